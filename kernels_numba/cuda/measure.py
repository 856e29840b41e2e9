"""Times of what a backend queues, and of each kernel that can compute a product, with a check of its bits."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from .driver import DeviceArray, Launch, call
from .graph import capture
from .linear import Plan, bind_linear, plans
from .memory import bf16_bits
from .moe_products import bind_experts_down, bind_experts_up, expert_plans
from .pack import PackedWeight, bind_pack

if TYPE_CHECKING:
    from . import CudaBackend

TIMES = 10  # of what is timed, in a graph
GUARD = 3  # rows behind a result, which nobody may write


def replay_seconds(
    backend: CudaBackend, work: Callable[[], object], repeats: int, *, dependent: bool = False, times: int = TIMES
) -> float:
    """Median seconds of one `work` of several in a CUDA graph. dependent: kernels may start before the one queued
    before has ended."""
    stream, before = backend.stream, backend.dependent
    work()  # loads what is loaded at first use
    stream.synchronize()
    backend.dependent = dependent
    try:
        with capture(stream) as finished:
            for _ in range(times):
                work()
    finally:
        backend.dependent = before
    graph = finished()
    seconds = []
    for number in range(repeats + 2):
        begin, end = backend.device.event(), backend.device.event()
        begin.record(stream)
        call("cuGraphLaunch", graph, stream.handle)
        end.record(stream)
        end.synchronize()
        if number > 1:
            seconds.append(end.since(begin) / 1e3 / times)
    call("cuGraphExecDestroy", graph)
    return statistics.median(seconds)


@dataclass(frozen=True)
class Product:
    """How many of `kernels` give the same bits (`beside`: which, or which don't), or one kernel's time."""

    name: str
    kernels: int = 0
    alike: int = 0
    beside: str = ""
    seconds: float | None = None
    nbytes: float = 0.0
    """of weights, each read once"""
    flops: float = 0.0


def every_product(
    backend: CudaBackend, hidden: int, features: int, experts: tuple[int, int, int] | None, rows: Sequence[int],
    timed: Sequence[int], random: np.random.Generator,
) -> Iterator[Product]:  # fmt: skip
    """Each product by every kernel that can compute it. experts: their number, their features, how many a row has;
    where rows are few most have none."""
    for name, outputs, depth, gated, residual in (
        ("product", 3 * hidden, hidden, False, False), ("product with residual", hidden, hidden, False, True),
        ("SwiGLU", features, hidden, True, False),
    ):  # fmt: skip
        yield from _dense(backend, f"{name}, {outputs} x {depth}", outputs, depth, gated, residual, rows, timed, random)
    if experts:
        yield from _experts(backend, hidden, *experts, rows, timed, random)


def _weights(
    backend: CudaBackend, random: np.random.Generator, outputs: int, depth: int, experts: int, gated: bool
) -> PackedWeight:
    """Packed random weights; experts repeat a few."""
    device, stream = backend.device, backend.stream
    weight = PackedWeight.allocate(device, outputs, depth, experts=experts, gated=gated)
    values = random.standard_normal((outputs * (1 + gated), depth), np.float32) * np.float32(depth**-0.5)
    source = device.to_device(bf16_bits(values))
    if weight.padded:
        device.fill(weight.data, 0, stream)
    for expert in range(experts):
        bind_pack(device, weight, source, expert * weight.rows).run(stream)
        if expert % 5 == 4:
            stream.synchronize()
            device.write(source, bf16_bits(np.roll(values, 7 * expert + 1, 0)))
    stream.synchronize()
    device.free(source)
    return weight


def _poisoned(backend: CudaBackend, rows: int, columns: int) -> DeviceArray:
    array = backend.device.allocate((rows + GUARD, columns), "bf16")
    backend.device.fill(array, 0xFF, backend.stream)
    return array


class _Bits:
    """Compares results of kernels with the first one's."""

    def __init__(self, backend: CudaBackend) -> None:
        self._backend = backend
        self.kernels: set[str] = set()
        self.different: dict[str, list[int]] = {}
        self._base: np.ndarray | None = None

    def take(self, name: str, rows: int, valid: int, launches: Sequence[Launch], out: DeviceArray) -> None:
        """Run a kernel into a poisoned array of which `valid` rows are written; all sizes begin with the same rows, or
        `restart` was called."""
        backend = self._backend
        backend.device.fill(out, 0xFF, backend.stream)
        for launch in launches:
            launch.run(backend.stream)
        got = backend.read(out)
        self.kernels.add(name)
        if self._base is None:
            self._base = got[:valid]
        if not np.array_equal(got[:valid], self._base[:valid]) or not (got[valid:] == 0xFFFF).all():
            self.different.setdefault(name, []).append(rows)

    def restart(self) -> None:
        self._base = None

    def product(self, name: str) -> Product:
        beside = ", ".join(f"{kernel} differs at {rows} rows" for kernel, rows in self.different.items())
        return Product(
            name, len(self.kernels), len(self.kernels) - len(self.different), beside or ", ".join(sorted(self.kernels))
        )


def _dense(
    backend: CudaBackend, name: str, outputs: int, depth: int, gated: bool, residual: bool, rows: Sequence[int],
    timed: Sequence[int], random: np.random.Generator,
) -> Iterator[Product]:  # fmt: skip
    device, most = backend.device, max([*rows, *timed])
    weight = _weights(backend, random, outputs, depth, 1, gated)
    drawn = bf16_bits(random.standard_normal((most, max(depth, outputs)), np.float32))
    x = device.to_device(np.ascontiguousarray(drawn[:, :depth]))
    extra = device.to_device(np.ascontiguousarray(drawn[::-1, :outputs])) if residual else None
    compared = _Bits(backend)

    def launch(count: int, plan: Plan, out: DeviceArray, dependent: bool) -> Launch:
        more = None if extra is None else extra[:count]
        return bind_linear(device, x[:count], weight, out[:count], residual=more, plan=plan, dependent=dependent)

    for count in sorted(rows, reverse=True):
        out = _poisoned(backend, count, outputs)
        for kernel, plan in plans(device, count, weight, out).items():
            compared.take(kernel, count, count, [launch(count, plan, out, False)], out)
        device.free(out)
    yield compared.product(name)
    for count in timed:
        out = _poisoned(backend, count, outputs)
        for kernel, plan in plans(device, count, weight, out).items():
            wide, work = outputs * (1 + gated), launch(count, plan, out, True)
            seconds = replay_seconds(backend, lambda work=work: work.run(backend.stream), 5)  # type: ignore[misc]
            yield Product(
                f"{name}, {count:,} rows, {kernel}", seconds=seconds,
                nbytes=2.0 * wide * depth, flops=2.0 * count * wide * depth,
            )  # fmt: skip
        device.free(out)
    for array in (x, weight.data, *([extra] if extra else [])):
        device.free(array)


def _experts(
    backend: CudaBackend, hidden: int, experts: int, features: int, top_k: int, rows: Sequence[int],
    timed: Sequence[int], random: np.random.Generator,
) -> Iterator[Product]:  # fmt: skip
    device, most = backend.device, max([*rows, *timed])
    up = _weights(backend, random, features, hidden, experts, True)
    down = _weights(backend, random, hidden, features, experts, False)
    x = device.to_device(bf16_bits(random.standard_normal((most, hidden), np.float32)))
    compared = _Bits(backend)
    for count in (*rows, *timed):
        checked = count in rows
        pairs = count * top_k
        allowed = experts - experts // 8  # the last are nobody's
        chosen = np.argsort(random.random((count, allowed)), 1)[:, :top_k].reshape(-1)
        order = np.argsort(chosen, kind="stable")
        number = np.bincount(chosen, minlength=experts)
        start = device.to_device(np.concatenate([[0], np.cumsum(number)]).astype(np.int32))
        row = device.to_device((order // top_k).astype(np.int32))
        scale = device.to_device(random.random(pairs).astype(np.float32))
        act, y = _poisoned(backend, pairs, features), _poisoned(backend, pairs, hidden)
        ups, downs = expert_plans(device, pairs, up, act, False), expert_plans(device, pairs, down, y, True)

        def both(
            plan_up: Plan, plan_down: Plan, given: Any = (start, row, scale, act, y, pairs, count)
        ) -> list[Launch]:
            start, row, scale, act, y, pairs, count = given
            first = bind_experts_up(device, x[:count], up, start, row, act[:pairs], plan=plan_up, dependent=True)
            then = bind_experts_down(device, act[:pairs], down, start, scale, y[:pairs], plan=plan_down, dependent=True)
            return [first, then]

        compared.restart()
        for kernel, plan in ups.items():
            if kernel not in downs:
                continue
            launches = both(plan, downs[kernel])
            if checked:
                device.fill(act, 0xFF, backend.stream)
                compared.take(kernel, count, pairs, launches, y)
            if count in timed:
                used = int(np.count_nonzero(number))
                for which, work, wide in (("up", launches[:1], 2.0), ("down", launches[1:], 1.0)):

                    def run(work: list[Launch] = work) -> None:
                        for each in work:
                            each.run(backend.stream)

                    yield Product(
                        f"experts {which}, {count:,} rows, {kernel}", seconds=replay_seconds(backend, run, 5),
                        nbytes=2.0 * used * wide * hidden * features, flops=2.0 * pairs * wide * hidden * features,
                    )  # fmt: skip
        for array in (start, row, scale, act, y):
            device.free(array)
    yield compared.product(f"experts, {experts} x {features}")
    for array in (x, up.data, down.data):
        device.free(array)
