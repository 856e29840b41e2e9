"""Messages of OpenAI clients, made into what every template can take."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from lfm2serve.chat.messages import normalise
from lfm2serve.errors import InvalidRequest


def one(**message: Any) -> dict[str, Any]:
    return normalise([message])[0]


def assistant(**fields: Any) -> dict[str, Any]:
    return one(role="assistant", **fields)


def call(arguments: Any = None, **more: Any) -> dict[str, Any]:
    return {"id": "c1", "type": "function", "function": {"name": "f", "arguments": arguments}, **more}


@pytest.mark.parametrize("role", ["system", "developer", "user", "assistant", "tool"])
def test_null_and_missing_content_are_empty(role: str) -> None:
    assert one(role=role, content=None) == one(role=role) == one(role=role, content="") == {"role": role, "content": ""}


def test_null_and_empty_fields_are_dropped() -> None:
    sent = {"tool_calls": [], "refusal": None, "audio": None, "function_call": None, "annotations": [{"url": "x"}]}
    assert assistant(content="T", thinking=None, reasoning_content="", **sent) == {"role": "assistant", "content": "T"}
    assert assistant(content="T", tool_calls=None) == {"role": "assistant", "content": "T"}


@pytest.mark.parametrize("name", ["thinking", "reasoning_content", "reasoning"])
def test_a_thought_has_one_name(name: str) -> None:
    assert assistant(content="b", **{name: "a"}) == {"role": "assistant", "content": "b", "thinking": "a"}


def test_the_same_thought_twice_is_fine_and_two_are_not() -> None:
    assert assistant(content="b", thinking="a", reasoning_content="a")["thinking"] == "a"
    with pytest.raises(InvalidRequest, match=r"messages\[0\]\.reasoning_content differs from thinking"):
        assistant(content="b", thinking="a", reasoning_content="x")


def test_text_parts_are_joined() -> None:
    parts = [{"type": "text", "text": "look "}, {"type": "text", "text": "here", "cache_control": {"type": "x"}}]
    assert one(role="user", content=parts)["content"] == "look here"
    assert one(role="tool", content=parts)["content"] == "look here"
    assert one(role="user", content=[])["content"] == ""


@pytest.mark.parametrize(
    ("content", "text"),
    [({"city": "Zürich"}, '{"city": "Zürich"}'), ([1, {"a": None}], '[1, {"a": null}]'), (42, "42"), (True, "true")],
)
def test_tool_results_become_json(content: Any, text: str) -> None:
    assert one(role="tool", content=content, tool_call_id="c1") == {
        "role": "tool",
        "content": text,
        "tool_call_id": "c1",
    }


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ('{"city": "Rome", "n": 1.0}', {"city": "Rome", "n": 1.0}),
        ({"city": "Rome"}, {"city": "Rome"}),
        ('{"b": 1, "a": {"z": null}}', {"b": 1, "a": {"z": None}}),
        ("{}", {}),
        ("", {}),
        (None, {}),
    ],
)
def test_arguments_become_an_object_in_their_order(arguments: Any, expected: dict[str, Any]) -> None:
    [made] = assistant(tool_calls=[call(arguments)])["tool_calls"]
    assert made == {"id": "c1", "type": "function", "function": {"name": "f", "arguments": expected}}
    assert list(made["function"]["arguments"]) == list(expected)


def test_calls_without_a_wrapper_get_one() -> None:
    [made] = assistant(tool_calls=[{"name": "f", "arguments": {"a": 1}}])["tool_calls"]
    assert made == {"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}


def test_the_input_is_never_changed() -> None:
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "a"}]},
        {"role": "assistant", "content": None, "tool_calls": [call({"o": {"l": [1]}})], "reasoning_content": "r"},
        {"role": "tool", "content": {"x": [1]}},
    ]
    before = copy.deepcopy(messages)
    made = normalise(messages)
    made[1]["tool_calls"][0]["function"]["arguments"]["o"]["l"].append(2)
    assert messages == before


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ("hi", ""),
        (None, ""),
        ({"content": "x"}, ".role"),
        ({"role": "function", "content": "x"}, ".role"),
        ({"role": ["user"], "content": "x"}, ".role"),
        ({"role": "user", "content": 3}, ".content"),
        ({"role": "user", "content": {"type": "text", "text": "x"}}, ".content"),
        ({"role": "user", "content": b"x"}, ".content"),
        ({"role": "user", "content": ["x"]}, ".content[0]"),
        ({"role": "user", "content": [{"text": "x"}]}, ".content[0]"),
        ({"role": "user", "content": [{"type": "text", "text": None}]}, ".content[0].text"),
        ({"role": "user", "content": [{"type": "text", "text": "x"}, {"type": "image_url"}]}, ".content[1].type"),
        ({"role": "tool", "content": [{"type": "image_url", "image_url": {}}]}, ".content[0].type"),
        ({"role": "user", "content": [{"type": "text", "text": "x", "bold": True}]}, ".content[0].bold"),
        ({"role": "user", "content": "x", "tool_calls": [call()]}, ".tool_calls"),
        ({"role": "user", "content": "x", "thinking": "y"}, ".thinking"),
        ({"role": "user", "content": "x", "name": 3}, ".name"),
        ({"role": "user", "content": "x", "weight": 3}, ".weight"),
        ({"role": "assistant", "refusal": "no"}, ".refusal"),
        ({"role": "assistant", "thinking": ["x"]}, ".thinking"),
        ({"role": "assistant", "tool_calls": "f()"}, ".tool_calls"),
        ({"role": "assistant", "tool_calls": {"name": "f"}}, ".tool_calls"),
        ({"role": "assistant", "tool_calls": ["f()"]}, ".tool_calls[0]"),
        ({"role": "assistant", "tool_calls": [call(type="custom")]}, ".tool_calls[0].type"),
        ({"role": "assistant", "tool_calls": [call(function="f")]}, ".tool_calls[0].function"),
        ({"role": "assistant", "tool_calls": [call(function={})]}, ".tool_calls[0].function.name"),
        ({"role": "assistant", "tool_calls": [call(function={"name": ""})]}, ".tool_calls[0].function.name"),
        ({"role": "assistant", "tool_calls": [call(), call("{")]}, ".tool_calls[1].function.arguments"),
        ({"role": "assistant", "tool_calls": [call("[1]")]}, ".tool_calls[0].function.arguments"),
        ({"role": "assistant", "tool_calls": [call("3")]}, ".tool_calls[0].function.arguments"),
        ({"role": "assistant", "tool_calls": [call([1])]}, ".tool_calls[0].function.arguments"),
        ({"role": "assistant", "tool_calls": [call('{"a": NaN}')]}, ".tool_calls[0].function.arguments"),
        ({"role": "assistant", "tool_calls": [call({"a": float("inf")})]}, ".tool_calls[0].function.arguments"),
        ({"role": "assistant", "tool_calls": [call({"a": {1, 2}})]}, ".tool_calls[0].function.arguments"),
        ({"role": "assistant", "tool_calls": [call("[" * 100_000)]}, ".tool_calls[0].function.arguments"),
        ({"role": "assistant", "tool_calls": [call('{"a": ' + "9" * 5000 + "}")]}, ".tool_calls[0].function.arguments"),
        ({"role": "assistant", "tool_calls": [call(id=7)]}, ".tool_calls[0].id"),
    ],
)
def test_what_cannot_be_rendered_is_refused_by_place(message: Any, param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        normalise([{"role": "user", "content": "first"}, message])
    assert caught.value.status == 400
    assert caught.value.param == f"messages[1]{param}"
    assert caught.value.message.startswith(f"messages[1]{param} ")
    assert "\n" not in caught.value.message


@pytest.mark.parametrize("messages", [[], None, "hi", {"role": "user"}, 3])
def test_messages_must_be_a_list_with_something_in_it(messages: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        normalise(messages)
    assert caught.value.param == "messages"
