"""Real models' shapes with random weights, for measuring speed without a download."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from lfm2serve.config import ModelConfig

_ATTENTION = {2, 5, 8, 10, 12, 14}


def _dense(hidden: int, heads: int, feed_forward: int) -> dict[str, object]:
    return {
        "model_type": "lfm2",
        "architectures": ["Lfm2ForCausalLM"],
        "vocab_size": 65536,
        "hidden_size": hidden,
        "num_hidden_layers": 16,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "layer_types": ["full_attention" if n in _ATTENTION else "conv" for n in range(16)],
        "intermediate_size": feed_forward,
        "block_auto_adjust_ff_dim": False,
        "norm_eps": 1e-5,
        "conv_L_cache": 3,
        "conv_bias": False,
        "rope_theta": 1e6,
        "max_position_embeddings": 128000,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 7,
        "pad_token_id": 0,
    }


SHAPES = {
    "lfm2-350m": _dense(1024, 16, 4608),
    "lfm2-700m": _dense(1536, 24, 6912),
    "lfm2-1.2b": _dense(2048, 32, 8192),
}


def shape(name: str) -> ModelConfig:
    """The configuration of a dense LFM2 model. KeyError: not one of SHAPES."""
    return ModelConfig.from_dict(dict(SHAPES[name]), source=name)


def tensor_shapes(config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of a dense model's loaded tensors, as `Checkpoint.load` gives them."""
    hidden, heads = config.hidden_size, config.num_attention_heads
    yield "embed", (config.vocab_size, hidden)
    yield "final_norm", (hidden,)
    for n, kind in enumerate(config.layer_types):
        layer = f"layers.{n}."
        yield layer + "operator_norm", (hidden,)
        yield layer + "ffn_norm", (hidden,)
        if kind == "conv":
            yield layer + "conv.in_proj", (3 * hidden, hidden)
            yield layer + "conv.weight", (hidden, 3)
            yield layer + "conv.out_proj", (hidden, hidden)
        else:
            yield layer + "attn.qkv", (config.qkv_rows, hidden)
            yield layer + "attn.q_norm", (64,)
            yield layer + "attn.k_norm", (64,)
            yield layer + "attn.out", (hidden, heads * 64)
        yield layer + "mlp.w13", (2 * config.intermediate_size, hidden)
        yield layer + "mlp.w2", (hidden, config.intermediate_size)


def random_tensors(config: ModelConfig, seed: int = 0) -> dict[str, np.ndarray]:
    """Random bf16 weights (normal, 0.02; norms 1), as uint16 arrays."""
    rng = np.random.default_rng(seed)
    tensors = {}
    for name, dims in tensor_shapes(config):
        out = np.empty(dims, np.uint16)
        flat = out.reshape(-1)
        for start in range(0, flat.size, 1 << 22):
            part = flat[start : start + (1 << 22)]
            values = np.ones(part.size, np.float32) if "norm" in name else rng.standard_normal(part.size, np.float32) * 0.02
            part[:] = (values.astype(np.float32).view(np.uint32) + 0x8000) >> 16
        tensors[name] = out
    return tensors
