"""Decode rounds over the running streams: their drafts, and one queued behind the other where the backend does that."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from lfm2serve.counters import EngineCounters
from lfm2serve.drafting import RoundCosts
from lfm2serve.scheduler import Chunk, Scheduler
from lfm2serve.steps import Begun, Drawn, StepRunner
from lfm2serve.stream import Stream

Commit = Callable[[Sequence[Chunk], Sequence[list[Drawn]]], None]
"""Takes chunks that have run and what was drawn behind each."""


class Decoding:
    """One row of every running stream a round, and the draft tokens behind it.

    Where the backend queues rounds, the network of the next one is queued before this one's tokens are known, so that
    what the host does with them takes no time of the device's. run: runs chunks and waits for them; commit: gives the
    streams what a round has drawn; failed: called with the chunks of a round that raised.
    """

    def __init__(
        self,
        steps: StepRunner,
        scheduler: Scheduler,
        counters: EngineCounters,
        *,
        run: Callable[[list[Chunk]], None],
        commit: Commit,
        failed: Callable[[Sequence[Chunk], Exception], None],
    ) -> None:
        self._steps, self._scheduler, self._counters = steps, scheduler, counters
        self._run, self._commit, self._failed = run, commit, failed
        self._costs = RoundCosts()
        self._ahead: Begun | None = None  # a round that is drawn and not taken yet
        self._started = 0.0
        self._behind_prompt = False

    def round(self, behind_prompt: bool) -> None:
        """Run one. behind_prompt: the device may still be busy with a prompt step."""
        started = time.perf_counter()
        self._behind_prompt = behind_prompt
        begun, self._ahead = self._ahead, None
        chunks = begun.chunks if begun else self._next_rows()
        try:
            if begun is None:
                begun = self._steps.begin(chunks)
                if begun is None:
                    self._plain(chunks)
                    return
                self._steps.draw(begun)
                self._started = started
                self._counters.host_s += time.perf_counter() - started
            following = self._following(begun)
            ahead = self._steps.begin_behind(following) if following else None
            self._take(begun)
            if ahead is not None:
                taken = time.perf_counter()
                late = ahead.round.network_done
                self._steps.draw(ahead)
                self._ahead = ahead
                self._counters.host_s += time.perf_counter() - taken if late else 0.0
        except Exception as error:
            self._failed(chunks, error)

    def collect(self) -> None:
        """Take what the round under way has drawn, and let none follow: no token waits for a prompt step."""
        begun, self._ahead = self._ahead, None
        if begun is not None:
            try:
                self._take(begun)
            except Exception as error:
                self._failed(begun.chunks, error)

    def _plain(self, chunks: list[Chunk]) -> None:
        """A round that is run and waited for."""
        started, backend_s = time.perf_counter(), self._steps.backend_s
        self._run(chunks)
        elapsed = time.perf_counter() - started
        self._count(sum(1 + len(chunk.draft) for chunk in chunks), elapsed)
        self._counters.host_s += elapsed - (self._steps.backend_s - backend_s)

    def _take(self, begun: Begun) -> None:
        """Wait for a round, and give its tokens to the streams that still want them."""
        drawn = self._steps.take(begun)
        now = time.perf_counter()
        self._count(len(begun.draws), now - self._started)
        self._started = now
        wanted = [pair for pair, live in zip(zip(begun.chunks, drawn, strict=True), begun.live, strict=True) if live]
        self._commit([chunk for chunk, _ in wanted], [tokens for _, tokens in wanted])

    def _count(self, rows: int, elapsed: float) -> None:
        pace, counters = self._scheduler.pace, self._counters
        if self._behind_prompt:  # most of it was the prompt's
            elapsed = min(elapsed, pace.round_s or elapsed)
        else:
            pace.decode_round(elapsed)
            self._costs.record(rows, elapsed)
        counters.decode_rounds += 1
        counters.decode_rows += rows
        counters.decode_s += elapsed

    def _next_rows(self) -> list[Chunk]:
        """The next row of every running stream, and its draft."""
        rows = len(self._scheduler.running)
        chunks = []
        for stream in self._scheduler.running:
            chunks.append(Chunk(stream, 1, self._draft(stream, rows)))
            rows += len(chunks[-1].draft)
        return chunks

    def _draft(self, stream: Stream, rows: int) -> Sequence[int]:
        if stream.drafter is None:
            return ()
        return stream.drafter.propose(stream.tokens, stream.max_tokens - stream.output_len - 1, rows, self._costs)

    def _following(self, begun: Begun) -> list[Stream]:
        """The streams of the round behind one whose tokens aren't known: those that go on whatever they are.

        None where a prompt step or a draft comes first.
        """
        if self._scheduler.filling or any(chunk.draft for chunk in begun.chunks):
            return []
        streams = [
            chunk.stream
            for chunk, live in zip(begun.chunks, begun.live, strict=True)
            if live and chunk.stream.output_len + 1 < chunk.stream.max_tokens
        ]
        if any(s.drafter and s.drafter.may_propose(s.tokens, len(streams), self._costs) for s in streams):
            return []
        return streams
