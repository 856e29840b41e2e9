"""Replies that follow a grammar: which tokens may be drawn next. The grammars are llguidance's (extra `structured`)."""

from __future__ import annotations

import importlib.util
import json
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from lfm2serve.chat.call_grammar import calls_rules, with_options
from lfm2serve.chat.constrain import END_THINK, THINK, CallConstraint, GrammarConstraint, Thinking, one_line
from lfm2serve.chat.reply_parts import Reading
from lfm2serve.chat.tokenizer import Tokenizer
from lfm2serve.chat.tool_choice import ToolUse
from lfm2serve.errors import InvalidRequest
from lfm2serve.sampling import SamplingParams, StructuredOutputsParams

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

__all__ = ["Constraint", "Grammar", "Grammars", "Thinking"]

log = logging.getLogger(__name__)

CALL_START, CALL_END = "<|tool_call_start|>", "<|tool_call_end|>"
KEPT_GRAMMARS = 64
LEXER_FUEL = 250_000  # work that may go into a grammar's tables: a second at most


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
        self.openings: dict[bytes, NDArray[np.uint32]] = {}  # spelled so far -> tokens that go on with <think>
        self.going_on = np.full(self.words, 0xFFFFFFFF, np.uint32)  # a thought isn't the reply's end
        for number in self.eos:
            self.going_on[number >> 5] &= np.uint32(~(1 << (number & 31)) & 0xFFFFFFFF)

    def grammar(self, params: SamplingParams, use: ToolUse | None = None, param: str | None = None) -> Grammar | None:
        """The grammar that a request asks for; None: none. use: its tools. param: what its errors name.

        InvalidRequest: a bad schema, regex or grammar, with the reason, or the extra isn't installed.
        """
        asked = params.structured_outputs
        if asked is None and (use is None or use.required is None):
            return self._strict_calls(use) if use is not None and use.strict else None
        param = param or ("structured_outputs" if use is None or use.required is None else "tool_choice")
        for name, clashes in (("min_tokens", params.min_tokens > 0), ("ignore_eos", params.ignore_eos)):
            if clashes:
                raise InvalidRequest(f"{name} can't be combined with {param}: the grammar ends the reply", param=name)
        calls = use is not None and use.offered is not None
        return Grammar(self, self._compiled(lambda: self._text(asked, use, param), param), calls)

    def _strict_calls(self, use: ToolUse) -> Grammar | None:
        """A grammar for the calls of a reply that needn't hold any; None without the extra, or without a token that
        begins them: `strict` is then a wish."""
        assert use.offered is not None
        if importlib.util.find_spec("llguidance") is None or self.tokenizer.token_id(CALL_START) is None:
            log.info("strict tools need the extra 'structured' and a token that begins calls: not enforced")
            return None
        rules = calls_rules(use.offered, use.parallel, self.call_start, self.call_end)
        return Grammar(self, self._compiled(lambda: f"start: calls\n{rules}", "tools"), calls=True, free=True)

    def _compiled(self, text: Callable[[], str], param: str) -> LLMatcher:
        try:
            return self._matcher(text(), param)
        except (RecursionError, UnicodeEncodeError) as error:
            problem = "nested too deeply" if isinstance(error, RecursionError) else "not valid Unicode"
            raise InvalidRequest(f"{param}: {problem}", param=param) from None
        except ImportError:
            message = f"{param} needs the extra 'structured': pip install 'lfm2serve[structured]'"
            raise InvalidRequest(message, param=param, code="unsupported_parameter") from None

    def _text(self, asked: StructuredOutputsParams | None, use: ToolUse | None, param: str) -> str:
        """The request's grammar as Lark: calls, an answer, or either where both may be."""
        tools = None if use is None else use.required or use.offered
        if use is None or tools is None:
            assert asked is not None
            return _own_grammar(asked, param) if asked.grammar is not None else f"start: answer\n{_answer(asked)}"
        calls = calls_rules(tools, use.parallel, self.call_start, self.call_end)
        if asked is None or use.required is not None:
            return f"start: calls\n{calls}"
        if asked.grammar is not None:
            raise InvalidRequest(f"{param}: a grammar can't be combined with tools; use tool_choice none", param=param)
        return f"start: calls | answer\n{calls}\n{_answer(asked)}"

    @property
    def call_start(self) -> str:
        return self._sentinel(CALL_START)

    @property
    def call_end(self) -> str:
        return self._sentinel(CALL_END)

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
            limits = LLParserLimits(verbose_errors=False, initial_lexer_fuel=LEXER_FUEL)
            matcher = LLMatcher(self._core, LLMatcher.grammar_from_lark(text), log_level=0, limits=limits)
            if not matcher.is_error():
                matcher.compute_bitmask()  # the first one makes tables, and finds what can't be followed
            if matcher.is_error():
                raise InvalidRequest(f"{param}: {one_line(matcher.get_error())}", param=param)
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
                _allow(self.blanks, number)
        for at in range(len(THINK)):
            bits = self.openings[THINK[:at]] = np.zeros(self.words, np.uint32)
            if self.think_id is not None:
                _allow(bits, self.think_id)
                continue
            left = THINK[at:]
            for number, data in enumerate(tokenizer.bytes_of):
                if data[:1] == left[:1] and (left.startswith(data) or data.startswith(left)):
                    _allow(bits, number)
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


class Grammar:
    """A compiled grammar; each reply follows a copy of it. calls: tool calls follow it. free: what else is said
    doesn't."""

    def __init__(self, grammars: Grammars, matcher: LLMatcher, calls: bool, free: bool = False) -> None:
        self._grammars = grammars
        self._matcher = matcher
        self._calls = calls
        self._free = free

    def reading(self, reading: Reading | None) -> Reading | None:
        """How the replies are read, given how those without a grammar are."""
        tokens = (CALL_START, CALL_END)
        sure = self._calls and all(self._grammars.tokenizer.token_id(text) is not None for text in tokens)
        return replace(reading, sure=True) if sure and reading is not None else reading

    def start(self, thinking: Thinking = Thinking.NEVER) -> Constraint:
        """The constraint of one reply. Its thought is free: the grammar begins behind it."""
        kind = CallConstraint if self._free else GrammarConstraint
        return kind(self._grammars, self._matcher.deep_copy(), thinking)


def _allow(bits: NDArray[np.uint32], number: int) -> None:
    bits[number >> 5] |= np.uint32(1 << (number & 31))


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
        raise InvalidRequest(f"{param}: {one_line(str(error))}", param=param) from None


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
