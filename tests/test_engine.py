"""The engine's promises: what is refused, how replies end, what errors leave behind."""

from __future__ import annotations

import itertools
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from lfm2serve.engine import Engine
from lfm2serve.errors import ContextLengthExceeded, EngineDead, InvalidRequest, RequestTooLarge
from lfm2serve.sampling import SamplingParams
from lfm2serve.stream import StreamEvent
from tests.law.harness import CONTEXT, VOCAB, Way, engine_for, prompt


class Reply:
    """Collects one stream's events. Each gets its own seed: the harness tells replies apart by it."""

    _seeds = itertools.count()

    def __init__(self, engine: Engine, ids: object, params: SamplingParams) -> None:
        self.events: list[StreamEvent] = []
        self._end = threading.Event()
        self.id = engine.submit(ids, params, self._sink, seed=next(self._seeds))  # type: ignore[arg-type]

    def _sink(self, event: StreamEvent) -> None:
        self.events.append(event)
        if event.finish_reason:
            self._end.set()

    def wait(self) -> StreamEvent:
        assert self._end.wait(60)
        return self.events[-1]

    @property
    def tokens(self) -> list[int]:
        return [token for event in self.events for token in event.tokens]


GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


@pytest.mark.parametrize(
    ("ids", "params", "error", "says"),
    [
        ((), GREEDY, InvalidRequest, "no tokens"),
        ((1, VOCAB), GREEDY, InvalidRequest, f"token id {VOCAB}"),
        ((1, -1), GREEDY, InvalidRequest, "token id -1"),
        (
            prompt(CONTEXT, 0),
            SamplingParams(),
            ContextLengthExceeded,
            f"context is {CONTEXT} tokens; the prompt has {CONTEXT}",
        ),
        (prompt(1400, 0), SamplingParams(max_tokens=101), ContextLengthExceeded, "1501"),
        ((1,), SamplingParams(max_tokens=0), InvalidRequest, "max_tokens"),
        ((1,), SamplingParams(stop_token_ids=[VOCAB]), InvalidRequest, "outside the vocabulary"),
        ((1,), SamplingParams(logit_bias={VOCAB: 1.0}), InvalidRequest, "outside the vocabulary"),
    ],
)
def test_bad_requests_are_refused_at_once(
    tiny_moe: Path, ids: tuple[int, ...], params: SamplingParams, error: type[Exception], says: str
) -> None:
    with engine_for(tiny_moe, Way()) as (engine, _), pytest.raises(error, match=says):
        Reply(engine, ids, params)


def test_a_request_that_the_pool_can_never_hold_is_refused(tiny_moe: Path) -> None:
    with engine_for(tiny_moe, Way(pages=1)) as (engine, _):
        with pytest.raises(RequestTooLarge, match="512"):
            Reply(engine, prompt(400, 0), SamplingParams(max_tokens=200))
        reply = Reply(engine, prompt(490, 0), SamplingParams(temperature=0, ignore_eos=True))
        reply.wait()
        assert len(reply.tokens) == 512 - 16 - 490


def test_omitted_max_tokens_is_what_context_default_and_pool_allow(tiny_moe: Path) -> None:
    with engine_for(tiny_moe, Way()) as (engine, _):
        reply = Reply(engine, prompt(CONTEXT - 1, 0), SamplingParams(temperature=0, ignore_eos=True))
        assert reply.wait().finish_reason == "length" and len(reply.tokens) == 1
        engine._limits.default_max_tokens = 5
        reply = Reply(engine, prompt(3, 0), SamplingParams(temperature=0, ignore_eos=True))
        assert reply.wait().finish_reason == "length" and len(reply.tokens) == 5


def test_stop_ids_eos_and_min_tokens(tiny_moe: Path) -> None:
    with engine_for(tiny_moe, Way()) as (engine, _):
        plain = Reply(engine, prompt(9, 1), GREEDY.with_(max_tokens=20))
        plain.wait()
        third = plain.tokens[2]
        first_at = plain.tokens.index(third)
        stopped = Reply(engine, prompt(9, 1), GREEDY.with_(max_tokens=20, stop_token_ids=[third]))
        end = stopped.wait()
        assert stopped.tokens == plain.tokens[: first_at + 1]
        assert (end.finish_reason, end.stop_reason) == ("stop", third)
        later = Reply(engine, prompt(9, 1), GREEDY.with_(max_tokens=20, stop_token_ids=[third], min_tokens=10))
        later.wait()
        assert third not in later.tokens[:10] and len(later.tokens) >= 10
        forced = Reply(engine, prompt(9, 1), SamplingParams(temperature=0, max_tokens=20, logit_bias={7: 100.0}))
        end = forced.wait()
        assert forced.tokens == [7] and (end.finish_reason, end.stop_reason) == ("stop", None)
        ignored = Reply(engine, prompt(9, 1), GREEDY.with_(logit_bias={7: 100.0}))
        assert ignored.wait().finish_reason == "length" and ignored.tokens == [7] * 8


def test_ids_beyond_the_tokenizer_are_never_drawn_and_not_in_the_normalisation(tiny_moe: Path) -> None:
    with engine_for(tiny_moe, Way()) as (engine, _):
        reply = Reply(
            engine, prompt(9, 1), SamplingParams(temperature=5.0, max_tokens=200, ignore_eos=True, logprobs=20)
        )
        reply.wait()
        assert max(reply.tokens) < VOCAB
        everything = [entry for event in reply.events for entry in event.logprobs or []]
        assert len(everything) == 200
        assert all(token < VOCAB for entry in everything for token, _ in entry.top)
        assert all(entry.top == tuple(sorted(entry.top, key=lambda pair: (-pair[1], pair[0]))) for entry in everything)


def test_prompt_logprobs_do_not_depend_on_chunks_and_score_without_a_reply(tiny_moe: Path) -> None:
    ids = prompt(150, 2)
    seen = []
    for chunk in (None, 7, 64):
        with engine_for(tiny_moe, Way(prompt_chunk=chunk)) as (engine, _):
            reply = Reply(engine, ids, SamplingParams(max_tokens=0, prompt_logprobs=3))
            end = reply.wait()
            assert end.finish_reason == "length" and not reply.tokens
            scores = [event.prompt_logprobs for event in reply.events if event.prompt_logprobs is not None]
            assert len(scores) == 1 and len(scores[0]) == len(ids) and scores[0][0] is None
            assert all(entry is not None and len(entry.top) == 3 and entry.rank >= 1 for entry in scores[0][1:])
            seen.append(scores[0])
    assert seen[0] == seen[1] == seen[2]


def test_log_probabilities_are_of_the_raw_logits(tiny_moe: Path) -> None:
    with engine_for(tiny_moe, Way()) as (engine, _):
        plain = Reply(engine, prompt(9, 1), GREEDY.with_(logprobs=5, max_tokens=1))
        hot = Reply(
            engine, prompt(9, 1), GREEDY.with_(logprobs=5, max_tokens=1, temperature=3.0, top_k=5, logit_bias={20: 3.0})
        )
        plain.wait()
        hot.wait()
        assert plain.events[0].logprobs is not None and hot.events[0].logprobs is not None
        assert plain.events[0].logprobs[0].top == hot.events[0].logprobs[0].top
        total = sum(np.exp(value) for _, value in plain.events[0].logprobs[0].top)
        assert 0 < total <= 1.0 + 1e-5


def test_cancel_in_every_state_is_idempotent_and_frees_the_pages(tiny_moe: Path) -> None:
    with engine_for(tiny_moe, Way(slots=1, prompt_chunk=2, drafts=False)) as (engine, _):
        filling = Reply(engine, prompt(1200, 1), GREEDY.with_(max_tokens=200))
        waiting = Reply(engine, prompt(100, 1), GREEDY)
        for reply in (waiting, filling, waiting, filling):
            engine.cancel(reply.id)
        assert waiting.wait().finish_reason == "abort" and filling.wait().finish_reason == "abort"
        assert not filling.tokens
        engine.cancel(12345)
        running = Reply(engine, prompt(5, 1), GREEDY.with_(max_tokens=1000))
        while not running.tokens:
            time.sleep(0.001)
        engine.cancel(running.id)
        engine.cancel(running.id)
        end = running.wait()
        assert end.finish_reason == "abort" and len(running.tokens) < 1000
        assert sum(event.finish_reason is not None for event in running.events) == 1


def test_a_receiver_that_fails_loses_only_its_own_stream(tiny_moe: Path) -> None:
    with engine_for(tiny_moe, Way()) as (engine, _):

        def broken(event: StreamEvent) -> None:
            raise ValueError("receiver")

        engine.submit(prompt(5, 1), GREEDY.with_(max_tokens=500), broken, seed=1)
        good = Reply(engine, prompt(6, 1), GREEDY)
        assert good.wait().finish_reason == "length"
        assert engine.drain(30)


def test_a_fault_of_the_engine_ends_every_stream_and_refuses_new_ones(tiny_moe: Path) -> None:
    with engine_for(tiny_moe, Way(drafts=False), ends=True) as (engine, _):
        reply = Reply(engine, prompt(5, 1), GREEDY.with_(max_tokens=1000))

        def broken() -> None:
            raise KeyError("bookkeeping")

        engine._scheduler.admit = broken  # type: ignore[method-assign, assignment]
        end = reply.wait()
        assert end.finish_reason == "error" and isinstance(end.error, EngineDead)
        assert not engine.alive and engine.fault is not None and "KeyError" in engine.fault
        with pytest.raises(EngineDead, match="fault"):
            Reply(engine, (1,), GREEDY)
        assert engine.census().clean


def test_what_broke_a_reply_is_for_the_log(tiny_moe: Path, caplog: pytest.LogCaptureFixture) -> None:
    with engine_for(tiny_moe, Way()) as (engine, _):
        run = engine._steps.run

        def broken(*args: object) -> None:
            raise RuntimeError("private detail")

        engine._steps.run = broken  # type: ignore[method-assign, assignment]
        end = Reply(engine, prompt(5, 1), GREEDY).wait()
        assert end.finish_reason == "error" and end.error is not None and "private" not in str(end.error)
        assert "private detail" in caplog.text
        engine._steps.run = run  # type: ignore[method-assign]
        assert Reply(engine, prompt(5, 1), GREEDY).wait().finish_reason == "length"


def test_an_error_that_the_backend_calls_fatal_is_the_engines_end(tiny_moe: Path) -> None:
    class LostDevice(RuntimeError):
        fatal = True

    with engine_for(tiny_moe, Way(drafts=False), ends=True) as (engine, _):
        reply = Reply(engine, prompt(5, 1), GREEDY.with_(max_tokens=1000))
        other = Reply(engine, prompt(6, 1), GREEDY.with_(max_tokens=1000))

        def lost(*args: object) -> None:
            raise LostDevice("the device is gone")

        engine._steps.run = lost  # type: ignore[method-assign, assignment]
        assert reply.wait().finish_reason == "error" and other.wait().finish_reason == "error"
        assert engine.fault is not None and "the device is gone" in engine.fault and engine.census().clean


def test_close_aborts_what_runs_and_can_be_called_twice(tiny_moe: Path) -> None:
    with engine_for(tiny_moe, Way(drafts=False), ends=True) as (engine, _):
        replies = [Reply(engine, prompt(50, i), GREEDY.with_(max_tokens=1000)) for i in range(12)]
        engine.close()
        engine.close()
        assert all(reply.wait().finish_reason == "abort" for reply in replies)
        assert engine.census().clean
        with pytest.raises(EngineDead, match="closed"):
            Reply(engine, (1,), GREEDY)


def test_metrics_are_complete_and_in_order(tiny_moe: Path) -> None:
    with engine_for(tiny_moe, Way()) as (engine, _):
        end = Reply(engine, prompt(9, 1), GREEDY).wait()
        m = end.metrics
        assert m.admitted is not None and m.first_token is not None and m.finished is not None
        assert m.arrival <= m.admitted <= m.first_token <= m.finished
        assert (m.prompt_tokens, m.output_tokens, m.cached_tokens) == (9, 8, 0)
        counters = engine.stats().counters
        assert (counters.prompt_tokens, counters.generated_tokens) == (9, 8)
