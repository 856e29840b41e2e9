"""Attention of a decode round's rows, from the q/k/v product to each range's partial results, in one kernel (sm_90 and
newer: elsewhere nothing begins early).

What earlier rounds left in the cache needs nothing of this one: a block asks for its keys and values before it waits
for the kernel before (programmatic dependent launch), then norms and rotates its row's queries and the keys that this
step adds, as `attention_inputs` does, and puts those keys and values beside the others. The bits are those of
`attention_inputs` and `attention_ranges`.
"""

from __future__ import annotations

import numpy as np
from numba import cuda

from .attention import (
    MOST_GROUP,
    NOBODY,
    RANGE,
    RANGE_BYTES,
    range_scores,
    range_source,
    range_sums,
    range_weights,
    store_partial,
)
from .attention_ranges import fetch_range, plan_rows, planned_row
from .compiler import BULK, kernel
from .rope import HALF, cache_word, turn, turned
from .scalar import SIMULATED, device, let_next_start, wait_for_earlier
from .unroll import registers, static, unrolled

if not SIMULATED:
    from .attention import wait_all_but_newest, wait_all_copies
    from .ptx import cp_async_commit, shared_address, shared_load_32, shared_store_32, store_32

QUERY_PITCH = 144
"""Shared memory from head to head of a row's queries: a word of all of them meets no bank twice."""
SHARED = 2 * RANGE_BYTES + MOST_GROUP * QUERY_PITCH

i32, u32, i64, u64 = np.int32, np.uint32, np.int64, np.uint64


@device
def locate(work, start_low, start_high, lane, positions, row_segment, seg_start, seg_slot, page_table, table_width):
    """Range `work` of all: its row, its number in the row, the row's first fellow that this step computes, the row's
    position, and the page."""
    row, first = planned_row(work, start_low, start_high)
    number = i32(work - first)
    segment = row_segment[row]
    page = page_table[i64(seg_slot[segment]) * table_width + (number >> i32(2))]
    return row, number, seg_start[segment], positions[row], page


@device
def put_word(tile, at, lane, word):
    """Word `lane` of position `at` of a range, at the tile's order."""
    piece = i32(i32(lane >> i32(2)) ^ i32(at & i32(7)))
    place = i32(i32(at * i32(128)) + i32(i32(piece * i32(16)) + i32(i32(lane & i32(3)) * i32(4))))
    shared_store_32(u32(tile + u32(place)), word)


@kernel(
    "u32* u32* u32* f32 u32* u32* u64 i32 i32 i32 i32 i32* i32* i32* i32* i32* i32 i32 f32* f32*",
    threads=32,
    blocks=6,
    dynamic_shared=SHARED,
    architectures=BULK,
)
@unrolled
def attention_decode(
    qkv, q_norm, k_norm, eps, cos, sin, pool, layer, layers, kv_heads, group, positions, row_segment, seg_start,
    seg_slot, page_table, table_width, rows, partial, partial_scale,
):  # fmt: skip
    """Partial results of every range of every row, as `attention_ranges`'; new keys and values also go to the pool.

    bf16 in pairs: qkv [rows, (heads + 2 kv_heads) * 64], cos, sin [positions, 32]. A segment's rows are consecutive
    positions; up to attention_ranges.PLAN_ROWS rows. Grid [any number of blocks, K/V heads], one warp.
    """
    shared = cuda.shared.array(0, np.uint8)
    let_next_start()
    base = shared_address(shared)
    values_at = u32(base + u32(RANGE_BYTES))
    queries = u32(base + u32(2 * RANGE_BYTES))
    lane = i32(cuda.threadIdx.x)
    line, column = i32(lane >> i32(2)), i32(lane & i32(3))
    head = i32(cuda.blockIdx.y)
    heads = i32(kv_heads * group)
    width = i32(heads + i32(kv_heads + kv_heads))
    exists = line < group
    query_weight, key_weight = q_norm[lane], k_norm[lane]
    start_low, start_high, every = plan_rows(positions, row_segment, seg_slot, rows, lane)
    work = i32(cuda.blockIdx.x)
    if work >= every:
        if work == i32(0):
            wait_for_earlier()  # one block is enough for the kernel not to end before the one before
        return
    row, number, fellow, position, page = locate(
        work, start_low, start_high, lane, positions, row_segment, seg_start, seg_slot, page_table, table_width
    )
    begin = i32(number * i32(RANGE))
    fresh = i32(i32(position - i32(row - fellow)) - begin)  # where in the range this step's positions begin
    fetch_range(base, range_source(pool, page, number, layer, layers, 0, head, kv_heads), i32(fresh - i32(1)), lane)
    cp_async_commit()
    fetch_range(
        values_at, range_source(pool, page, number, layer, layers, 1, head, kv_heads), i32(fresh - i32(1)), lane
    )
    cp_async_commit()
    c, s = turn(cos, sin, position, lane)
    wait_for_earlier()
    while work < every:
        source = i64(i32(row * width)) * i64(HALF) + i64(lane)
        key = qkv[source + i64(i32(heads + head)) * i64(HALF)]
        value = qkv[source + i64(i32(i32(heads + kv_heads) + head)) * i64(HALF)]
        for half in static(2):
            if i32(4 * half) < group:
                words = registers(4)
                for i in static(4):
                    h = min(i32(4 * half + i), i32(group - i32(1)))
                    words[i] = qkv[source + i64(i32(i32(head * group) + h)) * i64(HALF)]
                for i in static(4):
                    words[i] = turned(words[i], query_weight, c, s, lane, eps)
                for i in static(4):
                    shared_store_32(u32(queries + u32((4 * half + i) * QUERY_PITCH) + u32(lane * i32(4))), words[i])
        limit = i32(position - begin)
        if fresh < i32(RANGE):
            wait_all_copies()
            cuda.syncwarp()
            at = max(fresh, i32(0))
            while at < min(limit, i32(RANGE)):  # rows before this one, in the same segment
                other = i64(i32(i32(row - i32(limit - at)) * width)) * i64(HALF) + i64(lane)
                other_key = qkv[other + i64(i32(heads + head)) * i64(HALF)]
                other_value = qkv[other + i64(i32(i32(heads + kv_heads) + head)) * i64(HALF)]
                other_c, other_s = turn(cos, sin, i32(begin + at), lane)
                put_word(base, at, lane, turned(other_key, key_weight, other_c, other_s, lane, eps))
                put_word(values_at, at, lane, other_value)
                at = i32(at + i32(1))
            if limit < i32(RANGE):
                key = turned(key, key_weight, c, s, lane, eps)
                put_word(base, limit, lane, key)
                put_word(values_at, limit, lane, value)
                to = cache_word(page, position, layer, layers, 0, head, kv_heads, lane)
                store_32(u64(pool + u64(to * 4)), key)
                to = cache_word(page, position, layer, layers, 1, head, kv_heads, lane)
                store_32(u64(pool + u64(to * 4)), value)
        wait_all_but_newest()
        cuda.syncwarp()
        parts = registers(16, u32(0))
        if exists:
            for k in static(4):
                for i in static(2):
                    parts[4 * k + 2 * i] = shared_load_32(
                        u32(queries + u32(i32(line * i32(QUERY_PITCH)) + i32(column * i32(4))) + u32(32 * k + 16 * i))
                    )
        scores = registers(64)
        scores = range_scores(parts, base, lane)
        weights = registers(32)
        last = limit if exists else i32(NOBODY)
        target = i64(work) * heads + head * group + line
        weights, top, _top_8, total, _total_8 = range_weights(scores, last, i32(NOBODY), lane)
        work = i32(work + i32(cuda.gridDim.x))
        cuda.syncwarp()
        if work < every:
            row, number, fellow, position, page = locate(
                work, start_low, start_high, lane, positions, row_segment, seg_start, seg_slot, page_table, table_width
            )
            begin = i32(number * i32(RANGE))
            fresh = i32(i32(position - i32(row - fellow)) - begin)
            fetch_range(
                base, range_source(pool, page, number, layer, layers, 0, head, kv_heads), i32(fresh - i32(1)), lane
            )
        cp_async_commit()
        wait_all_but_newest()
        cuda.syncwarp()
        sums = registers(32)
        sums = range_sums(weights, values_at, lane)
        if exists:
            mine = registers(16)
            for n in static(8):
                for i in static(2):
                    mine[2 * n + i] = sums[4 * n + i]
            store_partial(partial, partial_scale, target, column, mine, top, total)
        cuda.syncwarp()
        if work < every:
            fetch_range(
                values_at, range_source(pool, page, number, layer, layers, 1, head, kv_heads), i32(fresh - i32(1)), lane
            )
            c, s = turn(cos, sin, position, lane)
        cp_async_commit()
