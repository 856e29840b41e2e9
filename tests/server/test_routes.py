"""The small endpoints: models, tokenise, detokenise, health, metrics."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import openai
import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from lfm2serve.sampling import SamplingParams
from lfm2serve.server import create_app
from lfm2serve.server.metrics import Histogram

from .conftest import Live, serving, wait_for
from .fake import Step, says

USER = [{"role": "user", "content": "Hi"}]


def values(live: Live) -> dict[str, float]:
    """Every sample of /metrics, by name and labels other than the model's."""
    answer = live.http.get("/metrics")
    assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/plain")
    found = {}
    for family in text_string_to_metric_families(answer.text):
        for sample in family.samples:
            labels = {name: value for name, value in sample.labels.items() if name != "model_name"}
            found[sample.name + "".join(f"{{{name}={value}}}" for name, value in labels.items())] = sample.value
    return found


def test_models(real: Live) -> None:
    [card] = real.client.models.list().data
    assert (card.id, card.object, card.owned_by) == ("tiny-lfm2moe", "model", "lfm2serve")
    assert card.max_model_len == real.engine.context
    assert real.client.models.retrieve("tiny-lfm2moe") == card


def test_a_served_name_may_hold_slashes(fake: Live) -> None:
    with serving(fake.runtime, served_model_name="Org/Name-1B") as live:
        assert live.client.models.list().data[0].id == "Org/Name-1B"
        assert live.client.models.retrieve("Org/Name-1B").id == "Org/Name-1B"
        assert live.http.get("/v1/models/Org/Name-1B").json()["id"] == "Org/Name-1B"
        assert live.post("/v1/completions", prompt="a").json()["model"] == "Org/Name-1B"
        assert 'model_name="Org/Name-1B"' in live.http.get("/metrics").text


def test_tokenize_is_what_the_completion_runs(real: Live) -> None:
    tokenizer = real.runtime.tokenizer
    asked = real.post("/tokenize", prompt="Hello 日本", return_token_strs=True).json()
    ran = real.complete("Hello 日本", extra_body={"return_token_ids": True}).choices[0].prompt_token_ids
    assert asked["tokens"] == ran and asked["count"] == len(ran)
    assert asked["max_model_len"] == real.engine.context
    assert asked["token_strs"] == [tokenizer.token_text(token) for token in ran]
    bare = real.post("/tokenize", prompt="Hello", add_special_tokens=False).json()
    assert bare["tokens"] == tokenizer.encode("Hello") and bare["token_strs"] is None


def test_tokenize_messages(real: Live) -> None:
    whole = real.post("/tokenize", messages=USER).json()["tokens"]
    assert whole == real.chat(extra_body={"return_token_ids": True}).prompt_token_ids
    without = real.post("/tokenize", messages=USER, add_generation_prompt=False).json()["tokens"]
    assert whole[: len(without)] == without and len(without) < len(whole)


def test_detokenize_is_the_way_back(real: Live) -> None:
    ids = real.post("/tokenize", prompt="<|im_start|>user\n日本 🎉", add_special_tokens=False).json()["tokens"]
    assert real.post("/detokenize", tokens=ids).json() == {"prompt": "<|im_start|>user\n日本 🎉"}
    assert real.post("/detokenize", tokens=[]).json() == {"prompt": ""}
    for tokens, place in (([1, 10**6], 1), ([-1], 0)):
        answer = real.post("/detokenize", tokens=tokens)
        assert answer.status_code == 400 and f"tokens[{place}]" in answer.json()["error"]["message"]


def test_health(real: Live) -> None:
    answer = real.http.get("/health")
    assert (answer.status_code, answer.json()["status"]) == (200, "ok")
    assert real.http.head("/health").status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_metrics_count_a_request(real: Live, stream: bool) -> None:
    before = values(real)
    plain = {"ignore_eos": True, "draft": False, "prompt_cache": False}
    answer = real.complete("Hello", max_tokens=7, stream=stream, extra_body=plain)
    if stream:
        list(answer)
    gained = {name: value - before.get(name, 0.0) for name, value in values(real).items()}
    prompt = real.post("/tokenize", prompt="Hello").json()["count"]
    assert gained["vllm:prompt_tokens_total"] == prompt and gained["vllm:generation_tokens_total"] == 7
    assert gained["vllm:request_success_total{finished_reason=length}"] == 1
    for name in ("time_to_first_token", "e2e_request_latency", "request_queue_time"):
        assert gained[f"vllm:{name}_seconds_count"] == 1
    assert gained["vllm:inter_token_latency_seconds_count"] == 6
    assert gained["vllm:e2e_request_latency_seconds_sum"] >= gained["vllm:time_to_first_token_seconds_sum"] > 0
    assert gained["lfm2serve:decode_rounds_total"] > 0 and gained["lfm2serve:prompt_steps_total"] > 0
    assert gained["lfm2serve:census_errors_total"] == 0


def test_gauges_follow_the_engine(fake: Live) -> None:
    def script(prompt: list[int], params: SamplingParams, choice: int) -> Iterator[Step]:
        yield 30.0

    fake.engine.script = script
    idle = values(fake)
    assert idle["lfm2serve:pages{state=free}"] == fake.engine.pages and idle["vllm:kv_cache_usage_perc"] == 0
    with fake.http.stream("POST", "/v1/completions", json={"prompt": "a", "n": 5, "stream": True}):
        busy = values(fake)
        assert busy["vllm:num_requests_running"] == 5 and busy["vllm:num_requests_waiting"] == 0
        assert busy["lfm2serve:pages{state=leased}"] == 5
        assert busy["vllm:kv_cache_usage_perc"] == pytest.approx(5 / fake.engine.pages)
    wait_for(lambda: fake.engine.census().clean)
    aborted = "vllm:request_success_total{finished_reason=abort}"
    wait_for(lambda: values(fake).get(aborted, 0) - idle.get(aborted, 0) == 5)


def test_a_stop_string_counts_as_stop(fake: Live) -> None:
    fake.engine.script = says("halt and go on and on", fake.runtime.tokenizer, pause=0.01)
    before = values(fake)
    assert fake.complete(stop=["halt"], max_tokens=100).choices[0].finish_reason == "stop"
    name = "vllm:request_success_total{finished_reason=%s}"
    wait_for(lambda: values(fake).get(name % "stop", 0) == before.get(name % "stop", 0) + 1)
    assert values(fake).get(name % "abort", 0) == before.get(name % "abort", 0)


def test_each_app_has_its_own_registry(fake: Live) -> None:
    for _ in range(2):
        create_app(fake.runtime)


def test_the_async_client(real: Live) -> None:
    async def main() -> tuple[str | None, str]:
        async with openai.AsyncOpenAI(base_url=real.url + "/v1", api_key="x", max_retries=0) as client:
            whole = await client.chat.completions.create(model="m", messages=USER, max_tokens=8, temperature=0)
            stream = await client.chat.completions.create(
                model="m", messages=USER, max_tokens=8, temperature=0, stream=True
            )
            return whole.choices[0].message.content, "".join([c.choices[0].delta.content or "" async for c in stream])

    whole, streamed = asyncio.run(main())
    assert whole == streamed


def test_prompts_are_never_logged(fake: Live, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG")
    secret = "attack at dawn"
    fake.post("/v1/completions", prompt=secret)
    fake.post("/v1/completions", prompt=[secret, 5])
    fake.post("/v1/chat/completions", messages=[{"role": "user", "content": secret}], stream=True)
    fake.engine.script = lambda prompt, params, choice: iter([RuntimeError("it broke")])
    assert fake.post("/v1/completions", prompt=secret).status_code == 500
    assert "it broke" in caplog.text and secret not in caplog.text


def test_histograms_hold_every_token(fake: Live) -> None:
    """Buckets are cumulative, a value on a bound is in its bucket, and tokens of one event are counted each."""
    histogram = Histogram("h", "text", (0.1, 1), "m")
    histogram.observe(0.1)
    histogram.observe(0.5, 3)
    histogram.observe(7.0)
    registry = CollectorRegistry()
    registry.register(histogram)
    lines = generate_latest(registry).decode().splitlines()
    assert [line for line in lines if not line.startswith("#")] == [
        'h_bucket{le="0.1",model_name="m"} 1.0', 'h_bucket{le="1.0",model_name="m"} 4.0',
        'h_bucket{le="+Inf",model_name="m"} 5.0', 'h_count{model_name="m"} 5.0', 'h_sum{model_name="m"} 8.6',
    ]  # fmt: skip
    name = "vllm:inter_token_latency_seconds_count"
    before = values(fake).get(name, 0.0)
    fake.engine.script = lambda prompt, params, choice: iter([[70, 71, 72], [73, 74]])
    fake.complete(max_tokens=5)
    assert values(fake)[name] == before + 4
