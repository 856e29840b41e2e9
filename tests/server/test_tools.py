"""Tool calls and thoughts over HTTP, through OpenAI's client: of a scripted model, and of one that can call tools."""

from __future__ import annotations

import json
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lfm2serve.chat.template import ChatTemplate
from lfm2serve.options import EngineOptions
from lfm2serve.runtime import load_runtime

from .conftest import Live, serving
from .fake import says

TS, TE = "<|tool_call_start|>", "<|tool_call_end|>"
USER = [{"role": "user", "content": "Hi"}]
DTEMPLATE = Path(__file__).parents[1] / "chat" / "templates" / "d.jinja"


def tool(name: str, **properties: str) -> dict[str, Any]:
    parameters = {
        "type": "object",
        "properties": {key: {"type": kind} for key, kind in properties.items()},
        "required": list(properties),
    }
    return {"type": "function", "function": {"name": name, "description": name, "parameters": parameters}}


WEATHER, MESSAGE = tool("get_weather", city="string"), tool("send_message", to="string", text="string")


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def told(live: Live, **fields: Any) -> tuple[dict[str, Any], str | None]:
    """What one reply is, whole and streamed, which must be the same but for the calls' ids; and why it ended."""
    body = {"tools": [WEATHER, MESSAGE], "max_tokens": 200, "messages": USER, **fields}
    whole = live.chat(**body).choices[0]
    message = whole.message.model_dump(exclude_none=True, exclude={"role", "refusal"})
    calls = message.get("tool_calls", [])
    streamed: dict[str, Any] = {}
    ends = []
    for chunk in live.chat(stream=True, **body):
        [choice] = chunk.choices
        delta = choice.delta.model_dump(exclude_none=True, exclude={"role"})
        ends += [choice.finish_reason] if choice.finish_reason else []
        for name in ("content", "reasoning_content"):
            if name in delta:
                streamed[name] = streamed.get(name, "") + delta[name]
        for piece in delta.get("tool_calls", []):
            made = streamed.setdefault("tool_calls", [])
            if piece["index"] == len(made):
                assert piece["type"] == "function" and piece["id"] and piece["function"]["name"]
                made.append({"type": "function", "id": piece["id"], "function": {**piece["function"]}})
            else:
                made[piece["index"]]["function"]["arguments"] += piece["function"]["arguments"]
    ids = [call.pop("id") for call in [*calls, *streamed.get("tool_calls", [])]]
    assert len(set(ids)) == len(ids) and all(call_id.startswith("call_") for call_id in ids)
    if not streamed.get("content") and "content" not in message:
        streamed.pop("content", None)
    assert streamed == message
    assert ends == [whole.finish_reason]
    return message, whole.finish_reason


def call(name: str, **arguments: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}


@pytest.mark.parametrize("per_event", [1, 4, 1000])
@pytest.mark.parametrize(
    ("said", "message", "finish"),
    [
        (f'{TS}[get_weather(city="Tokyo")]{TE}', {"tool_calls": [call("get_weather", city="Tokyo")]}, "tool_calls"),
        (
            f"Let me check. {TS}[f(x=1)]{TE} Done.",
            {"content": "Let me check.\nDone.", "tool_calls": [call("f", x=1)]},
            "tool_calls",
        ),
        (
            f"{TS}[f(), g(a=[1, null])]{TE} text {TS}[h()]{TE}",
            {"content": "text", "tool_calls": [call("f"), call("g", a=[1, None]), call("h")]},
            "tool_calls",
        ),
        (
            f"<think>maybe {TS}[f()]{TE}?</think>No.",
            {"content": "No.", "reasoning_content": f"maybe {TS}[f()]{TE}?"},
            "stop",
        ),
        (f"<think>a</think>{TS}[f()]{TE}", {"reasoning_content": "a", "tool_calls": [call("f")]}, "tool_calls"),
        (f"{TS}foo bar{TE}", {"content": f"{TS}foo bar{TE}"}, "stop"),
        (f"{TS}[]{TE}", {"content": ""}, "stop"),
        ("<think>no end", {"content": "", "reasoning_content": "no end"}, "stop"),
        ("Plain. ", {"content": "Plain. "}, "stop"),
    ],
)  # fmt: skip
def test_what_the_model_says_is_taken_apart(
    fake: Live, said: str, message: dict[str, Any], finish: str, per_event: int
) -> None:
    fake.engine.script = says(said, fake.runtime.tokenizer, per_event)
    assert told(fake) == (message, finish)


def test_a_cut_reply_ends_with_length(fake: Live) -> None:
    said = f"{TS}[f(x=1)]{TE}"
    fake.engine.script = says(said, fake.runtime.tokenizer)
    size = len(fake.runtime.tokenizer.encode(said))
    assert told(fake, max_tokens=size) == ({"tool_calls": [call("f", x=1)]}, "length")
    message, finish = told(fake, max_tokens=size - 4)
    assert "tool_calls" not in message and message["content"].startswith(f"{TS}[f(") and finish == "length"


def test_tool_choice_none_leaves_the_tools_out(fake: Live) -> None:
    fake.engine.script = says(f"{TS}[f(x=1)]{TE}", fake.runtime.tokenizer)
    message, finish = told(fake, tool_choice="none")
    assert message == {"content": "[f(x=1)]"} and finish == "stop"
    plain = fake.chat(max_tokens=2).usage.prompt_tokens
    assert fake.chat(tools=[WEATHER], tool_choice="none", max_tokens=2).usage.prompt_tokens == plain
    assert fake.chat(tools=[WEATHER], max_tokens=2).usage.prompt_tokens > plain
    assert fake.chat(tool_choice="none", max_tokens=2).usage.prompt_tokens == plain


def test_one_call_where_parallel_ones_are_unwanted(fake: Live) -> None:
    fake.engine.script = says(f"{TS}[f(), g()]{TE} {TS}[h()]{TE}", fake.runtime.tokenizer)
    assert told(fake, parallel_tool_calls=False) == ({"tool_calls": [call("f")]}, "tool_calls")


def test_thoughts_can_be_hidden(fake: Live) -> None:
    fake.engine.script = says(f"<think>a {TS}[f()]{TE}</think>b", fake.runtime.tokenizer)
    message, _ = told(fake, extra_body={"include_reasoning": False})
    assert message == {"content": "b"}
    assert fake.chat(max_tokens=200, extra_body={"include_reasoning": False}).usage.completion_tokens > 10


def test_positional_arguments_take_the_schemas_names(fake: Live) -> None:
    fake.engine.script = says(f'{TS}[send_message("Ann", text="Hi"), other("x")]{TE}', fake.runtime.tokenizer)
    assert told(fake)[0] == {"tool_calls": [call("send_message", to="Ann", text="Hi")]}


def test_a_flat_tool_is_one_too(fake: Live) -> None:
    fake.engine.script = says(f'{TS}[f("x")]{TE}', fake.runtime.tokenizer)
    flat = {"name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "string"}}}}
    assert told(fake, tools=[flat])[0] == {"tool_calls": [call("f", a="x")]}


def test_logprobs_and_token_ids_stay_those_of_the_tokens(fake: Live) -> None:
    said = f"<think>a</think>b {TS}[f()]{TE}"
    fake.engine.script = says(said, fake.runtime.tokenizer)
    fields = {"tools": [WEATHER], "logprobs": True, "max_tokens": 200, "extra_body": {"return_token_ids": True}}
    ids = [*fake.runtime.tokenizer.encode(said), fake.engine.eos]
    whole = fake.chat(**fields).choices[0]
    assert whole.token_ids == ids and len(whole.logprobs.content) == len(ids)
    chunks = [chunk.choices[0] for chunk in fake.chat(stream=True, **fields)]
    assert [token for chunk in chunks for token in getattr(chunk, "token_ids", None) or []] == ids
    assert sum(len(chunk.logprobs.content) for chunk in chunks if chunk.logprobs) == len(ids)


def test_several_replies_number_their_own_calls(fake: Live) -> None:
    fake.engine.script = says(f"{TS}[f()]{TE}", fake.runtime.tokenizer)
    whole = fake.chat(tools=[WEATHER], n=2, max_tokens=200).choices
    assert [choice.message.tool_calls[0].function.name for choice in whole] == ["f", "f"]
    chunks = [c.choices[0] for c in fake.chat(tools=[WEATHER], n=2, max_tokens=200, stream=True)]
    found = [(chunk.index, call.index) for chunk in chunks for call in chunk.delta.tool_calls or []]
    assert sorted(found) == [(0, 0), (1, 0)]


def test_the_engine_is_told_what_comes_back(fake: Live) -> None:
    """The client's next request begins with what the engine was told of this one."""
    runtime = fake.runtime
    for said in (f'<think>a</think>{TS}[f(x="é")]{TE}', f"A {TS}[f()]{TE} B", f"{TS}no{TE}"):
        runtime.engine.told.clear()
        fake.engine.script = says(said, runtime.tokenizer)
        reply = fake.chat(tools=[WEATHER], max_tokens=200).choices[0].message
        sent = [*USER, reply.model_dump(exclude_none=True)]
        [(_, ids)] = runtime.engine.told
        assert ids == runtime.encode_chat(sent, tools=[WEATHER], add_generation_prompt=False)
        answer = {"role": "tool", "tool_call_id": "c", "content": "R"}
        asked = fake.http.post("/tokenize", json={"messages": [*sent, answer], "tools": [WEATHER]}).json()["tokens"]
        assert asked[: len(ids)] == ids


@pytest.mark.parametrize(
    ("param", "fields"),
    [
        ("tools[0].type", {"tools": [{"type": "web_search"}]}),
        ("tools[1].function", {"tools": [WEATHER, {"type": "function"}]}),
        ("tools[0].function.name", {"tools": [{"type": "function", "function": {"name": ""}}]}),
        ("tools[0].function.parameters", {"tools": [named("f") | {"function": {"name": "f", "parameters": [1]}}]}),
        ("tools[1].function.name", {"tools": [WEATHER, WEATHER]}),
        ("tools[0].parameters", {"tools": [{"name": "f", "parameters": [1]}]}),
        ("tools[1].name", {"tools": [WEATHER, {"name": "get_weather"}]}),
        ("tools[0].type", {"tools": [{"name": "f", "type": "custom"}]}),
        ("tools[0].function.strict", {"tools": [named("f") | {"function": {"name": "f", "strict": "yes"}}]}),
        ("tool_choice", {"tool_choice": "required"}),
        ("tool_choice", {"tool_choice": "required", "tools": []}),
        ("tool_choice", {"tool_choice": named("f")}),
        ("tool_choice", {"tools": [WEATHER], "tool_choice": {"type": "allowed_tools"}}),
        ("tool_choice.function.name", {"tools": [WEATHER], "tool_choice": named("f")}),
        ("tool_choice.function.name", {"tools": [WEATHER], "tool_choice": {"type": "function"}}),
        ("min_tokens", {"tools": [WEATHER], "tool_choice": "required", "min_tokens": 2}),
        ("ignore_eos", {"tools": [WEATHER], "tool_choice": "required", "ignore_eos": True}),
        ("reasoning_effort", {"reasoning_effort": "low"}),
        ("enable_thinking", {"enable_thinking": False}),
    ],
)
def test_bad_requests_name_the_place(fake: Live, param: str, fields: dict[str, Any]) -> None:
    answer = fake.post("/v1/chat/completions", messages=USER, **fields)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == param and param.rsplit(".")[-1] in error["message"]


@pytest.fixture
def switched(fake: Live) -> Iterator[Live]:
    """A template that asks how much to think, and opens a thought unless it's told not to."""
    source = DTEMPLATE.read_text() + (
        "{%- if add_generation_prompt -%}"
        "{{- '<think></think>' if enable_thinking is false else '<think>\\n' -}}"
        "{%- endif -%}"
    )
    before, fake.runtime.template = fake.runtime.template, ChatTemplate(source, fake.runtime.tokenizer)
    yield fake
    fake.runtime.template = before


def test_how_much_to_think(switched: Live) -> None:
    switched.engine.script = says(f"plan {TS}[g()]{TE}</think>\n\nHi {TS}[f()]{TE}", switched.runtime.tokenizer)
    thought = {"content": "Hi", "reasoning_content": f"plan {TS}[g()]{TE}", "tool_calls": [call("f")]}
    for fields in ({}, {"reasoning_effort": "high"}, {"extra_body": {"enable_thinking": True}}):
        assert told(switched, **fields) == (thought, "tool_calls")
    switched.engine.script = says("</think>Hi", switched.runtime.tokenizer)
    for fields in (
        {"reasoning_effort": "none"},
        {"extra_body": {"enable_thinking": False}},
        {"extra_body": {"chat_template_kwargs": {"enable_thinking": False}}},
    ):
        assert told(switched, **fields)[0] == {"content": "</think>Hi"}
    body = {"enable_thinking": True, "chat_template_kwargs": {"enable_thinking": False}}
    assert switched.post("/v1/chat/completions", messages=USER, **body).status_code == 400


# ---- a model that can call tools ----


@pytest.fixture(scope="module")
def demo() -> Iterator[Live]:
    options = EngineOptions(device="cpu", context=1024, kv_pages=16, prompt_cache_gib=0.125)
    runtime = load_runtime("demo", options, offline=True)
    try:
        with serving(runtime) as live:
            yield live
            assert live.settled()
    finally:
        runtime.close()


QUESTION = [{"role": "user", "content": "What is the weather in Lima?"}]


def test_a_tool_is_called_and_its_result_used(demo: Live) -> None:
    fields = {"tools": [WEATHER, MESSAGE], "max_tokens": 60}
    message, finish = told(demo, messages=QUESTION, **fields)
    assert (message, finish) == ({"tool_calls": [call("get_weather", city="Lima")]}, "tool_calls")
    reply = demo.chat(messages=QUESTION, **fields).choices[0].message
    result = {
        "role": "tool",
        "tool_call_id": reply.tool_calls[0].id,
        "content": '{"temperature": 20, "condition": "sunny"}',
    }
    assert demo.engine.drain(60)
    answer = demo.chat(messages=[*QUESTION, reply, result], **fields)
    assert "sunny" in answer.choices[0].message.content and "20" in answer.choices[0].message.content
    cached = answer.usage.prompt_tokens_details.cached_tokens
    assert cached >= len(demo.runtime.encode_chat([*QUESTION], tools=fields["tools"]))  # the call's rows, too
    as_object = json.loads(reply.model_dump_json(exclude_none=True))
    as_object["tool_calls"][0]["function"]["arguments"] = {"city": "Lima"}
    again = demo.chat(messages=[*QUESTION, as_object, result], **fields)
    assert again.choices[0].message.content == answer.choices[0].message.content
    assert again.usage.prompt_tokens == answer.usage.prompt_tokens


@pytest.mark.parametrize("fields", [{"temperature": 0}, {"temperature": 1.5, "seed": 3}])
def test_a_required_tool_is_called(demo: Live, fields: dict[str, Any]) -> None:
    """A question that needs none, and a model that wouldn't: the grammar makes it."""
    hello = [{"role": "user", "content": "Hello, who are you?"}]
    number, place = tool("set_number", n="integer", on="boolean"), tool("get_weather", city="string")
    number["function"]["parameters"]["properties"]["n"] |= {"minimum": 0, "maximum": 999}
    place["function"]["parameters"]["properties"]["city"] |= {"maxLength": 12}
    assert "tool_calls" not in told(demo, messages=hello, temperature=0)[0]
    for tools, choice, names in (
        ([number, place], "required", {"set_number", "get_weather"}),
        ([place, number], named("set_number"), {"set_number"}),
    ):
        body = {"messages": hello, "tools": tools, "tool_choice": choice, "parallel_tool_calls": False, **fields}
        message, finish = told(demo, **body)
        [made] = message["tool_calls"]
        arguments = json.loads(made["function"]["arguments"])
        assert finish == "tool_calls" and made["function"]["name"] in names and "content" not in message
        if made["function"]["name"] == "set_number":
            assert 0 <= arguments["n"] < 1000 and type(arguments["on"]) is bool and len(arguments) == 2
        else:
            assert len(arguments["city"]) <= 12
        plain = demo.chat(**body, max_tokens=200, extra_body={"draft": False, "prompt_cache": False}).choices[0]
        assert plain.message.tool_calls[0].function.arguments == made["function"]["arguments"]


def test_a_cut_call_that_was_enforced_is_given_as_far_as_it_came(demo: Live) -> None:
    long = tool("send_message", to="string", text="string")
    long["function"]["parameters"]["properties"]["to"] |= {"maxLength": 10}
    long["function"]["parameters"]["properties"]["text"] |= {"minLength": 40, "maxLength": 60}
    body = {"messages": QUESTION, "tools": [long], "tool_choice": "required", "parallel_tool_calls": False}
    pieces = []
    for chunk in demo.chat(**body, stream=True, max_tokens=200):
        pieces += [call.function.arguments for call in chunk.choices[0].delta.tool_calls or []]
    assert json.loads("".join(pieces)).keys() == {"to", "text"}
    message, finish = told(demo, **body, max_tokens=20)
    [made] = message["tool_calls"]
    assert finish == "length" and "".join(pieces).startswith(made["function"]["arguments"])
    with pytest.raises(ValueError):
        json.loads(made["function"]["arguments"])
    message, finish = told(demo, **body, max_tokens=200, stop=['",'])
    assert finish == "stop" and message["tool_calls"][0]["function"]["arguments"].startswith('{"to": "')


def test_strict_tools_get_what_their_schemas_want(demo: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls are free to be made or not; the arguments of one that is made aren't."""
    strict = tool("get_weather", city="string")
    strict["function"]["strict"] = True
    strict["function"]["parameters"]["properties"]["city"] = {"enum": ["Rome", "Oslo"]}
    hello = [{"role": "user", "content": "What is the capital of Peru?"}]
    for fields in ({}, {"extra_body": {"draft": False}}):
        message, finish = told(demo, messages=QUESTION, tools=[strict], **fields)
        assert message["tool_calls"] in ([call("get_weather", city="Rome")], [call("get_weather", city="Oslo")])
        assert finish == "tool_calls"
        assert told(demo, messages=hello, tools=[strict], **fields) == told(demo, messages=hello, tools=[strict])
    bad = {**strict, "function": {**strict["function"], "parameters": {"properties": {"x": {"type": "foo"}}}}}
    error = demo.post("/v1/chat/completions", messages=hello, tools=[bad]).json()["error"]
    assert error["param"] == "tools" and "Invalid type: foo" in error["message"]
    monkeypatch.setitem(sys.modules, "llguidance", None)
    assert told(demo, messages=QUESTION, tools=[strict])[0] == {"tool_calls": [call("get_weather", city="Lima")]}


def test_the_example(demo: Live, capsys: pytest.CaptureFixture[str]) -> None:
    main: Any = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "tool_client.py"))["main"]
    main(demo.url + "/v1")
    made, answer, as_json = capsys.readouterr().out.splitlines()
    assert made == 'get_weather({"city": "Lima"})' and "sunny" in answer and as_json == "{'answer': 'Lima'}"
