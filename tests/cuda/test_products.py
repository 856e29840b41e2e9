"""Matrix products on the GPU: right within rounding, and the same bits whichever kernel, tile or neighbour."""

from __future__ import annotations

import numpy as np
import pytest

from kernels_numba.cuda.driver import Device, DeviceArray
from kernels_numba.cuda.linear import bind_linear, bind_plan, plans
from kernels_numba.cuda.moe_products import bind_experts_down, bind_experts_up, expert_plans
from kernels_numba.cuda.pack import PackedWeight, bind_pack, pack_on_host
from kernels_numba.cuda.products import LOGITS, PLAIN

pytestmark = pytest.mark.gpu

ROWS = (1, 2, 7, 8, 9, 15, 16, 17, 31, 33, 63, 64, 65, 127, 129, 500, 512, 513)
GUARD = 3


def bits(x: np.ndarray) -> np.ndarray:
    """float32 rounded to bf16, as uint16."""
    raw = np.asarray(x, np.float32).view(np.uint32)
    return ((raw + 0x7FFF + ((raw >> 16) & 1)) >> 16).astype(np.uint16)


def floats(x: np.ndarray) -> np.ndarray:
    return (x.astype(np.uint32) << 16).view(np.float32)


def rounded(x: np.ndarray) -> np.ndarray:
    return floats(bits(x))


def close(actual: np.ndarray, expected: np.ndarray) -> bool:
    """Within rounding: a bf16 ulp of each value, and of sums that nearly cancel a little of the row's size."""
    size = np.sqrt(np.mean(np.square(expected)))
    return bool(np.all(np.abs(actual - expected) <= np.abs(expected) * 2.0**-6 + size * 2.0**-6))


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


@pytest.fixture(scope="module")
def device() -> Device:
    return Device.open()


def packed(device: Device, weight: np.ndarray, gated: bool = False) -> PackedWeight:
    """bits [experts, rows, depth] packed on the GPU, checked against the reference twin."""
    experts, rows, depth = weight.shape
    out = PackedWeight.allocate(device, rows // 2 if gated else rows, depth, experts=experts, gated=gated)
    device.fill(out.data, 0 if out.padded else 0xFF)
    source = device.to_device(weight)
    stream = device.stream()
    bind_pack(device, out, source).run(stream)
    stream.synchronize()
    expected = np.concatenate([pack_on_host(w, gated) for w in weight])
    assert np.array_equal(device.read(out.data), expected)
    device.free(source)
    return out


def poisoned(device: Device, shape: tuple[int, ...], dtype: str = "bf16") -> DeviceArray:
    array = device.allocate(shape, dtype)
    device.fill(array, 0xFF)
    return array


def untouched(array: np.ndarray) -> bool:
    return bool(np.all(array.view(np.uint8) == 0xFF))


@pytest.mark.parametrize(
    ("outputs", "depth", "kind"),
    [
        (2048, 2048, "residual"), (3072, 2048, "plain"), (2048, 4608, "residual"), (1152, 2048, "gated"),
        (160, 256, "gated"), (192, 192, "residual"), (256, 160, "plain"), (512, 192, "logits"), (65, 256, "logits"),
        (6, 256, "plain"), (33, 48, "residual"), (8, 16, "plain"),
    ],
)  # fmt: skip
def test_dense(device: Device, outputs: int, depth: int, kind: str) -> None:
    random = np.random.default_rng(outputs * depth)
    most = max(ROWS)
    gated = kind == "gated"
    x = bits(random.standard_normal((most + GUARD, depth)))
    w = bits(random.standard_normal((1, outputs * (2 if gated else 1), depth)) * depth**-0.5)
    x[most:] = 0x7FC0  # NaN beyond the rows
    weight = packed(device, w, gated)
    xs = device.to_device(x)
    residual = random.standard_normal((most, outputs))
    extra = device.to_device(bits(residual)) if kind == "residual" else None
    dtype = "f32" if kind == "logits" else "bf16"
    stream = device.stream()
    y = rounded(floats(x[:most]).astype(np.float64) @ floats(w[0]).astype(np.float64).T)
    if gated:
        y = rounded(rounded(silu(y[:, :outputs])) * y[:, outputs:])
    elif kind == "residual":
        y = rounded(y + rounded(residual))
    base = None
    for rows in reversed(ROWS if outputs * depth < 1 << 20 else (1, 8, 17, 64, 129, 513)):
        out = poisoned(device, (rows + GUARD, outputs), dtype)
        for number, (name, plan) in enumerate(plans(device, rows, weight, out).items()):
            device.fill(out, 0xFF)
            device.synchronize()
            add = extra[:rows] if extra else None
            dependent = (rows + number) % 2 == 1
            bind_linear(
                device, xs[:rows], weight, out[:rows], residual=add, plan=plan, dependent=dependent
            ).run(stream)  # fmt: skip
            stream.synchronize()
            got = device.read(out)
            assert untouched(got[rows:]), (name, rows)
            got = got[:rows]
            if base is None:
                base = got
                value = base if kind == "logits" else floats(base)
                assert close(value, y), (name, rows, float(np.abs(value - y).max()))
            different = np.argwhere(got.view(np.uint8) != base[:rows].view(np.uint8))
            assert different.size == 0, (name, rows, dependent, len(different), different[:3].tolist())
        device.free(out)
    for array in (weight.data, xs, *([extra] if extra else [])):
        device.free(array)


def test_in_place_residual(device: Device) -> None:
    random = np.random.default_rng(5)
    weight = packed(device, bits(random.standard_normal((1, 256, 256)) / 16))
    x, residual = bits(random.standard_normal((100, 256))), bits(random.standard_normal((100, 256)))
    xs, apart, together, out = (device.to_device(a) for a in (x, residual, residual, residual))
    stream = device.stream()
    bind_linear(device, xs, weight, out, residual=apart).run(stream)
    bind_linear(device, xs, weight, together, residual=together).run(stream)
    stream.synchronize()
    assert np.array_equal(device.read(out), device.read(together))


KINDS = ("normal", "tails", "outliers", "tiny", "cancelling", "sparse")


def of_kind(kind: str, rows: int, outputs: int, depth: int) -> tuple[np.ndarray, np.ndarray]:
    """Activations [rows, depth] and weights [1, outputs, depth] that sums may round differently on."""
    random = np.random.default_rng(11)
    x, w = random.standard_normal((rows, depth)), random.standard_normal((1, outputs, depth)) * 0.02
    if kind == "tails":
        x, w = random.standard_t(1.5, (rows, depth)), random.standard_t(2, (1, outputs, depth)) * 0.02
    elif kind == "outliers":
        x[:, ::97] *= 1e4
    elif kind == "tiny":
        x, w = x * 1e-18, w * 1e-18
    elif kind == "cancelling":
        x[:, 1::2] = x[:, ::2]
        w[:, :, 1::2] = -w[:, :, ::2]
    elif kind == "sparse":
        x *= random.random(x.shape) < 0.05
    return bits(x), bits(w)


@pytest.mark.parametrize("kind", KINDS)
def test_bits_for_six_kinds_of_data(device: Device, kind: str) -> None:
    """mma.sync and wgmma must round alike whatever the data."""
    rows, outputs, depth = 130, 512, 2048
    x, w = of_kind(kind, rows, outputs, depth)
    weight = packed(device, w)
    xs = device.to_device(x)
    out = device.allocate((rows, outputs), "bf16")
    logits = device.allocate((rows, outputs), "f32")
    stream = device.stream()
    base = None
    for plan in plans(device, rows, weight, out).values():
        for mode, target in ((PLAIN, out), (LOGITS, logits)):
            device.fill(target, 0xFF)
            device.synchronize()
            bind_plan(device, plan, xs, weight, target, mode, rows).run(stream)
            stream.synchronize()
            got = device.read(target)
            got = got if mode == PLAIN else bits(got)
            base = got if base is None else base
            assert np.array_equal(got, base), (plan.kernel.name, np.mean(got != base))


@pytest.mark.parametrize("kind", KINDS)
def test_cublas_has_the_same_bits(device: Device, kind: str) -> None:
    """A large product, which cuBLAS (by torch, where it is installed) doesn't cut along k."""
    torch = pytest.importorskip("torch")
    rows, outputs, depth = 2048, 4096, 2048
    x, w = of_kind(kind, rows, outputs, depth)
    theirs = [torch.from_numpy(a.view(np.int16)).cuda().view(torch.bfloat16) for a in (x, w[0])]
    expected = (theirs[0] @ theirs[1].T).view(torch.int16).cpu().numpy().view(np.uint16)
    device.make_current()
    weight, xs, out = packed(device, w), device.to_device(x), device.allocate((rows, outputs), "bf16")
    stream = device.stream()
    bind_linear(device, xs, weight, out).run(stream)
    stream.synchronize()
    got = device.read(out)
    assert np.array_equal(got, expected), np.mean(got != expected)
    for array in (weight.data, xs, out):
        device.free(array)


@pytest.mark.parametrize(
    ("experts", "hidden", "features", "counts"),
    [
        (64, 512, 384, "one"), (64, 512, 384, "few"), (8, 2048, 1536, "many"), (6, 256, 48, "few"),
        (6, 256, 48, "many"), (64, 256, 128, "uneven"), (100, 256, 64, "few"),
    ],
)  # fmt: skip
def test_experts(device: Device, experts: int, hidden: int, features: int, counts: str) -> None:
    random = np.random.default_rng(experts + hidden)
    count = {
        "one": np.bincount(random.choice(experts, 4, replace=False), minlength=experts),
        "few": random.integers(0, 12, experts),
        "many": random.integers(0, 150, experts),
        "uneven": np.where(np.arange(experts) % 16 == 3, 129, np.arange(experts) % 3 == 0),
    }[counts]
    start = np.concatenate([[0], np.cumsum(count)]).astype(np.int32)
    pairs, rows = int(start[-1]), max(1, int(start[-1]) // 2)
    pair_row = random.integers(0, rows, pairs).astype(np.int32)
    weights = rounded(random.random(pairs)).astype(np.float32)
    x = bits(random.standard_normal((rows, hidden)))
    w13 = bits(random.standard_normal((experts, 2 * features, hidden)) * hidden**-0.5)
    w2 = bits(random.standard_normal((experts, hidden, features)) * features**-0.5)
    up, down = packed(device, w13, gated=True), packed(device, w2)
    xs, starts, gather, scale = (device.to_device(a) for a in (x, start, pair_row, weights))
    padded = pairs + 5  # more room than pairs, as under a graph's bucket
    act, y = poisoned(device, (padded, features)), poisoned(device, (padded, hidden))
    stream = device.stream()
    bases: list[np.ndarray] = []
    plans_up, plans_down = expert_plans(device, padded, up, act, False), expert_plans(device, padded, down, y, True)
    for name, plan_up in plans_up.items():
        plan_down = plans_down.get(name, plans_down["mma_product_16x64"])
        for dependent in (False, True):
            device.fill(act, 0xFF)
            device.fill(y, 0xFF)
            device.synchronize()
            bind_experts_up(device, xs, up, starts, gather, act, plan=plan_up, dependent=dependent).run(stream)
            bind_experts_down(device, act, down, starts, scale, y, plan=plan_down, dependent=dependent).run(stream)
            stream.synchronize()
            got = [device.read(act), device.read(y)]
            assert untouched(got[0][pairs:]) and untouched(got[1][pairs:]), name
            if not bases:
                bases = got
                for e in range(0, experts, 5):
                    part = slice(start[e], start[e + 1])
                    h = rounded(floats(x[pair_row[part]]) @ floats(w13[e]).T)
                    h = rounded(rounded(silu(h[:, :features])) * h[:, features:])
                    assert h.size == 0 or close(floats(got[0][part]), h), (name, e)
                    z = rounded(weights[part, None] * rounded(floats(got[0][part]) @ floats(w2[e]).T))
                    assert z.size == 0 or close(floats(got[1][part]), z), (name, e)
            assert np.array_equal(got[0], bases[0]), (name, dependent, np.mean(got[0] != bases[0]))
            assert np.array_equal(got[1], bases[1]), (name, dependent, np.mean(got[1] != bases[1]))
    for array in (up.data, down.data, xs, starts, gather, scale, act, y):
        device.free(array)
