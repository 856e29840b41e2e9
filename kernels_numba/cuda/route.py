"""Mixture of experts beside its products: the router, rows grouped by expert, and the sum over experts.

A router logit is the sum of eight parts of k, each in ascending order 16 at a time, added in order; the same kernel
serves prompts and decode rounds.
"""

from __future__ import annotations

import numpy as np
from numba import cuda

from .compiler import kernel
from .functions import ZERO, high_half, low_half, pack, rounded, sigmoid
from .norm import lane_sum, norm_pair, row_scale, square_sum
from .scalar import (
    add,
    atomic_add,
    ballot,
    bits_of,
    device,
    div,
    let_next_start,
    load4,
    load4_shared,
    mma,
    mul,
    store4,
    store4_shared,
    wait_for_earlier,
    warp_largest,
)
from .unroll import registers, static, unrolled

MOST_EXPERTS = 64
PARTS = 8  # of k, summed in order
TILE = 16  # experts of a tensor-core tile
ROUTE_ROWS = 8  # rows of one block, and its warps
ROUTE_THREADS = 32 * PARTS
MOST_HIDDEN = 2048
MOST_TOP = 8  # experts a row
LINE_WORDS = MOST_HIDDEN // 2 + 16  # of a normed row in shared memory: two lines don't share banks
LINES_WORDS = ROUTE_ROWS * LINE_WORDS
MOST_PAIRS = ROUTE_ROWS * MOST_TOP
SPREAD_BLOCKS = 32  # blocks of rows up to which each tile of experts gets a block of its own
EPSILON = np.float32(1e-6)
NOBODY = -1  # the expert id and the place of a padding row


@device
def order(value):
    """Whole numbers above 0 that ascend with the value; -0.0 is 0.0."""
    bits = bits_of(add(value, ZERO))
    if bits >> np.uint32(31):
        return np.uint32(~bits)
    return np.uint32(bits | np.uint32(0x80000000))


@device
def lowest_bit(bits):
    """Number of the lowest bit that is set."""
    return np.int32(np.int32(cuda.ffs(bits)) - np.int32(1))


@device
def chosen_bits(low, high, lane, top_k):
    """Top-k of a warp's choices in `order` form (a lane has experts lane and lane + 32), as bits of two words: the
    largest, of equal ones the lower id."""
    chosen_low, chosen_high = np.uint32(0), np.uint32(0)
    for _ in range(top_k):
        best = warp_largest(max(low, high))
        where_low, where_high = ballot(np.uint32(low == best)), ballot(np.uint32(high == best))
        if where_low != np.uint32(0):
            e = lowest_bit(where_low)
            chosen_low = np.uint32(chosen_low | np.uint32(np.uint32(1) << np.uint32(e)))
            if lane == e:
                low = np.uint32(0)
        else:
            e = lowest_bit(where_high)
            chosen_high = np.uint32(chosen_high | np.uint32(np.uint32(1) << np.uint32(e)))
            if lane == e:
                high = np.uint32(0)
    return chosen_low, chosen_high


@device
def choose(choice, at, lane, experts, top_k):
    """`chosen_bits` of line `at` of a shared array."""
    low, high = np.uint32(0), np.uint32(0)
    if lane < experts:
        low = order(choice[at, lane])
    if lane + 32 < experts:
        high = order(choice[at, lane + 32])
    return chosen_bits(low, high, lane, top_k)


@device
def final_weight(value, total, normalize, scaling):
    """A chosen expert's weight from its score and the sum of the row's chosen scores."""
    if normalize:
        value = rounded(div(value, rounded(add(rounded(total), EPSILON))))
    return rounded(mul(value, scaling))


@device
def write_choice(scores, at, lane, chosen_low, chosen_high, normalize, scaling, padding, ids, weights, out):
    """The chosen ids, ascending, and their weights to out, out + 1, ...; a lane writes one of them and returns it."""
    total = ZERO
    mine, number, j = ZERO, NOBODY, 0
    for word in range(2):
        left = chosen_low if word == 0 else chosen_high
        while left != np.uint32(0):
            e = lowest_bit(left) + word * 32
            left = np.uint32(left & np.uint32(left - np.uint32(1)))
            value = scores[at, e]
            total = add(total, value)
            if j == lane:
                mine, number = value, e
            j += 1
    if padding:
        number = NOBODY
    mine = final_weight(mine, total, normalize, scaling)
    if lane < j:
        ids[out + lane] = number
        weights[out + lane] = mine
    return number, mine


@device
def expert_score(logit):
    return rounded(sigmoid(rounded(logit)))


@device
def score(logit, bias, has_bias, scores, choice, at, e):
    value = expert_score(logit)
    scores[at, e] = value
    choice[at, e] = add(value, bias[e]) if has_bias else value


@device
@unrolled
def weight_line(weight, hidden, lane):
    """A lane's part of a norm's weights: pieces lane, lane + 32, ..."""
    words = registers(32, np.uint32(0))
    for g in static(8):
        piece = lane + 32 * g
        if piece < hidden >> 3:
            words[4 * g], words[4 * g + 1], words[4 * g + 2], words[4 * g + 3] = load4(weight, piece * 4)
    return words


@device
@unrolled
def norm_line(h, weights, eps, hidden, row, lane, lines, line, x, writes):
    """RMSNorm of a row by a warp, to shared memory and, if it `writes`, to x; the same order and bits as norm.py's."""
    pieces = hidden >> 3
    first = np.int64(row) * pieces
    total = ZERO
    words = registers(32, np.uint32(0))
    for g in static(8):
        piece = lane + 32 * g
        if piece < pieces:
            words[4 * g], words[4 * g + 1], words[4 * g + 2], words[4 * g + 3] = load4(h, (first + piece) * 4)
    for g in static(8):
        total = add(total, square_sum(words[4 * g], words[4 * g + 1], words[4 * g + 2], words[4 * g + 3]))
    scale = row_scale(total, hidden, eps)
    for g in static(8):
        piece = lane + 32 * g
        if piece < pieces:
            w = registers(4)
            for i in static(4):
                w[i] = norm_pair(words[4 * g + i], weights[4 * g + i], scale)
            store4_shared(lines, line * LINE_WORDS + piece * 4, w)
            if writes:
                store4(x, (first + piece) * 4, w)


@device
@unrolled
def tile_logits(gate, lines, parts, tile, first, rows, hidden, experts, warp, line, column):
    """This warp's part of k of the logits of 16 experts and 8 rows, to parts[warp].

    Lane (line, column) holds k = 32 c + 8 column ... + 7 of chunk c: the order within a chunk is free.
    """
    chunks = np.int32(hidden >> np.int32(5))
    chunk = np.int32(np.int32(chunks * warp) >> np.int32(3))
    stop = np.int32(np.int32(chunks * np.int32(warp + np.int32(1))) >> np.int32(3))
    low = np.int64(min(np.int32(tile * TILE + line), experts - 1)) * (hidden >> 1) + column * 4
    high = np.int64(min(np.int32(tile * TILE + line + 8), experts - 1)) * (hidden >> 1) + column * 4
    source = min(line, np.int32(rows - first - 1)) * LINE_WORDS + column * 4
    sums = registers(4, ZERO)
    while chunk + 4 <= stop:
        a = registers(16)
        b = registers(16)
        for i in static(4):
            a[4 * i], a[4 * i + 1], a[4 * i + 2], a[4 * i + 3] = load4(gate, low + (chunk + i) * 16)
            b[4 * i], b[4 * i + 1], b[4 * i + 2], b[4 * i + 3] = load4(gate, high + (chunk + i) * 16)
        for i in static(4):
            c = registers(4)
            c = load4_shared(lines, source + (chunk + i) * 16)
            sums = mma(a[4 * i], b[4 * i], a[4 * i + 1], b[4 * i + 1], c[0], c[1], sums)
            sums = mma(a[4 * i + 2], b[4 * i + 2], a[4 * i + 3], b[4 * i + 3], c[2], c[3], sums)
        chunk = np.int32(chunk + np.int32(4))
    while chunk < stop:
        d = registers(4)
        e = registers(4)
        c = registers(4)
        d = load4(gate, low + chunk * 16)
        e = load4(gate, high + chunk * 16)
        c = load4_shared(lines, source + chunk * 16)
        sums = mma(d[0], e[0], d[1], e[1], c[0], c[1], sums)
        sums = mma(d[2], e[2], d[3], e[3], c[2], c[3], sums)
        chunk = np.int32(chunk + np.int32(1))
    parts[warp, line, column * 2] = sums[0]
    parts[warp, line, column * 2 + 1] = sums[1]
    parts[warp, line + 8, column * 2] = sums[2]
    parts[warp, line + 8, column * 2 + 1] = sums[3]


@kernel(
    "u32* u32* f32 u32* u32* f32* i32 i32* i32* i32 i32 i32 i32 i32 f32 f32* u32* i32* f32* i32* i32* f32* i32*",
    threads=ROUTE_THREADS,
)
@unrolled
def norm_route(
    h, norm_weight, eps, x, gate, bias, has_bias, row_segment, seg_slot, rows, hidden, experts, top_k, normalize,
    scaling, logits, arrived, ids, weights, starts, pair_row, pair_weight, place,
):  # fmt: skip
    """x = RMSNorm of rows h, and top_k experts a row: largest r(sigmoid(r(gate x))) + bias, ties to the lower id.

    h, x [rows, hidden], gate [experts, hidden] bf16 in pairs, hidden a multiple of 32. ids [rows, top_k] ascend;
    weights are the chosen sigmoids, divided by their sum (+ 1e-6) if `normalize`, times `scaling`. Padding rows get
    id -1. Grid [rows / 8, 1 or tiles of 16 experts], 256 threads. With a block for each tile, the last of a row block
    to arrive chooses: logits [rows, 64] is scratch, arrived [rows / 8] counts and is 0 before and after. A single row
    block also groups the rows by expert (see `group_rows`).
    """
    lines = cuda.shared.array(LINES_WORDS, np.uint32, alignment=16)
    parts = cuda.shared.array((PARTS, TILE, ROUTE_ROWS), np.float32)
    scores = cuda.shared.array((ROUTE_ROWS, MOST_EXPERTS), np.float32)
    choice = cuda.shared.array((ROUTE_ROWS, MOST_EXPERTS), np.float32)
    chosen_ids = cuda.shared.array(MOST_PAIRS, np.int32)
    chosen_weights = cuda.shared.array(MOST_PAIRS, np.float32)
    last = cuda.shared.array(1, np.int32)
    let_next_start()
    thread = np.int32(cuda.threadIdx.x)
    lane, warp = np.int32(thread & np.int32(31)), np.int32(thread >> np.int32(5))
    line, column = np.int32(lane >> np.int32(2)), np.int32(lane & np.int32(3))
    first = np.int32(np.int32(cuda.blockIdx.x) * np.int32(ROUTE_ROWS))
    row = np.int32(min(np.int32(first + warp), rows - 1))
    norm_words = weight_line(norm_weight, hidden, lane)
    wait_for_earlier()
    norm_line(h, norm_words, eps, hidden, row, lane, lines, warp, x, cuda.blockIdx.y == 0 and first + warp < rows)
    cuda.syncthreads()
    spread = cuda.gridDim.y > 1
    at, e = thread & 7, thread >> 3
    for tile in range(cuda.blockIdx.y, (experts + TILE - 1) // TILE, cuda.gridDim.y):
        tile_logits(gate, lines, parts, tile, first, rows, hidden, experts, warp, line, column)
        cuda.syncthreads()
        expert = tile * TILE + e
        if e < TILE and expert < experts:
            total = parts[0, e, at]
            for part in range(1, PARTS):
                total = add(total, parts[part, e, at])
            if spread:
                logits[np.int64(first + at) * MOST_EXPERTS + expert] = total
            else:
                score(total, bias, has_bias, scores, choice, at, expert)
        cuda.syncthreads()
    if spread:
        if thread == 0:
            cuda.threadfence()
            before = atomic_add(arrived, cuda.blockIdx.x, np.uint32(1))
            last[0] = np.int32(before + np.uint32(1) == np.uint32(cuda.gridDim.y))
            if last[0] == 1:
                arrived[cuda.blockIdx.x] = np.uint32(0)
                cuda.threadfence()
        cuda.syncthreads()
        if last[0] == 0:
            return
        for expert in range(e, experts, ROUTE_THREADS >> 3):
            logit = logits[np.int64(first + at) * MOST_EXPERTS + expert]
            score(logit, bias, has_bias, scores, choice, at, expert)
        cuda.syncthreads()
    chosen_low, chosen_high = choose(choice, row - first, lane, experts, top_k)
    padding = seg_slot[row_segment[row]] < 0
    # a warp past the last row repeats that row, and writes the same
    number, weight = write_choice(
        scores,
        row - first,
        lane,
        chosen_low,
        chosen_high,
        normalize,
        scaling,
        padding,
        ids,
        weights,
        np.int64(row) * top_k,
    )
    if cuda.gridDim.x == 1:
        if lane < top_k and first + warp < rows:
            chosen_ids[warp * top_k + lane] = number
            chosen_weights[warp * top_k + lane] = weight
        cuda.syncthreads()
        group_few(
            chosen_ids, chosen_weights, rows * top_k, top_k, experts, thread, starts, pair_row, pair_weight, place
        )


@device
def before_pair(expert, pair, other_expert, other_pair):
    return expert < other_expert or (expert == other_expert and pair < other_pair)


@device
def group_few(ids, weights, pairs, top_k, experts, thread, starts, pair_row, pair_weight, place):
    """`group_rows` by a single block, for so few pairs that each thread looks at all of them."""
    if thread < pairs:
        e = ids[thread]
        at = 0
        for other in range(pairs):
            if ids[other] >= 0 and before_pair(ids[other], other, e, thread):
                at += 1
        place[thread] = at if e >= 0 else NOBODY
        if e >= 0:
            pair_row[at] = thread // top_k
            pair_weight[at] = weights[thread]
    if thread <= experts:
        count = 0
        for other in range(pairs):
            if ids[other] >= 0 and ids[other] < thread:
                count += 1
        starts[thread] = count


GROUP_THREADS = 256
NOTHING = -2  # past the last pair


@device
@unrolled
def some_ids(ids, at, last):
    """ids[at:at + 32] as far as `last`, then NOTHING; `at` is a multiple of 4."""
    found = registers(32, NOTHING)
    for j in static(8):
        if at + 4 * j + 4 <= last:
            a, b, c, d = load4(ids, np.int64(at + 4 * j))
            found[4 * j], found[4 * j + 1], found[4 * j + 2] = np.int32(a), np.int32(b), np.int32(c)
            found[4 * j + 3] = np.int32(d)
        else:
            for i in static(4):
                found[4 * j + i] = ids[at + 4 * j + i] if at + 4 * j + i < last else np.int32(NOTHING)
    return found


@kernel("i32* f32* i32 i32 i32 i32* i32* f32* i32*", threads=GROUP_THREADS)
@unrolled
def group_rows(ids, weights, rows, top_k, experts, starts, pair_row, pair_weight, place):
    """Rows by expert: expert e's are pair_row[starts[e]:starts[e + 1]], ascending, with their weights in pair_weight;
    place[row, j] is where row's j-th expert is.

    Padding rows are nobody's and get place -1. Grid [experts], 256 threads; a block counts what comes before its
    expert.
    """
    let_next_start()
    wait_for_earlier()
    counts = cuda.shared.array(GROUP_THREADS, np.int32)
    mine = cuda.shared.array(GROUP_THREADS, np.int32)
    thread, e = np.int32(cuda.threadIdx.x), np.int32(cuda.blockIdx.x)
    pairs = np.int32(rows * top_k)
    share = np.int32(np.int32((pairs + np.int32(4 * GROUP_THREADS - 1)) // np.int32(4 * GROUP_THREADS)) * np.int32(4))
    first, last = min(np.int32(thread * share), pairs), min(np.int32(np.int32(thread + 1) * share), pairs)
    lower = np.int32(0)
    equal = np.int32(0)
    for at in range(first, last, 32):
        expert = registers(32)
        expert = some_ids(ids, np.int32(at), last)
        for i in static(32):
            if expert[i] >= 0 and expert[i] < e:
                lower = np.int32(lower + np.int32(1))
            if expert[i] == e:
                equal = np.int32(equal + np.int32(1))
    counts[thread] = lower
    mine[thread] = equal
    cuda.syncthreads()
    stride = 1
    while stride < GROUP_THREADS:  # inclusive scan of `mine`, sum of `counts` in the last thread
        a, b = 0, 0
        if thread >= stride:
            a, b = counts[thread - stride], mine[thread - stride]
        cuda.syncthreads()
        counts[thread] += a
        mine[thread] += b
        cuda.syncthreads()
        stride *= 2
    start = counts[GROUP_THREADS - 1]
    target = np.int32(start + mine[thread] - equal)
    for at in range(first, last, 32):
        expert = registers(32)
        expert = some_ids(ids, np.int32(at), last)
        for i in static(32):
            if expert[i] == e:
                pair_row[target] = np.int32(np.int32(at) + np.int32(i))  # which pair, until all are found
                place[at + i] = target
                target = np.int32(target + np.int32(1))
            elif e == 0 and expert[i] == NOBODY:
                place[at + i] = NOBODY
    cuda.syncthreads()
    for at in range(start + thread, start + mine[GROUP_THREADS - 1], GROUP_THREADS):
        pair = pair_row[at]
        pair_row[at] = pair // top_k
        pair_weight[at] = weights[pair]
    if thread == 0:
        starts[e] = start
        if e == experts - 1:
            starts[experts] = start + mine[GROUP_THREADS - 1]


@device
def plus(total, pair):
    """A pair of running sums plus a pair of values."""
    return add(total[0], low_half(pair)), add(total[1], high_half(pair))


@device
def added(residual, total):
    """r(residual + r(total)) of two values."""
    return pack(add(low_half(residual), rounded(total[0])), add(high_half(residual), rounded(total[1])))


@device
@unrolled
def expert_sum(y, place, residual, row, piece, pieces, top_k):
    """8 values of r(residual + r(sum of y)), the sum in float32 in ascending expert id; y is weighted already."""
    rest = registers(4)
    rest = load4(residual, (np.int64(row) * pieces + piece) * 4)
    s0, s1, s2, s3 = (ZERO, ZERO), (ZERO, ZERO), (ZERO, ZERO), (ZERO, ZERO)
    for j in range(0, top_k, 4):
        at = registers(4)
        for i in static(4):
            at[i] = place[np.int64(row) * top_k + j + i] if j + i < top_k else NOBODY
        words = registers(16, np.uint32(0))
        for i in static(4):
            if at[i] >= 0:
                words[4 * i], words[4 * i + 1], words[4 * i + 2], words[4 * i + 3] = load4(
                    y, (np.int64(at[i]) * pieces + piece) * 4
                )
        for i in static(4):
            if at[i] >= 0:
                s0, s1 = plus(s0, words[4 * i]), plus(s1, words[4 * i + 1])
                s2, s3 = plus(s2, words[4 * i + 2]), plus(s3, words[4 * i + 3])
    return added(rest[0], s0), added(rest[1], s1), added(rest[2], s2), added(rest[3], s3)


@kernel("u32* i32* u32* i32 i32 u32*", threads=256)
def combine_experts(y, place, residual, top_k, hidden, out):
    """out = residual + the row's weighted experts, bf16 [rows, hidden]. Grid [rows], 256 threads. `out` may be
    `residual`."""
    let_next_start()
    wait_for_earlier()
    row = cuda.blockIdx.x
    pieces = hidden >> 3
    for piece in range(cuda.threadIdx.x, pieces, 256):
        a, b, c, d = expert_sum(y, place, residual, row, piece, pieces, top_k)
        store4(out, (np.int64(row) * pieces + piece) * 4, a, b, c, d)


@kernel("u32* i32* u32* i32 u32* f32 i32 u32* u32*", threads=256)
def combine_experts_norm(y, place, residual, top_k, norm_weight, eps, hidden, out, normed):
    """`combine_experts`, and the RMSNorm of its result for the next layer; hidden is at most 2048. Grid [rows], 256
    threads."""
    let_next_start()
    wait_for_earlier()
    partial = cuda.shared.array(256, np.float32)
    row = cuda.blockIdx.x
    pieces = hidden >> 3
    piece = cuda.threadIdx.x
    at = (np.int64(row) * pieces + piece) * 4
    squares = ZERO
    a, b, c, d = np.uint32(0), np.uint32(0), np.uint32(0), np.uint32(0)
    e, f, g, h = np.uint32(0), np.uint32(0), np.uint32(0), np.uint32(0)
    if piece < pieces:
        e, f, g, h = load4(norm_weight, piece * 4)
        a, b, c, d = expert_sum(y, place, residual, row, piece, pieces, top_k)
        store4(out, at, a, b, c, d)
        squares = square_sum(a, b, c, d)
    scale = row_scale(lane_sum(ZERO, squares, partial), hidden, eps)
    if piece < pieces:
        store4(
            normed, at, norm_pair(a, e, scale), norm_pair(b, f, scale), norm_pair(c, g, scale), norm_pair(d, h, scale)
        )
