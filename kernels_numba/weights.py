"""Where a model's weights go while they are read, piece by piece: into host memory, or through a ring to a device."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import TracebackType
from typing import Any, Protocol, Self

import numpy as np
from numpy.typing import NDArray

Shape = tuple[int, ...]

NUMPY: dict[str, np.dtype[Any]] = {"bf16": np.dtype(np.uint16), "f32": np.dtype(np.float32)}
PIECE_BYTES = 8 << 20


class WeightSink(Protocol):
    """Takes weights: `begin` names a tensor, `room` gives memory for a piece of it, `put` says that the piece is there.

    A piece is whole rows (of the last axis) of one tensor, at most `piece_bytes`. Rooms may be filled side by side and
    by any thread; they are put in the order in which they were given, at most `ahead` of them waiting. All rows of a
    tensor come, in any order. `tensors`: by name, as the backend's operations take them, complete when the sink is
    closed; closing gives back what only loading needs.
    """

    piece_bytes: int
    ahead: int
    tensors: dict[str, Any]

    def begin(self, name: str, shape: Shape, dtype: str) -> None: ...

    def room(self, name: str, start: int, count: int) -> NDArray[Any]: ...

    def put(self, name: str, start: int, count: int) -> None: ...

    def close(self) -> None: ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class HostWeights:
    """Weights that stay in host memory and are read where they stay.

    allocate(name, shape, "bf16" or "f32") gives a C-contiguous array (bf16 as uint16); ValueError when it isn't one.
    """

    piece_bytes = PIECE_BYTES
    ahead = 32

    def __init__(self, allocate: Callable[[str, Shape, str], NDArray[Any]]) -> None:
        self.tensors: dict[str, Any] = {}
        self._allocate = allocate

    def begin(self, name: str, shape: Shape, dtype: str) -> None:
        """Allocate a tensor, all of whose rows come from now on."""
        array = self._allocate(name, shape, dtype)
        if array.shape != shape or array.dtype != NUMPY[dtype] or not array.flags.c_contiguous:
            raise ValueError(f"allocate({name!r}) must give a C-contiguous {dtype} array of {shape}")
        self.tensors[name] = array

    def room(self, name: str, start: int, count: int) -> NDArray[Any]:
        """Elements [start, start + count) of a tensor, flat."""
        part: NDArray[Any] = self.tensors[name].reshape(-1)[start : start + count]
        return part

    def put(self, name: str, start: int, count: int) -> None:
        """Nothing: they lie where they belong."""

    def close(self) -> None:
        """Nothing: the arrays are the caller's."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def pieces(shape: Shape, itemsize: int, most: int) -> list[tuple[int, int]]:
    """(first element, elements) of pieces of whole rows, of at most `most` bytes each, a row at least."""
    size = math.prod(shape)
    row = shape[-1] if shape else 1
    each = max(1, most // max(1, row * itemsize)) * row
    return [(start, min(each, size - start)) for start in range(0, size, each)] if each else []


def put_array(sink: WeightSink, name: str, values: NDArray[Any]) -> None:
    """Send a whole array (bf16 as uint16, or float32) through a sink."""
    dtype = "f32" if values.dtype == np.float32 else "bf16"
    sink.begin(name, values.shape, dtype)
    flat = np.ascontiguousarray(values).reshape(-1)
    for start, count in pieces(values.shape, values.dtype.itemsize, sink.piece_bytes):
        sink.room(name, start, count)[:] = flat[start : start + count]
        sink.put(name, start, count)
