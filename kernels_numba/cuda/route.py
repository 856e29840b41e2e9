"""Mixture of experts beside its products: the router, rows grouped by expert, and the sum over experts.

A router logit is the sum of four quarters of k, each in ascending order 16 at a time, added in order; the same kernel
serves prompts and decode rounds.
"""

from __future__ import annotations

import numpy as np
from numba import cuda

from .compiler import kernel
from .functions import ZERO, device, high_half, low_half, pack, rounded, sigmoid
from .norm import norm_pair, row_scale, square_sum
from .scalar import SIMULATED, add, div, let_next_start, load4, mul, store4, wait_for_earlier
from .unroll import registers, static, unrolled

if not SIMULATED:
    from .ptx import mma

MOST_EXPERTS = 64
QUARTERS = 4
TILES = MOST_EXPERTS // 16
ROUTE_THREADS = 32 * QUARTERS * TILES
ROUTE_ROWS = 8  # rows of one block
EPSILON = np.float32(1e-6)
NOBODY = -1  # the expert id and the place of a padding row


@device
def ranks_before(value, expert, other_value, other):
    """Whether `other` is chosen before `expert`: the larger value, of equal ones the lower id."""
    return other_value > value or (other_value == value and other < expert)


@device
def choose(scores, choice, chosen, row, at, lane, experts, top_k, normalize, scaling, padding, ids, weights):
    """Top-k of one row by 32 lanes. scores, choice, chosen [8, 64] are shared memory; `at` is the row's line there."""
    for e in range(lane, experts, 32):
        value = choice[at, e]
        before = 0
        for other in range(experts):
            if ranks_before(value, e, choice[at, other], other):
                before += 1
        chosen[at, e] = 1 if before < top_k else 0
    cuda.syncthreads()
    if lane == 0:
        out = np.int64(row) * top_k
        total = ZERO
        for e in range(experts):
            if chosen[at, e] == 1:
                total = add(total, scores[at, e])
        divisor = rounded(add(rounded(total), EPSILON))
        j = 0
        for e in range(experts):
            if chosen[at, e] == 1 and j < top_k:
                weight = rounded(div(scores[at, e], divisor)) if normalize else scores[at, e]
                ids[out + j] = NOBODY if padding else e
                weights[out + j] = rounded(mul(weight, scaling))
                j += 1
        for i in range(j, top_k):  # only where scores are NaN
            ids[out + i] = NOBODY
            weights[out + i] = ZERO


@device
def score(logit, bias, has_bias, scores, choice, at, e):
    value = rounded(sigmoid(rounded(logit)))
    scores[at, e] = value
    choice[at, e] = add(value, bias[e]) if has_bias else value


@kernel("f32* f32* i32 i32* i32* i32 i32 i32 i32 f32 i32* f32*", threads=256)
def choose_experts(logits, bias, has_bias, row_segment, seg_slot, rows, experts, top_k, normalize, scaling, ids, weights):
    """`route` from given logits [rows, experts]. Grid [rows / 8], 256 threads."""
    let_next_start()
    wait_for_earlier()
    scores = cuda.shared.array((ROUTE_ROWS, MOST_EXPERTS), np.float32)
    choice = cuda.shared.array((ROUTE_ROWS, MOST_EXPERTS), np.float32)
    chosen = cuda.shared.array((ROUTE_ROWS, MOST_EXPERTS), np.int32)
    at, lane = cuda.threadIdx.x >> 5, cuda.threadIdx.x & 31
    row = cuda.blockIdx.x * ROUTE_ROWS + at
    last = min(row, rows - 1)
    for e in range(lane, experts, 32):
        score(logits[np.int64(last) * experts + e], bias, has_bias, scores, choice, at, e)
    cuda.syncthreads()
    padding = seg_slot[row_segment[last]] < 0
    # rows past the end repeat the last one, so that all threads meet at the barriers; they write the same values
    choose(scores, choice, chosen, last, at, lane, experts, top_k, normalize, scaling, padding, ids, weights)


@kernel("u32* u32* f32* i32 i32* i32* i32 i32 i32 i32 i32 f32 i32* f32*", threads=ROUTE_THREADS)
@unrolled
def route(x, gate, bias, has_bias, row_segment, seg_slot, rows, hidden, experts, top_k, normalize, scaling, ids, weights):
    """Choose top_k experts a row: largest r(sigmoid(r(gate x))) + bias, ties to the lower id.

    x [rows, hidden], gate [experts, hidden] bf16 in pairs, hidden a multiple of 32. ids [rows, top_k] ascend; weights are the
    chosen sigmoids, divided by their sum (+ 1e-6) if `normalize`, times `scaling`. Padding rows get id -1.
    Grid [rows / 8], 512 threads: warp w takes quarter w / 4 of k for experts 16 (w % 4) ... + 15.
    """
    let_next_start()
    wait_for_earlier()
    parts = cuda.shared.array((QUARTERS, MOST_EXPERTS, ROUTE_ROWS), np.float32)
    scores = cuda.shared.array((ROUTE_ROWS, MOST_EXPERTS), np.float32)
    choice = cuda.shared.array((ROUTE_ROWS, MOST_EXPERTS), np.float32)
    chosen = cuda.shared.array((ROUTE_ROWS, MOST_EXPERTS), np.int32)
    thread = np.int32(cuda.threadIdx.x)
    lane, warp = np.int32(thread & np.int32(31)), np.int32(thread >> np.int32(5))
    first = np.int32(np.int32(cuda.blockIdx.x) * np.int32(ROUTE_ROWS))
    quarter, tile = np.int32(warp >> np.int32(2)), np.int32(warp & np.int32(3))
    line, column = np.int32(lane >> np.int32(2)), np.int32(lane & np.int32(3))
    if tile * 16 < experts:
        # lane (line, column) holds k = 32 c + 8 column ... + 7 of chunk c: the order within a chunk is free
        chunks = hidden >> 5
        start, stop = chunks * quarter // QUARTERS, chunks * (quarter + 1) // QUARTERS
        low = np.int64(min(np.int32(tile * 16 + line), experts - 1)) * (hidden >> 1) + column * 4
        high = np.int64(min(np.int32(tile * 16 + line + 8), experts - 1)) * (hidden >> 1) + column * 4
        source = np.int64(min(np.int32(first + line), rows - 1)) * (hidden >> 1) + column * 4
        sums = registers(4, ZERO)
        chunk = start
        while chunk + 4 <= stop:
            a = registers(16)
            b = registers(16)
            c = registers(16)
            for i in static(4):
                a[4 * i], a[4 * i + 1], a[4 * i + 2], a[4 * i + 3] = load4(gate, low + (chunk + i) * 16)
                b[4 * i], b[4 * i + 1], b[4 * i + 2], b[4 * i + 3] = load4(gate, high + (chunk + i) * 16)
                c[4 * i], c[4 * i + 1], c[4 * i + 2], c[4 * i + 3] = load4(x, source + (chunk + i) * 16)
            for i in static(8):
                sums[0], sums[1], sums[2], sums[3] = mma(
                    a[2 * i], b[2 * i], a[2 * i + 1], b[2 * i + 1], c[2 * i], c[2 * i + 1], sums[0], sums[1], sums[2], sums[3]
                )
            chunk += 4
        while chunk < stop:
            a0, a1, a2, a3 = load4(gate, low + chunk * 16)
            b0, b1, b2, b3 = load4(gate, high + chunk * 16)
            c0, c1, c2, c3 = load4(x, source + chunk * 16)
            sums[0], sums[1], sums[2], sums[3] = mma(a0, b0, a1, b1, c0, c1, sums[0], sums[1], sums[2], sums[3])
            sums[0], sums[1], sums[2], sums[3] = mma(a2, b2, a3, b3, c2, c3, sums[0], sums[1], sums[2], sums[3])
            chunk += 1
        parts[quarter, tile * 16 + line, column * 2] = sums[0]
        parts[quarter, tile * 16 + line, column * 2 + 1] = sums[1]
        parts[quarter, tile * 16 + line + 8, column * 2] = sums[2]
        parts[quarter, tile * 16 + line + 8, column * 2 + 1] = sums[3]
    cuda.syncthreads()
    at, e = thread & 7, thread >> 3
    if e < experts:
        total = parts[0, e, at]
        for q in static(1, 4):
            total = add(total, parts[q, e, at])
        score(total, bias, has_bias, scores, choice, at, e)
    cuda.syncthreads()
    at = warp & 7
    row = min(np.int32(first + at), rows - 1)
    padding = seg_slot[row_segment[row]] < 0
    choose(scores, choice, chosen, row, at, lane, experts, top_k, normalize, scaling, padding, ids, weights)


GROUP_THREADS = 256


@kernel("i32* f32* i32 i32 i32 i32* i32* f32* i32*", threads=GROUP_THREADS)
def group_rows(ids, weights, rows, top_k, experts, starts, pair_row, pair_weight, place):
    """Rows by expert: expert e's are pair_row[starts[e]:starts[e + 1]], ascending, with their weights in pair_weight;
    place[row, j] is where row's j-th expert is.

    Padding rows are nobody's and get place -1. Grid [experts], 256 threads; a block counts what comes before its expert.
    """
    let_next_start()
    wait_for_earlier()
    counts = cuda.shared.array(GROUP_THREADS, np.int32)
    mine = cuda.shared.array(GROUP_THREADS, np.int32)
    thread, e = cuda.threadIdx.x, cuda.blockIdx.x
    pairs = rows * top_k
    share = (pairs + GROUP_THREADS - 1) // GROUP_THREADS
    first, last = min(thread * share, pairs), min((thread + 1) * share, pairs)
    lower = 0
    equal = 0
    for i in range(first, last):
        expert = ids[i]
        if expert >= 0 and expert < e:
            lower += 1
        if expert == e:
            equal += 1
        if e == 0 and expert < 0:
            place[i] = NOBODY
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
    at = start + mine[thread] - equal
    for i in range(first, last):
        if ids[i] == e:
            pair_row[at] = i // top_k
            pair_weight[at] = weights[i]
            place[i] = at
            at += 1
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
def expert_sum(y, place, residual, row, piece, pieces, top_k):
    """8 values of r(residual + r(sum of y)), the sum in float32 in ascending expert id; y is weighted already."""
    s0, s1, s2, s3 = (ZERO, ZERO), (ZERO, ZERO), (ZERO, ZERO), (ZERO, ZERO)
    for j in range(top_k):
        at = place[np.int64(row) * top_k + j]
        if at >= 0:
            a, b, c, d = load4(y, (np.int64(at) * pieces + piece) * 4)
            s0, s1, s2, s3 = plus(s0, a), plus(s1, b), plus(s2, c), plus(s3, d)
    a, b, c, d = load4(residual, (np.int64(row) * pieces + piece) * 4)
    return added(a, s0), added(b, s1), added(c, s2), added(d, s3)


@kernel("u32* i32* u32* i32 i32 u32*", threads=256)
def combine_experts(y, place, residual, top_k, hidden, out):
    """out = residual + the row's weighted experts, bf16 [rows, hidden]. Grid [rows], 256 threads. `out` may be `residual`."""
    let_next_start()
    wait_for_earlier()
    row = cuda.blockIdx.x
    pieces = hidden >> 3
    for piece in range(cuda.threadIdx.x, pieces, 256):
        a, b, c, d = expert_sum(y, place, residual, row, piece, pieces, top_k)
        store4(out, (np.int64(row) * pieces + piece) * 4, a, b, c, d)


@kernel("u32* i32* u32* i32 u32* f32 i32 u32* u32*", threads=256)
def combine_experts_norm(y, place, residual, top_k, norm_weight, eps, hidden, out, normed):
    """`combine_experts`, and the RMSNorm of its result for the next layer. Grid [rows], 256 threads."""
    let_next_start()
    wait_for_earlier()
    partial = cuda.shared.array(256, np.float32)
    row = cuda.blockIdx.x
    pieces = hidden >> 3
    total = ZERO
    for piece in range(cuda.threadIdx.x, pieces, 256):
        a, b, c, d = expert_sum(y, place, residual, row, piece, pieces, top_k)
        store4(out, (np.int64(row) * pieces + piece) * 4, a, b, c, d)
        total = add(total, square_sum(a, b, c, d))
    scale = row_scale(total, partial, hidden, eps)
    for piece in range(cuda.threadIdx.x, pieces, 256):
        at = (np.int64(row) * pieces + piece) * 4
        a, b, c, d = load4(out, at)
        e, f, g, h = load4(norm_weight, piece * 4)
        store4(normed, at, norm_pair(a, e, scale), norm_pair(b, f, scale), norm_pair(c, g, scale), norm_pair(d, h, scale))
