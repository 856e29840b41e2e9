"""The sampling state of all slots, laid out as the sampling kernel reads it."""

from __future__ import annotations

from collections.abc import Sequence, Sized

import numpy as np
from numpy.typing import NDArray

from kernels_numba.batch import SampleRows
from lfm2serve.backend import Backend
from lfm2serve.stream import Stream

Draw = tuple[Stream, Sequence[int]]  # a stream, and the draft tokens that stand before the token to draw


class DrawTable:
    """Parameters and penalty counts by slot. vocab_rows: rows of the head; vocab: entries of the tokenizer."""

    def __init__(self, backend: Backend, slots: int, vocab_rows: int, vocab: int) -> None:
        self.vocab = vocab
        self.tables = backend.penalty_tables(slots, vocab_rows)
        self._temperature = np.zeros(slots, np.float32)
        self._top_k = np.zeros(slots, np.int32)
        self._top_p = np.ones(slots, np.float32)
        self._min_p = np.zeros(slots, np.float32)
        self._repetition = np.ones(slots, np.float32)
        self._presence = np.zeros(slots, np.float32)
        self._frequency = np.zeros(slots, np.float32)
        self._seed = np.zeros(slots, np.uint64)
        self._choice = np.zeros(slots, np.uint32)
        self._top_n = np.full(slots, -1, np.int32)
        self._no_masks = np.zeros((0, -(-vocab_rows // 32)), np.uint32)

    def open(self, stream: Stream) -> None:
        """Take a slot for a stream; whatever its last owner left is gone."""
        slot, params = stream.slot, stream.params
        self._temperature[slot] = 0.0 if params.greedy else params.temperature
        self._top_k[slot] = min(params.top_k, self.vocab)
        self._top_p[slot] = params.top_p
        self._min_p[slot] = params.min_p
        self._repetition[slot] = params.repetition_penalty
        self._presence[slot] = params.presence_penalty
        self._frequency[slot] = params.frequency_penalty
        self._seed[slot] = stream.seed
        self._choice[slot] = stream.choice
        self._top_n[slot] = -1 if params.logprobs is None else min(params.logprobs, self.vocab)
        if params.penalised:
            self.tables.open(slot, stream.tokens[: stream.prompt_len])

    def record(self, stream: Stream, token: int) -> None:
        if stream.params.penalised:
            self.tables.record(stream.slot, token)

    def rows(self, draws: Sequence[Draw]) -> SampleRows:
        """The kernel's view of the draws, each at the position that its token will have.

        A stream that has ended (its slot is -1) draws nothing that anybody reads.
        """
        slots = np.array([stream.slot for stream, _ in draws], np.int32)
        bias = [stream.params.logit_bias or {} if stream.slot >= 0 else {} for stream, _ in draws]
        bans = [stream.bans(len(ahead)) if stream.slot >= 0 else [] for stream, ahead in draws]
        prompt_seen, output_count = self.tables.views
        masks = [s.constraint.mask(ahead) if s.constraint is not None and s.slot >= 0 else None for s, ahead in draws]
        mask_row, mask = self._masks(masks)
        penalised = [ahead if stream.params.penalised else () for stream, ahead in draws]
        return SampleRows(
            temperature=self._temperature[slots],
            top_k=self._top_k[slots],
            top_p=self._top_p[slots],
            min_p=self._min_p[slots],
            repetition=self._repetition[slots],
            presence=self._presence[slots],
            frequency=self._frequency[slots],
            seed=self._seed[slots],
            choice=self._choice[slots],
            position=np.array([len(stream.tokens) + len(ahead) for stream, ahead in draws], np.uint32),
            slot=slots,
            prompt_seen=prompt_seen,
            output_count=output_count,
            bias_start=_starts(bias),
            bias_id=np.array([token for row in bias for token in row], np.int32),
            bias_value=np.array([value for row in bias for value in row.values()], np.float32),
            ban_start=_starts(bans),
            ban_id=np.array([token for row in bans for token in row], np.int32),
            ahead_start=_starts(penalised),
            ahead_id=np.array([token for row in penalised for token in row], np.int32),
            mask_row=mask_row,
            mask=mask,
            vocab=self.vocab,
            top_n=self._top_n[slots],
        )

    def _masks(self, masks: Sequence[NDArray[np.uint32] | None]) -> tuple[NDArray[np.int32], NDArray[np.uint32]]:
        """The rows of `mask` that the draws read, and those rows."""
        rows = np.full(len(masks), -1, np.int32)
        given = [mask for mask in masks if mask is not None]
        if not given:
            return rows, self._no_masks
        rows[[mask is not None for mask in masks]] = np.arange(len(given))
        return rows, np.stack(given)


def _starts(rows: Sequence[Sized]) -> np.ndarray:
    starts = np.zeros(len(rows) + 1, np.int32)
    if any(map(len, rows)):
        np.cumsum([len(row) for row in rows], out=starts[1:])
    return starts
