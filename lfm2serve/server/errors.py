"""Every failure as OpenAI's error object: {"error": {message, type, param, code}}."""

from __future__ import annotations

import logging
from typing import Any

from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

from lfm2serve.errors import InvalidRequest, Lfm2Error

log = logging.getLogger(__name__)

CLIENT_CLOSED_REQUEST = 499  # nginx's status for a client that left; nobody reads it


def error_body(message: str, kind: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def body_of(error: Exception) -> dict[str, Any]:
    """The error object of an exception; what we didn't raise on purpose keeps its details in the log."""
    if isinstance(error, Lfm2Error):
        return error_body(error.message, error.kind, error.param, error.code)
    return error_body("internal error; the server's log has the details", "server_error", code="internal_error")


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
    return JSONResponse(body_of(error), error.status)


async def on_http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = f"{error.detail}: {request.method} {request.url.path}"
    code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code)
    body = error_body(message, "invalid_request_error", code=code)
    return JSONResponse(body, error.status_code, headers=error.headers)


async def on_disconnect(request: Request, error: Exception) -> Response:
    return Response(status_code=CLIENT_CLOSED_REQUEST)


async def on_unexpected(request: Request, error: Exception) -> Response:
    return JSONResponse(body_of(error), 500)


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
