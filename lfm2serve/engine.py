"""The engine: one thread that admits, runs prompt steps and decode rounds, and hands tokens out.

Each turn of its loop: take commands, admit, one prompt step, one decode round, deliver. Streams are only touched by
that thread; the methods of the first half may be called from any.
"""

from __future__ import annotations

import itertools
import logging
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from copy import deepcopy
from functools import partial

from lfm2serve.counters import CacheStats, EngineCounters, EngineStats
from lfm2serve.decoding import Decoding
from lfm2serve.draws import DrawTable
from lfm2serve.errors import ArenaMemory, EngineDead, Lfm2Error
from lfm2serve.keeping import Keeper
from lfm2serve.limits import Limits
from lfm2serve.memory.marks import raw_marks
from lfm2serve.memory.pages import SLACK_ROWS, Census, PagePool
from lfm2serve.memory.prompt_cache import Mark, PromptCache
from lfm2serve.memory.states import StreamStates
from lfm2serve.model import Model
from lfm2serve.sampling import SamplingParams
from lfm2serve.scheduler import Chunk, Scheduler
from lfm2serve.steps import Drawn, StepRunner
from lfm2serve.stream import Sink, Stream, StreamEvent, TokenLogprobs
from lfm2serve.structured import Constraint

log = logging.getLogger("lfm2serve.engine")

SWITCH_S = 5e-4
MAX_BACKGROUND = 16  # passes that wait; the oldest is given up


class Engine:
    """Serves streams of tokens from one model over one page pool.

    slots: streams at once. context: longest prompt + reply. vocab: entries of the tokenizer (ids at or above it are
    refused in prompts and never drawn). eos_token_ids: end every reply that doesn't set ignore_eos. Kernels that aren't
    in the disk cache are compiled before the constructor returns.
    """

    def __init__(
        self,
        model: Model,
        states: StreamStates,
        pool: PagePool,
        *,
        slots: int,
        context: int,
        vocab: int,
        eos_token_ids: Iterable[int],
        default_max_tokens: int = 4096,
        prompt_chunk: int | None = None,
        largest_chunk: int = 512,
        max_gap_ms: float = 50.0,
        drafts: bool = True,
        warm_pass: bool = True,
        graphs: bool = True,
    ) -> None:
        self.context = context
        self.vocab = vocab
        self.fault: str | None = None
        self.turn_started: float | None = None  # time.monotonic() of the turn that runs now, for who watches
        self.arena = states.arena
        self._states = states
        self._pool = pool
        self._eos = frozenset(eos_token_ids)
        self._limits = Limits(context, vocab, pool.capacity_rows - SLACK_ROWS, default_max_tokens)
        self._scheduler = Scheduler(
            pool, states.arena, slots,
            prompt_chunk=prompt_chunk, largest_chunk=largest_chunk, max_gap_s=max_gap_ms / 1e3,
        )  # fmt: skip
        self._draws = DrawTable(model.backend, slots, model.vocab_rows, vocab)
        self._steps = StepRunner(model, states, self._draws, graphs)
        self._keeper = Keeper(PromptCache(states.snapshot_pages, states.shape.state_bytes), states)
        self._keeps = states.snapshot_pages > 0
        self._drafts = drafts
        self._warm_pass = warm_pass
        self._counters = EngineCounters()
        self._decoding = Decoding(
            self._steps, self._scheduler, self._counters, run=self._step, commit=self._commit, failed=self._failed
        )
        self._streams: dict[int, Stream] = {}
        self._outbox: list[tuple[Stream, StreamEvent]] = []
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._ids = itertools.count(1)
        self._book = threading.Lock()  # guards the scheduler, the pool and _streams against readers on other threads
        self._open = 0
        self._closing = False
        self._settled = threading.Condition()
        self._steps.hand_over = self._deliver
        self._steps.warm_up()
        self._thread = threading.Thread(target=self._run, name="lfm2serve-engine", daemon=True)
        self._thread.start()

    # ---- for any thread ----

    @property
    def alive(self) -> bool:
        return self._thread.is_alive() and self.fault is None and not self._closing

    def submit(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        sink: Sink,
        *,
        seed: int,
        choice: int = 0,
        marks: Sequence[tuple[int, Mark]] | None = None,
        prompt_cache: bool = True,
        draft: bool = True,
        constraint: Constraint | None = None,
    ) -> int:
        """Queue one reply; its events go to `sink` on the engine's thread. Returns the stream's id.

        constraint: which tokens may be drawn; the stream's own, used on the engine's thread only.
        marks: where a chat's prompt is worth keeping; after its reply the caller says `returned` or `forget`. None: a
        raw prompt, kept a token before its end. prompt_cache False: neither resumes nor keeps. InvalidRequest: a bad
        token id or an empty prompt. ContextLengthExceeded: longer than the context. RequestTooLarge: needs more pages
        than the pool has. EngineDead: closed, or stopped by a fault.
        """
        stream = Stream(
            next(self._ids), prompt_token_ids, params, sink,
            max_tokens=self.check(prompt_token_ids, params), seed=seed, choice=choice, eos_token_ids=self._eos,
            marks=raw_marks(len(prompt_token_ids)) if marks is None else marks,
            keeps=prompt_cache and self._keeps,
            chat=marks is not None,
            drafts=draft and self._drafts,
            constraint=constraint,
        )  # fmt: skip
        with self._settled:
            if not self.alive:
                raise EngineDead(self._why_dead())
            self._open += 1
            self._commands.put(partial(self._arrive, stream))
        return stream.id

    def cancel(self, stream_id: int, *, whole: bool = False) -> None:
        """End a stream soon with finish_reason "abort"; harmless when it has ended or never was.

        whole: its reply is complete as it is, since a stop string ended it; it ends with "stop", and its end is kept.
        """
        self._commands.put(partial(self._cancel, stream_id, "stop" if whole else "abort"))

    def returned(self, stream_id: int, token_ids: Sequence[int]) -> None:
        """Say how a chat goes on: the conversation with this stream's reply, as the client will send it back, without
        a generation prompt. What the next turn resumes is kept, or prepared in the background. InvalidRequest: a bad
        token id."""
        self._limits.check_tokens(token_ids)
        self._tell(partial(self._returned, stream_id, list(token_ids)))

    def forget(self, stream_id: int) -> None:
        """Say that nobody will send this stream's reply back."""
        self._tell(partial(self._keeper.forget, stream_id))

    def _tell(self, command: Callable[[], None]) -> None:
        """Queue what a caller says of a reply; `drain` waits until it is heard."""

        def hear() -> None:
            try:
                command()
            finally:
                self._closed_one()

        with self._settled:
            if self.alive:
                self._open += 1
                self._commands.put(hear)

    def clear_prompt_cache(self) -> int:
        """Drop every kept state that isn't in use; returns how many. EngineDead when the engine has stopped."""
        done: Future[int] = Future()
        with self._settled:
            if not self.alive:
                raise EngineDead(self._why_dead())
            self._commands.put(lambda: done.set_result(self._keeper.clear()))
        return done.result()

    def census(self) -> Census:
        with self._book:
            return self._pool.census()

    def stats(self) -> EngineStats:
        with self._book:
            s = self._scheduler
            counters = EngineCounters(**{name: getattr(self._counters, name) for name in EngineCounters.__slots__})
            streams = (len(s.waiting), len(s.filling), len(s.running), len(s.preparing))
            return EngineStats(*streams, self._pool.census(), self._cache_stats(), counters)

    def kept_states(self) -> list[tuple[Mark, int, int]]:
        """(kind of mark, tokens, snapshot pages) of each kept state that can hit, the oldest first."""
        with self._book:
            return [(state.mark, state.at, state.pages) for state in self._keeper.cache.states if state.ready]

    def _cache_stats(self) -> CacheStats:
        keeper = self._keeper
        cache = keeper.cache
        sizes = (len(cache.states), cache.held_bytes, cache.spare_bytes)
        return CacheStats(*sizes, keeper.copies, keeper.copy_s, deepcopy(cache.counters))

    def drain(self, timeout: float | None = None) -> bool:
        """Wait until every stream that was submitted has ended; False when that took longer than `timeout` s."""
        with self._settled:
            return self._settled.wait_for(lambda: self._open == 0, timeout)

    def close(self) -> None:
        """Cancel everything, end the thread and let go of weights and pages. Idempotent."""
        with self._settled:
            self._closing = True
        self._commands.put(None)
        self._thread.join()
        self.arena.close()
        for name in ("_steps", "_states"):
            self.__dict__.pop(name, None)
        self._keeper.close()

    def _why_dead(self) -> str:
        return f"the engine stopped after a fault: {self.fault}" if self.fault else "the engine is closed"

    def check(self, prompt: Sequence[int], params: SamplingParams) -> int:
        """The reply limit of a request that can be served; raises for one that can't."""
        return self._limits.check(prompt, params)

    # ---- the engine's thread ----

    def _run(self) -> None:
        # other threads' Python must not keep a round waiting for 5 ms; this is the whole process's setting
        sys.setswitchinterval(min(sys.getswitchinterval(), SWITCH_S))
        try:
            self._steps.attach()
            while self._take_commands():
                self.turn_started = time.monotonic()
                self._turn()
                self.turn_started = None
        except BaseException as error:  # the thread ends here whatever it was: say so and let nobody wait
            self.fault = f"{type(error).__name__}: {error}"
            log.exception("the engine's thread stopped")
        self._end_all()

    def _take_commands(self) -> bool:
        """Do what other threads asked for; waits while there is nothing else to do. False: time to end."""
        idle = self._scheduler.idle
        if idle:
            self._check_census()
        while True:
            try:
                command = self._commands.get(block=idle)
            except queue.Empty:
                break
            idle = False
            if command is None:
                return False
            with self._book:
                command()
        self._deliver_unless_round()
        return True

    def _arrive(self, stream: Stream) -> None:
        scheduler = self._scheduler
        self._streams[stream.id] = stream
        (scheduler.background if stream.background else scheduler.waiting).append(stream)
        if stream.keeps and not stream.background:
            for late in scheduler.preparing:  # the next turn is here already, and keeps states of its own
                if stream.tokens[: late.prompt_len] == late.tokens:
                    self._finish(late, "abort")

    def _cancel(self, stream_id: int, reason: str) -> None:
        if stream_id in self._streams:
            self._finish(self._streams[stream_id], reason)

    def _returned(self, stream_id: int, tokens: list[int]) -> None:
        """Keep a reply's end, or queue the pass that prepares the next turn's start."""
        if not self._keeper.returned(stream_id, tokens) or not self._warm_pass:
            return
        rows = len(tokens) + SLACK_ROWS
        if len(tokens) >= self.context or rows > self._pool.capacity_rows or self._closing:
            return
        self._counters.warm_passes += 1
        self._prepare(tokens)
        if len(self._scheduler.background) > MAX_BACKGROUND:
            self._finish(self._scheduler.background[0], "abort")

    def _prepare(self, tokens: list[int]) -> None:
        """Queue the background pass that keeps the state behind these tokens."""
        stream = Stream(
            next(self._ids), tokens, SamplingParams(), _nobody,
            max_tokens=0, seed=0, choice=0, eos_token_ids=self._eos,
            marks=[(len(tokens), Mark.REPLY)], keeps=True, background=True,
        )  # fmt: skip
        with self._settled:
            self._open += 1
        self._arrive(stream)

    def _admit(self) -> None:
        """Give leases and slots to those who can have them; what is in their way and only prepares, gives way."""
        scheduler = self._scheduler
        admitted = self._seated()
        if scheduler.waiting and scheduler.warming is not None:
            put_off = scheduler.warming
            self._finish(put_off, "abort")
            admitted += self._seated()
            self._prepare(put_off.tokens)
        try:
            warming = scheduler.admit_background()
        except ArenaMemory:
            warming = None
            self._finish(scheduler.background[0], "abort")
        for stream in [*admitted, *([warming] if warming else [])]:
            assert stream.lease is not None
            self._states.open(stream.slot, stream.lease)
            self._draws.open(stream)
            self._keeper.admit(stream)
        if warming and not warming.planned:  # its state is there already, or there is no room for it
            self._finish(warming, "abort")

    def _seated(self) -> list[Stream]:
        """Who has a lease and a slot now; the first in line fails where the device has no memory for it."""
        scheduler = self._scheduler
        try:
            return scheduler.admit()
        except ArenaMemory as error:
            stream = scheduler.waiting[0]
            self._finish(stream, "error", stream.event(error=error))
            return []

    def _turn(self) -> None:
        with self._book:
            self._admit()
            chunks = self._scheduler.next_chunks()
        started, waits = time.perf_counter(), any(chunk.completes for chunk in chunks)
        if chunks:
            self._decoding.collect()
            self._deliver()
            started = time.perf_counter()
            self._step(chunks)
            self._counters.prompt_steps += 1
        self._deliver_unless_round()
        pace, running = self._scheduler.pace, bool(self._scheduler.running)
        if running:
            self._decoding.round(behind_prompt=bool(chunks) and not waits)
            self._deliver_unless_round()
        if chunks and (running or waits):  # else the device may not be through with the step
            elapsed = time.perf_counter() - started - (pace.round_s if running else 0.0)
            pace.prompt_step(sum(chunk.rows for chunk in chunks), max(elapsed, 0.0))

    def _step(self, chunks: list[Chunk]) -> None:
        """Run rows of several streams; draw tokens for each stream whose rows are complete."""
        try:
            self._run_rows(chunks)
        except Exception as error:
            self._failed(chunks, error)

    def _run_rows(self, chunks: list[Chunk]) -> None:
        taps = self._keeper.taps(chunks)

        def keep() -> None:
            with self._book:
                self._keeper.keep(taps)

        self._commit(chunks, self._steps.run(chunks, [tap.row for tap in taps], keep))

    def _commit(self, chunks: Sequence[Chunk], drawn: Sequence[list[Drawn]]) -> None:
        """Count the rows of chunks as run, and give their streams what was drawn."""
        with self._book:
            for chunk in chunks:
                self._count_rows(chunk)
            for chunk, tokens in zip(chunks, drawn, strict=True):
                if tokens:
                    self._take_drawn(chunk, tokens)

    def _count_rows(self, chunk: Chunk) -> None:
        """Count a chunk's rows as run; a stream whose prompt is through decodes from now on."""
        stream = chunk.stream
        if stream.rows_done < stream.prompt_len:
            self._counters.prompt_tokens += min(chunk.rows, stream.prompt_len - stream.rows_done)
        completes = chunk.completes
        stream.rows_done += chunk.rows
        stream.rows_written = max(stream.rows_written, stream.rows_done + len(chunk.draft))
        if not completes:
            return
        if stream in self._scheduler.filling:  # a background pass never decodes
            self._scheduler.filled(stream)
            if stream.scored is not None and stream.output_len == 0:
                self._emit(stream, stream.event(prompt_logprobs=stream.scored))
        if stream.max_tokens == 0:
            self._finish(stream, "length")

    def _take_drawn(self, chunk: Chunk, drawn: list[Drawn]) -> None:
        """Append what was drawn behind a chunk, as long as its draft tokens are what the model draws itself."""
        stream, draft = chunk.stream, chunk.draft
        tokens: list[int] = []
        logprobs: list[TokenLogprobs] = []
        for i, (token, logprob) in enumerate(drawn):
            stream.append(token)
            self._draws.record(stream, token)
            tokens.append(token)
            if logprob is not None:
                logprobs.append(logprob)
            if stream.finish_reason is not None or i == len(draft) or token != draft[i]:
                break
            stream.rows_done += 1  # the draft token's row holds what this token's row would
        counters, accepted = self._counters, len(tokens) - 1
        counters.generated_tokens += len(tokens)
        if draft and stream.drafter is not None:
            stream.drafter.learn(len(draft), accepted, len(stream.tokens))
            stream.metrics.draft_tokens += len(draft)
            stream.metrics.accepted_tokens += accepted
            counters.draft_tokens += len(draft)
            counters.accepted_tokens += accepted
        event = stream.event(tokens=tokens, logprobs=logprobs or None)
        if stream.finish_reason is None:
            self._emit(stream, event)
        else:
            self._finish(stream, stream.finish_reason, event)

    def _failed(self, chunks: Sequence[Chunk], error: Exception) -> None:
        """A step raised: its streams run again by themselves; one that fails alone ends with an error.

        An error that the backend calls fatal is the engine's end.
        """
        if getattr(error, "fatal", False):
            raise error
        self._counters.failed_steps += 1
        alone = len(chunks) == 1
        chunks = [chunk for chunk in chunks if chunk.stream.slot >= 0]  # the others have ended
        with self._book:
            if alone and chunks:
                stream = chunks[0].stream
                log.error("stream %d failed: %s: %s", stream.id, type(error).__name__, error, exc_info=error)
                self._counters.failed_streams += 1
                # what went wrong inside is for the log, not for whoever asked
                known = error if isinstance(error, Lfm2Error) else Lfm2Error("the reply failed inside the engine")
                self._finish(stream, "error", stream.event(error=known))
                return
            log.warning(
                "a step of %d streams failed (%s: %s); they run again alone", len(chunks), type(error).__name__, error
            )
            for chunk in chunks:
                self._scheduler.restart(chunk.stream)

    def _finish(self, stream: Stream, reason: str, event: StreamEvent | None = None) -> None:
        """End a stream: pages and slot are free before its last event is seen."""
        slot = stream.slot
        if slot >= 0:
            self._keeper.end(stream, finished=reason in ("stop", "length"))
            self._states.close(slot)
        self._scheduler.remove(stream)
        del self._streams[stream.id]
        stream.finish_reason = reason
        stream.metrics.finished = time.monotonic()
        event = event or stream.event()
        event.finish_reason, event.stop_reason = reason, stream.stop_reason
        self._emit(stream, event)

    def _emit(self, stream: Stream, event: StreamEvent) -> None:
        self._outbox.append((stream, event))

    def _deliver_unless_round(self) -> None:
        """Deliver now, unless a round follows that will do so at a better moment."""
        if not self._steps.hands_over(len(self._scheduler.running)):
            self._deliver()

    def _deliver(self) -> None:
        outbox, self._outbox = self._outbox, []
        for stream, event in outbox:
            try:
                stream.sink(event)
            except Exception:
                log.exception("the receiver of stream %d failed; the stream is cancelled", stream.id)
                self.cancel(stream.id)
            if event.finish_reason is not None:
                self._closed_one()

    def _closed_one(self) -> None:
        with self._settled:
            self._open -= 1
            self._settled.notify_all()

    def _check_census(self) -> None:
        """Nothing is in flight: every page must be free, and every snapshot page that isn't must be a kept state's."""
        census, kept = self._pool.census(), self._keeper.census()
        if not (census.clean and kept.clean):
            self._counters.census_errors += 1
            log.error("idle, and memory isn't accounted for: %s, %s", census, kept)

    def _end_all(self) -> None:
        """Abort what is left, also what was submitted meanwhile."""
        with self._settled:
            self._closing = True
        while True:
            try:
                command = self._commands.get_nowait()
            except queue.Empty:
                break
            if command is not None:
                with self._book:
                    command()
        dead = EngineDead(self._why_dead())
        with self._book:
            for stream in list(self._streams.values()):
                self._finish(
                    stream, "error" if self.fault else "abort", stream.event(error=dead if self.fault else None)
                )
        self._deliver()
        self._check_census()


def _nobody(event: StreamEvent) -> None:
    """The receiver of a background pass."""
