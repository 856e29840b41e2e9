"""Causal attention over the paged K/V pool on tensor cores.

Keys are reduced in ranges of 128 absolute positions. A range gives every query a partial result: the largest score and
the sum of weights (`range_weights`) and the weighted values; partial results are merged in ascending order, by
`merged`. Prompt rows do both in one kernel that walks over the ranges (`attention_rows`, and attention_wgmma.py);
decode rows spread their ranges over the GPU and merge afterwards (attention_ranges.py), and so do few prompt rows
behind a long context. All use the same functions and products of the same order, so a row has the same bits any way. A
key past a row's position weighs exactly nothing, and a range without visible keys is not merged.

A warp takes 16 query vectors: the heads that share a K/V head, of one or several rows. Tiles in shared memory are
[128 positions][8 pieces of 16 bytes], piece c of position p at c ^ (p & 7), as in the pool (see rope.py).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import cuda

from ..batch import PAGE_ROWS
from .compiler import Kernel, kernel
from .functions import LOG2_E, ONE, ZERO, pack
from .scalar import (
    SIMULATED,
    add,
    bits_of,
    device,
    exp2_approx,
    fma,
    larger,
    let_next_start,
    mul,
    shuffle_xor,
    store4,
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
        reciprocal,
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
NOBODY = -1  # the last visible position of a query that doesn't exist


class Way(NamedTuple):
    """A kernel of prompt rows' attention and how it is launched."""

    kernel: Kernel
    threads: int
    shared: int
    queries: int
    """query vectors of a tile at most"""


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
def range_scores(q: 16, keys, lane):
    """Scores of 16 queries against a range's keys, as C fragments. q: A fragments of 4 steps of 16 dims; keys: shared
    address of the tile."""
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
    return scores


@device
@unrolled
def range_weights(scores: 64, first, second, lane):
    """Weights of a range's keys, from scores as C fragments to A fragments of 8 steps of 16 keys.

    A lane has rows lane / 4 and lane / 4 + 8 of its tile of 16 queries. first, second: their last visible position,
    counted in the range (negative: none). Also for both the largest score (in powers of 2, -inf: nothing seen) and the
    sum of weights.
    """
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
    weights = registers(32)
    for n in static(16):
        for i in static(2):
            scores[4 * n + i] = exp2_approx(fma(scores[4 * n + i], SCALE, base))
            total = add(total, scores[4 * n + i])
            scores[4 * n + 2 + i] = exp2_approx(fma(scores[4 * n + 2 + i], SCALE, base_8))
            total_8 = add(total_8, scores[4 * n + 2 + i])
        weights[2 * n] = pack(scores[4 * n], scores[4 * n + 1])
        weights[2 * n + 1] = pack(scores[4 * n + 2], scores[4 * n + 3])
    return weights, top, top_8, quad_sum(total), quad_sum(total_8)


@device
@unrolled
def range_sums(weights: 32, values, lane):
    """Sums of weighted values, 16 queries by 64 dims as C fragments. values: shared address of the tile."""
    line = np.int32(lane & np.int32(7))
    part = np.int32(lane >> np.int32(3))
    value = np.uint32(
        np.uint32(values)
        + np.uint32(np.int32(np.int32(part & np.int32(1)) * np.int32(8) + line) * np.int32(128))
        + np.uint32(np.int32(np.int32(part >> np.int32(1)) ^ line) * np.int32(16))
    )
    sums = registers(32, ZERO)
    for j in static(8):
        for c in static(4):
            b = registers(4)
            b[0], b[1], b[2], b[3] = ldmatrix_x4_transposed(
                np.uint32(np.uint32(value ^ np.uint32(32 * c)) + np.uint32(2048 * j))
            )
            for i in static(2):
                sums[8 * c + 4 * i], sums[8 * c + 4 * i + 1], sums[8 * c + 4 * i + 2], sums[8 * c + 4 * i + 3] = mma(
                    weights[4 * j], weights[4 * j + 1], weights[4 * j + 2], weights[4 * j + 3], b[2 * i], b[2 * i + 1],
                    sums[8 * c + 4 * i], sums[8 * c + 4 * i + 1], sums[8 * c + 4 * i + 2], sums[8 * c + 4 * i + 3],
                )  # fmt: skip
    return sums


@device
def merge_weights(top, other):
    """The larger of two largest scores, and the factors that bring results to it. `other` is a number, not -inf."""
    new = larger(top, other)
    return new, exp2_approx(sub(top, new)), exp2_approx(sub(other, new))


@device
def inverse(x):
    """1 / x, rounded to nearest, of a number from 1 on: what div.rn does, without its call for special cases."""
    y = reciprocal(x)
    return fma(y, -fma(x, y, -ONE), y)


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


@device
@unrolled
def store_partial(partial, partial_scale, target, column, sums: 16, top, total):
    """A lane's part of one query's partial result: 16 sums, of dims 8 n + 2 column + i at 16 column + 2 n + i."""
    at = np.int64(target) * np.int64(64) + np.int64(column * np.int32(16))
    for j in static(4):
        store4(
            partial, np.int64(at + np.int64(4 * j)), bits_of(sums[4 * j]), bits_of(sums[4 * j + 1]),
            bits_of(sums[4 * j + 2]), bits_of(sums[4 * j + 3]),
        )  # fmt: skip
    if column == np.int32(0):
        partial_scale[target * 2] = top
        partial_scale[target * 2 + 1] = total


@kernel(
    "u32* u64 i32 i32 i32 i32 i32* i32* i32* i32* i32 i32* i32* i32 i32* f32* f32* u32*",
    threads=32 * WARPS,
    dynamic_shared=4 * RANGE_BYTES,
)
@unrolled
def attention_rows(
    q, pool, layer, layers, kv_heads, group, positions, row_segment, seg_slot, page_table, table_width, tile_row,
    tile_rows, each, range_start, partial, partial_scale, out,
):  # fmt: skip
    """softmax(q kT / 8) v of the rows of every tile, over their own stream's keys up to each row's position.

    q, out [rows, heads * 64] bf16 in pairs. Tile t is rows tile_row[t] ... + tile_rows[t] - 1 of one segment, at most
    QUERIES / group of them. Grid [tiles, K/V heads, parts]; 64 KiB of shared memory: two ranges of keys and values.
    each: ranges of a part, whose partial results are left for attention_merge (see attention_ranges) in place of out;
    0: all of them, in one part.
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
    begin = np.int32(np.int32(cuda.blockIdx.z) * each)
    ranges = np.int32(np.int32(end >> np.int32(7)) + np.int32(1))
    if each > np.int32(0):
        ranges = min(ranges, np.int32(begin + each))

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
    for step in range(begin - np.int32(1), ranges):
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
        if step >= begin:
            wait_all_but_newest()
            cuda.syncthreads()
            start = np.int32(np.int32(step) * np.int32(RANGE))
            if start <= warp_end:
                stage = np.uint32(base + np.uint32(np.int32(np.int32(step) & np.int32(1)) * np.int32(2 * RANGE_BYTES)))
                scores = registers(64)
                scores = range_scores(parts, stage, lane)
                weights = registers(32)
                first = np.int32(limit - start)
                second = np.int32(limit_8 - start)
                weights, new, new_8, more, more_8 = range_weights(scores, first, second, lane)
                other = registers(32)
                other = range_sums(weights, np.uint32(stage + np.uint32(RANGE_BYTES)), lane)
                if each > np.int32(0):
                    if first >= np.int32(0):
                        place = np.int64(range_start[row + offset] + np.int32(step)) * heads + head * group
                        half = registers(16)
                        for n in static(8):
                            for i in static(2):
                                half[2 * n + i] = other[4 * n + i]
                        store_partial(partial, partial_scale, place + (query - offset * group), column, half, new, more)
                    if second >= np.int32(0):
                        place = np.int64(range_start[row + offset_8] + np.int32(step)) * heads + head * group
                        half = registers(16)
                        for n in static(8):
                            for i in static(2):
                                half[2 * n + i] = other[4 * n + 2 + i]
                        store_partial(
                            partial, partial_scale, place + (query + 8 - offset_8 * group), column, half, new_8, more_8
                        )
                    new, new_8 = LOWEST, LOWEST
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
    if each > np.int32(0):
        return
    if exists:
        share = inverse(total)
        for n in static(8):
            out[target + 4 * n] = pack(mul(sums[4 * n], share), mul(sums[4 * n + 1], share))
    if exists_8:
        share = inverse(total_8)
        for n in static(8):
            out[target_8 + 4 * n] = pack(mul(sums[4 * n + 2], share), mul(sums[4 * n + 3], share))


WAY = Way(attention_rows, 32 * WARPS, 4 * RANGE_BYTES, QUERIES)
