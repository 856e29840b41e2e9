"""The layers between one attention and the next as one kernel, for rounds of one and of two rows (sm_90 and newer).

One block a multiprocessor, for all of the run's products ("phases"). The weight warp streams its block's units of
weights, phase after phase, through a ring of shared memory; it stops only before the experts' weights, until the
router's logits are there. Eight consumer warps take a unit each, in ascending k, for all rows at once. What a phase
computes goes to the next one through global memory, word by word: words are all ones until they are written, which no
result is, and who needs them asks until they are there. So there is no barrier between blocks: nobody waits for what it
doesn't need.

Two sets of those words: a launch uses one and clears the other. A counter that every block adds to at its end says
which.
"""

from __future__ import annotations

import numpy as np
from numba import cuda

from .compiler import BULK, Kernel, kernel
from .decode_parts import fetch_8, last_step_8, multiply_8, pairs_8
from .decode_products import CHUNK, UNIT_CHUNK
from .persistent_layout import (
    CHOICE_FREE,
    CONSUMERS,
    CONVOLUTION,
    DEPTH,
    DOWN,
    GIVEN,
    KIND,
    LAST,
    LOGITS,
    MOST_ROWS,
    MOST_SLOTS,
    NO_PAIR,
    NORM,
    NUMBERS_READY,
    OWN,
    PHASE_BYTES,
    RESIDUAL,
    RESULT,
    ROW_THREADS,
    SHARED,
    SOURCE,
    STATE,
    THREADS,
    UNITS,
    UP,
    WEIGHTS_READY,
    layout,
)
from .persistent_parts import gate_words, input_begins, norm_words, parts
from .persistent_stream import ahead, early_chunks, phase_share, unit_copies, weight_stream, words_of
from .products import add_pair, swiglu_pair, with_globals
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
    group_arrive,
    group_sync,
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
from .scalar import device
from .unroll import registers, static, unrolled

ROWS = LINE = WORDS = STREAM = NORMED = SQUARED = 0  # put in by _make
LOGIT_PARTS = CHANNELS = CHOSEN = PAIRS = SETS = PROGRAM = INPUT = RING = 0
stream_weights = rows_here = norm_rows = expected_pieces = added_experts = router = None  # the same
pairs_of = pair_of = input_pair = conv_given = convolve = None

u32, i32, u64 = np.uint32, np.int32, np.uint64
zero = zeros(4)


@device
def unit_product(base, ring, slot, parity, slots, step, early, early_slot, early_parity, depth, wo, xa, lane):
    """A unit's sums over all k, the rows at `xa`. Its first `early` stages lie `step` apart from `early_slot` on, the
    others from `slot`. Two k steps are fetched while two others are multiplied; what else is to be done has the time
    that products take."""
    last = i32(i32(i32(depth + i32(CHUNK - 1)) // i32(CHUNK)) - i32(1))
    at, turn, limit = slot, parity, slots
    if early > i32(0):
        at, turn, limit = early_slot, early_parity, i32(2 * MOST_SLOTS)
    full = u32(base + u32(at) * u32(16))
    barrier_wait(full, turn)
    wa = u32(ring + u32(at) * u32(UNIT_CHUNK) + wo)
    acc, now = zero(), fetch_8(wa, xa, 0)
    for c in range(last):
        freed = u32(full + u32(8))
        then = fetch_8(wa, xa, 2)
        acc = multiply_8(acc, now)
        at = i32(at + step)
        over = at >= limit
        at = i32(at - slots) if over else at
        turn = u32(turn ^ u32(1)) if over else turn
        moves = i32(i32(c) + i32(1)) == early
        at, turn, limit = slot if moves else at, parity if moves else turn, slots if moves else limit
        full = u32(base + u32(at) * u32(16))
        landed = barrier_test(full, turn)  # asked early: the answer takes as long as some products
        now = fetch_8(wa, xa, 4)
        acc = multiply_8(acc, then)
        then = fetch_8(wa, xa, 6)
        acc = multiply_8(acc, now)
        if landed == u32(0):
            barrier_wait(full, turn)
        wa = u32(ring + u32(at) * u32(UNIT_CHUNK) + wo)
        xa = u32(xa + u32(CHUNK * 2))
        now = fetch_8(wa, xa, 0)
        acc = multiply_8(acc, then)
        cuda.syncwarp()
        if lane == i32(0):
            barrier_arrive(freed)
    rest = i32(depth - i32(last * i32(CHUNK)))
    if rest == i32(CHUNK):
        then = fetch_8(wa, xa, 2)
        acc = multiply_8(acc, now)
        now = fetch_8(wa, xa, 4)
        acc = multiply_8(acc, then)
        then = fetch_8(wa, xa, 6)
        acc = multiply_8(multiply_8(acc, now), then)
    else:
        for s in range(i32(rest >> i32(4))):
            acc = last_step_8(acc, wa, xa, s)
    cuda.syncwarp()
    if lane == i32(0):
        barrier_arrive(u32(full + u32(8)))
    return acc


def _run_layers(
    program, phases, slots, early, flight, calm, words, set_bytes, arrivals, hidden, experts, top_k, normalize,
    scaling, eps, x, residual, states, state_bytes, row_segment, seg_slot, seg_start, positions, out, columns, sums,
    features,
):  # fmt: skip
    """A run of layers of ROWS rows; see the module. program: `phases` records of PHASE_BYTES.

    x, residual [ROWS, hidden]: what attention gives its out_proj, and the residual stream before it. states: the
    convolutions' rings, state_bytes from layer to layer. out [ROWS, columns]: the last product's result; sums [ROWS,
    hidden]: the residual stream then. All blocks must be on the device at once.
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
    squared, logit_parts, channels = u32(base + u32(SQUARED)), u32(base + u32(LOGIT_PARTS)), u32(base + u32(CHANNELS))
    row_bytes = u64(u64(u32(hidden)) * u64(2))
    here = u64(u64(u32(thread)) * u64(16))
    own = u32(stream + u32(thread) * u32(16))
    mine = thread < i32(hidden >> i32(3))
    # weights are the 16-row operand: row l % 16, 16-byte piece l / 16 of the k step; swizzled by the row
    wo = u32(u32(lane & i32(15)) * u32(128) + u32(u32(lane >> i32(4)) ^ u32(lane & i32(7))) * u32(16))
    # rows are its columns, again and again; a thread's pairs of results are those of column `row`
    piece_of = u32(u32(lane >> i32(3)) * u32(16))
    line_of = u32(piece_of + u32(lane & i32(ROWS - 1)) * u32(LINE))
    row = i32(i32(i32(lane & i32(3)) * i32(2)) + i32(i32(lane >> i32(2)) & i32(1)))
    has_row = row < i32(ROWS)
    pair = i32(i32(lane >> i32(3)) * i32(2))
    router_tile = i32(blocks - i32(1) - block)
    routes = i32(router_tile * i32(TILE)) < experts
    slot, parity, early_turn, sets = i32(0), u32(0), u32(0), top_k
    for _ in range(phases):
        kind = shared_load(u32(phase + u32(KIND)))
        units = shared_load(u32(phase + u32(UNITS)))
        depth = shared_load(u32(phase + u32(DEPTH)))
        source = shared_load(u32(phase + u32(SOURCE)))
        result = u64(used + u64(u32(shared_load(u32(phase + u32(RESULT))))))
        first, stop = phase_share(phase, i32(1), block, blocks)
        works = first < stop
        line = given
        if kind == i32(RESIDUAL):
            to = u32(given + u32(thread) * u32(16))
            if source == i32(GIVEN):
                if mine:
                    for r in static(ROWS):
                        a, b, c, d = load_128(u64(residual + u64(r) * row_bytes + here))
                        shared_store_128(u32(own + u32(r * LINE)), a, b, c, d)
                        a, b, c, d = load_128(u64(x + u64(r) * row_bytes + here))
                        shared_store_128(u32(to + u32(r * LINE)), a, b, c, d)
                group_sync(u32(2), u32(ROW_THREADS))
            elif works:
                begin = u64(used + u64(u32(source)))
                input_begins(begin, i32(i32(ROWS * hidden) >> i32(1)), warp, lane)
                rows_here(begin, to, mine, here, row_bytes)
                group_sync(u32(2), u32(ROW_THREADS))
        elif kind == i32(DOWN):
            group_sync(u32(WEIGHTS_READY), u32(THREADS))
            if works:
                begin = u64(used + u64(u32(source)))
                pieces = i32(i32(i32(ROWS * top_k) * depth) >> i32(3))
                input_begins(begin, i32(pieces << i32(2)), warp, lane)
                expected_pieces(begin, pieces, given, thread)
                group_sync(u32(2), u32(ROW_THREADS))
        elif kind == i32(UP):
            line = normed
            weights = norm_words(shared_load_64(u32(phase + u32(NORM))), mine, here)
            gate = registers(64, u32(0))
            if routes:
                gate = gate_words(shared_load_64(u32(phase + u32(OWN))), router_tile, hidden, experts, warp, lane)
            begin = u64(used + u64(u32(source)))
            input_begins(begin, i32(i32(ROWS * hidden) >> i32(1)), warp, lane)
            values = registers(WORDS)
            values = rows_here(begin, own, mine, here, row_bytes)
            norm_rows(values, weights, mine, hidden, eps, squared, normed, thread, lane)
            group_arrive(u32(CHOICE_FREE), u32(THREADS))  # the layer before is over
            if routes:
                logits = u64(used + u64(u32(shared_load(u32(phase + u32(LOGITS))))))
                router(gate, normed, logit_parts, router_tile, hidden, experts, logits, thread, warp, lane)
            if ROWS > 1:
                group_sync(u32(NUMBERS_READY), u32(THREADS))
                sets = shared_load(u32(base + u32(SETS)))
            first, stop = phase_share(phase, sets, block, blocks)
        elif works or block == i32(0):
            line = normed
            weights = norm_words(shared_load_64(u32(phase + u32(NORM))), mine, here)
            begin = u64(used + u64(u32(source)))
            input_begins(begin, i32(i32(ROWS * hidden) >> i32(1)), warp, lane)
            values = registers(WORDS)
            values = rows_here(begin, own, mine, here, row_bytes)
            if mine and kind == i32(LAST) and block == i32(0):
                for r in static(ROWS):
                    to = u64(sums + u64(r) * row_bytes + here)
                    store_128(to, values[4 * r], values[4 * r + 1], values[4 * r + 2], values[4 * r + 3])
            norm_rows(values, weights, mine, hidden, eps, squared, normed, thread, lane)
        chunks = i32(i32(depth + i32(CHUNK - 1)) // i32(CHUNK))
        ahead_of = early_chunks(phase, first, stop, early)
        used_early = ahead_of > i32(0)
        state = u64(states + u64(u32(shared_load(u32(phase + u32(STATE))))) * u64(state_bytes))
        while first < stop:
            copies = unit_copies(kind, i32(stop - first), sets)
            conv = registers(8, u32(0))
            if kind == i32(CONVOLUTION) and warp == i32(CONSUMERS - 1):
                conv = conv_given(
                    first, units, shared_load_64(u32(phase + u32(OWN))), state, row_segment, seg_slot, seg_start,
                    positions, lane,
                )  # fmt: skip
            if warp < copies:
                unit, set_, chosen = i32(first + warp), i32(0), i32(warp)
                xa = u32(line + line_of)
                if kind == i32(UP):
                    set_ = i32(divide(u32(unit), u32(units)))
                    unit = i32(unit - i32(set_ * units))
                    chosen = set_
                pairs = registers(ROWS, i32(0))
                if kind == i32(UP) or kind == i32(DOWN):
                    pairs = pairs_of(u32(base + u32(PAIRS)), chosen)
                if kind == i32(DOWN):
                    xa = u32(line + piece_of + u32(i32(input_pair(pairs, i32(lane & i32(ROWS - 1))) * depth)) * u32(2))
                mine_slot, mine_turn = ahead(slot, parity, warp, slots)
                acc = unit_product(
                    base, ring, mine_slot, mine_turn, slots, copies, ahead_of, i32(slots + warp), early_turn, depth,
                    wo, xa, lane,
                )  # fmt: skip
                low, high = pairs_8(acc, lane)
                chosen = pair_of(pairs, row)
                if kind == i32(CONVOLUTION):
                    if has_row:
                        to = u32(channels + u32(i32(i32(warp * i32(ROWS)) + row)) * u32(32) + u32(pair) * u32(2))
                        shared_store_32(to, low)
                        shared_store_32(u32(to + u32(16)), high)
                elif kind == i32(DOWN):
                    if has_row and chosen < i32(NO_PAIR):
                        to = u32(channels + u32(chosen) * u32(32) + u32(pair) * u32(2))
                        shared_store_32(to, low)
                        shared_store_32(u32(to + u32(16)), high)
                elif kind == i32(UP):
                    if has_row and chosen < i32(NO_PAIR):
                        column = i32(i32(chosen * features) + i32(unit * i32(8)) + pair)
                        publish_32(u64(result + u64(u32(column)) * u64(2)), swiglu_pair(low, high))
                elif has_row:
                    column = i32(i32(unit * i32(16)) + pair)
                    if kind == i32(RESIDUAL):
                        at = u32(stream + u32(i32(row * i32(LINE))) + u32(column) * u32(2))
                        low = add_pair(low, shared_load_32(at))
                        high = add_pair(high, shared_load_32(u32(at + u32(16))))
                    if kind == i32(LAST):
                        to = u64(out + u64(u32(i32(i32(row * columns) + column))) * u64(2))
                        store_32(to, low)
                        store_32(u64(to + u64(16)), high)
                    else:
                        to = u64(result + u64(u32(i32(i32(row * hidden) + column))) * u64(2))
                        publish_32(to, low)
                        publish_32(u64(to + u64(16)), high)
            if kind == i32(CONVOLUTION) or kind == i32(DOWN):
                group_sync(u32(2), u32(ROW_THREADS))
                if kind == i32(CONVOLUTION) and warp == i32(CONSUMERS - 1):
                    convolve(conv, channels, first, units, state, result, lane)
                elif kind == i32(DOWN) and warp == i32(0):
                    added_experts(channels, u32(base + u32(CHOSEN)), stream, first, hidden, top_k, result, lane)
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


ARGUMENTS = (
    "u64 i32 i32 i32 i32 i32 u64 u64 u64 i32 i32 i32 i32 f32 f32 u64 u64 u64 i64 u64 u64 u64 u64 u64 i32 u64 i32"
)


def _make(rows: int) -> Kernel:
    """The kernel of rounds of that many rows."""
    made = parts(rows)
    function = with_globals(
        unrolled(_run_layers, **layout(rows), WORDS=4 * rows), **made, stream_weights=weight_stream(rows, **made)
    )
    register = kernel(ARGUMENTS, threads=THREADS, dynamic_shared=SHARED, architectures=BULK, name=f"run_layers_{rows}")
    return register(function)


RUN_LAYERS = {rows: _make(rows) for rows in range(1, MOST_ROWS + 1)}
"""By the rows of a round."""
