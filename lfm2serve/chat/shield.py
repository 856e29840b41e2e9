"""Keeps users' text from becoming control tokens on its way through a chat template.

Every control string begins and ends with one of a few letters ("<" and ">"). Before rendering, these letters of users'
strings are replaced, one for one, by stand-ins that occur nowhere in the request. A control string in the rendered
text is then the template's own, even where the template joins pieces that no user sent as one. The text between them
is given its letters back and encoded as plain text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from lfm2serve.chat.tokenizer import Tokenizer
from lfm2serve.errors import InvalidRequest

# Printable, caseless and rare: templates write lists with repr(), which would escape a noncharacter.
CUNEIFORM = [chr(code) for code in range(0x12000, 0x12400) if chr(code).isprintable()]
IDEOGRAPHS = range(0x20000, 0x2A6D7)  # for texts that use all of those


def map_strings(value: Any, change: Callable[[str], str]) -> Any:
    """A copy of nested lists and dicts with every string (keys too) changed."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {map_strings(key, change): map_strings(item, change) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [map_strings(item, change) for item in value]
    return value


class Shield:
    """Stand-ins for one request.

    spoken: control strings that the model writes, let through where a string is said to be spoken by it. texts: the
    users' strings. written: the template's source. needed: whether a text has a letter that could begin a control
    string.
    """

    def __init__(self, tokenizer: Tokenizer, spoken: Iterable[str], texts: Iterable[str], written: str) -> None:
        self._tokenizer = tokenizer
        self._controls = tokenizer.control_tokens
        self._spoken = frozenset(spoken)
        self._spoken_pattern = re.compile("(" + "|".join(map(re.escape, self._spoken)) + ")")
        self._first_letters = {text[0] for text in self._controls}
        texts = list(texts)
        self.needed = any(letter in text for text in texts for letter in self._first_letters)
        letters = sorted(self._first_letters | {text[-1] for text in self._controls})
        self._stand_ins = (
            dict(zip(letters, unused([*texts, written], len(letters)), strict=True)) if self.needed else {}
        )

    def every(self, text: str, spoken: bool) -> str:
        """The text with all the letters replaced."""
        if not spoken:
            return self._raise(text)
        pieces = self._spoken_pattern.split(text)
        pieces[::2] = [self._raise(piece) for piece in pieces[::2]]
        return "".join(pieces)

    def whole(self, text: str, spoken: bool) -> str:
        """The text with the letters replaced in control strings, and in an end that could begin one.

        For templates that look at the letters themselves and render something else without them.
        """

        def replace(match: re.Match[str]) -> str:
            return match[0] if spoken and match[0] in self._spoken else self._raise(match[0])

        text = self._tokenizer.control_pattern.sub(replace, text)
        at = max(map(text.rfind, self._first_letters))
        end = text[at:].rstrip()
        if at >= 0 and any(control != end and control.startswith(end) for control in self._controls):
            text = text[:at] + self._raise(text[at:])
        return text

    def _raise(self, text: str) -> str:
        for letter, stand_in in self._stand_ins.items():
            text = text.replace(letter, stand_in)
        return text

    def lower(self, text: str) -> str:
        """The text with its letters back."""
        for letter, stand_in in self._stand_ins.items():
            text = text.replace(stand_in, letter)
        return text

    def controls(self, shielded: str) -> list[str]:
        """The control strings of a rendered text, in order."""
        return self._tokenizer.control_pattern.findall(shielded)

    def encode(self, text: str, shielded: str) -> list[int]:
        """Ids of a rendered text; the same text rendered from shielded strings says where its control tokens are."""
        tokenizer = self._tokenizer
        spans = [match.span() for match in tokenizer.control_pattern.finditer(shielded)]
        whole = [match.span() for match in tokenizer.control_pattern.finditer(text)] == spans
        if whole and not tokenizer.controls_stand_alone:
            return tokenizer.encode(text)
        ids: list[int] = []
        at = 0
        for start, end in spans:
            ids += tokenizer.encode_piece(text[at:start])
            ids.append(self._controls[text[start:end]])
            at = end
        return ids + tokenizer.encode_piece(text[at:])


def unused(texts: list[str], count: int) -> list[str]:
    """`count` characters that none of the texts has."""
    free = [char for char in CUNEIFORM[:32] if not any(char in text for text in texts)]
    if len(free) < count:
        used = set().union(*texts)
        free = [char for char in (*CUNEIFORM, *map(chr, IDEOGRAPHS)) if char not in used]
    if len(free) < count:
        raise InvalidRequest("messages use every rare character of Unicode", param="messages")
    return free[:count]
