"""The OpenAPI document tells the truth: of every route, and of how requests that it allows, or doesn't, are answered."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, settings
from schemathesis.checks import not_a_server_error
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
from lfm2serve.server.openapi import OPERATIONS, operations_of
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


@SCHEMA.parametrize()
@settings(
    max_examples=25,
    derandomize=True,
    database=None,
    deadline=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)
def test_what_the_document_allows_is_served_and_the_rest_refused(case: Any) -> None:
    case.call_and_validate(checks=PROMISES)


def test_the_document_has_every_route_and_nothing_else() -> None:
    found = operations_of(APP.routes)
    assert sorted(found) == sorted(OPERATIONS) and len(set(found)) == len(found)
    with TestClient(served) as client:
        told = client.get("/openapi.json").json()
    assert {(method.upper(), path) for path, methods in told["paths"].items() for method in methods} == set(found)
