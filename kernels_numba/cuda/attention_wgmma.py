"""Attention of prompt rows on Hopper: wgmma over ranges of keys and values that come by bulk copies, some ahead.

The same ranges, order of products and functions as in attention.py, so the same bits. Three warpgroups of consumers
take 64 query vectors each; while one multiplies, the others are at their weights. A range's keys, and its values, are
one run of memory in the pool, already in the order that wgmma reads (swizzle-128B atoms of 8 positions).
"""

from __future__ import annotations

import numpy as np
from numba import cuda

from .attention import (
    LOWEST,
    NOBODY,
    RANGE,
    RANGE_BYTES,
    ZERO,
    Way,
    inverse,
    merge_weights,
    merged,
    range_source,
    range_weights,
    store_partial,
)
from .compiler import HOPPER, kernel
from .functions import pack
from .ptx import (
    async_fence,
    barrier_arrive,
    barrier_expect,
    barrier_init,
    barrier_init_fence,
    barrier_wait,
    bulk_copy,
    dependency_wait,
    dependents_start,
    divide,
    load_128,
    shared_address,
    shared_store_128,
    wgmma,
    wgmma_commit,
    wgmma_fence,
    wgmma_transposed,
    wgmma_wait_0,
    zeros,
)
from .scalar import device, mul
from .unroll import registers, static, unrolled

GROUPS = 3  # warpgroups of consumers
QUERIES = 64 * GROUPS  # query vectors of a block
THREADS = 128 * GROUPS
STAGES = 5  # ranges in the ring
AHEAD = 3  # ranges on their way while one is used: STAGES less those that a warpgroup may lag behind
STAGE_BYTES = 2 * RANGE_BYTES
HEAD_BYTES = 1024  # barriers
Q_BYTES = QUERIES * 128
SHARED_BYTES = 1024 + HEAD_BYTES + Q_BYTES + STAGES * STAGE_BYTES
DESCRIPTOR = np.uint64((1 << 62) | (64 << 32) | (1 << 16))  # swizzle 128B, 1,024 bytes from 8 lines to the next 8

u32, i32, u64 = np.uint32, np.int32, np.uint64
scores_of, sums_of, no_scores, no_sums = wgmma(128), wgmma_transposed(64), zeros(64), zeros(32)


@device
def fetch(base, ring, number, slot, parity, page, pool, layer, layers, head, kv_heads, end, lane):
    """By one warp: a range's keys and values to the slot of the ring that lies AHEAD of `slot`, which is used for the
    time of `parity`, once all are through with what it held."""
    slot = i32(slot + i32(AHEAD))
    parity = u32(parity ^ u32(1))
    if slot >= i32(STAGES):
        slot = i32(slot - i32(STAGES))
        parity = u32(parity ^ u32(1))
    keys = u32(base + u32(slot) * u32(24))
    stage = u32(ring + u32(slot) * u32(STAGE_BYTES))
    lines = min(i32(RANGE), i32(end - number * i32(RANGE) + i32(1)))
    nbytes = u32(u32(lines) * u32(128))
    barrier_wait(u32(keys + u32(16)), parity)
    if lines < i32(RANGE):  # values past the last row weigh nothing, which must not meet whatever lies there
        for piece in range(i32(lines * i32(8) + lane), RANGE * 8, 32):
            shared_store_128(u32(stage + u32(RANGE_BYTES) + u32(piece) * u32(16)), u32(0), u32(0), u32(0), u32(0))
        async_fence()
        cuda.syncwarp()
    if lane == i32(0):
        barrier_expect(keys, nbytes)
        bulk_copy(stage, range_source(pool, page, number, layer, layers, 0, head, kv_heads), nbytes, keys)
        values = u32(keys + u32(8))
        barrier_expect(values, nbytes)
        source = range_source(pool, page, number, layer, layers, 1, head, kv_heads)
        bulk_copy(u32(stage + u32(RANGE_BYTES)), source, nbytes, values)
    cuda.syncwarp()


@kernel(
    "u64 u64 i32 i32 i32 i32 i32* i32* i32* i32* i32 i32* i32* i32 i32* f32* f32* u32*",
    threads=THREADS,
    dynamic_shared=SHARED_BYTES,
    architectures=HOPPER,
)
@unrolled
def attention_wgmma(
    q, pool, layer, layers, kv_heads, group, positions, row_segment, seg_slot, page_table, table_width, tile_row,
    tile_rows, each, range_start, partial, partial_scale, out,
):  # fmt: skip
    """As attention_rows, with tiles of up to QUERIES / group rows."""
    base = u32(u32(shared_address(cuda.shared.array(0, np.uint8)) + u32(1023)) & u32(0xFFFFFC00))
    queries = u32(base + u32(HEAD_BYTES))
    ring = u32(queries + u32(Q_BYTES))
    tid = i32(cuda.threadIdx.x)
    lane, warp = i32(tid & i32(31)), i32(tid >> i32(5))
    if tid == i32(0):
        for s in range(STAGES):
            barrier_init(u32(base + u32(s) * u32(24)), u32(1))  # keys are there
            barrier_init(u32(base + u32(s) * u32(24) + u32(8)), u32(1))  # values are
            barrier_init(u32(base + u32(s) * u32(24) + u32(16)), u32(4 * GROUPS))  # all consumers are through
        barrier_init_fence()
    dependency_wait()
    dependents_start()
    head = i32(cuda.blockIdx.y)
    heads = i32(kv_heads * group)
    row = tile_row[cuda.blockIdx.x]
    count = tile_rows[cuda.blockIdx.x]
    position = positions[row]
    slot = seg_slot[row_segment[row]]
    end = i32(position + count - i32(1))
    begin = i32(i32(cuda.blockIdx.z) * each)
    ranges = i32(i32(end >> i32(7)) + i32(1))
    if each > i32(0):
        ranges = min(ranges, i32(begin + each))
    if begin >= ranges:
        return
    for piece in range(tid, QUERIES * 8, THREADS):
        query = i32(i32(piece) >> i32(3))
        part = i32(i32(piece) & i32(7))
        offset = i32(divide(u32(query), u32(group)))
        a, b, c, d = u32(0), u32(0), u32(0), u32(0)
        if offset < count:
            vector = np.int64(row + offset) * heads + head * group + (query - offset * group)
            a, b, c, d = load_128(u64(q + u64(vector * 128) + u64(part * i32(16))))
        place = u32(u32(query) * u32(128) + u32(i32(part ^ i32(query & i32(7)))) * u32(16))
        shared_store_128(u32(queries + place), a, b, c, d)
    async_fence()
    cuda.syncthreads()
    pages = np.int64(slot) * table_width
    if warp == i32(0):
        for ahead in range(AHEAD):
            coming = i32(begin + i32(ahead))
            if coming < ranges:
                fetch(
                    base, ring, coming, i32(i32(ahead) - i32(AHEAD)), u32(0), page_table[pages + (coming >> i32(2))],
                    pool, layer, layers, head, kv_heads, end, lane,
                )  # fmt: skip
    last_page = i32(i32(ranges - i32(1)) >> i32(2))
    page = page_table[pages + min(i32(i32(begin + i32(AHEAD)) >> i32(2)), last_page)]  # of the next to be fetched
    slot_at, parity = i32(0), u32(0)
    mine = i32(warp >> i32(2))
    q_tile = u64(DESCRIPTOR | u64(u32(u32(queries + u32(mine) * u32(8192)) >> u32(4))))
    column = i32(lane & i32(3))
    query = i32(i32(warp * i32(16)) + i32(lane >> i32(2)))
    offset = i32(divide(u32(query), u32(group)))
    offset_8 = i32(divide(u32(query + i32(8)), u32(group)))
    limit = i32(position + offset) if offset < count else i32(NOBODY)
    limit_8 = i32(position + offset_8) if offset_8 < count else i32(NOBODY)
    lane_head = i32(i32(head * group) + i32(query - i32(offset * group)))  # of all heads
    lane_head_8 = i32(i32(head * group) + i32(i32(query + i32(8)) - i32(offset_8 * group)))
    to_row = i32(row - position)
    group_end = i32(NOBODY)
    if i32(divide(u32(mine * i32(64)), u32(group))) < count:
        group_end = i32(position + min(i32(divide(u32(mine * i32(64) + i32(63)), u32(group))), i32(count - i32(1))))
    sums = registers(32, ZERO)
    top, top_8, total, total_8 = LOWEST, LOWEST, ZERO, ZERO
    for number in range(begin, ranges):
        coming = i32(i32(number) + i32(AHEAD))
        if warp == i32(0) and coming < ranges:
            fetch(base, ring, coming, slot_at, parity, page, pool, layer, layers, head, kv_heads, end, lane)
            page = page_table[pages + min(i32(i32(coming + i32(1)) >> i32(2)), last_page)]
        keys = u32(base + u32(slot_at) * u32(24))
        stage = u32(ring + u32(slot_at) * u32(STAGE_BYTES))
        start = i32(i32(number) * i32(RANGE))
        barrier_wait(keys, parity)
        if start <= group_end:
            k_tile = u64(DESCRIPTOR | u64(u32(stage >> u32(4))))
            wgmma_fence()
            acc = no_scores()
            acc = scores_of(acc, q_tile, k_tile)
            acc = scores_of(acc, u64(q_tile + u64(2)), u64(k_tile + u64(2)))
            acc = scores_of(acc, u64(q_tile + u64(4)), u64(k_tile + u64(4)))
            acc = scores_of(acc, u64(q_tile + u64(6)), u64(k_tile + u64(6)))
            wgmma_commit()
            wgmma_wait_0()
            scores = registers(64)
            scores = acc
            first = i32(limit - start)
            second = i32(limit_8 - start)
            weights = registers(32)
            weights, new, new_8, more, more_8 = range_weights(scores, first, second, lane)
            barrier_wait(u32(keys + u32(8)), parity)
            v_tile = u64(DESCRIPTOR | u64(u32(u32(stage + u32(RANGE_BYTES)) >> u32(4))))
            wgmma_fence()
            o = no_sums()
            for j in static(8):
                o = sums_of(
                    o, weights[4 * j], weights[4 * j + 1], weights[4 * j + 2], weights[4 * j + 3],
                    u64(v_tile + u64(128 * j)),
                )  # fmt: skip
            wgmma_commit()
            wgmma_wait_0()
            if lane == i32(0):
                barrier_arrive(u32(keys + u32(16)))
            other = registers(32)
            other = o
            if each > i32(0):
                if first >= i32(0):
                    half = registers(16)
                    for n in static(8):
                        for i in static(2):
                            half[2 * n + i] = other[4 * n + i]
                    target = i32(i32(range_start[limit + to_row] + i32(number)) * heads + lane_head)
                    store_partial(partial, partial_scale, target, column, half, new, more)
                if second >= i32(0):
                    half = registers(16)
                    for n in static(8):
                        for i in static(2):
                            half[2 * n + i] = other[4 * n + 2 + i]
                    target = i32(i32(range_start[limit_8 + to_row] + i32(number)) * heads + lane_head_8)
                    store_partial(partial, partial_scale, target, column, half, new_8, more_8)
            else:
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
        else:  # nothing of this range is seen: only keep step
            barrier_wait(u32(keys + u32(8)), parity)
            if lane == i32(0):
                barrier_arrive(u32(keys + u32(16)))
        slot_at = i32(slot_at + i32(1))
        if slot_at == i32(STAGES):
            slot_at = i32(0)
            parity = u32(parity ^ u32(1))
    if each == i32(0):
        if limit >= i32(0):
            share = inverse(total)
            target = (np.int64(limit + to_row) * heads + lane_head) * 32 + column
            for n in static(8):
                out[target + 4 * n] = pack(mul(sums[4 * n], share), mul(sums[4 * n + 1], share))
        if limit_8 >= i32(0):
            share = inverse(total_8)
            target = (np.int64(limit_8 + to_row) * heads + lane_head_8) * 32 + column
            for n in static(8):
                out[target + 4 * n] = pack(mul(sums[4 * n + 2], share), mul(sums[4 * n + 3], share))


WAY = Way(attention_wgmma, THREADS, SHARED_BYTES, QUERIES)
