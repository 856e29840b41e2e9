"""A driver that keeps account of virtual memory on the host: what is created, mapped, accessible, zeroed, by whom."""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from kernels_numba.cuda.driver import CudaError, CudaOutOfMemory

STEPS = ("cuMemCreate", "cuMemMap", "cuMemSetAccess", "cuMemsetD8Async")
BASE = 1 << 40
GRANULARITY = 4096


class FakeDriver:
    """Takes the place of `driver.call`, and fails where an order is broken.

    fail_at: calls that fail, as (function, n): its n-th call from 1, counted from the last `count_anew`. capacity:
    bytes that there are. hold: while it is cleared, the helper's calls of cuMemCreate wait. zeroed, unmapped: told of
    every range that was.
    """

    def __init__(self, capacity: int = 1 << 40) -> None:
        self.capacity = capacity
        self.fail_at: set[tuple[str, int]] = set()
        self.hold = threading.Event()
        self.hold.set()
        self.waits = threading.Event()  # the helper is held
        self.zeroed: Callable[[int, int], None] = lambda start, nbytes: None
        self.unmapped: Callable[[int, int], None] = lambda start, nbytes: None
        self.created: dict[int, int] = {}  # bytes by handle
        self.mapped: dict[int, tuple[int, int]] = {}  # (bytes, handle) by address
        self.maps: list[tuple[str, int]] = []  # (thread, start) of each piece that was mapped
        self._reserved: dict[int, int] = {}
        self._accessible: set[int] = set()
        self._counts: Counter[str] = Counter()
        self._handles = itertools.count(1)
        self._lock = threading.Lock()

    def device(self) -> Any:
        stream = SimpleNamespace(handle=None, synchronize=lambda: None)
        return SimpleNamespace(
            ordinal=0, make_current=lambda: None, stream=lambda: stream, free_bytes=lambda: self.capacity - self.used
        )

    @property
    def used(self) -> int:
        return sum(self.created.values())

    @property
    def clean(self) -> bool:
        """Whether everything was given back."""
        return not (self.created or self.mapped or self._reserved)

    def count_anew(self) -> None:
        self._counts.clear()

    def call(self, function: str, *arguments: Any) -> Any:
        if function == "cuMemCreate" and threading.current_thread().name == "lfm2serve-arena":
            if not self.hold.is_set():
                self.waits.set()
            assert self.hold.wait(60)
        with self._lock:
            self._counts[function] += 1
            if (function, self._counts[function]) in self.fail_at:
                raise CudaError(f"{function}: injected")
            return getattr(self, function)(*arguments)

    def cuMemGetAllocationGranularity(self, memory: Any, kind: Any) -> int:
        return GRANULARITY

    def cuMemAddressReserve(self, size: int, alignment: int, address: int, flags: int) -> int:
        assert size % GRANULARITY == 0 and not self._reserved
        self._reserved[BASE] = size
        return BASE

    def cuMemAddressFree(self, address: int, size: int) -> None:
        assert self._reserved.pop(address) == size and not self.mapped

    def cuMemCreate(self, size: int, memory: Any, flags: int) -> int:
        assert size % GRANULARITY == 0
        if self.used + size > self.capacity:
            raise CudaOutOfMemory("cuMemCreate: CUDA_ERROR_OUT_OF_MEMORY")
        handle = next(self._handles)
        self.created[handle] = size
        return handle

    def cuMemRelease(self, handle: int) -> None:
        assert handle not in [held for _, held in self.mapped.values()]
        del self.created[handle]

    def cuMemMap(self, address: int, size: int, offset: int, handle: int, flags: int) -> None:
        assert address >= BASE and address + size <= BASE + self._reserved[BASE] and self.created[handle] == size
        assert all(address + size <= at or at + held <= address for at, (held, _) in self.mapped.items())
        self.mapped[address] = (size, handle)

    def cuMemSetAccess(self, address: int, size: int, access: Any, count: int) -> None:
        assert self.mapped[address][0] == size
        self._accessible.add(address)

    def cuMemsetD8Async(self, address: int, byte: int, size: int, stream: Any) -> None:
        assert address in self._accessible and self.mapped[address][0] == size and byte == 0
        self.zeroed(address - BASE, size)
        self.maps.append((threading.current_thread().name, address - BASE))

    def cuMemUnmap(self, address: int, size: int) -> None:
        assert self.mapped.pop(address)[0] == size
        self.unmapped(address - BASE, size)
        self._accessible.discard(address)
