"""Runs kernels that are written with PTX intrinsics without a GPU: a coroutine a CUDA thread, a block at a time.

Only what the products use is here. A thread runs until it has to wait; of those that may go on, one of the warp that
comes first in an order drawn for each launch, so that some warps are as far ahead of others as barriers let them; lanes
of a warp stay together. Copies land at once. So this finds wrong addresses, wrong fragments, protocols that deadlock
and many a missing barrier, not all races. Memory is bytes; addresses of global and shared memory are offsets into two
of them.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np

from kernels_numba.cuda import ptx, scalar

from .threads import WARP, Barrier, Block, Combine, Memory, Thread, Turns, Waiting
from .translated import Translator, bits_of, float_of, plain, single

ALL_ONES = 0xFFFFFFFF


def to_bf16(x: np.ndarray) -> np.ndarray:
    raw = np.asarray(x, np.float32).view(np.uint32)
    return ((raw + 0x7FFF + ((raw >> 16) & 1)) >> 16).astype(np.uint16)


def from_bf16(x: np.ndarray) -> np.ndarray:
    return (np.asarray(x, np.uint16).astype(np.uint32) << 16).view(np.float32)


class Emulator:
    """Launches kernels over one memory."""

    def __init__(self, size: int = 1 << 24, shared: int = 240 << 10) -> None:
        self.memory = Memory(size)
        self._shared, self._order = shared, random.Random(size)
        self._here = SimpleNamespace(now=None)
        self._asking: list[tuple[Thread, Callable[[], bool]]] = []
        self._kept = self._intrinsics()  # ids stay valid
        self._translate = Translator({id(operation): twin for operation, twin in self._kept.items()}, self._cuda())

    def launch(
        self, function: Callable[..., None], grid: int, threads: int, arguments: list[Any], together: bool = False
    ) -> None:
        """together: all blocks at once, for those that wait for each other."""
        kernel, given = self._translate(function), [plain(argument) for argument in arguments]
        for indices in [range(grid)] if together else [[index] for index in range(grid)]:
            ready = Turns(self._order)
            blocks = [Block(Memory(self._shared), threads, ready) for _ in indices]
            started = [
                Thread(block, thread, index, grid)
                for block, index in zip(blocks, indices, strict=True)
                for thread in range(threads)
            ]
            for thread in started:
                self._here.now = thread
                thread.run = kernel(*given) or iter(())
            with np.errstate(all="ignore"):
                self._run(started, ready)

    def _run(self, threads: list[Thread], ready: Turns) -> None:
        """Threads in turn, each until it waits, until all are over."""
        left = set(threads)
        ready.extend(threads)
        while left:
            for thread in ready:
                self._here.now = thread
                try:
                    next(thread.run)
                except StopIteration:
                    left.remove(thread)
            able = [thread for thread, written in self._asking if written()]
            self._asking = [(thread, written) for thread, written in self._asking if not written()]
            if left and not able:
                places = Counter(f"block {thread.index} in {thread.place()}" for thread in threads if thread in left)
                raise TimeoutError("; ".join(f"{n} threads of {place} wait for ever" for place, n in places.items()))
            ready.extend(able)

    def _cuda(self) -> Any:
        here = self._here

        def syncthreads() -> Waiting:
            yield from here.now.block.all.wait(here.now)

        def syncwarp() -> Waiting:
            yield from here.now.warp.wait(here.now)

        return SimpleNamespace(
            threadIdx=Index(x=lambda: here.now.thread), blockIdx=Index(x=lambda: here.now.index),
            gridDim=Index(x=lambda: here.now.grid), blockDim=Index(x=lambda: here.now.block.threads),
            syncthreads=syncthreads, syncwarp=syncwarp, shared=SimpleNamespace(array=lambda *_: None),
            ffs=lambda x: (x & -x).bit_length(),
        )  # fmt: skip

    def _intrinsics(self) -> dict[Any, Any]:
        here, memory, f32 = self._here, self.memory, np.float32

        def collective(combine: Combine) -> Callable[..., Any]:
            def run(*value: Any) -> Any:
                me = here.now
                return (yield from me.warp.exchange(me, me.lane, value, combine))

            return run

        def shuffled(x: Any, i: int) -> Any:
            me = here.now
            return (yield from me.warp.exchange(me, me.lane, x, lambda v: [v[n ^ i] for n in range(WARP)]))

        def lines_at(rows: list[Any]) -> np.ndarray:
            """The 16 bytes at each of the addresses that lanes gave."""
            shared = here.now.block.shared
            at = [shared.at(row, 16) for (row,) in rows]
            return shared.data.view(np.uint32).reshape(-1, 4)[at]

        def matrices(count: int) -> Combine:
            def load(values: list[Any]) -> list[Any]:
                words = lines_at(values[: 8 * count]).reshape(count, WARP)
                return [tuple(lane) for lane in words.T.tolist()]

            return load

        def transposed(values: list[Any]) -> list[Any]:
            halves = lines_at(values).view(np.uint16).reshape(4, 4, 2, 8)  # matrix, pair of rows, row, column
            pairs = np.ascontiguousarray(halves.transpose(3, 1, 0, 2)).view(np.uint32)
            return [tuple(lane) for lane in pairs.reshape(WARP, 4).tolist()]

        def multiply(values: list[Any]) -> list[Any]:
            given = np.array([v[:6] for v in values], np.uint32)
            pairs = from_bf16(given.view(np.uint16)).reshape(8, 4, 6, 2).astype(np.float64)
            # axes from lane / 4, lane % 4, then k / 8 and row / 8 of a, and the number in the pair
            a = pairs[:, :, :4].reshape(8, 4, 2, 2, 2).transpose(3, 0, 2, 1, 4).reshape(16, 16)
            b = pairs[:, :, 4:].transpose(2, 1, 3, 0).reshape(16, 8)
            c = np.array([v[6:] for v in values], np.float64).reshape(8, 4, 2, 2).transpose(2, 0, 1, 3).reshape(16, 8)
            d = (c + a @ b).astype(f32).reshape(2, 8, 4, 2).transpose(1, 2, 0, 3).reshape(WARP, 4)
            return [tuple(lane) for lane in d.tolist()]

        def copy_in(to: int, source: int, count: int) -> None:
            shared = here.now.block.shared
            assert to % 16 == 0 and source % 16 == 0 and count % 16 == 0
            to, source = shared.at(to, 1, count), memory.at(source, 1, count)
            shared.bytes[to : to + count] = memory.bytes[source : source + count]

        def copy_or_zero(to: int, source: int, count: int) -> None:
            if count:
                copy_in(to, source, 16)
            else:
                shared_store_128(to, 0, 0, 0, 0)

        def bulk(to: int, source: int, count: int, barrier: int, *_: Any) -> None:
            copy_in(to, source, count)
            here.now.block.barriers[barrier].change(0, -count)

        def init(address: int, count: int) -> None:
            here.now.block.barriers[address] = Barrier(count, here.now.block.ready)

        def wait(address: int, parity: int) -> Waiting:
            me = here.now
            barrier = me.block.barriers[address]
            while barrier.phase % 2 == parity:
                barrier.waiting.append(me)
                yield

        def wait_both(a: int, p: int, b: int, q: int) -> Waiting:
            yield from wait(a, p)
            yield from wait(b, q)

        def group_sync(number: int, threads: int) -> Waiting:
            yield from here.now.block.group(number, threads).wait(here.now)

        def store(address: int, *values: int) -> None:
            at = memory.at(address, 4, len(values))
            for i, value in enumerate(values):
                memory.words[at + i] = value & ALL_ONES

        def store_16(address: int, value: int) -> None:
            memory.halves[memory.at(address, 2)] = value & 0xFFFF

        def shared_store(address: int, value: int) -> None:
            shared = here.now.block.shared
            shared.words[shared.at(address, 4)] = value & ALL_ONES

        def shared_store_128(address: int, *values: int) -> None:
            shared = here.now.block.shared
            at = shared.at(address, 16) * 4
            for i, value in enumerate(values):
                shared.words[at + i] = value & ALL_ONES

        def shared_load(name: str, size: int) -> Callable[[int], Any]:
            def run(address: int) -> Any:
                shared = here.now.block.shared
                return getattr(shared, name)[shared.at(address, size)]

            return run

        def shared_or(address: int, value: int) -> None:
            shared = here.now.block.shared
            shared.words[shared.at(address, 4)] |= value

        def expect(count: int) -> Callable[..., Any]:
            """`count` words at each address, once none is all ones."""

            def run(*addresses: int) -> Any:
                places = [memory.at(address, 4, count) for address in addresses]

                def written() -> bool:
                    return not any(ALL_ONES in memory.words[at : at + count].tolist() for at in places)

                if not written():
                    self._asking.append((here.now, written))
                    yield
                values = [value for at in places for value in memory.words[at : at + count]]
                return values[0] if len(values) == 1 else tuple(values)

            return run

        def count_round(address: int, last: int) -> None:
            at = memory.at(address, 4)
            memory.words[at] = 0 if memory.words[at] >= last else memory.words[at] + 1

        def nothing(*_: Any) -> None:
            return None

        def store_4(array: memoryview, index: int, *values: int) -> None:
            for i, value in enumerate(values):
                array[index + i] = value & ALL_ONES

        def larger(a: float, b: float) -> float:
            return b if a != a else a if b != b else max(a, b)

        def bf16_bits(x: float) -> int:
            bits = bits_of(x)
            return 0x7FFF if x != x else (bits + 0x7FFF + (bits >> 16 & 1)) >> 16

        def of_numpy(function: Callable[..., Any]) -> Callable[..., float]:
            """With NumPy's results for what Python's operations refuse."""
            return lambda *values: single(function(*map(np.float64, values)))

        found: dict[Any, Any] = {
            ptx.mma: collective(multiply),
            ptx.ldmatrix_x4: collective(matrices(4)),
            ptx.ldmatrix_x2: collective(matrices(2)),
            ptx.ldmatrix_x4_transposed: collective(transposed),
            ptx.cp_async_16_or_zero: copy_or_zero,
            ptx.shuffle_xor_32: shuffled,
            scalar.shuffle_xor: shuffled,
            ptx.shuffle_up: collective(lambda v: [v[n - v[n][1] if n >= v[n][1] else n][0] for n in range(WARP)]),
            ptx.broadcast: collective(lambda v: [v[at][0] for _, at in v]),
            ptx.broadcast_f32: collective(lambda v: [v[at][0] for _, at in v]),
            scalar.ballot: collective(lambda v: [sum(1 << n for n in range(WARP) if v[n][0])] * WARP),
            scalar.warp_largest: collective(lambda v: [max(v)[0]] * WARP),
            ptx.population: lambda x: x.bit_count(),
            ptx.shared_or: shared_or,
            ptx.shared_store_128: shared_store_128,
            ptx.group_sync: group_sync,
            ptx.group_arrive: lambda number, threads: here.now.block.group(number, threads).arrive(),
            ptx.cp_async_16: lambda to, source: copy_in(to, source, 16),
            ptx.cp_async_arrive: lambda barrier: here.now.block.barriers[barrier].change(1, 0),
            ptx.bulk_copy: bulk,
            ptx.bulk_copy_hinted: bulk,
            ptx.barrier_init: init,
            ptx.barrier_expect: lambda barrier, count: here.now.block.barriers[barrier].change(1, count),
            ptx.barrier_arrive: lambda barrier: here.now.block.barriers[barrier].change(1, 0),
            ptx.barrier_wait: wait,
            ptx.barrier_wait_both: wait_both,
            ptx.barrier_test: lambda address, parity: int(here.now.block.barriers[address].phase % 2 != parity),
            ptx.load_32: lambda address: memory.words[memory.at(address, 4)],
            ptx.load_128: memory.four,
            ptx.load_f32: lambda address: memory.floats[memory.at(address, 4)],
            ptx.load_fresh: lambda address: memory.integers[memory.at(address, 4)],
            ptx.load_fresh_f32: lambda address: memory.floats[memory.at(address, 4)],
            ptx.shared_load_32: shared_load("words", 4),
            ptx.shared_store_32: shared_store,
            ptx.shared_load_64: shared_load("longs", 8),
            ptx.shared_load_128: lambda address: here.now.block.shared.four(address),
            ptx.publish_32: store,
            ptx.expect_32: expect(1),
            ptx.expect_128: expect(4),
            ptx.expect_2_words: expect(1),
            ptx.expect_4_words: expect(1),
            ptx.expect_2_rows: expect(4),
            ptx.expect_4_rows: expect(4),
            ptx.expect_8_rows: expect(4),
            ptx.count_round: count_round,
            ptx.store_16: store_16,
            ptx.store_32: store,
            ptx.store_128: store,
            ptx.shared_load: shared_load("integers", 4),
            ptx.shared_store: shared_store,
            ptx.shared_address: lambda array: 1024,
            ptx.divide: lambda a, b: a // b,
            ptx.reciprocal: of_numpy(lambda x: np.float64(1) / x),
            ptx.evict_first: lambda: 0,
            scalar.float_of: float_of,
            scalar.bits_of: bits_of,
            scalar.add: lambda a, b: single(a + b),
            scalar.sub: lambda a, b: single(a - b),
            scalar.mul: lambda a, b: single(a * b),
            scalar.fma: lambda a, b, c: single(a * b + c),
            scalar.div: of_numpy(lambda a, b: a / b),
            scalar.sqrt: of_numpy(np.sqrt),
            scalar.larger: larger,
            scalar.exp2_approx: of_numpy(np.exp2),
            scalar.log2_approx: of_numpy(np.log2),
            scalar.bf16_bits: bf16_bits,
            scalar.let_next_start: nothing,
            scalar.wait_for_earlier: nothing,
            scalar.load1: lambda array, index: array[index],
            scalar.load4: lambda array, index: tuple(array[index : index + 4]),
            scalar.store4: store_4,
            scalar.pack: lambda low, high: bf16_bits(low) | bf16_bits(high) << 16,
        }
        for name in (
            "cp_async_commit", "barrier_init_fence", "async_fence", "dependency_wait", "dependents_start",
            "bulk_prefetch", "wgmma_fence", "wgmma_commit", "wgmma_wait_0", "wgmma_wait_1",
        ):  # fmt: skip
            found[getattr(ptx, name)] = nothing
        for columns in (64, 128, 256):
            found[ptx.wgmma(columns)] = self._wgmma(columns)
        for count in (4, 8, 32, 64, 128):
            found[ptx.zeros(count)] = lambda count=count: (0.0,) * count
        for groups in range(8):
            found[ptx.cp_async_wait(groups)] = nothing
        return found

    def _wgmma(self, columns: int) -> Callable[..., Any]:
        """A warpgroup's 64 x columns x 16, operands in swizzle-128B atoms of 8 rows, 1,024 bytes apart."""
        here = self._here

        def tile(shared: Memory, descriptor: int, rows: int) -> np.ndarray:
            start = (descriptor & 0x3FFF) << 4
            assert descriptor >> 62 == 1 and descriptor >> 32 & 0x3FFF == 64
            row, piece = np.arange(rows)[:, None], np.arange(2)
            at = start + row // 8 * 1024 + row % 8 * 128 + piece * 16
            at ^= (at >> 7 & 7) << 4
            shared.at(int(at.min()), 16), shared.at(int(at.max()), 16)
            return from_bf16(shared.data.view(np.uint16).reshape(-1, 8)[at // 16]).reshape(rows, 16).astype(np.float64)

        def run(acc: Any, a: int, b: int) -> Any:
            me = here.now

            def combine(values: list[Any]) -> list[Any]:
                shared = me.block.shared
                d = tile(shared, a, 64) @ tile(shared, b, columns).T
                # warp, row / 8, row % 8, column / 8, pair, number in it -> thread, its numbers
                d = d.reshape(4, 2, 8, columns // 8, 4, 2).transpose(0, 2, 4, 3, 1, 5).reshape(4 * WARP, columns // 2)
                return [tuple(sums) for sums in (np.array(values, np.float64) + d).astype(np.float32).tolist()]

            return (yield from me.quad.exchange(me, me.thread % (4 * WARP), acc, combine))

        return run


class Index:
    """`cuda.threadIdx` and the like: numbers that are asked for anew every time."""

    def __init__(self, **axes: Callable[[], int]) -> None:
        self._axes = axes

    def __getattr__(self, axis: str) -> int:
        return self._axes[axis]()
