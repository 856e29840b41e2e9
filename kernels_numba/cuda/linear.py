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
from .pack import PackedWeight
from .products import LOGITS, PLAIN, RESIDUAL, SWIGLU

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


def ring_plan(device: Device, rows: int, units: int, early: bool = True) -> Plan | None:
    """The ring kernel for groups of up to `rows` rows (8, 16, 32 or 64) and about `units` units of weights in all.

    early: the weights' addresses don't depend on the kernel before.
    """
    kernel = RING_PRODUCTS[rows]
    if not device.supports(kernel):
        return None
    grid = min(device.multiprocessors, units)
    each = -(-units // grid)
    warps = -(-each // -(-each // ring.SHAPES[rows][0]))
    room = min(kernel.dynamic_shared, device.shared_bytes) - 128 - ring.RING
    stages = min(ring.STAGES, room // ring.stage_bytes(rows, warps))
    while stages < 3 and warps > 1:
        warps -= 1
        stages = min(ring.STAGES, room // ring.stage_bytes(rows, warps))
    shared = 128 + ring.RING + stages * ring.stage_bytes(rows, warps)
    return Plan(kernel, grid, ring.threads(rows, warps), shared, (warps, stages, int(early)))


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


def plans(device: Device, rows: int, weight: PackedWeight, out: DeviceArray) -> dict[str, Plan]:
    """Every plan that computes a dense product, by the kernel's name."""
    found = [ring_plan(device, size, -(-rows // size) * weight.units) for size in RING_PRODUCTS]
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

    def choice(device: Device, rows: int, weight: PackedWeight, out: DeviceArray, *more: bool) -> Plan:
        if rows > 256:
            rows = -(-rows // 128) * 128
        key = (choose, device, rows, weight.form, *more)
        plan = _CHOSEN.get(key)
        if plan is None:
            plan = _CHOSEN[key] = choose(device, rows, weight, out, *more)
        return plan

    return choice


@chosen
def best_plan(device: Device, rows: int, weight: PackedWeight, out: DeviceArray) -> Plan:
    """The plan that runs."""
    sizes = [next(size for size in RING_PRODUCTS if size >= rows)] if rows <= 32 else [32, 64]
    ring_size = min(sizes, key=lambda size: ring_time(device, size, rows, weight))
    plan = ring_plan(device, ring_size, -(-rows // ring_size) * weight.units)
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
    plan = plan or best_plan(device, rows, weight, out)
    return bind_plan(device, plan, x, weight, out, mode, rows, extra=residual, dependent=dependent)


def linear(
    stream: Stream, x: DeviceArray, weight: PackedWeight, out: DeviceArray, residual: DeviceArray | None = None
) -> None:
    """Queue a product; see `bind_linear`."""
    bind_linear(Device.current(), x, weight, out, residual=residual).run(stream)
