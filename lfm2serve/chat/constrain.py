"""One reply under a grammar: where it stands, and which tokens may come next."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from lfm2serve.errors import Lfm2Error

if TYPE_CHECKING:
    from llguidance import LLMatcher

    from lfm2serve.structured import Grammars

THINK, END_THINK = b"<think>", b"</think>"


class Thinking(Enum):
    """Where a reply's thought stands before its first token."""

    NEVER = auto()
    MAYBE = auto()
    OPENED = auto()


class _Stage(Enum):
    OPENING = auto()  # a thought or the grammar begins
    THINKING = auto()
    BEHIND = auto()  # right behind a thought, where one blank is free
    GRAMMAR = auto()
    DONE = auto()


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a reply stands. text: what its opening spells, or the end of its thought; tokens: those that the grammar
    hasn't taken yet."""

    stage: _Stage
    text: bytes = b""
    tokens: tuple[int, ...] = ()


class GrammarConstraint:
    """All tokens but eos while the reply thinks, then the grammar's."""

    def __init__(self, grammars: Grammars, matcher: LLMatcher, thinking: Thinking) -> None:
        self._grammars = grammars
        self._matcher = matcher
        stages = {Thinking.MAYBE: _Stage.OPENING, Thinking.OPENED: _Stage.THINKING}
        self._place = _Place(stages.get(thinking, _Stage.GRAMMAR))

    def accept(self, token: int) -> None:
        place = self._behind(self._place, token)
        if place.stage is _Stage.GRAMMAR and place.tokens:
            self._matcher.consume_tokens(list(place.tokens))  # a failure shows in the next mask
            place = replace(place, tokens=())
        self._place = place

    def mask(self, ahead: Sequence[int]) -> NDArray[np.uint32] | None:
        place = self._place
        for token in ahead:
            place = self._behind(place, token)
        if place.stage is _Stage.DONE:
            return None
        if place.stage is _Stage.THINKING:
            return self._grammars.going_on
        bits = self._grammar_bits(place.tokens)
        if place.stage is _Stage.OPENING:
            opening = self._grammars.openings[place.text]
            return opening if bits is None else bits | opening
        if bits is None:
            return None  # the draft ahead holds a token that can't be drawn
        if place.stage is _Stage.BEHIND:
            bits |= self._grammars.blanks
        return bits

    def _grammar_bits(self, tokens: Sequence[int]) -> NDArray[np.uint32] | None:
        """What the grammar allows behind these tokens; None: it doesn't allow them."""
        matcher = self._matcher
        taken = matcher.try_consume_tokens(list(tokens)) if tokens else 0
        bits = None
        if taken == len(tokens):
            bits = np.zeros(self._grammars.words, np.uint32)
            matcher.unsafe_compute_mask_ptr(bits.ctypes.data, -(-self._grammars.tokenizer.size // 32) * 4)
        if matcher.is_error():
            raise Lfm2Error(f"structured output can't go on: {one_line(matcher.get_error())}")
        if taken:
            matcher.rollback(taken)
        if bits is not None and not bits.any():
            raise Lfm2Error("structured output can't go on: no token may follow")
        return bits

    def _behind(self, place: _Place, token: int) -> _Place:
        """The place behind one more token."""
        if token in self._grammars.eos:
            return _Place(_Stage.DONE)
        data = self._grammars.tokenizer.token_bytes(token)
        match place.stage:
            case _Stage.OPENING:
                text, tokens = place.text + data, (*place.tokens, token)
                if self._grammars.think_id is not None:
                    thinks = token == self._grammars.think_id
                    return _Place(_Stage.THINKING) if thinks else _Place(_Stage.GRAMMAR, tokens=tokens)
                if text.startswith(THINK):
                    return self._thinking(text[len(THINK) :], token)
                stage = _Stage.OPENING if THINK.startswith(text) else _Stage.GRAMMAR
                return _Place(stage, text, tokens)
            case _Stage.THINKING:
                return self._thinking(place.text + data, token)
            case _Stage.BEHIND if not data.strip():
                return _Place(_Stage.GRAMMAR)
            case _Stage.BEHIND | _Stage.GRAMMAR:
                return _Place(_Stage.GRAMMAR, tokens=(*place.tokens, token))
        return place

    def _thinking(self, text: bytes, token: int) -> _Place:
        """Inside a thought that ends with `text`, or behind it."""
        if self._grammars.end_think_id is not None:
            return _Place(_Stage.BEHIND if token == self._grammars.end_think_id else _Stage.THINKING)
        _, end, rest = text.partition(END_THINK)
        if not end:
            return _Place(_Stage.THINKING, text[1 - len(END_THINK) :])
        rest = rest.lstrip()
        return _Place(_Stage.GRAMMAR, tokens=tuple(self._grammars.tokens_of(rest))) if rest else _Place(_Stage.BEHIND)


class CallConstraint(GrammarConstraint):
    """Free but for tool calls: from the token that begins a block up to the one that ends it, the grammar's. Each block
    begins it anew."""

    def __init__(self, grammars: Grammars, matcher: LLMatcher, thinking: Thinking) -> None:
        super().__init__(grammars, matcher, thinking)
        self._begin = grammars.tokenizer.token_id("<|tool_call_start|>")
        self._end = grammars.tokenizer.token_id("<|tool_call_end|>")
        if thinking is Thinking.NEVER:
            self._place = _Place(_Stage.BEHIND)

    def accept(self, token: int) -> None:
        before = self._place
        super().accept(token)
        if before.stage is _Stage.GRAMMAR and self._place.stage is not _Stage.GRAMMAR:
            self._matcher.reset()

    def mask(self, ahead: Sequence[int]) -> NDArray[np.uint32] | None:
        place, inside = self._place, self._place.stage is _Stage.GRAMMAR
        for token in ahead:
            place = self._behind(place, token)
            inside &= place.stage is _Stage.GRAMMAR
        if place.stage is not _Stage.GRAMMAR:
            return None
        if inside:
            return self._grammar_bits(place.tokens)
        matcher, self._matcher = self._matcher, self._matcher.deep_copy()  # a block that begins in the draft
        self._matcher.reset()
        bits = self._grammar_bits(place.tokens)
        self._matcher = matcher
        return bits

    def _behind(self, place: _Place, token: int) -> _Place:
        if token in self._grammars.eos:
            return _Place(_Stage.DONE)
        if place.stage is _Stage.GRAMMAR:
            ends = token == self._end
            return _Place(_Stage.BEHIND) if ends else replace(place, tokens=(*place.tokens, token))
        if place.stage is not _Stage.THINKING:
            if token == self._begin:
                return _Place(_Stage.GRAMMAR, tokens=(token,))
            if token == self._grammars.think_id:
                return _Place(_Stage.THINKING)
            if place.stage is _Stage.OPENING and self._grammars.think_id is None:
                text = (place.text + self._grammars.tokenizer.token_bytes(token)).lstrip()
                if text.startswith(THINK):
                    return self._thinking(text[len(THINK) :], token)
                return _Place(_Stage.OPENING, text) if THINK.startswith(text) else _Place(_Stage.BEHIND)
            return place
        thought = self._thinking(place.text + self._grammars.tokenizer.token_bytes(token), token)
        return thought if thought.stage is _Stage.THINKING else _Place(_Stage.BEHIND)


def one_line(text: str) -> str:
    """A message of the library's in one line, without the place in the grammar that we wrote."""
    lines = itertools.takewhile(lambda line: not re.match(r"\s*\d+ \|", line), text.splitlines())
    line = " ".join(" ".join(lines).split())
    return re.sub(r"^at \d+\(\d+\): ", "", line)[:300] or "it can't be compiled"
