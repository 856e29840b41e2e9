"""What the emulator's threads share: memory, barriers, and whose turn it is."""

from __future__ import annotations

import inspect
import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Any

import numpy as np

WARP = 32
Combine = Callable[[list[Any]], list[Any]]
Waiting = Iterator[None]


class Memory:
    """Bytes with an address; allocations are 256-byte aligned and start filled with 0xFF, which is NaN."""

    def __init__(self, size: int) -> None:
        self.data = np.full(size, 0xFF, np.uint8)
        self.used = 256
        self.bytes = memoryview(self.data)
        self.halves, self.words, self.longs = (self.bytes.cast(kind) for kind in "HIQ")  # type: ignore[call-overload]
        self.integers, self.floats = self.bytes.cast("i"), self.bytes.cast("f")

    def put(self, array: np.ndarray) -> int:
        address = self.used
        self.used += -(-(array.nbytes + 256) // 256) * 256
        self.data[address : address + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        return address

    def get(self, address: int, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        count = int(np.prod(shape)) * np.dtype(dtype).itemsize
        return self.data[address : address + count].view(dtype).reshape(shape).copy()

    def at(self, address: int, size: int, count: int = 1) -> int:
        """The index of `count` values of `size` bytes, all of which are inside."""
        assert address % size == 0, f"address {address} is not aligned for {size} bytes"
        assert 256 <= address <= len(self.data) - count * size, f"address {address} is outside"
        return address // size

    def four(self, address: int) -> tuple[int, ...]:
        """16 bytes as words."""
        at = self.at(address, 4, 4)
        return tuple(self.words[at : at + 4])


@dataclass(eq=False)
class Thread:
    """Where a CUDA thread is; run: what is left of it."""

    block: Block
    thread: int
    index: int
    grid: int
    run: Waiting = field(init=False)

    def __post_init__(self) -> None:
        self.lane, self.warp = self.thread % WARP, self.block.warps[self.thread // WARP]
        self.quad = self.block.quads[self.thread // (4 * WARP)] if self.block.quads else None

    def place(self) -> str:
        """The functions that it is in."""
        names, run = [], self.run
        while inspect.isgenerator(run):
            names.append(f"{run.gi_code.co_name}:{run.gi_frame.f_lineno}")
            run = run.gi_yieldfrom
        return " > ".join(names)


class Turns:
    """Threads that may go on, by warps, which come in an order drawn for each launch."""

    def __init__(self, order: random.Random) -> None:
        self.order = order
        self.warps: list[Warp] = []

    def extend(self, threads: Iterable[Thread]) -> None:
        for thread in threads:
            if not thread.warp.able:
                heappush(self.warps, thread.warp)
            thread.warp.able.append(thread)

    def __iter__(self) -> Iterator[Thread]:
        """Each in turn; what they do may add others. Lanes of a warp stay together as far as they can."""
        while self.warps:
            warp = heappop(self.warps)
            while warp.able:
                yield warp.able.popleft()


class Gate:
    """A barrier; at one with a name some threads may only arrive."""

    def __init__(self, threads: int, ready: Turns) -> None:
        self.threads, self.ready, self.arrived = threads, ready, 0
        self.waiting: list[Thread] = []

    def arrive(self) -> bool:
        """Whether this was the last."""
        self.arrived += 1
        if self.arrived < self.threads:
            return False
        self.ready.extend(self.waiting)
        self.arrived, self.waiting = 0, []
        return True

    def wait(self, me: Thread) -> Waiting:
        if not self.arrive():
            self.waiting.append(me)
            yield


class Group(Gate):
    """Threads that bring a value each and get the combined results: the base of every collective operation."""

    def __init__(self, threads: int, ready: Turns) -> None:
        super().__init__(threads, ready)
        self.values: list[Any] = [None] * threads
        self.results: list[Any] = []

    def exchange(self, me: Thread, index: int, value: Any, combine: Combine) -> Any:
        self.values[index] = value
        if self.arrive():
            self.results = combine(self.values)
        else:
            self.waiting.append(me)
            yield
        return self.results[index]


class Warp(Group):
    """able: its threads that may go on."""

    def __init__(self, ready: Turns) -> None:
        super().__init__(WARP, ready)
        self.rank = ready.order.random()
        self.able: deque[Thread] = deque()

    def __lt__(self, other: Warp) -> bool:
        return self.rank < other.rank


@dataclass
class Barrier:
    """An mbarrier."""

    count: int
    ready: Turns
    bytes: int = 0
    phase: int = 0
    waiting: list[Thread] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.pending = self.count

    def change(self, arrivals: int, promised: int) -> None:
        self.pending -= arrivals
        self.bytes += promised
        assert self.pending >= 0, "more arrivals than the barrier was made for"
        if self.pending == 0 and self.bytes == 0:
            self.phase += 1
            self.pending = self.count
            self.ready.extend(self.waiting)
            self.waiting = []


class Block:
    """What the threads of a block share."""

    def __init__(self, shared: Memory, threads: int, ready: Turns) -> None:
        self.shared, self.threads, self.ready = shared, threads, ready
        self.barriers: dict[int, Barrier] = {}
        self.groups: dict[tuple[int, int], Gate] = {}
        self.all = Gate(threads, ready)
        self.warps = [Warp(ready) for _ in range(threads // WARP)]
        self.quads = [Group(4 * WARP, ready) for _ in range(-(-threads // WARP // 4))]

    def group(self, number: int, threads: int) -> Gate:
        """A named barrier of some of the threads."""
        return self.groups.setdefault((number, threads), Gate(threads, self.ready))
