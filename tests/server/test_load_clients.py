"""Many clients: all are served whole, those that vanish leave nothing; a busy loop joins events and loses none."""

from __future__ import annotations

import asyncio
import gc
import time
from typing import Any

import pytest

from lfm2serve.bench.clients import run as clients
from lfm2serve.bench.server import measure, run_clients
from lfm2serve.options import EngineOptions
from lfm2serve.server.group import Bridge, Reply, ReplyGroup
from lfm2serve.stream import Stream, StreamEvent, StreamMetrics

from .conftest import TINY, Live, wait_for

CHAT = "/v1/chat/completions"


def living() -> dict[str, int]:
    """What a request consists of, and is still in memory."""
    gc.collect()
    kinds = (ReplyGroup, Reply, Stream)
    return {kind.__name__: sum(isinstance(thing, kind) for thing in gc.get_objects()) for kind in kinds}


@pytest.mark.parametrize("path", [CHAT, "/v1/completions"])
def test_streaming_clients_get_every_token(real: Live, path: str) -> None:
    got = run_clients("stream", real.url + path, 16, 24)
    assert got["tokens"] == 16 * 24 and got["seconds"] > 0


def test_clients_that_vanish_leave_nothing(real: Live) -> None:
    before = living()
    for _ in range(2):
        run_clients("vanish", real.url + CHAT, 60, 200)
    assert real.settled(), real.engine.census()
    state = real.app.state.server
    wait_for(lambda: state.places.taken == 0 and not state.groups)
    wait_for(lambda: living() == before)
    counters = real.engine.stats().counters
    assert counters.failed_steps == counters.census_errors == 0
    assert real.complete(max_tokens=3).usage.completion_tokens <= 3


def test_a_stream_that_breaks_off_is_noticed(fake: Live) -> None:
    fake.engine.script = lambda prompt, params, choice: iter([[70], RuntimeError("it broke")])
    with pytest.raises(RuntimeError, match=r"broke off.*it broke"):
        asyncio.run(clients("stream", fake.url + CHAT, 1, 8))


def test_the_bench() -> None:
    report = measure(
        str(TINY), EngineOptions(device="cpu", kv_pages=8, context=512, max_streams=4), dummy_weights=False,
        clients=4, tokens=8, vanish=8, repeats=1,
    )  # fmt: skip
    assert report.failures == [] and len(report.figures) == 5
    assert all(figure.value > 0 for figure in report.figures[:4])


class Listener:
    """Stands for a Reply: what it was given, and how long the loop works on it."""

    def __init__(self, work_s: float = 0.0) -> None:
        self.events: list[StreamEvent] = []
        self._work_s = work_s

    def receive(self, event: StreamEvent, at: float) -> None:
        self.events.append(event)
        end = time.thread_time() + self._work_s
        while time.thread_time() < end:
            pass


def event(*tokens: int, **more: Any) -> StreamEvent:
    return StreamEvent(1, StreamMetrics(arrival=0.0, prompt_tokens=1), list(tokens), **more)


def deliver(posts: list[tuple[Listener, StreamEvent]], pause: float) -> None:
    async def main() -> None:
        bridge = Bridge(asyncio.get_running_loop())
        for listener, what in posts:
            bridge.post(listener, what)  # type: ignore[arg-type]
            await asyncio.sleep(pause)
        await asyncio.sleep(0.2)

    asyncio.run(main())


def test_an_idle_loop_hands_each_event_over_at_once() -> None:
    listener = Listener()
    deliver([(listener, event(n)) for n in range(5)], pause=0.05)
    assert [e.tokens for e in listener.events] == [[0], [1], [2], [3], [4]]


def test_a_busy_loop_joins_events() -> None:
    busy, other = Listener(work_s=0.01), Listener()
    posts = [(busy if n % 2 else other, event(n)) for n in range(40)]
    deliver([*posts, (busy, event(99, finish_reason="stop", stop_reason=99))], pause=0.0)
    for listener, tokens in ((busy, [*range(1, 40, 2), 99]), (other, list(range(0, 40, 2)))):
        assert [token for e in listener.events for token in e.tokens] == tokens
    assert len(busy.events) < 15
    assert [e.finish_reason for e in busy.events if e.finish_reason] == ["stop"] and busy.events[-1].stop_reason == 99


def test_what_came_before_an_error_is_not_lost() -> None:
    listener = Listener()
    deliver([(listener, event(1)), (listener, event(2)), (listener, event(finish_reason="error"))], pause=0.0)
    assert [token for e in listener.events for token in e.tokens] == [1, 2]
    assert listener.events[-1].finish_reason == "error" and listener.events[-1].tokens == []
