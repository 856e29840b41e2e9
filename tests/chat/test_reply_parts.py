"""Thoughts, tool calls and text of a reply: what each becomes, and that the cuts between its tokens don't matter."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lfm2serve.chat.reply_parts import Reading
from lfm2serve.chat.tokenizer import Tokenizer
from lfm2serve.reply import ReplyBuilder, ReplyDelta
from lfm2serve.sampling import SamplingParams
from lfm2serve.stream import StreamEvent, StreamMetrics

from .conftest import TINY

TS, TE = "<|tool_call_start|>", "<|tool_call_end|>"
TOOLS = Reading(tools=[])
F = ("f", {"x": 1})


def play(
    tokenizer: Tokenizer,
    tokens: Sequence[int],
    reading: Reading | None = TOOLS,
    sizes: Sequence[int] = (),
    finish: str = "stop",
    **params: Any,
) -> tuple[ReplyBuilder, list[ReplyDelta]]:
    """A reply whose tokens come so many at a time (1 each once the sizes are used up); stop adds eos."""
    builder = ReplyBuilder(tokenizer, SamplingParams(**params), (), reading)
    eos = tokenizer.token_id("<|im_end|>")
    assert eos is not None
    left = [*tokens, eos] if finish == "stop" else list(tokens)
    deltas, sizes = [], list(sizes)
    while True:
        size = sizes.pop(0) if sizes else 1
        piece, left = left[:size], left[size:]
        metrics = StreamMetrics(arrival=0.0, prompt_tokens=1)
        event = StreamEvent(1, metrics, piece, finish_reason=None if left else finish)
        deltas.append(builder.feed(event))
        if not left or builder.finish_reason is not None:
            return builder, deltas


def calls_of(builder: ReplyBuilder) -> list[tuple[str, Any]]:
    return [(call.name, json.loads(call.arguments)) for call in builder.tool_calls]


Case = tuple[str, str, str, list[tuple[str, Any]]]
CASES: list[Case] = [
    # raw, content, reasoning, calls
    ("Hi ", "Hi ", "", []),
    (" \n", " \n", "", []),
    (f'{TS}[w(city="Tokyo")]{TE}', "", "", [("w", {"city": "Tokyo"})]),
    (f'{TS}[run(path="C:\\")]{TE} x', f'{TS}[run(path="C:\\")]{TE} x', "", []),
    (f'{TS}[run(p="C:\\")]{TE} x {TS}[f(x=1)]{TE}', f'{TS}[run(p="C:\\")]{TE} x', "", [F]),
    (f"{TS} [f(x=1)] {TE}", "", "", [F]),
    (f"{TS}[]{TE}", "", "", []),
    (f"A {TS}[]{TE} B", "A\nB", "", []),
    (f"Let me check. {TS}[f(x=1)]{TE} Done.", "Let me check.\nDone.", "", [F]),
    (f"Let me check.\n{TS}[f(x=1)]{TE}\n", "Let me check.", "", [F]),
    (f"{TS}[f(x=1)]{TE}[f(x=1)]{TE}", "", "", [F]),
    (f"{TS}[f(x=1)]{TE} [f(x=1)] {TE} Done [f(x=1)]", "Done [f(x=1)]", "", [F]),
    (f"{TS}[f(x=1)]{TE}[f(x=1)]", "[f(x=1)]", "", [F]),
    (f"{TS}[f(x=1)]{TE}[f(x=2)]", "[f(x=2)]", "", [F]),
    (f"{TS}foo bar{TE}", f"{TS}foo bar{TE}", "", []),
    (f"a {TS}it's{TE} {TS}[f(x=1)]{TE}", f"a {TS}it's{TE}", "", [F]),
    (f"{TS}[f(x=1)]", "", "", [F]),
    (f"{TS}[f(x=", f"{TS}[f(x=", "", []),
    (f"Go {TS}", f"Go {TS}", "", []),
    (f"{TS}[f()]{TE} text {TS}[g(), f(x=1)]{TE}", "text", "", [("f", {}), ("g", {}), F]),
    (f'{TS}[{{"name":"f","arguments":{{"x":1}}}}]{TE}', "", "", [F]),
    (f'{TS}[f(x="[{TE}] {TS}")]{TE}', "", "", [("f", {"x": f"[{TE}] {TS}"})]),
    (f"a{TE}b", "ab", "", []),
    ("[f(x=1)]", "[f(x=1)]", "", []),
    (f"<think>maybe {TS}[f()]{TE}?</think>No tool needed.", "No tool needed.", f"maybe {TS}[f()]{TE}?", []),
    ("<think>a</think>b", "b", "a", []),
    ("\n<think>\na\n</think>\n\nb \n", "b \n", "\na\n", []),
    (f"<think>a</think>\n{TS}[f(x=1)]{TE}", "", "a", [F]),
    ("<think>never ends", "", "never ends", []),
    ("<think>a</think> <think>b</think>c", "c", "a\nb", []),
    ("<think></think>b", "b", "", []),
    ("a </think> b", "a </think> b", "", []),
    ("a < b <thin", "a < b <thin", "", []),
]


@pytest.mark.parametrize(("raw", "text", "reasoning", "calls"), CASES)
def test_parts_of_a_reply(tokenizer: Tokenizer, raw: str, text: str, reasoning: str, calls: list[Any]) -> None:
    for finish in ("stop", "length"):
        builder, deltas = play(tokenizer, tokenizer.encode(raw), finish=finish)
        assert (builder.text, builder.reasoning, calls_of(builder)) == (text, reasoning, calls)
        assert "".join(delta.text for delta in deltas) == text
        assert "".join(delta.reasoning for delta in deltas) == reasoning
        assert (
            builder.finish_reason
            == deltas[-1].finish_reason
            == ("tool_calls" if calls and finish == "stop" else finish)
        )
        for index, call in enumerate(builder.tool_calls):
            [first, *rest] = [d for delta in deltas for d in delta.tool_calls if d.index == index]
            assert (first.id, first.name) == (call.id, call.name)
            assert first.arguments + "".join(d.arguments for d in rest) == call.arguments
            assert all(d.id is None and d.name is None for d in rest)
        assert len({call.id for call in builder.tool_calls}) == len(calls)


OPENED = [
    ("plan…</think>Hi", "Hi", "plan…", []),
    ("<think>plan</think>Hi", "Hi", "plan", []),
    ("\n<think>plan", "", "plan", []),
    ("a plan that never ends", "", "a plan that never ends", []),
    (f"{TS}[f()]{TE}</think>{TS}[f(x=1)]{TE}", "", f"{TS}[f()]{TE}", [F]),
]


@pytest.mark.parametrize(("raw", "text", "reasoning", "calls"), OPENED)
def test_a_thought_that_the_prompt_opened(
    tokenizer: Tokenizer, raw: str, text: str, reasoning: str, calls: list[Any]
) -> None:
    builder, _ = play(tokenizer, tokenizer.encode(raw), Reading(tools=[], thinking=True))
    assert (builder.text, builder.reasoning, calls_of(builder)) == (text, reasoning, calls)


def test_a_thought_token_opens_a_thought_anywhere(thinking: Tokenizer) -> None:
    builder, _ = play(thinking, thinking.encode(f"So: <think>{TS}[f()]{TE}</think> yes"))
    assert (builder.text, builder.reasoning, builder.tool_calls) == ("So:\nyes", f"{TS}[f()]{TE}", [])


def test_a_spelled_thought_begins_at_the_start_only(tiny: Tokenizer) -> None:
    builder, _ = play(tiny, tiny.encode("The tag <think>a</think> b"))
    assert (builder.text, builder.reasoning) == ("The tag <think>a</think> b", "")


def test_without_tools_nothing_is_a_call(tokenizer: Tokenizer) -> None:
    raw = f"<think>a</think>A {TS}[f(x=1)]{TE} B"
    builder, deltas = play(tokenizer, tokenizer.encode(raw), Reading())
    assert (builder.text, builder.reasoning, builder.tool_calls) == ("A [f(x=1)] B", "a", [])
    assert builder.finish_reason == "stop"
    assert sum(bool(delta.text) for delta in deltas) > 5
    raw_builder, _ = play(tokenizer, tokenizer.encode(raw), None)
    assert raw_builder.text == "<think>a</think>A [f(x=1)] B"


def test_a_spelled_sentinel_is_text_where_there_is_a_token(thinking: Tokenizer) -> None:
    raw = f"<think>a</think>{TS}[f(x=1)]{TE}"
    builder, _ = play(thinking, thinking.encode_plain(raw))
    assert (builder.text, builder.reasoning, builder.tool_calls) == (raw, "", [])


def test_nothing_of_a_sentinel_is_ever_said(tokenizer: Tokenizer) -> None:
    _, deltas = play(tokenizer, tokenizer.encode(f"Let me check. {TS}[f(x=1)]{TE} Done."))
    said = [delta.text for delta in deltas if delta.text]
    assert len(said) > 3 and not any(set("<|>") & set(text) for text in said)


def test_text_streams_on_beside_calls(tokenizer: Tokenizer) -> None:
    _, deltas = play(tokenizer, tokenizer.encode("one two three four five"))
    assert sum(bool(delta.text) for delta in deltas) > 5


@pytest.mark.parametrize("include", [False, True])
def test_stop_strings_may_be_sentinels(tokenizer: Tokenizer, include: bool) -> None:
    raw = f"<think>a</think>b{TS}[f(x=1)]{TE} c"
    for stop, text, reasoning, calls in (("</think>", "", "a", []), (TE, "b", "a", [F]), (" c", "b", "a", [F])):
        builder, _ = play(tokenizer, tokenizer.encode(raw), stop=[stop], include_stop_str_in_output=include)
        shown = " c" if include and stop == " c" else ""
        assert builder.text == text + shown.replace(" ", "\n") and builder.reasoning == reasoning
        assert calls_of(builder) == calls
        assert builder.stop_reason == stop and builder.finish_reason == ("tool_calls" if calls else "stop")


def test_half_a_character_before_a_sentinel(thinking: Tokenizer) -> None:
    half = thinking.encode_plain("é")
    byte = next(n for n in range(thinking.size) if thinking.token_bytes(n) == "é".encode()[:1])
    assert half != [byte]
    builder, _ = play(thinking, [byte, *thinking.encode(f"{TS}[f(x=1)]{TE}")])
    assert (builder.text, calls_of(builder)) == ("\ufffd", [F])


TOKENIZER = Tokenizer.from_dir(TINY)
PIECES = st.lists(
    st.sampled_from(
        [TS, TE, "<think>", "</think>", "[f(x=1)]", "[f(", "[]", "'", '"', "\\", "[g(s='", "')]", " ", "\n", "a", "foo",
         "<", "é", '[{"name": "f"}]', "[f(s=\"]", '")]', '"""'],
    ),
    max_size=14,
)  # fmt: skip


@settings(deadline=None, max_examples=300)
@given(
    pieces=PIECES,
    sizes=st.lists(st.integers(0, 6), max_size=30),
    reading=st.sampled_from([Reading(), TOOLS, Reading(tools=[], thinking=True)]),
    finish=st.sampled_from(["stop", "length"]),
    plain=st.booleans(),
    stop=st.sampled_from([(), ("foo",), (TE, "a")]),
)
def test_the_cuts_do_not_matter(
    pieces: list[str], sizes: list[int], reading: Reading, finish: str, plain: bool, stop: tuple[str, ...]
) -> None:
    raw = "".join(pieces)
    tokens = TOKENIZER.encode_plain(raw) if plain else TOKENIZER.encode(raw)
    whole, [*_, last] = play(TOKENIZER, tokens, reading, [len(tokens) + 1], finish, stop=stop)
    split, deltas = play(TOKENIZER, tokens, reading, sizes, finish, stop=stop)
    assert (split.text, split.reasoning, calls_of(split)) == (whole.text, whole.reasoning, calls_of(whole))
    assert "".join(delta.text for delta in deltas) == whole.text == last.text
    assert "".join(delta.reasoning for delta in deltas) == whole.reasoning
    assert [d.index for delta in deltas for d in delta.tool_calls] == list(range(len(whole.tool_calls)))
    assert (split.finish_reason, split.stop_reason) == (whole.finish_reason, whole.stop_reason)
    assert not any("\ud800" <= char <= "\udfff" for char in whole.text + whole.reasoning)
    if reading.tools is None:
        assert not whole.tool_calls
