"""A reply as a row of parts, thought, text and calls: what the dialects' blocks and items are made from."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Literal

from lfm2serve.chat.tokenizer import Tokenizer
from lfm2serve.chat.tool_calls import ToolCallDelta
from lfm2serve.reply import ReplyBuilder, ReplyDelta

Kind = Literal["thought", "text", "call"]


@dataclass(slots=True)
class Part:
    """What a reply says in one go. A call's text is its arguments as JSON. last: the reply ended with it."""

    kind: Kind
    index: int
    call_id: str = ""
    name: str = ""
    last: bool = False
    pieces: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        if len(self.pieces) > 1:
            self.pieces = ["".join(self.pieces)]
        return self.pieces[0] if self.pieces else ""


class Step(Enum):
    BEGIN = auto()
    GROW = auto()
    END = auto()


Event = tuple[Step, Part, str]  # with the piece that a part grows by


class PartStream:
    """Takes a reply's deltas and says how its parts begin, grow and end; one is open at a time."""

    def __init__(self) -> None:
        self.parts: list[Part] = []
        self._open: Part | None = None

    def take(self, delta: ReplyDelta) -> Iterator[Event]:
        yield from self._grow("thought", delta.reasoning)
        yield from self._grow("text", delta.text)
        for call in delta.tool_calls:
            if call.id is not None:
                yield from self._begin("call", call.id, call.name or "")
            yield from self._grow("call", call.arguments)
        if delta.finish_reason is not None and self._open is not None:
            self._open.last = True
            yield from self._end()

    def _grow(self, kind: Kind, piece: str) -> Iterator[Event]:
        if not piece:
            return
        if self._open is None or self._open.kind != kind:
            yield from self._begin(kind)
        assert self._open is not None
        self._open.pieces.append(piece)
        yield Step.GROW, self._open, piece

    def _begin(self, kind: Kind, call_id: str = "", name: str = "") -> Iterator[Event]:
        yield from self._end()
        self._open = Part(kind, len(self.parts), call_id, name)
        self.parts.append(self._open)
        yield Step.BEGIN, self._open, ""

    def _end(self) -> Iterator[Event]:
        if self._open is not None:
            yield Step.END, self._open, ""
            self._open = None


def parts_of(built: ReplyBuilder) -> list[Part]:
    """The parts of a whole reply."""
    stream = PartStream()
    calls = [ToolCallDelta(index, call.id, call.name, call.arguments) for index, call in enumerate(built.tool_calls)]
    whole = ReplyDelta(built.text, built.reasoning, calls, finish_reason=built.finish_reason)
    for _ in stream.take(whole):
        pass
    return stream.parts


def thought_tokens(built: ReplyBuilder, tokenizer: Tokenizer) -> int:
    """How many of a reply's tokens are its thought, with the tags around it."""
    if not built.reasoning:
        return 0
    end = tokenizer.token_id("</think>")
    if end is None:
        return len(tokenizer.encode(built.reasoning))
    return built.token_ids.index(end) + 1 if end in built.token_ids else len(built.token_ids)
