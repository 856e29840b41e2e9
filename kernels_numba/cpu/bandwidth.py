"""How fast this machine reads memory: the bound of every decode round on a CPU."""

from __future__ import annotations

import time

import numba
import numpy as np

from ..jit import device, kernel
from .linear import part_of
from .team import spread, team


@device
def sum_part(part, parts, words, partial):
    first, last = part_of(words.size, part, parts)
    mine = words[first:last]  # a slice: its indices need no check, so the loop is vectorised
    total = np.uint64(0)
    for i in range(mine.size):
        total += mine[i]
    partial[part] = total


run_sums = spread(sum_part)


@kernel
def sum_words(team, words, partial):
    run_sums(team, partial.size, (words, partial))


def read_bandwidth(size: int = 1 << 30, repeats: int = 8, threads: int | None = None) -> float:
    """Bytes a second when all threads read `size` bytes once, in order (the best of `repeats`)."""
    readers = team(numba.config.NUMBA_NUM_THREADS if threads is None else threads)
    words = np.ones(size // 8, np.uint64)
    partial = np.empty(4 * numba.config.NUMBA_NUM_THREADS, np.uint64)
    best = float("inf")
    for _ in range(repeats + 1):  # the first one compiles
        started = time.perf_counter()
        readers.wake()
        sum_words(readers.state, words, partial)
        best = min(best, time.perf_counter() - started)
    return words.nbytes / best
