"""Drafting: a suffix lookup over a stream's own tokens, and when it is worth the rows.

A draft changes how many rows a round runs and never what is drawn: a draft token is taken only where the model draws
the same token itself. (Prompt lookup decoding, Saxena 2023, with a rule for when to stop.)
"""

from __future__ import annotations

from collections.abc import Sequence

MATCH = 4  # shortest suffix that is looked up
MAX_DRAFT = 15  # tokens; with the row before them a verify window of 16
TRUST = 0.75  # share of draft tokens taken, assumed of a stream that has not drafted yet
MEMORY = 0.8  # weight of the past in that share
PAUSE = 16  # tokens without drafts after one that lost; doubles while drafts lose
LONGEST_PAUSE = 512


class SuffixLookup:
    """Where each run of MATCH tokens last occurred in a growing list of tokens."""

    def __init__(self) -> None:
        self._last: dict[tuple[int, ...], int] = {}
        self._earlier: dict[tuple[int, ...], int] = {}
        self._known = 0  # tokens whose runs are in the tables

    def propose(self, tokens: Sequence[int], most: int) -> list[int]:
        """Up to `most` tokens that followed the last earlier occurrence of the longest suffix found."""
        count = len(tokens)
        for end in range(max(self._known, MATCH - 1) + 1, count + 1):
            run = tuple(tokens[end - MATCH : end])
            if (before := self._last.get(run)) is not None:
                self._earlier[run] = before
            self._last[run] = end
        self._known = count
        if count <= MATCH or most < 1:
            return []
        at = self._earlier.get(tuple(tokens[count - MATCH : count]))
        if at is None:
            return []
        draft = list(tokens[at : at + most])
        while len(draft) < most and at < count:  # the match reaches the end of the tokens: it repeats itself
            more = draft[len(draft) - (count - at) :][: most - len(draft)]
            draft.extend(more)
        return draft


class RoundCosts:
    """What a decode round of so many rows takes, learned from the rounds that ran (seconds, smoothed)."""

    def __init__(self) -> None:
        self._seconds: dict[int, float] = {}

    def record(self, rows: int, seconds: float) -> None:
        old = self._seconds.get(rows)
        self._seconds[rows] = seconds if old is None else 0.8 * old + 0.2 * seconds

    def estimate(self, rows: int) -> float:
        """Seconds of a round of `rows` rows; 0 while nothing near is known (so that it gets tried)."""
        known = sorted(self._seconds)
        if not known:
            return 0.0
        above = next((r for r in known if r >= rows), None)
        below = next((r for r in reversed(known) if r <= rows), None)
        if above is None or below is None:
            near = known[-1] if above is None else known[0]
            return self._seconds[near] * (1.0 if above is not None else 1.0 + 0.02 * (rows - near))
        if above == below:
            return self._seconds[above]
        share = (rows - below) / (above - below)
        return self._seconds[below] + share * (self._seconds[above] - self._seconds[below])


class Drafter:
    """One stream's drafts: proposes, learns what was taken, and pauses while drafts gain nothing."""

    def __init__(self) -> None:
        self.drafted = 0
        self.accepted = 0
        self._lookup = SuffixLookup()
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

    def _worth(self, longest: int, rows: int, costs: RoundCosts) -> int:
        """The draft length with the best tokens per second of this stream, 0 if that is a plain round."""
        plain = costs.estimate(rows)
        best, rate = 0, 1.0
        expected, chance = 1.0, 1.0
        for length in range(1, longest + 1):
            chance *= self._trust
            expected += chance
            cost = costs.estimate(rows + length) / plain if plain else 1.0
            if expected / max(cost, 1.0) > rate * 1.02:
                best, rate = length, expected / max(cost, 1.0)
        return best

    def learn(self, drafted: int, accepted: int, length: int) -> None:
        """What became of a draft; `length`: tokens of the stream now."""
        self.drafted += drafted
        self.accepted += accepted
        tried = min(drafted, accepted + 1)  # what follows the first refusal was never tested
        self._trust = MEMORY * self._trust + (1 - MEMORY) * accepted / tried
        if accepted:
            self._pause = PAUSE
        else:
            self._quiet_until = length + self._pause
            self._pause = min(2 * self._pause, LONGEST_PAUSE)
