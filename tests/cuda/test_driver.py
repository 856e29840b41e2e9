"""Arrays in GPU memory as values, and what is said where there is no GPU."""

from __future__ import annotations

import pytest

from kernels_numba.cuda import driver
from kernels_numba.cuda.compiler import architecture_of
from kernels_numba.cuda.driver import CudaUnavailable, Device, DeviceArray

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
