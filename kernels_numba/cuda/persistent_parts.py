"""What a block of the layers' kernel (see persistent.py) does beside its products: one row's norms, sums over experts,
router and convolution, each with the bits of the kernel that does it elsewhere."""

from __future__ import annotations

import numpy as np

from .conv import filtered, product_pair
from .decode_parts import conv_inputs, gated_product, projected, state_at
from .decode_route import PADDING
from .functions import ZERO
from .norm import norm_pair, row_scale, square_sum
from .ptx import (
    divide,
    expect_4_rows,
    expect_32,
    group_sync,
    load_128,
    publish_32,
    shared_load_32,
    shared_load_128,
    shared_store_32,
    shared_store_128,
    store_32,
)
from .route import PARTS, TILE, added, chosen_bits, expert_score, lowest_bit, order, plus
from .scalar import add, bits_of, device, float_of, mma
from .unroll import registers, static, unrolled

CONSUMERS = 8
"""Warps that compute: pieces of a row of up to 2,048, and one unit of weights each."""
ROW_THREADS = 32 * CONSUMERS
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
    one warp asks: if all did, the weights on their way would wait behind their questions."""
    if warp == i32(SCOUT) and lane < i32(4):
        expect_32(u64(words + u64(u32(i32(lane * i32(count >> i32(2))))) * u64(4)))
    group_sync(u32(2), u32(ROW_THREADS))


@device
def norm_row(a, b, c, d, weights, mine, depth, eps, squared, line, thread, lane):
    """By all consumers: the RMSNorm of a row, of which a thread has 8 values, into a line of shared memory."""
    e, f, g, h = weights
    squares = ZERO
    if mine:
        squares = square_sum(a, b, c, d)
    shared_store_32(u32(squared + u32(thread) * u32(4)), bits_of(squares))
    group_sync(u32(2), u32(ROW_THREADS))
    total = ZERO
    for part in range(CONSUMERS):
        word = shared_load_32(u32(squared + u32(i32(i32(part) * i32(32)) + lane) * u32(4)))
        total = add(total, float_of(word))
    scale = row_scale(total, depth, eps)
    if mine:
        shared_store_128(
            u32(line + u32(thread) * u32(16)), norm_pair(a, e, scale), norm_pair(b, f, scale), norm_pair(c, g, scale),
            norm_pair(d, h, scale),
        )  # fmt: skip
    group_sync(u32(2), u32(ROW_THREADS))


@device
def norm_words(norm, mine, here):
    """A thread's 8 norm weights."""
    if mine:
        return load_128(u64(norm + here))
    return u32(0), u32(0), u32(0), u32(0)


@device
@unrolled
def expected_pieces(words, count, line, thread):
    """By all consumers: `count` pieces of 16 bytes, at most four a thread, that other blocks write now, to shared
    memory."""
    at = registers(4, u64(0))
    got = registers(16)
    for i in static(4):
        piece = i32(thread + i32(i * ROW_THREADS))
        at[i] = u64(words + u64(u32(min(piece, i32(count - i32(1))))) * u64(16))
    got = expect_4_rows(at)
    for i in static(4):
        piece = i32(thread + i32(i * ROW_THREADS))
        if piece < count:
            to = u32(line + u32(piece) * u32(16))
            shared_store_128(to, got[4 * i], got[4 * i + 1], got[4 * i + 2], got[4 * i + 3])


@device
def added_experts(area, stream, unit, top_k, out, lane):
    """By one warp: 16 values of the residual stream and the sum over the experts' at `area`, as `row_sum`'s."""
    if lane < i32(8):
        word = i32(i32(unit * i32(8)) + lane)
        total = (ZERO, ZERO)
        for j in range(top_k):
            total = plus(total, shared_load_32(u32(area + u32(i32(j)) * u32(32) + u32(lane) * u32(4))))
        residual = shared_load_32(u32(stream + u32(word) * u32(4)))
        publish_32(u64(out + u64(u32(word)) * u64(4)), added(residual, total))


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


@device
@unrolled
def router(words: 64, line, parts, tile, hidden, experts, logits, thread, warp, lane):
    """By all consumers: the logits of a tile of 16 experts for the normed row at `line`, as `route_logits`'."""
    chunks = i32(hidden >> i32(5))
    chunk = i32(i32(chunks * warp) >> i32(3))
    count = i32(i32(i32(chunks * i32(warp + i32(1))) >> i32(3)) - chunk)
    source = u32(line + u32(i32(i32(chunk * i32(64)) + i32(i32(lane & i32(3)) * i32(16)))))
    sums = registers(4, ZERO)
    for i in static(8):
        if i32(i) < count:
            c = registers(4)
            c = shared_load_128(u32(source + u32(64 * i)))
            sums = mma(words[8 * i], words[8 * i + 4], words[8 * i + 1], words[8 * i + 5], c[0], c[1], sums)
            sums = mma(words[8 * i + 2], words[8 * i + 6], words[8 * i + 3], words[8 * i + 7], c[2], c[3], sums)
    if i32(lane & i32(3)) == i32(0):
        at = u32(parts + u32(i32(i32(warp * i32(TILE)) + i32(lane >> i32(2)))) * u32(4))
        shared_store_32(at, bits_of(sums[0]))
        shared_store_32(u32(at + u32(32)), bits_of(sums[2]))
    group_sync(u32(2), u32(ROW_THREADS))
    expert = i32(i32(tile * i32(TILE)) + thread)
    if thread < i32(TILE) and expert < experts:
        at = u32(parts + u32(thread) * u32(4))
        total = float_of(shared_load_32(at))
        for part in range(1, PARTS):
            total = add(total, float_of(shared_load_32(u32(at + u32(i32(part)) * u32(4 * TILE)))))
        publish_32(u64(logits + u64(u32(expert)) * u64(4)), bits_of(total))


@device
def expected_logits(logits, lane, experts):
    """A lane's two of a row's logits, as soon as they are there."""
    low, high = PADDING, PADDING
    at = u64(logits + u64(u32(lane)) * u64(4))
    if lane < experts:
        low = float_of(expect_32(at))
    if i32(lane + i32(32)) < experts:
        high = float_of(expect_32(u64(at + u64(128))))
    return low, high


@device
def chosen_number(low, high, bias_low, bias_high, has_bias, experts, top_k, lane):
    """The lane-th chosen expert, as `choose_row`'s, which takes longer: it gives the weights too."""
    order_low, order_high = u32(0), u32(0)
    if lane < experts:
        score = expert_score(low)
        order_low = order(add(score, bias_low) if has_bias else score)
    if i32(lane + i32(32)) < experts:
        score = expert_score(high)
        order_high = order(add(score, bias_high) if has_bias else score)
    left, right = chosen_bits(order_low, order_high, lane, top_k)
    number = i32(0)
    for j in range(top_k):
        e = i32(0)
        if left != u32(0):
            e = lowest_bit(left)
            left = u32(left & u32(left - u32(1)))
        elif right != u32(0):
            e = i32(lowest_bit(right) + i32(32))
            right = u32(right & u32(right - u32(1)))
        if i32(j) == lane:
            number = e
    return number


@device
def convolve(area, tile, units, filters, state, row_segment, seg_slot, seg_start, positions, out, lane, members):
    """By one warp: the convolution of a unit's 16 channels, whose B, C and x other warps bring to `area` meanwhile, as
    `short_conv`'s; the input goes into the ring."""
    inside = lane < i32(8)
    w0, w1, w2, u1, u2, slot, position = u32(0), u32(0), u32(0), u32(0), u32(0), u32(0), u32(0)
    if inside:
        w0, w1, w2, u1, u2, slot, _, position = conv_inputs(
            lane, tile, units, filters, state, row_segment, seg_slot, seg_start, positions
        )
    group_sync(u32(1), members)
    if inside:
        word = i32(i32(tile * i32(8)) + lane)
        to = u64(out + u64(u32(word)) * u64(4))
        if i32(slot) < i32(0):
            publish_32(to, u32(0))
        else:
            u = gated_product(area, i32(1), i32(0), lane)
            c = projected(area, i32(1), i32(1), i32(0), lane)
            publish_32(to, product_pair(c, filtered(w0, w1, w2, u2, u1, u)))
            store_32(state_at(state, i32(slot), i32(position), i32(units * i32(8)), word), u)
