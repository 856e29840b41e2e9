"""The gated short convolution of LFM2 (arXiv 2511.23404): three taps over time, one filter a channel."""

from __future__ import annotations

import numpy as np

from ..batch import RING_ROWS
from ..jit import device, kernel
from .functions import rounded
from .simd import LANES, fma, load, load_apart, splat, store
from .team import spread

BLOCK = 32  # rows of a channel block done in one go


@device
def gated_input(bcx, row, hidden, at, bf16):
    """u = r(B * x) of 16 channels."""
    start = row * 3 * hidden + at
    return rounded(load(bcx, start) * load(bcx, start + 2 * hidden), bf16)


@device
def earlier_input(bcx, row, back, first, position, ring, ring_at, hidden, at, bf16):
    """u of `back` positions before `row`: from the segment's own rows, else from the ring; zero before position 0."""
    if row - back >= first:
        return gated_input(bcx, row - back, hidden, at, bf16)
    if position < back:
        return splat(np.float32(0.0))
    return load(ring, ring_at + (position - back) % RING_ROWS * hidden + at)


@device
def conv_part(part, parts, bcx, weight, ring, layer, positions, seg_start, seg_slot, out, bf16):
    """A part's share of the channels. It alone reads and writes their ring, and writes after all reads."""
    hidden = weight.shape[0]
    blocks = hidden // LANES
    first_channel, last_channel = blocks * part // parts * LANES, blocks * (part + 1) // parts * LANES
    for segment in range(seg_slot.size):
        first, last = np.int64(seg_start[segment]), np.int64(seg_start[segment + 1])
        ring_at = (layer * ring.shape[1] + np.int64(seg_slot[segment])) * RING_ROWS * hidden
        for start in range(first, last, BLOCK):
            position = np.int64(positions[start])
            for at in range(first_channel, last_channel, LANES):
                w0, w1, w2 = (
                    load_apart(weight, at * 3, 3),
                    load_apart(weight, at * 3 + 1, 3),
                    load_apart(weight, at * 3 + 2, 3),
                )
                u2 = earlier_input(bcx, start, 2, first, position, ring, ring_at, hidden, at, bf16)
                u1 = earlier_input(bcx, start, 1, first, position, ring, ring_at, hidden, at, bf16)
                for row in range(start, min(start + BLOCK, last)):
                    u = gated_input(bcx, row, hidden, at, bf16)
                    z = rounded(fma(w2, u, fma(w1, u1, w0 * u2)), bf16)
                    store(out, row * hidden + at, rounded(load(bcx, row * 3 * hidden + hidden + at) * z, bf16))
                    u2, u1 = u1, u
        for row in range(max(first, last - RING_ROWS), last):
            position = np.int64(positions[row])
            for at in range(first_channel, last_channel, LANES):
                u = gated_input(bcx, row, hidden, at, bf16)
                store(ring, ring_at + position % RING_ROWS * hidden + at, u)


run_conv = spread(conv_part)


@kernel
def short_conv(team, bcx, weight, ring, layer, positions, seg_start, seg_slot, out, bf16, parts):
    """r(C * r(w0 u[t-2] + w1 u[t-1] + w2 u[t])) with u = r(B x); bcx rows hold B, C, x; weight [hidden, 3]."""
    run_conv(team, parts, (bcx, weight, ring, layer, positions, seg_start, seg_slot, out, bf16))


@kernel
def conv_taps(bcx, ring, layer, positions, row_segment, seg_start, seg_slot, rows, taps, bf16):
    """The inputs u of each of `rows` and of the position before it, to taps [T, layers, 2, hidden]."""
    hidden = ring.shape[3]
    for tap in range(rows.size):
        row, segment = np.int64(rows[tap]), row_segment[rows[tap]]
        first = np.int64(seg_start[segment])
        ring_at = (layer * ring.shape[1] + np.int64(seg_slot[segment])) * RING_ROWS * hidden
        tap_at = (tap * ring.shape[0] + layer) * 2 * hidden
        for at in range(0, hidden, LANES):
            before = earlier_input(bcx, row, 1, first, np.int64(positions[row]), ring, ring_at, hidden, at, bf16)
            store(taps, tap_at + at, before)
            store(taps, tap_at + hidden + at, gated_input(bcx, row, hidden, at, bf16))
