"""The HTTP face: routes to OpenAI's and vLLM's endpoints over one runtime."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from functools import partial
from typing import Any

from anyio import to_thread
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from lfm2serve.errors import InvalidRequest
from lfm2serve.runtime import Runtime
from lfm2serve.server.answer import Answer, ServerState, maybe_in_thread, read, state_of
from lfm2serve.server.dialects.routes import ROUTES
from lfm2serve.server.errors import HANDLERS
from lfm2serve.server.front import in_front
from lfm2serve.server.openapi import OPENAPI
from lfm2serve.server.options import ServerOptions
from lfm2serve.server.page import PAGE
from lfm2serve.server.page import ROUTES as MEMORY_ROUTES
from lfm2serve.server.requests import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from lfm2serve.server.responses import ChatShape, CompletionShape


async def chat_completions(request: Request) -> Response:
    asked, long = await read(request, ChatRequest.parse)
    state = state_of(request)
    return Answer(state, asked, long, partial(ChatShape, asked, state.runtime.tokenizer))


async def completions(request: Request) -> Response:
    asked, long = await read(request, CompletionRequest.parse)
    state = state_of(request)
    return Answer(state, asked, long, partial(CompletionShape, asked, state.runtime.tokenizer))


async def tokenize(request: Request) -> Response:
    state = state_of(request)
    asked, long = await read(request, TokenizeRequest.parse)
    ids = await maybe_in_thread(long, lambda: asked.token_ids(state.runtime))
    texts = [state.runtime.tokenizer.token_text(token) for token in ids] if asked.return_token_strs else None
    context = state.runtime.engine.context
    return JSONResponse({"count": len(ids), "max_model_len": context, "tokens": ids, "token_strs": texts})


async def detokenize(request: Request) -> Response:
    tokenizer = state_of(request).runtime.tokenizer
    asked, long = await read(request, DetokenizeRequest.parse)
    for place, token in enumerate(asked.tokens):
        if not 0 <= token < tokenizer.size:
            raise InvalidRequest(f"tokens[{place}]={token}: not one of {tokenizer.size} entries", param="tokens")
    text = await maybe_in_thread(long, lambda: tokenizer.decode(asked.tokens, skip_special_tokens=False))
    return JSONResponse({"prompt": text})


async def clear_prompt_cache(request: Request) -> Response:
    dropped = await to_thread.run_sync(state_of(request).runtime.engine.clear_prompt_cache)
    return JSONResponse({"object": "prompt_cache", "dropped": dropped})


async def models(request: Request) -> Response:
    card = _model_card(request)
    ends = {"has_more": False, "first_id": card["id"], "last_id": card["id"]}  # Anthropic's clients read these
    return JSONResponse({"object": "list", "data": [card], **ends})


async def model(request: Request) -> Response:
    asked, state = request.path_params["name"], state_of(request)
    if asked not in (state.model, state.runtime.name):
        raise HTTPException(404, f"the model {asked!r} is not served here; {state.model!r} is")
    return JSONResponse(_model_card(request))


def _model_card(request: Request) -> dict[str, Any]:
    state = state_of(request)
    card = {"id": state.model, "object": "model", "created": request.app.state.created, "owned_by": "lfm2serve"}
    created = datetime.fromtimestamp(request.app.state.created, UTC).isoformat()
    anthropics = {"type": "model", "display_name": state.model, "created_at": created}
    context = state.runtime.engine.context
    return {**card, **anthropics, "root": state.runtime.name, "parent": None, "max_model_len": context}


async def health(request: Request) -> Response:
    state = state_of(request)
    state.check()
    return JSONResponse({"status": "ok", "model": state.model})


async def metrics(request: Request) -> Response:
    return Response(state_of(request).metrics.exposition(), headers={"content-type": CONTENT_TYPE_LATEST})


@asynccontextmanager
async def _lifespan(app: Starlette) -> AsyncIterator[None]:
    yield
    app.state.server.stop()


Endpoint = Callable[[Request], Awaitable[Response]]


class _App(Starlette):
    """Starlette behind the server's own front, which its handlers of unexpected errors stand behind too."""

    def build_middleware_stack(self) -> ASGIApp:
        state: ServerState = self.state.server
        return in_front(super().build_middleware_stack(), state.options, state.metrics.responded)


def create_app(
    runtime: Runtime,
    *,
    served_model_name: str | None = None,
    keepalive_s: float = 15.0,
    options: ServerOptions | None = None,
) -> Starlette:
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
    routes += [*ROUTES, OPENAPI]
    routes += MEMORY_ROUTES
    options = options or ServerOptions()
    if options.page:
        routes.append(PAGE)
    app = _App(routes=routes, exception_handlers=HANDLERS, lifespan=_lifespan)
    app.state.created = int(time.time())
    app.state.server = ServerState(runtime, served_model_name or runtime.name, keepalive_s, options)
    return app
