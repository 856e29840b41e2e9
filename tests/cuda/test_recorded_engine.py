"""The whole engine on the CUDA backend over a device that queues nothing: every way of bench law."""

from __future__ import annotations

import pytest

from lfm2serve.bench import dummy
from lfm2serve.bench.law import compare
from lfm2serve.bench.throughput import measure
from lfm2serve.devices import GPU_CHUNK, Target
from lfm2serve.dummy import SHAPES
from lfm2serve.options import EngineOptions
from lfm2serve.sampling import SamplingParams
from tests.cuda.recorder import Recorder
from tests.cuda.test_backend import recorder  # noqa: F401


@pytest.fixture(autouse=True)
def target(monkeypatch: pytest.MonkeyPatch, recorder: Recorder) -> None:  # noqa: F811
    monkeypatch.setattr(dummy, "find_device", lambda options: Target("cuda", "recorder", 130 << 30, None, GPU_CHUNK))


def test_nothing_is_allocated_or_freed_while_serving(recorder: Recorder) -> None:  # noqa: F811
    ids = dummy.prompt(700)
    options = EngineOptions(context=1100, max_streams=4)
    with dummy.dummy("lfm2-8b-a1b", options) as made, made.engine(keeps=True, drafts=True) as engine:
        before = len(recorder.allocated), len(recorder.freed)
        for _ in range(2):
            dummy.ask(engine, [ids, ids[:40], ids[:513]], SamplingParams(max_tokens=20, logprobs=3))
        assert engine.stats().cache.counters.hits.total() > 0
        assert (len(recorder.allocated), len(recorder.freed)) == before


@pytest.mark.parametrize("name", sorted(SHAPES))
def test_the_largest_step_fits_into_the_scratch_that_is_planned_for_it(name: str, recorder: Recorder) -> None:  # noqa: F811
    options = EngineOptions(context=GPU_CHUNK + 20, max_streams=32)
    once = SamplingParams(max_tokens=2)
    with dummy.dummy(name, options) as made, made.engine(keeps=True) as engine:
        dummy.ask(engine, [dummy.prompt(GPU_CHUNK)], once)
        dummy.ask(engine, [dummy.prompt(GPU_CHUNK // 32, n) for n in range(32)], once)
        dummy.ask(engine, [dummy.prompt(700 * (1 + n % 3), n) for n in range(64)], once)
        assert engine.stats().counters.failed_steps == 0


@pytest.mark.parametrize("name", ["lfm2-24b-a2b", "lfm2.5-24b-a2b", "lfm2-8b-a1b", "lfm2-700m"])
def test_prompts_rounds_drafts_and_kept_states_run_and_give_all_memory_back(
    name: str,
    recorder: Recorder,  # noqa: F811
) -> None:
    options = EngineOptions(context=1100, max_streams=4)
    ways = list(
        compare(name, options, lengths=[1, 17, 513, 1000], tokens=12, chunks=[64], together=[4], randoms=3, limit_s=60)
    )
    assert len(ways) == 12 and all(way.ok for way in ways)
    report = measure(
        name, EngineOptions(), streams=[1, 32], prompts=[700], contexts=[300, 500], tokens=6, repeats=1, fixed=True
    )
    assert {figure.measure for figure in report.figures} >= {
        "engine start",
        "decode, 32 streams, 300 tokens of context",
        "decode, 1 stream, 500 tokens of context against 300",
        "decode, 1 stream, 300: paged against fixed",
        "prompt of 700",
    }
    assert recorder.launched.count("cuGraphLaunch") > 100
    assert sorted(recorder.allocated) == sorted(recorder.freed)
