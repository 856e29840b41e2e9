"""The HTTP face: routes to OpenAI's and vLLM's endpoints over one runtime."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import pydantic_core
from anyio import to_thread
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from lfm2serve.errors import EngineDead, InvalidRequest, Lfm2Error
from lfm2serve.runtime import Runtime, new_seed
from lfm2serve.server.errors import HANDLERS, BodyTooLarge, UnsupportedMediaType, body_of
from lfm2serve.server.group import SHUTTING_DOWN, Bridge, ReplyGroup
from lfm2serve.server.metrics import ServerMetrics
from lfm2serve.server.requests import ChatRequest, CompletionRequest, DetokenizeRequest, Strict, TokenizeRequest
from lfm2serve.server.responses import ChatShape, CompletionShape, Shape
from lfm2serve.server.streaming import EventStream, unless_disconnected

log = logging.getLogger(__name__)

MAX_BODY = 32 * 2**20
LONG_BODY = 4096  # bytes; parsing and tokenising more could be felt by the other clients, so that gets a thread

T = TypeVar("T")
R = TypeVar("R", bound=Strict)


class ServerState:
    """What the endpoints share: the runtime, the metrics, and the requests in flight."""

    def __init__(self, runtime: Runtime, model: str, keepalive_s: float) -> None:
        self.runtime = runtime
        self.model = model
        self.keepalive_s = keepalive_s
        self.metrics = ServerMetrics(runtime.engine, model)
        self.groups: set[ReplyGroup] = set()
        self.stopping = False
        self._bridge: Bridge | None = None

    def bridge(self) -> Bridge:
        loop = asyncio.get_running_loop()
        if self._bridge is None or self._bridge.loop is not loop:
            self._bridge = Bridge(loop)
        return self._bridge

    def stop(self) -> None:
        """End every request in flight with an error, and refuse new ones."""
        self.stopping = True
        for group in self.groups:
            group.fail(EngineDead(SHUTTING_DOWN))


def state_of(request: Request) -> ServerState:
    state: ServerState = request.app.state.server
    return state


async def read_body(request: Request) -> bytes:
    """The whole body, up to the limit."""
    too_large = BodyTooLarge(f"the body is over {MAX_BODY} bytes", code="request_too_large")
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > MAX_BODY:
        raise too_large
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > MAX_BODY:
            raise too_large
    return bytes(body)


async def maybe_in_thread(long: bool, work: Callable[[], T]) -> T:
    return await to_thread.run_sync(work) if long else work()


async def read(request: Request, kind: type[R]) -> tuple[R, bool]:
    """The checked request in a JSON body, and whether it is a long one."""
    body = await read_body(request)
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json":
        raise UnsupportedMediaType(f"content-type {media_type or 'missing'!r}: must be application/json")
    long = len(body) > LONG_BODY
    return await maybe_in_thread(long, lambda: kind.parse(json_object(body))), long


def json_object(body: bytes) -> dict[str, Any]:
    """A JSON object; InvalidRequest for anything else, NaN and lone surrogates included."""
    try:
        value = pydantic_core.from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise InvalidRequest("the body must be a JSON object")
    return value


class Answer(Response):
    """The reply to a generation request, whole or as a stream. Whatever ends it, its streams end with it."""

    def __init__(self, state: ServerState, request: ChatRequest | CompletionRequest, long: bool) -> None:
        self._state = state
        self._request = request
        self._long = long

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            body = await unless_disconnected(receive, self._work(send))
            if body is not None:
                await JSONResponse(body)(scope, receive, send)
        except ClientDisconnect:
            log.debug("client left: %s", scope["path"])

    async def _work(self, send: Send) -> dict[str, Any] | None:
        """Run the request; returns the whole response unless it was streamed."""
        request, state = self._request, self._state
        params = request.params(state.runtime)
        prompts = await maybe_in_thread(self._long, lambda: request.prompts(state.runtime))
        # 53 bits: a number that every JSON reader keeps exactly, so that the seed we report can be sent back.
        seed = new_seed() >> 10 if params.seed is None else params.seed
        shape = self._shape(seed)
        with ReplyGroup(state.runtime, state.metrics, state.bridge()) as group:
            state.groups.add(group)
            try:
                if state.stopping:
                    raise EngineDead(SHUTTING_DOWN)
                group.submit(prompts, params, seed, draft=request.draft, prompt_cache=request.prompt_cache)
                if request.stream:
                    await self._stream(group, shape, EventStream(send))
                    return None
                await group.finish(state.keepalive_s)
                return shape.whole(group.replies)
            finally:
                state.groups.discard(group)

    def _shape(self, seed: int) -> Shape:
        request, tokenizer = self._request, self._state.runtime.tokenizer
        model = request.model if request.model is not None else self._state.model
        if isinstance(request, ChatRequest):
            return ChatShape(request, tokenizer, model, seed)
        return CompletionShape(request, tokenizer, model, seed)

    async def _stream(self, group: ReplyGroup, shape: Shape, events: EventStream) -> None:
        try:
            while group.running:
                try:
                    reply, delta = await group.next(self._state.keepalive_s)
                except TimeoutError:
                    await events.comment("keep-alive")
                    continue
                for chunk in shape.chunks(reply, delta):
                    await events.data(chunk)
            if self._request.include_usage:
                await events.data(shape.usage_chunk(group.replies))
        except ClientDisconnect:
            raise
        except Exception as error:
            if not events.started:
                raise
            if not isinstance(error, Lfm2Error):
                log.exception("a stream failed")
            await events.data(body_of(error))
        await events.done()


async def chat_completions(request: Request) -> Response:
    return Answer(state_of(request), *await read(request, ChatRequest))


async def completions(request: Request) -> Response:
    return Answer(state_of(request), *await read(request, CompletionRequest))


async def tokenize(request: Request) -> Response:
    state = state_of(request)
    asked, long = await read(request, TokenizeRequest)
    ids = await maybe_in_thread(long, lambda: asked.token_ids(state.runtime))
    texts = [state.runtime.tokenizer.token_text(token) for token in ids] if asked.return_token_strs else None
    context = state.runtime.engine.context
    return JSONResponse({"count": len(ids), "max_model_len": context, "tokens": ids, "token_strs": texts})


async def detokenize(request: Request) -> Response:
    tokenizer = state_of(request).runtime.tokenizer
    asked, long = await read(request, DetokenizeRequest)
    for place, token in enumerate(asked.tokens):
        if not 0 <= token < tokenizer.size:
            raise InvalidRequest(f"tokens[{place}]={token}: not one of {tokenizer.size} entries", param="tokens")
    text = await maybe_in_thread(long, lambda: tokenizer.decode(asked.tokens, skip_special_tokens=False))
    return JSONResponse({"prompt": text})


async def clear_prompt_cache(request: Request) -> Response:
    dropped = await to_thread.run_sync(state_of(request).runtime.engine.clear_prompt_cache)
    return JSONResponse({"object": "prompt_cache", "dropped": dropped})


async def models(request: Request) -> Response:
    return JSONResponse({"object": "list", "data": [_model_card(request)]})


async def model(request: Request) -> Response:
    asked, state = request.path_params["name"], state_of(request)
    if asked not in (state.model, state.runtime.name):
        raise HTTPException(404, f"the model {asked!r} is not served here; {state.model!r} is")
    return JSONResponse(_model_card(request))


def _model_card(request: Request) -> dict[str, Any]:
    state = state_of(request)
    card = {"id": state.model, "object": "model", "created": request.app.state.created, "owned_by": "lfm2serve"}
    return {**card, "root": state.runtime.name, "parent": None, "max_model_len": state.runtime.engine.context}


async def health(request: Request) -> Response:
    state = state_of(request)
    engine = state.runtime.engine
    if not engine.alive:
        raise EngineDead(engine.fault or "the engine has stopped")
    if state.stopping:
        raise EngineDead("the server is shutting down")
    return JSONResponse({"status": "ok", "model": state.model})


async def metrics(request: Request) -> Response:
    return Response(state_of(request).metrics.exposition(), headers={"content-type": CONTENT_TYPE_LATEST})


@asynccontextmanager
async def _lifespan(app: Starlette) -> AsyncIterator[None]:
    yield
    app.state.server.stop()


Endpoint = Callable[[Request], Awaitable[Response]]


def create_app(runtime: Runtime, *, served_model_name: str | None = None, keepalive_s: float = 15.0) -> Starlette:
    """The ASGI app that serves `runtime`; closing the runtime stays with the caller.

    served_model_name: what /v1/models and the metrics call the model (default: the runtime's name); any name is taken
    in requests. keepalive_s: seconds of silence in a stream before a comment is sent.
    """
    posts: dict[str, Endpoint] = {
        "/v1/chat/completions": chat_completions,
        "/v1/completions": completions,
        "/tokenize": tokenize,
        "/detokenize": detokenize,
    }
    gets: dict[str, Endpoint] = {
        "/v1/models": models,
        "/v1/models/{name:path}": model,
        "/health": health,
        "/metrics": metrics,
    }
    routes = [Route(path, endpoint, methods=["POST"]) for path, endpoint in posts.items()]
    routes += [Route(path, endpoint, methods=["GET"]) for path, endpoint in gets.items()]
    routes.append(Route("/v1/prompt_cache", clear_prompt_cache, methods=["DELETE"]))
    app = Starlette(routes=routes, exception_handlers=HANDLERS, lifespan=_lifespan)
    app.state.created = int(time.time())
    app.state.server = ServerState(runtime, served_model_name or runtime.name, keepalive_s)
    return app
