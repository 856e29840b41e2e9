"""One GPU through CUDA's driver: memory, copies, streams, events and launches. Nothing here runs before it is called.

Kernels take raw addresses and numbers, so a launch packs them into memory that the driver reads, and is one call of it
(Numba's own dispatch takes 21-28 us of host time).
"""

from __future__ import annotations

import ctypes
import logging
import math
import struct
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .compiler import Kernel, architecture_of, prepare

_log = logging.getLogger(__name__)

ITEM_BYTES = {"bf16": 2, "f32": 4, "i32": 4, "u32": 4, "i64": 8, "u64": 8, "u8": 1}
_NUMPY = {"bf16": "<u2", "f32": "<f4", "i32": "<i4", "u32": "<u4", "i64": "<i8", "u64": "<u8", "u8": "|u1"}
_MINIMUM_CAPABILITY = (8, 0)


class CudaError(RuntimeError):
    """A call of the driver failed. fatal: what the device's memory holds now can't be trusted."""

    fatal = True


class CudaUnavailable(CudaError):
    """There is no driver, no such GPU, or the GPU is too old."""


class CudaOutOfMemory(CudaError):
    """An allocation did not fit."""

    fatal = False


def _driver() -> Any:
    from cuda.bindings import driver

    return driver


def call(function: str, *arguments: Any) -> Any:
    """Call a function of the driver by name; its result, or CudaError naming function and reason."""
    driver = _driver()
    error, *values = getattr(driver, function)(*arguments)
    if int(error) != 0:
        kind = CudaOutOfMemory if error == driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY else CudaError
        raise kind(f"{function}: {error.name}")
    return values[0] if len(values) == 1 else tuple(values) if values else None


@dataclass(slots=True)
class DeviceArray:
    """A C-contiguous array in GPU memory, not to be changed. It does not own the memory: `Device.allocate` and
    `Device.free` do."""

    pointer: int
    shape: tuple[int, ...]
    dtype: str
    """"bf16", "f32", "i32", "u32", "i64", "u64" or "u8" """

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.size * ITEM_BYTES[self.dtype]

    @property
    def row_bytes(self) -> int:
        """Bytes from one entry of the first axis to the next."""
        return math.prod(self.shape[1:]) * ITEM_BYTES[self.dtype]

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, index: int | slice) -> DeviceArray:
        """Entries of the first axis: an integer drops the axis, a slice (step 1) keeps it."""
        if isinstance(index, slice):
            start, stop, step = index.indices(self.shape[0])
            if step != 1:
                raise IndexError("a slice of a DeviceArray has step 1")
            return DeviceArray(
                self.pointer + start * self.row_bytes, (max(0, stop - start), *self.shape[1:]), self.dtype
            )
        if not -self.shape[0] <= index < self.shape[0]:
            raise IndexError(f"index {index} of {self.shape[0]} entries")
        return DeviceArray(self.pointer + index % self.shape[0] * self.row_bytes, self.shape[1:], self.dtype)

    def view(self, shape: Sequence[int], dtype: str | None = None) -> DeviceArray:
        """The same memory, from its start, as another shape and type; may be shorter, never longer."""
        other = DeviceArray(self.pointer, tuple(shape), dtype or self.dtype)
        if other.nbytes > self.nbytes:
            raise ValueError(f"a view of {other.nbytes} bytes of an array of {self.nbytes}")
        return other

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {"shape": self.shape, "typestr": _NUMPY[self.dtype], "data": (self.pointer, False), "version": 3}


@dataclass(frozen=True, slots=True)
class Stream:
    """An in-order queue of work; `handle` is a CUstream."""

    handle: Any

    def synchronize(self) -> None:
        call("cuStreamSynchronize", self.handle)

    def wait(self, event: Event) -> None:
        """Work queued from here on waits for the event."""
        call("cuStreamWaitEvent", self.handle, event.handle, 0)


@dataclass(frozen=True, slots=True)
class Event:
    """A mark in a stream."""

    handle: Any

    def record(self, stream: Stream) -> None:
        call("cuEventRecord", self.handle, stream.handle)

    def synchronize(self) -> None:
        call("cuEventSynchronize", self.handle)

    def done(self) -> bool:
        error = _driver().cuEventQuery(self.handle)[0]
        if int(error) not in (0, int(_driver().CUresult.CUDA_ERROR_NOT_READY)):
            raise CudaError(f"cuEventQuery: {error.name}")
        return int(error) == 0

    def since(self, earlier: Event) -> float:
        """Milliseconds from `earlier` to this event; both were recorded and are done."""
        return float(call("cuEventElapsedTime", earlier.handle, self.handle))


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute with an int as its value."""

    _fields_ = (("id", ctypes.c_uint64), ("value", ctypes.c_int), ("pad", ctypes.c_char * 60))


class Function:
    """A kernel loaded on a device, and the memory through which the driver is told its arguments."""

    def __init__(self, kernel: Kernel, handle: Any, queue: Callable[..., int], early: bool) -> None:
        """queue: the driver's cuLaunchKernelEx. early: whether the device knows dependent launches."""
        self.kernel = kernel
        self.handle = int(handle)
        self.early = early
        self.queue = queue
        codes = ["Q" if a.endswith("*") else _CODES[a] for a in kernel.arguments]
        self.pointers = [i for i, code in enumerate(codes) if code == "Q"]
        self.count = len(codes)
        self.lock = threading.Lock()
        self._format = struct.Struct("@" + "".join(codes))
        self._values = ctypes.create_string_buffer(max(1, self._format.size))
        start = ctypes.addressof(self._values)
        offsets = [struct.calcsize(f"@{''.join(codes[:i])}0{code}") for i, code in enumerate(codes)]
        self._addresses = (ctypes.c_void_p * max(1, len(codes)))(*[start + offset for offset in offsets])
        self._attribute = _Attribute()
        if early:
            kinds = _driver().CUlaunchAttributeID
            self._attribute.id = int(kinds.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION)
            self._attribute.value = 1
        self._config = ctypes.create_string_buffer(_CONFIG.size)
        self._told = (ctypes.addressof(self._config), self.handle, ctypes.addressof(self._addresses), None)

    def bind(
        self,
        grid: int | tuple[int, ...],
        block: int,
        arguments: Sequence[Any],
        *,
        shared: int = 0,
        dependent: bool = False,
    ) -> Launch:
        """A launch with its arguments fixed, to be run any number of times.

        Arguments are numbers, or what has a `pointer` where an address is meant (None is address 0). shared: bytes of
        dynamic shared memory. dependent: the kernel may start before the one queued before it ends (programmatic
        dependent launch); it must execute `griddepcontrol.wait` before it touches what others wrote. Ignored below
        sm_90.
        """
        return Launch(self, grid, block, arguments, shared, dependent)

    def run(self, values: Sequence[Any], config: tuple[int, ...], stream: int) -> int:
        """Queue it; the driver copies what it is told before it returns."""
        with self.lock:
            self._format.pack_into(self._values, 0, *values)
            _CONFIG.pack_into(
                self._config, 0, *config[:7], stream, ctypes.addressof(self._attribute) if config[7] else 0, config[7]
            )
            return self.queue(*self._told)


_CODES = {"u64": "Q", "i64": "q", "u32": "I", "i32": "i", "f32": "f"}
_CONFIG = struct.Struct("@7IQQI")
"""CUlaunchConfig: grid, block, shared bytes, stream, attributes and how many."""


class Launch:
    """A kernel, its grid and its arguments, ready to be queued."""

    __slots__ = ("_config", "_values", "function")

    def __init__(
        self,
        function: Function,
        grid: int | tuple[int, ...],
        block: int,
        arguments: Sequence[Any],
        shared: int,
        dependent: bool,
    ) -> None:
        kernel = function.kernel
        if len(arguments) != function.count:
            raise TypeError(f"kernel {kernel.name} takes {function.count} arguments, not {len(arguments)}")
        if block > kernel.threads or shared > kernel.dynamic_shared:
            raise ValueError(f"kernel {kernel.name}: {block} threads, {shared} bytes exceed what it is registered for")
        self.function = function
        self._values = values = list(arguments)
        for i in function.pointers:
            a = values[i]
            if a is None:
                values[i] = 0
            elif a.__class__ is not int:
                values[i] = getattr(a, "pointer", a)
        x, y, z = (grid, 1, 1) if isinstance(grid, int) else (*grid, 1, 1)[:3]
        self._config = (x, y, z, block, 1, 1, shared, int(dependent and function.early))

    def run(self, stream: Stream) -> None:
        """Queue it on a stream."""
        error = self.function.run(self._values, self._config, int(stream.handle))
        if error:
            raise CudaError(f"launch of kernel {self.function.kernel.name}: {_driver().CUresult(error).name}")


class PinnedBuffer:
    """Page-locked host memory; `array` is it as uint8."""

    def __init__(self, nbytes: int) -> None:
        self.pointer = int(call("cuMemHostAlloc", nbytes, 0))
        self.array = np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(self.pointer))

    def free(self) -> None:
        call("cuMemFreeHost", self.pointer)


class Staging:
    """A ring of pinned buffers on their way to the GPU: some are filled while earlier ones travel.

    Buffers are sent in the order in which they were taken; no more can be taken than the ring has.
    """

    def __init__(self, device: Device, buffers: int, nbytes: int) -> None:
        self._buffers: list[PinnedBuffer] = []
        self.stream = device.stream()
        self._taken = self._sent = 0
        try:
            for _ in range(buffers):
                self._buffers.append(PinnedBuffer(nbytes))
            self._events = [device.event(timing=False) for _ in range(buffers)]
        except CudaError:
            self.close()
            raise

    def take(self) -> np.ndarray:
        """The next buffer as uint8, once what it held before has been copied."""
        index, free = self._taken % len(self._buffers), len(self._buffers) - (self._taken - self._sent)
        if not free:
            raise ValueError(f"all {len(self._buffers)} buffers are taken and none was sent")
        if self._taken >= len(self._buffers):
            self._events[index].synchronize()
        self._taken += 1
        return self._buffers[index].array

    def send(self, destination: int, nbytes: int) -> None:
        """Queue the copy of the first bytes of the buffer that was taken longest ago to a device address."""
        if self._sent == self._taken:
            raise ValueError("no buffer is taken")
        index = self._sent % len(self._buffers)
        call("cuMemcpyHtoDAsync", destination, self._buffers[index].pointer, nbytes, self.stream.handle)
        self._events[index].record(self.stream)
        self._sent += 1

    def close(self) -> None:
        """Wait for what was sent, and let go of the memory."""
        self.stream.synchronize()
        for buffer in self._buffers:
            buffer.free()
        self._buffers = []


class Device:
    """A GPU and its primary context (shared with other libraries of the process)."""

    _opened: Device | None = None
    _lock = threading.Lock()

    def __init__(self, ordinal: int) -> None:
        count = _device_count()
        if not 0 <= ordinal < count:
            raise CudaUnavailable(f"GPU {ordinal} was asked for; this machine has {count}")
        attribute = _driver().CUdevice_attribute
        self._handle = call("cuDeviceGet", ordinal)

        def ask(name: str) -> int:
            return int(call("cuDeviceGetAttribute", getattr(attribute, f"CU_DEVICE_ATTRIBUTE_{name}"), self._handle))

        self.ordinal = ordinal
        self.name = bytes(call("cuDeviceGetName", 256, self._handle)).split(b"\0")[0].decode()
        self.capability = (ask("COMPUTE_CAPABILITY_MAJOR"), ask("COMPUTE_CAPABILITY_MINOR"))
        if self.capability < _MINIMUM_CAPABILITY:
            raise CudaUnavailable(
                f"GPU {ordinal} ({self.name}) has compute capability {'.'.join(map(str, self.capability))}, below 8.0"
            )
        self.architecture = architecture_of(self.capability)
        self.multiprocessors = ask("MULTIPROCESSOR_COUNT")
        self.shared_bytes = ask("MAX_SHARED_MEMORY_PER_BLOCK_OPTIN")
        """most shared memory that one block may take"""
        self.l2_bytes = ask("L2_CACHE_SIZE")
        self.memory_bytes = int(call("cuDeviceTotalMem", self._handle))
        self.virtual_memory = bool(ask("VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED"))
        self._context = call("cuDevicePrimaryCtxRetain", self._handle)
        address, _ = call("cuGetProcAddress", b"cuLaunchKernelEx", 12000, 0)
        self._launch = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_void_p] * 4)(int(address))
        self._functions: dict[str, Function] = {}
        self._modules: list[Any] = []
        self._allocated: dict[int, int] = {}
        self._threads = threading.local()
        self.make_current()

    @classmethod
    def open(cls, ordinal: int = 0) -> Device:
        """The GPU that this process uses; CudaUnavailable says why there is none."""
        with cls._lock:
            if cls._opened is None:
                cls._opened = cls(ordinal)
            elif cls._opened.ordinal != ordinal:
                raise CudaUnavailable(f"this process already uses GPU {cls._opened.ordinal}, not {ordinal}")
            return cls._opened

    @classmethod
    def current(cls) -> Device:
        """The opened GPU."""
        if cls._opened is None:
            raise CudaUnavailable("no GPU is opened yet")
        return cls._opened

    def make_current(self) -> None:
        """Bind the calling thread to this GPU. Every thread that allocates, copies or launches needs it once."""
        if not getattr(self._threads, "bound", False):
            call("cuCtxSetCurrent", self._context)
            self._threads.bound = True

    # Memory

    def free_bytes(self) -> int:
        """Bytes of GPU memory free now."""
        return int(call("cuMemGetInfo")[0])

    def allocate(self, shape: Sequence[int], dtype: str) -> DeviceArray:
        """New memory, not zeroed, aligned to 256 bytes."""
        self.make_current()
        nbytes = max(1, math.prod(shape) * ITEM_BYTES[dtype])
        try:
            pointer = int(call("cuMemAlloc", nbytes))
        except CudaOutOfMemory as error:
            free = self.free_bytes()
            raise CudaOutOfMemory(f"{nbytes:,} bytes on GPU {self.ordinal}, which has {free:,} free") from error
        self._allocated[pointer] = nbytes
        return DeviceArray(pointer, tuple(shape), dtype)

    def free(self, array: DeviceArray) -> None:
        """Give back what `allocate` returned."""
        self.make_current()
        del self._allocated[array.pointer]
        call("cuMemFree", array.pointer)

    @property
    def allocated_bytes(self) -> int:
        return sum(self._allocated.values())

    def to_device(self, host: np.ndarray, dtype: str | None = None) -> DeviceArray:
        """A new array with the values of `host` (uint16 is taken as bf16); waits for the copy."""
        kinds = {"uint16": "bf16", "float32": "f32", "int32": "i32", "uint32": "u32", "int64": "i64", "uint64": "u64"}
        array = self.allocate(host.shape, dtype or kinds.get(host.dtype.name, "u8"))
        self.write(array, host)
        return array

    def write(self, destination: DeviceArray, host: np.ndarray, stream: Stream | None = None) -> None:
        """Copy a host array over a device array, and wait; with a stream it is queued, and `host` must be pinned and
        kept."""
        host = np.ascontiguousarray(host)
        if host.nbytes != destination.nbytes:
            raise ValueError(f"{host.nbytes} bytes for an array of {destination.nbytes}")
        self.make_current()
        if stream is None:
            call("cuMemcpyHtoD", destination.pointer, host.ctypes.data, host.nbytes)
            call("cuStreamSynchronize", 0)  # it returns while the last bytes travel, and our streams don't wait for it
        else:
            call("cuMemcpyHtoDAsync", destination.pointer, host.ctypes.data, host.nbytes, stream.handle)

    def read(self, source: DeviceArray, into: np.ndarray | None = None, stream: Stream | None = None) -> np.ndarray:
        """Copy to the host (bf16 arrives as uint16); with a stream it is queued, into pinned memory."""
        host = np.empty(source.shape, np.dtype(_NUMPY[source.dtype])) if into is None else into
        if host.nbytes != source.nbytes or not host.flags.c_contiguous:
            raise ValueError(f"an array of {source.nbytes} bytes is read into one of {host.nbytes}, contiguous")
        self.make_current()
        if stream is None:
            call("cuMemcpyDtoH", host.ctypes.data, source.pointer, host.nbytes)
        else:
            call("cuMemcpyDtoHAsync", host.ctypes.data, source.pointer, host.nbytes, stream.handle)
        return host

    def copy(self, destination: int, source: int, nbytes: int, stream: Stream) -> None:
        """Queue a copy between two device addresses."""
        call("cuMemcpyDtoDAsync", destination, source, nbytes, stream.handle)

    def fill(self, array: DeviceArray, byte: int, stream: Stream | None = None) -> None:
        """Set every byte of an array, and wait; with a stream it is queued."""
        self.make_current()
        if stream is None:
            call("cuMemsetD8", array.pointer, byte, array.nbytes)
            call("cuStreamSynchronize", 0)  # it is only queued, and our streams don't wait for it
        else:
            call("cuMemsetD8Async", array.pointer, byte, array.nbytes, stream.handle)

    # Work

    def stream(self) -> Stream:
        """A new stream that does not wait for the default one."""
        self.make_current()
        return Stream(call("cuStreamCreate", int(_driver().CUstream_flags.CU_STREAM_NON_BLOCKING)))

    def event(self, timing: bool = True) -> Event:
        self.make_current()
        flags = _driver().CUevent_flags
        return Event(call("cuEventCreate", int(flags.CU_EVENT_DEFAULT if timing else flags.CU_EVENT_DISABLE_TIMING)))

    def synchronize(self) -> None:
        self.make_current()
        call("cuCtxSynchronize")

    def function(self, kernel: Kernel) -> Function:
        """The kernel as loaded on this GPU; compiled on first use, then found in the disk cache."""
        found = self._functions.get(kernel.name)
        if found is None:
            if not self.supports(kernel):
                raise CudaError(f"kernel {kernel.name} does not run on {self.architecture}")
            self.make_current()
            code = np.frombuffer(kernel.cubin(self.architecture), np.uint8)
            module = call("cuModuleLoadData", code.ctypes.data)
            handle = call("cuModuleGetFunction", module, kernel.name.encode())
            self._modules.append(module)
            if kernel.dynamic_shared > 48 << 10:
                limit = _driver().CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
                call("cuFuncSetAttribute", handle, limit, min(kernel.dynamic_shared, self.shared_bytes))
            call("cuFuncLoad", handle)  # else its first launch does, while somebody waits
            found = Function(kernel, handle, self._launch, self.capability >= (9, 0))
            self._functions[kernel.name] = found
        return found

    def load(self, kernels: Iterable[Kernel]) -> None:
        """Compile what the disk cache lacks, and load all that run here: none of it is left for a first use."""
        usable = [kernel for kernel in kernels if self.supports(kernel)]
        prepare(usable, self.architecture)
        for kernel in usable:
            self.function(kernel)

    def supports(self, kernel: Kernel) -> bool:
        """Whether the kernel was written for this GPU's architecture (or, unlisted ones, for those of its major)."""
        majors = {name.removeprefix("sm_").rstrip("a")[:-1] for name in kernel.architectures}
        if kernel.architectures and all(name.endswith("a") for name in kernel.architectures):
            return self.architecture in kernel.architectures
        return str(self.capability[0]) in majors


def device_count() -> int:
    """GPUs that the driver shows; 0 without a driver."""
    try:
        return _device_count()
    except CudaUnavailable:
        return 0


def _device_count() -> int:
    try:
        call("cuInit", 0)
        count = int(call("cuDeviceGetCount"))
    except ImportError as error:
        raise CudaUnavailable('CUDA needs the package cuda-bindings: install "lfm2serve[cuda]"') from error
    except (CudaError, RuntimeError) as error:
        raise CudaUnavailable(f"no usable CUDA driver on this machine ({error})") from error
    if count == 0:
        raise CudaUnavailable("the CUDA driver shows no GPU")
    return count
