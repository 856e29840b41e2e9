"""Replicas behind Ray Serve, each conversation at the replica that holds its state (needs `pip install '.[ray]'`):

python examples/ray_serve.py demo --replicas 2     # http://127.0.0.1:8000/v1, until Ctrl-C
python examples/ray_serve.py demo --measure        # hit rates of affine against random routing
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import random
import statistics
import threading
import time
from collections import OrderedDict
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
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
GETS = {"/v1/models", "/health"}


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


def trail(raw: bytes) -> dict[str, Any] | None:
    """Hashes of the prompt's beginnings, the shortest first, and which of them is the opening. None: no prompt."""
    try:
        body = json.loads(raw)
    except ValueError:
        return None
    pieces = pieces_of(body) if isinstance(body, dict) else []
    digest, hashes = hashlib.sha256(), []
    for piece in pieces:
        digest.update(json.dumps(piece, sort_keys=True).encode() + b"\n")
        hashes.append(digest.hexdigest()[:32])
    return {"hashes": hashes, "opening": hashes[min(opening(body), len(hashes)) - 1]} if hashes else None


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
        conversation = pending_request.kwargs.get("conversation") if pending_request is not None else None
        if conversation is None or not candidate_replicas:
            return [candidate_replicas]
        home = self._home(candidate_replicas, conversation) if self._affine else random.choice(candidate_replicas)
        return [[home], [replica for replica in candidate_replicas if replica is not home]]

    def _home(self, replicas: list[RunningReplica], conversation: dict[str, Any]) -> RunningReplica:
        living = {replica.replica_id: replica for replica in replicas}
        for beginning in reversed(conversation["hashes"]):
            if (known := self._went.get(beginning)) in living:
                return living[known]
        start = conversation["opening"]
        return max(replicas, key=lambda replica: hashlib.sha256(f"{start}{replica.replica_id}".encode()).digest())

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        conversation = pending_request.kwargs.get("conversation")
        if conversation is not None:
            whole = conversation["hashes"][-1]
            self._went[whole] = replica_id
            self._went.move_to_end(whole)
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
        conversation: dict[str, Any] | None = None,
    ) -> AsyncIterator[Any]:
        """The status and headers, then the pieces of the response's body. Leaving early cancels what runs."""
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
        path = request.url.path
        if path not in {"GET": GETS, "POST": POSTS}.get(request.method, ()):
            message = f"{request.method} {path} isn't served behind several replicas"
            error = {"message": message, "type": "invalid_request_error", "param": None, "code": "not_found"}
            return JSONResponse({"error": error}, 404)
        body = await request.body()
        response = self._answer.remote(request.method, path, request.headers.raw, body, conversation=trail(body))
        status, headers, replica = await anext(response)
        answer = StreamingResponse(response, status)
        answer.raw_headers = [*headers, (b"x-replica", replica.encode())]
        return answer


def start(model: str, options: dict[str, Any], *, replicas: int, cpus: float, gpus: float, routing: str) -> None:
    """Deploy, and return once every replica has loaded the model."""
    router = RequestRouterConfig(request_router_class=Router, request_router_kwargs={"routing": routing})
    streams = options.get("max_streams", 64)
    behind = Replica.options(
        num_replicas=replicas,
        max_ongoing_requests=streams,
        request_router_config=router,
        ray_actor_options={"num_cpus": cpus, "num_gpus": gpus},
    )
    serve.run(Front.bind(behind.bind(model, options)), name="lfm2serve", route_prefix="/")
