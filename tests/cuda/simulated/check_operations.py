"""Kernels without tensor cores in Numba's CUDA simulator, on small sizes. Run by ../test_simulated.py."""

from __future__ import annotations

import sys
import threading
from typing import Any

import numpy as np
import pytest
from numba import cuda
from numba.cuda.simulator.kernel import BlockManager, BlockThread
from numba.cuda.simulator.kernelapi import FakeCUDAShared

from kernels_numba.cuda import route
from kernels_numba.cuda.scalar import SIMULATED
from tests.cuda import operations

assert SIMULATED, "set NUMBA_ENABLE_CUDASIM=1"
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # sums of unsigned numbers wrap on purpose


@pytest.fixture(autouse=True)
def any_alignment(monkeypatch: pytest.MonkeyPatch) -> None:
    """The simulator has no addresses and refuses alignments. Arrays go by where they are asked for."""
    plain = FakeCUDAShared.array

    def array(self: Any, shape: Any, dtype: Any, alignment: int | None = None) -> Any:
        if shape == 0:
            return plain(self, shape, dtype)
        frame = sys._getframe(1)
        place = (frame.f_code.co_filename, frame.f_lineno)
        return self._allocations.setdefault(place, np.empty(shape, dtype))

    monkeypatch.setattr(FakeCUDAShared, "array", array)


class Meeting:
    """Where a block's threads wait for each other; those that are over are not waited for."""

    def __init__(self, threads: int) -> None:
        self.lock, self.live, self.failed = threading.Lock(), threads, False
        self.waiting: list[threading.Lock] = []

    def wait(self) -> None:
        turn = threading.Lock()
        turn.acquire()
        with self.lock:
            self.waiting.append(turn)
            self.release()
        turn.acquire()
        if self.failed:
            raise threading.BrokenBarrierError

    def leave(self, failed: bool) -> None:
        with self.lock:
            self.live -= 1
            self.failed |= failed
            self.release()

    def release(self) -> None:
        if self.failed or len(self.waiting) == self.live:
            for turn in self.waiting:
                turn.release()
            self.waiting = []


@pytest.fixture(autouse=True)
def threads_that_sleep(monkeypatch: pytest.MonkeyPatch) -> None:
    """The simulator asks threads all the time whether they wait, and takes the time from those that don't."""

    def run_block(manager: Any, at: Any, *arguments: Any) -> None:
        points = list(np.ndindex(*manager._block_dim))
        meeting = manager.meeting = Meeting(len(points))

        def target() -> None:
            failed = True
            try:
                manager._f(*arguments)
                failed = False
            finally:
                meeting.leave(failed)

        threads = [BlockThread(target, manager, at, point, manager._debug) for point in points]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        errors = [thread.exception for thread in threads if thread.exception]
        for kind, trace in sorted(errors, key=lambda error: isinstance(error[0], threading.BrokenBarrierError)):
            raise kind.with_traceback(trace)

    monkeypatch.setattr(BlockManager, "run", run_block)
    monkeypatch.setattr(BlockThread, "syncthreads", lambda thread: thread._manager.meeting.wait())


def run(kernel: Any, grid: Any, block: int, *arguments: Any, shared: int = 0) -> None:
    cuda.jit(kernel.function)[grid, block, 0, shared](*arguments)


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(11)


def test_embed(rng: np.random.Generator) -> None:
    operations.check_embed(run, rng, 4, 192)


def test_norm(rng: np.random.Generator) -> None:
    operations.check_norm(run, rng, 2, 192)


def test_attention_inputs(rng: np.random.Generator) -> None:
    operations.check_attention_inputs(run, rng, 3, 1, [(1, 0, 2), (0, 510, 3)])


@pytest.mark.parametrize("tile", [1, 8])
def test_conv(rng: np.random.Generator, tile: int) -> None:
    steps = [
        [(0, 0, 1), (2, 0, 37), (1, 0, 2)],
        [(1, 2, 1), (0, 1, 9), (2, 37, 33)],
        [(0, 10, 1), (1, 3, 1), (2, 70, 31)],
    ]
    operations.check_conv(run, rng, 64, steps, tile)


@pytest.mark.parametrize(("rows", "experts", "top_k"), [(1, 6, 2), (3, 12, 4)])
def test_routing(rng: np.random.Generator, rows: int, experts: int, top_k: int) -> None:
    class Chooser:
        """norm_route's choice from given logits."""

        @staticmethod
        def function(logits, bias, top_k, ids, weights):  # type: ignore[no-untyped-def]
            scores = cuda.shared.array((1, 64), np.float32)
            choice = cuda.shared.array((1, 64), np.float32)
            row, lane = cuda.blockIdx.x, cuda.threadIdx.x
            for e in range(lane, len(bias), 32):
                route.score(logits[row, e], bias, True, scores, choice, 0, e)
            cuda.syncthreads()
            low, high = route.choose(choice, 0, lane, len(bias), top_k)
            route.write_choice(scores, 0, lane, low, high, True, np.float32(1), False, ids[row], weights[row], 0)

    operations.check_routing(run, rng, rows, experts, top_k, 64, Chooser)


def test_router(rng: np.random.Generator) -> None:
    operations.check_routing(run, rng, 2, 12, 3, 256)


def test_sample(rng: np.random.Generator) -> None:
    operations.check_sample(run, rng, 2, 96, 90, 1.0, True, [1])
