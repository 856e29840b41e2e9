"""A model's layers from one attention to the next, for the kernel that runs them at once (see persistent.py): which
they are, its program, and its launch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from .decode_parts import SUM_DEPTH
from .decode_products import CHUNK, UNIT_CHUNK
from .driver import Device, DeviceArray
from .pack import PackedWeight
from .persistent import RUN_LAYERS
from .persistent_layout import (
    BIAS,
    CONSUMERS,
    CONVOLUTION,
    DOWN,
    GIVEN,
    LAST,
    MOST_PHASES,
    MOST_ROWS,
    MOST_SLOTS,
    MOST_TOP,
    PHASE_BYTES,
    RESIDUAL,
    SHARED,
    STATE,
    THREADS,
    UP,
    WEIGHTS,
    input_bytes,
    layout,
)
from .route import MOST_EXPERTS, TILE

if TYPE_CHECKING:
    from . import CudaBackend
    from .inputs import DeviceBatch
    from .memory import DeviceMemory
    from .scratch import Activations

FLIGHT = 25
CALM = 17
"""Stages of gate and up, and of other products, that are on their way at most: more, and everything else queues behind
weights."""
EARLY = 24
"""Most stages of a product whose weights are known that have slots of their own: they come while the router works."""
LEAST_RING = CONSUMERS + max(FLIGHT, CALM)
"""Slots that the other stages need, so that no warp asks for a slot that is two uses behind; see `stream_weights`."""


@dataclass(frozen=True, slots=True)
class LayerRun:
    """A run of layers, ready for a few rows: from an attention's out_proj to the next attention's first product."""

    stop: int
    """the layer that follows it"""
    rows: int
    """of a round at most"""
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


def run_rows(device: Device, layers: Sequence[Any], top_k: int) -> int:
    """The most rows of a round with which the kernel can do a run of these layers; 0 if none."""
    up, down = layers[0].feed_forward["w13"], layers[0].feed_forward["w2"]
    hidden, blocks = down.outputs, device.multiprocessors
    if not (
        hidden % 32 == 0
        and hidden <= SUM_DEPTH
        and top_k <= MOST_TOP
        and up.experts <= min(MOST_EXPERTS, blocks * TILE)
        and all(_out(layer).depth == hidden for layer in layers)
        and 4 * len(layers) <= MOST_PHASES
    ):
        return 0
    fits = [
        rows
        for rows, kernel in RUN_LAYERS.items()
        if device.supports(kernel)
        and run_slots(device, rows) >= LEAST_RING
        # the weight warp waits until out_proj's first slot is free, which parity tells only before its next use
        and all(_block_stages(_out(layer), blocks) <= ring_slots(device, rows)[0] for layer in layers)
        and rows * top_k * up.outputs * 2 <= input_bytes(rows)
    ]
    return max(fits, default=0)


def _out(layer: Any) -> PackedWeight:
    return layer.mixer["out" if layer.attention else "out_proj"]  # type: ignore[no-any-return]


def _block_stages(weight: PackedWeight, blocks: int) -> int:
    """Most stages of a product that are a block's."""
    return -(-weight.units // blocks) * -(-weight.depth // CHUNK)


def run_program(layers: Sequence[Any], following: Any, top_k: int) -> tuple[np.ndarray, int]:
    """The phases of a run, uint32 [phases, PHASE_BYTES / 4], and how many bytes of words they exchange; the same for
    any number of rows.

    following: the attention layer whose first product ends the run, or None.
    """
    used, phases = 0, []

    def room(nbytes: int) -> int:
        nonlocal used
        begin, used = used, used + -(-MOST_ROWS * nbytes // 256) * 256
        return begin

    def phase(
        kind: int, weight: PackedWeight | None, source: int, result: int, logits: int = 0, norm: Any = None,
        own: Any = None, bias: Any = None, state: int = 0,
    ) -> None:  # fmt: skip
        units = 0 if weight is None else weight.units // 3 if kind == CONVOLUTION else weight.units
        depth = 0 if weight is None else weight.depth
        row = np.zeros(PHASE_BYTES // 4, np.uint32)
        row[: STATE // 4 + 1] = np.array([kind, units, depth, source, result, logits, state], np.int32).view("u4")
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
        phase(UP, feed["w13"], stream, act, logits, layer.ffn_norm, feed["gate"], feed.get("bias"))
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
        """The layers behind attention layer `first`'s y [R, H], h [R, H] before it: the residual stream, the next
        attention's first product if there is one, and the layer that follows. None: they are no run, or the batch is
        not one of so few decode rows."""
        run, rows = self.runs.get(first), batch.rows
        if run is None or rows > run.rows or batch.range_start is None or not backend.alone:
            return None
        take, device = backend.scratch.take, backend.device
        sums, out = take((rows, run.hidden), "bf16"), take((rows, run.columns), "bf16") if run.columns else None
        backend.launch(
            RUN_LAYERS[rows], device.multiprocessors, THREADS,
            *run_arguments(device, self, run, rows, y, h, ring, batch, out, sums), shared=run_shared(device, rows),
        )  # fmt: skip
        return sums, out, run.stop


def find_runs(
    memory: DeviceMemory, layers: Sequence[Any], top_k: int, normalize: bool, scaling: float, eps: float
) -> LayerRuns | None:
    """The runs of a model's layers that the kernel can do; None without any."""
    made = {}
    for first, stop in run_ends(layers).items():
        rows = run_rows(memory.device, layers[first:stop], top_k)
        if rows == 0:
            continue
        following = layers[stop] if stop < len(layers) else None
        program, words_bytes = run_program(layers[first:stop], following, top_k)
        up = layers[first].feed_forward["w13"]
        made[first] = LayerRun(
            stop, rows, memory.keep(program), len(program), words_bytes,
            0 if following is None else following.mixer["qkv"].outputs, up.depth, up.outputs, up.experts, top_k,
            normalize, scaling, eps,
        )  # fmt: skip
    if not made:
        return None
    words = memory.allocate((2 * max(run.words_bytes for run in made.values()),), "u8")
    memory.device.fill(words, 0xFF)
    return LayerRuns(made, words, memory.zeros((1,), "u32"))


def run_slots(device: Device, rows: int) -> int:
    """Stages of 4 KB that a block has room for."""
    return min(MOST_SLOTS, (min(SHARED, device.shared_bytes) - 128 - layout(rows)["RING"]) // UNIT_CHUNK)


def ring_slots(device: Device, rows: int) -> tuple[int, int]:
    """Those of the ring, and those of early stages: a multiple of six, see `early_chunks`."""
    slots = run_slots(device, rows)
    early = min(EARLY, slots - LEAST_RING) // 6 * 6
    return slots - early, early


def run_shared(device: Device, rows: int) -> int:
    """Bytes of shared memory of a block."""
    return 128 + layout(rows)["RING"] + run_slots(device, rows) * UNIT_CHUNK


def run_arguments(
    device: Device, runs: LayerRuns, run: LayerRun, rows: int, x: Any, residual: Any, states: DeviceArray,
    batch: DeviceBatch, out: Any, sums: Any,
) -> list[Any]:  # fmt: skip
    """The arguments of `RUN_LAYERS[rows]`."""
    return [
        run.program, run.phases, *ring_slots(device, rows), FLIGHT, CALM, runs.words, runs.words.nbytes // 2,
        runs.arrivals, run.hidden, run.experts, run.top_k, int(run.normalize), run.scaling, run.eps, x, residual,
        states, states.row_bytes, batch.row_segment, batch.seg_slot, batch.seg_start, batch.positions, out,
        run.columns, sums, run.features,
    ]  # fmt: skip
