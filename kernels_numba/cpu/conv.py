"""The gated short convolution of LFM2 (arXiv 2511.23404): three taps over time, one filter a channel."""

from __future__ import annotations

import numpy as np

from ..batch import RING_ROWS
from ..jit import device, kernel
from .functions import rounded
from .simd import LANES, fma, load, splat, store
from .team import spread


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
    """A thread's share of the channels. It alone reads and writes their ring, and writes after all reads."""
    hidden = weight.shape[0]
    blocks = hidden // LANES
    first_channel, last_channel = blocks * part // parts * LANES, blocks * (part + 1) // parts * LANES
    taps = np.empty((3, hidden), np.float32)
    for at in range(first_channel, last_channel):
        for tap in range(3):
            taps[tap, at] = weight[at, tap]
    for segment in range(seg_slot.size):
        first, last = np.int64(seg_start[segment]), np.int64(seg_start[segment + 1])
        ring_at = (layer * ring.shape[1] + np.int64(seg_slot[segment])) * RING_ROWS * hidden
        for row in range(first, last):
            position = np.int64(positions[row])
            for at in range(first_channel, last_channel, LANES):
                u = gated_input(bcx, row, hidden, at, bf16)
                u1 = earlier_input(bcx, row, 1, first, position, ring, ring_at, hidden, at, bf16)
                u2 = earlier_input(bcx, row, 2, first, position, ring, ring_at, hidden, at, bf16)
                z = load(taps, at) * u2
                z = rounded(fma(load(taps, 2 * hidden + at), u, fma(load(taps, hidden + at), u1, z)), bf16)
                store(out, row * hidden + at, rounded(load(bcx, row * 3 * hidden + hidden + at) * z, bf16))
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
