"""`run`: what SIGTERM does, in a process of its own; and addresses that can't be had."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette

from lfm2serve.errors import Lfm2Error
from lfm2serve.server import run

from .conftest import sse

ROOT = Path(__file__).parents[2]

SERVE = """
import sys
from pathlib import Path
from lfm2serve.server import create_app, run
from tests.server.fake import fake_runtime

words, pause, drain_s = int(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3])
runtime = fake_runtime(Path("tests/data/tiny-lfm2moe"))

def script(prompt, params, choice):
    for _ in range(words):
        yield [70]
        yield pause

runtime.engine.script = script
run(create_app(runtime), "127.0.0.1", 0, drain_s, on_ready=lambda url: print(url, flush=True))
assert runtime.engine.drain(5) and runtime.engine.census().clean
print("closed", flush=True)
"""


@contextmanager
def process(words: int, pause: float, drain_s: float) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server whose replies have so many words, with so many seconds between them."""
    args = [sys.executable, "-c", SERVE, str(words), str(pause), str(drain_s)]
    with subprocess.Popen(args, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None and server.stderr is not None
            url = server.stdout.readline().strip()
            assert url.startswith("http://127.0.0.1:"), server.stderr.read()
            yield server, url
        finally:
            if server.poll() is None:
                server.kill()


def ended(server: subprocess.Popen[str]) -> str:
    out, err = server.communicate(timeout=60)
    assert server.returncode == 0, err
    return out + err


def test_sigterm_lets_replies_finish() -> None:
    with process(words=10, pause=0.1, drain_s=30) as (server, url):
        with httpx.stream("POST", url + "/v1/completions", json={"prompt": "a", "stream": True}, timeout=60) as answer:
            lines = answer.iter_lines()
            first = next(lines)
            server.send_signal(signal.SIGTERM)
            events = sse("\n".join([first, *lines]) + "\n")
        assert events[-1] == "[DONE]" and len(events) >= 11
        assert json.loads(events[-2])["choices"][0]["finish_reason"] == "stop"
        assert "closed" in ended(server), "run returned, so the caller could close the runtime"
        with pytest.raises(httpx.ConnectError):
            httpx.get(url + "/health")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_drain_has_a_bound(number: int) -> None:
    with process(words=1000, pause=1.0, drain_s=0.5) as (server, url):
        whole: list[httpx.Response] = []

        def ask() -> None:
            whole.append(httpx.post(url + "/v1/completions", json={"prompt": "a", "n": 2}, timeout=60))

        asking = threading.Thread(target=ask)
        body: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}], "stream": True}
        with httpx.stream("POST", url + "/v1/chat/completions", json=body, timeout=60) as answer:
            lines = answer.iter_lines()
            first = next(lines)
            asking.start()
            while "running{" not in (text := httpx.get(url + "/metrics").text) or " 3.0\n" not in text:
                pass
            server.send_signal(number)
            events = sse("\n".join([first, *lines]) + "\n")
        assert events[-1] == "[DONE]" and "shutting down" in json.loads(events[-2])["error"]["message"]
        asking.join()
        assert whole[0].status_code == 503 and "shutting down" in whole[0].json()["error"]["message"]
        said = ended(server)
        assert "closed" in said and "Traceback" not in said


def test_an_address_that_is_taken_is_one_readable_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(Lfm2Error, match=f"127.0.0.1:{port}: Address already in use") as caught:
            run(Starlette(), "127.0.0.1", port)
        assert "\n" not in str(caught.value)
    for host, port in (("no.such.host.invalid", 8000), ("127.0.0.1", 70_000)):
        with pytest.raises(Lfm2Error, match=f"can't listen on {host}:{port}"):
            run(Starlette(), host, port)
