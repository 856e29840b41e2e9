"""Clients of a server, in a process of their own: `python -m lfm2serve.bench.clients WHAT URL NUMBER TOKENS`.

URL is an endpoint's, of chats or completions. stream: all connect, then all ask, and each reads its streamed reply to
the end. vanish: each begins a reply and breaks the connection off. Prints one JSON object; `seconds` begin with the
first request, not with this process. Only the standard library, and no more work a chunk than reading it: what is
measured is the server.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from functools import partial
from typing import Any
from urllib.parse import SplitResult, urlsplit

AT_ONCE = 100  # connections that vanish are open together
END = b"data: [DONE]\n\n"


def story(number: int) -> str:
    """What client `number` asks for."""
    return f"Tell me the story number {number}."


def _request(url: SplitResult, tokens: int, number: int) -> bytes:
    text = story(number)
    asked: Any = {"messages": [{"role": "user", "content": text}]} if "/chat/" in url.path else {"prompt": text}
    body = {
        **asked, "stream": True, "stream_options": {"include_usage": True},
        "max_tokens": tokens, "ignore_eos": True, "draft": False, "prompt_cache": False, "seed": number,
    }  # fmt: skip
    text = json.dumps(body)
    head = f"POST {url.path} HTTP/1.1\r\nHost: {url.netloc}\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(text)}\r\nConnection: close\r\n\r\n{text}".encode()


Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def _stream(connection: Connection, request: bytes, number: int) -> tuple[int, int]:
    """Tokens of the reply, and the chunks that they came in."""
    reader, writer = connection
    writer.write(request)
    chunks, tail = 0, b""
    while piece := await reader.read(1 << 16):
        chunks += piece.count(b"data: ")
        tail = (tail + piece)[-2000:]
    writer.close()
    last = next((part for part in reversed(tail.split(b"data: ")) if b'"usage":{' in part), None)
    if END not in tail or last is None:
        raise RuntimeError(f"client {number}: the stream broke off: {tail[-300:]!r}")
    return int(json.loads(last.split(b"\r\n")[0])["usage"]["completion_tokens"]), chunks


async def _vanish(url: SplitResult, tokens: int, number: int, free: asyncio.Semaphore) -> None:
    """Gone before the answer, or in its midst; politely or by a reset."""
    async with free:
        reader, writer = await asyncio.open_connection(url.hostname, url.port)
        writer.write(_request(url, tokens, number))
        await writer.drain()
        if number % 3:
            await reader.read(200 * (number % 3))
        if number % 2:
            writer.transport.abort()
        else:
            writer.close()


async def run(what: str, url: str, number: int, tokens: int) -> dict[str, Any]:
    """WHAT with NUMBER clients against the server at `url`; seconds, and what came."""
    parts = urlsplit(url)
    started = time.monotonic()
    if what == "vanish":
        free = asyncio.Semaphore(AT_ONCE)
        await asyncio.gather(*(_vanish(parts, tokens, i, free) for i in range(number)))
        return {"seconds": time.monotonic() - started}
    open_one = partial(asyncio.open_connection, parts.hostname, parts.port)
    connections = await asyncio.gather(*(open_one() for _ in range(number)))
    requests = [_request(parts, tokens, i) for i in range(number)]
    started = time.monotonic()
    done = await asyncio.gather(*map(_stream, connections, requests, range(number)))
    seconds = time.monotonic() - started
    return {"seconds": seconds, "tokens": sum(t for t, _ in done), "chunks": sum(c for _, c in done)}


if __name__ == "__main__":
    print(json.dumps(asyncio.run(run(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])))))
