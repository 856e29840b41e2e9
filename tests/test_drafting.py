"""Drafts: what the lookup proposes, and when a stream stops drafting."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lfm2serve.drafting import ENOUGH, MATCH, MAX_DRAFT, PAUSE, RECENT, SAMPLES, Drafter, RoundCosts, SuffixLookup


def test_the_lookup_proposes_what_followed_the_last_earlier_occurrence() -> None:
    text = [1, 2, 3, 4, 50, 51, 9, 1, 2, 3, 4, 60, 61, 62, 8, 1, 2, 3, 4]
    assert SuffixLookup().propose(text, 3) == [60, 61, 62]
    assert SuffixLookup().propose(text[:11], 2) == [50, 51]
    assert SuffixLookup().propose(text[:6], 5) == []


def test_a_short_repetition_is_drafted_on_and_on() -> None:
    assert SuffixLookup().propose([7, 8] * 4, 7) == [7, 8, 7, 8, 7, 8, 7]
    assert SuffixLookup().propose([5] * 5, 4) == [5, 5, 5, 5]


@given(st.lists(st.integers(0, 3), max_size=60), st.integers(0, MAX_DRAFT))
def test_the_lookup_is_the_same_grown_token_by_token(tokens: list[int], most: int) -> None:
    grown = SuffixLookup()
    for end in range(len(tokens)):
        grown.propose(tokens[:end], most)
    draft = grown.propose(tokens, most)
    assert draft == SuffixLookup().propose(tokens, most)
    assert len(draft) <= most
    ends = [end for end in range(MATCH, len(tokens)) if tokens[end - MATCH : end] == tokens[-MATCH:]]
    assert bool(draft) == bool(ends and most)
    if draft:
        text = tokens + draft
        assert all(text[ends[-1] + i] == token for i, token in enumerate(draft))


@given(st.lists(st.integers(0, 3), max_size=60), st.integers(0, 60), st.integers(0, MAX_DRAFT))
def test_the_lookup_is_the_same_when_it_is_given_the_prompt(tokens: list[int], prompt: int, most: int) -> None:
    given_it = SuffixLookup(np.array(tokens[:prompt], np.int32))
    for end in range(min(prompt, len(tokens)) + 1, len(tokens) + 1):
        plain = SuffixLookup()
        assert given_it.propose(tokens[:end], most) == plain.propose(tokens[:end], most)
        assert given_it.may_follow(tokens[:end]) == plain.may_follow(tokens[:end])


def cost(per_row: float) -> RoundCosts:
    costs = RoundCosts()
    for rows in (1, 2, 4, 8, 16) * ENOUGH:
        costs.record(rows, 1.0 + per_row * (rows - 1))
    return costs


def test_cheap_rows_are_drafted_in_full_and_dear_ones_not_at_all() -> None:
    text = [1, 2, 3, 4, 5, 6, 7, 8, 9] * 3
    assert len(Drafter().propose(text, 100, 1, cost(0.0))) == MAX_DRAFT
    assert Drafter().propose(text, 100, 1, cost(1.0)) == []
    assert 1 <= len(Drafter().propose(text, 100, 1, cost(0.2))) < MAX_DRAFT
    assert len(Drafter().propose(text, 2, 1, cost(0.0))) == 2


def test_a_stream_whose_drafts_fail_pauses_longer_each_time_and_starts_again_on_success() -> None:
    drafter, text, costs = Drafter(), [1, 2, 3, 4, 5] * 200, cost(0.05)
    length, gaps = 20, []
    for _ in range(4):
        start = length
        while not drafter.propose(text[:length], 10, 1, costs) and length < 900:
            length += 1
        gaps.append(length - start)
        drafter.learn(5, 0, length)
    assert gaps[0] == 0 and gaps[1] >= PAUSE and gaps[2] >= 2 * PAUSE and gaps[3] >= 4 * PAUSE
    assert drafter.accepted == 0 and drafter.drafted == 20


def test_a_size_that_was_slow_once_is_tried_until_it_is_known() -> None:
    costs = RoundCosts()
    assert costs.estimates([16])[0] == 0.0
    for _ in range(ENOUGH):
        costs.record(1, 1.0)
    costs.record(16, 50.0)  # it had to wait for something
    assert costs.estimates([16])[0] == pytest.approx(1.3)
    costs.record(16, 2.0)
    costs.record(16, 2.2)
    assert costs.estimates([1, 16, 2]) == [1.0, 2.0, pytest.approx(1.0 + 1 / 15)]
    for _ in range(SAMPLES):
        costs.record(16, 3.0)
    assert costs.estimates([16])[0] == 3.0


def test_what_a_size_took_is_forgotten_when_it_has_not_run_for_long() -> None:
    costs = RoundCosts()
    for _ in range(ENOUGH):
        costs.record(16, 5.0)
    for _ in range(RECENT):
        costs.record(1, 1.0)
    assert costs.estimates([16])[0] == 5.0
    costs.record(1, 1.0)
    assert costs.estimates([16])[0] == pytest.approx(1.3)
    costs.record(16, 2.0)
    assert costs.estimates([16])[0] == pytest.approx(1.3)


@given(st.lists(st.tuples(st.integers(1, 64), st.floats(1e-4, 1.0)), min_size=1, max_size=20), st.integers(1, 80))
def test_cost_estimates_lie_among_what_was_seen(seen: list[tuple[int, float]], rows: int) -> None:
    costs = RoundCosts()
    for count, seconds in seen * ENOUGH:
        costs.record(count, seconds)
    low, high = min(s for _, s in seen), max(s for _, s in seen)
    assert low * 0.999 <= costs.estimates([rows])[0] <= high * (1.0 + 0.02 * 80)


def test_trust_follows_single_tokens() -> None:
    """A long draft that is taken whole says more than a short one; what follows a refusal says nothing."""
    text, costs = [1, 2, 3, 4, 5, 6, 7, 8, 9] * 3, cost(0.2)
    lengths = []
    for drafted, accepted in ((15, 15), (1, 1), (15, 1)):
        drafter = Drafter()
        drafter.learn(drafted, accepted, 0)
        lengths.append(len(drafter.propose([*text, *text], 100, 1, costs)))
    assert lengths[0] > lengths[1] > lengths[2] > 0
