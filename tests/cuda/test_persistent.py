"""The kernel of a run of layers without a GPU: blocks that exchange words, the ring, every phase, several rounds."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from kernels_numba.cuda import layer_runs, persistent
from kernels_numba.cuda.driver import Device, DeviceArray
from kernels_numba.cuda.pack import PackedWeight, pack_on_host
from kernels_numba.cuda.persistent_layout import layout

from .emulator import Emulator, from_bf16, to_bf16

BLOCKS, EPS = 2, 1e-5


class Processors:
    """A GPU of two multiprocessors with little shared memory, so that the ring turns over. spare: stages that a round
    of two rows has room for beside the ring."""

    multiprocessors = BLOCKS

    def __init__(self, spare: int) -> None:
        self.shared_bytes = layout(2)["RING"] + 128 + (layer_runs.LEAST_RING + spare) * persistent.UNIT_CHUNK

    def supports(self, kernel: object) -> bool:
        return True


def rounded(x: np.ndarray) -> np.ndarray:
    return from_bf16(to_bf16(x))


def close(actual: np.ndarray, expected: np.ndarray) -> bool:
    return bool(np.all(np.abs(actual - expected) <= np.abs(expected) * 2.0**-5 + 2.0**-5))


def norm(x: np.ndarray, w: np.ndarray) -> np.ndarray:
    return rounded(w * rounded(x / np.sqrt(np.mean(x.astype(np.float64) ** 2) + EPS)))


class Layers:
    """Random weights of an attention layer's end, a convolution layer, and the product of the attention behind it."""

    def __init__(self, emulator: Emulator, random: np.random.Generator, hidden: int, features: int, experts: int):
        self.memory, self.random = emulator.memory, random
        self.hidden, self.features, self.experts, self.values = hidden, features, experts, {}
        self.layers = [self.layer(0, True), self.layer(1, False)]
        self.following = SimpleNamespace(
            operator_norm=self.array("norm", 1 + 0.1 * random.standard_normal(hidden)),
            mixer={"qkv": self.weight("qkv", 80, hidden)},
        )

    def array(self, name: str, values: np.ndarray, kind: str = "bf16") -> DeviceArray:
        stored = to_bf16(values) if kind == "bf16" else np.asarray(values, np.float32)
        self.values[name] = from_bf16(stored) if kind == "bf16" else stored
        return DeviceArray(self.memory.put(stored), stored.shape, kind)

    def weight(self, name: str, outputs: int, depth: int, experts: int = 1, gated: bool = False) -> PackedWeight:
        w = rounded(self.random.standard_normal((experts, outputs * (1 + gated), depth)) * depth**-0.5)
        self.values[name] = w if experts > 1 else w[0]
        data = np.concatenate([pack_on_host(to_bf16(e), gated) for e in w])
        return PackedWeight.over(DeviceArray(self.memory.put(data), data.shape, "bf16"), outputs, depth, experts, gated)

    def layer(self, n: int, attention: bool) -> Any:
        h, random = self.hidden, self.random
        mixer = {"out" if attention else "out_proj": self.weight(f"{n}.out", h, h)}
        if not attention:
            mixer |= {
                "in_proj": self.weight(f"{n}.in", 3 * h, h),
                "weight": self.array(f"{n}.taps", random.standard_normal((3, h))),
            }
        return SimpleNamespace(
            index=0, attention=attention, moe=True, mixer=mixer,
            operator_norm=self.array(f"{n}.norm", 1 + 0.1 * random.standard_normal(h)),
            ffn_norm=self.array(f"{n}.ffn", 1 + 0.1 * random.standard_normal(h)),
            feed_forward={
                "gate": self.array(f"{n}.gate", random.standard_normal((self.experts, h)) * 0.2),
                "bias": self.array(f"{n}.bias", random.random(self.experts) * 0.1, "f32"),
                "w13": self.weight(f"{n}.up", self.features, h, self.experts, gated=True),
                "w2": self.weight(f"{n}.down", h, self.features, self.experts),
            },
        )  # fmt: skip

    def expert_layer(self, n: int, h: np.ndarray, top_k: int) -> np.ndarray:
        """h and the sum over its experts."""
        v = self.values
        x = norm(h, v[f"{n}.ffn"])
        score = rounded(1 / (1 + np.exp(-rounded(v[f"{n}.gate"] @ x).astype(np.float64))))
        ids = np.sort(np.argsort(-(score + v[f"{n}.bias"]), kind="stable")[:top_k])
        weights = rounded(score[ids] / rounded(rounded(score[ids].sum()) + 1e-6))
        total = np.zeros_like(h)
        for e, weight in zip(ids, weights, strict=True):
            gate, up = np.split(rounded(v[f"{n}.up"][e] @ x), 2)
            act = rounded(rounded(gate / (1 + np.exp(-gate))) * up)
            total = total + rounded(weight * rounded(v[f"{n}.down"][e] @ act))
        return rounded(h + rounded(total))

    def run(self, y: np.ndarray, h: np.ndarray, u1: np.ndarray, u2: np.ndarray, top_k: int) -> tuple[np.ndarray, ...]:
        """The last product, the residual stream before its norm, and the convolution's input."""
        v, hidden = self.values, self.hidden
        h = self.expert_layer(0, rounded(h + rounded(v["0.out"] @ y)), top_k)
        b, c, x = np.split(rounded(v["1.in"] @ norm(h, v["1.norm"])), 3)
        u, taps = rounded(b * x), v["1.taps"]
        y = rounded(c * rounded(taps[0] * u2 + taps[1] * u1 + taps[2] * u))
        h = self.expert_layer(1, rounded(h + rounded(v["1.out"] @ y)), top_k)
        assert len(h) == hidden
        return rounded(v["qkv"] @ norm(h, v["norm"])), h, u


def test_a_run_needs_enough_multiprocessors() -> None:
    """With fewer blocks, a block's part of out_proj goes around the ring, and the weight warp may wait for ever."""
    emulator, random = Emulator(), np.random.default_rng(5)
    wide, narrow = (Layers(emulator, random, hidden, 32, 18).layers for hidden in (512, 320))
    device = cast(Device, Processors(6))
    assert layer_runs.run_rows(device, narrow, 3) == 2
    assert layer_runs.run_rows(device, wide, 3) == 0


Row = tuple[int, int]
"""Slot, or -1 for padding, and position."""


@pytest.mark.parametrize(
    ("hidden", "features", "spare", "rounds"),
    [
        (64, 32, 6, [[(1, 32)], [(-1, 0)], [(1, 33)]]),
        # two streams, a draft, one row between
        (64, 32, 6, [[(1, 40), (0, 7)], [(1, 41), (1, 42)], [(0, 8)], [(0, 9), (-1, 0)]]),
        (320, 144, 6, [[(0, 7)], [(0, 8), (1, 3)]]),
        # one chunk of a convolution's units would fit, two of the last product's, which take other slots
        (320, 144, 4, [[(0, 8), (1, 3)]]),
    ],
    ids=["one row", "two rows", "several chunks of k", "four slots to spare"],
)
def test_rounds_of_a_run(hidden: int, features: int, spare: int, rounds: list[list[Row]]) -> None:
    experts, top_k = 18, 3
    random = np.random.default_rng(hidden)
    emulator, device = Emulator(), cast(Device, Processors(spare))
    put, get = emulator.memory.put, emulator.memory.get
    layers = Layers(emulator, random, hidden, features, experts)
    most = layer_runs.run_rows(device, layers.layers, top_k)
    assert most == 2
    program, used = layer_runs.run_program(layers.layers, layers.following, top_k)
    run = layer_runs.LayerRun(
        3, most, DeviceArray(put(program), program.shape, "u32"), len(program), used, 80, hidden, features, experts,
        top_k, True, 1.0, EPS,
    )  # fmt: skip
    words = DeviceArray(put(np.full(2 * used, 0xFF, np.uint8)), (2 * used,), "u8")
    arrivals = DeviceArray(put(np.zeros(1, np.uint32)), (1,), "u32")
    runs = layer_runs.LayerRuns({}, words, arrivals)
    state = rounded(random.standard_normal((2, 32, hidden)))
    ring = DeviceArray(put(to_bf16(state)), (1, 2, 32, hidden), "bf16")
    for turn, given in enumerate(rounds):
        rows = len(given)
        y, h = (rounded(random.standard_normal((rows, hidden))) for _ in range(2))
        slots = list(dict.fromkeys(slot for slot, _ in given))
        starts = [next(r for r, (slot, _) in enumerate(given) if slot == s) for s in slots]
        batch: Any = SimpleNamespace(
            row_segment=put(np.array([slots.index(slot) for slot, _ in given], np.int32)),
            seg_slot=put(np.array(slots, np.int32)),
            seg_start=put(np.array([*starts, rows], np.int32)),
            positions=put(np.array([position for _, position in given], np.int32)),
        )
        out, sums = put(np.full((rows, 80), -1, np.int16)), put(np.full((rows, hidden), -1, np.int16))
        arguments = layer_runs.run_arguments(
            device, runs, run, rows, put(to_bf16(y)), put(to_bf16(h)), ring, batch, out, sums
        )
        kinds = {"u64": np.uint64, "i64": np.int64, "i32": np.int32, "f32": np.float32}
        kernel = persistent.RUN_LAYERS[rows]
        typed = [kinds[kind](getattr(a, "pointer", a)) for kind, a in zip(kernel.arguments, arguments, strict=True)]
        emulator.launch(kernel.function, BLOCKS, persistent.THREADS, typed, together=True)
        streams, products = get(sums, (rows, hidden), np.uint16), get(out, (rows, 80), np.uint16)
        for r, (slot, position) in enumerate(given):
            if slot < 0:  # a padding row: nobody's state changes, nobody waits for ever
                continue
            qkv, stream, u = layers.run(
                y[r], h[r], state[slot, (position - 1) % 32], state[slot, (position - 2) % 32], top_k
            )
            state[slot, position % 32] = u
            assert close(from_bf16(streams[r]), stream)
            assert close(from_bf16(products[r]), qkv)
        assert close(from_bf16(get(ring.pointer, state.shape, np.uint16)), state)
        assert np.all(get(words.pointer, (2, used), np.uint8)[1 - turn % 2] == 0xFF)
        assert get(arrivals.pointer, (1,), np.uint32)[0] == BLOCKS * (1 + turn) % (2 * BLOCKS)
