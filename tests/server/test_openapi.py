"""The OpenAPI document tells the truth: of every route, and of what answers the requests that it allows or does not."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, settings
from schemathesis.checks import not_a_server_error
from schemathesis.python import asgi
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
    unsupported_method,
)
from starlette.applications import Starlette
from starlette.testclient import TestClient
from starlette.types import Receive, Scope, Send

from lfm2serve.sampling import SamplingParams
from lfm2serve.server import create_app
from lfm2serve.server.front import OPEN_PATHS
from lfm2serve.server.openapi import EVENTS, OPERATIONS, operations_of
from lfm2serve.server.options import ServerOptions

from .conftest import TINY
from .fake import Step, fake_runtime

ENDLESS = "/v1/memory/events"
SAID = "<think>plan</think>Well.<|tool_call_start|>[f(x=1)]<|tool_call_end|>"
PROMISES = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
    negative_data_rejection,
    unsupported_method,
]


def fuzzed_app() -> Starlette:
    """An app whose engine says a little of everything, at once."""
    runtime = fake_runtime(TINY)
    ids = runtime.tokenizer.encode(SAID)

    def script(prompt: list[int], params: SamplingParams, choice: int) -> Iterator[Step]:
        yield ids

    runtime.engine.script = script  # type: ignore[attr-defined]
    return create_app(runtime)


APP = fuzzed_app()


async def served(scope: Scope, receive: Receive, send: Send) -> None:
    """The app, which doesn't learn that a test client starts and ends it with each request."""
    while scope["type"] == "lifespan":
        phase = (await receive())["type"]
        await send({"type": f"{phase}.complete"})
        if phase == "lifespan.shutdown":
            return
    await APP(scope, receive, send)


SCHEMA = schemathesis.openapi.from_asgi("/openapi.json", served).exclude(path=ENDLESS)


@pytest.fixture(scope="module")
def client() -> Iterator[Any]:
    """One client for all requests: starting an event loop for each would take longer than the request."""
    with asgi.get_client(served) as client:
        yield client


@SCHEMA.parametrize()
@settings(
    max_examples=8,
    derandomize=True,
    database=None,
    deadline=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)
def test_what_the_document_allows_is_served_and_the_rest_refused(case: Any, client: Any) -> None:
    case.call_and_validate(checks=PROMISES, session=client)


MINIMAL: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}]},
    "/v1/completions": {"prompt": "Hi"},
    "/v1/responses": {"input": "Hi"},
    "/v1/messages": {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 20},
    "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": "Hi"}]},
    "/tokenize": {"prompt": "Hi"},
    "/detokenize": {"tokens": [20]},
}


def told(app: Any = served) -> dict[str, Any]:
    with TestClient(app) as client:
        document: dict[str, Any] = client.get("/openapi.json", headers={"x-api-key": "k"}).json()
    return document


@pytest.mark.parametrize("page", [True, False])
def test_the_document_has_every_route_and_nothing_else(page: bool) -> None:
    app = create_app(fake_runtime(TINY), options=ServerOptions(page=page))
    found = operations_of(app.routes)
    assert {(method.upper(), path) for path, methods in told(app)["paths"].items() for method in methods} == set(found)
    assert len(set(found)) == len(found) == len(OPERATIONS) - (not page)


def test_what_answers_look_like() -> None:
    posts = {path: operation for (method, path), operation in OPERATIONS.items() if method == "POST"}
    assert set(MINIMAL) == set(posts)
    with TestClient(served) as client:
        for path, operation in posts.items():
            answer = client.post(path, json=MINIMAL[path])
            assert answer.status_code == 200 and operation.answer is not None
            operation.answer.model_validate(answer.json(), strict=True)
            if EVENTS in operation.media:
                kind = client.post(path, json={**MINIMAL[path], "stream": True}).headers["content-type"]
                assert kind.partition(";")[0] == EVENTS


def test_what_needs_a_key() -> None:
    app = create_app(fake_runtime(TINY), options=ServerOptions(api_keys=("k",)))
    document = told(app)
    free = {path for path, methods in document["paths"].items() for name in methods if "security" not in methods[name]}
    assert free == OPEN_PATHS
    schemes = document["components"]["securitySchemes"]
    assert {name for each in document["paths"]["/tokenize"]["post"]["security"] for name in each} == set(schemes)
    assert "security" not in told()["paths"]["/tokenize"]["post"]


def test_every_reference_leads_somewhere() -> None:
    document = told()
    found = set(re.findall(r'"#/components/schemas/([^"]+)"', json.dumps(document)))
    assert found == set(document["components"]["schemas"]) and not any("__" in name for name in found)


def test_fields_that_ask_for_nothing_are_in_the_document() -> None:
    fields = told()["components"]["schemas"]["CompletionRequest"]["properties"]
    assert fields["suffix"] == {"enum": [None]} and fields["user"] == {"anyOf": [{}, {"type": "null"}]}
    with TestClient(served) as client:
        refused = client.post("/v1/completions", json={"prompt": "a", "suffix": "b"})
    assert refused.status_code == 400
    assert refused.json()["error"] == {
        "message": "suffix is not supported",
        "type": "invalid_request_error",
        "param": "suffix",
        "code": "unsupported_parameter",
    }
