"""A model's layers from one attention to the next, for the kernel that runs them at once (see persistent.py): which
they are, its program, and its launch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from .decode_parts import SUM_DEPTH
from .decode_products import UNIT_CHUNK
from .driver import Device, DeviceArray
from .pack import PackedWeight
from .persistent import THREADS, run_layers
from .persistent_parts import CONSUMERS
from .persistent_stream import (
    BIAS,
    CONVOLUTION,
    DOWN,
    GIVEN,
    INPUT_BYTES,
    LAST,
    MOST_PHASES,
    MOST_SLOTS,
    MOST_TOP,
    PHASE_BYTES,
    RESIDUAL,
    RING,
    SHARED,
    STATE,
    UP,
    WEIGHTS,
)
from .route import MOST_EXPERTS, TILE

if TYPE_CHECKING:
    from . import CudaBackend
    from .inputs import DeviceBatch
    from .memory import DeviceMemory
    from .scratch import Activations

FLIGHT = 17
CALM = 17
"""Stages of gate and up, and of other products, that are on their way at most: more, and everything else queues behind
weights."""
EARLY = 24
"""Stages of a product whose weights are known that have slots of their own: they come while the router works."""


@dataclass(frozen=True, slots=True)
class LayerRun:
    """A run of layers, ready for one row: from an attention's out_proj to the next attention's first product."""

    stop: int
    """the layer that follows it"""
    program: DeviceArray
    phases: int
    words_bytes: int
    columns: int
    """of the last product; 0 without one"""
    hidden: int
    features: int
    experts: int
    top_k: int
    normalize: bool
    scaling: float
    eps: float


def run_ends(layers: Sequence[Any]) -> dict[int, int]:
    """First and one past the last layer of each run: an attention layer with experts and those behind it until the
    next attention."""
    starts = [n for n, layer in enumerate(layers) if layer.attention]
    ends = dict(zip(starts, [*starts[1:], len(layers)], strict=True))
    return {n: end for n, end in ends.items() if all(layer.moe for layer in layers[n:end])}


def run_fits(device: Device, layers: Sequence[Any], top_k: int) -> bool:
    """Whether the kernel can do a run of these layers; the last may be the attention layer behind it."""
    if not device.supports(run_layers) or run_slots(device) < EARLY + CONSUMERS + max(FLIGHT, CALM):
        return False
    up, down = layers[0].feed_forward["w13"], layers[0].feed_forward["w2"]
    hidden, blocks = down.outputs, device.multiprocessors
    return (
        hidden % 32 == 0
        and hidden <= SUM_DEPTH
        and top_k * up.outputs <= INPUT_BYTES // 2
        and top_k <= MOST_TOP
        and up.experts <= min(MOST_EXPERTS, blocks * TILE)
        and all(_out(layer).depth == hidden for layer in layers)
        and 4 * len(layers) <= MOST_PHASES
    )


def _out(layer: Any) -> PackedWeight:
    return layer.mixer["out" if layer.attention else "out_proj"]  # type: ignore[no-any-return]


def run_program(layers: Sequence[Any], following: Any, top_k: int) -> tuple[np.ndarray, int]:
    """The phases of a run, uint32 [phases, PHASE_BYTES / 4], and how many bytes of words they exchange.

    following: the attention layer whose first product ends the run, or None.
    """
    used, phases = 0, []

    def room(nbytes: int) -> int:
        nonlocal used
        used += -(-nbytes // 256) * 256
        return used - -(-nbytes // 256) * 256

    def phase(
        kind: int, weight: PackedWeight | None, source: int, result: int, sets: int = 1, logits: int = 0,
        norm: Any = None, own: Any = None, bias: Any = None, state: int = 0,
    ) -> None:  # fmt: skip
        units = 0 if weight is None else weight.units // 3 if kind == CONVOLUTION else weight.units
        depth = 0 if weight is None else weight.depth
        row = np.zeros(PHASE_BYTES // 4, np.uint32)
        row[: STATE // 4 + 1] = np.array([kind, units, sets, depth, source, result, logits, state], np.int32).view("u4")
        long = [0 if weight is None else weight.data.pointer, 0 if weight is None else weight.expert_bytes]
        long += [0 if array is None else array.pointer for array in (norm, own, bias)]
        row[WEIGHTS // 4 : BIAS // 4 + 2] = np.array(long, np.uint64).view(np.uint32)
        phases.append(row)

    summed, hidden = 0, layers[0].feed_forward["w2"].outputs
    for n, layer in enumerate(layers):
        source, feed = GIVEN, layer.feed_forward
        if n:
            source = room(hidden * 2)
            phase(
                CONVOLUTION, layer.mixer["in_proj"], summed, source, norm=layer.operator_norm,
                own=layer.mixer["weight"], state=layer.index,
            )  # fmt: skip
        stream, logits = room(hidden * 2), room(MOST_EXPERTS * 4)
        phase(RESIDUAL, _out(layer), source, stream)
        act, summed = room(top_k * feed["w13"].outputs * 2), room(hidden * 2)
        phase(UP, feed["w13"], stream, act, top_k, logits, layer.ffn_norm, feed["gate"], feed.get("bias"))
        phase(DOWN, feed["w2"], act, summed)
    if following is None:
        phase(LAST, None, summed, 0, norm=layers[-1].ffn_norm)
    else:
        phase(LAST, following.mixer["qkv"], summed, 0, norm=following.operator_norm)
    return np.stack(phases), used


@dataclass(frozen=True, slots=True)
class LayerRuns:
    """A model's runs by their first layer, and the memory through which blocks exchange words: used by one at a
    time."""

    runs: dict[int, LayerRun]
    words: DeviceArray
    """two sets"""
    arrivals: DeviceArray

    def run(
        self, backend: CudaBackend, first: int, y: Activations, h: Activations, batch: DeviceBatch, ring: DeviceArray
    ) -> tuple[Activations, Activations | None, int] | None:
        """The layers behind attention layer `first`'s y [1, H], h [1, H] before it: the residual stream, the next
        attention's first product if there is one, and the layer that follows. None: they are no run, or the batch is
        not one decode row."""
        run = self.runs.get(first)
        if run is None or batch.rows != 1 or batch.range_start is None or not backend.alone:
            return None
        take, device = backend.scratch.take, backend.device
        sums, out = take((1, run.hidden), "bf16"), take((1, run.columns), "bf16") if run.columns else None
        backend.launch(
            run_layers, device.multiprocessors, THREADS,
            *run_arguments(device, self, run, y, h, ring, batch, out, sums), shared=run_shared(device),
        )  # fmt: skip
        return sums, out, run.stop


def find_runs(
    memory: DeviceMemory, layers: Sequence[Any], top_k: int, normalize: bool, scaling: float, eps: float
) -> LayerRuns | None:
    """The runs of a model's layers that the kernel can do; None without any."""
    made = {}
    for first, stop in run_ends(layers).items():
        if not run_fits(memory.device, layers[first:stop], top_k):
            continue
        following = layers[stop] if stop < len(layers) else None
        program, words_bytes = run_program(layers[first:stop], following, top_k)
        up = layers[first].feed_forward["w13"]
        made[first] = LayerRun(
            stop, memory.keep(program), len(program), words_bytes,
            0 if following is None else following.mixer["qkv"].outputs, up.depth, up.outputs, up.experts, top_k,
            normalize, scaling, eps,
        )  # fmt: skip
    if not made:
        return None
    words = memory.allocate((2 * max(run.words_bytes for run in made.values()),), "u8")
    memory.device.fill(words, 0xFF)
    return LayerRuns(made, words, memory.zeros((1,), "u32"))


def run_slots(device: Device) -> int:
    """Stages of 4 KB that a block has room for."""
    return min(MOST_SLOTS, (min(SHARED, device.shared_bytes) - 128 - RING) // UNIT_CHUNK)


def run_shared(device: Device) -> int:
    """Bytes of shared memory of a block."""
    return 128 + RING + run_slots(device) * UNIT_CHUNK


def run_arguments(
    device: Device, runs: LayerRuns, run: LayerRun, x: Any, residual: Any, states: DeviceArray, batch: DeviceBatch,
    out: Any, sums: Any,
) -> list[Any]:  # fmt: skip
    """The arguments of `run_layers`."""
    return [
        run.program, run.phases, run_slots(device) - EARLY, EARLY, FLIGHT, CALM, runs.words, runs.words.nbytes // 2,
        runs.arrivals, run.hidden, run.experts, run.top_k, int(run.normalize), run.scaling, run.eps, x, residual,
        states, states.row_bytes, batch.row_segment,
        batch.seg_slot, batch.seg_start, batch.positions, out, sums, run.features,
    ]  # fmt: skip
