"""Kept states: what resumes, from where, and that it changes no bit of any reply."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kernels_numba.batch import RING_ROWS
from lfm2serve.engine import Engine
from lfm2serve.memory.prompt_cache import Mark
from tests.law.harness import END, Chat, Collector, Request, Result, Way, ask, check, engine_for, prompt, solo

KEEPING = Way(threads=1, snapshot_pages=256, snapshot_bytes=128 << 10)
WAYS = st.builds(
    replace,
    st.just(KEEPING),
    prompt_chunk=st.one_of(st.none(), st.sampled_from([1, 3, 16, 64, 129])),
    slots=st.integers(1, 4),
    kv=st.sampled_from(["paged", "fixed"]),
    shuffle=st.one_of(st.none(), st.integers(0, 9)),
    drafts=st.booleans(),
    queued=st.booleans(),
)
few = settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def kept(engine: Engine) -> list[tuple[int, str]]:
    """Every state that can hit: tokens and kind of mark, shortest first."""
    return sorted((state.at, str(state.mark)) for state in engine._keeper.cache.states if state.ready)


def reply(engine: Engine, chat: Chat, request: Request) -> Result:
    """One turn of a chat whose client sends back what it got."""
    [result] = ask(engine, request)
    engine.returned(result.stream_id, chat.answered(request, result.tokens))
    return result


# ---- chats ----


@few
@given(
    way=WAYS,
    texts=st.lists(st.one_of(st.integers(0, 40), st.sampled_from([100, 200])), min_size=4, max_size=4),
    system=st.sampled_from([0, 1, 30, 505]),
    temperature=st.sampled_from([0.0, 0.9]),
    penalties=st.booleans(),
    restart=st.integers(0, 3),
)
def test_a_resumed_chat_is_the_fresh_one(
    tiny: Path, way: Way, texts: list[int], system: int, temperature: float, penalties: bool, restart: int
) -> None:
    chat, turn = Chat(prompt(system, 5)), 0
    for turns in (texts[:restart], texts[restart:]):  # between them the engine starts again, with nothing kept
        with engine_for(tiny, way) as (engine, backend):
            ends = 0
            for length in turns:
                turn += 1
                request = chat.ask(
                    prompt(length, turn),
                    seed=turn,
                    temperature=temperature,
                    penalties=penalties,
                    max_tokens=3 + 5 * turn,
                )
                result = reply(engine, chat, request)
                check(tiny, backend, request, result)
                assert result.cached == ends
                ends = len(request.prompt) + len(result.tokens) - 1  # the last token's row never ran


@pytest.mark.parametrize(("drafts", "queued"), [(False, False), (True, False), (False, True), (True, True)])
def test_eight_chats_of_four_turns_hit_at_every_later_turn(tiny: Path, drafts: bool, queued: bool) -> None:
    chats = [Chat(prompt(10 + 7 * n, n)) for n in range(8)]
    way = replace(KEEPING, slots=3, drafts=drafts, shuffle=3, prompt_chunk=70, queued=queued)
    with engine_for(tiny, way) as (engine, backend):
        for turn in range(4):
            asked = [
                chat.ask(prompt(3 + 4 * n, turn), seed=10 * turn + n, temperature=0.8 * (n % 2), max_tokens=14)
                for n, chat in enumerate(chats)
            ]
            before = [len(chat.tokens) - 3 for chat in chats]
            for chat, request, result, rows in zip(chats, asked, ask(engine, *asked), before, strict=True):
                check(tiny, backend, request, result)
                # different chats begin with three equal tokens, and even those are resumed
                assert result.cached == rows if turn else result.cached in (0, 3)
                engine.returned(result.stream_id, chat.answered(request, result.tokens))
        assert engine.stats().cache.counters.hits[Mark.REPLY] == 24
        assert engine.stats().counters.warm_passes == 0


def test_chats_in_a_cache_that_is_too_small_for_them_stay_equal(tiny_moe: Path) -> None:
    chats = [Chat(prompt(30, n)) for n in range(6)]
    way = replace(KEEPING, snapshot_pages=45, slots=2, pages=4, prompt_chunk=100)
    with engine_for(tiny_moe, way) as (engine, backend):
        for turn in range(4):
            asked = [
                chat.ask(prompt(20 + 30 * n, turn), seed=10 * turn + n, temperature=0.8 * (n % 2))
                for n, chat in enumerate(chats)
            ]
            for chat, request, result in zip(chats, asked, ask(engine, *asked), strict=True):
                check(tiny_moe, backend, request, result)
                comes_back = result.tokens if turn % 2 else prompt(40, 100 * turn)
                engine.returned(result.stream_id, chat.answered(request, comes_back))
            assert engine.drain(60)
            assert engine.stats().cache.held_bytes <= 45 * way.snapshot_bytes
        counters = engine.stats().cache.counters
        assert counters.evictions.total() > 20 and counters.hits.total() > 3


def test_long_requests_on_a_pool_that_is_short_resume_and_draft_as_ever(tiny_moe: Path) -> None:
    common = prompt(450, 1)
    first = Request((*common, 20), seed=99, marks=((450, Mark.SHARED),))
    asked = [
        Request((*common, *prompt(100 + n, n)), seed=n, max_tokens=20, temperature=0.8 * (n % 2)) for n in range(8)
    ]
    with engine_for(tiny_moe, replace(KEEPING, pages=4, prompt_chunk=150, shuffle=2)) as (engine, backend):
        ask(engine, first)
        results = ask(engine, *asked)
        for request, result in zip(asked, results, strict=True):
            check(tiny_moe, backend, request, result)
            assert result.cached == 450
        admitted = [result.metrics.admitted for result in results if result.metrics is not None]
        assert admitted == sorted(admitted)  # type: ignore[type-var]


def test_a_client_that_says_nothing_resumes_at_the_history_end(tiny: Path) -> None:
    chat = Chat(prompt(20, 1))
    with engine_for(tiny, KEEPING) as (engine, backend):
        settled = 0
        for turn in range(4):
            request = chat.ask(prompt(9, turn), seed=turn)
            [result] = ask(engine, request)
            check(tiny, backend, request, result)
            assert result.cached == settled
            assert result.metrics is not None and result.metrics.cache_hit == ("history" if turn else None)
            settled = chat.settled
            chat.answered(request, result.tokens)
        assert engine.stats().cache.counters.hits == {Mark.HISTORY: 3}


# ---- prompts of any length ----


@pytest.mark.parametrize("length", [2, 3, 31, 32, 33, 40, 64, 100, 513, 527, 528, 561])
def test_an_identical_prompt_hits_a_row_before_its_end_and_its_extension_too(tiny: Path, length: int) -> None:
    request = Request(prompt(length, 2), seed=1, max_tokens=5)
    with engine_for(tiny, KEEPING) as (engine, backend):
        for cached in (0, length - 1, length - 1):
            [result] = ask(engine, request)
            check(tiny, backend, request, result)
            assert result.cached == cached
        assert result.metrics is not None
        assert (result.metrics.cache_hit, result.metrics.cache_missed) == ("prompt", None)
        longer = Request(request.prompt + prompt(20, 3), seed=2, max_tokens=5)
        [result] = ask(engine, longer)
        check(tiny, backend, longer, result)
        assert result.cached >= length - 1


def test_a_completion_that_goes_on_resumes_at_the_rows_that_ran(tiny: Path) -> None:
    request = Request(prompt(50, 2), seed=1, max_tokens=9)
    with engine_for(tiny, KEEPING) as (engine, backend):
        [first] = ask(engine, request)
        longer = Request((*request.prompt, *first.tokens, 20, 21), seed=2)
        [result] = ask(engine, longer)
        check(tiny, backend, longer, result)
        assert result.cached == 58 and result.metrics is not None and result.metrics.cache_hit == "reply"


def test_a_prompt_of_one_token_has_nothing_to_resume(tiny: Path) -> None:
    with engine_for(tiny, KEEPING) as (engine, backend):
        for _ in range(2):
            request = Request((50,), seed=1, max_tokens=4)
            [result] = ask(engine, request)
            check(tiny, backend, request, result)
            assert result.cached == 0


def test_an_identical_chat_hits_at_its_history_end_then_a_row_before_its_end(tiny: Path) -> None:
    chat = Chat(prompt(15, 1))
    request = chat.ask(prompt(30, 1), seed=4)
    settled, whole = chat.settled, len(request.prompt)
    with engine_for(tiny, KEEPING) as (engine, backend):
        cached = []
        for _ in range(4):
            [result] = ask(engine, request)
            check(tiny, backend, request, result)
            cached.append(result.cached)
            engine.returned(result.stream_id, chat.answered(request, result.tokens))
        # the reply's end holds the whole prompt: where they part, one row before the prompt's end, is kept from then on
        assert cached == [0, settled, whole - 1, whole - 1]


# ---- edits, branches, shared beginnings ----


def test_an_edited_message_resumes_at_its_start_and_a_branch_from_an_earlier_turn_does_too(tiny: Path) -> None:
    chat = Chat(prompt(12, 1))
    with engine_for(tiny, KEEPING) as (engine, backend):
        sent = []
        for turn in range(4):
            before = list(chat.tokens)
            request = chat.ask(prompt(25, turn), seed=turn)
            sent.append((before, request))
            reply(engine, chat, request)
        for turn in (3, 1):
            before, request = sent[turn]
            edited = Chat()
            edited.tokens, edited.shared = before, chat.shared
            other = edited.ask(prompt(17, 40 + turn), seed=20 + turn)
            [result] = ask(engine, other)
            check(tiny, backend, other, result)
            assert result.cached == len(before) + 2
            assert result.metrics is not None and result.metrics.cache_hit == "last_user"


def test_another_chat_with_the_same_system_prompt_resumes_behind_it(tiny: Path) -> None:
    system = prompt(120, 1)
    with engine_for(tiny, KEEPING) as (engine, backend):
        first, second = Chat(system), Chat(system)
        reply(engine, first, first.ask((100, *prompt(20, 1)), seed=1))
        request = second.ask((101, *prompt(20, 2)), seed=2)
        [result] = ask(engine, request)
        check(tiny, backend, request, result)
        # two tokens that open every user message follow the system prompt: the last user text starts behind them
        assert result.cached == second.shared + 2
        third = Chat((*system[:-1], 399))
        request = third.ask(prompt(20, 3), seed=3)
        [result] = ask(engine, request)
        check(tiny, backend, request, result)
        assert result.cached == 0 and result.metrics is not None
        assert result.metrics.cache_missed == f"diverged at token {3 + 119}"


def test_where_two_prompts_part_is_kept_on_the_second_pass_and_hits_on_the_third(tiny: Path) -> None:
    common = prompt(90, 1)
    asked = [Request((*common, 100 + n, *prompt(30, n)), seed=n) for n in range(4)]
    with engine_for(tiny, KEEPING) as (engine, backend):
        seen = []
        for request in asked:
            [result] = ask(engine, request)
            check(tiny, backend, request, result)
            assert result.metrics is not None
            seen.append((result.cached, result.metrics.cache_hit, result.metrics.cache_missed))
            if request is asked[1]:
                assert (90, "shared") in kept(engine)
        assert seen == [
            (0, None, None),
            (0, None, "diverged at token 90"),
            (90, "shared", None),
            (90, "shared", None),
        ]


@pytest.mark.parametrize("count", range(1, 9))
def test_requests_on_one_shared_beginning_all_equal_solo(tiny_moe: Path, count: int) -> None:
    common = prompt(200, 1)
    first = Request((*common, 20), seed=0, marks=((200, Mark.SHARED),))
    asked = [Request((*common, *prompt(5 + n, n)), seed=1 + n, temperature=0.7 * (n % 2)) for n in range(count)]
    with engine_for(tiny_moe, replace(KEEPING, slots=5)) as (engine, backend):
        ask(engine, first)
        for request, result in zip(asked, ask(engine, *asked), strict=True):
            check(tiny_moe, backend, request, result)
            assert result.cached == 200
    with engine_for(tiny_moe, replace(KEEPING, slots=8)) as (engine, backend):
        for request, result in zip(asked, ask(engine, *asked), strict=True):  # nothing is kept before they start
            check(tiny_moe, backend, request, result)


# ---- the reply's end ----


@pytest.mark.parametrize("back", [0, 1, 2, 15, 30, 31, 32, 33, 60])
def test_a_reply_that_comes_back_shorter_resumes_exactly_where_it_was_cut(tiny: Path, back: int) -> None:
    """As far as the ring goes the reply's end is cut; beyond, a background pass prepares the next turn's start."""
    chat = Chat(prompt(12, 1))
    with engine_for(tiny, replace(KEEPING, drafts=False)) as (engine, backend):
        request = chat.ask(prompt(20, 1), seed=1, temperature=0.9, max_tokens=80)
        [result] = ask(engine, request)
        assert back == 0 or result.tokens[80 - back] != END[0]
        ran = len(request.prompt) + 79  # the last token's row never did
        rows = min(ran, len(request.prompt) + 80 - back)
        sent = chat.answered(request, result.tokens[: 80 - back])
        engine.returned(result.stream_id, sent)
        assert engine.drain(60)
        within = rows - 2 >= ran - RING_ROWS
        assert engine.stats().counters.warm_passes == (not within)
        expected = rows if within else len(sent)
        assert kept(engine)[-1] == (expected, "reply")
        following = chat.ask(prompt(8, 2), seed=2)
        [after] = ask(engine, following)
        check(tiny, backend, following, after)
        assert after.cached == expected


@pytest.mark.parametrize("back", [1, 2, 3, 4, 5, 30])
def test_a_ring_that_a_resumed_stream_never_filled_is_not_cut_into(tiny: Path, back: int) -> None:
    """A state kept by a tap brings two conv inputs along: what lies before them is whatever the slot held."""
    base = Request(prompt(100, 1), seed=1, max_tokens=2, marks=((99, Mark.SHARED),))
    other = Request(prompt(90, 7), seed=2, max_tokens=20, prompt_cache=False)
    with engine_for(tiny, replace(KEEPING, slots=1, drafts=False)) as (engine, backend):
        ask(engine, base)
        ask(engine, other)
        request = Request((*base.prompt[:99], 30, 31), seed=3, max_tokens=3, marks=())
        [result] = ask(engine, request)
        check(tiny, backend, request, result)
        assert result.cached == 99
        ran = [*request.prompt, *result.tokens][:103]
        engine.returned(result.stream_id, [*ran[: 103 - back], 20])
        assert engine.drain(60)
        after = Request((*ran[: 103 - back], 20, 21), seed=4)
        [result] = ask(engine, after)
        check(tiny, backend, after, result)
        assert result.cached == (103 - back if back <= 4 else 104 - back)  # cut, or prepared as it came back


@few
@given(
    way=WAYS,
    cuts=st.lists(st.tuples(st.integers(1, 30), st.integers(0, 45)), min_size=2, max_size=4),
    seed=st.integers(0, 5),
)
def test_cut_after_cut_is_exact(tiny: Path, way: Way, cuts: list[tuple[int, int]], seed: int) -> None:
    """Replies that come back with their end dropped, again and again, also into the turns before."""
    conversation, turn = [1, *prompt(40, seed)], 0
    with engine_for(tiny, way) as (engine, backend):
        for length, back in cuts:
            turn += 1
            request = Request(
                (*conversation, *prompt(3, turn)), seed=turn, temperature=0.9, max_tokens=length, marks=()
            )
            [result] = ask(engine, request)
            check(tiny, backend, request, result)
            whole = [*request.prompt, *result.tokens]
            conversation = [*whole[: max(2, len(whole) - back)], 10 + turn]
            engine.returned(result.stream_id, conversation)
            assert engine.drain(60)


# ---- taps ----


@few
@given(
    way=WAYS,
    length=st.sampled_from([30, 140, 530]),
    places=st.lists(st.floats(0.0, 1.0), min_size=1, max_size=4),
    seed=st.integers(0, 9),
)
def test_every_mark_resumes_exactly(tiny: Path, way: Way, length: int, places: list[float], seed: int) -> None:
    ids = prompt(length, seed)
    at = sorted({max(1, round(place * length)) for place in places})
    request = Request(ids, seed=1, max_tokens=2, marks=tuple((a, Mark.SHARED) for a in at))
    with engine_for(tiny, way) as (engine, backend):
        [result] = ask(engine, request)
        check(tiny, backend, request, result)
        assert [a for a, _ in kept(engine)] == at
        for n, a in enumerate(at):
            after = Request((*ids[:a], *[(t + 1) % 300 + 50 for t in prompt(4, n)]), seed=10 + n, max_tokens=4)
            [result] = ask(engine, after)
            check(tiny, backend, after, result)
            assert result.cached == a


@pytest.mark.parametrize("queued", [False, True])
def test_a_reply_that_a_stop_string_ended_is_kept_as_far_as_it_comes_back(tiny: Path, queued: bool) -> None:
    """Whoever reads the text sees the stop string some tokens after it was drawn, and says that the reply is whole."""
    chat = Chat(prompt(12, 1))
    with engine_for(tiny, replace(KEEPING, drafts=False, queued=queued)) as (engine, backend):
        request = chat.ask(prompt(20, 1), seed=1, temperature=0.9, max_tokens=900)
        whole = solo(tiny, replace(request, max_tokens=12))
        collector = StopAfter(engine, 12)
        result = collector.submit(request)
        collector.wait()
        assert result.finish_reason == "stop" and result.tokens[:12] == whole.tokens
        sent = chat.answered(request, result.tokens[:10])
        engine.returned(result.stream_id, sent)
        assert engine.drain(60)
        assert engine.stats().counters.warm_passes == 0
        following = chat.ask(prompt(8, 2), seed=2)
        [after] = ask(engine, following)
        check(tiny, backend, following, after)
        assert after.cached == len(request.prompt) + 10


class StopAfter(Collector):
    """Says that a reply is whole once it has so many tokens."""

    def __init__(self, engine: Engine, count: int) -> None:
        super().__init__(engine)
        self.count = count

    def seen(self, result: Result, stream_id: int) -> None:
        if len(result.tokens) >= self.count:
            self.engine.cancel(stream_id, whole=True)
