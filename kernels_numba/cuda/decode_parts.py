"""What a block of a few-row product computes: rounds, tensor-core steps in ascending k, the sum over experts and the
norm of one row, the short convolution of finished channels."""

from __future__ import annotations

import numpy as np
from numba import cuda

from ..batch import RING_ROWS
from .conv import filtered, product_pair
from .functions import ZERO, pack
from .norm import norm_pair, row_scale, square_sum
from .products import find_expert, table_groups, table_start
from .ptx import (
    dependency_wait,
    divide,
    group_sync,
    ldmatrix_x2,
    ldmatrix_x4,
    load_32,
    load_128,
    load_fresh,
    mma,
    shared_load_32,
    shared_store_32,
    shared_store_128,
    store_32,
    store_128,
)
from .route import added, plus
from .scalar import add, bits_of, device, float_of, shuffle_xor
from .unroll import registers, static, unrolled

SUM_THREADS = 256
SUM_DEPTH = 8 * SUM_THREADS
"""Longest row that a block sums and norms by itself."""

u32, i32, u64 = np.uint32, np.int32, np.uint64


@device
def advance(slot, parity, stages):
    """The next slot of the ring and the parity of its phase."""
    slot = i32(slot + i32(1))
    if slot == stages:
        return i32(0), u32(parity ^ u32(1))
    return slot, parity


@device
def round_units(unit, stop, most, units, tile):
    """How many units the round that begins at `unit`, a group's `tile`, takes: a group's rounds are about equal."""
    left = min(i32(stop - unit), i32(units - tile))
    rounds = i32(divide(u32(i32(left + most) - i32(1)), u32(most)))
    return i32(divide(u32(i32(left + rounds) - i32(1)), u32(rounds)))


@device
def round_of(unit, stop, most, units, rows, group_rows, grouped, table, experts):
    """The round that begins at `unit`: units taken, the first one's tile, the expert, and its rows [first, last)."""
    group = i32(divide(u32(unit), u32(units)))
    tile = i32(unit - i32(group * units))
    taken = round_units(unit, stop, most, units, tile)
    if not grouped:
        return taken, tile, i32(0), i32(group * group_rows), rows
    expert = find_expert(table, experts, group, i32(1))
    first = i32(table_start(table, expert) + i32(i32(group - table_groups(table, expert)) * group_rows))
    return taken, tile, expert, first, table_start(table, i32(expert + i32(1)))


@device
def weights_at(wa, step):
    """Fragments of a unit's 16 rows in one k step of a stage: its swizzled address."""
    return ldmatrix_x4(u32(u32(wa ^ u32(u32(step & 3) * u32(32))) + u32(u32(step >> 2) * u32(2048))))


@device
def fetch_8(wa, xa, step):
    """Fragments of two k steps, weights as the 16-row operand."""
    return weights_at(wa, step), weights_at(wa, step + 1), ldmatrix_x4(u32(xa + u32(u32(step) * u32(32))))


@device
def multiply_one_8(acc, w, x0, x1):
    return mma(w[0], w[1], w[2], w[3], x0, x1, acc[0], acc[1], acc[2], acc[3])


@device
def multiply_8(acc, f):
    w0, w1, x = f
    return multiply_one_8(multiply_one_8(acc, w0, x[0], x[1]), w1, x[2], x[3])


@device
def fetch_16(wa, xa, step):
    """Fragments of two k steps, activations as the 16-row operand and the two halves of a unit as 8-row ones."""
    x0 = ldmatrix_x4(u32(xa + u32(u32(step) * u32(32))))
    x1 = ldmatrix_x4(u32(xa + u32(u32(step) * u32(32)) + u32(32)))
    return weights_at(wa, step), weights_at(wa, step + 1), x0, x1


@device
def multiply_step_16(acc, w, x):
    a = mma(x[0], x[1], x[2], x[3], w[0], w[1], acc[0], acc[1], acc[2], acc[3])
    b = mma(x[0], x[1], x[2], x[3], w[2], w[3], acc[4], acc[5], acc[6], acc[7])
    return a[0], a[1], a[2], a[3], b[0], b[1], b[2], b[3]


@device
def multiply_16(acc, f):
    return multiply_step_16(multiply_step_16(acc, f[0], f[2]), f[1], f[3])


@device
def last_step_8(acc, wa, xa, step):
    x = ldmatrix_x2(u32(xa + u32(u32(step) * u32(32))))
    return multiply_one_8(acc, weights_at(wa, step), x[0], x[1])


@device
def last_step_16(acc, wa, xa, step):
    return multiply_step_16(acc, weights_at(wa, step), ldmatrix_x4(u32(xa + u32(u32(step) * u32(32)))))


@device
def pairs_8(acc, lane):
    """A thread holds outputs l / 4 and l / 4 + 8 of two rows; its neighbour gives the other half of one row's pairs."""
    odd = i32(lane & i32(4)) != i32(0)
    p = shuffle_xor(acc[0] if odd else acc[1], i32(4))
    q = shuffle_xor(acc[2] if odd else acc[3], i32(4))
    return (pack(p, acc[1]), pack(q, acc[3])) if odd else (pack(acc[0], p), pack(acc[2], q))


@device
def pairs_16(acc, lane):
    """The pairs of row l / 4 in columns 0 to 7 and 8 to 15, then those of row l / 4 + 8."""
    return pack(acc[0], acc[1]), pack(acc[4], acc[5]), pack(acc[2], acc[3]), pack(acc[6], acc[7])


@device
def sum_and_norm(summands, residual, norm_weight, eps, depth, top_k, sums, line, consumers, warp, lane):
    """By all warps but the weights': the only row's sum over its experts and the RMSNorm of that, as
    `combine_experts_norm`'s; the normed row to shared memory, the sum (by one block) to `sums`. A thread has 8 values.
    """
    thread = i32(i32(warp * i32(32)) + lane)
    if warp > consumers:
        thread = i32(thread - i32(32))
    pieces = i32(depth >> i32(3))
    here = u64(u64(u32(thread)) * u64(16))
    mine = thread < pieces
    e, f, g, h = u32(0), u32(0), u32(0), u32(0)
    if mine:
        e, f, g, h = load_128(u64(norm_weight + here))
    dependency_wait()
    a, b, c, d = u32(0), u32(0), u32(0), u32(0)
    squares = ZERO
    if mine:
        a, b, c, d = row_sum(summands, residual, here, u64(u64(u32(depth)) * u64(2)), top_k)
        squares = square_sum(a, b, c, d)
        if i32(cuda.blockIdx.x) == i32(0):
            store_128(u64(sums + here), a, b, c, d)
    squared = u32(line + u32(i32(depth + depth)))
    shared_store_32(u32(squared + u32(thread) * u32(4)), bits_of(squares))
    group_sync(u32(2), u32(SUM_THREADS))
    total = ZERO
    for part in range(SUM_THREADS // 32):
        word = shared_load_32(u32(squared + u32(i32(i32(part) * i32(32)) + lane) * u32(4)))
        total = add(total, float_of(word))
    scale = row_scale(total, depth, eps)
    if mine:
        shared_store_128(
            u32(line + u32(here)), norm_pair(a, e, scale), norm_pair(b, f, scale), norm_pair(c, g, scale),
            norm_pair(d, h, scale),
        )  # fmt: skip
    group_sync(u32(2), u32(SUM_THREADS))


@device
@unrolled
def row_sum(summands, residual, here, row_bytes, top_k):
    """8 values of r(residual + r(sum of `top_k` rows)), as `expert_sum`'s."""
    rest = registers(4)
    rest = load_128(u64(residual + here))
    s0, s1, s2, s3 = (ZERO, ZERO), (ZERO, ZERO), (ZERO, ZERO), (ZERO, ZERO)
    for j in range(0, top_k, 4):
        words = registers(16, u32(0))
        for i in static(4):
            if i32(j + i) < top_k:
                words[4 * i], words[4 * i + 1], words[4 * i + 2], words[4 * i + 3] = load_128(
                    u64(summands + u64(u32(i32(j + i))) * row_bytes + here)
                )
        for i in static(4):
            if i32(j + i) < top_k:
                s0, s1 = plus(s0, words[4 * i]), plus(s1, words[4 * i + 1])
                s2, s3 = plus(s2, words[4 * i + 2]), plus(s3, words[4 * i + 3])
    return added(rest[0], s0), added(rest[1], s1), added(rest[2], s2), added(rest[3], s3)


@device
def conv_inputs(item, tile, units, filters, state, row_segment, seg_slot, seg_start, positions):
    """What the convolution of row item / 8 and two of a unit's channels needs beside the product: taps, the two inputs
    before where they lie in the ring, slot, row of the segment, position."""
    row, word = i32(item >> i32(3)), i32(i32(tile * i32(8)) + i32(item & i32(7)))
    half = i32(units * i32(8))
    w0 = load_32(u64(filters + u64(u32(word)) * u64(4)))
    w1 = load_32(u64(filters + u64(u32(i32(half + word))) * u64(4)))
    w2 = load_32(u64(filters + u64(u32(i32(i32(half + half) + word))) * u64(4)))
    position = load_fresh(u64(positions + u64(u32(row)) * u64(4)))
    segment = load_fresh(u64(row_segment + u64(u32(row)) * u64(4)))
    slot = load_fresh(u64(seg_slot + u64(u32(segment)) * u64(4)))
    number = i32(row - load_fresh(u64(seg_start + u64(u32(segment)) * u64(4))))
    u1, u2 = u32(0), u32(0)
    if slot >= i32(0):
        if number < i32(1) and position >= i32(1):
            u1 = load_32(state_at(state, slot, i32(position - i32(1)), half, word))
        if number < i32(2) and position >= i32(2):
            u2 = load_32(state_at(state, slot, i32(position - i32(2)), half, word))
    return w0, w1, w2, u1, u2, u32(slot), u32(number), u32(position)


@device
def state_at(state, slot, position, half, word):
    line = u64(u64(u32(slot)) * u64(RING_ROWS) + u64(u32(position & i32(RING_ROWS - 1))))
    return u64(state + u64(line * u64(u32(half)) + u64(u32(word))) * u64(4))


@device
def projected(area, group_rows, part, row, item):
    """Two channels of B (part 0), C or x of a row of this block's unit."""
    at = u32(u32(i32(i32(part * group_rows) + row)) * u32(32) + u32(item & i32(7)) * u32(4))
    return shared_load_32(u32(area + at))


@device
def gated_product(area, group_rows, row, item):
    """u = r(B * x) of a row."""
    return product_pair(projected(area, group_rows, i32(0), row, item), projected(area, group_rows, i32(2), row, item))


@device
def conv_output(item, tile, units, group_rows, area, w0, w1, w2, u1, u2, slot, number, position, state, out):
    """Two channels of a row of the convolution, as `short_conv`'s, and their input into the ring."""
    row, word = i32(item >> i32(3)), i32(i32(tile * i32(8)) + i32(item & i32(7)))
    to = u64(out + u64(u64(u32(row)) * u64(u32(i32(units * i32(8)))) + u64(u32(word))) * u64(4))
    store_32(to, conv_result(item, tile, units, group_rows, area, w0, w1, w2, u1, u2, slot, number, position, state))


@device
def conv_result(item, tile, units, group_rows, area, w0, w1, w2, u1, u2, slot, number, position, state):
    """What `conv_output` stores; 0 for padding rows, whose input goes nowhere."""
    row, word = i32(item >> i32(3)), i32(i32(tile * i32(8)) + i32(item & i32(7)))
    if i32(slot) < i32(0):
        return u32(0)
    if i32(number) >= i32(1):
        u1 = gated_product(area, group_rows, i32(row - i32(1)), item)
    if i32(number) >= i32(2):
        u2 = gated_product(area, group_rows, i32(row - i32(2)), item)
    u = gated_product(area, group_rows, row, item)
    store_32(state_at(state, i32(slot), i32(position), i32(units * i32(8)), word), u)
    return product_pair(projected(area, group_rows, i32(1), row, item), filtered(w0, w1, w2, u2, u1, u))
