"""Random weights (`--dummy-weights`) of any configuration, and real models' shapes, to measure without a download."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from kernels_numba.weights import WeightSink, pieces
from lfm2serve.backend import ARENA_SLACK, Backend
from lfm2serve.config import CONV_TAPS, ModelConfig

_COMMON: dict[str, object] = {
    "num_key_value_heads": 8,
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


def _layers(count: int, attention: Sequence[int]) -> list[str]:
    return ["full_attention" if n in attention else "conv" for n in range(count)]


def _dense(hidden: int, heads: int, feed_forward: int) -> dict[str, object]:
    return {
        **_COMMON,
        "model_type": "lfm2",
        "architectures": ["Lfm2ForCausalLM"],
        "vocab_size": 65536,
        "hidden_size": hidden,
        "num_hidden_layers": 16,
        "num_attention_heads": heads,
        "layer_types": _layers(16, (2, 5, 8, 10, 12, 14)),
        "intermediate_size": feed_forward,
        "block_auto_adjust_ff_dim": False,
    }


def _moe(
    layers: int, attention: Sequence[int], feed_forward: int, expert: int, experts: int, vocab: int = 65536
) -> dict[str, object]:
    return {
        **_COMMON,
        "model_type": "lfm2_moe",
        "architectures": ["Lfm2MoeForCausalLM"],
        "vocab_size": vocab,
        "hidden_size": 2048,
        "num_hidden_layers": layers,
        "num_attention_heads": 32,
        "layer_types": _layers(layers, attention),
        "intermediate_size": feed_forward,
        "moe_intermediate_size": expert,
        "num_experts": experts,
        "num_experts_per_tok": 4,
        "num_dense_layers": 2,
        "norm_topk_prob": True,
        "use_expert_bias": True,
        "routed_scaling_factor": 1.0,
    }


SHAPES = {
    "lfm2-350m": _dense(1024, 16, 4608),
    "lfm2-700m": _dense(1536, 24, 6912),
    "lfm2-1.2b": _dense(2048, 32, 8192),
    "lfm2-8b-a1b": _moe(24, (2, 6, 10, 14, 18, 21), 7168, 1792, 32),
    "lfm2-24b-a2b": _moe(40, range(2, 40, 4), 11776, 1536, 64),
    "lfm2.5-24b-a2b": _moe(40, range(2, 40, 4), 11776, 1536, 64, 128000),
}


def shape(name: str) -> ModelConfig:
    """The configuration of a model. KeyError: not one of SHAPES."""
    return ModelConfig.from_dict(dict(SHAPES[name]), source=name)


def tensor_shapes(config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of a model's loaded tensors, as of `Checkpoint.load`; moe.bias is float32, the rest bf16."""
    hidden, heads, dim = config.hidden_size, config.num_attention_heads, config.head_dim
    yield "embed", (config.vocab_size, hidden)
    yield "final_norm", (hidden,)
    for n, kind in enumerate(config.layer_types):
        layer = f"layers.{n}."
        yield layer + "operator_norm", (hidden,)
        yield layer + "ffn_norm", (hidden,)
        if kind == "conv":
            yield layer + "conv.in_proj", (3 * hidden, hidden)
            yield layer + "conv.weight", (hidden, CONV_TAPS)
            yield layer + "conv.out_proj", (hidden, hidden)
        else:
            yield layer + "attn.qkv", (config.qkv_rows, hidden)
            yield layer + "attn.q_norm", (dim,)
            yield layer + "attn.k_norm", (dim,)
            yield layer + "attn.out", (hidden, heads * dim)
        if config.is_moe(n):
            experts, expert = config.num_experts, config.moe_intermediate_size
            yield layer + "moe.gate", (experts, hidden)
            if config.use_expert_bias:
                yield layer + "moe.bias", (experts,)
            yield layer + "moe.w13", (experts, 2 * expert, hidden)
            yield layer + "moe.w2", (experts, hidden, expert)
        else:
            yield layer + "mlp.w13", (2 * config.intermediate_size, hidden)
            yield layer + "mlp.w2", (hidden, config.intermediate_size)
    if not config.tie_word_embeddings:
        yield "lm_head", (config.vocab_size, hidden)


def weight_bytes(config: ModelConfig) -> int:
    """Bytes of the loaded weights."""
    return sum(math.prod(dims) * (4 if name.endswith("bias") else 2) for name, dims in tensor_shapes(config))


def random_weights(config: ModelConfig, backend: Backend) -> dict[str, Any]:
    """A model's weights for `Model`: normal with deviation 0.02, norms 1, router biases 0; on a GPU made there."""
    made = backend.random_weights(tensor_shapes(config))
    if made is not None:
        return made
    with backend.weight_sink(weight_bytes(config) + ARENA_SLACK) as sink:
        random_tensors(config, sink)
    return sink.tensors


def random_tensors(config: ModelConfig, sink: WeightSink, seed: int = 0) -> None:
    """Fill a sink with random weights: normal, 0.02; norms 1; router bias 0."""
    rng = np.random.default_rng(seed)
    for name, dims in tensor_shapes(config):
        bias = name.endswith("bias")
        sink.begin(name, dims, "f32" if bias else "bf16")
        for start, count in pieces(dims, 4 if bias else 2, sink.piece_bytes):
            part = sink.room(name, start, count)
            if bias:
                part[:] = 0
            else:
                values = rng.standard_normal(count, np.float32) * 0.02
                values = np.ones_like(values) if "norm" in name else values
                part[:] = (values.astype(np.float32).view(np.uint32) + 0x8000) >> 16
            sink.put(name, start, count)
