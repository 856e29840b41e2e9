"""Every product kernel on small shapes without a GPU: addresses, fragments, tails, groups of experts, barriers."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from kernels_numba.cuda import gemm_wgmma, linear
from kernels_numba.cuda.compiler import Kernel
from kernels_numba.cuda.decode_products import RING_CONVS, RING_EXPERTS, RING_PRODUCTS
from kernels_numba.cuda.decode_route import PADDING
from kernels_numba.cuda.driver import DeviceArray
from kernels_numba.cuda.gemm_mma import MMA_PRODUCTS
from kernels_numba.cuda.gemm_wgmma import WGMMA_PRODUCTS
from kernels_numba.cuda.pack import THREADS, PackedWeight, pack_on_host, pack_weights
from kernels_numba.cuda.products import LOGITS, PLAIN, RESIDUAL, SCALED, SWIGLU

from .emulator import Emulator, from_bf16, to_bf16


class FewProcessors:
    """A GPU of two multiprocessors that runs everything."""

    multiprocessors = 2
    shared_bytes = 227 << 10

    def supports(self, kernel: Kernel) -> bool:
        return True


def plan_of(kernel: Kernel, units: int, rows: int, processors: int = 2) -> linear.Plan:
    device = FewProcessors()
    device.multiprocessors = processors
    for size, ring in RING_PRODUCTS.items():
        if ring is kernel:
            plan = linear.ring_plan(device, size, units * -(-rows // size))  # type: ignore[arg-type]
            assert plan is not None
            return plan
    for columns, wgmma in WGMMA_PRODUCTS.items():
        if wgmma is kernel:
            return linear.Plan(kernel, 2, gemm_wgmma.THREADS, gemm_wgmma.shared_bytes(columns), ())
    shape = next(shape for shape, mma in MMA_PRODUCTS.items() if mma is kernel)
    return linear.mma_plan(device, shape, -(-rows // shape[0]), units)  # type: ignore[arg-type]


def rounded(x: np.ndarray) -> np.ndarray:
    return from_bf16(to_bf16(x))


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def close(actual: np.ndarray, expected: np.ndarray) -> bool:
    return bool(np.all(np.abs(actual - expected) <= np.abs(expected) * 2.0**-6 + 2.0**-6))


def run(
    kernel: Kernel, x: np.ndarray, w: np.ndarray, mode: int, rows: int, extra: np.ndarray | None = None,
    start: np.ndarray | None = None, gather: np.ndarray | None = None, processors: int = 2,
) -> np.ndarray:  # fmt: skip
    """Result of a product of x [., depth] with w [experts, outputs, depth], poisoned where nothing is written."""
    emulator = Emulator()
    memory = emulator.memory
    experts, outputs, depth = w.shape
    gated = mode == SWIGLU
    columns = outputs // 2 if gated else outputs
    packed = np.concatenate([pack_on_host(to_bf16(e), gated) for e in w])
    weight = PackedWeight.over(DeviceArray(memory.put(packed), packed.shape, "bf16"), columns, depth, experts, gated)
    plan = plan_of(kernel, weight.units, rows, processors)
    out = memory.put(np.full((rows + 2, columns), -1, np.int32 if mode == LOGITS else np.int16))
    arguments = [
        memory.put(to_bf16(x)), depth * 2, rows, depth, weight.data.pointer, weight.expert_bytes, weight.units,
        out, columns, columns, mode,
        0 if extra is None else memory.put(extra if mode == SCALED else to_bf16(extra)),
        0 if start is None else memory.put(start), experts, 0 if gather is None else memory.put(gather), *plan.tail,
    ]  # fmt: skip
    kinds = {"u64": np.uint64, "i64": np.int64, "i32": np.int32}
    typed = [kinds[kind](value) for kind, value in zip(kernel.arguments, arguments, strict=True)]
    emulator.launch(kernel.function, min(plan.grid, processors), plan.threads, typed)
    if mode == LOGITS:
        return memory.get(out, (rows + 2, columns), np.float32)
    return from_bf16(memory.get(out, (rows + 2, columns), np.uint16))


@pytest.mark.parametrize(
    ("experts", "rows", "depth", "gated", "cuts"),
    [
        (1, 40, 176, False, (7, 16)),
        (1, 33, 64, False, ()),
        (3, 32, 80, True, (5, 20, 50, 70)),
        (2, 20, 16, False, (23,)),
    ],
)
def test_rows_are_packed_in_any_portions(
    experts: int, rows: int, depth: int, gated: bool, cuts: tuple[int, ...]
) -> None:
    emulator = Emulator(1 << 20)
    memory = emulator.memory
    weight = np.random.default_rng(rows).integers(1, 1 << 16, (experts * rows, depth), np.uint16)
    expected = np.concatenate([pack_on_host(matrix, gated) for matrix in weight.reshape(experts, rows, depth)])
    target, blocks_k = memory.put(np.zeros_like(expected)), -(-depth // 64)
    for first, last in reversed(list(pairwise((0, *cuts, experts * rows)))):
        source, count = memory.put(weight[first:last]), last - first
        given = [np.uint64(source), np.uint64(target), *map(np.int32, (first, count, depth, rows, blocks_k, gated))]
        emulator.launch(pack_weights.function, -(-count * depth // 8 // THREADS), THREADS, given)
    assert np.array_equal(memory.get(target, expected.shape, np.uint16), expected)
    assert (memory.get(target + expected.nbytes, (64,), np.uint8) == 0xFF).all()


# one kernel of each source at least; the rest differ in numbers only and run on a GPU
DENSE = [
    (RING_PRODUCTS[8], RESIDUAL, 7, 72), (RING_PRODUCTS[8], SWIGLU, 11, 64), (RING_PRODUCTS[16], LOGITS, 9, 24),
    (RING_PRODUCTS[32], SWIGLU, 5, 48), (RING_PRODUCTS[64], RESIDUAL, 20, 40), (WGMMA_PRODUCTS[64], RESIDUAL, 11, 72),
    (WGMMA_PRODUCTS[64], SWIGLU, 5, 48), (WGMMA_PRODUCTS[128], LOGITS, 3, 24), (MMA_PRODUCTS[16, 64], RESIDUAL, 11, 70),
    (MMA_PRODUCTS[16, 64], SWIGLU, 5, 64), (MMA_PRODUCTS[64, 64], LOGITS, 3, 23),
]  # fmt: skip
EXPERTS = [RING_PRODUCTS[8], RING_PRODUCTS[32], WGMMA_PRODUCTS[64], MMA_PRODUCTS[16, 64]]


@pytest.mark.parametrize(
    ("kernel", "mode", "rows", "outputs"), DENSE, ids=[f"{k.name}-{mode}-{rows}" for k, mode, rows, _ in DENSE]
)
def test_dense(kernel: Kernel, mode: int, rows: int, outputs: int) -> None:
    random = np.random.default_rng(rows)
    depth = 128 if kernel in WGMMA_PRODUCTS.values() else 176
    x = rounded(random.standard_normal((rows, depth)))
    w = rounded(random.standard_normal((1, outputs, depth)) * depth**-0.5)
    residual = rounded(random.standard_normal((rows, outputs)))
    got = run(kernel, x, w, mode, rows, extra=residual if mode == RESIDUAL else None)
    y = rounded(x @ w[0].T)
    if mode == RESIDUAL:
        y = rounded(y + residual)
    elif mode == SWIGLU:
        y = rounded(rounded(silu(y[:, : outputs // 2])) * y[:, outputs // 2 :])
    assert close(got[:rows], y)
    assert np.all(np.isnan(got[rows:]))


@pytest.mark.parametrize("kernel", EXPERTS, ids=[k.name for k in EXPERTS])
def test_experts(kernel: Kernel) -> None:
    random = np.random.default_rng(3)
    count = np.array([0, 3, 0, 0, 10, 1])
    depth, outputs, rows = 64, 32, 7
    start = np.concatenate([[0], np.cumsum(count)]).astype(np.int32)
    pairs = int(start[-1])
    gather = random.integers(0, rows, pairs).astype(np.int32)
    x = rounded(random.standard_normal((rows, depth)))
    w = rounded(random.standard_normal((len(count), outputs, depth)) * depth**-0.5)
    weights = rounded(random.random(pairs).astype(np.float32))
    up = run(kernel, x, w, SWIGLU, pairs, start=start, gather=gather)
    spread = rounded(random.standard_normal((pairs, depth)))
    down = run(kernel, spread, w, SCALED, pairs, extra=weights, start=start)
    for e in range(len(count)):
        part = slice(start[e], start[e + 1])
        h = rounded(x[gather[part]] @ w[e].T)
        assert close(up[part], rounded(rounded(silu(h[:, :16])) * h[:, 16:]))
        assert close(down[part], rounded(weights[part, None] * rounded(spread[part] @ w[e].T)))
    assert np.all(np.isnan(up[pairs:])) and np.all(np.isnan(down[pairs:]))


def test_no_pairs_at_all() -> None:
    w = np.zeros((6, 32, 64), np.float32)
    got = run(RING_PRODUCTS[8], np.zeros((2, 64), np.float32), w, PLAIN, 4, start=np.zeros(7, np.int32))
    assert np.all(np.isnan(got))


def test_few_groups_take_whole_blocks_each() -> None:
    random = np.random.default_rng(9)
    start, depth = np.array([0, 0, 3, 3, 3, 5, 5], np.int32), 32
    w = rounded(random.standard_normal((6, 400, depth)) * depth**-0.5)
    x = rounded(random.standard_normal((5, depth)))
    got = run(RING_PRODUCTS[8], x, w, PLAIN, 5, start=start, processors=17)
    for e in range(6):
        part = slice(start[e], start[e + 1])
        assert close(got[part], rounded(x[part] @ w[e].T))
    assert np.all(np.isnan(got[5:]))


def launch(emulator: Emulator, plan: linear.Plan, arguments: list[object], processors: int = 2) -> None:
    kinds = {"u64": np.uint64, "i64": np.int64, "i32": np.int32, "f32": np.float32}
    typed = [kinds[kind](value) for kind, value in zip(plan.kernel.arguments, arguments, strict=True)]
    emulator.launch(plan.kernel.function, min(plan.grid, processors), plan.threads, typed)


def packed_weight(emulator: Emulator, w: np.ndarray, gated: bool = False) -> PackedWeight:
    experts, outputs, depth = w.shape
    data = np.concatenate([pack_on_host(to_bf16(e), gated) for e in w])
    memory = DeviceArray(emulator.memory.put(data), data.shape, "bf16")
    return PackedWeight.over(memory, outputs // 2 if gated else outputs, depth, experts, gated)


@pytest.mark.parametrize(("rows", "biased"), [(1, False), (11, True), (19, True)])
def test_experts_choose_for_themselves(rows: int, biased: bool) -> None:
    random = np.random.default_rng(rows)
    experts, top_k, depth, features = 40, 3, 64, 32
    size = 8 if rows < 30 else 16
    logits = rounded(random.standard_normal((rows, 64)).astype(np.float32))
    logits[:, 5] = logits[:, 4]  # equal: the lower id comes first
    bias = (random.random(experts) * 0.2).astype(np.float32)
    padding = np.arange(rows) % 5 == 4
    score = rounded(1 / (1 + np.exp(-logits[:, :experts].astype(np.float64))))
    chosen = np.sort(np.argsort(-(score + bias if biased else score), axis=1, kind="stable")[:, :top_k], axis=1)
    picked = np.take_along_axis(score, chosen, 1)
    weights = rounded(picked / rounded(rounded(picked.sum(1, keepdims=True)) + 1e-6))
    pairs = [(e, r, j) for e in range(experts) for r in range(rows) for j in range(top_k)
             if chosen[r, j] == e and not padding[r]]  # fmt: skip

    emulator = Emulator()
    put = emulator.memory.put
    x = rounded(random.standard_normal((rows, depth)))
    w = rounded(random.standard_normal((experts, 2 * features, depth)) * depth**-0.5)
    w2 = rounded(random.standard_normal((experts, depth, features)) * features**-0.5)
    up, down = packed_weight(emulator, w, gated=True), packed_weight(emulator, w2)
    act, y = (put(np.full((rows * top_k, n), -1, np.int16)) for n in (features, depth))
    place = put(np.full((rows, top_k), 99, np.int32))
    logits[padding] = PADDING
    choice = [put(logits), put(bias) if biased else 0, top_k, 1, 1.0, place]
    for weight, source, row, out, columns, mode, early in (
        (up, put(to_bf16(x)), depth, act, features, SWIGLU, False), (down, act, features, y, depth, SCALED, True),
    ):  # fmt: skip
        units = experts * weight.units
        plan = linear.ring_plan(FewProcessors(), size, units, early, mode=mode, kind=linear.EXPERTS)  # type: ignore
        assert plan is not None and plan.kernel is RING_EXPERTS[size]
        launch(emulator, plan, [
            source, row * 2, rows, row, weight.data.pointer, weight.expert_bytes, weight.units, out, columns, columns,
            mode, experts, *plan.tail, *choice,
        ])  # fmt: skip
    got_act = from_bf16(emulator.memory.get(act, (rows * top_k, features), np.uint16))
    got = from_bf16(emulator.memory.get(y, (rows * top_k, depth), np.uint16))
    got_place = emulator.memory.get(place, (rows, top_k), np.int32)
    expected_place = np.full((rows, top_k), -1)
    for n, (e, r, j) in enumerate(pairs):
        expected_place[r, j] = n
        h = rounded(x[r] @ w[e].T)
        assert close(got_act[n], rounded(rounded(silu(h[:features])) * h[features:]))
        assert close(got[n], rounded(weights[r, j] * rounded(got_act[n] @ w2[e].T)))
    assert np.array_equal(got_place, expected_place)
    assert np.all(np.isnan(got[len(pairs) :]))


@pytest.mark.parametrize("convolves", [False, True])
def test_one_row_is_summed_and_normed_inside(convolves: bool) -> None:
    random = np.random.default_rng(5)
    hidden, top_k, eps = 144, 3, np.float32(1e-5)
    outputs = 3 * hidden if convolves else 104
    y, residual = (rounded(random.standard_normal(shape)) for shape in ((top_k, hidden), hidden))
    norm = rounded(1 + random.standard_normal(hidden) * 0.1)
    w = rounded(random.standard_normal((outputs, hidden)) * hidden**-0.5)
    taps, state = rounded(random.standard_normal((3, hidden))), rounded(random.standard_normal((2, 32, hidden)))
    h = rounded(residual + rounded(y.sum(0)))
    x = rounded(norm * rounded(h / np.sqrt(np.mean(h**2) + eps)))
    emulator = Emulator()
    weight = packed_weight(emulator, w[None])
    put = emulator.memory.put
    sums, out = (put(np.full(n, -1, np.int16)) for n in (hidden, hidden if convolves else outputs))
    given = [*(put(to_bf16(a)) for a in (y, residual, norm)), eps, sums]
    if convolves:
        plan = linear.ring_plan(FewProcessors(), 1, hidden // 16, kind=linear.SUM_CONVS)  # type: ignore[arg-type]
        batch = [put(np.array(a, np.int32)) for a in ([0], [1], [0, 1], [7])]
        at = put(to_bf16(state))
        arguments = [*batch, top_k, put(to_bf16(taps)), at, *given]
    else:
        plan = linear.ring_plan(FewProcessors(), 1, weight.units, kind=linear.SUMS)  # type: ignore[arg-type]
        arguments = [top_k, *given]
    assert plan is not None
    warps, stages, _, late = plan.tail
    shape = [weight.units // 3, out] if convolves else [weight.units, out, outputs, outputs]
    launch(emulator, plan, [hidden, weight.data.pointer, *shape, warps, stages, late, *arguments])
    assert close(from_bf16(emulator.memory.get(sums, (hidden,), np.uint16)), h)
    got = from_bf16(emulator.memory.get(out, (hidden if convolves else outputs,), np.uint16))
    projected = rounded(x @ w.T)
    if not convolves:
        assert close(got, projected)
        return
    b, c, u = projected.reshape(3, hidden)
    z = rounded(taps[0] * state[1, 5] + taps[1] * state[1, 6] + taps[2] * rounded(b * u))
    assert np.all(np.abs(got - rounded(c * z)) <= 2.0**-4)
    state[1, 7] = rounded(b * u)
    after = from_bf16(emulator.memory.get(at, state.shape, np.uint16))
    assert np.all(np.abs(after - state) <= 2.0**-4)


@pytest.mark.parametrize(
    ("size", "lengths"),
    [(8, (1, 1)), (8, (4, 1, 2)), (16, (1, 9, 1)), (32, (16, 1, 5, 2)), (64, (16, 9, 15, 3))],
)
def test_product_and_convolution(size: int, lengths: tuple[int, ...]) -> None:
    """B, C, x and the convolution of decode rows in one kernel; the last segment is padding."""
    random = np.random.default_rng(size)
    depth, hidden, slots = 48, 64, 5
    rows = sum(lengths)
    emulator = Emulator()
    put = emulator.memory.put
    x = rounded(random.standard_normal((rows, depth)))
    w = rounded(random.standard_normal((3 * hidden, depth)) * depth**-0.5)
    taps = rounded(random.standard_normal((3, hidden)))
    weight = packed_weight(emulator, w[None])
    state = rounded(random.standard_normal((slots, 32, hidden)))
    at = {"x": put(to_bf16(x)), "state": put(to_bf16(state)), "out": put(np.full((rows, hidden), -1, np.int16))}
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    segment_slots = np.array([*(3, 0, 4, 2)[: len(lengths) - 1], -1], np.int32)
    first = np.array([0, 1, 31, 100][: len(lengths)])
    segment = np.repeat(np.arange(len(lengths)), lengths).astype(np.int32)
    positions = (first[segment] + np.arange(rows) - starts[segment]).astype(np.int32)
    plan = linear.ring_plan(FewProcessors(), size, hidden // 16, kind=linear.CONVS)  # type: ignore[arg-type]
    assert plan is not None and plan.kernel is RING_CONVS[size]
    launch(emulator, plan, [
        at["x"], depth * 2, rows, depth, weight.data.pointer, weight.units // 3, at["out"], *plan.tail[:2],
        plan.tail[3], *(put(a) for a in (segment, segment_slots, starts, positions, to_bf16(taps))), at["state"],
    ])  # fmt: skip
    out = from_bf16(emulator.memory.get(at["out"], (rows, hidden), np.uint16))
    after = from_bf16(emulator.memory.get(at["state"], (slots, 32, hidden), np.uint16))
    bcx = rounded(x @ w.T)
    expected_state = state.copy()
    for s, slot in enumerate(segment_slots):
        for r in range(starts[s], starts[s + 1]):
            if slot < 0:
                assert not out[r].any()
                continue
            inputs = []
            for back in (2, 1, 0):
                if r - back >= starts[s]:
                    inputs.append(rounded(bcx[r - back, :hidden] * bcx[r - back, 2 * hidden :]))
                elif positions[r] < back:
                    inputs.append(np.zeros(hidden))
                else:
                    inputs.append(state[slot, (positions[r] - back) % 32])
            z = rounded(sum(t * u for t, u in zip(taps, inputs, strict=True)))
            assert close(out[r], rounded(bcx[r, hidden : 2 * hidden] * z)), (s, r)
            expected_state[slot, positions[r] % 32] = inputs[2]
    assert close(after, expected_state)
