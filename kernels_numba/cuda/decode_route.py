"""The router of decode rounds: logits in a kernel of few blocks; every block of the experts' products then chooses and
groups for itself, so that nothing but 64 numbers a row stands between the router and the first weights.

The choice has the bits of `norm_route`, which runs where this doesn't: the same functions in the same order.
"""

from __future__ import annotations

import numpy as np
from numba import cuda

from .compiler import kernel
from .functions import ZERO
from .products import STARTS, table_start
from .ptx import (
    broadcast,
    broadcast_f32,
    load_fresh_f32,
    population,
    shared_load,
    shared_load_32,
    shared_or,
    shared_store,
    shared_store_32,
    shuffle_up,
    store_32,
)
from .route import (
    LINE_WORDS,
    LINES_WORDS,
    MOST_EXPERTS,
    NOBODY,
    PARTS,
    ROUTE_ROWS,
    ROUTE_THREADS,
    TILE,
    chosen_bits,
    expert_score,
    final_weight,
    lowest_bit,
    norm_line,
    order,
    weight_line,
)
from .scalar import (
    add,
    bits_of,
    device,
    float_of,
    let_next_start,
    load4,
    load4_shared,
    mma,
    wait_for_earlier,
)
from .unroll import registers, static, unrolled

u32, i32, u64 = np.uint32, np.int32, np.uint64

CHOICE_ROWS = 64
"""Most rows that a block of the experts' products chooses for."""
CHOICE_PAIRS = 512
LATER_ROWS, PAIRS, WEIGHTS, NUMBERS = 256, 512, 2560, 4608
"""Where, behind the experts' rows 0 to 31 as bits, rows 32 to 63, the pairs, weights and experts [row, choice] lie."""
CHOICE_BYTES = 6656
PADDING = np.float32(-np.inf)
"""Logits of rows that are padding."""


@kernel("u32* u32* f32 u32* u32* i32* i32* i32 i32 i32 f32*", threads=ROUTE_THREADS)
@unrolled
def route_logits(h, norm_weight, eps, x, gate, row_segment, seg_slot, rows, hidden, experts, logits):
    """x = RMSNorm of rows h, and the router's logits [rows, 64] float32 = gate x, or PADDING.

    h, x [rows, hidden], gate [experts, hidden] bf16 in pairs, hidden a multiple of 32 up to 2048. Grid [rows / 8,
    tiles of 16 experts], 256 threads.
    """
    lines = cuda.shared.array(LINES_WORDS, np.uint32, alignment=16)
    parts = cuda.shared.array((PARTS, TILE, ROUTE_ROWS), np.float32)
    let_next_start()
    thread = i32(cuda.threadIdx.x)
    lane, warp = i32(thread & i32(31)), i32(thread >> i32(5))
    line, column = i32(lane >> i32(2)), i32(lane & i32(3))
    first = i32(i32(cuda.blockIdx.x) * i32(ROUTE_ROWS))
    tile = i32(cuda.blockIdx.y)
    chunks = i32(hidden >> i32(5))
    chunk = i32(i32(chunks * warp) >> 3)
    count = i32(i32(i32(chunks * i32(warp + i32(1))) >> 3) - chunk)
    low = np.int64(min(i32(tile * TILE + line), experts - 1)) * (hidden >> 1) + column * 4
    high = np.int64(min(i32(tile * TILE + line + 8), experts - 1)) * (hidden >> 1) + column * 4
    a = registers(32, u32(0))
    b = registers(32, u32(0))
    for i in static(8):
        if i32(i) < count:
            a[4 * i], a[4 * i + 1], a[4 * i + 2], a[4 * i + 3] = load4(gate, low + (chunk + i) * 16)
            b[4 * i], b[4 * i + 1], b[4 * i + 2], b[4 * i + 3] = load4(gate, high + (chunk + i) * 16)
    weights = weight_line(norm_weight, hidden, lane)
    at, e = thread & 7, thread >> 3
    padding = seg_slot[row_segment[min(first + at, rows - 1)]] < 0
    wait_for_earlier()
    row = i32(min(i32(first + warp), rows - 1))
    norm_line(h, weights, eps, hidden, row, lane, lines, warp, x, tile == 0 and first + warp < rows)
    cuda.syncthreads()
    source = min(line, i32(rows - first - 1)) * LINE_WORDS + column * 4
    sums = registers(4, ZERO)
    for i in static(8):
        if i32(i) < count:
            c = registers(4)
            c = load4_shared(lines, source + (chunk + i) * 16)
            sums = mma(a[4 * i], b[4 * i], a[4 * i + 1], b[4 * i + 1], c[0], c[1], sums)
            sums = mma(a[4 * i + 2], b[4 * i + 2], a[4 * i + 3], b[4 * i + 3], c[2], c[3], sums)
    parts[warp, line, column * 2] = sums[0]
    parts[warp, line, column * 2 + 1] = sums[1]
    parts[warp, line + 8, column * 2] = sums[2]
    parts[warp, line + 8, column * 2 + 1] = sums[3]
    cuda.syncthreads()
    expert = tile * TILE + e
    if e < TILE and expert < experts and first + at < rows:
        total = parts[0, e, at]
        for part in range(1, PARTS):
            total = add(total, parts[part, e, at])
        logits[np.int64(first + at) * MOST_EXPERTS + expert] = PADDING if padding else total


@device
def own_values(values, lane, experts, otherwise):
    """A lane's two of `experts` float32 in global memory: lane and lane + 32."""
    low, high = otherwise, otherwise
    if values != u64(0):
        at = u64(values + u64(u32(lane)) * u64(4))
        if lane < experts:
            low = load_fresh_f32(at)
        if i32(lane + i32(32)) < experts:
            high = load_fresh_f32(u64(at + u64(128)))
    return low, high


@device
def logits_of(logits, row, rows, lane, experts):
    """A row's logits; past the last row, as padding."""
    if row < rows:
        return own_values(u64(logits + u64(u32(i32(row * i32(4 * MOST_EXPERTS))))), lane, experts, PADDING)
    return PADDING, PADDING


@device
def choose_row(low, high, bias_low, bias_high, has_bias, experts, top_k, normalize, scaling, lane):
    """By a warp, of a row's logits: the weight and the number of the lane-th chosen expert, in ascending order."""
    score_low, score_high = expert_score(low), expert_score(high)
    order_low, order_high = u32(0), u32(0)
    if lane < experts:
        order_low = order(add(score_low, bias_low) if has_bias else score_low)
    if i32(lane + i32(32)) < experts:
        order_high = order(add(score_high, bias_high) if has_bias else score_high)
    chosen_low, chosen_high = chosen_bits(order_low, order_high, lane, top_k)
    total, mine, number, j = ZERO, ZERO, i32(0), i32(0)
    left = chosen_low
    while left != u32(0):
        e = lowest_bit(left)
        value = broadcast_f32(score_low, e)
        left = u32(left & u32(left - u32(1)))
        total = add(total, value)
        if j == lane:
            mine = value
            number = e
        j = i32(j + i32(1))
    left = chosen_high
    while left != u32(0):
        e = lowest_bit(left)
        value = broadcast_f32(score_high, e)
        left = u32(left & u32(left - u32(1)))
        total = add(total, value)
        if j == lane:
            mine = value
            number = i32(e + i32(32))
        j = i32(j + i32(1))
    return final_weight(mine, total, normalize != i32(0), scaling), number


@device
def choose_and_group(
    logits, bias, bias_low, bias_high, rows, experts, top_k, normalize, scaling, place, shift, table, area, lane, warp,
    warps,
):  # fmt: skip
    """By all warps of a block: the group table (see `group_table`) and, at `area`, whose rows the pairs are and their
    weights (see `pair_row` and `pair_weight`). place [rows, top_k], where given: the pair of each choice, -1 for
    padding rows."""
    low, high = logits_of(logits, warp, rows, lane, experts)
    row = warp
    while row < rows:
        next_low, next_high = logits_of(logits, i32(row + warps), rows, lane, experts)
        weight, number = choose_row(
            low, high, bias_low, bias_high, bias != u64(0), experts, top_k, normalize, scaling, lane
        )
        if broadcast_f32(low, i32(0)) == PADDING:
            number = i32(NOBODY)
        if lane < top_k:
            at = u32(area + u32(i32(i32(row * top_k) + lane)) * u32(4))
            shared_store_32(u32(at + u32(WEIGHTS)), bits_of(weight))
            shared_store(u32(at + u32(NUMBERS)), number)
            if number >= i32(0):
                word = u32(area + u32(row >> i32(5)) * u32(LATER_ROWS) + u32(number) * u32(4))
                shared_or(word, u32(u32(1) << u32(row & i32(31))))
        low, high = next_low, next_high
        row = i32(row + warps)
    cuda.syncthreads()
    if warp == i32(0):
        scan_choices(area, experts, shift, table, lane)
    cuda.syncthreads()
    row = warp
    while row < rows:
        if lane < top_k:
            at = i32(i32(row * top_k) + lane)
            number = shared_load(u32(area + u32(NUMBERS) + u32(at) * u32(4)))
            pair = i32(NOBODY)
            if number >= i32(0):
                word = u32(area + u32(number) * u32(4))
                first, before = shared_load_32(word), u32(u32(u32(1) << u32(row & i32(31))) - u32(1))
                pair = table_start(table, number)
                if row < i32(32):
                    pair = i32(pair + population(u32(first & before)))
                else:
                    second = shared_load_32(u32(word + u32(LATER_ROWS)))
                    pair = i32(i32(pair + population(first)) + population(u32(second & before)))
                shared_store(u32(area + u32(PAIRS) + u32(pair) * u32(4)), i32(i32(at << i32(8)) | row))
            if place != u64(0):
                store_32(u64(place + u64(u32(at)) * u64(4)), u32(pair))
        row = i32(row + warps)
    cuda.syncthreads()


@device
def no_choices(area, thread, threads):
    """Before `choose_and_group`, by the block: no expert has rows."""
    for word in range(thread, 2 * MOST_EXPERTS, threads):
        shared_store_32(u32(area + u32(word) * u32(4)), u32(0))


@device
def pair_row(area, pair):
    """The row of a pair."""
    return i32(shared_load(u32(area + u32(PAIRS) + u32(pair) * u32(4))) & i32(255))


@device
def pair_weight(area, pair):
    """The routing weight of a pair."""
    at = i32(shared_load(u32(area + u32(PAIRS) + u32(pair) * u32(4))) >> i32(8))
    return float_of(shared_load_32(u32(area + u32(WEIGHTS) + u32(at) * u32(4))))


@device
def rows_of(word):
    """How many rows an expert has."""
    return i32(population(shared_load_32(word)) + population(shared_load_32(u32(word + u32(LATER_ROWS)))))


@device
def scan_choices(area, experts, shift, table, lane):
    """By one warp: `group_table` of the experts that rows chose."""
    low = rows_of(u32(area + u32(lane) * u32(4)))
    high = rows_of(u32(area + u32(lane) * u32(4) + u32(128)))
    more = i32(i32(i32(1) << shift) - i32(1))
    groups_low, groups_high = i32(i32(low + more) >> shift), i32(i32(high + more) >> shift)
    for step in (1, 2, 4, 8, 16):
        a, b = shuffle_up(low, i32(step)), shuffle_up(high, i32(step))
        c, d = shuffle_up(groups_low, i32(step)), shuffle_up(groups_high, i32(step))
        if lane >= i32(step):
            low, high = i32(low + a), i32(high + b)
            groups_low, groups_high = i32(groups_low + c), i32(groups_high + d)
    high = i32(high + broadcast(low, i32(31)))
    groups_high = i32(groups_high + broadcast(groups_low, i32(31)))
    starts = u32(table + u32(STARTS))
    if lane == i32(0):
        shared_store(table, i32(0))
        shared_store(starts, i32(0))
    after = u32(u32(lane) * u32(4) + u32(4))
    if lane < experts:
        shared_store(u32(table + after), groups_low)
        shared_store(u32(starts + after), low)
    if i32(lane + i32(32)) < experts:
        shared_store(u32(table + after + u32(128)), groups_high)
        shared_store(u32(starts + after + u32(128)), high)
