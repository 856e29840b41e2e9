"""Replies that follow a grammar: which tokens may be drawn next. The grammars are llguidance's (extra `structured`)."""

from __future__ import annotations

import itertools
import json
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from lfm2serve.chat.call_grammar import calls_rules, with_options
from lfm2serve.chat.tokenizer import Tokenizer
from lfm2serve.chat.tool_choice import ToolUse
from lfm2serve.errors import InvalidRequest, Lfm2Error
from lfm2serve.sampling import SamplingParams, StructuredOutputsParams

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

KEPT_GRAMMARS = 64
THINK, END_THINK = b"<think>", b"</think>"


class Constraint(Protocol):
    """Which tokens of one reply may be drawn; used on the engine's thread only."""

    def mask(self, ahead: Sequence[int]) -> NDArray[np.uint32] | None:
        """Bits of the tokens that are allowed after what was accepted and then `ahead`: words [ceil(head rows / 32)];
        None: all. Changes nothing."""
        ...

    def accept(self, token: int) -> None:
        """Take a drawn token."""
        ...


class Grammars:
    """Compiles grammars for one tokeniser, and remembers the latest. For any thread.

    vocab_rows: rows of the head, which masks are made for. eos_token_ids: what ends a reply, where its grammar may end.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_rows: int, eos_token_ids: Iterable[int]) -> None:
        self.tokenizer = tokenizer
        self.words = -(-vocab_rows // 32)
        self.eos = frozenset(eos_token_ids)
        self._lock = threading.Lock()
        self._core: LLTokenizer | None = None
        self._kept: OrderedDict[str, LLMatcher] = OrderedDict()
        self.blanks = np.zeros(self.words, np.uint32)
        self.openings = np.zeros(self.words, np.uint32)  # tokens that <think> may begin with
        self.going_on = np.full(self.words, 0xFFFFFFFF, np.uint32)  # a thought isn't the reply's end
        for number in self.eos:
            self.going_on[number >> 5] &= np.uint32(~(1 << (number & 31)) & 0xFFFFFFFF)

    def grammar(self, params: SamplingParams, use: ToolUse | None = None, param: str | None = None) -> Grammar | None:
        """The grammar that a request asks for; None: none. use: its tools. param: what its errors name.

        InvalidRequest: a bad schema, regex or grammar, with the reason, or the extra isn't installed.
        """
        asked = params.structured_outputs
        if asked is None and (use is None or use.required is None):
            return None
        param = param or ("structured_outputs" if use is None or use.required is None else "tool_choice")
        for name, clashes in (("min_tokens", params.min_tokens > 0), ("ignore_eos", params.ignore_eos)):
            if clashes:
                raise InvalidRequest(f"{name} can't be combined with {param}: the grammar ends the reply", param=name)
        try:
            return Grammar(self, self._matcher(self._text(asked, use, param), param))
        except ImportError:
            message = f"{param} needs the extra 'structured': pip install 'lfm2serve[structured]'"
            raise InvalidRequest(message, param=param, code="unsupported_parameter") from None

    def _text(self, asked: StructuredOutputsParams | None, use: ToolUse | None, param: str) -> str:
        """The request's grammar as Lark: calls, an answer, or either where both may be."""
        tools = None if use is None else use.required or use.offered
        if use is None or tools is None:
            assert asked is not None
            return _own_grammar(asked, param) if asked.grammar is not None else f"start: answer\n{_answer(asked)}"
        start, end = (self._sentinel(text) for text in ("<|tool_call_start|>", "<|tool_call_end|>"))
        calls = calls_rules(tools, use.parallel, start, end)
        if asked is None or use.required is not None:
            return f"start: calls\n{calls}"
        if asked.grammar is not None:
            raise InvalidRequest(f"{param}: a grammar can't be combined with tools; use tool_choice none", param=param)
        return f"start: calls | answer\n{calls}\n{_answer(asked)}"

    def _sentinel(self, text: str) -> str:
        """A control token in Lark; its text where the tokeniser has no such token."""
        number = self.tokenizer.token_id(text)
        return json.dumps(text) if number is None else f"<[{number}]>"

    def _matcher(self, text: str, param: str) -> LLMatcher:
        from llguidance import LLMatcher, LLParserLimits

        with self._lock:
            if self._core is None:
                self._core = self._open()
            matcher = self._kept.pop(text, None)
        if matcher is None:
            limits = LLParserLimits(verbose_errors=False)
            matcher = LLMatcher(self._core, LLMatcher.grammar_from_lark(text), log_level=0, limits=limits)
            if matcher.is_error():
                raise InvalidRequest(f"{param}: {_reason(matcher.get_error())}", param=param)
        with self._lock:
            self._kept[text] = matcher
            if len(self._kept) > KEPT_GRAMMARS:
                self._kept.popitem(last=False)
            return matcher.deep_copy()

    def _open(self) -> LLTokenizer:
        """The tokeniser as the library wants it, and the sets of tokens that we allow beside its own."""
        from llguidance import LLTokenizer, TokenizerWrapper

        tokenizer = self.tokenizer
        special = set(tokenizer.control_tokens.values())
        for number, data in enumerate(tokenizer.bytes_of):
            if number in special or not data:
                continue
            if not data.strip():
                self.blanks[number >> 5] |= np.uint32(1 << (number & 31))
            if self.think_id is None and (THINK.startswith(data) or data.startswith(THINK)):
                self.openings[number >> 5] |= np.uint32(1 << (number & 31))
        if self.think_id is not None:
            self.openings[self.think_id >> 5] |= np.uint32(1 << (self.think_id & 31))
        wrapper = TokenizerWrapper(_Vocabulary(tokenizer, min(self.eos), sorted(special)))
        return LLTokenizer(wrapper, n_vocab=tokenizer.size, eos_token=sorted(self.eos))

    @property
    def think_id(self) -> int | None:
        return self.tokenizer.token_id(THINK.decode())

    @property
    def end_think_id(self) -> int | None:
        return self.tokenizer.token_id(END_THINK.decode())

    def tokens_of(self, data: bytes) -> list[int]:
        """Some tokens that spell these bytes."""
        assert self._core is not None, "a grammar was compiled"
        return self._core.tokenize_bytes(data)


class _Vocabulary:
    """What llguidance asks of a tokeniser."""

    def __init__(self, tokenizer: Tokenizer, eos: int, special: list[int]) -> None:
        self.eos_token_id = eos
        self.bos_token_id = tokenizer.bos_token_id
        self.tokens = list(tokenizer.bytes_of)
        self.special_token_ids = special
        self._encode = tokenizer.encode_plain

    def __call__(self, text: str) -> list[int]:
        return self._encode(text)


class Thinking(Enum):
    """Where a reply's thought stands before its first token."""

    NEVER = auto()
    MAYBE = auto()
    OPENED = auto()


class Grammar:
    """A compiled grammar; each reply follows a copy of it."""

    def __init__(self, grammars: Grammars, matcher: LLMatcher) -> None:
        self._grammars = grammars
        self._matcher = matcher

    def start(self, thinking: Thinking = Thinking.NEVER) -> Constraint:
        """The constraint of one reply. Its thought is free but for eos: the grammar begins behind it."""
        return GrammarConstraint(self._grammars, self._matcher.deep_copy(), thinking)


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
            opening = self._grammars.openings if not place.text else self._next_openings(place.text)
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
            raise Lfm2Error(f"structured output can't go on: {_reason(matcher.get_error())}")
        if taken:
            matcher.rollback(taken)
        if bits is not None and not bits.any():
            raise Lfm2Error("structured output can't go on: no token may follow")
        return bits

    def _next_openings(self, text: bytes) -> NDArray[np.uint32]:
        """Tokens that go on with <think> where its beginning was spelled."""
        bits = np.zeros(self._grammars.words, np.uint32)
        left = THINK[len(text) :]
        for number, data in enumerate(self._grammars.tokenizer.bytes_of):
            if data and (left.startswith(data) or data.startswith(left)):
                bits[number >> 5] |= np.uint32(1 << (number & 31))
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


def _answer(asked: StructuredOutputsParams) -> str:
    """The rule `answer`."""
    if asked.regex is not None:
        from llguidance import regex_to_lark

        return f"answer: /{regex_to_lark(asked.regex)}/"
    if asked.choice is not None:
        return "answer: " + " | ".join(json.dumps(choice, ensure_ascii=False) for choice in asked.choice)
    schema: Any = {"type": "object"} if asked.json_object else asked.json
    if isinstance(schema, str):
        schema = json.loads(schema)
    if asked.disable_additional_properties:
        schema = _closed(schema)
    options: dict[str, Any] = {}
    if asked.disable_any_whitespace:
        options = {"whitespace_pattern": None, "whitespace_flexible": False}
    elif asked.whitespace_pattern is not None:
        options = {"whitespace_pattern": asked.whitespace_pattern}
    return f"answer: %json {with_options(schema, **options)}"


def _own_grammar(asked: StructuredOutputsParams, param: str) -> str:
    from llguidance import gbnf_to_lark

    assert asked.grammar is not None
    to_lark: Callable[[str], str] = gbnf_to_lark.any_to_lark
    try:
        return to_lark(asked.grammar)
    except Exception as error:  # a bare one, for whatever it can't read
        raise InvalidRequest(f"{param}: {_reason(str(error))}", param=param) from None


def _closed(schema: Any) -> Any:
    """The schema with no properties but those that its objects name."""
    if isinstance(schema, list):
        return [_closed(item) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    closed = {key: _closed(value) for key, value in schema.items()}
    if isinstance(schema.get("properties"), Mapping):
        closed.setdefault("additionalProperties", False)
    return closed


def _reason(text: str) -> str:
    """A message of the library's in one line, without the place in the grammar that we wrote."""
    lines = itertools.takewhile(lambda line: not re.match(r"\s*\d+ \|", line), text.splitlines())
    line = " ".join(" ".join(lines).split())
    return re.sub(r"^at \d+\(\d+\): ", "", line)[:300] or "it can't be compiled"
