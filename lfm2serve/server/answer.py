"""From a request's body to its answer: what every endpoint that generates text shares."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any, TypeVar

import pydantic_core
from anyio import to_thread
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from lfm2serve.errors import EngineDead, InvalidRequest, Lfm2Error
from lfm2serve.runtime import Runtime, new_seed
from lfm2serve.server.dialects.store import ResponseStore
from lfm2serve.server.errors import BodyTooLarge, RequestTimedOut, UnsupportedMediaType
from lfm2serve.server.group import SHUTTING_DOWN, Bridge, ReplyGroup
from lfm2serve.server.logs import Record, record_of
from lfm2serve.server.metrics import ServerMetrics
from lfm2serve.server.options import ServerOptions
from lfm2serve.server.places import Places
from lfm2serve.server.requests import ChatRequest, CompletionRequest
from lfm2serve.server.shape import Shape
from lfm2serve.server.streaming import EventStream, unless_disconnected

log = logging.getLogger(__name__)

LAST_WORDS_S = 5  # after a time limit, for the error to reach its client
LONG_BODY = 4096  # bytes; parsing and tokenising more could be felt by the other clients, so that gets a thread

T = TypeVar("T")


class ServerState:
    """What the endpoints share: the runtime, the metrics, and the requests in flight."""

    def __init__(self, runtime: Runtime, model: str, keepalive_s: float, options: ServerOptions) -> None:
        self.runtime = runtime
        self.model = model
        self.keepalive_s = keepalive_s
        self.options = options
        self.metrics = ServerMetrics(runtime.engine, model)
        self.places = Places(runtime.plan.slots, options.max_queue)
        self.groups: set[ReplyGroup] = set()
        self.responses = ResponseStore()
        self.draining = False
        self.stopping = False
        self._bridge: Bridge | None = None

    def bridge(self) -> Bridge:
        loop = asyncio.get_running_loop()
        if self._bridge is None or self._bridge.loop is not loop:
            self._bridge = Bridge(loop)
        return self._bridge

    def drain(self) -> None:
        """Let replies finish, and end what would go on for ever."""
        self.draining = True

    def stop(self) -> None:
        """End every request in flight with an error, and refuse new ones."""
        self.draining = self.stopping = True
        for group in self.groups:
            group.fail(EngineDead(SHUTTING_DOWN))

    def check(self) -> None:
        """EngineDead, saying why, where no reply can be expected."""
        engine = self.runtime.engine
        if not engine.alive:
            raise EngineDead(engine.fault or "the engine has stopped")
        if self.draining:
            raise EngineDead("the server is shutting down")
        started = engine.turn_started
        if started is not None and (lasts := time.monotonic() - started) > self.options.stuck_after_s:
            raise EngineDead(f"the engine is stuck: a turn has taken {lasts:.0f} s and isn't over")


def state_of(request: Request) -> ServerState:
    state: ServerState = request.app.state.server
    return state


async def read_body(request: Request) -> bytes:
    """The whole body, up to the limits of size and time."""
    options = state_of(request).options
    too_large = BodyTooLarge(f"the body is over {options.max_body} bytes (--max-body-mib)", code="request_too_large")
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > options.max_body:
        raise too_large
    body = bytearray()
    try:
        async with asyncio.timeout(options.request_timeout_s):
            async for piece in request.stream():
                body += piece
                if len(body) > options.max_body:
                    raise too_large
    except TimeoutError:
        assert options.request_timeout_s is not None
        raise RequestTimedOut(options.request_timeout_s) from None
    return bytes(body)


async def maybe_in_thread(long: bool, work: Callable[[], T]) -> T:
    return await to_thread.run_sync(work) if long else work()


async def read(request: Request, parse: Callable[[dict[str, Any]], T]) -> tuple[T, bool]:
    """What `parse` makes of a JSON body, and whether that is a long one."""
    body = await read_body(request)
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json":
        raise UnsupportedMediaType(f"content-type {media_type or 'missing'!r}: must be application/json")
    long = len(body) > LONG_BODY
    return await maybe_in_thread(long, lambda: parse(json_object(body))), long


def json_object(body: bytes) -> dict[str, Any]:
    """A JSON object; InvalidRequest for anything else, NaN and lone surrogates included."""
    try:
        value = pydantic_core.from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise InvalidRequest("the body must be a JSON object")
    return value


ShapeMaker = Callable[[str, int], Shape]  # of the model's name and the seed that the response reports


class Answer(Response):
    """The reply to a generation request, whole or as a stream. Whatever ends it, its streams end with it."""

    def __init__(
        self, state: ServerState, request: ChatRequest | CompletionRequest, long: bool, make_shape: ShapeMaker
    ) -> None:
        self._state = state
        self._request = request
        self._long = long
        self._make_shape = make_shape

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            body = await unless_disconnected(receive, self._bounded(send, record_of(scope)))
            if body is not None:
                await JSONResponse(body)(scope, receive, send)
        except ClientDisconnect:
            log.debug("client left: %s", scope["path"])

    async def _bounded(self, send: Send, record: Record) -> dict[str, Any] | None:
        """Whatever the client does, it holds nothing longer than the time limit and some seconds."""
        limit = self._state.options.request_timeout_s
        try:
            async with asyncio.timeout(None if limit is None else limit + LAST_WORDS_S):
                return await self._work(send, record)
        except TimeoutError:  # it doesn't read what it is sent
            raise ClientDisconnect from None

    async def _work(self, send: Send, record: Record) -> dict[str, Any] | None:
        """Run the request; returns the whole response unless it was streamed."""
        request, state = self._request, self._state
        state.places.check()  # before any work
        params = request.params(state.runtime)
        prompts = await maybe_in_thread(self._long, lambda: request.prompts(state.runtime))
        grammar = None
        if request.structured:
            grammar = await to_thread.run_sync(request.grammar, state.runtime)
        params = request.fit(params, prompts, state.runtime.engine.context)
        # 53 bits: a number that every JSON reader keeps exactly, so that the seed we report can be sent back.
        seed = new_seed() >> 10 if params.seed is None else params.seed
        shape = self._make_shape(request.model if request.model is not None else state.model, seed)
        with (
            state.places.take(len(prompts) * params.n),
            ReplyGroup(state.runtime, state.metrics, state.bridge()) as group,
            _TimeLimit(group, state.options.request_timeout_s),
        ):
            state.groups.add(group)
            try:
                if state.stopping:
                    raise EngineDead(SHUTTING_DOWN)
                group.submit(
                    prompts,
                    params,
                    seed,
                    draft=request.draft,
                    prompt_cache=request.prompt_cache,
                    grammar=grammar,
                )
                if request.stream:
                    await self._stream(group, shape, EventStream(send, named=shape.named_events), record)
                    return None
                await group.finish(state.keepalive_s)
                return shape.whole(group.replies)
            finally:
                state.groups.discard(group)
                record.fields |= _told(group, request.stream)
                if state.options.log_prompts:
                    record.fields |= _quoted(request, group)

    async def _stream(self, group: ReplyGroup, shape: Shape, events: EventStream, record: Record) -> None:
        try:
            while group.running:
                try:
                    reply, delta = await group.next(self._state.keepalive_s)
                except TimeoutError:
                    await events.comment("keep-alive")
                    continue
                for chunk in shape.chunks(reply, delta):
                    await events.data(chunk)
                if not group.ready:
                    await events.flush()
            for chunk in shape.closing(group.replies):
                await events.data(chunk)
        except ClientDisconnect:
            raise
        except Exception as error:
            if not events.begun:
                raise
            if not isinstance(error, Lfm2Error):
                log.exception("a stream failed")
            record.fields["error"] = type(error).__name__
            for chunk in shape.failure(error):
                await events.data(chunk)
        await events.end(shape.end_mark)


class _TimeLimit:
    """Ends a request's replies with an error when its time is over."""

    def __init__(self, group: ReplyGroup, limit_s: float | None) -> None:
        self._group = group
        self._limit_s = limit_s
        self._timer: asyncio.TimerHandle | None = None

    def __enter__(self) -> None:
        if self._limit_s is not None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(self._limit_s, self._group.fail, RequestTimedOut(self._limit_s))

    def __exit__(self, *exc_info: object) -> None:
        if self._timer is not None:
            self._timer.cancel()


def _told(group: ReplyGroup, stream: bool) -> dict[str, Any]:
    """What the log says of a request's replies: figures, no text."""
    built = [reply.builder for reply in group.replies]
    told: dict[str, Any] = {
        "stream": stream,
        "replies": len(built),
        "streams": [reply.stream_id for reply in group.replies],
        "prompt_tokens": sum(len(reply.prompt.token_ids) for reply in group.replies),
        "cached_tokens": sum(reply.cached_tokens for reply in group.replies),
        "completion_tokens": sum(len(builder.token_ids) for builder in built),
        "finish_reasons": [builder.finish_reason for builder in built],
    }
    first = built[0].metrics if built else None
    if first is not None and first.admitted is not None:
        told["queue_ms"] = round(1e3 * (first.admitted - first.arrival), 1)
    if first is not None and first.first_token is not None:
        told["first_token_ms"] = round(1e3 * (first.first_token - first.arrival), 1)
    return told


def _quoted(request: ChatRequest | CompletionRequest, group: ReplyGroup) -> dict[str, Any]:
    """The text of a request and its replies, for a log that may hold it."""
    asked = request.messages if isinstance(request, ChatRequest) else request.prompt
    return {"prompt": asked, "texts": [reply.builder.text for reply in group.replies]}
