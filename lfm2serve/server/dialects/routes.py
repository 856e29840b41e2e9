"""The endpoints of the dialects."""

from __future__ import annotations

from functools import partial

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from lfm2serve.server.answer import Answer, maybe_in_thread, read, state_of
from lfm2serve.server.dialects.anthropic import CountTokensRequest, MessagesRequest
from lfm2serve.server.dialects.anthropic_reply import MessageShape


async def messages(request: Request) -> Response:
    asked, long = await read(request, MessagesRequest.parse)
    return Answer(state_of(request), asked.chat(), long, partial(MessageShape, asked))


async def count_tokens(request: Request) -> Response:
    runtime = state_of(request).runtime
    asked, long = await read(request, CountTokensRequest.parse)
    [prompt] = await maybe_in_thread(long, lambda: asked.chat(prompt_cache=False).prompts(runtime))
    return JSONResponse({"input_tokens": len(prompt.token_ids)})


ROUTES = [
    Route("/v1/messages", messages, methods=["POST"]),
    Route("/v1/messages/count_tokens", count_tokens, methods=["POST"]),
]
