"""Server-sent events, and work that ends when its client does."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

import pydantic_core
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Send

T = TypeVar("T")

ESCAPES = tuple((text.encode(), f"\\u{ord(text):04x}".encode()) for text in "\u2028\u2029\x85")
MOST_WAITING = 1 << 16  # bytes of events that wait to be sent together

HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def unless_disconnected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled when the client leaves (ClientDisconnect) or the caller is.

    The body must have been read. Watching receive() beside the work doesn't depend on what a server's send() does
    once the client has gone.
    """
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        working.cancel()
        watching.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


def to_json(value: Any) -> bytes:
    """JSON that is safe inside an event: no line separators of Unicode, which some clients split lines at."""
    text = pydantic_core.to_json(value, inf_nan_mode="null")
    if not text.isascii():
        for separator, escaped in ESCAPES:
            text = text.replace(separator, escaped)
    return text


class EventStream:
    """A response of server-sent events. Its status line is sent with the first event, so that failures before it keep
    their own status. named: an event's "type" is its name too.

    `data` only collects: `flush` sends what is there in one piece, so that a server that is behind has less to send.
    """

    def __init__(self, send: Send, *, named: bool = False) -> None:
        self._send_message = send
        self._named = named
        self._waiting = bytearray()
        self._started = False

    @property
    def begun(self) -> bool:
        """Whether the client has been sent an event, or is about to."""
        return self._started or bool(self._waiting)

    async def _send(self, message: dict[str, Any]) -> None:
        try:
            await self._send_message(message)
        except OSError:
            raise ClientDisconnect from None

    async def flush(self) -> None:
        """Send every event that waits."""
        if not self._waiting:
            return
        if not self._started:
            self._started = True
            await self._send({"type": "http.response.start", "status": 200, "headers": HEADERS})
        body, self._waiting = bytes(self._waiting), bytearray()
        await self._send({"type": "http.response.body", "body": body, "more_body": True})

    async def data(self, value: dict[str, Any]) -> None:
        """One event with `value` as JSON, to be sent by the next `flush`."""
        if self._named:
            self._waiting += b"event: %b\n" % value["type"].encode()
        self._waiting += b"data: %b\n\n" % to_json(value)
        if len(self._waiting) > MOST_WAITING:
            await self.flush()

    async def comment(self, text: str) -> None:
        """A line that clients ignore and that keeps proxies from closing the connection."""
        self._waiting += f": {text}\n\n".encode()
        await self.flush()

    async def end(self, mark: str | None = None) -> None:
        """The end of the response, behind a last line of data where the protocol has one."""
        if mark is not None:
            self._waiting += f"data: {mark}\n\n".encode()
        await self.flush()
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})
