"""The OpenAPI document at /openapi.json, made from the models that read the requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import GenerateJsonSchema, models_json_schema
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from lfm2serve import __version__
from lfm2serve.chat.messages import ROLES
from lfm2serve.server import replies_schema as replies
from lfm2serve.server.answer import state_of
from lfm2serve.server.dialects.anthropic import CountTokensRequest, MessagesRequest
from lfm2serve.server.dialects.fields import Body
from lfm2serve.server.dialects.responses import ResponsesRequest
from lfm2serve.server.errors import ANTHROPIC_PATH
from lfm2serve.server.requests import LABELS, ChatRequest, CompletionRequest, DetokenizeRequest, Strict, TokenizeRequest

JSON, EVENTS, TEXT, HTML = "application/json", "text/event-stream", "text/plain", "text/html"
REFERENCE = "#/components/schemas/{model}"


@dataclass(frozen=True, slots=True)
class Operation:
    """One method of a path. answer: its JSON; media: further types that it may answer with. open: needs no API key."""

    summary: str
    request: type[Strict] | None = None
    answer: type[BaseModel] | None = None
    media: tuple[str, ...] = ()
    open: bool = False


OPERATIONS: dict[tuple[str, str], Operation] = {
    ("POST", "/v1/chat/completions"): Operation(
        "Answer a conversation (OpenAI's chat completions).", ChatRequest, replies.ChatCompletion, (EVENTS,)
    ),
    ("POST", "/v1/completions"): Operation(
        "Continue a text (OpenAI's completions).", CompletionRequest, replies.Completion, (EVENTS,)
    ),
    ("POST", "/v1/responses"): Operation(
        "Answer a conversation (OpenAI's responses).", ResponsesRequest, replies.Response, (EVENTS,)
    ),
    ("GET", "/v1/responses/{name}"): Operation("A response that was kept.", answer=replies.Response),
    ("DELETE", "/v1/responses/{name}"): Operation("Forget a response.", answer=replies.DeletedResponse),
    ("POST", "/v1/messages"): Operation(
        "Answer a conversation (Anthropic's messages).", MessagesRequest, replies.MessageReply, (EVENTS,)
    ),
    ("POST", "/v1/messages/count_tokens"): Operation(
        "How many tokens a conversation has (Anthropic's).", CountTokensRequest, replies.TokenCount
    ),
    ("POST", "/tokenize"): Operation("The tokens of a text or a conversation.", TokenizeRequest, replies.Tokens),
    ("POST", "/detokenize"): Operation("The text of tokens.", DetokenizeRequest, replies.Detokenized),
    ("GET", "/v1/models"): Operation("The models that are served: one.", answer=replies.ModelList),
    ("GET", "/v1/models/{name}"): Operation("A model.", answer=replies.ModelCard),
    ("DELETE", "/v1/prompt_cache"): Operation("Drop every kept state.", answer=replies.ClearedCache),
    ("GET", "/v1/memory"): Operation("Who holds which memory.", answer=replies.Memory),
    ("GET", "/v1/memory/events"): Operation("The same again and again, as events.", media=(EVENTS,)),
    ("GET", "/health"): Operation("Whether replies can be expected.", answer=replies.Health, open=True),
    ("GET", "/metrics"): Operation("Prometheus metrics.", media=(TEXT,)),
    ("GET", "/"): Operation("A page to look at.", media=(HTML,), open=True),
    ("GET", "/openapi.json"): Operation("This document.", media=(JSON,)),
}

STRINGS = {"type": "array", "items": {"type": "string"}}
IDS = {"type": "array", "items": {"type": "integer"}, "minItems": 1}
MESSAGE = {
    "type": "object",
    "required": ["role"],
    "properties": {
        "role": {"enum": list(ROLES)},
        "content": {"description": "A string, null, or a list of text parts; of a tool's message any JSON."},
        "name": {"type": ["string", "null"]},
        "tool_call_id": {"type": ["string", "null"]},
    },
}

# Where the models of requests.py take more, or less, than their annotations say.
SAID_BETTER: dict[str, dict[str, Any]] = {
    "stop": {"anyOf": [{"type": "string"}, STRINGS]},
    "prompt": {
        "anyOf": [
            {"type": "string"},
            {**STRINGS, "minItems": 1},
            IDS,
            {"type": "array", "items": IDS, "minItems": 1},
        ]
    },
    "messages": {"type": "array", "items": MESSAGE, "minItems": 1},
}


class _WithoutTitles(GenerateJsonSchema):
    """A field's title would only be its name once more."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False


def document(routes: Sequence[BaseRoute], *, keys: bool) -> dict[str, Any]:
    """The OpenAPI 3.1 document of an app with these routes. keys: whether an API key is asked for."""
    operations = [(method, path, OPERATIONS[method, path]) for method, path in operations_of(routes)]
    requests = [operation.request for _, _, operation in operations if operation.request is not None]
    answers = [operation.answer for _, _, operation in operations if operation.answer is not None]
    models: list[type[BaseModel]] = [*answers, replies.Error, replies.AnthropicError, *requests]
    _, made = models_json_schema(
        [(model, "validation") for model in dict.fromkeys(models)],
        ref_template=REFERENCE,
        schema_generator=_WithoutTitles,
    )
    schemas = made["$defs"]
    for model in requests:
        schemas[model.__name__] = _as_read(model, schemas[model.__name__])
    paths: dict[str, dict[str, Any]] = {}
    for method, path, operation in operations:
        paths.setdefault(path, {})[method.lower()] = _operation(path, operation, keys)
    components: dict[str, Any] = {"schemas": schemas}
    if keys:
        components["securitySchemes"] = {
            "bearer": {"type": "http", "scheme": "bearer"},
            "header": {"type": "apiKey", "in": "header", "name": "x-api-key"},
        }
    about = "LFM2 models over HTTP, in the dialects of OpenAI and Anthropic, and with vLLM's further fields."
    info = {"title": "lfm2serve", "version": __version__, "description": about}
    return {"openapi": "3.1.0", "info": info, "paths": paths, "components": components}


def operations_of(routes: Sequence[BaseRoute]) -> list[tuple[str, str]]:
    """(method, path) of each route, as the document has them."""
    found = []
    for route in routes:
        assert isinstance(route, Route)
        methods = sorted((route.methods or set()) - {"HEAD"})
        found += [(method, route.path.replace(":path}", "}")) for method in methods]
    return found


def _as_read(model: type[Strict], schema: dict[str, Any]) -> dict[str, Any]:
    """A request's schema with what is done before the model looks: nulls, and fields that ask for nothing."""
    better = {} if issubclass(model, Body) else SAID_BETTER
    properties = {name: better.get(name, value) for name, value in schema["properties"].items()}
    for name, allowed in getattr(model, "inert", {}).items():
        if name not in model.model_fields:
            properties[name] = {"enum": [*allowed, None]}
    if hasattr(model, "inert"):
        for name in sorted(LABELS - set(properties)):
            properties[name] = {}
    for name, value in properties.items():
        has_null = {"type": "null"} in value.get("anyOf", ()) or None in value.get("enum", ())
        if name not in schema.get("required", ()) and not has_null:
            properties[name] = {"anyOf": [value, {"type": "null"}]}
    return {**schema, "properties": properties}


def _operation(path: str, operation: Operation, keys: bool) -> dict[str, Any]:
    content: dict[str, Any] = {
        kind: {"schema": {"type": "string"} if kind in (TEXT, HTML) else {}} for kind in operation.media
    }
    if operation.answer is not None:
        content[JSON] = {"schema": _reference(operation.answer)}
    error = replies.AnthropicError if path.startswith(ANTHROPIC_PATH) else replies.Error
    failed = {"content": {JSON: {"schema": _reference(error)}}}
    told: dict[str, Any] = {
        "summary": operation.summary,
        "responses": {
            "200": {"description": "Done.", "content": content},
            "4XX": {"description": "The request can't be served.", **failed},
            "5XX": {"description": "The server can't serve it.", **failed},
        },
    }
    if operation.request is not None:
        told["requestBody"] = {"required": True, "content": {JSON: {"schema": _reference(operation.request)}}}
    if "{name}" in path:
        told["parameters"] = [{"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}]
    if keys and not operation.open:
        told["security"] = [{"bearer": []}, {"header": []}]
    return told


def _reference(model: type[BaseModel]) -> dict[str, str]:
    return {"$ref": REFERENCE.format(model=model.__name__)}


async def openapi(request: Request) -> Response:
    return JSONResponse(document(request.app.routes, keys=bool(state_of(request).options.api_keys)))


OPENAPI = Route("/openapi.json", openapi, methods=["GET"])
