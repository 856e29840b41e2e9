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
from .scalar import add, fma, let_next_start, load4, mul, shuffle_xor, store4, sub, wait_for_earlier
from .unroll import registers, static, unrolled

HEAD = 64
HALF = HEAD // 2
THREADS = 256
WARPS = THREADS // 32
BLOCK_ROWS = 4  # of a prompt's block
AT_ONCE = 6  # times four heads that a prompt's warp has under way


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
def turned(pair, w, c, s, lane, eps):
    """A head's values 2 * lane and 2 * lane + 1 after norm by pair `w` of its weights and rotation by pairs of cos and
    sin (`turn`'s); dim i turns with dim i + 32, 16 lanes away."""
    low, high = low_half(pair), high_half(pair)
    scale = inverse_rms(warp_sum(fma(high, high, mul(low, low))), np.float32(HEAD), eps)
    low = rounded(mul(low_half(w), rounded(mul(low, scale))))
    high = rounded(mul(high_half(w), rounded(mul(high, scale))))
    other_low, other_high = shuffle_xor(low, np.int32(16)), shuffle_xor(high, np.int32(16))
    if lane < 16:
        low = sub(rounded(mul(low, low_half(c))), rounded(mul(other_low, low_half(s))))
        high = sub(rounded(mul(high, high_half(c))), rounded(mul(other_high, high_half(s))))
    else:
        low = add(rounded(mul(low, low_half(c))), rounded(mul(other_low, low_half(s))))
        high = add(rounded(mul(high, high_half(c))), rounded(mul(other_high, high_half(s))))
    return pack(low, high)


@device
def turn(cos, sin, position, lane):
    """A lane's cos and sin of a position."""
    at = np.int64(position) * 16 + (lane & 15)
    return cos[at], sin[at]


@device
def normed_rotated(pair, lane, weight, eps, cos, sin, position):
    """`turned` of a head at a position."""
    w = weight[lane]
    c, s = turn(cos, sin, position, lane)
    return turned(pair, w, c, s, lane, eps)


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


@device
@unrolled
def piece_normed_rotated(p: 4, w: 4, c: 4, s: 4, lane, eps):
    """`normed_rotated` of eight values of a head that eight lanes hold: the sums meet in the same tree, of whose levels
    the last two lie in a lane."""
    squares = registers(4)
    for i in static(4):
        squares[i] = fma(high_half(p[i]), high_half(p[i]), mul(low_half(p[i]), low_half(p[i])))
    for mask in (4, 2, 1):
        for i in static(4):
            squares[i] = add(squares[i], shuffle_xor(squares[i], np.int32(mask)))
    total = add(add(squares[0], squares[2]), add(squares[1], squares[3]))
    scale = inverse_rms(total, np.float32(HEAD), eps)
    for i in static(4):
        low = rounded(mul(low_half(w[i]), rounded(mul(low_half(p[i]), scale))))
        high = rounded(mul(high_half(w[i]), rounded(mul(high_half(p[i]), scale))))
        other_low, other_high = shuffle_xor(low, np.int32(4)), shuffle_xor(high, np.int32(4))
        low, high = rounded(mul(low, low_half(c[i]))), rounded(mul(high, high_half(c[i])))
        other_low, other_high = rounded(mul(other_low, low_half(s[i]))), rounded(mul(other_high, high_half(s[i])))
        if lane & 4:
            p[i] = pack(add(low, other_low), add(high, other_high))
        else:
            p[i] = pack(sub(low, other_low), sub(high, other_high))
    return p


@kernel("u32* u32* u32* f32 u32* u32* u32* i32 i32 i32* i32* i32* i32* i32 i32 i32 i32 u32*", threads=THREADS)
@unrolled(AT_ONCE=AT_ONCE)
def attention_inputs_rows(
    qkv, q_norm, k_norm, eps, cos, sin, pool, layer, layers, positions, row_segment, seg_slot, page_table, table_width,
    heads, kv_heads, rows, q,
):  # fmt: skip
    """`attention_inputs` for prompts. Grid [rows / 4], 256 threads: two warps take a row, four heads at a time, an
    eighth of a head a lane; what AT_ONCE times need is asked for together."""
    let_next_start()
    wait_for_earlier()
    lane, warp = np.int32(cuda.threadIdx.x & 31), np.int32(cuda.threadIdx.x >> 5)
    row = min(np.int32(cuda.blockIdx.x * BLOCK_ROWS + (warp & 3)), np.int32(rows - 1))  # the last one again
    every = np.int32(heads + 2 * kv_heads)
    piece, within = np.int32(np.int32(lane & 7) * 4), np.int32(lane >> 3)
    position = positions[row]
    slot = seg_slot[row_segment[row]]
    page = page_table[np.int64(max(slot, 0)) * table_width + (position >> 9)]
    for first in range(np.int32(warp >> 2) * 4, every, 8 * AT_ONCE):
        words = registers(4 * AT_ONCE)
        for n in static(AT_ONCE):
            head = min(np.int32(first + 8 * n + within), np.int32(every - 1))
            words[4 * n], words[4 * n + 1], words[4 * n + 2], words[4 * n + 3] = load4(
                qkv, (np.int64(row) * every + head) * HALF + piece
            )
        c = registers(4)
        s = registers(4)
        q_weight = registers(4)
        k_weight = registers(4)
        c = load4(cos, np.int64(position) * 16 + (piece & 15))
        s = load4(sin, np.int64(position) * 16 + (piece & 15))
        q_weight = load4(q_norm, np.int64(piece))
        k_weight = load4(k_norm, np.int64(piece))
        for n in static(AT_ONCE):
            head = np.int32(first + 8 * n + within)
            w = registers(4)
            p = registers(4)
            for i in static(4):
                w[i] = q_weight[i] if head < heads else k_weight[i]
                p[i] = words[4 * n + i]
            p = piece_normed_rotated(p, w, c, s, lane, eps)
            if head < heads:
                store4(q, (np.int64(row) * heads + head) * HALF + piece, p)
            elif head < every and slot >= 0:
                kind = 0 if head < heads + kv_heads else 1
                target = head - heads - kind * kv_heads
                place = cache_word(page, position, layer, layers, kind, target, kv_heads, piece)
                if kind == 0:
                    store4(pool, place, p)
                else:
                    store4(pool, place, words[4 * n], words[4 * n + 1], words[4 * n + 2], words[4 * n + 3])
