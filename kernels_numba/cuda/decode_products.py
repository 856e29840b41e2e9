"""Products with few rows, at the speed of memory (sm_90 and newer).

One block a multiprocessor, three roles. The weight warp streams the block's units of weights through a ring of shared
memory by bulk copies; it needs nothing of the kernel before and so begins early. The row warps bring the same k of the
activations by cp.async. A consumer warp owns some rows of one unit (16 outputs a row) of a round and adds in ascending
k, with the next fragments on their way. With experts, a group is up to ROWS rows of one, and a round is of one group.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import cuda

from .compiler import BULK, Kernel, kernel
from .decode_parts import (
    SUM_DEPTH,
    SUM_THREADS,
    advance,
    conv_inputs,
    conv_output,
    fetch_8,
    fetch_16,
    last_step_8,
    last_step_16,
    multiply_8,
    multiply_16,
    pairs_8,
    pairs_16,
    round_of,
    sum_and_norm,
)
from .decode_route import CHOICE_BYTES, choose_and_group, no_choices, own_values, pair_row, pair_weight
from .products import (
    PLAIN,
    RESIDUAL,
    SCALED,
    SWIGLU,
    TABLE_BYTES,
    add_pair,
    group_table,
    residual_pair,
    row_weight,
    scale_pair,
    store_pair,
    swiglu_pair,
    table_groups,
    with_globals,
)
from .ptx import (
    async_fence,
    barrier_arrive,
    barrier_expect,
    barrier_init,
    barrier_init_fence,
    barrier_test,
    barrier_wait,
    bulk_copy_hinted,
    bulk_prefetch,
    cp_async_16,
    cp_async_arrive,
    dependency_wait,
    dependents_start,
    divide,
    evict_first,
    group_sync,
    load_fresh,
    shared_address,
    shared_store_32,
    zeros,
)
from .unroll import registers, static, unrolled

STAGES = 32
"""Most stages of the ring."""
CHUNK = 128
"""k of a stage."""
UNIT_CHUNK = 16 * CHUNK * 2
X_PITCH = CHUNK * 2 + 16  # shared memory from row to row of activations; 16 more, so that ldmatrix meets no bank twice
RING = 512 + TABLE_BYTES + 496  # barriers, group table, then the stages, or first:
CHOICE_RING = RING + CHOICE_BYTES  # what a block chose (see decode_route.py)
FIRST, SECOND = 118016, 105472
"""Shared memory of a block. A multiprocessor holds one kernel with FIRST (never two blocks of one, which would leave
another multiprocessor idle) and beside it one with SECOND: what follows one another takes them in turn, so that the
next one's weights can already come in."""
SUM_BYTES = 2 * SUM_DEPTH + 4 * SUM_THREADS
WIDE = 224 << 10
"""Shared memory with so many rows that nothing fits beside it."""
SHAPES = {8: (8, 1, 1), 16: (8, 1, 1), 32: (8, 2, 2), 64: (4, 4, 4)}
"""By the most rows of a group: units of a round at most, consumer warps that share the rows of a unit, row warps."""

ROWS = SHIFT = HALVES = SPLIT = X_WARPS = X_COPIES = CHOICE = CONV = SUM = START = LINE = (
    0  # of each version, put in by `unrolled`
)
zero = fetch = multiply = last_step = pairs = None  # the same, put in by _make

u32, i32, u64 = np.uint32, np.int32, np.uint64


def stage_bytes(rows: int, warps: int) -> int:
    return warps * UNIT_CHUNK + rows * X_PITCH


def _ring(
    x, x_row, rows, depth, w, expert_bytes, units, out, out_row, columns, mode, extra, start, experts, gather, warps,
    stages, early, late, logits, bias, row_segment, seg_slot, seg_start, positions, top_k, normalize, scaling, places,
    filters, state, summands, residual, norm_weight, eps, sums,
):  # fmt: skip
    base = u32(u32(shared_address(cuda.shared.array(0, np.uint8)) + u32(127)) & u32(0xFFFFFF80))
    tid = i32(cuda.threadIdx.x)
    lane = i32(tid & i32(31))
    warp = i32(tid >> i32(5))
    consumers = i32(warps * i32(SPLIT))
    table = u32(base + u32(512))
    area = u32(base + u32(RING))
    ring = u32(base + u32(START))
    stage_size = u32(u32(warps) * u32(UNIT_CHUNK) + u32(ROWS * X_PITCH))
    arrivals = u32(1 + 32 * X_WARPS)
    if SUM == 1:
        stage_size, arrivals = u32(u32(warps) * u32(UNIT_CHUNK)), u32(1)
    if tid == i32(0):
        for s in range(stages):
            barrier_init(u32(base + u32(s) * u32(16)), arrivals)
            barrier_init(u32(base + u32(s) * u32(16) + u32(8)), u32(consumers))
        barrier_init_fence()
        async_fence()
    if CHOICE == 1:
        bias_low, bias_high = own_values(bias, lane, experts, np.float32(0.0))
        no_choices(area, tid, i32(cuda.blockDim.x))
        cuda.syncthreads()
    if early == i32(0):  # which experts' weights are read is not known before
        dependency_wait()
    if late == i32(0):
        dependents_start()
    groups = i32(i32(rows + i32(ROWS - 1)) >> i32(SHIFT))
    grouped = start != u64(0)
    if CHOICE == 1:
        grouped = True
        if mode != SWIGLU or i32(cuda.blockIdx.x) != i32(0):
            places = u64(0)
        choose_and_group(
            logits, bias, bias_low, bias_high, rows, experts, top_k, normalize, scaling, places, i32(SHIFT), table,
            area, lane, warp, i32(i32(cuda.blockDim.x) >> i32(5)),
        )  # fmt: skip
        groups = table_groups(table, experts)
    elif grouped:
        if warp == i32(0):
            group_table(start, experts, i32(SHIFT), table, lane)
        cuda.syncthreads()
        groups = table_groups(table, experts)
    else:
        cuda.syncthreads()
    most = i32(warps)  # units of a round; with a convolution one of B's, and those of C and x of the same channels
    if CONV == 1:
        most = i32(1)
    total = u32(u32(groups) * u32(units))
    grid = u32(cuda.gridDim.x)
    unit = i32(divide(u32(total * u32(cuda.blockIdx.x)), grid))
    stop = i32(divide(u32(total * u32(u32(cuda.blockIdx.x) + u32(1))), grid))
    if grouped and groups > i32(0) and u32(u32(groups) * u32(8)) <= grid:
        # few groups: whole blocks for each, so that no block has a second, short round
        group = i32(divide(u32(u32(cuda.blockIdx.x) * u32(groups)), grid))
        begin = i32(divide(u32(u32(group) * grid + u32(groups) - u32(1)), u32(groups)))
        count = i32(i32(divide(u32(u32(group + i32(1)) * grid + u32(groups) - u32(1)), u32(groups))) - begin)
        at = u32(i32(i32(cuda.blockIdx.x) - begin))
        unit = i32(i32(group * units) + i32(divide(u32(u32(units) * at), u32(count))))
        stop = i32(i32(group * units) + i32(divide(u32(u32(units) * u32(at + u32(1))), u32(count))))
    chunks = i32(i32(depth + i32(CHUNK - 1)) // i32(CHUNK))
    unit_bytes = i32(i32(i32(depth + i32(63)) // i32(64)) * i32(2048))
    slot = i32(0)
    parity = u32(0)
    if warp > consumers:  # the producers find the ring empty at first
        parity = u32(1)
    if warp == consumers:
        parity = u32(1)
        policy = evict_first()
        ahead = i32(-1)
        if early >= i32(2) and i32(stop - unit) <= most:
            ahead = stages  # once the ring is full, the rest of the only round comes to the second-level cache
        left = i32(i32(i32(divide(u32(i32(stop - unit) + most - i32(1)), u32(most))) * chunks) - late)
        if left <= i32(0):
            dependents_start()
        while unit < stop:
            taken, tile, expert, _, _ = round_of(unit, stop, most, units, rows, i32(ROWS), grouped, table, experts)
            copies, number = taken, i32(tile + lane)
            if CONV == 1:
                copies, number = i32(3), i32(tile + i32(lane * units))
            source = u64(w + u64(expert) * u64(expert_bytes) + u64(number) * u64(unit_bytes))
            for c in range(chunks):
                part = min(i32(UNIT_CHUNK), i32(unit_bytes - i32(c * UNIT_CHUNK)))
                full = u32(base + u32(slot) * u32(16))
                if i32(c) == ahead:
                    if early == i32(3):  # the kernel before may need memory still
                        dependency_wait()
                    if lane < copies:
                        bulk_prefetch(source, u32(unit_bytes - i32(c * UNIT_CHUNK)))
                barrier_wait(u32(full + u32(8)), parity)
                if lane == i32(0):
                    barrier_expect(full, u32(copies * part))
                cuda.syncwarp()
                if lane < copies:
                    at = u32(ring + u32(slot) * stage_size + u32(lane) * u32(UNIT_CHUNK))
                    bulk_copy_hinted(at, source, u32(part), full, policy)
                source = u64(source + u64(UNIT_CHUNK))
                slot, parity = advance(slot, parity, stages)
                left = i32(left - i32(1))
                if left == i32(0):  # the next kernel's weights take little from this one's now
                    dependents_start()
            unit = i32(unit + taken)
        dependents_start()
        return
    if SUM == 1:
        sum_and_norm(
            summands, residual, norm_weight, eps, depth, top_k, sums, u32(base + u32(LINE)), consumers, warp, lane
        )
        if warp > consumers:
            return
    elif CONV == 0 or warp > consumers:
        dependency_wait()
    if warp > consumers:
        # row 2 i + (lane / 16) of this warp's share, 16-byte piece lane % 16 of a chunk
        mine = i32(i32(warp - consumers - i32(1)) * i32(2 * X_COPIES) + i32(lane >> i32(4)))
        piece = i32(lane & i32(15))
        to = u32(u32(warps) * u32(UNIT_CHUNK) + u32(mine) * u32(X_PITCH) + u32(piece) * u32(16))
        while unit < stop:
            taken, _, _, first, last = round_of(unit, stop, most, units, rows, i32(ROWS), grouped, table, experts)
            source = registers(X_COPIES, u64(0))
            for i in static(X_COPIES):
                row = i32(first + mine + i32(2 * i))
                if row < last:
                    if CHOICE == 1:
                        if mode == SWIGLU:
                            row = pair_row(area, row)
                    elif gather != u64(0):
                        row = load_fresh(u64(gather + u64(row) * u64(4)))
                    source[i] = u64(x + u64(row) * u64(x_row) + u64(i32(piece * i32(16))))
            for c in range(chunks):
                full = u32(base + u32(slot) * u32(16))
                barrier_wait(u32(full + u32(8)), parity)
                if i32(i32(c * CHUNK) + i32(piece * i32(8))) < depth:
                    at = u32(ring + u32(slot) * stage_size + to)
                    for i in static(X_COPIES):
                        if source[i] != u64(0):
                            cp_async_16(u32(at + u32(2 * i * X_PITCH)), u64(source[i] + u64(c * CHUNK * 2)))
                cp_async_arrive(full)
                slot, parity = advance(slot, parity, stages)
            unit = i32(unit + taken)
        return
    if ROWS == 8:
        # weights are the 16-row operand: row l % 16, 16-byte piece l / 16 of the k step; swizzled by the row
        wo = u32(u32(lane & i32(15)) * u32(128) + u32(u32(lane >> i32(4)) ^ u32(lane & i32(7))) * u32(16))
        # activations are the 8-row one: row l % 8, piece l / 8 of two k steps
        xo = u32(u32(lane & i32(7)) * u32(X_PITCH) + u32(lane >> i32(3)) * u32(16))
        here = i32(i32(i32(lane & i32(3)) * i32(2)) + i32(i32(lane >> i32(2)) & i32(1)))
        pair = i32(i32(lane >> i32(3)) * i32(2))
    else:
        # weights are the 8-row operand, twice: row l % 8 of half l / 16, piece (l / 8) % 2
        wo = u32(u32(lane >> i32(4)) * u32(1024) + u32(lane & i32(7)) * u32(128))
        wo = u32(wo + u32(u32(u32(lane >> i32(3)) & u32(1)) ^ u32(lane & i32(7))) * u32(16))
        # activations are the 16-row one: row l % 16, piece l / 16
        xo = u32(u32(lane & i32(15)) * u32(X_PITCH) + u32(lane >> i32(4)) * u32(16))
        here = i32(lane >> i32(2))
        pair = i32(i32(lane & i32(3)) * i32(2))
    place = i32(warp // i32(SPLIT))
    share = i32(i32(warp - i32(place * i32(SPLIT))) * i32(16))  # this warp's first row
    here = i32(here + share)
    wo = u32(wo + u32(place) * u32(UNIT_CHUNK))
    xo = u32(xo + u32(warps) * u32(UNIT_CHUNK) + u32(share) * u32(X_PITCH))
    if SUM == 1:  # the only row, all of it; the other rows of the fragments are the same
        xo = u32(u32(base + u32(LINE)) + u32(lane >> i32(3)) * u32(16))
    last_chunk = i32(chunks - i32(1))
    rest = i32(depth - i32(last_chunk * i32(CHUNK)))
    while unit < stop:
        taken, tile, _, first, last = round_of(unit, stop, most, units, rows, i32(ROWS), grouped, table, experts)
        unit = i32(unit + taken)
        if CONV == 1:
            taken = i32(3)
            given = registers(16, u32(0))
            for i in static(2):
                item = i32(tid + i32(i32(i) * i32(consumers * i32(32))))
                if item < i32(rows * i32(8)):
                    (
                        given[8 * i], given[8 * i + 1], given[8 * i + 2], given[8 * i + 3], given[8 * i + 4],
                        given[8 * i + 5], given[8 * i + 6], given[8 * i + 7],
                    ) = conv_inputs(
                        item, tile, units, filters, state, row_segment, seg_slot, seg_start, positions
                    )  # fmt: skip
        if place >= taken:  # nothing to do but to keep step
            for _ in range(chunks):
                barrier_wait(u32(base + u32(slot) * u32(16)), parity)
                if lane == i32(0):
                    barrier_arrive(u32(base + u32(slot) * u32(16) + u32(8)))
                slot, parity = advance(slot, parity, stages)
            continue
        mine = i32(tile + place)
        kept = registers(4, u32(0))
        factor = registers(2, np.float32(0.0))
        for h in static(HALVES):  # what the end needs is asked for early
            row = i32(first + i32(h * 8) + here)
            if row < last and mode == SCALED:
                if CHOICE == 1:
                    factor[h] = pair_weight(area, row)
                else:
                    factor[h] = row_weight(extra, row)
            if row < last and mode == RESIDUAL:
                for t in static(2):
                    column = i32(mine * i32(16) + i32(t * 8) + pair)
                    if column < columns:
                        kept[2 * h + t] = residual_pair(extra, out_row, columns, row, column)
        acc = zero()
        full = u32(base + u32(slot) * u32(16))
        barrier_wait(full, parity)
        wa = u32(ring + u32(slot) * stage_size + wo)
        xa = u32(ring + u32(slot) * stage_size + xo)
        if SUM == 1:
            xa = xo
        now = fetch(wa, xa, 0)
        for _ in range(last_chunk):
            # two k steps are fetched while two others are multiplied; what else is to be done has the time that takes
            freed = u32(full + u32(8))
            slot, parity = advance(slot, parity, stages)
            full = u32(base + u32(slot) * u32(16))
            then = fetch(wa, xa, 2)
            acc = multiply(acc, now)
            landed = barrier_test(full, parity)  # asked early: the answer takes as long as some products
            now = fetch(wa, xa, 4)
            acc = multiply(acc, then)
            then = fetch(wa, xa, 6)
            acc = multiply(acc, now)
            if landed == u32(0):
                barrier_wait(full, parity)
            wa = u32(ring + u32(slot) * stage_size + wo)
            xa = u32(xa + u32(CHUNK * 2)) if SUM == 1 else u32(ring + u32(slot) * stage_size + xo)
            now = fetch(wa, xa, 0)
            acc = multiply(acc, then)
            cuda.syncwarp()
            if lane == i32(0):
                barrier_arrive(freed)
        if rest == i32(CHUNK):
            then = fetch(wa, xa, 2)
            acc = multiply(acc, now)
            now = fetch(wa, xa, 4)
            acc = multiply(acc, then)
            then = fetch(wa, xa, 6)
            acc = multiply(multiply(acc, now), then)
        else:
            for s in range(i32(rest >> i32(4))):
                acc = last_step(acc, wa, xa, s)
        cuda.syncwarp()
        if lane == i32(0):
            barrier_arrive(u32(full + u32(8)))
        slot, parity = advance(slot, parity, stages)
        results = pairs(acc, lane)
        if CONV == 1:
            # this warp's rows of B, C or x, then everyone's channels of all three
            for h in static(HALVES):
                to = u32(area + u32(i32(i32(i32(place * i32(ROWS)) + here) + i32(h * 8))) * u32(32))
                to = u32(to + u32(pair) * u32(2))
                shared_store_32(to, results[2 * h])
                shared_store_32(u32(to + u32(16)), results[2 * h + 1])
            group_sync(u32(1), u32(consumers * i32(32)))
            for i in static(2):
                item = i32(tid + i32(i32(i) * i32(consumers * i32(32))))
                if item < i32(rows * i32(8)):
                    conv_output(
                        item, tile, units, i32(ROWS), area, given[8 * i], given[8 * i + 1], given[8 * i + 2],
                        given[8 * i + 3], given[8 * i + 4], given[8 * i + 5], given[8 * i + 6], given[8 * i + 7],
                        state, out,
                    )  # fmt: skip
            group_sync(u32(1), u32(consumers * i32(32)))
            continue
        for h in static(HALVES):
            row = i32(first + i32(h * 8) + here)
            if row < last:
                low, high = results[2 * h], results[2 * h + 1]
                if mode == SWIGLU:
                    column = i32(mine * i32(8) + pair)
                    store_pair(out, out_row, columns, mode, row, column, swiglu_pair(low, high))
                else:
                    if mode == RESIDUAL:
                        low, high = add_pair(low, kept[2 * h]), add_pair(high, kept[2 * h + 1])
                    elif mode == SCALED:
                        low, high = scale_pair(low, factor[h]), scale_pair(high, factor[h])
                    column = i32(mine * i32(16) + pair)
                    store_pair(out, out_row, columns, mode, row, column, low)
                    store_pair(out, out_row, columns, mode, row, i32(column + i32(8)), high)


COMMON = "u64 i32 i32 i32 u64 i64 i32 u64 i32 i32 i32"
ARGUMENTS = f"{COMMON} u64 u64 i32 u64 i32 i32 i32 i32"
CHOICE_ARGUMENTS = f"{COMMON} i32 i32 i32 i32 i32 u64 u64 i32 i32 f32 u64"
CONV_ARGUMENTS = "u64 i32 i32 i32 u64 i32 u64 i32 i32 i32 u64 u64 u64 u64 u64 u64"
SUM_ARGUMENTS = "i32 u64 i32 u64 i32 i32 i32 i32 i32 i32 u64 u64 u64 f32 u64"
SUM_CONV_ARGUMENTS = "i32 u64 i32 u64 i32 i32 i32 u64 u64 u64 u64 i32 u64 u64 u64 u64 u64 f32 u64"
_CHOOSES = ("logits", "bias", "normalize", "scaling", "places")
_GROUPED = ("extra", "start", "gather")
_CONVOLVES = ("seg_start", "positions", "filters", "state")
_SUMS = ("summands", "residual", "norm_weight", "eps", "sums")


def threads(rows: int, warps: int) -> int:
    """Threads of a block: consumers of `warps` units a round, the weight warp, the row warps."""
    _, split, row_warps = SHAPES[rows]
    return 32 * (warps * split + 1 + row_warps)


def sum_stage_bytes(rows: int, warps: int) -> int:
    """`stage_bytes` where the only row lies apart."""
    return warps * UNIT_CHUNK


def sum_threads(rows: int, warps: int) -> int:
    """`threads` where all warps but the weights' sum and norm the row."""
    return SUM_THREADS + 32


def conv_ring(rows: int) -> int:
    """Where the stages begin behind what the three parts of a unit's channels exchange."""
    return RING + 3 * rows * 32


def _make(size: int, name: str, arguments: str, begin: int, **known: Any) -> Kernel:
    """A version of `_ring` for groups of up to `size` rows; parameters that are `known` are dropped."""
    most, split, row_warps = SHAPES[size]
    given = set(known)
    known = {"CHOICE": 0, "CONV": 0, "SUM": 0, "LINE": 0} | known | {
        "ROWS": size, "SHIFT": size.bit_length() - 1, "HALVES": 1 if size == 8 else 2, "SPLIT": split,
        "X_WARPS": row_warps, "X_COPIES": size // 2 // row_warps, "CHUNK": CHUNK, "UNIT_CHUNK": UNIT_CHUNK,
        "X_PITCH": X_PITCH, "RING": RING, "START": begin,
    }  # fmt: skip
    few = size == 8
    function = with_globals(
        unrolled(_ring, **known),
        zero=zeros(4 if few else 8),
        fetch=fetch_8 if few else fetch_16,
        multiply=multiply_8 if few else multiply_16,
        last_step=last_step_8 if few else last_step_16,
        pairs=pairs_8 if few else pairs_16,
    )
    register = kernel(
        arguments,
        threads=threads(size, most),
        dynamic_shared=FIRST if size <= 32 or name == "ring_conv" else WIDE,
        architectures=BULK,
        name=name if "SUM" in given else f"{name}_{size}",
    )
    return register(function)


def _without(*groups: tuple[str, ...]) -> dict[str, int]:
    return {name: 0 for group in groups for name in group}


RING_PRODUCTS = {
    rows: _make(
        rows, "ring_product", ARGUMENTS, RING, row_segment=0, seg_slot=0, top_k=0,
        **_without(_CHOOSES, _CONVOLVES, _SUMS),
    )
    for rows in SHAPES
}  # fmt: skip
"""By the most rows of a group."""

RING_EXPERTS = {
    rows: _make(
        rows, "ring_experts", CHOICE_ARGUMENTS, CHOICE_RING, CHOICE=1, row_segment=0, seg_slot=0,
        **_without(_GROUPED, _CONVOLVES, _SUMS),
    )
    for rows in (8, 16)
}  # fmt: skip
"""Experts' products of a decode round: each block chooses and groups for itself, from the router's logits."""

_CONV = {"CONV": 1, "mode": PLAIN, "experts": 1, "expert_bytes": 0, "out_row": 0, "columns": 0}

RING_CONVS = {
    rows: _make(
        rows, "ring_conv", CONV_ARGUMENTS, conv_ring(rows), top_k=0, early=3 if rows <= 16 else 2, **_CONV,
        **_without(_GROUPED, _CHOOSES, _SUMS),
    )
    for rows in SHAPES
}  # fmt: skip
"""A convolution layer's first product and its short convolution, for up to so many rows: units of B, C and x that are
the same channels meet in one block."""

_ONE_ROW = {"SUM": 1, "rows": 1, "x": 0, "x_row": 0, "early": 2}

RING_SUMS = {
    1: _make(
        8, "ring_sum", SUM_ARGUMENTS, RING + SUM_BYTES, LINE=RING, mode=PLAIN, experts=1, expert_bytes=0,
        row_segment=0, seg_slot=0, **_ONE_ROW, **_without(_GROUPED, _CHOOSES, _CONVOLVES),
    )
}  # fmt: skip
"""A product of one row, behind the sum over experts and the norm, which each block computes for itself."""

RING_SUM_CONVS = {
    1: _make(
        8, "ring_sum_conv", SUM_CONV_ARGUMENTS, conv_ring(8) + SUM_BYTES, LINE=conv_ring(8), **_CONV, **_ONE_ROW,
        **_without(_GROUPED, _CHOOSES),
    )
}  # fmt: skip
"""The same before a convolution layer."""
