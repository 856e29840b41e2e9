"""The arena: which thread maps a piece, what a failure leaves behind, and what is mapped ahead."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kernels_numba.batch import PAGE_ROWS
from lfm2serve.errors import ArenaMemory
from lfm2serve.memory.arena import Arena
from lfm2serve.memory.pages import PagePool, pages_for

HELPER, ME = "lfm2serve-arena", threading.main_thread().name
PAGE = 10


class FakeMapper:
    """Memory of `capacity` bytes. failing: starts that can't be mapped. hold: while cleared, the helper's maps wait."""

    def __init__(self, capacity: int = 1 << 40) -> None:
        self.capacity = capacity
        self.failing: set[int] = set()
        self.fatal = False
        self.hold = threading.Event()
        self.hold.set()
        self.held = threading.Event()
        self.mapped: dict[int, int] = {}
        self.maps: list[tuple[int, str]] = []
        self._lock = threading.Lock()

    def map(self, start: int, nbytes: int) -> None:
        if threading.current_thread().name == HELPER and not self.hold.is_set():
            self.held.set()
            assert self.hold.wait(60)
        with self._lock:
            assert start not in self.mapped, "mapped twice"
            if start in self.failing or nbytes > self.free_bytes():
                error = RuntimeError("no memory")
                error.fatal = self.fatal  # type: ignore[attr-defined]
                raise error
            self.mapped[start] = nbytes
            self.maps.append((start, threading.current_thread().name))

    def unmap(self, start: int, nbytes: int) -> None:
        assert self.mapped.pop(start) == nbytes

    def free_bytes(self) -> int:
        return self.capacity - sum(self.mapped.values())


@pytest.fixture
def mapper() -> FakeMapper:
    return FakeMapper()


@pytest.fixture
def arena(mapper: FakeMapper) -> Iterator[Arena]:
    """Ten pages of 10 bytes in pieces of 25: the fourth and the last piece are 25 bytes too; pages 2 and 7 lie over
    two of them."""
    made = Arena(10, PAGE, mapper, piece_bytes=25)
    yield made
    mapper.hold.set()
    made.close()


def test_pages_lie_over_pieces(arena: Arena) -> None:
    assert list(arena.pieces_of([0, 1])) == [0]
    assert list(arena.pieces_of([2])) == [0, 1]
    assert list(arena.pieces_of([7, 9, 0])) == [2, 3, 0]
    assert list(Arena(3, 30, FakeMapper(), piece_bytes=20).pieces_of([2])) == [3, 4]
    assert Arena(3, 30, FakeMapper(), piece_bytes=20).stats().pieces == 5


def test_the_last_piece_may_be_smaller() -> None:
    mapper = FakeMapper()
    arena = Arena(3, PAGE, mapper, piece_bytes=25)
    assert arena.ready((0, 1, 2), alone=True)
    assert mapper.mapped == {0: 25, 25: 5} and arena.stats().mapped == arena.stats().reserved == 30


def test_without_a_mapper_everything_has_memory() -> None:
    arena = Arena(100, PAGE)
    assert arena.ready(range(100), alone=False)
    arena.ahead(range(100))
    assert arena.stats().mapped == arena.stats().reserved == 1000 and arena.stats().pieces == 1
    arena.close()


def test_alone_the_caller_maps_what_a_lease_needs_and_nothing_else(arena: Arena, mapper: FakeMapper) -> None:
    assert arena.ready((2, 3), alone=True)
    assert mapper.maps == [(0, ME), (25, ME)]
    assert arena.ready((2, 3, 4), alone=True) and arena.ready((0,), alone=False)
    assert len(mapper.maps) == 2 and arena.stats().by_caller == 2 and arena.stats().mapped == 50


def test_beside_others_the_helper_maps_and_the_caller_never_waits(arena: Arena, mapper: FakeMapper) -> None:
    mapper.hold.clear()
    assert not arena.ready((2, 7), alone=False)
    assert mapper.held.wait(60) and not arena.ready((2, 7), alone=False), "asked again while the helper is at it"
    assert mapper.maps == []
    mapper.hold.set()
    assert arena.settle(60) and arena.ready((2, 7), alone=False)
    assert mapper.maps == [(0, HELPER), (25, HELPER), (50, HELPER), (75, HELPER)]
    assert arena.stats().by_helper == 4 and arena.stats().by_caller == 0


def test_left_alone_the_caller_takes_queued_pieces_and_waits_for_the_one_in_hand(
    arena: Arena, mapper: FakeMapper
) -> None:
    mapper.hold.clear()
    assert not arena.ready((0, 3, 7), alone=False)  # pieces 0, 1, 2, 3
    assert mapper.held.wait(60)
    threading.Timer(0.05, mapper.hold.set).start()  # the helper has piece 0; 1 ... 3 are in the queue
    assert arena.ready((3, 7, 0), alone=True)
    assert mapper.maps[:3] == [(25, ME), (50, ME), (75, ME)], "queued pieces are taken, whatever the order"
    assert mapper.maps[3:] == [(0, HELPER)], "the one in hand is waited for"


def test_a_failure_goes_to_who_waits_for_the_piece(arena: Arena, mapper: FakeMapper) -> None:
    mapper.failing = {50}
    assert not arena.ready((3, 5, 9), alone=False)
    assert arena.settle(60)
    with pytest.raises(ArenaMemory, match="25 bytes") as caught:
        arena.ready((3, 5, 9), alone=False)
    assert (caught.value.status, caught.value.code, caught.value.asked) == (503, "out_of_memory", 25)
    assert caught.value.free == mapper.capacity - 25, "as it was when piece 2 failed"
    assert 50 not in mapper.mapped and arena.stats().failed == 1
    mapper.failing = set()
    assert not arena.ready((3, 5, 9), alone=False) and arena.settle(60) and arena.ready((3, 5, 9), alone=False)
    assert {name for _, name in mapper.maps} == {HELPER}


def test_a_failed_piece_goes_back_to_a_caller_that_is_alone(arena: Arena, mapper: FakeMapper) -> None:
    mapper.failing = {0}
    assert not arena.ready((0,), alone=False) and arena.settle(60)
    mapper.failing = set()
    assert arena.ready((0,), alone=True) and mapper.maps == [(0, ME)]


def test_alone_a_failure_gives_back_what_the_call_has_mapped(arena: Arena, mapper: FakeMapper) -> None:
    assert arena.ready((3,), alone=True)
    for position in (0, 50, 75):
        mapper.failing = {position}
        with pytest.raises(ArenaMemory):
            arena.ready(range(10), alone=True)
        assert mapper.mapped == {25: 25} and arena.stats().mapped == 25
    mapper.failing = set()
    assert arena.ready(range(10), alone=True) and len(mapper.mapped) == 4


def test_what_could_not_be_mapped_ahead_is_told_to_nobody(arena: Arena, mapper: FakeMapper) -> None:
    mapper.failing = {0}
    arena.ahead([0])
    assert arena.settle(60) and arena.stats().failed == 1
    mapper.failing = set()
    assert not arena.ready((0,), alone=False), "it is posted once more"
    assert arena.settle(60) and arena.ready((0,), alone=False)


def test_a_release_forgets_failures(arena: Arena, mapper: FakeMapper) -> None:
    mapper.failing = {0}
    assert not arena.ready((0,), alone=False) and arena.settle(60)
    mapper.failing = set()
    arena.ahead([])
    assert not arena.ready((0,), alone=False) and arena.settle(60) and arena.ready((0,), alone=False)


def test_who_has_left_is_told_of_no_failure(arena: Arena, mapper: FakeMapper) -> None:
    mapper.hold.clear()
    mapper.failing = {0}
    assert not arena.ready((0,), alone=False) and mapper.held.wait(60)
    arena.ahead([])  # the stream that waited is cancelled
    mapper.hold.set()
    assert arena.settle(60)
    mapper.failing = set()
    assert not arena.ready((0,), alone=False) and arena.settle(60) and arena.ready((0,), alone=False)


def test_a_lost_device_is_no_lack_of_memory(arena: Arena, mapper: FakeMapper) -> None:
    mapper.failing, mapper.fatal = {0}, True
    arena.ahead([0])
    assert arena.settle(60)
    with pytest.raises(RuntimeError, match="no memory"):
        arena.ready((0,), alone=False)
    with pytest.raises(RuntimeError, match="no memory"):
        arena.ready((0,), alone=True)


def test_closing_ends_the_helper_and_drops_its_queue(arena: Arena, mapper: FakeMapper) -> None:
    mapper.hold.clear()
    arena.ready((0, 3, 7), alone=False)
    assert mapper.held.wait(60)
    threading.Timer(0.05, mapper.hold.set).start()
    arena.close()
    arena.close()
    arena.ahead(range(10))
    assert mapper.maps == [(0, HELPER)]
    assert not any(thread.name == HELPER for thread in threading.enumerate())


class ArenaMachine(RuleBasedStateMachine):
    """Random histories of leases and releases on a pool over an arena whose device may run out of memory."""

    @initialize(
        pages=st.integers(1, 30), page_bytes=st.integers(1, 40), piece_bytes=st.integers(1, 100),
        range_pages=st.integers(1, 3), seed=st.one_of(st.none(), st.integers(0, 99)), room=st.floats(0.2, 1.5),
    )  # fmt: skip
    def build(
        self, pages: int, page_bytes: int, piece_bytes: int, range_pages: int, seed: int | None, room: float
    ) -> None:
        self.pool = PagePool(max(pages, range_pages), range_pages)
        if seed is not None:
            self.pool.shuffle(seed)
        self.mapper = FakeMapper(int(room * self.pool.total * page_bytes))
        self.arena = Arena(self.pool.total, page_bytes, self.mapper, piece_bytes=piece_bytes)
        self.ready: dict[int, tuple[int, ...]] = {}
        self.streams = 0

    @rule(share=st.floats(0.01, 1.0), alone=st.booleans())
    def lease(self, share: float, alone: bool) -> None:
        rows = max(1, int(share * self.pool.capacity_rows))
        stream, self.streams = self.streams, self.streams + 1
        upcoming, before = list(self.pool.upcoming()), self.pool.census()
        order = list(self.arena.pieces_of(upcoming))
        lease = self.pool.ask(stream, rows)
        if lease is None:
            self.pool.release(stream)
            return
        assert list(lease.pages) == upcoming[: len(lease.pages)]
        taken = list(self.arena.pieces_of(lease.pages))
        assert taken == order[: len(taken)], "the look-ahead names the pieces that the next lease takes"
        mapped = dict(self.mapper.mapped)
        try:
            while not self.arena.ready(lease.pages, alone=alone):
                assert self.arena.settle(60)
        except ArenaMemory as error:
            assert error.asked > 0
            self.arena.settle(60)
            assert self.mapper.mapped.items() >= mapped.items() and (not alone or self.mapper.mapped == mapped)
            self.pool.release(stream)
            assert self.pool.census() == before and list(self.pool.upcoming()) == upcoming
            return
        self.ready[stream] = lease.pages

    @rule(pick=st.integers(0, 99), pieces=st.integers(0, 3))
    def release(self, pick: int, pieces: int) -> None:
        if self.ready:
            stream = sorted(self.ready)[pick % len(self.ready)]
            del self.ready[stream]
            self.pool.release(stream)
            self.arena.ahead(self.pool.upcoming(), pieces)
            assert self.arena.settle(60)
            wanted = list(self.arena.pieces_of(self.pool.upcoming()))[:pieces]
            if self.mapper.free_bytes() >= self.arena.nbytes:
                assert {start // self.arena._piece_bytes for start in self.mapper.mapped} >= set(wanted)

    @invariant()
    def what_is_ready_has_memory_and_the_counts_agree(self) -> None:
        if hasattr(self, "arena"):
            have = {start // self.arena._piece_bytes for start in self.mapper.mapped}
            for pages in self.ready.values():
                assert have >= set(self.arena.pieces_of(pages))
            stats = self.arena.stats()
            assert stats.mapped_pieces == len(have) and stats.mapped == sum(self.mapper.mapped.values())

    def teardown(self) -> None:
        if hasattr(self, "arena"):
            for stream in list(self.ready):
                self.pool.release(stream)
            assert self.pool.census().clean
            self.arena.close()


TestArenaMachine = ArenaMachine.TestCase
TestArenaMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_a_growing_pool_is_mapped_one_piece_ahead() -> None:
    """Short replies one after another stay in the first pieces; a longer one finds its first pieces mapped."""
    mapper = FakeMapper()
    pool, arena = PagePool(40), Arena(40, PAGE, mapper, piece_bytes=25)
    arena.ahead(pool.upcoming(), 1)
    for stream in range(20):
        lease = pool.ask(stream, PAGE_ROWS)
        assert lease is not None and arena.ready(lease.pages, alone=True)
        pool.release(stream)
        arena.ahead(pool.upcoming())
        assert arena.settle(60)
    assert sorted(mapper.mapped) == [0, 25]
    lease = pool.ask(99, 5 * PAGE_ROWS)
    assert lease is not None and pages_for(lease.rows) == 5 and arena.ready(lease.pages, alone=False)
    arena.close()
