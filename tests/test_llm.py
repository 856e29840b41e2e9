"""The library face on a real engine: inputs, results in order, streams, cancels, and memory given back."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from shutil import copytree

import pytest

from lfm2serve import LLM, RequestOutput, SamplingParams
from lfm2serve.errors import CheckpointError, ContextLengthExceeded, DeviceError, EngineDead, InvalidRequest
from lfm2serve.runtime import Runtime

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
LONG = SamplingParams(temperature=1.0, max_tokens=3000, ignore_eos=True)
QUESTION = [{"role": "user", "content": "Where is Lima?"}]


@pytest.fixture(scope="module")
def llm(tiny_moe: Path) -> Iterator[LLM]:
    with LLM(tiny_moe, progress=False) as llm:
        yield llm


@pytest.fixture(autouse=True)
def nothing_leaks(request: pytest.FixtureRequest) -> Iterator[None]:
    """After every test that used the shared LLM, every page is free."""
    yield
    if "llm" in request.fixturenames:
        llm: LLM = request.getfixturevalue("llm")
        assert runtime_of(llm).engine.drain(timeout=30)
        assert llm.census().clean


def runtime_of(llm: LLM) -> Runtime:
    return llm._open_runtime()


def tokens(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


@contextmanager
def stop_button(llm: LLM) -> Iterator[None]:
    """Ctrl-C once tokens are being generated."""
    engine = runtime_of(llm).engine
    before = engine.stats().counters.generated_tokens

    def press() -> None:
        while engine.stats().counters.generated_tokens < before + 4:
            time.sleep(0.002)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=press)
    with pytest.raises(KeyboardInterrupt):
        thread.start()
        yield
    thread.join()


# ---- prompts ----


def test_every_way_to_give_a_prompt_gives_the_same_reply(llm: LLM) -> None:
    text = "Where is Lima?"
    ids = runtime_of(llm).encode_prompt(text)
    ways: list[object] = [
        text,
        [text],
        (text,),
        ids,
        tuple(ids),
        [ids],
        {"prompt": text},
        {"prompt_token_ids": ids},
        [{"prompt_token_ids": ids, "prompt": None}],
    ]
    replies = [llm.generate(way, GREEDY) for way in ways]  # type: ignore[arg-type]
    assert [len(reply) for reply in replies] == [1] * len(ways)
    assert all(tokens(reply) == tokens(replies[0]) for reply in replies)
    assert all(reply[0].prompt_token_ids == ids for reply in replies)
    assert replies[0][0].prompt == text and replies[3][0].prompt is None


def test_no_prompts_give_no_outputs(llm: LLM) -> None:
    assert llm.generate([], GREEDY) == []
    assert llm.chat([], GREEDY) == []


@pytest.mark.parametrize(
    "prompt", [7, None, [1.5], [True], ["a", 7], {"text": "a"}, {"prompt": "a", "prompt_token_ids": [1]}, {}]
)
def test_what_is_no_prompt_is_refused_by_name(llm: LLM, prompt: object) -> None:
    with pytest.raises(InvalidRequest, match="prompts"):
        llm.generate(prompt, GREEDY)  # type: ignore[arg-type]


@pytest.mark.parametrize("prompt", ["\ud800", [10**6], [-1], []])
def test_unusable_text_and_ids_are_refused(llm: LLM, prompt: object) -> None:
    with pytest.raises(InvalidRequest):
        llm.generate([prompt], GREEDY)  # type: ignore[list-item]


# ---- results ----


def test_results_come_in_order_and_equal_the_solo_replies(llm: LLM) -> None:
    prompts = [f"{'word ' * (count * 7 % 40)}number {count}" for count in range(12)]
    params = [GREEDY.with_(max_tokens=3 + count % 5) for count in range(12)]
    together = llm.generate(prompts, params)
    assert [output.prompt for output in together] == prompts
    assert [len(output.outputs[0].token_ids) for output in together] == [p.max_tokens for p in params]
    solo = [llm.generate(prompt, p)[0] for prompt, p in zip(prompts, params, strict=True)]
    assert tokens(together) == tokens(solo)
    assert len({output.request_id for output in together + solo}) == 24


def test_parameters_must_be_one_or_one_each(llm: LLM) -> None:
    with pytest.raises(InvalidRequest, match="1 for 2 prompts"):
        llm.generate(["a", "b"], [GREEDY])


def test_choices_differ_and_the_first_is_that_of_n_1(llm: LLM) -> None:
    params = SamplingParams(temperature=1.5, max_tokens=12, seed=5, ignore_eos=True)
    [three] = llm.generate("Once", params.with_(n=3))
    [one] = llm.generate("Once", params)
    assert [choice.index for choice in three.outputs] == [0, 1, 2]
    assert three.outputs[0].token_ids == one.outputs[0].token_ids
    assert len({tuple(choice.token_ids) for choice in three.outputs}) == 3
    assert three.metrics is not None and three.metrics.num_generation_tokens == 36


def test_a_seed_is_drawn_and_reported_and_repeats_the_reply(llm: LLM) -> None:
    params = SamplingParams(temperature=1.5, max_tokens=12, ignore_eos=True)
    first, second = llm.generate(["Once", "Once"], params)
    assert first.seed is not None and first.seed != second.seed
    [again] = llm.generate("Once", params.with_(seed=first.seed))
    assert again.outputs[0].token_ids == first.outputs[0].token_ids and again.seed == first.seed


def test_log_probabilities_have_vllms_shape(llm: LLM) -> None:
    [output] = llm.generate("Where is Lima?", GREEDY.with_(logprobs=2, prompt_logprobs=1))
    [reply] = output.outputs
    assert reply.logprobs is not None and output.prompt_logprobs is not None
    assert [next(iter(entry)) for entry in reply.logprobs] == reply.token_ids
    assert all(entry[token].rank == 1 for entry, token in zip(reply.logprobs, reply.token_ids, strict=True))
    assert len(output.prompt_logprobs) == len(output.prompt_token_ids) and output.prompt_logprobs[0] is None
    assert reply.cumulative_logprob == pytest.approx(
        sum(entry[token].logprob for entry, token in zip(reply.logprobs, reply.token_ids, strict=True))
    )


def test_a_prompt_can_be_scored_without_a_reply(llm: LLM) -> None:
    [output] = llm.generate("Where is Lima?", SamplingParams(max_tokens=0, prompt_logprobs=0))
    assert output.prompt_logprobs is not None and len(output.prompt_logprobs) == len(output.prompt_token_ids)
    assert output.outputs[0].text == "" and output.outputs[0].finish_reason == "length"


def test_a_stop_string_ends_the_reply_and_frees_its_pages(llm: LLM) -> None:
    params = GREEDY.with_(max_tokens=40)
    [plain] = llm.generate("Where is Lima?", params)
    text = plain.outputs[0].text
    stop = text[10:13]
    [cut] = llm.generate("Where is Lima?", params.with_(stop=stop, max_tokens=3000))
    assert cut.outputs[0].text == text[: text.index(stop)]
    assert (cut.outputs[0].finish_reason, cut.outputs[0].stop_reason) == ("stop", stop)
    assert llm.census().clean  # without a wait: the call returns when the pages are back


def test_times_are_in_order(llm: LLM) -> None:
    [output] = llm.generate("Where is Lima?", GREEDY)
    times = output.metrics
    assert times is not None and None not in (times.first_token_latency, times.total_time)
    assert times.arrival_time <= times.first_scheduled_time <= times.first_token_time <= times.finished_time  # type: ignore[operator]
    assert times.num_prompt_tokens == len(output.prompt_token_ids) and times.num_generation_tokens == 12


def test_one_prompt_that_cannot_be_served_stops_the_call_before_anything_runs(llm: LLM) -> None:
    engine = runtime_of(llm).engine
    before = engine.stats().counters.prompt_steps
    with pytest.raises(ContextLengthExceeded):
        llm.generate(["short", "word " * engine.context], GREEDY)
    assert engine.stats().counters.prompt_steps == before
    assert llm.census().clean


# ---- chat ----


def test_chat_takes_one_conversation_or_many(llm: LLM) -> None:
    [one] = llm.chat(QUESTION, GREEDY)
    two = llm.chat([QUESTION, [{"role": "system", "content": "Be brief."}, *QUESTION]], GREEDY)
    assert two[0].outputs[0].token_ids == one.outputs[0].token_ids
    assert one.prompt is not None and "Where is Lima?" in one.prompt and one.prompt.endswith("assistant\n")
    assert two[1].prompt is not None and "Be brief." in two[1].prompt
    [plain] = llm.generate({"prompt_token_ids": one.prompt_token_ids}, GREEDY)
    assert plain.outputs[0].token_ids == one.outputs[0].token_ids


def test_the_next_turn_resumes_and_changes_nothing(llm: LLM) -> None:
    [first] = llm.chat(QUESTION, GREEDY)
    turn = [
        *QUESTION,
        {"role": "assistant", "content": first.outputs[0].text},
        {"role": "user", "content": "And Rome?"},
    ]
    [resumed] = llm.chat(turn, GREEDY)
    [fresh] = llm.chat(turn, GREEDY, prompt_cache=False, draft=False)
    assert resumed.num_cached_tokens >= len(first.prompt_token_ids) - 5 and fresh.num_cached_tokens == 0
    assert resumed.outputs[0].token_ids == fresh.outputs[0].token_ids
    assert llm.prompt_cache.stats().states > 0 and "states" in repr(llm.prompt_cache)
    assert runtime_of(llm).engine.drain(timeout=30)  # also what prepares the next turn
    assert llm.prompt_cache.clear() > 0 and llm.prompt_cache.stats().states == 0


@pytest.mark.parametrize("messages", ["hello", 7, ["hello"], [[]], [{"role": "user"}, "hello"], [{"content": "a"}]])
def test_what_is_no_conversation_is_refused(llm: LLM, messages: object) -> None:
    with pytest.raises(InvalidRequest):
        llm.chat(messages, GREEDY)  # type: ignore[arg-type]


def test_a_checkpoint_without_a_template_has_no_chat(tiny_moe: Path, tmp_path: Path) -> None:
    bare = copytree(tiny_moe, tmp_path / "bare")
    (bare / "chat_template.jinja").unlink()
    with LLM(bare, progress=False) as llm:
        assert not llm.has_chat_template
        with pytest.raises(InvalidRequest, match="no chat template"):
            llm.chat(QUESTION, GREEDY)
        assert len(llm.generate("Where is Lima?", GREEDY)) == 1


# ---- streams ----


def test_streamed_pieces_joined_are_the_reply(llm: LLM) -> None:
    params = GREEDY.with_(max_tokens=60)
    [whole] = llm.chat(QUESTION, params)
    with llm.stream(QUESTION, params) as stream:
        deltas = list(stream)
    assert "".join(delta.text for delta in deltas) == whole.outputs[0].text == stream.output.outputs[0].text
    assert [token for delta in deltas for token in delta.token_ids] == whole.outputs[0].token_ids
    assert [delta.finish_reason for delta in deltas if delta.finish_reason] == ["length"]
    assert stream.output.finished and next(stream, None) is None


def test_a_stream_takes_prompts_like_generate(llm: LLM) -> None:
    [whole] = llm.generate("Where is Lima?", GREEDY)
    for prompt in ("Where is Lima?", whole.prompt_token_ids, {"prompt": "Where is Lima?"}):
        stream = llm.stream(prompt, GREEDY)
        assert [token for delta in stream for token in delta.token_ids] == whole.outputs[0].token_ids


def test_leaving_the_loop_cancels_the_reply(llm: LLM) -> None:
    for delta in llm.stream("Once", LONG):
        assert delta.token_ids
        break
    assert runtime_of(llm).engine.drain(timeout=30)
    assert runtime_of(llm).engine.stats().counters.generated_tokens < 2000


def test_closing_a_stream_waits_until_its_pages_are_back(llm: LLM) -> None:
    stream = llm.stream("Once", LONG)
    next(stream)
    assert not llm.census().clean
    stream.close()
    assert llm.census().clean
    stream.close()
    assert stream.output.finished and next(stream, None) is None


def test_a_stream_gives_one_reply(llm: LLM) -> None:
    with pytest.raises(InvalidRequest, match="n=2"):
        llm.stream("Once", GREEDY.with_(n=2))


# ---- interrupts ----


def test_the_stop_button_cancels_the_calls_requests_and_nothing_else(llm: LLM) -> None:
    [expected] = llm.generate("Where is Lima?", GREEDY)
    with stop_button(llm):
        llm.generate(["Once", "Twice", "Thrice"] * 30, LONG.with_(n=2))
    assert llm.census().clean
    assert tokens(llm.generate("Where is Lima?", GREEDY)) == [expected.outputs[0].token_ids]


def test_the_stop_button_ends_a_stream(llm: LLM) -> None:
    with stop_button(llm):
        for _ in llm.stream("Once", LONG):
            pass
    assert llm.census().clean
    assert len(llm.generate("Once", GREEDY)) == 1


def test_another_threads_call_goes_on(llm: LLM) -> None:
    params = GREEDY.with_(max_tokens=200)
    [expected] = llm.generate("Where is Lima?", params)
    got: list[RequestOutput] = []
    other = threading.Thread(target=lambda: got.extend(llm.generate("Where is Lima?", params)))
    with stop_button(llm):
        other.start()
        llm.generate("Once", LONG)
    other.join()
    assert tokens(got) == [expected.outputs[0].token_ids]


# ---- living ----


def test_options_are_checked_by_name(tiny_moe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kernels_numba.cuda.driver.device_count", lambda: 0)
    with pytest.raises(InvalidRequest, match="unknown option 'gpu_memory_utilization'"):
        LLM(tiny_moe, gpu_memory_utilization=0.9)
    with pytest.raises(InvalidRequest, match="context=0"):
        LLM(tiny_moe, context=0)
    with pytest.raises(InvalidRequest, match=r"context.*max_model_len"):
        LLM(tiny_moe, context=128, max_model_len=128)
    with pytest.raises(DeviceError, match="cuda"):
        LLM(tiny_moe, device="cuda")
    with pytest.raises(CheckpointError, match="no such model"):
        LLM("no/such/model")


def test_vllms_names_for_options_are_taken(tiny_moe: Path) -> None:
    with LLM(str(tiny_moe), max_model_len=256, max_num_seqs=2, progress=False) as llm:
        assert runtime_of(llm).engine.context == 256
        assert runtime_of(llm).options.max_streams == 2


def test_a_readable_repr(llm: LLM) -> None:
    assert repr(llm) == "LLM('tiny-lfm2moe', lfm2_moe, 1.7M parameters, context=4096, kv_pages=576)"


def closings() -> list[Callable[[LLM], object]]:
    return [LLM.close, lambda llm: llm.__exit__(None, None, None), lambda llm: None]


@pytest.mark.parametrize("close", closings(), ids=["close", "with", "dropped"])
def test_closing_gives_the_memory_back(tiny_dense: Path, close: Callable[[LLM], object]) -> None:
    llm = LLM(tiny_dense, progress=False, context=256, max_streams=1)
    llm.generate("Once", GREEDY)
    engine = runtime_of(llm).engine
    pool, weights = weakref.ref(engine._states.kv), weakref.ref(engine._steps._model.head)
    assert pool() is not None and weights() is not None
    close(llm)
    del llm
    gc.collect()
    assert not engine.alive
    del engine
    gc.collect()
    assert pool() is None and weights() is None


def test_a_closed_llm_says_so(tiny_dense: Path) -> None:
    llm = LLM(tiny_dense, progress=False, context=256, max_streams=1)
    llm.close()
    llm.close()
    assert repr(llm) == "LLM(closed)"
    for use in (lambda: llm.generate("a"), lambda: llm.chat(QUESTION), lambda: llm.stream("a"), llm.census):
        with pytest.raises(EngineDead, match="closed"):
            use()


def test_closing_ends_the_calls_of_other_threads(tiny_dense: Path) -> None:
    llm = LLM(tiny_dense, progress=False)
    ended: list[object] = []

    def call() -> None:
        try:
            ended.extend(output.outputs[0].finish_reason for output in llm.generate(["Once", "Twice"], LONG))
        except EngineDead as error:
            ended.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    engine = runtime_of(llm).engine
    while not engine.stats().running:
        time.sleep(0.002)
    llm.close()
    thread.join(timeout=30)
    assert ended == ["abort", "abort"]
