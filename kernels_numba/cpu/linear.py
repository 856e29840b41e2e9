"""Products with stored bf16 weights: x wT, and the SwiGLU feed-forward built from three of them.

Every output is one accumulator over ascending k (see `simd.dot_tile`), so tile shapes, blocks and threads are free.
"""

from __future__ import annotations

import numpy as np
from numba import prange

from ..jit import device, kernel
from .functions import rounded, silu
from .simd import dot_tile

COLUMNS = 96  # outputs of a row computed between two epilogues; a multiple of every tile width
CACHED_INPUTS = 1 << 17  # float32 values of x that stay in the second-level cache while weights stream past


@device
def part_of(count, part, parts):
    """Part `part` of range(count) cut into `parts` even ranges."""
    return count * part // parts, count * (part + 1) // parts


def _strip(rows: int, columns: int):
    """Products of a block of at least rows x columns by tiles of that size; edge tiles overlap their neighbours."""
    tile = dot_tile(rows, columns)

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


_narrow = _strip(1, 1)
_one = _strip(1, 8)
_two = _strip(2, 8)
_three = _strip(3, 8)
_four = _strip(4, 6)
_five = _strip(5, 4)
_six = _strip(6, 4)
_seven = _strip(7, 3)
_eight = _strip(8, 3)


@device
def product(x, x_row, count, w, w_row, width, out, out_row, out_column):
    """out[out_row + m, out_column + n] = x[x_row + m] . w[w_row + n] for `count` rows and `width` weights, unrounded."""
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
    elif count > 0:
        _four(x, x_row, count, w, w_row, width, out, out_row, out_column)


@device
def row_block(depth):
    return max(8, CACHED_INPUTS // depth // 4 * 4)


@device
def linear_part(part, parts, x, row_start, row_stop, w, residual, add, out, bf16):
    """A thread's share of the columns of r(x wT), or of r(residual + r(x wT)), for rows [row_start, row_stop)."""
    first, last = part_of(w.shape[0], part, parts)
    for row in range(row_start, row_stop, row_block(w.shape[1])):
        count = min(row_block(w.shape[1]), row_stop - row)
        for column in range(first, last, COLUMNS):
            width = min(COLUMNS, last - column)
            product(x, row, count, w, column, width, out, row, column)
            for m in range(row, row + count):
                for n in range(column, column + width):
                    y = rounded(out[m, n], bf16)
                    out[m, n] = rounded(residual[m, n] + y, bf16) if add else y


@kernel(parallel=True)
def linear(x, w, residual, add, out, bf16, parts):
    if parts == 1:
        linear_part(np.int64(0), parts, x, 0, x.shape[0], w, residual, add, out, bf16)
    else:
        for part in prange(parts):
            linear_part(np.int64(part), parts, x, 0, x.shape[0], w, residual, add, out, bf16)


@device
def gate_up_part(part, parts, x, row_start, row_stop, w13, act, bf16):
    """A thread's share of the columns of r(r(silu(w1 x)) * (w3 x)); w13 holds the rows of w1, then those of w3."""
    features = w13.shape[0] // 2
    block = min(row_block(w13.shape[1]), row_stop - row_start)
    up = np.empty((block, COLUMNS), np.float32)
    first, last = part_of(features, part, parts)
    for row in range(row_start, row_stop, block):
        count = min(block, row_stop - row)
        for column in range(first, last, COLUMNS):
            width = min(COLUMNS, last - column)
            product(x, row, count, w13, column, width, act, row, column)
            product(x, row, count, w13, features + column, width, up, 0, 0)
            for m in range(count):
                for n in range(width):
                    gate = rounded(silu(rounded(act[row + m, column + n], bf16)), bf16)
                    act[row + m, column + n] = rounded(gate * rounded(up[m, n], bf16), bf16)


@kernel(parallel=True)
def swiglu(x, w13, w2, residual, act, out, bf16, parts):
    """r(residual + r(w2 r(r(silu(w1 x)) * (w3 x)))), `act` [rows, features] is scratch."""
    if parts == 1:
        gate_up_part(np.int64(0), parts, x, 0, x.shape[0], w13, act, bf16)
        linear_part(np.int64(0), parts, act, 0, x.shape[0], w2, residual, True, out, bf16)
    else:
        for part in prange(parts):
            gate_up_part(np.int64(part), parts, x, 0, x.shape[0], w13, act, bf16)
        for part in prange(parts):
            linear_part(np.int64(part), parts, act, 0, x.shape[0], w2, residual, True, out, bf16)
