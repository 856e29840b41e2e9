"""One step: rows of several streams through the network, and the tokens drawn behind them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import islice

import numpy as np

from kernels_numba.batch import FED_BACK, SampleResult, SampleRows
from lfm2serve.backend import Array, Round, Rounds
from lfm2serve.draws import Draw, DrawTable
from lfm2serve.memory.pages import Lease
from lfm2serve.memory.states import Segment, StreamStates
from lfm2serve.model import Model
from lfm2serve.sampling import SamplingParams
from lfm2serve.scheduler import Chunk
from lfm2serve.stream import Stream, TokenLogprobs

MANY_CHUNKS = 16  # have many clients, who want the interpreter too; with few it costs more than it gives
SCORE_ROWS = 64  # prompt rows whose logits are held at once for their log-probabilities

Drawn = tuple[int, TokenLogprobs | None]


@dataclass(slots=True)
class Begun:
    """A decode round whose network is queued. positions: of each chunk's first row; rows: of its draw, once drawn."""

    chunks: list[Chunk]
    positions: list[int]
    draws: list[Draw]
    round: Round
    rows: SampleRows | None = None

    @property
    def live(self) -> list[bool]:
        """Of each chunk: whether its stream still waits for what is drawn; not if it was cancelled meanwhile."""
        return [
            chunk.stream.slot >= 0 and chunk.stream.rows_done == at
            for chunk, at in zip(self.chunks, self.positions, strict=True)
        ]


class StepRunner:
    """Runs chunks on a model. Changes no stream but its `scored`; `backend_s` adds up the backend's time.

    graphs: decode rounds are queued as the backend's graphs, where it has them.
    """

    def __init__(self, model: Model, states: StreamStates, draws: DrawTable, graphs: bool = True) -> None:
        self.backend_s = 0.0
        self._model = model
        self._states = states
        self._draws = draws
        self._graphs = graphs
        self._rounds: Rounds | None = None
        self.hand_over: Callable[[], object] = _nothing  # called when kernels are about to run, see `hands_over`

    def hands_over(self, streams: int) -> bool:
        """Whether a decode round of so many streams calls `hand_over` when its kernels, all together, are about to run:
        the moment for other threads to be given work, since this one won't want the interpreter for a while."""
        return streams >= MANY_CHUNKS and self._rounds is None

    def attach(self) -> None:
        """Called on the thread that runs steps from now on."""
        self._model.backend.attach()

    def run(
        self, chunks: Sequence[Chunk], tap_rows: Sequence[int] = (), keep: Callable[[], object] | None = None
    ) -> list[list[Drawn]]:
        """Run the chunks' rows, leaving the conv states after `tap_rows` of them in the states' taps.

        keep: copies what was tapped. It is called when the draws are queued, before they are waited for: nobody's
        first token waits for a copy, nor for the work of queueing it.
        Returns what was drawn behind each chunk: nothing where its rows aren't complete, else a token behind its last
        row and one behind each of its draft tokens.
        """
        counts = [len(c.draft) + 1 if c.completes and c.stream.max_tokens else 0 for c in chunks]
        draws = _draws(chunks, counts)
        batch = self._states.pack(
            [(c.stream.slot, c.stream.rows_done, [*c.stream.next_rows(c.rows), *c.draft]) for c in chunks]
        )
        together = self.hands_over(len(chunks))
        with self._model.backend.together() if together else nullcontext():
            started = time.perf_counter()
            h = self._model.forward(batch, self._states, np.array(tap_rows, np.int32) if tap_rows else None)
            self.backend_s += time.perf_counter() - started
            for i, chunk in enumerate(chunks):
                if chunk.stream.scoring:
                    self._score(chunk, h, int(batch.seg_start[i]))
            ends = batch.seg_start[1:].tolist()
            rows = [row for end, count in zip(ends, counts, strict=True) for row in range(end - count, end)]
            if draws:
                return _split(self._draw(draws, self._model.backend.take(h, rows), keep, together), counts)
            if keep is not None:
                keep()
            return _split([], counts)

    def begin(self, chunks: list[Chunk]) -> Begun | None:
        """Queue the network of a decode round; None where the backend has none that large."""
        segments = [(c.stream.slot, c.stream.rows_done, [*c.stream.next_rows(1), *c.draft]) for c in chunks]
        return self._begin(chunks, segments)

    def begin_behind(self, streams: Sequence[Stream]) -> Begun | None:
        """Queue the network of these streams' next rows, behind a round that was drawn and not taken yet."""
        return self._begin([Chunk(s, 1) for s in streams], [(s.slot, s.rows_done + 1, [FED_BACK]) for s in streams])

    def _begin(self, chunks: list[Chunk], segments: Sequence[Segment]) -> Begun | None:
        if self._rounds is None:
            return None
        batch = self._states.pack(segments)
        if not self._rounds.fits(batch):
            return None
        draws = _draws(chunks, [len(chunk.draft) + 1 for chunk in chunks])
        begun = Begun(chunks, [start for _, start, _ in segments], draws, self._rounds.begin(batch))
        for chunk, (_, start, ids) in zip(chunks, segments, strict=True):
            chunk.stream.rows_written = max(chunk.stream.rows_written, start + len(ids))
        return begun

    def draw(self, begun: Begun) -> None:
        """Queue the draws behind a round's rows; what the rows before them drew must be known by now."""
        assert self._rounds is not None
        begun.rows = self._draws.rows(begun.draws)
        self._rounds.draw(begun.round, begun.rows)

    def take(self, begun: Begun) -> list[list[Drawn]]:
        """What was drawn behind each chunk of a round; waits for it."""
        assert begun.rows is not None
        return _split(_drawn(begun.round.result(), begun.rows), [len(chunk.draft) + 1 for chunk in begun.chunks])

    def warm_up(self) -> None:
        """Run every operation once, in slot 0, so that no request waits for kernels to be compiled or captured."""
        params = SamplingParams(logprobs=1, prompt_logprobs=1)
        stream = Stream(
            -1, [0, 0], params, lambda event: None, max_tokens=1, seed=0, choice=0, eos_token_ids=frozenset()
        )
        stream.slot = 0
        self._states.open(0, Lease(-1, (0,), 2))
        self._draws.open(stream)
        with self._model.backend.together():
            self.run([Chunk(stream, 2)], [0])
        self._states.close(0)
        self.backend_s = 0.0
        if not self._graphs:
            return
        self._rounds = self._model.backend.decode_rounds(
            lambda batch, logits: self._model.logits(self._model.forward(batch, self._states), logits),
            self._draws.tables,
            width=self._model.vocab_rows,
            vocab=self._draws.vocab,
            page_table=self._states.page_table,
            slots=len(self._states.leased_rows),
            context=self._states.max_rows,
        )

    def _draw(
        self, draws: list[Draw], h: Array, meanwhile: Callable[[], object] | None, hand_over: bool
    ) -> list[Drawn]:
        rows = self._draws.rows(draws)
        started = time.perf_counter()
        logits = self._model.logits(h)
        if hand_over:
            self.hand_over()
        result = self._model.backend.sample(logits, rows, meanwhile)
        self.backend_s += time.perf_counter() - started
        return _drawn(result, rows)

    def _score(self, chunk: Chunk, h: Array, row: int) -> None:
        """Log-probabilities of the prompt tokens that follow this chunk's rows, h[row:]."""
        stream, scored = chunk.stream, chunk.stream.scored
        assert scored is not None and stream.params.prompt_logprobs is not None
        del scored[stream.rows_done + 1 :]
        last = min(chunk.rows, stream.prompt_len - 1 - stream.rows_done)
        top = min(stream.params.prompt_logprobs, self._draws.vocab)
        for start in range(0, last, SCORE_ROWS):
            end = min(last, start + SCORE_ROWS)
            first = stream.rows_done + 1 + start
            targets = np.array(stream.tokens[first : first + end - start], np.int32)
            top_n = np.full(end - start, top, np.int32)
            logits = self._model.logits(self._model.backend.take(h, range(row + start, row + end)))
            found = self._model.backend.token_logprobs(logits, targets, top_n, self._draws.vocab)
            scored.extend(_logprobs(*found, top_n))


def _nothing() -> None:
    pass


def _draws(chunks: Sequence[Chunk], counts: Sequence[int]) -> list[Draw]:
    """`counts` draws of each chunk: the first behind its rows, one more behind each draft token."""
    return [(c.stream, c.draft[:j]) for c, count in zip(chunks, counts, strict=True) for j in range(count)]


def _split(drawn: list[Drawn], counts: Sequence[int]) -> list[list[Drawn]]:
    """The draws of each chunk."""
    rest = iter(drawn)
    return [list(islice(rest, count)) for count in counts]


def _drawn(result: SampleResult, rows: SampleRows) -> list[Drawn]:
    logprobs = _logprobs(result.logprob, result.rank, result.top_ids, result.top_logprobs, rows.top_n)
    return list(zip(result.token.tolist(), logprobs, strict=True))


def _logprobs(
    logprob: np.ndarray, rank: np.ndarray, top_ids: np.ndarray, top_logprobs: np.ndarray, top_n: np.ndarray
) -> list[TokenLogprobs | None]:
    """A kernel's log-probability arrays, row by row; None where top_n is -1."""
    return [
        None
        if top < 0
        else TokenLogprobs(
            float(logprob[i]),
            int(rank[i]),
            tuple(zip(top_ids[i, :top].tolist(), top_logprobs[i, :top].tolist(), strict=True)),
        )
        for i, top in enumerate(top_n.tolist())
    ]
