"""The experts' products, grouped: each expert's weights meet all rows that chose it.

The routing lies on the device (written by route.py) and nothing is read back: pairs (row, expert) are sorted by expert;
`start` [experts + 1] int32 says where each expert's begin, and start[experts] how many pairs there are.
"""

from __future__ import annotations

from .decode_products import RING_PRODUCTS
from .driver import Device, DeviceArray, Launch
from .gemm_mma import MMA_PRODUCTS
from .gemm_wgmma import WGMMA_PRODUCTS
from .linear import Plan, best_wgmma, bind_plan, chosen, mma_plan, ring_plan, wgmma_fits, wgmma_plan
from .pack import PackedWeight
from .products import MAXIMUM_EXPERTS, SCALED, SWIGLU


def _units(weight: PackedWeight, pairs: int, rows: int) -> int:
    """About how many units of weights are read, `rows` pairs of an expert at a time."""
    return max(min(weight.experts, pairs), -(-pairs // rows)) * weight.units


def expert_plans(device: Device, pairs: int, weight: PackedWeight, out: DeviceArray, early: bool) -> dict[str, Plan]:
    """Every plan that computes a grouped product of up to `pairs` pairs, by the kernel's name."""
    found = [ring_plan(device, rows, _units(weight, pairs, rows), early) for rows in RING_PRODUCTS]
    if wgmma_fits(weight, out):
        found += [wgmma_plan(device, columns, _tiles(weight, pairs, 128), weight.units) for columns in WGMMA_PRODUCTS]
    found += [mma_plan(device, shape, _tiles(weight, pairs, shape[0]), weight.units) for shape in MMA_PRODUCTS]
    return {plan.kernel.name: plan for plan in found if plan is not None}


def _tiles(weight: PackedWeight, pairs: int, rows: int) -> int:
    """Most row tiles that pairs may need: every expert ends in a tile that may be almost empty."""
    return min(pairs, pairs // rows + weight.experts)


@chosen
def best_expert_plan(device: Device, pairs: int, weight: PackedWeight, out: DeviceArray, early: bool) -> Plan:
    """The plan that runs, by the mean of pairs an expert; a group of the ring has room for twice that."""
    mean = -(-pairs // weight.experts)
    if mean <= 16:
        rows = next(size for size in RING_PRODUCTS if size >= 2 * mean)
        plan = ring_plan(device, rows, _units(weight, pairs, rows), early)
        if plan is not None:
            return plan
    if wgmma_fits(weight, out):
        plan = best_wgmma(device, _tiles(weight, pairs, 128), weight)
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


def _check(weight: PackedWeight, out: DeviceArray, depth: int, gated: bool) -> None:
    if weight.gated != gated or depth != weight.depth or out.shape[-1] != weight.outputs or out.shape[0] == 0:
        raise ValueError(f"depth {depth} times experts {weight.outputs} x {weight.depth} into {out.shape}")
    if weight.experts > MAXIMUM_EXPERTS:
        raise ValueError(f"{weight.experts} experts; {MAXIMUM_EXPERTS} are the most")
