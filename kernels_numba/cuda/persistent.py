"""The layers between one attention and the next as one kernel, for a round of one row (sm_90 and newer).

One block a multiprocessor, for all of the run's products ("phases"). The weight warp streams its block's units of
weights, phase after phase, through a ring of shared memory; it stops only before the experts' weights, until the
router's logits are there. Eight consumer warps take a unit each, in ascending k. What a phase computes goes to the next
one through global memory, word by word: words are all ones until they are written, which no result is, and who needs
them asks until they are there. So there is no barrier between blocks: nobody waits for what it doesn't need.

Two sets of those words: a launch uses one and clears the other. A counter that every block adds to at its end says
which.
"""

from __future__ import annotations

import numpy as np
from numba import cuda

from .compiler import BULK, kernel
from .decode_parts import last_step_8, multiply_one_8, pairs_8, weights_at
from .decode_products import CHUNK, UNIT_CHUNK
from .persistent_parts import (
    CONSUMERS,
    ROW_THREADS,
    added_experts,
    convolve,
    expected_pieces,
    gate_words,
    input_begins,
    norm_row,
    norm_words,
    router,
)
from .persistent_stream import (
    CHANNELS,
    CHOSEN,
    CONVOLUTION,
    DEPTH,
    DOWN,
    GIVEN,
    INPUT,
    KIND,
    LAST,
    LOGIT_PARTS,
    LOGITS,
    NORM,
    NORMED,
    OWN,
    PHASE_BYTES,
    PROGRAM,
    RESIDUAL,
    RESULT,
    RING,
    SHARED,
    SOURCE,
    SQUARED,
    STATE,
    STREAM,
    UNITS,
    UP,
    ahead,
    early_chunks,
    phase_share,
    stream_weights,
    unit_copies,
    words_of,
)
from .products import add_pair, scale_pair, swiglu_pair
from .ptx import (
    async_fence,
    barrier_arrive,
    barrier_init,
    barrier_init_fence,
    barrier_test,
    barrier_wait,
    count_round,
    dependency_wait,
    divide,
    expect_128,
    group_sync,
    ldmatrix_x4,
    load_128,
    publish_32,
    shared_address,
    shared_load,
    shared_load_32,
    shared_load_64,
    shared_store_32,
    shared_store_128,
    store_32,
    store_128,
    zeros,
)
from .route import TILE
from .scalar import device, float_of
from .unroll import registers, unrolled

THREADS = ROW_THREADS + 32
u32, i32, u64 = np.uint32, np.int32, np.uint64
zero = zeros(4)


@device
def fetch_4(wa, xa, step):
    """Fragments of four k steps: weights, and the row."""
    x0 = ldmatrix_x4(u32(xa + u32(u32(step) * u32(32))))
    x1 = ldmatrix_x4(u32(xa + u32(u32(step) * u32(32)) + u32(64)))
    return (
        weights_at(wa, step), weights_at(wa, step + 1), weights_at(wa, step + 2), weights_at(wa, step + 3), x0, x1,
    )  # fmt: skip


@device
def multiply_4(acc, f):
    w0, w1, w2, w3, x0, x1 = f
    acc = multiply_one_8(multiply_one_8(acc, w0, x0[0], x0[1]), w1, x0[2], x0[3])
    return multiply_one_8(multiply_one_8(acc, w2, x1[0], x1[1]), w3, x1[2], x1[3])


@device
def unit_product(base, ring, slot, parity, slots, step, early, early_slot, early_parity, depth, wo, xa, lane):
    """A unit's sums over all k, the row at `xa`. Its first `early` stages lie `step` apart from `early_slot` on, the
    others from `slot`."""
    chunks = i32(i32(depth + i32(CHUNK - 1)) // i32(CHUNK))
    whole = i32(depth // i32(CHUNK))
    rest = i32(i32(depth - i32(whole * i32(CHUNK))) >> i32(4))
    acc = zero()
    at, turn = slot, parity
    if early > i32(0):
        at, turn = early_slot, early_parity
    full = u32(base + u32(at) * u32(16))
    barrier_wait(full, turn)
    wa = u32(ring + u32(at) * u32(UNIT_CHUNK) + wo)
    now = fetch_4(wa, xa, 0)
    for c in range(whole):
        # four k steps at a time: the next four are fetched before these are multiplied
        freed = u32(full + u32(8))
        number = i32(i32(c) + i32(1))
        if number < early:
            at = i32(at + step)
        elif number == early:
            at, turn = slot, parity
        else:
            at, turn = ahead(at, turn, step, slots)
        full = u32(base + u32(at) * u32(16))
        more = number < chunks
        landed = u32(1)
        if more:
            landed = barrier_test(full, turn)  # asked early: the answer takes as long as some products
        then = fetch_4(wa, xa, 4)
        acc = multiply_4(acc, now)
        if more:
            if landed == u32(0):
                barrier_wait(full, turn)
            wa = u32(ring + u32(at) * u32(UNIT_CHUNK) + wo)
            xa = u32(xa + u32(CHUNK * 2))
            now = fetch_4(wa, xa, 0)
        acc = multiply_4(acc, then)
        cuda.syncwarp()
        if lane == i32(0):
            barrier_arrive(freed)
    if rest > i32(0):
        for s in range(rest):
            acc = last_step_8(acc, wa, xa, s)
        cuda.syncwarp()
        if lane == i32(0):
            barrier_arrive(u32(full + u32(8)))
    return acc


@kernel(
    "u64 i32 i32 i32 i32 i32 u64 u64 u64 i32 i32 i32 i32 f32 f32 u64 u64 u64 i64 u64 u64 u64 u64 u64 u64 i32",
    threads=THREADS, dynamic_shared=SHARED, architectures=BULK,
)  # fmt: skip
@unrolled
def run_layers(
    program, phases, slots, early, flight, calm, words, set_bytes, arrivals, hidden, experts, top_k, normalize,
    scaling, eps, x, residual, states, state_bytes, row_segment, seg_slot, seg_start, positions, out, sums, features,
):  # fmt: skip
    """A run of layers of one row; see the module. program: `phases` records of PHASE_BYTES.

    x, residual [hidden]: what attention gives its out_proj, and the residual stream before it. states: the
    convolutions' rings, state_bytes from layer to layer. out: the last product's result; sums [hidden]: the residual
    stream then. All blocks must be on the device at once.
    """
    base = u32(u32(shared_address(cuda.shared.array(0, np.uint8)) + u32(127)) & u32(0xFFFFFF80))
    thread = i32(cuda.threadIdx.x)
    lane, warp = i32(thread & i32(31)), i32(thread >> i32(5))
    block, blocks = i32(cuda.blockIdx.x), i32(cuda.gridDim.x)
    if thread == i32(0):
        for s in range(i32(slots + early)):
            barrier_init(u32(base + u32(s) * u32(16)), u32(1))
            barrier_init(u32(base + u32(s) * u32(16) + u32(8)), u32(1))
        barrier_init_fence()
        async_fence()
    for piece in range(thread, i32(phases * i32(PHASE_BYTES // 16)), THREADS):
        a, b, c, d = load_128(u64(program + u64(u32(i32(piece))) * u64(16)))
        shared_store_128(u32(base + u32(PROGRAM) + u32(i32(piece)) * u32(16)), a, b, c, d)
    cuda.syncthreads()
    ring, phase = u32(base + u32(RING)), u32(base + u32(PROGRAM))
    if warp == i32(CONSUMERS):
        stream_weights(
            base, ring, phase, phases, slots, early, flight, calm, words, set_bytes, arrivals, experts, top_k,
            normalize, scaling, lane,
        )  # fmt: skip
        return
    dependency_wait()
    used = words_of(words, set_bytes, arrivals, blocks)
    unused = u64(words + set_bytes) if used == words else words
    ones = u32(0xFFFFFFFF)
    for piece in range(
        i32(i32(block * i32(ROW_THREADS)) + thread), i32(i32(set_bytes) >> i32(4)), i32(blocks * i32(ROW_THREADS))
    ):
        store_128(u64(unused + u64(u32(i32(piece))) * u64(16)), ones, ones, ones, ones)
    stream, normed, given = u32(base + u32(STREAM)), u32(base + u32(NORMED)), u32(base + u32(INPUT))
    squared, parts, channels = u32(base + u32(SQUARED)), u32(base + u32(LOGIT_PARTS)), u32(base + u32(CHANNELS))
    here = u64(u64(u32(thread)) * u64(16))
    own = u32(stream + u32(thread) * u32(16))
    mine = thread < i32(hidden >> i32(3))
    # weights are the 16-row operand: row l % 16, 16-byte piece l / 16 of the k step; swizzled by the row
    wo = u32(u32(lane & i32(15)) * u32(128) + u32(u32(lane >> i32(4)) ^ u32(lane & i32(7))) * u32(16))
    first_row = i32(i32(i32(lane & i32(3)) * i32(2)) + i32(i32(lane >> i32(2)) & i32(1))) == i32(0)
    pair = i32(i32(lane >> i32(3)) * i32(2))
    router_tile = i32(blocks - i32(1) - block)
    routes = i32(router_tile * i32(TILE)) < experts
    slot, parity, early_turn = i32(0), u32(0), u32(0)
    for _ in range(phases):
        kind = shared_load(u32(phase + u32(KIND)))
        units = shared_load(u32(phase + u32(UNITS)))
        depth = shared_load(u32(phase + u32(DEPTH)))
        source = shared_load(u32(phase + u32(SOURCE)))
        result = u64(used + u64(u32(shared_load(u32(phase + u32(RESULT))))))
        first, stop = phase_share(phase, block, blocks)
        works = first < stop
        line = given
        if kind == i32(RESIDUAL):
            if source == i32(GIVEN):
                if mine:
                    a, b, c, d = load_128(u64(residual + here))
                    shared_store_128(own, a, b, c, d)
                    a, b, c, d = load_128(u64(x + here))
                    shared_store_128(u32(given + u32(thread) * u32(16)), a, b, c, d)
                group_sync(u32(2), u32(ROW_THREADS))
            elif works:
                input_begins(u64(used + u64(u32(source))), i32(hidden >> i32(1)), warp, lane)
                if mine:
                    a, b, c, d = expect_128(u64(used + u64(u32(source)) + here))
                    shared_store_128(u32(given + u32(thread) * u32(16)), a, b, c, d)
                group_sync(u32(2), u32(ROW_THREADS))
        elif kind == i32(DOWN):
            if works:
                begin = u64(used + u64(u32(source)))
                pieces = i32(i32(top_k * depth) >> i32(3))
                input_begins(begin, i32(pieces << i32(2)), warp, lane)
                expected_pieces(begin, pieces, given, thread)
                group_sync(u32(2), u32(ROW_THREADS))
        elif kind == i32(UP):
            line = normed
            weights = norm_words(shared_load_64(u32(phase + u32(NORM))), mine, here)
            gate = registers(64, u32(0))
            if routes:
                gate = gate_words(shared_load_64(u32(phase + u32(OWN))), router_tile, hidden, experts, warp, lane)
            input_begins(u64(used + u64(u32(source))), i32(hidden >> i32(1)), warp, lane)
            a, b, c, d = u32(0), u32(0), u32(0), u32(0)
            if mine:
                a, b, c, d = expect_128(u64(used + u64(u32(source)) + here))
                shared_store_128(own, a, b, c, d)
            norm_row(a, b, c, d, weights, mine, hidden, eps, squared, normed, thread, lane)
            if routes:
                logits = u64(used + u64(u32(shared_load(u32(phase + u32(LOGITS))))))
                router(gate, normed, parts, router_tile, hidden, experts, logits, thread, warp, lane)
        elif works or block == i32(0):
            line = normed
            weights = norm_words(shared_load_64(u32(phase + u32(NORM))), mine, here)
            input_begins(u64(used + u64(u32(source))), i32(hidden >> i32(1)), warp, lane)
            a, b, c, d = u32(0), u32(0), u32(0), u32(0)
            if mine:
                a, b, c, d = expect_128(u64(used + u64(u32(source)) + here))
                shared_store_128(own, a, b, c, d)
                if kind == i32(LAST) and block == i32(0):
                    store_128(u64(sums + here), a, b, c, d)
            norm_row(a, b, c, d, weights, mine, hidden, eps, squared, normed, thread, lane)
        chunks = i32(i32(depth + i32(CHUNK - 1)) // i32(CHUNK))
        ahead_of = early_chunks(phase, first, stop, early, top_k)
        used_early = ahead_of > i32(0)
        while first < stop:
            copies = unit_copies(kind, i32(stop - first), top_k)
            if warp < copies:
                unit, set_ = i32(first + warp), i32(0)
                xa = u32(line + u32(lane >> i32(3)) * u32(16))
                if kind == i32(UP):
                    set_ = i32(divide(u32(unit), u32(units)))
                    unit = i32(unit - i32(set_ * units))
                elif kind == i32(DOWN):
                    xa = u32(xa + u32(i32(warp * depth)) * u32(2))
                mine_slot, mine_turn = ahead(slot, parity, warp, slots)
                acc = unit_product(
                    base, ring, mine_slot, mine_turn, slots, copies, ahead_of, i32(slots + warp), early_turn, depth,
                    wo, xa, lane,
                )  # fmt: skip
                low, high = pairs_8(acc, lane)
                if kind == i32(CONVOLUTION):
                    if first_row:
                        to = u32(channels + u32(warp) * u32(32) + u32(pair) * u32(2))
                        shared_store_32(to, low)
                        shared_store_32(u32(to + u32(16)), high)
                    group_sync(u32(1), u32(128))
                elif kind == i32(DOWN):
                    if first_row:
                        factor = float_of(shared_load_32(u32(base + u32(CHOSEN) + u32(warp) * u32(4))))
                        to = u32(channels + u32(warp) * u32(32) + u32(pair) * u32(2))
                        shared_store_32(to, scale_pair(low, factor))
                        shared_store_32(u32(to + u32(16)), scale_pair(high, factor))
                    group_sync(u32(1), u32(u32(top_k) * u32(32)))
                    if warp == i32(0):
                        added_experts(channels, stream, first, top_k, result, lane)
                elif kind == i32(UP):
                    if first_row:
                        column = i32(i32(set_ * features) + i32(unit * i32(8)) + pair)
                        publish_32(u64(result + u64(u32(column)) * u64(2)), swiglu_pair(low, high))
                elif first_row:
                    column = i32(i32(unit * i32(16)) + pair)
                    if kind == i32(RESIDUAL):
                        at = u32(stream + u32(column) * u32(2))
                        low = add_pair(low, shared_load_32(at))
                        high = add_pair(high, shared_load_32(u32(at + u32(16))))
                    to = u64(result + u64(u32(column)) * u64(2))
                    if kind == i32(LAST):
                        to = u64(out + u64(u32(column)) * u64(2))
                        store_32(to, low)
                        store_32(u64(to + u64(16)), high)
                    else:
                        publish_32(to, low)
                        publish_32(u64(to + u64(16)), high)
            elif kind == i32(CONVOLUTION) and warp == i32(CONSUMERS - 1):
                state = u64(states + u64(u32(shared_load(u32(phase + u32(STATE))))) * u64(state_bytes))
                convolve(
                    channels, first, units, shared_load_64(u32(phase + u32(OWN))), state, row_segment, seg_slot,
                    seg_start, positions, result, lane, u32(128),
                )  # fmt: skip
            slot, parity = ahead(slot, parity, i32(copies * i32(chunks - ahead_of)), slots)
            ahead_of = i32(0)
            if kind == i32(CONVOLUTION) or kind == i32(DOWN):
                first = i32(first + i32(1))
                if first < stop:
                    group_sync(u32(2), u32(ROW_THREADS))  # the channels are read before others come
            else:
                first = i32(first + copies)
        if used_early:
            early_turn = u32(early_turn ^ u32(1))
        phase = u32(phase + u32(PHASE_BYTES))
    if thread == i32(0):
        count_round(arrivals, u32(i32(i32(blocks + blocks) - i32(1))))
