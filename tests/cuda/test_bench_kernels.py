"""`bench kernels` on the CUDA backend over a device that queues nothing: which kernels it runs, and that it ends."""

from __future__ import annotations

import json
from collections import Counter
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kernels_numba.cuda import measure
from kernels_numba.cuda.compiler import KERNELS
from lfm2serve.bench import kernels
from lfm2serve.config import ModelConfig
from lfm2serve.devices import Target
from lfm2serve.options import EngineOptions
from tests.cuda.recorder import Recorder
from tests.cuda.test_backend import recorder  # noqa: F401
from tests.cuda.test_network import DATA

ELSEWHERE = {
    "attention_rows",  # of GPUs without wgmma
    "run_layers_1", "run_layers_2",  # of rounds of so many rows
    "combine_experts", "conv_taps", "copy_runs", "count_tokens", "mark_tokens", "random_normal", "take_rows",
}  # fmt: skip
"""Kernels that other tests and `bench law` run."""


def test_nearly_every_kernel_runs(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    event = recorder.event
    timed = {"since": lambda earlier: 1.0}
    monkeypatch.setattr(recorder, "event", lambda timing=True: SimpleNamespace(**vars(event()), **timed))
    monkeypatch.setattr(measure, "call", lambda function, *arguments: recorder.launched.append(function))
    monkeypatch.setattr(kernels, "find_device", lambda options: Target("cuda", "recorder", 130 << 30, None, 16384))
    raw: dict[str, Any] = json.loads((DATA / "tiny-lfm2moe" / "config.json").read_text())
    config = ModelConfig.from_dict({**raw, "num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 64})
    before = list(recorder.allocated)
    report = kernels.measure(
        config, "tiny", EngineOptions(device="cuda"), rows=[1, 15, 17, 64, 1100], timed=[1, 8, 100], repeats=1,
        every=True, seed=1,
    )  # fmt: skip
    assert report.failures, "a device that computes nothing is found out"
    missing = set(KERNELS) - set(recorder.launched) - ELSEWHERE
    assert missing == set()
    measures = [figure.measure for figure in report.figures]
    assert "experts down, 100 rows, wgmma_product_128" in measures
    assert "product, 768 x 256, 8 rows, ring_product_8" in measures
    assert sum(figure.unit == "us" for figure in report.figures) > 100
    allocated = [pointer for pointer in recorder.allocated if pointer not in before]
    assert sorted(allocated) == sorted(recorder.freed)


@pytest.mark.parametrize("gated", [False, True])
def test_every_row_of_every_expert_is_packed_once(
    recorder: Recorder,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    gated: bool,
) -> None:
    packed: Counter[int] = Counter()
    bind_pack = measure.bind_pack

    def counting(device: Any, weight: Any, source: Any, first: int = 0) -> Any:
        packed.update(range(first, first + source.shape[0]))
        return bind_pack(device, weight, source, first)

    monkeypatch.setattr(measure, "bind_pack", counting)
    backend: Any = SimpleNamespace(device=recorder, stream=recorder.stream())
    weight = measure._weights(backend, np.random.default_rng(0), 48, 64, 7, gated)
    assert packed == Counter(range(7 * 48 * (1 + gated))) and weight.rows == 48 * (1 + gated)
