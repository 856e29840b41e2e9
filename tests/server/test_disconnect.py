"""Clients that leave: whatever was running for them ends, and their pages come back."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from lfm2serve.sampling import SamplingParams

from .conftest import Live, wait_for
from .fake import Step

USER = [{"role": "user", "content": "Hi"}]


def connect(live: Live, path: str, body: dict[str, Any]) -> socket.socket:
    """Sends a request and leaves the reply unread."""
    url = httpx.URL(live.url)
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
    sock = socket.create_connection((url.host, url.port))
    sock.sendall(head.encode() + data)
    return sock


@pytest.mark.parametrize("stream", [False, True])
def test_leaving_before_the_first_token(fake: Live, stream: bool, caplog: pytest.LogCaptureFixture) -> None:
    """A long prompt says nothing for a while; each choice of it is cancelled once, and nobody calls it an error."""
    fake.engine.script = lambda prompt, params, choice: iter([60.0])
    body = {"messages": USER, "stream": stream, "n": 3}
    with connect(fake, "/v1/chat/completions", body):
        wait_for(lambda: fake.engine.census().leased == 3)
    wait_for(lambda: fake.engine.census().clean)
    assert sorted(fake.engine.cancels) == [1, 2, 3]
    assert not [record for record in caplog.records if record.levelname in ("WARNING", "ERROR")]


def test_leaving_within_a_stream(fake: Live) -> None:
    def script(prompt: list[int], params: SamplingParams, choice: int) -> Iterator[Step]:
        while True:
            yield 0.01
            yield [70]

    fake.engine.script = script
    with fake.client.chat.completions.create(model="m", messages=USER, stream=True) as stream:
        for count, _ in enumerate(stream):
            if count == 3:
                break
    wait_for(lambda: fake.engine.census().clean)
    assert fake.engine.cancels == [1]


def test_leaving_while_the_prompt_is_tokenised_starts_nothing(fake: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    encode = type(fake.runtime).encode_prompt
    began = []

    def slow(self: Any, *args: Any, **kwargs: Any) -> list[int]:
        began.append(1)
        time.sleep(0.2)
        return encode(self, *args, **kwargs)

    monkeypatch.setattr(type(fake.runtime), "encode_prompt", slow)
    with connect(fake, "/v1/completions", {"prompt": "long " * 2000}):
        wait_for(lambda: began)
    time.sleep(0.4)
    assert fake.engine.submitted == []


def test_a_long_prompt_does_not_hold_up_the_others(fake: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    encode = type(fake.runtime).encode_prompt
    gate = threading.Event()

    def slow(self: Any, prompt: Any, **kwargs: Any) -> list[int]:
        if len(prompt) > 1000:
            assert gate.wait(10)
        return encode(self, prompt, **kwargs)

    monkeypatch.setattr(type(fake.runtime), "encode_prompt", slow)
    with connect(fake, "/v1/completions", {"prompt": "long " * 2000, "max_tokens": 1}) as waiting:
        assert fake.post("/v1/completions", prompt="short").status_code == 200
        gate.set()
        assert waiting.recv(12) == b"HTTP/1.1 200", "the long one is answered too"


def test_leaving_a_hundred_times(real: Live) -> None:
    """Mid-prompt, mid-reply, queued; streamed and whole: the engine forgets them all at once."""
    body = {"ignore_eos": True, "temperature": 0, "draft": False}  # drafts would be done before anyone can leave
    long = {**body, "prompt": [20] * 500, "max_tokens": 400}
    short = {**body, "prompt": "Hi", "max_tokens": 400}
    before = real.engine.stats().counters.generated_tokens
    for turn in range(100):
        asked = (long, short)[turn % 2] | {"stream": turn % 4 < 2, "n": 1 + turn % 3}
        with connect(real, "/v1/completions", asked) as sock:
            if asked["stream"] and asked is not long and turn % 8 < 4:
                sock.recv(100)
            else:
                time.sleep(0.002 * (turn % 10))
    assert real.engine.drain(60)
    stats = real.engine.stats()
    assert (stats.waiting, stats.filling, stats.running) == (0, 0, 0) and stats.census.clean
    assert stats.counters.generated_tokens - before < 40_000, "they asked for 80,000: nothing runs on for nobody"


def test_the_async_client_can_cancel(real: Live) -> None:
    before = real.engine.stats().counters.generated_tokens

    async def main() -> None:
        async with openai.AsyncOpenAI(base_url=real.url + "/v1", api_key="none", max_retries=0) as client:
            ask = client.completions.create(
                model="m", prompt="Hi", max_tokens=900, temperature=0, extra_body={"ignore_eos": True, "draft": False}
            )
            task = asyncio.create_task(ask)
            while not real.engine.census().leased:
                assert not task.done(), "it ended before it could be cancelled"
                await asyncio.sleep(0.005)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert await asyncio.to_thread(real.engine.drain, 60)
            assert real.engine.stats().counters.generated_tokens - before < 800

    asyncio.run(main())
