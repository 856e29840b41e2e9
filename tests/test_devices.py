"""Which device is taken, and what is said when it can't be."""

from __future__ import annotations

import pytest

from kernels_numba.cuda import driver
from lfm2serve.devices import find_device, open_backend, scratch_bytes
from lfm2serve.dummy import shape
from lfm2serve.errors import DeviceError
from lfm2serve.options import EngineOptions


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "device_count", lambda: 0)


def test_without_a_gpu_cuda_is_refused_in_one_line(no_gpu: None) -> None:
    assert find_device(EngineOptions()).kind == "cpu"
    with pytest.raises(DeviceError, match="no NVIDIA driver or no GPU here"):
        find_device(EngineOptions(device="cuda"))


def test_a_gpu_that_cannot_be_used_says_why(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(ordinal: int = 0) -> object:
        raise driver.CudaUnavailable("GPU 0 (Old) has compute capability 7.5; 8.0 is needed")

    monkeypatch.setattr(driver, "device_count", lambda: 1)
    monkeypatch.setattr(driver.Device, "open", refuse)
    assert find_device(EngineOptions(device="auto")).kind == "cpu"
    assert "running on the CPU: device cuda: GPU 0 (Old) has compute capability 7.5" in caplog.text
    with pytest.raises(DeviceError, match=r"7\.5"):
        find_device(EngineOptions(device="cuda"))
    with pytest.raises(DeviceError, match="float32"):
        find_device(EngineOptions(device="cuda", dtype="float32"))


def test_auto_takes_the_gpu_that_can_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    class Usable:
        name, virtual_memory = "H", True

        def function(self, kernel: object) -> None: ...

        def free_bytes(self) -> int:
            return 7 << 30

    monkeypatch.setattr(driver, "device_count", lambda: 1)
    monkeypatch.setattr(driver.Device, "open", lambda ordinal=0: Usable())
    found = find_device(EngineOptions())
    assert (found.kind, found.name, found.memory) == ("cuda", "H", 7 << 30)
    assert find_device(EngineOptions(dtype="float32")).kind == "cpu"
    assert find_device(EngineOptions(device="cpu")).kind == "cpu"


def test_the_cpu_backend_takes_dtype_and_threads() -> None:
    target = find_device(EngineOptions(device="cpu"))
    assert target.kind == "cpu" and target.memory > 0
    assert scratch_bytes(target, shape("lfm2-8b-a1b"), EngineOptions()) > scratch_bytes(
        target, shape("lfm2-350m"), EngineOptions()
    )
    assert open_backend(target, EngineOptions(dtype="float32", threads=1), 0).name == "cpu"
