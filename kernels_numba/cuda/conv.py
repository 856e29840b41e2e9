"""The gated short convolution of LFM2 (arXiv 2511.23404): three taps over time, one filter a channel."""

from __future__ import annotations

import numpy as np
from numba import cuda

from ..batch import RING_ROWS
from .compiler import kernel
from .functions import device, high_half, low_half, pack
from .scalar import fma, let_next_start, load1, mul, wait_for_earlier
from .unroll import registers, static, unrolled

THREADS = 128
TILE = 8  # rows of a prompt's tile


@device
def product_pair(a, b):
    """r(a * b) of two channels."""
    return pack(mul(low_half(a), low_half(b)), mul(high_half(a), high_half(b)))


@device
def gated_input(bcx, row, half, word):
    """u = r(B * x) of two channels."""
    at = np.int64(row) * 3 * half + word
    return product_pair(bcx[at], bcx[at + 2 * half])


@device
def earlier_input(bcx, row, back, first, position, ring, ring_at, half, word):
    """u of `back` positions before `row`: from the segment's own rows, else from the ring; zero before position 0."""
    if row - back >= first:
        return gated_input(bcx, row - back, half, word)
    if position < back:
        return np.uint32(0)
    return ring[ring_at + ((position - back) & (RING_ROWS - 1)) * half + word]


@device
def filtered(w0, w1, w2, u2, u1, u):
    """r(w0 u[t-2] + w1 u[t-1] + w2 u[t])"""
    low = fma(low_half(w2), low_half(u), fma(low_half(w1), low_half(u1), mul(low_half(w0), low_half(u2))))
    high = fma(high_half(w2), high_half(u), fma(high_half(w1), high_half(u1), mul(high_half(w0), high_half(u2))))
    return pack(low, high)


@device
@unrolled(TILE=TILE)
def inner_tile(bcx, w0, w1, w2, start, half, word, row_segment, seg_start, seg_slot, out):
    """TILE rows from `start` on where they and the two before are of one segment: nothing of the ring is read or
    written. Everything is asked for before it is known whether that is so; says whether it was."""
    b = registers(TILE + 2)
    x = registers(TILE + 2)
    c = registers(TILE)
    for i in static(TILE + 2):
        at = np.int64(start + i - 2) * 3 * half + word
        b[i] = load1(bcx, at)
        x[i] = load1(bcx, at + 2 * half)
    for i in static(TILE):
        c[i] = load1(bcx, np.int64(start + i) * 3 * half + half + word)
    segment = row_segment[start]
    if seg_slot[segment] < 0 or seg_start[segment] + 2 > start or start + TILE > seg_start[segment + 1]:
        return False
    u2, u1 = product_pair(b[0], x[0]), product_pair(b[1], x[1])
    for i in static(TILE):
        u = product_pair(b[i + 2], x[i + 2])
        out[np.int64(start + i) * half + word] = product_pair(c[i], filtered(w0, w1, w2, u2, u1, u))
        u2, u1 = u1, u
    return True


@kernel("u32* u32* u32* i32 i32 i32* i32* i32* i32* i32 i32 i32 u32*", threads=THREADS)
def short_conv(bcx, weight, ring, layer, slots, positions, row_segment, seg_start, seg_slot, rows, hidden, tile, out):
    """out = r(C * r(w0 u[t-2] + w1 u[t-1] + w2 u[t])), u = r(B x). Grid [tiles of rows, channels in blocks of 256].

    bf16 in pairs: bcx [rows, 3 hidden] holds B, C, x; weight [3, hidden] the taps; ring [layers, slots, 32, hidden].
    The thread that runs a segment's first row of its channels also runs the second, which are the two that read the
    ring, and only then writes the ring: the last 32 rows' u, whichever thread runs those. Padding rows (slot -1) write
    zeros to `out` and nothing to the ring.
    """
    let_next_start()
    wait_for_earlier()
    half = hidden >> 1
    word = cuda.blockIdx.y * THREADS + cuda.threadIdx.x
    if word >= half:
        return
    start = cuda.blockIdx.x * tile
    stop = min(start + tile, rows)
    w0, w1, w2 = weight[word], weight[half + word], weight[2 * half + word]
    if (
        tile == TILE
        and start >= 2
        and start + TILE <= rows
        and inner_tile(bcx, w0, w1, w2, start, half, word, row_segment, seg_start, seg_slot, out)
    ):
        return
    if start > 0 and seg_start[row_segment[start]] == start - 1:
        start += 1
    if stop < rows and stop > 0 and seg_start[row_segment[stop]] == stop - 1:
        stop += 1
    u1, u2 = np.uint32(0), np.uint32(0)
    for row in range(start, stop):
        segment = row_segment[row]
        slot = seg_slot[segment]
        if slot < 0:
            out[np.int64(row) * half + word] = np.uint32(0)
            continue
        first = seg_start[segment]
        position = positions[row]
        ring_at = (np.int64(layer) * slots + slot) * RING_ROWS * half
        tile_begins = row == start
        if tile_begins or row == first:
            u1 = earlier_input(bcx, row, 1, first, position, ring, ring_at, half, word)
            u2 = earlier_input(bcx, row, 2, first, position, ring, ring_at, half, word)
        u = gated_input(bcx, row, half, word)
        z = filtered(w0, w1, w2, u2, u1, u)
        out[np.int64(row) * half + word] = product_pair(bcx[np.int64(row) * 3 * half + half + word], z)
        u2, u1 = u1, u
        last = seg_start[segment + 1]
        if row == min(first + 1, last - 1):
            for kept in range(max(first, last - RING_ROWS), last):
                at = position + (kept - row)
                ring[ring_at + (at & (RING_ROWS - 1)) * half + word] = gated_input(bcx, kept, half, word)
