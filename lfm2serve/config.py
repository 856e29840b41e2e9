"""What a checkpoint's config.json and generation_config.json say, checked field by field.

Both dialects of config.json are read (flat `rope_theta` / `full_attn_idxs` of 2025, `rope_parameters` / `layer_types`
since). Nothing is guessed: a field that the network needs and that the tensors can't tell has to be there.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lfm2serve.errors import CheckpointError, InvalidRequest
from lfm2serve.sampling import SamplingParams

HEAD_DIM = 64
CONV_TAPS = 3
K_MULTIPLE = 16  # the matrix products take the inner dimension 16 at a time
ARCHITECTURES = {"lfm2": "Lfm2ForCausalLM", "lfm2_moe": "Lfm2MoeForCausalLM"}
LAYER_TYPES = ("conv", "full_attention")
LARGEST_SIZE = 2**31 - 1
MOST_PARTS = 4096  # layers, or experts of a layer
PLAIN_ROTARY = ("partial_rotary_factor", 1.0)


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Sizes and constants of one LFM2 network; field names are config.json's.

    intermediate_size: the real dense feed-forward size, after the adjust rule. Dense models (`lfm2`) have no experts:
    num_experts, num_experts_per_tok and moe_intermediate_size are 0 and num_dense_layers is num_hidden_layers.
    tie_word_embeddings: False means that the checkpoint has to hold an `lm_head.weight`.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    layer_types: tuple[str, ...]
    intermediate_size: int
    norm_eps: float
    rope_theta: float
    max_position_embeddings: int
    num_experts: int = 0
    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 0
    num_dense_layers: int = 0
    norm_topk_prob: bool = False
    use_expert_bias: bool = False
    routed_scaling_factor: float = 1.0
    tie_word_embeddings: bool = True
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    pad_token_id: int | None = None

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_attention_heads

    @property
    def attention_layers(self) -> tuple[int, ...]:
        """Numbers of the attention layers, ascending."""
        return tuple(n for n, kind in enumerate(self.layer_types) if kind == "full_attention")

    @property
    def conv_layers(self) -> tuple[int, ...]:
        """Numbers of the short-convolution layers, ascending."""
        return tuple(n for n, kind in enumerate(self.layer_types) if kind == "conv")

    def is_moe(self, layer: int) -> bool:
        """Whether this layer's feed-forward is a mixture of experts."""
        return layer >= self.num_dense_layers

    @property
    def qkv_rows(self) -> int:
        """Rows of the joined q, k and v projection."""
        return (self.num_attention_heads + 2 * self.num_key_value_heads) * self.head_dim

    def kv_bytes_per_token(self, dtype_bytes: int) -> int:
        """Bytes of K and V of one position over all attention layers."""
        return 2 * self.num_key_value_heads * self.head_dim * dtype_bytes * len(self.attention_layers)

    @property
    def parameters(self) -> int:
        """Parameters as published: tied embedding once, float32 expert biases not counted."""
        return self._parameters(self.num_experts)

    @property
    def active_parameters(self) -> int:
        """Parameters that one token uses: only the experts that it is routed to."""
        return self._parameters(self.num_experts_per_tok)

    def _parameters(self, experts: int) -> int:
        h = self.hidden_size
        conv = 4 * h * h + CONV_TAPS * h
        attention = self.qkv_rows * h + h * self.num_attention_heads * self.head_dim + 2 * self.head_dim
        dense = 3 * h * self.intermediate_size
        moe = self.num_experts * h + experts * 3 * h * self.moe_intermediate_size
        mixers = len(self.conv_layers) * conv + len(self.attention_layers) * attention
        feed_forward = self.num_dense_layers * dense + (self.num_hidden_layers - self.num_dense_layers) * moe
        return self.vocab_size * h + h + self.num_hidden_layers * 2 * h + mixers + feed_forward

    @classmethod
    def from_dict(cls, raw: dict[str, Any], source: str = "config.json") -> ModelConfig:
        """The checked configuration. CheckpointError names `source` and the field."""
        fields = _Fields(raw, source)
        model_type = _architecture(fields)
        for name in ("quantization_config", "quantization"):
            fields.check(raw.get(name) is None, name, "quantised checkpoints can't be read")
        fields.check(fields.flag("conv_bias", default=False) is False, "conv_bias", "must be false")
        taps = fields.size("conv_L_cache", default=CONV_TAPS)
        fields.check(taps == CONV_TAPS, "conv_L_cache", f"must be {CONV_TAPS}")
        hidden, heads = fields.size("hidden_size"), fields.size("num_attention_heads")
        kv_heads, vocab = fields.size("num_key_value_heads"), fields.size("vocab_size")
        fields.check(hidden == HEAD_DIM * heads, "hidden_size", f"must be {HEAD_DIM} x num_attention_heads ({heads})")
        fields.check(fields.size("head_dim", default=HEAD_DIM) == HEAD_DIM, "head_dim", f"must be {HEAD_DIM}")
        fields.check(heads % kv_heads == 0, "num_key_value_heads", f"must divide num_attention_heads ({heads})")
        layer_types = _layer_types(fields)
        moe = model_type == "lfm2_moe"
        intermediate = fields.inner_size("intermediate_size") if moe else _intermediate_size(fields)
        experts = _experts(fields, len(layer_types)) if moe else {"num_dense_layers": len(layer_types)}
        return cls(
            model_type=model_type,
            vocab_size=vocab,
            hidden_size=hidden,
            num_hidden_layers=len(layer_types),
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            layer_types=layer_types,
            intermediate_size=intermediate,
            norm_eps=fields.number("norm_eps", above=0.0),
            rope_theta=_rope_theta(fields),
            max_position_embeddings=fields.size("max_position_embeddings"),
            **experts,
            tie_word_embeddings=_tied(fields),
            bos_token_id=fields.token("bos_token_id", vocab),
            eos_token_ids=fields.tokens("eos_token_id", vocab),
            pad_token_id=fields.token("pad_token_id", vocab),
        )

    @classmethod
    def from_dir(cls, path: Path) -> ModelConfig:
        """The configuration in `path`/config.json."""
        raw = read_json(path / "config.json")
        if raw is None:
            raise CheckpointError(f"{path}: no config.json")
        return cls.from_dict(raw)


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """What generation_config.json sets; None where it says nothing. `do_sample: false` makes the temperature 0."""

    eos_token_ids: tuple[int, ...] = ()
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None

    @classmethod
    def from_dir(cls, path: Path) -> GenerationDefaults:
        """The defaults in `path`/generation_config.json; all unset without that file."""
        source = "generation_config.json"
        raw = read_json(path / source)
        if raw is None:
            return cls()
        names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
        values = {name: raw[name] for name in names if raw.get(name) is not None}
        if _Fields(raw, source).flag("do_sample", default=True) is False:
            values["temperature"] = 0.0
        try:
            SamplingParams(**values)
        except InvalidRequest as error:
            raise CheckpointError(f"{source}: {error.message}") from error
        return cls(eos_token_ids=_Fields(raw, source).tokens("eos_token_id"), **values)


def read_json(path: Path) -> dict[str, Any] | None:
    """A JSON object from a file; None if there is no such file, CheckpointError if it isn't a JSON object."""
    try:
        raw = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path.name}: not valid JSON ({error})") from error
    except OSError as error:
        raise CheckpointError(f"{path.name}: can't be read ({error.strerror})") from error
    if not isinstance(raw, dict):
        raise CheckpointError(f"{path.name}: must hold a JSON object, not {type(raw).__name__}")
    return raw


class _Fields:
    """Typed access to one JSON object; every error names the file and the field."""

    def __init__(self, raw: dict[str, Any], source: str) -> None:
        self.raw = raw
        self.source = source

    def fail(self, name: str, problem: str) -> CheckpointError:
        value = self.raw.get(name)
        shown = "" if value is None else f"={_short(value)}"
        return CheckpointError(f"{self.source}: {name if name.isprintable() else repr(name)}{shown}: {problem}")

    def check(self, ok: bool, name: str, problem: str) -> None:
        if not ok:
            raise self.fail(name, problem)

    def size(self, name: str, *, default: int | None = None, low: int = 1, high: int = LARGEST_SIZE) -> int:
        value: Any = self.raw.get(name)
        if value is None and default is not None:
            return default
        self.check(value is not None, name, "is missing")
        whole = isinstance(value, int) and not isinstance(value, bool)
        self.check(whole and low <= value <= high, name, f"must be a whole number between {low} and {high}")
        return int(value)

    def number(self, name: str, *, above: float) -> float:
        value = self.raw.get(name)
        self.check(value is not None, name, "is missing")
        return self.real(name, value, above)

    def real(self, name: str, value: Any, above: float) -> float:
        """`value`, found under `name`, as a float between `above` and the largest size."""
        real = isinstance(value, int | float) and not isinstance(value, bool)
        self.check(real and above < value <= LARGEST_SIZE, name, f"must be a number above {above:g}")
        return float(value)

    def flag(self, name: str, *, default: bool | None = None) -> bool:
        value = self.raw.get(name)
        if value is None and default is not None:
            return default
        self.check(value is not None, name, "is missing")
        self.check(isinstance(value, bool), name, "must be true or false")
        return bool(value)

    def inner_size(self, name: str) -> int:
        """A size that is the inner dimension of a matrix product."""
        value = self.size(name)
        self.check(value % K_MULTIPLE == 0, name, f"must be a multiple of {K_MULTIPLE}")
        return value

    def token(self, name: str, vocab: int) -> int | None:
        value = self.raw.get(name)
        return None if value is None else self._token(name, value, vocab)

    def tokens(self, name: str, vocab: int = LARGEST_SIZE) -> tuple[int, ...]:
        value = self.raw.get(name)
        if value is None:
            return ()
        listed = value if isinstance(value, list) else [value]
        return tuple(dict.fromkeys(self._token(name, token, vocab) for token in listed))

    def _token(self, name: str, value: Any, vocab: int) -> int:
        ok = isinstance(value, int) and not isinstance(value, bool) and 0 <= value < vocab
        self.check(ok, name, f"must be a token id below {vocab}")
        return int(value)


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _architecture(fields: _Fields) -> str:
    known = " and ".join(ARCHITECTURES)
    model_type = fields.raw.get("model_type")
    fields.check(model_type is not None, "model_type", f"is missing (served are {known})")
    served = isinstance(model_type, str) and model_type in ARCHITECTURES
    fields.check(served, "model_type", f"wrong architecture, only {known} are served")
    names = fields.raw.get("architectures")
    right = ARCHITECTURES[str(model_type)]
    fields.check(
        names is None or (isinstance(names, list) and right in names), "architectures", f"{model_type} wants {right}"
    )
    return str(model_type)


def _layer_types(fields: _Fields) -> tuple[str, ...]:
    """Layer kinds from `layer_types` or `full_attn_idxs`; both have to agree."""
    count = fields.size("num_hidden_layers", high=MOST_PARTS)
    listed, numbers = fields.raw.get("layer_types"), fields.raw.get("full_attn_idxs")
    fields.check(listed is not None or numbers is not None, "layer_types", "is missing, and so is full_attn_idxs")
    from_numbers: tuple[str, ...] | None = None
    if numbers is not None:
        fields.check(
            isinstance(numbers, list) and all(type(n) is int and 0 <= n < count for n in numbers),
            "full_attn_idxs",
            f"must list layer numbers below num_hidden_layers ({count})",
        )
        fields.check(len(set(numbers)) == len(numbers), "full_attn_idxs", "names a layer twice")
        from_numbers = tuple("full_attention" if n in numbers else "conv" for n in range(count))
    if listed is None:
        name, kinds = "full_attn_idxs", from_numbers or ()
    else:
        name = "layer_types"
        fields.check(isinstance(listed, list), name, "must be a list")
        for kind in listed:
            fields.check(kind in LAYER_TYPES, name, f"unknown kind {_short(kind)} (known: {', '.join(LAYER_TYPES)})")
        fields.check(len(listed) == count, name, f"has {len(listed)} entries, num_hidden_layers is {count}")
        kinds = tuple(listed)
        fields.check(from_numbers in (None, kinds), name, "disagrees with full_attn_idxs")
    fields.check(set(kinds) == set(LAYER_TYPES), name, "an LFM2 network has conv and attention layers")
    return kinds


def _rope_theta(fields: _Fields) -> float:
    """theta, flat or nested; any rope but the plain one is refused."""
    found: dict[str, float] = {}
    if fields.raw.get("rope_theta") is not None:
        found["rope_theta"] = fields.number("rope_theta", above=1.0)
    for name in ("rope_parameters", "rope_scaling"):
        nested = fields.raw.get(name)
        if nested is None:
            continue
        fields.check(isinstance(nested, dict), name, "must be an object")
        kind = nested.get("rope_type", nested.get("type", "default"))
        fields.check(kind == "default", f"{name}.rope_type", f"{_short(kind)} is unknown, only default rope is served")
        for key, value in nested.items():
            plain = key in ("rope_type", "type", "rope_theta") or value is None or (key, value) == PLAIN_ROTARY
            fields.check(plain, f"{name}.{key}", "is unknown for default rope")
        if nested.get("rope_theta") is not None:
            found[f"{name}.rope_theta"] = fields.real(f"{name}.rope_theta", nested["rope_theta"], 1.0)
    fields.check(bool(found), "rope_theta", "is missing, and so is rope_parameters.rope_theta")
    fields.check(len(set(found.values())) == 1, "rope_theta", f"disagrees with {' and '.join(found)}: {found}")
    return next(iter(found.values()))


def _intermediate_size(fields: _Fields) -> int:
    """The dense feed-forward size as transformers' Lfm2MLP derives it; the tensors have the last word."""
    name = "block_ff_dim" if fields.raw.get("block_ff_dim") is not None else "intermediate_size"
    size = fields.size(name)
    if not fields.flag("block_auto_adjust_ff_dim", default=False):
        return size
    size = int(2 * size / 3)
    if fields.raw.get("block_ffn_dim_multiplier") is not None:
        size = int(fields.number("block_ffn_dim_multiplier", above=0.0) * size)
    step = fields.size("block_multiple_of")
    size = step * -(-size // step)
    fields.check(0 < size <= LARGEST_SIZE, name, f"is adjusted to {size}")
    return size


def _experts(fields: _Fields, layers: int) -> dict[str, Any]:
    names = [name for name in ("num_experts", "num_local_experts") if fields.raw.get(name) is not None]
    counts = {fields.size(name, high=MOST_PARTS) for name in names or ["num_experts"]}
    fields.check(len(counts) == 1, "num_experts", "disagrees with num_local_experts")
    count, chosen = counts.pop(), fields.size("num_experts_per_tok")
    fields.check(chosen <= count, "num_experts_per_tok", f"is above num_experts ({count})")
    dense = fields.size("num_dense_layers", low=0)
    fields.check(dense < layers, "num_dense_layers", f"must be below num_hidden_layers ({layers})")
    size = fields.inner_size("moe_intermediate_size")
    return {
        "num_experts": count,
        "num_experts_per_tok": chosen,
        "moe_intermediate_size": size,
        "num_dense_layers": dense,
        "norm_topk_prob": fields.flag("norm_topk_prob"),
        "use_expert_bias": fields.flag("use_expert_bias"),
        "routed_scaling_factor": fields.number("routed_scaling_factor", above=0.0),
    }


def _tied(fields: _Fields) -> bool:
    names = [name for name in ("tie_word_embeddings", "tie_embedding") if fields.raw.get(name) is not None]
    values = {fields.flag(name) for name in names}
    fields.check(len(values) < 2, "tie_word_embeddings", "disagrees with tie_embedding")
    return values.pop() if values else True
