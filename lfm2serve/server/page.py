"""The page at /: a chat, and a live view of who holds which memory; and the endpoints that feed it."""

from __future__ import annotations

import asyncio
import base64
import functools
import hashlib
import re
import time
from collections.abc import AsyncIterator
from importlib import resources
from typing import Any

from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from kernels_numba.batch import PAGE_ROWS
from lfm2serve.memory.snapshots import SNAPSHOT_PAGE
from lfm2serve.server.answer import ServerState, state_of
from lfm2serve.server.streaming import HEADERS, to_json

BEAT_S = 0.5  # between two views of the memory


@functools.cache
def _page() -> tuple[str, dict[str, str]]:
    """The page and its headers: nothing runs in it, and it calls nobody, but what it brings along and who sent it."""
    text = resources.files("lfm2serve.server").joinpath("page.html").read_text(encoding="utf-8")
    style, script = (re.search(f"<{tag}>(.*?)</{tag}>", text, re.DOTALL) for tag in ("style", "script"))
    assert style is not None and script is not None
    policy = (
        f"default-src 'none'; style-src {_source(style[1])}; script-src {_source(script[1])}; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    headers = {
        "content-security-policy": policy,
        "cache-control": "no-cache",
        "referrer-policy": "no-referrer",
        "x-content-type-options": "nosniff",
    }
    return text, headers


def _source(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


async def page(request: Request) -> Response:
    text, headers = _page()
    return HTMLResponse(text, headers=headers)


def view(state: ServerState) -> dict[str, Any]:
    """Who holds which memory at this moment.

    time: monotonic seconds. pages: K/V pages, with each stream's. arena: pieces of the pool, and who mapped them. kept:
    snapshot pages, and (mark, tokens, pages) of each kept state, the oldest first. plan: bytes by purpose.
    """
    engine = state.runtime.engine
    stats, kept = engine.stats(), engine.kept_states()
    census, cache, arena = stats.census, stats.cache, engine.arena.stats()
    counted = ("hits", "tokens_saved", "keeps", "refusals", "evictions")
    return {
        "object": "memory",
        "model": state.model,
        "time": time.monotonic(),
        "streams": {name: getattr(stats, name) for name in ("waiting", "filling", "running", "background")},
        "tokens": {"prompt": stats.counters.prompt_tokens, "generated": stats.counters.generated_tokens},
        "pages": {
            "rows": PAGE_ROWS,
            "bytes": state.runtime.plan.page_bytes,
            "total": census.total,
            "free": census.free,
            "leased": census.leased,
            "promised": census.promised,
            "streams": census.streams,
        },
        "arena": {
            "pieces": arena.pieces,
            "mapped": arena.mapped_pieces,
            "parts": {"beside others": arena.by_helper, "for who waited": arena.by_caller},
        },
        "kept": {
            "page_bytes": SNAPSHOT_PAGE,
            "total": (cache.held_bytes + cache.spare_bytes) // SNAPSHOT_PAGE,
            "held": cache.held_bytes // SNAPSHOT_PAGE,
            "states": [[str(mark), tokens, pages] for mark, tokens, pages in kept],
        },
        "cache": {"lookups": cache.counters.lookups}
        | {name: {str(mark): n for mark, n in getattr(cache.counters, name).items()} for name in counted},
        "plan": state.runtime.memory.to_dict(),
    }


async def memory(request: Request) -> Response:
    return JSONResponse(view(state_of(request)))


async def memory_events(request: Request) -> Response:
    """The view of the memory again and again, as server-sent events, until the client or the server leaves."""
    state = state_of(request)

    async def beats() -> AsyncIterator[bytes]:
        while not state.draining:
            yield b"data: %b\n\n" % to_json(view(state))
            await asyncio.sleep(BEAT_S)

    # a HEAD has no body that could tell us when its client leaves
    response = Response() if request.method == "HEAD" else StreamingResponse(beats())
    response.raw_headers = list(HEADERS)
    return response


ROUTES = [Route("/v1/memory", memory, methods=["GET"]), Route("/v1/memory/events", memory_events, methods=["GET"])]
PAGE = Route("/", page, methods=["GET"])
