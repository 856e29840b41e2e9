"""Kept states over HTTP: what the engine is told of each reply, what clients and metrics are told of the cache."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from lfm2serve.chat.template import ChatTemplate
from lfm2serve.errors import InvalidRequest
from lfm2serve.keeping import SPARED_ROWS
from lfm2serve.memory.marks import chat_marks
from lfm2serve.sampling import SamplingParams

from .conftest import Live, sse, wait_for
from .fake import Step, says
from .test_disconnect import connect
from .test_routes import values

USER = [{"role": "user", "content": "Hi"}]
TALK = [{"role": "system", "content": "Be kind."}, *USER]


def coming_back(live: Live, messages: list[dict[str, Any]], text: str) -> list[int]:
    """The conversation's ids once the client has the reply."""
    reply = {"role": "assistant", "content": text}
    return live.runtime.encode_chat([*messages, reply], add_generation_prompt=False)


# ---- what the engine is told ----


@pytest.mark.parametrize("stream", [False, True])
def test_a_chats_reply_is_told_as_the_client_will_send_it(fake: Live, stream: bool) -> None:
    fake.engine.script = says("Hello there", fake.runtime.tokenizer)
    assert fake.post("/v1/chat/completions", messages=TALK, stream=stream).status_code == 200
    assert fake.engine.told == [(1, coming_back(fake, TALK, "Hello there"))]
    [asked] = fake.engine.submitted
    assert fake.runtime.template is not None
    assert asked["marks"] == chat_marks(fake.runtime.template.prompt(TALK))
    assert len(asked["marks"]) == 2


def test_it_is_told_before_the_client_can_go_on(fake: Live) -> None:
    fake.engine.script = says("Hello there", fake.runtime.tokenizer)
    for chunk in fake.chat(stream=True):
        if chunk.choices[0].finish_reason is not None:
            assert len(fake.engine.told) == 1


def test_switches_and_n_replies_are_told(fake: Live) -> None:
    def script(prompt: list[int], params: SamplingParams, choice: int) -> Iterator[Step]:
        yield fake.runtime.tokenizer.encode(f"reply {choice}")

    fake.engine.script = script
    messages = [*USER, {"role": "assistant", "content": "<think>a</think>b"}, *USER]
    how = {"chat_template_kwargs": {"keep_past_thinking": True}}
    assert fake.post("/v1/chat/completions", messages=messages, n=3, **how).status_code == 200
    replies = [{"role": "assistant", "content": f"reply {choice}"} for choice in range(3)]
    assert sorted(fake.engine.told) == [
        (n + 1, fake.runtime.encode_chat([*messages, reply], add_generation_prompt=False, keep_past_thinking=True))
        for n, reply in enumerate(replies)
    ]


def test_a_stop_string_cuts_what_comes_back(fake: Live) -> None:
    fake.engine.script = says("Hello END there", fake.runtime.tokenizer, pause=0.01)
    answer = fake.post("/v1/chat/completions", messages=USER, stop="END").json()
    assert answer["choices"][0]["message"]["content"] == "Hello "
    assert fake.engine.told == [(1, coming_back(fake, USER, "Hello "))]
    assert fake.engine.cancels == [1]


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_sends_nothing_back(fake: Live, stream: bool) -> None:
    fake.engine.script = lambda prompt, params, choice: iter([60.0])
    with connect(fake, "/v1/chat/completions", {"messages": USER, "stream": stream, "n": 2}):
        wait_for(lambda: fake.engine.census().leased == 2)
    wait_for(lambda: len(fake.engine.told) == 2)
    assert sorted(fake.engine.told) == [(1, None), (2, None)]


def test_a_reply_that_fails_does_not_come_back(fake: Live) -> None:
    fake.engine.script = lambda prompt, params, choice: iter([fake.runtime.tokenizer.encode("Hel"), ValueError("x")])
    assert fake.post("/v1/chat/completions", messages=USER).status_code == 500
    assert fake.engine.told == [(1, None)]


def test_a_reply_that_cannot_be_rendered_is_still_given(fake: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    encode = ChatTemplate.encode

    def picky(self: ChatTemplate, messages: Any, **how: Any) -> list[int]:
        if messages[-1]["role"] == "assistant":
            raise InvalidRequest("no assistants")
        return encode(self, messages, **how)

    monkeypatch.setattr(ChatTemplate, "encode", picky)
    fake.engine.script = says("Hello", fake.runtime.tokenizer)
    answer = fake.post("/v1/chat/completions", messages=USER)
    assert answer.json()["choices"][0]["message"]["content"] == "Hello"
    assert fake.engine.told == [(1, None)]


def test_requests_that_keep_nothing_tell_nothing(fake: Live) -> None:
    fake.post("/v1/chat/completions", messages=TALK, prompt_cache=False)
    fake.post("/v1/completions", prompt="a")
    assert fake.engine.told == []
    assert [asked["marks"] for asked in fake.engine.submitted] == [[], None]


# ---- what clients are told ----


@pytest.mark.parametrize("chat", [False, True])
def test_every_reply_says_how_the_cache_served_it(fake: Live, chat: bool) -> None:
    fake.engine.script = says("Hello there", fake.runtime.tokenizer)
    fake.engine.served = {
        "cached_tokens": 4, "cache_hit": "last_user", "cache_missed": "diverged at token 9",
        "draft_tokens": 7, "accepted_tokens": 5,
    }  # fmt: skip
    path, body = ("/v1/chat/completions", {"messages": TALK}) if chat else ("/v1/completions", {"prompt": "abcdef"})
    expected = {
        "cache": {"hit": "last_user", "missed": "diverged at token 9", "cached_tokens": 4},
        "drafts": {"tokens": 7, "accepted": 5},
    }
    whole = fake.post(path, n=2, **body).json()
    assert [choice["lfm2serve"] for choice in whole["choices"]] == [expected, expected]
    assert whole["usage"]["prompt_tokens_details"] == {"cached_tokens": 4}
    streamed = fake.post(path, stream=True, stream_options={"include_usage": True}, **body).text
    *chunks, last = [json.loads(data) for data in sse(streamed)[:-1]]
    choices = [chunk["choices"][0] for chunk in chunks]
    assert [choice.get("lfm2serve") for choice in choices] == [None] * (len(choices) - 1) + [expected]
    assert last["usage"]["prompt_tokens_details"] == {"cached_tokens": 4}


def test_the_cache_is_emptied_on_demand(fake: Live) -> None:
    answer = fake.http.delete("/v1/prompt_cache")
    assert (answer.status_code, answer.json()) == (200, {"object": "prompt_cache", "dropped": 3})
    assert fake.http.get("/v1/prompt_cache").status_code == 405


# ---- a real engine ----


def served(live: Live, messages: list[dict[str, Any]], **fields: Any) -> tuple[str, dict[str, Any]]:
    """The reply, and how the cache served it."""
    body = {"messages": messages, "temperature": 0, "max_tokens": 12, **fields}
    answer = live.post("/v1/chat/completions", **body).json()
    [choice] = answer["choices"]
    cache = choice["lfm2serve"]["cache"]
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == cache["cached_tokens"]
    return choice["message"]["content"], cache


def test_a_chat_resumes_what_the_last_turn_left(real: Live) -> None:
    """Random weights speak no valid text: what comes back is other tokens, which a background pass prepares where more
    than a few rows of them would have to run."""
    real.http.delete("/v1/prompt_cache")
    before = values(real)
    messages = [{"role": "system", "content": "You answer."}, {"role": "user", "content": "One?"}]
    plain = {"prompt_cache": False, "draft": False}
    text, cache = served(real, messages, max_tokens=60)
    assert cache == {"hit": None, "missed": None, "cached_tokens": 0}
    saved = 0
    for question in ("Two?", "Three?"):
        assert real.engine.drain(60)
        messages.append({"role": "assistant", "content": text})
        left = len(real.runtime.encode_chat(messages, add_generation_prompt=False))
        messages.append({"role": "user", "content": question})
        text, cache = served(real, messages, max_tokens=60)
        assert cache["hit"] == "reply" and left - SPARED_ROWS < cache["cached_tokens"] <= left
        saved += cache["cached_tokens"]
        again, cache = served(real, messages, max_tokens=60, **plain)
        assert again == text
        assert cache == {"hit": None, "missed": None, "cached_tokens": 0}
    after = values(real)
    gained = {name: after[name] - before.get(name, 0.0) for name in after if "prompt_cache" in name}

    def of(event: str, mark: str) -> float:
        return gained[f"lfm2serve:prompt_cache_{event}_total{{mark={mark}}}"]

    assert of("hits", "reply") == 2 and of("tokens_saved", "reply") == saved
    assert of("keeps", "history") == 3 and of("keeps", "reply") >= 2
    assert of("hits", "history") == of("evictions", "history") == of("refusals", "history") == 0
    assert gained["lfm2serve:prompt_cache_bytes{state=held}"] > 0
    dropped = real.http.delete("/v1/prompt_cache").json()["dropped"]
    assert dropped == after["lfm2serve:prompt_cache_states"]
    assert served(real, messages, max_tokens=60) == (text, {"hit": None, "missed": None, "cached_tokens": 0})


def test_resent_edited_and_other_chats_resume_too(real: Live) -> None:
    real.http.delete("/v1/prompt_cache")
    template = real.runtime.template
    assert template is not None
    head = [{"role": "system", "content": "You answer in rhyme."}]
    messages = [*head, {"role": "user", "content": "Is it late?"}]
    text, _ = served(real, messages)
    prompt = template.prompt(messages)
    reached = prompt.history_end
    for _ in range(3):
        again, cache = served(real, messages)
        assert again == text
        assert cache["hit"] is not None and reached <= cache["cached_tokens"] < len(prompt.ids)
        reached = cache["cached_tokens"]
    for other in ("Is it dark?", "No"):
        _, cache = served(real, [*head, {"role": "user", "content": other}])
        assert cache["hit"] in ("last_user", "shared")
        assert cache["cached_tokens"] >= prompt.last_user
    longer = [*messages, {"role": "assistant", "content": "Never."}, {"role": "user", "content": "Why?"}]
    _, cache = served(real, longer)
    assert cache["cached_tokens"] >= prompt.history_end


def test_the_same_completion_has_one_row_left(real: Live) -> None:
    real.http.delete("/v1/prompt_cache")
    replies = [real.complete("It was a dark night", max_tokens=3) for _ in range(3)]
    assert len({reply.choices[0].text for reply in replies}) == 1
    prompt = replies[0].usage.prompt_tokens
    assert [reply.usage.prompt_tokens_details.cached_tokens for reply in replies] == [0, prompt - 1, prompt - 1]
    assert replies[2].choices[0].lfm2serve["cache"]["hit"] == "prompt"
