"""Drawing tokens. Of equal logits the lower id comes first everywhere.

A weight exp((z - largest) / temperature) is held as a whole number of 2**-40. Sums of whole numbers don't depend on
their order, so any thread may add any part of a row, atomically too, and a row's draw has one value.

A row's vocabulary is cut into parts with a block each; see sample_parts.py.
"""

from __future__ import annotations

import numpy as np
from numba import cuda

from .compiler import kernel
from .functions import ONE, ZERO, exp
from .logprobs import log_probabilities, nothing_asked
from .sample_parts import (
    BINS,
    CHOSEN,
    EVERY,
    FIRST,
    LAST,
    LOWEST,
    MASK,
    MEETINGS,
    SHIFT,
    THREADS,
    block_scan,
    block_sum,
    cut,
    first_of,
    leave,
    logit_of,
    meet,
    order,
    row_total,
    tell,
    told,
)
from .scalar import add, device, div, high_product, let_next_start, mul, sub, to_weight, wait_for_earlier
from .unroll import registers, static, unrolled

CHUNKS = 32  # parts of a block's ids whose weights are summed before one of them is searched
CHUNK_THREADS = THREADS // CHUNKS
BINS_A_LOGIT = np.float32(BINS / 32)
LOGIT_BINS = np.uint32(32)  # in place of a shift: bins of equal width in the logit


@device
def random_bits(seed, choice, position):
    """The first 64 bits of Philox4x32-10 (Salmon et al., SC 2011) at counter (position, choice, 0, 0), key seed."""
    c0, c1, c2, c3 = np.uint64(position), np.uint64(choice), np.uint64(0), np.uint64(0)
    k0, k1 = np.uint64(seed) & MASK, np.uint64(seed) >> np.uint64(32)
    for _ in range(10):
        a = np.uint64(0xD2511F53) * c0
        b = np.uint64(0xCD9E8D57) * c2
        c0, c1, c2, c3 = (b >> np.uint64(32)) ^ c1 ^ k0, b & MASK, (a >> np.uint64(32)) ^ c3 ^ k1, a & MASK
        k0 = (k0 + np.uint64(0x9E3779B9)) & MASK
        k1 = (k1 + np.uint64(0xBB67AE85)) & MASK
    return (c0 << np.uint64(32)) | c1


@device
def probability(z, largest, temperature):
    """exp((z - largest) / temperature)"""
    return exp(div(sub(z, largest), temperature))


@device
@unrolled
def kept_mass(z, start, begin, end, largest, temperature, limit, ties, sums, link, found):
    """Weight of the row's logits whose order is below `limit`, and of the first `ties` at it."""
    mass, tied = np.uint64(0), np.uint64(0)
    for base in range(begin + cuda.threadIdx.x, end, 8 * THREADS):
        v = registers(8)
        for i in static(8):
            v[i] = z[start + base + i * THREADS] if base + i * THREADS < end else LOWEST
        for i in static(8):
            place = order(v[i])
            if base + i * THREADS < end and place <= limit:
                if place < limit:
                    mass += to_weight(probability(v[i], largest, temperature))
                else:
                    tied += np.uint64(1)
    mass = block_sum(mass, sums)
    tied = block_sum(tied, sums)
    if cuda.threadIdx.x == 0:
        tell(link, found, 0, mass)
        tell(link, found, 1, tied)
    meet(link, found)
    total, count = row_total(link, found, 0), row_total(link, found, 1)
    if count > np.uint64(0):
        total += to_weight(probability(logit_of(limit), largest, temperature)) * min(count, np.uint64(ties))
    return total


@device
@unrolled
def select(z, start, begin, end, largest, temperature, counting, limit, need, sums, low, high, found, link):
    """The shortest run of logits, in order, that amounts to `need`: (order of its last, how many of that order).

    The amount of a logit is 1 where `counting`, else its weight. Only logits up to order `limit` take part. First by
    bins of equal width in the logit, which spread the work, then within one bin by bins of the exact order.
    """
    thread = cuda.threadIdx.x
    if thread == 0:
        found[FIRST], found[LAST], found[SHIFT] = np.uint32(0), np.uint32(0xFFFFFFFF), LOGIT_BINS
    above = np.uint64(0)
    searching = True
    while searching:
        low[thread], high[thread] = np.uint32(0), np.uint32(0)
        cuda.syncthreads()
        first, last, shift = found[FIRST], found[LAST], found[SHIFT]
        for base in range(begin + thread, end, 8 * THREADS):
            v = registers(8)
            for i in static(8):
                v[i] = z[start + base + i * THREADS] if base + i * THREADS < end else LOWEST
            for i in static(8):
                place = order(v[i])
                if base + i * THREADS < end and place <= limit and place >= first and place <= last:
                    chosen = np.uint32(BINS - 1)
                    if shift == LOGIT_BINS:
                        far = mul(sub(largest, v[i]), BINS_A_LOGIT)
                        if far < np.float32(BINS - 1):
                            chosen = np.uint32(far)
                    else:
                        chosen = np.uint32(np.uint32(place - first) >> shift)
                    amount = np.uint64(1)
                    if not counting:
                        amount = to_weight(probability(v[i], largest, temperature))
                    if shift != LOGIT_BINS or chosen != np.uint32(BINS - 1):  # nobody asks for the last bin's amount
                        part = np.uint32(amount & MASK)
                        old = cuda.atomic.add(low, chosen, part)
                        carry = np.uint32(1) if np.uint32(old + part) < part else np.uint32(0)
                        more = np.uint32(np.uint32(amount >> np.uint64(32)) + carry)
                        if more != np.uint32(0):
                            cuda.atomic.add(high, chosen, more)
        cuda.syncthreads()
        tell(link, found, thread, (np.uint64(high[thread]) << np.uint64(32)) | np.uint64(low[thread]))
        meet(link, found)
        amount = row_total(link, found, thread)
        block_scan(amount, sums)
        if thread == 0:
            found[CHOSEN] = np.uint32(BINS - 1)
        cuda.syncthreads()
        reached = above + sums[thread]
        if reached >= need and reached - amount < need:
            found[CHOSEN] = np.uint32(thread)
        cuda.syncthreads()
        chosen = found[CHOSEN]
        if chosen > np.uint32(0):
            above += sums[chosen - 1]
        if shift == LOGIT_BINS:
            # the orders of the bin's first and last logit
            if thread == 0:
                found[FIRST], found[LAST] = np.uint32(0xFFFFFFFF), np.uint32(0)
            cuda.syncthreads()
            mine_first, mine_last = np.uint32(0xFFFFFFFF), np.uint32(0)
            for base in range(begin + thread, end, 8 * THREADS):
                v = registers(8)
                for i in static(8):
                    v[i] = z[start + base + i * THREADS] if base + i * THREADS < end else LOWEST
                for i in static(8):
                    place = order(v[i])
                    if base + i * THREADS < end and place <= limit:
                        inside = np.uint32(BINS - 1)
                        far = mul(sub(largest, v[i]), BINS_A_LOGIT)
                        if far < np.float32(BINS - 1):
                            inside = np.uint32(far)
                        if inside == chosen:
                            mine_first, mine_last = min(mine_first, place), max(mine_last, place)
            cuda.atomic.min(found, FIRST, mine_first)
            cuda.atomic.max(found, LAST, mine_last)
            cuda.syncthreads()
            if thread == 0:
                tell(link, found, 0, np.uint64(found[FIRST]))
                tell(link, found, 1, np.uint64(found[LAST]))
            meet(link, found)
            if thread == 0:
                for part in range(link[4]):
                    found[FIRST] = min(found[FIRST], np.uint32(told(link, found, part, 0)))
                    found[LAST] = max(found[LAST], np.uint32(told(link, found, part, 1)))
        elif thread == 0:
            lowest = np.uint32(first + np.uint32(chosen << shift))
            found[FIRST] = lowest
            found[LAST] = min(last, np.uint32(lowest + np.uint32(np.uint32(np.uint32(1) << shift) - np.uint32(1))))
        cuda.syncthreads()
        searching = shift != np.uint32(0)
        if thread == 0:
            width = np.uint32(found[LAST] - found[FIRST])
            narrower = np.uint32(0)
            while np.uint32(width >> narrower) >= np.uint32(BINS):
                narrower = np.uint32(narrower + np.uint32(1))
            found[SHIFT] = narrower
        cuda.syncthreads()
    at_limit = found[FIRST]
    # logits of one order have equal amounts
    each = np.uint64(1)
    if not counting:
        each = max(to_weight(probability(logit_of(at_limit), largest, temperature)), np.uint64(1))
    cuda.syncthreads()
    left = need - above
    return at_limit, np.int32(max(np.uint64(1), (left + each - np.uint64(1)) // each))


@device
def member_weight(value, largest, temperature, min_p, limit):
    """Weight of a logit that is kept if its order is at most `limit` and its probability at least min_p."""
    p = probability(value, largest, temperature)
    if order(value) > limit or p < min_p:
        return np.uint64(0)
    return to_weight(p)


@device
@unrolled
def draw(z, start, begin, end, largest, temperature, min_p, limit, ties, random, sums, low, found, link):
    """The id at which the row's kept weights, summed over ascending ids, pass random * 2**-64 of their total; EVERY in
    blocks that don't have it."""
    thread = cuda.threadIdx.x
    part, parts = link[3], link[4]
    size = (end - begin + CHUNKS - 1) // CHUNKS
    chunk = thread // CHUNK_THREADS
    stop = min(begin + (chunk + 1) * size, end)
    mass, tied = np.uint64(0), np.uint32(0)
    for base in range(begin + chunk * size + thread % CHUNK_THREADS, stop, 8 * CHUNK_THREADS):
        v = registers(8)
        for i in static(8):
            v[i] = z[start + base + i * CHUNK_THREADS] if base + i * CHUNK_THREADS < stop else LOWEST
        for i in static(8):
            if base + i * CHUNK_THREADS < stop:
                if order(v[i]) == limit:
                    tied += np.uint32(1)
                else:
                    mass += member_weight(v[i], largest, temperature, min_p, limit)
    sums[thread], low[thread] = mass, tied
    cuda.syncthreads()
    if thread < CHUNKS:
        mass, tied = np.uint64(0), np.uint32(0)
        for i in range(thread * CHUNK_THREADS, (thread + 1) * CHUNK_THREADS):
            mass += sums[i]
            tied += low[i]
    cuda.syncthreads()
    if thread < CHUNKS:
        sums[thread], low[thread] = mass, tied
    cuda.syncthreads()
    if thread == 0:
        mass, count = np.uint64(0), np.uint64(0)
        for c in range(CHUNKS):
            mass += sums[c]
            count += np.uint64(low[c])
        tell(link, found, 0, mass)
        tell(link, found, 1, count)
    meet(link, found)
    # every thread finds the part, and whoever has it the chunk
    each = np.uint64(0)
    if limit != np.uint32(0xFFFFFFFF):
        each = member_weight(logit_of(limit), largest, temperature, min_p, limit)
    total, left = np.uint64(0), np.int64(ties)
    for p in range(parts):
        kept = min(np.int64(told(link, found, p, 1)), left)
        total += told(link, found, p, 0) + each * np.uint64(kept)
        left -= kept
    target = high_product(random, total)
    left = np.int64(ties)
    begun = np.uint64(0)
    for p in range(part):
        kept = min(np.int64(told(link, found, p, 1)), left)
        begun += told(link, found, p, 0) + each * np.uint64(kept)
        left -= kept
    chosen, chosen_left = -1, left
    passed = begun
    for c in range(CHUNKS):
        kept = min(np.int64(low[c]), left)
        amount = sums[c] + each * np.uint64(kept)
        if passed <= target and target < passed + amount:
            chosen, chosen_left, begun = c, left, passed
        passed += amount
        left -= kept
    cuda.syncthreads()
    if chosen < 0:
        return EVERY
    # consecutive ids of the chunk a thread
    share = (size + THREADS - 1) // THREADS
    stop = min(begin + (chosen + 1) * size, end)
    first = min(begin + chosen * size + thread * share, stop)
    last = min(first + share, stop)
    mine = np.uint64(0)
    for at in range(first, last):
        if order(z[start + at]) == limit:
            mine += np.uint64(1)
    block_scan(mine, sums)
    left = chosen_left - np.int64(sums[thread] - mine)
    cuda.syncthreads()
    mass, still = np.uint64(0), left
    for at in range(first, last):
        value = z[start + at]
        at_limit = order(value) == limit
        if not at_limit or still > 0:
            mass += member_weight(value, largest, temperature, min_p, limit)
        if at_limit:
            still -= 1
    block_scan(mass, sums)
    passed = begun + sums[thread] - mass
    cuda.syncthreads()
    if passed <= target and target < passed + mass:
        token = EVERY
        for at in range(first, last):
            value = z[start + at]
            at_limit = order(value) == limit
            if not at_limit or left > 0:
                weight = member_weight(value, largest, temperature, min_p, limit)
                if passed <= target and target < passed + weight:
                    token = np.int32(at)
                passed += weight
            if at_limit:
                left -= 1
        found[CHOSEN] = np.uint32(token)
    cuda.syncthreads()
    token = np.int32(found[CHOSEN])
    cuda.syncthreads()
    return token


@device
def penalized(value, repetition, presence, frequency, count):
    """Repetition penalty of a token of prompt or output (arXiv 1909.05858), then OpenAI's two for `count` in the
    output."""
    value = div(value, repetition) if value > ZERO else mul(value, repetition)
    if count > 0:
        value = sub(sub(value, presence), mul(frequency, np.float32(count)))
    return value


@device
def adjust(
    logits, z, start, begin, end, bias_first, bias_last, bias_id, bias_value, ban_first, ban_last, ban_id, mask_row,
    mask, words, penalised, repetition, presence, frequency, prompt_seen, output_count, table, ahead_first, ahead_last,
    ahead_id,
):  # fmt: skip
    """z = the row's logits begin ... end - 1 with biases, bans, its mask and penalties."""
    thread = cuda.threadIdx.x
    for at in range(begin + thread, end, THREADS):
        z[start + at] = logits[start + at]
    cuda.syncthreads()
    for i in range(bias_first + thread, bias_last, THREADS):
        if bias_id[i] >= begin and bias_id[i] < end:
            z[start + bias_id[i]] = add(z[start + bias_id[i]], bias_value[i])
    cuda.syncthreads()
    for i in range(ban_first + thread, ban_last, THREADS):
        if ban_id[i] >= begin and ban_id[i] < end:
            z[start + ban_id[i]] = LOWEST
    cuda.syncthreads()
    if mask_row >= 0:
        allowed = np.int64(mask_row) * words
        for at in range(begin + thread, end, THREADS):
            if (mask[allowed + (at >> 5)] >> np.uint32(at & 31)) & np.uint32(1) == np.uint32(0):
                z[start + at] = LOWEST
        cuda.syncthreads()
    if penalised:
        for at in range(begin + thread, end, THREADS):
            count = output_count[table + at]
            for i in range(ahead_first, ahead_last):
                if ahead_id[i] == at:
                    count += 1
            if prompt_seen[table + at] != 0 or count > 0:
                z[start + at] = penalized(z[start + at], repetition, presence, frequency, count)
        cuda.syncthreads()


@kernel(
    "f32* i32 i32 f32* f32* i32* f32* f32* f32* f32* f32* u64* u32* u32* i32* i32* u32* i32 u8* i32* i32* i32* f32* "
    "i32* i32* i32* i32* i32* i32 i32* i32* f32* i32* i32* f32* u64* u32*",
    threads=THREADS,
)
def sample(
    logits, width, vocab, adjusted, temperature, top_k, top_p, min_p, repetition, presence, frequency, seed, choice,
    position, slot, mask_row, mask, words, prompt_seen, output_count, bias_start, bias_id, bias_value, ban_start,
    ban_id, ahead_start, ahead_id, top_n, most, drawn, token, logprob, rank, top_ids, top_logprobs, exchange, arrived,
):  # fmt: skip
    """One token a row of logits [rows, width]; the controls are batch.SampleRows. Grid [rows, parts].

    drawn [slots]: each slot's token, for rows of the next round that don't know theirs. A row whose slot is -1 is
    padding and gets token 0. mask [rows, words]. most: width of top_ids and top_logprobs. Scratch: adjusted [rows,
    width], exchange [rows, parts, 2, BINS]; arrived [2, rows] is 0 before and after.
    """
    values = cuda.shared.array(THREADS, np.float32)
    ids = cuda.shared.array(THREADS, np.int32)
    sums = cuda.shared.array(THREADS, np.uint64)
    low = cuda.shared.array(BINS, np.uint32)
    high = cuda.shared.array(BINS, np.uint32)
    found = cuda.shared.array(8, np.uint32)
    let_next_start()
    wait_for_earlier()
    row, thread = np.int32(cuda.blockIdx.x), cuda.threadIdx.x
    part, parts = np.int32(cuda.blockIdx.y), np.int32(cuda.gridDim.y)
    if slot[row] < 0:
        if part == 0:
            if thread == 0:
                token[row] = 0
            nothing_asked(row, most, -1, logprob, rank, top_ids, top_logprobs)
        return
    if thread == 0:
        found[MEETINGS] = np.uint32(0)
    cuda.syncthreads()
    link = (exchange, arrived, row, part, parts)
    begin, end = cut(vocab)
    start = np.int64(row) * width
    table = np.int64(slot[row]) * width
    penalised = repetition[row] != ONE or presence[row] != ZERO or frequency[row] != ZERO
    z = logits
    changed = bias_start[row + 1] > bias_start[row] or ban_start[row + 1] > ban_start[row] or mask_row[row] >= 0
    if penalised or changed:
        adjust(
            logits, adjusted, start, begin, end, bias_start[row], bias_start[row + 1], bias_id, bias_value,
            ban_start[row], ban_start[row + 1], ban_id, mask_row[row], mask, words, penalised, repetition[row],
            presence[row], frequency[row], prompt_seen, output_count, table, ahead_start[row], ahead_start[row + 1],
            ahead_id,
        )  # fmt: skip
        z = adjusted
    largest, best = first_of(z, start, begin, end, np.float32(np.inf), np.int32(-1), values, ids, link, found)
    chosen = min(best, np.int32(vocab - 1))
    asked = top_n[row]
    if part == 0 and thread == 0:
        token[row] = chosen
        drawn[slot[row]] = chosen
    if temperature[row] > ZERO and largest > LOWEST and largest < np.float32(np.inf):
        warmth = temperature[row]
        limit, ties = np.uint32(0xFFFFFFFF), EVERY
        if top_k[row] > 0 and top_k[row] < vocab:
            limit, ties = select(
                z, start, begin, end, largest, warmth, True, limit, np.uint64(top_k[row]), sums, low, high, found, link
            )
        if top_p[row] < ONE:
            mass = kept_mass(z, start, begin, end, largest, warmth, limit, ties, sums, link, found)
            share = np.uint64(mul(top_p[row], np.float32(4294967296.0))) << np.uint64(32)
            need = max(high_product(mass, share), np.uint64(1))
            limit, ties = select(
                z, start, begin, end, largest, warmth, False, limit, need, sums, low, high, found, link
            )
        random = random_bits(seed[row], choice[row], position[row]) >> np.uint64(11) << np.uint64(11)
        mine = draw(z, start, begin, end, largest, warmth, min_p[row], limit, ties, random, sums, low, found, link)
        if mine != EVERY and thread == 0:
            token[row] = mine
            drawn[slot[row]] = mine
        if asked >= 0:  # then all need it
            if thread == 0:
                tell(link, found, 0, np.uint64(mine))
            meet(link, found)
            for other in range(parts):
                theirs = np.int32(told(link, found, other, 0))
                if theirs != EVERY:
                    chosen = theirs
    if part == 0:
        nothing_asked(row, most, asked, logprob, rank, top_ids, top_logprobs)
    if asked >= 0:
        log_probabilities(
            logits, start, begin, end, vocab, chosen, asked, most, row, logprob, rank, top_ids, top_logprobs, values,
            ids, sums, link, found,
        )  # fmt: skip
    leave(link, cuda.gridDim.x)
