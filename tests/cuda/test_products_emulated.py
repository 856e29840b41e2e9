"""Every product kernel on small shapes without a GPU: addresses, fragments, tails, groups of experts, barriers."""

from __future__ import annotations

import numpy as np
import pytest

from kernels_numba.cuda import gemm_wgmma, linear
from kernels_numba.cuda.compiler import Kernel
from kernels_numba.cuda.decode_products import RING_PRODUCTS
from kernels_numba.cuda.driver import DeviceArray
from kernels_numba.cuda.gemm_mma import MMA_PRODUCTS
from kernels_numba.cuda.gemm_wgmma import WGMMA_PRODUCTS
from kernels_numba.cuda.pack import PackedWeight, pack_on_host
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
