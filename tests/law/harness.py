"""Runs requests through a real engine in a chosen way and keeps the tokens and the bits of every logit row."""

from __future__ import annotations

import hashlib
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from pathlib import Path
from unittest.mock import patch

import numpy as np

from kernels_numba.batch import FED_BACK, Batch, SampleResult, SampleRows
from kernels_numba.cpu import CpuBackend
from lfm2serve.checkpoint import Checkpoint
from lfm2serve.engine import Engine
from lfm2serve.memory import prompt_cache, states
from lfm2serve.memory.pages import SLACK_ROWS, Lease, PagePool, pages_for
from lfm2serve.memory.prompt_cache import Mark
from lfm2serve.memory.states import StreamStates
from lfm2serve.model import Array, Model
from lfm2serve.sampling import SamplingParams
from lfm2serve.stream import StreamEvent, StreamMetrics, TokenLogprobs

CONTEXT = 1500
VOCAB = 400


class RecordingBackend(CpuBackend):
    """A CPU backend that keeps a hash of each logit row that a token is drawn from, by (seed, choice, position).

    The last one counts: behind a draft token that was refused a row is drawn again, from what was drawn before it.
    """

    def __init__(self, *args: object) -> None:
        super().__init__(*args)  # type: ignore[arg-type]
        self.bits: dict[tuple[int, int, int], str] = {}
        self.copies = 0
        self.failing: frozenset[int] = frozenset()  # calls of `copy` that raise, from 1
        self.queued = False
        self.rounds: QueuedRounds | None = None

    def copy(self, target: Array, source: Array, plan: Sequence[tuple[int, int, int]]) -> None:  # type: ignore[override]
        self.copies += 1
        if self.copies in self.failing:
            raise RuntimeError("injected copy failure")
        super().copy(target, source, plan)  # type: ignore[arg-type]

    def sample(self, logits: Array, rows: SampleRows, meanwhile: Callable[[], object] | None = None) -> SampleResult:
        logits = self.read(logits)
        for i in range(len(logits)):
            key = (int(rows.seed[i]), int(rows.choice[i]), int(rows.position[i]))
            self.bits[key] = hashlib.blake2b(np.ascontiguousarray(logits[i]).tobytes(), digest_size=8).hexdigest()
        return super().sample(logits, rows, meanwhile)

    def decode_rounds(  # type: ignore[override]
        self, forward: Callable[[Batch, Array], Array], tables: object, *, width: int, slots: int, **_: object
    ) -> QueuedRounds | None:
        self.rounds = QueuedRounds(self, forward, slots, width) if self.queued else None
        return self.rounds

    def give(self, request: Request, result: Result) -> None:
        """Hand a result the hashes of the rows that its tokens were drawn from."""
        drawn = range(len(request.prompt), len(request.prompt) + len(result.tokens))
        result.bits = {pos: bits for (seed, _, pos), bits in self.bits.items() if seed == request.seed and pos in drawn}


class QueuedRounds:
    """Decode rounds as a GPU's: the network runs when it is begun, in order, and takes tokens that the round before
    drew from there. `began` counts those whose tokens the host didn't know."""

    def __init__(self, backend: CpuBackend, forward: Callable[[Batch, Array], Array], slots: int, width: int):
        self.drawn = np.full(slots, -1, np.int32)
        self.began = 0
        self.failing: frozenset[int] = frozenset()  # results that can't be taken, from 1
        self._backend, self._forward = backend, forward
        self._logits = np.empty((64, width), np.float32)
        self._undrawn: Queued | None = None
        self._taken = 0

    def fits(self, batch: Batch) -> bool:
        return len(batch.tokens) <= len(self._logits)

    def begin(self, batch: Batch) -> Queued:
        fed_back = batch.tokens == FED_BACK
        self.began += bool(fed_back.any())
        tokens = np.where(fed_back, self.drawn[batch.seg_slot[batch.row_segment]], batch.tokens).astype(np.int32)
        assert (tokens >= 0).all(), "nothing was drawn for the slot"
        self._forward(batch._replace(tokens=tokens), self._logits[: len(tokens)])
        self._undrawn = Queued(self, len(tokens))
        return self._undrawn

    def draw(self, begun: Queued, rows: SampleRows) -> None:
        assert begun is self._undrawn, "rounds are drawn in the order in which they begin"
        ended = rows.slot < 0
        rows = rows._replace(seed=np.where(ended, np.uint64(2**64 - 1), rows.seed), slot=np.where(ended, 0, rows.slot))
        begun.drawn = self._backend.sample(self._logits[: begun.count], rows)
        self.drawn[rows.slot[~ended]] = begun.drawn.token[~ended]

    def taken(self) -> None:
        self._taken += 1
        if self._taken in self.failing:
            self._undrawn = None
            raise RuntimeError("injected fault of a round")


@dataclass
class Queued:
    rounds: QueuedRounds
    count: int
    drawn: SampleResult | None = None
    network_done: bool = True

    def result(self) -> SampleResult:
        self.rounds.taken()
        assert self.drawn is not None
        return self.drawn


class FaultyModel(Model):
    """A model whose step fails whenever a row with one of `poison`'s tokens at position 0 is in the batch."""

    poison: frozenset[int] = frozenset()

    def forward(self, batch: Batch, states: StreamStates, tap_rows: object = None) -> Array:
        if self.poison and bool(np.isin(batch.tokens[batch.positions == 0], list(self.poison)).any()):
            raise RuntimeError("injected fault")
        return super().forward(batch, states, tap_rows)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Request:
    """One reply to compare; `seed` names it in the recording, so give each its own."""

    prompt: tuple[int, ...]
    seed: int
    max_tokens: int = 12
    temperature: float = 0.0
    cancel_after: int | None = None  # tokens after which a neighbour is cancelled
    penalties: bool = False
    stop: tuple[int, ...] = ()  # stop token ids
    min_tokens: int = 0
    marks: tuple[tuple[int, Mark], ...] | None = None  # None: a raw prompt
    prompt_cache: bool = True
    draft: bool = True

    def params(self) -> SamplingParams:
        sampled = {} if self.temperature == 0 else {"top_k": 50, "top_p": 0.95, "repetition_penalty": 1.05}
        if self.penalties:
            sampled |= {"repetition_penalty": 1.2, "presence_penalty": 0.4, "frequency_penalty": 0.3}
        return SamplingParams(
            temperature=self.temperature, max_tokens=self.max_tokens, ignore_eos=True, logprobs=2, seed=self.seed,
            stop_token_ids=tuple(self.stop), min_tokens=self.min_tokens, **sampled,
        )  # fmt: skip


@dataclass
class Result:
    """tokens of a reply, its log-probabilities, and the hash of each logit row by position.

    The rest is no part of what has to be equal: how the reply was come by.
    """

    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    bits: dict[int, str] = field(default_factory=dict)
    finish_reason: str | None = None
    stream_id: int = field(default=0, compare=False)
    metrics: StreamMetrics | None = field(default=None, compare=False)

    @property
    def cached(self) -> int:
        """Tokens that were not run again."""
        assert self.metrics is not None
        return self.metrics.cached_tokens

    def same(self, other: Result) -> bool:
        return self == other


@dataclass(frozen=True)
class Way:
    """One way to compute the same tokens."""

    prompt_chunk: int | None = None
    slots: int = 8
    kv: str = "paged"
    shuffle: int | None = None  # seed of a random page order
    dtype: str = "bfloat16"
    threads: int | None = None
    pages: int | None = None
    snapshot_pages: int = 0
    snapshot_bytes: int = 2 << 20  # of a snapshot page
    drafts: bool = True
    warm_pass: bool = True
    queued: bool = False  # decode rounds are queued one behind the other, as on a GPU


@lru_cache(maxsize=4)
def _tensors(path: Path) -> tuple[Checkpoint, dict[str, np.ndarray]]:
    checkpoint = Checkpoint(path)
    tensors = checkpoint.load(lambda _n, shape, dtype: np.empty(shape, np.float32 if dtype == "f32" else np.uint16))
    return checkpoint, tensors


@contextmanager
def engine_for(
    path: Path, way: Way, poison: frozenset[int] = frozenset(), *, ends: bool = False
) -> Iterator[tuple[Engine, RecordingBackend]]:
    """An engine set up in one way; afterwards its accounts must be clean. ends: the test itself stops the engine."""
    with ExitStack() as stack:
        if way.snapshot_pages:  # an engine that keeps nothing may run beside one with pages of another size
            for module in (states, prompt_cache):
                stack.enter_context(patch.object(module, "SNAPSHOT_PAGE", way.snapshot_bytes))
        yield from _engine_for(path, way, poison, ends)


def _engine_for(path: Path, way: Way, poison: frozenset[int], ends: bool) -> Iterator[tuple[Engine, RecordingBackend]]:
    checkpoint, tensors = _tensors(path)
    backend = RecordingBackend(way.dtype, way.threads)
    backend.queued = way.queued
    rows = CONTEXT + SLACK_ROWS
    model = FaultyModel(checkpoint.config, tensors, backend, max_rows=rows)
    model.poison = poison
    range_pages = pages_for(rows) if way.kv == "fixed" else 1
    pages = way.pages or way.slots * pages_for(rows)
    pool = PagePool(pages, range_pages)
    if way.shuffle is not None:
        pool.shuffle(way.shuffle)
    slots = StreamStates(
        checkpoint.config, backend, slots=way.slots, pages=pages, max_rows=rows, snapshot_pages=way.snapshot_pages
    )
    poison_states(slots)
    slots.open = partial(_open_poisoned, slots, slots.open)  # type: ignore[method-assign]
    engine = Engine(
        model, slots, pool,
        slots=way.slots, context=CONTEXT, vocab=VOCAB, eos_token_ids=[7], prompt_chunk=way.prompt_chunk,
        drafts=way.drafts, warm_pass=way.warm_pass,
    )  # fmt: skip
    try:
        yield engine, backend
        assert engine.drain(60)
        assert engine.census().clean
        check_kept(engine)
        assert engine.alive != ends, engine.fault
        assert engine.stats().counters.census_errors == 0
    finally:
        engine.close()


def poison_states(states: StreamStates) -> None:
    """Fill what no stream has written yet with NaN: a read of it would show in every later bit."""
    for array in (states.ring, states.taps, *(a for a in vars_of(states.kv) if isinstance(a, np.ndarray))):
        array[...] = np.nan if array.dtype == np.float32 else 0x7FC0
    states._snapshots.view(np.uint16)[...] = 0x7FC0


def _open_poisoned(states: StreamStates, open_: Callable[[int, Lease], None], slot: int, lease: Lease) -> None:
    """Open a slot; what its last owner left in its ring and pages is gone, so that a restore has to bring all of it."""
    open_(slot, lease)
    nan = np.nan if states.ring.dtype == np.float32 else 0x7FC0
    states.ring[:, slot] = nan
    states.kv.data[list(lease.pages)] = nan


def check_kept(engine: Engine) -> None:
    """What must hold of the kept states whenever nothing runs: every page is some state's, nobody uses one, and only
    those that wait to be returned can't hit."""
    with engine._book:
        keeper = engine._keeper
        cache = keeper.cache
        held = sum(state.pages for state in cache.states)
        assert held == cache.pages.total - cache.pages.free
        assert held * prompt_cache.SNAPSHOT_PAGE == cache.held_bytes
        pages = [page for state in cache.states for run in state.runs for page in range(run.start, run.end)]
        assert len(pages) == len(set(pages)) == held
        assert not any(state.pins for state in cache.states)
        waiting = {id(state) for state in keeper._pending.values()}
        assert all(state.ready != (id(state) in waiting) for state in cache.states)
        assert all(len(state.tokens) == 4 * state.at for state in cache.states)


def vars_of(obj: object) -> list[object]:
    return (
        list(obj) if isinstance(obj, tuple) else [getattr(obj, name) for name in getattr(obj, "__slots__", vars(obj))]
    )


class Collector:
    """Receives the events of several requests and waits for their ends."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.results: list[Result] = []
        self._done = threading.Semaphore(0)

    def submit(self, request: Request, choice: int = 0) -> Result:
        result = Result()

        def sink(event: StreamEvent) -> None:
            result.tokens.extend(event.tokens)
            result.logprobs.extend(event.logprobs or [])
            result.metrics = event.metrics
            self.seen(result, event.stream_id)
            if request.cancel_after is not None and len(result.tokens) >= request.cancel_after:
                self.engine.cancel(event.stream_id)
            if event.finish_reason is not None:
                result.finish_reason = event.finish_reason
                self._done.release()

        result.stream_id = self.engine.submit(
            request.prompt, request.params(), sink, seed=request.seed, choice=choice,
            marks=request.marks, prompt_cache=request.prompt_cache, draft=request.draft,
        )  # fmt: skip
        self.results.append(result)
        return result

    def seen(self, result: Result, stream_id: int) -> None:
        """Called with each event of a reply, on the engine's thread."""

    def wait(self) -> list[Result]:
        for _ in self.results:
            assert self._done.acquire(timeout=120), "a reply never ended"
        return self.results


def run(
    path: Path, way: Way, requests: Sequence[Request], *, together: bool = True, poison: frozenset[int] = frozenset()
) -> list[Result]:
    """Each request's result, run at once or one after another."""
    with engine_for(path, way, poison) as (engine, backend):
        collector = Collector(engine)
        for request in requests:
            collector.submit(request)
            if not together:
                assert engine.drain(120)
        results = collector.wait()
    for request, result in zip(requests, results, strict=True):
        backend.give(request, result)
    return results


def solo(path: Path, request: Request, dtype: str = "bfloat16") -> Result:
    """The reference: alone in a fresh engine, whole prompt in the largest chunks, nothing kept, nothing drafted."""
    return _solo(path, replace(request, marks=None, prompt_cache=True, draft=True, cancel_after=None), dtype)


@lru_cache(maxsize=512)
def _solo(path: Path, request: Request, dtype: str) -> Result:
    return run(path, Way(dtype=dtype, slots=1, drafts=False), [request])[0]


def prompt(length: int, seed: int) -> tuple[int, ...]:
    """A prompt of random token ids."""
    return tuple(random.Random(seed * 7919 + length).choices(range(13, VOCAB), k=length))


USER, ASSISTANT, END = (6, 20), (6, 21), (7, 10)  # tokens before a user's text, before a reply, and behind either


class Chat:
    """A conversation in tokens, laid out as a chat template does it.

    tokens: what a client has, without a generation prompt. settled: the history end of the last request.
    """

    def __init__(self, system: Sequence[int] = ()) -> None:
        self.tokens = [1, *(([6, 19, *system, *END]) if system else ())]
        self.shared = len(self.tokens)
        self.settled = 0

    def ask(self, text: Sequence[int], *, seed: int, **how: object) -> Request:
        """The request of the next turn, with its marks."""
        start = len(self.tokens) + len(USER)
        history = (*self.tokens, *USER, *text, *END)
        self.settled = len(history)
        marks = ((len(history), Mark.HISTORY), (start, Mark.LAST_USER), (self.shared, Mark.SHARED))
        return Request((*history, *ASSISTANT), seed=seed, marks=marks, **how)  # type: ignore[arg-type]

    def answered(self, request: Request, reply: Sequence[int]) -> list[int]:
        """Take a reply; returns the conversation as the client will send it back."""
        self.tokens = [*request.prompt, *reply, *END]
        return self.tokens


def ask(engine: Engine, *requests: Request) -> list[Result]:
    """The results of requests that are sent together."""
    collector = Collector(engine)
    for request in requests:
        collector.submit(request)
    return collector.wait()


def check(path: Path, backend: RecordingBackend, request: Request, result: Result, dtype: str = "bfloat16") -> None:
    """A reply must be the solo one: tokens, log-probabilities and the bits of every logit row."""
    expected = solo(path, request, dtype)
    backend.give(request, result)
    assert len(expected.bits) == len(expected.tokens) > 0
    assert result.tokens == expected.tokens
    assert result == expected
