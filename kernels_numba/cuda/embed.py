"""Embedding rows, read from the packed matrix that the head multiplies with (see `packed_piece`)."""

from __future__ import annotations

import numpy as np
from numba import cuda

from ..batch import FED_BACK
from .compiler import kernel
from .functions import device
from .scalar import let_next_start, load4, store4, wait_for_earlier

THREADS = 128


@device
def packed_piece(row, piece, depth):
    """Where 8 values of a packed weight [rows, depth] lie, in 16-byte pieces: [rows / 16][depth / 64][16][8 pieces],
    piece c of a block's row r at c ^ (r & 7)."""
    block = (np.int64(row) >> 4) * (depth >> 6) + (piece >> 3)
    return (block * 16 + (row & 15)) * 8 + ((piece & 7) ^ (row & 7))


@kernel("i32* i32* i32* i32* u32* i32 u32*", threads=THREADS)
def embed(tokens, drawn, row_segment, seg_slot, weight, hidden, out):
    """out [rows, hidden] bf16: the rows of `weight` at `tokens`; zeros where the row is padding (its slot is -1).

    drawn [slots]: each slot's last drawn token, taken where the token is FED_BACK. Grid [rows].
    """
    let_next_start()
    wait_for_earlier()
    row = cuda.blockIdx.x
    slot = seg_slot[row_segment[row]]
    token = tokens[row]
    if slot >= 0 and token == FED_BACK:
        token = drawn[slot]
    pieces = hidden >> 3
    for piece in range(cuda.threadIdx.x, pieces, THREADS):
        at = (np.int64(row) * pieces + piece) * 4
        if slot >= 0:
            a, b, c, d = load4(weight, packed_piece(token, piece, hidden) * 4)
            store4(out, at, a, b, c, d)
        else:
            zero = np.uint32(0)
            store4(out, at, zero, zero, zero, zero)
