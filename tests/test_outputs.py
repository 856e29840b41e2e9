"""The library's results: vLLM's names, timings, and reprs that a notebook can show."""

from __future__ import annotations

from lfm2serve.outputs import CompletionOutput, RequestMetrics, RequestOutput
from lfm2serve.stream import StreamMetrics


def choice(first: float | None, finished: float | None, tokens: int) -> StreamMetrics:
    return StreamMetrics(
        arrival=10.0,
        prompt_tokens=7,
        admitted=10.5,
        first_token=first,
        finished=finished,
        cached_tokens=4,
        output_tokens=tokens,
    )


def test_metrics_of_several_choices() -> None:
    metrics = RequestMetrics.of([choice(12.0, 14.0, 3), choice(11.0, 15.0, 5)])
    assert (metrics.time_in_queue, metrics.first_token_latency, metrics.total_time) == (0.5, 1.0, 5.0)
    assert (metrics.num_prompt_tokens, metrics.num_cached_tokens, metrics.num_generation_tokens) == (7, 4, 8)
    assert "first_token_latency=1.000 s" in repr(metrics) and "4 cached" in repr(metrics)


def test_metrics_of_a_request_that_has_not_ended() -> None:
    metrics = RequestMetrics.of([choice(12.0, 14.0, 3), choice(None, None, 0)])
    assert metrics.finished_time is None and metrics.total_time is None
    assert metrics.first_token_time == 12.0
    waiting = RequestMetrics.of([StreamMetrics(arrival=1.0, prompt_tokens=2)])
    assert waiting.time_in_queue is None and waiting.first_token_latency is None
    assert "total_time" not in repr(waiting)


def test_reprs_are_short_and_say_what_counts() -> None:
    reply = CompletionOutput(0, "x" * 500, list(range(400)), finish_reason="stop", stop_reason="END")
    output = RequestOutput("r1", "why? " * 100, list(range(300)), [reply], finished=True)
    text = repr(output)
    assert len(text) < 400
    for part in ("'r1'", "300 tokens", "400 tokens", "500 characters", "finish_reason='stop'", "stop_reason='END'"):
        assert part in text
    assert repr(RequestOutput("r2", None, [1, 2], [], finished=False)).count("prompt=2 tokens") == 1
    assert "stop_reason" not in repr(CompletionOutput(0, "hi", [1]))


def test_a_completion_knows_whether_it_is_finished() -> None:
    assert not CompletionOutput(0, "", []).finished()
    assert CompletionOutput(0, "", [], finish_reason="length").finished()
