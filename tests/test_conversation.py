"""Chats over the library: what each later turn resumes, what is let go, and that no reply depends on it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lfm2serve import LLM, RequestOutput, SamplingParams
from lfm2serve.chat.prompt import ChatPrompt
from lfm2serve.counters import CacheStats
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
