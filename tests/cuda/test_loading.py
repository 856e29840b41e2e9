"""Weights on their way to a GPU: sent as they are read, with the checkpoint's bits, through a ring."""

from __future__ import annotations

import shutil
import threading
import tracemalloc
from io import FileIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kernels_numba.cuda import CudaBackend, loading, memory
from kernels_numba.cuda.driver import DeviceArray
from kernels_numba.cuda.pack import pack_on_host, pack_weights
from lfm2serve import runtime, tensor_files
from lfm2serve.checkpoint import Checkpoint
from lfm2serve.devices import GPU_CHUNK, Target
from lfm2serve.dummy import tensor_shapes
from lfm2serve.errors import CheckpointError
from lfm2serve.options import EngineOptions
from lfm2serve.sources import find_source
from tests.checkpoints import FILE, allocate, copy_in_other_layout
from tests.cuda.recorder import FakeStaging, Recorder
from tests.cuda.test_backend import recorder  # noqa: F401

OPTIONS = EngineOptions(context=1024, max_streams=2)


@pytest.fixture(autouse=True)
def target(monkeypatch: pytest.MonkeyPatch, recorder: Recorder) -> None:  # noqa: F811
    monkeypatch.setattr(runtime, "find_device", lambda options: Target("cuda", "recorder", 90 << 30, None, GPU_CHUNK))


class Packing(Recorder):
    """A device whose memory holds what is copied to it, and that packs rows as `pack_weights` does."""

    def __init__(self) -> None:
        super().__init__()
        self.memory: dict[int, np.ndarray] = {}

    def allocate(self, shape: Any, dtype: str) -> DeviceArray:
        array = super().allocate(shape, dtype)
        self.memory[array.pointer] = np.full(array.nbytes, 0xAA, np.uint8)
        return array

    def at(self, pointer: int) -> np.ndarray:
        base = max(start for start in self.memory if start <= pointer)
        return self.memory[base][pointer - base :]

    def fill(self, array: DeviceArray, byte: int, stream: Any = None) -> None:
        self.at(array.pointer)[: array.nbytes] = byte

    def function(self, kernel: Any) -> Any:
        if kernel is not pack_weights:
            return super().function(kernel)
        return SimpleNamespace(bind=lambda grid, threads, given: SimpleNamespace(run=lambda stream: self._pack(*given)))

    def _pack(self, source: DeviceArray, target: DeviceArray, first: int, rows: int, depth: int, each: int,
              blocks_k: int, gated: int) -> None:  # fmt: skip
        data = self.at(source.pointer)[: rows * depth * 2].view(np.uint16).reshape(rows, depth // 8, 8)
        expert, row = np.divmod(first + np.arange(rows)[:, None], each)
        unit, at = np.divmod(row, 16)
        if gated:
            upper, row = np.divmod(row, each // 2)
            unit, at = row // 8, row % 8 + 8 * upper
        column = np.arange(depth // 8)
        place = ((expert * -(-each // 16) + unit) * blocks_k + column // 8) * 1024 + at * 64 + (column % 8 ^ at % 8) * 8
        self.at(target.pointer).view(np.uint16)[place[..., None] + np.arange(8)] = data


@pytest.mark.parametrize("piece", [8 << 10, 1 << 20])
@pytest.mark.parametrize("layout", ["as published", "experts fused, in shards"])
def test_every_weight_arrives_where_the_products_look(
    tiny: Path, tmp_path: Path, layout: str, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = Packing()

    class Sending(FakeStaging):
        def sent(self, destination: int, data: np.ndarray) -> None:
            device.at(destination)[: len(data)] = data

    monkeypatch.setattr(memory, "Device", SimpleNamespace(open=lambda ordinal: device))
    monkeypatch.setattr(loading, "Staging", Sending)
    monkeypatch.setattr(loading, "PIECE_BYTES", piece)
    monkeypatch.setattr(loading.DeviceWeights, "piece_bytes", piece)
    be = CudaBackend(scratch_bytes=1 << 20)
    folder = tiny if layout == "as published" else copy_in_other_layout(tiny, tmp_path / "other")
    stored = Checkpoint(folder).load(allocate)
    for out in (find_source(str(folder)).weights(be, None), be.upload(stored.items())):
        assert set(out) == set(stored)
        for name, values in stored.items():
            given = out[name]
            if isinstance(given, np.ndarray):
                assert name.endswith(("norm", "conv.weight")) and given.tobytes() == values.tobytes()
            elif isinstance(given, DeviceArray):
                assert name.endswith(("moe.gate", "moe.bias")) and given.shape == values.shape
                assert device.at(given.pointer)[: given.nbytes].tobytes() == values.tobytes()
            else:
                matrices = values.reshape(-1, *values.shape[-2:])
                expected = np.concatenate([pack_on_host(matrix, given.gated) for matrix in matrices])
                assert given.gated == name.endswith("w13")
                assert device.at(given.data.pointer)[: given.data.nbytes].tobytes() == expected.tobytes(), name


def test_the_host_holds_no_more_than_the_ring(
    tiny_moe: Path,
    monkeypatch: pytest.MonkeyPatch,
    recorder: Recorder,  # noqa: F811
) -> None:
    piece = 4096
    monkeypatch.setattr(loading, "PIECE_BYTES", piece)
    monkeypatch.setattr(loading.DeviceWeights, "piece_bytes", piece)
    monkeypatch.setattr(tensor_files, "CONVERTED", 1024)
    checkpoint = Checkpoint(tiny_moe)
    bound = loading.BUFFERS * piece + 150_000  # the threads and what they remember
    assert 4 * bound < checkpoint.weight_bytes
    be, source = CudaBackend(scratch_bytes=1 << 20), find_source(str(tiny_moe))
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        out = source.weights(be, None)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    kept = sum(values.nbytes for values in out.values() if isinstance(values, np.ndarray))
    assert loading.BUFFERS * piece < peak - before < bound + kept
    held = [pointer for pointer in recorder.allocated if pointer not in recorder.freed]
    assert recorder.peak - sum(recorder._sizes[pointer] for pointer in held) <= piece, "one piece beside the weights"


def test_a_reader_that_fails_is_told_and_nothing_is_left(
    tiny: Path,
    recorder: Recorder,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    closed: list[int] = []

    class Ring(FakeStaging):
        def close(self) -> None:
            closed.append(sum(thread.name.startswith("lfm2serve-read") for thread in threading.enumerate()))

    class Failing(FileIO):
        def readinto(self, view: Any) -> int:
            if self.tell() > 100_000:
                raise OSError(5, "Input/output error")
            return super().readinto(view) or 0

    monkeypatch.setattr(loading, "Staging", Ring)
    source = find_source(str(tiny))
    with monkeypatch.context() as patched:
        patched.setattr(tensor_files, "FileIO", Failing)
        for _ in range(3):
            be = CudaBackend(scratch_bytes=1 << 20)
            with pytest.raises(CheckpointError, match=r"^model\.safetensors: model\..* can't be read \(Input/output"):
                source.weights(be, None)
            be.close()
    assert closed == [0, 0, 0], "a ring is given back once nobody writes into it"
    assert sorted(recorder.allocated) == sorted(recorder.freed)


@pytest.mark.parametrize("dummy_weights", [False, True])
def test_a_model_loads_and_gives_all_memory_back(tiny: Path, dummy_weights: bool, recorder: Recorder) -> None:  # noqa: F811
    calls: list[tuple[int, int]] = []
    loaded = runtime.load_runtime(
        tiny, OPTIONS, progress=lambda *count: calls.append(count), dummy_weights=dummy_weights
    )
    assert dummy_weights or calls[-1][0] == calls[-1][1]
    loaded.close()
    assert recorder.allocated and sorted(recorder.allocated) == sorted(recorder.freed)


def test_a_built_in_shape_is_made_on_the_device(recorder: Recorder) -> None:  # noqa: F811
    loaded = runtime.load_runtime("lfm2-24b-a2b", OPTIONS, dummy_weights=True)
    assert loaded.name == "lfm2-24b-a2b" and loaded.tokenizer.size == 65536 and loaded.template is not None
    large = [name for name, _ in tensor_shapes(loaded.config) if not name.endswith(("norm", "bias", "conv.weight"))]
    assert recorder.launched.count("random_normal") == len(large)
    loaded.close()
    assert sorted(recorder.allocated) == sorted(recorder.freed)


def test_a_load_that_fails_gives_all_memory_back(tiny: Path, tmp_path: Path, recorder: Recorder) -> None:  # noqa: F811
    folder = shutil.copytree(tiny, tmp_path / "copy")

    def cut(done: int, total: int) -> None:
        with (folder / FILE).open("r+b") as stream:
            stream.truncate(200_000)

    with pytest.raises(CheckpointError, match="truncated"):
        runtime.load_runtime(folder, OPTIONS, progress=cut)
    assert recorder.allocated and sorted(recorder.allocated) == sorted(recorder.freed)
