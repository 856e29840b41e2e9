"""Server-sent events, and work that ends when its client does."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect
from starlette.types import Receive, Send

T = TypeVar("T")

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


def to_json(value: Any) -> str:
    """JSON that is safe inside an event: no line separators of Unicode, which some clients split lines at."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.replace("\u2028", "\\u2028").replace("\u2029", "\\u2029").replace("\x85", "\\u0085")


class EventStream:
    """A response of server-sent events. Its status line is sent with the first event, so that failures before it keep
    their own status. named: an event's "type" is its name too."""

    def __init__(self, send: Send, *, named: bool = False) -> None:
        self._send_message = send
        self._named = named
        self.started = False

    async def _send(self, message: dict[str, Any]) -> None:
        try:
            await self._send_message(message)
        except OSError:
            raise ClientDisconnect from None

    async def _write(self, text: str) -> None:
        if not self.started:
            self.started = True
            await self._send({"type": "http.response.start", "status": 200, "headers": HEADERS})
        await self._send({"type": "http.response.body", "body": text.encode(), "more_body": True})

    async def data(self, value: dict[str, Any]) -> None:
        """One event with `value` as JSON."""
        name = f"event: {value['type']}\n" if self._named else ""
        await self._write(f"{name}data: {to_json(value)}\n\n")

    async def comment(self, text: str) -> None:
        """A line that clients ignore and that keeps proxies from closing the connection."""
        await self._write(f": {text}\n\n")

    async def end(self, mark: str | None = None) -> None:
        """The end of the response, behind a last line of data where the protocol has one."""
        if mark is not None:
            await self._write(f"data: {mark}\n\n")
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})
