"""Snapshot pages: the run map and the copies over it."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from lfm2serve.errors import LeaseError
from lfm2serve.memory.snapshots import Run, RunMap, byte_runs, copy_plan, cut, merge


def test_a_fresh_map_leases_one_run_and_merges_what_comes_back() -> None:
    pages = RunMap(10)
    a, b, c = pages.lease(3), pages.lease(3), pages.lease(4)
    assert a == (Run(0, 3),) and b == (Run(3, 3),) and c == (Run(6, 4),)
    assert pages.lease(1) is None
    pages.release(a)
    pages.release(c)
    assert pages.runs() == [Run(0, 3), Run(6, 4)]
    pages.release(b)
    assert pages.runs() == [Run(0, 10)]


def test_the_smallest_run_that_holds_a_lease_is_taken_else_the_largest_first() -> None:
    pages = RunMap(12)
    leases = [pages.lease(n) for n in (2, 1, 4, 1, 3, 1)]
    for i in (0, 2, 4):
        pages.release(leases[i] or ())
    assert pages.runs() == [Run(0, 2), Run(3, 4), Run(8, 3)]
    assert pages.lease(3) == (Run(8, 3),)
    assert pages.lease(5) == (Run(0, 1), Run(3, 4))


def test_giving_back_twice_or_what_never_was_is_refused() -> None:
    pages = RunMap(4)
    lease = pages.lease(2) or ()
    pages.release(lease)
    for runs in (lease, [Run(3, 2)], [Run(-1, 1)]):
        with pytest.raises(LeaseError):
            pages.release(runs)
    assert pages.free == 4


class RunMapMachine(RuleBasedStateMachine):
    """Random leases and releases against a plain set of pages."""

    @initialize(pages=st.integers(0, 40))
    def build(self, pages: int) -> None:
        self.map = RunMap(pages)
        self.free = set(range(pages))
        self.leases: list[tuple[Run, ...]] = []

    @rule(count=st.integers(1, 12))
    def lease(self, count: int) -> None:
        runs = self.map.lease(count)
        assert (runs is not None) == (count <= len(self.free))
        if runs is None:
            return
        pages = [page for run in runs for page in range(run.start, run.end)]
        assert len(pages) == count and set(pages) <= self.free and pages == sorted(pages)
        self.free -= set(pages)
        self.leases.append(runs)

    @rule(which=st.integers(0, 100))
    def release(self, which: int) -> None:
        if self.leases:
            runs = self.leases.pop(which % len(self.leases))
            self.map.release(runs)
            self.free |= {page for run in runs for page in range(run.start, run.end)}
            with pytest.raises(LeaseError):
                self.map.release(runs)

    @invariant()
    def free_runs_are_merged_and_exact(self) -> None:
        runs = self.map.runs()
        assert {page for run in runs for page in range(run.start, run.end)} == self.free
        assert self.map.free == len(self.free)
        assert all(a.end < b.start for a, b in pairwise(runs))


TestRunMap = RunMapMachine.TestCase
TestRunMap.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)


def test_a_state_in_a_fresh_pool_is_a_handful_of_copies() -> None:
    pages = range(20)  # 10,144 tokens
    arena = RunMap(200).lease(101) or ()
    target = [Run(run.start * (2 << 20), run.count * (2 << 20)) for run in arena]
    assert len(copy_plan(byte_runs(pages, 10 << 20), target)) == 1


RUNS = st.lists(st.tuples(st.integers(1, 9), st.booleans()), min_size=1, max_size=12)


def lay(spec: list[tuple[int, bool]]) -> list[Run]:
    """Disjoint runs in a shuffled-looking order, some touching."""
    runs, at = [], 0
    for count, gap in spec:
        at += gap
        runs.append(Run(at, count))
        at += count
    return runs[len(runs) // 2 :] + runs[: len(runs) // 2]


@given(RUNS, RUNS, st.integers(0, 20), st.integers(1, 20))
def test_copies_lay_the_source_over_the_target(
    a: list[tuple[int, bool]], b: list[tuple[int, bool]], start: int, size: int
) -> None:
    source, target = lay(a), lay(b)

    def flat(runs: list[Run]) -> list[int]:
        return [i for run in runs for i in range(run.start, run.end)]

    if sum(r.count for r in source) > sum(r.count for r in target):
        with pytest.raises(ValueError, match="shorter"):
            copy_plan(source, target)
    else:
        copies = copy_plan(source, target)
        moved = [(s + i, t + i) for s, t, n in copies for i in range(n)]
        assert moved == list(zip(flat(source), flat(target), strict=False))
        assert len(copies) <= len(merge(source)) + len(merge(target)) - 1
    assert flat(cut(source, start, size)) == flat(source)[start : start + size]
