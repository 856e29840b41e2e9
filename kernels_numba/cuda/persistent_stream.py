"""The weight warp of the layers' kernel (see persistent.py)."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import cuda

from .decode_products import CHUNK, UNIT_CHUNK
from .decode_route import PADDING, choose_row, own_values
from .persistent_layout import (
    BIAS,
    CHOICE_FREE,
    CONSUMERS,
    CONVOLUTION,
    DEPTH,
    DOWN,
    EXPERT_BYTES,
    KIND,
    LAST,
    LOGITS,
    NUMBERS_READY,
    PHASE_BYTES,
    RESIDUAL,
    THREADS,
    UNITS,
    UP,
    WEIGHTS,
    WEIGHTS_READY,
    layout,
)
from .persistent_parts import share
from .products import with_globals
from .ptx import (
    barrier_expect,
    barrier_wait,
    barrier_wait_both,
    broadcast,
    bulk_copy_hinted,
    dependency_wait,
    dependents_start,
    divide,
    evict_first,
    group_arrive,
    group_sync,
    load_fresh,
    shared_load,
    shared_load_64,
    shared_store_32,
)
from .scalar import bits_of, device
from .unroll import registers, static, unrolled

ROWS = HALVES = CHOSEN = PAIRS = SETS = 0  # put in by `weight_stream`
expected_logits = choices = None  # the same

u32, i32, u64 = np.uint32, np.int32, np.uint64


@device
def ahead(slot, parity, by, slots):
    """The slot `by` stages on and the parity of its phase."""
    slot = i32(slot + by)
    while slot >= slots:
        slot = i32(slot - slots)
        parity = u32(parity ^ u32(1))
    return slot, parity


@device
def words_of(words, set_bytes, arrivals, blocks):
    """The words that this launch exchanges: the first set where a round's worth of blocks have yet to end."""
    if load_fresh(arrivals) < blocks:
        return words
    return u64(words + set_bytes)


@device
def phase_share(phase, sets, block, blocks):
    """A phase's units that are a block's, where blocks share out `sets` sets of them."""
    return share(i32(shared_load(u32(phase + u32(UNITS))) * sets), block, blocks)


@device
def unit_copies(kind, units, sets):
    """Units that are computed at once by a warp each, of `units` that are left: B, C and x, or all the experts'."""
    if kind == i32(CONVOLUTION):
        return i32(3)
    if kind == i32(DOWN):
        return sets
    return min(units, i32(CONSUMERS))


@device
def lane_source(phase, first, part, number):
    """Where the weights of the `part`-th of those units begin, the first or only one being unit `first`."""
    kind, units = shared_load(u32(phase + u32(KIND))), shared_load(u32(phase + u32(UNITS)))
    unit_bytes = i32(i32(i32(shared_load(u32(phase + u32(DEPTH))) + i32(63)) // i32(64)) * i32(2048))
    unit, set_ = i32(first + part), i32(0)
    if kind == i32(CONVOLUTION):
        unit = i32(first + i32(part * units))
    elif kind == i32(UP):
        set_ = i32(divide(u32(unit), u32(units)))
        unit = i32(unit - i32(set_ * units))
    elif kind == i32(DOWN):
        unit, set_ = first, part
    expert = broadcast(number, set_)
    if kind != i32(UP) and kind != i32(DOWN):
        expert = i32(0)
    source = u64(shared_load_64(u32(phase + u32(WEIGHTS))) + u64(u32(unit)) * u64(u32(unit_bytes)))
    return u64(source + u64(u32(expert)) * shared_load_64(u32(phase + u32(EXPERT_BYTES))))


@device
def early_chunks(phase, first, stop, early):
    """How many of the chunks of a block's first units come early. A run's last phase takes no slot that convolutions
    don't take, or its parity would be another: `early` is a multiple of 6."""
    kind, depth = shared_load(u32(phase + u32(KIND))), shared_load(u32(phase + u32(DEPTH)))
    if first == stop or (kind != i32(CONVOLUTION) and kind != i32(LAST)):
        return i32(0)
    copies = unit_copies(kind, i32(stop - first), i32(0))
    if copies > i32(3):
        return i32(0)
    return min(i32(i32(depth + i32(CHUNK - 1)) // i32(CHUNK)), i32(divide(u32(early), u32(copies))))


@device
def bring_early(base, ring, phase, block, blocks, first_slot, early, turn, window, policy, lane):
    """The early stages of a phase."""
    first, stop = phase_share(phase, i32(1), block, blocks)
    chunks = early_chunks(phase, first, stop, early)
    if chunks == i32(0):
        return
    depth = shared_load(u32(phase + u32(DEPTH)))
    unit_bytes = i32(i32(i32(depth + i32(63)) // i32(64)) * i32(2048))
    copies = unit_copies(shared_load(u32(phase + u32(KIND))), i32(stop - first), i32(0))
    at_once = max(i32(1), i32(divide(u32(CONSUMERS), u32(copies))))
    deep = i32(divide(u32(lane), u32(copies)))
    offset = i32(deep * i32(UNIT_CHUNK))
    source = lane_source(phase, first, i32(lane - i32(deep * copies)), i32(0))
    stage = lane
    chunk = i32(0)
    while chunk < chunks:
        issues = lane < i32(min(at_once, i32(chunks - chunk)) * copies)
        full = u32(base + u32(i32(first_slot + stage)) * u32(16))
        if issues:
            if stage < window:
                barrier_wait(u32(full + u32(8)), u32(turn ^ u32(1)))
            else:
                barrier_wait_both(u32(full + u32(8)), u32(turn ^ u32(1)), u32(full - u32(window) * u32(16)), turn)
        cuda.syncwarp()  # none before all may: see stream_weights
        if issues:
            part = min(i32(UNIT_CHUNK), i32(unit_bytes - offset))
            barrier_expect(full, u32(part))
            to = u32(ring + u32(i32(first_slot + stage)) * u32(UNIT_CHUNK))
            bulk_copy_hinted(to, u64(source + u64(u32(offset))), u32(part), full, policy)
        chunk = i32(chunk + at_once)
        offset = i32(offset + i32(at_once * i32(UNIT_CHUNK)))
        stage = i32(stage + i32(at_once * copies))


def _stream_weights(
    base, ring, program, phases, slots, early, flight, calm, words, set_bytes, arrivals, experts, top_k, normalize,
    scaling, lane,
):  # fmt: skip
    """By the weight warp: the stages of all of the block's units, 4 KB each, in the order in which they are used."""
    block, blocks = i32(cuda.blockIdx.x), i32(cuda.gridDim.x)
    policy = evict_first()
    slot, parity, issued, early_turn = i32(0), u32(0), i32(0), u32(0)
    number, sets, pairs = i32(0), top_k, u32(0)
    residual_free, residual_turn, has_residual = u32(0), u32(0), False
    for p in range(phases):
        phase = u32(program + u32(i32(p)) * u32(PHASE_BYTES))
        kind = shared_load(u32(phase + u32(KIND)))
        depth = shared_load(u32(phase + u32(DEPTH)))
        chunks = i32(i32(depth + i32(CHUNK - 1)) // i32(CHUNK))
        unit_bytes = i32(i32(i32(depth + i32(63)) // i32(64)) * i32(2048))
        window = calm
        logits = registers(HALVES, PADDING)
        bias_low, bias_high, has_bias = np.float32(0.0), np.float32(0.0), False
        first, stop = phase_share(phase, i32(1), block, blocks)
        if kind == i32(UP):
            window = flight
            if i32(i32(p) + i32(2)) < phases:
                if has_residual:  # once the row is there: it isn't to wait behind these weights
                    barrier_wait(residual_free, residual_turn)
                bring_early(
                    base, ring, u32(phase + u32(2 * PHASE_BYTES)), block, blocks, slots, early, early_turn, calm,
                    policy, lane,
                )  # fmt: skip
            dependency_wait()
            bias = shared_load_64(u32(phase + u32(BIAS)))
            has_bias = bias != u64(0)
            bias_low, bias_high = own_values(bias, lane, experts, np.float32(0.0))
            at = shared_load(u32(phase + u32(LOGITS)))
            logits = expected_logits(u64(words_of(words, set_bytes, arrivals, blocks) + u64(u32(at))), lane, experts)
            number, sets, pairs = choices(logits, bias_low, bias_high, has_bias, experts, top_k, lane)
            if ROWS == 1:
                sets = top_k
            else:
                group_sync(u32(CHOICE_FREE), u32(THREADS))
                if lane == i32(0):
                    shared_store_32(u32(base + u32(SETS)), u32(sets))
                if lane < i32(CONSUMERS):
                    shared_store_32(u32(base + u32(PAIRS) + u32(lane) * u32(4)), pairs)
                cuda.syncwarp()
                group_arrive(u32(NUMBERS_READY), u32(THREADS))
            first, stop = phase_share(phase, sets, block, blocks)
        elif kind == i32(RESIDUAL):
            has_residual = first < stop
            residual_free, residual_turn = u32(base + u32(slot) * u32(16) + u32(8)), parity
        chunk = early_chunks(phase, first, stop, early)
        if chunk > i32(0):
            early_turn = u32(early_turn ^ u32(1))
        while first < stop:
            copies = unit_copies(kind, i32(stop - first), sets)
            # a lane is for one unit: the `deep`-th chunk of `at_once`
            at_once = max(i32(1), i32(divide(u32(CONSUMERS), u32(copies))))
            deep = i32(divide(u32(lane), u32(copies)))
            source = lane_source(phase, first, i32(lane - i32(deep * copies)), number)
            offset = i32(i32(deep + chunk) * i32(UNIT_CHUNK))
            while chunk < chunks:
                lanes = i32(min(at_once, i32(chunks - chunk)) * copies)
                here, turn = i32(slot + lane), parity
                if here >= slots:
                    here, turn = i32(here - slots), u32(turn ^ u32(1))
                full = u32(base + u32(here) * u32(16))
                if lane < lanes:
                    if i32(issued + lane) < window:
                        barrier_wait(u32(full + u32(8)), u32(turn ^ u32(1)))
                    else:
                        before, then = i32(here - window), turn
                        if before < i32(0):
                            before, then = i32(before + slots), u32(then ^ u32(1))
                        barrier_wait_both(
                            u32(full + u32(8)), u32(turn ^ u32(1)), u32(base + u32(before) * u32(16)), then
                        )  # fmt: skip
                # No lane copies before all may: where a stage has landed, all `window` stages before it have, so that
                # a warp never asks for its next stage while the slot is two uses behind: parity can't tell these apart
                cuda.syncwarp()
                if lane < lanes:
                    part = min(i32(UNIT_CHUNK), i32(unit_bytes - offset))
                    barrier_expect(full, u32(part))
                    to = u32(ring + u32(here) * u32(UNIT_CHUNK))
                    bulk_copy_hinted(to, u64(source + u64(u32(offset))), u32(part), full, policy)
                chunk = i32(chunk + at_once)
                offset = i32(offset + i32(at_once * i32(UNIT_CHUNK)))
                slot, parity = ahead(slot, parity, lanes, slots)
                issued = min(i32(issued + lanes), i32(1 << 20))
            chunk = i32(0)
            first = i32(first + (copies if kind != i32(CONVOLUTION) and kind != i32(DOWN) else i32(1)))
        if kind == i32(UP):  # what the experts' results are multiplied with isn't needed before
            if ROWS == 1:
                group_sync(u32(CHOICE_FREE), u32(THREADS))
            for r in static(ROWS):
                weight, _ = choose_row(
                    logits[2 * r], logits[2 * r + 1], bias_low, bias_high, has_bias, experts, top_k, normalize, scaling,
                    lane,
                )  # fmt: skip
                if lane < top_k:
                    at = u32(base + u32(CHOSEN) + u32(i32(i32(r * top_k) + lane)) * u32(4))
                    shared_store_32(at, bits_of(weight))
            cuda.syncwarp()
            group_arrive(u32(WEIGHTS_READY), u32(THREADS))
    dependents_start()


def weight_stream(rows: int, **parts: Any) -> Any:
    """stream_weights(...) for a number of rows, with the `parts` for them."""
    return device(with_globals(unrolled(_stream_weights, **layout(rows), HALVES=2 * rows), **parts))
