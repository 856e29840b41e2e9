"""POST /v1/completions with the official client, over a real engine."""

from __future__ import annotations

from typing import Any

import pytest

from .conftest import Live


def ids_of(live: Live, text: str) -> list[int]:
    return live.post("/tokenize", prompt=text).json()["tokens"]


def test_shape(real: Live) -> None:
    reply = real.complete("Hello", model="x", max_tokens=3, extra_body={"ignore_eos": True, "prompt_cache": False})
    assert reply.id.startswith("cmpl-") and reply.object == "text_completion" and reply.model == "x"
    [choice] = reply.choices
    assert (choice.index, choice.finish_reason, choice.logprobs) == (0, "length", None)
    assert reply.usage.prompt_tokens == len(ids_of(real, "Hello")) and reply.usage.completion_tokens == 3
    assert reply.usage.prompt_tokens_details.cached_tokens == 0


def test_every_kind_of_prompt(real: Live) -> None:
    texts = ["Hello", "Once upon a time"]
    ids = [ids_of(real, text) for text in texts]
    alone = [real.complete(text) for text in texts]
    expected = [reply.choices[0].text for reply in alone]
    for prompt in (texts, ids):
        reply = real.complete(prompt)
        assert [choice.text for choice in reply.choices] == expected
        assert [choice.index for choice in reply.choices] == [0, 1]
        for part in ("prompt_tokens", "completion_tokens", "total_tokens"):
            assert getattr(reply.usage, part) == sum(getattr(one.usage, part) for one in alone)
    assert real.complete(ids[0]).choices[0].text == expected[0]


def test_choices_of_several_prompts(real: Live) -> None:
    ask = {"n": 2, "temperature": 1.0, "seed": 3}
    both = real.complete(["Hello", "Once"], **ask)
    assert [choice.index for choice in both.choices] == [0, 1, 2, 3]
    texts = [choice.text for choice in both.choices]
    assert texts == [c.text for prompt in ("Hello", "Once") for c in real.complete(prompt, **ask).choices]
    streamed = dict.fromkeys(range(4), "")
    for chunk in real.complete(["Hello", "Once"], stream=True, **ask):
        for choice in chunk.choices:
            streamed[choice.index] += choice.text
    assert list(streamed.values()) == texts


@pytest.mark.parametrize(
    "how", [{}, {"echo": True}, {"echo": True, "logprobs": 2}, {"logprobs": 0}, {"stop": ["e", "a"]}]
)
def test_streamed_equals_whole(real: Live, how: dict[str, Any]) -> None:
    whole = real.complete("Tokyo 日本 🎉", max_tokens=24, **how).choices[0]
    text, reasons = "", []
    parts: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for chunk in real.complete("Tokyo 日本 🎉", max_tokens=24, stream=True, **how):
        [choice] = chunk.choices
        assert chunk.object == "text_completion"
        text += choice.text
        reasons.append(choice.finish_reason)
        for name, values in parts.items():
            values += getattr(choice.logprobs, name) if choice.logprobs else []
    assert text == whole.text
    assert reasons == [None] * (len(reasons) - 1) + [whole.finish_reason]
    if "logprobs" in how:
        assert {name: getattr(whole.logprobs, name) for name in parts} == parts


def test_echo(real: Live) -> None:
    reply = real.complete("Hello").choices[0].text
    assert real.complete("Hello", echo=True).choices[0].text == "Hello" + reply
    assert real.complete(ids_of(real, "Hello"), echo=True).choices[0].text == "Hello" + reply


@pytest.mark.parametrize("max_tokens", [1, 0])
@pytest.mark.parametrize("as_ids", [False, True])
def test_scoring_a_prompt(real: Live, max_tokens: int, as_ids: bool) -> None:
    ids = ids_of(real, "a b")[:5]
    text = real.runtime.tokenizer.decode(ids)
    prompt: Any = ids if as_ids else text
    reply = real.complete(prompt, echo=True, logprobs=1, max_tokens=max_tokens, extra_body={"return_token_ids": True})
    [choice] = reply.choices
    logprobs = choice.logprobs
    count = len(ids) + max_tokens
    assert choice.prompt_token_ids == ids and len(choice.token_ids) == max_tokens
    for values in (logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs, logprobs.text_offset):
        assert len(values) == count
    assert logprobs.token_logprobs[0] is None and logprobs.top_logprobs[0] is None
    assert all(value <= 0 for value in logprobs.token_logprobs[1:])
    for token, value, top in zip(
        logprobs.tokens[1:], logprobs.token_logprobs[1:], logprobs.top_logprobs[1:], strict=True
    ):
        assert top[token] == value and 1 <= len(top) <= 2
    assert reply.usage.completion_tokens == max_tokens and choice.finish_reason == "length"
    if max_tokens == 0:
        assert choice.text == text


def test_offsets_point_at_the_tokens_text(real: Live) -> None:
    for prompt in ("one, two: 日本", "<|im_start|>user\nHi<|im_end|>"):
        choice = real.complete(prompt, echo=True, logprobs=0, max_tokens=20).choices[0]
        offsets = choice.logprobs.text_offset
        assert offsets == sorted(offsets) and offsets[0] == 0
        for place, token in zip(offsets, choice.logprobs.tokens, strict=True):
            if "\ufffd" not in token and not token.startswith("<|startoftext|>") and token != "<|im_end|>":
                assert choice.text.startswith(token, place)
        assert choice.text.startswith(prompt)


def test_scores_dont_depend_on_how_they_are_asked(real: Live) -> None:
    ids = ids_of(real, "The quick brown fox")
    scored = real.complete(ids, echo=True, logprobs=3, max_tokens=4)
    again = real.complete(ids, echo=True, logprobs=3, max_tokens=0)
    count = len(ids)
    assert again.choices[0].logprobs.token_logprobs == scored.choices[0].logprobs.token_logprobs[:count]
    vllm = real.complete(ids, max_tokens=1, extra_body={"prompt_logprobs": 0}).choices[0].prompt_logprobs
    assert [None, *(step[str(i)]["logprob"] for i, step in zip(ids[1:], vllm[1:], strict=True))] == (
        again.choices[0].logprobs.token_logprobs
    )


def test_max_tokens_0_with_echo_needs_no_logprobs(real: Live) -> None:
    reply = real.complete("Hello", echo=True, max_tokens=0)
    assert (reply.choices[0].text, reply.choices[0].finish_reason) == ("Hello", "length")


def test_begin_token_is_added_once_and_can_be_left_out(real: Live) -> None:
    plain = real.complete("Hello", extra_body={"return_token_ids": True}).choices[0].prompt_token_ids
    twice = real.complete("<|startoftext|>Hello", extra_body={"return_token_ids": True}).choices[0].prompt_token_ids
    bare = real.complete("Hello", extra_body={"return_token_ids": True, "add_special_tokens": False})
    assert bare.choices[0].prompt_token_ids == [i for i in plain if i != real.runtime.tokenizer.bos_token_id]
    assert twice.count(real.runtime.tokenizer.bos_token_id) <= 1


def test_best_of_equal_to_n_is_accepted(real: Live) -> None:
    assert len(real.complete("Hi", n=2, best_of=2).choices) == 2
