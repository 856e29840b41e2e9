"""The page pool: no page has two owners, nobody overtakes, nothing is lost."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from kernels_numba.batch import PAGE_ROWS
from lfm2serve.errors import LeaseError
from lfm2serve.memory.pages import PagePool, pages_for


def assert_clean(pool: PagePool) -> None:
    census = pool.census()
    assert census.promised == 0
    assert census.free == census.total
    assert census.clean


def test_a_lease_holds_its_rows_and_release_gives_everything_back() -> None:
    pool = PagePool(8)
    lease = pool.ask(1, PAGE_ROWS * 2 + 1)
    assert lease is not None and len(lease.pages) == 3 and lease.rows == PAGE_ROWS * 2 + 1
    assert pool.census().free == 5 and pool.census().streams == {1: 3}
    pool.release(1)
    assert_clean(pool)


def test_releasing_twice_is_harmless_and_frees_nothing_twice() -> None:
    pool = PagePool(4)
    pool.ask(1, PAGE_ROWS)
    pool.release(1)
    pool.release(1)
    pool.release(99)
    assert_clean(pool)
    first, second = pool.ask(2, PAGE_ROWS * 2), pool.ask(3, PAGE_ROWS * 2)
    assert first is not None and second is not None
    assert not set(first.pages) & set(second.pages)


def test_a_small_request_does_not_overtake_a_large_one_that_waits() -> None:
    pool = PagePool(4)
    pool.ask(1, PAGE_ROWS * 3)
    assert pool.ask(2, PAGE_ROWS * 2) is None
    assert pool.ask(3, 1) is None, "one page is free, but stream 2 was first"
    assert pool.census().promised == 3
    pool.release(1)
    assert pool.ask(3, 1) is None
    assert pool.ask(2, PAGE_ROWS * 2) is not None
    assert pool.ask(3, 1) is not None


def test_a_cancelled_wait_lets_the_next_one_through() -> None:
    pool = PagePool(2)
    pool.ask(1, PAGE_ROWS)
    assert pool.ask(2, PAGE_ROWS * 2) is None
    assert pool.ask(3, PAGE_ROWS) is None
    pool.release(2)
    assert pool.ask(3, PAGE_ROWS) is not None
    assert pool.census().promised == 0


def test_what_never_fits_and_what_is_leased_already_is_refused() -> None:
    pool = PagePool(2)
    with pytest.raises(LeaseError):
        pool.ask(1, PAGE_ROWS * 2 + 1)
    with pytest.raises(LeaseError):
        pool.ask(1, 0)
    pool.ask(1, 1)
    with pytest.raises(LeaseError):
        pool.ask(1, 1)
    pool.release(1)
    assert_clean(pool)


def test_fixed_ranges_are_contiguous_and_hold_a_whole_context() -> None:
    pool = PagePool(10, range_pages=3)
    assert pool.total == 9 and pool.capacity_rows == 3 * PAGE_ROWS
    leases = [pool.ask(stream, 5) for stream in range(3)]
    assert pool.ask(7, 5) is None
    for lease in leases:
        assert lease is not None
        assert list(lease.pages) == list(range(lease.pages[0], lease.pages[0] + 3))
    for stream in (0, 1, 2, 7):
        pool.release(stream)
    assert_clean(pool)
    with pytest.raises(ValueError):
        PagePool(2, range_pages=3)


class PoolMachine(RuleBasedStateMachine):
    """Random histories of ask, ask again, release, cancel and refuse, against a plain model of the rules."""

    streams = Bundle("streams")

    @initialize(pages=st.integers(1, 12), range_pages=st.integers(1, 3))
    def build(self, pages: int, range_pages: int) -> None:
        self.pool = PagePool(max(pages, range_pages), range_pages)
        self.next_id = 0
        self.line: list[tuple[int, int]] = []
        self.owned: dict[int, tuple[int, ...]] = {}

    def units(self, rows: int) -> int:
        return pages_for(rows) if self.pool.range_pages == 1 else self.pool.range_pages

    def try_lease(self, stream: int, rows: int) -> None:
        free = self.pool.total - sum(map(len, self.owned.values()))
        granted = self.line[0][0] == stream and self.units(rows) <= free
        lease = self.pool.ask(stream, rows)
        assert (lease is not None) == granted
        if lease is not None:
            self.line.pop(0)
            self.owned[stream] = lease.pages
            assert len(lease.pages) == self.units(rows) and lease.rows == rows

    @rule(target=streams, share=st.floats(0.01, 1.0))
    def ask(self, share: float) -> int:
        stream, self.next_id = self.next_id, self.next_id + 1
        rows = max(1, int(share * self.pool.capacity_rows))
        self.line.append((stream, rows))
        self.try_lease(stream, rows)
        return stream

    @rule()
    def first_in_line_asks_again(self) -> None:
        if self.line:
            self.try_lease(*self.line[0])

    @rule()
    def last_in_line_asks_again(self) -> None:
        if self.line:
            self.try_lease(*self.line[-1])

    @rule(stream=consumes(streams))
    def release_or_cancel(self, stream: int) -> None:
        self.pool.release(stream)
        self.owned.pop(stream, None)
        self.line = [entry for entry in self.line if entry[0] != stream]

    @rule(stream=streams)
    def leased_streams_are_refused_a_second_lease(self, stream: int) -> None:
        if stream in self.owned:
            with pytest.raises(LeaseError):
                self.pool.ask(stream, 1)

    @rule(extra=st.integers(1, 5000))
    def refuse(self, extra: int) -> None:
        with pytest.raises(LeaseError):
            self.pool.ask(-1, self.pool.capacity_rows + extra)

    @invariant()
    def every_page_has_one_owner_and_the_census_adds_up(self) -> None:
        census = self.pool.census()
        pages = [page for owned in self.owned.values() for page in owned]
        assert len(pages) == len(set(pages)) and all(0 <= page < census.total for page in pages)
        assert census.leased == len(pages) and census.free == census.total - census.leased
        assert census.streams == {stream: len(owned) for stream, owned in self.owned.items()}
        assert census.promised == sum(self.units(rows) for _, rows in self.line)

    def teardown(self) -> None:
        if hasattr(self, "pool"):
            for stream in range(self.next_id):
                self.pool.release(stream)
            assert_clean(self.pool)


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
