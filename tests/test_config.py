"""config.json and generation_config.json: both dialects, the real models' sizes, and every refusal."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lfm2serve.config import GenerationDefaults, ModelConfig
from lfm2serve.errors import CheckpointError
from tests.checkpoints import old_dialect
from tests.real_models import LFM25_2_6B, MODELS, SMALL, Config, Published, dense_2025, moe

DENSE = dense_2025(1024, 16, 6656, SMALL)
MOE = moe(24, [2, 6, 10, 14, 18, 21], 7168, 1792, 32, 1e6, 65536)


def changed(config: Config, **changes: Any) -> Config:
    """A copy with fields set, or left out where the value is `...`."""
    return {key: value for key, value in {**config, **changes}.items() if value is not ...}


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_published_models_have_their_published_sizes(model: Published) -> None:
    config = ModelConfig.from_dict(model.config)
    assert config.parameters == model.parameters
    assert config.intermediate_size == model.intermediate
    assert config.head_dim == 64
    assert config.num_key_value_heads == 8
    assert config.kv_bytes_per_token(2) == model.kv_bytes
    assert config.max_position_embeddings in (128000, 131072)
    biases = sum(config.num_experts for n in range(config.num_hidden_layers) if config.is_moe(n))
    assert (biases if config.use_expert_bias else 0) == model.bias_values


def test_special_tokens_and_theta_are_the_file_s() -> None:
    small, large = ModelConfig.from_dict(DENSE), ModelConfig.from_dict(LFM25_2_6B)
    assert (small.bos_token_id, small.eos_token_ids, small.pad_token_id, small.rope_theta) == (1, (7,), 0, 1e6)
    assert (large.bos_token_id, large.eos_token_ids, large.pad_token_id, large.rope_theta) == (
        124894,
        (124900,),
        124893,
        1e7,
    )


def test_active_parameters_leave_out_the_experts_that_a_token_does_not_use() -> None:
    config = ModelConfig.from_dict(MOE)
    assert config.parameters - config.active_parameters == 22 * (32 - 4) * 3 * 1792 * 2048
    assert ModelConfig.from_dict(DENSE).active_parameters == ModelConfig.from_dict(DENSE).parameters


def test_layers_by_kind() -> None:
    config = ModelConfig.from_dict(MOE)
    assert config.attention_layers == (2, 6, 10, 14, 18, 21)
    assert sorted(config.attention_layers + config.conv_layers) == list(range(24))
    assert [n for n in range(24) if not config.is_moe(n)] == [0, 1]
    assert config.qkv_rows == 32 * 64 + 2 * 8 * 64
    dense = ModelConfig.from_dict(DENSE)
    assert not any(dense.is_moe(n) for n in range(16))


@pytest.mark.parametrize("tiny", ["tiny_moe", "tiny_dense"])
def test_the_two_dialects_say_the_same(tiny: str, request: pytest.FixtureRequest) -> None:
    raw = json.loads((request.getfixturevalue(tiny) / "config.json").read_text())
    assert ModelConfig.from_dict(raw) == ModelConfig.from_dict(old_dialect(raw))
    both = {**raw, **{key: value for key, value in old_dialect(raw).items() if key != "block_ff_dim"}}
    assert ModelConfig.from_dict(raw) == ModelConfig.from_dict(both)


@pytest.mark.parametrize(
    ("changes", "size"),
    [
        ({"block_ff_dim": 6656}, 4608),
        ({"block_ff_dim": 10240}, 6912),
        ({"block_ff_dim": 12288}, 8192),
        ({"block_ff_dim": 10752, "block_auto_adjust_ff_dim": False}, 10752),
        ({"block_ff_dim": 272, "block_auto_adjust_ff_dim": False}, 272),  # off: not rounded either
        ({"block_ff_dim": 6656, "block_auto_adjust_ff_dim": ...}, 6656),
        ({"block_ff_dim": ..., "intermediate_size": 6656}, 4608),
        ({"block_ff_dim": None, "intermediate_size": 6656}, 4608),
        ({"block_ff_dim": 6656, "intermediate_size": 10240}, 4608),
        ({"block_ffn_dim_multiplier": None}, 4608),
        ({"block_ffn_dim_multiplier": ...}, 4608),
        ({"block_ffn_dim_multiplier": 1.3}, 5888),  # int(1.3 * 4437) = 5768
        ({"block_multiple_of": 64}, 4480),
    ],
)
def test_dense_feed_forward_size(changes: Config, size: int) -> None:
    assert ModelConfig.from_dict(changed(DENSE, **changes)).intermediate_size == size


def test_moe_has_no_adjust_rule() -> None:
    odd = changed(MOE, block_ff_dim=4096, block_auto_adjust_ff_dim=True, block_multiple_of=256)
    assert ModelConfig.from_dict(odd).intermediate_size == 7168


def test_experts_under_their_other_name() -> None:
    assert ModelConfig.from_dict(changed(MOE, num_experts=..., num_local_experts=32)).num_experts == 32
    assert ModelConfig.from_dict(changed(MOE, num_local_experts=32)).num_experts == 32


@pytest.mark.parametrize(
    ("value", "ids"), [(7, (7,)), ([7, 2], (7, 2)), ([7, 2, 7], (7, 2)), (None, ()), (..., ()), ([], ())]
)
def test_end_tokens_are_one_or_many(value: Any, ids: tuple[int, ...]) -> None:
    assert ModelConfig.from_dict(changed(DENSE, eos_token_id=value)).eos_token_ids == ids


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_theta": 5e6},
        {"rope_theta": 5000000},
        {"rope_theta": 5e6, "rope_scaling": None},
        {"rope_theta": 5e6, "rope_scaling": {"rope_type": "default"}},
        {"rope_theta": 5e6, "rope_parameters": {"rope_theta": 5e6, "rope_type": "default"}},
        {"rope_parameters": {"rope_theta": 5e6, "rope_type": "default"}},
        {"rope_parameters": {"rope_theta": 5e6}},
        {"rope_parameters": {"rope_theta": 5e6, "rope_type": "default", "partial_rotary_factor": 1.0}},
    ],
)
def test_rope_theta_flat_or_nested(rope: Config) -> None:
    assert ModelConfig.from_dict({**changed(DENSE, rope_theta=...), **rope}).rope_theta == 5e6


@pytest.mark.parametrize(
    ("tied", "expected"),
    [
        ({}, True),
        ({"tie_embedding": True}, True),
        ({"tie_word_embeddings": False}, False),
        ({"tie_word_embeddings": False, "tie_embedding": False}, False),
    ],
)
def test_tied_embeddings_under_both_names(tied: Config, expected: bool) -> None:
    config = ModelConfig.from_dict({**changed(DENSE, tie_embedding=...), **tied})
    assert config.tie_word_embeddings is expected


REQUIRED_DENSE = [
    "model_type",
    "hidden_size",
    "max_position_embeddings",
    "norm_eps",
    "num_attention_heads",
    "num_hidden_layers",
    "num_key_value_heads",
    "rope_theta",
    "vocab_size",
    "block_multiple_of",
]
REQUIRED_MOE = [
    "intermediate_size",
    "moe_intermediate_size",
    "norm_topk_prob",
    "num_dense_layers",
    "num_experts",
    "num_experts_per_tok",
    "routed_scaling_factor",
    "use_expert_bias",
]


@pytest.mark.parametrize(
    ("base", "field"), [(DENSE, name) for name in REQUIRED_DENSE] + [(MOE, name) for name in REQUIRED_MOE]
)
@pytest.mark.parametrize("absent", [..., None])
def test_a_missing_field_is_named_and_never_guessed(base: Config, field: str, absent: Any) -> None:
    with pytest.raises(CheckpointError, match=rf"^config\.json: {field}: is missing"):
        ModelConfig.from_dict(changed(base, **{field: absent}))


REFUSED: list[tuple[Config, Config, str]] = [
    (DENSE, {"model_type": "llama"}, r'model_type="llama": wrong architecture, only lfm2 and lfm2_moe'),
    (DENSE, {"model_type": "lfm2_vl"}, r'model_type="lfm2_vl": wrong architecture'),
    (DENSE, {"model_type": ["lfm2"]}, "model_type"),
    (
        DENSE,
        {"architectures": ["LlamaForCausalLM"]},
        r'architectures=\["LlamaForCausalLM"\]: lfm2 wants Lfm2ForCausalLM',
    ),
    (MOE, {"architectures": ["Lfm2ForCausalLM"]}, "architectures.*lfm2_moe wants Lfm2MoeForCausalLM"),
    (DENSE, {"architectures": "Lfm2ForCausalLM"}, "architectures"),
    (DENSE, {"quantization_config": {"quant_method": "awq"}}, "quantization_config.*quantised"),
    (DENSE, {"quantization": {"bits": 4}}, "quantization.*quantised"),
    (DENSE, {"conv_bias": True}, "conv_bias=true: must be false"),
    (DENSE, {"conv_bias": 0}, "conv_bias=0: must be true or false"),
    (DENSE, {"conv_L_cache": 4}, "conv_L_cache=4: must be 3"),
    (DENSE, {"num_attention_heads": 8}, r"hidden_size=1024: must be 64 x num_attention_heads \(8\)"),
    (DENSE, {"hidden_size": 1000}, "hidden_size=1000"),
    (DENSE, {"head_dim": 128}, "head_dim=128: must be 64"),
    (DENSE, {"num_key_value_heads": 3}, "num_key_value_heads=3: must divide num_attention_heads"),
    (DENSE, {"vocab_size": "65536"}, 'vocab_size="65536": must be a whole number'),
    (DENSE, {"vocab_size": 65536.0}, "vocab_size=65536.0: must be a whole number"),
    (DENSE, {"vocab_size": True}, "vocab_size=true: must be a whole number"),
    (DENSE, {"vocab_size": 0}, "vocab_size=0: must be a whole number between 1"),
    (DENSE, {"num_hidden_layers": 2**31 - 1}, "num_hidden_layers=2147483647: must be"),
    (DENSE, {"norm_eps": "1e-5"}, "norm_eps"),
    (DENSE, {"norm_eps": 0}, "norm_eps=0: must be a number above 0"),
    (DENSE, {"norm_eps": float("nan")}, "norm_eps=NaN"),
    (DENSE, {"norm_eps": 10**400}, "norm_eps=10"),
    (DENSE, {"full_attn_idxs": ...}, "layer_types: is missing, and so is full_attn_idxs"),
    (DENSE, {"full_attn_idxs": None, "layer_types": None}, "layer_types: is missing"),
    (DENSE, {"full_attn_idxs": [2, 16]}, r"full_attn_idxs=\[2, 16\]: must list layer numbers"),
    (DENSE, {"full_attn_idxs": [2, -1]}, "full_attn_idxs"),
    (DENSE, {"full_attn_idxs": [2, "5"]}, "full_attn_idxs"),
    (DENSE, {"full_attn_idxs": [2, True]}, "full_attn_idxs"),
    (DENSE, {"full_attn_idxs": [2, 2]}, "full_attn_idxs.*twice"),
    (DENSE, {"full_attn_idxs": 2}, "full_attn_idxs=2"),
    (DENSE, {"full_attn_idxs": []}, "full_attn_idxs.*conv and attention"),
    (DENSE, {"layer_types": ["conv", "full_attention"] * 8}, "layer_types.*disagrees with full_attn_idxs"),
    (MOE, {"layer_types": ["conv", "full_attention"]}, "layer_types.*has 2 entries, num_hidden_layers is 24"),
    (MOE, {"num_hidden_layers": 25}, "layer_types.*has 24 entries, num_hidden_layers is 25"),
    (MOE, {"layer_types": ["conv", "sliding_attention"] * 12}, 'layer_types.*unknown kind "sliding_attention"'),
    (MOE, {"layer_types": ["conv"] * 24}, "layer_types.*conv and attention"),
    (MOE, {"layer_types": "conv"}, "layer_types"),
    (DENSE, {"rope_scaling": {"type": "linear", "factor": 8}}, r'rope_scaling\.rope_type: "linear" is unknown'),
    (
        MOE,
        {"rope_parameters": {"rope_theta": 1e6, "rope_type": "yarn"}},
        r'rope_parameters\.rope_type: "yarn" is unknown',
    ),
    (MOE, {"rope_parameters": {"rope_theta": 1e6, "factor": 8}}, r"rope_parameters\.factor: is unknown"),
    (
        MOE,
        {"rope_parameters": {"rope_theta": 1e6, "partial_rotary_factor": 0.5}},
        r"rope_parameters\.partial_rotary_factor",
    ),
    (
        MOE,
        {"rope_parameters": {"rope_type": "default"}},
        "rope_theta: is missing, and so is rope_parameters.rope_theta",
    ),
    (MOE, {"rope_parameters": {"full_attention": {"rope_theta": 1e6}}}, r"rope_parameters\.full_attention: is unknown"),
    (MOE, {"rope_parameters": [1e6]}, "rope_parameters.*must be an object"),
    (MOE, {"rope_theta": 1e4}, r"rope_theta=10000.0: disagrees with rope_theta and rope_parameters\.rope_theta"),
    (DENSE, {"rope_theta": "1e6"}, "rope_theta"),
    (DENSE, {"rope_theta": 0.5}, "rope_theta=0.5: must be a number above 1"),
    (DENSE, {"block_ff_dim": ...}, "intermediate_size: is missing"),
    (MOE, {"intermediate_size": 1000}, "intermediate_size=1000: must be a multiple of 16"),
    (DENSE, {"block_ffn_dim_multiplier": -1.0}, "block_ffn_dim_multiplier=-1.0"),
    (DENSE, {"block_auto_adjust_ff_dim": "yes"}, "block_auto_adjust_ff_dim"),
    (DENSE, {"block_ffn_dim_multiplier": 1e9}, "block_ff_dim=6656: is adjusted to"),
    (MOE, {"moe_intermediate_size": 1800}, "moe_intermediate_size=1800: must be a multiple of 16"),
    (MOE, {"num_local_experts": 64}, "num_experts=32: disagrees with num_local_experts"),
    (MOE, {"num_experts_per_tok": 33}, r"num_experts_per_tok=33: is above num_experts \(32\)"),
    (MOE, {"num_dense_layers": 24}, "num_dense_layers=24: must be below num_hidden_layers"),
    (MOE, {"num_dense_layers": -1}, "num_dense_layers=-1"),
    (MOE, {"routed_scaling_factor": 0.0}, "routed_scaling_factor=0.0"),
    (MOE, {"norm_topk_prob": 1}, "norm_topk_prob=1: must be true or false"),
    (DENSE, {"tie_word_embeddings": False}, "tie_word_embeddings=false: disagrees with tie_embedding"),
    (DENSE, {"eos_token_id": 65536}, "eos_token_id=65536: must be a token id below 65536"),
    (DENSE, {"eos_token_id": [7, -1]}, "eos_token_id"),
    (DENSE, {"eos_token_id": "7"}, "eos_token_id"),
    (DENSE, {"bos_token_id": 1.5}, "bos_token_id=1.5"),
    (DENSE, {"pad_token_id": -1}, "pad_token_id=-1"),
]


@pytest.mark.parametrize(("base", "changes", "message"), REFUSED, ids=[str(case[1])[:60] for case in REFUSED])
def test_refusals_name_the_file_and_the_field(base: Config, changes: Config, message: str) -> None:
    with pytest.raises(CheckpointError, match=message) as caught:
        ModelConfig.from_dict(changed(base, **changes), source="x/config.json")
    text = str(caught.value)
    assert text.startswith("x/config.json: ")
    assert "\n" not in text
    assert len(text) < 250


@pytest.mark.parametrize("optional", ["conv_bias", "conv_L_cache", "architectures", "tie_embedding", "pad_token_id"])
def test_what_the_tensors_prove_may_be_left_out(optional: str) -> None:
    without = ModelConfig.from_dict(changed(DENSE, **{optional: ...}))
    assert without.parameters == 354_483_968


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", r"^config\.json: not valid JSON"),
        (b"\xff\xfe\x00", r"^config\.json: not valid JSON"),
        (b"[" * 100_000, r"^config\.json: not valid JSON"),
        (b"[1]", r"^config\.json: must hold a JSON object, not list"),
        (b"", r"^config\.json: not valid JSON"),
    ],
)
def test_a_broken_config_file(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=message):
        ModelConfig.from_dir(tmp_path)


def test_no_config_file(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        ModelConfig.from_dir(tmp_path)
    (tmp_path / "config.json").mkdir()
    with pytest.raises(CheckpointError, match=r"config\.json: can't be read"):
        ModelConfig.from_dir(tmp_path)


def generation(folder: Path, **values: Any) -> GenerationDefaults:
    (folder / "generation_config.json").write_text(json.dumps(values))
    return GenerationDefaults.from_dir(folder)


def test_generation_defaults_are_the_file_s(tmp_path: Path) -> None:
    assert GenerationDefaults.from_dir(tmp_path) == GenerationDefaults()
    found = generation(
        tmp_path, eos_token_id=[7, 2], temperature=0.1, top_k=50, repetition_penalty=1.05, do_sample=True
    )
    assert found == GenerationDefaults(eos_token_ids=(7, 2), temperature=0.1, top_k=50, repetition_penalty=1.05)
    assert generation(tmp_path, min_p=0.15, top_p=0.9, temperature=None).temperature is None
    assert generation(tmp_path, _from_model_config=True) == GenerationDefaults()


def test_do_sample_false_is_greedy(tmp_path: Path) -> None:
    assert generation(tmp_path, do_sample=False, temperature=0.7).temperature == 0.0
    assert generation(tmp_path, do_sample=False).temperature == 0.0


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"temperature": -1}, "temperature=-1"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 1.5}, "top_p=1.5"),
        ({"top_k": 2.5}, "top_k=2.5"),
        ({"eos_token_id": "<|im_end|>"}, "eos_token_id"),
        ({"do_sample": "no"}, "do_sample"),
    ],
)
def test_broken_generation_defaults(tmp_path: Path, values: Config, field: str) -> None:
    with pytest.raises(CheckpointError, match=rf"^generation_config\.json: {field}"):
        generation(tmp_path, **values)
