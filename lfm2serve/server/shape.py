"""How an endpoint writes its replies: what `Answer` asks of every dialect."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

from lfm2serve.reply import ReplyDelta
from lfm2serve.server.group import Reply


class Shape(ABC):
    """The replies of one request, whole or as the events of a stream; one object writes one response.

    named_events: an event's "type" is its SSE name too. end_mark: what a stream's last line of data says, if it
    has one.
    """

    named_events: ClassVar[bool] = False
    end_mark: ClassVar[str | None] = None

    @abstractmethod
    def whole(self, replies: Sequence[Reply]) -> dict[str, Any]:
        """The response once all replies have ended."""

    @abstractmethod
    def chunks(self, reply: Reply, delta: ReplyDelta) -> Iterable[dict[str, Any]]:
        """The events that tell what a reply gained: none where there is nothing to tell."""

    def closing(self, replies: Sequence[Reply]) -> Iterable[dict[str, Any]]:
        """The events after the last reply's end."""
        return ()

    @abstractmethod
    def failure(self, error: Exception) -> Iterable[dict[str, Any]]:
        """The events that end a stream which has begun and can't go on."""
