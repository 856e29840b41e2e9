"""Every failure as OpenAI's error object, {"error": {message, type, param, code}}, or as Anthropic's on its paths."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import Scope

from lfm2serve.errors import InvalidRequest, Lfm2Error
from lfm2serve.server.logs import record_of

log = logging.getLogger(__name__)

CLIENT_CLOSED_REQUEST = 499  # nginx's status for a client that left; nobody reads it

ANTHROPIC_PATH = "/v1/messages"
ANTHROPIC_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    529: "overloaded_error",
}  # else by class: invalid_request_error, api_error


def error_body(message: str, kind: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def body_of(error: Exception) -> dict[str, Any]:
    """The error object of an exception; what we didn't raise on purpose keeps its details in the log."""
    if isinstance(error, Lfm2Error):
        return error_body(error.message, error.kind, error.param, error.code)
    return error_body("internal error; the server's log has the details", "server_error", code="internal_error")


def anthropic_body(body: dict[str, Any], status: int) -> dict[str, Any]:
    """OpenAI's error object as Anthropic's."""
    kind = ANTHROPIC_KINDS.get(status, "invalid_request_error" if status < 500 else "api_error")
    code = body["error"]["code"]
    details = {} if code is None else {"details": {"error_code": code}}
    return {"type": "error", "error": {"type": kind, "message": body["error"]["message"], **details}}


def error_response(
    path: str, body: dict[str, Any], status: int, headers: Mapping[str, str] | None = None
) -> JSONResponse:
    """An error object as the dialect of a path has it."""
    if path.startswith(ANTHROPIC_PATH):
        body = anthropic_body(body, status)
    return JSONResponse(body, status, headers)


def headers_of(error: Exception) -> dict[str, str]:
    """The headers that go with an error's status."""
    if isinstance(error, QueueFull):
        return {"retry-after": str(error.retry_after_s)}
    if isinstance(error, Unauthorized):
        return {"www-authenticate": "Bearer"}
    if isinstance(error, RequestTimedOut):
        return {"x-should-retry": "false"}  # clients would ask for the same long reply again
    return {}


def respond(scope: Scope, error: Lfm2Error) -> Response:
    """The response to a request that failed as we know it can."""
    record_of(scope).fields["error"] = type(error).__name__
    return error_response(scope["path"], body_of(error), error.status, headers_of(error))


def field_path(location: tuple[int | str, ...]) -> str:
    """pydantic's ("messages", 2, "content") as "messages[2].content"."""
    path = ""
    for part in location:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else part
    return path


def from_validation(error: ValidationError) -> InvalidRequest:
    """pydantic's first complaint as one line that names the field and never quotes the request's text."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    param = field_path(first["loc"])
    if first["type"] == "extra_forbidden":
        return InvalidRequest(f"unknown field {param!r}", param=param, code="unknown_parameter")
    if first["type"] == "missing":
        return InvalidRequest(f"{param} is required", param=param, code="missing_required_parameter")
    reason = first["msg"].removeprefix("Value error, ").removeprefix("Input ")
    return InvalidRequest(f"{param}: {reason}" if param else reason, param=param or None)


async def on_lfm2_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, Lfm2Error)
    if error.status == 500:
        log.error("%s %s: %s", request.method, request.url.path, error.message)
    return respond(request.scope, error)


async def on_http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = f"{error.detail}: {request.method} {request.url.path}"
    code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code)
    body = error_body(message, "invalid_request_error", code=code)
    return error_response(request.url.path, body, error.status_code, error.headers)


async def on_disconnect(request: Request, error: Exception) -> Response:
    return Response(status_code=CLIENT_CLOSED_REQUEST)


async def on_unexpected(request: Request, error: Exception) -> Response:
    return error_response(request.url.path, body_of(error), 500)


HANDLERS: dict[Any, Any] = {
    Lfm2Error: on_lfm2_error,
    HTTPException: on_http_exception,
    ClientDisconnect: on_disconnect,
    Exception: on_unexpected,
}


class UnsupportedMediaType(InvalidRequest):
    """A body that isn't declared as JSON."""

    status = 415


class BodyTooLarge(InvalidRequest):
    """A body over the limit."""

    status = 413


class Unauthorized(Lfm2Error):
    """A request without one of the server's API keys."""

    status = 401
    kind = "invalid_request_error"


class QueueFull(Lfm2Error):
    """More replies wait than --max-queue allows."""

    status = 429
    kind = "rate_limit_error"

    def __init__(self, message: str, retry_after_s: int) -> None:
        super().__init__(message, code="queue_full")
        self.retry_after_s = retry_after_s


class RequestTimedOut(Lfm2Error):
    """A reply that wasn't done within --request-timeout."""

    status = 504
    kind = "timeout_error"

    def __init__(self, seconds: float) -> None:
        super().__init__(f"the reply was not done within {seconds:g} s and was cancelled", code="request_timeout")
