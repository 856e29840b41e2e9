"""Drafting: a suffix lookup over a stream's own tokens, and when it is worth the rows.

A draft changes how many rows a round runs and never what is drawn: a draft token is taken only where the model draws
the same token itself. (Prompt lookup decoding, Saxena 2023, with a rule for when to stop.)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

MATCH = 4  # shortest suffix that is looked up
MAX_DRAFT = 15  # tokens; with the row before them a verify window of 16
TRUST = 0.75  # share of draft tokens taken, assumed of a stream that has not drafted yet
MEMORY = 0.8  # weight of the past in that share, after one more token
ENOUGH, SAMPLES = 3, 4  # rounds of a size: fewest to know its cost, most that are remembered
RECENT = 512  # rounds
PAUSE = 16  # tokens without drafts after one that lost; doubles while drafts lose
LONGEST_PAUSE = 512


class PromptRuns:
    """Where each run of MATCH tokens last ended in a prompt: sorted arrays, made in a few calls whatever its length.

    Runs are found by a hash of 64 bits; whoever looks one up compares the tokens.
    """

    def __init__(self, prompt: NDArray[np.int32]) -> None:
        self.end = len(prompt)  # runs that end up to here are known
        starts = _hashes(prompt, MATCH - 1)[: max(0, self.end - MATCH + 1)]
        self._starts = np.sort(starts)
        hashes = starts * FACTOR + prompt[MATCH - 1 :].astype(np.uint64)
        order = np.argsort(hashes, kind="stable")
        self._hashes, self._ends = hashes[order], order + MATCH

    def last(self, run: Sequence[int]) -> int | None:
        """Where the run's hash ended last."""
        at = int(np.searchsorted(self._hashes, _hash(run), "right")) - 1
        return int(self._ends[at]) if at >= 0 and self._hashes[at] == _hash(run) else None

    def starts(self, run: Sequence[int]) -> bool:
        """Whether a run of one token less may be the beginning of one."""
        at = int(np.searchsorted(self._starts, _hash(run)))
        return at < len(self._starts) and bool(self._starts[at] == _hash(run))


FACTOR = np.uint64(0x9E3779B97F4A7C15)
_MASK = (1 << 64) - 1


def _hashes(tokens: NDArray[np.int32], length: int) -> NDArray[np.uint64]:
    """Of every run of so many tokens."""
    count = max(0, len(tokens) - length + 1)
    found = np.zeros(count, np.uint64)
    for i in range(length):
        found = found * FACTOR + tokens[i : i + count].astype(np.uint64)
    return found


def _hash(run: Sequence[int]) -> np.uint64:
    found = 0
    for token in run:
        found = (found * int(FACTOR) + token) & _MASK
    return np.uint64(found)


class SuffixLookup:
    """Where each run of MATCH tokens last occurred in a growing list of tokens. prompt: its first tokens."""

    def __init__(self, prompt: NDArray[np.int32] | None = None) -> None:
        self._prompt = PromptRuns(np.zeros(0, np.int32) if prompt is None else prompt)
        self._last: dict[tuple[int, ...], int] = {}
        self._starts: set[tuple[int, ...]] = set()  # of those runs, all but their last token
        self._known = max(MATCH - 1, self._prompt.end)  # runs that end up to here are known

    def _learn(self, tokens: Sequence[int], end: int) -> None:
        """Know the runs that end up to there."""
        if self._known < end:
            new = tokens[self._known + 1 - MATCH : end]
            runs = list(zip(*(new[i:] for i in range(MATCH)), strict=False))
            self._last.update(zip(runs, range(self._known + 1, end + 1), strict=True))
            self._starts.update(run[:-1] for run in runs)
            self._known = end

    def may_follow(self, tokens: Sequence[int]) -> bool:
        """Whether there may be a next token that `propose` would find something for."""
        self._learn(tokens, len(tokens))
        run = tuple(tokens[-MATCH + 1 :])
        return run in self._starts or (len(run) == MATCH - 1 and self._prompt.starts(run))

    def propose(self, tokens: Sequence[int], most: int) -> list[int]:
        """Up to `most` tokens that followed the last earlier occurrence of the longest suffix found."""
        count = len(tokens)
        self._learn(tokens, count - 1)  # all runs but the one to look up
        at = self._find(tokens) if most >= 1 and count > MATCH else None
        if at is None:
            return []
        draft = list(tokens[at : at + most])
        while len(draft) < most and at < count:  # the match reaches the end of the tokens: it repeats itself
            more = draft[len(draft) - (count - at) :][: most - len(draft)]
            draft.extend(more)
        return draft

    def _find(self, tokens: Sequence[int]) -> int | None:
        run = tuple(tokens[-MATCH:])
        at = self._last.get(run)
        if at is None and len(tokens) > self._prompt.end:
            at = self._prompt.last(run)
            if at is not None and tuple(tokens[at - MATCH : at]) != run:
                return None  # another run of the same hash
        return at


class RoundCosts:
    """What a decode round of so many rows takes, in seconds, learned from the rounds that ran.

    A number of rows is known by the best of its last rounds, since what disturbs one only ever adds to it: from the
    third on, and as long as one of them is recent. So a size that was slow once is tried again.
    """

    def __init__(self) -> None:
        self._samples: dict[int, deque[float]] = {}
        self._last: dict[int, int] = {}  # round in which a size ran last
        self._rounds = 0

    def record(self, rows: int, seconds: float) -> None:
        size = _size(rows)
        self._rounds += 1
        if self._rounds - self._last.get(size, self._rounds) > RECENT:
            self._samples[size].clear()
        self._last[size] = self._rounds
        self._samples.setdefault(size, deque(maxlen=SAMPLES)).append(seconds)

    def estimates(self, counts: Sequence[int]) -> list[float]:
        """Seconds of rounds of so many rows; 0 while nothing near is known (so that they get tried)."""
        oldest = self._rounds - RECENT
        known = {
            size: min(samples)
            for size, samples in self._samples.items()
            if len(samples) >= ENOUGH and self._last[size] >= oldest
        }
        return [_between(known, _size(rows)) for rows in counts]


def _size(rows: int) -> int:
    """Round sizes that count as one."""
    return rows if rows <= 16 else -(-rows // 8) * 8


def _between(known: dict[int, float], size: int) -> float:
    """The cost of a size from those of its neighbours; beyond the largest 2 % a row."""
    above = min((other for other in known if other >= size), default=None)
    below = max((other for other in known if other <= size), default=None)
    if below is None:
        return known[above] if above is not None else 0.0
    if above is None:
        return known[below] * (1.0 + 0.02 * (size - below))
    if above == below:
        return known[size]
    return known[below] + (size - below) / (above - below) * (known[above] - known[below])


class Drafter:
    """One stream's drafts: proposes, learns what was taken, and pauses while drafts gain nothing."""

    def __init__(self, prompt: NDArray[np.int32] | None = None) -> None:
        self.drafted = 0
        self.accepted = 0
        self._lookup = SuffixLookup(prompt)
        self._trust = TRUST
        self._pause = PAUSE
        self._quiet_until = 0

    def propose(self, tokens: Sequence[int], most: int, rows: int, costs: RoundCosts) -> list[int]:
        """Draft tokens for the next round, none where they would cost more than they bring.

        most: tokens that the reply may still grow by; rows: of the round without this draft.
        """
        if len(tokens) < self._quiet_until:
            return []
        draft = self._lookup.propose(tokens, min(most, MAX_DRAFT))
        return draft[: self._worth(len(draft), rows, costs)]

    def may_propose(self, tokens: Sequence[int], rows: int, costs: RoundCosts) -> bool:
        """Whether there might be a draft behind the token that comes next: then it has to be known first."""
        if len(tokens) + 1 < self._quiet_until or not self._lookup.may_follow(tokens):
            return False
        return self._worth(MAX_DRAFT, rows, costs) > 0

    def _worth(self, longest: int, rows: int, costs: RoundCosts) -> int:
        """The draft length with the best tokens per second of this stream, 0 if that is a plain round."""
        if not longest:
            return 0
        plain, *drafted = costs.estimates(range(rows, rows + longest + 1))
        best, rate = 0, 1.0
        expected, chance = 1.0, 1.0
        for length, seconds in enumerate(drafted, start=1):
            chance *= self._trust
            expected += chance
            cost = max(seconds / plain, 1.0) if plain else 1.0
            if expected / cost > rate * 1.02:
                best, rate = length, expected / cost
        return best

    def learn(self, drafted: int, accepted: int, length: int) -> None:
        """What became of a draft; `length`: tokens of the stream now."""
        self.drafted += drafted
        self.accepted += accepted
        tried = min(drafted, accepted + 1)  # what follows the first refusal was never tested
        weight = MEMORY**tried
        self._trust = weight * self._trust + (1 - weight) * accepted / tried
        if accepted:
            self._pause = PAUSE
        else:
            self._quiet_until = length + self._pause
            self._pause = min(2 * self._pause, LONGEST_PAUSE)
