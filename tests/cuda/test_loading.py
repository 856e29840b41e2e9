"""Weights on their way to a GPU: sent as they are read, with the checkpoint's bits, from host memory used again."""

from __future__ import annotations

import shutil
import tracemalloc
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernels_numba.cuda import CudaBackend, memory
from kernels_numba.cuda.memory import HostBuffers
from lfm2serve import runtime, tensor_files
from lfm2serve.checkpoint import Checkpoint
from lfm2serve.devices import GPU_CHUNK, Target
from lfm2serve.dummy import tensor_shapes
from lfm2serve.errors import CheckpointError
from lfm2serve.options import EngineOptions
from lfm2serve.sources import find_source
from tests.checkpoints import FILE, allocate
from tests.cuda.recorder import Recorder
from tests.cuda.test_backend import recorder  # noqa: F401

OPTIONS = EngineOptions(context=1024, max_streams=2)


@pytest.fixture(autouse=True)
def target(monkeypatch: pytest.MonkeyPatch, recorder: Recorder) -> None:  # noqa: F811
    monkeypatch.setattr(runtime, "find_device", lambda options: Target("cuda", "recorder", 90 << 30, None, GPU_CHUNK))


def test_what_is_sent_is_what_the_checkpoint_holds(
    tiny: Path,
    recorder: Recorder,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sent: list[bytes] = []
    staging = SimpleNamespace(
        upload=lambda to, array: sent.append(array.tobytes()), stream=None, finish=lambda: None, close=lambda: None
    )
    monkeypatch.setattr(memory, "Staging", lambda device: staging)
    to_device = recorder.to_device
    monkeypatch.setattr(recorder, "to_device", lambda host: (sent.append(host.tobytes()), to_device(host))[1])
    be = CudaBackend(scratch_bytes=1 << 20)
    out = be.upload(find_source(str(tiny)).weights(be, None))
    stored = Checkpoint(tiny).load(allocate)
    assert set(out) == set(stored)
    kept = {name for name in stored if name.endswith(("norm", "conv.weight"))}
    assert all(out[name].tobytes() == stored[name].tobytes() for name in kept)
    pieces: list[bytes] = []
    for name, array in stored.items():
        if name not in kept:
            pieces += [part.tobytes() for part in array] if array.ndim == 3 else [array.tobytes()]
    assert sorted(sent) == sorted(pieces)


def test_the_host_holds_no_more_than_what_is_on_its_way(
    tiny_moe: Path,
    monkeypatch: pytest.MonkeyPatch,
    recorder: Recorder,  # noqa: F811
) -> None:
    monkeypatch.setattr(tensor_files, "PIECE", 8192)
    checkpoint = Checkpoint(tiny_moe)
    sizes = {name: array.nbytes for name, array in checkpoint.load(allocate).items()}
    largest = max(sizes.values())  # two at once: the experts of a layer are stored in turn
    assert 2 * largest < checkpoint.weight_bytes / 4
    be, source = CudaBackend(scratch_bytes=1 << 20), find_source(str(tiny_moe))
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        out = be.upload(source.weights(be, None))
        after, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    kept = sum(sizes[name] for name in sizes if isinstance(out[name], np.ndarray))
    assert largest < peak - before < 2 * largest + kept + 100_000
    assert after - before < kept + 100_000


@given(st.lists(st.tuples(st.integers(1, 5000), st.integers(0, 9)), max_size=40))
def test_host_memory_is_shared_by_none_and_used_again(steps: list[tuple[int, int]]) -> None:
    buffers, taken = HostBuffers(), []
    most = 0
    for count, which in steps:
        if which < 6 or not taken:
            array = buffers.take((count,), np.uint16)
            array[:] = len(taken)
            taken.append((array, array.copy()))
        else:
            array, wrote = taken.pop(which % len(taken))
            assert np.array_equal(array, wrote)
            buffers.give_back(array)
        most = max(most, len(taken))
    assert all(np.array_equal(array, wrote) for array, wrote in taken)
    for array, _ in taken:
        buffers.give_back(array)
    assert buffers.nbytes <= most * 10_000
    held = buffers.nbytes
    if held:
        buffers.give_back(np.zeros(4, np.uint16))
        buffers.take((1,), np.uint16)
        assert buffers.nbytes == held
    buffers.clear()
    assert buffers.nbytes == 0


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
