#!/usr/bin/env python3
"""Make the two tiny random LFM2 checkpoints of the tests, and what transformers computes with them.

Needs torch, transformers 5.x, tokenizers and numpy; CPU only, no network. Two runs give the same bytes.

    python tests/data/make_reference.py                 # tests/data/tiny-lfm2moe, tests/data/tiny-lfm2
    python tests/data/make_reference.py --out DIR

Each directory holds a checkpoint as transformers saves it (bf16; expert_bias float32), a 400-entry tokenizer (the
embedding has 512 rows, so some are never to be drawn), a chat template, and reference.npz:

    ids              int64 [T]            the fixed token list
    logits_f32/bf16  float32 [T, V]       eager; float32 weights (= the bf16 values widened) or all bf16
    decode_f32/bf16  float32 [T-P, V]     the same tokens: P at once, then one at a time
    prefill_len      int64                P
    greedy_f32/bf16  int64 [G]            greedy continuation after the whole list
    margin_f32/bf16  float32 [G]          gap between the two highest logits at each of its steps
    hidden_f32       float32 [L+1, T, H]  residual stream after embedding and layers, the last one after the final norm
    conv_state_L     float32 [H, 3]       u of conv layer L at the last 3 tokens (f32 run)
    topk_L           int64 [T, k]         experts chosen in MoE layer L (f32 run), ascending
    topk_w_L         float32 [T, k]       their weights, same order
"""

from __future__ import annotations

import argparse
import io
import json
import shutil
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy_forward import NumpyForward, read_weights
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import Lfm2Config, Lfm2ForCausalLM, Lfm2MoeConfig, Lfm2MoeForCausalLM

HERE = Path(__file__).parent
IDS = [1, 6, 17, 300, 511, 42, 42, 7, 99, 256, 3, 128, 400, 5, 77, 210, 333, 64, 12, 500, 2, 450, 9, 9]
PREFILL = 7  # shorter than the list, longer than the conv kernel
GREEDY = 16
TOKENS = 400
SPECIALS = [
    "<|pad|>",
    "<|startoftext|>",
    "<|endoftext|>",
    "<|fim_pre|>",
    "<|fim_mid|>",
    "<|fim_suf|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|tool_list_start|>",
    "<|tool_list_end|>",
    "<|tool_call_start|>",
    "<|tool_call_end|>",
    "<|tool_response_start|>",
    "<|tool_response_end|>",
]
PRE_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEXT = """\
The harbour wakes before the town does. A small boat comes in with the tide, and the man who steers it counts his
boxes twice: once for himself and once for the buyer. Nobody says good morning until the ropes are tied.
What is the capital of France? The capital of France is Paris. How many days are there in a week? There are seven days.
You are a helpful assistant. Answer the question in one short sentence, then stop. \
Say that you don't know when you don't.
She wrote the numbers 1, 2, 3 on the board, then 10, 20 and 30, and asked which of them the others could be made from.
def add(left, right):
    return left + right
Rain is expected in the north, with wind from the west; the south stays dry and warm until the evening.
The city has 120 bridges, the river has 14 islands, and the old market opens at 6 in the morning from May to October.
Der Zug fährt um acht Uhr ab. Où est la gare? ¿Qué hora es? 東京は今日も晴れです。
When the work was done they sat on the wall and talked about the winter, the price of fish and the new teacher.
"""

COMMON: dict[str, Any] = dict(
    vocab_size=512,
    hidden_size=128,
    num_attention_heads=2,  # head_dim 64, as in every published model
    num_key_value_heads=1,
    max_position_embeddings=4096,
    norm_eps=1e-5,
    conv_L_cache=3,
    conv_bias=False,
    bos_token_id=1,
    eos_token_id=7,
    pad_token_id=0,
    rope_parameters={"rope_theta": 1000000.0, "rope_type": "default"},
    tie_word_embeddings=True,
)


def moe_config() -> Lfm2MoeConfig:
    return Lfm2MoeConfig(
        **{**COMMON, "hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2},
        intermediate_size=160,
        moe_intermediate_size=48,
        num_hidden_layers=4,
        layer_types=["conv", "full_attention", "full_attention", "conv"],
        num_dense_layers=2,
        num_experts=6,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        use_expert_bias=True,
        routed_scaling_factor=1.0,
    )


def dense_config() -> Lfm2Config:
    # 260 -> int(2 * 260 / 3) = 173 -> rounded up to a multiple of 64 = 192
    return Lfm2Config(
        **{**COMMON, "hidden_size": 192, "num_attention_heads": 3},  # 3 query heads per K/V head
        intermediate_size=260,
        block_auto_adjust_ff_dim=True,
        block_ffn_dim_multiplier=1.0,
        block_multiple_of=64,
        num_hidden_layers=5,
        layer_types=["conv", "conv", "full_attention", "conv", "full_attention"],
    )


@torch.no_grad()
def randomise(model: Any, seed: int) -> None:
    """Give every tensor values large enough that a wrong layout shows."""
    generator = torch.Generator().manual_seed(seed)
    tensors = dict(model.named_parameters())
    tensors.update({n: b for n, b in model.named_buffers() if n.endswith("expert_bias")})
    for name in sorted(tensors):
        tensor = tensors[name]
        r = torch.randn(tensor.shape, generator=generator, dtype=torch.float32)
        if name.endswith("expert_bias"):
            value = 0.15 * r  # enough to change which experts win
        elif "norm" in name:
            value = 1.0 + 0.2 * r
        elif name.endswith("conv.conv.weight"):
            value = 0.5 * r
        elif name.endswith("embed_tokens.weight"):
            value = 0.3 * r  # smaller than what the layers add, or greedy replies repeat one token
        else:
            value = r / tensor.shape[-1] ** 0.5
        tensor.copy_(value.to(tensor.dtype))


def save_tokenizer(out: Path) -> None:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PRE_SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=TOKENS,
        special_tokens=SPECIALS,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXT.splitlines(keepends=True), trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|startoftext|> $A",
        pair="<|startoftext|> $A <|startoftext|> $B",
        special_tokens=[("<|startoftext|>", 1)],
    )
    assert tokenizer.get_vocab_size() == TOKENS
    assert [tokenizer.token_to_id(s) for s in SPECIALS] == list(range(len(SPECIALS)))
    tokenizer.save(str(out / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|startoftext|>",
        "eos_token": "<|im_end|>",
        "pad_token": "<|pad|>",
        "clean_up_tokenization_spaces": False,
        "model_max_length": COMMON["max_position_embeddings"],
    }
    (out / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    shutil.copyfile(HERE / "chat_template.jinja", out / "chat_template.jinja")


class RouterLog:
    """Remembers which experts each router chose, and their weights."""

    def __init__(self, model: Any) -> None:
        self.chosen: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.handles = []
        for i, layer in enumerate(model.model.layers):
            gate = getattr(layer.feed_forward, "gate", None)
            if gate is not None:
                self.handles.append(gate.register_forward_hook(self.hook(i)))

    def hook(self, layer: int) -> Any:
        def remember(_module: Any, _args: Any, out: Any) -> None:
            self.chosen[layer] = (out[2].clone(), out[1].float().clone())

        return remember

    def close(self) -> None:
        for handle in self.handles:
            handle.remove()


@torch.no_grad()
def run(model: Any, tag: str) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """The references of one dtype, and the states that are stored of the f32 run only."""
    x = torch.tensor([IDS])
    router = RouterLog(model)
    out = model(input_ids=x, use_cache=True, output_hidden_states=True)
    router.close()
    refs = {f"logits_{tag}": out.logits[0].float().numpy()}
    states = {"hidden_f32": torch.stack([h[0].float() for h in out.hidden_states]).numpy()}
    for i, kind in enumerate(model.config.layer_types):
        if kind == "conv":
            states[f"conv_state_{i}"] = out.past_key_values.layers[i].conv_states[0][0].float().numpy().copy()
    for i, (chosen, weight) in router.chosen.items():
        order = chosen.argsort(dim=-1)
        states[f"topk_{i}"] = chosen.gather(1, order).numpy()
        states[f"topk_w_{i}"] = weight.gather(1, order).numpy()

    cache = model(input_ids=x[:, :PREFILL], use_cache=True).past_key_values
    rows = []
    for t in range(PREFILL, len(IDS)):
        out = model(input_ids=x[:, t : t + 1], use_cache=True, past_key_values=cache)
        rows.append(out.logits[0, -1].float().numpy())
    refs[f"decode_{tag}"] = np.stack(rows)

    greedy, margin = [], []
    for _ in range(GREEDY):
        best = model(input_ids=x, use_cache=False).logits[0, -1].float().topk(2)
        greedy.append(int(best.indices[0]))
        margin.append(float(best.values[0] - best.values[1]))
        x = torch.cat([x, best.indices[None, :1]], dim=1)
    refs[f"greedy_{tag}"] = np.array(greedy)
    refs[f"margin_{tag}"] = np.array(margin, np.float32)
    return refs, states


def save_npz(path: Path, arrays: dict[str, np.ndarray]) -> None:
    """np.savez_compressed without the time of day in it."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, array in arrays.items():
            buffer = io.BytesIO()
            np.save(buffer, array)
            archive.writestr(zipfile.ZipInfo(f"{name}.npy"), buffer.getvalue(), zipfile.ZIP_DEFLATED, 9)


def make(kind: str, out: Path) -> None:
    cls, config, seed = (
        (Lfm2MoeForCausalLM, moe_config(), 20261215) if kind == "moe" else (Lfm2ForCausalLM, dense_config(), 20261120)
    )
    model = cls(config).eval()
    randomise(model, seed)
    bias = {n: b.clone() for n, b in model.named_buffers() if n.endswith("expert_bias")}
    model.to(torch.bfloat16)
    for name, buffer in model.named_buffers():
        if name in bias:
            buffer.data = bias[name]  # published checkpoints keep it in float32
    model.config.dtype = "bfloat16"
    out.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(out)
    (out / "model.safetensors").chmod(0o644)
    save_tokenizer(out)
    print(f"{kind}: {sum(p.numel() for p in model.parameters())} parameters")

    written = json.loads((out / "config.json").read_text())
    weights = read_weights(out)
    save: dict[str, np.ndarray] = {"ids": np.array(IDS), "prefill_len": np.array(PREFILL)}
    for tag, dtype, bound in (("f32", torch.float32, 1e-3), ("bf16", torch.bfloat16, 0.5)):
        extra = {"experts_implementation": "eager"} if kind == "moe" else {}
        model = cls.from_pretrained(out, dtype=dtype, attn_implementation="eager", **extra).eval()
        refs, states = run(model, tag)
        save.update(refs)
        if tag == "f32":
            save.update(states)
        full = refs[f"logits_{tag}"]
        mine, _ = NumpyForward(weights, written, low=tag == "bf16")(IDS)
        worst, steps = np.abs(full - mine).max(), np.abs(full[PREFILL:] - refs[f"decode_{tag}"]).max()
        print(f"  {tag}: logits std {full.std():.2f}; numpy differs by {worst:.2e}, cached steps by {steps:.2e}")
        print(f"  {tag}: greedy {save[f'greedy_{tag}'].tolist()}")
        print(f"  {tag}: margins {np.round(save[f'margin_{tag}'], 2).tolist()}")
        assert worst < bound and steps < bound, "the independent forward pass disagrees"
    save_npz(out / "reference.npz", save)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, default=HERE)
    torch.set_num_threads(1)
    target = parser.parse_args().out
    make("moe", target / "tiny-lfm2moe")
    make("dense", target / "tiny-lfm2")
