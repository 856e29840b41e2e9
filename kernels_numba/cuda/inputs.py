"""What the host tells the device about a step: packed into one page-locked buffer and sent with one copy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..batch import Batch, SampleResult, SampleRows
from .attention import RANGE
from .driver import Device, DeviceArray, Event, PinnedBuffer, Stream, call

ALIGN = 16
KINDS = {"i4": "i32", "u4": "u32", "f4": "f32", "u8": "u64", "i8": "i64", "u1": "u8", "u2": "bf16"}

CONTROLS = (
    "temperature", "top_k", "top_p", "min_p", "repetition", "presence", "frequency", "seed", "choice", "position",
    "slot", "mask_row",
)  # fmt: skip
"""Fields of SampleRows with one entry a row, in the order of the sampling kernel."""
LISTS = ("bias_start", "bias_id", "bias_value", "ban_start", "ban_id", "ahead_start", "ahead_id")


class Uploads:
    """A ring of page-locked buffers; a buffer is written again once its copy has been made."""

    def __init__(self, device: Device, stream: Stream, nbytes: int, buffers: int = 4) -> None:
        self.nbytes = nbytes
        self._device = device
        self._stream = stream
        self._buffers = [PinnedBuffer(nbytes) for _ in range(buffers)]
        self._sent: list[Event | None] = [None] * buffers
        self._events = [device.event(timing=False) for _ in range(buffers)]
        self._next = 0

    def send(self, arrays: Sequence[np.ndarray], target: DeviceArray) -> list[DeviceArray]:
        """Queue the copy of host arrays, one after another, to the start of `target`; the device arrays.

        What the buffers are too small for is copied at once, behind everything that is queued.
        """
        if packed_bytes(arrays) > self.nbytes:
            return self._write(arrays, target)
        index = self._next
        event = self._sent[index]
        if event is not None:
            event.synchronize()
        buffer, offset, end, out = self._buffers[index], 0, 0, []
        for array in arrays:
            nbytes = array.nbytes
            end = offset + nbytes  # the last array is copied without padding: what lies behind it isn't ours
            buffer.array[offset : offset + nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
            out.append(DeviceArray(target.pointer + offset, array.shape, KINDS[array.dtype.str[1:]]))
            offset += -(-nbytes // ALIGN) * ALIGN
        call("cuMemcpyHtoDAsync", target.pointer, buffer.pointer, end, self._stream.handle)
        self._events[index].record(self._stream)
        self._sent[index] = self._events[index]
        self._next = (index + 1) % len(self._buffers)
        return out

    def _write(self, arrays: Sequence[np.ndarray], target: DeviceArray) -> list[DeviceArray]:
        self._stream.synchronize()
        offset, out = 0, []
        for array in arrays:
            out.append(DeviceArray(target.pointer + offset, array.shape, KINDS[array.dtype.str[1:]]))
            self._device.write(out[-1], array)
            offset += -(-array.nbytes // ALIGN) * ALIGN
        return out

    def close(self) -> None:
        for buffer in self._buffers:
            buffer.free()
        self._buffers = []


def packed_bytes(arrays: Sequence[np.ndarray]) -> int:
    """Bytes that `Uploads.send` fills."""
    return sum(-(-array.nbytes // ALIGN) * ALIGN for array in arrays)


@dataclass(slots=True, eq=False)
class DeviceBatch:
    """A Batch on the device, and how its attention runs; `rows` counts padding rows too.

    Attention by ranges (decode, drafts) has `range_start` and at most `ranges` ranges in all; by tiles (prompts) it has
    `tiles` once it has begun, made of `host`. Tiles in parts of `each` of the `longest` row's ranges have `part_start`
    in place of `range_start`.
    """

    rows: int
    tokens: DeviceArray
    positions: DeviceArray
    row_segment: DeviceArray
    seg_start: DeviceArray
    seg_slot: DeviceArray
    range_start: DeviceArray | None = None
    ranges: int = 0
    tiles: list[DeviceArray] | None = None
    part_start: DeviceArray | None = None
    each: int = 0
    longest: int = 0
    tap_rows: DeviceArray | None = None
    host: Batch | None = None
    owner: Any = field(default=None, repr=False)


def attention_tiles(batch: Batch, most: int) -> tuple[np.ndarray, np.ndarray]:
    """First row and rows of each tile of up to `most` rows of a prompt's attention, the longest work first."""
    rows, counts = [], []
    for start, stop in zip(batch.seg_start[:-1].tolist(), batch.seg_start[1:].tolist(), strict=True):
        firsts = range(start, stop, most)
        rows += firsts
        counts += [min(most, stop - first) for first in firsts]
    tile_row, tile_rows = np.array(rows, np.int32), np.array(counts, np.int32)
    order = np.argsort(-batch.positions[tile_row], kind="stable")
    return tile_row[order], tile_rows[order]


def count_ranges(batch: Batch) -> int:
    """Ranges that attention_ranges walks over, all rows together."""
    return int((batch.positions // RANGE + 1).sum())


def control_arrays(rows: SampleRows) -> list[np.ndarray]:
    """Everything of SampleRows but the tables, in the order of the sampling kernel; empty lists get an entry."""
    lists = [getattr(rows, name) for name in LISTS]
    lists = [array if array.size else np.zeros(1, array.dtype) for array in lists]
    return [*(getattr(rows, name) for name in CONTROLS), *lists, rows.top_n]


def split_results(block: DeviceArray, count: int, most: int) -> list[DeviceArray]:
    """token, logprob, rank, top_ids, top_logprobs in one block of 32-bit words."""
    out, at = [], 0
    for shape, kind in (
        ((count,), "i32"),
        ((count,), "f32"),
        ((count,), "i32"),
        ((count, most), "i32"),
        ((count, most), "f32"),
    ):
        out.append(DeviceArray(block.pointer + 4 * at, shape, kind))
        at += out[-1].size
    return out


def host_results(words: NDArray[np.int32], count: int, most: int) -> SampleResult:
    """The same block on the host, copied out."""
    words = words.copy()
    token, logprob, rank = words[:count], words[count : 2 * count].view(np.float32), words[2 * count : 3 * count]
    ids, best = words[3 * count : (3 + most) * count], words[(3 + most) * count :].view(np.float32)
    return SampleResult(token, logprob, rank, ids.reshape(count, most), best.reshape(count, most))
