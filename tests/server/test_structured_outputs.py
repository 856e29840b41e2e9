"""response_format and vLLM's guided fields over HTTP: replies that follow them, and requests that can't."""

from __future__ import annotations

import json
import re
import sys
from typing import Any

import pytest

from .conftest import Live
from .test_tools import WEATHER, call

__all__ = ["demo"]
from .test_tools import demo

CAPITAL = [{"role": "user", "content": "What is the capital of Peru?"}]
SCHEMA = {
    "type": "object",
    "properties": {
        "answer": {"type": "string", "maxLength": 20},
        "n": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["answer", "n"],
    "additionalProperties": False,
}


def follows(text: str) -> bool:
    value = json.loads(text)
    return list(value) == ["answer", "n"] and isinstance(value["answer"], str) and 0 <= value["n"] < 100


def as_format(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": schema}}


WAYS: list[tuple[dict[str, Any], Any]] = [
    ({"response_format": as_format(SCHEMA)}, follows),
    ({"guided_json": SCHEMA}, follows),
    ({"guided_json": json.dumps(SCHEMA), "guided_whitespace_pattern": " ?"}, follows),
    ({"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}}, follows),
    ({"guided_regex": "[A-F]{3}[0-9]/x"}, re.compile("[A-F]{3}[0-9]/x").fullmatch),
    ({"guided_choice": ["Rome", "Lima", "Lima!"]}, {"Rome", "Lima", "Lima!"}.__contains__),
    ({"structured_outputs": {"choice": ["Paris", 'a"b']}}, {"Paris", 'a"b'}.__contains__),
    ({"guided_grammar": 'root ::= "no " [0-9] [0-9]'}, re.compile("no [0-9]{2}").fullmatch),
    ({"structured_outputs": {"grammar": 'start: "a" /[0-9]/ | "b"'}}, re.compile("a[0-9]|b").fullmatch),
]


@pytest.mark.parametrize("temperature", [0.0, 2.0])
@pytest.mark.parametrize(("fields", "good"), WAYS)
def test_replies_follow_their_grammar(demo: Live, fields: dict[str, Any], good: Any, temperature: float) -> None:
    body = {"messages": CAPITAL, "temperature": temperature, "seed": 1, "max_tokens": 300, **fields}
    first = demo.post("/v1/chat/completions", **body).json()["choices"][0]
    assert first["finish_reason"] == "stop" and good(first["message"]["content"]), first
    plain = demo.post("/v1/chat/completions", **body, draft=False, prompt_cache=False).json()["choices"][0]
    assert plain["message"] == first["message"]
    prompt = {key: value for key, value in body.items() if key != "messages"} | {"prompt": "Lima is"}
    text = demo.post("/v1/completions", **prompt).json()["choices"][0]
    assert text["finish_reason"] == "stop" and good(text["text"]), text


def test_any_object(demo: Live) -> None:
    reply = demo.chat(messages=CAPITAL, response_format={"type": "json_object"}, max_tokens=100).choices[0]
    assert reply.finish_reason == "stop" and json.loads(reply.message.content) == {"answer": "Lima"}


def test_streamed_replies_and_several_of_them_follow_it_too(demo: Live) -> None:
    fields = {"messages": CAPITAL, "n": 3, "temperature": 1.5, "seed": 5, "max_tokens": 300}
    wanted = {"response_format": as_format(SCHEMA)}
    whole = [choice.message.content for choice in demo.chat(**fields, **wanted).choices]
    assert len(set(whole)) == 3 and all(map(follows, whole))
    pieces = ["", "", ""]
    for chunk in demo.chat(**fields, **wanted, stream=True):
        pieces[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert pieces == whole


def test_a_schema_leaves_the_tools_a_way(demo: Live) -> None:
    body = {"tools": [WEATHER], "response_format": as_format(SCHEMA), "max_tokens": 100}
    question = [{"role": "user", "content": "What is the weather in Lima?"}]
    [made] = demo.chat(messages=question, **body).choices[0].message.tool_calls
    assert {"type": "function", "function": made.function.model_dump()} == call("get_weather", city="Lima")
    assert follows(demo.chat(messages=question, **body, tool_choice="none").choices[0].message.content)


def test_a_cut_reply_is_cut(demo: Live) -> None:
    choice = demo.chat(messages=CAPITAL, response_format=as_format(SCHEMA), max_tokens=3).choices[0]
    assert choice.finish_reason == "length" and choice.message.content.startswith("{")


@pytest.mark.parametrize(
    ("param", "fields", "reason"),
    [
        ("response_format", {"response_format": as_format({"type": "foo"})}, "Invalid type: foo"),
        ("response_format", {"response_format": as_format({"$ref": "#/no"})}, "'/no' does not exist"),
        ("response_format", {"response_format": as_format({"not": {}})}, "not"),
        ("response_format.type", {"response_format": {"type": "structural_tag"}}, "json_schema"),
        ("response_format.type", {"response_format": {}}, "required"),
        ("response_format.json_schema", {"response_format": {"type": "json_schema"}}, "required"),
        ("response_format.json_schema", {"response_format": {"type": "text", "json_schema": {"schema": {}}}}, "text"),
        ("response_format.json_schema.schema", {"response_format": as_format(None)}, "dictionary"),
        ("response_format", {"response_format": "text"}, "object|dictionary"),
        ("guided_json", {"guided_json": "{"}, "not valid JSON"),
        ("guided_regex", {"guided_regex": "(a"}, "unclosed group"),
        ("guided_regex", {"guided_regex": ""}, "empty"),
        ("guided_choice", {"guided_choice": []}, "choice"),
        ("guided_grammar", {"guided_grammar": "start: foo"}, "unknown name"),
        ("guided_grammar", {"guided_grammar": "root ::= ("}, "Expected"),
        ("structured_outputs", {"structured_outputs": {}}, "exactly one"),
        ("structured_outputs", {"structured_outputs": {"regex": "a", "json_object": True}}, "exactly one"),
        ("structured_outputs.structural_tag", {"structured_outputs": {"structural_tag": "x"}}, "unknown field"),
        ("guided_choice", {"guided_regex": "a", "guided_choice": ["a"]}, "can't be combined"),
        ("guided_whitespace_pattern", {"guided_whitespace_pattern": " "}, "guided_json"),
        ("min_tokens", {"guided_regex": "a", "min_tokens": 1}, "guided_regex"),
        ("guided_grammar", {"guided_grammar": 'start: "a"', "tools": [WEATHER]}, "tools"),
    ],
)  # fmt: skip
def test_what_cannot_be_followed_is_refused(demo: Live, param: str, fields: dict[str, Any], reason: str) -> None:
    answer = demo.post("/v1/chat/completions", messages=CAPITAL, **fields)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == param and re.search(reason, error["message"]), error
    assert "\n" not in error["message"] and "%json" not in error["message"]


def test_without_the_extra_it_is_named(demo: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    for param, fields in (
        ("guided_regex", {"guided_regex": "ab+"}),
        ("tool_choice", {"tools": [WEATHER], "tool_choice": "required"}),
    ):
        error = demo.post("/v1/chat/completions", messages=CAPITAL, **fields).json()["error"]
        assert error["param"] == param and "pip install 'lfm2serve[structured]'" in error["message"]
    assert demo.post("/v1/chat/completions", messages=CAPITAL, tools=[WEATHER], max_tokens=2).status_code == 200
