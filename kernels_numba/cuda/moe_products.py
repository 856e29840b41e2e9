"""The experts' products, grouped: each expert's weights meet all rows that chose it.

The routing lies on the device (written by route.py) and nothing is read back: pairs (row, expert) are sorted by expert;
`start` [experts + 1] int32 says where each expert's begin, and start[experts] how many pairs there are.
"""

from __future__ import annotations

from dataclasses import dataclass

from .decode_products import RING_EXPERTS, RING_PRODUCTS
from .decode_route import CHOICE_PAIRS, CHOICE_ROWS
from .driver import Device, DeviceArray, Launch
from .gemm_mma import MMA_PRODUCTS
from .gemm_wgmma import WGMMA_PRODUCTS
from .inputs import DeviceBatch
from .linear import (
    EXPERTS,
    FEW_EXPERTS,
    FEW_ROWS,
    Plan,
    best_wgmma,
    bind_plan,
    chosen,
    mma_plan,
    ring_plan,
    wgmma_fits,
    wgmma_plan,
)
from .pack import PackedWeight
from .products import MAXIMUM_EXPERTS, SCALED, SWIGLU
from .route import MOST_EXPERTS


def _units(weight: PackedWeight, pairs: int, rows: int) -> int:
    """About how many units of weights are read, `rows` pairs of an expert at a time."""
    return max(min(weight.experts, pairs), -(-pairs // rows)) * weight.units


def expert_plans(device: Device, pairs: int, weight: PackedWeight, out: DeviceArray, early: bool) -> dict[str, Plan]:
    """Every plan that computes a grouped product of up to `pairs` pairs, by the kernel's name."""
    mode = SWIGLU if weight.gated else SCALED
    found = [ring_plan(device, rows, _units(weight, pairs, rows), early, mode=mode) for rows in RING_PRODUCTS]
    if wgmma_fits(weight, out):
        found += [wgmma_plan(device, columns, _tiles(weight, pairs, 128), weight.units) for columns in WGMMA_PRODUCTS]
    found += [mma_plan(device, shape, _tiles(weight, pairs, shape[0]), weight.units) for shape in MMA_PRODUCTS]
    return {plan.kernel.name: plan for plan in found if plan is not None}


def _tiles(weight: PackedWeight, pairs: int, rows: int) -> int:
    """Most row tiles that pairs may need: every expert ends in a tile that may be almost empty."""
    return min(pairs, pairs // rows + weight.experts)


@chosen
def best_expert_plan(device: Device, pairs: int, weight: PackedWeight, out: DeviceArray, early: bool) -> Plan:
    """The plan that runs, by the mean of pairs an expert; a group of the ring has room for twice that, or 32."""
    mean = -(-pairs // weight.experts)
    if mean <= 20:
        rows = next(size for size in RING_PRODUCTS if size >= min(2 * mean, 32))
        mode = SWIGLU if weight.gated else SCALED
        plan = ring_plan(device, rows, _units(weight, pairs, rows), early, mode=mode)
        if plan is not None:
            return plan
    if wgmma_fits(weight, out):
        tiles = _tiles(weight, pairs, 128)  # up to half a tile an expert, narrow ones keep more reads on their way
        plan = best_wgmma(device, tiles, weight) if mean > 64 else wgmma_plan(device, 128, tiles, weight.units)
        if plan is not None:
            return plan
    shape = (16, 64) if mean <= 16 else (64, 64) if mean <= 96 else (128, 128)
    return mma_plan(device, shape, _tiles(weight, pairs, shape[0]), weight.units)


def bind_experts_up(
    device: Device,
    x: DeviceArray,
    weight: PackedWeight,
    start: DeviceArray,
    pair_row: DeviceArray,
    act: DeviceArray,
    *,
    plan: Plan | None = None,
    dependent: bool = False,
) -> Launch:
    """act[p] = r(r(silu(r(w1 x))) * r(w3 x)) for x = x[pair_row[p]] and pair p's expert; act [pairs, features] bf16."""
    _check(weight, act, x.shape[-1], gated=True)
    plan = plan or best_expert_plan(device, act.shape[0], weight, act, False)
    return bind_plan(
        device, plan, x, weight, act, SWIGLU, act.shape[0], start=start, gather=pair_row, dependent=dependent
    )  # fmt: skip


def bind_experts_down(
    device: Device,
    act: DeviceArray,
    weight: PackedWeight,
    start: DeviceArray,
    pair_weight: DeviceArray,
    y: DeviceArray,
    *,
    plan: Plan | None = None,
    dependent: bool = False,
) -> Launch:
    """y[p] = r(pair_weight[p] * r(w2 act[p])); y [pairs, hidden] bf16, pair_weight [pairs] float32.

    dependent: the kernel queued just before must be the one of `bind_experts_up` (`start` is read before it ends).
    """
    _check(weight, y, act.shape[-1], gated=False)
    plan = plan or best_expert_plan(device, act.shape[0], weight, y, True)
    return bind_plan(
        device, plan, act, weight, y, SCALED, act.shape[0], extra=pair_weight, start=start, dependent=dependent
    )


@dataclass(frozen=True, slots=True)
class Choice:
    """What the experts of a decode round's rows are chosen from: the router's logits [rows, 64] float32, and how."""

    logits: DeviceArray
    bias: DeviceArray | None
    top_k: int
    normalize: bool
    scaling: float
    place: DeviceArray
    """[rows, top_k] int32, written by the first product: the pair of each choice"""
    batch: DeviceBatch


def choice_plans(device: Device, rows: int, up: PackedWeight, down: PackedWeight, top_k: int) -> list[Plan] | None:
    """The plans of both products where each block chooses and groups the rows' experts itself; None: it can't."""
    pairs = rows * top_k
    size = next((size for size in RING_EXPERTS if size >= 2 * -(-pairs // up.experts)), None)
    if size is None or rows > CHOICE_ROWS or pairs > CHOICE_PAIRS or up.experts > MOST_EXPERTS:
        return None
    kind = FEW_EXPERTS if rows <= FEW_ROWS else EXPERTS
    found = [
        ring_plan(device, size, _units(weight, pairs, size), early, mode=mode, kind=kind)
        for weight, early, mode in ((up, False, SWIGLU), (down, True, SCALED))
    ]
    return None if None in found else found  # type: ignore[return-value]


def bind_choice(
    device: Device,
    plan: Plan,
    x: DeviceArray,
    weight: PackedWeight,
    out: DeviceArray,
    choice: Choice,
    *,
    dependent: bool = False,
) -> Launch:
    """As `bind_experts_up` (gated weights, x [rows, hidden]) or `bind_experts_down` (x [pairs, features]) of the chosen
    experts. dependent: the kernel before the first must have written the logits, the second must follow the first."""
    mode = SWIGLU if weight.gated else SCALED
    _check(weight, out, x.shape[-1], weight.gated)
    batch = choice.batch
    return device.function(plan.kernel).bind(
        plan.grid,
        plan.threads,
        [
            x, x.shape[-1] * 2, batch.rows, weight.depth, weight.data, weight.expert_bytes, weight.units,
            out, out.shape[-1], weight.outputs, mode, weight.experts, *plan.tail, choice.logits, choice.bias,
            choice.top_k, int(choice.normalize), choice.scaling, choice.place,
        ],
        shared=plan.shared,
        dependent=dependent,
    )  # fmt: skip


def _check(weight: PackedWeight, out: DeviceArray, depth: int, gated: bool) -> None:
    if weight.gated != gated or depth != weight.depth or out.shape[-1] != weight.outputs or out.shape[0] == 0:
        raise ValueError(f"depth {depth} times experts {weight.outputs} x {weight.depth} into {out.shape}")
    if weight.experts > MAXIMUM_EXPERTS:
        raise ValueError(f"{weight.experts} experts; {MAXIMUM_EXPERTS} are the most")
