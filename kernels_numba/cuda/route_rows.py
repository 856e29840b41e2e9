"""The router for prompts of many rows: a block takes 16, reads them once and all experts with them; bits as
`norm_route`'s."""

from __future__ import annotations

import numpy as np
from numba import cuda

from .compiler import kernel
from .functions import ZERO
from .norm import norm_pair, row_scale, square_sum
from .route import (
    MOST_EXPERTS,
    PARTS,
    ROUTE_ROWS,
    ROUTE_THREADS,
    TILE,
    choose,
    score,
    write_choice,
)
from .scalar import add, device, let_next_start, load4, mma, store4, wait_for_earlier
from .unroll import registers, static, unrolled

MANY_ROWS = 16  # rows of a prompt's block
MANY_GROUPS = MANY_ROWS // 8
MOST_TILES = MOST_EXPERTS // TILE
MANY_LEAST = 1024  # rows from which on prompts' blocks are enough of them


@device
@unrolled
def row_words(h, hidden, row, lane):
    """A lane's part of a row: pieces lane, lane + 32, ..."""
    pieces = hidden >> 3
    words = registers(32, np.uint32(0))
    for g in static(8):
        piece = lane + 32 * g
        if piece < pieces:
            words[4 * g], words[4 * g + 1], words[4 * g + 2], words[4 * g + 3] = load4(
                h, (np.int64(row) * pieces + piece) * 4
            )
    return words


@device
@unrolled
def norm_words(words: 32, weight, eps, hidden, row, lane, x):
    """`norm_line` of a row's `row_words`, to x alone, with the norm's weights as they are needed."""
    pieces = hidden >> 3
    total = ZERO
    for g in static(8):
        total = add(total, square_sum(words[4 * g], words[4 * g + 1], words[4 * g + 2], words[4 * g + 3]))
    scale = row_scale(total, hidden, eps)
    for g in static(8):
        piece = lane + 32 * g
        if piece < pieces:
            w = registers(4)
            w = load4(weight, piece * 4)
            for i in static(4):
                w[i] = norm_pair(words[4 * g + i], w[i], scale)
            store4(x, (np.int64(row) * pieces + piece) * 4, w)


@device
@unrolled(MANY_GROUPS=MANY_GROUPS, MOST_TILES=MOST_TILES)
def many_logits(gate, x, parts, scores, choice, bias, has_bias, first, hidden, experts, warp, lane, thread):
    """Scores and choices of MANY_ROWS rows: a warp multiplies its part of k of all of them by all experts, in the order
    of `tile_logits`; then the parts are added, eight rows at a time."""
    line, column = np.int32(lane >> np.int32(2)), np.int32(lane & np.int32(3))
    chunks = np.int32(hidden >> np.int32(5))
    chunk = np.int32(np.int32(chunks * warp) >> np.int32(3))
    stop = np.int32(np.int32(chunks * np.int32(warp + np.int32(1))) >> np.int32(3))
    half = np.int32(hidden >> np.int32(1))
    eight = np.int32(np.int32(8) * half)
    sums = registers(4 * MANY_GROUPS * MOST_TILES, ZERO)
    within = np.int32(np.int32(line * half) + np.int32(column * np.int32(4)) + np.int32(chunk * np.int32(16)))
    source = np.int32(np.int32(first * half) + within)
    while chunk < stop:
        c = registers(4 * MANY_GROUPS)
        for g in static(MANY_GROUPS):
            c[4 * g], c[4 * g + 1], c[4 * g + 2], c[4 * g + 3] = load4(
                x, np.int64(np.int32(source + np.int32(g) * eight))
            )
        a = registers(4 * MOST_TILES, np.uint32(0))
        b = registers(4 * MOST_TILES, np.uint32(0))
        for t in static(MOST_TILES):
            if np.int32(t * TILE) < experts:
                a[4 * t], a[4 * t + 1], a[4 * t + 2], a[4 * t + 3] = load4(
                    gate, np.int64(np.int32(within + np.int32(2 * t) * eight))
                )
                b[4 * t], b[4 * t + 1], b[4 * t + 2], b[4 * t + 3] = load4(
                    gate, np.int64(np.int32(within + np.int32(2 * t + 1) * eight))
                )
        for t in static(MOST_TILES):
            for g in static(MANY_GROUPS):
                now = registers(4)
                for i in static(4):
                    now[i] = sums[4 * (t * MANY_GROUPS + g) + i]
                now = mma(a[4 * t], b[4 * t], a[4 * t + 1], b[4 * t + 1], c[4 * g], c[4 * g + 1], now)
                now = mma(a[4 * t + 2], b[4 * t + 2], a[4 * t + 3], b[4 * t + 3], c[4 * g + 2], c[4 * g + 3], now)
                for i in static(4):
                    sums[4 * (t * MANY_GROUPS + g) + i] = now[i]
        source = np.int32(source + np.int32(16))
        within = np.int32(within + np.int32(16))
        chunk = np.int32(chunk + np.int32(1))
    at, e = thread & 7, thread >> 3
    for g in static(MANY_GROUPS):
        for t in static(MOST_TILES):
            for i in static(4):
                parts[warp, t * TILE + line + 8 * (i // 2), column * 2 + i % 2] = sums[4 * (t * MANY_GROUPS + g) + i]
        cuda.syncthreads()
        for expert in range(e, experts, ROUTE_THREADS >> 3):
            total = parts[0, expert, at]
            for part in range(1, PARTS):
                total = add(total, parts[part, expert, at])
            score(total, bias, has_bias, scores, choice, 8 * g + at, expert)
        cuda.syncthreads()


@kernel("u32* u32* f32 u32* u32* f32* i32 i32* i32* i32 i32 i32 i32 i32 f32 i32* f32*", threads=ROUTE_THREADS, blocks=2)
@unrolled
def norm_route_rows(
    h, norm_weight, eps, x, gate, bias, has_bias, row_segment, seg_slot, rows, hidden, experts, top_k, normalize,
    scaling, ids, weights,
):  # fmt: skip
    """`norm_route` for prompts: MANY_ROWS rows meet the router's weights each time these are read; grouping is left to
    `group_rows`. At least MANY_ROWS rows (the last block repeats some of those before it); experts a multiple of 16.
    Grid [rows / MANY_ROWS], 256 threads."""
    parts = cuda.shared.array((PARTS, MOST_EXPERTS, ROUTE_ROWS), np.float32)
    scores = cuda.shared.array((MANY_ROWS, MOST_EXPERTS), np.float32)
    choice = cuda.shared.array((MANY_ROWS, MOST_EXPERTS), np.float32)
    let_next_start()
    thread = np.int32(cuda.threadIdx.x)
    lane, warp = np.int32(thread & np.int32(31)), np.int32(thread >> np.int32(5))
    first = min(np.int32(np.int32(cuda.blockIdx.x) * np.int32(MANY_ROWS)), np.int32(rows - np.int32(MANY_ROWS)))
    wait_for_earlier()
    words = registers(32)
    more = registers(32)
    words = row_words(h, hidden, first + warp, lane)
    more = row_words(h, hidden, first + warp + PARTS, lane)
    norm_words(words, norm_weight, eps, hidden, first + warp, lane, x)
    norm_words(more, norm_weight, eps, hidden, first + warp + PARTS, lane, x)
    cuda.syncthreads()
    many_logits(gate, x, parts, scores, choice, bias, has_bias, first, hidden, experts, warp, lane, thread)
    for row in range(first + warp, first + MANY_ROWS, PARTS):
        at = np.int32(row - first)
        chosen_low, chosen_high = choose(choice, at, lane, experts, top_k)
        padding = seg_slot[row_segment[row]] < 0
        write_choice(
            scores, at, lane, chosen_low, chosen_high, normalize, scaling, padding, ids, weights, np.int64(row) * top_k
        )
