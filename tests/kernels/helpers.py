"""Random inputs of the kernels' tests, and how close is close."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from numpy.typing import NDArray

from kernels_numba.reference import bf16_bits, round_bf16

DTYPES = ("bfloat16", "float32")
THREADS = min(2, numba.config.NUMBA_NUM_THREADS)


def activations(rng: np.random.Generator, dtype: str, *shape: int, scale: float = 1.0) -> NDArray[np.float32]:
    x = (rng.standard_normal(shape) * scale).astype(np.float32)
    return round_bf16(x).astype(np.float32) if dtype == "bfloat16" else x


def weights(rng: np.random.Generator, *shape: int, scale: float | None = None) -> NDArray[np.uint16]:
    return bf16_bits(rng.standard_normal(shape) * (scale or shape[-1] ** -0.5))


def assert_close(actual: NDArray[Any], expected: NDArray[Any], dtype: str, steps: float = 1.0) -> None:
    """float32: 1e-5 of the largest value. bf16: each value within `steps` bf16 steps (a sum may fall on the other side
    of a rounding boundary), and nearly all equal."""
    assert actual.shape == expected.shape and actual.dtype == np.float32
    assert np.isfinite(actual).all()
    difference = np.abs(actual - expected)
    largest = np.abs(expected).max(initial=1e-3)
    if dtype == "float32":
        assert difference.max(initial=0) <= 1e-5 * largest
    else:
        assert (round_bf16(actual) == actual).all(), "results aren't bf16 values"
        assert (difference <= steps * 2.0**-7 * np.abs(expected) + steps * 2.0**-9 * largest).all()
        assert np.mean(difference > 0) <= 0.2


def assert_same_bits(a: NDArray[Any], b: NDArray[Any]) -> None:
    assert a.shape == b.shape and a.dtype == b.dtype
    assert a.tobytes() == b.tobytes()
