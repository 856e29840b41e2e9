"""Every kernel beside the products on the GPU, against its NumPy twin; outputs start as NaN."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kernels_numba.cuda.attention_decode import attention_decode
from kernels_numba.cuda.attention_wgmma import attention_wgmma
from kernels_numba.cuda.driver import Device
from tests.cuda import attention_operations, operations

pytestmark = pytest.mark.gpu


def run(kernel: Any, grid: Any, block: int, *arguments: Any, shared: int = 0) -> None:
    """Launch on NumPy arrays and copy every array back."""
    device = Device.open()
    arrays = {i: device.to_device(a) for i, a in enumerate(arguments) if isinstance(a, np.ndarray)}
    given = [arrays.get(i, a) for i, a in enumerate(arguments)]
    device.function(kernel).bind(grid, block, given, shared=shared).run(device.stream())
    device.synchronize()
    for i, array in arrays.items():
        device.read(array, arguments[i])
        device.free(array)


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng()


@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("hidden", [192, 256, 2048])
def test_embed(rng: np.random.Generator, rows: int, hidden: int) -> None:
    operations.check_embed(run, rng, rows, hidden)


@pytest.mark.parametrize("rows", [1, 17, 513])
@pytest.mark.parametrize("hidden", [64, 192, 1024, 1536, 2048])
def test_norm(rng: np.random.Generator, rows: int, hidden: int) -> None:
    operations.check_norm(run, rng, rows, hidden)


@pytest.mark.parametrize(("heads", "kv_heads"), [(3, 1), (16, 8), (24, 8), (32, 8)])
def test_attention_inputs(rng: np.random.Generator, heads: int, kv_heads: int) -> None:
    operations.check_attention_inputs(run, rng, heads, kv_heads, [(1, 0, 2), (0, 500, 30), (2, 1023, 2)])


@pytest.mark.parametrize("tile", [1, 3, 8])
@pytest.mark.parametrize("hidden", [64, 2048])
def test_conv(rng: np.random.Generator, hidden: int, tile: int) -> None:
    steps = [
        [(0, 0, 1), (2, 0, 137), (1, 0, 2)],
        [(1, 2, 1), (0, 1, 9), (2, 137, 33)],
        [(0, 10, 1), (1, 3, 65), (2, 170, 31)],
        [(1, 68, 1), (0, 11, 500)],
    ]
    operations.check_conv(run, rng, hidden, steps, tile)


@pytest.mark.parametrize("rows", [1, 8, 9, 64, 500, 2049])
@pytest.mark.parametrize(("experts", "top_k", "hidden"), [(6, 2, 256), (32, 4, 2048), (64, 4, 2048)])
def test_routing(rng: np.random.Generator, rows: int, experts: int, top_k: int, hidden: int) -> None:
    operations.check_routing(run, rng, rows, experts, top_k, hidden)


@pytest.mark.parametrize(("group", "kv_heads"), [(1, 1), (2, 2), (3, 1), (4, 8)])
@pytest.mark.parametrize(
    "segments",
    [
        [(0, 0, 1), (1, 0, 17), (2, 0, 130)],
        [(0, 127, 1), (1, 126, 4), (2, 500, 40)],
        [(0, 511, 1), (1, 1020, 9), (2, 1400, 1)],
        [(0, 3000, 1), (1, 2, 65), (2, 640, 2)],
        [(0, 9000, 3), (1, 4090, 200), (2, 0, 1)],
    ],
)
def test_attention(rng: np.random.Generator, group: int, kv_heads: int, segments: list[Any]) -> None:
    hopper = Device.open().supports(attention_wgmma)
    attention_operations.check_attention(run, rng, group, kv_heads, segments, hopper)


@pytest.mark.parametrize(("group", "kv_heads"), [(1, 2), (3, 1), (4, 8), (8, 1)])
@pytest.mark.parametrize(
    ("segments", "blocks"),
    [
        ([(0, 513, 1)], 7),
        ([(1, 0, 1), (2, 127, 1), (0, 128, 2)], 200),
        ([(0, 120, 16), (2, 505, 16), (1, 3000, 1)], 5),
        ([(0, 1000, 9), (1, 0, 16), (2, 900, 16), (0, 2000, 15)], 40),
    ],
)
def test_attention_decode(
    rng: np.random.Generator, group: int, kv_heads: int, segments: list[Any], blocks: int
) -> None:
    if Device.open().supports(attention_decode):
        attention_operations.check_attention_decode(run, rng, group, kv_heads, segments, blocks)


@pytest.mark.parametrize("vocab", [300, 511, 65000])
@pytest.mark.parametrize(("scale", "ties"), [(0.5, True), (1.0, False), (6.0, False)])
def test_sample(rng: np.random.Generator, vocab: int, scale: float, ties: bool) -> None:
    room = Device.open().multiprocessors  # all blocks must run at once
    parts = [each for each in (1, 2, 5) if 24 * each <= room]
    operations.check_sample(run, rng, 24, 512 if vocab < 512 else 65536, vocab, scale, ties, parts)
