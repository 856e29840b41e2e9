"""What every matrix product shares: the form of its weights, its epilogues, and the groups of rows of experts.

The law: an output is one float32 accumulator over ascending k, 16 at a time (mma.sync and wgmma give equal bits that
way), rounded to bf16; everything after that is one of the functions below. So no tile shape, kernel or neighbour shows.

Weights lie as [units of 16 rows][blocks of 64 k][16 rows][128 bytes], the 16-byte piece c of row r at c ^ (r % 8):
one 64-k block of a unit is two swizzle-128B atoms of wgmma, and a unit is contiguous, as bulk copies like it. In the
weights of a SwiGLU a unit is 8 rows of w1 and the same 8 rows of w3, so that one thread gets gate and up.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any

import numpy as np

from .functions import high_half, low_half, pack, rounded
from .ptx import (
    broadcast,
    load_32,
    load_f32,
    load_fresh,
    reciprocal,
    shared_load,
    shared_store,
    shuffle_up,
    store_16,
    store_32,
)
from .scalar import add, device, exp2_approx, mul

PLAIN, RESIDUAL, SWIGLU, LOGITS, SCALED = range(5)
"""Epilogues: r(y) · r(residual + r(y)) · r(r(silu(r(gate))) * r(up)) · r(y) stored as float32 · r(weight * r(y))."""

UNIT = 16
"""Rows of weights that lie together."""
BLOCK_K = 64
BLOCK_BYTES = UNIT * BLOCK_K * 2
MAXIMUM_EXPERTS = 128
TABLE_BYTES = 1040
"""Shared memory of a group table: two arrays of MAXIMUM_EXPERTS + 1 int32, and what aligns the next thing to 16."""
STARTS = 4 * (MAXIMUM_EXPERTS + 1)

MINUS_LOG2_E = np.float32(-1.4426950408889634)
ONE = np.float32(1.0)


def with_globals(function: Callable[..., None], **values: Any) -> Callable[..., None]:
    """The function with some of its module's names bound to other things, for intrinsics that differ by version."""
    assert isinstance(function, FunctionType)
    bound = FunctionType(function.__code__, {**function.__globals__, **values}, function.__name__)
    bound.__module__ = function.__module__
    return bound


@device
def silu(x):
    """x / (1 + e**-x) within a few units in the last place of float32, for a result that is rounded to bf16."""
    return mul(x, reciprocal(add(ONE, exp2_approx(mul(x, MINUS_LOG2_E)))))


@device
def swiglu_pair(gate, up):
    """r(r(silu(gate)) * up) of two bf16 pairs."""
    low = mul(rounded(silu(low_half(gate))), low_half(up))
    return pack(low, mul(rounded(silu(high_half(gate))), high_half(up)))


@device
def add_pair(word, residual):
    """r(residual + word) of two bf16 pairs."""
    return pack(add(low_half(residual), low_half(word)), add(high_half(residual), high_half(word)))


@device
def scale_pair(word, weight):
    """r(weight * word) of a bf16 pair."""
    return pack(mul(weight, low_half(word)), mul(weight, high_half(word)))


@device
def output_address(out, out_row, row, column, item):
    return np.uint64(out + np.uint64(np.uint64(row) * np.uint64(out_row) + np.uint64(column)) * np.uint64(item))


@device
def residual_pair(extra, out_row, columns, row, column):
    """The bf16 pair of the residual at an even column; single where the pair is cut or rows have odd lengths."""
    at = output_address(extra, out_row, row, column, 2)
    if (out_row & np.int32(1)) == np.int32(0):
        return load_32(at)
    # rows of odd length: 4-byte loads would not be aligned
    half = np.uint32(np.uint32(at) & np.uint32(2))
    first = load_32(np.uint64(at - np.uint64(half)))
    if half == np.uint32(0):
        return first
    word = np.uint32(first >> np.uint32(16))
    if np.int32(column + np.int32(1)) < columns:
        word = np.uint32(word | np.uint32(load_32(np.uint64(at + np.uint64(2))) << np.uint32(16)))
    return word


@device
def store_pair(out, out_row, columns, mode, row, column, word):
    """Store a bf16 pair at an even column, as bf16 or (LOGITS) float32, but nothing beyond `columns`."""
    if column >= columns:
        return
    both = np.int32(column + np.int32(1)) < columns
    if mode == LOGITS:
        at = output_address(out, out_row, row, column, 4)
        store_32(at, np.uint32(word << np.uint32(16)))
        if both:
            store_32(np.uint64(at + np.uint64(4)), np.uint32(word & np.uint32(0xFFFF0000)))
        return
    at = output_address(out, out_row, row, column, 2)
    if both and (out_row & np.int32(1)) == np.int32(0):
        store_32(at, word)
    else:
        store_16(at, np.uint16(word & np.uint32(0xFFFF)))
        if both:
            store_16(np.uint64(at + np.uint64(2)), np.uint16(word >> np.uint32(16)))


@device
def row_weight(extra, row):
    return load_f32(np.uint64(extra + np.uint64(row) * np.uint64(4)))


@device
def finish_unit(out, out_row, columns, mode, extra, row, unit, low, high, lane):
    """Epilogue of one row's part of a unit: the thread's pairs `low` of columns 0 to 7 and `high` of 8 to 15."""
    pair = np.int32(np.int32(lane & np.int32(3)) * np.int32(2))
    if mode == SWIGLU:
        store_pair(out, out_row, columns, mode, row, np.int32(unit * np.int32(8) + pair), swiglu_pair(low, high))
        return
    column = np.int32(unit * np.int32(16) + pair)
    other = np.int32(column + np.int32(8))
    if mode == RESIDUAL:
        if column < columns:
            low = add_pair(low, residual_pair(extra, out_row, columns, row, column))
        if other < columns:
            high = add_pair(high, residual_pair(extra, out_row, columns, row, other))
    elif mode == SCALED:
        weight = row_weight(extra, row)
        low, high = scale_pair(low, weight), scale_pair(high, weight)
    store_pair(out, out_row, columns, mode, row, column, low)
    store_pair(out, out_row, columns, mode, row, other, high)


@device
def group_table(start, experts, shift, table, lane):
    """By one warp: into shared memory, how many groups of 2**shift rows lie before each expert, and `start` itself."""
    carry = np.int32(0)
    if lane == np.int32(0):
        shared_store(table, np.int32(0))
    for first in range(0, experts, 32):
        expert = np.int32(first + lane)
        begin, end = np.int32(0), np.int32(0)
        if expert < experts:
            begin = load_fresh(np.uint64(start + np.uint64(expert) * np.uint64(4)))
            end = load_fresh(np.uint64(start + np.uint64(expert) * np.uint64(4) + np.uint64(4)))
        groups = np.int32(np.int32(end - begin + np.int32(np.int32(1) << shift) - np.int32(1)) >> shift)
        for step in (1, 2, 4, 8, 16):
            before = shuffle_up(groups, np.int32(step))
            if lane >= np.int32(step):
                groups = np.int32(groups + before)
        groups = np.int32(groups + carry)
        if expert < experts:
            shared_store(np.uint32(table + np.uint32(expert) * np.uint32(4) + np.uint32(4)), groups)
            shared_store(np.uint32(table + np.uint32(STARTS) + np.uint32(expert) * np.uint32(4)), begin)
            shared_store(np.uint32(table + np.uint32(STARTS) + np.uint32(expert) * np.uint32(4) + np.uint32(4)), end)
        carry = broadcast(groups, np.int32(31))


@device
def table_groups(table, expert):
    """Groups before an expert."""
    return shared_load(np.uint32(table + np.uint32(expert) * np.uint32(4)))


@device
def table_start(table, expert):
    """First sorted pair of an expert."""
    return shared_load(np.uint32(table + np.uint32(STARTS) + np.uint32(expert) * np.uint32(4)))


@device
def find_expert(table, experts, number, scale):
    """The expert whose groups, each `scale` tiles, hold tile `number`."""
    low, high = np.int32(0), experts
    while np.int32(high - low) > np.int32(1):
        middle = np.int32(np.int32(low + high) >> np.int32(1))
        if np.int32(table_groups(table, middle) * scale) <= number:
            low = middle
        else:
            high = middle
    return low
