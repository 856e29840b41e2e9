"""Causal attention over the paged K/V pool on tensor cores.

Keys are reduced in ranges of 128 absolute positions. A range gives every query a partial result: the largest score, the
sum of weights and the weighted values, in `range_partial`; partial results are merged in ascending order, in `merge`. Prompt
rows do both in one kernel that walks over the ranges (`attention_rows`); decode rows spread their ranges over the GPU
(`attention_ranges`) and merge afterwards (`attention_merge`). Both call the same two functions, so a row has the same bits
either way. A key past a row's position weighs exactly nothing, and a range without visible keys is not merged.

A warp takes 16 query vectors: the heads that share a K/V head, of one or several rows. Tiles in shared memory are
[128 positions][8 pieces of 16 bytes], piece c of position p at c ^ (p & 7), as in the pool (see rope.py).
"""

from __future__ import annotations

import numpy as np
from numba import cuda

from .compiler import kernel
from .functions import LOG2_E, ONE, ZERO, device, pack
from .scalar import add, div, exp2_approx, fma, larger, load_u32, mul, shuffle_xor, sub
from .tiles import (
    copies_end_group,
    copies_wait_all,
    copies_wait_but_1,
    copy_async_or_zero,
    global_address,
    load_tiles,
    load_tiles_transposed,
    mma,
    shared_address,
)
from .unroll import registers, static, unrolled
from ..batch import PAGE_ROWS

RANGE = 128
TILE_BYTES = RANGE * 128
SCALE = np.float32(0.125) * LOG2_E  # 64 ** -0.5, and weights are powers of 2
LOWEST = np.float32(-np.inf)
WARPS = 8  # of a block of attention_rows
QUERIES = 16 * WARPS  # query vectors of such a block
MERGE_AT_ONCE = 16
NO_KEY = -1
