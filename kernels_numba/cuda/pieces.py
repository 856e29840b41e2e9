"""A range of addresses that gets its memory part by part (CUDA's virtual memory management)."""

from __future__ import annotations

from typing import Any

from .driver import CudaError, CudaOutOfMemory, Device, call


class ReservedRange:
    """Addresses on one GPU; `map` puts memory behind a part of them while kernels use the others.

    Parts begin at multiples of `granularity`; a part's memory is rounded up to it. Any thread may map, several at once
    where the parts differ. An address never changes, so captured graphs stay valid.
    """

    def __init__(self, device: Device, nbytes: int) -> None:
        from cuda.bindings import driver

        device.make_current()
        self._device = device
        self._memory = driver.CUmemAllocationProp()
        self._memory.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        self._memory.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        self._memory.location.id = device.ordinal
        self._access = driver.CUmemAccessDesc()
        self._access.location = self._memory.location
        self._access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        kind = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_RECOMMENDED
        self.granularity = int(call("cuMemGetAllocationGranularity", self._memory, kind))
        self.nbytes = self._rounded(max(1, nbytes))
        self.pointer = int(call("cuMemAddressReserve", self.nbytes, 0, 0, 0))
        self._stream = device.stream()  # zeroing waits for nobody's kernels
        self._mapped: dict[int, tuple[int, Any]] = {}  # bytes and handle by start

    def _rounded(self, nbytes: int) -> int:
        return -(-nbytes // self.granularity) * self.granularity

    def map(self, start: int, nbytes: int) -> None:
        """Create memory for [start, start + nbytes), map it, make it accessible and zero it, in that order.

        CudaOutOfMemory: a step failed, and those before it are undone. CudaError: they couldn't be.
        """
        self._device.make_current()
        address, size = self.pointer + start, self._rounded(nbytes)
        undo: list[tuple[Any, ...]] = []
        try:
            handle = call("cuMemCreate", size, self._memory, 0)
            undo.append(("cuMemRelease", handle))
            call("cuMemMap", address, size, 0, handle, 0)
            undo.append(("cuMemUnmap", address, size))
            call("cuMemSetAccess", address, size, [self._access], 1)
            call("cuMemsetD8Async", address, 0, size, self._stream.handle)
            self._stream.synchronize()
        except CudaError as error:
            for step in reversed(undo):
                call(*step)
            raise CudaOutOfMemory(str(error)) from error
        self._mapped[start] = (size, handle)

    def unmap(self, start: int, nbytes: int) -> None:
        """Give a part's memory back; nothing that is queued may use it."""
        self._device.make_current()
        size, handle = self._mapped.pop(start)
        call("cuMemUnmap", self.pointer + start, size)
        call("cuMemRelease", handle)

    def free_bytes(self) -> int:
        """Bytes of GPU memory free now."""
        self._device.make_current()
        return self._device.free_bytes()

    def close(self) -> None:
        """Give back all memory and the addresses; nothing that is queued may use them. Idempotent."""
        for start, (size, _) in list(self._mapped.items()):
            self.unmap(start, size)
        if self.pointer:
            call("cuMemAddressFree", self.pointer, self.nbytes)
        self.pointer = 0
