"""Memory for what one step computes: taken once at start, handed out and taken back as Python's references go.

All work is on one stream, so a block may be handed out again as soon as the launches that use it are queued.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence

from .driver import ITEM_BYTES, CudaOutOfMemory, DeviceArray

ALIGN = 256


class Scratch:
    """One block of device memory, handed out first fit."""

    def __init__(self, memory: DeviceArray) -> None:
        self.nbytes = memory.nbytes // ALIGN * ALIGN
        self._memory = memory
        self._free = [(0, self.nbytes)]  # (offset, bytes), ascending, never adjacent

    @property
    def memory(self) -> DeviceArray:
        """All of it."""
        return self._memory

    @property
    def free_bytes(self) -> int:
        return sum(size for _, size in self._free)

    def take(self, shape: Sequence[int], dtype: str) -> Activations:
        """A block for an array; CudaOutOfMemory where nothing that large is free."""
        size = max(ALIGN, -(-math.prod(shape) * ITEM_BYTES[dtype] // ALIGN) * ALIGN)
        for i, (offset, free) in enumerate(self._free):
            if free >= size:
                if free == size:
                    del self._free[i]
                else:
                    self._free[i] = (offset + size, free - size)
                array = DeviceArray(self._memory.pointer + offset, tuple(shape), dtype)
                return Activations(array, self, (offset, size))
        raise CudaOutOfMemory(
            f"a step needs {size:,} bytes more than the {self.nbytes:,} bytes of scratch; {self.free_bytes:,} are free"
        )

    def give_back(self, block: tuple[int, int]) -> None:
        """A block, offset and bytes, is free again; joined with the free ones beside it."""
        free = self._free
        at = bisect.bisect(free, block)
        offset, size = block
        if at < len(free) and offset + size == free[at][0]:
            size += free.pop(at)[1]
        if at and sum(free[at - 1]) == offset:
            offset, before = free[at - 1]
            free[at - 1] = (offset, before + size)
        else:
            free.insert(at, (offset, size))


class Activations:
    """An array in scratch memory, given back when nobody refers to it any more.

    A slice keeps the whole. While it is `pending`, `finish` has yet to queue what fills the array (see
    CudaBackend.moe).
    """

    __slots__ = ("__weakref__", "_array", "_block", "_holder", "pending")

    def __init__(
        self, array: DeviceArray, holder: Scratch | Activations | None, block: tuple[int, int] | None = None
    ) -> None:
        """holder: whom `block` is given back to, or who keeps the memory."""
        self._array = array
        self._holder = holder
        self._block = block
        self.pending = False

    def __del__(self) -> None:
        if self._block is not None:
            self._holder.give_back(self._block)  # type: ignore[union-attr]

    @property
    def array(self) -> DeviceArray:
        """The memory, complete in the order of the stream."""
        if self.pending:
            self.pending = False
            self.finish()
        return self._array

    @property
    def pointer(self) -> int:
        """The address of `array`."""
        return self.array.pointer

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
        return Activations(self.array[start:stop], self)
