"""The streams' states on the device: K/V pages, conv rings, snapshot pages, and which slot may write where."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kernels_numba.batch import PAGE_ROWS, RING_ROWS, Batch
from kernels_numba.cpu import CpuBackend
from lfm2serve.config import ModelConfig
from lfm2serve.errors import LeaseError
from lfm2serve.memory.pages import Lease, pages_for
from lfm2serve.memory.snapshots import SNAPSHOT_PAGE, Run, byte_runs, copy_plan, cut

Segment = tuple[int, int, Sequence[int]]  # slot, position of the first row, token ids

TAPS = 16  # states that one step can tap
TAP_ROWS = 2  # conv inputs that a row needs of those before it
ALIGN = 256


@dataclass(frozen=True, slots=True)
class StateShape:
    """What a kept state takes: conv inputs first (`input_bytes` a position, all layers), then whole K/V pages."""

    input_bytes: int
    page_bytes: int

    def conv_bytes(self, conv_rows: int) -> int:
        """Bytes of the conv inputs, padded."""
        return -(-self.input_bytes * conv_rows // ALIGN) * ALIGN

    def state_bytes(self, at: int, conv_rows: int) -> int:
        """Bytes of a kept state of `at` rows with `conv_rows` conv inputs a layer."""
        return self.conv_bytes(conv_rows) + pages_for(at) * self.page_bytes


class StreamStates:
    """K/V pool, conv rings and page table of `slots` streams, and the arena of snapshot pages.

    A slot's page table row and its leased rows are set by `open` and cleared by `close`; `pack` refuses rows past
    them. A slot that starts at position 0 never sees what the slot held before.
    """

    def __init__(
        self, config: ModelConfig, backend: CpuBackend, *, slots: int, pages: int, max_rows: int, snapshot_pages: int = 0
    ) -> None:
        layers = len(config.conv_layers)
        self.kv = backend.allocate_kv(pages, len(config.attention_layers), config.num_key_value_heads)
        self.ring = backend.allocate_ring(layers, slots, config.hidden_size)
        self.taps = np.zeros((TAPS, layers, TAP_ROWS, config.hidden_size), self.ring.dtype)
        self.page_table = np.zeros((slots, pages_for(max_rows)), np.int32)
        self.leased_rows = np.zeros(slots, np.int64)
        self.snapshot_pages = snapshot_pages
        self.shape = StateShape(layers * config.hidden_size * self.ring.itemsize, self.kv.page_bytes)
        self._backend = backend
        self._arena = np.empty(snapshot_pages * SNAPSHOT_PAGE, np.uint8)
        self._kv_bytes = self.kv.data.reshape(-1).view(np.uint8)

    def open(self, slot: int, lease: Lease) -> None:
        """Give a lease's pages to a free slot."""
        if self.leased_rows[slot]:
            raise LeaseError(f"slot {slot} is in use and was given to stream {lease.stream}")
        rows = min(lease.rows, self.page_table.shape[1] * PAGE_ROWS)
        count = pages_for(rows)
        self.page_table[slot, :count] = lease.pages[:count]
        self.leased_rows[slot] = rows

    def close(self, slot: int) -> None:
        self.leased_rows[slot] = 0

    def pack(self, segments: Sequence[Segment]) -> Batch:
        """One batch of the segments' rows, in order. LeaseError: a row past its slot's lease, or an empty segment."""
        count = len(segments)
        starts = np.zeros(count + 1, np.int32)
        slots = np.empty(count, np.int32)
        tokens: list[int] = []
        positions = []
        for i, (slot, start, ids) in enumerate(segments):
            end = start + len(ids)
            if not ids or end > self.leased_rows[slot]:
                raise LeaseError(f"slot {slot}: rows {start}..{end} with {self.leased_rows[slot]} rows leased")
            slots[i] = slot
            tokens.extend(ids)
            starts[i + 1] = len(tokens)
            positions.append(np.arange(start, end, dtype=np.int32))
        lengths = np.diff(starts)
        return Batch(
            tokens=np.array(tokens, np.int32),
            positions=positions[0] if count == 1 else np.concatenate(positions),
            row_segment=np.repeat(np.arange(count, dtype=np.int32), lengths),
            seg_start=starts,
            seg_slot=slots,
            page_table=self.page_table,
        )

    def keep(self, slot: int, at: int, runs: Sequence[Run], tap: int | None) -> int:
        """Copy a slot's state after `at` rows to snapshot pages; returns how many copies it took.

        tap: where `forward` left the conv state; None: the whole ring of the slot. K/V rows past `at` are copied
        along with their page and never read.
        """
        conv = self.taps[tap] if tap is not None else np.ascontiguousarray(self.ring[:, slot])
        conv_rows = conv.shape[1]
        target = _in_bytes(runs)
        source = byte_runs(self.page_table[slot, : pages_for(at)].tolist(), self.kv.page_bytes)
        size = sum(run.count for run in source)
        conv_bytes = conv.reshape(-1).view(np.uint8)
        first = copy_plan([Run(0, conv_bytes.size)], cut(target, 0, conv_bytes.size))
        rest = copy_plan(source, cut(target, self.shape.conv_bytes(conv_rows), size))
        self._backend.copy(self._arena, conv_bytes, first)
        self._backend.copy(self._arena, self._kv_bytes, rest)
        return len(first) + len(rest)

    def restore(self, slot: int, at: int, runs: Sequence[Run], conv_rows: int) -> int:
        """Copy a kept state into a slot's pages and ring, as if its `at` rows had run there."""
        layers, _, _, hidden = self.ring.shape
        conv = np.empty((layers, conv_rows, hidden), self.ring.dtype)
        conv_bytes = conv.reshape(-1).view(np.uint8)
        source = _in_bytes(runs)
        target = byte_runs(self.page_table[slot, : pages_for(at)].tolist(), self.kv.page_bytes)
        size = sum(run.count for run in target)
        if at > self.leased_rows[slot]:
            raise LeaseError(f"slot {slot}: a kept state of {at} rows with {self.leased_rows[slot]} rows leased")
        first = copy_plan(cut(source, 0, conv_bytes.size), [Run(0, conv_bytes.size)])
        rest = copy_plan(cut(source, self.shape.conv_bytes(conv_rows), size), target)
        self._backend.copy(conv_bytes, self._arena, first)
        self._backend.copy(self._kv_bytes, self._arena, rest)
        if conv_rows == RING_ROWS:
            self.ring[:, slot] = conv
        else:
            for back in range(1, min(at, conv_rows) + 1):
                self.ring[:, slot, (at - back) % RING_ROWS] = conv[:, conv_rows - back]
        return len(first) + len(rest)


def _in_bytes(runs: Sequence[Run]) -> list[Run]:
    return [Run(run.start * SNAPSHOT_PAGE, run.count * SNAPSHOT_PAGE) for run in runs]
