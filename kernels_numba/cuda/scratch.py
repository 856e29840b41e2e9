"""Memory for what one step computes: taken once at start, handed out and taken back as Python's references go.

All work is on one stream, so a block may be handed out again as soon as the launches that use it are queued.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Sequence
from functools import partial

from .driver import ITEM_BYTES, CudaOutOfMemory, DeviceArray

ALIGN = 256


class Scratch:
    """One block of device memory, handed out first fit."""

    def __init__(self, memory: DeviceArray) -> None:
        self.nbytes = memory.nbytes // ALIGN * ALIGN
        self._memory = memory
        self._free = [(0, self.nbytes)]  # (offset, bytes), ascending, never adjacent

    @property
    def free_bytes(self) -> int:
        return sum(size for _, size in self._free)

    def take(self, shape: Sequence[int], dtype: str) -> Activations:
        """A block for an array; CudaOutOfMemory where nothing that large is free."""
        size = max(1, -(-math.prod(shape) * ITEM_BYTES[dtype] // ALIGN)) * ALIGN
        for i, (offset, free) in enumerate(self._free):
            if free >= size:
                if free == size:
                    del self._free[i]
                else:
                    self._free[i] = (offset + size, free - size)
                array = DeviceArray(self._memory.pointer + offset, tuple(shape), dtype)
                return Activations(array, partial(self._release, offset, size))
        raise CudaOutOfMemory(
            f"a step needs {size:,} bytes more than the {self.nbytes:,} bytes of scratch; {self.free_bytes:,} are free"
        )

    def _release(self, offset: int, size: int) -> None:
        at = bisect.bisect(self._free, (offset, size))
        self._free.insert(at, (offset, size))
        for i in (at, at - 1):  # join with the next, then with the one before
            if 0 <= i < len(self._free) - 1 and sum(self._free[i]) == self._free[i + 1][0]:
                self._free[i : i + 2] = [(self._free[i][0], self._free[i][1] + self._free[i + 1][1])]


class Activations:
    """An array in scratch memory, given back when nobody refers to it any more.

    A slice keeps the whole. While it is `pending`, `finish` has yet to queue what fills the array (see
    CudaBackend.moe).
    """

    __slots__ = ("__weakref__", "_array", "_release", "_whole", "pending")

    def __init__(
        self, array: DeviceArray, release: Callable[[], None] | None, whole: Activations | None = None
    ) -> None:
        self._array = array
        self._release = release
        self._whole = whole
        self.pending = False

    def __del__(self) -> None:
        if self._release is not None:
            self._release()

    @property
    def array(self) -> DeviceArray:
        """The memory, complete in the order of the stream."""
        if self.pending:
            self.pending = False
            self.finish()
        return self._array

    def finish(self) -> None:
        """Queue what fills the array."""

    @property
    def memory(self) -> DeviceArray:
        """The memory, perhaps not complete yet."""
        return self._array

    @property
    def shape(self) -> tuple[int, ...]:
        return self._array.shape

    def __len__(self) -> int:
        return self._array.shape[0]

    def part(self, start: int, stop: int) -> Activations:
        """Rows start ... stop - 1, in place."""
        return Activations(self.array[start:stop], None, self)
