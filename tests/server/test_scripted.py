"""What a real model can't be made to say: stop strings in pieces, broken characters, failures half-way."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from lfm2serve.config import GenerationDefaults
from lfm2serve.errors import EngineDead, Lfm2Error
from lfm2serve.reply import ReplyBuilder
from lfm2serve.sampling import SamplingParams
from lfm2serve.server.streaming import to_json

from .conftest import KEEPALIVE_S, Live, sse, wait_for
from .fake import Step, says

USER = [{"role": "user", "content": "Hi"}]


def texts(live: Live, **fields: Any) -> set[tuple[str, str | None]]:
    """(text, finish_reason) from both endpoints, whole and streamed."""
    found = set()
    whole = live.chat(max_tokens=200, **fields).choices[0]
    found.add((whole.message.content, whole.finish_reason))
    text = live.complete(max_tokens=200, **fields).choices[0]
    found.add((text.text, text.finish_reason))
    chunks = [chunk.choices[0] for chunk in live.chat(max_tokens=200, stream=True, **fields)]
    found.add(("".join(chunk.delta.content or "" for chunk in chunks), chunks[-1].finish_reason))
    pieces = [chunk.choices[0] for chunk in live.complete(max_tokens=200, stream=True, **fields)]
    found.add(("".join(piece.text for piece in pieces), pieces[-1].finish_reason))
    return found


@pytest.mark.parametrize("per_event", [1, 3])
@pytest.mark.parametrize(
    ("said", "stop", "left"),
    [
        ("The quick brown fox", ["own fox"], "The quick br"),
        ("one, two, three, four, five, six", ["five"], "one, two, three, four, "),
        ("alpha beta gamma delta", "beta gamma", "alpha "),
        ("Fine.\nUser: next", ["\nUser:"], "Fine."),
        ("Think.Observation: x", ["Observation:"], "Think."),
        ("an Obs is no stop", ["Observation:"], "an Obs is no stop"),
        ("日本語の文", ["語の"], "日本"),
        ("first or second", ["second", "first"], ""),
    ],
)
def test_stop_strings_over_token_and_chunk_edges(
    fake: Live, said: str, stop: str | list[str], left: str, per_event: int
) -> None:
    fake.engine.script = says(said, fake.runtime.tokenizer, per_event)
    assert texts(fake, stop=stop) == {(left, "stop")}


def test_a_stop_string_cancels_its_choice_and_leaves_the_others(fake: Live) -> None:
    tokenizer = fake.runtime.tokenizer

    def script(prompt: list[int], params: SamplingParams, choice: int) -> Iterator[Step]:
        yield tokenizer.encode("go on" if choice else "halt now")
        yield 0.1
        yield from ([token] for token in tokenizer.encode(" and on" * 3))

    fake.engine.script = script
    reply = fake.chat(n=2, stop=["halt"], max_tokens=100)
    assert [choice.message.content for choice in reply.choices] == ["", "go on" + " and on" * 3]
    assert fake.engine.cancels == [1], "only the stopped choice, and only once"


def test_a_normal_end_cancels_nothing(fake: Live) -> None:
    fake.engine.script = says("done", fake.runtime.tokenizer)
    fake.chat(n=3)
    list(fake.chat(n=3, stream=True))
    assert fake.engine.cancels == []


def test_pieces_never_split_a_character(fake: Live) -> None:
    said = "日本語 🎉 ď ∑\u2028x\x85y"
    fake.engine.script = says(said, fake.runtime.tokenizer)
    assert texts(fake) == {(said, "stop")}
    fake.engine.script = says(said, fake.runtime.tokenizer, pause=0.05)  # what comes at once may share a chunk
    chunks = [chunk.choices[0].delta.content or "" for chunk in fake.chat(stream=True, max_tokens=100)]
    assert not any("\ufffd" in chunk for chunk in chunks) and len(chunks) > 5


def test_broken_bytes_become_one_replacement_character(fake: Live) -> None:
    first = fake.runtime.tokenizer.encode("日")[0]
    assert fake.runtime.tokenizer.token_text(first) == "\ufffd"
    letter = fake.runtime.tokenizer.encode("A")

    def script(prompt: list[int], params: SamplingParams, choice: int) -> Iterator[Step]:
        yield [first]
        yield letter
        yield [first]

    fake.engine.script = script
    assert texts(fake) == {("\ufffdA\ufffd", "stop")}


def test_events_hold_no_line_separators() -> None:
    text = "a\u2028b\u2029c\x85d\re\nf\x0bg"
    written = to_json({"text": text}).decode()
    assert len(written.splitlines()) == 1 and json.loads(written) == {"text": text}


def test_minus_infinity_is_clamped(fake: Live) -> None:
    fake.engine.script = says("x", fake.runtime.tokenizer)
    fake.engine.top_logprob = float("-inf")
    chat = fake.post("/v1/chat/completions", messages=USER, logprobs=True, top_logprobs=2)
    entry = chat.json()["choices"][0]["logprobs"]["content"][0]
    assert [entry["logprob"], *(top["logprob"] for top in entry["top_logprobs"])] == [-9999.0] * 3
    text = fake.post("/v1/completions", prompt="a b", logprobs=2, echo=True, prompt_logprobs=2).json()["choices"][0]
    assert set(text["logprobs"]["token_logprobs"][1:]) == {-9999.0}
    assert {p["logprob"] for step in text["prompt_logprobs"][1:] for p in step.values()} == {-9999.0}


def test_long_silence_is_filled_with_comments(fake: Live) -> None:
    def script(prompt: list[int], params: SamplingParams, choice: int) -> Iterator[Step]:
        yield 3.5 * KEEPALIVE_S
        yield fake.runtime.tokenizer.encode("late")

    fake.engine.script = script
    answer = fake.post("/v1/chat/completions", messages=USER, stream=True)
    assert answer.text.count(": keep-alive\n\n") >= 2 and answer.text.startswith(": keep-alive\n\n")
    content = "".join(json.loads(data)["choices"][0]["delta"].get("content", "") for data in sse(answer.text)[:-1])
    assert content == "late" and sse(answer.text)[-1] == "[DONE]"
    assert fake.chat(stream=False).choices[0].message.content == "late"


def test_headers_of_a_stream(fake: Live) -> None:
    answer = fake.post("/v1/completions", prompt="a", stream=True)
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert answer.headers["cache-control"] == "no-cache"


@pytest.mark.parametrize("stream", [False, True])
def test_failures_before_the_first_token_keep_their_status(fake: Live, stream: bool) -> None:
    for failure, status in ((Lfm2Error("it broke"), 500), (EngineDead("gone"), 503)):
        fake.engine.script = lambda prompt, params, choice, failure=failure: iter([0.01, failure])
        answer = fake.post("/v1/chat/completions", messages=USER, stream=stream, n=2)
        assert answer.status_code == status
        assert answer.json()["error"]["message"] == failure.message


def test_failures_within_a_stream_are_its_last_event(fake: Live) -> None:
    said = fake.runtime.tokenizer.encode("begin")

    def script(prompt: list[int], params: SamplingParams, choice: int) -> Iterator[Step]:
        yield said
        yield 0.02 if choice else 5.0
        if choice:
            yield Lfm2Error("it broke")

    fake.engine.script = script
    events = sse(fake.post("/v1/chat/completions", messages=USER, stream=True, n=2).text)
    assert events[-1] == "[DONE]"
    error = json.loads(events[-2])["error"]
    assert error == {"message": "it broke", "type": "server_error", "param": None, "code": None}
    assert not any('"finish_reason":"' in event for event in events), "a broken reply doesn't look finished"
    wait_for(lambda: fake.engine.cancels == [1])  # the other choice is cancelled
    with pytest.raises(openai.APIError, match="it broke"):
        list(fake.chat(stream=True, n=2))


def test_unexpected_errors_stay_out_of_the_reply(fake: Live, caplog: pytest.LogCaptureFixture) -> None:
    def broken(*args: Any, **kwargs: Any) -> int:
        raise RuntimeError("private detail")

    fake.engine.submit = broken
    try:
        answer = fake.post("/v1/chat/completions", messages=USER)
    finally:
        del fake.engine.submit
    assert answer.status_code == 500 and "private" not in answer.text
    assert answer.json()["error"]["type"] == "server_error"


def test_a_reply_that_cant_be_built_fails_alone(fake: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    feed = ReplyBuilder.feed

    def picky(self: ReplyBuilder, event: Any) -> Any:
        if self._params.seed == 13:
            raise RuntimeError("private detail")
        return feed(self, event)

    monkeypatch.setattr(ReplyBuilder, "feed", picky)
    fake.engine.script = says("fine", fake.runtime.tokenizer, pause=0.01)
    good = fake.client.chat.completions.create(model="m", messages=USER, stream=True)
    bad = fake.post("/v1/chat/completions", messages=USER, seed=13, n=2)
    assert bad.status_code == 500 and "private" not in bad.text
    assert "".join(chunk.choices[0].delta.content or "" for chunk in good) == "fine"


@pytest.mark.parametrize("stream", [False, True])
def test_a_failed_submit_takes_back_the_ones_before(fake: Live, stream: bool) -> None:
    fake.engine.script = lambda prompt, params, choice: iter([30.0])
    fake.engine.refuse_after = 2
    answer = fake.post("/v1/completions", prompt=["a", "b", "c"], stream=stream)
    assert answer.status_code == 503 and answer.json()["error"]["type"] == "service_unavailable"
    assert fake.engine.cancels == [1, 2]


def test_an_engine_that_died_without_a_word_is_noticed(fake: Live) -> None:
    fake.engine.script = lambda prompt, params, choice: iter([30.0])
    for stream in (False, True):
        fake.engine.alive, fake.engine.fault = True, None
        with httpx.Client(base_url=fake.url, timeout=10) as http:
            fake.engine.alive, fake.engine.fault = False, "RuntimeError: boom"
            answer = http.post("/v1/chat/completions", json={"messages": USER, "stream": stream})
            assert answer.status_code == 503 and "boom" in answer.text
            assert fake.http.get("/health").status_code == 503


def test_defaults_come_from_the_checkpoint_and_the_request_wins(fake: Live, monkeypatch: pytest.MonkeyPatch) -> None:

    defaults = GenerationDefaults(
        eos_token_ids=(7,), temperature=0.3, top_k=50, top_p=None, min_p=0.15, repetition_penalty=1.05
    )
    monkeypatch.setattr(fake.runtime, "generation", defaults)
    fake.post("/v1/chat/completions", messages=USER, temperature=0.9, top_k=-1, top_p=None)
    fake.post("/v1/completions", prompt="a")
    chat, text = (request["params"] for request in fake.engine.submitted)
    assert (chat.temperature, chat.top_k, chat.top_p, chat.min_p, chat.repetition_penalty) == (0.9, 0, 1.0, 0.15, 1.05)
    assert (text.temperature, text.top_k, text.max_tokens) == (0.3, 50, None)


def test_every_sampling_field_reaches_the_engine(fake: Live) -> None:
    asked = {
        "n": 2, "temperature": 0.5, "top_p": 0.9, "top_k": 40, "min_p": 0.1, "repetition_penalty": 1.1,
        "presence_penalty": 0.2, "frequency_penalty": -0.2, "seed": 9, "max_tokens": 5, "min_tokens": 2,
        "stop": ["x", "y"], "stop_token_ids": [3, 4], "ignore_eos": True, "include_stop_str_in_output": True,
        "skip_special_tokens": False,
    }  # fmt: skip
    for path, body in (("/v1/chat/completions", {"messages": USER}), ("/v1/completions", {"prompt": "a"})):
        fake.engine.submitted.clear()
        assert fake.post(path, **body, **asked, logit_bias={"5": -3}).status_code == 200
        first, second = fake.engine.submitted
        for name, value in asked.items():
            found = getattr(first["params"], name)
            assert (list(found) if isinstance(value, list) else found) == value
        assert first["params"].logit_bias == {5: -3.0}
        assert (first["seed"], second["seed"], first["choice"], second["choice"]) == (9, 9, 0, 1)


def test_drafts_and_the_prompt_cache_can_be_switched_off(fake: Live) -> None:
    fake.post("/v1/completions", prompt="a")
    fake.post("/v1/completions", prompt="a", draft=False)
    fake.post("/v1/chat/completions", messages=USER, prompt_cache=False)
    asked = [(request["draft"], request["prompt_cache"]) for request in fake.engine.submitted]
    assert asked == [(True, True), (False, True), (True, False)]


def test_one_request_draws_one_seed(fake: Live) -> None:
    fake.post("/v1/completions", prompt=["a", "b"], n=2)
    assert len({request["seed"] for request in fake.engine.submitted}) == 1
    assert [request["choice"] for request in fake.engine.submitted] == [0, 1, 0, 1]
    wait_for(lambda: fake.engine.census().clean)
