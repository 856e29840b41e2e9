"""Attention by ranges: each range's partial results to memory, on as many blocks as there are, and their merge.

Decode rows run this way; prompt rows in parts leave their partial results to the same merge (see attention.py).
"""

from __future__ import annotations

import numpy as np
from numba import cuda

from .attention import (
    LOWEST,
    NOBODY,
    RANGE,
    RANGE_BYTES,
    inverse,
    merge_weights,
    merged,
    range_scores,
    range_source,
    range_sums,
    range_weights,
    store_partial,
)
from .compiler import kernel
from .functions import ONE, ZERO, pack
from .scalar import SIMULATED, ballot, bits_of, device, float_of, larger, let_next_start, mul, wait_for_earlier
from .unroll import registers, static, unrolled

if not SIMULATED:
    from .attention import wait_all_but_newest, wait_all_copies
    from .ptx import (
        broadcast,
        cp_async_16,
        cp_async_16_or_zero,
        cp_async_commit,
        load_64,
        population,
        shared_address,
        shuffle_up,
    )

MERGE_THREADS = 128
MOST_AT_ONCE = 256  # ranges that attention_merge fetches together
MERGE_BYTES = 4 * (64 + 3)  # of shared memory for each
TOPS = MOST_AT_ONCE // 32
FEW = 16  # ranges of a row that one warp merges
PLAN_ROWS = 64
"""Up to so many rows a block counts everybody's ranges for itself (`plan_rows`), before it waits for anything."""
NEVER = 0x7FFFFFFF


@device
def shuffle_up_f32(x, lanes):
    return float_of(np.uint32(shuffle_up(np.int32(bits_of(x)), lanes)))


@device
@unrolled
def largest_up_to(x):
    """Largest of the lanes up to this one."""
    for step in static(5):
        x = larger(x, shuffle_up_f32(x, np.int32(2**step)))
    return x


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


@device
def row_ranges(positions, row_segment, seg_slot, row, rows):
    """How many ranges a row has; none past the last one."""
    count = np.int32(0)
    if row < rows and seg_slot[row_segment[row]] >= np.int32(0):
        count = np.int32(np.int32(positions[row] >> np.int32(7)) + np.int32(1))
    return count


@device
def plan_rows(positions, row_segment, seg_slot, rows, lane):
    """By a warp: `attention_plan`'s numbers of rows lane and lane + 32 (NEVER past the last row), and of all rows."""
    low = row_ranges(positions, row_segment, seg_slot, lane, rows)
    high = row_ranges(positions, row_segment, seg_slot, np.int32(lane + np.int32(32)), rows)
    upto_low, upto_high = low, high
    if rows > np.int32(1):
        for step in (1, 2, 4, 8, 16):
            a, b = shuffle_up(upto_low, np.int32(step)), shuffle_up(upto_high, np.int32(step))
            if lane >= np.int32(step):
                upto_low, upto_high = np.int32(upto_low + a), np.int32(upto_high + b)
    first_high = broadcast(upto_low, np.int32(31))
    if rows == np.int32(1):
        first_high = broadcast(upto_low, np.int32(0))
    every = np.int32(first_high + broadcast(upto_high, np.int32(31)))
    start_low = np.int32(upto_low - low) if lane < rows else np.int32(NEVER)
    start_high = np.int32(NEVER)
    if np.int32(lane + np.int32(32)) < rows:
        start_high = np.int32(first_high + np.int32(upto_high - high))
    return start_low, start_high, every


@device
def planned_start(row, start_low, start_high):
    """Where a row's ranges begin."""
    if row < np.int32(32):
        return broadcast(start_low, row)
    return broadcast(start_high, np.int32(row - np.int32(32)))


@device
def planned_row(work, start_low, start_high):
    """The row of range `work` of all, and where that row's ranges begin."""
    low, high = ballot(np.uint32(start_low <= work)), ballot(np.uint32(start_high <= work))
    row = np.int32(np.int32(population(low) + population(high)) - np.int32(1))
    return row, planned_start(row, start_low, start_high)


@device
def locate(
    work, rows, range_start, positions, row_segment, seg_slot, page_table, table_width, pool, layer, layers, head,
    kv_heads,
):  # fmt: skip
    """Row of range `work` of all, the row's last visible position in the range, and where its keys and values are."""
    low, high = np.int32(0), np.int32(rows - np.int32(1))
    while low < high:  # the last row that starts at or before `work`
        middle = np.int32(np.int32(low + high + np.int32(1)) >> np.int32(1))
        if range_start[middle] <= work:
            low = middle
        else:
            high = np.int32(middle - np.int32(1))
    number = np.int32(work - range_start[low])
    slot = seg_slot[row_segment[low]]
    page = page_table[np.int64(slot) * table_width + (number >> np.int32(2))]
    keys = range_source(pool, page, number, layer, layers, 0, head, kv_heads)
    values = range_source(pool, page, number, layer, layers, 1, head, kv_heads)
    return low, np.int32(positions[low] - number * np.int32(RANGE)), keys, values


@device
@unrolled
def fetch_range(target, source, seen, lane):
    """One warp's copies of a range's keys or values to shared memory; zeros past position `seen`."""
    for i in static(32):
        piece = np.int32(lane + np.int32(32 * i))
        size = np.uint32(16) if np.int32(piece >> np.int32(3)) <= seen else np.uint32(0)
        at = np.uint32(piece * np.int32(16))
        cp_async_16_or_zero(np.uint32(target + at), np.uint64(source + np.uint64(at)), size)


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

    partial [ranges, heads, 64]: the sums of weighted values (order of dims: see store_partial); partial_scale [ranges,
    heads, 2]: largest score and sum of weights. Grid [any number of blocks, K/V heads], one warp; 32 KiB of shared
    memory. The next range's keys are on their way while values are multiplied.
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
    exists = line < group
    every = range_start[rows]
    work = np.int32(cuda.blockIdx.x)
    if work >= every:
        return
    row, seen, keys, values = locate(
        work, rows, range_start, positions, row_segment, seg_slot, page_table, table_width, pool, layer, layers, head,
        kv_heads,
    )  # fmt: skip
    fetch_range(base, keys, seen, lane)
    cp_async_commit()
    fetch_range(np.uint32(base + np.uint32(RANGE_BYTES)), values, seen, lane)
    cp_async_commit()
    while work < every:
        source = (np.int64(row) * heads + head * group + line) * 32 + column
        parts = registers(16, zero)
        for k in static(4):
            for i in static(2):
                parts[4 * k + 2 * i] = q[source + (8 * k + 4 * i)] if exists else zero
        limit = seen if exists else np.int32(NOBODY)
        target = np.int64(work) * heads + head * group + line
        wait_all_but_newest()
        cuda.syncwarp()
        scores = registers(64)
        scores = range_scores(parts, base, lane)
        weights = registers(32)
        weights, top, _top_8, total, _total_8 = range_weights(scores, limit, np.int32(NOBODY), lane)
        work = np.int32(work + np.int32(cuda.gridDim.x))
        cuda.syncwarp()
        if work < every:
            row, seen, keys, values = locate(
                work, rows, range_start, positions, row_segment, seg_slot, page_table, table_width, pool, layer,
                layers, head, kv_heads,
            )  # fmt: skip
            fetch_range(base, keys, seen, lane)
        cp_async_commit()
        wait_all_but_newest()
        cuda.syncwarp()
        sums = registers(32)
        sums = range_sums(weights, np.uint32(base + np.uint32(RANGE_BYTES)), lane)
        if exists:
            half = registers(16)
            for n in static(8):
                for i in static(2):
                    half[2 * n + i] = sums[4 * n + i]
            store_partial(partial, partial_scale, target, column, half, top, total)
        cuda.syncwarp()
        if work < every:
            fetch_range(np.uint32(base + np.uint32(RANGE_BYTES)), values, seen, lane)
        cp_async_commit()


@device
@unrolled
def merge_few(partial, partial_scale, first, last, heads, head, target, out, lane):
    """`attention_merge` of few ranges by one warp, a lane with two dims."""
    top, total, low, high = LOWEST, ZERO, ZERO, ZERO
    for begin in range(first, last, 8):
        own = registers(8, LOWEST)
        weight = registers(8, ZERO)
        x = registers(8, ZERO)
        y = registers(8, ZERO)
        for i in static(8):
            at = np.int32(np.int32(begin) + np.int32(i))
            if at < last:
                place = np.int64(at) * heads + head
                a, b = load_64(np.uint64(partial + np.uint64(place * 256 + lane * 8)))
                own[i], weight[i] = partial_scale[place * 2], partial_scale[place * 2 + 1]
                x[i], y[i] = float_of(a), float_of(b)
        for i in static(8):
            if own[i] > LOWEST:
                top, kept, taken = merge_weights(top, own[i])
                total = merged(total, kept, weight[i], taken)
                low = merged(low, kept, x[i], taken)
                high = merged(high, kept, y[i], taken)
    share = inverse(total)
    word = np.int32(np.int32(np.int32(lane & np.int32(7)) * np.int32(4)) + np.int32(lane >> np.int32(3)))
    out[target + word] = pack(mul(low, share), mul(high, share))


@kernel(
    "u64 f32* i32* i32 i32* i32* i32* i32 i32 u32*", threads=MERGE_THREADS, dynamic_shared=MOST_AT_ONCE * MERGE_BYTES
)
@unrolled
def attention_merge(
    partial, partial_scale, range_start, rows, positions, row_segment, seg_slot, heads, at_once, out
):  # fmt: skip
    """Merge a row's ranges in ascending order. Grid [rows, heads]. Padding rows: zeros.

    at_once: ranges fetched together, a multiple of 32, MERGE_BYTES of shared memory each. What brings each result to
    the largest score so far is found by all threads at once; then 64 threads go through the ranges with a dim each, and
    one with the sums of weights. range_start is read if there are more rows than PLAN_ROWS.
    """
    shared = cuda.shared.array(0, np.float32)
    tops = cuda.shared.array(TOPS, np.float32)
    let_next_start()
    thread = np.int32(cuda.threadIdx.x)
    lane = np.int32(thread & np.int32(31))
    row, head = np.int32(cuda.blockIdx.x), np.int32(cuda.blockIdx.y)
    first, last = np.int32(0), np.int32(0)
    if rows <= np.int32(PLAN_ROWS):
        start_low, start_high, _every = plan_rows(positions, row_segment, seg_slot, rows, lane)
        first = planned_start(row, start_low, start_high)
        last = np.int32(first + row_ranges(positions, row_segment, seg_slot, row, rows))
    wait_for_earlier()
    if rows > np.int32(PLAN_ROWS):
        first, last = range_start[row], range_start[row + 1]
    if first < last and np.int32(last - first) <= np.int32(FEW):
        if thread < np.int32(32):
            target = (np.int64(row) * heads + head) * 32
            merge_few(partial, partial_scale, first, last, heads, head, target, out, lane)
        return
    base = shared_address(shared)
    factors = np.int32(at_once * np.int32(64))  # then others, totals: places in `shared`
    others = np.int32(factors + at_once)
    totals = np.int32(others + at_once)
    carried = LOWEST
    state = ZERO
    for begin in range(first, last, at_once):
        count = min(np.int32(at_once), np.int32(last - np.int32(begin)))
        for piece in range(thread, count * np.int32(16), MERGE_THREADS):
            at = np.int32(np.int32(piece) >> np.int32(4))
            source = np.uint64((np.int64(begin + at) * heads + head) * 256 + (np.int32(piece) & np.int32(15)) * 16)
            cp_async_16(np.uint32(base + np.uint32(np.int32(piece) * np.int32(16))), np.uint64(partial + source))
        cp_async_commit()
        # largest score up to each range: within its 32 by shuffles, then of the 32s before
        own = registers(2, LOWEST)
        upto = registers(2, LOWEST)
        for p in static(2):
            at = np.int32(thread + np.int32(MERGE_THREADS * p))
            if at < count:
                source = (np.int64(begin + at) * heads + head) * 2
                own[p] = partial_scale[source]
                shared[totals + at] = partial_scale[source + 1]
            upto[p] = largest_up_to(own[p])
            if lane == np.int32(31):
                tops[at >> np.int32(5)] = upto[p]
        cuda.syncthreads()
        for p in static(2):
            at = np.int32(thread + np.int32(MERGE_THREADS * p))
            before = shuffle_up_f32(upto[p], np.int32(1))
            if lane == np.int32(0):
                before = LOWEST
            before = larger(before, carried)
            for group in range(at >> np.int32(5)):
                before = larger(before, tops[group])
            if at < at_once:
                kept, taken = ONE, np.float32(-1.0)  # nothing is taken
                if own[p] > LOWEST:
                    _new, kept, taken = merge_weights(before, own[p])
                shared[factors + at] = kept
                shared[others + at] = taken
        for group in range(TOPS):
            carried = larger(carried, tops[group])
        wait_all_copies()
        cuda.syncthreads()
        if thread <= np.int32(64):
            step = np.int32(64) if thread < np.int32(64) else np.int32(1)
            place = thread if thread < np.int32(64) else totals
            for at in range(0, count, 16):
                x = registers(16, ZERO)
                factor = registers(16, ONE)
                other = registers(16, ZERO)
                for i in static(16):
                    x[i] = shared[np.int32(place + np.int32(np.int32(np.int32(at) + np.int32(i)) * step))]
                    factor[i] = shared[np.int32(factors + np.int32(at) + np.int32(i))]
                    other[i] = shared[np.int32(others + np.int32(at) + np.int32(i))]
                for i in static(16):
                    if other[i] >= ZERO:
                        state = merged(state, factor[i], x[i], other[i])
        cuda.syncthreads()
    if thread <= np.int32(64):
        shared[thread] = state
    cuda.syncthreads()
    if thread < np.int32(32):
        target = (np.int64(row) * heads + head) * 32 + thread
        if first < last:
            share = inverse(shared[64])
            place = np.int32(
                np.int32(np.int32(thread & np.int32(3)) * np.int32(16))
                + np.int32(np.int32(thread >> np.int32(2)) * np.int32(2))
            )
            out[target] = pack(mul(shared[place], share), mul(shared[place + 1], share))
        else:
            out[target] = np.uint32(0)
