"""x wT for packed weights: which kernel runs, and its launch. Every choice gives the same bits, so all of it is free.

Rounding: r(y), or r(residual + r(y)), or r(r(silu(r(w1 x))) * r(w3 x)), or r(y) stored as float32 (see products.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from . import decode_products as ring
from . import gemm_mma, gemm_wgmma
from .compiler import Kernel
from .decode_products import RING_PRODUCTS
from .driver import Device, DeviceArray, Launch, Stream
from .gemm_mma import MMA_PRODUCTS
from .gemm_wgmma import WGMMA_PRODUCTS
from .inputs import DeviceBatch
from .pack import PackedWeight
from .products import LOGITS, PLAIN, RESIDUAL, SCALED, SWIGLU

_WGMMA_NS = {256: 1100, 128: 680, 64: 500}
"""Nanoseconds of 64 k of a tile by its columns, measured on an H200 as the figures below."""
_RING_NS = {8: 140, 16: 160, 32: 240, 64: 320}
"""Nanoseconds of 64 k of a round by the rows of a group."""
_MEMORY = 4200.0
"""Bytes a nanosecond from memory."""
_CACHE = 38.0
"""Bytes a nanosecond from the second-level cache into a multiprocessor."""


@dataclass(frozen=True, slots=True)
class Plan:
    """A kernel, its launch and the arguments that follow the common ones."""

    kernel: Kernel
    grid: int
    threads: int
    shared: int
    tail: tuple[int, ...]


def ring_plan(
    device: Device, rows: int, units: int, early: bool = True, *, mode: int = PLAIN, kind: RingKind | None = None
) -> Plan | None:
    """The ring kernel for groups of up to `rows` rows (8, 16, 32 or 64) and about `units` units of weights in all.

    early: the weights' addresses don't depend on the kernel before. mode: the epilogue; kernels with RESIDUAL and
    SCALED follow others in a layer. kind: another family of ring kernels than RING_PRODUCTS.
    """
    kind = kind or _PRODUCTS
    kernel = kind.kernels.get(rows)
    if kernel is None or not device.supports(kernel):
        return None
    second = mode in (RESIDUAL, SCALED)
    grid = min(device.multiprocessors, units)
    each = -(-units // grid)
    whole = ring.SECOND if second and rows <= 32 else kernel.dynamic_shared
    room = min(whole, device.shared_bytes) - 128 - kind.start(rows)
    most = kind.most[mode != SWIGLU] if kind.most else ring.SHAPES[kind.rows or rows][0]
    warps = kind.warps or -(-each // -(-each // most))
    stages = min(ring.STAGES, room // kind.stage_bytes(rows, warps))
    while stages < 3 and warps > 1 and not kind.warps:
        warps -= 1
        stages = min(ring.STAGES, room // kind.stage_bytes(rows, warps))
    if stages < 2:
        return None
    shared = 128 + kind.start(rows) + stages * kind.stage_bytes(rows, warps)
    if whole == ring.FIRST:
        shared = min(whole, device.shared_bytes)  # no room for a second block
    ahead = mode != SCALED  # the second product's weights would only push the first's aside
    tail = (warps, stages, int(early) + int(early and ahead), _LATE.get(mode, 0))
    return Plan(kernel, grid, kind.threads(rows, warps), shared, tail)


@dataclass(frozen=True, slots=True)
class RingKind:
    """A family of ring kernels: by rows of a group, where its stages begin, and the units of its rounds if fixed."""

    kernels: dict[int, Kernel]
    start: Callable[[int], int]
    warps: int = 0
    stage_bytes: Callable[[int, int], int] = ring.stage_bytes
    threads: Callable[[int, int], int] = ring.threads
    rows: int = 0
    """of its group, where it isn't their number in `kernels`"""
    most: tuple[int, int] | None = None
    """units of a round of gated products and of others, where fewer than a shape's do better"""


_PRODUCTS = RingKind(RING_PRODUCTS, lambda rows: ring.RING)
EXPERTS = RingKind(ring.RING_EXPERTS, lambda rows: ring.CHOICE_RING)
FEW_ROWS = 32
FEW_EXPERTS = RingKind(ring.RING_EXPERTS, lambda rows: ring.CHOICE_RING, most=(6, 4))
"""With up to FEW_ROWS rows: more stages are worth more than more units (LADDER.md)."""
CONVS = RingKind(ring.RING_CONVS, ring.conv_ring, 3)
SUMS = RingKind(ring.RING_SUMS, lambda rows: ring.RING + ring.SUM_BYTES, 0, ring.sum_stage_bytes, ring.sum_threads, 8)
SUM_CONVS = RingKind(
    ring.RING_SUM_CONVS, lambda rows: ring.conv_ring(8) + ring.SUM_BYTES, 3, ring.sum_stage_bytes, ring.sum_threads, 8
)
_LATE = {SWIGLU: 8, SCALED: 8}
"""Before how many of its stages a product lets the next kernel begin, by epilogue; the others do so at once."""


def wgmma_plan(device: Device, columns: int, tiles_m: int, units: int) -> Plan | None:
    """The wgmma kernel with tiles of `columns` outputs, for about `tiles_m` row tiles."""
    kernel = WGMMA_PRODUCTS[columns]
    if not device.supports(kernel):
        return None
    tiles = tiles_m * -(-units * 16 // columns)
    return Plan(kernel, min(device.multiprocessors, tiles), gemm_wgmma.THREADS, gemm_wgmma.shared_bytes(columns), ())


def mma_plan(device: Device, shape: tuple[int, int], tiles_m: int, units: int) -> Plan:
    """The mma.sync kernel with tiles of shape[0] rows by shape[1] outputs."""
    kernel = MMA_PRODUCTS[shape]
    shared = gemm_mma.shared_bytes(*shape)
    resident = max(1, min((device.shared_bytes + 1024) // (shared + 1024), 512 // kernel.threads))
    grid = min(device.multiprocessors * resident, tiles_m * -(-units * 16 // shape[1]))
    return Plan(kernel, grid, kernel.threads, shared, ())


def wgmma_fits(weight: PackedWeight, out: DeviceArray) -> bool:
    """Whether wgmma's whole blocks of k and 16-byte stores do for a shape."""
    return weight.depth % 64 == 0 and weight.outputs % 8 == 0 and out.shape[-1] % 8 == 0


def plans(device: Device, rows: int, weight: PackedWeight, out: DeviceArray, mode: int = PLAIN) -> dict[str, Plan]:
    """Every plan that computes a dense product, by the kernel's name."""
    found = [ring_plan(device, size, -(-rows // size) * weight.units, mode=mode) for size in RING_PRODUCTS]
    if wgmma_fits(weight, out):
        found += [wgmma_plan(device, columns, -(-rows // 128), weight.units) for columns in WGMMA_PRODUCTS]
    found += [mma_plan(device, shape, -(-rows // shape[0]), weight.units) for shape in MMA_PRODUCTS]
    return {plan.kernel.name: plan for plan in found if plan is not None}


def ring_time(device: Device, size: int, rows: int, weight: PackedWeight) -> float:
    """About the nanoseconds of the ring kernel for groups of `size` rows: the slowest of its limits."""
    groups = -(-rows // size)
    each = -(-groups * weight.units // device.multiprocessors)
    rounds = -(-each // ring.SHAPES[size][0])
    from_memory = weight.expert_bytes * (groups if weight.expert_bytes > device.l2_bytes // 2 else 1)
    through_cache = each * weight.expert_bytes // weight.units + rounds * size * weight.depth * 2
    return max(rounds * _RING_NS[size] * weight.depth / 64, from_memory / _MEMORY, through_cache / _CACHE)


def wgmma_time(device: Device, columns: int, tiles_m: int, units: int, depth: int) -> float:
    """About the nanoseconds of the wgmma kernel."""
    return -(-tiles_m * -(-units * 16 // columns) // device.multiprocessors) * _WGMMA_NS[columns] * depth / 64


_CHOSEN: dict[tuple[object, ...], Plan] = {}


def chosen(choose: Callable[..., Plan]) -> Callable[..., Plan]:
    """A choice by (device, rows, weight, out, ...) that is made once; more than 256 rows count in steps of 128."""

    def choice(device: Device, rows: int, weight: PackedWeight, out: DeviceArray, *more: int) -> Plan:
        if rows > 256:
            rows = -(-rows // 128) * 128
        key = (choose, device, rows, weight.form, *more)
        plan = _CHOSEN.get(key)
        if plan is None:
            plan = _CHOSEN[key] = choose(device, rows, weight, out, *more)
        return plan

    return choice


@chosen
def best_plan(device: Device, rows: int, weight: PackedWeight, out: DeviceArray, mode: int = PLAIN) -> Plan:
    """The plan that runs."""
    sizes = [next(size for size in RING_PRODUCTS if size >= rows)] if rows <= 32 else [32, 64]
    ring_size = min(sizes, key=lambda size: ring_time(device, size, rows, weight))
    plan = ring_plan(device, ring_size, -(-rows // ring_size) * weight.units, mode=mode)
    tiles_m = -(-rows // 128)
    if wgmma_fits(weight, out) and rows > 32:
        wide = best_wgmma(device, tiles_m, weight)
        columns = best_columns(device, tiles_m, weight)
        faster = wgmma_time(device, columns, tiles_m, weight.units, weight.depth) < ring_time(
            device, ring_size, rows, weight
        )
        if wide is not None and (plan is None or faster):
            return wide
    if plan is not None and rows <= 256:
        return plan
    shape = best_mma(device, rows, weight.units)
    return mma_plan(device, shape, -(-rows // shape[0]), weight.units)


def best_columns(device: Device, tiles_m: int, weight: PackedWeight) -> int:
    """Columns of the wgmma kernel's tile."""
    return min(WGMMA_PRODUCTS, key=lambda c: wgmma_time(device, c, tiles_m, weight.units, weight.depth))


def best_wgmma(device: Device, tiles_m: int, weight: PackedWeight) -> Plan | None:
    return wgmma_plan(device, best_columns(device, tiles_m, weight), tiles_m, weight.units)


def best_mma(device: Device, rows: int, units: int) -> tuple[int, int]:
    if rows <= 16:
        return (16, 64)
    large = -(-rows // 128) * -(-units // 8) >= device.multiprocessors
    return (128, 128) if large else (64, 64)


def bind_plan(
    device: Device,
    plan: Plan,
    x: DeviceArray,
    weight: PackedWeight,
    out: DeviceArray,
    mode: int,
    rows: int,
    extra: DeviceArray | None = None,
    start: DeviceArray | None = None,
    gather: DeviceArray | None = None,
    dependent: bool = False,
) -> Launch:
    """A launch of a plan; the arguments of every product kernel in their order."""
    return device.function(plan.kernel).bind(
        plan.grid,
        plan.threads,
        [
            x, x.shape[-1] * 2, rows, weight.depth, weight.data, weight.expert_bytes, weight.units,
            out, out.shape[-1], weight.outputs, mode, extra, start, weight.experts, gather, *plan.tail,
        ],
        shared=plan.shared,
        dependent=dependent,
    )  # fmt: skip


def bind_linear(
    device: Device,
    x: DeviceArray,
    weight: PackedWeight,
    out: DeviceArray,
    *,
    residual: DeviceArray | None = None,
    plan: Plan | None = None,
    dependent: bool = False,
) -> Launch:
    """The launch of a product: x [rows, depth] bf16, out [rows, outputs] bf16, or float32 for logits.

    residual [rows, outputs] may be `out` itself. Gated weights give the SwiGLU. dependent: see `Function.bind`.
    """
    rows = x.shape[0]
    if x.shape != (rows, weight.depth) or out.shape != (rows, weight.outputs) or rows == 0:
        raise ValueError(f"x {x.shape} times weights {weight.outputs} x {weight.depth} into {out.shape}")
    if residual is not None and (residual.shape != out.shape or weight.gated or out.dtype != "bf16"):
        raise ValueError("a residual has the shape of a bf16 result, and none goes with a SwiGLU")
    mode = SWIGLU if weight.gated else RESIDUAL if residual is not None else LOGITS if out.dtype == "f32" else PLAIN
    plan = plan or best_plan(device, rows, weight, out, mode)
    return bind_plan(device, plan, x, weight, out, mode, rows, extra=residual, dependent=dependent)


def conv_plan(device: Device, rows: int, hidden: int) -> Plan | None:
    """The kernel that runs a convolution layer's first product and its convolution, where there is one."""
    size = next((size for size in ring.RING_CONVS if size >= rows), None)
    if size is None or hidden % 16:
        return None
    return ring_plan(device, size, hidden // 16, kind=CONVS)


@dataclass(frozen=True, slots=True)
class Summed:
    """The input of a product of one row: the RMSNorm of residual + the sum of `top_k` rows, which goes to `sums`."""

    summands: DeviceArray
    residual: DeviceArray
    top_k: int
    norm_weight: DeviceArray
    eps: float
    sums: DeviceArray


def sum_plan(device: Device, weight: PackedWeight) -> Plan | None:
    """The kernel for a product of a `Summed` row, where there is one."""
    if weight.depth > ring.SUM_DEPTH or weight.depth % 16:
        return None
    return ring_plan(device, 1, weight.units, kind=SUMS)


def bind_sum(
    device: Device, plan: Plan, given: Summed, weight: PackedWeight, out: DeviceArray, dependent: bool = False
) -> Launch:
    """r(x wT) of a `Summed` row x."""
    warps, stages, _, late = plan.tail
    return device.function(plan.kernel).bind(
        plan.grid,
        plan.threads,
        [
            weight.depth, weight.data, weight.units, out, out.shape[-1], weight.outputs, warps, stages, late,
            given.top_k, given.summands, given.residual, given.norm_weight, given.eps, given.sums,
        ],
        shared=plan.shared,
        dependent=dependent,
    )  # fmt: skip


def sum_conv_plan(device: Device, hidden: int) -> Plan | None:
    """`conv_plan` for a `Summed` row."""
    if hidden > ring.SUM_DEPTH or hidden % 16:
        return None
    return ring_plan(device, 1, hidden // 16, kind=SUM_CONVS)


def bind_sum_conv(
    device: Device,
    plan: Plan,
    given: Summed,
    weight: PackedWeight,
    out: DeviceArray,
    filters: DeviceArray,
    state: DeviceArray,
    batch: DeviceBatch,
    dependent: bool = False,
) -> Launch:
    """`bind_conv` for a `Summed` row."""
    warps, stages, _, late = plan.tail
    return device.function(plan.kernel).bind(
        plan.grid,
        plan.threads,
        [
            weight.depth, weight.data, weight.units // 3, out, warps, stages, late, batch.row_segment, batch.seg_slot,
            batch.seg_start, batch.positions, given.top_k, filters, state, given.summands, given.residual,
            given.norm_weight, given.eps, given.sums,
        ],
        shared=plan.shared,
        dependent=dependent,
    )  # fmt: skip


def bind_conv(
    device: Device,
    plan: Plan,
    x: DeviceArray,
    weight: PackedWeight,
    out: DeviceArray,
    filters: DeviceArray,
    state: DeviceArray,
    batch: DeviceBatch,
    dependent: bool = False,
) -> Launch:
    """r(C * r(conv(r(B * x')))) for B, C, x' = x wT: `linear` and `short_conv` of decode rows; state: the layer's ring
    [slots, RING_ROWS, hidden]. A segment has at most RING_ROWS - 2 rows."""
    warps, stages, _, late = plan.tail
    return device.function(plan.kernel).bind(
        plan.grid,
        plan.threads,
        [
            x, x.shape[-1] * 2, x.shape[0], weight.depth, weight.data, weight.units // 3, out, warps, stages, late,
            batch.row_segment, batch.seg_slot, batch.seg_start, batch.positions, filters, state,
        ],
        shared=plan.shared,
        dependent=dependent,
    )  # fmt: skip


def linear(
    stream: Stream, x: DeviceArray, weight: PackedWeight, out: DeviceArray, residual: DeviceArray | None = None
) -> None:
    """Queue a product; see `bind_linear`."""
    bind_linear(Device.current(), x, weight, out, residual=residual).run(stream)
