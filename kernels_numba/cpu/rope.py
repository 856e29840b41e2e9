"""Rotary tables, and what lies between the q/k/v product and attention: q/k norm, rotation, the write to the cache."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ..batch import PAGE_ROWS
from ..jit import device, kernel
from .functions import rounded
from .linear import part_of
from .norm import inverse_rms
from .simd import LANES, load, splat, store, store_one
from .team import spread

HEAD = 64
HALF = HEAD // 2
TILE = 64  # positions whose keys lie together, as [dims, positions]


def rope_tables(theta: float, max_position: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """cos and sin [max_position, 32] of position * theta**(-2i/64), each step rounded to float32 (arXiv 2104.09864)."""
    exponent = np.arange(0, HEAD, 2, dtype=np.float32) / np.float32(HEAD)
    inverse = np.float32(1.0) / np.power(np.float64(theta), exponent.astype(np.float64)).astype(np.float32)
    angle = np.arange(max_position, dtype=np.float32)[:, None] * inverse[None, :]
    return np.cos(angle.astype(np.float64)).astype(np.float32), np.sin(angle.astype(np.float64)).astype(np.float32)


@device
def head_norm_rope(qkv, at, weight, eps, cos, sin, position, out, out_at, bf16):
    """One head of one row: r(w r(x / rms)), then dim i rotated with dim i + 32."""
    scale = splat(inverse_rms(qkv, at, HEAD, eps))
    for i in range(0, HALF, LANES):
        a = rounded(load(weight, i) * rounded(load(qkv, at + i) * scale, bf16), bf16)
        b = rounded(load(weight, HALF + i) * rounded(load(qkv, at + HALF + i) * scale, bf16), bf16)
        c, s = load(cos, position * HALF + i), load(sin, position * HALF + i)
        store(out, out_at + i, rounded(rounded(a * c, bf16) - rounded(b * s, bf16), bf16))
        store(out, out_at + HALF + i, rounded(rounded(b * c, bf16) + rounded(a * s, bf16), bf16))


@device
def inputs_part(
    part,
    parts,
    qkv,
    q_norm,
    k_norm,
    eps,
    cos,
    sin,
    kv,
    layout,
    layer,
    positions,
    segments,
    seg_slot,
    page_table,
    q,
    bf16,
):
    layers, kv_heads = layout
    heads = q.shape[1] // HEAD
    width = qkv.shape[1]
    key = np.empty(HEAD, np.float32)
    first, last = part_of(qkv.shape[0], part, parts)
    for row in range(first, last):
        position = np.int64(positions[row])
        for head in range(heads):
            head_norm_rope(
                qkv, row * width + head * HEAD, q_norm, eps, cos, sin, position, q, (row * heads + head) * HEAD, bf16
            )
        page = np.int64(page_table[seg_slot[segments[row]], position // PAGE_ROWS])
        place = position % PAGE_ROWS
        for head in range(kv_heads):
            source = row * width + (heads + head) * HEAD
            head_norm_rope(qkv, source, k_norm, eps, cos, sin, position, key, 0, bf16)
            keys = (((page * layers + layer) * 2) * kv_heads + head) * PAGE_ROWS * HEAD
            column = keys + place // TILE * TILE * HEAD + place % TILE
            for i in range(HEAD):
                store_one(kv, column + i * TILE, key[i])
            values = keys + kv_heads * PAGE_ROWS * HEAD + place * HEAD
            for i in range(0, HEAD, LANES):
                store(kv, values + i, load(qkv, source + kv_heads * HEAD + i))


run_inputs = spread(inputs_part)


@kernel
def attention_inputs(
    team,
    qkv,
    q_norm,
    k_norm,
    eps,
    cos,
    sin,
    kv,
    layout,
    layer,
    positions,
    segments,
    seg_slot,
    page_table,
    q,
    bf16,
    parts,
):
    """q [rows, heads * 64] normed and rotated; the rows' keys (normed, rotated) and values go to the cache."""
    arguments = (
        *(qkv, q_norm, k_norm, eps, cos, sin, kv, layout, layer),
        *(positions, segments, seg_slot, page_table, q, bf16),
    )
    run_inputs(team, parts, arguments)
