"""Arrays in GPU memory as values, and what is said where there is no GPU."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kernels_numba.cuda import driver
from kernels_numba.cuda.compiler import architecture_of
from kernels_numba.cuda.driver import CudaOutOfMemory, CudaUnavailable, Device, DeviceArray, Staging


class FakeEvent:
    def __init__(self, number: int, log: list[Any]) -> None:
        self.number, self.log = number, log

    def record(self, stream: Any) -> None:
        self.log.append(("record", self.number))

    def synchronize(self) -> None:
        self.log.append(("wait", self.number))


def test_a_pinned_buffer_is_filled_again_once_its_copy_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[Any] = []
    addresses, events = itertools.count(1000, 1000), itertools.count()

    class Pinned:
        def __init__(self, nbytes: int) -> None:
            self.pointer, self.array = next(addresses), np.zeros(nbytes, np.uint8)

        def free(self) -> None:
            log.append(("free", self.pointer))

    monkeypatch.setattr(driver, "PinnedBuffer", Pinned)
    monkeypatch.setattr(driver, "call", lambda name, *given: log.append((name, *given[:3])))
    stream = SimpleNamespace(handle="s", synchronize=lambda: log.append("synchronized"))
    device = SimpleNamespace(stream=lambda: stream, event=lambda timing: FakeEvent(next(events), log))
    ring = Staging(device, 2, 64)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="no buffer is taken"):
        ring.send(7, 1)
    ring.take()
    ring.take()
    with pytest.raises(ValueError, match="all 2 buffers are taken"):
        ring.take()
    assert log == []
    ring.send(70, 5)
    ring.take()
    ring.send(71, 6)
    ring.send(72, 7)
    ring.take()
    assert log == [
        ("cuMemcpyHtoDAsync", 70, 1000, 5), ("record", 0), ("wait", 0), ("cuMemcpyHtoDAsync", 71, 2000, 6),
        ("record", 1), ("cuMemcpyHtoDAsync", 72, 1000, 7), ("record", 0), ("wait", 1),
    ]  # fmt: skip
    log.clear()
    ring.close()
    assert log == ["synchronized", ("free", 1000), ("free", 2000)]


def test_a_ring_that_can_not_be_had_leaves_nothing_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []

    class Pinned:
        def __init__(self, nbytes: int) -> None:
            if len(made) == 2:
                raise CudaOutOfMemory("cuMemHostAlloc: CUDA_ERROR_OUT_OF_MEMORY")
            made.append(self)

        def free(self) -> None:
            made.remove(self)

    monkeypatch.setattr(driver, "PinnedBuffer", Pinned)
    device = SimpleNamespace(stream=lambda: SimpleNamespace(synchronize=lambda: None))
    with pytest.raises(CudaOutOfMemory):
        Staging(device, 4, 64)  # type: ignore[arg-type]
    assert made == []


ARRAY = DeviceArray(4096, (6, 4, 2), "bf16")


def test_sizes() -> None:
    assert (ARRAY.size, ARRAY.nbytes, ARRAY.row_bytes, len(ARRAY)) == (48, 96, 16, 6)


def test_slices_of_the_first_axis() -> None:
    assert ARRAY[2] == DeviceArray(4096 + 32, (4, 2), "bf16")
    assert ARRAY[-1] == ARRAY[5]
    assert ARRAY[1:4] == DeviceArray(4096 + 16, (3, 4, 2), "bf16")
    assert ARRAY[4:2].shape == (0, 4, 2)
    with pytest.raises(IndexError):
        ARRAY[6]
    with pytest.raises(IndexError):
        ARRAY[::2]


def test_views_may_shrink_but_not_grow() -> None:
    assert ARRAY.view((24,), "f32") == DeviceArray(4096, (24,), "f32")
    with pytest.raises(ValueError, match="100 bytes of an array of 96"):
        ARRAY.view((25,), "f32")


def test_other_libraries_see_the_memory() -> None:
    interface = ARRAY.__cuda_array_interface__
    assert (interface["data"], interface["shape"], interface["typestr"]) == ((4096, False), (6, 4, 2), "<u2")


def test_architectures() -> None:
    assert [architecture_of(c) for c in ((8, 0), (8, 6), (9, 0), (12, 0))] == ["sm_80", "sm_86", "sm_90a", "sm_120"]


def test_what_is_said_without_a_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_driver(*_: object) -> None:
        raise RuntimeError("libcuda.so.1 not found")

    monkeypatch.setattr(driver, "call", no_driver)
    assert driver.device_count() == 0
    with pytest.raises(CudaUnavailable, match=r"no usable CUDA driver on this machine \(libcuda.so.1 not found\)"):
        Device(0)


def test_what_is_said_of_a_gpu_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "call", lambda name, *_: {"cuInit": None, "cuDeviceGetCount": 2}[name])
    with pytest.raises(CudaUnavailable, match="GPU 2 was asked for; this machine has 2"):
        Device(2)
