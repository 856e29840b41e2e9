"""The weight warp of the layers' kernel (see persistent.py), and how a run of layers is written down: its phases, and
where what lies in shared memory."""

from __future__ import annotations

import numpy as np
from numba import cuda

from .decode_parts import SUM_DEPTH
from .decode_products import CHUNK, UNIT_CHUNK
from .decode_route import PADDING, choose_row, own_values
from .persistent_parts import CONSUMERS, ROW_THREADS, chosen_number, expected_logits, share
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
    load_fresh,
    shared_load,
    shared_load_64,
    shared_store_32,
)
from .route import TILE
from .scalar import bits_of, device

MOST_SLOTS = 64
MOST_TOP = 4
"""Most experts of a row."""

CONVOLUTION, RESIDUAL, UP, DOWN, LAST = range(5)
"""Phases of a run: norm, B, C and x, convolution · product and residual · norm, router, gate and up
with SwiGLU · down, weighted, sum over experts · norm, product."""

PHASE_BYTES = 128
MOST_PHASES = 24
KIND, UNITS, SETS, DEPTH, SOURCE, RESULT, LOGITS, STATE = range(0, 32, 4)
WEIGHTS, EXPERT_BYTES, NORM, OWN, BIAS = range(32, 72, 8)
"""Bytes of a phase: kind; units of a set of weights; sets of them that blocks share out: of gate and up as many as the
row has experts; k; where, from the beginning of the exchanged words, its input lies (GIVEN: the run's input), its
result, the router's logits; the convolution's layer; the weights, the bytes of an expert's; the norm's weights; the
router's weights or the convolution's; the router's bias."""
GIVEN = -1

# shared memory: two barriers a slot, then the row in bf16 as it is, normed, then
STREAM, NORMED = 16 * MOST_SLOTS, 16 * MOST_SLOTS + 2 * SUM_DEPTH
SQUARED = NORMED + 2 * SUM_DEPTH
LOGIT_PARTS = SQUARED + 4 * ROW_THREADS
CHANNELS = LOGIT_PARTS + 4 * CONSUMERS * TILE
CHOSEN = CHANNELS + 32 * MOST_TOP
PROGRAM = CHOSEN + 128
INPUT = PROGRAM + PHASE_BYTES * MOST_PHASES
INPUT_BYTES = 16384
RING = INPUT + INPUT_BYTES
SHARED = 232448

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
def phase_share(phase, block, blocks):
    """A phase's units that are a block's."""
    return share(i32(shared_load(u32(phase + u32(UNITS))) * shared_load(u32(phase + u32(SETS)))), block, blocks)


@device
def unit_copies(kind, units, top_k):
    """Units that are computed at once by a warp each, of `units` that are left: B, C and x, or all the experts'."""
    if kind == i32(CONVOLUTION):
        return i32(3)
    if kind == i32(DOWN):
        return top_k
    return min(units, i32(CONSUMERS))


@device
def lane_source(phase, first, part, number, top_k):
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
def early_chunks(phase, first, stop, early, top_k):
    """How many of the chunks of a block's first units come early."""
    kind, depth = shared_load(u32(phase + u32(KIND))), shared_load(u32(phase + u32(DEPTH)))
    if first == stop or (kind != i32(CONVOLUTION) and kind != i32(LAST)):
        return i32(0)
    copies = unit_copies(kind, i32(stop - first), top_k)
    return min(i32(i32(depth + i32(CHUNK - 1)) // i32(CHUNK)), i32(divide(u32(early), u32(copies))))


@device
def bring_early(base, ring, phase, block, blocks, first_slot, early, turn, window, top_k, policy, lane):
    """The early stages of a phase."""
    first, stop = phase_share(phase, block, blocks)
    chunks = early_chunks(phase, first, stop, early, top_k)
    if chunks == i32(0):
        return
    depth = shared_load(u32(phase + u32(DEPTH)))
    unit_bytes = i32(i32(i32(depth + i32(63)) // i32(64)) * i32(2048))
    copies = unit_copies(shared_load(u32(phase + u32(KIND))), i32(stop - first), top_k)
    at_once = max(i32(1), i32(divide(u32(CONSUMERS), u32(copies))))
    deep = i32(divide(u32(lane), u32(copies)))
    offset = i32(deep * i32(UNIT_CHUNK))
    source = lane_source(phase, first, i32(lane - i32(deep * copies)), i32(0), top_k)
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


@device
def stream_weights(
    base, ring, program, phases, slots, early, flight, calm, words, set_bytes, arrivals, experts, top_k, normalize,
    scaling, lane,
):  # fmt: skip
    """By the weight warp: the stages of all of the block's units, 4 KB each, in the order in which they are used."""
    block, blocks = i32(cuda.blockIdx.x), i32(cuda.gridDim.x)
    policy = evict_first()
    slot, parity, issued, number, early_turn = i32(0), u32(0), i32(0), i32(0), u32(0)
    residual_free, residual_turn, has_residual = u32(0), u32(0), False
    for p in range(phases):
        phase = u32(program + u32(i32(p)) * u32(PHASE_BYTES))
        kind = shared_load(u32(phase + u32(KIND)))
        depth = shared_load(u32(phase + u32(DEPTH)))
        chunks = i32(i32(depth + i32(CHUNK - 1)) // i32(CHUNK))
        unit_bytes = i32(i32(i32(depth + i32(63)) // i32(64)) * i32(2048))
        first, stop = phase_share(phase, block, blocks)
        window = calm
        low, high, bias_low, bias_high = PADDING, PADDING, np.float32(0.0), np.float32(0.0)
        has_bias, chooses = False, False
        if kind == i32(UP):
            window = flight
            if i32(i32(p) + i32(2)) < phases:
                if has_residual:  # once the row is there: it isn't to wait behind these weights
                    barrier_wait(residual_free, residual_turn)
                bring_early(
                    base, ring, u32(phase + u32(2 * PHASE_BYTES)), block, blocks, slots, early, early_turn, calm,
                    top_k, policy, lane,
                )  # fmt: skip
            dependency_wait()
            down, down_stop = phase_share(u32(phase + u32(PHASE_BYTES)), block, blocks)
            if first < stop or down < down_stop:
                chooses = True
                bias = shared_load_64(u32(phase + u32(BIAS)))
                has_bias = bias != u64(0)
                bias_low, bias_high = own_values(bias, lane, experts, np.float32(0.0))
                at = shared_load(u32(phase + u32(LOGITS)))
                low, high = expected_logits(
                    u64(words_of(words, set_bytes, arrivals, blocks) + u64(u32(at))), lane, experts
                )
                number = chosen_number(low, high, bias_low, bias_high, has_bias, experts, top_k, lane)
        elif kind == i32(RESIDUAL):
            has_residual = first < stop
            residual_free, residual_turn = u32(base + u32(slot) * u32(16) + u32(8)), parity
        chunk = early_chunks(phase, first, stop, early, top_k)
        if chunk > i32(0):
            early_turn = u32(early_turn ^ u32(1))
        while first < stop:
            copies = unit_copies(kind, i32(stop - first), top_k)
            # a lane is for one unit: the `deep`-th chunk of `at_once`
            at_once = max(i32(1), i32(divide(u32(CONSUMERS), u32(copies))))
            deep = i32(divide(u32(lane), u32(copies)))
            source = lane_source(phase, first, i32(lane - i32(deep * copies)), number, top_k)
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
        if chooses:  # what the experts' results are multiplied with; read by those who wait for the next stages
            weight, _ = choose_row(low, high, bias_low, bias_high, has_bias, experts, top_k, normalize, scaling, lane)
            if lane < top_k:
                shared_store_32(u32(base + u32(CHOSEN) + u32(lane) * u32(4)), bits_of(weight))
            cuda.syncwarp()
    dependents_start()
