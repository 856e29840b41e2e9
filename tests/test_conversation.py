"""Chats over the library: what each later turn resumes, what is let go, and that no reply depends on it."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from lfm2serve import LLM, RequestOutput, SamplingParams
from lfm2serve.chat.prompt import ChatPrompt
from lfm2serve.chat.template import ChatTemplate
from lfm2serve.counters import CacheStats
from lfm2serve.keeping import SPARED_ROWS
from lfm2serve.runtime import Runtime

SYSTEM = {"role": "system", "content": "You are a helpful assistant."}
QUESTIONS = ["What is the capital of Peru?", "My name is Anna. Remember it.", "What is my name?", "What is 12 plus 5?"]
GREEDY = SamplingParams(temperature=0.0, max_tokens=40)
SAMPLED = SamplingParams(temperature=0.8, seed=7, max_tokens=40)


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


@pytest.fixture(scope="module")
def demo() -> Iterator[LLM]:
    with LLM("demo", progress=False, context=1024, kv_pages=16, prompt_cache_gib=0.25) as llm:
        yield llm


@pytest.fixture(scope="module")
def tiny(tiny_moe: Path) -> Iterator[LLM]:
    """Random weights: the text of a reply is hardly ever tokenised as it was drawn."""
    with LLM(tiny_moe, progress=False, context=1024, kv_pages=16, prompt_cache_gib=0.25) as llm:
        yield llm


@pytest.fixture(autouse=True)
def a_fresh_cache(request: pytest.FixtureRequest) -> Iterator[None]:
    """Every test begins without kept states, and leaves all pages free and every state counted."""
    llms: list[LLM] = [request.getfixturevalue(name) for name in ("demo", "tiny") if name in request.fixturenames]
    for llm in llms:
        llm.prompt_cache.clear()
    yield
    for llm in llms:
        settle(llm)
        assert llm.census().clean
        stats, budget = llm.prompt_cache.stats(), runtime_of(llm).plan.prompt_cache
        assert stats.held_bytes + stats.spare_bytes == budget // 2**21 * 2**21
        llm.prompt_cache.clear()
        stats = llm.prompt_cache.stats()
        assert (stats.states, stats.held_bytes) == (0, 0)


def runtime_of(llm: LLM) -> Runtime:
    return llm._open_runtime()


def settle(llm: LLM) -> CacheStats:
    """Wait for background passes too."""
    assert runtime_of(llm).engine.drain(60)
    return llm.prompt_cache.stats()


def places(llm: LLM, messages: list[dict[str, Any]]) -> ChatPrompt:
    template = runtime_of(llm).template
    assert template is not None
    return template.prompt(messages)


def returned(llm: LLM, messages: list[dict[str, Any]]) -> int:
    """Tokens of a conversation as a client sends it back."""
    return len(runtime_of(llm).encode_chat(messages, add_generation_prompt=False))


def ask(llm: LLM, messages: list[dict[str, Any]], params: SamplingParams = GREEDY, **how: Any) -> RequestOutput:
    [output] = llm.chat(messages, params, **how)
    return output


def token_ids(output: RequestOutput) -> list[int]:
    return output.outputs[0].token_ids


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_each_turn_resumes_at_the_end_of_the_last_reply(demo: LLM, params: SamplingParams) -> None:
    messages = [SYSTEM]
    ran = 0  # rows that the turn before has left behind
    for question in QUESTIONS:
        messages.append(user(question))
        output = ask(demo, messages, params)
        assert output.num_cached_tokens == ran
        assert output.metrics is not None and output.metrics.num_cached_tokens == ran
        assert token_ids(output) == token_ids(ask(demo, messages, params, prompt_cache=False, draft=False))
        [reply] = output.outputs
        assert reply.finish_reason == "stop"
        messages.append(assistant(reply.text))
        ran = len(output.prompt_token_ids) + len(reply.token_ids) - 1  # of the token that ended it no row ran
        assert returned(demo, messages) > ran
    counters = settle(demo).counters
    assert runtime_of(demo).engine.stats().counters.warm_passes == 0, "every reply comes back as it was drawn"
    assert counters.lookups >= len(QUESTIONS)


def test_resending_editing_and_branching(demo: LLM) -> None:
    first = [SYSTEM, user(QUESTIONS[0])]
    reply = ask(demo, first)
    chat = [*first, assistant(reply.outputs[0].text), user(QUESTIONS[1])]
    ask(demo, chat)
    history = places(demo, chat).history_end
    assert history is not None
    for _ in range(3):
        assert history <= ask(demo, chat).num_cached_tokens < len(places(demo, chat).ids)
    edited = [*chat[:-1], user("How many days has a week?")]
    assert ask(demo, edited).num_cached_tokens == places(demo, edited).last_user
    other = [SYSTEM, user("Where is Lima?")]
    assert ask(demo, other).num_cached_tokens >= places(demo, other).last_user
    branch = [*chat[:3], user("What is 2 plus 2?")]
    assert ask(demo, branch).num_cached_tokens >= places(demo, branch).last_user


def test_a_raw_prompt_sent_again_has_one_row_left(demo: LLM) -> None:
    outputs = [demo.generate("Once upon a time", GREEDY)[0] for _ in range(3)]
    count = len(outputs[0].prompt_token_ids)
    assert [output.num_cached_tokens for output in outputs] == [0, count - 1, count - 1]
    assert len({tuple(token_ids(output)) for output in outputs}) == 1


def test_what_comes_back_as_other_tokens_is_prepared(tiny: LLM) -> None:
    messages = [SYSTEM]
    for turn, question in enumerate(QUESTIONS[:3]):
        messages.append(user(question))
        output = ask(tiny, messages, SAMPLED.with_(ignore_eos=True, max_tokens=60))
        assert output.num_cached_tokens == (returned(tiny, messages[:-1]) if turn else 0)
        messages.append(assistant(output.outputs[0].text))
        assert token_ids(output) == token_ids(
            ask(tiny, messages[:-1], SAMPLED.with_(ignore_eos=True, max_tokens=60), prompt_cache=False)
        )
        settle(tiny)
    assert runtime_of(tiny).engine.stats().counters.warm_passes >= 2


def test_a_reply_cut_by_a_stop_string_is_prepared_as_it_was_cut(demo: LLM) -> None:
    messages = [SYSTEM, *[user("word " * 30)] * 2, user(QUESTIONS[0])]
    output = ask(demo, messages, GREEDY.with_(stop=[" is"]))
    [reply] = output.outputs
    assert (reply.text, reply.finish_reason) == ("The capital of Peru", "stop")
    settle(demo)
    messages += [assistant(reply.text), user(QUESTIONS[3])]
    history = places(demo, messages[:-2]).history_end
    assert history is not None
    assert history <= ask(demo, messages).num_cached_tokens <= returned(demo, messages[:-1])


def test_a_stream_that_is_left_keeps_nothing_of_its_reply(demo: LLM) -> None:
    messages = [SYSTEM, user(QUESTIONS[0])]
    with demo.stream(messages, GREEDY) as stream:
        settle(demo)  # the reply is whole, and nobody has read it
        states = demo.prompt_cache.stats().states
    assert settle(demo).states == states - 1
    with demo.stream(messages, GREEDY) as stream:
        text = "".join(delta.text for delta in stream)
    assert settle(demo).states >= states
    ended = len(stream.output.prompt_token_ids) + len(stream.output.outputs[0].token_ids) - 1
    assert ask(demo, [*messages, assistant(text), user(QUESTIONS[1])]).num_cached_tokens == ended


def test_several_replies_to_one_chat(demo: LLM) -> None:
    messages = [SYSTEM, user(QUESTIONS[0])]
    output = ask(demo, messages, SAMPLED.with_(n=3, temperature=1.5))
    settle(demo)
    for reply in output.outputs:
        turn = [*messages, assistant(reply.text), user(QUESTIONS[1])]
        history = places(demo, messages).history_end
        assert history is not None and ask(demo, turn).num_cached_tokens >= history


def test_many_chats_at_once(demo: LLM) -> None:
    chats = [[{"role": "system", "content": f"You are helper {n}."}, user(QUESTIONS[0])] for n in range(6)]
    first = demo.chat(chats, GREEDY, use_tqdm=False)
    assert [output.num_cached_tokens for output in first] == [0] * 6
    for chat, output in zip(chats, first, strict=True):
        chat += [assistant(output.outputs[0].text), user(QUESTIONS[2])]
    second = demo.chat(chats, GREEDY, use_tqdm=False)
    for before, output in zip(first, second, strict=True):
        assert output.num_cached_tokens == len(before.prompt_token_ids) + len(token_ids(before)) - 1
    fresh = demo.chat(chats, GREEDY, use_tqdm=False, prompt_cache=False)
    assert [output.num_cached_tokens for output in fresh] == [0] * 6
    assert [token_ids(output) for output in fresh] == [token_ids(output) for output in second]


def test_prompt_cache_false_neither_reads_nor_keeps(demo: LLM) -> None:
    messages = [SYSTEM, user(QUESTIONS[0])]
    before = settle(demo)
    assert ask(demo, messages, prompt_cache=False).num_cached_tokens == 0
    demo.generate("Once", GREEDY, prompt_cache=False)
    list(demo.stream(messages, GREEDY, prompt_cache=False))
    after = settle(demo)
    assert after.states == 0 and after.counters == before.counters
    ask(demo, messages)
    kept = settle(demo)
    assert kept.states > 0
    assert ask(demo, messages, prompt_cache=False).num_cached_tokens == 0
    assert settle(demo) == kept


def test_clearing_makes_the_next_turn_run_from_its_start(demo: LLM) -> None:
    messages = [SYSTEM, user(QUESTIONS[0])]
    ask(demo, messages)
    states = settle(demo).states
    assert repr(demo.prompt_cache).startswith(f"prompt cache: {states} states, ")
    assert demo.prompt_cache.clear() == states
    assert demo.prompt_cache.clear() == 0
    assert ask(demo, messages).num_cached_tokens == 0


@pytest.mark.parametrize("options", [{"prompt_cache_gib": 0}, {"warm_pass": False}, {"drafts": False}])
def test_switched_off_the_replies_are_the_same(demo: LLM, options: dict[str, Any]) -> None:
    messages = [SYSTEM, user(QUESTIONS[0]), assistant("It is Lima."), user(QUESTIONS[1])]
    expected = ask(demo, messages)
    with LLM("demo", progress=False, context=1024, kv_pages=16, **options) as llm:
        for _ in range(2):
            output = ask(llm, messages)
            assert token_ids(output) == token_ids(expected)
            settle(llm)
        cached = output.num_cached_tokens
        counters = runtime_of(llm).engine.stats().counters
        if "prompt_cache_gib" in options:
            assert cached == llm.prompt_cache.stats().states == llm.prompt_cache.clear() == 0
        else:
            assert cached > 0
        if "drafts" in options:
            assert counters.draft_tokens == 0
        assert counters.warm_passes == 0


# ---- calls and thoughts ----

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 12}},
            "required": ["city"],
        },
    },
}
RESULT = {"role": "tool", "tool_call_id": "call_1", "content": '{"temperature": 20, "condition": "sunny"}'}


def as_returned(output: RequestOutput) -> dict[str, Any]:
    """The assistant message as a client of the API sends it back."""
    reply = output.outputs[0]
    message: dict[str, Any] = {"role": "assistant", "content": reply.text or None}
    if reply.reasoning:
        message["reasoning_content"] = reply.reasoning
    if reply.tool_calls:
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in reply.tool_calls
        ]
    return message


def test_a_call_that_comes_back_as_it_was_drawn_is_resumed(demo: LLM) -> None:
    messages = [SYSTEM, user("What is the weather in Lima?")]
    passes = runtime_of(demo).engine.stats().counters.warm_passes
    first = ask(demo, messages, tools=[WEATHER])
    ran = len(first.prompt_token_ids) + len(token_ids(first)) - 1
    messages += [as_returned(first), RESULT]
    second = ask(demo, messages, tools=[WEATHER])
    assert second.num_cached_tokens == ran and "sunny" in second.outputs[0].text
    assert token_ids(second) == token_ids(ask(demo, messages, tools=[WEATHER], prompt_cache=False, draft=False))
    ran = len(second.prompt_token_ids) + len(token_ids(second)) - 1
    assert ask(demo, [*messages, as_returned(second), user("Thanks")], tools=[WEATHER]).num_cached_tokens == ran
    assert runtime_of(demo).engine.stats().counters.warm_passes == passes


@pytest.fixture
def thinking(demo: LLM) -> Iterator[LLM]:
    """The demo model under a template that opens a thought and drops those before the last user message."""
    runtime = runtime_of(demo)
    source = (Path(__file__).parent / "chat" / "templates" / "d.jinja").read_text()
    before, runtime.template = (
        runtime.template,
        ChatTemplate(
            source + "{%- if add_generation_prompt -%}{{- '<think>' -}}{%- endif -%}",
            runtime.tokenizer,
            now=lambda: datetime(2026, 11, 30),
        ),
    )
    yield demo
    settle(demo)
    runtime.template = before


def test_thoughts_and_calls_are_resumed_as_they_come_back(thinking: LLM) -> None:
    """Within a user's turn the thought is shown to the model, in the next one no more; the call's quotes differ from
    those that were drawn. No more than a few rows run again."""
    end = runtime_of(thinking).tokenizer.token_id("</think>")
    assert end is not None
    how = {"tools": [WEATHER], "tool_choice": "required"}
    params = SamplingParams(temperature=1.0, seed=2, max_tokens=200, logit_bias={end: 19.0})
    messages = [user("Think. What is the weather in Lima?")]
    for follow in (RESULT, user("And now?"), user("Once more?")):
        output = ask(thinking, messages, params, **how)
        reply = output.outputs[0]
        assert reply.reasoning and not reply.text and reply.finish_reason == "tool_calls", reply
        settle(thinking)
        plain = ask(thinking, messages, params, **how, prompt_cache=False, draft=False)
        assert token_ids(plain) == token_ids(output)
        messages += [as_returned(output), follow]
        kept = runtime_of(thinking).encode_chat(messages[:-1], tools=[WEATHER], add_generation_prompt=False)
        prompt = runtime_of(thinking).encode_chat(messages, tools=[WEATHER])
        following = ask(thinking, messages, params, **how)
        if prompt[: len(kept)] == kept:
            assert following.num_cached_tokens > len(kept) - SPARED_ROWS
        else:  # the new user message has taken the thought out of the history
            assert follow["role"] == "user" and 0 < following.num_cached_tokens < len(kept)
