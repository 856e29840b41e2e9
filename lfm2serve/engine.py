"""The engine: one thread that admits, runs prompt steps and decode rounds, and hands tokens out.

Each turn of its loop: take commands, admit, one prompt step, one decode round, deliver. Streams are only touched by
that thread; `submit`, `cancel`, `census` and `stats` may be called from any.
"""

from __future__ import annotations

import itertools
import logging
import queue
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from lfm2serve.draws import DrawTable
from lfm2serve.errors import ContextLengthExceeded, EngineDead, InvalidRequest, Lfm2Error, RequestTooLarge
from lfm2serve.memory.pages import SLACK_ROWS, Census, PagePool
from lfm2serve.memory.states import StreamStates
from lfm2serve.model import Array, Model
from lfm2serve.sampling import SamplingParams
from lfm2serve.scheduler import Chunk, Scheduler
from lfm2serve.stream import Sink, Stream, StreamEvent, TokenLogprobs

log = logging.getLogger("lfm2serve.engine")

SCORE_ROWS = 64  # prompt rows whose logits are held at once for their log-probabilities


@dataclass(slots=True)
class EngineCounters:
    """What the engine has done since it started. host_s: time of decode rounds outside the backend's operations."""

    prompt_tokens: int = 0
    generated_tokens: int = 0
    prompt_steps: int = 0
    decode_rounds: int = 0
    decode_rows: int = 0
    decode_s: float = 0.0
    host_s: float = 0.0
    failed_steps: int = 0
    failed_streams: int = 0
    census_errors: int = 0


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Streams by state, pages, and the counters, at one moment."""

    waiting: int
    filling: int
    running: int
    census: Census
    counters: EngineCounters = field(default_factory=EngineCounters)


class Engine:
    """Serves streams of tokens from one model over one page pool.

    slots: streams at once. context: longest prompt + reply. vocab: entries of the tokenizer (ids at or above it are
    refused in prompts and never drawn). eos_token_ids: end every reply that doesn't set ignore_eos.
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
    ) -> None:
        self.context = context
        self.vocab = vocab
        self.fault: str | None = None
        self._model = model
        self._states = states
        self._pool = pool
        self._eos = frozenset(eos_token_ids)
        self._default_max_tokens = default_max_tokens
        self._scheduler = Scheduler(
            pool, slots, prompt_chunk=prompt_chunk, largest_chunk=largest_chunk, max_gap_s=max_gap_ms / 1e3
        )
        self._draws = DrawTable(slots, model.head.shape[0], vocab)
        self._counters = EngineCounters()
        self._streams: dict[int, Stream] = {}
        self._outbox: list[tuple[Stream, StreamEvent]] = []
        self._commands: queue.SimpleQueue[Stream | int | None] = queue.SimpleQueue()
        self._ids = itertools.count(1)
        self._book = threading.Lock()  # guards the scheduler, the pool and _streams against readers on other threads
        self._open = 0
        self._closing = False
        self._settled = threading.Condition()
        self._backend_s = 0.0
        self._thread = threading.Thread(target=self._run, name="lfm2serve-engine", daemon=True)
        self._thread.start()

    # ---- for any thread ----

    @property
    def alive(self) -> bool:
        return self._thread.is_alive() and self.fault is None and not self._closing

    def submit(
        self, prompt_token_ids: Sequence[int], params: SamplingParams, sink: Sink, *, seed: int, choice: int = 0
    ) -> int:
        """Queue one reply; its events go to `sink` on the engine's thread. Returns the stream's id.

        InvalidRequest: a bad token id or an empty prompt. ContextLengthExceeded: longer than the context.
        RequestTooLarge: needs more pages than the pool has. EngineDead: closed, or stopped by a fault.
        """
        max_tokens = self.check(prompt_token_ids, params)
        with self._settled:
            if not self.alive:
                raise EngineDead(self._why_dead())
            stream = Stream(
                next(self._ids), prompt_token_ids, params, sink,
                max_tokens=max_tokens, seed=seed, choice=choice, eos_token_ids=self._eos,
            )  # fmt: skip
            self._open += 1
            self._commands.put(stream)
        return stream.id

    def cancel(self, stream_id: int) -> None:
        """End a stream soon with finish_reason "abort"; harmless when it has ended or never was."""
        self._commands.put(stream_id)

    def census(self) -> Census:
        with self._book:
            return self._pool.census()

    def stats(self) -> EngineStats:
        with self._book:
            s = self._scheduler
            counters = EngineCounters(**{name: getattr(self._counters, name) for name in EngineCounters.__slots__})
            return EngineStats(len(s.waiting), len(s.filling), len(s.running), self._pool.census(), counters)

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
        self.__dict__.pop("_model", None)
        self.__dict__.pop("_states", None)

    def _why_dead(self) -> str:
        return f"the engine stopped after a fault: {self.fault}" if self.fault else "the engine is closed"

    def check(self, prompt: Sequence[int], params: SamplingParams) -> int:
        """The reply limit of a request that can be served; raises for one that can't."""
        count, wanted = len(prompt), params.max_tokens
        if count == 0:
            raise InvalidRequest("the prompt has no tokens", param="prompt")
        for token in prompt:
            if not 0 <= token < self.vocab:
                raise InvalidRequest(f"prompt: token id {token} is outside the vocabulary of {self.vocab}", param="prompt")
        for token in (*params.stop_token_ids, *(params.logit_bias or ())):
            if token >= self.vocab:
                name = "stop_token_ids" if token in params.stop_token_ids else "logit_bias"
                raise InvalidRequest(f"{name}: token id {token} is outside the vocabulary of {self.vocab}", param=name)
        least = 1 if wanted is None else wanted
        if wanted == 0 and params.prompt_logprobs is None:
            raise InvalidRequest("max_tokens=0 gives nothing without prompt_logprobs", param="max_tokens")
        if count + least > self.context:
            asked = f" and a reply of {wanted}" if wanted is not None else ""
            raise ContextLengthExceeded(
                f"the context is {self.context} tokens; the prompt has {count}{asked}: {count + least} at least",
                param="max_tokens" if count < self.context else "prompt",
            )
        room = self._pool.capacity_rows - SLACK_ROWS - count
        if room < least:
            raise RequestTooLarge(
                f"prompt and reply need {count + least + SLACK_ROWS} rows; the page pool holds {self._pool.capacity_rows}",
                param="max_tokens" if wanted else "prompt",
            )
        if wanted is not None:
            return wanted
        return max(params.min_tokens, min(self.context - count, self._default_max_tokens, room))

    # ---- the engine's thread ----

    def _run(self) -> None:
        try:
            while self._take_commands():
                self._turn()
        except BaseException as error:  # the thread ends here whatever it was: say so and let nobody wait
            self.fault = f"{type(error).__name__}: {error}"
            log.exception("the engine's thread stopped")
        self._end_all()

    def _take_commands(self) -> bool:
        """Take what other threads asked for; waits while there is nothing to do. False: time to end."""
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
                if isinstance(command, Stream):
                    self._streams[command.id] = command
                    self._scheduler.waiting.append(command)
                elif command in self._streams:
                    self._finish(self._streams[command], "abort")
        self._deliver()
        return True

    def _turn(self) -> None:
        with self._book:
            for stream in self._scheduler.admit():
                assert stream.lease is not None
                self._states.open(stream.slot, stream.lease)
                self._draws.open(stream)
            chunks = self._scheduler.next_chunks()
        if chunks:
            started = time.perf_counter()
            self._step(chunks)
            rows = sum(chunk.rows for chunk in chunks)
            self._scheduler.pace.prompt_step(rows, time.perf_counter() - started)
            self._counters.prompt_steps += 1
            self._deliver()
        chunks = [Chunk(stream, 1) for stream in self._scheduler.running]
        if chunks:
            started, self._backend_s = time.perf_counter(), 0.0
            self._step(chunks)
            elapsed = time.perf_counter() - started
            self._scheduler.pace.decode_round(elapsed)
            counters = self._counters
            counters.decode_rounds += 1
            counters.decode_rows += len(chunks)
            counters.decode_s += elapsed
            counters.host_s += elapsed - self._backend_s
            self._deliver()

    def _step(self, chunks: list[Chunk]) -> None:
        """Run rows of several streams; draw a token for each stream whose rows are complete."""
        try:
            self._run_rows(chunks)
        except Exception as error:
            self._failed(chunks, error)

    def _run_rows(self, chunks: list[Chunk]) -> None:
        batch = self._states.pack(
            [(c.stream.slot, c.stream.rows_done, c.stream.next_rows(c.rows)) for c in chunks]
        )
        started = time.perf_counter()
        h = self._model.forward(batch, self._states)
        self._backend_s += time.perf_counter() - started
        for i, chunk in enumerate(chunks):
            if chunk.stream.scoring:
                self._score(chunk, h[batch.seg_start[i] : batch.seg_start[i + 1]])
        complete = [i for i, chunk in enumerate(chunks) if chunk.completes and chunk.stream.max_tokens > 0]
        drawn = self._draw([chunks[i].stream for i in complete], h[batch.seg_start[1:][complete] - 1]) if complete else []
        with self._book:
            for chunk in chunks:
                self._commit(chunk)
            for i, (token, logprobs) in zip(complete, drawn, strict=True):
                self._take_token(chunks[i].stream, token, logprobs)

    def _draw(self, streams: list[Stream], h: Array) -> list[tuple[int, TokenLogprobs | None]]:
        rows = self._draws.rows(streams)
        started = time.perf_counter()
        backend = self._model.backend
        result = backend.sample(self._model.logits(h), rows)
        self._backend_s += time.perf_counter() - started
        logprobs = _logprobs(result.logprob, result.rank, result.top_ids, result.top_logprobs, rows.top_n)
        return list(zip(result.token.tolist(), logprobs, strict=True))

    def _score(self, chunk: Chunk, h: Array) -> None:
        """Log-probabilities of the prompt tokens that follow this chunk's rows."""
        stream, scored = chunk.stream, chunk.stream.scored
        assert scored is not None and stream.params.prompt_logprobs is not None
        del scored[stream.rows_done + 1 :]
        last = min(chunk.rows, stream.prompt_len - 1 - stream.rows_done)
        top = min(stream.params.prompt_logprobs, self.vocab)
        for start in range(0, last, SCORE_ROWS):
            end = min(last, start + SCORE_ROWS)
            first = stream.rows_done + 1 + start
            targets = np.array(stream.tokens[first : first + end - start], np.int32)
            logits = self._model.logits(h[start:end])
            top_n = np.full(end - start, top, np.int32)
            scored.extend(_logprobs(*self._model.backend.token_logprobs(logits, targets, top_n, self.vocab), top_n))

    def _commit(self, chunk: Chunk) -> None:
        """Count a chunk's rows as run; a stream whose prompt is through decodes from now on."""
        stream = chunk.stream
        if stream.rows_done < stream.prompt_len:
            self._counters.prompt_tokens += min(chunk.rows, stream.prompt_len - stream.rows_done)
        completes = chunk.completes
        stream.rows_done += chunk.rows
        if not completes:
            return
        if stream in self._scheduler.filling:
            self._scheduler.filled(stream)
            if stream.scored is not None and stream.output_len == 0:
                self._emit(stream, stream.event(prompt_logprobs=stream.scored))
        if stream.max_tokens == 0:
            self._finish(stream, "length")

    def _take_token(self, stream: Stream, token: int, logprobs: TokenLogprobs | None) -> None:
        stream.append(token)
        self._draws.record(stream, token)
        self._counters.generated_tokens += 1
        event = stream.event(tokens=[token], logprobs=None if logprobs is None else [logprobs])
        if stream.finish_reason is None:
            self._emit(stream, event)
        else:
            self._finish(stream, stream.finish_reason, event)

    def _failed(self, chunks: list[Chunk], error: Exception) -> None:
        """A step raised: its streams run again by themselves; one that fails alone ends with an error."""
        self._counters.failed_steps += 1
        with self._book:
            if len(chunks) == 1:
                stream = chunks[0].stream
                log.error("stream %d failed: %s: %s", stream.id, type(error).__name__, error, exc_info=error)
                self._counters.failed_streams += 1
                known = error if isinstance(error, Lfm2Error) else Lfm2Error(f"{type(error).__name__}: {error}")
                self._finish(stream, "error", stream.event(error=known))
                return
            log.warning("a step of %d streams failed (%s: %s); they run again alone", len(chunks), type(error).__name__, error)
            for chunk in chunks:
                self._scheduler.restart(chunk.stream)

    def _finish(self, stream: Stream, reason: str, event: StreamEvent | None = None) -> None:
        """End a stream: pages and slot are free before its last event is seen."""
        slot = stream.slot
        self._scheduler.remove(stream)
        if slot >= 0:
            self._states.close(slot)
        del self._streams[stream.id]
        stream.finish_reason = reason
        stream.metrics.finished = time.monotonic()
        event = event or stream.event()
        event.finish_reason, event.stop_reason = reason, stream.stop_reason
        self._emit(stream, event)

    def _emit(self, stream: Stream, event: StreamEvent) -> None:
        self._outbox.append((stream, event))

    def _deliver(self) -> None:
        outbox, self._outbox = self._outbox, []
        for stream, event in outbox:
            try:
                stream.sink(event)
            except Exception:
                log.exception("the receiver of stream %d failed; the stream is cancelled", stream.id)
                self._commands.put(stream.id)
            if event.finish_reason is not None:
                with self._settled:
                    self._open -= 1
                    self._settled.notify_all()

    def _check_census(self) -> None:
        """Nothing is in flight: every page must be free."""
        census = self._pool.census()
        if not census.clean:
            self._counters.census_errors += 1
            log.error("idle, and the page pool isn't clean: %s", census)

    def _end_all(self) -> None:
        """Abort what is left, also what was submitted meanwhile."""
        with self._settled:
            self._closing = True
        while True:
            try:
                command = self._commands.get_nowait()
            except queue.Empty:
                break
            if isinstance(command, Stream):
                self._streams[command.id] = command
                self._scheduler.waiting.append(command)
        dead = EngineDead(self._why_dead())
        with self._book:
            for stream in list(self._streams.values()):
                self._finish(stream, "error" if self.fault else "abort", stream.event(error=dead if self.fault else None))
        self._deliver()
        self._check_census()


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
