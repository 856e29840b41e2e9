"""Calls that are made together give the bits of calls made at once, whatever holds them up or ends them."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

from kernels_numba.cpu import CpuBackend, calls

from .helpers import DTYPES, THREADS, activations, assert_same_bits, weights
from .test_team import starve

ROWS, HIDDEN, FEATURES, EXPERTS = 24, 64, 96, 4


class Network:
    """Some layers' worth of operations."""

    def __init__(self, dtype: str, threads: int) -> None:
        rng = np.random.default_rng(1)
        self.backend = be = CpuBackend(dtype, threads)
        self.x = activations(rng, dtype, ROWS, HIDDEN)
        self.norm, self.bias = be.norm_weight(weights(rng, HIDDEN, scale=1.0)), None
        self.w, self.gate = weights(rng, HIDDEN, HIDDEN), weights(rng, EXPERTS, HIDDEN)
        self.w13, self.w2 = weights(rng, EXPERTS, 2 * FEATURES, HIDDEN), weights(rng, EXPERTS, HIDDEN, FEATURES)

    def run(self, layers: int = 3) -> list[np.ndarray]:
        be, h, found = self.backend, self.x, []
        for _ in range(layers):
            h = be.linear(be.rms_norm(h, self.norm, 1e-5), self.w, residual=h)
            h = be.swiglu(be.rms_norm(h, self.norm, 1e-5), self.w13[0], self.w2[0], h)
            h = be.moe(be.rms_norm(h, self.norm, 1e-5), self.gate, self.bias, self.w13, self.w2, 2, True, 1.0, h)
            found.append(h)
        return found


def same(found: list[np.ndarray], expected: list[np.ndarray]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert_same_bits(one, other)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("threads", [1, THREADS])
def test_together_gives_the_same_bits(dtype: str, threads: int) -> None:
    network = Network(dtype, threads)
    expected = network.run()
    for _ in range(3):
        with network.backend.together():
            found = network.run()
        same(found, expected)


@pytest.mark.parametrize(("limit", "least"), [("WORDS", 200), ("MOST_BYTES", 1)])
def test_what_has_no_room_waits_no_longer(monkeypatch: pytest.MonkeyPatch, limit: str, least: int) -> None:
    monkeypatch.setattr(calls, limit, least)
    network = Network("bfloat16", THREADS)
    expected = network.run(4)
    with network.backend.together(), network.backend.together():
        found = network.run(4)
    same(found, expected)


def test_what_is_read_inside_is_there() -> None:
    network = Network("float32", 1)
    be, expected = network.backend, network.run()[-1]
    with be.together():
        h = network.run()[-1]
        some = be.take(h, [3, 1])
        assert_same_bits(some, expected[[3, 1]])
        assert_same_bits(be.read(be.take(network.run()[-1], range(ROWS))), expected)
        target = np.zeros(expected.nbytes, np.uint8)
        be.copy(target, be.bytes_of(network.run()[-1]), [(0, 0, expected.nbytes)])
        assert target.tobytes() == expected.tobytes()


def test_other_threads_do_not_wait() -> None:
    network = Network("bfloat16", 1)
    expected = network.run()
    elsewhere: list[Any] = []
    with network.backend.together():
        found = network.run()
        thread = threading.Thread(target=lambda: elsewhere.extend(array.copy() for array in network.run()))
        thread.start()
        thread.join()
        same(elsewhere, expected)
    same(found, expected)


def test_a_block_that_fails_leaves_nothing_behind() -> None:
    network = Network("bfloat16", 1)
    expected = network.run()
    with pytest.raises(ZeroDivisionError), network.backend.together():
        found = network.run()
        found[0][:] = 7
        raise ZeroDivisionError
    assert (found[0] == 7).all(), "a call was made that nobody waits for"
    with network.backend.together():
        again = network.run()
    same(again, expected)


def test_a_call_without_memory_is_an_error() -> None:
    network = Network("bfloat16", 1)
    made = calls.Calls(1)
    with pytest.raises(MemoryError, match="scratch"), made.together():
        made(starve, made.team.state, 1, 1)
        made(starve, made.team.state, 3, 1 << 60)
    expected = network.run()
    with network.backend.together():
        found = network.run()
    same(found, expected)
