"""The packed form of weights, without a GPU."""

from __future__ import annotations

import numpy as np
import pytest

from kernels_numba.cuda.driver import DeviceArray
from kernels_numba.cuda.pack import PackedWeight, pack_on_host, packed_elements


def address(row: int, k: int, depth: int) -> int:
    """Element of the packed form that holds a weight, from the description in products.py."""
    blocks = -(-depth // 64)
    piece = (k % 64) // 8 ^ row % 8
    return ((row // 16 * blocks + k // 64) * 16 + row % 16) * 64 + piece * 8 + k % 8


@pytest.mark.parametrize(("rows", "depth"), [(16, 64), (40, 192), (33, 48), (6, 160)])
def test_every_weight_lies_where_the_products_look(rows: int, depth: int) -> None:
    weight = np.arange(1, rows * depth + 1, dtype=np.uint16).reshape(rows, depth)
    packed = pack_on_host(weight)
    assert packed.size == packed_elements(rows, depth)
    places = np.array([[address(r, k, depth) for k in range(depth)] for r in range(rows)])
    assert np.array_equal(packed[places], weight)
    assert np.count_nonzero(packed) == weight.size  # the rest is zero


def test_gate_and_up_rows_alternate_by_eight() -> None:
    features, depth = 24, 64
    weight = np.arange(2 * features * depth, dtype=np.uint16).reshape(2 * features, depth)
    packed = pack_on_host(weight, gated=True)
    for feature in range(features):
        unit, row = divmod(feature, 8)
        assert packed[address(unit * 16 + row, 5, depth)] == weight[feature, 5]
        assert packed[address(unit * 16 + 8 + row, 5, depth)] == weight[features + feature, 5]


def test_sizes_of_several_experts() -> None:
    data = DeviceArray(256, (packed_elements(48, 256, experts=6, gated=True),), "bf16")
    weight = PackedWeight.over(data, 48, 256, experts=6, gated=True)
    assert (weight.units, weight.expert_bytes) == (6, 6 * 4 * 2048)
    assert weight.data.nbytes == 6 * weight.expert_bytes


@pytest.mark.parametrize(("outputs", "depth", "gated"), [(16, 40, False), (12, 64, True)])
def test_shapes_that_products_cannot_take_are_refused(outputs: int, depth: int, gated: bool) -> None:
    with pytest.raises(ValueError, match="multiple of"):
        PackedWeight.over(DeviceArray(256, (1 << 20,), "bf16"), outputs, depth, gated=gated)
