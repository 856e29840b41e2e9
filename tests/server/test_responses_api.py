"""OpenAI's Responses through the official client: whole and streamed, with tools, thoughts and kept conversations."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from lfm2serve.errors import Lfm2Error
from lfm2serve.sampling import SamplingParams
from lfm2serve.server.dialects.fields import thinking_fields
from lfm2serve.server.dialects.store import ResponseNotFound, ResponseStore, Stored

from .conftest import Live, wait_for
from .fake import Step, says, says_after

WEATHER = {
    "type": "function",
    "name": "get_weather",
    "description": "The weather of a city",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    "strict": True,
}
CALL = '<|tool_call_start|>[get_weather(city="Rome")]<|tool_call_end|>'


def ask(live: Live, said: Any = "Hi", **fields: Any) -> Any:
    return live.client.responses.create(**{"model": "m", "input": said, **fields})


def stream(live: Live, said: Any = "Hi", **fields: Any) -> tuple[Any, list[Any]]:
    """The response that the client put together, and the events as they came."""
    with live.client.responses.stream(**{"model": "m", "input": said, **fields}) as events:
        seen = list(events)
        return events.get_final_response(), seen


def both(live: Live, said: Any = "Hi", **fields: Any) -> list[Any]:
    return [ask(live, said, **fields), stream(live, said, **fields)[0]]


def prompt(live: Live) -> str:
    """The latest prompt, as text."""
    return live.runtime.tokenizer.decode(live.engine.submitted[-1]["prompt"], skip_special_tokens=False)


def sse(live: Live, gate: threading.Event | None = None, **fields: Any) -> list[dict[str, Any]]:
    """The events; the gate is opened when something was said."""
    lines = []
    with live.http.stream("POST", "/v1/responses", json={"input": "Hi", "stream": True, **fields}) as answer:
        for line in answer.iter_lines():
            if gate is not None and ".delta" in line:
                gate.set()
            lines += [line] if line and not line.startswith(":") else []
    events = []
    for number, (name, data) in enumerate(zip(lines[::2], lines[1::2], strict=True)):
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}" and event["sequence_number"] == number
        events.append(event)
    return events


def test_a_response(fake: Live) -> None:
    fake.engine.script = says("Hello there.", fake.runtime.tokenizer)
    fake.engine.served["cached_tokens"] = 5
    tokens = len(fake.runtime.tokenizer.encode("Hello there.")) + 1
    for response in both(fake, instructions="Be brief.", metadata={"a": "b"}, temperature=0.5):
        assert (response.object, response.status, response.model) == ("response", "completed", "m")
        assert response.output_text == "Hello there." and len(response.output) == 1
        assert (response.instructions, response.metadata, response.temperature) == ("Be brief.", {"a": "b"}, 0.5)
        usage = response.usage
        count = len(fake.engine.submitted[-1]["prompt"])
        assert (usage.input_tokens, usage.output_tokens, usage.total_tokens) == (count, tokens, count + tokens)
        assert usage.input_tokens_details.cached_tokens == 5
    assert "<|im_start|>system\nBe brief.<|im_end|>" in prompt(fake)


def test_the_events_of_a_stream(fake: Live) -> None:
    gate = threading.Event()
    fake.engine.script = says_after("one", gate, " two", fake.runtime.tokenizer)
    events = sse(fake, gate)
    kinds = [event["type"].removeprefix("response.") for event in events]
    deltas = kinds.count("output_text.delta")
    assert deltas > 1 and kinds == [
        *("created", "in_progress", "output_item.added", "content_part.added"),
        *["output_text.delta"] * deltas,
        *("output_text.done", "content_part.done", "output_item.done", "completed"),
    ]
    assert "".join(event["delta"] for event in events if "delta" in event) == "one two"
    first, last = events[0]["response"], events[-1]["response"]
    assert (first["status"], first["output"], first["id"]) == ("in_progress", [], last["id"])
    assert last["output"] == [events[-2]["item"]]
    assert {event["item_id"] for event in events if "item_id" in event} == {last["output"][0]["id"]}


def test_a_reply_that_is_cut(fake: Live) -> None:
    fake.engine.script = says("one two three", fake.runtime.tokenizer)
    whole = ask(fake, max_output_tokens=2)
    last = sse(fake, max_output_tokens=2)[-1]
    assert last["type"] == "response.incomplete"
    for response in (whole.model_dump(), last["response"]):
        assert (response["status"], response["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
        assert response["output"][-1]["status"] == "incomplete"


def test_a_call_and_its_result(fake: Live) -> None:
    fake.engine.script = says(f"Let me see.{CALL}", fake.runtime.tokenizer)
    for response in both(fake, tools=[WEATHER]):
        said, call = response.output
        assert said.content[0].text == "Let me see."
        assert (call.type, call.name, json.loads(call.arguments)) == ("function_call", "get_weather", {"city": "Rome"})
        assert response.status == call.status == "completed" and response.tools[0].name == "get_weather"
        assert '"name": "get_weather"' in prompt(fake)
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    fake.engine.script = says("It is sunny.", fake.runtime.tokenizer)
    sent = [
        {"role": "user", "content": "Hi"},
        *(item.model_dump(exclude_none=True) for item in response.output),
        result,
    ]
    for item in sent:
        item.pop("parsed_arguments", None)
        for part in item["content"] if isinstance(item.get("content"), list) else []:
            part.pop("parsed", None)
    assert ask(fake, sent, tools=[WEATHER]).output_text == "It is sunny."
    stateless = fake.engine.submitted[-1]["prompt"]
    ask(fake, [result], tools=[WEATHER], previous_response_id=response.id)
    assert fake.engine.submitted[-1]["prompt"] == stateless
    shown = prompt(fake)
    assert "get_weather(city='Rome')" in shown.replace('"', "'")
    assert shown.index("Let me see.") < shown.index("<|im_start|>tool\nsunny<|im_end|>")


def test_the_events_of_a_call(fake: Live) -> None:
    fake.engine.script = says(f"So:{CALL}", fake.runtime.tokenizer)
    events = sse(fake, tools=[WEATHER])
    mine = [event for event in events if event.get("output_index") == 1]
    kinds = [event["type"].removeprefix("response.") for event in mine]
    deltas = kinds.count("function_call_arguments.delta")
    between = ["function_call_arguments.delta"] * deltas
    assert kinds == ["output_item.added", *between, "function_call_arguments.done", "output_item.done"]
    assert mine[0]["item"]["arguments"] == "" and mine[0]["item"]["status"] == "in_progress"
    assert "".join(event["delta"] for event in mine if "delta" in event) == mine[-1]["item"]["arguments"]
    assert events[-1]["response"]["output"][1] == mine[-1]["item"]


def test_several_calls_and_text_behind_them(fake: Live) -> None:
    block = "<|tool_call_start|>[get_weather(city='A'), get_weather(city='B')]<|tool_call_end|>"
    for per_event in (1, 100):
        fake.engine.script = says(f"{block} Done.", fake.runtime.tokenizer, per_event)
        for response in both(fake, tools=[WEATHER]):
            calls = [item for item in response.output if item.type == "function_call"]
            assert [json.loads(call.arguments)["city"] for call in calls] == ["A", "B"]
            assert len({call.call_id for call in calls}) == 2 and response.output_text.strip() == "Done."


def test_tools_with_free_text_and_in_namespaces(fake: Live) -> None:
    patch = {
        "type": "custom",
        "name": "patch",
        "format": {"type": "grammar", "syntax": "lark", "definition": "start: X"},
    }
    inner = {key: value for key, value in WEATHER.items() if key != "strict"}
    sky = {"type": "namespace", "name": "sky", "description": "Weather", "tools": [inner]}
    block = "<|tool_call_start|>[patch(input='a b'), sky.get_weather(city='Rome')]<|tool_call_end|>"
    fake.engine.script = says(block, fake.runtime.tokenizer)
    for response in both(fake, tools=[patch, sky]):
        free, spaced = response.output
        assert (free.type, free.name, free.input) == ("custom_tool_call", "patch", "a b")
        assert (spaced.type, spaced.namespace, spaced.name) == ("function_call", "sky", "get_weather")
    assert "start: X" in prompt(fake)
    kinds = [event["type"] for event in sse(fake, tools=[patch, sky]) if event.get("output_index") == 0]
    assert kinds[1:3] == ["response.custom_tool_call_input.delta", "response.custom_tool_call_input.done"]
    results = [
        {"type": "custom_tool_call_output", "call_id": free.call_id, "output": "ok"},
        {"type": "function_call_output", "call_id": spaced.call_id, "output": [{"type": "input_text", "text": "hot"}]},
    ]
    items = [free.model_dump(exclude_none=True), spaced.model_dump(exclude_none=True, exclude={"parsed_arguments"})]
    ask(fake, [{"role": "user", "content": "Hi"}, *items, *results], tools=[patch, sky])
    assert "patch(input='a b')" in prompt(fake).replace('"', "'")
    assert "sky.get_weather(city='Rome')" in prompt(fake).replace('"', "'")
    assert prompt(fake).index("tool\nok<|im_end|>") < prompt(fake).index("tool\nhot<|im_end|>")


@pytest.mark.parametrize(
    ("choice", "offered"),
    [
        ("auto", ["get_weather", "other"]),
        ("none", []),
        ({"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "other"}]}, ["other"]),
    ],
)
def test_tool_choice(fake: Live, choice: Any, offered: list[str]) -> None:
    other = {"type": "function", "name": "other", "parameters": None, "strict": None}
    response = ask(fake, tools=[WEATHER, other], tool_choice=choice)
    assert [name for name in ("get_weather", "other") if f'"name": "{name}"' in prompt(fake)] == offered
    echoed = response.tool_choice
    assert (echoed if isinstance(echoed, str) else echoed.model_dump()) == choice


def test_tools_that_nobody_runs_here_are_left_out(fake: Live) -> None:
    hosted = [{"type": "web_search", "external_web_access": False}, {"type": "image_generation"}]
    response = ask(fake, tools=[*hosted, WEATHER])
    assert [tool.type for tool in response.tools] == ["function"] and "web_search" not in prompt(fake)
    for refused in ({"type": "mcp", "server_label": "x"}, {"type": "file_search"}, {"type": "code_interpreter"}):
        answer = fake.post("/v1/responses", input="a", tools=[refused])
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "tools[0].type"


def test_thoughts(fake: Live) -> None:
    fake.engine.script = says("<think>plan it</think>Done.", fake.runtime.tokenizer)
    for response in both(fake, reasoning={"effort": "medium", "summary": "auto"}):
        thought, said = response.output
        assert (thought.type, thought.content[0].text, thought.summary) == ("reasoning", "plan it", [])
        assert said.content[0].text == response.output_text == "Done."
        assert 0 < response.usage.output_tokens_details.reasoning_tokens < response.usage.output_tokens
    events = [event for event in sse(fake) if event.get("output_index") == 0]
    kinds = [event["type"].removeprefix("response.") for event in events]
    between = ["reasoning_text.delta"] * kinds.count("reasoning_text.delta")
    assert between and kinds == [
        *("output_item.added", "content_part.added", *between),
        *("reasoning_text.done", "content_part.done", "output_item.done"),
    ]
    assert "".join(event["delta"] for event in events if "delta" in event) == "plan it"


@pytest.mark.parametrize(
    ("known", "asked", "wanted"),
    [
        ((), {"effort": "high", "on": True}, {}),
        (("enable_thinking",), {}, {}),
        (("enable_thinking",), {"on": True}, {"enable_thinking": True}),
        (("enable_thinking",), {"effort": "none"}, {"reasoning_effort": "none"}),
        (("enable_thinking",), {"effort": "high", "on": False}, {"enable_thinking": False}),
        (("reasoning_effort",), {"effort": "low", "on": True}, {"reasoning_effort": "low"}),
        (("reasoning_effort",), {"on": False}, {}),
    ],
)
def test_how_much_to_think_is_asked_of_templates_that_know(known: tuple[str, ...], asked: Any, wanted: Any) -> None:
    assert thinking_fields(frozenset(known), **asked) == wanted


def test_the_next_turn_is_what_the_engine_was_told(fake: Live) -> None:
    fake.engine.script = says("<think>plan it</think>Done.", fake.runtime.tokenizer)
    first = ask(fake)
    _, told = fake.engine.told[0]
    ask(fake, "And?", previous_response_id=first.id)
    kept = fake.engine.submitted[-1]["prompt"]
    assert told and kept[: len(told)] == told
    items = [item.model_dump(exclude_none=True) for item in first.output]
    ask(fake, [{"role": "user", "content": "Hi"}, *items, {"role": "user", "content": "And?"}], store=False)
    assert fake.engine.submitted[-1]["prompt"] == kept


def test_a_conversation_becomes_the_chat_that_it_is(fake: Live) -> None:
    chat = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
    ]
    fake.client.chat.completions.create(model="m", messages=chat)  # type: ignore[arg-type]
    said = {"type": "output_text", "text": "b", "annotations": []}
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
        {"type": "message", "id": "msg_1", "status": "completed", "role": "assistant", "content": [said]},
        {"role": "user", "content": "c"},
    ]
    ask(fake, items, instructions="Be brief.")
    ask(fake, [{"role": "developer", "content": "Be brief."}, *items])
    first, second, third = fake.engine.submitted
    assert first["prompt"] == second["prompt"] == third["prompt"] and first["marks"] == second["marks"]


def test_kept_responses(fake: Live) -> None:
    fake.engine.script = says("One.", fake.runtime.tokenizer)
    for first in both(fake, instructions="Be brief."):
        assert fake.client.responses.retrieve(first.id).model_dump() == ask_again(fake, first.id)
        second = ask(fake, "More", previous_response_id=first.id)
        assert second.previous_response_id == first.id and "Be brief." not in prompt(fake)
        branch = ask(fake, "Less", previous_response_id=first.id)
        third = ask(fake, "End", previous_response_id=second.id)
        assert prompt(fake).count("One.") == 2 and "Less" not in prompt(fake)
        fake.client.responses.delete(first.id)
        with pytest.raises(openai.NotFoundError):
            fake.client.responses.retrieve(first.id)
        with pytest.raises(openai.BadRequestError) as caught:
            ask(fake, "x", previous_response_id=first.id)
        assert caught.value.code == "previous_response_not_found"
        for kept in (second, branch, third):
            assert fake.client.responses.retrieve(kept.id).output_text == "One."
    assert fake.http.delete("/v1/responses/nowhere").status_code == 404
    refused = fake.http.get(f"/v1/responses/{third.id}?stream=true")
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "stream")


def ask_again(fake: Live, name: str) -> Any:
    """The kept response as the client reads it from plain JSON."""
    body = fake.http.get(f"/v1/responses/{name}").json()
    return type(fake.client.responses.retrieve(name)).model_validate(body).model_dump()


def test_what_isnt_stored_or_failed_isnt_kept(fake: Live) -> None:
    response = ask(fake, store=False)
    assert fake.http.get(f"/v1/responses/{response.id}").status_code == 404
    fake.engine.script = lambda tokens, params, choice: iter([[300], Lfm2Error("it broke")])
    name = sse(fake)[-1]["response"]["id"]
    assert fake.http.get(f"/v1/responses/{name}").status_code == 404


def test_the_store_is_bounded() -> None:
    def stored(name: str, size: int = 0) -> Stored:
        return Stored.after(None, {"id": name, "text": "x" * size}, [{"role": "user", "content": "Hi"}])

    store = ResponseStore(max_responses=3, max_bytes=1000)
    for name in "abc":
        store.put(stored(name))
    store.get("a")  # the newest again
    store.put(stored("d"))
    with pytest.raises(ResponseNotFound, match="'b'"):
        store.get("b")
    assert [store.get(name).body["id"] for name in "acd"] == ["a", "c", "d"]
    store.put(stored("e", 850))
    assert len(store) < 3 and store.bytes <= 1000 and store.get("e")
    store.put(stored("f", 2000))
    assert store.get("e"), "what is larger than the whole store isn't kept, and pushes nothing out"
    for name in "de":
        store.delete(name)
    assert (len(store), store.bytes) == (0, 0)


def test_a_conversation_counts_in_full_with_each_response() -> None:
    first = Stored.after(None, {"id": "a"}, [{"content": "x" * 100}])
    second = Stored.after(first, {"id": "b"}, [{"content": "y" * 10}])
    assert [message["content"][0] for message in second.messages] == ["x", "y"] and len(first.messages) == 1
    assert 100 < first.size < second.size - 10


def test_a_failure_within_a_stream_is_its_last_event(fake: Live) -> None:
    said = fake.runtime.tokenizer.encode("begin")

    def script(tokens: list[int], params: SamplingParams, choice: int) -> Iterator[Step]:
        yield said
        yield Lfm2Error("it broke")

    fake.engine.script = script
    last = sse(fake)[-1]
    assert (last["type"], last["response"]["status"]) == ("response.failed", "failed")
    assert last["response"]["error"] == {"code": "server_error", "message": "it broke"}
    assert last["response"]["output"][0]["content"][0]["text"] == "begin"


def test_a_client_that_leaves_cancels_its_response(fake: Live) -> None:
    fake.engine.script = says("word " * 50, fake.runtime.tokenizer, pause=0.05)
    with fake.client.responses.stream(model="m", input="Hi") as events:
        next(event for event in events if event.type == "response.output_text.delta")
    wait_for(lambda: fake.engine.cancels == [1])


def test_an_agents_request(fake: Live) -> None:
    """What Codex sends."""
    fake.engine.script = says("Fine.", fake.runtime.tokenizer)
    body = {
        "model": "gpt-x",
        "instructions": "You are an agent.",
        "input": [
            {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "<permissions/>"}]},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "<environment/>"}]},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
            {"type": "reasoning", "summary": [], "content": None, "encrypted_content": "abc"},
        ],
        "tools": [
            {**WEATHER, "strict": False},
            {"type": "web_search", "external_web_access": False},
            {"type": "namespace", "name": "mcp__x", "description": "d", "tools": [{**WEATHER, "strict": False}]},
            {"type": "custom", "name": "apply_patch", "description": "d", "format": {"type": "text"}},
        ],
        "tool_choice": "auto",
        "parallel_tool_calls": False,
        "reasoning": {"effort": "medium", "summary": "auto"},
        "store": False,
        "stream": True,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "k",
        "client_metadata": {"x": "y"},
        "text": {"verbosity": "low"},
    }
    answer = fake.http.post("/v1/responses", json=body)
    assert answer.status_code == 200, answer.text
    assert answer.text.rstrip().splitlines()[-2] == "event: response.completed"


def test_sampling_fields_reach_the_engine(fake: Live) -> None:
    asked = {"temperature": 0.5, "top_p": 0.9, "seed": 3, "min_p": 0.1}
    answer = fake.post("/v1/responses", input="Hi", max_output_tokens=7, prompt_cache=False, **asked)
    assert answer.status_code == 200 and answer.json()["lfm2serve"]["seed"] == 3
    submitted = fake.engine.submitted[-1]
    assert {name: getattr(submitted["params"], name) for name in asked} == asked
    assert submitted["params"].max_tokens == 7 and submitted["prompt_cache"] is False


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "input"),
        ({"input": []}, "input"),
        ({"input": 3}, "input"),
        ({"input": [{"type": "zap"}]}, "input[0].type"),
        ({"input": [{"id": "msg_1"}]}, "input[0].type"),
        ({"input": [{"role": "robot", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input[0].content[0].text"),
        (
            {"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": "[1]"}]},
            "input[0].arguments",
        ),
        ({"input": "a", "tools": [{"type": "function"}]}, "tools[0].name"),
        ({"input": "a", "tools": [WEATHER, WEATHER]}, "tools[1].name"),
        ({"input": "a", "tool_choice": "maybe"}, "tool_choice.type"),
        ({"input": "a", "tool_choice": "required"}, "tool_choice"),
        ({"input": "a", "tool_choice": {"type": "function", "name": "f"}}, "tool_choice.name"),
        ({"input": "a", "max_output_tokens": 0}, "max_output_tokens"),
        ({"input": "a", "text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
        ({"input": "a", "include": ["message.output_text.logprobs"]}, "include[0]"),
        ({"input": "a", "top_logprobs": 2}, "top_logprobs"),
        ({"input": "a", "background": True}, "background"),
        ({"input": "a", "conversation": "conv_1"}, "conversation"),
        ({"input": "a", "prompt": {"id": "p"}}, "prompt"),
        ({"input": "a", "temperature": 999}, "temperature"),
        ({"input": "a", "bogus": 1}, "bogus"),
    ],
)
def test_bad_requests_name_the_field(fake: Live, fields: dict[str, Any], param: str) -> None:
    answer = fake.post("/v1/responses", **fields)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert fake.engine.submitted == []


def test_a_real_engine_resumes_a_conversation(real: Live) -> None:
    first = ask(real, "Say it again. " * 12, max_output_tokens=8)
    assert real.engine.drain(30)
    second = ask(real, "More", max_output_tokens=8, previous_response_id=first.id)
    assert second.usage.input_tokens_details.cached_tokens > first.usage.input_tokens - 8


def test_forced_calls_and_formats(real: Live) -> None:
    city = {"properties": {"city": {"enum": ["Rome", "Lima"]}}, "required": ["city"], "additionalProperties": False}
    cities = {"type": "object", **city}
    tools = [{"type": "function", "name": name, "parameters": cities} for name in ("get_weather", "get_time")]
    named = {"type": "function", "name": "get_time"}
    for choice, names in (("required", {"get_weather", "get_time"}), (named, {"get_time"})):
        for response in both(real, tools=tools, tool_choice=choice, parallel_tool_calls=False):
            [call] = [item for item in response.output if item.type == "function_call"]
            assert call.name in names and json.loads(call.arguments) in ({"city": "Rome"}, {"city": "Lima"})
    form = {"type": "json_schema", "name": "place", "schema": cities, "strict": True}
    response = ask(real, text={"format": form})
    assert json.loads(response.output_text) in ({"city": "Rome"}, {"city": "Lima"})
    assert response.text.format.type == "json_schema"
    with pytest.raises(openai.BadRequestError) as caught:
        ask(real, text={"format": {**form, "schema": {"type": "nonsense"}}})
    assert caught.value.param == "text.format"
