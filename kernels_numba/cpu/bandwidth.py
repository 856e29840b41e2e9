"""How fast this machine reads memory: the bound of every decode round on a CPU."""

from __future__ import annotations

import time

import numba
import numpy as np

from kernels_numba.jit import kernel


@kernel(parallel=True)
def _sum_blocks(words, partial):  # type: ignore[no-untyped-def]
    block = words.size // partial.size
    for b in numba.prange(partial.size):
        mine = words[b * block : (b + 1) * block]  # a slice: its indices need no check, so the loop is vectorised
        total = np.uint64(0)
        for i in range(mine.size):
            total += mine[i]
        partial[b] = total


def read_bandwidth(size: int = 1 << 30, repeats: int = 8) -> float:
    """Bytes a second when all threads read `size` bytes once, in order (the best of `repeats`)."""
    words = np.ones(size // 8, np.uint64)
    partial = np.empty(4 * numba.get_num_threads(), np.uint64)
    best = float("inf")
    for _ in range(repeats + 1):  # the first one compiles
        started = time.perf_counter()
        _sum_blocks(words, partial)
        best = min(best, time.perf_counter() - started)
    return words.nbytes / best
