"""examples/ray_serve.py with two replicas of the demo model on this machine: python -m pytest tests/test_ray.py

Needs the extra `ray`, and takes a while to start: it is a step of its own, which `pytest` alone leaves out.
"""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import openai
import pytest

ROOT = Path(__file__).parent.parent
EXAMPLE = ROOT / "examples" / "ray_serve.py"
ENGINE = {"device": "cpu", "threads": 1, "memory_limit_gib": 0.5, "max_streams": 4}


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("ray_serve", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = sys.modules["ray_serve"] = importlib.util.module_from_spec(spec)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Ray's own, of pydantic
        spec.loader.exec_module(module)
    return module


def body(*said: str, **more: Any) -> bytes:
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": text} for i, text in enumerate(said)]
    return json.dumps({"messages": messages, **more}).encode()


def test_a_later_turn_begins_with_the_trail_of_the_turn_before(example: ModuleType) -> None:
    first, second = example.trail(body("Hi")), example.trail(body("Hi", "Hello.", "How are you?"))
    assert second.hashes[: len(first.hashes)] == first.hashes and len(second.hashes) == len(first.hashes) + 2
    assert second.opening == first.opening != example.trail(body("Hi!")).opening
    assert example.trail(body("Hi", tools=[{"type": "function"}])).opening != first.opening
    assert example.trail(body("Hi", temperature=1, seed=7)) == first
    with_system = {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]}
    system = example.trail(json.dumps(with_system).encode())
    assert system.opening == system.hashes[-1] != first.opening


@pytest.mark.parametrize("raw", [b"", b"no JSON", b"[]", b'{"messages": "Hi"}', b'{"messages": []}', b'{"prompt": ""}'])
def test_what_has_no_prompt_may_go_anywhere(example: ModuleType, raw: bytes) -> None:
    assert len(example.trail(raw).hashes) <= 1


def test_raw_prompts_with_the_same_beginning(example: ModuleType) -> None:
    long = "x" * 2500
    first, second = (example.trail(json.dumps({"prompt": text}).encode()) for text in (long, long + "y"))
    assert first.hashes[:2] == second.hashes[:2] and first.hashes[2] != second.hashes[2]
    assert first.opening == second.opening


class Cluster:
    def __init__(self, url: str) -> None:
        self.client = openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0, timeout=60)
        self.http = httpx.Client(base_url=url, timeout=60)

    def ask(self, messages: list[dict[str, str]], **fields: Any) -> tuple[str, Any]:
        """The replica that answered, and the completion."""
        fields = {"max_tokens": 24, "temperature": 0, **fields}
        raw = self.client.chat.completions.with_raw_response.create(model="demo", messages=messages, **fields)
        return raw.headers["x-replica"], raw.parse()

    def memory(self, replica: str) -> dict[str, Any]:
        found = self.http.get("/v1/memory", headers={"x-replica": replica})
        assert found.headers["x-replica"] == replica
        return found.json()


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    command = [sys.executable, str(EXAMPLE), "demo", "--replicas", "2", "--cpus", "0.1", "--port", str(port)]
    found = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": found, "RAY_USAGE_STATS_ENABLED": "0", "RAY_ADDRESS": "local"}
    with subprocess.Popen(
        [*command, "--engine", json.dumps(ENGINE)], stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        try:
            assert process.stdout is not None
            line = next((line for line in process.stdout if line.startswith("2 replicas")), "it ended")
            assert line == f"2 replicas of demo on http://127.0.0.1:{port}/v1\n"
            cluster = Cluster(f"http://127.0.0.1:{port}")
            yield cluster
            cluster.client.close()
            cluster.http.close()
        finally:
            process.terminate()
        assert process.wait(60) == 0


def eventually(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end, "it never happened"
        time.sleep(0.1)


@pytest.fixture(scope="module")
def replicas(cluster: Cluster) -> set[str]:
    """The names of both: with so many openings neither can be missed."""
    seen = set()
    for number in range(24):
        seen.add(cluster.ask([{"role": "user", "content": f"Hello number {number}."}], max_tokens=1)[0])
    return seen


def test_openings_are_spread_over_both_replicas(replicas: set[str]) -> None:
    assert len(replicas) == 2


@pytest.mark.parametrize("name", ["Ada", "Ben", "Cora"])
def test_a_conversation_stays_where_its_state_is(cluster: Cluster, name: str) -> None:
    messages: list[dict[str, str]] = []
    homes, ran = set(), 0
    for said in (f"My name is {name}. Please remember it.", "What is the capital of Japan?", "What is my name?"):
        messages.append({"role": "user", "content": said})
        replica, reply = cluster.ask(messages)
        homes.add(replica)
        assert reply.usage.prompt_tokens_details.cached_tokens >= ran
        ran = reply.usage.prompt_tokens
        messages.append({"role": "assistant", "content": reply.choices[0].message.content})
    assert len(homes) == 1 and name in messages[-1]["content"]


def test_a_full_replica_sends_others_away_and_clients_that_leave_free_it(cluster: Cluster, replicas: set[str]) -> None:
    endless: dict[str, Any] = {"max_tokens": 3000, "extra_body": {"ignore_eos": True}, "stream": True}
    messages = [{"role": "user", "content": "Tell me a story."}]

    def generated() -> int:
        return sum(cluster.memory(replica)["tokens"]["generated"] for replica in replicas)

    before, count = generated(), ENGINE["max_streams"] + 1
    raws = [
        cluster.client.chat.completions.with_raw_response.create(model="demo", messages=messages, **endless)
        for _ in range(count)
    ]
    assert len({raw.headers["x-replica"] for raw in raws}) == 2
    for raw in raws:
        raw.http_response.close()
    for replica in replicas:  # one that was alone may have reached its end, and prepares the next turn
        eventually(lambda replica=replica: cluster.memory(replica)["streams"]["running"] == 0)
        eventually(lambda replica=replica: cluster.memory(replica)["pages"]["leased"] == 0)
        assert cluster.memory(replica)["pages"]["promised"] == 0
    assert generated() - before < count * 3000


def test_a_stream_is_what_the_whole_reply_is(cluster: Cluster) -> None:
    messages = [{"role": "user", "content": "What is the capital of Peru?"}]
    chunks = cluster.client.chat.completions.create(model="demo", messages=messages, temperature=0, stream=True)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == cluster.ask(messages)[1].choices[0].message.content == "The capital of Peru is Lima."


def test_what_belongs_to_one_replica_is_refused_without_its_name(cluster: Cluster) -> None:
    assert cluster.http.get("/v1/memory").status_code == 400
    assert cluster.http.get("/v1/memory", headers={"x-replica": "nobody"}).status_code == 404
    assert cluster.http.post("/v1/responses", json={"input": "Hi"}).status_code == 404
    assert cluster.http.get("/v1/models").json()["data"][0]["id"] == "demo"
    wrong = cluster.http.post("/v1/chat/completions", json={"messages": "Hi"})
    assert wrong.status_code == 400 and wrong.json()["error"]["param"] == "messages"
