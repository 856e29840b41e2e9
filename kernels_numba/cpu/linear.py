"""Products with stored bf16 weights: x wT, and the SwiGLU feed-forward built from three of them.

Every output is one accumulator over ascending k (see `simd.dot_tile`), so tile shapes, blocks and threads are free.
"""

from __future__ import annotations

import numpy as np

from ..jit import device, kernel
from .functions import rounded, silu
from .simd import LANES, dot_tile, load, load_one, store, store_one
from .team import spread

FEW_ROWS = 8  # up to here the weights set the pace, not the arithmetic
CACHED_INPUTS = 1 << 17  # float32 values of x that stay in the second-level cache while weights stream past


@device
def part_of(count, part, parts):
    """Part `part` of range(count) cut into `parts` even ranges."""
    return count * part // parts, count * (part + 1) // parts


def _strip(rows: int, columns: int, prefetch: bool):
    """Products of a block of at least rows x columns by tiles of that size; edge tiles overlap their neighbours."""
    tile = dot_tile(rows, columns, prefetch)

    @device
    def strip(x, x_row, count, w, w_row, width, out, out_row, out_column):
        n = 0
        while n < width:
            j = min(n, width - columns)
            m = 0
            while m < count:
                i = min(m, count - rows)
                tile(x, x_row + i, w, w_row + j, out, out_row + i, out_column + j)
                m += rows
            n += columns

    return strip


# up to 24 accumulators and what a step loads fit 32 registers; one row reads weights fastest in two streams
_narrow = _strip(1, 1, False)
_one = _strip(1, 2, True)
_two = _strip(2, 4, True)
_three = _strip(3, 4, True)
_four = _strip(4, 6, True)
_five = _strip(5, 4, True)
_six = _strip(6, 4, True)
_seven = _strip(7, 3, True)
_eight = _strip(8, 3, True)
_many = _strip(4, 6, False)


@device
def product(x, x_row, count, w, w_row, width, out, out_row, out_column):
    """out[out_row + m, out_column + n] = x[x_row + m] . w[w_row + n] for `count` rows, `width` weights, unrounded."""
    if width < 8:
        _narrow(x, x_row, count, w, w_row, width, out, out_row, out_column)
    elif count == 1:
        _one(x, x_row, count, w, w_row, width, out, out_row, out_column)
    elif count == 2:
        _two(x, x_row, count, w, w_row, width, out, out_row, out_column)
    elif count == 3:
        _three(x, x_row, count, w, w_row, width, out, out_row, out_column)
    elif count == 5:
        _five(x, x_row, count, w, w_row, width, out, out_row, out_column)
    elif count == 6:
        _six(x, x_row, count, w, w_row, width, out, out_row, out_column)
    elif count == 7:
        _seven(x, x_row, count, w, w_row, width, out, out_row, out_column)
    elif count == 8:
        _eight(x, x_row, count, w, w_row, width, out, out_row, out_column)
    elif count == 4:
        _four(x, x_row, count, w, w_row, width, out, out_row, out_column)
    elif count > FEW_ROWS:
        _many(x, x_row, count, w, w_row, width, out, out_row, out_column)


@device
def row_block(depth):
    """Rows whose inputs stay in the cache while weights stream past."""
    return max(FEW_ROWS, CACHED_INPUTS // depth // 4 * 4)


@device
def column_block(rows):
    """Outputs of a row between two epilogues, a multiple of every tile width: long streams of weights for few rows."""
    return 768 if rows <= FEW_ROWS else 96


@device
def finished(y, residual, add, bf16):
    y = rounded(y, bf16)
    return rounded(residual + y, bf16) if add else y


@device
def finish(out, at, width, residual, add, bf16):
    """Round `width` products in place from flat element `at` on, and add the residual."""
    whole = width // LANES * LANES
    for i in range(at, at + whole, LANES):
        store(out, i, finished(load(out, i), load(residual, i), add, bf16))
    for i in range(at + whole, at + width):
        store_one(out, i, finished(load_one(out, i), load_one(residual, i), add, bf16))


@device
def gated(gate, up, bf16):
    return rounded(rounded(silu(rounded(gate, bf16)), bf16) * rounded(up, bf16), bf16)


@device
def multiply_gate(act, at, up, up_at, width, bf16):
    """act = silu(act) * up for `width` products from the flat elements on."""
    whole = width // LANES * LANES
    for i in range(0, whole, LANES):
        store(act, at + i, gated(load(act, at + i), load(up, up_at + i), bf16))
    for i in range(whole, width):
        store_one(act, at + i, gated(load_one(act, at + i), load_one(up, up_at + i), bf16))


@device
def linear_part(part, parts, x, row_start, row_stop, w, residual, add, out, bf16):
    """A thread's share of the columns of r(x wT), or of r(residual + r(x wT)), for rows [row_start, row_stop)."""
    first, last = part_of(w.shape[0], part, parts)
    for row in range(row_start, row_stop, row_block(w.shape[1])):
        count = min(row_block(w.shape[1]), row_stop - row)
        for column in range(first, last, column_block(count)):
            width = min(column_block(count), last - column)
            product(x, row, count, w, column, width, out, row, column)
            for m in range(row, row + count):
                finish(out, m * out.shape[1] + column, width, residual, add, bf16)


run_linear = spread(linear_part)


@kernel
def linear(team, x, w, residual, add, out, bf16, parts):
    run_linear(team, parts, (x, 0, x.shape[0], w, residual, add, out, bf16))


@device
def gate_up_part(part, parts, x, row_start, row_stop, w13, act, bf16):
    """A thread's share of the columns of r(r(silu(w1 x)) * (w3 x)); w13 holds the rows of w1, then those of w3."""
    features = w13.shape[0] // 2
    block = min(row_block(w13.shape[1]), row_stop - row_start)
    up = np.empty((block, column_block(block)), np.float32)
    first, last = part_of(features, part, parts)
    for row in range(row_start, row_stop, block):
        count = min(block, row_stop - row)
        for column in range(first, last, up.shape[1]):
            width = min(up.shape[1], last - column)
            product(x, row, count, w13, column, width, act, row, column)
            product(x, row, count, w13, features + column, width, up, 0, 0)
            for m in range(count):
                multiply_gate(act, (row + m) * features + column, up, m * up.shape[1], width, bf16)


run_gate_up = spread(gate_up_part)


@kernel
def swiglu(team, x, w13, w2, residual, act, out, bf16, parts):
    """r(residual + r(w2 r(r(silu(w1 x)) * (w3 x)))), `act` [rows, features] is scratch."""
    run_gate_up(team, parts, (x, 0, x.shape[0], w13, act, bf16))
    run_linear(team, parts, (act, 0, x.shape[0], w2, residual, True, out, bf16))
