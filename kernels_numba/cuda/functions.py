"""Scalar arithmetic that every kernel shares: explicitly rounded float32 operations, bf16, exp, sigmoid, SiLU.

Plain `*` and `+` may be contracted into one fma in one kernel and not in another; the operations here never are, so a
value has the same bits wherever it is computed. Under Numba's CUDA simulator the same names are plain Python.
PTX: https://docs.nvidia.com/cuda/parallel-thread-execution (sections in brackets).
"""

from __future__ import annotations

import numpy as np

from .scalar import (
    add,
    bf16_bits,
    device,
    div,
    exp2_approx,
    float_of,
    fma,
    log2_approx,
    mul,
    shuffle_xor,
    sqrt,
    sub,
)
from .scalar import (
    pack as pack,
)

ZERO = np.float32(0.0)
ONE = np.float32(1.0)
LOG2_E = np.float32(1.4426950408889634)
LOG2_E_REST = np.float32(1.925963033500e-08)  # log2(e) less LOG2_E
LN_2 = np.float32(0.6931471805599453)


@device
def low_half(pair):
    """The first of two bf16 in 32 bits, as float32."""
    return float_of(np.uint32(pair << np.uint32(16)))


@device
def high_half(pair):
    """The second of two bf16 in 32 bits, as float32."""
    return float_of(np.uint32(pair & np.uint32(0xFFFF0000)))


@device
def rounded(x):
    """x rounded to the nearest bf16, ties to even, as float32."""
    return float_of(np.uint32(np.uint32(bf16_bits(x)) << np.uint32(16)))


@device
def exp(x):
    """e**x within 4 units in the last place; the product's rounding error is put back to first order."""
    t = mul(x, LOG2_E)
    rest = fma(x, LOG2_E_REST, fma(x, LOG2_E, -t))
    y = exp2_approx(t)
    # where t is infinite so is y or 0, and rest is NaN: nothing to correct
    return fma(y, mul(rest, LN_2), y) if abs(t) < np.float32(127.0) else y


@device
def sigmoid(x):
    return div(ONE, add(ONE, exp(-x)))


@device
def silu(x):
    return div(x, add(ONE, exp(-x)))


@device
def log(x):
    """Natural logarithm of a positive normal number, within 1e-6 of max(1, |log x|)."""
    return mul(log2_approx(x), LN_2)


@device
def inverse_rms(sum_of_squares, count, eps):
    """1 / sqrt(mean + eps)."""
    return div(ONE, sqrt(add(div(sum_of_squares, count), eps)))


@device
def warp_sum(x):
    """Sum over the warp's 32 lanes by an xor tree: the same bits in every lane."""
    x = add(x, shuffle_xor(x, np.int32(16)))
    x = add(x, shuffle_xor(x, np.int32(8)))
    x = add(x, shuffle_xor(x, np.int32(4)))
    x = add(x, shuffle_xor(x, np.int32(2)))
    return add(x, shuffle_xor(x, np.int32(1)))


@device
def difference(a, b):
    """a - b, rounded once."""
    return sub(a, b)
