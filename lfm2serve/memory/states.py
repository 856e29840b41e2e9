"""The streams' states on the device: K/V pages, conv rings, snapshot pages, and which slot may write where."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kernels_numba.batch import PAGE_ROWS, RING_ROWS, Batch
from lfm2serve.backend import Backend
from lfm2serve.config import ModelConfig
from lfm2serve.errors import LeaseError
from lfm2serve.memory.arena import Arena
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
    them. A slot that starts at position 0 never sees what the slot held before. lazy: `arena` gives pages their memory
    as leases reach them, where the backend can.
    """

    def __init__(
        self, config: ModelConfig, backend: Backend, *, slots: int, pages: int, max_rows: int, snapshot_pages: int = 0,
        lazy: bool = False,
    ) -> None:  # fmt: skip
        layers, hidden = len(config.conv_layers), config.hidden_size
        self.kv = backend.allocate_kv(pages, len(config.attention_layers), config.num_key_value_heads, lazy=lazy)
        self.arena = Arena(pages, self.kv.page_bytes, self.kv.mapper)
        self.arena.ready((0,), alone=True)  # steps are tried on page 0 before anybody has a lease
        self.ring = backend.allocate_ring(layers, slots, hidden)
        self.taps = backend.allocate_taps(TAPS, layers, hidden)
        self.page_table = np.zeros((slots, pages_for(max_rows)), np.int32)
        self.leased_rows = np.zeros(slots, np.int64)
        self.snapshot_pages = snapshot_pages
        self.max_rows = max_rows
        self._backend = backend
        self._snapshots = backend.allocate_bytes(snapshot_pages * SNAPSHOT_PAGE)
        self._kv_bytes = backend.bytes_of(self.kv.data)
        self._ring_bytes = backend.bytes_of(self.ring)
        self._tap_bytes = backend.bytes_of(self.taps)
        self._layers = layers
        self._slots = slots
        self._row_bytes = self._ring_bytes.nbytes // (layers * slots * RING_ROWS) if layers else 0
        self.shape = StateShape(layers * self._row_bytes, self.kv.page_bytes)

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

    def close_all(self) -> None:
        """Give the device's memory back; the states can't be used afterwards."""
        self.arena.close()
        for array in (self.kv.data, self.ring, self.taps, self._snapshots):
            self._backend.free(array)

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
        """Copy a slot's state after `at` rows to snapshot pages; returns how many copies its K/V took.

        tap: where `forward` left the conv state; None: the whole ring of the slot. K/V rows past `at` are copied
        along with their page and never read.
        """
        target = _in_bytes(runs)
        tap_bytes = self.shape.input_bytes * TAP_ROWS
        if tap is None:
            conv = self._ring_runs(slot, range(RING_ROWS))
            self._copy(self._snapshots, self._ring_bytes, conv, target)
        else:
            self._copy(self._snapshots, self._tap_bytes, [Run(tap * tap_bytes, tap_bytes)], target)
        conv_rows = RING_ROWS if tap is None else TAP_ROWS
        pages = self._page_runs(slot, at)
        return self._copy(self._snapshots, self._kv_bytes, pages, self._kv_part(target, conv_rows, pages))

    def restore(self, slot: int, at: int, runs: Sequence[Run], conv_rows: int) -> int:
        """Copy a kept state into a slot's pages and ring, as if its `at` rows had run there."""
        if at > self.leased_rows[slot]:
            raise LeaseError(f"slot {slot}: a kept state of {at} rows with {self.leased_rows[slot]} rows leased")
        source = _in_bytes(runs)
        rows = (
            range(RING_ROWS)
            if conv_rows == RING_ROWS
            else [(at - back) % RING_ROWS for back in range(conv_rows, 0, -1)]
        )
        ring = self._ring_runs(slot, rows)
        self._copy(self._ring_bytes, self._snapshots, cut(source, 0, sum(run.count for run in ring)), ring)
        pages = self._page_runs(slot, at)
        return self._copy(self._kv_bytes, self._snapshots, self._kv_part(source, conv_rows, pages), pages)

    def _ring_runs(self, slot: int, rows: Sequence[int]) -> list[Run]:
        """Where a slot's conv inputs lie, layer by layer."""
        size = self._row_bytes
        firsts = [(layer * self._slots + slot) * RING_ROWS for layer in range(self._layers)]
        if len(rows) == RING_ROWS:
            return [Run(first * size, RING_ROWS * size) for first in firsts]
        return [Run((first + row) * size, size) for first in firsts for row in rows]

    def _page_runs(self, slot: int, at: int) -> list[Run]:
        return byte_runs(self.page_table[slot, : pages_for(at)].tolist(), self.kv.page_bytes)

    def _kv_part(self, state: Sequence[Run], conv_rows: int, pages: Sequence[Run]) -> list[Run]:
        """Where the K/V pages of a state lie."""
        return cut(state, self.shape.conv_bytes(conv_rows), sum(run.count for run in pages))

    def _copy(self, target: Any, source: Any, source_runs: Sequence[Run], target_runs: Sequence[Run]) -> int:
        plan = copy_plan(source_runs, target_runs)
        self._backend.copy(target, source, plan)
        return len(plan)


def _in_bytes(runs: Sequence[Run]) -> list[Run]:
    return [Run(run.start * SNAPSHOT_PAGE, run.count * SNAPSHOT_PAGE) for run in runs]
