"""Sampling on the device: what the kernels of sample.py and logprobs.py are given, and what comes back."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from ..batch import SampleResult, SampleRows
from . import logprobs as _logprobs
from . import sample as _sample
from . import sample_parts as _parts
from .driver import DeviceArray, PinnedBuffer
from .inputs import CONTROLS, control_arrays, host_results, split_results
from .memory import DeviceMemory, PenaltyTables
from .scratch import Activations

RESULT_BYTES = 1 << 20


class Sampler(DeviceMemory):
    """The part of a backend that draws tokens."""

    _spreads: ClassVar[weakref.ref[Sampler] | None] = None
    """the one backend of the process whose blocks may wait for each other: those of two might not all fit"""

    def __init__(self, ordinal: int, scratch_bytes: int) -> None:
        super().__init__(ordinal, scratch_bytes)
        self._results: PinnedBuffer | None = PinnedBuffer(RESULT_BYTES)
        self._ready = self.device.event(timing=False)
        self._drawn: DeviceArray | None = None
        if Sampler._spreads is None or Sampler._spreads() is None:
            Sampler._spreads = weakref.ref(self)
        self._met = self.zeros((2 * self.device.multiprocessors,), "u32")

    def close(self) -> None:
        self._spread_no_more()
        results, self._results = self._results, None
        super().close()
        if results is not None:
            results.free()

    def _spread_no_more(self) -> None:
        if self.alone:
            Sampler._spreads = None

    @property
    def alone(self) -> bool:
        """Whether blocks of this backend's kernels may wait for each other."""
        return Sampler._spreads is not None and Sampler._spreads() is self

    def sample(
        self, logits: Activations, rows: SampleRows, meanwhile: Callable[[], object] | None = None
    ) -> SampleResult:
        """One token a row; see `SampleRows`. prompt_seen and output_count may be a `PenaltyTables` (both the same
        one). meanwhile: called once the draws and their way back are queued, before they are waited for."""
        count, most = len(logits), max(0, int(rows.top_n.max(initial=-1)))
        if isinstance(rows.prompt_seen, PenaltyTables):
            tables, owners = rows.prompt_seen, []
            tables.flush()
            seen, counts = tables.prompt_seen, tables.output_count
        else:
            used = np.where((rows.repetition != 1) | (rows.presence != 0) | (rows.frequency != 0), rows.slot, -1)
            rows, seen, counts, owners = self._host_tables(rows, used)
        masks = rows.mask if len(rows.mask) else np.zeros((1, 1), np.uint32)
        *controls, mask, owner = self.send(*control_arrays(rows), masks)
        block, result = self.result_arrays(count, most)
        self.draw(logits, rows.vocab, controls, seen, counts, most, result, mask)
        out = self._download(block, count, most, meanwhile)
        del owner, owners
        return out

    def _host_tables(
        self, rows: SampleRows, used: NDArray[np.int32]
    ) -> tuple[SampleRows, DeviceArray | None, DeviceArray | None, list[Any]]:
        """Host tables: the rows of slots that need them, sent along; `slot` then counts those."""
        slots = np.unique(used[used >= 0])
        if not len(slots):
            return rows._replace(slot=np.zeros_like(rows.slot)), None, None, []
        moved = np.searchsorted(slots, np.where(used >= 0, rows.slot, slots[0])).astype(np.int32)
        seen, counts, owner = self.send(rows.prompt_seen[slots], rows.output_count[slots])
        return rows._replace(slot=moved), seen, counts, [owner]

    def result_arrays(self, count: int, most: int) -> tuple[Activations, list[DeviceArray]]:
        """Memory for token, logprob, rank, top_ids, top_logprobs of `count` rows, one after another."""
        block = self.scratch.take((count * (3 + 2 * most),), "i32")
        return block, split_results(block.array, count, most)

    def draw(
        self,
        logits: Activations,
        vocab: int,
        controls: Sequence[DeviceArray],
        seen: DeviceArray | None,
        counts: DeviceArray | None,
        most: int,
        result: Sequence[DeviceArray],
        mask: DeviceArray | None = None,
    ) -> None:
        """Queue the sampling kernel. controls: as of `control_arrays`. mask: needed where a row is masked."""
        head = len(CONTROLS)
        adjusted = self.scratch.take(logits.shape, "f32")
        grid, exchange, arrived = self._sampling(len(logits))
        self.launch(
            _sample.sample, grid, _parts.THREADS, logits, logits.shape[1], vocab, adjusted, *controls[:head],
            mask, 0 if mask is None else mask.shape[1], seen, counts, *controls[head:], most, self._drawn, *result,
            exchange, arrived,
        )  # fmt: skip

    def _sampling(self, rows: int) -> tuple[tuple[int, int], Activations, DeviceArray]:
        """Blocks for sampling so many rows, and what those of a row tell each other by."""
        parts = _parts.parts_of(rows, self.device.multiprocessors) if self.alone else 1
        return (rows, parts), self.scratch.take((rows * parts, 2, _parts.BINS), "u64"), self._met

    def _download(
        self, block: Activations, count: int, most: int, meanwhile: Callable[[], object] | None = None
    ) -> SampleResult:
        words, queued = count * (3 + 2 * most), block.array.nbytes <= RESULT_BYTES
        assert self._results is not None
        host = self._results.array[: words * 4].view(np.int32) if queued else self.read(block)
        if queued:
            self.device.read(block.array, host, self.stream)
            self._ready.record(self.stream)
        if meanwhile is not None:
            meanwhile()
        if queued:
            self._ready.synchronize()
        return host_results(host, count, most)

    def token_logprobs(
        self, logits: Activations, targets: NDArray[np.int32], top_n: NDArray[np.int32], vocab: int
    ) -> tuple[NDArray[np.float32], NDArray[np.int32], NDArray[np.int32], NDArray[np.float32]]:
        """Log-probability and rank [n] of each target, and the ids and log-probabilities [n, T] of the best `top_n`."""
        count, most = len(logits), max(0, int(top_n.max(initial=0)))
        target, wanted, owner = self.send(targets, top_n)
        block, result = self.result_arrays(count, most)
        grid, exchange, arrived = self._sampling(count)
        self.launch(
            _logprobs.token_logprobs, grid, _parts.THREADS, logits, logits.shape[1], vocab, target, wanted, most,
            *result[1:], exchange, arrived,
        )  # fmt: skip
        out = self._download(block, count, most)
        del owner
        return out.logprob, out.rank, out.top_ids, out.top_logprobs
