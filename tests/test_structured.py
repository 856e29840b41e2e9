"""Constraints: what their masks allow, that looking ahead changes nothing, and where a thought leaves them."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels_numba.cpu import CpuBackend
from lfm2serve import LLM, SamplingParams
from lfm2serve.chat.call_stream import CallStream
from lfm2serve.chat.template import ChatTemplate
from lfm2serve.chat.tokenizer import Tokenizer
from lfm2serve.chat.tool_calls import parse_calls
from lfm2serve.chat.tool_choice import tool_use
from lfm2serve.errors import InvalidRequest, Lfm2Error
from lfm2serve.sampling import StructuredOutputsParams
from lfm2serve.stream import StreamEvent
from lfm2serve.structured import Constraint, Grammars, Thinking

from .chat.conftest import TINY, save, thinking_core
from .law.harness import QueuedRounds

ROOT = Path(__file__).parent.parent
TS, TE = "<|tool_call_start|>", "<|tool_call_end|>"


@cache
def grammars(path: Path) -> Grammars:
    tokenizer = Tokenizer.from_dir(path)
    eos = tokenizer.token_id("<|im_end|>")
    assert eos is not None
    return Grammars(tokenizer, tokenizer.size + 40, [eos])


DEMO = grammars(ROOT / "lfm2serve" / "demo")


def constraint(
    kind: dict[str, Any], thinking: Thinking = Thinking.NEVER, use: Any = None, on: Grammars = DEMO
) -> Constraint:
    structure = StructuredOutputsParams(**kind) if kind else None
    grammar = on.grammar(SamplingParams(structured_outputs=structure), use)
    assert grammar is not None
    return grammar.start(thinking)


def allowed(follows: Constraint, ahead: Sequence[int] = ()) -> list[int]:
    mask = follows.mask(ahead)
    assert mask is not None and mask.dtype == np.uint32
    ids: list[int] = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()
    return ids


def texts(follows: Constraint, ahead: Sequence[int] = (), on: Grammars = DEMO) -> set[str]:
    return {on.tokenizer.token_text(token) for token in allowed(follows, ahead)}


def spoken(follows: Constraint, rng: random.Random, on: Grammars = DEMO, most: int = 400) -> str:
    """A reply of random allowed tokens, which hurries to its end after a while."""
    tokenizer, [eos] = on.tokenizer, on.eos
    closing = {b'"', b")", b"]", b"}", b'"]', b'")', b'"}', b"}]"}
    tokens: list[int] = []
    while len(tokens) < most:
        ids = allowed(follows)
        ends = [i for i in ids if i == eos or tokenizer.token_bytes(i) in closing]
        token = rng.choice(ends if ends and len(tokens) > 25 else ids)
        follows.accept(token)
        if token == eos:
            return tokenizer.decode(tokens, skip_special_tokens=False)
        tokens.append(token)
    raise AssertionError(tokenizer.decode(tokens, skip_special_tokens=False))


def tool(name: str, parameters: Any = None) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **({"parameters": parameters} if parameters else {})}}


NUMBER = {"type": "integer", "minimum": -9, "maximum": 9}
TOOLS = [
    tool("plain", {
        "type": "object",
        "properties": {"s": {"type": "string", "maxLength": 9}, "from": NUMBER, "user-id": {"type": "boolean"}},
        "required": ["s", "user-id"],
        "additionalProperties": False,
    }),
    tool("nothing"),
    tool("all.optional", {
        "properties": {"a": NUMBER, "z": {"type": "null"}, "e": {"enum": ["x", 'q"\\', None, True]}},
    }),
    tool("deep", {
        "type": "object", "required": ["l"], "$defs": {"E": {"enum": [1, "two"]}},
        "properties": {"l": {"type": "array", "items": {"$ref": "#/$defs/E"}, "maxItems": 3, "minItems": 1}},
    }),
    tool("two words", {"properties": {"a": NUMBER}, "required": ["a"], "additionalProperties": False}),
    tool("any", {"type": "object", "additionalProperties": NUMBER, "maxProperties": 2}),
]  # fmt: skip


def streamed(body: str, size: int) -> list[tuple[str, Any]]:
    """The calls of a block that comes in pieces."""
    stream, made = CallStream(0, None), list[list[str]]()
    for at in range(0, len(body), size):
        for delta in stream.push(body[at : at + size]):
            if delta.name is not None:
                assert delta.id is not None and delta.index == len(made)
                made.append([delta.name])
            made[delta.index].append(delta.arguments)
    assert stream.whole and stream.count == len(made)
    return [(name, json.loads("".join(pieces))) for name, *pieces in made]


NEEDED = {"plain": {"s", "user-id"}, "deep": {"l"}, "two words": {"a"}}


@pytest.mark.parametrize("name", [None, *(tool["function"]["name"] for tool in TOOLS)])
def test_calls_follow_the_tools_schemas(name: str | None) -> None:
    choice = "required" if name is None else {"type": "function", "function": {"name": name}}
    for seed in range(12):
        parallel = seed % 2 == 0
        said = spoken(constraint({}, use=tool_use(TOOLS, choice, parallel)), random.Random(seed))
        body = said.removeprefix(TS).removesuffix(TE)
        assert said == f"{TS}{body}{TE}"
        calls = parse_calls(body, TOOLS)
        assert calls and (parallel or len(calls) == 1)
        assert (
            streamed(body, 1)
            == streamed(body, 7)
            == streamed(body, len(body))
            == [(made, json.loads(text)) for made, text in calls]
        )
        for made, text in calls:
            arguments = json.loads(text)
            properties = next(t for t in TOOLS if t["function"]["name"] == made)["function"].get("parameters", {})
            assert name in (None, made) and NEEDED.get(made, set()) <= arguments.keys()
            assert made == "any" or arguments.keys() <= properties.get("properties", {}).keys()
            assert type(arguments.get("from", 0)) is int and type(arguments.get("user-id", True)) is bool
            assert len(arguments.get("s", "")) <= 9 and arguments.get("z") is None
            assert arguments.get("e") in ("x", 'q"\\', None, True) and -9 <= arguments.get("a", 0) <= 9
            assert all(item in (1, "two") for item in arguments.get("l", [1]))


LIST = {"type": "array", "items": {"enum": [1, 2]}, "maxItems": 3}
KINDS: list[tuple[dict[str, Any], str]] = [
    ({"regex": "[ab]{2,4}/?"}, "[ab]{2,4}/?"),
    ({"choice": ["yes", "yes!", "no\n"]}, "yes!?|no\n"),
    ({"grammar": 'start: "x" /[0-9]/ "y"?'}, "x[0-9]y?"),
    ({"json": LIST}, r"\s*\[[12,\s]*\]\s*"),
    ({"json": LIST, "disable_any_whitespace": True}, r"\[[12,]*\]"),
    ({"json": LIST, "whitespace_pattern": "__"}, r"[12,_\[\]]*"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "pattern"), KINDS)
def test_every_allowed_way_matches(kind: dict[str, Any], pattern: str) -> None:
    for seed in range(10):
        said = spoken(constraint(kind), random.Random(seed))
        assert re.fullmatch(pattern, said), said


def test_objects_can_be_closed() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "object", "properties": {"b": {"const": 1}}}}}
    assert "}" not in texts(constraint({"json": schema, "disable_additional_properties": True}), [])
    said = {
        spoken(constraint({"json": schema, "disable_additional_properties": True}), random.Random(n)) for n in range(9)
    }
    assert all(json.loads(text) in ({}, {"a": {}}, {"a": {"b": 1}}) for text in said)


@settings(deadline=None, max_examples=60)
@given(seed=st.integers(0, 999), kind=st.sampled_from([kind for kind, _ in KINDS]), ahead=st.integers(0, 6))
def test_looking_ahead_is_what_accepting_gives(seed: int, kind: dict[str, Any], ahead: int) -> None:
    rng, thinking = random.Random(seed), random.Random(seed).choice(list(Thinking))
    looked, took = constraint(kind, thinking), constraint(kind, thinking)
    tokens: list[int] = []
    for _ in range(ahead):
        if took.mask(()) is None:  # eos was drawn
            break
        ids = [i for i in allowed(took) if i < DEMO.tokenizer.size]
        tokens.append(DEMO.end_think_id if DEMO.end_think_id in ids and rng.random() < 0.5 else rng.choice(ids))
        took.accept(tokens[-1])
    before = looked.mask(())
    for count in (len(tokens), 0, *range(len(tokens))):
        looked.mask(tokens[:count])
    impossible = [*tokens, 0, 0, 0]
    looked.mask(impossible)
    for mask, other in ((looked.mask(tokens), took.mask(())), (before, looked.mask(()))):
        assert (mask is None) == (other is None) and (mask is None or np.array_equal(mask, other))


def test_eos_comes_where_the_grammar_may_end_and_nothing_follows_it() -> None:
    [eos] = DEMO.eos
    follows = constraint({"regex": "ab?"})
    assert eos not in allowed(follows)
    [a], [b] = DEMO.tokenizer.encode_plain("a"), DEMO.tokenizer.encode_plain("b")
    assert set(allowed(follows, [a])) == {b, eos}
    assert allowed(follows, [a, b]) == [eos]
    assert follows.mask([a, eos]) is None
    follows.accept(a)
    follows.accept(eos)
    assert follows.mask(()) is None


def test_a_reply_that_leaves_the_grammar_fails() -> None:
    follows = constraint({"regex": "ab"})
    follows.accept(DEMO.tokenizer.encode_plain("z")[0])
    with pytest.raises(Lfm2Error, match="structured output can't go on"):
        follows.mask(())


def test_control_tokens_are_never_text() -> None:
    control = set(DEMO.tokenizer.control_tokens.values())
    ids = allowed(constraint({"regex": "(?s:.*)"}))
    assert control.isdisjoint(set(ids) - DEMO.eos) and len(ids) > 2000


# ---- thoughts ----


@pytest.fixture(scope="module")
def thinking(tmp_path_factory: pytest.TempPathFactory) -> Grammars:
    folder = tmp_path_factory.mktemp("thinking")
    return grammars(save(thinking_core(), folder, bos_token={"content": "<|startoftext|>"}))


@pytest.fixture(params=["token", "spelled"])
def either(request: pytest.FixtureRequest, thinking: Grammars) -> Grammars:
    """A tokeniser with tokens for <think> and </think>, and one that spells them."""
    chosen = thinking if request.param == "token" else grammars(TINY)
    assert (chosen.think_id is not None) == (request.param == "token")
    return chosen


CHOICE = {"choice": ["yes", "no"]}


def test_a_thought_that_the_prompt_opened_is_free(either: Grammars) -> None:
    tokenizer = either.tokenizer
    follows = constraint(CHOICE, Thinking.OPENED, on=either)
    thought = tokenizer.encode("I <think> so: no < </thin")
    every = set(range(32 * either.words)) - either.eos
    for count in range(len(thought)):
        assert set(allowed(follows, thought[:count])) == every
    for token in [*thought, *tokenizer.encode("</think>")]:
        assert set(allowed(follows)) == every
        follows.accept(token)
    first = texts(follows, on=either)
    assert (
        {"y", "n"} <= first
        and " " in first
        and all(text in ("y", "n", "yes", "no", "ye") or text.isspace() for text in first)
    )
    [blank] = tokenizer.encode_plain("\n")
    assert not any(text.isspace() for text in texts(follows, [blank], on=either))
    follows.accept(blank)
    assert spoken(follows, random.Random(1), on=either) in ("yes", "no")


def test_a_thought_may_begin_or_not(either: Grammars) -> None:
    tokenizer = either.tokenizer
    opening = tokenizer.encode("<think>")
    follows = constraint(CHOICE, Thinking.MAYBE, on=either)
    for count in range(len(opening)):
        assert opening[count] in allowed(follows, opening[:count])
    assert {"y", "n"} <= texts(follows, on=either)
    assert set(allowed(follows, opening)) == set(range(32 * either.words)) - either.eos
    assert spoken(constraint(CHOICE, Thinking.NEVER, on=either), random.Random(2), on=either) in ("yes", "no")
    assert opening[0] not in allowed(constraint(CHOICE, Thinking.NEVER, on=either))
    answered = constraint(CHOICE, Thinking.MAYBE, on=either)
    for token in tokenizer.encode_plain("no"):
        answered.accept(token)
    assert allowed(answered) == list(either.eos)
    for token in [*opening, *tokenizer.encode("well</think>")]:
        follows.accept(token)
    assert {"y", "n"} <= texts(follows, on=either)


def test_an_answer_may_begin_like_a_spelled_thought() -> None:
    spelled = grammars(TINY)
    follows = constraint({"regex": "<th?a>"}, Thinking.MAYBE, on=spelled)
    for token in spelled.tokenizer.encode_plain("<t"):
        follows.accept(token)
    assert {"h", "a"} <= texts(follows, on=spelled)
    for token in spelled.tokenizer.encode_plain("a>"):
        follows.accept(token)
    assert allowed(follows) == list(spelled.eos)


def test_what_shares_a_token_with_the_end_of_a_thought_counts() -> None:
    spelled = grammars(TINY)
    follows = constraint(CHOICE, Thinking.OPENED, on=spelled)
    place = follows._thinking(b"a</think> ye", 0)  # type: ignore[attr-defined]
    assert spelled.tokenizer.decode(place.tokens) == "ye"


# ---- strict tools ----


def test_strict_calls_are_free_outside_of_calls(either: Grammars) -> None:
    tokenizer = either.tokenizer
    city = {"properties": {"city": {"enum": ["Rome"]}}, "required": ["city"]}
    strict = tool("w", city)
    strict["function"]["strict"] = True
    use = tool_use([strict])
    assert either.grammar(SamplingParams(), tool_use([tool("w", city)])) is None
    wanted = tokenizer.encode(f'{TS}[w(city="Rome")]{TE}')
    thought = tokenizer.encode(f"<think>{TS}[w(</think>")
    for thinking, before in (
        (Thinking.NEVER, tokenizer.encode("Well, ")),
        (Thinking.MAYBE, thought),
        (Thinking.OPENED, tokenizer.encode(f"so {TS}[</think>")),
        (Thinking.MAYBE, []),
    ):
        follows, ahead = (constraint({}, thinking, use, either) for _ in range(2))
        said = [*before, *wanted, *tokenizer.encode("or "), *wanted, *either.eos]
        inside = False
        for count, token in enumerate(said):
            looked = ahead.mask(said[:count])
            mask = follows.mask(())
            assert (mask is None) == (not inside) == (looked is None), count
            if mask is not None and looked is not None:
                assert np.array_equal(mask, looked) and token in allowed(follows)
                assert either.eos.isdisjoint(allowed(follows))
            follows.accept(token)
            inside = count >= len(before) and (token == wanted[0] or (inside and token != wanted[-1]))
        assert follows.mask(()) is None
    assert texts(constraint({}, Thinking.NEVER, use, either), wanted[:1], either) == {"["}


# ---- parameters ----


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({}, "got none"),
        ({"regex": "a", "choice": ["a"]}, "got regex, choice"),
        ({"json_object": False}, "got none"),
        ({"choice": "yes"}, "list of strings"),
        ({"choice": [""]}, "none of them empty"),
        ({"regex": ""}, "regex must be a string"),
        ({"json": "{"}, "json is not valid JSON"),
        ({"json": [1]}, "json must be a schema"),
        ({"json_object": True, "whitespace_pattern": ""}, "whitespace_pattern must be"),
    ],
)
def test_parameters_are_checked(fields: dict[str, Any], problem: str) -> None:
    with pytest.raises(InvalidRequest, match=problem) as caught:
        StructuredOutputsParams(**fields)
    assert caught.value.param == "structured_outputs"
    with pytest.raises(InvalidRequest, match="must be StructuredOutputsParams"):
        SamplingParams(structured_outputs={"regex": "a"})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("kind", "problem"),
    [
        ({"json": {"$ref": "#"}}, "no|No"),
        ({"grammar": "start: start"}, "no|No"),
        ({"regex": "(" * 3000 + ")" * 3000}, "invalid regex"),
        ({"json": {"$ref": "http://example.com/x"}}, "not present"),
        ({"choice": ["\ud800"]}, "Unicode"),
        ({"json": nested(200)}, "recursion"),
        ({"json": nested(5000)}, "deep"),
        ({"grammar": "start: " + "(" * 5000 + '"a"' + ")" * 5000}, "nested"),
    ],
)
def test_what_cannot_be_compiled_is_a_bad_request(kind: dict[str, Any], problem: str) -> None:
    with pytest.raises(InvalidRequest, match=problem) as caught:
        constraint(kind)
    assert caught.value.param == "structured_outputs" and len(caught.value.message) < 400


# ---- the library ----


@pytest.fixture(scope="module", params=[False, True], ids=["waited for", "queued"])
def llm(request: pytest.FixtureRequest) -> Iterator[LLM]:
    """Decode rounds as a CPU's, and queued one behind the other as a GPU's."""

    def decode_rounds(self: CpuBackend, forward: Any, tables: Any, *, width: int, slots: int, **_: Any) -> Any:
        return QueuedRounds(self, forward, slots, width) if request.param else None

    how: dict[str, Any] = {"device": "cpu", "context": 1024, "kv_pages": 16, "prompt_cache_gib": 0.125}
    with patch.object(CpuBackend, "decode_rounds", decode_rounds), LLM("demo", progress=False, **how) as llm:
        yield llm


def test_replies_do_not_depend_on_drafts_or_neighbours(llm: LLM) -> None:
    """Long, repetitive answers: drafts are proposed, taken and refused, and change nothing."""
    properties = {"name": {"enum": ["Anna", "Bert"]}, "n": NUMBER}
    item = {"type": "object", "properties": properties, "required": ["name", "n"], "additionalProperties": False}
    schema = {"type": "array", "items": item, "minItems": 8, "maxItems": 8}
    params = [
        SamplingParams(temperature=t, seed=4, max_tokens=400, structured_outputs=StructuredOutputsParams(**kind))
        for t in (0.0, 0.7)
        for kind in ({"json": schema}, {"regex": "(na |no ){30}"}, {"choice": ["Lima"]})
    ]
    prompts = [f"List {n}: " for n in range(len(params))]
    before = llm._open_runtime().engine.stats().counters.accepted_tokens
    together = llm.generate(prompts, params, use_tqdm=False)
    assert llm._open_runtime().engine.stats().counters.accepted_tokens > before
    for prompt, how, output in zip(prompts, params, together, strict=True):
        for drafts in (True, False):
            [alone] = llm.generate(prompt, how, draft=drafts)
            assert alone.outputs[0].token_ids == output.outputs[0].token_ids
        structure, text = how.structured_outputs, output.outputs[0].text
        assert structure is not None and output.outputs[0].finish_reason == "stop"
        assert structure.json is None or len(json.loads(text)) == 8
        assert structure.regex is None or re.fullmatch(structure.regex, text)


def test_logprobs_are_of_the_raw_logits(llm: LLM) -> None:
    [free] = llm.generate("Lima is", SamplingParams(temperature=0, max_tokens=1, logprobs=3))
    kept = StructuredOutputsParams(choice=["Zebra"])
    [held] = llm.generate("Lima is", SamplingParams(temperature=0, max_tokens=1, logprobs=3, structured_outputs=kept))
    assert free.outputs[0].logprobs is not None and held.outputs[0].logprobs is not None
    top = dict(list(free.outputs[0].logprobs[0].items())[:3])
    assert {token: held.outputs[0].logprobs[0][token] for token in top} == top
    assert held.outputs[0].token_ids[0] not in top


def test_the_library_calls_tools(llm: LLM) -> None:
    city = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    tools = [tool("get_weather", city)]
    question = [{"role": "user", "content": "What is the weather in Lima?"}]
    [output] = llm.chat(question, SamplingParams(temperature=0, max_tokens=40), tools=tools)
    reply = output.outputs[0]
    [call] = reply.tool_calls
    assert (call.name, json.loads(call.arguments), reply.text) == ("get_weather", {"city": "Lima"}, "")
    assert reply.finish_reason == "tool_calls" and "get_weather" in repr(reply)
    deltas = list(llm.stream(question, SamplingParams(temperature=0, max_tokens=40), tools=tools))
    [delta] = [call for delta in deltas for call in delta.tool_calls]
    assert (delta.index, delta.name, delta.arguments) == (0, call.name, call.arguments)
    hello = [{"role": "user", "content": "Hello, who are you?"}]
    choice = {"type": "function", "function": {"name": "get_weather"}}
    params = SamplingParams(temperature=0, max_tokens=40)
    assert not llm.chat(hello, params, tools=tools)[0].outputs[0].tool_calls
    short = [tool("get_weather", {**city, "properties": {"city": {"type": "string", "maxLength": 9}}})]
    assert llm.chat(hello, params, tools=short, tool_choice=choice)[0].outputs[0].tool_calls[0].name == "get_weather"
    how = {"tools": short, "tool_choice": choice, "draft": False}
    pieces = [call for delta in llm.stream(hello, params, **how) for call in delta.tool_calls]
    assert len(pieces) > 3, "an enforced call's arguments come as they are drawn"
    assert [piece.name for piece in pieces if piece.name] == ["get_weather"]
    assert json.loads("".join(piece.arguments for piece in pieces)).keys() == {"city"}
    for wrong in ("always", {"type": "function", "function": {"name": "other"}}):
        with pytest.raises(InvalidRequest, match="tool_choice"):
            llm.chat(hello, tools=tools, tool_choice=wrong)


@pytest.mark.parametrize("opened", [True, False])
def test_the_answer_behind_a_thought_follows_its_schema(llm: LLM, opened: bool) -> None:
    runtime = llm._open_runtime()
    source = "{{ bos_token }}<|im_start|>user\n{{ messages[0].content }}<|im_end|>\n<|im_start|>assistant\n"
    before = runtime.template
    runtime.template = ChatTemplate(source + ("<think>" if opened else "{# <think> #}"), runtime.tokenizer)
    try:
        params = SamplingParams(
            seed=1, max_tokens=200, logit_bias={DEMO.end_think_id or 0: 20.0},
            structured_outputs=StructuredOutputsParams(json={"type": "array", "items": NUMBER, "maxItems": 4}),
        )  # fmt: skip
        replies = llm.chat([{"role": "user", "content": "17 - 6 + 3 * 2?"}], params.with_(n=4))[0].outputs
        assert any(reply.reasoning for reply in replies) == opened
        assert all(isinstance(json.loads(reply.text), list) and reply.finish_reason == "stop" for reply in replies)
    finally:
        runtime.template = before


class Broken:
    """A constraint whose grammar gives up after some tokens."""

    def __init__(self, tokens: int) -> None:
        self.left = tokens

    def mask(self, ahead: Sequence[int]) -> None:
        if self.left - len(ahead) <= 0:
            raise Lfm2Error("structured output can't go on: too complex")

    def accept(self, token: int) -> None:
        self.left -= 1


def test_a_grammar_that_gives_up_ends_its_reply_only(llm: LLM) -> None:
    engine = llm._open_runtime().engine
    prompt = llm.get_tokenizer().encode("Once upon a time")
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    [alone] = llm.generate(prompt, params)
    events: dict[str, list[StreamEvent]] = {"broken": [], "beside": []}
    for name, follows in (("broken", Broken(5)), ("beside", None)):
        engine.submit(prompt, params, events[name].append, seed=0, draft=False, constraint=follows)
    assert engine.drain(60) and engine.census().clean
    last = events["broken"][-1]
    assert last.finish_reason == "error" and "too complex" in str(last.error)
    assert sum(len(event.tokens) for event in events["broken"]) == 5
    assert [token for event in events["beside"] for token in event.tokens] == alone.outputs[0].token_ids
