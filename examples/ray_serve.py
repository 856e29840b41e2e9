"""Replicas behind Ray Serve, each conversation at the replica that holds its state (needs `pip install '.[ray]'`):

python examples/ray_serve.py demo --replicas 2     # http://127.0.0.1:8000/v1, until Ctrl-C
python examples/ray_serve.py demo --measure        # hit rates of affine against random routing
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import itertools
import json
import os
import random
import signal
import statistics
import threading
import time
import urllib.request
from collections import OrderedDict
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import ray
from ray import serve
from ray.serve.config import HTTPOptions, RequestRouterConfig
from ray.serve.handle import DeploymentHandle
from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

REMEMBERED = 100_000  # conversations whose replica the router knows
BLOCK = 1000  # characters of a raw prompt that count as one piece of it
AT_FRONT = 10_000  # requests that may be on their way through the front
POSTS = {
    *("/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/messages/count_tokens"),
    *("/tokenize", "/detokenize"),
}  # /v1/responses isn't among them: a replica knows only the responses that it gave itself
GETS = {"/v1/models", "/health", "/v1/memory", "/metrics"}
OF_ONE = {"/v1/memory", "/metrics"}  # which replica's is said by the header
REPLICA = "x-replica"  # in a response: who gave it; in a request: who shall


# ---- where a conversation belongs ----


def pieces_of(body: dict[str, Any]) -> list[Any]:
    """What a prompt is made of, in order: a later turn of the same conversation begins with the same pieces."""
    if isinstance(body.get("messages"), list):
        return [[body.get("system"), body.get("tools")], *body["messages"]]
    prompt = body.get("prompt")
    if isinstance(prompt, str | list):
        return [prompt[at : at + BLOCK] for at in range(0, len(prompt), BLOCK)]
    return []


def opening(body: dict[str, Any]) -> int:
    """How many pieces tell a conversation from others: up to the first message that isn't the system's."""
    messages = body.get("messages")
    if not isinstance(messages, list):
        return 1
    system = [isinstance(message, dict) and message.get("role") in ("system", "developer") for message in messages]
    return 2 + (system.index(False) if False in system else 0)


@dataclass(frozen=True)
class Trail:
    """What the router knows of a request. hashes: of the prompt's beginnings, the shortest first; opening: that of the
    beginning that tells it from other conversations. replica: the one that was asked for."""

    hashes: list[str]
    opening: str
    replica: str | None = None


def trail(raw: bytes, replica: str | None = None) -> Trail:
    """The trail of a request's body; one without a prompt has no hashes."""
    try:
        body = json.loads(raw or b"{}")
    except ValueError:
        body = {}  # the replica will say what is wrong with it
    pieces = pieces_of(body) if isinstance(body, dict) else []
    digest, hashes = hashlib.sha256(), []
    for piece in pieces:
        digest.update(json.dumps(piece, sort_keys=True).encode() + b"\n")
        hashes.append(digest.hexdigest()[:32])
    return Trail(hashes, hashes[min(opening(body), len(hashes)) - 1] if hashes else "", replica)


class Router(RequestRouter):
    """Sends a prompt where the longest of its beginnings went; a new one to the replica that its opening hashes to, so
    that several routers agree. Where that replica is full, the least loaded of the others takes it, and keeps it."""

    def initialize_state(self, routing: str = "affine") -> None:
        self._affine = routing == "affine"
        self._went: OrderedDict[str, ReplicaID] = OrderedDict()

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Groups in order of preference; Ray takes the least loaded of the first group that isn't full."""
        asked = pending_request.kwargs.get("conversation") if pending_request is not None else None
        if asked is None or not candidate_replicas:
            return [candidate_replicas]
        if asked.replica is not None:  # the front refuses what comes from another
            named = [replica for replica in candidate_replicas if replica.replica_id.unique_id == asked.replica]
            return [named or candidate_replicas]
        if not self._affine:
            home = random.choice(candidate_replicas)
        elif asked.hashes:
            home = self._home(candidate_replicas, asked)
        else:
            return [candidate_replicas]
        return [[home], [replica for replica in candidate_replicas if replica is not home]]

    def _home(self, replicas: list[RunningReplica], asked: Trail) -> RunningReplica:
        living = {replica.replica_id: replica for replica in replicas}
        for beginning in reversed(asked.hashes):
            known = self._went.get(beginning)
            if known in living:
                return living[known]

        def lot(replica: RunningReplica) -> bytes:
            return hashlib.sha256(f"{asked.opening} {replica.replica_id.unique_id}".encode()).digest()

        return max(replicas, key=lot)

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        asked = pending_request.kwargs.get("conversation")
        if asked is not None and asked.hashes:
            self._went[asked.hashes[-1]] = replica_id
            self._went.move_to_end(asked.hashes[-1])
            if len(self._went) > REMEMBERED:
                self._went.popitem(last=False)


# ---- a replica: lfm2serve's own server, without a socket ----


@serve.deployment
class Replica:
    def __init__(self, model: str, options: dict[str, Any]) -> None:
        from lfm2serve.options import EngineOptions
        from lfm2serve.runtime import load_runtime
        from lfm2serve.server import create_app

        self._runtime = load_runtime(model, EngineOptions.from_dict(options))
        self._app = create_app(self._runtime)

    async def answer(
        self,
        method: str,
        path: str,
        headers: list[tuple[bytes, bytes]],
        body: bytes,
        conversation: Trail,
    ) -> AsyncIterator[Any]:
        """(status, headers, replica), then the pieces of the response's body. Leaving early cancels what runs.

        conversation is for the router.
        """
        scope = {"type": "http", "method": method, "path": path, "raw_path": path.encode(), "query_string": b""}
        scope |= {"headers": headers, "http_version": "1.1", "scheme": "http", "root_path": "", "state": {}}
        asked = [{"type": "http.request", "body": body, "more_body": False}]
        sent: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()

        async def receive() -> dict[str, Any]:
            if not asked:
                await asyncio.Event().wait()  # the client leaves by cancelling this call
            return asked.pop()

        working = asyncio.ensure_future(self._app(scope, receive, sent.put))
        working.add_done_callback(lambda _: sent.put_nowait(None))
        try:
            while (message := await sent.get()) is not None:
                if message["type"] == "http.response.start":
                    yield message["status"], message["headers"], serve.get_replica_context().replica_id.unique_id
                elif message["body"]:
                    yield message["body"]
            await working  # raises what went wrong
        finally:
            working.cancel()

    def check_health(self) -> None:
        """Ray replaces a replica whose engine is dead or stuck."""
        self._app.state.server.check()

    def __del__(self) -> None:
        if hasattr(self, "_runtime"):
            self._runtime.close()


# ---- the front: the endpoint that clients see ----


@serve.deployment(ray_actor_options={"num_cpus": 0}, max_ongoing_requests=AT_FRONT)
class Front:
    def __init__(self, replicas: DeploymentHandle) -> None:
        self._answer = replicas.options(stream=True).answer

    async def __call__(self, request: Request) -> Response:
        path, replica = request.url.path, request.headers.get(REPLICA)
        if path not in {"GET": GETS, "POST": POSTS}.get(request.method, ()):
            return refusal(404, f"{request.method} {path} isn't served behind several replicas")
        if path in OF_ONE and replica is None:
            return refusal(400, f"{path} is a replica's own: name it in the header {REPLICA}")
        body = await request.body()
        asked = trail(body, replica)
        response = self._answer.remote(request.method, path, request.headers.raw, body, conversation=asked)
        status, headers, name = await anext(response)
        if replica not in (None, name):
            response.cancel()
            return refusal(404, f"{REPLICA}: there is no such replica; {name} is one")
        answer = StreamingResponse(response, status)
        answer.raw_headers = [*headers, (REPLICA.encode(), name.encode())]
        return answer


def refusal(status: int, message: str) -> Response:
    error = {"message": message, "type": "invalid_request_error", "param": None, "code": None}
    return JSONResponse({"error": error}, status)


def start(model: str, options: dict[str, Any], *, replicas: int, cpus: float, gpus: float, routing: str) -> None:
    """Deploy, and return once every replica has loaded the model. cpus, gpus: that Ray sets aside for a replica."""
    behind = Replica.options(
        num_replicas=replicas,
        max_ongoing_requests=options.get("max_streams", 64),
        request_router_config=RequestRouterConfig(
            request_router_class=Router, request_router_kwargs={"routing": routing}
        ),
        ray_actor_options={"num_cpus": cpus, "num_gpus": gpus},
    )
    serve.run(Front.bind(behind.bind(model, options)), name="lfm2serve", route_prefix="/")


# ---- what affine routing is worth ----

CONVERSATIONS, TURNS, AT_ONCE = 24, 6, 4
SYSTEM = "You are a helpful assistant. Answer in one short sentence, and say so where you don't know."
WORDS = (
    "river",
    "stone",
    "market",
    "dog",
    "turtle",
    "garden",
    "window",
    "letter",
    "winter",
    "music",
    "bread",
    "silver",
)


@dataclass
class Turn:
    """prompt, cached: tokens; first: seconds to the first piece of the reply."""

    text: str
    prompt: int
    cached: int
    first: float


def ask(url: str, messages: list[dict[str, str]]) -> Turn:
    body = {"messages": messages, "temperature": 0, "max_tokens": 24, "stream": True}
    body["stream_options"] = {"include_usage": True}
    request = urllib.request.Request(
        f"{url}/v1/chat/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    started, turn = time.perf_counter(), Turn("", 0, 0, 0.0)
    with urllib.request.urlopen(request) as response:
        for line in response:
            if not line.startswith(b"data: {"):
                continue
            chunk = json.loads(line[6:])
            for choice in chunk["choices"]:
                turn.text += choice["delta"].get("content") or ""
                turn.first = turn.first or time.perf_counter() - started
            if chunk.get("usage"):
                turn.prompt = chunk["usage"]["prompt_tokens"]
                turn.cached = chunk["usage"]["prompt_tokens_details"]["cached_tokens"]
    return turn


def converse(url: str, number: int) -> list[Turn]:
    """One conversation: what it says depends on its number alone."""
    draw, turns = random.Random(number), []
    messages = [{"role": "system", "content": SYSTEM}]
    for _ in range(TURNS):
        said = " ".join(draw.choices(WORDS, k=60))
        messages.append({"role": "user", "content": f"Conversation {number}: {said}."})
        turns.append(ask(url, messages))
        messages.append({"role": "assistant", "content": turns[-1].text})
    return turns


def measure(url: str, arguments: argparse.Namespace) -> None:
    """The same conversations with both routings, each on replicas that have just started."""
    print(f"{CONVERSATIONS} conversations of {TURNS} turns, {AT_ONCE} at once, {arguments.replicas} replicas")
    print("| routing | later turns that resumed the one before | prompt tokens resumed | to the first token, median |")
    print("| --- | --- | --- | --- |", flush=True)
    for routing in ("affine", "random"):
        deploy(arguments, routing)
        with ThreadPoolExecutor(AT_ONCE) as clients:
            talks = list(clients.map(lambda number: converse(url, number), range(CONVERSATIONS)))
        serve.delete("lfm2serve")
        later = [(before, turn) for turns in talks for before, turn in itertools.pairwise(turns)]
        hits = sum(turn.cached >= before.prompt for before, turn in later)
        prompt = sum(turn.prompt for turns in talks for turn in turns)
        cached = sum(turn.cached for turns in talks for turn in turns)
        first = statistics.median(turn.first for _, turn in later)
        shares = f"{hits} of {len(later)} | {cached / prompt:.0%} of {prompt:,}"
        print(f"| {routing} | {shares} | {1e3 * first:.0f} ms |", flush=True)


# ---- the command ----


def deploy(arguments: argparse.Namespace, routing: str) -> None:
    start(
        arguments.model,
        json.loads(arguments.engine),
        replicas=arguments.replicas,
        cpus=arguments.cpus,
        gpus=arguments.gpus,
        routing=routing,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Replicas of lfm2serve behind Ray Serve.")
    parser.add_argument("model", nargs="?", default="demo", help='"demo", a checkpoint directory, or a hub id')
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--cpus", type=float, default=1.0, help="CPUs that Ray sets aside for a replica")
    parser.add_argument("--gpus", type=float, default=0.0, help="GPUs that Ray sets aside for a replica")
    parser.add_argument("--engine", default="{}", help='engine options as JSON, such as {"threads": 1}')
    parser.add_argument("--routing", choices=("affine", "random"), default="affine")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--measure", action="store_true", help="compare affine with random routing, and end")
    arguments = parser.parse_args()
    address = os.environ.get("RAY_ADDRESS", "local")  # a cluster of this machine alone, where none is named
    ray.init(address, include_dashboard=False, log_to_driver=False, logging_level="warning")
    url = f"http://{arguments.host}:{arguments.port}"
    try:
        serve.start(http_options=HTTPOptions(host=arguments.host, port=arguments.port))
        if arguments.measure:
            measure(url, arguments)
            return
        deploy(arguments, arguments.routing)
        print(f"{arguments.replicas} replicas of {arguments.model} on {url}/v1", flush=True)
        stop = threading.Event()
        signal.signal(signal.SIGTERM, lambda *_: stop.set())
        stop.wait()
    except KeyboardInterrupt:
        pass
    finally:
        serve.shutdown()
        ray.shutdown()


if __name__ == "__main__":
    main()
