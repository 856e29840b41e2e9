"""Drawing tokens and their log-probabilities. A row's draw depends on its own inputs only; of equal logits the lower id
comes first everywhere."""

from __future__ import annotations

import numpy as np

from ..jit import device, kernel
from .functions import ONE, ZERO, exp
from .linear import part_of
from .simd import LANES, lane_max, larger, load, splat
from .team import spread

MINUS_INFINITY = np.float32(-np.inf)
NAN = np.float32(np.nan)
DIGIT_BITS = 8
DIGITS = 1 << DIGIT_BITS
MASK_32 = np.uint64(0xFFFFFFFF)
SHIFT_32 = np.uint64(32)


@device
def philox(counter_0, counter_1, counter_2, counter_3, key_0, key_1):
    """Philox4x32-10 (Salmon et al., SC 2011): four 32-bit words, held in uint64."""
    c0, c1, c2, c3 = np.uint64(counter_0), np.uint64(counter_1), np.uint64(counter_2), np.uint64(counter_3)
    k0, k1 = np.uint64(key_0), np.uint64(key_1)
    for _ in range(10):
        a = np.uint64(0xD2511F53) * c0
        b = np.uint64(0xCD9E8D57) * c2
        c0, c1, c2, c3 = (b >> SHIFT_32) ^ c1 ^ k0, b & MASK_32, (a >> SHIFT_32) ^ c3 ^ k1, a & MASK_32
        k0 = (k0 + np.uint64(0x9E3779B9)) & MASK_32
        k1 = (k1 + np.uint64(0xBB67AE85)) & MASK_32
    return c0, c1, c2, c3


@device
def uniform(seed, choice, position):
    """A float64 in [0, 1) with 53 random bits, a pure function of its arguments."""
    high, low, _, _ = philox(position, choice, 0, 0, np.uint64(seed) & MASK_32, np.uint64(seed) >> SHIFT_32)
    return np.float64(((high << SHIFT_32) | low) >> np.uint64(11)) * 2.0**-53


@kernel
def random_words(counter, key, out):
    out[0], out[1], out[2], out[3] = philox(counter[0], counter[1], counter[2], counter[3], key[0], key[1])


@device
def argmax(values, count):
    """The first of the largest values; NaN is never the largest."""
    best = splat(MINUS_INFINITY)
    whole = count // LANES * LANES
    for i in range(0, whole, LANES):
        best = larger(load(values, i), best)
    largest = lane_max(best)
    for i in range(whole, count):
        largest = larger(values[i], largest)
    for i in range(count):
        if values[i] == largest:
            return i
    return 0


@device
def order_keys(values, bits, count, keys):
    """Unsigned keys in the order of the values (`bits` is their uint32 view)."""
    for i in range(count):
        if values[i] == ZERO:
            keys[i] = np.uint32(0x80000000)  # -0.0 equals 0.0
        elif bits[i] >> np.uint32(31):
            keys[i] = ~bits[i]
        else:
            keys[i] = bits[i] | np.uint32(0x80000000)


@device
def keep_best(keys, ids, count, k):
    """Keep the k ids with the largest keys; `ids` stays ascending. Returns how many are left."""
    if k >= count:
        return count
    histogram = np.empty(DIGITS, np.int64)
    cut, wanted = np.uint32(0), np.int64(k)
    for shift in range(32 - DIGIT_BITS, -1, -DIGIT_BITS):
        histogram[:] = 0
        high = np.uint64(shift + DIGIT_BITS)
        for i in range(count):
            key = np.uint64(keys[ids[i]])
            if key >> high == np.uint64(cut) >> high:
                histogram[(key >> np.uint64(shift)) & np.uint64(DIGITS - 1)] += 1
        digit = DIGITS - 1
        while histogram[digit] < wanted:
            wanted -= histogram[digit]
            digit -= 1
        cut = np.uint32(cut | np.uint32(digit << shift))
    return keep_from(keys, ids, count, cut, wanted)


@device
def keep_mass(keys, mass, ids, count, share):
    """Keep the shortest run of ids, largest keys first, whose mass reaches `share` of all; at least one."""
    total = 0.0
    for i in range(count):
        total += np.float64(mass[ids[i]])
    wanted = total * np.float64(share)
    histogram = np.empty(DIGITS, np.float64)
    members = np.empty(DIGITS, np.int64)
    cut = np.uint32(0)
    for shift in range(32 - DIGIT_BITS, -1, -DIGIT_BITS):
        histogram[:] = 0.0
        members[:] = 0
        high = np.uint64(shift + DIGIT_BITS)
        for i in range(count):
            key = np.uint64(keys[ids[i]])
            if key >> high == np.uint64(cut) >> high:
                digit = (key >> np.uint64(shift)) & np.uint64(DIGITS - 1)
                histogram[digit] += np.float64(mass[ids[i]])
                members[digit] += 1
        chosen = -1
        for digit in range(DIGITS - 1, -1, -1):
            if members[digit] > 0:
                if chosen >= 0:
                    wanted -= histogram[chosen]
                chosen = digit
                if histogram[digit] >= wanted:
                    break
        cut = np.uint32(cut | np.uint32(chosen << shift))
    ties, kept = members[chosen], np.int64(1)
    each = histogram[chosen] / np.float64(ties)  # equal keys have equal mass
    while kept < ties and each * np.float64(kept) < wanted:
        kept += 1
    return keep_from(keys, ids, count, cut, kept)


@device
def keep_from(keys, ids, count, cut, ties):
    """Keep the ids whose key is above `cut`, and the first `ties` of those at it."""
    left = 0
    for i in range(count):
        key = keys[ids[i]]
        at_cut = key == cut
        if key > cut or (at_cut and ties > 0):
            ids[left] = ids[i]
            left += 1
            if at_cut:
                ties -= 1
    return left


@device
def penalized(value, repetition, presence, frequency, count):
    """Repetition penalty of a token of prompt or output (arXiv 1909.05858), then OpenAI's two for `count` in output."""
    value = value / repetition if value > ZERO else value * repetition
    if count > 0:
        value = value - presence - frequency * np.float32(count)
    return value


@device
def penalize(z, vocab, repetition, presence, frequency, seen, counts, ahead):
    """Penalise every token once; `ahead` holds drafted tokens that count as output."""
    before = np.empty(ahead.size, np.float32)
    for i in range(ahead.size):
        before[i] = z[ahead[i]]
    for i in range(vocab):
        if seen[i] or counts[i] > 0:
            z[i] = penalized(z[i], repetition, presence, frequency, counts[i])
    for i in range(ahead.size):
        count = counts[ahead[i]]
        for j in range(ahead.size):
            count += ahead[j] == ahead[i]
        z[ahead[i]] = penalized(before[i], repetition, presence, frequency, count)


@device
def draw(z, bits, p, keys, ids, vocab, temperature, top_k, top_p, min_p, random):
    """One id of [0, vocab) from logits z by the inverse of the cumulative weight over the kept ids, ascending."""
    best = argmax(z, vocab)
    largest = z[best]
    if temperature == ZERO or not np.isfinite(largest):
        return best
    for i in range(vocab):
        p[i] = exp((z[i] - largest) / temperature)
        ids[i] = i
    count = vocab
    if 0 < top_k < count or top_p < ONE:
        order_keys(z, bits, vocab, keys)
    if 0 < top_k < count:
        count = keep_best(keys, ids, count, top_k)
    if top_p < ONE:
        count = keep_mass(keys, p, ids, count, top_p)
    total = 0.0
    for i in range(count):
        if p[ids[i]] >= min_p:
            total += np.float64(p[ids[i]])
    target = random * total
    total = 0.0
    chosen = best
    for i in range(count):
        weight = p[ids[i]]
        if weight >= min_p and weight > ZERO:
            total += np.float64(weight)
            chosen = ids[i]
            if total > target:
                break
    return chosen


@device
def log_probabilities(logits, bits, p, keys, ids, vocab, token, top_n, top_ids, top_logprobs):
    """Log-probability and rank of `token`, and the `top_n` best ids with theirs, normalised over [0, vocab)."""
    largest = logits[argmax(logits, vocab)]
    for i in range(vocab):
        p[i] = exp(logits[i] - largest)
    total = 0.0
    for i in range(vocab):
        total += np.float64(p[i])
    normalizer = np.float64(largest) + np.log(total)
    rank = 1
    for i in range(vocab):
        if logits[i] > logits[token] or (logits[i] == logits[token] and i < token):
            rank += 1
    if top_n > 0:
        order_keys(logits, bits, vocab, keys)
        for i in range(vocab):
            ids[i] = i
        count = keep_best(keys, ids, vocab, top_n)
        for i in range(count):
            j = i
            while j > 0 and logits[top_ids[j - 1]] < logits[ids[i]]:
                top_ids[j] = top_ids[j - 1]
                j -= 1
            top_ids[j] = ids[i]
        for i in range(count):
            top_logprobs[i] = np.float32(np.float64(logits[top_ids[i]]) - normalizer)
    return np.float32(np.float64(logits[token]) - normalizer), rank


@device
def sample_part(part, parts, logits, rows, tables, lists, vocab, scratch, result):
    temperature, top_k, top_p, min_p, repetition, presence, frequency, seed, choice, position, slot, top_n = rows
    prompt_seen, output_count = tables
    bias_start, bias_id, bias_value, ban_start, ban_id, ahead_start, ahead_id, mask_row, mask = lists
    all_z, all_p, all_keys, all_ids = scratch
    z, p, keys, ids = all_z[part], all_p[part], all_keys[part], all_ids[part]
    bits = z.view(np.uint32)
    token, logprob, rank, top_ids, top_logprobs = result
    first, last = part_of(logits.shape[0], part, parts)
    for row in range(first, last):
        for i in range(vocab):
            z[i] = logits[row, i]
        for i in range(bias_start[row], bias_start[row + 1]):
            if 0 <= bias_id[i] < vocab:
                z[bias_id[i]] += bias_value[i]
        for i in range(ban_start[row], ban_start[row + 1]):
            if 0 <= ban_id[i] < vocab:
                z[ban_id[i]] = MINUS_INFINITY
        if mask_row[row] >= 0:
            allowed = mask[mask_row[row]]
            for i in range(vocab):
                if not (allowed[i >> 5] >> np.uint32(i & 31)) & np.uint32(1):
                    z[i] = MINUS_INFINITY
        if repetition[row] != ONE or presence[row] != ZERO or frequency[row] != ZERO:
            seen, counts = prompt_seen[slot[row]], output_count[slot[row]]
            ahead = ahead_id[ahead_start[row] : ahead_start[row + 1]]
            penalize(z, vocab, repetition[row], presence[row], frequency[row], seen, counts, ahead)
        random = uniform(seed[row], choice[row], position[row])
        token[row] = draw(z, bits, p, keys, ids, vocab, temperature[row], top_k[row], top_p[row], min_p[row], random)
        if top_n[row] >= 0:
            raw = logits[row]
            logprob[row], rank[row] = log_probabilities(
                raw, raw.view(np.uint32), p, keys, ids, vocab, token[row], top_n[row], top_ids[row], top_logprobs[row]
            )


run_sample = spread(sample_part)


@kernel
def sample(team, logits, rows, tables, lists, vocab, scratch, result, parts):
    """Bias, bans and masks, penalties, temperature, top_k, top_p, min_p, then one draw a row; see `SampleRows`."""
    run_sample(team, parts, (logits, rows, tables, lists, vocab, scratch, result))


@device
def logprobs_part(part, parts, logits, targets, top_n, vocab, scratch, result):
    all_p, all_keys, all_ids = scratch
    logprob, rank, top_ids, top_logprobs = result
    first, last = part_of(logits.shape[0], part, parts)
    for row in range(first, last):
        raw = logits[row]
        logprob[row], rank[row] = log_probabilities(
            raw,
            raw.view(np.uint32),
            all_p[part],
            all_keys[part],
            all_ids[part],
            vocab,
            targets[row],
            top_n[row],
            top_ids[row],
            top_logprobs[row],
        )


run_logprobs = spread(logprobs_part)


@kernel
def token_logprobs(team, logits, targets, top_n, vocab, scratch, result, parts):
    run_logprobs(team, parts, (logits, targets, top_n, vocab, scratch, result))
