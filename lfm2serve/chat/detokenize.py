"""Token ids back to text, piece by piece: whole characters only, and never the start of a stop string."""

from __future__ import annotations

import codecs
import re
from collections.abc import Mapping, Sequence

from lfm2serve.chat.tokenizer import Tokenizer

_utf8 = codecs.getincrementaldecoder("utf-8")


class Detokenizer:
    """Text of one reply. The joined pieces equal `tokenizer.decode` of all the ids, however they were split.

    marks: tokens that are shown as another text.
    """

    def __init__(
        self, tokenizer: Tokenizer, skip_special_tokens: bool = True, marks: Mapping[int, str] | None = None
    ) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._marks = marks or {}
        self._decoder = _utf8("replace")

    def push(self, ids: Sequence[int]) -> str:
        """The whole characters that are complete now. Bytes that can't be UTF-8 become U+FFFD at once."""
        if self._marks.keys().isdisjoint(ids):
            return self._decoder.decode(self._tokenizer.join_bytes(ids, self._skip))
        pieces: list[str] = []
        for token in ids:
            mark = self._marks.get(token)
            pieces.append(
                self._decoder.decode(self._tokenizer.join_bytes((token,), self._skip))
                if mark is None
                else self.finish() + mark
            )
        return "".join(pieces)

    def finish(self) -> str:
        """What is left before a mark or at the end: "" or, for a character that was never completed, one U+FFFD."""
        return self._decoder.decode(b"", final=True)


class StopStrings:
    """Looks for the first stop string in a text that comes in pieces.

    First means: the one that is complete earliest in the text; of several that end at the same character, the one
    listed first. What has left `push` is never part of a stop string that is left out. Results don't depend on how
    the text is cut into pieces.
    """

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        self._stops = list(stops)
        self._include = include
        self._longest = max(map(len, self._stops), default=0)
        self._first_letters = re.compile("|".join({re.escape(stop[0]) for stop in self._stops}) or "(?!)")
        self._held = ""

    def push(self, text: str, search: bool = True) -> tuple[str, str | None]:
        """Text that is safe to send, and the stop string that was hit (the text ends before it, or with it).

        search False: stop strings that are complete within this piece don't count.
        """
        old, text = len(self._held), self._held + text
        if search and (hit := self._first_hit(text, old)) is not None:
            end, stop = hit
            self._held = ""
            return text[: end if self._include else end - len(stop)], stop
        cut = self._tail(text)
        self._held = text[cut:]
        return text[:cut], None

    def _first_hit(self, text: str, old: int) -> tuple[int, str] | None:
        """(end, stop) of the first stop string that ends behind `old`."""
        best: tuple[int, str] | None = None
        for stop in self._stops:
            at = text.find(stop, max(0, old + 1 - len(stop)))
            if at >= 0 and (best is None or at + len(stop) < best[0]):
                best = at + len(stop), stop
        return best

    def _tail(self, text: str) -> int:
        """Where the longest end of the text that could begin a stop string starts (len(text) if none could)."""
        for letter in self._first_letters.finditer(text, max(0, len(text) + 1 - self._longest)):
            tail = text[letter.start() :]
            if any(len(tail) < len(stop) and stop.startswith(tail) for stop in self._stops):
                return letter.start()
        return len(text)

    def finish(self) -> str:
        """The text that was held back, when no more comes."""
        held, self._held = self._held, ""
        return held
