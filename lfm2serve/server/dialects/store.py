"""Responses that clients may come back to, by id; the oldest make room."""

from __future__ import annotations

import json
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

from lfm2serve.errors import Lfm2Error

MAX_RESPONSES = 4096
MAX_BYTES = 256 * 2**20


class ResponseNotFound(Lfm2Error):
    """No such response is kept: it never was, was deleted, or made room for others."""

    status = 404
    kind = "invalid_request_error"


@dataclass(frozen=True, slots=True)
class Stored:
    """body: the response. messages: the conversation up to it, as a chat has it, without instructions."""

    body: dict[str, Any]
    messages: list[dict[str, Any]]

    @property
    def size(self) -> int:
        """About as many bytes as it holds; a conversation counts in full with each of its responses."""
        return len(json.dumps([self.body, self.messages]))


class ResponseStore:
    """The latest responses, bounded in number and bytes. One thread (the event loop's) uses it."""

    def __init__(self, max_responses: int = MAX_RESPONSES, max_bytes: int = MAX_BYTES) -> None:
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self._kept: OrderedDict[str, tuple[Stored, int]] = OrderedDict()
        self.bytes = 0

    def __len__(self) -> int:
        return len(self._kept)

    def put(self, stored: Stored) -> None:
        """Keep a response, unless it is larger than all that may be kept."""
        size = stored.size
        if size > self._max_bytes:
            return
        self._kept[stored.body["id"]] = stored, size
        self.bytes += size
        while len(self._kept) > self._max_responses or self.bytes > self._max_bytes:
            _, (_, freed) = self._kept.popitem(last=False)
            self.bytes -= freed

    def get(self, name: str) -> Stored:
        """The response, which counts as new again. ResponseNotFound."""
        if name not in self._kept:
            raise ResponseNotFound(f"no response {name[:64]!r} is kept here")
        self._kept.move_to_end(name)
        return self._kept[name][0]

    def delete(self, name: str) -> None:
        """ResponseNotFound: there is no such response."""
        self.get(name)
        self.bytes -= self._kept.pop(name)[1]
