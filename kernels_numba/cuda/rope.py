"""Rotary tables, and what stands between the q/k/v product and attention: q/k norm, rotation, the write to the cache.

The K/V pool is [page][attention layer][keys, values][K/V head][512 positions][64] bf16; of a position's eight 16-byte
pieces, piece c lies at c ^ (position & 7), so that attention's copies into shared memory need no other order.
"""

from __future__ import annotations

import numpy as np
from numba import cuda
from numpy.typing import NDArray

from ..batch import PAGE_ROWS
from .compiler import kernel
from .functions import device, high_half, inverse_rms, low_half, pack, rounded, warp_sum
from .scalar import add, fma, let_next_start, mul, shuffle_xor, sub, wait_for_earlier

HEAD = 64
HALF = HEAD // 2
THREADS = 256
WARPS = THREADS // 32


def rope_tables(theta: float, positions: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """cos and sin [positions, 32] of position * theta**(-2i/64), every step rounded to float32 (arXiv 2104.09864)."""
    exponent = np.arange(0, HEAD, 2, dtype=np.float32) / np.float32(HEAD)
    inverse = np.float32(1.0) / np.power(np.float64(theta), exponent.astype(np.float64)).astype(np.float32)
    angle = np.arange(positions, dtype=np.float32)[:, None] * inverse[None, :]
    return np.cos(angle.astype(np.float64)).astype(np.float32), np.sin(angle.astype(np.float64)).astype(np.float32)


@device
def cache_word(page, position, layer, layers, kind, head, kv_heads, word):
    """Where 32-bit word `word` of one head's key (kind 0) or value (kind 1) lies in the pool."""
    row = (((np.int64(page) * layers + layer) * 2 + kind) * kv_heads + head) * PAGE_ROWS + (position & (PAGE_ROWS - 1))
    return row * HALF + ((((word >> 2) ^ (position & 7)) << 2) | (word & 3))


@device
def normed_rotated(pair, lane, weight, eps, cos, sin, position):
    """A head's values 2 * lane and 2 * lane + 1 after norm and rotation; dim i turns with dim i + 32, 16 lanes away."""
    low, high = low_half(pair), high_half(pair)
    scale = inverse_rms(warp_sum(fma(high, high, mul(low, low))), np.float32(HEAD), eps)
    w = weight[lane]
    low = rounded(mul(low_half(w), rounded(mul(low, scale))))
    high = rounded(mul(high_half(w), rounded(mul(high, scale))))
    other_low, other_high = shuffle_xor(low, np.int32(16)), shuffle_xor(high, np.int32(16))
    at = np.int64(position) * 16 + (lane & 15)
    c, s = cos[at], sin[at]
    if lane < 16:
        low = sub(rounded(mul(low, low_half(c))), rounded(mul(other_low, low_half(s))))
        high = sub(rounded(mul(high, high_half(c))), rounded(mul(other_high, high_half(s))))
    else:
        low = add(rounded(mul(low, low_half(c))), rounded(mul(other_low, low_half(s))))
        high = add(rounded(mul(high, high_half(c))), rounded(mul(other_high, high_half(s))))
    return pack(low, high)


@kernel("u32* u32* u32* f32 u32* u32* u32* i32 i32 i32* i32* i32* i32* i32 i32 i32 u32*", threads=THREADS)
def attention_inputs(
    qkv, q_norm, k_norm, eps, cos, sin, pool, layer, layers, positions, row_segment, seg_slot, page_table, table_width,
    heads, kv_heads, q,
):  # fmt: skip
    """q [rows, heads * 64] normed and rotated; the rows' keys (normed, rotated) and values go to the pool.

    bf16 in pairs: qkv [rows, (heads + 2 kv_heads) * 64]; cos, sin [positions, 32]. Padding rows write nothing to the
    pool. Grid [rows, heads in blocks of 8]; a warp takes one head of one row.
    """
    let_next_start()
    wait_for_earlier()
    row = cuda.blockIdx.x
    lane = cuda.threadIdx.x & 31
    head = cuda.blockIdx.y * WARPS + (cuda.threadIdx.x >> 5)
    every = heads + 2 * kv_heads
    inside = head < every
    if not inside:
        head = 0  # the warp works along, so that all threads meet at the shuffles
    pair = qkv[(np.int64(row) * every + head) * HALF + lane]
    position = positions[row]
    word = pair
    if head < heads:
        word = normed_rotated(pair, lane, q_norm, eps, cos, sin, position)
    elif head < heads + kv_heads:
        word = normed_rotated(pair, lane, k_norm, eps, cos, sin, position)
    if inside and head < heads:
        q[(np.int64(row) * heads + head) * HALF + lane] = word
    elif inside:
        slot = seg_slot[row_segment[row]]
        if slot >= 0:
            page = page_table[np.int64(slot) * table_width + (position >> 9)]
            kind = 0 if head < heads + kv_heads else 1
            target = head - heads - kind * kv_heads
            pool[cache_word(page, position, layer, layers, kind, target, kv_heads, lane)] = word
