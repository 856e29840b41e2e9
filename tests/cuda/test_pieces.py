"""Memory behind parts of a range: the order of the driver's calls, and what a failed one leaves behind."""

from __future__ import annotations

import json
import time
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from kernels_numba.cuda import memory, pieces
from kernels_numba.cuda.driver import CudaError, CudaOutOfMemory, Device
from kernels_numba.cuda.pieces import ReservedRange
from lfm2serve.bench import dummy
from lfm2serve.bench import gaps as bench_gaps
from lfm2serve.bench import memory as bench_memory
from lfm2serve.bench.cli import app
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


@pytest.fixture
def in_pieces(
    driver: FakeDriver,
    recorder: Recorder,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> Recorder:
    """A device that queues nothing, with virtual memory."""
    recorder.virtual_memory = True
    recorder.free_bytes = lambda: (130 << 30) - driver.used  # type: ignore[attr-defined]

    def reserve(device: Any, nbytes: int) -> ReservedRange:
        return ReservedRange(driver.device(), nbytes)

    target = Target("cuda", "recorder", 130 << 30, None, GPU_CHUNK, virtual_memory=True)
    monkeypatch.setattr(memory, "ReservedRange", reserve)
    monkeypatch.setattr(Device, "current", classmethod(lambda cls: recorder))
    for module in (dummy, bench_memory):
        monkeypatch.setattr(module, "find_device", lambda options: target)
    return recorder


def test_the_engine_in_pieces_on_a_device_that_queues_nothing(in_pieces: Recorder, driver: FakeDriver) -> None:
    options = EngineOptions(context=1100, max_streams=4)
    ways = list(
        compare(
            "lfm2-24b-a2b", options, lengths=[1, 513, 1000], tokens=6, chunks=[64], together=[4], randoms=1, limit_s=60
        )
    )
    assert all(way.ok for way in ways) and driver.maps and driver.clean
    assert in_pieces.launched.count("cuGraphLaunch") > 20
    assert sorted(in_pieces.allocated) == sorted(in_pieces.freed)


def test_bench_memory_says_what_is_mapped_and_compares_with_one_allocation(
    in_pieces: Recorder, driver: FakeDriver
) -> None:
    flags = ["--kv-gib", "16", "--cache-gib", "1", "--streams", "3", "--context", "700", "--tokens", "5", "--json"]
    result = CliRunner().invoke(app, ["memory", "--model", "lfm2-24b-a2b", "--device", "cuda", *flags])
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    figures = {figure["measure"]: figure for figure in report["figures"]}
    assert report["failures"] == [] and driver.clean
    mapped = figures["pool mapped after load"]
    assert 0 < mapped["value"] < 8 and "0.25 of 16.00 GiB, 1 pieces" in mapped["beside"]
    assert figures["replies equal, pieces and one allocation, first and spread pages"]["value"] == 3
    assert figures["used after load, against the plan"]["value"] > 0


def test_bench_gaps_opens_long_prompts_beside_a_stream(
    in_pieces: Recorder, driver: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    def event(timing: bool = True) -> Any:  # a round takes a moment: the running stream must not come to its end
        return SimpleNamespace(record=lambda stream: None, synchronize=lambda: time.sleep(5e-4), done=lambda: True)

    monkeypatch.setattr(in_pieces, "event", event)
    flags = ["--kv-gib", "16", "--prompts", "64000,120000", "--json"]
    result = CliRunner().invoke(app, ["gaps", "--model", "lfm2-24b-a2b", "--device", "cuda", *flags])
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    figures = {figure["measure"]: figure for figure in report["figures"]}
    assert figures["replies equal to those alone"]["value"] == 3
    for length in ("64,000", "120,000"):
        maps = figures[f"{length}: map calls on the engine's thread"]
        assert maps["value"] == 0 and int(maps["beside"].split()[0]) >= 4
        assert figures[f"{length}: longest gap during its prompt"]["value"] > 0
    assert driver.clean


def test_a_bench_whose_replies_differ_fails(in_pieces: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = iter(range(1000))
    monkeypatch.setattr(bench_gaps, "reply_hash", lambda reply: str(next(numbers)))
    result = CliRunner().invoke(app, ["gaps", "--model", "lfm2-8b-a1b", "--device", "cuda", "--json"])
    assert result.exit_code == 1
    assert json.loads(result.stdout)["failures"] == ["3 of 3 replies differ from those alone"]
