"""config.json of every published LFM2 text model, as far as it concerns the network, and the published counts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

Config = dict[str, Any]


@dataclass(frozen=True)
class Published:
    """name; config.json; feed-forward size after the adjust rule; parameters and tensors of the published files."""

    name: str
    config: Config
    intermediate: int
    parameters: int
    bias_values: int
    tensors: int
    kv_bytes: int


def dense_2025(hidden: int, heads: int, ff: int, attention: list[int], layers: int = 16, adjust: bool = True) -> Config:
    """The dialect of 2025: flat theta, full_attn_idxs, block_* keys, torch_dtype, tie_embedding."""
    return {
        "architectures": ["Lfm2ForCausalLM"],
        "model_type": "lfm2",
        "block_auto_adjust_ff_dim": adjust,
        "block_dim": hidden,
        "block_ff_dim": ff,
        "block_ffn_dim_multiplier": 1.0,
        "block_mlp_init_scale": 1.0,
        "block_multiple_of": 256,
        "block_norm_eps": 1e-5,
        "block_out_init_scale": 1.0,
        "block_use_swiglu": True,
        "block_use_xavier_init": True,
        "bos_token_id": 1,
        "conv_L_cache": 3,
        "conv_bias": False,
        "conv_dim": hidden,
        "conv_dim_out": hidden,
        "conv_use_xavier_init": True,
        "eos_token_id": 7,
        "full_attn_idxs": attention,
        "hidden_size": hidden,
        "initializer_range": 0.02,
        "max_position_embeddings": 128000,
        "norm_eps": 1e-5,
        "num_attention_heads": heads,
        "num_heads": heads,
        "num_hidden_layers": layers,
        "num_key_value_heads": 8,
        "pad_token_id": 0,
        "rope_theta": 1000000.0,
        "tie_embedding": True,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "use_pos_enc": True,
        "vocab_size": 65536,
    }


def layer_types(layers: int, attention: list[int]) -> list[str]:
    return ["full_attention" if n in attention else "conv" for n in range(layers)]


def moe(layers: int, attention: list[int], ff: int, expert: int, experts: int, theta: float, vocab: int) -> Config:
    """The dialect since: nested theta, layer_types, dtype, tie_word_embeddings."""
    small = vocab == 65536
    return {
        "architectures": ["Lfm2MoeForCausalLM"],
        "model_type": "lfm2_moe",
        "bos_token_id": 1 if small else 124894,
        "conv_L_cache": 3,
        "conv_bias": False,
        "dtype": "bfloat16",
        "eos_token_id": 7 if small else 124900,
        "hidden_size": 2048,
        "intermediate_size": ff,
        "layer_types": layer_types(layers, attention),
        "max_position_embeddings": 128000,
        "moe_intermediate_size": expert,
        "norm_eps": 1e-5,
        "norm_topk_prob": True,
        "num_attention_heads": 32,
        "num_dense_layers": 2,
        "num_experts": experts,
        "num_experts_per_tok": 4,
        "num_hidden_layers": layers,
        "num_key_value_heads": 8,
        "pad_token_id": 0 if small else 124893,
        "rope_parameters": {"rope_theta": theta, "rope_type": "default"},
        "routed_scaling_factor": 1.0,
        "tie_word_embeddings": True,
        "use_cache": True,
        "use_expert_bias": True,
        "vocab_size": vocab,
    }


SMALL = [2, 5, 8, 10, 12, 14]
LARGE = [2, 5, 9, 13, 17, 21, 24, 27]
MOE_8B = [2, 6, 10, 14, 18, 21]
MOE_24B = list(range(2, 40, 4))

LFM2_2_6B = dense_2025(2048, 32, 10752, LARGE, layers=30, adjust=False)
LFM25_2_6B = {
    **{key: value for key, value in LFM2_2_6B.items() if key not in ("full_attn_idxs", "rope_theta", "torch_dtype")},
    "layer_types": layer_types(30, LARGE),
    "rope_parameters": {"rope_theta": 10000000.0, "rope_type": "default"},
    "dtype": "bfloat16",
    "vocab_size": 128000,
    "bos_token_id": 124894,
    "eos_token_id": 124900,
    "pad_token_id": 124893,
    "max_position_embeddings": 131072,
}

MODELS = [
    Published("LFM2-350M", dense_2025(1024, 16, 6656, SMALL), 4608, 354_483_968, 0, 148, 12288),
    Published("LFM2-700M", dense_2025(1536, 24, 10240, SMALL), 6912, 742_489_344, 0, 148, 12288),
    Published("LFM2-1.2B", dense_2025(2048, 32, 12288, SMALL), 8192, 1_170_340_608, 0, 148, 12288),
    Published("LFM2-2.6B", LFM2_2_6B, 10752, 2_569_272_320, 0, 266, 16384),
    Published("LFM2.5-2.6B", LFM25_2_6B, 10752, 2_697_198_592, 0, 266, 16384),
    Published("LFM2-8B-A1B", moe(24, MOE_8B, 7168, 1792, 32, 1e6, 65536), 7168, 8_339_929_856, 704, 2302, 12288),
    Published("LFM2.5-8B-A1B", moe(24, MOE_8B, 7168, 1792, 32, 5e6, 128000), 7168, 8_467_856_128, 704, 2302, 12288),
    Published("LFM2-24B-A2B", moe(40, MOE_24B, 11776, 1536, 64, 1e6, 65536), 11776, 23_843_659_008, 2432, 7610, 20480),
    Published(
        "LFM2.5-24B-A2B", moe(40, MOE_24B, 11776, 1536, 64, 5e6, 128000), 11776, 23_971_585_280, 2432, 7610, 20480
    ),
]
