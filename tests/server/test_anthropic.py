"""Anthropic's dialect through its own client: messages whole and streamed, tools, thoughts, counts and errors."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from typing import Any

import anthropic
import pytest

from lfm2serve.errors import Lfm2Error
from lfm2serve.sampling import SamplingParams

from .conftest import Live, wait_for
from .fake import Step, says, says_after

USER = [{"role": "user", "content": "Hi"}]
WEATHER = {
    "name": "get_weather",
    "description": "The weather of a city",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
CALL = '<|tool_call_start|>[get_weather(city="Rome")]<|tool_call_end|>'


@pytest.fixture
def claude(fake: Live) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=fake.url, api_key="none", max_retries=0, timeout=30) as client:
        yield client


def ask(client: anthropic.Anthropic, **fields: Any) -> Any:
    return client.messages.create(**{"model": "m", "max_tokens": 100, "messages": USER, **fields})


def stream(client: anthropic.Anthropic, **fields: Any) -> tuple[Any, list[Any]]:
    """The message that the client put together, and the events as they came."""
    with client.messages.stream(**{"model": "m", "max_tokens": 100, "messages": USER, **fields}) as events:
        seen = list(events)
        return events.get_final_message(), seen


def both(client: anthropic.Anthropic, **fields: Any) -> list[Any]:
    return [ask(client, **fields), stream(client, **fields)[0]]


def prompt(live: Live) -> str:
    """The latest prompt, as text."""
    return live.runtime.tokenizer.decode(live.engine.submitted[-1]["prompt"], skip_special_tokens=False)


def sse(live: Live, gate: threading.Event | None = None, **fields: Any) -> list[tuple[str, dict[str, Any]]]:
    """(name, data) of each event; the gate is opened when something was said."""
    body = {"max_tokens": 100, "messages": USER, "stream": True, **fields}
    lines = []
    with live.http.stream("POST", "/v1/messages", json=body) as answer:
        assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
        for line in answer.iter_lines():
            if gate is not None and "content_block_delta" in line:
                gate.set()
            lines += [line] if line and not line.startswith(":") else []
    pairs = zip(lines[::2], lines[1::2], strict=True)
    return [(name.removeprefix("event: "), json.loads(data.removeprefix("data: "))) for name, data in pairs]


def test_a_message(fake: Live, claude: anthropic.Anthropic) -> None:
    fake.engine.script = says("Hello there.", fake.runtime.tokenizer)
    fake.engine.served["cached_tokens"] = 5
    tokens = len(fake.runtime.tokenizer.encode("Hello there.")) + 1
    for message in both(claude):
        assert (message.role, message.type, message.model, message.id[:4]) == ("assistant", "message", "m", "msg_")
        assert [(block.type, block.text) for block in message.content] == [("text", "Hello there.")]
        assert (message.stop_reason, message.stop_sequence) == ("end_turn", None)
        usage = message.usage
        assert usage.output_tokens == tokens and usage.cache_read_input_tokens == 5
        assert usage.input_tokens + usage.cache_read_input_tokens == len(fake.engine.submitted[-1]["prompt"])
    assert ask(claude).lfm2serve["cache"]["cached_tokens"] == 5


def test_the_events_of_a_stream(fake: Live) -> None:
    gate = threading.Event()
    fake.engine.script = says_after("one", gate, " two", fake.runtime.tokenizer)
    events = sse(fake, gate)
    assert [name for name, _ in events] == [data["type"] for _, data in events]
    first, last = events[0][1]["message"], events[-2][1]
    assert first["content"] == [] and first["stop_reason"] is None and first["usage"]["output_tokens"] == 0
    assert last["delta"] == {"stop_reason": "end_turn", "stop_sequence": None} and last["usage"]["output_tokens"] > 1
    names = [name for name, _ in events]
    deltas = names.count("content_block_delta")
    between = ["content_block_start", *["content_block_delta"] * deltas, "content_block_stop"]
    assert names == ["message_start", *between, "message_delta", "message_stop"] and deltas > 1
    pieces = [data["delta"] for name, data in events if name == "content_block_delta"]
    assert "".join(piece["text"] for piece in pieces) == "one two"
    assert {piece["type"] for piece in pieces} == {"text_delta"}


def test_why_a_reply_ended(fake: Live, claude: anthropic.Anthropic) -> None:
    fake.engine.script = says("one two three", fake.runtime.tokenizer)
    for message in both(claude, stop_sequences=["two", "nine"]):
        assert (message.stop_reason, message.stop_sequence, message.content[0].text) == ("stop_sequence", "two", "one ")
    for message in both(claude, max_tokens=2):
        assert (message.stop_reason, message.usage.output_tokens) == ("max_tokens", 2)


def test_an_empty_reply_has_no_block(fake: Live, claude: anthropic.Anthropic) -> None:
    for message in both(claude):
        assert (message.content, message.stop_reason) == ([], "end_turn")


def test_a_call_and_its_result(fake: Live, claude: anthropic.Anthropic) -> None:
    fake.engine.script = says(f"Let me see.{CALL}", fake.runtime.tokenizer)
    for message in both(claude, tools=[WEATHER]):
        text, call = message.content
        assert (text.text, message.stop_reason) == ("Let me see.", "tool_use")
        assert (call.type, call.name, call.input) == ("tool_use", "get_weather", {"city": "Rome"})
        assert '"name": "get_weather"' in prompt(fake) and "input_schema" not in prompt(fake)
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "sunny"}
    back = [*USER, {"role": "assistant", "content": message.content}, {"role": "user", "content": [result]}]
    fake.engine.script = says("It is sunny.", fake.runtime.tokenizer)
    assert ask(claude, tools=[WEATHER], messages=back).content[0].text == "It is sunny."
    shown = prompt(fake)
    assert "get_weather(city='Rome')" in shown.replace('"', "'")
    assert shown.index("Let me see.") < shown.index("<|im_start|>tool\nsunny<|im_end|>")


def test_the_events_of_a_call(fake: Live) -> None:
    fake.engine.script = says(f"So:{CALL}", fake.runtime.tokenizer)
    events = [data for _, data in sse(fake, tools=[WEATHER])]
    start = next(at for at, event in enumerate(events) if event.get("content_block", {}).get("type") == "tool_use")
    assert events[start]["content_block"]["input"] == {} and events[start]["index"] == 1
    assert events[start - 1] == {"type": "content_block_stop", "index": 0}
    stop = events.index({"type": "content_block_stop", "index": 1})
    pieces = [event["delta"] for event in events[start + 1 : stop]]
    assert {piece["type"] for piece in pieces} == {"input_json_delta"}
    assert json.loads("".join(piece["partial_json"] for piece in pieces)) == {"city": "Rome"}


def test_several_results_and_a_failed_one(fake: Live, claude: anthropic.Anthropic) -> None:
    uses = [{"type": "tool_use", "id": f"t{n}", "name": "get_weather", "input": {"city": "X"}} for n in range(2)]
    results = [
        {"type": "tool_result", "tool_use_id": "t0", "content": [{"type": "text", "text": "wet"}]},
        {"type": "tool_result", "tool_use_id": "t1", "content": "no such city", "is_error": True},
        {"type": "text", "text": "And now?"},
    ]
    ask(claude, messages=[*USER, {"role": "assistant", "content": uses}, {"role": "user", "content": results}])
    turns = prompt(fake).split("<|im_start|>")[-4:-1]
    wanted = ["tool\nwet", "tool\nError: no such city", "user\nAnd now?"]
    assert [turn.removesuffix("<|im_end|>\n") for turn in turns] == wanted


@pytest.mark.parametrize(("choice", "offered"), [({"type": "auto"}, True), ({"type": "none"}, False), (None, True)])
def test_tool_choice(fake: Live, claude: anthropic.Anthropic, choice: Any, offered: bool) -> None:
    fields = {} if choice is None else {"tool_choice": choice}
    fake.engine.script = says(CALL, fake.runtime.tokenizer)
    for message in both(claude, tools=[WEATHER], **fields):
        assert ("get_weather" in prompt(fake)) == offered == (message.stop_reason == "tool_use")


def test_thoughts_are_blocks_for_those_who_ask(fake: Live, claude: anthropic.Anthropic) -> None:
    fake.engine.script = says("<think>plan it</think>Done.", fake.runtime.tokenizer)
    for thinking in ({"type": "enabled", "budget_tokens": 1024}, {"type": "adaptive"}):
        for message in both(claude, thinking=thinking):
            thought, text = message.content
            assert (thought.type, thought.thinking, text.text) == ("thinking", "plan it", "Done.")
            assert thought.signature
    for fields in ({}, {"thinking": {"type": "disabled"}}):
        for message in both(claude, **fields):
            assert [block.type for block in message.content] == ["text"] and message.content[0].text == "Done."
    for message in both(claude, thinking={"type": "adaptive", "display": "omitted"}):
        assert (message.content[0].thinking, message.content[1].text) == ("", "Done.")


def test_the_events_of_a_thought(fake: Live) -> None:
    fake.engine.script = says("<think>plan</think>Go", fake.runtime.tokenizer)
    events = [data for _, data in sse(fake, thinking={"type": "adaptive"})]
    kinds = [event["delta"]["type"] for event in events if event["type"] == "content_block_delta"]
    thinking, text = kinds.count("thinking_delta"), kinds.count("text_delta")
    assert kinds == ["thinking_delta"] * thinking + ["signature_delta"] + ["text_delta"] * text and thinking and text


@pytest.mark.parametrize("thinking", [{"type": "adaptive"}, {"type": "disabled"}])
def test_what_comes_back_is_what_the_engine_was_told(fake: Live, claude: anthropic.Anthropic, thinking: Any) -> None:
    fake.engine.script = says(f"<think>plan it</think>So:{CALL}", fake.runtime.tokenizer)
    message = ask(claude, thinking=thinking, tools=[WEATHER])
    _, told = fake.engine.told[0]
    result = {"type": "tool_result", "tool_use_id": message.content[-1].id, "content": "sunny"}
    back = [*USER, {"role": "assistant", "content": message.content}, {"role": "user", "content": [result]}]
    ask(claude, messages=back, thinking=thinking, tools=[WEATHER])
    assert told and fake.engine.submitted[-1]["prompt"][: len(told)] == told
    assert ("plan it" in prompt(fake)) == (thinking["type"] == "adaptive")


def test_a_conversation_becomes_the_chat_that_it_is(fake: Live, claude: anthropic.Anthropic) -> None:
    chat = [
        {"role": "system", "content": "Be brief.\nAnd kind."},
        {"role": "user", "content": "a\nb"},
        {"role": "assistant", "content": "c"},
        {"role": "user", "content": "d"},
    ]
    fake.client.chat.completions.create(model="m", messages=chat)
    ephemeral = {"type": "ephemeral"}
    ask(
        claude,
        system=[
            {"type": "text", "text": "Be brief."},
            {"type": "text", "text": "And kind.", "cache_control": ephemeral},
        ],
        messages=[
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {"role": "assistant", "content": [{"type": "text", "text": "c"}]},
            {"role": "user", "content": "d"},
        ],
    )
    first, second = (request["prompt"] for request in fake.engine.submitted)
    assert first == second
    assert fake.engine.submitted[0]["marks"] == fake.engine.submitted[1]["marks"]


def test_counts_are_those_of_the_prompt(fake: Live, claude: anthropic.Anthropic) -> None:
    fields: dict[str, Any] = {"messages": USER, "system": "Be brief.", "tools": [WEATHER]}
    ask(claude, **fields)
    count = claude.messages.count_tokens(model="m", **fields)
    assert count.input_tokens == len(fake.engine.submitted[0]["prompt"]) and len(fake.engine.submitted) == 1


def test_models(fake: Live, claude: anthropic.Anthropic) -> None:
    [card] = claude.models.list()
    assert (card.id, card.type, card.display_name) == ("fake-model", "model", "fake-model")
    assert claude.models.retrieve("fake-model") == card and card.created_at.year > 2000


def test_sampling_fields_reach_the_engine(fake: Live) -> None:
    asked = {"temperature": 0.5, "top_p": 0.9, "top_k": 40, "max_tokens": 7, "seed": 3, "min_p": 0.1}
    assert fake.post("/v1/messages", messages=USER, stop_sequences=["x"], draft=False, **asked).status_code == 200
    submitted = fake.engine.submitted[-1]
    params: SamplingParams = submitted["params"]
    assert {name: getattr(params, name) for name in asked} == asked and params.stop == ("x",)
    assert (submitted["seed"], submitted["draft"]) == (3, False)


def test_an_agents_request(fake: Live) -> None:
    """What Claude Code sends besides messages and tools."""
    fake.engine.script = says("Fine.", fake.runtime.tokenizer)
    ephemeral = {"type": "ephemeral"}
    body = {
        "model": "claude-x",
        "max_tokens": 32000,
        "stream": True,
        "system": [{"type": "text", "text": "You are an agent.", "cache_control": ephemeral}],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "<system-reminder>x</system-reminder>"}]},
            {"role": "user", "content": [{"type": "text", "text": "Hi", "cache_control": ephemeral}]},
        ],
        "tools": [{**WEATHER, "cache_control": ephemeral, "eager_input_streaming": True}],
        "metadata": {"user_id": "u"},
        "thinking": {"type": "adaptive", "budget_tokens": 0},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "medium"},
    }
    headers = {"anthropic-beta": "interleaved-thinking-2025-05-14", "anthropic-version": "2023-06-01"}
    answer = fake.http.post("/v1/messages?beta=true", json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    assert '"text":"Fine."' in answer.text or answer.text.count("text_delta") > 1
    assert fake.engine.submitted[-1]["params"].max_tokens < 32000, "as much as the context holds"


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        ({"messages": [*USER, {"role": "assistant", "content": "I am"}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "thinking", "thinking": "x"}]}]}, "content[0].type"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"name": "f"}]}, "tools[0].input_schema"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"stop_sequences": [""]}, "stop_sequences[0]"),
        ({"temperature": 999}, "temperature"),
        ({"container": "c"}, "container"),
        ({"thread": {"type": "create"}}, "thread"),
        ({"bogus": 1}, "bogus"),
    ],
)
def test_bad_requests_name_the_field(fake: Live, claude: anthropic.Anthropic, fields: Any, named: str) -> None:
    body = {"max_tokens": 10, "messages": USER, **fields}
    for path in ("/v1/messages", "/v1/messages?beta=true"):
        answer = fake.http.post(path, json=body)
        error = answer.json()
        assert (answer.status_code, error["type"], error["error"]["type"]) == (400, "error", "invalid_request_error")
        assert named in error["error"]["message"]
    assert fake.engine.submitted == []


def test_errors_have_the_clients_types(fake: Live, claude: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.BadRequestError, match="bogus"):
        ask(claude, extra_body={"bogus": 1})
    answer = fake.http.get("/v1/messages/nowhere")
    assert answer.json()["error"]["type"] == "not_found_error" and answer.status_code == 404
    fake.engine.refuse_after = 0
    with pytest.raises(anthropic.InternalServerError) as caught:
        ask(claude)
    assert caught.value.body["error"]["type"] == "api_error"  # type: ignore[index]


def test_a_failure_within_a_stream_is_its_last_event(fake: Live, claude: anthropic.Anthropic) -> None:
    said = fake.runtime.tokenizer.encode("begin")

    def script(tokens: list[int], params: SamplingParams, choice: int) -> Iterator[Step]:
        yield said
        yield Lfm2Error("it broke")

    fake.engine.script = script
    name, data = sse(fake)[-1]
    assert (name, data["error"]) == ("error", {"type": "api_error", "message": "it broke"})
    with pytest.raises(anthropic.APIStatusError, match="it broke"):
        stream(claude)


def test_a_client_that_leaves_cancels_its_reply(fake: Live, claude: anthropic.Anthropic) -> None:
    fake.engine.script = says("word " * 50, fake.runtime.tokenizer, pause=0.05)
    with claude.messages.stream(model="m", max_tokens=100, messages=USER) as events:  # type: ignore[arg-type]
        next(iter(events.text_stream))
    wait_for(lambda: fake.engine.cancels == [1])


def test_a_real_engine_resumes_a_conversation(real: Live) -> None:
    with anthropic.Anthropic(base_url=real.url, api_key="none", max_retries=0, timeout=60) as client:
        fields: dict[str, Any] = {"temperature": 0, "max_tokens": 8}
        long = "Say it again. " * 12
        first = real.post("/v1/messages", messages=[{"role": "user", "content": long}], **fields).json()
        messages = [
            {"role": "user", "content": long},
            {"role": "assistant", "content": first["content"] or "x"},
            {"role": "user", "content": "More"},
        ]
        real.engine.drain(30)
        second = client.messages.create(model="m", messages=messages, max_tokens=8)  # type: ignore[arg-type]
        assert (second.usage.cache_read_input_tokens or 0) > 0


def test_forced_calls_and_formats(real: Live) -> None:
    city = {"properties": {"city": {"enum": ["Rome", "Lima"]}}, "required": ["city"], "additionalProperties": False}
    cities = {"type": "object", **city}
    tools: Any = [{"name": name, "input_schema": cities} for name in ("get_weather", "get_time")]
    with anthropic.Anthropic(base_url=real.url, api_key="none", max_retries=0, timeout=60) as client:
        for choice, names in (
            ({"type": "any"}, {"get_weather", "get_time"}),
            ({"type": "tool", "name": "get_time"}, {"get_time"}),
        ):
            alone = {**choice, "disable_parallel_tool_use": True}
            for message in both(client, tools=tools, tool_choice=alone):
                [call] = [block for block in message.content if block.type == "tool_use"]
                assert message.stop_reason == "tool_use" and call.name in names
                assert call.input in ({"city": "Rome"}, {"city": "Lima"})
        form = {"type": "json_schema", "schema": cities}
        message = ask(client, output_config={"format": form})
        assert json.loads(message.content[0].text) in ({"city": "Rome"}, {"city": "Lima"})
        bad = {"type": "json_schema", "schema": {"type": "nonsense"}}
        with pytest.raises(anthropic.BadRequestError, match=r"output_config\.format"):
            ask(client, output_config={"format": bad})
