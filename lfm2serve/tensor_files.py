"""The safetensors files of a checkpoint: their headers, and threads that read tensors into given memory.

File format: https://huggingface.co/docs/safetensors (8 bytes of header length, a JSON header, the tensors' bytes).
"""

from __future__ import annotations

import json
import math
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from lfm2serve.config import read_json
from lfm2serve.errors import CheckpointError

Shape = tuple[int, ...]
Buffer = NDArray[Any]
ByteProgress = Callable[[int, int], None]  # bytes done, bytes in all

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
LARGEST_HEADER = 100_000_000  # bytes, the format's own limit
READERS = 8  # threads: one copies 2-6 GB/s out of the system's cache, and a fast disk wants many requests at once
CONVERTED = 1 << 18  # elements that a thread converts at once
COMPARED = 1 << 20  # elements of two tensors that a thread compares at once
# Element sizes of the format: extents are checked of tensors, too, that are then refused for their dtype.
ITEM_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "I16": 2, "U16": 2, "F16": 2, "BF16": 2,
    "I32": 4, "U32": 4, "F32": 4, "I64": 8, "U64": 8, "F64": 8,
}  # fmt: skip
READABLE: dict[str, np.dtype[Any]] = {
    "BF16": np.dtype(np.uint16),
    "F16": np.dtype(np.float16),
    "F32": np.dtype(np.float32),
}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One stored tensor. offset: of its first byte, from the start of `file`."""

    name: str
    file: Path
    dtype: str
    shape: Shape
    offset: int
    nbytes: int


def read_headers(folder: Path) -> dict[str, TensorInfo]:
    """All tensors of a checkpoint directory, by name. CheckpointError names the file and the tensor."""
    if (folder / SINGLE_FILE).exists():
        return {tensor.name: tensor for tensor in _read_header(folder / SINGLE_FILE)}
    index = read_json(folder / INDEX_FILE)
    if index is None:
        raise CheckpointError(f"{folder}: no {SINGLE_FILE} and no {INDEX_FILE} (--dummy-weights does without)")
    places = index.get("weight_map")
    if not isinstance(places, dict) or not places:
        raise CheckpointError(f"{INDEX_FILE}: weight_map is missing or empty")
    for name, shard in places.items():
        if not isinstance(shard, str) or Path(shard).name != shard or shard in ("", ".."):
            raise CheckpointError(f"{INDEX_FILE}: weight_map[{name!r}]={shard!r} is no file name")
    tensors: dict[str, TensorInfo] = {}
    for shard in sorted(set(places.values())):
        if not (folder / shard).exists():
            raise CheckpointError(f"{shard}: missing, but {INDEX_FILE} lists it")
        for tensor in _read_header(folder / shard):
            if tensor.name in tensors:
                raise CheckpointError(f"{shard}: {tensor.name} is in {tensors[tensor.name].file.name} as well")
            if places.get(tensor.name) != shard:
                raise CheckpointError(f"{shard}: {tensor.name} is not listed for this file in {INDEX_FILE}")
            tensors[tensor.name] = tensor
    for name, shard in places.items():
        if name not in tensors:
            raise CheckpointError(f"{shard}: {name} is missing, but {INDEX_FILE} lists it")
    return tensors


def _read_header(file: Path) -> list[TensorInfo]:
    """The tensors of one file, in the order of their bytes; extents are checked against the file's size."""
    try:
        with FileIO(file) as stream:
            size = stream.seek(0, 2)
            stream.seek(0)
            length = int.from_bytes(_read_up_to(stream, 8), "little")
            if size < 8 or length > min(size - 8, LARGEST_HEADER):
                raise CheckpointError(f"{file.name}: header of {length} bytes in a file of {size}: truncated or broken")
            text = _read_up_to(stream, length)
    except OSError as error:
        raise CheckpointError(f"{file.name}: can't be read ({error.strerror})") from error
    try:
        header = json.loads(text, object_pairs_hook=_without_duplicates)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file.name}: broken header ({error})") from error
    if not isinstance(header, dict):
        raise CheckpointError(f"{file.name}: broken header (no JSON object)")
    header.pop("__metadata__", None)
    data, room = 8 + length, size - 8 - length
    tensors = sorted((_entry(file, name, entry, data, room) for name, entry in header.items()), key=lambda t: t.offset)
    at = data
    for tensor in tensors:
        if tensor.offset != at:
            raise CheckpointError(f"{file.name}: {tensor.name} starts at byte {tensor.offset}, where {at} is due")
        at += tensor.nbytes
    if at != size:
        raise CheckpointError(f"{file.name}: {size - at} bytes after the last tensor")
    return tensors


def _read_up_to(stream: FileIO, count: int) -> bytes:
    parts = []
    while count and (part := stream.read(count)):
        parts.append(part)
        count -= len(part)
    return b"".join(parts)


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"{name!r} appears twice")
        found[name] = value
    return found


def _entry(file: Path, name: str, entry: Any, data: int, room: int) -> TensorInfo:
    """One tensor of a header. data: where the tensors' bytes start; room: how many there are."""

    def whole(values: Any) -> bool:
        return isinstance(values, list) and all(type(value) is int and value >= 0 for value in values)

    if not isinstance(entry, dict) or not name.isprintable():
        raise CheckpointError(f"{file.name}: {name!r}: broken header entry")
    dtype, shape, extent = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        raise CheckpointError(f"{file.name}: {name}: unknown dtype {dtype!r}")
    if not isinstance(shape, list) or not whole(shape):
        raise CheckpointError(f"{file.name}: {name}: broken shape")
    if not isinstance(extent, list) or not whole(extent) or len(extent) != 2:
        raise CheckpointError(f"{file.name}: {name}: broken data_offsets")
    begin, end = extent
    nbytes = math.prod(shape) * ITEM_BYTES[dtype]
    if end - begin != nbytes:
        raise CheckpointError(f"{file.name}: {name}: {end - begin} bytes, {dtype} {shape} takes {nbytes}")
    if end > room:
        raise CheckpointError(f"{file.name}: {name} ends at byte {data + end} of {data + room}: truncated")
    return TensorInfo(name, file, dtype, tuple(shape), data + begin, nbytes)


class TensorReader:
    """Reads tensors' elements, from any number of threads of its own side by side. A context manager: leaving it drops
    what hasn't begun, waits for what has and closes the files."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(READERS, "lfm2serve-read")
        self._thread = threading.local()
        self._open: list[_File] = []

    def read(self, tensor: TensorInfo, first: int, target: Buffer) -> Future[None]:
        """Fill `target` (flat, contiguous, uint16 = bf16 or float32) with a tensor's elements from `first` on, sooner
        or later. CheckpointError in the result: the file ends early, or can't be read."""
        return self._pool.submit(self._read, tensor, first, target)

    def equal(self, one: TensorInfo, other: TensorInfo) -> bool:
        """Whether two tensors of the same shape have the same bf16 bits; reads until they differ."""
        size = math.prod(one.shape)
        starts = range(0, size, COMPARED)
        return all(self._pool.map(lambda start: self._same(one, other, start, min(COMPARED, size - start)), starts))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)
        for file in self._open:
            file.close()

    def _same(self, one: TensorInfo, other: TensorInfo, first: int, count: int) -> bool:
        ours, theirs = np.empty(count, np.uint16), np.empty(count, np.uint16)
        self._read(one, first, ours)
        self._read(other, first, theirs)
        return np.array_equal(ours, theirs)

    def _read(self, tensor: TensorInfo, first: int, target: Buffer) -> None:
        file: _File | None = getattr(self._thread, "file", None)
        if file is None:
            file = self._thread.file = _File()
            self._open.append(file)
        stored = READABLE[tensor.dtype]
        if stored == target.dtype:
            file.read(tensor, first * stored.itemsize, target.data.cast("B"))
            return
        for start in range(0, len(target), CONVERTED):
            part = target[start : start + CONVERTED]
            raw: Buffer = np.empty(len(part), stored)
            file.read(tensor, (first + start) * stored.itemsize, raw.data.cast("B"))
            wide = bf16_to_f32(raw) if tensor.dtype == "BF16" else raw.astype(np.float32, copy=False)
            part[:] = f32_to_bf16(wide) if target.dtype == np.uint16 else wide


class _File:
    """The file that one thread reads just now."""

    def __init__(self) -> None:
        self._stream: FileIO | None = None

    def read(self, tensor: TensorInfo, at: int, view: memoryview) -> None:
        """Fill `view` with a tensor's bytes from `at` on."""
        file = tensor.file
        try:
            if self._stream is None or self._stream.name != str(file):
                self.close()
                self._stream = FileIO(str(file))
            self._stream.seek(tensor.offset + at)
            if hasattr(os, "posix_fadvise"):  # the system reads ahead far less than a piece
                os.posix_fadvise(self._stream.fileno(), tensor.offset + at, len(view), os.POSIX_FADV_WILLNEED)
            while view:
                count = self._stream.readinto(view)
                if not count:
                    raise CheckpointError(f"{file.name}: ends inside {tensor.name}: truncated")
                view = view[count:]
        except OSError as error:
            raise CheckpointError(f"{file.name}: {tensor.name} can't be read ({error.strerror})") from error

    def close(self) -> None:
        if self._stream is not None:
            self._stream.close()
            self._stream = None


def f32_to_bf16(x: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Bits of float32 values rounded to the nearest bf16, ties to even; NaN stays NaN."""
    bits = x.view(np.uint32)
    rounded = ((bits + (np.uint32(0x7FFF) + ((bits >> 16) & 1))) >> 16).astype(np.uint16)
    nan = np.isnan(x)
    if nan.any():
        rounded[nan] = (bits[nan] >> 16).astype(np.uint16) | np.uint16(0x40)
    return rounded


def bf16_to_f32(bits: NDArray[np.uint16]) -> NDArray[np.float32]:
    """bf16 bits widened to float32."""
    return (bits.astype(np.uint32) << 16).view(np.float32)
