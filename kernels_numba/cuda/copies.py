"""Copies and small updates inside the device: rows picked out, runs of bytes, tokens noted for the penalties."""

from __future__ import annotations

import numpy as np
from numba import cuda
from numpy.typing import NDArray

from .compiler import kernel
from .conv import earlier_input, gated_input
from .scalar import let_next_start, load4, store4, wait_for_earlier

THREADS = 256
COPY_THREADS = 512
COPY_BYTES = 256 << 10


@kernel("u32* i32* i32 u32*", threads=THREADS)
def take_rows(source, index, hidden, out):
    """out[i] = source[index[i]] of bf16 rows [rows, hidden]. Grid [rows of out]."""
    let_next_start()
    wait_for_earlier()
    row = cuda.blockIdx.x
    pieces = hidden >> 3
    from_ = np.int64(index[row]) * pieces
    for piece in range(cuda.threadIdx.x, pieces, THREADS):
        a, b, c, d = load4(source, (from_ + piece) * 4)
        store4(out, (np.int64(row) * pieces + piece) * 4, a, b, c, d)


def in_pieces(plan: NDArray[np.int64]) -> NDArray[np.int64]:
    """Runs (offset in source, offset in target, bytes) cut into pieces of COPY_BYTES at most, a block's work each."""
    counts = -(-plan[:, 2] // COPY_BYTES)
    first = np.repeat(np.cumsum(counts) - counts, counts)
    skipped = (np.arange(len(first)) - first) * COPY_BYTES
    whole = np.repeat(plan, counts, axis=0)
    sizes = np.minimum(whole[:, 2] - skipped, COPY_BYTES)
    return np.stack([whole[:, 0] + skipped, whole[:, 1] + skipped, sizes], axis=1)


@kernel("u32* u32* i64*", threads=COPY_THREADS)
def copy_runs(source, target, plan):
    """Copy pieces of bytes; plan [pieces, 3]: offset in source, offset in target, bytes, all multiples of 16.

    Grid [pieces]; a thread has four loads on their way.
    """
    let_next_start()
    wait_for_earlier()
    at = cuda.blockIdx.x * 3
    from_, to, size = plan[at] >> 4, plan[at + 1] >> 4, plan[at + 2] >> 4
    whole = size - size % (4 * COPY_THREADS)
    for piece in range(np.int64(cuda.threadIdx.x), whole, 4 * COPY_THREADS):
        a0, a1, a2, a3 = load4(source, (from_ + piece) * 4)
        b0, b1, b2, b3 = load4(source, (from_ + piece + COPY_THREADS) * 4)
        c0, c1, c2, c3 = load4(source, (from_ + piece + 2 * COPY_THREADS) * 4)
        d0, d1, d2, d3 = load4(source, (from_ + piece + 3 * COPY_THREADS) * 4)
        store4(target, (to + piece) * 4, a0, a1, a2, a3)
        store4(target, (to + piece + COPY_THREADS) * 4, b0, b1, b2, b3)
        store4(target, (to + piece + 2 * COPY_THREADS) * 4, c0, c1, c2, c3)
        store4(target, (to + piece + 3 * COPY_THREADS) * 4, d0, d1, d2, d3)
    for piece in range(whole + cuda.threadIdx.x, size, COPY_THREADS):
        a0, a1, a2, a3 = load4(source, (from_ + piece) * 4)
        store4(target, (to + piece) * 4, a0, a1, a2, a3)


@kernel("u32* u32* i32 i32 i32 i32* i32* i32* i32* i32* i32 u32*", threads=THREADS)
def conv_taps(bcx, ring, layer, layers, slots, positions, row_segment, seg_start, seg_slot, rows, hidden, taps):
    """The convolution's inputs of each of `rows` and of the position before it, to taps [taps, layers, 2, hidden].

    bf16 in pairs; runs before `short_conv`, which overwrites the ring. Grid [taps, channels in blocks of 512].
    """
    let_next_start()
    wait_for_earlier()
    half = hidden >> 1
    word = cuda.blockIdx.y * THREADS + cuda.threadIdx.x
    if word >= half:
        return
    row = rows[cuda.blockIdx.x]
    segment = row_segment[row]
    first, position = seg_start[segment], positions[row]
    ring_at = (np.int64(layer) * slots + seg_slot[segment]) * 32 * half
    out = (np.int64(cuda.blockIdx.x) * layers + layer) * hidden + word
    taps[out] = earlier_input(bcx, row, 1, first, position, ring, ring_at, half, word)
    taps[out + half] = gated_input(bcx, row, half, word)


@kernel("i32* i32 u8*", threads=THREADS)
def mark_tokens(ids, count, seen):
    """seen[id] = 1 for each of `count` ids of a row of the penalty table. Grid: any."""
    let_next_start()
    wait_for_earlier()
    for i in range(cuda.grid(1), count, cuda.gridsize(1)):
        seen[ids[i]] = np.uint8(1)


@kernel("i32* i32* i32 i32 i32*", threads=THREADS)
def count_tokens(slots, ids, count, width, output_count):
    """output_count[slot, id] += 1 for each of `count` (slot, id). One block."""
    let_next_start()
    wait_for_earlier()
    if cuda.threadIdx.x == 0:
        for i in range(count):
            output_count[np.int64(slots[i]) * width + ids[i]] += 1
