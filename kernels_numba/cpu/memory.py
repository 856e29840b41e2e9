"""Large memory in huge pages: reading weights through 4 KiB pages costs a tenth of the bandwidth."""

from __future__ import annotations

import mmap
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

HUGE_PAGE = 2 << 20
LINE = 64


def mapped(nbytes: int) -> NDArray[np.uint8]:
    """Zeroed bytes, taken from the system as they are first touched, in huge pages where it has them."""
    if nbytes < HUGE_PAGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return np.zeros(nbytes, np.uint8)
    region = mmap.mmap(-1, nbytes + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    region.madvise(mmap.MADV_HUGEPAGE)
    whole = np.frombuffer(region, np.uint8)
    start = -whole.ctypes.data % HUGE_PAGE
    return whole[start : start + nbytes]


class Arena:
    """Arrays cut from one mapping, each on a cache line of its own."""

    def __init__(self, nbytes: int) -> None:
        self._bytes = mapped(nbytes)
        self._used = 0

    def take(self, shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
        """A C-contiguous array; beyond the arena's size, of memory of its own."""
        count = int(np.prod(shape)) * np.dtype(dtype).itemsize
        end = self._used + -(-count // LINE) * LINE
        if end > self._bytes.size:
            return mapped(count).view(dtype).reshape(shape)
        piece = self._bytes[self._used : self._used + count]
        self._used = end
        return piece.view(dtype).reshape(shape)
