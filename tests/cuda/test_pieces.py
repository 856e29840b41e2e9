"""Memory behind parts of a range: the order of the driver's calls, and what a failed one leaves behind."""

from __future__ import annotations

from typing import Any

import pytest

from kernels_numba.cuda import memory, pieces
from kernels_numba.cuda.driver import CudaError, CudaOutOfMemory
from kernels_numba.cuda.pieces import ReservedRange
from lfm2serve.bench import dummy
from lfm2serve.bench.law import compare
from lfm2serve.devices import GPU_CHUNK, Target
from lfm2serve.options import EngineOptions
from tests.cuda.fake_driver import GRANULARITY, STEPS, FakeDriver
from tests.cuda.recorder import Recorder
from tests.cuda.test_backend import recorder  # noqa: F401

PIECE = 4 * GRANULARITY


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    fake = FakeDriver()
    monkeypatch.setattr(pieces, "call", fake.call)
    return fake


def test_parts_get_zeroed_memory_and_give_it_back(driver: FakeDriver) -> None:
    reserved = ReservedRange(driver.device(), 2 * PIECE + 100)
    assert reserved.nbytes == 2 * PIECE + GRANULARITY and driver.used == 0
    reserved.map(PIECE, PIECE)
    reserved.map(2 * PIECE, 100)
    assert [start for _, start in driver.maps] == [PIECE, 2 * PIECE] and driver.used == PIECE + GRANULARITY
    reserved.unmap(PIECE, PIECE)
    assert driver.used == GRANULARITY
    reserved.map(PIECE, PIECE)
    reserved.close()
    reserved.close()
    assert driver.clean


@pytest.mark.parametrize("step", STEPS)
def test_a_failed_step_undoes_those_before_it(driver: FakeDriver, step: str) -> None:
    reserved = ReservedRange(driver.device(), 2 * PIECE)
    reserved.map(0, PIECE)
    driver.fail_at = {(step, 2)}
    with pytest.raises(CudaOutOfMemory, match=f"{step}: injected"):
        reserved.map(PIECE, PIECE)
    assert driver.used == PIECE and len(driver.mapped) == 1
    reserved.map(PIECE, PIECE)
    reserved.close()
    assert driver.clean


def test_what_cannot_be_undone_is_fatal(driver: FakeDriver) -> None:
    reserved = ReservedRange(driver.device(), PIECE)
    driver.fail_at = {("cuMemSetAccess", 1), ("cuMemUnmap", 1)}
    with pytest.raises(CudaError, match="cuMemUnmap") as caught:
        reserved.map(0, PIECE)
    assert caught.value.fatal


def test_the_engine_in_pieces_on_a_device_that_queues_nothing(
    driver: FakeDriver,
    recorder: Recorder,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    recorder.virtual_memory = True

    def reserve(device: Any, nbytes: int) -> ReservedRange:
        return ReservedRange(driver.device(), nbytes)

    monkeypatch.setattr(memory, "ReservedRange", reserve)
    target = Target("cuda", "recorder", 130 << 30, None, GPU_CHUNK, virtual_memory=True)
    monkeypatch.setattr(dummy, "find_device", lambda options: target)
    options = EngineOptions(context=1100, max_streams=4)
    ways = list(
        compare(
            "lfm2-24b-a2b", options, lengths=[1, 513, 1000], tokens=6, chunks=[64], together=[4], randoms=1, limit_s=60
        )
    )
    assert all(way.ok for way in ways) and driver.maps and driver.clean
    assert recorder.launched.count("cuGraphLaunch") > 20
    assert sorted(recorder.allocated) == sorted(recorder.freed)
