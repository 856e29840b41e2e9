"""Blocks of tool calls: what is read as a call, and what never is."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lfm2serve.chat.tool_calls import parse_calls, write_calls


def tool(name: str, *properties: str) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {key: {"type": "string"} for key in properties}}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


TOOLS = [
    tool("get-weather", "city", "unit"),
    {"name": "flat", "parameters": {"properties": {"a": {}}}},
    tool("mcp/do:it"),
]


def read(body: str) -> list[tuple[str, Any]] | None:
    calls = parse_calls(body, TOOLS)
    return None if calls is None else [(name, json.loads(arguments)) for name, arguments in calls]


@pytest.mark.parametrize(
    ("body", "calls"),
    [
        ('[get_weather(city="Tokyo")]', [("get_weather", {"city": "Tokyo"})]),
        ('[run(cmd="ls [a-z]*")]', [("run", {"cmd": "ls [a-z]*"})]),
        ('[run(path="C:\\\\")]', [("run", {"path": "C:\\"})]),
        ("[go(lon=-74.00, n=-3, p=+2)]", [("go", {"lon": -74.0, "n": -3, "p": 2})]),
        ('[route(from="A", to="B", class=1, a-b=2)]', [("route", {"from": "A", "to": "B", "class": 1, "a-b": 2})]),
        (" [f(x=1)] ", [("f", {"x": 1})]),
        ("[\n  f(\n    x=1,\n    y=2,\n  ),\n]", [("f", {"x": 1, "y": 2})]),
        ("[f(month=07, z=00, a=0, r=0.5, big=1_0)]", [("f", {"month": 7, "z": 0, "a": 0, "r": 0.5, "big": 10})]),
        ("[f(t=\"at 07:00, from=x(1)\")]", [("f", {"t": "at 07:00, from=x(1)"})]),
        ("[]", []),
        ("[f(x=1), g(y=b'z')]", [("f", {"x": 1})]),
        ('[db.query(q="x", strict=true, lim=null, o=True, n=None)]',
         [("db.query", {"q": "x", "strict": True, "lim": None, "o": True, "n": None})]),
        ("[f(a='x, y', b=2)]", [("f", {"a": "x, y", "b": 2})]),
        ('[grocery.order(a=[1,{"k":"v"}]), g()]', [("grocery.order", {"a": [1, {"k": "v"}]}), ("g", {})]),
        ('[f(d={1: [true, {"k": null}], "s": (1, 2), true: {3}})]',
         [("f", {"d": {"1": [True, {"k": None}], "s": [1, 2], "true": [3]}})]),
        ('[f(**{"a": 1, "b-c": 2}, d=3)]', [("f", {"a": 1, "b-c": 2, "d": 3})]),
        ('[get-weather("Rome", unit="C")]', [("get-weather", {"city": "Rome", "unit": "C"})]),
        ('[flat(1), get-weather("Rome", "C")]', [("flat", {"a": 1}), ("get-weather", {"city": "Rome", "unit": "C"})]),
        ("[mcp/do:it()]", [("mcp/do:it", {})]),
        ('[f(s="it\'s", t=\'say "hi"\', u="""a "b"\nc""")]', [("f", {"s": "it's", "t": 'say "hi"', "u": 'a "b"\nc'})]),
        ('[f(s="a\nb\tc\\n\\d\\"")]', [("f", {"s": 'a\nb\tc\n\\d"'})]),
        ('[f(a="\\ud83d\\ude00", b="\\ud83d")]', [("f", {"a": "\U0001f600", "b": "\ufffd"})]),
        ('[f(a="x" "y")]', [("f", {"a": "xy"})]),
        ('[{"name":"f","arguments":{"x":1}}]', [("f", {"x": 1})]),
        ('{"name": "f", "parameters": {"x": "a\nb"}}', [("f", {"x": "a\nb"})]),
        ('[{"name": "f", "arguments": "{\\"x\\": 1}"}, {"name": "g"}]', [("f", {"x": 1}), ("g", {})]),
        ('[{"type": "function", "function": {"name": "f", "arguments": {}}}]', [("f", {})]),
        ("[{'name': 'f', 'arguments': {'x': True}}]", [("f", {"x": True})]),
        ('[{"name": "f"}, {"nome": "g"}]', [("f", {})]),
    ],
)  # fmt: skip
def test_blocks_that_are_calls(body: str, calls: list[tuple[str, Any]]) -> None:
    assert read(body) == calls


@pytest.mark.parametrize(
    "body",
    [
        "", "foo bar", "f(x=1)", "(f(x=1),)", "[f]", "[1]", "[f(x=", "[f(x=1)", '[run(path="C:\\")]', "[f(x=1)] and",
        "[f(x=1 y=2)]", "[f(x=a=1)]", "[x.y[0](a=1)]", "[f(x=1)(y=2)]", "[(lambda: 1)()]",
        "[f(x=g())]", "[f(x=__import__('os').system('true'))]", "[f(x=y)]", "[f(x=1+1)]", "[f(x=not True)]",
        "[f(x=[i for i in 'ab'])]", '[f(x=f"{1}")]', "[f(x=b'z')]", "[f(x=3j)]", "[f(x=...)]",
        "[f(x=1 if True else 2)]",
        "[f(x=1e999)]", "[f(x=-1e999)]", "[f(x=nan)]", "[f(x=-True)]", "[f(x=" + "9" * 5000 + ")]", "[f(x={**{}})]",
        "[f(x={[1]: 2})]", "[f(x=1, x=2)]", '[f(**{"x": 1}, x=2)]', "[f(**[1])]", "[f(*[1])]",
        "[f('a')]", "[get-weather('a', 'b', 'c')]", "[get-weather('a', city='b')]",
        '[{"name": 1}]', '[{"name": "f", "arguments": [1]}]', '[{"name": "f", "arguments": {"x": NaN}}]', "{}", "[{}]",
        r'[f(x=\"a\")]', "[f(x=" + '\\"' * 100_000 + ")]", "[f(x=" + "'\"" * 50_000 + ")]", "[f(x='" + '\\"' * 99_999,
        "[" * 5000, "[f(x=" + "[" * 5000 + "]" * 5000 + ")]", "[f(x=" + "-" * 100_000 + "1)]", "[f(x=\x00)]",
    ],
)  # fmt: skip
def test_blocks_that_are_none(body: str) -> None:
    assert read(body) is None


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=("Cs",)), max_size=12) | st.text("\"'\\\n<|>tool_cend[]", max_size=16),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)  # fmt: skip
KEYS = st.sampled_from(["a", "from", "class", "user-id", "", "ünï", "x y", "a.b"])


@given(
    st.lists(st.tuples(st.sampled_from(["f", "db.query", "get-weather"]), st.dictionaries(KEYS, VALUES, max_size=3)))
)
def test_what_is_written_is_read_back(calls: list[tuple[str, dict[str, Any]]]) -> None:
    written = write_calls([{"function": {"name": name, "arguments": arguments}} for name, arguments in calls])
    assert read(written) == calls
    assert "<|" not in written and "think>" not in written.replace("\\x3cthink>", "").replace("\\x3c/think>", "")


@given(st.lists(st.tuples(st.just("f"), st.dictionaries(KEYS, VALUES, max_size=3)), min_size=1))
def test_json_is_read_too(calls: list[tuple[str, dict[str, Any]]]) -> None:
    assert read(json.dumps([{"name": name, "arguments": arguments} for name, arguments in calls])) == calls


@given(st.text("[]f(x=1,){}'\"\\ \nb-.0:*_c<", max_size=30))
def test_any_text_is_calls_or_none(body: str) -> None:
    calls = read(body)
    assert calls is None or all(isinstance(arguments, dict) for _, arguments in calls)
