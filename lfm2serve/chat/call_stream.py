"""Tool calls that a grammar makes well-formed, as they are drawn: their arguments become JSON piece by piece."""

from __future__ import annotations

import json
from collections.abc import Callable

from lfm2serve.chat.tool_calls import ToolCallDelta, new_call_id, parse_calls

_WORDS = {"True": "true", "False": "false", "None": "null"}


class CallStream:
    """Takes one block of calls that follows `calls_rules`, and gives what its calls gain.

    first: index of the next call. most: calls beyond so many are left out. whole: whether the last call is complete.
    A value is JSON as it was drawn; a call that is written as an object comes when it is complete.
    """

    def __init__(self, first: int, most: int | None) -> None:
        self.count = first
        self.whole = True
        self._last = None if most is None else first + most
        self._step: Callable[[str], str] = self._between
        self._text = ""  # of the name, key, word or object that isn't complete
        self._depth = 0
        self._quoted = self._escaped = False
        self._comma = ""
        self._given: list[ToolCallDelta] = []

    def push(self, text: str) -> list[ToolCallDelta]:
        self._given = []
        pieces: list[str] = []
        for char in text:
            pieces.append(self._step(char))
            if self._step == self._between and not self.whole:
                self._give("".join(pieces))
                pieces.clear()
                self.whole = True
        self._give("".join(pieces))
        return self._given

    def _give(self, arguments: str) -> None:
        """A piece of the open call's arguments."""
        if arguments and (self._last is None or self.count <= self._last):
            if self._given and self._given[-1].index == self.count - 1:
                last = self._given.pop()
                self._given.append(ToolCallDelta(last.index, last.id, last.name, last.arguments + arguments))
            else:
                self._given.append(ToolCallDelta(self.count - 1, None, None, arguments))

    def _begin(self, name: str) -> None:
        self.count += 1
        if self._last is None or self.count <= self._last:
            self._given.append(ToolCallDelta(self.count - 1, new_call_id(), name, ""))

    # Each of these takes a character and returns what the arguments gain.

    def _between(self, char: str) -> str:
        if char == "{":
            self._step, self._text, self._depth = self._object, char, 1
        elif char not in "[], ":
            self._step, self._text = self._name, char
        return ""

    def _name(self, char: str) -> str:
        if char != "(":
            self._text += char
            return ""
        self._begin(self._text)
        self._step, self._text, self.whole = self._key, "", False
        self._comma = ""
        return "{"

    def _key(self, char: str) -> str:
        if char == ")":
            self._step = self._between
            return "}"
        if char == "=":
            key = self._comma + json.dumps(self._text, ensure_ascii=False) + ": "
            self._step, self._text, self._comma = self._value, "", ", "
            return key
        if self._text or char not in ", ":
            self._text += char
        return ""

    def _value(self, char: str) -> str:
        if self._inside(char):
            return char
        if char not in ",)":
            self._text += char.strip()
            return ""
        word, self._text, self._step = self._text, "", self._key
        return _WORDS.get(word, word) + (self._key(char) if char == ")" else "")

    def _object(self, char: str) -> str:
        self._text += char
        if not self._inside(char):
            return ""
        if self._depth == 0 and not self._quoted:
            self._step = self._between
            for name, arguments in parse_calls(self._text) or ():
                self._begin(name)
                self._give(arguments)
        return ""

    def _inside(self, char: str) -> bool:
        """Whether a character belongs to a string, list or object, its quotes and brackets included."""
        if self._quoted:
            self._quoted = self._escaped or char != '"'
            self._escaped = char == "\\" and not self._escaped
            return True
        if char in "[{":
            self._depth += 1
        elif char in "]}":
            self._depth -= 1
            return True
        self._quoted = char == '"'
        return self._quoted or self._depth > 0
