"""A reply's text, taken apart while it grows: the thought, the tool calls, and what is said.

The four tokens around thoughts and calls come as one character each: halves of surrogate pairs, which no decoded text
holds. So a sentinel that is merely spelled out stays text, unless the tokeniser has no token for it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from lfm2serve.chat.call_stream import CallStream
from lfm2serve.chat.tokenizer import Tokenizer
from lfm2serve.chat.tool_calls import ToolCallDelta, Tools, end_pattern, new_call_id, parse_calls

THINK, END_THINK, CALL, END_CALL, SPELLED_THINK = "\ud800", "\ud801", "\ud802", "\ud803", "\ud804"
SENTINELS = {
    THINK: "<think>",
    END_THINK: "</think>",
    CALL: "<|tool_call_start|>",
    END_CALL: "<|tool_call_end|>",
    SPELLED_THINK: "<think>",
}
_MARK = re.compile("[" + "".join(SENTINELS) + "]")
_BLOCK_END = end_pattern(END_CALL)


def spelled_out(text: str) -> str:
    """The text with sentinels as they are written."""
    return _MARK.sub(lambda match: SENTINELS[match[0]], text)


def with_marks(text: str, marks: Iterable[str]) -> list[str]:
    """The text, and what it is where its sentinels are these characters."""
    marked = text
    for mark in marks:
        marked = marked.replace(SENTINELS[mark], mark)
    return [text] if marked == text else [text, marked]


@dataclass(frozen=True, slots=True)
class Reading:
    """How a chat's reply is read.

    tools: the request's; None: tool calls aren't looked for. parallel: several calls count, not just the first.
    thinking: the prompt opened a thought. hidden: thoughts aren't shown. sure: a grammar makes the calls well-formed.
    """

    tools: Tools | None = None
    parallel: bool = True
    thinking: bool = False
    hidden: bool = False
    sure: bool = False

    def marks(self, tokenizer: Tokenizer) -> dict[int, str]:
        """Token id -> character of the sentinels that are one token."""
        ids = {mark: tokenizer.token_id(SENTINELS[mark]) for mark in self._sought}
        return {number: mark for mark, number in ids.items() if number is not None}

    def spelled(self, tokenizer: Tokenizer) -> dict[str, str]:
        """Text -> character of the sentinels that the tokeniser has no token for."""
        missing = [mark for mark in self._sought if tokenizer.token_id(SENTINELS[mark]) is None]
        return {SENTINELS[mark]: SPELLED_THINK if mark == THINK else mark for mark in missing}

    @property
    def _sought(self) -> tuple[str, ...]:
        return (THINK, END_THINK) if self.tools is None else (THINK, END_THINK, CALL, END_CALL)


@dataclass(slots=True)
class Parts:
    """What a piece of a reply adds: things said, thoughts and calls."""

    text: str = ""
    reasoning: str = ""
    calls: list[ToolCallDelta] = field(default_factory=list)


class ReplyParts:
    """Takes a reply's text in pieces; what comes out in all doesn't depend on how it was cut.

    A thought stands between <think> and </think>; nothing in it is read as a call. Calls come when their block is
    complete, so that half a call is never given; a block that isn't a list of calls is said as it is. Where a grammar
    makes them sure, arguments come as they are drawn, and a reply that is cut ends with what there is of its call.
    Blanks around calls and behind thoughts are dropped, text behind a call begins a new line. A second copy of a block
    that ends without having begun is dropped.

    called: whether there are calls, the last of which is complete.
    """

    def __init__(self, tokenizer: Tokenizer, reading: Reading) -> None:
        self.called = False
        self._tools = reading.tools
        self._parallel = reading.parallel
        self._hidden = reading.hidden
        self._spelling = _Spelling(reading.spelled(tokenizer))
        self._buffer = ""
        self._step = self._think if reading.thinking else self._say
        self._may_open_again = reading.thinking  # models may write the <think> that the prompt already has
        self._has_thought = self._has_said = False
        self._count = 0  # of calls
        self._searched = 0  # how much of a block was looked at for its end
        self._stream: CallStream | None = None
        self._call = self._call_surely if reading.sure else self._call_once_whole
        self._blank = ""  # blanks that are said once something follows
        self._joint: str | None = None  # what stands for them behind a thought or a call
        self._echo: str | None = None  # the block that may come once more

    def push(self, text: str) -> Parts:
        """What the reply gains."""
        return self._read(text, final=False)

    def finish(self) -> Parts:
        """What was held back, when no more comes."""
        parts = self._read("", final=True)
        if self._joint is None and not self._count:
            parts.text += self._blank
        self._blank = ""
        return parts

    def _read(self, text: str, final: bool) -> Parts:
        parts = Parts()
        self._buffer += self._spelling.marked(text, final)
        while self._step(parts, final):
            pass
        if self._hidden:
            parts.reasoning = ""
        return parts

    # Each of these takes what it can off the buffer; False: no more can be told yet.

    def _think(self, parts: Parts, final: bool) -> bool:
        if self._may_open_again:
            text = self._buffer.lstrip()
            if not text and not final:
                return False
            self._may_open_again = False
            if text[:1] in (THINK, SPELLED_THINK):
                self._buffer = text[1:]
        thought, end, self._buffer = self._buffer.partition(END_THINK)
        parts.reasoning += spelled_out(thought)
        if end:
            self._has_thought = True
            self._go_on()
        return bool(end)

    def _say(self, parts: Parts, final: bool) -> bool:
        match = _MARK.search(self._buffer)
        text = self._buffer[: match.start()] if match is not None else self._buffer
        mark = match[0] if match is not None else ""
        if self._echo is not None:
            said = text.strip()
            if mark == "" and not final and (self._echo.startswith(text.lstrip()) or said == self._echo):
                return False
            if mark == END_CALL and said == self._echo:
                self._buffer = self._buffer[len(text) + 1 :]
                return True
            self._echo = None
        self._buffer = self._buffer[len(text) + len(mark) :]
        self._speak(parts, text)
        if mark == CALL:
            self._step = self._call
        elif mark == THINK or (mark == SPELLED_THINK and not self._has_said):
            self._step, self._blank = self._think, ""
            parts.reasoning += "\n" if self._has_thought else ""
        elif mark != END_CALL:
            self._speak(parts, SENTINELS.get(mark, ""))
        return match is not None

    def _call_surely(self, parts: Parts, final: bool) -> bool:
        if self._stream is None:
            self._stream = CallStream(self._count, None if self._parallel else 1 - self._count)
        block, end, self._buffer = self._buffer.partition(END_CALL)
        gained = self._stream.push(spelled_out(block))
        parts.calls += gained
        self._count = max([self._count, *(delta.index + 1 for delta in gained)])
        self.called = self._count > 0 and self._stream.whole
        if end:
            self._stream = None
            self._go_on()
        return bool(end)

    def _call_once_whole(self, parts: Parts, final: bool) -> bool:
        end = self._block_end(final)
        if end is None and not final:
            return False
        body, self._searched = spelled_out(self._buffer[:end]), 0
        self._buffer = self._buffer[end + 1 :] if end is not None else ""
        self._step = self._say
        found = parse_calls(body, self._tools or ())
        if found is None:
            self._speak(parts, SENTINELS[CALL] + body + (SENTINELS[END_CALL] if end is not None else ""))
        else:
            taken = found if self._parallel else found[: 1 - self._count]
            for index, (name, arguments) in enumerate(taken, self._count):
                parts.calls.append(ToolCallDelta(index, new_call_id(), name, arguments))
            self._count += len(taken)
            self.called = self._count > 0
            self._echo = body.strip()
            self._go_on()
        return True

    def _block_end(self, final: bool) -> int | None:
        """Where the block's end token is: the first that isn't inside a string, for want of that the first."""
        fresh = self._buffer[self._searched :]
        self._searched = len(self._buffer)
        first = self._buffer.find(END_CALL)
        if first >= 0 and self._buffer.lstrip().startswith(("[", "{")):
            may_end = any(char in fresh for char in f"'\"{END_CALL}")
            match = _BLOCK_END.match(self._buffer) if may_end or final else None
            if match is not None or not final:
                return None if match is None else match.end() - 1
        return None if first < 0 else first

    def _go_on(self) -> None:
        """Behind a thought or a block."""
        self._step, self._blank = self._say, ""
        self._joint = "\n" if self._has_said else ""

    def _speak(self, parts: Parts, text: str) -> None:
        """Say a text without marks."""
        text = self._blank + text
        plain = self._has_said and self._tools is None and self._joint is None
        kept = len(text) if plain else len(text.rstrip())
        said, self._blank = text[:kept], text[kept:]
        if said:
            parts.text += said if self._joint is None else self._joint + said.lstrip()
            self._joint, self._has_said = None, True


class _Spelling:
    """Finds sentinels that are ordinary text. spelled: their texts -> the characters that stand for them."""

    def __init__(self, spelled: dict[str, str]) -> None:
        self._spelled = spelled
        self._pattern = re.compile("|".join(map(re.escape, spelled)) or "(?!)")
        self._held = ""

    def marked(self, text: str, final: bool) -> str:
        """The text with their characters, except for an end that could begin one, which is held back."""
        text = self._pattern.sub(lambda match: self._spelled[match[0]], self._held + text)
        at = text.rfind("<")  # each begins with the only one that it has
        held = text[at:] if at >= 0 and not final else ""
        self._held = held if held and any(sentinel.startswith(held) for sentinel in self._spelled) else ""
        return text[: len(text) - len(self._held)]
