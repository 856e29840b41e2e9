"""ReplyBuilder: events in, a reply out, the same whichever way the tokens come."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lfm2serve.chat.tokenizer import Tokenizer
from lfm2serve.errors import EngineDead
from lfm2serve.outputs import Logprob
from lfm2serve.reply import LEAST_LOGPROB, ReplyBuilder, ReplyDelta
from lfm2serve.sampling import SamplingParams
from lfm2serve.stream import StreamEvent, StreamMetrics, TokenLogprobs

TOKENIZER = Tokenizer.from_dir(Path(__file__).parent / "data" / "tiny-lfm2moe")
EOS = TOKENIZER.token_id("<|im_end|>") or 0
BYTES = {TOKENIZER.token_bytes(n): n for n in range(TOKENIZER.size) if len(TOKENIZER.token_bytes(n)) == 1}


def ids_of(text: str) -> list[int]:
    """One token a byte, so that characters and stop strings lie across tokens."""
    return [BYTES[bytes([byte])] for byte in text.encode()]


def event(tokens: Sequence[int] = (), **fields: Any) -> StreamEvent:
    return StreamEvent(1, StreamMetrics(arrival=0.0, prompt_tokens=3), list(tokens), **fields)


def run(
    tokens: Sequence[int],
    params: SamplingParams,
    size: int = 1,
    finish: str | None = "length",
    stop_reason: int | None = None,
) -> tuple[ReplyBuilder, list[ReplyDelta]]:
    """Feed tokens `size` at a time, as the engine does: the reason comes with the last of them."""
    builder = ReplyBuilder(TOKENIZER, params)
    pieces = [tokens[at : at + size] for at in range(0, len(tokens), size)]
    deltas = []
    for count, piece in enumerate(pieces, start=1):
        last = count == len(pieces)
        reason, stopped = (finish, stop_reason) if last else (None, None)
        deltas.append(builder.feed(event(piece, finish_reason=reason, stop_reason=stopped)))
    return builder, deltas


@pytest.mark.parametrize("size", [1, 2, 3, 100])
def test_text_of_a_reply_that_reaches_its_length(size: int) -> None:
    tokens = ids_of("日本語 🎉 ď ∑")
    builder, deltas = run(tokens, SamplingParams(), size)
    assert builder.text == "".join(delta.text for delta in deltas) == "日本語 🎉 ď ∑"
    assert builder.token_ids == [token for delta in deltas for token in delta.token_ids] == tokens
    assert [delta.finish_reason for delta in deltas] == [None] * (len(deltas) - 1) + ["length"]
    assert builder.logprobs is None and builder.cumulative_logprob is None


def test_a_character_cut_by_the_length_becomes_one_replacement_character() -> None:
    builder, deltas = run(ids_of("a🎉")[:-1], SamplingParams())
    assert builder.text == "a�" and deltas[-1].text == "�"


@pytest.mark.parametrize("skip", [True, False])
def test_eos_is_a_token_without_text(skip: bool) -> None:
    tokens = [*ids_of("hi"), EOS]
    params = SamplingParams(skip_special_tokens=skip, include_stop_str_in_output=True)
    builder, _ = run(tokens, params, finish="stop")
    assert (builder.text, builder.token_ids) == ("hi", tokens)
    assert (builder.finish_reason, builder.stop_reason) == ("stop", None)


def test_stop_token_has_text_only_on_demand() -> None:
    tokens = ids_of("hi!")
    for include, text in ((False, "hi"), (True, "hi!")):
        params = SamplingParams(stop_token_ids=[tokens[-1]], include_stop_str_in_output=include)
        builder, _ = run(tokens, params, finish="stop", stop_reason=tokens[-1])
        assert (builder.text, builder.token_ids) == (text, tokens)
        assert (builder.finish_reason, builder.stop_reason) == ("stop", tokens[-1])


def test_special_tokens_are_text_only_on_demand() -> None:
    tokens = TOKENIZER.encode("a<|tool_call_start|>b")
    assert run(tokens, SamplingParams())[0].text == "ab"
    assert run(tokens, SamplingParams(skip_special_tokens=False))[0].text == "a<|tool_call_start|>b"


@pytest.mark.parametrize("size", [1, 2, 5, 100])
def test_stop_string_ends_the_reply_at_the_token_that_completes_it(size: int) -> None:
    params = SamplingParams(stop=["own fox"])
    builder, deltas = run(ids_of("The quick brown fox jumps"), params, size)
    assert builder.text == "".join(delta.text for delta in deltas) == "The quick br"
    assert builder.token_ids == ids_of("The quick brown fox")
    assert (builder.finish_reason, builder.stop_reason) == ("stop", "own fox")
    ended = [delta.finish_reason for delta in deltas].index("stop")
    assert all(delta == ReplyDelta() for delta in deltas[ended + 1 :])


def test_stop_string_is_kept_on_demand() -> None:
    builder, _ = run(ids_of("one, five, six"), SamplingParams(stop="five", include_stop_str_in_output=True))
    assert builder.text == "one, five"


def test_the_engines_last_word_after_a_stop_string_changes_nothing() -> None:
    builder, _ = run(ids_of("a stop"), SamplingParams(stop="stop"), finish=None)
    delta = builder.feed(event(ids_of("x"), finish_reason="abort"))
    assert delta == ReplyDelta()
    assert (builder.text, builder.finish_reason, builder.stop_reason) == ("a ", "stop", "stop")


def test_a_stop_string_in_the_last_tokens_outranks_the_length() -> None:
    builder, _ = run(ids_of("a stop"), SamplingParams(stop="stop"), size=6)
    assert (builder.finish_reason, builder.stop_reason) == ("stop", "stop")


def test_what_could_have_been_a_stop_string_is_given_out_at_the_end() -> None:
    for finish in ("length", "abort"):
        builder, deltas = run(ids_of("a sto"), SamplingParams(stop="stop"), finish=finish)
        assert builder.text == "a sto" and deltas[-1].text == "sto"
        assert builder.finish_reason == finish
    builder, _ = run([*ids_of("a sto"), EOS], SamplingParams(stop="stop"), finish="stop")
    assert (builder.text, builder.stop_reason) == ("a sto", None)


def test_stop_string_of_a_replacement_character_is_found_at_the_end() -> None:
    builder, _ = run(ids_of("a🎉")[:-1], SamplingParams(stop="�"))
    assert (builder.text, builder.finish_reason, builder.stop_reason) == ("a", "stop", "�")


@pytest.mark.parametrize("size", [1, 3, 100])
def test_stop_strings_do_not_count_within_min_tokens(size: int) -> None:
    tokens = ids_of("xxaxxbxx")
    for least, text in ((0, ""), (1, "x"), (4, "xxax"), (7, "xxaxxbx"), (8, "xxaxxbxx")):
        builder, _ = run(tokens, SamplingParams(stop="x", min_tokens=least, max_tokens=8), size)
        assert len(builder.token_ids) > least or least == 8
        assert builder.text == text or (least == 1 and builder.text == "x")


def logprobs_of(count: int) -> list[TokenLogprobs]:
    return [TokenLogprobs(-0.5 * n, n + 1, ((40, -0.25), (41, -1.0))) for n in range(count)]


def test_logprobs_have_vllms_shape() -> None:
    builder = ReplyBuilder(TOKENIZER, SamplingParams(logprobs=2))
    tokens = [41, EOS]
    delta = builder.feed(event(tokens, logprobs=logprobs_of(2), finish_reason="stop"))
    text = TOKENIZER.token_text
    assert delta.logprobs == builder.logprobs
    assert builder.logprobs is not None
    first, last = builder.logprobs
    assert list(first) == [41, 40] and list(last) == [EOS, 40, 41]
    assert first[41] == Logprob(0.0, 1, text(41)) and first[40] == Logprob(-0.25, 1, text(40))
    assert last[EOS] == Logprob(-0.5, 2, "<|im_end|>") and last[41].rank == 2
    assert builder.cumulative_logprob == -0.5


def test_logprobs_end_with_the_stop_string() -> None:
    tokens = ids_of("a stop and more")
    builder = ReplyBuilder(TOKENIZER, SamplingParams(logprobs=0, stop="stop"))
    delta = builder.feed(event(tokens, logprobs=logprobs_of(len(tokens))))
    assert delta.logprobs is not None and len(delta.logprobs) == len(delta.token_ids) == len("a stop")
    assert builder.cumulative_logprob == sum(-0.5 * n for n in range(6))


def test_minus_infinity_is_clamped() -> None:
    builder = ReplyBuilder(TOKENIZER, SamplingParams(logprobs=1))
    builder.feed(event([40], logprobs=[TokenLogprobs(float("-inf"), 400, ((41, float("-inf")),))]))
    assert builder.logprobs is not None
    assert [entry.logprob for entry in builder.logprobs[0].values()] == [LEAST_LOGPROB] * 2
    assert builder.cumulative_logprob == LEAST_LOGPROB


def test_prompt_logprobs_come_once_and_begin_with_none() -> None:
    builder = ReplyBuilder(TOKENIZER, SamplingParams(prompt_logprobs=0, max_tokens=0), [1, 40, 41])
    scores = [None, TokenLogprobs(-1.0, 2, ()), TokenLogprobs(-2.0, 3, ())]
    delta = builder.feed(event(prompt_logprobs=scores, finish_reason="length"))
    assert delta == ReplyDelta(finish_reason="length")
    assert builder.prompt_logprobs is not None
    assert builder.prompt_logprobs[0] is None
    assert [list(entry) for entry in builder.prompt_logprobs[1:] if entry] == [[40], [41]]
    assert builder.text == ""


def test_an_error_is_kept_with_the_text_so_far() -> None:
    builder, _ = run(ids_of("part"), SamplingParams(stop="rt!"), finish=None)
    error = EngineDead("gone")
    delta = builder.feed(event(finish_reason="error", error=error))
    assert (builder.error, builder.text, delta.text, builder.finish_reason) == (error, "part", "rt", "error")


def test_metrics_are_the_latest() -> None:
    builder, _ = run(ids_of("a stop"), SamplingParams(stop="stop"), finish=None)
    last = event(finish_reason="abort")
    builder.feed(last)
    assert builder.metrics is last.metrics


def test_completion_is_a_copy_in_vllms_shape() -> None:
    builder, _ = run(ids_of("a stop"), SamplingParams(stop="stop"))
    made = builder.completion(3)
    assert (made.index, made.text, made.finish_reason, made.stop_reason) == (3, "a ", "stop", "stop")
    assert made.token_ids == builder.token_ids and made.token_ids is not builder.token_ids
    assert made.finished()


WORDS = st.text("ab🎉é", max_size=16)


@settings(deadline=None)
@given(
    text=WORDS,
    stops=st.lists(st.text("ab🎉é", min_size=1, max_size=4), max_size=3),
    sizes=st.lists(st.integers(0, 5), max_size=40),
    least=st.integers(0, 6),
    include=st.booleans(),
    finish=st.sampled_from(["length", "stop", "abort"]),
)
def test_a_reply_does_not_depend_on_how_its_tokens_arrive(
    text: str, stops: list[str], sizes: list[int], least: int, include: bool, finish: str
) -> None:
    tokens = [*ids_of(text), EOS]
    params = SamplingParams(stop=stops, min_tokens=least, include_stop_str_in_output=include)
    whole = ReplyBuilder(TOKENIZER, params)
    one = whole.feed(event(tokens, finish_reason=finish))
    split, sent, left = ReplyBuilder(TOKENIZER, params), "", list(tokens)
    for size in sizes:
        piece, left = left[:size], left[size:]
        sent += split.feed(event(piece)).text
        if not left:
            break
    sent += split.feed(event(left, finish_reason=finish)).text if left else ""
    if left:
        assert sent == one.text == whole.text == split.text
        assert split.completion(0) == whole.completion(0)
    assert whole.text == text or whole.stop_reason is not None or finish != "stop"
