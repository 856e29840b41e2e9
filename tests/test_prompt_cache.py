"""The prompt cache by itself: what it finds, whom it evicts, what it promises of its budget."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from lfm2serve.errors import LeaseError
from lfm2serve.memory.prompt_cache import CHAT_ENDS, KeptState, Mark, PromptCache, common, digest, token_bytes
from lfm2serve.memory.snapshots import SNAPSHOT_PAGE

PAGE_TOKENS = 4  # a state of so many tokens fills a snapshot page


def cache_of(pages: int) -> PromptCache:
    return PromptCache(pages, lambda at, conv_rows: -(-at // PAGE_TOKENS) * SNAPSHOT_PAGE)


def keep(cache: PromptCache, tokens: list[int], mark: Mark = Mark.SHARED) -> KeptState | None:
    """A state that is made at once."""
    state = cache.reserve(token_bytes(tokens), mark, 2)
    if state is not None:
        cache.complete(state)
    return state


def found(cache: PromptCache, tokens: list[int]) -> int:
    state = cache.lookup(token_bytes(tokens)).state
    return state.at if state is not None else 0


def lengths(cache: PromptCache) -> list[int]:
    return sorted(state.at for state in cache.states)


# ---- lookup ----


def test_the_longest_strict_prefix_hits() -> None:
    cache = cache_of(20)
    for tokens in ([1], [1, 2, 3], [1, 2, 3, 4, 5], [1, 2, 9]):
        keep(cache, tokens)
    assert found(cache, [1, 2, 3, 4, 5, 6]) == 5
    assert found(cache, [1, 2, 3, 4, 5]) == 3  # a row is left to run
    assert found(cache, [1, 2, 9, 9]) == 3
    assert found(cache, [1, 2]) == 1
    assert found(cache, [1]) == found(cache, [2, 1]) == 0


def test_a_state_that_is_being_made_hits_nobody() -> None:
    cache = cache_of(20)
    state = cache.reserve(token_bytes([1, 2]), Mark.SHARED, 2)
    assert state is not None and found(cache, [1, 2, 3]) == 0
    assert cache.lookup(token_bytes([1, 5])).shared == 0
    cache.complete(state)
    assert found(cache, [1, 2, 3]) == 2


@pytest.mark.parametrize(
    ("prompt", "at", "shared", "missed"),
    [
        ([1, 2, 3, 4, 5], 4, 0, None),
        ([1, 2, 3, 9, 9], 2, 3, "diverged at token 3"),
        ([1, 2, 9], 2, 0, None),  # parts from the longer one where the shorter one ends
        ([1, 9], 0, 1, "diverged at token 1"),
        ([9, 9], 0, 0, None),
        ([1, 2, 3, 4], 2, 3, "diverged at token 3"),  # held whole by a state: a row before its end
        ([1, 2, 3], 2, 0, None),  # that is where the best state is already
        ([1, 2], 0, 1, "diverged at token 1"),
        ([1], 0, 0, None),
    ],
)
def test_where_a_prompt_leaves_the_kept_states(prompt: list[int], at: int, shared: int, missed: str | None) -> None:
    cache = cache_of(20)
    keep(cache, [1, 2])
    keep(cache, [1, 2, 3, 4])
    lookup = cache.lookup(token_bytes(prompt))
    assert (lookup.state.at if lookup.state else 0, lookup.shared, lookup.missed) == (at, shared, missed)


def test_a_miss_says_what_was_evicted_until_it_is_back() -> None:
    cache = cache_of(2)
    keep(cache, [1, 2])
    keep(cache, [1, 2, 3, 4])
    keep(cache, [5])
    assert lengths(cache) == [1, 4]
    assert cache.lookup(token_bytes([1, 2])).missed == "diverged at token 1"  # the one that went could not have hit
    keep(cache, [6])
    assert cache.lookup(token_bytes([1, 2, 3])).missed == "evicted"
    assert cache.lookup(token_bytes([1, 2, 3, 4, 5])).missed == "evicted"
    assert cache.lookup(token_bytes([2, 2, 3])).missed is None
    keep(cache, [1, 2, 3, 4])
    assert cache.lookup(token_bytes([1, 2, 3, 4, 5])).missed is None


TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=8)


@given(st.lists(TOKENS, max_size=12), TOKENS)
def test_lookup_is_what_a_search_over_all_states_gives(states: list[list[int]], prompt: list[int]) -> None:
    cache = cache_of(100)
    for tokens in states:
        keep(cache, tokens)
    prefixes = [len(tokens) for tokens in states if len(tokens) < len(prompt) and prompt[: len(tokens)] == tokens]
    best = max(prefixes, default=0)
    reach = [next((i for i, (a, b) in enumerate(zip(t, prompt)) if a != b), min(len(t), len(prompt))) for t in states]  # noqa: B905
    shared = min(max(reach, default=0), len(prompt) - 1)
    lookup = cache.lookup(token_bytes(prompt))
    assert (lookup.state.at if lookup.state else 0) == best
    assert lookup.shared == (shared if shared > best else 0)


@given(TOKENS, TOKENS)
def test_common_counts_equal_tokens(a: list[int], b: list[int]) -> None:
    count = common(token_bytes(a), token_bytes(b))
    assert a[:count] == b[:count] and (count in (len(a), len(b)) or a[count] != b[count])


# ---- use ----


def test_a_state_is_resumed_only_by_its_own_tokens() -> None:
    cache = cache_of(4)
    state = keep(cache, [1, 2, 3])
    assert state is not None
    cache.resume(state, token_bytes([1, 2, 3, 4]))
    assert state.pins == 1
    cache.unpin(state)
    with pytest.raises(LeaseError):
        cache.resume(state, token_bytes([1, 2, 4, 4]))
    state.at = 2
    with pytest.raises(LeaseError):
        cache.resume(state, token_bytes([1, 2, 3, 4]))
    unready = cache.reserve(token_bytes([5]), Mark.SHARED, 2)
    assert unready is not None
    with pytest.raises(LeaseError):
        cache.resume(unready, token_bytes([5, 6]))
    assert state.pins == unready.pins == 0


def test_counters_are_by_kind_of_mark() -> None:
    cache = cache_of(4)
    state = keep(cache, [1, 2, 3], Mark.HISTORY)
    assert state is not None
    cache.hit(state)
    cache.hit(state)
    assert keep(cache, list(range(30)), Mark.SHARED) is None
    for n in range(4):
        keep(cache, [n], Mark.PROMPT)
    cache.failed(cache.states[-1])
    counters = cache.counters
    assert counters.hits == {"history": 2} and counters.tokens_saved == {"history": 6}
    assert counters.keeps == {"history": 1, "prompt": 4}
    assert counters.refusals == {"shared": 1} and counters.evictions == {"history": 1}
    assert counters.failures == 1 and len(cache.states) == 3


# ---- room ----


def test_superseded_states_go_first_then_the_least_recently_used() -> None:
    cache = cache_of(4)
    keep(cache, [9])
    keep(cache, [1], Mark.HISTORY)
    keep(cache, [8])
    keep(cache, [1, 2], Mark.REPLY)
    assert [state.at for state in cache.states if state.superseded] == [1]
    keep(cache, [7])
    assert found(cache, [1, 2, 3]) == 2 and found(cache, [1, 5]) == 0 and found(cache, [9, 9]) == 1
    state = cache.lookup(token_bytes([9, 9])).state
    assert state is not None
    cache.resume(state, token_bytes([9, 9]))
    cache.unpin(state)
    keep(cache, [6])
    assert found(cache, [9, 9]) == 1 and found(cache, [8, 8]) == 0


@pytest.mark.parametrize("mark", list(Mark))
@pytest.mark.parametrize("newer", list(Mark))
def test_only_a_chats_ends_supersede_and_are_superseded(mark: Mark, newer: Mark) -> None:
    cache = cache_of(4)
    old, other = keep(cache, [1], mark), keep(cache, [3], mark)
    new = keep(cache, [1, 2], newer)
    assert old is not None and other is not None and new is not None
    assert old.superseded == (mark in CHAT_ENDS and newer in CHAT_ENDS)
    assert not other.superseded and not new.superseded


def test_a_state_that_turns_out_to_be_shared_is_no_longer_superseded() -> None:
    cache = cache_of(4)
    state = keep(cache, [1], Mark.REPLY)
    keep(cache, [1, 2], Mark.HISTORY)
    assert state is not None and state.superseded
    assert cache.reserve(token_bytes([1]), Mark.SHARED, 2) is None
    assert not state.superseded and state.mark == Mark.SHARED
    assert cache.reserve(token_bytes([1]), Mark.HISTORY, 2) is None
    keep(cache, [1, 2, 3], Mark.HISTORY)
    assert not state.superseded and state.mark == Mark.HISTORY


def test_neither_a_pinned_state_nor_one_being_made_gives_way_and_a_refusal_evicts_nothing() -> None:
    cache = cache_of(3)
    pinned = keep(cache, [1])
    assert pinned is not None
    cache.resume(pinned, token_bytes([1, 2]))
    assert cache.reserve(token_bytes([2]), Mark.SHARED, 2) is not None
    keep(cache, [3])
    assert cache.reserve(token_bytes(list(range(8))), Mark.SHARED, 2) is None
    assert cache.reserve(token_bytes(list(range(40))), Mark.SHARED, 2) is None
    assert not cache.fits(13, 2) and cache.fits(12, 2)
    assert lengths(cache) == [1, 1, 1] and not cache.counters.evictions
    cache.unpin(pinned)
    assert cache.reserve(token_bytes(list(range(8))), Mark.SHARED, 2) is not None
    assert lengths(cache) == [1, 8]


def test_a_state_that_waits_to_be_claimed_gives_way_and_is_then_gone() -> None:
    cache = cache_of(1)
    state = cache.reserve(token_bytes([1]), Mark.REPLY, 32)
    assert state is not None and cache.reserve(token_bytes([2]), Mark.SHARED, 2) is None
    state.copied = True
    assert cache.holds(state) and found(cache, [1, 2]) == 0
    assert cache.reserve(token_bytes([2]), Mark.SHARED, 2) is not None
    assert not cache.holds(state)
    cache.drop(state)
    assert cache.held_bytes == SNAPSHOT_PAGE


def test_a_state_of_known_tokens_is_not_made_twice() -> None:
    cache = cache_of(4)
    first = cache.reserve(token_bytes([1, 2]), Mark.REPLY, 32)
    assert first is not None and cache.reserve(token_bytes([1, 2]), Mark.SHARED, 2) is None
    cache.complete(first)
    assert first.lasting  # it was asked for as a shared one while it was made
    assert cache.reserve(token_bytes([1, 2]), Mark.HISTORY, 2) is None
    assert first.mark == Mark.HISTORY and len(cache.states) == 1


def test_a_cut_state_hits_where_it_ends_now() -> None:
    cache = cache_of(8)
    state = cache.reserve(token_bytes([1, 2, 3, 4, 5, 6]), Mark.REPLY, 32)
    keep(cache, [1, 2, 3])
    assert state is not None
    assert not cache.cut(state, 3) and not cache.cut(state, 0)
    assert cache.cut(state, 5)
    cache.complete(state)
    assert state.digest == digest(token_bytes([1, 2, 3, 4, 5])) and state.pages == 2
    assert found(cache, [1, 2, 3, 4, 5, 9]) == 5 and found(cache, [1, 2, 3, 4, 5, 6, 7]) == 5
    cache.resume(state, token_bytes([1, 2, 3, 4, 5, 6]))
    cache.unpin(state)
    cache.drop(state)
    assert cache.pages.free == 7


def test_clear_spares_what_is_in_use() -> None:
    cache = cache_of(8)
    keep(cache, [1])
    pinned, making = keep(cache, [2]), cache.reserve(token_bytes([3]), Mark.SHARED, 2)
    assert pinned is not None and making is not None
    cache.resume(pinned, token_bytes([2, 2]))
    assert cache.clear() == 1
    assert cache.states == [pinned, making]


class CacheMachine(RuleBasedStateMachine):
    """Random keeps, resumes, cuts and drops against the rules, state by state."""

    @initialize(pages=st.integers(0, 9))
    def build(self, pages: int) -> None:
        self.cache = cache_of(pages)
        self.making: list[KeptState] = []
        self.pinned: list[KeptState] = []

    @rule(tokens=TOKENS, mark=st.sampled_from(list(Mark)), at_once=st.booleans())
    def reserve(self, tokens: list[int], mark: Mark, at_once: bool) -> None:
        cache, data = self.cache, token_bytes(tokens)
        before = cache.states
        known = any(state.tokens == data for state in before)
        need = -(-len(tokens) // PAGE_TOKENS)
        movable = [state for state in before if state.copied and not state.pins]
        room = cache.pages.free + sum(state.pages for state in movable)
        order = sorted(movable, key=lambda state: (not state.superseded, state.last_used))
        free = cache.pages.free
        expected = []
        for state in order:
            if need <= free:
                break
            free += state.pages
            expected.append(state)
        state = cache.reserve(data, mark, 2)
        gone = [other for other in before if other not in cache.states]
        if known or need > room:
            assert state is None and not gone
        else:
            assert state is not None and sorted(map(id, gone)) == sorted(map(id, expected))
            if at_once:
                cache.complete(state)
            else:
                self.making.append(state)

    @precondition(lambda self: self.making)
    @rule(which=st.integers(0, 99), end=st.sampled_from(["complete", "fail", "drop", "copied"]), back=st.integers(0, 3))
    def settle(self, which: int, end: str, back: int) -> None:
        state = self.making.pop(which % len(self.making))
        if not self.cache.holds(state):
            return
        if end == "copied" and not state.copied:
            state.copied = True
            self.making.append(state)
        elif end == "complete":
            if back and self.cache.cut(state, state.at - back):
                assert self.cache.holds(state)
            self.cache.complete(state)
        else:
            (self.cache.failed if end == "fail" else self.cache.drop)(state)

    @rule(tokens=TOKENS)
    def resume(self, tokens: list[int]) -> None:
        data = token_bytes(tokens)
        state = self.cache.lookup(data).state
        if state is not None:
            assert state.ready and data.startswith(state.tokens) and state.at < len(tokens)
            self.cache.resume(state, data)
            self.pinned.append(state)

    @precondition(lambda self: self.pinned)
    @rule(which=st.integers(0, 99))
    def unpin(self, which: int) -> None:
        self.cache.unpin(self.pinned.pop(which % len(self.pinned)))

    @rule()
    def clear(self) -> None:
        left = [state for state in self.cache.states if state.pins or not state.copied]
        self.cache.clear()
        assert self.cache.states == left

    @invariant()
    def accounts_are_exact(self) -> None:
        cache = self.cache
        states = cache.states
        held = sum(state.pages for state in states)
        assert held == cache.pages.total - cache.pages.free
        assert cache.held_bytes + cache.spare_bytes == cache.pages.total * SNAPSHOT_PAGE
        pages = [page for state in states for run in state.runs for page in range(run.start, run.end)]
        assert len(set(pages)) == len(pages) == held
        assert len({state.tokens for state in states}) == len(states)
        assert all(state in states for state in self.pinned)
        for state in states:
            assert len(state.tokens) == 4 * state.at
            assert not state.ready or digest(state.tokens) == state.digest
            assert not state.superseded or (state.mark in CHAT_ENDS and not state.lasting)


TestCache = CacheMachine.TestCase
TestCache.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
