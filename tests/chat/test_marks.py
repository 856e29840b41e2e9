"""Where a chat's states are kept: every place must be one that the later prompts it is meant for begin with."""

from __future__ import annotations

import json
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Core

from lfm2serve.chat.prompt import ChatPrompt
from lfm2serve.chat.shield import CUNEIFORM
from lfm2serve.chat.template import ChatTemplate
from lfm2serve.chat.tokenizer import Tokenizer
from lfm2serve.errors import InvalidRequest
from lfm2serve.memory.marks import chat_marks, raw_marks
from lfm2serve.memory.prompt_cache import Mark
from tests.chat.conftest import save, thinking_core
from tests.chat.test_control_text import EVIL, EVIL_TEXT, TEXT, chatml
from tests.chat.test_template import CALLS, PAST, F, G, S, assistant, call, load, system, tool, turn, user

THOUGHTFUL = st.builds("<think>{}</think>{}".format, TEXT, TEXT)
TEXTS = TEXT | EVIL_TEXT | THOUGHTFUL
HEADS = st.lists(
    st.builds(system, TEXTS) | st.builds(lambda text: {"role": "developer", "content": text}, TEXTS), max_size=2
)
TOOLS = st.none() | st.just([F]) | st.builds(lambda name: [F, {"type": "function", "function": {"name": name}}], TEXTS)


@st.composite
def replies(draw: st.DrawFn) -> dict[str, Any]:
    calls = [call(f"f{name}", q=name) for name in draw(st.lists(TEXTS, max_size=2))]
    return assistant(draw(TEXTS), thinking=draw(st.none() | TEXT), tool_calls=calls)


TURNS = st.lists(st.builds(user, TEXTS) | replies() | st.builds(tool, TEXTS), max_size=6)


def texts(template: ChatTemplate, tokenizer: Tokenizer, **request: Any) -> dict[str, str | None]:
    """The text before each place."""
    prompt = template.prompt(**request)
    places = {name: getattr(prompt, name) for name in ("history_end", "last_user", "shared", "settled")}
    return {
        name: None if at is None else tokenizer.decode(prompt.ids[:at], skip_special_tokens=False)
        for name, at in places.items()
    }


def begins(ids: list[int], prompt: ChatPrompt, at: int | None) -> bool:
    return at is None or ids[:at] == prompt.ids[:at]


@pytest.mark.parametrize("name", "abcd")
def test_places_of_a_first_turn(tokenizer: Tokenizer, name: str) -> None:
    head = S + turn("system", "S1")
    assert texts(load(name, tokenizer), tokenizer, messages=[system("S1"), user("Hi")]) == {
        "history_end": head + turn("user", "Hi"),
        "last_user": head + "<|im_start|>",
        "shared": None,  # where last_user is
        "settled": None,
    }


@pytest.mark.parametrize("name", "abcd")
def test_places_of_a_later_turn(tokenizer: Tokenizer, name: str) -> None:
    messages = [system("S1"), user("u1"), assistant("a1"), user("u2")]
    before = S + turn("system", "S1") + turn("user", "u1") + turn("assistant", "a1")
    assert texts(load(name, tokenizer), tokenizer, messages=messages) == {
        "history_end": before + turn("user", "u2"),
        "last_user": before + "<|im_start|>",
        "shared": S + turn("system", "S1") + "<|im_start|>",
        "settled": None,
    }


@pytest.mark.parametrize("name", "abcd")
def test_control_tokens_alone_are_not_worth_a_state(tokenizer: Tokenizer, name: str) -> None:
    template = load(name, tokenizer)
    found = texts(template, tokenizer, messages=[user("Hi")])
    assert found == {"history_end": S + turn("user", "Hi"), "last_user": None, "shared": None, "settled": None}
    found = texts(template, tokenizer, messages=[user("u1"), assistant("a1"), user("u2")])
    assert found["shared"] is None
    assert found["last_user"] == S + turn("user", "u1") + turn("assistant", "a1") + "<|im_start|>"


def test_nothing_is_behind_a_prompt_without_generation_prompt(tokenizer: Tokenizer) -> None:
    prompt = load("d", tokenizer).prompt([system("S"), user("Hi")], add_generation_prompt=False)
    assert prompt.history_end is None
    assert prompt.last_user is not None


@pytest.mark.parametrize("name", "abcd")
def test_chats_without_a_user_message(tokenizer: Tokenizer, name: str) -> None:
    template = load(name, tokenizer)
    only_system = texts(template, tokenizer, messages=[system("S1")])
    assert only_system["last_user"] is None
    assert only_system["shared"] == S + turn("system", "S1") + "<|im_start|>"
    greeting = texts(template, tokenizer, messages=[system("S1"), assistant("Hello")])
    assert greeting["shared"] == S + turn("system", "S1") + "<|im_start|>"


@pytest.mark.parametrize("name", "abcd")
def test_a_greeting_is_not_part_of_what_other_chats_share(tokenizer: Tokenizer, name: str) -> None:
    found = texts(load(name, tokenizer), tokenizer, messages=[system("S1"), assistant("Hello"), user("Hi")])
    assert found["shared"] == S + turn("system", "S1") + "<|im_start|>"
    assert found["last_user"] == S + turn("system", "S1") + turn("assistant", "Hello") + "<|im_start|>"


@pytest.mark.parametrize("name", "abcd")
def test_tools_are_shared_without_a_system_message(tokenizer: Tokenizer, name: str) -> None:
    template = load(name, tokenizer)
    found = texts(template, tokenizer, messages=[user("u1"), assistant("a1"), user("u2")], tools=[F])
    assert found["shared"] is not None
    assert found["shared"] + "user\nu1" in template.render([user("u1")], tools=[F])
    assert '"name": "f"' in found["shared"]


@pytest.mark.parametrize(("name", "settled"), [("a", False), ("b", True), ("c", True), ("d", False)])
def test_what_the_next_turn_keeps_of_past_thoughts(tokenizer: Tokenizer, name: str, settled: bool) -> None:
    """b and c show the last reply's thought until there is another reply; a keeps them all, d has dropped them."""
    found = texts(load(name, tokenizer), tokenizer, messages=PAST)
    before = S + turn("user", "u1") + turn("assistant", "b1") + turn("user", "u2") + "<|im_start|>"
    assert found["settled"] == (before if settled else None)


def test_thoughts_of_a_running_turn_go_with_the_next_user_message(thinking: Tokenizer) -> None:
    template = load("d", thinking)
    messages = [user("u1"), assistant("", thinking="t", tool_calls=CALLS), tool("R")]
    prompt = template.prompt(messages)
    assert prompt.settled is not None
    assert thinking.decode(prompt.ids[: prompt.settled], skip_special_tokens=False) == S + turn("user", "u1") + G
    more_tools = template.encode([*messages, assistant("", tool_calls=CALLS), tool("R2")])
    assert begins(more_tools, prompt, prompt.history_end)
    next_turn = template.encode([*messages, assistant("done"), user("u2")])
    assert begins(next_turn, prompt, prompt.settled)
    assert not begins(next_turn, prompt, prompt.history_end)
    kept = template.prompt(messages, preserve_thinking=True)
    assert kept.settled is None


def test_users_control_strings_are_no_places(tokenizer: Tokenizer) -> None:
    template = load("d", tokenizer)
    plain, evil = ([system(x), user(x), assistant(x), user(x)] for x in ("x", f"x{EVIL}<|im_start|>"))
    names = texts(template, tokenizer, messages=plain)
    for name, text in texts(template, tokenizer, messages=evil).items():
        expected = names[name]
        assert text == (None if expected is None else expected.replace("\nx<", f"\nx{EVIL}<|im_start|><"))


@pytest.mark.parametrize("content", ["", " ", "\n", "\nx", " x", "<", "<|im_end|>", CUNEIFORM[0], CUNEIFORM[0] + "<"])
@pytest.mark.parametrize("body", ["m.content", "m.content | trim", "'<' ~ m.content ~ m.content"])
def test_the_last_text_may_begin_with_anything(tokenizer: Tokenizer, body: str, content: str) -> None:
    template = chatml(body, tokenizer)
    prompt = template.prompt([system("S"), user(content)])
    before = [*template.encode([system("S")], add_generation_prompt=False), tokenizer.token_id("<|im_start|>")]
    assert prompt.last_user == len(before)
    assert prompt.ids[: prompt.last_user] == before


def test_a_template_that_refuses_the_changed_chat_has_no_such_place(tiny: Tokenizer) -> None:
    body = "m.content if loop.index0 < 3 else raise_exception('too long')"
    prompt = chatml(body, tiny).prompt([system("S"), user("u"), assistant("a")])
    assert prompt.settled is None
    assert prompt.history_end is not None
    strict = "m.content if add_generation_prompt else raise_exception('ask for a reply')"
    prompt = chatml(strict, tiny).prompt([system("S"), user("u")])
    assert prompt.history_end is None
    assert prompt.last_user is not None
    with pytest.raises(InvalidRequest, match="ask for a reply"):
        chatml(strict, tiny).prompt([user("u")], add_generation_prompt=False)


def test_one_clock_for_all_the_renderings(tiny: Tokenizer) -> None:
    """A chat at midnight: every rendering has the same date line."""
    now = datetime(2026, 11, 30, 23, 59)

    def clock() -> datetime:
        nonlocal now
        now += timedelta(days=1)
        return now

    template = ChatTemplate("{{ strftime_now('%d') }}<|im_start|>{{ messages[0].content }}<|im_end|>", tiny, now=clock)
    assert template.prompt([user("u")]).last_user is not None


def test_deep_nesting_is_a_bad_request(tiny: Tokenizer) -> None:
    deep: Any = "x"
    for _ in range(5000):
        deep = [deep]
    for template in (load("d", tiny), chatml("m.content", tiny)):
        with pytest.raises(InvalidRequest):
            template.prompt([user()], tools=[{"deep": deep}])


@settings(deadline=None, max_examples=60)
@given(head=HEADS, turns=TURNS, tools=TOOLS, reply=replies(), question=TEXTS, name=st.sampled_from("abcd"))
def test_the_next_turn_begins_with_what_was_kept(
    tokenizer: Tokenizer, head: Any, turns: Any, tools: Any, reply: Any, question: str, name: str
) -> None:
    template = load(name, tokenizer)
    messages = [*head, user("u"), *turns]
    prompt = template.prompt(messages, tools=tools)
    assert prompt.ids == template.encode(messages, tools=tools)
    assert prompt.history_end == len(template.encode(messages, tools=tools, add_generation_prompt=False))
    assert prompt.ids[prompt.history_end :] == tokenizer.encode(G)
    following = template.encode([*messages, reply, user(question)], tools=tools)
    assert begins(following, prompt, prompt.settled or prompt.history_end)
    if name in "ad":  # c and b drop a thought as soon as there is another reply
        assert begins(template.encode([*messages, reply, tool(question)], tools=tools), prompt, prompt.history_end)
    if name == "a" or not any("thinking" in str(turn) or "</think>" in str(turn) for turn in turns):
        assert prompt.settled is None


@settings(deadline=None, max_examples=60)
@given(head=HEADS, turns=TURNS, tools=TOOLS, old=TEXTS, new=TEXTS, name=st.sampled_from("abcd"))
def test_an_edited_last_message_begins_with_what_was_kept(
    tokenizer: Tokenizer, head: Any, turns: Any, tools: Any, old: str, new: str, name: str
) -> None:
    template = load(name, tokenizer)
    prompt = template.prompt([*head, user("u"), *turns, user(old)], tools=tools)
    assert prompt.last_user is not None
    behind = tokenizer.decode(prompt.ids[prompt.last_user :], skip_special_tokens=False)
    assert behind == f"user\n{old}<|im_end|>\n{G}"
    edited = template.encode([*head, user("u"), *turns, user(new)], tools=tools)
    assert begins(edited, prompt, prompt.last_user)


@settings(deadline=None, max_examples=60)
@given(head=HEADS, turns=TURNS, others=TURNS, tools=TOOLS, name=st.sampled_from("abcd"))
def test_other_chats_with_the_same_head_begin_with_what_was_kept(
    tokenizer: Tokenizer, head: Any, turns: Any, others: Any, tools: Any, name: str
) -> None:
    template = load(name, tokenizer)
    prompt = template.prompt([*head, user("u"), *turns], tools=tools)
    assert begins(template.encode([*head, *others, user("v")], tools=tools), prompt, prompt.shared)
    alone = template.prompt([*head, user("v")], tools=tools)  # its head ends where its last user message starts
    assert prompt.shared == (alone.last_user if prompt.last_user != alone.last_user else None)


def test_marks_of_a_chat_by_importance() -> None:
    ids = list(range(100))
    assert chat_marks(ChatPrompt(ids, history_end=97, last_user=60, shared=20, settled=50)) == [
        (97, Mark.HISTORY),
        (60, Mark.LAST_USER),
        (20, Mark.SHARED),
        (50, Mark.SHARED),
    ]
    assert chat_marks(ChatPrompt(ids, history_end=97, last_user=50, settled=50)) == [
        (97, Mark.HISTORY),
        (50, Mark.LAST_USER),
    ]
    assert chat_marks(ChatPrompt(ids)) == []


def test_mark_of_a_raw_prompt() -> None:
    assert raw_marks(5) == [(4, Mark.PROMPT)]
    assert raw_marks(2) == [(1, Mark.PROMPT)]
    assert raw_marks(1) == raw_marks(0) == []


def test_control_tokens_that_take_blanks_give_no_places(tmp_path: Path) -> None:
    """<|im_end|> swallows the newline behind it: its text can't be cut there, and the ids are the whole text's."""
    raw = json.loads(thinking_core().to_str())
    next(token for token in raw["added_tokens"] if token["content"] == "<|im_end|>")["rstrip"] = True
    tokenizer = Tokenizer.from_dir(save(Core.from_str(json.dumps(raw)), tmp_path / "greedy"))
    template = load("d", tokenizer)
    messages = [system("S1"), user("a < b")]
    prompt = template.prompt(messages)
    assert prompt == ChatPrompt(tokenizer.encode(template.render(messages)))
    assert len(prompt.ids) < len(
        load("d", Tokenizer.from_dir(save(thinking_core(), tmp_path / "plain"))).encode(messages)
    )
