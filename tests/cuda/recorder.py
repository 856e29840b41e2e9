"""A device that queues nothing: it checks every launch's arguments and remembers the kernels' names in order."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from kernels_numba.cuda import driver
from kernels_numba.cuda.driver import DeviceArray
from kernels_numba.cuda.scratch import Activations


class FakeStaging:
    """Takes the place of `driver.Staging`; `sent` sees what is copied."""

    stream = None

    def __init__(self, device: Any, buffers: int, nbytes: int) -> None:
        self.free = [np.zeros(nbytes, np.uint8) for _ in range(buffers)]
        self.taken: list[np.ndarray] = []

    def take(self) -> np.ndarray:
        self.taken.append(self.free.pop(0))
        return self.taken[-1]

    def send(self, destination: int, nbytes: int) -> None:
        self.free.append(self.taken.pop(0))
        self.sent(destination, self.free[-1][:nbytes])

    def sent(self, destination: int, data: np.ndarray) -> None:
        pass

    def close(self) -> None:
        self.free = []


class Recorder:
    """Takes the place of `driver.Device`; memory is a range of made-up addresses."""

    name, capability, architecture = "recorder", (9, 0), "sm_90a"
    multiprocessors, shared_bytes, l2_bytes = 132, 232448, 60 << 20
    virtual_memory = False

    def __init__(self) -> None:
        self.launched: list[str] = []
        self.allocated: list[int] = []
        self.freed: list[int] = []
        self.peak = 0  # bytes allocated at once
        self._sizes: dict[int, int] = {}
        self._next = 1 << 40

    def make_current(self) -> None:
        pass

    def stream(self) -> Any:
        return SimpleNamespace(handle=None, synchronize=lambda: None)

    def event(self, timing: bool = True) -> Any:
        return SimpleNamespace(record=lambda stream: None, synchronize=lambda: None, done=lambda: True)

    def allocate(self, shape: Any, dtype: str) -> DeviceArray:
        array = DeviceArray(self._next, tuple(shape), dtype)
        self._next += max(1, -(-array.nbytes // 256)) * 256
        self.allocated.append(array.pointer)
        self._sizes[array.pointer] = array.nbytes
        self.peak = max(self.peak, sum(self._sizes.values()))
        return array

    def free(self, array: DeviceArray) -> None:
        self.freed.append(array.pointer)
        self._sizes.pop(array.pointer, None)

    def to_device(self, host: np.ndarray, dtype: str | None = None) -> DeviceArray:
        kinds = {"uint16": "bf16", "float32": "f32", "int32": "i32", "uint32": "u32", "int64": "i64", "uint64": "u64"}
        return self.allocate(host.shape, dtype or kinds.get(host.dtype.name, "u8"))

    def write(self, destination: DeviceArray, host: np.ndarray, stream: Any = None) -> None:
        assert host.nbytes == destination.nbytes

    def read(self, source: DeviceArray, into: np.ndarray | None = None, stream: Any = None) -> np.ndarray:
        host = np.zeros(source.shape, driver._NUMPY[source.dtype]) if into is None else into
        assert host.nbytes == source.nbytes
        host[...] = 0
        return host

    def fill(self, array: DeviceArray, byte: int, stream: Any = None) -> None:
        pass

    def load(self, kernels: Any) -> None:
        pass

    def supports(self, kernel: Any) -> bool:
        return True

    def function(self, kernel: Any) -> Any:
        return SimpleNamespace(bind=lambda *args, **kwargs: _bind(self, kernel, *args, **kwargs), kernel=kernel)


def _bind(
    device: Recorder, kernel: Any, grid: Any, block: int, arguments: Any, shared: int = 0, dependent: bool = False
) -> Any:
    arguments = [a.array if isinstance(a, Activations) else a for a in arguments]
    assert len(arguments) == len(kernel.arguments), (
        f"{kernel.name}: {len(arguments)} of {len(kernel.arguments)} arguments"
    )
    assert block <= kernel.threads and shared <= kernel.dynamic_shared
    assert all(1 <= side < 1 << 31 for side in (grid if isinstance(grid, tuple) else (grid,))), (
        f"{kernel.name}: grid {grid}"
    )
    sizes = {"bf16*": 2, "u32*": (2, 4), "i32*": 4, "f32*": 4, "u8*": 1, "u64*": 8, "i64*": 8}
    for value, kind in zip(arguments, kernel.arguments, strict=True):
        if kind.endswith("*") and isinstance(value, DeviceArray):
            item = driver.ITEM_BYTES[value.dtype]
            wanted = sizes[kind]
            fits = item in wanted if isinstance(wanted, tuple) else item == wanted
            assert fits or kernel.name == "copy_runs", f"{kernel.name}: a {value.dtype} array for {kind}"
            assert (value.dtype == "f32") == (kind == "f32*"), f"{kernel.name}: a {value.dtype} array for {kind}"
        elif kind in ("i32", "u32", "i64", "f32"):
            assert isinstance(value, int | float | np.integer | np.floating), f"{kernel.name}: {value!r} for {kind}"
        else:
            assert hasattr(value, "pointer") or isinstance(value, int) or value is None, (
                f"{kernel.name}: {value!r} for {kind}"
            )
    return SimpleNamespace(run=lambda stream: device.launched.append(kernel.name))
