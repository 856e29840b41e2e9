"""The memory plan beside what the backend allocates on a device that queues nothing."""

from __future__ import annotations

import pytest

from lfm2serve.bench import dummy
from lfm2serve.bench.dummy import ask, prompt
from lfm2serve.devices import GPU_CHUNK, Target
from lfm2serve.options import EngineOptions
from lfm2serve.sampling import SamplingParams
from tests.cuda.recorder import Recorder
from tests.cuda.test_backend import recorder  # noqa: F401


@pytest.mark.parametrize(("slots", "context"), [(64, 16384), (4, 120_000)])
@pytest.mark.parametrize("name", ["lfm2-24b-a2b", "lfm2-8b-a1b", "lfm2-350m"])
def test_the_estimate_is_what_is_allocated_at_the_peak(
    name: str,
    slots: int,
    context: int,
    recorder: Recorder,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dummy, "find_device", lambda options: Target("cuda", "recorder", 130 << 30, None, GPU_CHUNK))
    options = EngineOptions(max_streams=slots, context=context, kv_gib=4, prompt_cache_gib=1)
    with dummy.dummy(name, options) as made, made.engine(keeps=True) as engine:
        ask(engine, [prompt(3000)], SamplingParams(temperature=0, max_tokens=4))
        planned = made.plan.total - made.plan.graphs
    assert recorder.peak == pytest.approx(planned, rel=0.03)
