"""What a running stream feels while a long prompt opens into memory that isn't mapped yet."""

from __future__ import annotations

import statistics
import threading
import time
from dataclasses import dataclass, field
from itertools import pairwise

from lfm2serve.bench.dummy import Dummy, Reply, ask, dummy, prompt
from lfm2serve.bench.law import reply_hash
from lfm2serve.bench.memory import Receipt
from lfm2serve.engine import Engine
from lfm2serve.options import EngineOptions
from lfm2serve.sampling import SamplingParams
from lfm2serve.stream import StreamEvent, TokenLogprobs

FIRST = 512  # tokens of the running stream's prompt
MOST = 16384  # of its reply
SETTLED = 200  # of its tokens before a long prompt comes
REPLY = 8  # tokens of a long prompt's reply


@dataclass(slots=True)
class _Watched:
    """One stream's tokens and when they came (time.monotonic()); `end`: its last event."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    end: StreamEvent | None = None
    changed: threading.Condition = field(default_factory=threading.Condition)

    def take(self, event: StreamEvent) -> None:
        now = time.monotonic()
        with self.changed:
            self.tokens += event.tokens
            self.logprobs += event.logprobs or []
            self.times += [now] * bool(event.tokens)
            self.end = event if event.finish_reason else None
            self.changed.notify_all()

    def wait(self, tokens: int | None = None) -> None:
        """Until there are so many tokens, or the end. The stream's error is raised."""
        with self.changed:
            self.changed.wait_for(lambda: self.end or (tokens is not None and len(self.tokens) >= tokens))
        if self.end is not None and self.end.error is not None:
            raise self.end.error

    def gaps(self, start: float, end: float) -> list[float]:
        """Seconds between tokens, of the gaps that end in (start, end]."""
        return [later - earlier for earlier, later in pairwise(self.times) if start < later <= end]


def measure(model: str, options: EngineOptions, *, prompts: list[int], max_gap_ms: float = 50.0) -> Receipt:
    """A stream decodes while prompts of the given lengths come, one after another; then everything again by itself.

    options: context and pool must hold the longest prompt beside the stream.
    """
    with dummy(model, options) as made:
        report = Receipt(model, made.target.name)
        with made.engine(max_gap_ms=max_gap_ms) as engine:
            together = _together(report, made, engine, prompts)
        with made.engine(kv="eager") as engine:
            _compare(report, engine, prompts, together)
    return report


def _together(report: Receipt, made: Dummy, engine: Engine, prompts: list[int]) -> list[_Watched]:
    """The running stream, then each long prompt's."""
    most = min(MOST, made.plan.context - FIRST - 1)
    running, late = _Watched(), []
    asked = [(length, prompt(length, number)) for number, length in enumerate(prompts, 1)]  # not beside the stream
    stream = _submit(engine, prompt(FIRST), most, running)
    for length, ids in asked:
        engine.arena.settle()
        running.wait(len(running.tokens) + SETTLED)
        settled = running.times[-SETTLED // 2 :]
        median = statistics.median(later - earlier for earlier, later in pairwise(settled))
        maps = engine.arena.stats()
        watched = _Watched()
        _submit(engine, ids, REPLY, watched)
        watched.wait()
        report.expect(running.end is None, f"the running stream ended before the prompt of {length:,} tokens")
        running.wait(len(running.tokens) + 1)
        late.append(watched)
        _figures(report, running, watched, length, median)
        now = engine.arena.stats()
        mapped, here = now.by_helper - maps.by_helper, now.by_caller - maps.by_caller
        report.add(f"{length:,}: map calls on the engine's thread", here, "", f"{mapped} pieces mapped by the helper")
        report.expect(here == 0, f"{here} pieces were mapped on the engine's thread beside a running stream")
    engine.cancel(stream)
    running.wait()
    return [running, *late]


def _figures(report: Receipt, running: _Watched, late: _Watched, length: int, median: float) -> None:
    assert late.end is not None
    m = late.end.metrics
    assert m.admitted is not None and m.first_token is not None
    report.add(f"{length:,}: the running stream's median gap before", 1e3 * median, "ms")
    opening = running.gaps(m.arrival, m.admitted)
    wait = f"{len(opening)} gaps in {1e3 * (m.admitted - m.arrival):.1f} ms"
    longest = max(opening, default=median) / median
    report.add(f"{length:,}: longest gap before its first prompt step, against the median", longest, "x", wait)
    during = running.gaps(m.admitted, m.first_token + median)
    beside = f"median {1e3 * statistics.median(during):.1f} ms, {len(during)} tokens" if during else "no token came"
    report.add(f"{length:,}: longest gap during its prompt", 1e3 * max(during, default=0.0), "ms", beside)
    report.add(f"{length:,}: time to its first token", m.first_token - m.arrival, "s")


def _submit(engine: Engine, ids: list[int], tokens: int, watched: _Watched) -> int:
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, logprobs=0)
    return engine.submit(ids, params, watched.take, seed=0, prompt_cache=False)


def _compare(report: Receipt, engine: Engine, prompts: list[int], together: list[_Watched]) -> None:
    """The same replies, each alone, in one allocation."""
    lengths = [(FIRST, SETTLED), *((length, REPLY) for length in prompts)]
    equal = 0
    for number, ((length, tokens), watched) in enumerate(zip(lengths, together, strict=True)):
        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, logprobs=0)
        alone = ask(engine, [prompt(length, number)], params)
        beside = Reply(watched.tokens[:tokens], watched.logprobs[:tokens])
        equal += reply_hash(alone[0]) == reply_hash(beside)
        report.add(f"{length:,}: time to its first token, alone", alone[0].first_s, "s")
    report.expect(equal == len(lengths), f"{len(lengths) - equal} of {len(lengths)} replies differ from those alone")
    report.add("replies equal to those alone", equal, f"of {len(lengths)}", "tokens and bits")
