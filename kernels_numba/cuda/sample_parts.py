"""The blocks of one row in sampling: what they tell each other, the row's first logit, sums over a block.

A row's vocabulary is cut into parts with a block each. Blocks of a row tell each other what they found (the first
logit, sums, bins) through global memory: each writes, `meet`s the others there, and reads what all have written. All
parts of all rows must run at once, since a block waits for its row's others: see `parts_of`.
"""

from __future__ import annotations

import numpy as np
from numba import cuda

from .functions import ZERO
from .scalar import SIMULATED, add, atomic_add, bits_of, device, float_of, give_up
from .unroll import registers, static, unrolled

THREADS = 64 if SIMULATED else 512
BINS = THREADS
LOWEST = np.float32(-np.inf)
MASK = np.uint64(0xFFFFFFFF)
EVERY = np.int32(0x7FFFFFFF)
MOST_PARTS = 16
PATIENCE = 4_000_000  # looks at whether the others have come
CHOSEN, FIRST, LAST, SHIFT, MEETINGS = range(5)  # places in the shared array `found`


def parts_of(rows: int, multiprocessors: int) -> int:
    """Blocks a row: all of them together take half of the GPU, so that they run at once beside another such kernel."""
    return max(1, min(MOST_PARTS, multiprocessors // (2 * rows)))


@device
def desk(link, part, meeting):
    """Where a part leaves what it tells before a meeting; two in turn, as a block may be one meeting ahead."""
    _exchange, _arrived, row, _part, parts = link
    return ((np.int64(row) * parts + part) * 2 + (meeting & 1)) * BINS


@device
def meet(link, found):
    """Wait until all parts of the row have left what they tell."""
    _exchange, arrived, row, _part, parts = link
    cuda.syncthreads()
    if cuda.threadIdx.x == 0:
        found[MEETINGS] = np.uint32(found[MEETINGS] + np.uint32(1))
        if parts > 1:
            cuda.threadfence()
            goal = np.uint32(found[MEETINGS] * np.uint32(parts))
            here = np.uint32(atomic_add(arrived, row, np.uint32(1)) + np.uint32(1))
            looks = 0
            while here < goal:
                here = atomic_add(arrived, row, np.uint32(0))
                looks += 1
                if looks > PATIENCE:
                    give_up()
            cuda.threadfence()
    cuda.syncthreads()


@device
def leave(link, rows):
    """A block's last word: the last of a row's to leave clears its counters, arrived [2, rows]."""
    _exchange, arrived, row, _part, parts = link
    cuda.syncthreads()
    if parts > 1 and cuda.threadIdx.x == 0:
        gone = atomic_add(arrived, rows + row, np.uint32(1))
        if gone == np.uint32(parts - 1):
            arrived[row] = np.uint32(0)
            arrived[rows + row] = np.uint32(0)


@device
def tell(link, found, place, value):
    """Leave a value for the next meeting; by one thread."""
    exchange, _arrived, _row, part, _parts = link
    exchange[desk(link, part, np.int32(found[MEETINGS])) + place] = value


@device
def told(link, found, part, place):
    """A part's value of the last meeting."""
    exchange, _arrived, _row, _part, _parts = link
    return exchange[desk(link, part, np.int32(found[MEETINGS]) - 1) + place]


@device
def order(z):
    """Whole numbers that ascend as logits descend; -0.0 is 0.0."""
    bits = bits_of(add(z, ZERO))
    if bits >> np.uint32(31):
        return np.uint32(bits)
    return np.uint32(~np.uint32(bits | np.uint32(0x80000000)))


@device
def logit_of(place):
    """The logit whose `order` that is."""
    if place >> np.uint32(31):
        return float_of(place)
    return float_of(np.uint32(np.uint32(~place) & np.uint32(0x7FFFFFFF)))


@device
def before(value, at, other, other_at):
    """Whether `other` comes first: larger, or equal with a lower id."""
    return other > value or (other == value and other_at < at)


@device
def block_first(value, at, values, ids):
    """The block's first (value, id); the shared arrays are free again afterwards."""
    thread = cuda.threadIdx.x
    values[thread], ids[thread] = value, at
    cuda.syncthreads()
    stride = THREADS >> 1
    while stride > 0:
        if thread < stride and before(values[thread], ids[thread], values[thread + stride], ids[thread + stride]):
            values[thread], ids[thread] = values[thread + stride], ids[thread + stride]
        cuda.syncthreads()
        stride >>= 1
    value, at = values[0], ids[0]
    cuda.syncthreads()
    return value, at


@device
def block_scan(x, sums):
    """Inclusive sums over threads, left in `sums` (shared uint64)."""
    thread = cuda.threadIdx.x
    sums[thread] = x
    cuda.syncthreads()
    stride = 1
    while stride < THREADS:
        lower = np.uint64(0)
        if thread >= stride:
            lower = sums[thread - stride]
        cuda.syncthreads()
        sums[thread] += lower
        cuda.syncthreads()
        stride *= 2


@device
def block_sum(x, sums):
    block_scan(x, sums)
    total = sums[THREADS - 1]
    cuda.syncthreads()
    return total


@device
def row_total(link, found, place):
    """Sum over the parts of what they told."""
    total = np.uint64(0)
    for part in range(link[4]):
        total += told(link, found, part, place)
    return total


@device
@unrolled
def first_of(z, start, begin, end, last, last_at, values, ids, link, found):
    """Value and id of the row's first logit that comes after (last, last_at); begin, end: the block's own."""
    best, best_at = LOWEST, EVERY
    for base in range(begin + cuda.threadIdx.x, end, 8 * THREADS):
        v = registers(8)
        for i in static(8):
            v[i] = z[start + base + i * THREADS] if base + i * THREADS < end else LOWEST
        for i in static(8):
            at = np.int32(base + i * THREADS)
            if at < end and before(best, best_at, v[i], at) and before(v[i], at, last, last_at):
                best, best_at = v[i], at
    best, best_at = block_first(best, best_at, values, ids)
    if cuda.threadIdx.x == 0:
        tell(link, found, 0, (np.uint64(order(best)) << np.uint64(32)) | np.uint64(best_at))
    meet(link, found)
    first = told(link, found, 0, 0)
    for part in range(1, link[4]):
        first = min(first, told(link, found, part, 0))
    return logit_of(np.uint32(first >> np.uint64(32))), np.int32(first & MASK)


@device
def cut(vocab):
    """First of the block's own ids, and the one past its last."""
    share = ((vocab + cuda.gridDim.y - 1) // cuda.gridDim.y + 31) // 32 * 32
    begin = min(np.int32(cuda.blockIdx.y * share), vocab)
    return begin, min(np.int32(begin + share), vocab)
