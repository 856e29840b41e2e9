"""How fast the products are on this GPU: `python -m kernels_numba.cuda.measure [--quick]`.

Each figure is the median of several replays of a CUDA graph that runs the product over different weights in turn, more
of them than the second-level cache holds.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from .compiler import KERNELS
from .driver import Device, DeviceArray, Launch, Stream, call
from .linear import best_plan, bind_linear, plans
from .moe_products import best_expert_plan, bind_experts_down, bind_experts_up, expert_plans
from .pack import PackedWeight

HIDDEN, EXPERTS, CHOSEN, FEATURES = 2048, 64, 4, 1536
"""The 24B model's widths."""


@dataclass(frozen=True)
class Figure:
    name: str
    rows: int
    kernel: str
    microseconds: float
    terabytes: float
    """TB/s of weights, each read once"""
    teraflops: float

    def __str__(self) -> str:
        return (
            f"{self.name:24s} rows {self.rows:6d}  {self.kernel:20s} {self.microseconds:9.1f} us"
            f" {self.terabytes:6.2f} TB/s {self.teraflops:7.1f} TFLOP/s"
        )


def replay_time(device: Device, stream: Stream, launches: list[Launch], repeats: int = 7) -> float:
    """Median microseconds of one launch of those captured into a graph."""
    driver_mode = 2  # relaxed
    from cuda.bindings import driver

    call("cuStreamBeginCapture", stream.handle, driver.CUstreamCaptureMode(driver_mode))
    for launch in launches:
        launch.run(stream)
    graph = call("cuStreamEndCapture", stream.handle)
    ready = call("cuGraphInstantiate", graph, 0)
    times = []
    for i in range(repeats + 2):
        begin, end = device.event(), device.event()
        begin.record(stream)
        call("cuGraphLaunch", ready, stream.handle)
        end.record(stream)
        end.synchronize()
        if i > 1:
            times.append(end.since(begin) * 1000 / len(launches))
    call("cuGraphExecDestroy", ready)
    call("cuGraphDestroy", graph)
    return statistics.median(times)


def random_bits(device: Device, array: DeviceArray, scale: float, seed: int = 0) -> None:
    """Fill with normal bf16 values: 64 MiB are drawn, the rest repeats them at odd distances."""
    random = np.random.default_rng(seed)
    values = min(array.size, (32 << 20) - 4096)
    drawn = (random.standard_normal(values, np.float32) * np.float32(scale)).view(np.uint32)
    device.write(array.view((values,)), ((drawn + 0x8000) >> 16).astype(np.uint16))
    stream = device.stream()
    filled = values
    while filled < array.size:
        more = min(filled, array.size - filled)
        device.copy(array.pointer + 2 * filled, array.pointer, 2 * more, stream)
        filled += more
    stream.synchronize()


class Bench:
    """The products of one layer over several sets of weights in one stretch of memory."""

    def __init__(self, device: Device, rows: int, nbytes: int = 6 << 30) -> None:
        self.device = device
        self.stream = device.stream()
        self.memory = device.allocate((nbytes // 2,), "bf16")
        random_bits(device, self.memory, 0.02)
        self.x = device.allocate((rows * CHOSEN, 12288), "bf16")
        random_bits(device, self.x, 1.0, seed=1)
        self.out = device.allocate((rows * CHOSEN, 12288), "f32")

    def weights(
        self, outputs: int, depth: int, experts: int = 1, gated: bool = False, most: int = 16
    ) -> list[PackedWeight]:
        size = PackedWeight.over(self.memory, outputs, depth, experts, gated).data.nbytes
        count = max(1, min(most, self.memory.nbytes // size))
        return [
            PackedWeight.over(
                DeviceArray(self.memory.pointer + i * size, (size // 2,), "bf16"), outputs, depth, experts, gated
            )
            for i in range(count)
        ]

    def array(self, source: DeviceArray, shape: tuple[int, ...], dtype: str = "bf16") -> DeviceArray:
        return source.view(shape, dtype)

    def dense(
        self, name: str, rows: int, outputs: int, depth: int, gated: bool = False, residual: bool = False,
        every: bool = False, dtype: str = "bf16",
    ) -> Iterator[Figure]:  # fmt: skip
        """A dense product; every: by each kernel that can, else by the one that runs."""
        weights = self.weights(outputs, depth, gated=gated)
        x, out = self.array(self.x, (rows, depth)), self.array(self.out, (rows, outputs), dtype)
        extra = self.array(self.x, (rows, outputs)) if residual else None
        best = best_plan(self.device, rows, weights[0], out)
        chosen = plans(self.device, rows, weights[0], out) if every else {}
        for plan in (best, *(p for p in chosen.values() if p.kernel.name != best.kernel.name)):
            for dependent in (False, True) if rows == 1 else (True,):
                launches = [
                    bind_linear(self.device, x, w, out, residual=extra, plan=plan, dependent=dependent) for w in weights
                ]
                time = replay_time(self.device, self.stream, launches)
                wide = outputs * (2 if gated else 1)
                kernel = plan.kernel.name.replace("_product", "") + ("+dep" if dependent else "")
                yield Figure(
                    name, rows, kernel, time, wide * depth * 2 / time / 1e6, 2 * rows * wide * depth / time / 1e6
                )

    def experts(self, rows: int, every: bool = False) -> Iterator[Figure]:
        """Gate/up and down of `rows` rows spread evenly over the experts."""
        device, random = self.device, np.random.default_rng(rows)
        pairs = rows * CHOSEN
        chosen = np.sort(np.argsort(random.random((rows, EXPERTS)), 1)[:, :CHOSEN])
        order = np.argsort(chosen.reshape(-1), kind="stable")
        count = np.bincount(chosen.reshape(-1), minlength=EXPERTS)
        start = device.to_device(np.concatenate([[0], np.cumsum(count)]).astype(np.int32))
        row = device.to_device((order // CHOSEN).astype(np.int32))
        scale = device.to_device(np.full(pairs, 0.25, np.float32))
        x, act, y = (
            self.array(s, (n, d))
            for s, n, d in ((self.x, rows, HIDDEN), (self.x, pairs, FEATURES), (self.out, pairs, HIDDEN))
        )
        used = int(np.count_nonzero(count))
        up, down = (
            self.weights(FEATURES, HIDDEN, EXPERTS, gated=True, most=6),
            self.weights(HIDDEN, FEATURES, EXPERTS, most=6),
        )
        ups = expert_plans(device, pairs, up[0], act, False)
        downs = expert_plans(device, pairs, down[0], y, True)
        best = best_expert_plan(device, pairs, up[0], act, False).kernel.name
        out = self.array(self.out, (pairs, FEATURES))
        for name in [best, *[n for n in ups if every and n != best]]:
            kernel = name.replace("_product", "") + "+dep"
            launches = [bind_experts_up(device, x, w, start, row, out, plan=ups[name], dependent=True) for w in up]
            time = replay_time(device, self.stream, launches)
            bytes_, work = used * 2 * FEATURES * HIDDEN * 2, 2 * pairs * 2 * FEATURES * HIDDEN
            yield Figure("experts up", rows, kernel, time, bytes_ / time / 1e6, work / time / 1e6)
            launches = [
                bind_experts_down(device, act, w, start, scale, y, plan=downs[name], dependent=True) for w in down
            ]
            time = replay_time(device, self.stream, launches)
            yield Figure("experts down", rows, kernel, time, bytes_ / 2 / time / 1e6, work / 2 / time / 1e6)
            both = []
            for a, b in zip(up, down, strict=False):
                both.append(bind_experts_up(device, x, a, start, row, out, plan=ups[name], dependent=True))
                both.append(bind_experts_down(device, act, b, start, scale, y, plan=downs[name], dependent=True))
            time = 2 * replay_time(device, self.stream, both)
            yield Figure("experts up, down", rows, kernel, time, bytes_ * 1.5 / time / 1e6, work * 1.5 / time / 1e6)
        first, second = self.weights(3 * HIDDEN, HIDDEN, most=6), self.weights(HIDDEN, HIDDEN, most=18)[12:]
        wide, kept = self.array(self.out, (rows, 3 * HIDDEN)), self.array(self.x, (rows, HIDDEN))
        layer = []
        for i in range(6):
            layer.append(bind_linear(device, x, first[i], wide, dependent=True))
            layer.append(bind_linear(device, x, second[i], kept, residual=kept, dependent=True))
            layer.append(bind_experts_up(device, x, up[i], start, row, out, dependent=True))
            layer.append(bind_experts_down(device, act, down[i], start, scale, y, dependent=True))
        time = 4 * replay_time(device, self.stream, layer)
        dense = 4 * HIDDEN * HIDDEN
        bytes_, work = bytes_ * 1.5 + dense * 2, work * 1.5 + 2 * rows * dense
        yield Figure("a conv layer's products", rows, "", time, bytes_ / time / 1e6, work / time / 1e6)
        for array in (start, row, scale):
            device.free(array)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--every", action="store_true", help="time every kernel that can compute a product")
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 8, 32, 64, 105, 2048, 10144])
    parser.add_argument("--gpu", type=int, default=0)
    given = parser.parse_args()
    device = Device.open(given.gpu)
    device.load(KERNELS.values())
    bench = Bench(device, max(given.rows))
    print(f"{device.name}, {device.multiprocessors} multiprocessors, {device.architecture}", flush=True)
    for rows in given.rows:
        for name, outputs, depth, gated, residual in (
            ("conv in_proj", 3 * HIDDEN, HIDDEN, False, False), ("attention qkv", 3072, HIDDEN, False, False),
            ("out_proj + residual", HIDDEN, HIDDEN, False, True), ("dense gate/up", 11776, HIDDEN, True, False),
            ("dense down + residual", HIDDEN, 11776, False, True),
        ):  # fmt: skip
            for figure in bench.dense(name, rows, outputs, depth, gated, residual, given.every):
                print(figure, flush=True)
        if rows <= 64:
            for figure in bench.dense("logits", rows, 65536, HIDDEN, dtype="f32"):
                print(figure, flush=True)
        for figure in bench.experts(rows, given.every):
            print(figure, flush=True)


if __name__ == "__main__":
    main()
