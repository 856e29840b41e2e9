"""Real uvicorn servers on a free port: one over a real engine, one over a scripted one."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import uvicorn
from starlette.applications import Starlette

from lfm2serve.options import EngineOptions
from lfm2serve.runtime import Runtime, load_runtime
from lfm2serve.sampling import SamplingParams
from lfm2serve.server import create_app

from .fake import FakeEngine, fake_runtime

TINY = Path(__file__).parents[1] / "data" / "tiny-lfm2moe"
KEEPALIVE_S = 0.2


@dataclass
class Live:
    """A server that runs, and ways to talk to it."""

    url: str
    app: Starlette
    runtime: Runtime
    client: openai.OpenAI
    http: httpx.Client

    @property
    def engine(self) -> Any:
        return self.runtime.engine

    def chat(self, text: str = "Hi", **fields: Any) -> Any:
        fields = {
            "model": "m",
            "temperature": 0,
            "max_tokens": 12,
            "messages": [{"role": "user", "content": text}],
        } | fields
        return self.client.chat.completions.create(**fields)

    def complete(self, prompt: Any = "Hi", **fields: Any) -> Any:
        fields = {"model": "m", "temperature": 0, "max_tokens": 12, "prompt": prompt} | fields
        return self.client.completions.create(**fields)

    def post(self, path: str, **fields: Any) -> httpx.Response:
        return self.http.post(path, json=fields)

    def settled(self) -> bool:
        """Whether every stream ends soon and all pages are free."""
        return self.engine.drain(60) and self.engine.census().clean


@contextmanager
def serving(runtime: Runtime, **options: Any) -> Iterator[Live]:
    app = create_app(runtime, **{"keepalive_s": KEEPALIVE_S, **options})
    config = uvicorn.Config(app, port=0, log_config=None, lifespan="on", ws="none", timeout_graceful_shutdown=2)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    wait_for(lambda: server.started)
    url = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    limits = httpx.Limits(max_connections=200)
    try:
        with (
            openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0, timeout=60) as client,
            httpx.Client(base_url=url, timeout=60, limits=limits) as http,
        ):
            yield Live(url, app, runtime, client, http)
    finally:
        server.should_exit = True
        thread.join()


def wait_for(condition: Callable[[], Any], seconds: float = 10) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it never happened"
        time.sleep(0.005)


@contextmanager
def real_runtime(**options: Any) -> Iterator[Runtime]:
    """A tiny checkpoint whose kernels are compiled: what the tests wait for afterwards is never the compiler."""
    runtime = load_runtime(TINY, EngineOptions(**options))
    try:
        rows = min(runtime.engine.context, 512) - 8
        for prompt, more in (([20] * rows, {"logprobs": 2, "prompt_logprobs": 2}), ([20], {"temperature": 0.0})):
            params = SamplingParams(max_tokens=4, ignore_eos=True, **more)
            runtime.engine.submit(prompt, params, lambda event: None, seed=0)
        assert runtime.engine.drain(600)
        yield runtime
    finally:
        runtime.close()


@pytest.fixture(scope="session")
def _real() -> Iterator[Live]:
    with real_runtime(kv_pages=4, context=1024, max_streams=16) as runtime, serving(runtime) as live:
        yield live


@pytest.fixture(scope="session")
def _fake() -> Iterator[Live]:
    with serving(fake_runtime(TINY)) as live:
        yield live


@pytest.fixture
def real(_real: Live) -> Iterator[Live]:
    """A server over a real engine of four pages; every test must leave the pool as it found it."""
    yield _real
    assert _real.settled(), _real.engine.census()
    counters = _real.engine.stats().counters
    assert (counters.census_errors, counters.failed_steps) == (0, 0)


@pytest.fixture
def fake(_fake: Live) -> Iterator[Live]:
    """A server over a scripted engine; every test must leave it without streams."""
    engine = _fake.engine
    assert isinstance(engine, FakeEngine)
    engine.reset()
    yield _fake
    engine.alive = True
    assert _fake.settled(), engine.census()


def sse(text: str) -> list[str]:
    """The data of each event of a stream, comments left out."""
    events = [block for block in text.split("\n\n") if block]
    assert all(event.startswith(("data: ", ": ")) and "\n" not in event for event in events)
    return [event.removeprefix("data: ") for event in events if event.startswith("data: ")]
