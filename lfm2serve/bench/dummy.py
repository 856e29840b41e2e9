"""An engine on random weights of a real model's shape."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

from lfm2serve.backend import Backend
from lfm2serve.config import ModelConfig
from lfm2serve.devices import Target, find_device, open_backend
from lfm2serve.dummy import random_weights, shape, weight_bytes
from lfm2serve.engine import Engine
from lfm2serve.errors import Lfm2Error
from lfm2serve.memory.pages import SLACK_ROWS, PagePool
from lfm2serve.memory.plan import MemoryPlan, make_plan
from lfm2serve.memory.states import StreamStates
from lfm2serve.model import Model
from lfm2serve.options import EngineOptions
from lfm2serve.sampling import SamplingParams
from lfm2serve.stream import StreamEvent, TokenLogprobs


@dataclass(slots=True)
class Dummy:
    """A model's shape loaded with random weights; `engine` makes engines over it, one after another."""

    config: ModelConfig
    target: Target
    backend: Backend
    plan: MemoryPlan
    model: Model
    states: StreamStates | None = None
    """of the engine that is open"""

    @contextmanager
    def engine(self, *, kv: str = "paged", prompt_chunk: int | None = None, drafts: bool = False, keeps: bool = False,
               shuffle: int | None = None, max_gap_ms: float = 50.0,
               graphs: bool = True) -> Iterator[Engine]:  # fmt: skip
        """An engine over the whole plan. kv: as in EngineOptions; shuffle: seed of a random page order; graphs: as in
        `StepRunner`."""
        plan = self.plan
        rows = plan.context + SLACK_ROWS
        range_pages = plan.pages // plan.slots if kv == "fixed" else plan.range_pages
        pool = PagePool(plan.pages, range_pages)
        if shuffle is not None:
            pool.shuffle(shuffle)
        pages = plan.snapshot_pages if keeps else 0
        states = StreamStates(
            self.config, self.backend, slots=plan.slots, pages=plan.pages, max_rows=rows, snapshot_pages=pages,
            lazy=kv != "eager",
        )  # fmt: skip
        states.arena.ahead(pool.upcoming(), plan.first_pieces)
        engine = Engine(
            self.model, states, pool,
            slots=plan.slots, context=plan.context, vocab=self.config.vocab_size, eos_token_ids=[],
            prompt_chunk=prompt_chunk, largest_chunk=self.target.chunk, drafts=drafts,
            max_gap_ms=max_gap_ms, graphs=graphs,
        )  # fmt: skip
        self.states = states
        try:
            yield engine
        finally:
            self.states = None
            engine.close()
            states.close_all()


@contextmanager
def dummy(name: str, options: EngineOptions) -> Iterator[Dummy]:
    """A model of SHAPES on the device that the options ask for; all its memory is free again afterwards."""
    config = shape(name)
    target = find_device(options)
    plan = make_plan(config, options, weight_bytes(config), target)
    backend = open_backend(target, options, plan.scratch)
    try:
        model = Model(config, random_weights(config, backend), backend, max_rows=plan.context + SLACK_ROWS)
        yield Dummy(config, target, backend, plan, model)
    finally:
        backend.close()


@dataclass(slots=True)
class Reply:
    """What came of a request: tokens, log-probabilities, and times in seconds since it was asked.

    times: when each token came, by the clock of time.perf_counter()."""

    tokens: list[int]
    logprobs: list[TokenLogprobs]
    first_s: float = 0.0
    total_s: float = 0.0
    times: list[float] = field(default_factory=list)


def ask(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams | Sequence[SamplingParams],
    seeds: Sequence[int] | None = None,
) -> list[Reply]:
    """All prompts at once; waits for all replies. params: for all, or of each; seeds: of each (default: its place).

    Lfm2Error: one of them failed.
    """
    replies = [Reply([], []) for _ in prompts]
    errors: list[Lfm2Error] = []

    def take(reply: Reply, event: StreamEvent) -> None:
        reply.tokens.extend(event.tokens)
        reply.times.extend([time.perf_counter()] * len(event.tokens))
        reply.logprobs.extend(event.logprobs or [])
        m = event.metrics
        if event.error is not None:
            errors.append(event.error)
        if event.finish_reason is not None and m.first_token and m.finished:
            reply.first_s, reply.total_s = m.first_token - m.arrival, m.finished - m.arrival

    each = [params] * len(prompts) if isinstance(params, SamplingParams) else params
    for ids, reply, wanted, seed in zip(prompts, replies, each, seeds or range(len(prompts)), strict=True):
        engine.submit(ids, wanted, partial(take, reply), seed=seed)
    engine.drain()
    if errors:
        raise errors[0]
    return replies


def prompt(length: int, number: int = 0, vocab: int = 60000) -> list[int]:
    """Token ids that never repeat in a way that a draft could use."""
    return [(104729 * (number + 1) * (j + 1) + 31 * j * j) % vocab for j in range(length)]
