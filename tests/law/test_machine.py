"""Random chats, edits, cancels, evictions, failing copies and restarts, against replies that are computed afresh."""

from __future__ import annotations

import itertools
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from tests.conftest import DATA
from tests.law.harness import CONTEXT, Chat, Collector, Request, Result, Way, check_kept, engine_for, prompt, solo

PATHS = [DATA / "tiny-lfm2moe", DATA / "tiny-lfm2"]
LONGEST = CONTEXT - 400  # of a conversation that goes on


@dataclass
class Turn:
    """A request on its way. comes_back: what becomes of a chat's reply; back: tokens that the client drops of it."""

    request: Request
    result: Result
    collector: Collector
    chat: Chat | None = None
    comes_back: str = "whole"
    back: int = 0


TEXT = st.one_of(st.integers(0, 30), st.sampled_from([100, 250]))
SMALL = st.integers(0, 2)


TURN = st.fixed_dictionaries(
    {
        "length": TEXT,
        "words": SMALL,
        "max_tokens": st.integers(1, 45),
        "temperature": st.sampled_from([0.0, 0.9]),
        "penalties": st.booleans(),
        "cancel_after": st.one_of(st.none(), st.none(), st.integers(0, 20)),
        "prompt_cache": st.sampled_from([True, True, True, False]),
        "comes_back": st.sampled_from(["whole", "whole", "cut", "cut", "other", "forgotten", "never"]),
        "back": st.integers(1, 40),
    }
)


class EngineMachine(RuleBasedStateMachine):
    """Whatever happened before, every reply is the solo one, and after a drain every page is accounted for."""

    @initialize(
        path=st.sampled_from(PATHS),
        prompt_chunk=st.sampled_from([None, 9, 64]),
        slots=st.integers(1, 4),
        kv=st.sampled_from(["paged", "fixed"]),
        shuffle=st.one_of(st.none(), SMALL),
        pages=st.sampled_from([None, 3, 5]),
        snapshot_pages=st.sampled_from([0, 12, 40, 200]),
        drafts=st.booleans(),
        warm_pass=st.booleans(),
        queued=st.booleans(),
    )
    def build(self, path: Path, kv: str, pages: int | None, **how: object) -> None:
        self.path = path
        self.way = Way(threads=1, kv=kv, pages=pages if kv == "paged" else None, snapshot_bytes=128 << 10, **how)  # type: ignore[arg-type]
        self.seeds = itertools.count()
        self.chats = [Chat(prompt(20, 5)), Chat(prompt(20, 5)), Chat()]
        self.asked: list[tuple[Chat, list[int]]] = []  # chats and what they were before a turn
        self.turns: list[Turn] = []
        self.start()

    def start(self) -> None:
        self.stack = ExitStack()
        self.engine, self.backend = self.stack.enter_context(engine_for(self.path, self.way))

    def stop(self) -> None:
        with self.stack:
            self.read()

    def teardown(self) -> None:
        if hasattr(self, "stack"):
            self.stop()

    # ---- what clients do ----

    def send(self, request: Request, chat: Chat | None = None, comes_back: str = "whole", back: int = 0) -> None:
        collector = Collector(self.engine)
        self.turns.append(Turn(request, collector.submit(request), collector, chat, comes_back, back))

    @rule(system=st.sampled_from([0, 1, 20, 500]))
    def open_chat(self, system: int) -> None:
        self.chats.append(Chat(prompt(system, 5)))

    @rule(which=st.integers(0, 99), turn=TURN)
    def say(self, which: int, turn: dict[str, Any]) -> None:
        chat = self.chats[which % len(self.chats)]
        if len(chat.tokens) > LONGEST or any(other.chat is chat for other in self.turns):
            return
        how = dict(turn)
        length, words, comes_back, back = (how.pop(name) for name in ("length", "words", "comes_back", "back"))
        self.asked.append((chat, list(chat.tokens)))
        self.send(chat.ask(prompt(length, words), seed=next(self.seeds), **how), chat, comes_back, back)

    @rule(which=st.integers(0, 99), turns=st.lists(TURN, min_size=2, max_size=4), settle=st.booleans())
    def converse(self, which: int, turns: list[dict[str, Any]], settle: bool) -> None:
        for turn in turns:
            self.say(which, turn)
            self.drain() if settle else self.read()

    @rule(turns=st.lists(TURN, min_size=2, max_size=5))
    def say_all(self, turns: list[dict[str, Any]]) -> None:
        for which, turn in enumerate(turns):
            self.say(which, turn)

    @precondition(lambda self: self.asked)
    @rule(which=st.integers(0, 99))
    def branch(self, which: int) -> None:
        """Go back to where a turn began, in a new chat: to edit its message or to try it again."""
        chat, before = self.asked[which % len(self.asked)]
        again = Chat()
        again.tokens, again.shared = list(before), chat.shared
        self.chats.append(again)

    @rule(length=st.sampled_from([1, 2, 40, 100, 513, 600]), words=SMALL, more=SMALL, cancel=st.booleans())
    def complete(self, length: int, words: int, more: int, cancel: bool) -> None:
        tokens = (*prompt(length, words), *([50 + words] * more))
        self.send(Request(tokens, seed=next(self.seeds), max_tokens=9, cancel_after=3 if cancel else None))

    @rule()
    def read(self) -> None:
        """Clients read their replies; each must be the solo one."""
        turns, self.turns = self.turns, []
        for turn in turns:
            turn.collector.wait()
            request, result = turn.request, turn.result
            expected = solo(self.path, request)
            self.backend.give(request, result)
            if result.finish_reason == "abort":
                count = len(result.tokens)
                assert request.cancel_after is not None and result.tokens == expected.tokens[:count]
                assert result.bits.items() <= expected.bits.items()
            else:
                assert result == expected
            assert 0 <= result.cached < len(request.prompt) and (request.prompt_cache or not result.cached)
            if turn.chat is not None:
                self.come_back(turn, turn.chat)

    def come_back(self, turn: Turn, chat: Chat) -> None:
        reply, ident = turn.result.tokens, turn.result.stream_id
        if turn.comes_back == "cut":
            reply = reply[: max(0, len(reply) - turn.back)]
        elif turn.comes_back == "other":
            reply = list(prompt(30 + turn.back, turn.back))
        sent = chat.answered(turn.request, reply)
        if turn.comes_back == "forgotten":
            self.engine.forget(ident)
        elif turn.comes_back != "never" and turn.request.prompt_cache:
            self.engine.returned(ident, sent)

    # ---- what else happens ----

    @rule(after=st.integers(1, 4))
    def fail_a_copy(self, after: int) -> None:
        self.backend.failing = frozenset({self.backend.copies + after})

    @rule()
    def clear(self) -> None:
        self.engine.clear_prompt_cache()

    @rule()
    def drain(self) -> None:
        self.read()
        assert self.engine.drain(60)
        assert self.engine.census().clean
        check_kept(self.engine)
        stats = self.engine.stats()
        assert stats.background == 0 and stats.counters.failed_streams == 0

    @rule()
    def restart(self) -> None:
        self.stop()
        self.start()


TestEngine = EngineMachine.TestCase
TestEngine.settings = settings(
    max_examples=60, stateful_step_count=20, deadline=None, suppress_health_check=list(HealthCheck)
)
