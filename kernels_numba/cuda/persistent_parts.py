"""What a block of the layers' kernel (see persistent.py) does beside its products: norms, sums over experts, router,
choice and convolution of its rows, each with the bits of the kernel that does it elsewhere. Functions that begin with
an underscore are made for a number of rows by `parts`."""

from __future__ import annotations

from typing import Any

import numpy as np

from .decode_parts import conv_inputs, conv_result
from .decode_route import PADDING
from .functions import ZERO
from .norm import norm_pair, row_scale, square_sum
from .persistent_layout import CONSUMERS, NO_PAIR, ROW_THREADS, layout
from .products import scale_pair, with_globals
from .ptx import (
    divide,
    expect_2_rows,
    expect_2_words,
    expect_4_rows,
    expect_4_words,
    expect_8_rows,
    expect_32,
    expect_128,
    group_sync,
    load_128,
    population,
    publish_32,
    shared_load_32,
    shared_load_128,
    shared_store_32,
    shared_store_128,
)
from .route import MOST_EXPERTS, PARTS, TILE, added, expert_score, lowest_bit, order, plus
from .scalar import add, ballot, bits_of, device, float_of, mma, warp_largest
from .unroll import registers, static, unrolled

ROWS = LINE = WORDS = HALVES = 0  # numbers, put in by `parts`
expect_rows = expect_pieces = expect_logits = None  # the same

SCOUT = 6
"""The warp that waits for a phase's input."""

u32, i32, u64 = np.uint32, np.int32, np.uint64


@device
def share(total, block, blocks):
    """The part [first, stop) of `total` units that is a block's; the first blocks have one more."""
    each = i32(divide(u32(total), u32(blocks)))
    more = i32(total - i32(each * blocks))
    first = i32(i32(block * each) + min(block, more))
    stop = i32(first + each)
    if block < more:
        stop = i32(stop + i32(1))
    return first, stop


@device
def input_begins(words, count, warp, lane):
    """By all consumers: waits until four of `count` words, all over them, are written, so that the rest soon is. Only
    one warp asks, or everybody's questions would be on the weights' way; see LADDER.md."""
    if warp == i32(SCOUT) and lane < i32(4):
        expect_32(u64(words + u64(u32(i32(lane * i32(count >> i32(2))))) * u64(4)))
    group_sync(u32(2), u32(ROW_THREADS))


def _rows_here(source, to, mine, here, row_bytes):
    """A thread's 8 values of each row that other blocks write now; also to lines of shared memory from `to` on."""
    words = registers(WORDS, u32(0))
    at = registers(ROWS, u64(0))
    if mine:
        for r in static(ROWS):
            at[r] = u64(source + u64(r) * row_bytes + here)
        words = expect_rows(at)
        for r in static(ROWS):
            line = u32(to + u32(r * LINE))
            shared_store_128(line, words[4 * r], words[4 * r + 1], words[4 * r + 2], words[4 * r + 3])
    return words


def _norm_rows(words: WORDS, weights, mine, depth, eps, squared, lines, thread, lane):
    """By all consumers: the RMSNorm of rows, of each of which a thread has 8 values, into lines of shared memory."""
    e, f, g, h = weights
    for r in static(ROWS):
        squares = ZERO
        if mine:
            squares = square_sum(words[4 * r], words[4 * r + 1], words[4 * r + 2], words[4 * r + 3])
        shared_store_32(u32(squared + u32(4 * r * ROW_THREADS) + u32(thread) * u32(4)), bits_of(squares))
    group_sync(u32(2), u32(ROW_THREADS))
    for r in static(ROWS):
        total = ZERO
        for part in range(CONSUMERS):
            at = u32(squared + u32(4 * r * ROW_THREADS) + u32(i32(i32(part) * i32(32)) + lane) * u32(4))
            total = add(total, float_of(shared_load_32(at)))
        scale = row_scale(total, depth, eps)
        if mine:
            shared_store_128(
                u32(lines + u32(r * LINE) + u32(thread) * u32(16)), norm_pair(words[4 * r], e, scale),
                norm_pair(words[4 * r + 1], f, scale), norm_pair(words[4 * r + 2], g, scale),
                norm_pair(words[4 * r + 3], h, scale),
            )  # fmt: skip
    group_sync(u32(2), u32(ROW_THREADS))


@device
def norm_words(norm, mine, here):
    """A thread's 8 norm weights."""
    if mine:
        return load_128(u64(norm + here))
    return u32(0), u32(0), u32(0), u32(0)


def _expected_pieces(words, count, line, thread):
    """By all consumers: `count` pieces of 16 bytes, at most four a thread and row, that other blocks write now, to
    shared memory."""
    at = registers(4 * ROWS, u64(0))
    got = registers(16 * ROWS)
    for i in static(4 * ROWS):
        piece = i32(thread + i32(i * ROW_THREADS))
        at[i] = u64(words + u64(u32(min(piece, i32(count - i32(1))))) * u64(16))
    got = expect_pieces(at)
    for i in static(4 * ROWS):
        piece = i32(thread + i32(i * ROW_THREADS))
        if piece < count:
            to = u32(line + u32(piece) * u32(16))
            shared_store_128(to, got[4 * i], got[4 * i + 1], got[4 * i + 2], got[4 * i + 3])


def _added_experts(area, weights, stream, unit, hidden, top_k, out, lane):
    """By one warp: of each row 16 values of the residual stream and the weighted sum over the experts' at `area`, as
    `row_sum`'s."""
    row = i32(lane >> i32(3))
    if row < i32(ROWS):
        word = i32(i32(unit * i32(8)) + i32(lane & i32(7)))
        total = (ZERO, ZERO)
        for j in range(top_k):
            pair = i32(i32(row * top_k) + i32(j))
            factor = float_of(shared_load_32(u32(weights + u32(pair) * u32(4))))
            given = shared_load_32(u32(area + u32(pair) * u32(32) + u32(lane & i32(7)) * u32(4)))
            total = plus(total, scale_pair(given, factor))
        residual = shared_load_32(u32(stream + u32(i32(row * i32(LINE))) + u32(word) * u32(4)))
        to = u64(out + u64(u32(i32(row * i32(hidden >> i32(1))) + word)) * u64(4))
        publish_32(to, added(residual, total))


@device
@unrolled
def gate_words(gate, tile, hidden, experts, warp, lane):
    """This warp's k of a tile of 16 experts' router weights, as `route_logits` holds them."""
    words = registers(64, u32(0))
    line, column = i32(lane >> i32(2)), i32(lane & i32(3))
    chunks = i32(hidden >> i32(5))
    chunk = i32(i32(chunks * warp) >> i32(3))
    count = i32(i32(i32(chunks * i32(warp + i32(1))) >> i32(3)) - chunk)
    row = u64(u32(i32(hidden + hidden)))
    inside = u64(u32(i32(i32(chunk * i32(64)) + i32(column * i32(16)))))
    low = u64(gate + u64(u32(min(i32(tile * i32(TILE) + line), i32(experts - i32(1))))) * row + inside)
    high = u64(gate + u64(u32(min(i32(tile * i32(TILE) + line + i32(8)), i32(experts - i32(1))))) * row + inside)
    for i in static(8):
        if i32(i) < count:
            words[8 * i], words[8 * i + 1], words[8 * i + 2], words[8 * i + 3] = load_128(u64(low + u64(64 * i)))
            words[8 * i + 4], words[8 * i + 5], words[8 * i + 6], words[8 * i + 7] = load_128(u64(high + u64(64 * i)))
    return words


def _router(words: 64, lines, parts, tile, hidden, experts, logits, thread, warp, lane):
    """By all consumers: the logits of a tile of 16 experts for the normed rows at `lines`, as `route_logits`'."""
    chunks = i32(hidden >> i32(5))
    chunk = i32(i32(chunks * warp) >> i32(3))
    count = i32(i32(i32(chunks * i32(warp + i32(1))) >> i32(3)) - chunk)
    row = i32(i32(lane >> i32(2)) & i32(ROWS - 1))  # columns beyond the rows repeat them
    source = u32(lines + u32(i32(row * i32(LINE))) + u32(i32(i32(chunk * i32(64)) + i32(i32(lane & i32(3)) * i32(16)))))
    sums = registers(4, ZERO)
    for i in static(8):
        if i32(i) < count:
            c = registers(4)
            c = shared_load_128(u32(source + u32(64 * i)))
            sums = mma(words[8 * i], words[8 * i + 4], words[8 * i + 1], words[8 * i + 5], c[0], c[1], sums)
            sums = mma(words[8 * i + 2], words[8 * i + 6], words[8 * i + 3], words[8 * i + 7], c[2], c[3], sums)
    if i32(lane & i32(3)) == i32(0):
        for r in static(ROWS):
            at = u32(parts + u32(i32(i32(i32(i32(r * PARTS) + warp) * i32(TILE)) + i32(lane >> i32(2)))) * u32(4))
            shared_store_32(at, bits_of(sums[r]))
            shared_store_32(u32(at + u32(32)), bits_of(sums[2 + r]))
    group_sync(u32(2), u32(ROW_THREADS))
    row = i32(thread >> i32(4))
    expert = i32(i32(tile * i32(TILE)) + i32(thread & i32(TILE - 1)))
    if row < i32(ROWS) and expert < experts:
        at = u32(parts + u32(i32(i32(row * i32(PARTS * TILE)) + i32(thread & i32(TILE - 1)))) * u32(4))
        total = float_of(shared_load_32(at))
        for part in range(1, PARTS):
            total = add(total, float_of(shared_load_32(u32(at + u32(i32(part)) * u32(4 * TILE)))))
        publish_32(u64(logits + u64(u32(i32(row * i32(MOST_EXPERTS)) + expert)) * u64(4)), bits_of(total))


def _expected_logits(logits, lane, experts):
    """A lane's two of each row's logits, as soon as they are there."""
    at = registers(2 * ROWS, u64(0))
    words = registers(2 * ROWS)
    values = registers(2 * ROWS, PADDING)
    last = i32(experts - i32(1))
    for r in static(ROWS):
        row = u64(logits + u64(4 * r * MOST_EXPERTS))
        at[2 * r] = u64(row + u64(u32(min(lane, last))) * u64(4))
        at[2 * r + 1] = u64(row + u64(u32(min(i32(lane + i32(32)), last))) * u64(4))
    words = expect_logits(at)
    for r in static(ROWS):
        if lane < experts:
            values[2 * r] = float_of(words[2 * r])
        if i32(lane + i32(32)) < experts:
            values[2 * r + 1] = float_of(words[2 * r + 1])
    return values


@device
def taken(low, high, where_low, where_high, lane, chosen_low, chosen_high):
    """A step of `chosen_bits`: a warp's choices without the first of those that `where_low`, `where_high` say, and the
    bits with it."""
    from_low = where_low != u32(0)
    e = lowest_bit(where_low if from_low else where_high)
    bit = u32(u32(1) << u32(e))
    chosen_low = u32(chosen_low | (bit if from_low else u32(0)))
    chosen_high = u32(chosen_high | (u32(0) if from_low else bit))
    low = u32(0) if lane == e and from_low else low
    high = high if lane != e or from_low else u32(0)
    return low, high, chosen_low, chosen_high


def _choices(values: HALVES, bias_low, bias_high, has_bias, experts, top_k, lane):
    """Which experts rows chose, from their logits, as `choose_row`'s, which takes longer: the lane-th one's number; how
    many; and of the lane-th, 16 bits a row, the pair of row and expert that it is, or NO_PAIR."""
    low = registers(ROWS, u32(0))
    high = registers(ROWS, u32(0))
    left = registers(ROWS, u32(0))
    right = registers(ROWS, u32(0))
    best = registers(ROWS, u32(0))
    where = registers(HALVES, u32(0))
    for r in static(ROWS):
        if lane < experts:
            score = expert_score(values[2 * r])
            low[r] = order(add(score, bias_low) if has_bias else score)
        if i32(lane + i32(32)) < experts:
            score = expert_score(values[2 * r + 1])
            high[r] = order(add(score, bias_high) if has_bias else score)
    for _ in range(top_k):  # `chosen_bits` of all rows at once: each answer takes long
        for r in static(ROWS):
            best[r] = warp_largest(max(low[r], high[r]))
        for r in static(ROWS):
            where[2 * r], where[2 * r + 1] = ballot(u32(low[r] == best[r])), ballot(u32(high[r] == best[r]))
        for r in static(ROWS):
            low[r], high[r], left[r], right[r] = taken(
                low[r], high[r], where[2 * r], where[2 * r + 1], lane, left[r], right[r]
            )
    all_left, all_right = left[0], right[0]
    for r in static(1, ROWS):
        all_left, all_right = u32(all_left | left[r]), u32(all_right | right[r])
    sets = i32(population(all_left) + population(all_right))
    number = i32(0)
    for j in range(sets):
        e = i32(0)
        if all_left != u32(0):
            e = lowest_bit(all_left)
            all_left = u32(all_left & u32(all_left - u32(1)))
        else:
            e = i32(lowest_bit(all_right) + i32(32))
            all_right = u32(all_right & u32(all_right - u32(1)))
        if i32(j) == lane:
            number = e
    pairs = u32(0)
    for r in static(ROWS):
        bit = u32(u32(1) << u32(number & i32(31)))
        mine, rank = left[r], i32(0)
        if number >= i32(32):
            mine, rank = right[r], i32(population(left[r]))
        rank = i32(i32(r * top_k) + i32(rank + population(u32(mine & u32(bit - u32(1))))))
        pair = u32(rank) if u32(mine & bit) != u32(0) else u32(NO_PAIR)
        pairs = u32(pairs | u32(pair << u32(16 * r)))
    return number, sets, pairs


def _pairs_of(sets, which):
    """The pair of each row that a set of experts' weights is, or NO_PAIR; of one row, sets are its pairs."""
    pairs = registers(ROWS, i32(0))
    if ROWS == 1:
        pairs[0] = which
    else:
        word = shared_load_32(u32(sets + u32(which) * u32(4)))
        for r in static(ROWS):
            pairs[r] = i32(u32(word >> u32(16 * r)) & u32(NO_PAIR))
    return pairs


def _pair_of(pairs: ROWS, row):
    """A row's pair."""
    pair = pairs[0]
    for r in static(1, ROWS):
        if row == i32(r):
            pair = pairs[r]
    return pair


def _input_pair(pairs: ROWS, row):
    """What a column of a set's product takes: its row's pair, or another's where the row didn't choose the expert."""
    pair = i32(NO_PAIR)
    for r in static(ROWS):
        if pairs[r] < i32(NO_PAIR) and (row == i32(r) or pair == i32(NO_PAIR)):
            pair = pairs[r]
    return pair


def _conv_given(tile, units, filters, state, row_segment, seg_slot, seg_start, positions, lane):
    """By one warp: what the convolution of a unit's 16 channels needs beside B, C and x, which other warps bring
    meanwhile; see `conv_inputs`."""
    given = registers(8, u32(0))
    if lane < i32(8 * ROWS):
        given[0], given[1], given[2], given[3], given[4], given[5], given[6], given[7] = conv_inputs(
            lane, tile, units, filters, state, row_segment, seg_slot, seg_start, positions
        )
    return given


def _convolve(given: 8, area, tile, units, state, out, lane):
    """By one warp: that convolution, as `short_conv`'s; its input goes into the ring."""
    if lane < i32(8 * ROWS):
        word = i32(i32(tile * i32(8)) + i32(lane & i32(7)))
        to = u64(out + u64(u32(i32(i32(i32(lane >> i32(3)) * i32(units * i32(8))) + word))) * u64(4))
        publish_32(to, conv_result(lane, tile, units, i32(ROWS), area, given, state))


def parts(rows: int) -> dict[str, Any]:
    """The functions for a number of rows, by their names without the underscore."""
    known = {**layout(rows), "WORDS": 4 * rows, "HALVES": 2 * rows}
    asking = {
        "expect_rows": {1: expect_128, 2: expect_2_rows}[rows],
        "expect_pieces": {1: expect_4_rows, 2: expect_8_rows}[rows],
        "expect_logits": {1: expect_2_words, 2: expect_4_words}[rows],
    }
    made = (
        _rows_here, _norm_rows, _expected_pieces, _added_experts, _router, _expected_logits, _choices, _pairs_of,
        _pair_of, _input_pair, _conv_given, _convolve,
    )  # fmt: skip
    return {f.__name__[1:]: device(with_globals(unrolled(f, **known), **asking)) for f in made}
