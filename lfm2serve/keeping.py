"""Kept states in a stream's life: what it resumes, what it keeps on the way, what is left at its end.

Lives on the engine's thread. A keep or restore that fails leaves nothing behind and costs no stream its reply.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from kernels_numba.batch import RING_ROWS
from lfm2serve.memory.prompt_cache import KeptState, Mark, PromptCache, common, token_bytes
from lfm2serve.memory.states import TAP_ROWS, TAPS, StreamStates
from lfm2serve.scheduler import Chunk
from lfm2serve.stream import Stream

log = logging.getLogger("lfm2serve.cache")

MAX_MARKS = 4  # states that one prompt keeps
SPARED_ROWS = 16  # fewer than these aren't worth a background pass
MAX_PENDING = 256  # replies whose clients have not been heard of


@dataclass(frozen=True, slots=True)
class Tap:
    """A state to keep when the step has run: `row` of the batch is its last row."""

    stream: Stream
    state: KeptState
    row: int


@dataclass(frozen=True, slots=True)
class SnapshotCensus:
    """total = free + held, in snapshot pages. held: by kept states. unfinished: states being made; pinned: in use."""

    total: int
    free: int
    held: int
    unfinished: int
    pinned: int

    @property
    def clean(self) -> bool:
        """What must hold after every drain."""
        return self.free + self.held == self.total and not self.unfinished and not self.pinned


class Keeper:
    """Resumes and keeps states for streams; `cache` knows them, `states` copies them."""

    def __init__(self, cache: PromptCache, states: StreamStates) -> None:
        self.cache = cache
        self.copies = 0
        self.copy_s = 0.0
        self._states = states
        self._pending: OrderedDict[int, KeptState] = OrderedDict()  # replies' ends, until it is known what comes back

    def admit(self, stream: Stream) -> None:
        """Resume the longest kept state and make room for the states that the prompt will pass."""
        if not stream.keeps:
            return
        tokens = stream.prompt_bytes
        marks = dict(stream.marks)
        pinned: KeptState | None = None
        if stream.scored is None:
            found = self.cache.lookup(tokens)
            self.cache.counters.lookups += not stream.background
            stream.metrics.cache_missed = found.missed
            if found.state is not None:
                pinned = self._resume(stream, found.state, tokens)
            if found.shared and not stream.background:
                marks.setdefault(found.shared, Mark.SHARED)
        ahead = [(at, mark) for at, mark in marks.items() if stream.rows_done < at <= stream.prompt_len]
        for at, mark in sorted(ahead, key=lambda entry: (entry[1].rank, -entry[0]))[:MAX_MARKS]:
            state = self.cache.reserve(tokens[: 4 * at], mark, TAP_ROWS)
            if state is not None:
                stream.planned[at] = state
        if pinned is not None:
            self.cache.unpin(pinned)

    def _resume(self, stream: Stream, state: KeptState, tokens: bytes) -> KeptState | None:
        """Restore a state into a stream's slot; it stays pinned for the caller."""
        started = time.perf_counter()
        try:
            self.cache.resume(state, tokens)
            self.copies += self._states.restore(stream.slot, state.at, state.runs, state.conv_rows)
        except Exception:
            log.exception("a kept state of %d tokens could not be restored; the prompt runs from its start", state.at)
            self.cache.failed(state)
            return None
        self.copy_s += time.perf_counter() - started
        if not stream.background:  # it saves a client nothing yet
            self.cache.hit(state)
        stream.rows_done = stream.rows_written = state.at
        stream.first_input = state.first_input
        stream.metrics.cached_tokens = state.at
        stream.metrics.cache_hit = str(state.mark)
        return state

    def taps(self, chunks: Sequence[Chunk]) -> list[Tap]:
        """The states that this step's rows complete; the most important ones where there are too many."""
        taps: list[Tap] = []
        first = 0
        for chunk in chunks:
            done = chunk.stream.rows_done
            planned = chunk.stream.planned.items()
            taps += [Tap(chunk.stream, s, first + at - done - 1) for at, s in planned if done < at <= done + chunk.rows]
            first += chunk.rows + len(chunk.draft)
        taps.sort(key=lambda tap: tap.state.mark.rank)
        for tap in taps[TAPS:]:
            self.cache.drop(tap.stream.planned.pop(tap.state.at))
        return taps[:TAPS]

    def keep(self, taps: Sequence[Tap]) -> None:
        """Copy what a step has tapped; the states can hit from now on."""
        for i, tap in enumerate(taps):
            del tap.stream.planned[tap.state.at]
            if self._copy(tap.stream, tap.state, i):
                self.cache.complete(tap.state)

    def _copy(self, stream: Stream, state: KeptState, tap: int | None) -> bool:
        started = time.perf_counter()
        try:
            self.copies += self._states.keep(stream.slot, state.at, state.runs, tap)
        except Exception:
            log.exception("a state of %d tokens could not be kept", state.at)
            self.cache.failed(state)
            return False
        self.copy_s += time.perf_counter() - started
        return True

    def end(self, stream: Stream, *, finished: bool) -> None:
        """A stream leaves its slot. finished: its reply is whole, and its end is kept.

        Of a chat's reply, only what the client sends back may hit: it waits for `returned`.
        """
        for state in stream.planned.values():
            self.cache.drop(state)
        stream.planned.clear()
        if not (finished and stream.keeps and stream.output_len and stream.rows_done >= stream.prompt_len):
            return
        tokens = stream.prompt_bytes + token_bytes(stream.tokens[stream.prompt_len : stream.rows_done])
        end = self.cache.reserve(tokens, Mark.REPLY, RING_ROWS)
        if end is None or not self._copy(stream, end, None):
            return
        end.first_input = max(stream.first_input, stream.rows_written - RING_ROWS)
        if not stream.chat:
            self.cache.complete(end)
            return
        end.copied = True
        self._pending[stream.id] = end
        while len(self._pending) > MAX_PENDING:
            self.forget(next(iter(self._pending)))

    def returned(self, stream_id: int, tokens: Sequence[int]) -> bool:
        """The conversation as the client will send it back, with the reply. True: its state has to be prepared.

        A reply's end that reaches further is cut where the tokens part, as far as its ring goes back.
        """
        sent = token_bytes(tokens)
        state = self._pending.pop(stream_id, None)
        if state is not None and self.cache.holds(state):
            at = common(state.tokens, sent)
            inside = max(0, at - TAP_ROWS) >= state.first_input
            if at == state.at or (inside and self.cache.cut(state, at)):
                self.cache.complete(state)
            else:
                self.cache.drop(state)
        return self._worth_preparing(sent)

    def _worth_preparing(self, sent: bytes) -> bool:
        """Whether rows would have to run again that a background pass can spare the next turn."""
        rows = len(sent) // 4
        found = self.cache.lookup(sent + b"\0\0\0\0")
        missing = rows - (found.state.at if found.state is not None else 0)
        return missing >= SPARED_ROWS and self.cache.fits(rows, TAP_ROWS)

    def forget(self, stream_id: int) -> None:
        """Nobody will send this reply back: let its state go."""
        state = self._pending.pop(stream_id, None)
        if state is not None:
            self.cache.drop(state)

    def census(self) -> SnapshotCensus:
        """Who holds which snapshot pages."""
        states = self.cache.states
        waiting = {id(state) for state in self._pending.values()}
        pages = self.cache.pages
        return SnapshotCensus(
            total=pages.total,
            free=pages.free,
            held=sum(state.pages for state in states),
            unfinished=sum(not state.ready and id(state) not in waiting for state in states),
            pinned=sum(state.pins > 0 for state in states),
        )

    def close(self) -> None:
        """Forget everything, and let go of the device's memory."""
        self.clear()
        self.__dict__.pop("_states", None)

    def clear(self) -> int:
        """Drop every kept state that isn't in use; returns how many."""
        self._pending.clear()
        return self.cache.clear()
