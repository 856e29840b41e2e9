"""Drafted == plain: whatever is drafted, whatever of it is refused, no bit of a reply changes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from unittest.mock import patch

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kernels_numba.batch import RING_ROWS
from lfm2serve.drafting import MAX_DRAFT, Drafter, RoundCosts, SuffixLookup
from lfm2serve.memory.pages import SLACK_ROWS
from tests.law.harness import CONTEXT, END, VOCAB, Chat, Request, Result, Way, ask, check, engine_for, prompt, solo

PLAIN = Way(threads=1, snapshot_pages=256, snapshot_bytes=128 << 10)
law = settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])

Wrong = Callable[[], int]  # how many tokens of the next draft are right


@contextmanager
def drafting(
    path: Path, asked: Sequence[Request], right: Wrong, length: int = MAX_DRAFT
) -> Iterator[list[tuple[int, int]]]:
    """Every stream drafts from its known reply, with a wrong token behind the first `right()` ones of each draft.

    Yields (tokens of the stream, draft length) of each round that drafted, while it happens.
    """
    known = [(request.prompt, [*request.prompt, *solo(path, request).tokens]) for request in asked]
    rounds: list[tuple[int, int]] = []

    def propose(self: Drafter, tokens: Sequence[int], most: int, rows: int, costs: RoundCosts) -> list[int]:
        [whole] = {
            tuple(whole) for ids, whole in known if tuple(tokens[: len(ids)]) == ids and tokens == whole[: len(tokens)]
        }
        count, good = min(most, length), right()
        draft = [*whole[len(tokens) :], *[20] * count][:count]
        draft[good:] = [(token + 1) % VOCAB for token in draft[good : good + 1]] + draft[good + 1 :]
        if draft:
            rounds.append((len(tokens), len(draft)))
        return draft

    with patch.object(Drafter, "propose", propose):
        yield rounds


def always(count: int) -> Wrong:
    return lambda: count


def in_turn(counts: Sequence[int]) -> Wrong:
    return cycle(counts).__next__


def drafted(path: Path, way: Way, asked: Sequence[Request], right: Wrong) -> list[Result]:
    """The replies, which must equal the plain ones."""
    with drafting(path, asked, right), engine_for(path, way) as (engine, backend):
        results = ask(engine, *asked)
        for request, result in zip(asked, results, strict=True):
            check(path, backend, request, result)
        assert engine.stats().counters.draft_tokens > 0
        return results


# ---- forced drafts ----


@pytest.mark.parametrize("right", range(MAX_DRAFT + 1))
def test_a_refusal_at_every_place_of_the_window(tiny: Path, right: int) -> None:
    asked = [
        Request(prompt(30, 1), seed=1, max_tokens=40),
        Request(prompt(31, 2), seed=2, max_tokens=40, temperature=0.9),
        Request(prompt(29, 3), seed=3, max_tokens=40, penalties=True),
    ]
    for request in asked:
        [result] = drafted(tiny, PLAIN, [request], always(right))
        assert result.metrics is not None
        rounds = -(-39 // (right + 1))  # the first token comes behind the prompt
        assert result.metrics.accepted_tokens == 39 - rounds
        assert result.metrics.output_tokens == 40


@law
@given(
    length=st.integers(486, 515),
    rights=st.lists(st.integers(0, MAX_DRAFT), min_size=1, max_size=6),
    temperature=st.sampled_from([0.0, 0.9]),
    penalties=st.booleans(),
    chunk=st.sampled_from([None, 16, 129]),
    shuffle=st.integers(0, 9),
)
def test_drafts_across_a_page_edge(
    tiny: Path, length: int, rights: list[int], temperature: float, penalties: bool, chunk: int | None, shuffle: int
) -> None:
    request = Request(prompt(length, 1), seed=1, max_tokens=40, temperature=temperature, penalties=penalties)
    drafted(tiny, replace(PLAIN, prompt_chunk=chunk, shuffle=shuffle), [request], in_turn(rights))


@pytest.mark.parametrize("right", [0, 3, MAX_DRAFT])
def test_drafts_at_the_end_of_a_lease_and_of_the_context(tiny: Path, right: int) -> None:
    """The lease ends with its last page, then with the context; the widest windows stay inside it."""
    for length, tokens in ((512 - SLACK_ROWS - 20, 20), (1024 - SLACK_ROWS - 3, 3), (CONTEXT - 20, 20)):
        request = Request(prompt(length, 1), seed=1, max_tokens=tokens)
        drafted(tiny, replace(PLAIN, slots=1, kv="fixed", prompt_chunk=300), [request], always(right))
        drafted(tiny, replace(PLAIN, slots=1), [request], always(right))


@pytest.mark.parametrize("ends", ["stop", "eos"])
@pytest.mark.parametrize("place", [0, 1, 7, 14, 15])
def test_a_reply_that_ends_inside_an_accepted_draft(tiny: Path, place: int, ends: str) -> None:
    """What was drafted behind the end is never seen, and none of its rows is kept."""
    plain = solo(tiny, Request(prompt(30, 1), seed=1, max_tokens=40, temperature=0.9))
    last = next(t for n, t in enumerate(plain.tokens) if n >= place + 1 and t not in plain.tokens[:n])
    at = plain.tokens.index(last)
    request = Request(prompt(30, 1), seed=1, max_tokens=40, temperature=0.9, stop=(last,))
    with drafting(tiny, [replace(request, stop=())], always(MAX_DRAFT)), engine_for(tiny, PLAIN) as (engine, backend):
        if ends == "eos":
            engine._eos = frozenset({last})
            done: list[int] = []
            params = replace(request.params(), ignore_eos=False, stop_token_ids=())
            engine.submit(request.prompt, params, lambda event: done.extend(event.tokens), seed=1)
            assert engine.drain(60)
            assert done == plain.tokens[: at + 1]
        else:
            [result] = ask(engine, request)
            check(tiny, backend, request, result)
            assert result.tokens == plain.tokens[: at + 1] and result.finish_reason == "stop"
        longer = Request((*request.prompt, *plain.tokens[: at + 1], 20), seed=2)
    # the same again, and on from where it ended
    with (
        drafting(tiny, [replace(request, stop=()), longer], always(MAX_DRAFT)),
        engine_for(tiny, PLAIN) as (engine, backend),
    ):
        ask(engine, request)
        [result] = ask(engine, longer)
        check(tiny, backend, longer, result)
        assert result.cached == 30 + at


@pytest.mark.parametrize("right", [0, 2, MAX_DRAFT])
def test_bans_see_draft_tokens_as_drawn(tiny: Path, right: int) -> None:
    """The stop token is the one that the model draws most: it comes as soon as it isn't banned any more."""
    base = Request(prompt(30, 1), seed=1, max_tokens=40)
    plain = solo(tiny, base).tokens
    asked = [replace(base, stop=(max(plain, key=plain.count),), min_tokens=count) for count in range(1, 40, 3)]
    for request in asked:
        drafted(tiny, PLAIN, [request], always(right))
    assert len({len(solo(tiny, request).tokens) for request in asked}) > 1


@law
@given(
    rights=st.lists(st.integers(0, MAX_DRAFT), min_size=1, max_size=6),
    lengths=st.lists(st.sampled_from([1, 2, 5, 31, 100, 500, 510]), min_size=2, max_size=6),
    slots=st.integers(1, 6),
    chunk=st.sampled_from([None, 7, 64]),
    kv=st.sampled_from(["paged", "fixed"]),
)
def test_several_streams_draft_at_once(
    tiny: Path, rights: list[int], lengths: list[int], slots: int, chunk: int | None, kv: str
) -> None:
    asked = [
        Request(
            (20 + n, *prompt(length, n)), seed=n, max_tokens=9 + 5 * n, temperature=0.9 * (n % 2), penalties=n % 3 == 0
        )
        for n, length in enumerate(lengths)
    ]
    drafted(tiny, replace(PLAIN, slots=slots, prompt_chunk=chunk, kv=kv), asked, in_turn(rights))


def test_a_stream_with_drafts_starts_again_after_a_failed_step(tiny_moe: Path) -> None:
    asked = [Request((20 + n, *prompt(40, n)), seed=n, max_tokens=150, temperature=0.9) for n in range(2)]
    with drafting(tiny_moe, asked, in_turn([3, 0, 15])), engine_for(tiny_moe, PLAIN) as (engine, backend):
        forward, calls = engine._steps._model.forward, []

        def flaky(batch: object, *rest: object) -> object:
            if len(batch.seg_slot) > 1:  # type: ignore[attr-defined]
                calls.append(batch)
                if len(calls) in (1, 3):
                    raise RuntimeError("injected fault")
            return forward(batch, *rest)  # type: ignore[arg-type]

        engine._steps._model.forward = flaky  # type: ignore[method-assign, assignment]
        for request, result in zip(asked, ask(engine, *asked), strict=True):
            check(tiny_moe, backend, request, result)
        assert engine.stats().counters.failed_steps > 0


# ---- what is kept after drafts ----


@pytest.mark.parametrize("right", range(MAX_DRAFT + 1))
def test_a_reply_end_after_refused_drafts_resumes_exactly(tiny: Path, right: int) -> None:
    """Rows behind a refusal or behind the end have moved the conv ring on: neither resuming nor cutting sees them."""
    plain = Chat(prompt(12, 1)).ask(prompt(20, 1), seed=1, temperature=5.0, max_tokens=90)
    reply = solo(tiny, plain).tokens
    count, stop = next((n + 1, token) for n, token in enumerate(reply) if n >= 50 and token not in reply[:n])
    request = replace(plain, stop=(stop,))
    seen = set()
    for back in (0, 1, 2, 10, 15, 16, 17, 18, 25, 30, 31):
        sent = [*request.prompt, *reply[: count - back], *END]
        after = Request((*sent, 6, 20, 30 + back), seed=2 + back, max_tokens=20)
        with drafting(tiny, [plain, after], always(right)) as rounds, engine_for(tiny, PLAIN) as (engine, backend):
            [result] = ask(engine, request)
            check(tiny, backend, request, result)
            assert len(result.tokens) == count
            written = max(at + length for at, length in rounds)
            engine.returned(result.stream_id, sent)
            assert engine.drain(60)
            [result] = ask(engine, after)
            check(tiny, backend, after, result)
            rows = len(request.prompt) + count - max(1, back)
            cut = rows - 2 >= written - RING_ROWS
            assert result.cached == (rows if cut else len(sent))
            seen.add(cut)
    assert seen == {False, True}


@law
@given(
    turns=st.lists(
        st.tuples(st.integers(1, 30), st.lists(st.integers(0, MAX_DRAFT), min_size=1, max_size=4), st.integers(0, 20)),
        min_size=2,
        max_size=4,
    ),
    chunk=st.sampled_from([None, 5, 64]),
)
def test_drafted_chats_resume_exactly(tiny: Path, turns: list[tuple[int, list[int], int]], chunk: int | None) -> None:
    conversation = [1, *prompt(490, 3)]
    with engine_for(tiny, replace(PLAIN, prompt_chunk=chunk)) as (engine, backend):
        for seed, (count, rights, back) in enumerate(turns):
            request = Request((*conversation, *prompt(3, seed)), seed=seed, temperature=0.9, max_tokens=count, marks=())
            with drafting(tiny, [request], in_turn(rights)):
                [result] = ask(engine, request)
                check(tiny, backend, request, result)
            whole = [*request.prompt, *result.tokens]
            conversation = [*whole[: len(whole) - back], 10 + seed]
            engine.returned(result.stream_id, conversation)
            assert engine.drain(60)


# ---- the lookup in the engine ----

COPYING = Request(prompt(25, 1) * 4, seed=1, max_tokens=60)


def cheap(self: RoundCosts, counts: Sequence[int]) -> list[float]:
    return [1.0 for _ in counts]


def dear(self: RoundCosts, counts: Sequence[int]) -> list[float]:
    return [float(rows) for rows in counts]


def test_the_lookup_drafts_where_rows_are_cheap_and_not_where_they_are_dear(tiny: Path) -> None:
    seen = []
    for estimate in (cheap, dear):
        with patch.object(RoundCosts, "estimates", estimate), engine_for(tiny, PLAIN) as (engine, backend):
            [result] = ask(engine, COPYING)
            check(tiny, backend, COPYING, result)
            counters = engine.stats().counters
            assert result.metrics is not None
            assert result.metrics.draft_tokens == counters.draft_tokens >= counters.accepted_tokens
            assert counters.decode_rows == counters.decode_rounds + counters.draft_tokens
            assert counters.decode_rounds == 59 - counters.accepted_tokens
            seen.append(counters.draft_tokens)
    assert seen[0] > 0 == seen[1]


def test_a_stream_that_gains_nothing_stops_drafting(tiny: Path) -> None:
    """A stream whose drafts are all refused drafts at ever longer intervals: a handful in 300 tokens."""
    request = Request(prompt(5, 1) * 20, seed=1, max_tokens=300, temperature=3.0)

    def wrong(self: object, tokens: list[int], most: int) -> list[int]:
        return [399][:most]

    with (
        patch.object(RoundCosts, "estimates", cheap),
        patch.object(SuffixLookup, "propose", wrong),
        engine_for(tiny, PLAIN) as (engine, backend),
    ):
        [result] = ask(engine, request)
        check(tiny, backend, request, result)
        assert result.metrics is not None
        assert 1 <= result.metrics.draft_tokens - result.metrics.accepted_tokens <= 8


def test_drafts_can_be_turned_off_for_a_request_and_for_an_engine(tiny: Path) -> None:
    with patch.object(RoundCosts, "estimates", cheap):
        for way, request in ((replace(PLAIN, drafts=False), COPYING), (PLAIN, replace(COPYING, draft=False))):
            with engine_for(tiny, way) as (engine, backend):
                [result] = ask(engine, request)
                check(tiny, backend, request, result)
                assert engine.stats().counters.draft_tokens == 0
