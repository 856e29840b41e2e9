"""Every operation's kernels against NumPy on fresh random inputs, and their times beside what the machine allows."""

from __future__ import annotations

import secrets
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from kernels_numba.reference import widen
from lfm2serve.bench.memory import Receipt
from lfm2serve.bench.operations import STREAMS, Operation, Operations
from lfm2serve.bench.sampling import check_sampling
from lfm2serve.bench.throughput import GPU_BYTES_S
from lfm2serve.config import ModelConfig
from lfm2serve.devices import Target, find_device, open_backend
from lfm2serve.options import EngineOptions

GPU_FLOPS = 989e12  # of an H200's tensor cores in bf16, by its data sheet
GPU_SPREAD_BYTES = 256 << 20  # of a weight's copies, used in turn: what no cache holds
SCRATCH_BYTES = 3 << 30


def measure(
    config: ModelConfig, name: str, options: EngineOptions, *, rows: Sequence[int], timed: Sequence[int], repeats: int,
    every: bool = False, seed: int | None = None,
) -> Receipt:  # fmt: skip
    """Checks, then times. rows: numbers of rows that are checked; timed: that are timed, by the median of `repeats`.
    every: on a GPU, also time each kernel that could compute a product, not only the one that does."""
    target = find_device(options)
    backend = open_backend(target, options, SCRATCH_BYTES)
    try:
        report = Receipt(name, target.name)
        seed = secrets.randbits(32) if seed is None else seed
        report.add("seed", seed, "", f"--seed {seed} repeats these inputs")
        spread = GPU_SPREAD_BYTES if target.kind == "cuda" else 0
        operations = Operations(backend, config, max([*rows, *timed]), spread=spread, seed=seed)
        bounds = _bounds(report, target, config)
        for operation in operations.every():
            check(report, operations, operation, rows)
            for count in timed:
                if operation.most is None or count <= operation.most:
                    _time(report, operations, operation, count, repeats, *bounds)
        check_sampling(report, backend, config.vocab_size, np.random.default_rng(seed))
        if target.kind == "cuda":
            _products(report, backend, config, rows, timed if every else (), seed)
    finally:
        backend.close()
    return report


def poison(backend: Any, *arrays: Any) -> None:
    """NaN to the arrays and to whatever a GPU will write results to."""
    for array in arrays:
        if isinstance(array, np.ndarray):
            array.reshape(-1).view(np.uint8)[:] = 0xFF
        else:
            backend.device.fill(array, 0xFF, backend.stream)
    if backend.name == "cuda":
        backend.device.fill(backend.scratch.memory, 0xFF, backend.stream)


def check(report: Receipt, operations: Operations, operation: Operation, rows: Sequence[int]) -> None:
    """Each number of rows against NumPy, and against the most of them bit by bit."""
    counts = sorted({count for count in rows if operation.most is None or count <= operation.most}, reverse=True)
    if not counts:
        return
    expected = operation.expected(counts[0])
    scale = float(np.abs(expected).max())
    allowed = 2.0**-7 * (np.abs(expected) + scale / 4)  # a bf16 step of each value, and of what sums may cancel to
    close = np.zeros(counts[0], bool) if operation.close is None else operation.close(counts[0])
    base: np.ndarray | None = None
    furthest, alike, right, other = 0.0, 0, 0, 0
    for count in counts:
        poison(operations.backend, operations.kv.data, operations.ring)
        got = operations.values(operation.prepare(count)())
        values = widen(got) if got.dtype == np.uint16 else got.astype(np.float64)
        off = np.abs(values - expected[:count]) / (allowed[:count] if operation.steps else 2.0**-149)
        worst = np.where(np.isfinite(values).all(1), np.nan_to_num(off, nan=np.inf).max(1), np.inf)
        chosen = close[:count] & (worst > operation.steps) & np.isfinite(worst)  # other experts than NumPy's, rightly
        here, other = float(worst[~chosen].max(initial=0)), max(other, int(chosen.sum()))
        furthest = max(furthest, here)
        right += here <= operation.steps and 8 * int(chosen.sum()) <= max(8, count)
        base = got if base is None else base
        alike += got.tobytes() == base[:count].tobytes()
    beside = f"furthest {furthest:.2f} bf16 steps, {operation.steps:g} allowed"
    beside += f"; {other} rows chose an expert that is as good" if other else ""
    report.add(f"{operation.name}: sizes as NumPy says", right, f"of {len(counts)}", beside)
    report.add(f"{operation.name}: sizes with the same bits", alike, f"of {len(counts)}", _named(counts))
    report.expect(right == len(counts), f"{operation.name}: {len(counts) - right} sizes differ from NumPy ({beside})")
    report.expect(alike == len(counts), f"{operation.name}: rows have other bits in {len(counts) - alike} sizes")


def _named(counts: Sequence[int]) -> str:
    return f"{', '.join(map(str, reversed(counts)))} rows"


def _time(
    report: Receipt, operations: Operations, operation: Operation, rows: int, repeats: int, bytes_s: float, flops: float
) -> None:
    poison(operations.backend)
    work = operation.prepare(rows)
    seconds = seconds_of(operations.backend, lambda: operations.done(work()), repeats, rows <= STREAMS)
    moved, done = operation.nbytes(rows), operation.flops(rows)
    share = max(moved / bytes_s, done / flops) / seconds
    rate = f"{moved / seconds / 1e9:,.4g} GB/s"
    if done / flops > moved / bytes_s:
        rate = f"{done / seconds / 1e12:.3g} TFLOP/s"
    what = f"{operation.name}, {rows:,} {'row' if rows == 1 else 'rows'}"
    report.add(what, 1e6 * seconds, "us", f"{rate}, {100 * share:.0f} % of the roofline")


def seconds_of(backend: Any, work: Callable[[], object], repeats: int, few: bool) -> float:
    """Median seconds of `work`; on a GPU in a graph, as rounds run it: each kernel behind the one before, or with few
    rows before its end."""
    if backend.name == "cuda":
        from kernels_numba.cuda.measure import replay_seconds

        return replay_seconds(backend, work, repeats, dependent=few)
    work()  # compiles
    times = []
    for _ in range(repeats):
        started, count = time.perf_counter(), 0
        while time.perf_counter() - started < 2e-3:
            work()
            count += 1
        times.append((time.perf_counter() - started) / count)
    return statistics.median(times)


def _bounds(report: Receipt, target: Target, config: ModelConfig) -> tuple[float, float]:
    """Bytes and floating-point operations a second: the roofline."""
    if target.kind == "cuda":
        report.add("roofline: memory", GPU_BYTES_S / 1e9, "GB/s", "an H200's, by its data sheet")
        report.add("roofline: bf16 products", GPU_FLOPS / 1e12, "TFLOP/s", "an H200's, by its data sheet")
        return GPU_BYTES_S, GPU_FLOPS
    from kernels_numba.cpu.bandwidth import read_bandwidth

    rate = read_bandwidth()
    x, w = (np.ones((rows, config.hidden_size), np.float32) for rows in (512, 4096))
    flops = 2 * len(x) * w.size / seconds_of_numpy(lambda: np.matmul(x, w.T))
    report.add("roofline: memory", rate / 1e9, "GB/s", "reading it with all threads")
    report.add("roofline: float32 products", flops / 1e12, "TFLOP/s", "NumPy's")
    return rate, flops


def seconds_of_numpy(work: Callable[[], object]) -> float:
    """The best of five."""
    times = []
    for _ in range(5):
        started = time.perf_counter()
        work()
        times.append(time.perf_counter() - started)
    return min(times)


def _products(
    report: Receipt, backend: Any, config: ModelConfig, rows: Sequence[int], timed: Sequence[int], seed: int
) -> None:
    """Each kernel that can compute a product: the same bits, and its time."""
    from kernels_numba.cuda.measure import every_product

    c = config
    experts = (c.num_experts, c.moe_intermediate_size, c.num_experts_per_tok) if c.num_experts else None
    random = np.random.default_rng(seed)
    for each in every_product(backend, c.hidden_size, c.intermediate_size, experts, rows, timed, random):
        if each.seconds is None:
            report.add(f"{each.name}: kernels with the same bits", each.alike, f"of {each.kernels}", each.beside)
            report.expect(each.alike == each.kernels, f"{each.name}: {each.beside}")
        else:
            share = max(each.nbytes / GPU_BYTES_S, each.flops / GPU_FLOPS) / each.seconds
            rate = f"{each.nbytes / each.seconds / 1e9:,.4g} GB/s, {each.flops / each.seconds / 1e12:.3g} TFLOP/s"
            report.add(each.name, 1e6 * each.seconds, "us", f"{rate}, {100 * share:.0f} % of the roofline")
