"""exp, sigmoid, SiLU and bf16 rounding: accuracy, limits, and equal bits as a scalar and as lanes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kernels_numba.cpu import functions, simd
from kernels_numba.jit import kernel
from kernels_numba.reference import round_bf16


@kernel
def scalar_results(x, out):  # type: ignore[no-untyped-def]
    for i in range(x.size):
        out[0, i] = functions.exp(x[i])
        out[1, i] = functions.sigmoid(x[i])
        out[2, i] = functions.silu(x[i])
        out[3, i] = functions.rounded(x[i], True)


@kernel
def lane_results(x, out):  # type: ignore[no-untyped-def]
    for i in range(0, x.size, 16):
        lanes = simd.load(x, i)
        simd.store(out, i, functions.exp(lanes))
        simd.store(out, x.size + i, functions.sigmoid(lanes))
        simd.store(out, 2 * x.size + i, functions.silu(lanes))
        simd.store(out, 3 * x.size + i, functions.rounded(lanes, True))


@pytest.fixture(scope="module")
def values() -> np.ndarray:
    rng = np.random.default_rng(0)
    tiny = rng.standard_normal(1000) * 1e-6
    spread = np.concatenate([np.linspace(-110, 95, 60000), rng.standard_normal(40000), tiny])
    special = [0.0, -0.0, np.inf, -np.inf, np.nan, 88.72, 88.73, -87.3, -103.9, -104.1, 3e38, -3e38, 1e-40]
    x = np.concatenate([spread, special]).astype(np.float32)
    return np.concatenate([x, np.zeros(-len(x) % 16, np.float32)])


@pytest.fixture(scope="module")
def results(values: np.ndarray) -> np.ndarray:
    out = np.full((4, len(values)), np.nan, np.float32)
    scalar_results(values, out)
    return out


def units(actual: np.ndarray, expected: np.ndarray) -> Any:
    """Distance in units in the last place of the expected float32."""
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        step = np.spacing(np.abs(expected.astype(np.float32))).astype(np.float64)
        return np.abs(actual.astype(np.float64) - expected) / step


def test_lanes_have_the_bits_of_scalars(values: np.ndarray, results: np.ndarray) -> None:
    out = np.full_like(results, -1)
    lane_results(values, out)
    assert (out.view(np.uint32) == results.view(np.uint32))[:, ~np.isnan(values)].all()
    assert np.isnan(out[:, np.isnan(values)]).all()


def test_exp_is_within_two_units(values: np.ndarray, results: np.ndarray) -> None:
    with np.errstate(over="ignore", under="ignore"):
        expected = np.exp(values.astype(np.float64))
    ordinary = (values > -87) & (values < 88.7)
    assert units(results[0], expected)[ordinary].max() <= 2
    small = (values <= -87) & np.isfinite(values)
    assert np.abs(results[0][small] - expected[small]).max() <= 2 * 2.0**-149


def test_exp_limits() -> None:
    x = np.array([-np.inf, np.inf, np.nan, 0.0, 88.73, -104.1, 1000, -1000], np.float32)
    out = np.empty((4, 8), np.float32)
    scalar_results(x, out)
    assert out[0, :2].tolist() == [0.0, np.inf] and np.isnan(out[0, 2]) and out[0, 3] == 1.0
    assert out[0, 4:].tolist() == [np.inf, 0.0, np.inf, 0.0]


def test_sigmoid_and_silu(values: np.ndarray, results: np.ndarray) -> None:
    ordinary = np.abs(values) < 80
    wide = values[ordinary].astype(np.float64)
    sigmoid = 1 / (1 + np.exp(-wide))
    assert units(results[1][ordinary], sigmoid).max() <= 4
    assert units(results[2][ordinary], wide * sigmoid)[np.abs(wide) > 1e-30].max() <= 4
    assert results[1][values == np.inf].tolist() == [1.0] and results[1][values == -np.inf].tolist() == [0.0]


def test_bf16_rounding(values: np.ndarray, results: np.ndarray) -> None:
    finite = np.isfinite(values)
    with np.errstate(over="ignore"):
        assert (results[3][finite] == round_bf16(values)[finite]).all()
    assert np.isnan(results[3][np.isnan(values)]).all()
    x = np.array([1 + 2**-8, 1 + 3 * 2**-8, 3.4e38, np.inf, -0.0], np.float32)  # ties to even, overflow, signs
    out = np.empty((4, 5), np.float32)
    scalar_results(x, out)
    assert out[3].tolist() == [1.0, 1 + 2**-6, np.inf, np.inf, 0.0] and np.signbit(out[3, 4])
