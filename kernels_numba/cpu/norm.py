"""Embedding rows and RMSNorm."""

from __future__ import annotations

import numpy as np

from ..jit import device, kernel
from .functions import ONE, rounded
from .linear import part_of
from .simd import LANES, fma, lane_sum, load, splat, square_root, store
from .team import spread


@device
def embed_part(part, parts, tokens, weight, out):
    first, last = part_of(tokens.size, part, parts)
    width = weight.shape[1]
    for row in range(first, last):
        for at in range(0, width, LANES):
            store(out, row * width + at, load(weight, np.int64(tokens[row]) * width + at))


run_embed = spread(embed_part)


@kernel
def embed(team, tokens, weight, out, parts):
    run_embed(team, parts, (tokens, weight, out))


@device
def inverse_rms(x, at, width, eps):
    """1 / sqrt(mean(x**2) + eps) of `width` values from flat element `at`; lanes first, then the lane tree."""
    squares = splat(np.float32(0.0))
    for k in range(0, width, LANES):
        lanes = load(x, at + k)
        squares = fma(lanes, lanes, squares)
    return ONE / square_root(lane_sum(squares) / np.float32(width) + eps)


@device
def norm_part(part, parts, x, weight, eps, out, bf16):
    first, last = part_of(x.shape[0], part, parts)
    width = x.shape[1]
    for row in range(first, last):
        at = row * width
        scale = splat(inverse_rms(x, at, width, eps))
        for k in range(0, width, LANES):
            y = rounded(load(x, at + k) * scale, bf16)
            store(out, at + k, rounded(load(weight, k) * y, bf16))


run_norm = spread(norm_part)


@kernel
def rms_norm(team, x, weight, eps, out, bf16, parts):
    """r(w * r(x / rms(x))), the mean of squares in float32 (arXiv 1910.07467)."""
    run_norm(team, parts, (x, weight, eps, out, bf16))
