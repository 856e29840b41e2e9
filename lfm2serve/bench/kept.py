"""What kept states and drafts cost and save: cold and warm turns, decode, drafts, a pool under pressure."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING
from unittest.mock import patch

from lfm2serve.bench.dummy import prompt
from lfm2serve.drafting import MAX_DRAFT, Drafter, RoundCosts
from lfm2serve.engine import Engine
from lfm2serve.memory.pages import SLACK_ROWS, pages_for
from lfm2serve.memory.prompt_cache import Mark
from lfm2serve.runtime import Runtime
from lfm2serve.sampling import SamplingParams
from lfm2serve.stream import StreamEvent

if TYPE_CHECKING:
    from lfm2serve.bench.chat import ChatReport

COPY = "Type out this text once more:\n"
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
WHO = ("clerk", "farmer", "judge", "soldier", "teacher", "woman", "captain", "gardener", "miller", "doctor")
DID = ("lifted", "washed", "sold", "painted", "measured", "bought", "dropped", "burned")
WHAT = ("road", "sock", "turtle", "basket", "shadow", "hat", "lantern", "violin", "kettle", "ladder")
WHERE = ("forest", "bakery", "castle", "market", "valley", "church", "lake", "mountain", "station", "garden")
NEW_TOKENS = 105  # of a warm turn's prompt: they and the generation prompt are not kept
LONG_REPLY = 128
COLD_PAIRS, COLD_S = 24, 6.0  # cold turns with and without keeps: so many, or as many as fit, beyond the repeats
PRESSED = 8  # long requests on a pool that holds two of them


def passage(number: int, sentences: int) -> str:
    """A text to copy."""
    rng = random.Random(number)
    return " ".join(
        f"On {rng.choice(DAYS)} the {rng.choice(WHO)} {rng.choice(DID)} the {rng.choice(WHAT)} and went to the "
        f"{rng.choice(WHERE)}."
        for _ in range(sentences)
    )


@dataclass(slots=True)
class _Reply:
    """Times in seconds: first_s from the request, prompt_s from the admission, both to the first token; decode_s on."""

    tokens: list[int] = field(default_factory=list)
    admitted: float = 0.0
    first_s: float = 0.0
    prompt_s: float = 0.0
    decode_s: float = 0.0
    cached: int = 0
    drafted: int = 0
    accepted: int = 0


def _ask(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    *,
    marks: Sequence[tuple[int, Mark]] | None = None,
    prompt_cache: bool = False,
    draft: bool = False,
) -> list[_Reply]:
    """All prompts at once; waits for all replies. The ends of replies to prompts with marks are not kept."""
    replies = [_Reply() for _ in prompts]

    def take(reply: _Reply, event: StreamEvent) -> None:
        reply.tokens.extend(event.tokens)
        m = event.metrics
        if event.finish_reason is not None and m.admitted and m.first_token and m.finished:
            reply.admitted = m.admitted
            reply.first_s, reply.prompt_s = m.first_token - m.arrival, m.first_token - m.admitted
            reply.decode_s = m.finished - m.first_token
            reply.cached, reply.drafted, reply.accepted = m.cached_tokens, m.draft_tokens, m.accepted_tokens

    streams = [
        engine.submit(
            ids, params, partial(take, reply), seed=n, marks=marks, prompt_cache=prompt_cache, draft=draft
        )
        for n, (ids, reply) in enumerate(zip(prompts, replies, strict=True))
    ]  # fmt: skip
    engine.drain()
    if marks is not None:
        for stream in streams:
            engine.forget(stream)
    return replies


def figures(report: ChatReport, runtime: Runtime, length: int, repeats: int) -> None:
    """Everything that one engine over the whole plan can tell."""
    length = min(length, runtime.plan.context - NEW_TOKENS - LONG_REPLY)
    _cold(report, runtime, length, repeats)
    _warm(report, runtime, length, repeats)
    _copies(report, runtime, length, repeats)
    for streams in (1, 4, 8):
        _decode(report, runtime, streams, repeats)
    _drafts(report, runtime, repeats)


def _ids(runtime: Runtime, length: int, number: int) -> list[int]:
    return prompt(length, number, runtime.tokenizer.size)


ONE = SamplingParams(temperature=0, max_tokens=1)


def _cold(report: ChatReport, runtime: Runtime, length: int, repeats: int) -> None:
    """The same prompt with and without, one right after the other and either of them first: a prompt's tokens, and what
    the device did just before, change its time by more than keeping does."""
    engine = runtime.engine
    marks = ((length - 3, Mark.HISTORY), (length - 60, Mark.LAST_USER))
    seconds: dict[bool, list[float]] = {True: [], False: []}
    passes: dict[bool, set[int]] = {True: set(), False: set()}
    _ask(engine, [_ids(runtime, length, 99)], ONE)
    started, pair = time.perf_counter(), 0
    while pair < repeats or (pair < COLD_PAIRS and time.perf_counter() - started < COLD_S):
        ids = _ids(runtime, length, 100 + pair)
        for keeps in (True, False) if pair % 2 else (False, True):
            engine.clear_prompt_cache()  # pages that were used before: on a CPU the first touch costs more than a copy
            before = engine.stats().counters.prompt_steps
            [reply] = _ask(engine, [ids], ONE, marks=marks if keeps else None, prompt_cache=keeps)
            passes[keeps].add(engine.stats().counters.prompt_steps - before)
            seconds[keeps].append(reply.prompt_s)
        pair += 1
    more = statistics.median(with_two / none - 1 for with_two, none in zip(*seconds.values(), strict=True))
    with_two, with_none = statistics.median(seconds[True]), statistics.median(seconds[False])
    beside = f"{1e3 * with_two:.4g} ms against {1e3 * with_none:.4g} ms, {pair} pairs"
    report.add(f"cold turn of {length:,} keeping two states, against none", 100 * more, "%", beside)
    report.expect(passes[True] == passes[False], f"prompt passes with marks {passes[True]}, without {passes[False]}")
    report.add(
        "prompt passes with two marks in the last chunk", max(passes[True]), "", f"{max(passes[False])} with none"
    )


def _warm(report: ChatReport, runtime: Runtime, length: int, repeats: int) -> None:
    engine = runtime.engine
    warm, cold = [], []
    for run in range(repeats):
        ids = _ids(runtime, length, 20_000 + run)
        _ask(engine, [ids], ONE, marks=((length - 3, Mark.HISTORY),), prompt_cache=True)
        following = [*ids[: length - 3], *_ids(runtime, NEW_TOKENS, 21_000 + run)]
        [reply] = _ask(engine, [following], ONE, marks=(), prompt_cache=True)
        report.expect(reply.cached == length - 3, f"a warm turn resumed {reply.cached} of {length - 3} tokens")
        warm.append(reply.first_s)
        [reply] = _ask(engine, [[(token + 1) % runtime.tokenizer.size for token in following]], ONE)
        cold.append(reply.first_s)
    ours, theirs = statistics.median(warm), statistics.median(cold)
    beside = f"cold {1e3 * theirs:.4g} ms, {theirs / ours:.1f} x"
    report.add(f"warm turn of {len(following):,}, {length - 3:,} kept, to the first token", 1e3 * ours, "ms", beside)


def _copies(report: ChatReport, runtime: Runtime, length: int, repeats: int) -> None:
    """Keeps and restores of a whole prompt, each on the device."""
    engine = runtime.engine
    engine.clear_prompt_cache()
    before = engine.stats().cache
    ids = _ids(runtime, length, 30_000)
    with _timed_copies(runtime) as seconds:
        for _ in range(repeats + 1):
            _ask(engine, [ids], ONE, marks=((length - 1, Mark.HISTORY),), prompt_cache=True)
    after = engine.stats().cache
    hits = after.counters.hits.total() - before.counters.hits.total()
    report.expect(hits == repeats, f"{hits} of {repeats} identical prompts hit")
    copies = (after.copies - before.copies) / sum(map(len, seconds.values()))
    for name, taken in seconds.items():
        report.add(f"{name} of {length:,} tokens", 1e6 * statistics.median(taken), "us", f"{copies:.1f} copies of K/V")


@contextmanager
def _timed_copies(runtime: Runtime) -> Iterator[dict[str, list[float]]]:
    """The seconds of every keep and restore. Only for replies of one token: no decode round may be under way."""
    states, backend = runtime.engine._states, runtime.backend
    seconds: dict[str, list[float]] = {"keep": [], "restore": []}

    def timed(name: str, copy: Callable[..., int]) -> Callable[..., int]:
        def run(*args: object) -> int:
            copies: list[int] = []
            seconds[name].append(backend.timed(lambda: copies.append(copy(*args))))
            return copies[0]

        return run

    with (
        patch.object(states, "keep", timed("keep", states.keep)),
        patch.object(states, "restore", timed("restore", states.restore)),
    ):
        yield seconds


def _decode(report: ChatReport, runtime: Runtime, streams: int, repeats: int) -> None:
    engine, params = runtime.engine, SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
    rates: dict[bool, list[float]] = {True: [], False: []}
    for run in range(2 * repeats):
        keeps = (run + run // 2) % 2 == 0
        engine.clear_prompt_cache()
        before = engine.stats().counters
        _ask(engine, [_ids(runtime, 32, 40_000 + 100 * run + n) for n in range(streams)], params, prompt_cache=keeps)
        after = engine.stats().counters
        rates[keeps].append((after.decode_rows - before.decode_rows) / (after.decode_s - before.decode_s))
    on, off = statistics.median(rates[True]), statistics.median(rates[False])
    report.add(f"decode, {streams} at once, cache on against off", on / off, "x", f"{on:,.4g} and {off:,.4g} tok/s")


# ---- drafts ----


def _drafts(report: ChatReport, runtime: Runtime, repeats: int) -> None:
    long = SamplingParams(temperature=0, max_tokens=LONG_REPLY, ignore_eos=True)
    if runtime.template is not None:
        texts = [[{"role": "user", "content": COPY + passage(50 + n, 5)}] for n in range(repeats)]
        prompts = [runtime.encode_chat(messages) for messages in texts]
    else:
        prompts = [runtime.encode_prompt(2 * f"{passage(50 + n, 5)}\n") for n in range(repeats)]
    _drafted(
        report, runtime, "prompts that ask for a copy", prompts, SamplingParams(temperature=0, max_tokens=LONG_REPLY)
    )
    prompts = [_ids(runtime, 32, 50_000 + n) for n in range(repeats)]
    wild = SamplingParams(temperature=100.0, max_tokens=LONG_REPLY, ignore_eos=True)
    _drafted(report, runtime, "text that never repeats", prompts, wild)
    known = [[*ids, *_ask(runtime.engine, [ids], long)[0].tokens] for ids in prompts]
    with _known(known):
        _drafted(report, runtime, "drafts from the known reply", prompts, long)


@contextmanager
def _known(texts: list[list[int]]) -> Iterator[None]:
    """Every stream drafts what it is going to say: the most that drafts can bring."""

    def propose(self: Drafter, tokens: Sequence[int], most: int, rows: int, costs: RoundCosts) -> list[int]:
        count = len(tokens)
        whole = next((text for text in texts if text[:count] == tokens), [])
        return whole[count : count + min(most, MAX_DRAFT)]

    with patch.object(Drafter, "propose", propose), patch.object(Drafter, "may_propose", lambda *_: True):
        yield


def _drafted(
    report: ChatReport, runtime: Runtime, what: str, prompts: Sequence[Sequence[int]], params: SamplingParams
) -> None:
    """Each prompt drafted and plain, in turns; rates are of all tokens behind the first of each reply."""
    tokens, seconds = {True: 0, False: 0}, {True: 0.0, False: 0.0}
    drafted = accepted = 0
    for run, ids in enumerate(prompts):
        replies: dict[bool, _Reply] = {}
        for draft in (True, False) if run % 2 else (False, True):
            [reply] = _ask(runtime.engine, [ids], params, draft=draft)
            replies[draft] = reply
            tokens[draft] += len(reply.tokens) - 1
            seconds[draft] += reply.decode_s
            drafted += reply.drafted
            accepted += reply.accepted
        same = replies[True].tokens == replies[False].tokens
        report.expect(same, f"{what}: the drafted reply differs from the plain one")
    rate = {draft: tokens[draft] / max(seconds[draft], 1e-9) for draft in (True, False)}
    beside = f"{rate[True]:,.4g} and {rate[False]:,.4g} tok/s; {accepted} of {drafted} draft tokens taken"
    report.add(f"drafted against plain: {what}", rate[True] / max(rate[False], 1e-9), "x", beside)


# ---- pressure ----


def pressure(report: ChatReport, loaded: Callable[..., AbstractContextManager[Runtime]], length: int) -> None:
    """Eight long requests on a pool that holds two of them, against a pool that holds them all."""
    pages = pages_for(length + LONG_REPLY + SLACK_ROWS)
    seconds, replies = {}, {}
    for pool in (PRESSED * pages, 2 * pages):
        with loaded(kv_pages=pool, max_streams=PRESSED, context=length + LONG_REPLY) as runtime:
            prompts = [_ids(runtime, length, 60_000 + n) for n in range(PRESSED)]
            started = time.perf_counter()
            got = _ask(
                runtime.engine, prompts, SamplingParams(temperature=0, max_tokens=LONG_REPLY, ignore_eos=True),
                prompt_cache=True, draft=True,
            )  # fmt: skip
            seconds[pool] = time.perf_counter() - started
            replies[pool] = [reply.tokens for reply in got]
            order = [reply.admitted for reply in got]
            report.expect(order == sorted(order), "requests that waited for pages overtook each other")
    large, small = seconds.values()
    equal = len(set(map(str, replies.values()))) == 1
    report.expect(equal, "replies on a small pool differ")
    report.add(
        f"{PRESSED} requests of {length:,} on {2 * pages} pages, against {PRESSED * pages}",
        small / large,
        "x",
        f"{small:.3g} s and {large:.3g} s",
    )
