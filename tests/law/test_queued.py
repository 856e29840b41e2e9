"""Decode rounds that are queued before the tokens of the one before are known, as a GPU's are."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

from lfm2serve.drafting import RoundCosts, SuffixLookup
from lfm2serve.engine import Engine
from tests.law.harness import Collector, RecordingBackend, Request, Way, check, engine_for, prompt, solo
from tests.law.test_drafts import COPYING, cheap

QUEUED = Way(threads=1, queued=True, drafts=False)


def rounds_ahead(backend: RecordingBackend) -> int:
    assert backend.rounds is not None
    return backend.rounds.began


def run(engine: Engine, backend: RecordingBackend, path: Path, *requests: Request) -> None:
    """All at once; each must be its solo reply."""
    collector = Collector(engine)
    for request in requests:
        collector.submit(request)
    for request, result in zip(requests, collector.wait(), strict=True):
        check(path, backend, request, result)


def test_a_stream_alone_is_one_round_behind_from_its_second_token_on(tiny: Path) -> None:
    with engine_for(tiny, QUEUED) as (engine, backend):
        run(engine, backend, tiny, Request(prompt(20, 1), seed=1, max_tokens=12))
        counters = engine.stats().counters
        # the prompt's step draws the first token; the other eleven are a round each, and no round runs for nothing
        assert counters.decode_rounds == counters.decode_rows == 11
        assert rounds_ahead(backend) == 10


def test_a_round_that_ran_for_a_stream_that_had_ended_changes_nothing(tiny: Path) -> None:
    plain = solo(tiny, Request(prompt(9, 1), seed=3, max_tokens=30, temperature=0.9))
    stop = plain.tokens[6]
    first = plain.tokens.index(stop)
    stopping = Request(prompt(9, 1), seed=3, max_tokens=30, temperature=0.9, stop=(stop,))
    others = [Request(prompt(5 + i, i), seed=10 + i, max_tokens=20, penalties=bool(i % 2)) for i in range(3)]
    with engine_for(tiny, QUEUED) as (engine, backend):
        collector = Collector(engine)
        ended = collector.submit(stopping)
        rest = [collector.submit(request) for request in others]
        collector.wait()
        assert ended.tokens == plain.tokens[: first + 1] and ended.finish_reason == "stop"
        for request, result in zip(others, rest, strict=True):
            check(tiny, backend, request, result)
        # a new stream takes the slot that the round ran in
        run(engine, backend, tiny, *others)


def test_streams_that_may_draft_wait_for_their_token_and_the_others_do_not(tiny: Path) -> None:
    with (
        patch.object(RoundCosts, "estimates", cheap),
        engine_for(tiny, replace(QUEUED, drafts=True)) as (engine, backend),
    ):
        run(engine, backend, tiny, COPYING)
        counters = engine.stats().counters
        assert counters.accepted_tokens > 0
        assert counters.decode_rows == counters.decode_rounds + counters.draft_tokens
        before = rounds_ahead(backend)
        run(engine, backend, tiny, Request(tuple(range(60, 120)), seed=9, max_tokens=10, temperature=2.0))
        assert rounds_ahead(backend) > before


def test_what_may_follow_is_exactly_what_a_lookup_could_find() -> None:
    tokens = [5, 1, 2, 3, 9, 9, 9, 9, 1, 2, 3]
    for length in range(1, len(tokens) + 1):
        known = tokens[:length]
        found = any(SuffixLookup().propose([*known, token], 3) for token in range(10))
        assert SuffixLookup().may_follow(known) == found, known


def test_rounds_that_fail_are_run_again(tiny: Path) -> None:
    requests = [Request(prompt(30, i), seed=i, max_tokens=25, temperature=0.8 * (i % 2)) for i in range(3)]
    with engine_for(tiny, QUEUED) as (engine, backend):
        assert backend.rounds is not None
        backend.rounds.failing = frozenset({3, 14})
        run(engine, backend, tiny, *requests)
        assert engine.stats().counters.failed_steps == 2


def test_a_cancelled_stream_leaves_the_round_under_way(tiny: Path) -> None:
    leaving = [Request(prompt(12, 7), seed=90 + i, max_tokens=40, cancel_after=i) for i in range(1, 5)]
    staying = [Request(prompt(30, i), seed=i, max_tokens=25, temperature=0.8 * (i % 2)) for i in range(3)]
    with engine_for(tiny, replace(QUEUED, slots=4)) as (engine, backend):
        collector = Collector(engine)
        gone = [collector.submit(request) for request in leaving]
        kept = [collector.submit(request) for request in staying]
        collector.wait()
        assert all(result.finish_reason == "abort" for result in gone)
        for request, result in zip(staying, kept, strict=True):
            check(tiny, backend, request, result)


def test_a_draw_that_fails_ends_nobody_who_was_not_alone(tiny: Path) -> None:
    """Of two streams one has just ended with what the round before drew: the other one runs again."""
    short, long = (Request(prompt(30, i), seed=i, max_tokens=200, temperature=0.8) for i in range(2))
    stop = solo(tiny, replace(short, max_tokens=12)).tokens[-1]
    short = replace(short, stop=(stop,))
    with engine_for(tiny, QUEUED) as (engine, backend):
        assert backend.rounds is not None
        draw, seen = backend.rounds.draw, []

        def flaky(begun: Any, rows: Any) -> None:
            if len(rows.slot) == 2 and (rows.slot < 0).any() and not seen:
                seen.append(rows)
                raise RuntimeError("injected fault of a draw")
            draw(begun, rows)

        backend.rounds.draw = flaky  # type: ignore[method-assign]
        collector = Collector(engine)
        ended, rest = collector.submit(short), collector.submit(long)
        collector.wait()
        assert seen and ended.finish_reason == "stop" and rest.finish_reason == "length"
        check(tiny, backend, long, rest)
