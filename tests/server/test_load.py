"""Many clients on a small pool: every reply is the one that it would have been alone."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest

from .conftest import Live, real_runtime, serving

CLIENTS = 64


def request(number: int) -> dict[str, Any]:
    """Sixteen different requests: greedy and sampled, short and long, chat-sized and near a page."""
    kind = number % 16
    fields: dict[str, Any] = {"model": "m", "max_tokens": 6 + kind, "prompt": "word " * (1 + 5 * kind) + str(kind)}
    if kind % 2:
        fields |= {"temperature": 0.9, "seed": kind, "extra_body": {"top_k": 20 + kind, "repetition_penalty": 1.1}}
    else:
        fields |= {"temperature": 0}
    return fields | ({"stop": ["e"]} if kind % 5 == 0 else {})


async def ask(client: openai.AsyncOpenAI, number: int) -> str:
    if number % 3:
        return (await client.completions.create(**request(number))).choices[0].text
    stream = await client.completions.create(stream=True, **request(number))
    return "".join([chunk.choices[0].text async for chunk in stream])


def test_64_clients_on_a_pool_that_holds_3() -> None:
    with real_runtime(kv_pages=3, context=512, max_streams=8) as runtime, serving(runtime) as live:

        async def main() -> tuple[list[str], list[str]]:
            url = live.url + "/v1"
            async with openai.AsyncOpenAI(base_url=url, api_key="x", max_retries=0, timeout=120) as client:
                solo = [await ask(client, number) for number in range(16)]
                crowd = await asyncio.gather(*(ask(client, number) for number in range(CLIENTS)))
                return solo, crowd

        solo, crowd = asyncio.run(main())
        assert crowd == [solo[number % 16] for number in range(CLIENTS)]
        assert len(set(solo)) > 8, "the requests are different ones"
        assert live.settled(), live.engine.census()
        assert live.engine.stats().counters.census_errors == 0


def test_greedy_replies_are_one_text_among_neighbours(real: Live) -> None:
    async def main() -> set[str]:
        async with openai.AsyncOpenAI(base_url=real.url + "/v1", api_key="x", max_retries=0) as client:

            async def greedy() -> str:
                reply = await client.completions.create(model="m", prompt="Once upon", max_tokens=16, temperature=0)
                return reply.choices[0].text

            alone = {await greedy()}
            mixed = [ask(client, number) for number in range(16)]
            found = await asyncio.gather(*(greedy() for _ in range(20)), *mixed)
            return alone | set(found[:20])

    assert len(asyncio.run(main())) == 1


def test_a_bad_request_among_good_ones_harms_nobody(real: Live) -> None:
    async def main() -> None:
        async with openai.AsyncOpenAI(base_url=real.url + "/v1", api_key="x", max_retries=0) as client:
            good = [ask(client, number) for number in range(8)]
            bad = [client.completions.create(model="m", prompt=[10] * 5000) for _ in range(8)]
            pairs = [task for pair in zip(good, bad, strict=True) for task in pair]
            found = await asyncio.gather(*pairs, return_exceptions=True)
            assert all(isinstance(reply, str) for reply in found[::2])
            assert all(isinstance(error, openai.BadRequestError) for error in found[1::2])

    asyncio.run(main())


@pytest.mark.parametrize("stream", [False, True])
def test_an_engine_fault_is_503_everywhere(stream: bool) -> None:
    """A fault ends what was running with an error, refuses what comes, and shows in /health."""
    with real_runtime(kv_pages=2, context=512) as runtime, serving(runtime) as live:
        assert live.http.get("/health").json()["status"] == "ok"

        def die(*args: Any) -> None:
            raise SystemError("injected fault")

        runtime.engine._scheduler.admit = die  # type: ignore[method-assign, assignment]
        answer = live.post("/v1/completions", prompt="Hi", stream=stream)
        for reply in (answer, live.post("/v1/completions", prompt="Hi"), live.http.get("/health")):
            assert reply.status_code == 503 and "injected fault" in reply.json()["error"]["message"]
        assert live.http.get("/v1/models").status_code == 200
