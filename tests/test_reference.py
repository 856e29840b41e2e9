"""The network against transformers' values for the tiny checkpoints, and what each known mistake would do to it."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kernels_numba.batch import RING_ROWS
from kernels_numba.cpu import CpuBackend
from lfm2serve.checkpoint import Checkpoint
from lfm2serve.config import ModelConfig
from lfm2serve.memory.pages import PagePool
from lfm2serve.memory.states import StreamStates
from lfm2serve.model import Model
from tests.conftest import DATA
from tests.data.numpy_forward import MISTAKES, MOE_ONLY, NumpyForward, read_weights

Tensors = dict[str, np.ndarray]
ROWS = 64
F32_BOUND = 1e-3
BF16_BOUND = 0.4  # of logits with a spread of 4 to 5: the order of sums differs from torch's
NAMES = ["tiny-lfm2moe", "tiny-lfm2"]
LAYOUTS = [(24,), (1, 3, 20), (23, 1), (12, 12), (7, *[1] * 17), (1,) * 24]


@dataclass
class Watch(CpuBackend):
    """A backend that keeps what goes into each norm and what each router chose."""

    dtype: str
    norms: list[np.ndarray] = field(default_factory=list)
    routes: list[tuple[np.ndarray, np.ndarray]] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__(self.dtype)

    def rms_norm(self, x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
        self.norms.append(x.copy())
        return super().rms_norm(x, weight, eps)

    def moe_route(self, *args: Any) -> tuple[np.ndarray, np.ndarray]:
        ids, weights = super().moe_route(*args)
        self.routes.append((ids.copy(), weights.copy()))
        return ids, weights


class Network:
    """One stream over a model: call it with token ids to get the logits of their rows."""

    def __init__(self, config: ModelConfig, tensors: Tensors, dtype: str) -> None:
        self.backend = Watch(dtype)
        self.model = Model(config, tensors, self.backend, max_rows=ROWS)
        self.states = StreamStates(config, self.backend, slots=1, pages=1, max_rows=ROWS)
        lease = PagePool(1).ask(0, ROWS)
        assert lease is not None
        self.states.open(0, lease)
        self.at = 0

    def __call__(self, ids: Sequence[int]) -> np.ndarray:
        batch = self.states.pack([(0, self.at, list(ids))])
        self.at += len(ids)
        return self.model.logits(self.model.forward(batch, self.states))


@cache
def weights(name: str) -> tuple[ModelConfig, Tensors]:
    checkpoint = Checkpoint(DATA / name)
    dtypes = {"bf16": np.uint16, "f32": np.float32}
    return checkpoint.config, checkpoint.load(lambda _name, shape, dtype: np.empty(shape, dtypes[dtype]))


@cache
def reference(name: str) -> dict[str, np.ndarray]:
    with np.load(DATA / name / "reference.npz") as file:
        return dict(file)


def ids_of(name: str) -> list[int]:
    return [int(token) for token in reference(name)["ids"]]


@cache
def logits(name: str, dtype: str, layout: tuple[int, ...] = (24,)) -> np.ndarray:
    """All rows' logits, computed in chunks of the given lengths."""
    network, ids = Network(*weights(name), dtype), ids_of(name)
    rows = []
    for length in layout:
        rows.append(network(ids[network.at : network.at + length]))
    return np.concatenate(rows)


def gap(row: np.ndarray) -> float:
    """How far the highest logit is above the next one."""
    second, first = np.sort(row)[-2:]
    return float(first - second)


# ---------------------------------------------------------------- agreement


@pytest.mark.parametrize("name", NAMES)
def test_float32_logits_agree_at_every_position(name: str) -> None:
    wanted = reference(name)["logits_f32"]
    ours = logits(name, "float32")
    assert ours.shape == wanted.shape
    assert np.abs(ours - wanted).max() < F32_BOUND
    assert ours.argmax(-1).tolist() == wanted.argmax(-1).tolist()


@pytest.mark.parametrize("name", NAMES)
def test_bfloat16_logits_agree_with_the_bfloat16_reference(name: str) -> None:
    wanted = reference(name)["logits_bf16"]
    ours = logits(name, "bfloat16")
    assert np.abs(ours - wanted).max() < BF16_BOUND
    clear = [t for t, row in enumerate(wanted) if gap(row) > BF16_BOUND]
    assert len(clear) > len(wanted) // 2
    assert ours.argmax(-1)[clear].tolist() == wanted.argmax(-1)[clear].tolist()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", NAMES)
def test_rows_computed_one_by_one_agree_with_cached_steps(name: str, dtype: str) -> None:
    tag, bound = ("f32", F32_BOUND) if dtype == "float32" else ("bf16", BF16_BOUND)
    wanted, prefill = reference(name)[f"decode_{tag}"], int(reference(name)["prefill_len"])
    ours = logits(name, dtype, (7, *[1] * 17))[prefill:]
    assert np.abs(ours - wanted).max() < bound


@pytest.mark.parametrize("layout", LAYOUTS[1:], ids=lambda layout: "+".join(map(str, layout[:3])))
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", NAMES)
def test_chunks_change_no_bit(name: str, dtype: str, layout: tuple[int, ...]) -> None:
    assert sum(layout) == 24
    assert logits(name, dtype, layout).tobytes() == logits(name, dtype).tobytes()


@pytest.mark.parametrize("name", NAMES)
def test_every_layer_s_output_agrees(name: str) -> None:
    network = Network(*weights(name), "float32")
    network(ids_of(name))
    residual = network.backend.norms[0::2]  # what each layer gets, then what the final norm gets
    wanted = reference(name)["hidden_f32"]
    assert len(residual) == len(wanted)
    for layer, (ours, theirs) in enumerate(zip(residual[:-1], wanted[:-1], strict=True)):
        assert np.abs(ours - theirs).max() < 1e-4, f"what layer {layer} gets"
    config = network.model.config
    last = network.backend.rms_norm(residual[-1], network.model.final_norm, config.norm_eps)
    assert np.abs(last - wanted[-1]).max() < 1e-4


@pytest.mark.parametrize("layout", [(24,), (5, 19), (7, *[1] * 17)], ids=["24", "5+19", "7+1"])
@pytest.mark.parametrize("name", NAMES)
def test_the_convolution_s_state_agrees(name: str, layout: tuple[int, ...]) -> None:
    network, ids = Network(*weights(name), "float32"), ids_of(name)
    for length in layout:
        network(ids[network.at : network.at + length])
    for place, layer in enumerate(network.model.config.conv_layers):
        wanted = reference(name)[f"conv_state_{layer}"]
        for column, position in enumerate(range(len(ids) - 3, len(ids))):
            ours = network.states.ring[place, 0, position % RING_ROWS]
            assert np.abs(ours - wanted[:, column]).max() < 1e-4


def test_the_routers_choose_the_same_experts_with_the_same_weights() -> None:
    network = Network(*weights("tiny-lfm2moe"), "float32")
    network(ids_of("tiny-lfm2moe"))
    config = network.model.config
    layers = [n for n in range(config.num_hidden_layers) if config.is_moe(n)]
    assert len(network.backend.routes) == len(layers) == 2
    for layer, (ids, weight) in zip(layers, network.backend.routes, strict=True):
        order = np.argsort(ids, axis=-1)
        assert np.take_along_axis(ids, order, -1).tolist() == reference("tiny-lfm2moe")[f"topk_{layer}"].tolist()
        wanted = reference("tiny-lfm2moe")[f"topk_w_{layer}"]
        assert np.abs(np.take_along_axis(weight, order, -1) - wanted).max() < 1e-5


@pytest.mark.parametrize("name", NAMES)
def test_float32_greedy_reply_is_the_reference_s(name: str) -> None:
    wanted = reference(name)["greedy_f32"].tolist()
    assert reference(name)["margin_f32"].min() > 10 * F32_BOUND
    network = Network(*weights(name), "float32")
    row, reply = network(ids_of(name))[-1], []
    while len(reply) < len(wanted):
        reply.append(int(row.argmax()))
        row = network(reply[-1:])[-1]
    assert reply == wanted


@pytest.mark.parametrize("name", NAMES)
def test_bfloat16_greedy_tokens_where_the_margin_allows(name: str) -> None:
    wanted, margins = reference(name)["greedy_bf16"].tolist(), reference(name)["margin_bf16"]
    network = Network(*weights(name), "bfloat16")
    rows = np.concatenate([network(ids_of(name))[-1:], network(wanted[:-1])])
    clear = margins > BF16_BOUND
    assert clear.sum() > len(wanted) // 2
    assert rows.argmax(-1)[clear].tolist() == np.array(wanted)[clear].tolist()


# ---------------------------------------------------------------- mistakes


@pytest.mark.parametrize("mistake", MISTAKES)
@pytest.mark.parametrize("name", NAMES)
def test_the_reference_tells_each_mistake_apart(name: str, mistake: str) -> None:
    config = json.loads((DATA / name / "config.json").read_text())
    stored = read_weights(DATA / name)
    right, _ = NumpyForward(stored, config)(ids_of(name))
    assert np.abs(right - reference(name)["logits_f32"]).max() < F32_BOUND
    wrong, _ = NumpyForward(stored, config, mistake=mistake)(ids_of(name))
    moved = np.abs(wrong - reference(name)["logits_f32"]).max()
    if name == "tiny-lfm2" and mistake in (*MOE_ONLY, "GQA by n % kv"):  # nothing to mistake with one K/V head
        assert moved < F32_BOUND
    else:
        assert moved > 500 * F32_BOUND


def blocks(array: np.ndarray, order: Sequence[int], axis: int = 0) -> np.ndarray:
    """The array with its equal blocks along an axis in another order."""
    parts = np.split(array, max(order) + 1, axis)
    return np.ascontiguousarray(np.concatenate([parts[i] for i in order], axis))


def edit(suffix: str, change: Callable[[np.ndarray], np.ndarray]) -> Callable[[ModelConfig, Tensors], None]:
    """A change of every tensor whose name ends so."""

    def apply(_config: ModelConfig, tensors: Tensors) -> None:
        names = [name for name in tensors if name.endswith(suffix)]
        assert names or "moe" in suffix
        for name in names:
            tensors[name] = change(tensors[name])

    return apply


def one_plus(bits: np.ndarray) -> np.ndarray:
    wide = (bits.astype(np.uint32) << 16).view(np.float32) + np.float32(1)
    return (wide.view(np.uint32) >> 16).astype(np.uint16)


def swap_gate_and_up(_config: ModelConfig, tensors: Tensors) -> None:
    for name in [name for name in tensors if name.endswith("w13")]:
        tensors[name] = blocks(tensors[name], (1, 0), axis=-2)


def interleave_rope(config: ModelConfig, tensors: Tensors) -> None:
    """Order the head dimensions so that the half-split rotation turns the pairs (2i, 2i + 1)."""
    order = [*range(0, 64, 2), *range(1, 64, 2)]
    rotated = (config.num_attention_heads + config.num_key_value_heads) * 64
    for layer in config.attention_layers:
        qkv = tensors[f"layers.{layer}.attn.qkv"]
        heads = qkv[:rotated].reshape(-1, 64, config.hidden_size)[:, order]
        tensors[f"layers.{layer}.attn.qkv"] = np.concatenate([heads.reshape(rotated, -1), qkv[rotated:]])
        for norm in ("q_norm", "k_norm"):
            tensors[f"layers.{layer}.attn.{norm}"] = tensors[f"layers.{layer}.attn.{norm}"][order]


def spread_heads(config: ModelConfig, tensors: Tensors) -> None:
    """Order the query heads so that head n meets K/V head n % kv."""
    heads, kv = config.num_attention_heads, config.num_key_value_heads
    order = [n for k in range(kv) for n in range(k, heads, kv)]
    for layer in config.attention_layers:
        qkv, out = tensors[f"layers.{layer}.attn.qkv"], tensors[f"layers.{layer}.attn.out"]
        tensors[f"layers.{layer}.attn.qkv"] = np.concatenate([blocks(qkv[: heads * 64], order), qkv[heads * 64 :]])
        tensors[f"layers.{layer}.attn.out"] = blocks(out, order, axis=1)


def drop_bias(_config: ModelConfig, tensors: Tensors) -> None:
    for name in [name for name in tensors if name.endswith("moe.bias")]:
        del tensors[name]


ALTERED: dict[str, tuple[Callable[[ModelConfig, Tensors], None] | dict[str, Any], bool]] = {
    # what is altered, and whether only the MoE checkpoint has it
    "split as B,x,C": (edit("conv.in_proj", lambda w: blocks(w, (0, 2, 1))), False),
    "split as x,B,C": (edit("conv.in_proj", lambda w: blocks(w, (1, 2, 0))), False),
    "B and C swapped": (edit("conv.in_proj", lambda w: blocks(w, (1, 0, 2))), False),
    "kernel reversed": (edit("conv.weight", lambda w: np.ascontiguousarray(w[:, ::-1])), False),
    "operator norm with 1+w": (edit("operator_norm", one_plus), False),
    "feed-forward norm with 1+w": (edit("ffn_norm", one_plus), False),
    "final norm with 1+w": (edit("final_norm", one_plus), False),
    "q norm with 1+w": (edit("q_norm", one_plus), False),
    "k norm with 1+w": (edit("k_norm", one_plus), False),
    "w1 and w3 swapped": (swap_gate_and_up, False),
    "rope interleaved": (interleave_rope, False),
    "theta 1e4": ({"rope_theta": 1e4}, False),
    "theta 5e6": ({"rope_theta": 5e6}, False),
    "GQA by n % kv": (spread_heads, True),
    "bias left out": (drop_bias, True),
    "no renormalisation": ({"norm_topk_prob": False}, True),
    "weights scaled by 2.5": ({"routed_scaling_factor": 2.5}, True),
    "one expert a token": ({"num_experts_per_tok": 1}, True),
}
CASES = [(name, what) for what, (_, moe_only) in ALTERED.items() for name in (NAMES[:1] if moe_only else NAMES)]


@pytest.mark.parametrize(("name", "what"), CASES)
def test_each_altered_weight_or_constant_moves_our_logits(name: str, what: str) -> None:
    change, _ = ALTERED[what]
    config, tensors = weights(name)
    tensors = dict(tensors)
    if isinstance(change, dict):
        config = replace(config, **change)
    else:
        change(config, tensors)
    moved = np.abs(Network(config, tensors, "float32")(ids_of(name)) - reference(name)["logits_f32"]).max()
    assert moved > 500 * F32_BOUND


@pytest.mark.parametrize("mistake", [mistake for mistake in MISTAKES if mistake in ALTERED])
def test_an_altered_model_makes_exactly_that_mistake(mistake: str) -> None:
    """Ties the two ways of making a mistake together: ours with altered weights is the NumPy pass with the mistake."""
    name = NAMES[0]
    config, tensors = weights(name)
    tensors = dict(tensors)
    change, _ = ALTERED[mistake]
    if isinstance(change, dict):
        config = replace(config, **change)
    else:
        change(config, tensors)
    raw = json.loads((DATA / name / "config.json").read_text())
    wrong, _ = NumpyForward(read_weights(DATA / name), raw, mistake=mistake)(ids_of(name))
    assert np.abs(Network(config, tensors, "float32")(ids_of(name)) - wrong).max() < F32_BOUND


def test_the_reference_files_belong_to_the_checkpoints() -> None:
    for name in NAMES:
        found: Path = DATA / name
        config = ModelConfig.from_dir(found)
        assert reference(name)["logits_f32"].shape == (24, config.vocab_size)
        assert reference(name)["hidden_f32"].shape == (config.num_hidden_layers + 1, 24, config.hidden_size)
