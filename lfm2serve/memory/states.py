"""The streams' states on the device: K/V pages, conv rings, and which slot may write where."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kernels_numba.batch import PAGE_ROWS, Batch
from kernels_numba.cpu import CpuBackend
from lfm2serve.config import ModelConfig
from lfm2serve.errors import LeaseError
from lfm2serve.memory.pages import Lease, pages_for

Segment = tuple[int, int, Sequence[int]]  # slot, position of the first row, token ids


class StreamStates:
    """K/V pool, conv rings and page table of `slots` streams.

    A slot's page table row and its leased rows are set by `open` and cleared by `close`; `pack` refuses rows past
    them. A slot that starts at position 0 never sees what the slot held before.
    """

    def __init__(self, config: ModelConfig, backend: CpuBackend, *, slots: int, pages: int, max_rows: int) -> None:
        self.kv = backend.allocate_kv(pages, len(config.attention_layers), config.num_key_value_heads)
        self.ring = backend.allocate_ring(len(config.conv_layers), slots, config.hidden_size)
        self.page_table = np.zeros((slots, pages_for(max_rows)), np.int32)
        self.leased_rows = np.zeros(slots, np.int64)

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
