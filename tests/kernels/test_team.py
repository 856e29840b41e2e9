"""The team of threads: every part runs exactly once, whoever is asleep, and after a fork."""

from __future__ import annotations

import multiprocessing
import time

import numpy as np
import pytest

from kernels_numba.cpu import CpuBackend
from kernels_numba.cpu.linear import part_of
from kernels_numba.cpu.team import Team, spread, team
from kernels_numba.jit import device, kernel

from .helpers import activations, assert_same_bits, weights


@device
def mark_part(part, parts, marks):  # type: ignore[no-untyped-def]
    first, last = part_of(marks.size, part, parts)
    for i in range(first, last):
        marks[i] += part + 1


run_marks = spread(mark_part)


@kernel
def mark(state, parts, marks):  # type: ignore[no-untyped-def]
    run_marks(state, parts, (marks,))


@device
def starve_part(part, parts, size):  # type: ignore[no-untyped-def]
    if part == 2:
        np.empty(size, np.uint8)[0] = 1


run_starve = spread(starve_part)


@kernel
def starve(state, parts, size):  # type: ignore[no-untyped-def]
    run_starve(state, parts, (size,))


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_every_part_runs_once(threads: int) -> None:
    crew = Team(threads)
    for round in range(300):
        parts = round % 17 + 1
        marks = np.zeros(parts * 3, np.int64)
        if round % 3:
            crew.wake()
        if round % 100 == 50:
            time.sleep(0.02)  # the helpers fall asleep
        mark(crew.state, parts, marks)
        assert marks.tolist() == [i // 3 + 1 for i in range(parts * 3)]


@pytest.mark.parametrize("parts", [1, 4])
def test_no_memory_in_a_part_is_an_error_and_the_team_goes_on(parts: int) -> None:
    crew = Team(2)
    crew.wake()
    if parts > 1:
        with pytest.raises(MemoryError, match="scratch"):
            starve(crew.state, parts, 1 << 60)
    marks = np.zeros(8, np.int64)
    mark(crew.state, 4, marks)
    assert marks.tolist() == [1, 1, 2, 2, 3, 3, 4, 4]


def product(seed: int) -> bytes:
    rng = np.random.default_rng(seed)
    return CpuBackend("bfloat16").linear(activations(rng, "bfloat16", 9, 512), weights(rng, 1024, 512)).tobytes()


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # Python 3.12 warns of forks beside threads
def test_a_forked_child_has_a_team_of_its_own() -> None:
    expected = product(1)
    receiver, sender = multiprocessing.get_context("fork").Pipe(duplex=False)
    child = multiprocessing.get_context("fork").Process(target=lambda: sender.send_bytes(product(1)))
    child.start()
    assert receiver.poll(60), "the child hangs"
    assert receiver.recv_bytes() == expected
    child.join()


def test_one_team_for_each_size() -> None:
    assert team(2) is team(2)
    rng = np.random.default_rng(0)
    x, w = activations(rng, "float32", 3, 64), weights(rng, 4096, 64)
    assert_same_bits(CpuBackend("float32", 1).linear(x, w), CpuBackend("float32").linear(x, w))
