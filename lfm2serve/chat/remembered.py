"""Texts whose token ids are remembered: every turn of a chat brings the earlier messages again."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable
from threading import Lock

REMEMBERED_CHARACTERS = 4 << 20


class Remembered:
    """`encode` with a memory of the texts that it was used for lately; for any thread."""

    def __init__(self, encode: Callable[[str], list[int]], characters: int = REMEMBERED_CHARACTERS) -> None:
        self._encode = encode
        self._characters = self._room = characters
        self._ids: OrderedDict[str, array[int]] = OrderedDict()  # last used last
        self._lock = Lock()

    def __call__(self, text: str) -> list[int]:
        with self._lock:
            known = self._ids.get(text)
            if known is not None:
                self._ids.move_to_end(text)
        if known is not None:
            return known.tolist()
        ids = self._encode(text)
        if len(text) > self._characters:
            return ids
        with self._lock:
            if text not in self._ids:
                self._ids[text] = array("i", ids)
                self._room -= len(text)
            while self._room < 0:
                gone, _ = self._ids.popitem(last=False)
                self._room += len(gone)
        return ids
