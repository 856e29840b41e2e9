"""The one implementation of exp, sigmoid and SiLU, and of rounding to the activations' type.

Each works on a float32 or on 16 lanes with the same operations, so the same bits.
"""

from __future__ import annotations

import numpy as np

from ..jit import device
from .simd import constant_like, fma, larger, nearest_integer, power_of_two, round_bf16, smaller

LOWEST = np.float32(-105.0)  # exp rounds to 0 from here down
HIGHEST = np.float32(89.0)  # exp rounds to infinity from here up
LOG2_E = np.float32(1.4426950408889634)
MINUS_LN2_HIGH = np.float32(-0.693359375)  # few bits, so that n * ln2_high is exact
MINUS_LN2_LOW = np.float32(2.12194440e-4)
# e**r = 1 + r + r**2 * (C2 + C3 r + ...), fitted to 3e-9 relative on |r| <= ln(2) / 2
C2 = np.float32(0.4999999403953552)
C3 = np.float32(0.1666652113199234)
C4 = np.float32(0.04166838899254799)
C5 = np.float32(0.0083687175065279)
C6 = np.float32(0.0013814594130963087)
HALF = np.float32(0.5)
ZERO = np.float32(0.0)
ONE = np.float32(1.0)


@device
def exp(x):
    """e**x within 2 units in the last place; exp(-inf) = 0, overflow gives inf, NaN stays NaN."""
    x = smaller(constant_like(x, HIGHEST), larger(constant_like(x, LOWEST), x))
    n = nearest_integer(x * constant_like(x, LOG2_E))
    r = fma(n, constant_like(x, MINUS_LN2_LOW), fma(n, constant_like(x, MINUS_LN2_HIGH), x))
    series = fma(r, constant_like(x, C6), constant_like(x, C5))
    series = fma(r, series, constant_like(x, C4))
    series = fma(r, series, constant_like(x, C3))
    series = fma(r, series, constant_like(x, C2))
    series = fma(r * r, series, r) + constant_like(x, ONE)
    first = nearest_integer(n * constant_like(x, HALF))  # two factors: one alone can't reach 2**128 or 2**-149
    return series * power_of_two(first) * power_of_two(n - first)


@device
def sigmoid(x):
    one = constant_like(x, ONE)
    return one / (one + exp(constant_like(x, ZERO) - x))


@device
def silu(x):
    return x / (constant_like(x, ONE) + exp(constant_like(x, ZERO) - x))


@device
def rounded(x, bf16):
    """x as the activations hold it: nearest-even bf16, or float32 as it is."""
    return round_bf16(x) if bf16 else x
