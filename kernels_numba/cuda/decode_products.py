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

from ..batch import RING_ROWS
from .compiler import BULK, Kernel, kernel
from .conv import filtered, product_pair
from .decode_route import CHOICE_BYTES, choose_and_group, no_choices, own_values, pair_row, pair_weight
from .functions import ZERO, pack
from .norm import norm_pair, row_scale, square_sum
from .products import (
    PLAIN,
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
    bulk_prefetch,
    cp_async_16,
    cp_async_arrive,
    dependency_wait,
    dependents_start,
    divide,
    evict_first,
    group_sync,
    ldmatrix_x2,
    ldmatrix_x4,
    load_32,
    load_128,
    load_fresh,
    mma,
    shared_address,
    shared_load_32,
    shared_store_32,
    shared_store_128,
    store_32,
    store_128,
    zeros,
)
from .route import added, plus
from .scalar import add, bits_of, device, float_of, shuffle_xor
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
SUM_THREADS = 256
SUM_DEPTH = 8 * SUM_THREADS
"""Longest row that a block sums and norms by itself."""
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


@device
def advance(slot, parity, stages):
    """The next slot of the ring and the parity of its phase."""
    slot = i32(slot + i32(1))
    if slot == stages:
        return i32(0), u32(parity ^ u32(1))
    return slot, parity


@device
def round_of(unit, stop, most, units, rows, group_rows, grouped, table, experts):
    """The round that begins at `unit`: units taken, the first one's tile, the expert, and its rows [first, last)."""
    group = i32(divide(u32(unit), u32(units)))
    tile = i32(unit - i32(group * units))
    taken = min(most, i32(stop - unit), i32(units - tile))
    if not grouped:
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


@device
def sum_and_norm(summands, residual, norm_weight, eps, depth, top_k, sums, line, consumers, warp, lane):
    """By all warps but the weights': the only row's sum over its experts and the RMSNorm of that, as
    `combine_experts_norm`'s; the normed row to shared memory, the sum (by one block) to `sums`. A thread has 8 values.
    """
    thread = i32(i32(warp * i32(32)) + lane)
    if warp > consumers:
        thread = i32(thread - i32(32))
    pieces = i32(depth >> i32(3))
    here = u64(u64(u32(thread)) * u64(16))
    mine = thread < pieces
    e, f, g, h = u32(0), u32(0), u32(0), u32(0)
    if mine:
        e, f, g, h = load_128(u64(norm_weight + here))
    dependency_wait()
    a, b, c, d = u32(0), u32(0), u32(0), u32(0)
    squares = ZERO
    if mine:
        a, b, c, d = row_sum(summands, residual, here, u64(u64(u32(depth)) * u64(2)), top_k)
        squares = square_sum(a, b, c, d)
        if i32(cuda.blockIdx.x) == i32(0):
            store_128(u64(sums + here), a, b, c, d)
    squared = u32(line + u32(i32(depth + depth)))
    shared_store_32(u32(squared + u32(thread) * u32(4)), bits_of(squares))
    group_sync(u32(2), u32(SUM_THREADS))
    total = ZERO
    for part in range(SUM_THREADS // 32):
        word = shared_load_32(u32(squared + u32(i32(i32(part) * i32(32)) + lane) * u32(4)))
        total = add(total, float_of(word))
    scale = row_scale(total, depth, eps)
    if mine:
        shared_store_128(
            u32(line + u32(here)), norm_pair(a, e, scale), norm_pair(b, f, scale), norm_pair(c, g, scale),
            norm_pair(d, h, scale),
        )  # fmt: skip
    group_sync(u32(2), u32(SUM_THREADS))


@device
@unrolled
def row_sum(summands, residual, here, row_bytes, top_k):
    """8 values of r(residual + r(sum of `top_k` rows)), as `expert_sum`'s."""
    rest = registers(4)
    rest = load_128(u64(residual + here))
    s0, s1, s2, s3 = (ZERO, ZERO), (ZERO, ZERO), (ZERO, ZERO), (ZERO, ZERO)
    for j in range(0, top_k, 4):
        words = registers(16, u32(0))
        for i in static(4):
            if i32(j + i) < top_k:
                words[4 * i], words[4 * i + 1], words[4 * i + 2], words[4 * i + 3] = load_128(
                    u64(summands + u64(u32(i32(j + i))) * row_bytes + here)
                )
        for i in static(4):
            if i32(j + i) < top_k:
                s0, s1 = plus(s0, words[4 * i]), plus(s1, words[4 * i + 1])
                s2, s3 = plus(s2, words[4 * i + 2]), plus(s3, words[4 * i + 3])
    return added(rest[0], s0), added(rest[1], s1), added(rest[2], s2), added(rest[3], s3)


@device
def conv_inputs(item, tile, units, filters, state, row_segment, seg_slot, seg_start, positions):
    """What the convolution of row item / 8 and two of a unit's channels needs beside the product: taps, the two inputs
    before where they lie in the ring, slot, row of the segment, position."""
    row, word = i32(item >> i32(3)), i32(i32(tile * i32(8)) + i32(item & i32(7)))
    half = i32(units * i32(8))
    w0 = load_32(u64(filters + u64(u32(word)) * u64(4)))
    w1 = load_32(u64(filters + u64(u32(i32(half + word))) * u64(4)))
    w2 = load_32(u64(filters + u64(u32(i32(i32(half + half) + word))) * u64(4)))
    position = load_fresh(u64(positions + u64(u32(row)) * u64(4)))
    segment = load_fresh(u64(row_segment + u64(u32(row)) * u64(4)))
    slot = load_fresh(u64(seg_slot + u64(u32(segment)) * u64(4)))
    number = i32(row - load_fresh(u64(seg_start + u64(u32(segment)) * u64(4))))
    u1, u2 = u32(0), u32(0)
    if slot >= i32(0):
        if number < i32(1) and position >= i32(1):
            u1 = load_32(state_at(state, slot, i32(position - i32(1)), half, word))
        if number < i32(2) and position >= i32(2):
            u2 = load_32(state_at(state, slot, i32(position - i32(2)), half, word))
    return w0, w1, w2, u1, u2, u32(slot), u32(number), u32(position)


@device
def state_at(state, slot, position, half, word):
    line = u64(u64(u32(slot)) * u64(RING_ROWS) + u64(u32(position & i32(RING_ROWS - 1))))
    return u64(state + u64(line * u64(u32(half)) + u64(u32(word))) * u64(4))


@device
def projected(area, group_rows, part, row, item):
    """Two channels of B (part 0), C or x of a row of this block's unit."""
    at = u32(u32(i32(i32(part * group_rows) + row)) * u32(32) + u32(item & i32(7)) * u32(4))
    return shared_load_32(u32(area + at))


@device
def gated_product(area, group_rows, row, item):
    """u = r(B * x) of a row."""
    return product_pair(projected(area, group_rows, i32(0), row, item), projected(area, group_rows, i32(2), row, item))


@device
def conv_output(item, tile, units, group_rows, area, w0, w1, w2, u1, u2, slot, number, position, state, out):
    """Two channels of a row of the convolution, as `short_conv`'s, and their input into the ring."""
    row, word = i32(item >> i32(3)), i32(i32(tile * i32(8)) + i32(item & i32(7)))
    half = i32(units * i32(8))
    to = u64(out + u64(u64(u32(row)) * u64(u32(half)) + u64(u32(word))) * u64(4))
    if i32(slot) < i32(0):
        store_32(to, u32(0))
        return
    if i32(number) >= i32(1):
        u1 = gated_product(area, group_rows, i32(row - i32(1)), item)
    if i32(number) >= i32(2):
        u2 = gated_product(area, group_rows, i32(row - i32(2)), item)
    u = gated_product(area, group_rows, row, item)
    store_32(to, product_pair(projected(area, group_rows, i32(1), row, item), filtered(w0, w1, w2, u2, u1, u)))
    store_32(state_at(state, i32(slot), i32(position), half, word), u)


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
        if early == i32(2) and i32(stop - unit) <= most:
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
                if i32(c) == ahead and lane < copies:
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
    whole = i32(depth // i32(CHUNK))
    rest = i32(i32(depth - i32(whole * i32(CHUNK))) >> i32(4))
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
                xa = u32(xa + u32(CHUNK * 2)) if SUM == 1 else u32(ring + u32(slot) * stage_size + xo)
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
        rows,
        "ring_experts",
        CHOICE_ARGUMENTS,
        CHOICE_RING,
        CHOICE=1,
        row_segment=0,
        seg_slot=0,
        **_without(_GROUPED, _CONVOLVES, _SUMS),
    )
    for rows in (8, 16)
}
"""Experts' products of a decode round: each block chooses and groups for itself, from the router's logits."""

_CONV = {"CONV": 1, "mode": PLAIN, "experts": 1, "expert_bytes": 0, "out_row": 0, "columns": 0, "early": 2}

RING_CONVS = {
    rows: _make(
        rows, "ring_conv", CONV_ARGUMENTS, conv_ring(rows), top_k=0, **_CONV, **_without(_GROUPED, _CHOOSES, _SUMS)
    )
    for rows in SHAPES
}  # fmt: skip
"""A convolution layer's first product and its short convolution, for up to so many rows: units of B, C and x that are
the same channels meet in one block."""

_ONE_ROW = {"SUM": 1, "rows": 1, "x": 0, "x_row": 0}

RING_SUMS = {
    1: _make(
        8, "ring_sum", SUM_ARGUMENTS, RING + SUM_BYTES, LINE=RING, mode=PLAIN, experts=1, expert_bytes=0, early=2,
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
