"""Causal attention over the paged K/V pool on tensor cores.

Keys are reduced in ranges of 128 absolute positions. A range gives every query a partial result: the largest score, the
sum of weights and the weighted values, in `range_partial`; partial results are merged in ascending order, by
`merged`. Prompt rows do both in one kernel that walks over the ranges (`attention_rows`); decode rows spread their
ranges over the GPU (`attention_ranges`) and merge afterwards (`attention_merge`). Both use the same functions, so a
row has the same bits either way. A key past a row's position weighs exactly nothing, and a range without visible keys
is not merged.

A warp takes 16 query vectors: the heads that share a K/V head, of one or several rows. Tiles in shared memory are
[128 positions][8 pieces of 16 bytes], piece c of position p at c ^ (p & 7), as in the pool (see rope.py).
"""

from __future__ import annotations

import numpy as np
from numba import cuda

from ..batch import PAGE_ROWS
from .compiler import kernel
from .functions import LOG2_E, ONE, ZERO, pack
from .scalar import (
    SIMULATED,
    add,
    device,
    div,
    exp2_approx,
    fma,
    larger,
    let_next_start,
    mul,
    shuffle_xor,
    sub,
    wait_for_earlier,
)
from .unroll import registers, static, unrolled

if not SIMULATED:
    from .ptx import (
        cp_async_16_or_zero,
        cp_async_commit,
        cp_async_wait,
        ldmatrix_x4,
        ldmatrix_x4_transposed,
        mma,
        shared_address,
    )

    wait_all_copies, wait_all_but_newest = cp_async_wait(0), cp_async_wait(1)

RANGE = 128
RANGES_A_PAGE = PAGE_ROWS // RANGE
RANGE_BYTES = RANGE * 128  # of keys or of values of one head
SCALE = np.float32(np.float32(0.125) * LOG2_E)  # 64 ** -0.5; weights are powers of 2
LOWEST = np.float32(-np.inf)
WARPS = 8  # of a block of attention_rows
QUERIES = 16 * WARPS  # query vectors of such a block
MOST_GROUP = 8  # query heads of a K/V head
AT_ONCE = 16  # partial results that attention_merge loads ahead
NOBODY = -1  # the last visible position of a query that doesn't exist


@device
def quad_larger(x):
    """Largest of the 4 lanes that share a row of a tile."""
    x = larger(x, shuffle_xor(x, np.int32(1)))
    return larger(x, shuffle_xor(x, np.int32(2)))


@device
def quad_sum(x):
    x = add(x, shuffle_xor(x, np.int32(1)))
    return add(x, shuffle_xor(x, np.int32(2)))


@device
@unrolled
def range_partial(q: 16, keys, values, first, second, lane):
    """Partial result of 16 queries over one range; a lane has those of rows lane / 4 and lane / 4 + 8 of the tile.

    q: A fragments of 4 steps of 16 dims. keys, values: shared addresses of the tiles. first, second: last visible
    position of the lane's two rows, counted in the range (negative: none). Returns 32 sums of weighted values, as C
    fragments, and for both rows the largest score (in powers of 2, -inf: nothing seen) and the sum of weights.
    """
    line = np.int32(lane & np.int32(7))
    part = np.int32(lane >> np.int32(3))
    key = np.uint32(np.uint32(keys) + np.uint32(line * np.int32(128)) + np.uint32(np.int32(part ^ line) * np.int32(16)))
    scores = registers(64, ZERO)
    for n in static(16):
        b = registers(8)
        b[0], b[1], b[2], b[3] = ldmatrix_x4(np.uint32(key + np.uint32(1024 * n)))
        b[4], b[5], b[6], b[7] = ldmatrix_x4(np.uint32(np.uint32(key ^ np.uint32(64)) + np.uint32(1024 * n)))
        for k in static(4):
            scores[4 * n], scores[4 * n + 1], scores[4 * n + 2], scores[4 * n + 3] = mma(
                q[4 * k], q[4 * k + 1], q[4 * k + 2], q[4 * k + 3], b[2 * k], b[2 * k + 1], scores[4 * n],
                scores[4 * n + 1], scores[4 * n + 2], scores[4 * n + 3],
            )  # fmt: skip
    if first < np.int32(127) or second < np.int32(127):
        column = np.int32(np.int32(lane & np.int32(3)) * np.int32(2))
        first = np.int32(first - column)
        second = np.int32(second - column)
        for n in static(16):
            scores[4 * n] = scores[4 * n] if first >= np.int32(8 * n) else LOWEST
            scores[4 * n + 1] = scores[4 * n + 1] if first >= np.int32(8 * n + 1) else LOWEST
            scores[4 * n + 2] = scores[4 * n + 2] if second >= np.int32(8 * n) else LOWEST
            scores[4 * n + 3] = scores[4 * n + 3] if second >= np.int32(8 * n + 1) else LOWEST
    top, top_8 = LOWEST, LOWEST
    for n in static(16):
        top = larger(top, larger(scores[4 * n], scores[4 * n + 1]))
        top_8 = larger(top_8, larger(scores[4 * n + 2], scores[4 * n + 3]))
    top = mul(quad_larger(top), SCALE)
    top_8 = mul(quad_larger(top_8), SCALE)
    base = -top if top > LOWEST else ZERO
    base_8 = -top_8 if top_8 > LOWEST else ZERO
    total, total_8 = ZERO, ZERO
    for n in static(16):
        for i in static(2):
            scores[4 * n + i] = exp2_approx(fma(scores[4 * n + i], SCALE, base))
            total = add(total, scores[4 * n + i])
            scores[4 * n + 2 + i] = exp2_approx(fma(scores[4 * n + 2 + i], SCALE, base_8))
            total_8 = add(total_8, scores[4 * n + 2 + i])
    value = np.uint32(
        np.uint32(values)
        + np.uint32(np.int32(np.int32(part & np.int32(1)) * np.int32(8) + line) * np.int32(128))
        + np.uint32(np.int32(np.int32(part >> np.int32(1)) ^ line) * np.int32(16))
    )
    sums = registers(32, ZERO)
    for j in static(8):
        a = registers(4)
        for i in static(4):
            a[i] = pack(scores[8 * j + 2 * i], scores[8 * j + 2 * i + 1])
        for c in static(4):
            b = registers(4)
            b[0], b[1], b[2], b[3] = ldmatrix_x4_transposed(
                np.uint32(np.uint32(value ^ np.uint32(32 * c)) + np.uint32(2048 * j))
            )
            for i in static(2):
                sums[8 * c + 4 * i], sums[8 * c + 4 * i + 1], sums[8 * c + 4 * i + 2], sums[8 * c + 4 * i + 3] = mma(
                    a[0], a[1], a[2], a[3], b[2 * i], b[2 * i + 1], sums[8 * c + 4 * i], sums[8 * c + 4 * i + 1],
                    sums[8 * c + 4 * i + 2], sums[8 * c + 4 * i + 3],
                )  # fmt: skip
    return sums, top, top_8, quad_sum(total), quad_sum(total_8)


@device
def merge_weights(top, other):
    """The larger of two largest scores, and the factors that bring results to it. `other` is a number, not -inf."""
    new = larger(top, other)
    return new, exp2_approx(sub(top, new)), exp2_approx(sub(other, new))


@device
def merged(sums, factor, other, other_factor):
    return fma(other, other_factor, mul(sums, factor))


@device
def range_source(pool, page, range_, layer, layers, kind, head, kv_heads):
    """Address of a range's keys (kind 0) or values (kind 1) in the pool."""
    rows = (((np.int64(page) * layers + layer) * 2 + kind) * kv_heads + head) * PAGE_ROWS + (
        range_ & (RANGES_A_PAGE - 1)
    ) * RANGE
    return np.uint64(pool + np.uint64(rows * 128))


@kernel(
    "u32* u64 i32 i32 i32 i32 i32* i32* i32* i32* i32 i32* i32* u32*",
    threads=32 * WARPS,
    dynamic_shared=4 * RANGE_BYTES,
)
@unrolled
def attention_rows(
    q, pool, layer, layers, kv_heads, group, positions, row_segment, seg_slot, page_table, table_width, tile_row,
    tile_rows, out,
):  # fmt: skip
    """softmax(q kT / 8) v of the rows of every tile, over their own stream's keys up to each row's position.

    q, out [rows, heads * 64] bf16 in pairs. Tile t is rows tile_row[t] ... + tile_rows[t] - 1 of one segment, at most
    QUERIES / group of them. Grid [tiles, K/V heads]; 64 KiB of shared memory: two ranges of keys and values.
    """
    shared = cuda.shared.array(0, np.uint8)
    let_next_start()
    wait_for_earlier()
    base = shared_address(shared)
    thread = np.int32(cuda.threadIdx.x)
    lane, warp = np.int32(thread & np.int32(31)), np.int32(thread >> np.int32(5))
    line, column = np.int32(lane >> np.int32(2)), np.int32(lane & np.int32(3))
    head = np.int32(cuda.blockIdx.y)
    heads = np.int32(kv_heads * group)
    row = tile_row[cuda.blockIdx.x]
    count = tile_rows[cuda.blockIdx.x]
    position = positions[row]
    slot = seg_slot[row_segment[row]]
    end = np.int32(position + count - np.int32(1))
    pages = np.int64(slot) * table_width

    query = np.int32(warp * np.int32(16) + line)
    offset, offset_8 = np.int32(query // group), np.int32(np.int32(query + np.int32(8)) // group)
    target = (np.int64(row + offset) * heads + head * group + (query - offset * group)) * 32 + column
    target_8 = (np.int64(row + offset_8) * heads + head * group + (query + 8 - offset_8 * group)) * 32 + column
    exists, exists_8 = offset < count, offset_8 < count
    limit = np.int32(position + offset) if exists else np.int32(NOBODY)
    limit_8 = np.int32(position + offset_8) if exists_8 else np.int32(NOBODY)
    zero = np.uint32(0)
    parts = registers(16)
    for k in static(4):
        for i in static(2):
            parts[4 * k + 2 * i] = q[target + (8 * k + 4 * i)] if exists else zero
            parts[4 * k + 2 * i + 1] = q[target_8 + (8 * k + 4 * i)] if exists_8 else zero
    first_query = np.int32(np.int32(warp * np.int32(16)) // group)
    warp_end = np.int32(NOBODY)
    if first_query < count:
        warp_end = np.int32(
            position
            + min(np.int32(np.int32(warp * np.int32(16) + np.int32(15)) // group), np.int32(count - np.int32(1)))
        )

    sums = registers(32, ZERO)
    top, top_8, total, total_8 = LOWEST, LOWEST, ZERO, ZERO
    ranges = np.int32(np.int32(end >> np.int32(7)) + np.int32(1))
    for step in range(-1, ranges):
        coming = np.int32(step + 1)
        if coming < ranges:
            page = page_table[pages + (coming >> np.int32(2))]
            keys = range_source(pool, page, coming, layer, layers, 0, head, kv_heads)
            values = range_source(pool, page, coming, layer, layers, 1, head, kv_heads)
            stage = np.uint32(base + np.uint32(np.int32(coming & np.int32(1)) * np.int32(2 * RANGE_BYTES)))
            seen = np.int32(end - coming * np.int32(RANGE))
            for i in static(4):
                piece = np.int32(thread + np.int32(256 * i))
                size = np.uint32(16) if np.int32(piece >> np.int32(3)) <= seen else zero
                at = np.uint32(piece * np.int32(16))
                cp_async_16_or_zero(np.uint32(stage + at), np.uint64(keys + np.uint64(at)), size)
                cp_async_16_or_zero(
                    np.uint32(stage + at + np.uint32(RANGE_BYTES)), np.uint64(values + np.uint64(at)), size
                )
        cp_async_commit()
        if step >= 0:
            wait_all_but_newest()
            cuda.syncthreads()
            start = np.int32(np.int32(step) * np.int32(RANGE))
            if start <= warp_end:
                stage = np.uint32(base + np.uint32(np.int32(np.int32(step) & np.int32(1)) * np.int32(2 * RANGE_BYTES)))
                other = registers(32)
                other, new, new_8, more, more_8 = range_partial(
                    parts,
                    stage,
                    np.uint32(stage + np.uint32(RANGE_BYTES)),
                    np.int32(limit - start),
                    np.int32(limit_8 - start),
                    lane,
                )
                if new > LOWEST:
                    top, factor, factor_new = merge_weights(top, new)
                    total = merged(total, factor, more, factor_new)
                    for n in static(8):
                        for i in static(2):
                            sums[4 * n + i] = merged(sums[4 * n + i], factor, other[4 * n + i], factor_new)
                if new_8 > LOWEST:
                    top_8, factor, factor_new = merge_weights(top_8, new_8)
                    total_8 = merged(total_8, factor, more_8, factor_new)
                    for n in static(8):
                        for i in static(2, 4):
                            sums[4 * n + i] = merged(sums[4 * n + i], factor, other[4 * n + i], factor_new)
            cuda.syncthreads()
    if exists:
        share = div(ONE, total)
        for n in static(8):
            out[target + 4 * n] = pack(mul(sums[4 * n], share), mul(sums[4 * n + 1], share))
    if exists_8:
        share = div(ONE, total_8)
        for n in static(8):
            out[target_8 + 4 * n] = pack(mul(sums[4 * n + 2], share), mul(sums[4 * n + 3], share))


@kernel("i32* i32* i32* i32 i32*", threads=256)
def attention_plan(positions, row_segment, seg_slot, rows, range_start):
    """range_start[row]: ranges of the rows before; [rows + 1] entries. Padding rows have none. One block of 256
    threads."""
    let_next_start()
    wait_for_earlier()
    counts = cuda.shared.array(256, np.int32)
    thread = cuda.threadIdx.x
    share = (rows + 255) // 256
    first, last = min(thread * share, rows), min((thread + 1) * share, rows)
    mine = 0
    for row in range(first, last):
        if seg_slot[row_segment[row]] >= 0:
            mine += (positions[row] >> 7) + 1
    counts[thread] = mine
    cuda.syncthreads()
    stride = 1
    while stride < 256:
        before = 0
        if thread >= stride:
            before = counts[thread - stride]
        cuda.syncthreads()
        counts[thread] += before
        cuda.syncthreads()
        stride *= 2
    at = counts[thread] - mine
    for row in range(first, last):
        range_start[row] = at
        if seg_slot[row_segment[row]] >= 0:
            at += (positions[row] >> 7) + 1
    if thread == 255:
        range_start[rows] = counts[255]


@kernel(
    "u32* u64 i32 i32 i32 i32 i32* i32* i32* i32* i32 i32 i32* f32* f32*",
    threads=32,
    blocks=6,
    dynamic_shared=2 * RANGE_BYTES,
)
@unrolled
def attention_ranges(
    q, pool, layer, layers, kv_heads, group, positions, row_segment, seg_slot, page_table, table_width, rows,
    range_start, partial, partial_scale,
):  # fmt: skip
    """Partial results of every range of every row: range g of all (see attention_plan), head h.

    partial [ranges, heads, 2, 32]: the sums of weighted values, even dims then odd ones; partial_scale [ranges,
    heads, 2]: largest score and sum of weights. Grid [any number of blocks, K/V heads], one warp; 32 KiB of shared
    memory.
    """
    shared = cuda.shared.array(0, np.uint8)
    let_next_start()
    wait_for_earlier()
    base = shared_address(shared)
    lane = np.int32(cuda.threadIdx.x)
    line, column = np.int32(lane >> np.int32(2)), np.int32(lane & np.int32(3))
    head = np.int32(cuda.blockIdx.y)
    heads = np.int32(kv_heads * group)
    zero = np.uint32(0)
    every = range_start[rows]
    work = np.int32(cuda.blockIdx.x)
    while work < every:
        low, high = np.int32(0), np.int32(rows - np.int32(1))
        while low < high:  # the last row that starts at or before `work`
            middle = np.int32(np.int32(low + high + np.int32(1)) >> np.int32(1))
            if range_start[middle] <= work:
                low = middle
            else:
                high = np.int32(middle - np.int32(1))
        row = low
        number = np.int32(work - range_start[row])
        position = positions[row]
        slot = seg_slot[row_segment[row]]
        page = page_table[np.int64(slot) * table_width + (number >> np.int32(2))]
        keys = range_source(pool, page, number, layer, layers, 0, head, kv_heads)
        values = range_source(pool, page, number, layer, layers, 1, head, kv_heads)
        seen = np.int32(position - number * np.int32(RANGE))
        for i in static(32):
            piece = np.int32(lane + np.int32(32 * i))
            size = np.uint32(16) if np.int32(piece >> np.int32(3)) <= seen else zero
            at = np.uint32(piece * np.int32(16))
            cp_async_16_or_zero(np.uint32(base + at), np.uint64(keys + np.uint64(at)), size)
        for i in static(32):
            piece = np.int32(lane + np.int32(32 * i))
            size = np.uint32(16) if np.int32(piece >> np.int32(3)) <= seen else zero
            at = np.uint32(piece * np.int32(16))
            cp_async_16_or_zero(np.uint32(base + at + np.uint32(RANGE_BYTES)), np.uint64(values + np.uint64(at)), size)
        cp_async_commit()
        exists = line < group
        source = (np.int64(row) * heads + head * group + line) * 32 + column
        parts = registers(16, zero)
        for k in static(4):
            for i in static(2):
                parts[4 * k + 2 * i] = q[source + (8 * k + 4 * i)] if exists else zero
        wait_all_copies()
        cuda.syncwarp()
        limit = seen if exists else np.int32(NOBODY)
        sums = registers(32)
        sums, top, _top_8, total, _total_8 = range_partial(
            parts, base, np.uint32(base + np.uint32(RANGE_BYTES)), limit, np.int32(NOBODY), lane
        )
        if exists:
            target = np.int64(work) * heads + head * group + line
            for n in static(8):
                for i in static(2):
                    partial[target * 64 + (32 * i + 4 * n) + column] = sums[4 * n + i]
            if column == 0:
                partial_scale[target * 2] = top
                partial_scale[target * 2 + 1] = total
        cuda.syncwarp()
        work = np.int32(work + np.int32(cuda.gridDim.x))


@kernel("f32* f32* i32* i32 u32*", threads=32)
@unrolled
def attention_merge(partial, partial_scale, range_start, heads, out):
    """Merge a row's ranges in ascending order. Grid [rows, heads], one warp; a lane has two dims. Padding rows:
    zeros."""
    let_next_start()
    wait_for_earlier()
    row, head, lane = cuda.blockIdx.x, cuda.blockIdx.y, cuda.threadIdx.x
    first, last = range_start[row], range_start[row + 1]
    top, total, even, odd = LOWEST, ZERO, ZERO, ZERO
    for at in range(first, last, AT_ONCE):
        tops = registers(16, LOWEST)
        totals = registers(16, ZERO)
        evens = registers(16, ZERO)
        odds = registers(16, ZERO)
        for i in static(16):
            if at + i < last:
                source = np.int64(at + i) * heads + head
                tops[i] = partial_scale[source * 2]
                totals[i] = partial_scale[source * 2 + 1]
                evens[i] = partial[source * 64 + lane]
                odds[i] = partial[source * 64 + 32 + lane]
        for i in static(16):
            if tops[i] > LOWEST:
                top, factor, other = merge_weights(top, tops[i])
                total = merged(total, factor, totals[i], other)
                even = merged(even, factor, evens[i], other)
                odd = merged(odd, factor, odds[i], other)
    target = (np.int64(row) * heads + head) * 32 + lane
    if first < last:
        share = div(ONE, total)
        out[target] = pack(mul(even, share), mul(odd, share))
    else:
        out[target] = np.uint32(0)
