"""Log-probabilities of a row's token and of its best ones; weights are summed as in sample.py."""

from __future__ import annotations

import numpy as np
from numba import cuda

from .compiler import kernel
from .functions import exp, log
from .sample_parts import LOWEST, MEETINGS, THREADS, before, block_sum, cut, first_of, leave, meet, row_total, tell
from .scalar import device, let_next_start, mul, sub, to_weight, wait_for_earlier
from .unroll import registers, static, unrolled

NAN = np.float32(np.nan)
WHOLE = np.float32(2.0**-40)


@device
@unrolled
def log_probabilities(
    logits, start, begin, end, vocab, token, top_n, most, row, logprob, rank, top_ids, top_logprobs, values, ids, sums,
    link, found,
):  # fmt: skip
    """Log-probability and rank of `token`, and the `top_n` best ids with theirs, normalised over [0, vocab)."""
    thread = cuda.threadIdx.x
    writes = thread == 0 and link[3] == 0
    largest, _ = first_of(logits, start, begin, end, np.float32(np.inf), np.int32(-1), values, ids, link, found)
    own = logits[start + token]
    total, ahead = np.uint64(0), np.uint64(0)
    for base in range(begin + thread, end, 8 * THREADS):
        v = registers(8)
        for i in static(8):
            v[i] = logits[start + base + i * THREADS] if base + i * THREADS < end else LOWEST
        for i in static(8):
            at = base + i * THREADS
            if at < end:
                total += to_weight(exp(sub(v[i], largest)))
                if before(own, token, v[i], at):
                    ahead += np.uint64(1)
    total = block_sum(total, sums)
    ahead = block_sum(ahead, sums)
    if thread == 0:
        tell(link, found, 0, total)
        tell(link, found, 1, ahead)
    meet(link, found)
    norm = log(mul(np.float32(row_total(link, found, 0)), WHOLE))
    if writes:
        logprob[row] = sub(sub(own, largest), norm)
        rank[row] = np.int32(row_total(link, found, 1)) + 1
    value, at = np.float32(np.inf), np.int32(-1)
    for i in range(min(top_n, vocab)):
        value, at = first_of(logits, start, begin, end, value, at, values, ids, link, found)
        if writes:
            top_ids[row * most + i] = at
            top_logprobs[row * most + i] = sub(sub(value, largest), norm)


@device
def nothing_asked(row, most, first, logprob, rank, top_ids, top_logprobs):
    """Mark entries from `first` on as unwanted; the token's own too where `first` is negative."""
    thread = cuda.threadIdx.x
    for i in range(max(first, 0) + thread, most, THREADS):
        top_ids[row * most + i] = -1
        top_logprobs[row * most + i] = NAN
    if first < 0 and thread == 0:
        logprob[row] = NAN
        rank[row] = 0


@kernel("f32* i32 i32 i32* i32* i32 f32* i32* i32* f32* u64* u32*", threads=THREADS)
def token_logprobs(logits, width, vocab, targets, top_n, most, logprob, rank, top_ids, top_logprobs, exchange, arrived):
    """Log-probability and rank of a given token of each row, and the best `top_n`. Grid [rows, parts]; scratch as of
    `sample`."""
    values = cuda.shared.array(THREADS, np.float32)
    ids = cuda.shared.array(THREADS, np.int32)
    sums = cuda.shared.array(THREADS, np.uint64)
    found = cuda.shared.array(8, np.uint32)
    let_next_start()
    wait_for_earlier()
    row = np.int32(cuda.blockIdx.x)
    part, parts = np.int32(cuda.blockIdx.y), np.int32(cuda.gridDim.y)
    if cuda.threadIdx.x == 0:
        found[MEETINGS] = np.uint32(0)
    cuda.syncthreads()
    link = (exchange, arrived, row, part, parts)
    begin, end = cut(vocab)
    if part == 0:
        nothing_asked(row, most, max(top_n[row], 0), logprob, rank, top_ids, top_logprobs)
    log_probabilities(
        logits, np.int64(row) * width, begin, end, vocab, targets[row], top_n[row], most, row, logprob, rank, top_ids,
        top_logprobs, values, ids, sums, link, found,
    )  # fmt: skip
    leave(link, cuda.gridDim.x)
