"""Every error that a user can meet, with the HTTP status and exit code it maps to."""

from __future__ import annotations


class Lfm2Error(Exception):
    """Base of all errors raised on purpose. `str(error)` is one readable line.

    status: HTTP status; exit_code: of the command line; kind: OpenAI's error type; code: OpenAI's error code.
    """

    status = 500
    exit_code = 1
    kind = "server_error"

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code


class CheckpointError(Lfm2Error):
    """A checkpoint that can't be found, read or trusted; names the file and the field or tensor."""

    exit_code = 2


class InvalidRequest(Lfm2Error):
    """A request (or argument) that can't be served as asked; `param` names the field."""

    status = 400
    exit_code = 2
    kind = "invalid_request_error"


class ContextLengthExceeded(InvalidRequest):
    """Prompt plus reply limit is longer than the context that is served."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message, param=param, code="context_length_exceeded")


class RequestTooLarge(InvalidRequest):
    """A request that needs more K/V pages than the whole pool has."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message, param=param, code="request_too_large")


class MemoryPlanError(Lfm2Error):
    """Weights, scratch and pages don't fit; the message names the flag to change."""

    exit_code = 2


class DeviceError(Lfm2Error):
    """The device that was asked for isn't there or can't run the kernels."""

    exit_code = 2


class LeaseError(Lfm2Error):
    """Rows past a stream's lease, or pages handled twice: a bug, never a user's mistake."""


class ArenaMemory(Lfm2Error):
    """The device has no memory left for a lease's pages. asked, free: bytes."""

    status = 503
    kind = "service_unavailable"

    def __init__(self, message: str, *, asked: int, free: int) -> None:
        super().__init__(message, code="out_of_memory")
        self.asked = asked
        self.free = free


class EngineDead(Lfm2Error):
    """The engine thread has stopped (closed, or after a fault)."""

    status = 503
    kind = "service_unavailable"
