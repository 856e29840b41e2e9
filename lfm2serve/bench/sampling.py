"""Draws and log-probabilities of `bench kernels` against NumPy."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kernels_numba.batch import SampleRows
from kernels_numba.reference import bf16_bits, kept_weights, log_probabilities, make_batch, uniform
from lfm2serve.backend import Backend
from lfm2serve.bench.memory import Receipt

ROWS = 24
WIDTH = 256  # hidden size of the product whose logits are drawn from
MOST = 3  # log-probabilities a row
NEAR = 1e-4  # a random number this far off may draw the token beside


def check_sampling(report: Receipt, backend: Backend, vocab: int, random: np.random.Generator) -> None:
    """Greedy and drawn tokens with every control, their log-probabilities and ranks."""
    table = backend.upload({"embed": bf16_bits(random.standard_normal((ROWS, WIDTH)))}.items())["embed"]
    weight = bf16_bits(random.standard_normal((vocab, WIDTH)) * (2 / WIDTH**0.5))
    head = backend.upload({"lm_head": weight}.items())["lm_head"]
    pages = np.zeros((ROWS, 1), np.int32)  # as many slots as rows
    begun = backend.begin(make_batch([(0, 0, ROWS)], ROWS, pages)._replace(tokens=np.arange(ROWS, dtype=np.int32)))
    logits = backend.logits(backend.embed(begun.tokens, table), head)
    on_host = np.asarray(backend.read(logits)).copy()
    rows = controls(random, ROWS, vocab)
    drawn = backend.sample(logits, rows)
    right = sum(int(drawn.token[n]) in possible(on_host, rows, n) for n in range(ROWS))
    report.add("draws that NumPy may make", right, f"of {ROWS}", f"from {vocab:,} tokens")
    report.expect(right == ROWS, f"{ROWS - right} of {ROWS} tokens aren't those that NumPy draws")
    scores, ranks, ids, best = backend.token_logprobs(logits, drawn.token, np.full(ROWS, MOST, np.int32), vocab)
    exact = 0
    for n in range(ROWS):
        value, rank, top, values = log_probabilities(on_host[n], vocab, int(drawn.token[n]), MOST)
        near = abs(scores[n] - value) < 2e-5 and bool(np.allclose(best[n], values, atol=2e-5))
        exact += near and int(ranks[n]) == rank and ids[n].tolist() == top
    report.add("log-probabilities, ranks and best tokens as NumPy's", exact, f"of {ROWS}")
    report.expect(exact == ROWS, f"the log-probabilities of {ROWS - exact} of {ROWS} rows differ from NumPy's")


def controls(random: np.random.Generator, rows: int, vocab: int) -> SampleRows:
    """Every control, on and off; penalties that are exact in float32, so that ties stay ties."""

    def pick(*values: float) -> NDArray[np.float32]:
        return random.choice(values, rows).astype(np.float32)

    none = np.zeros(rows + 1, np.int32)
    bias = np.arange(rows + 1, dtype=np.int32)
    seen = (random.random((rows, vocab)) < 0.1).astype(np.uint8)
    counts = ((random.random((rows, vocab)) < 0.05) * random.integers(1, 4, (rows, vocab))).astype(np.int32)
    return SampleRows(
        temperature=pick(0, 0.3, 1, 2), top_k=random.choice((0, 1, 5, 50), rows).astype(np.int32),
        top_p=pick(1, 0.9, 0.3), min_p=pick(0, 0.05, 0.3), repetition=pick(1, 2), presence=pick(0, 0.5),
        frequency=pick(0, 0.25), seed=random.integers(0, 2**63, rows).astype(np.uint64),
        choice=random.integers(0, 3, rows).astype(np.uint32),
        position=random.integers(0, 5000, rows).astype(np.uint32), slot=random.permutation(rows).astype(np.int32),
        prompt_seen=seen, output_count=counts, bias_start=bias,
        bias_id=random.integers(0, vocab, rows).astype(np.int32), bias_value=np.full(rows, 2, np.float32),
        ban_start=bias, ban_id=random.integers(0, vocab, rows).astype(np.int32), ahead_start=none,
        ahead_id=np.zeros(0, np.int32), mask_row=np.where(random.random(rows) < 0.4, 0, -1).astype(np.int32),
        mask=random.integers(0, 2**32, (1, -(-vocab // 32)), np.uint32), vocab=vocab,
        top_n=np.full(rows, -1, np.int32),
    )  # fmt: skip


def possible(logits: NDArray[np.float32], rows: SampleRows, row: int) -> set[int]:
    """The tokens that NumPy draws with random numbers next to the row's."""
    weights = kept_weights(logits, rows, row)
    sums = np.cumsum(weights) / weights.sum()
    u = uniform(int(rows.seed[row]), int(rows.choice[row]), int(rows.position[row]))
    first, last = (
        int(np.searchsorted(sums, min(max(u + d, 0), 1 - 1e-12), side="right")) for d in (-NEAR, NEAR)
    )  # fmt: skip
    return {at for at in range(first, last + 1) if weights[at] > 0}
