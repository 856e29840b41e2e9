"""Causal attention over the paged K/V cache with an online softmax (arXiv 2205.14135).

Keys are taken in tiles of 64 at absolute positions, in ascending order, whatever the row's neighbours: a row at
position p sees exactly the keys [0, p], in the same tiles, as a prompt row and as a decoded one.
"""

from __future__ import annotations

import numpy as np

from ..batch import PAGE_ROWS
from ..jit import device, kernel
from .functions import exp, rounded
from .rope import HEAD, TILE
from .simd import LANES, keep_lanes, lane_max, lane_sum, larger, load, mix_tile, splat, store
from .team import spread

QUERIES = 16  # query vectors that share a tile of keys
SCALE = np.float32(0.125)  # 64 ** -0.5
MINUS_INFINITY = np.float32(-np.inf)
ZERO = np.float32(0.0)

_score_4, _score_2, _score_1 = (mix_tile(rows, TILE // LANES, True) for rows in (4, 2, 1))
_mix_4, _mix_2, _mix_1 = (mix_tile(rows, HEAD // LANES, False) for rows in (4, 2, 1))


@device
def score_tile(q, first, count, kv, keys, scores):
    """scores[m] = q[m] . key for the 64 positions of a tile, m in [first, count); its keys lie as [64 dims, TILE]."""
    m = first
    while m < count:
        if count - m >= 4:
            _score_4(q, m * HEAD, HEAD, kv, keys, HEAD, scores, m * TILE, TILE)
            m += 4
        elif count - m >= 2:
            _score_2(q, m * HEAD, HEAD, kv, keys, HEAD, scores, m * TILE, TILE)
            m += 2
        else:
            _score_1(q, m * HEAD, HEAD, kv, keys, HEAD, scores, m * TILE, TILE)
            m += 1


@device
def mix_values(weights, seen, first, count, kv, values, sums):
    """sums[m] += sum of weights[m, k] * value[k] over k < seen[m]; `seen` ascends from `first` to `count`."""
    m = first
    while m < count:
        rows = 4 if count - m >= 4 else (2 if count - m >= 2 else 1)
        shared = seen[m]
        if rows == 4:
            _mix_4(weights, m * TILE, TILE, kv, values, shared, sums, m * HEAD, HEAD)
        elif rows == 2:
            _mix_2(weights, m * TILE, TILE, kv, values, shared, sums, m * HEAD, HEAD)
        else:
            _mix_1(weights, m * TILE, TILE, kv, values, shared, sums, m * HEAD, HEAD)
        for i in range(m + 1, m + rows):
            rest = seen[i] - shared
            _mix_1(weights, i * TILE + shared, TILE, kv, values + shared * HEAD, rest, sums, i * HEAD, HEAD)
        m += rows


@device
def softmax_step(scores, m, seen, largest, totals, sums):
    """Turn row m's scores of one tile into weights exp(score - largest) and rescale what was summed before.

    Keys from `seen` on get weight 0, whatever their score was.
    """
    lowest = splat(MINUS_INFINITY)
    best = splat(largest[m])
    for at in range(0, TILE, LANES):
        lanes = keep_lanes(load(scores, m * TILE + at), seen - at, lowest)
        store(scores, m * TILE + at, lanes)
        best = larger(lanes, best)
    new_largest = lane_max(best)
    shrink = splat(exp(largest[m] - new_largest))
    largest[m] = new_largest
    total = load(totals, m * LANES) * shrink
    for at in range(0, TILE, LANES):
        weight = exp(load(scores, m * TILE + at) - splat(new_largest))
        store(scores, m * TILE + at, weight)
        total = total + weight
    store(totals, m * LANES, total)
    for at in range(0, HEAD, LANES):
        store(sums, m * HEAD + at, load(sums, m * HEAD + at) * shrink)


@device
def attend(q, row, rows, head, group, position, kv, layout, layer, pages, out, bf16, scratch):
    """`rows` rows from `row` on, at positions from `position` on, with the `group` query heads of one K/V head."""
    queries, scores, totals, sums, largest, seen = scratch
    layers, kv_heads = layout
    heads = kv_heads * group
    count = rows * group
    for m in range(count):
        source = ((row + m // group) * heads + head * group + m % group) * HEAD
        for at in range(0, HEAD, LANES):
            store(queries, m * HEAD + at, load(q, source + at) * splat(SCALE))
            store(sums, m * HEAD + at, splat(ZERO))
        store(totals, m * LANES, splat(ZERO))
        largest[m] = MINUS_INFINITY
    end = position + rows  # keys seen by the last row
    for start in range(0, end, TILE):
        page = np.int64(pages[start // PAGE_ROWS])
        keys = ((page * layers + layer) * 2 * kv_heads + head) * PAGE_ROWS * HEAD + start % PAGE_ROWS * HEAD
        values = keys + kv_heads * PAGE_ROWS * HEAD
        first = max(0, start - position) * group  # rows before this see no key of the tile
        score_tile(queries, first, count, kv, keys, scores)
        for m in range(first, count):
            seen[m] = min(TILE, position + m // group + 1 - start)
            softmax_step(scores, m, seen[m], largest, totals, sums)
        mix_values(scores, seen, first, count, kv, values, sums)
    for m in range(count):
        target = ((row + m // group) * heads + head * group + m % group) * HEAD
        total = splat(lane_sum(load(totals, m * LANES)))
        for at in range(0, HEAD, LANES):
            store(out, target + at, rounded(load(sums, m * HEAD + at) / total, bf16))


@device
def attention_part(part, parts, q, kv, layout, layer, positions, seg_start, seg_slot, page_table, out, bf16):
    """Every `parts`-th task; a task is a K/V head and a block of a segment's rows."""
    scratch = (
        np.empty((QUERIES, HEAD), np.float32),
        np.empty((QUERIES, TILE), np.float32),
        np.empty((QUERIES, LANES), np.float32),
        np.empty((QUERIES, HEAD), np.float32),
        np.empty(QUERIES, np.float32),
        np.empty(QUERIES, np.int64),
    )
    kv_heads = layout[1]
    group = q.shape[1] // HEAD // kv_heads
    block = max(1, QUERIES // group)
    task = 0
    for segment in range(seg_slot.size):
        pages = page_table[seg_slot[segment]]
        last = np.int64(seg_start[segment + 1])
        for row in range(np.int64(seg_start[segment]), last, block):
            rows = min(block, last - row)
            for head in range(kv_heads):
                if task % parts == part:
                    position = np.int64(positions[row])
                    attend(q, row, rows, head, group, position, kv, layout, layer, pages, out, bf16, scratch)
                task += 1


run_attention = spread(attention_part)


@kernel
def attention(team, q, kv, layout, layer, positions, seg_start, seg_slot, page_table, out, bf16, parts):
    """softmax(q kT / 8) v of each row over its own stream's keys up to its position, rounded once."""
    arguments = (q, kv, layout, layer, positions, seg_start, seg_slot, page_table, out, bf16)
    run_attention(team, parts, arguments)
