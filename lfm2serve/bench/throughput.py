"""Decode and prefill speed of a dense model's shape, beside what this machine's memory and NumPy allow."""

from __future__ import annotations

import statistics
import time
from dataclasses import asdict, dataclass

import numpy as np

from kernels_numba.cpu import CpuBackend
from kernels_numba.cpu.bandwidth import read_bandwidth
from lfm2serve.bench.shapes import random_tensors, shape, tensor_shapes
from lfm2serve.config import ModelConfig
from lfm2serve.engine import Engine
from lfm2serve.memory.pages import SLACK_ROWS, PagePool, pages_for
from lfm2serve.memory.states import StreamStates
from lfm2serve.model import Model
from lfm2serve.sampling import SamplingParams
from lfm2serve.stream import StreamEvent

CONTEXT = 2048


@dataclass(frozen=True, slots=True)
class Throughput:
    """One run's figures; times are medians. decode_bound: tokens/s if reading the weights once were all."""

    model: str
    threads: int
    weight_gb: float
    bandwidth_gbs: float
    decode_bound: float
    decode_1: float
    decode_8: float
    prefill_512: float
    prefill_gflops: float
    numpy_gflops: float
    host_ms_8: float

    def rows(self) -> list[tuple[str, str, str]]:
        """(measure, figure, beside)."""
        return [
            ("memory read", f"{self.bandwidth_gbs:.1f} GB/s", f"{self.threads} threads; weights {self.weight_gb:.3f} GB"),
            ("decode, 1 stream", f"{self.decode_1:.1f} tok/s", f"{100 * self.decode_1 / self.decode_bound:.0f} % of {self.decode_bound:.1f}"),
            ("decode, 8 streams", f"{self.decode_8:.1f} tok/s", f"{self.decode_8 / self.decode_1:.2f} x one stream"),
            ("prompt of 512", f"{self.prefill_512:.1f} tok/s", f"{self.prefill_gflops:.0f} GFLOP/s, {100 * self.prefill_gflops / self.numpy_gflops:.0f} % of NumPy's {self.numpy_gflops:.0f}"),
            ("scheduler, 8 streams", f"{self.host_ms_8:.3f} ms a round", "outside the backend's operations"),
        ]  # fmt: skip

    def to_dict(self) -> dict[str, object]:
        return asdict(self)


def product_flops(config: ModelConfig, rows: int) -> float:
    """Floating-point operations of a prompt's products (logits of one row apart)."""
    return 2.0 * rows * sum(np.prod(dims) for name, dims in tensor_shapes(config) if len(dims) == 2 and name != "embed")


def numpy_gflops(config: ModelConfig, rows: int) -> float:
    """What NumPy's float32 product reaches on the same shapes (best of three each)."""
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
    return product_flops(config, rows) / total / 1e9


def measure(model: str = "lfm2-350m", threads: int | None = None, tokens: int = 64, repeats: int = 3) -> Throughput:
    """Run the whole engine on random weights. tokens: decoded by each stream; repeats: medians are taken of so many."""
    config = shape(model)
    backend = CpuBackend("bfloat16", threads)
    bandwidth = read_bandwidth()
    tensors = random_tensors(config)
    weight_bytes = sum(tensor.nbytes for tensor in tensors.values())
    rows, slots = CONTEXT + SLACK_ROWS, 8
    pages = slots * pages_for(rows)
    engine = Engine(
        Model(config, tensors, backend, max_rows=rows),
        StreamStates(config, backend, slots=slots, pages=pages, max_rows=rows),
        PagePool(pages),
        slots=slots, context=CONTEXT, vocab=config.vocab_size, eos_token_ids=[],
    )  # fmt: skip
    try:
        _decode(engine, 1, 8)  # compiles
        one = statistics.median(_decode(engine, 1, tokens)[0] for _ in range(repeats))
        eight = [_decode(engine, 8, tokens) for _ in range(repeats)]
        prefill = statistics.median(_prefill(engine, 512) for _ in range(repeats))
    finally:
        engine.close()
    return Throughput(
        model=model,
        threads=backend.threads,
        weight_gb=weight_bytes / 1e9,
        bandwidth_gbs=bandwidth / 1e9,
        decode_bound=bandwidth / weight_bytes,
        decode_1=one,
        decode_8=statistics.median(rate for rate, _ in eight),
        prefill_512=512 / prefill,
        prefill_gflops=product_flops(config, 512) / prefill / 1e9,
        numpy_gflops=numpy_gflops(config, 512),
        host_ms_8=1e3 * statistics.median(host for _, host in eight),
    )


def _ignore(event: StreamEvent) -> None:
    """A sink for tokens that nobody reads."""


def _decode(engine: Engine, streams: int, tokens: int) -> tuple[float, float]:
    """Tokens a second of full decode rounds, and the scheduler's seconds a round."""
    before = engine.stats().counters
    for i in range(streams):
        prompt = [(7919 * (i + 1) + 31 * j) % 60000 for j in range(32)]
        engine.submit(prompt, SamplingParams(temperature=0, max_tokens=tokens), _ignore, seed=i)
    engine.drain()
    after = engine.stats().counters
    rounds = after.decode_rounds - before.decode_rounds
    seconds = after.decode_s - before.decode_s
    return (after.decode_rows - before.decode_rows) / seconds, (after.host_s - before.host_s) / rounds


def _prefill(engine: Engine, length: int) -> float:
    """Seconds from submission to the first token of a prompt."""
    times: list[float] = []

    def sink(event: StreamEvent) -> None:
        if event.tokens and event.metrics.admitted is not None and event.metrics.first_token is not None:
            times.append(event.metrics.first_token - event.metrics.admitted)

    prompt = [(104729 * (j + 1)) % 60000 for j in range(length)]
    engine.submit(prompt, SamplingParams(temperature=0, max_tokens=1), sink, seed=0)
    engine.drain()
    return times[0]
