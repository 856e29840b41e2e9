"""RMSNorm (arXiv 1910.07467), alone and behind the sum over experts.

A row's sum of squares, in a block as in a warp: the squares of a piece of 8 values by an fma chain, the pieces l, l +
32, l + 64, ... of lane l in order, then the xor tree over lanes.
"""

from __future__ import annotations

import numpy as np
from numba import cuda

from .compiler import kernel
from .functions import ZERO, device, high_half, inverse_rms, low_half, pack, rounded, warp_sum
from .scalar import add, fma, let_next_start, load4, mul, store4, wait_for_earlier

THREADS = 256
WARPS = THREADS // 32


@device
def square_pair(pair, total):
    low, high = low_half(pair), high_half(pair)
    return fma(high, high, fma(low, low, total))


@device
def square_sum(a, b, c, d):
    """Sum of squares of 8 bf16 values, ascending."""
    return square_pair(d, square_pair(c, square_pair(b, square_pair(a, ZERO))))


@device
def lane_sum(total, squares, partial):
    """A lane's sum, with the squares that the block's threads hold of up to 256 pieces more."""
    partial[cuda.threadIdx.x] = squares
    cuda.syncthreads()
    lane = cuda.threadIdx.x & 31
    for warp in range(WARPS):
        total = add(total, partial[lane + warp * 32])
    cuda.syncthreads()
    return total


@device
def row_scale(total, hidden, eps):
    """1 / rms of a row from its lanes' sums."""
    return inverse_rms(warp_sum(total), np.float32(hidden), eps)


@device
def norm_pair(pair, weight, scale):
    """r(w * r(x * scale)) of two values."""
    low = mul(low_half(weight), rounded(mul(low_half(pair), scale)))
    high = mul(high_half(weight), rounded(mul(high_half(pair), scale)))
    return pack(low, high)


@kernel("u32* u32* f32 i32 u32*", threads=THREADS)
def rms_norm(x, weight, eps, hidden, out):
    """out = r(w * r(x / rms(x))) of bf16 rows [rows, hidden]. Grid [rows], 256 threads."""
    let_next_start()
    wait_for_earlier()
    partial = cuda.shared.array(THREADS, np.float32)
    pieces = hidden >> 3
    first = np.int64(cuda.blockIdx.x) * pieces
    total = ZERO
    a, b, c, d = np.uint32(0), np.uint32(0), np.uint32(0), np.uint32(0)
    for start in range(0, pieces, THREADS):
        piece = start + cuda.threadIdx.x
        squares = ZERO
        if piece < pieces:
            a, b, c, d = load4(x, (first + piece) * 4)
            squares = square_sum(a, b, c, d)
        total = lane_sum(total, squares, partial)
    scale = row_scale(total, hidden, eps)
    for piece in range(cuda.threadIdx.x, pieces, THREADS):
        if pieces > THREADS:
            a, b, c, d = load4(x, (first + piece) * 4)
        e, f, g, h = load4(weight, piece * 4)
        store4(
            out,
            (first + piece) * 4,
            norm_pair(a, e, scale),
            norm_pair(b, f, scale),
            norm_pair(c, g, scale),
            norm_pair(d, h, scale),
        )
