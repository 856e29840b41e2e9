"""Sampling and log-probabilities: the random numbers, every control against the twin, limits, ties and statistics."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels_numba.cpu import CpuBackend, SampleResult, SampleRows
from kernels_numba.cpu.sample import random_words
from kernels_numba.reference import draw, kept_weights, log_probabilities, philox, round_bf16

from .helpers import THREADS, assert_same_bits


def sample_rows(n: int, vocab: int, width: int, **given_fields: Any) -> SampleRows:
    """Controls of n rows that are all off, but for those given (a scalar goes to every row)."""
    kinds = {
        "temperature": (np.float32, 1),
        "top_k": (np.int32, 0),
        "top_p": (np.float32, 1),
        "min_p": (np.float32, 0),
        "repetition": (np.float32, 1),
        "presence": (np.float32, 0),
        "frequency": (np.float32, 0),
        "seed": (np.uint64, 7),
        "choice": (np.uint32, 0),
        "position": (np.uint32, 0),
        "slot": (np.int32, 0),
        "top_n": (np.int32, -1),
    }
    fields: dict[str, Any] = {
        name: np.broadcast_to(np.asarray(given_fields.pop(name, off), kind), (n,)).copy()
        for name, (kind, off) in kinds.items()
    }
    biases, bans = given_fields.pop("biases", [{}] * n), given_fields.pop("bans", [[]] * n)
    fields["bias_start"] = np.cumsum([0] + [len(b) for b in biases]).astype(np.int32)
    fields["bias_id"] = np.array([i for b in biases for i in b], np.int32)
    fields["bias_value"] = np.array([v for b in biases for v in b.values()], np.float32)
    fields["ban_start"] = np.cumsum([0] + [len(b) for b in bans]).astype(np.int32)
    fields["ban_id"] = np.array([i for b in bans for i in b], np.int32)
    ahead = given_fields.pop("ahead", [[]] * n)
    fields["ahead_start"] = np.cumsum([0] + [len(a) for a in ahead]).astype(np.int32)
    fields["ahead_id"] = np.array([i for a in ahead for i in a], np.int32)
    masks = given_fields.pop("masks", [None] * n)
    fields["mask_row"] = np.array([-1 if mask is None else i for i, mask in enumerate(masks)], np.int32)
    fields["mask"] = np.array([packed(range(vocab) if mask is None else mask, vocab) for mask in masks], np.uint32)
    fields["prompt_seen"] = given_fields.pop("prompt_seen", np.zeros((1, width), np.uint8))
    fields["output_count"] = given_fields.pop("output_count", np.zeros((1, width), np.int32))
    assert not given_fields
    return SampleRows(vocab=vocab, **fields)


def packed(ids: Iterable[int], vocab: int) -> np.ndarray:
    """Ids as bits."""
    bits = np.zeros(-(-vocab // 32) * 32, np.uint8)
    bits[list(ids)] = 1
    return np.packbits(bits, bitorder="little").view(np.uint32)


def sample(logits: np.ndarray, **fields: Any) -> SampleResult:
    vocab = fields.pop("vocab", logits.shape[1])
    rows = sample_rows(len(logits), vocab, logits.shape[1], **fields)
    return CpuBackend("bfloat16").sample(np.ascontiguousarray(logits, np.float32), rows)


# ------------------------------------------------------------------------------------------------------ random words

KNOWN_ANSWERS = [  # philox4x32-10 of Random123's kat_vectors
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize("counter, key, words", KNOWN_ANSWERS)
def test_philox_known_answers(counter: tuple[int, ...], key: tuple[int, int], words: tuple[int, ...]) -> None:
    out = np.zeros(4, np.uint64)
    random_words(np.array(counter, np.uint64), np.array(key, np.uint64), out)
    assert tuple(out.tolist()) == words == philox(counter, key)


@given(st.tuples(*[st.integers(0, 2**32 - 1)] * 4), st.tuples(*[st.integers(0, 2**32 - 1)] * 2))
@settings(max_examples=50, deadline=None)
def test_philox_twin(counter: tuple[int, ...], key: tuple[int, int]) -> None:
    out = np.zeros(4, np.uint64)
    random_words(np.array(counter, np.uint64), np.array(key, np.uint64), out)
    assert tuple(out.tolist()) == philox(counter, key)


# --------------------------------------------------------------------------------------------------- against the twin


def test_draws_equal_the_twin() -> None:
    """Every mix of controls at once, logits with many ties (bf16 steps); a row may sit on a rounding edge."""
    rng = np.random.default_rng(0)
    n, width, vocab, slots = 600, 203, 197, 4
    logits = round_bf16(rng.standard_normal((n, width)) * 3).astype(np.float32)
    logits[:, vocab:] = 1e4  # beyond the tokenizer
    rows = sample_rows(
        n,
        vocab,
        width,
        temperature=rng.choice([0, 0.05, 0.3, 1.0, 3.0], n),
        top_k=rng.choice([0, 1, 5, 50, 196, 197, 500], n),
        top_p=rng.choice([1.0, 0.9, 0.5, 0.1, 1e-6], n),
        min_p=rng.choice([0.0, 0.05, 0.15, 1.0], n),
        repetition=rng.choice([1.0, 1.05, 1.5, 0.5], n),
        presence=rng.choice([0.0, 0.5, -1.0], n),
        frequency=rng.choice([0.0, 0.2, -0.1], n),
        seed=rng.integers(0, 2**64, n, dtype=np.uint64),
        choice=rng.integers(0, 4, n),
        position=rng.integers(0, 2**17, n),
        slot=rng.integers(0, slots, n),
        prompt_seen=(rng.random((slots, width)) < 0.3).astype(np.uint8),
        output_count=(rng.random((slots, width)) < 0.2) * rng.integers(1, 5, (slots, width)).astype(np.int32),
        biases=[{int(i): float(rng.standard_normal()) for i in rng.integers(0, vocab, i % 3)} for i in range(n)],
        bans=[rng.integers(0, vocab, i % 4).tolist() for i in range(n)],
        masks=[np.flatnonzero(rng.random(vocab) < 0.4) if i % 3 == 0 else None for i in range(n)],
    )
    token = CpuBackend("bfloat16", THREADS).sample(logits, rows).token
    expected = np.array([draw(logits, rows, i) for i in range(n)])
    assert (token != expected).sum() <= 2
    for i in range(n):  # never outside the kept set
        weights = kept_weights(logits, rows, i)
        assert token[i] < vocab and (weights[token[i]] > 0 or token[i] == expected[i])


def test_draws_follow_the_distribution() -> None:
    logits = np.array([0.0, 1.0, 2.0, -1.0, 0.5], np.float32)
    n = 20000
    token = sample(np.tile(logits, (n, 1)), temperature=0.7, position=np.arange(n)).token
    p = np.exp(logits / 0.7)
    p /= p.sum()
    counts = np.bincount(token, minlength=5)
    chi_square = ((counts - n * p) ** 2 / (n * p)).sum()
    assert chi_square < 23.5  # 4 degrees of freedom, 1 in 10,000; the draws are fixed by the seed


@pytest.mark.parametrize("field", ["seed", "choice", "position"])
def test_each_part_of_the_key_changes_the_draws(field: str) -> None:
    logits = np.zeros((64, 1000), np.float32)
    base, other = sample(logits, position=np.arange(64)), None
    other = sample(logits, **{"position": np.arange(64), field: np.arange(64) + 1000})
    assert (base.token != other.token).mean() > 0.9


def test_high_half_of_the_seed_counts() -> None:
    logits = np.zeros((64, 1000), np.float32)
    seeds = np.arange(64, dtype=np.uint64)
    assert (sample(logits, seed=seeds).token != sample(logits, seed=seeds << np.uint64(32)).token).mean() > 0.9


# ------------------------------------------------------------------------------------------------- ties, limits, bans


def test_ties_go_to_the_lower_id() -> None:
    logits = np.array([[1, 3, 3, 0, 3]], np.float32).repeat(200, 0)
    positions = np.arange(200)
    assert set(sample(logits, temperature=0).token) == {1}
    assert set(sample(logits, top_k=1, position=positions).token) == {1}
    assert set(sample(logits, top_k=2, position=positions).token) == {1, 2}
    assert set(sample(logits, top_p=0.3, position=positions).token) == {1}
    assert set(sample(logits, top_p=0.6, position=positions).token) == {1, 2}
    assert set(sample(logits, min_p=1.0, position=positions).token) == {1, 2, 4}


def test_minus_zero_ties_with_zero() -> None:
    logits = np.array([[-0.0, 0.0, -5.0]], np.float32)
    result = sample(logits, temperature=0, top_n=2)
    assert result.token[0] == 0 and result.top_ids[0].tolist() == [0, 1]
    assert sample(logits[:, [1, 0, 2]], temperature=1, top_k=1).token[0] == 0


@pytest.mark.parametrize("temperature", [1e-5, 1e-20, 1e-40])
def test_tiny_temperature_is_greedy(temperature: float) -> None:
    logits = np.random.default_rng(0).standard_normal((50, 300)).astype(np.float32) * 100
    token = sample(logits, temperature=temperature, position=np.arange(50)).token
    assert (token == logits.argmax(1)).all()


def test_all_but_one_banned() -> None:
    logits = np.random.default_rng(0).standard_normal((1, 40)).astype(np.float32)
    bans = [[i for i in range(40) if i != 17]]
    for fields in ({"temperature": 0}, {"temperature": 2.0}, {"top_k": 5}, {"top_p": 0.5}, {"min_p": 0.5}):
        assert sample(logits, bans=bans, **fields).token[0] == 17


def test_bias_and_bans_beyond_the_vocabulary_do_nothing() -> None:
    logits = np.array([[0, 1, 5, 9]], np.float32)
    result = sample(logits, vocab=3, temperature=0, biases=[{3: 5.0, 9: 5.0}], bans=[[3, 70000]])
    assert result.token[0] == 2


def test_a_token_beyond_the_vocabulary_is_never_drawn() -> None:
    logits = np.zeros((500, 20), np.float32)
    logits[:, 11:] = 50
    token = sample(logits, vocab=11, position=np.arange(500)).token
    assert set(token) == set(range(11))
    assert sample(logits, vocab=11, temperature=0).token.max() == 0


def test_bias_moves_the_greedy_choice_and_penalties_use_the_tables() -> None:
    logits = np.array([[1.0, 2.0, -1.0, 0.0]] * 4, np.float32)
    seen = np.array([[0, 1, 0, 0], [0, 0, 0, 0]], np.uint8)
    count = np.array([[0, 0, 0, 0], [3, 1, 0, 0]], np.int32)
    result = sample(
        logits,
        temperature=0,
        slot=[0, 1, 1, 0],
        repetition=[4.0, 1, 1, 1],
        presence=[0, 0, 2.5, 0],
        frequency=[0, 1.5, 0, 0],
        biases=[{}, {}, {}, {2: 10.0}],
        prompt_seen=seen,
        output_count=count,
    )
    # 2 / 4 < 1; 2 - 1.5 > 0, 1 - 4.5 < 0; 2 - 2.5, 1 - 2.5 < 0; -1 + 10
    assert result.token.tolist() == [0, 1, 3, 2]


def test_repetition_of_a_negative_logit_multiplies() -> None:
    logits = np.array([[-1.0, -1.5]], np.float32)
    seen = np.array([[1, 0]], np.uint8)
    assert sample(logits, temperature=0, repetition=2.0, prompt_seen=seen).token[0] == 1


# --------------------------------------------------------------------------------------------------- log-probabilities


@pytest.mark.parametrize("width, vocab", [(5, 5), (17, 16), (203, 150), (65536, 64400)])
def test_log_probabilities(width: int, vocab: int) -> None:
    rng = np.random.default_rng(width)
    n = 7
    logits = round_bf16(rng.standard_normal((n, width)) * 4).astype(np.float32)
    targets = rng.integers(0, vocab, n).astype(np.int32)
    top_n = np.array([0, 1, 5, 3, 2, 4, 0], np.int32)
    logprob, rank, top_ids, top_logprobs = CpuBackend("bfloat16").token_logprobs(logits, targets, top_n, vocab)
    assert top_ids.shape == top_logprobs.shape == (n, 5)
    for i in range(n):
        expected, expected_rank, ids, values = log_probabilities(logits[i], vocab, int(targets[i]), int(top_n[i]))
        assert abs(logprob[i] - expected) < 2e-6 * max(1, abs(expected)) and rank[i] == expected_rank
        assert top_ids[i, : top_n[i]].tolist() == ids and (top_ids[i, top_n[i] :] == -1).all()
        assert np.allclose(top_logprobs[i, : top_n[i]], values, rtol=2e-6, atol=2e-6)
        assert np.isnan(top_logprobs[i, top_n[i] :]).all()


def test_log_probabilities_of_draws_are_of_the_raw_logits() -> None:
    rng = np.random.default_rng(1)
    logits = rng.standard_normal((4, 50)).astype(np.float32)
    plain = sample(logits, temperature=0, top_n=[-1, 0, 2, 3])
    result = sample(
        logits, temperature=0.2, top_k=3, top_n=[-1, 0, 2, 3], bans=[[0]] * 4, biases=[{1: 9.0}] * 4, repetition=1.3
    )
    assert np.isnan(result.logprob[0]) and result.rank[0] == 0
    assert result.top_ids.shape == (4, 3)
    assert_same_bits(result.top_logprobs, plain.top_logprobs)
    for i in (1, 2, 3):
        expected, rank, _, _ = log_probabilities(logits[i], 50, int(result.token[i]), 0)
        assert abs(result.logprob[i] - expected) < 1e-5 and result.rank[i] == rank


def test_no_logprobs_wanted_gives_empty_lists() -> None:
    result = sample(np.zeros((2, 9), np.float32))
    assert result.top_ids.shape == (2, 0) and np.isnan(result.logprob).all()


# --------------------------------------------------------------------------------------------------------------- law


def test_a_row_draws_the_same_alone_and_with_any_threads() -> None:
    rng = np.random.default_rng(3)
    n, width = 9, 1003
    logits = rng.standard_normal((n, width)).astype(np.float32)
    fields: dict[str, Any] = {
        "temperature": rng.random(n) + 0.2,
        "top_k": rng.integers(0, 60, n),
        "top_p": rng.random(n) * 0.5 + 0.5,
        "min_p": rng.random(n) * 0.1,
        "seed": rng.integers(0, 2**63, n),
        "position": rng.integers(0, 1000, n),
        "top_n": np.full(n, 4),
    }
    rows = sample_rows(n, 1000, width, **fields)
    together = CpuBackend("bfloat16", THREADS).sample(logits, rows)
    for got, expected in zip(CpuBackend("bfloat16", 1).sample(logits, rows), together, strict=True):
        assert_same_bits(got, expected)
    for i in range(n):
        alone = sample_rows(1, 1000, width, **{name: values[i] for name, values in fields.items()})
        for got, expected in zip(CpuBackend("bfloat16").sample(logits[i : i + 1], alone), together, strict=True):
            assert_same_bits(got, expected[i : i + 1])


@given(st.lists(st.integers(0, 11), max_size=6), st.integers(0, 2**31))
@settings(max_examples=60, deadline=None)
def test_draft_tokens_ahead_are_penalised_like_drawn_ones(ahead: list[int], seed: int) -> None:
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(1, 12)).astype(np.float32) * 3
    seen, counts = rng.integers(0, 2, (1, 12)).astype(np.uint8), rng.integers(0, 3, (1, 12)).astype(np.int32)
    after = counts + np.bincount(ahead, minlength=12)[None].astype(np.int32)
    controls = {"temperature": 0.9, "repetition": 1.3, "presence": 0.4, "frequency": 0.7, "prompt_seen": seen}
    for position in range(20):
        drafted = sample(logits, **controls, output_count=counts, ahead=[ahead], position=position)
        drawn = sample(logits, **controls, output_count=after, position=position)
        assert drafted.token[0] == drawn.token[0]
