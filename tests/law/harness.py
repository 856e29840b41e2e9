"""Runs requests through a real engine in a chosen way and keeps the tokens and the bits of every logit row."""

from __future__ import annotations

import hashlib
import random
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

import numpy as np

from kernels_numba.batch import Batch, SampleRows, SampleResult
from kernels_numba.cpu import CpuBackend
from lfm2serve.checkpoint import Checkpoint
from lfm2serve.engine import Engine
from lfm2serve.memory.pages import SLACK_ROWS, PagePool, pages_for
from lfm2serve.memory.states import StreamStates
from lfm2serve.model import Array, Model
from lfm2serve.sampling import SamplingParams
from lfm2serve.stream import StreamEvent, TokenLogprobs

CONTEXT = 1500
VOCAB = 400


class RecordingBackend(CpuBackend):
    """A CPU backend that keeps a hash of each logit row that a token is drawn from, by (seed, choice, position).

    The last one counts: behind a draft token that was refused a row is drawn again, from what was drawn before it.
    """

    def __init__(self, *args: object) -> None:
        super().__init__(*args)  # type: ignore[arg-type]
        self.bits: dict[tuple[int, int, int], str] = {}

    def sample(self, logits: Array, rows: SampleRows) -> SampleResult:
        for i in range(len(logits)):
            key = (int(rows.seed[i]), int(rows.choice[i]), int(rows.position[i]))
            self.bits[key] = hashlib.blake2b(np.ascontiguousarray(logits[i]).tobytes(), digest_size=8).hexdigest()
        return super().sample(logits, rows)

    def give(self, request: Request, result: Result) -> None:
        """Hand a result the hashes of the rows that its tokens were drawn from."""
        end = len(request.prompt) + len(result.tokens)
        result.bits = {pos: bits for (seed, _, pos), bits in self.bits.items() if seed == request.seed and pos < end}


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

    def params(self) -> SamplingParams:
        sampled = {} if self.temperature == 0 else {"top_k": 50, "top_p": 0.95, "repetition_penalty": 1.05}
        return SamplingParams(
            temperature=self.temperature, max_tokens=self.max_tokens, ignore_eos=True, logprobs=2, seed=self.seed, **sampled
        )


@dataclass
class Result:
    """tokens of a reply, its log-probabilities, and the hash of each logit row by position."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    bits: dict[int, str] = field(default_factory=dict)
    finish_reason: str | None = None

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


@lru_cache(maxsize=4)
def _tensors(path: Path) -> tuple[Checkpoint, dict[str, np.ndarray]]:
    checkpoint = Checkpoint(path)
    tensors = checkpoint.load(lambda _n, shape, dtype: np.empty(shape, np.float32 if dtype == "f32" else np.uint16))
    return checkpoint, tensors


@contextmanager
def engine_for(
    path: Path, way: Way, poison: frozenset[int] = frozenset(), *, ends: bool = False
) -> Iterator[tuple[Engine, RecordingBackend]]:
    """An engine set up in one way; afterwards its census must be clean. ends: the test itself stops the engine."""
    checkpoint, tensors = _tensors(path)
    backend = RecordingBackend(way.dtype, way.threads)
    rows = CONTEXT + SLACK_ROWS
    model = FaultyModel(checkpoint.config, tensors, backend, max_rows=rows)
    model.poison = poison
    range_pages = pages_for(rows) if way.kv == "fixed" else 1
    pages = way.pages or way.slots * pages_for(rows)
    pool = PagePool(pages, range_pages)
    if way.shuffle is not None:
        random.Random(way.shuffle).shuffle(pool._free)
    states = StreamStates(checkpoint.config, backend, slots=way.slots, pages=pages, max_rows=rows)
    poison_states(states)
    engine = Engine(
        model, states, pool,
        slots=way.slots, context=CONTEXT, vocab=VOCAB, eos_token_ids=[7], prompt_chunk=way.prompt_chunk,
    )  # fmt: skip
    try:
        yield engine, backend
        assert engine.drain(60)
        assert engine.census().clean
        assert engine.alive != ends, engine.fault
        assert engine.stats().counters.census_errors == 0
    finally:
        engine.close()


def poison_states(states: StreamStates) -> None:
    """Fill what no stream has written yet with NaN: a read of it would show in every later bit."""
    for array in (states.ring, *(a for a in vars_of(states.kv) if isinstance(a, np.ndarray))):
        array[...] = np.nan if array.dtype == np.float32 else 0x7FC0


def vars_of(obj: object) -> list[object]:
    return list(obj) if isinstance(obj, tuple) else [getattr(obj, name) for name in getattr(obj, "__slots__", vars(obj))]


class Collector:
    """Receives the events of several requests and waits for their ends."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.results: list[Result] = []
        self._done = threading.Semaphore(0)

    def submit(self, request: Request, choice: int = 0) -> Result:
        result = Result()
        ident: list[int] = []

        def sink(event: StreamEvent) -> None:
            result.tokens.extend(event.tokens)
            result.logprobs.extend(event.logprobs or [])
            if request.cancel_after is not None and len(result.tokens) >= request.cancel_after and ident:
                self.engine.cancel(ident[0])
            if event.finish_reason is not None:
                result.finish_reason = event.finish_reason
                self._done.release()

        ident.append(self.engine.submit(request.prompt, request.params(), sink, seed=request.seed, choice=choice))
        self.results.append(result)
        return result

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
    """The reference: alone in a fresh engine, whole prompt in the largest chunks."""
    return _solo(path, request, dtype)


@lru_cache(maxsize=512)
def _solo(path: Path, request: Request, dtype: str) -> Result:
    return run(path, Way(dtype=dtype, slots=1), [request])[0]


def prompt(length: int, seed: int) -> tuple[int, ...]:
    """A prompt of random token ids."""
    return tuple(random.Random(seed * 7919 + length).choices(range(13, VOCAB), k=length))
