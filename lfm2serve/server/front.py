"""What stands in front of every endpoint: request ids and the access log, cross-origin rules, API keys."""

from __future__ import annotations

import hashlib
import hmac
import logging
import random
import re
import time
from collections.abc import Callable, Sequence

from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lfm2serve.server.errors import CLIENT_CLOSED_REQUEST, Unauthorized, respond
from lfm2serve.server.logs import REQUEST_ID, Record
from lfm2serve.server.options import ServerOptions

log = logging.getLogger("lfm2serve.access")

REQUEST_ID_HEADER = "x-request-id"
GIVEN_ID = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")  # others are replaced: a log line must not be forged
OPEN_PATHS = frozenset({"/health", "/"})  # the page is a file without a secret in it; what it asks for needs the key
ROUTINE = frozenset({"/health", "/metrics", "/"})  # asked all day long


class AccessLog:
    """Gives every request an id, or takes the client's; the response carries it, and a line in the log says how it
    went."""

    def __init__(self, app: ASGIApp, on_end: Callable[[int], None]) -> None:
        self._app = app
        self._on_end = on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get(REQUEST_ID_HEADER, "")
        record = Record(given if GIVEN_ID.fullmatch(given) else f"{random.getrandbits(128):032x}")
        scope["lfm2serve.record"] = record
        token = REQUEST_ID.set(record.request_id)
        started, status, whole = time.monotonic(), CLIENT_CLOSED_REQUEST, False

        async def send_with_id(message: Message) -> None:
            nonlocal status, whole
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)[REQUEST_ID_HEADER] = record.request_id
            await send(message)
            whole = message["type"] == "http.response.body" and not message.get("more_body", False)

        try:
            await self._app(scope, receive, send_with_id)
        except Exception:
            log.exception("a request failed", extra={"request_id": record.request_id})
            if not whole:  # the server breaks the connection off; where the client has its 500 it need not
                raise
        finally:
            self._on_end(status)
            routine = scope["path"] in ROUTINE and status < 400
            fields = {
                "method": scope["method"],
                "path": scope["path"],
                "status": status,
                "duration_ms": round(1e3 * (time.monotonic() - started), 1),
                **record.fields,
            }
            extra = {"fields": fields, "request_id": record.request_id}
            log.log(logging.DEBUG if routine else logging.INFO, "request", extra=extra)
            REQUEST_ID.reset(token)


class ApiKeys:
    """Lets in who has one of the keys, as `Authorization: Bearer KEY` or `x-api-key: KEY`."""

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self._app = app
        self._digests = [_digest(key) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS:
            error = self._refusal(Headers(scope=scope))
            if error is not None:
                await respond(scope, error)(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _refusal(self, headers: Headers) -> Unauthorized | None:
        scheme, _, given = headers.get("authorization", "").partition(" ")
        key = given.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
        if not key:
            return Unauthorized("no API key was given; send it as: Authorization: Bearer KEY")
        digest = _digest(key)
        # all of them, and digests rather than keys: the time tells nothing of which one is nearly right
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        return None if any(matches) else Unauthorized("the API key is not one of this server's", code="invalid_api_key")


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def in_front(app: ASGIApp, options: ServerOptions, on_end: Callable[[int], None]) -> ASGIApp:
    """`app` behind everything that `options` ask for. on_end is called with each response's status."""
    if options.api_keys:
        app = ApiKeys(app, options.api_keys)
    if options.cors_origins:
        app = CORSMiddleware(
            app,
            allow_origins=options.cors_origins,
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],
            expose_headers=[REQUEST_ID_HEADER, "retry-after"],
        )
    return AccessLog(app, on_end)
