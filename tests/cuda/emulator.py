"""Runs kernels that are written with PTX intrinsics without a GPU: one Python thread a CUDA thread, a block at a time.

Only what the products use is here. Copies land at once, so this finds wrong addresses, wrong fragments and protocols
that deadlock, not races. Memory is one bytearray; addresses of global and shared memory are offsets into two of them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from types import FunctionType, SimpleNamespace
from typing import Any

import numpy as np

from kernels_numba.cuda import ptx, scalar

WARP = 32


def to_bf16(x: np.ndarray) -> np.ndarray:
    raw = np.asarray(x, np.float32).view(np.uint32)
    return ((raw + 0x7FFF + ((raw >> 16) & 1)) >> 16).astype(np.uint16)


def from_bf16(x: np.ndarray) -> np.ndarray:
    return (np.asarray(x, np.uint16).astype(np.uint32) << 16).view(np.float32)


class Memory:
    """Bytes with an address; allocations are 256-byte aligned and start filled with 0xFF, which is NaN."""

    def __init__(self, size: int) -> None:
        self.data = np.full(size, 0xFF, np.uint8)
        self.used = 256

    def put(self, array: np.ndarray) -> int:
        address = self.used
        self.used += -(-(array.nbytes + 256) // 256) * 256
        self.data[address : address + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        return address

    def get(self, address: int, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        count = int(np.prod(shape)) * np.dtype(dtype).itemsize
        return self.data[address : address + count].view(dtype).reshape(shape).copy()

    def view(self, address: Any, dtype: Any, count: int = 1) -> np.ndarray:
        start = int(address)
        assert start % np.dtype(dtype).itemsize == 0, f"address {start} is not aligned for {np.dtype(dtype)}"
        assert start >= 256 and start + count * np.dtype(dtype).itemsize <= len(self.data), (
            f"address {start} is outside"
        )
        return self.data[start : start + count * np.dtype(dtype).itemsize].view(dtype)


@dataclass
class Barrier:
    """An mbarrier."""

    count: int
    pending: int = 0
    bytes: int = 0
    phase: int = 0

    def settle(self) -> None:
        assert self.pending >= 0, "more arrivals than the barrier was made for"
        if self.pending == 0 and self.bytes == 0:
            self.phase += 1
            self.pending = self.count


class NamedBarrier:
    """A barrier at which some threads only arrive."""

    def __init__(self, threads: int) -> None:
        self.threads, self.arrived, self.rounds, self.broken = threads, 0, 0, False
        self.changed = threading.Condition()

    def arrive(self) -> int:
        """The number of the round."""
        with self.changed:
            mine = self.rounds
            self.arrived += 1
            if self.arrived == self.threads:
                self.arrived, self.rounds = 0, mine + 1
                self.changed.notify_all()
            return mine

    def wait(self) -> None:
        mine = self.arrive()
        with self.changed:
            if not self.changed.wait_for(lambda: self.broken or self.rounds > mine, 60) or self.broken:
                raise threading.BrokenBarrierError

    def abort(self) -> None:
        with self.changed:
            self.broken = True
            self.changed.notify_all()


@dataclass
class Block:
    """What the threads of a block share."""

    memory: Memory
    shared: Memory
    threads: int
    barriers: dict[int, Barrier] = field(default_factory=dict)
    groups: dict[tuple[int, int], NamedBarrier] = field(default_factory=dict)
    changed: threading.Condition = field(default_factory=threading.Condition)
    failed: list[BaseException] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.all = threading.Barrier(self.threads)
        self.warps = [Warp(self) for _ in range(self.threads // WARP)]

    def group(self, number: int, threads: int) -> NamedBarrier:
        """A named barrier of some of the threads."""
        with self.changed:
            return self.groups.setdefault((number, threads), NamedBarrier(threads))

    def stop(self, error: BaseException) -> None:
        self.failed.append(error)
        self.all.abort()
        for gate in self.groups.values():
            gate.abort()
        for warp in self.warps:
            warp.abort()
        with self.changed:
            self.changed.notify_all()


class Group:
    """Threads that bring a value each and get the combined results: the base of every collective operation."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.values: list[Any] = [None] * size
        self.results: list[Any] = []
        self.gate = threading.Barrier(size)

    def exchange(self, index: int, value: Any, combine: Callable[[list[Any]], list[Any]]) -> Any:
        self.values[index] = value
        if self.gate.wait(60) == 0:
            self.results = combine(list(self.values))
        self.gate.wait(60)
        return self.results[index]


class Warp(Group):
    def __init__(self, block: Block) -> None:
        super().__init__(WARP)
        self.block = block

    def abort(self) -> None:
        self.gate.abort()


class Emulator:
    """Launches kernels over one memory."""

    def __init__(self, size: int = 1 << 24, shared: int = 240 << 10) -> None:
        self.memory = Memory(size)
        self._shared = shared
        self._here = threading.local()
        self._counting = threading.Lock()
        self._made: dict[int, Any] = {}
        self._operations = self._intrinsics()
        self.quads: dict[int, Group] = {}

    def launch(
        self, function: Callable[..., None], grid: int, threads: int, arguments: list[Any], together: bool = False
    ) -> None:
        """together: all blocks at once, for those that wait for each other."""
        kernel = self._translate(function)
        for indices in [range(grid)] if together else [[index] for index in range(grid)]:
            blocks = [Block(self.memory, Memory(self._shared), threads) for _ in indices]
            self.quads = {i: Group(4 * WARP) for i in range(threads // WARP // 4)}
            workers = [
                threading.Thread(target=self._thread, args=(kernel, block, index, grid, t, arguments))
                for block, index in zip(blocks, indices, strict=True)
                for t in range(threads)
            ]
            for worker in workers:
                worker.start()
            for worker in workers:
                worker.join()
            failed = [error for block in blocks for error in block.failed]
            if failed:
                real = [e for e in failed if not isinstance(e, threading.BrokenBarrierError)]
                raise (real or failed)[0]

    def _thread(self, kernel: Any, block: Block, index: int, grid: int, thread: int, arguments: list[Any]) -> None:
        here = self._here
        here.block, here.thread, here.lane, here.warp = block, thread, thread % WARP, block.warps[thread // WARP]
        here.index, here.grid = index, grid
        try:
            with np.errstate(all="ignore"):
                kernel(*arguments)
        except BaseException as error:
            block.stop(error)

    # From kernels to plain functions

    def _translate(self, thing: Any) -> Any:
        key = id(thing)
        if key in self._operations:
            return self._operations[key]
        if key in self._made:
            return self._made[key][0]
        function = getattr(thing, "py_func", thing)
        if not isinstance(function, FunctionType) or not function.__module__.startswith(("kernels_numba", "<unrolled")):
            return thing
        scope = dict(function.__globals__)
        made = FunctionType(function.__code__, scope, function.__name__, function.__defaults__)
        self._made[key] = (made, thing)
        for name in function.__code__.co_names:
            if name in scope:
                scope[name] = self._cuda() if name == "cuda" else self._translate(scope[name])
        return made

    def _cuda(self) -> Any:
        here = self._here

        class Index:
            def __init__(self, value: Callable[[], int]) -> None:
                self._value = value

            @property
            def x(self) -> int:
                return self._value()

        def syncthreads() -> None:
            here.block.all.wait(60)

        def syncwarp() -> None:
            here.warp.exchange(here.lane, None, lambda values: values)

        return SimpleNamespace(
            threadIdx=Index(lambda: here.thread), blockIdx=Index(lambda: here.index), gridDim=Index(lambda: here.grid),
            blockDim=Index(lambda: here.block.threads), syncthreads=syncthreads, syncwarp=syncwarp,
            shared=SimpleNamespace(array=lambda *_: None),
            ffs=lambda x: (int(x) & -int(x)).bit_length(),
        )  # fmt: skip

    # Intrinsics

    def _intrinsics(self) -> dict[int, Any]:
        here, u32, f32 = self._here, np.uint32, np.float32

        def collective(combine: Callable[..., list[Any]]) -> Callable[..., Any]:
            return lambda *value: here.warp.exchange(here.lane, value, combine)

        def matrices(count: int) -> Callable[[list[Any]], list[Any]]:
            def load(values: list[Any]) -> list[Any]:
                shared = here.block.shared
                out = []
                for lane in range(WARP):
                    words = []
                    for m in range(count):
                        row = values[8 * m + lane // 4][0]
                        assert int(row) % 16 == 0
                        words.append(shared.view(int(row) + 4 * (lane % 4), np.uint32)[0])
                    out.append(tuple(words))
                return out

            return load

        def multiply(values: list[Any]) -> list[Any]:
            a, b, c = np.zeros((16, 16), f32), np.zeros((16, 8), f32), np.zeros((16, 8), f32)
            for lane, v in enumerate(values):
                r, q = lane // 4, 2 * (lane % 4)
                for i in range(4):
                    a[r + 8 * (i % 2), q + 8 * (i // 2) : q + 8 * (i // 2) + 2] = from_bf16(
                        np.array([v[i]], u32).view(np.uint16)
                    )
                for i in range(2):
                    b[q + 8 * i : q + 8 * i + 2, r] = from_bf16(np.array([v[4 + i]], u32).view(np.uint16))
                c[r, q : q + 2], c[r + 8, q : q + 2] = v[6:8], v[8:10]
            with np.errstate(all="ignore"):
                d = (c.astype(np.float64) + a.astype(np.float64) @ b.astype(np.float64)).astype(f32)
            return [
                (
                    d[n // 4, 2 * (n % 4)],
                    d[n // 4, 2 * (n % 4) + 1],
                    d[n // 4 + 8, 2 * (n % 4)],
                    d[n // 4 + 8, 2 * (n % 4) + 1],
                )
                for n in range(WARP)
            ]

        def copy_in(to: Any, source: Any, count: Any) -> None:
            block = here.block
            assert int(to) % 16 == 0 and int(source) % 16 == 0 and int(count) % 16 == 0
            block.shared.view(to, np.uint8, int(count))[:] = block.memory.view(source, np.uint8, int(count))

        def copy_or_zero(to: Any, source: Any, count: Any) -> None:
            if int(count):
                copy_in(to, source, 16)
            else:
                here.block.shared.view(to, np.uint8, 16)[:] = 0

        def transposed(values: list[Any]) -> list[Any]:
            out = []
            for lane in range(WARP):
                column, row = lane // 4, 2 * (lane % 4)
                words = []
                for m in range(4):
                    low, high = (
                        int(here.block.shared.view(int(values[8 * m + row + i][0]) + 2 * column, np.uint16)[0])
                        for i in range(2)
                    )
                    words.append(u32(low | high << 16))
                out.append(tuple(words))
            return out

        def bulk(to: Any, source: Any, count: Any, barrier: Any, *_: Any) -> None:
            copy_in(to, source, count)
            change(barrier, 0, -int(count))

        def change(address: Any, arrivals: int, promised: int) -> None:
            block = here.block
            with block.changed:
                barrier = block.barriers[int(address)]
                barrier.pending -= arrivals
                barrier.bytes += promised
                barrier.settle()
                block.changed.notify_all()

        def init(address: Any, count: Any) -> None:
            here.block.barriers[int(address)] = Barrier(int(count), int(count))

        def wait(address: Any, parity: Any) -> None:
            block = here.block
            with block.changed:
                over = block.changed.wait_for(
                    lambda: block.failed or block.barriers[int(address)].phase % 2 != int(parity), timeout=60
                )
                if not over or block.failed:
                    raise TimeoutError(f"thread {here.thread} waits for barrier {int(address)}, parity {int(parity)}")

        def load(dtype: Any, count: int = 1) -> Callable[[Any], Any]:
            def run(address: Any) -> Any:
                values = here.block.memory.view(address, dtype, count)
                return values[0] if count == 1 else tuple(values)

            return run

        def store(dtype: Any) -> Callable[..., None]:
            def run(address: Any, *values: Any) -> None:
                here.block.memory.view(address, dtype, len(values))[:] = values

            return run

        def shared_store(address: Any, value: Any) -> None:
            here.block.shared.view(address, np.int32)[0] = value

        def shared_store_32(address: Any, value: Any) -> None:
            here.block.shared.view(address, np.uint32)[0] = value

        def shared_store_128(address: Any, *values: Any) -> None:
            here.block.shared.view(address, np.uint32, 4)[:] = values

        def shared_or(address: Any, value: Any) -> None:
            with here.block.changed:
                here.block.shared.view(address, np.uint32)[0] |= value

        def expect(count: int) -> Callable[..., Any]:
            """`count` words at each address, once none is all ones."""

            def run(*addresses: Any) -> Any:
                until = time.monotonic() + 60
                while True:
                    values = [v for at in addresses for v in here.block.memory.view(at, np.uint32, count).copy()]
                    if all(v != 0xFFFFFFFF for v in values):
                        return values[0] if len(values) == 1 else tuple(values)
                    if here.block.failed or time.monotonic() > until:
                        raise TimeoutError(f"thread {here.thread} of block {here.index} waits for {addresses}")
                    time.sleep(0.001)

            return run

        def count_round(address: Any, last: Any) -> None:
            with self._counting:
                word = here.block.memory.view(address, np.uint32)
                word[0] = 0 if word[0] >= last else word[0] + 1

        def from_lane(x: Any, lane: Any) -> Any:
            return here.warp.exchange(here.lane, (x, int(lane)), lambda v: [v[at][0] for _, at in v])

        def nothing(*_: Any) -> None:
            return None

        found: dict[Any, Any] = {
            ptx.mma: collective(multiply),
            ptx.ldmatrix_x4: collective(matrices(4)),
            ptx.ldmatrix_x2: collective(matrices(2)),
            ptx.ldmatrix_x4_transposed: collective(transposed),
            ptx.cp_async_16_or_zero: copy_or_zero,
            ptx.shuffle_xor_32: lambda x, i: here.warp.exchange(
                here.lane, x, lambda v: [v[n ^ int(i)] for n in range(WARP)]
            ),
            scalar.shuffle_xor: lambda x, i: here.warp.exchange(
                here.lane, x, lambda v: [v[n ^ int(i)] for n in range(WARP)]
            ),
            ptx.shuffle_up: lambda x, i: here.warp.exchange(
                here.lane, x, lambda v: [v[n - int(i)] if n >= int(i) else v[n] for n in range(WARP)]
            ),
            ptx.broadcast: from_lane,
            ptx.broadcast_f32: from_lane,
            scalar.ballot: lambda x: here.warp.exchange(
                here.lane, x, lambda v: [u32(sum(1 << n for n in range(WARP) if v[n]))] * WARP
            ),
            scalar.warp_largest: lambda x: here.warp.exchange(here.lane, x, lambda v: [max(v)] * WARP),
            ptx.population: lambda x: np.int32(int(x).bit_count()),
            ptx.shared_or: shared_or,
            ptx.shared_store_128: shared_store_128,
            ptx.group_sync: lambda number, threads: here.block.group(int(number), int(threads)).wait(),
            ptx.group_arrive: lambda number, threads: here.block.group(int(number), int(threads)).arrive(),
            ptx.cp_async_16: lambda to, source: copy_in(to, source, 16),
            ptx.cp_async_arrive: lambda barrier: change(barrier, 1, 0),
            ptx.bulk_copy: bulk,
            ptx.bulk_copy_hinted: bulk,
            ptx.barrier_init: init,
            ptx.barrier_expect: lambda barrier, count: change(barrier, 1, int(count)),
            ptx.barrier_arrive: lambda barrier: change(barrier, 1, 0),
            ptx.barrier_wait: wait,
            ptx.barrier_wait_both: lambda a, p, b, q: (wait(a, p), wait(b, q)),
            ptx.barrier_test: lambda address, parity: u32(here.block.barriers[int(address)].phase % 2 != int(parity)),
            ptx.load_32: load(np.uint32),
            ptx.load_128: load(np.uint32, 4),
            ptx.load_f32: load(np.float32),
            ptx.load_fresh: load(np.int32),
            ptx.load_fresh_f32: load(np.float32),
            ptx.shared_load_32: lambda address: here.block.shared.view(address, np.uint32)[0],
            ptx.shared_store_32: shared_store_32,
            ptx.shared_load_64: lambda address: here.block.shared.view(address, np.uint64)[0],
            ptx.shared_load_128: lambda address: tuple(here.block.shared.view(address, np.uint32, 4)),
            ptx.publish_32: store(np.uint32),
            ptx.expect_32: expect(1),
            ptx.expect_128: expect(4),
            ptx.expect_2_words: expect(1),
            ptx.expect_4_words: expect(1),
            ptx.expect_2_rows: expect(4),
            ptx.expect_4_rows: expect(4),
            ptx.expect_8_rows: expect(4),
            ptx.count_round: count_round,
            ptx.store_16: store(np.uint16),
            ptx.store_32: store(np.uint32),
            ptx.store_128: store(np.uint32),
            ptx.shared_load: lambda address: here.block.shared.view(address, np.int32)[0],
            ptx.shared_store: shared_store,
            ptx.shared_address: lambda array: u32(1024),
            ptx.divide: lambda a, b: u32(int(a) // int(b)),
            ptx.reciprocal: lambda x: f32(1) / f32(x),
            ptx.evict_first: lambda: np.uint64(0),
        }
        for name in (
            "cp_async_commit", "barrier_init_fence", "async_fence", "dependency_wait", "dependents_start",
            "bulk_prefetch", "wgmma_fence", "wgmma_commit", "wgmma_wait_0", "wgmma_wait_1",
        ):  # fmt: skip
            found[getattr(ptx, name)] = nothing
        for name, function in scalar._simulated().items():
            found.setdefault(getattr(scalar, name), function)
        for columns in (64, 128, 256):
            found[ptx.wgmma(columns)] = self._wgmma(columns)
        for count in (4, 8, 32, 64, 128):
            found[ptx.zeros(count)] = lambda count=count: (f32(0),) * count
        for groups in range(8):
            found[ptx.cp_async_wait(groups)] = nothing
        self._kept = found  # ids stay valid
        return {id(operation): twin for operation, twin in found.items()}

    def _wgmma(self, columns: int) -> Callable[..., Any]:
        """A warpgroup's 64 x columns x 16, operands in swizzle-128B atoms of 8 rows, 1,024 bytes apart."""
        here = self._here

        def tile(block: Block, descriptor: Any, rows: int) -> np.ndarray:
            start = (int(descriptor) & 0x3FFF) << 4
            assert int(descriptor) >> 62 == 1 and int(descriptor) >> 32 & 0x3FFF == 64
            out = np.zeros((rows, 16), np.float32)
            for row in range(rows):
                for piece in range(2):
                    at = start + (row // 8) * 1024 + (row % 8) * 128 + piece * 16
                    at ^= (at >> 7 & 7) << 4
                    out[row, 8 * piece : 8 * piece + 8] = from_bf16(block.shared.view(at, np.uint16, 8))
            return out

        def run(acc: Any, a: Any, b: Any) -> Any:
            block, thread = here.block, here.thread % (4 * WARP)

            def combine(values: list[Any]) -> list[Any]:
                with np.errstate(all="ignore"):
                    d = tile(block, a, 64).astype(np.float64) @ tile(block, b, columns).astype(np.float64).T
                out = []
                for t, given in enumerate(values):
                    row, column = t // WARP * 16 + t % WARP // 4, 2 * (t % 4)
                    more = [
                        d[row + 8 * (i % 4 // 2), i // 4 * 8 + column + i % 2] for i in range(columns // 2)
                    ]  # fmt: skip
                    with np.errstate(all="ignore"):
                        out.append(tuple(np.float32(np.float64(g) + m) for g, m in zip(given, more, strict=True)))
                return out

            return self.quads[here.thread // (4 * WARP)].exchange(thread, acc, combine)

        return run
