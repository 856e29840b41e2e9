"""Responses that clients may come back to, by id; the oldest make room."""

from __future__ import annotations

import json
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

from lfm2serve.errors import Lfm2Error

MAX_RESPONSES = 4096
MAX_BYTES = 64 * 2**20


class ResponseNotFound(Lfm2Error):
    """No such response is kept: it never was, was deleted, or made room for others."""

    status = 404
    kind = "invalid_request_error"


@dataclass(frozen=True, slots=True)
class Stored:
    """body: the response. messages: the conversation up to it, as a chat has it, without instructions. size: about as
    many bytes as these hold; a conversation counts in full with each of its responses."""

    body: dict[str, Any]
    messages: list[dict[str, Any]]
    size: int

    @classmethod
    def after(cls, before: Stored | None, body: dict[str, Any], messages: list[dict[str, Any]]) -> Stored:
        """The response to `messages`, the reply among them, behind those of `before`."""
        new = len(json.dumps([body, messages]))
        if before is None:
            return cls(body, messages, new)
        return cls(body, [*before.messages, *messages], before.size + new)


class ResponseStore:
    """The latest responses, bounded in number and bytes. One thread (the event loop's) uses it."""

    def __init__(self, max_responses: int = MAX_RESPONSES, max_bytes: int = MAX_BYTES) -> None:
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self._kept: OrderedDict[str, Stored] = OrderedDict()
        self.bytes = 0

    def __len__(self) -> int:
        return len(self._kept)

    def put(self, stored: Stored) -> None:
        """Keep a response, unless it is larger than all that may be kept."""
        if stored.size > self._max_bytes:
            return
        self._kept[stored.body["id"]] = stored
        self.bytes += stored.size
        while len(self._kept) > self._max_responses or self.bytes > self._max_bytes:
            _, oldest = self._kept.popitem(last=False)
            self.bytes -= oldest.size

    def get(self, name: str) -> Stored:
        """The response, which counts as new again. ResponseNotFound."""
        if name not in self._kept:
            raise ResponseNotFound(f"no response {name[:64]!r} is kept here")
        self._kept.move_to_end(name)
        return self._kept[name]

    def delete(self, name: str) -> None:
        """ResponseNotFound: there is no such response."""
        self.get(name)
        self.bytes -= self._kept.pop(name).size
