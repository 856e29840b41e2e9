"""Decode and prompt speed of a model's shape, beside what the machine allows."""

from __future__ import annotations

import statistics
import time
from dataclasses import asdict, dataclass, field

import numpy as np

from lfm2serve.bench.dummy import Dummy, ask, dummy, prompt
from lfm2serve.bench.shapes import product_flops, round_bytes
from lfm2serve.config import ModelConfig
from lfm2serve.dummy import tensor_shapes, weight_bytes
from lfm2serve.engine import Engine
from lfm2serve.options import EngineOptions
from lfm2serve.sampling import SamplingParams

GPU_BYTES_S = 4.8e12  # an H200's memory by its data sheet: the roofline of the README's GPU table


@dataclass(frozen=True, slots=True)
class Figure:
    """One row: what was measured, the figure, and what it is compared with."""

    measure: str
    value: float
    unit: str
    beside: str


@dataclass(slots=True)
class Report:
    """One run on one machine; rates are medians."""

    model: str
    device: str
    figures: list[Figure] = field(default_factory=list)

    def add(self, measure: str, value: float, unit: str, beside: str = "") -> None:
        self.figures.append(Figure(measure, value, unit, beside))

    def to_dict(self) -> dict[str, object]:
        return asdict(self)


def measure(
    model: str,
    options: EngineOptions,
    *,
    streams: list[int],
    prompts: list[int],
    contexts: list[int],
    tokens: int,
    repeats: int,
    fixed: bool = False,
) -> Report:
    """Run the whole engine on random weights.

    streams: numbers of streams that decode together, each from so many tokens of `contexts` on, `tokens` each. prompts:
    lengths of prompts run alone. repeats: medians are taken of so many. fixed: also decode with one fixed range of K/V
    a stream.
    """
    longest = max([max(contexts) + tokens, *prompts]) + 1
    started = time.perf_counter()
    with dummy(model, _with(options, longest, max(streams))) as made:
        loaded = time.perf_counter()
        report = Report(model, made.target.name)
        with made.engine() as engine:
            report.add("engine start", time.perf_counter() - loaded, "s", f"weights {loaded - started:.1f} s before")
            bound = _memory_bound(report, made)
            runs = [(count, context) for count in streams for context in contexts]
            rates = {run: _decode_figures(report, made.config, engine, *run, tokens, repeats, bound) for run in runs}
            for length in prompts:
                _prompt_figures(report, made, engine, length, repeats)
        for count, context in runs:
            if context != contexts[0]:
                ratio = rates[count, context] / max(rates[count, contexts[0]], 1e-9)
                report.add(
                    f"decode, {_streams(count)}, {context:,} tokens of context against {contexts[0]:,}", ratio, "x"
                )
        if fixed:
            with made.engine(kv="fixed") as engine:
                for count, context in runs:
                    rate = statistics.median(_decode(engine, count, context, tokens)[0] for _ in range(repeats))
                    what = f"decode, {_streams(count)}, {context:,}: paged against fixed"
                    report.add(what, rates[count, context] / max(rate, 1e-9), "x", f"fixed {rate:,.4g} tok/s")
    return report


def _streams(count: int) -> str:
    return f"{count} streams" if count > 1 else "1 stream"


def _with(options: EngineOptions, context: int, streams: int) -> EngineOptions:
    values = {name: getattr(options, name) for name in options.__slots__}
    pages = (context + 16) // 512 + 1
    return EngineOptions(**{**values, "context": context, "max_streams": streams, "kv_pages": pages * streams})


def _memory_bound(report: Report, made: Dummy) -> float:
    """Bytes a second that a decode round can read at best."""
    if made.target.kind == "cuda":
        return GPU_BYTES_S
    from kernels_numba.cpu.bandwidth import read_bandwidth

    rate = read_bandwidth()
    report.add("memory read", rate / 1e9, "GB/s", f"weights {weight_bytes(made.config) / 1e9:.3f} GB")
    return rate


def _decode_figures(
    report: Report,
    config: ModelConfig,
    engine: Engine,
    streams: int,
    context: int,
    tokens: int,
    repeats: int,
    bound: float,
) -> float:
    runs = [_decode(engine, streams, context, tokens) for _ in range(repeats)]
    rate = statistics.median(rate for rate, _ in runs)
    most = streams * bound / round_bytes(config, streams)
    beside = f"{100 * rate / most:.0f} % of {most:,.0f}: the weights read once a round"
    report.add(f"decode, {_streams(streams)}, {context:,} tokens of context", rate, "tok/s", beside)
    host = 1e3 * statistics.median(host for _, host in runs)
    report.add(f"host time of a round, {streams}", host, "ms", "during which the device may have waited")
    return rate


def _decode(engine: Engine, streams: int, context: int, tokens: int) -> tuple[float, float]:
    """Tokens a second while all streams decode, and the host's seconds a round that the device may have waited for."""
    before = engine.stats().counters
    replies = ask(
        engine, [prompt(context, n) for n in range(streams)], SamplingParams(temperature=0, max_tokens=tokens)
    )
    after = engine.stats().counters
    start, end = max(reply.times[0] for reply in replies), min(reply.times[-1] for reply in replies)
    decoded = sum(start < at <= end for reply in replies for at in reply.times)
    rounds = after.decode_rounds - before.decode_rounds
    return decoded / max(end - start, 1e-9), (after.host_s - before.host_s) / rounds


def _prompt_figures(report: Report, made: Dummy, engine: Engine, length: int, repeats: int) -> None:
    once = SamplingParams(temperature=0, max_tokens=1)
    seconds = statistics.median(ask(engine, [prompt(length, n)], once)[0].first_s for n in range(repeats))
    rate = product_flops(made.config, length) / seconds / 1e12
    beside = f"{length / seconds:,.0f} tok/s, {rate:.3g} TFLOP/s"
    if made.target.kind == "cpu":
        beside += f", {100 * rate / numpy_tflops(made.config, length):.0f} % of NumPy's float32 products"
    report.add(f"prompt of {length:,}", 1e3 * seconds, "ms", beside)


def numpy_tflops(config: ModelConfig, rows: int) -> float:
    """What NumPy's float32 product reaches on a dense model's shapes (best of three each)."""
    seconds: dict[tuple[int, ...], float] = {}
    total = 0.0
    for name, dims in tensor_shapes(config):
        if len(dims) != 2 or name == "embed" or dims[1] < 64:
            continue
        if dims not in seconds:
            x, w = np.ones((rows, dims[1]), np.float32), np.ones(dims, np.float32)
            times = []
            for _ in range(3):
                started = time.perf_counter()
                np.matmul(x, w.T)
                times.append(time.perf_counter() - started)
            seconds[dims] = min(times)
        total += seconds[dims]
    return product_flops(config, rows) / total / 1e12
