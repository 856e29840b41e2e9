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
from .functions import pack
from .products import (
    RESIDUAL,
    SCALED,
    SWIGLU,
    TABLE_BYTES,
    add_pair,
    find_expert,
    group_table,
    residual_pair,
    row_weight,
    scale_pair,
    store_pair,
    swiglu_pair,
    table_groups,
    table_start,
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
    cp_async_16,
    cp_async_arrive,
    dependency_wait,
    dependents_start,
    divide,
    evict_first,
    ldmatrix_x2,
    ldmatrix_x4,
    load_fresh,
    mma,
    shared_address,
    zeros,
)
from .scalar import device, shuffle_xor
from .unroll import registers, static, unrolled

STAGES = 32
"""Most stages of the ring."""
CHUNK = 128
"""k of a stage."""
UNIT_CHUNK = 16 * CHUNK * 2
X_PITCH = CHUNK * 2 + 16  # shared memory from row to row of activations; 16 more, so that ldmatrix meets no bank twice
RING = 512 + TABLE_BYTES + 496  # barriers, group table, then the stages
BUDGET = 112 << 10
"""Shared memory of a block: two kernels fit a multiprocessor, so the next one's weights can already come in."""
SHAPES = {8: (8, 1, 1), 16: (8, 1, 1), 32: (8, 2, 2), 64: (4, 4, 4)}
"""By the most rows of a group: units of a round at most, consumer warps that share the rows of a unit, row warps."""

ROWS = SHIFT = HALVES = SPLIT = X_WARPS = X_COPIES = 0  # of each version, put in by `unrolled`
zero = fetch = multiply = last_step = pairs = None  # the same, put in by _make

u32, i32, u64 = np.uint32, np.int32, np.uint64


def stage_bytes(rows: int, warps: int) -> int:
    return warps * UNIT_CHUNK + rows * X_PITCH


@device
def advance(slot, parity, stages):
    """The next slot of the ring and the parity of its phase."""
    slot = i32(slot + i32(1))
    if slot == stages:
        return i32(0), u32(parity ^ u32(1))
    return slot, parity


@device
def round_of(unit, stop, most, units, rows, group_rows, start, table, experts):
    """The round that begins at `unit`: units taken, the first one's tile, the expert, and its rows [first, last)."""
    group = i32(divide(u32(unit), u32(units)))
    tile = i32(unit - i32(group * units))
    taken = min(most, i32(stop - unit), i32(units - tile))
    if start == u64(0):
        return taken, tile, i32(0), i32(group * group_rows), rows
    expert = find_expert(table, experts, group, i32(1))
    first = i32(table_start(table, expert) + i32(i32(group - table_groups(table, expert)) * group_rows))
    return taken, tile, expert, first, table_start(table, i32(expert + i32(1)))


@device
def weights_at(wa, step):
    """Fragments of a unit's 16 rows in one k step of a stage: its swizzled address."""
    return ldmatrix_x4(u32(u32(wa ^ u32(u32(step & 3) * u32(32))) + u32(u32(step >> 2) * u32(2048))))


@device
def fetch_8(wa, xa, step):
    """Fragments of two k steps, weights as the 16-row operand."""
    return weights_at(wa, step), weights_at(wa, step + 1), ldmatrix_x4(u32(xa + u32(u32(step) * u32(32))))


@device
def multiply_one_8(acc, w, x0, x1):
    return mma(w[0], w[1], w[2], w[3], x0, x1, acc[0], acc[1], acc[2], acc[3])


@device
def multiply_8(acc, f):
    w0, w1, x = f
    return multiply_one_8(multiply_one_8(acc, w0, x[0], x[1]), w1, x[2], x[3])


@device
def fetch_16(wa, xa, step):
    """Fragments of two k steps, activations as the 16-row operand and the two halves of a unit as 8-row ones."""
    x0 = ldmatrix_x4(u32(xa + u32(u32(step) * u32(32))))
    x1 = ldmatrix_x4(u32(xa + u32(u32(step) * u32(32)) + u32(32)))
    return weights_at(wa, step), weights_at(wa, step + 1), x0, x1


@device
def multiply_step_16(acc, w, x):
    a = mma(x[0], x[1], x[2], x[3], w[0], w[1], acc[0], acc[1], acc[2], acc[3])
    b = mma(x[0], x[1], x[2], x[3], w[2], w[3], acc[4], acc[5], acc[6], acc[7])
    return a[0], a[1], a[2], a[3], b[0], b[1], b[2], b[3]


@device
def multiply_16(acc, f):
    return multiply_step_16(multiply_step_16(acc, f[0], f[2]), f[1], f[3])


@device
def last_step_8(acc, wa, xa, step):
    x = ldmatrix_x2(u32(xa + u32(u32(step) * u32(32))))
    return multiply_one_8(acc, weights_at(wa, step), x[0], x[1])


@device
def last_step_16(acc, wa, xa, step):
    return multiply_step_16(acc, weights_at(wa, step), ldmatrix_x4(u32(xa + u32(u32(step) * u32(32)))))


@device
def pairs_8(acc, lane):
    """A thread holds outputs l / 4 and l / 4 + 8 of two rows; its neighbour gives the other half of one row's pairs."""
    odd = i32(lane & i32(4)) != i32(0)
    p = shuffle_xor(acc[0] if odd else acc[1], i32(4))
    q = shuffle_xor(acc[2] if odd else acc[3], i32(4))
    return (pack(p, acc[1]), pack(q, acc[3])) if odd else (pack(acc[0], p), pack(acc[2], q))


@device
def pairs_16(acc, lane):
    """The pairs of row l / 4 in columns 0 to 7 and 8 to 15, then those of row l / 4 + 8."""
    return pack(acc[0], acc[1]), pack(acc[4], acc[5]), pack(acc[2], acc[3]), pack(acc[6], acc[7])


def _ring(
    x, x_row, rows, depth, w, expert_bytes, units, out, out_row, columns, mode, extra, start, experts, gather, warps,
    stages, early,
):  # fmt: skip
    base = u32(u32(shared_address(cuda.shared.array(0, np.uint8)) + u32(127)) & u32(0xFFFFFF80))
    tid = i32(cuda.threadIdx.x)
    lane = i32(tid & i32(31))
    warp = i32(tid >> i32(5))
    consumers = i32(warps * i32(SPLIT))
    table = u32(base + u32(512))
    ring = u32(base + u32(RING))
    stage_size = u32(u32(warps) * u32(UNIT_CHUNK) + u32(ROWS * X_PITCH))
    if tid == i32(0):
        for s in range(stages):
            barrier_init(u32(base + u32(s) * u32(16)), u32(1 + 32 * X_WARPS))
            barrier_init(u32(base + u32(s) * u32(16) + u32(8)), u32(consumers))
        barrier_init_fence()
        async_fence()
    if early == i32(0):  # the group table, and so the weights' addresses, come from the kernel before
        dependency_wait()
    dependents_start()
    groups = i32(i32(rows + i32(ROWS - 1)) >> i32(SHIFT))
    if start != u64(0):
        if warp == i32(0):
            group_table(start, experts, i32(SHIFT), table, lane)
        cuda.syncthreads()
        groups = table_groups(table, experts)
    else:
        cuda.syncthreads()
    total = u32(u32(groups) * u32(units))
    grid = u32(cuda.gridDim.x)
    unit = i32(divide(u32(total * u32(cuda.blockIdx.x)), grid))
    stop = i32(divide(u32(total * u32(u32(cuda.blockIdx.x) + u32(1))), grid))
    if start != u64(0) and groups > i32(0) and u32(u32(groups) * u32(8)) <= grid:
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
        while unit < stop:
            taken, tile, expert, _, _ = round_of(unit, stop, warps, units, rows, i32(ROWS), start, table, experts)
            source = u64(w + u64(expert) * u64(expert_bytes) + u64(i32(tile + lane)) * u64(unit_bytes))
            for c in range(chunks):
                part = min(i32(UNIT_CHUNK), i32(unit_bytes - i32(c * UNIT_CHUNK)))
                full = u32(base + u32(slot) * u32(16))
                barrier_wait(u32(full + u32(8)), parity)
                if lane == i32(0):
                    barrier_expect(full, u32(taken * part))
                cuda.syncwarp()
                if lane < taken:
                    at = u32(ring + u32(slot) * stage_size + u32(lane) * u32(UNIT_CHUNK))
                    bulk_copy_hinted(at, source, u32(part), full, policy)
                source = u64(source + u64(UNIT_CHUNK))
                slot, parity = advance(slot, parity, stages)
            unit = i32(unit + taken)
        return
    dependency_wait()
    if warp > consumers:
        # row 2 i + (lane / 16) of this warp's share, 16-byte piece lane % 16 of a chunk
        mine = i32(i32(warp - consumers - i32(1)) * i32(2 * X_COPIES) + i32(lane >> i32(4)))
        piece = i32(lane & i32(15))
        to = u32(u32(warps) * u32(UNIT_CHUNK) + u32(mine) * u32(X_PITCH) + u32(piece) * u32(16))
        while unit < stop:
            taken, _, _, first, last = round_of(unit, stop, warps, units, rows, i32(ROWS), start, table, experts)
            source = registers(X_COPIES, u64(0))
            for i in static(X_COPIES):
                row = i32(first + mine + i32(2 * i))
                if row < last:
                    if gather != u64(0):
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
    whole = i32(depth // i32(CHUNK))
    rest = i32(i32(depth - i32(whole * i32(CHUNK))) >> i32(4))
    while unit < stop:
        taken, tile, _, first, last = round_of(unit, stop, warps, units, rows, i32(ROWS), start, table, experts)
        unit = i32(unit + taken)
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
        now = fetch(wa, xa, 0)
        for c in range(whole):
            # two k steps at a time: the next two are fetched before these are multiplied
            freed = u32(full + u32(8))
            slot, parity = advance(slot, parity, stages)
            full = u32(base + u32(slot) * u32(16))
            more = i32(c + i32(1)) < chunks
            landed = barrier_test(full, parity)  # asked early: the answer takes as long as two products
            then = fetch(wa, xa, 2)
            acc = multiply(acc, now)
            now = fetch(wa, xa, 4)
            acc = multiply(acc, then)
            then = fetch(wa, xa, 6)
            acc = multiply(acc, now)
            if more:
                if landed == u32(0):
                    barrier_wait(full, parity)
                wa = u32(ring + u32(slot) * stage_size + wo)
                xa = u32(ring + u32(slot) * stage_size + xo)
                now = fetch(wa, xa, 0)
            acc = multiply(acc, then)
            cuda.syncwarp()
            if lane == i32(0):
                barrier_arrive(freed)
        if rest > i32(0):
            for s in range(rest):
                acc = last_step(acc, wa, xa, s)
            cuda.syncwarp()
            if lane == i32(0):
                barrier_arrive(u32(full + u32(8)))
            slot, parity = advance(slot, parity, stages)
        results = pairs(acc, lane)
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


ARGUMENTS = "u64 i32 i32 i32 u64 i64 i32 u64 i32 i32 i32 u64 u64 i32 u64 i32 i32 i32"


def threads(rows: int, warps: int) -> int:
    """Threads of a block: consumers of `warps` units a round, the weight warp, the row warps."""
    _, split, row_warps = SHAPES[rows]
    return 32 * (warps * split + 1 + row_warps)


def _make(rows: int) -> Kernel:
    most, split, row_warps = SHAPES[rows]
    known: dict[str, Any] = {
        "ROWS": rows, "SHIFT": rows.bit_length() - 1, "HALVES": 1 if rows == 8 else 2, "SPLIT": split,
        "X_WARPS": row_warps, "X_COPIES": rows // 2 // row_warps, "CHUNK": CHUNK, "UNIT_CHUNK": UNIT_CHUNK,
        "X_PITCH": X_PITCH, "RING": RING,
    }  # fmt: skip
    few = rows == 8
    function = with_globals(
        unrolled(_ring, **known),
        zero=zeros(4 if few else 8),
        fetch=fetch_8 if few else fetch_16,
        multiply=multiply_8 if few else multiply_16,
        last_step=last_step_8 if few else last_step_16,
        pairs=pairs_8 if few else pairs_16,
    )
    register = kernel(
        ARGUMENTS,
        threads=threads(rows, most),
        dynamic_shared=BUDGET if rows <= 16 else 2 * BUDGET,
        architectures=BULK,
        name=f"ring_product_{rows}",
    )
    return register(function)


RING_PRODUCTS = {rows: _make(rows) for rows in SHAPES}
"""By the most rows of a group."""
