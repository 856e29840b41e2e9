"""The endpoints of the dialects."""

from __future__ import annotations

from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from lfm2serve.errors import InvalidRequest
from lfm2serve.server.answer import Answer, maybe_in_thread, read, state_of
from lfm2serve.server.dialects.anthropic import CountTokensRequest, MessagesRequest
from lfm2serve.server.dialects.anthropic_reply import MessageShape
from lfm2serve.server.dialects.response_tools import ToolBox
from lfm2serve.server.dialects.responses import ResponsesRequest
from lfm2serve.server.dialects.responses_reply import ResponseShape
from lfm2serve.server.dialects.store import ResponseNotFound, ResponseStore, Stored
from lfm2serve.server.requests import known_switches


async def messages(request: Request) -> Response:
    state = state_of(request)
    asked, long = await read(request, MessagesRequest.parse)
    chat = await maybe_in_thread(long, lambda: asked.chat(known_switches(state.runtime)))
    return Answer(state, chat, long, partial(MessageShape, asked))


async def count_tokens(request: Request) -> Response:
    runtime = state_of(request).runtime
    asked, long = await read(request, CountTokensRequest.parse)
    asked.prompt_cache = False  # nothing comes of it that could be kept
    [prompt] = await maybe_in_thread(long, lambda: asked.chat(known_switches(runtime)).prompts(runtime))
    return JSONResponse({"input_tokens": len(prompt.token_ids)})


async def create_response(request: Request) -> Response:
    state = state_of(request)
    asked, long = await read(request, ResponsesRequest.parse)
    before = _before(asked, state.responses)
    tools = ToolBox(asked.tools)
    new = asked.messages()
    conversation = [*before.messages, *new] if before is not None else new
    chat = await maybe_in_thread(long, lambda: asked.chat(tools, conversation, known_switches(state.runtime)))

    def keep(body: dict[str, Any], message: dict[str, Any]) -> None:
        if asked.store:
            state.responses.put(Stored.after(before, body, [*new, message]))

    shape = partial(ResponseShape, asked, tools, chat.params(state.runtime), state.runtime.tokenizer, keep)
    return Answer(state, chat, long, shape)


def _before(asked: ResponsesRequest, store: ResponseStore) -> Stored | None:
    """The response that a request goes on from."""
    name = asked.previous_response_id
    if name is None:
        return None
    try:
        return store.get(name)
    except ResponseNotFound as error:
        param = "previous_response_id"
        raise InvalidRequest(f"{param}: {error.message}", param=param, code="previous_response_not_found") from None


async def get_response(request: Request) -> Response:
    if request.query_params.get("stream", "false") != "false":
        raise InvalidRequest("stream: a kept response is not streamed again", param="stream")
    return JSONResponse(state_of(request).responses.get(request.path_params["name"]).body)


async def delete_response(request: Request) -> Response:
    name = request.path_params["name"]
    state_of(request).responses.delete(name)
    return JSONResponse({"id": name, "object": "response", "deleted": True})


ROUTES = [
    Route("/v1/messages", messages, methods=["POST"]),
    Route("/v1/messages/count_tokens", count_tokens, methods=["POST"]),
    Route("/v1/responses", create_response, methods=["POST"]),
    Route("/v1/responses/{name}", get_response, methods=["GET"]),
    Route("/v1/responses/{name}", delete_response, methods=["DELETE"]),
]
