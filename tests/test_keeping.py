"""What the engine keeps, prepares, gives up and drops; that replies stay equal is the law's to test."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lfm2serve import keeping
from lfm2serve.engine import Engine
from lfm2serve.errors import InvalidRequest
from lfm2serve.memory.prompt_cache import Mark
from lfm2serve.memory.states import TAPS
from tests.law.harness import (
    ASSISTANT,
    END,
    USER,
    Chat,
    Collector,
    Request,
    Way,
    ask,
    check,
    check_kept,
    engine_for,
    prompt,
)
from tests.law.test_kept import KEEPING, kept, reply

# ---- who neither resumes nor keeps ----


def test_prompt_logprobs_never_resume_but_keep(tiny: Path) -> None:
    ids = prompt(60, 1)
    with engine_for(tiny, KEEPING) as (engine, backend):
        request = Request(ids, seed=1)
        for cached in (0, 59):
            [result] = ask(engine, request)
            assert result.cached == cached
        done: list[object] = []
        params = replace(request.params(), prompt_logprobs=1)
        for _ in range(2):
            engine.submit(ids, params, done.append, seed=2)
            assert engine.drain(60)
        events = [event for event in done if event.finish_reason is not None]  # type: ignore[attr-defined]
        assert [event.metrics.cached_tokens for event in events] == [0, 0]
        scores = [event.prompt_logprobs for event in done if event.prompt_logprobs]  # type: ignore[attr-defined]
        assert len(scores) == 2 and scores[0] == scores[1] and len(scores[0]) == 60
        assert engine.clear_prompt_cache()
        engine.submit(ids, params, done.append, seed=2)
        assert engine.drain(60)
        [result] = ask(engine, request)
        check(tiny, backend, request, result)
        assert result.cached == 59


def test_a_request_without_the_prompt_cache_neither_resumes_nor_keeps(tiny: Path) -> None:
    request = Request(prompt(60, 1), seed=1)
    with engine_for(tiny, KEEPING) as (engine, backend):
        off = replace(request, prompt_cache=False)
        [result] = ask(engine, off)
        assert kept(engine) == []
        ask(engine, request)
        before = kept(engine)
        [result] = ask(engine, replace(off, prompt=(*request.prompt, 30)))
        check(tiny, backend, replace(off, prompt=(*request.prompt, 30)), result)
        assert result.cached == 0 and kept(engine) == before
        assert engine.stats().cache.counters.lookups == 1


def test_without_a_budget_nothing_is_kept_and_nothing_prepared(tiny: Path) -> None:
    chat = Chat(prompt(12, 1))
    with engine_for(tiny, replace(KEEPING, snapshot_pages=0)) as (engine, backend):
        for turn in range(2):
            request = chat.ask(prompt(30, turn), seed=turn)
            result = reply(engine, chat, request)
            check(tiny, backend, request, result)
            assert result.cached == 0
        assert engine.drain(60)
        assert engine.stats().counters.warm_passes == 0 and engine.stats().cache.states == 0


# ---- what comes back ----


@pytest.mark.parametrize("few", [True, False])
def test_a_background_pass_is_made_where_it_spares_sixteen_rows(tiny_moe: Path, few: bool) -> None:
    chat = Chat(prompt(12, 1))
    with engine_for(tiny_moe, KEEPING) as (engine, _):
        request = chat.ask(prompt(20, 1), seed=1, max_tokens=60)
        [result] = ask(engine, request)
        sent = chat.answered(request, prompt(16 - len(ASSISTANT) - len(END) - few, 9))
        engine.returned(result.stream_id, sent)
        assert engine.drain(60)
        assert engine.stats().counters.warm_passes == (not few)
        [result] = ask(engine, chat.ask(prompt(5, 2), seed=2))
        assert result.cached == (
            chat.settled - 5 - len(USER) - len(END) if not few else len(request.prompt) - len(ASSISTANT)
        )


def test_a_forgotten_reply_leaves_nothing(tiny: Path) -> None:
    chat = Chat(prompt(12, 1))
    with engine_for(tiny, KEEPING) as (engine, _):
        request = chat.ask(prompt(20, 1), seed=1)
        [result] = ask(engine, request)
        assert engine.stats().cache.states == len(kept(engine)) + 1
        engine.forget(result.stream_id)
        engine.forget(result.stream_id)
        engine.forget(999)
        assert engine.drain(60)
        assert [mark for _, mark in kept(engine)] == ["shared", "last_user", "history"]
        assert engine.stats().cache.states == 3
        engine.returned(result.stream_id, [])
        assert engine.drain(60)


def test_a_reply_that_was_cancelled_keeps_no_end(tiny: Path) -> None:
    chat = Chat(prompt(12, 1))
    with engine_for(tiny, KEEPING) as (engine, _):
        ask(engine, chat.ask(prompt(20, 1), seed=1, max_tokens=200, cancel_after=5))
        assert {mark for _, mark in kept(engine)} == {"shared", "last_user", "history"}
        assert engine.stats().cache.states == 3


def test_replies_that_nobody_claims_give_way(tiny: Path) -> None:
    """Clients that never come back can't fill the cache for good."""
    with engine_for(tiny, replace(KEEPING, snapshot_pages=30)) as (engine, backend):
        for n in range(12):
            ask(engine, Request(prompt(20, n), seed=n, marks=()))
        request = Request(prompt(33, 50), seed=50)
        for cached in (0, 32):
            [result] = ask(engine, request)
            check(tiny, backend, request, result)
            assert result.cached == cached


def test_only_so_many_replies_are_waited_for(tiny_moe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeping, "MAX_PENDING", 3)
    with engine_for(tiny_moe, KEEPING) as (engine, _):
        asked = [Request(prompt(20, n), seed=n, marks=()) for n in range(5)]
        results = ask(engine, *asked)
        assert engine.stats().cache.states == 3
        for request, result in zip(asked, results, strict=True):
            engine.returned(result.stream_id, [*request.prompt, *result.tokens, 7])
        assert engine.drain(60)
        # the two that were given up are as long as a pass is worth: it prepares them anew
        assert engine.stats().counters.warm_passes == 2 and len(kept(engine)) == 5


def test_token_ids_that_are_no_tokens_are_refused(tiny: Path) -> None:
    with engine_for(tiny, KEEPING) as (engine, _), pytest.raises(InvalidRequest, match="400"):
        engine.returned(1, [5, 400])


# ---- taps ----


@pytest.mark.parametrize("chunk", [None, 64, 7])
def test_keeping_states_costs_no_prompt_pass(tiny: Path, chunk: int | None) -> None:
    ids = prompt(600, 1)
    kinds = (Mark.HISTORY, Mark.LAST_USER, Mark.SHARED, Mark.PROMPT)
    steps = []
    for marks in ((), ((599, Mark.HISTORY), (590, Mark.SHARED)), tuple(zip((599, 598, 597, 596), kinds, strict=True))):
        with engine_for(tiny, replace(KEEPING, prompt_chunk=chunk)) as (engine, backend):
            request = Request(ids, seed=1, max_tokens=2, marks=marks)
            [result] = ask(engine, request)
            check(tiny, backend, request, result)
            steps.append(engine.stats().counters.prompt_steps)
            assert kept(engine) == sorted((at, str(mark)) for at, mark in marks)
    assert steps[0] == steps[1] == steps[2] == -(-600 // (chunk or 512))


def test_a_first_token_waits_for_no_copy(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    marks = ((20, Mark.LAST_USER), (55, Mark.HISTORY))
    with engine_for(tiny, KEEPING) as (engine, backend):
        order: list[object] = []
        sample, copy, commit = backend.sample, backend.copy, engine._commit

        def drawing(logits: Any, rows: Any, meanwhile: Any = None) -> Any:
            def told() -> None:
                order.append("queued")
                meanwhile()
                order.append("waited for")

            return sample(logits, rows, told)

        monkeypatch.setattr(backend, "sample", drawing)
        monkeypatch.setattr(backend, "copy", lambda *given: (order.append("copy"), copy(*given)))
        monkeypatch.setattr(engine, "_commit", lambda *given: (order.append("given out"), commit(*given)))
        ask(engine, Request(prompt(60, 1), seed=1, marks=marks, max_tokens=1))
    assert order[:7] == ["queued", *["copy"] * 4, "waited for", "given out"]


def test_of_more_than_four_marks_the_most_important_are_kept(tiny: Path) -> None:
    marks = [
        (10, Mark.SHARED),
        (20, Mark.PROMPT),
        (30, Mark.SHARED),
        (40, Mark.LAST_USER),
        (50, Mark.SHARED),
        (60, Mark.HISTORY),
    ]
    for seed in range(3):
        random.Random(seed).shuffle(marks)
        with engine_for(tiny, KEEPING) as (engine, _):
            ask(engine, Request(prompt(70, 1), seed=1, marks=tuple(marks)))
            assert kept(engine) == [(30, "shared"), (40, "last_user"), (50, "shared"), (60, "history")]


def test_a_packed_step_with_more_marks_than_taps_keeps_the_most_important(tiny: Path) -> None:
    kinds = (Mark.SHARED, Mark.LAST_USER, Mark.HISTORY)
    marks = tuple(zip((5, 10, 15), kinds, strict=True))
    asked = [Request(prompt(20, n), seed=n, marks=marks, max_tokens=2) for n in range(8)]
    with engine_for(tiny, KEEPING) as (engine, backend):
        gate(engine, asked)
        for request, result in zip(asked, ask(engine, *asked), strict=True):
            check(tiny, backend, request, result)
        assert engine.stats().counters.prompt_steps == 1
        assert sorted(mark for _, mark in kept(engine)) == ["history"] * 8 + ["last_user"] * (TAPS - 8)


def gate(engine: Engine, requests: Sequence[Request]) -> None:
    """Hold the engine back until all of the requests wait, so that they share its next step."""
    admit = engine._scheduler.admit

    def late() -> list[object]:
        if len(engine._scheduler.waiting) < len(requests):
            return []
        engine._scheduler.admit = admit  # type: ignore[method-assign]
        return admit()  # type: ignore[return-value]

    engine._scheduler.admit = late  # type: ignore[method-assign, assignment]


# ---- background passes ----


LONG = 300  # tokens of a reply that comes back in other words


def different(engine: Engine, chat: Chat, request: Request) -> list[int]:
    """A turn whose reply comes back as other tokens than those that ran; what comes back."""
    [result] = ask(engine, request)
    sent = chat.answered(request, prompt(LONG, 900))
    engine.returned(result.stream_id, sent)
    return sent


class Watch:
    """Sees every step of an engine: whether it is a background pass's, and that nobody waits for a token then.

    before: called on the engine's thread ahead of each background step, with how many there were.
    """

    def __init__(self, engine: Engine, before: Callable[[int], None] = lambda count: None) -> None:
        self._engine = engine
        self._steps = ""
        scheduler, model = engine._scheduler, engine._steps._model
        scheduler.pace._max_gap_s = 0.0  # the smallest chunks
        forward = model.forward

        def watched(batch: Any, *rest: Any) -> Any:
            warming = scheduler.warming
            background = warming is not None and batch.seg_slot.tolist() == [warming.slot]
            if background:
                assert not (scheduler.waiting or scheduler.filling or scheduler.running)
                before(self._steps.count("b"))
            self._steps += "b" if background else "f"
            return forward(batch, *rest)

        model.forward = watched  # type: ignore[method-assign]

    @property
    def steps(self) -> str:
        """A letter for each step, of a background pass or of the foreground."""
        assert self._engine.stats().counters.failed_steps == 0
        return self._steps


def test_a_background_pass_prepares_exactly_what_comes_back(tiny: Path) -> None:
    chat = Chat(prompt(12, 1))
    with engine_for(tiny, KEEPING) as (engine, backend):
        sent = different(engine, chat, chat.ask(prompt(20, 1), seed=1))
        assert engine.drain(60)
        counters = engine.stats().counters
        assert (counters.warm_passes, counters.failed_streams) == (1, 0)
        assert kept(engine)[-1] == (len(sent), "reply")
        assert engine.stats().cache.counters.hits.total() == 0  # what the pass itself resumed is nobody's hit
        following = chat.ask(prompt(8, 2), seed=2)
        [result] = ask(engine, following)
        check(tiny, backend, following, result)
        assert result.cached == len(sent)
        engine.returned(result.stream_id, chat.answered(following, result.tokens))
        assert engine.drain(60)
        assert engine.stats().counters.warm_passes == 1


def test_a_foreground_request_outranks_a_background_pass_at_once(tiny_moe: Path) -> None:
    chat, collected = Chat(prompt(12, 1)), []
    others = [Request(prompt(40, 60 + n), seed=60 + n, max_tokens=6) for n in range(3)]
    with engine_for(tiny_moe, replace(KEEPING, drafts=False)) as (engine, backend):

        def arrive(count: int) -> None:
            if count in (2, 5, 6):
                collected.append(Collector(engine))
                collected[-1].submit(others[len(collected) - 1])

        watch = Watch(engine, arrive)
        sent = different(engine, chat, chat.ask(prompt(20, 1), seed=1))
        assert engine.drain(60)
        for collector, request in zip(collected, others, strict=True):
            check(tiny_moe, backend, request, collector.wait()[0])
        # right behind the step during which it came, until it is served
        assert watch.steps.strip("f").startswith("bbb" + 6 * "f" + "bbb" + 6 * "f" + "b" + 6 * "f" + "b")
        assert (len(sent), "reply") in kept(engine)
        assert watch.steps.count("b") == -(-(LONG + len(END)) // 8)  # the rows before them are kept: nothing ran twice


@pytest.mark.parametrize("short_of", ["pages", "slots"])
def test_a_background_pass_gives_way_to_a_request_that_needs_its_memory_and_is_made_up_for(
    tiny_moe: Path, short_of: str
) -> None:
    chat, collector = Chat(prompt(12, 1)), []
    other = Request(prompt(500, 60), seed=60, max_tokens=6)
    way = replace(KEEPING, pages=2) if short_of == "pages" else replace(KEEPING, slots=1)
    with engine_for(tiny_moe, way) as (engine, backend):

        def arrive(count: int) -> None:
            if count == 2:
                collector.append(Collector(engine))
                collector[0].submit(other)

        watch = Watch(engine, arrive)
        sent = different(engine, chat, chat.ask(prompt(20, 1), seed=1))
        assert engine.drain(60)
        check(tiny_moe, backend, other, collector[0].wait()[0])
        assert "bbbf" in watch.steps and watch.steps.endswith("b")
        assert (len(sent), "reply") in kept(engine)
        assert engine.stats().counters.warm_passes == 1
        check_kept(engine)


def test_a_drain_waits_for_a_background_pass_and_close_ends_it(tiny_moe: Path) -> None:
    started, go_on = threading.Event(), threading.Event()

    def hold(count: int) -> None:
        if count == 1:
            started.set()
            assert go_on.wait(60)

    chat = Chat(prompt(12, 1))
    with engine_for(tiny_moe, KEEPING) as (engine, _):
        Watch(engine, hold)
        sent = different(engine, chat, chat.ask(prompt(20, 1), seed=1))
        assert started.wait(60) and not engine.drain(0)
        go_on.set()
        assert engine.drain(60) and (len(sent), "reply") in kept(engine)
    started.clear()
    go_on.clear()
    chat = Chat(prompt(12, 1))
    with engine_for(tiny_moe, KEEPING, ends=True) as (engine, _):
        Watch(engine, hold)
        different(engine, chat, chat.ask(prompt(20, 1), seed=1))
        assert started.wait(60)
        engine._closing = True
        go_on.set()
        engine.close()
        assert engine.census().clean and engine.stats().cache.states == 0


def test_background_passes_can_be_turned_off(tiny_moe: Path) -> None:
    chat = Chat(prompt(12, 1))
    with engine_for(tiny_moe, replace(KEEPING, warm_pass=False)) as (engine, backend):
        request = chat.ask(prompt(20, 1), seed=1)
        watch = Watch(engine)
        different(engine, chat, request)
        following = chat.ask(prompt(8, 2), seed=2)
        [result] = ask(engine, following)
        check(tiny_moe, backend, following, result)
        assert result.cached == len(request.prompt)  # the reply's end, cut where the tokens part
        assert engine.stats().counters.warm_passes == 0 and "b" not in watch.steps


def test_a_pass_whose_state_is_there_or_has_no_room_runs_nothing(tiny_moe: Path) -> None:
    chat = Chat(prompt(12, 1))
    with engine_for(tiny_moe, KEEPING) as (engine, _):
        watch = Watch(engine)
        request = chat.ask(prompt(20, 1), seed=1)
        [result] = ask(engine, request)
        sent = chat.answered(request, prompt(LONG, 900))
        with engine._book:  # both are queued before the first of them runs
            engine.returned(result.stream_id, sent)
            engine.returned(result.stream_id, sent)
        assert engine.drain(60)
        assert engine.stats().counters.warm_passes == 2
        assert watch.steps.count("b") == -(-(LONG + len(END)) // 8)
    with engine_for(tiny_moe, replace(KEEPING, snapshot_pages=STATE)) as (engine, _):
        watch = Watch(engine)
        [result] = ask(engine, Request(prompt(600, 1), seed=1, marks=()))
        engine.returned(result.stream_id, prompt(650, 1))
        assert engine.drain(60)
        assert engine.stats().counters.warm_passes == 0 and kept(engine) == []


@pytest.mark.parametrize("prompt_cache", [True, False])
def test_a_pass_ends_when_the_next_turn_is_there_already(tiny_moe: Path, prompt_cache: bool) -> None:
    """Its rows run in the foreground then, and that keeps states further on; unless it keeps none."""
    chat, other, collector = Chat(prompt(12, 1)), Chat(prompt(13, 2)), []
    with engine_for(tiny_moe, KEEPING) as (engine, backend):
        [result] = ask(engine, chat.ask(prompt(20, 1), seed=1))
        request = chat.ask(prompt(20, 1), seed=1)
        sent = chat.answered(request, prompt(LONG, 900))
        following = chat.ask(prompt(8, 2), seed=2, prompt_cache=prompt_cache)

        def arrive(count: int) -> None:
            if count == 2:
                collector.append(Collector(engine))
                collector[0].submit(following)

        watch = Watch(engine, arrive)
        with engine._book:  # a second pass waits behind the first, of another chat
            engine.returned(result.stream_id, sent)
            engine.returned(999, other.answered(other.ask(prompt(60, 3), seed=3), prompt(60, 901)))
        assert engine.drain(60)
        check(tiny_moe, backend, following, collector[0].wait()[0])
        rows = len(other.tokens)
        assert watch.steps.count("b") == (3 if prompt_cache else -(-(LONG + len(END)) // 8)) + -(-rows // 8)
        assert (rows, "reply") in kept(engine)
        assert ((len(sent), "reply") in kept(engine)) != prompt_cache


def test_only_so_many_passes_wait(tiny_moe: Path) -> None:
    with engine_for(tiny_moe, KEEPING) as (engine, _):
        with engine._book:
            for n in range(40):
                engine.returned(1000 + n, prompt(30, n))
        assert engine.drain(60)
        assert engine.stats().counters.warm_passes == 40
        assert len(kept(engine)) < 40 and (30, "reply") in kept(engine)


# ---- room ----

STATE = 5  # snapshot pages of a state of up to 512 rows of the tiny MoE model


def room(states: int) -> Way:
    return replace(KEEPING, snapshot_pages=STATE * states)


def only(n: int, at: int = 30, mark: Mark = Mark.SHARED) -> Request:
    """A request that keeps one state: its reply's end waits for `returned`, and is forgotten by `one`."""
    return Request((20 + n, *prompt(at + 1, n)), seed=100 + n, max_tokens=1, marks=((at, mark),))


def one(engine: Engine, request: Request) -> int:
    [result] = ask(engine, request)
    engine.forget(result.stream_id)
    assert engine.drain(60)
    return result.cached


def test_the_least_recently_used_state_goes_first_and_the_miss_says_so(tiny_moe: Path) -> None:
    with engine_for(tiny_moe, room(4)) as (engine, backend):
        for n in (1, 2, 3):  # a fourth place is for replies' ends
            assert one(engine, only(n)) == 0
        assert one(engine, only(1)) == 30
        assert one(engine, only(4)) == 0
        assert one(engine, only(1)) == 30 and one(engine, only(4)) == 30
        assert one(engine, only(3)) == 30
        [result] = ask(engine, only(2))
        check(tiny_moe, backend, only(2), result)
        assert result.metrics is not None
        assert (result.cached, result.metrics.cache_missed) == (0, "evicted")
        assert engine.stats().cache.counters.evictions[Mark.SHARED] >= 1


def test_superseded_states_go_before_older_ones(tiny_moe: Path) -> None:
    with engine_for(tiny_moe, room(4)) as (engine, _):
        one(engine, only(1))
        first = Request((50, *prompt(40, 9)), seed=1, max_tokens=1, marks=((30, Mark.HISTORY),))
        one(engine, first)
        longer = Request((*first.prompt, *prompt(30, 8)), seed=2, max_tokens=1, marks=((60, Mark.HISTORY),))
        assert one(engine, longer) == 30
        one(engine, only(2))  # its reply's end needs a place
        assert [at for at, mark in kept(engine) if mark == "history"] == [60]
        assert one(engine, only(1)) == 30


def test_only_ends_of_a_chat_are_superseded(tiny_moe: Path) -> None:
    kinds = (Mark.LAST_USER, Mark.SHARED, Mark.HISTORY)
    with engine_for(tiny_moe, KEEPING) as (engine, _):
        first = Request((50, *prompt(40, 9)), seed=1, max_tokens=1, marks=tuple(zip((20, 25, 30), kinds, strict=True)))
        one(engine, first)
        one(engine, Request((*first.prompt, 15), seed=2, max_tokens=1, marks=((40, Mark.HISTORY),)))
        assert kept(engine) == [(20, "last_user"), (25, "shared"), (30, "history"), (40, "history")]
        assert [state.at for state in engine._keeper.cache.states if state.superseded] == [30]


def test_the_state_that_is_resumed_is_never_evicted_for_the_pass_that_resumes_it(tiny_moe: Path) -> None:
    with engine_for(tiny_moe, room(1)) as (engine, _):
        ids = prompt(30, 1)
        ask(engine, Request(ids, seed=1, max_tokens=90, marks=((29, Mark.SHARED),), cancel_after=1))
        longer = Request((*ids, *prompt(20, 2)), seed=2, max_tokens=90, marks=((45, Mark.HISTORY),), cancel_after=1)
        [result] = ask(engine, longer)
        assert result.cached == 29 and kept(engine) == [(29, "shared")]
        assert engine.stats().cache.counters.refusals == {Mark.HISTORY: 1}
        assert engine.stats().cache.counters.evictions == {}


def test_a_state_larger_than_the_budget_is_refused_and_evicts_nothing(tiny_moe: Path) -> None:
    with engine_for(tiny_moe, room(1)) as (engine, backend):
        one(engine, Request(prompt(32, 1), seed=1, max_tokens=1, marks=((31, Mark.SHARED),)))
        before = kept(engine)
        large = Request(prompt(700, 2), seed=2, max_tokens=3)
        [result] = ask(engine, large)
        check(tiny_moe, backend, large, result)
        counters = engine.stats().cache.counters
        assert kept(engine) == before
        assert (counters.refusals["prompt"], counters.refusals["reply"]) == (1, 1)


# ---- copies that fail ----


def test_a_failing_copy_costs_no_reply_and_leaves_nothing(
    tiny_moe: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    way = replace(KEEPING, snapshot_pages=60, prompt_chunk=50)
    failures = 0
    for failing in range(100):
        chat = Chat(prompt(12, 1))
        with engine_for(tiny_moe, way) as (engine, backend):
            backend.failing = frozenset({failing})
            for turn in range(3):
                request = chat.ask(prompt(12, turn), seed=turn, temperature=0.8 * (turn % 2), max_tokens=8)
                [result] = ask(engine, request)
                check(tiny_moe, backend, request, result)
                engine.returned(result.stream_id, chat.answered(request, result.tokens))
                assert engine.drain(60)
                check_kept(engine)
            assert engine.stats().cache.counters.failures == (0 < failing <= backend.copies)
            failures += engine.stats().cache.counters.failures
            if failing > backend.copies:
                break
    assert failures == failing - 1 >= 12
    assert caplog.text.count("RuntimeError: injected copy failure") == failures


def test_a_state_that_is_not_what_it_says_is_dropped(tiny_moe: Path, caplog: pytest.LogCaptureFixture) -> None:
    request = Request(prompt(40, 1), seed=1)
    with engine_for(tiny_moe, KEEPING) as (engine, backend):
        ask(engine, request)
        for state in engine._keeper.cache.states:
            state.digest = b"another"
        [result] = ask(engine, request)
        check(tiny_moe, backend, request, result)
        assert result.cached == 0 and engine.stats().cache.counters.failures == 1
        assert "could not be restored" in caplog.text
        [result] = ask(engine, request)
        assert result.cached == 39


def test_clearing_drops_what_nobody_uses(tiny_moe: Path) -> None:
    with engine_for(tiny_moe, KEEPING) as (engine, backend):
        chat = Chat(prompt(12, 1))
        request = chat.ask(prompt(12, 1), seed=1)
        ask(engine, request)
        assert engine.clear_prompt_cache() == 4  # three marks, and a reply that nobody claimed yet
        assert engine.stats().cache.states == 0 and engine.stats().cache.held_bytes == 0
        assert engine.clear_prompt_cache() == 0
        [result] = ask(engine, request)
        check(tiny_moe, backend, request, result)
        assert result.cached == 0


def test_a_keep_is_a_handful_of_copies(tiny: Path) -> None:
    """Pages that lie side by side are copied as one."""
    with engine_for(tiny, KEEPING) as (engine, _):
        ask(engine, Request(prompt(1400, 1), seed=1, max_tokens=2))
        copies = engine.stats().cache.copies
        assert 2 <= copies <= 2 * 4
