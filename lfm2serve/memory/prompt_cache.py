"""The prompt cache: which kept states there are, which one a prompt resumes, and who makes room for whom.

Knows tokens and pages, no device. One thread (the engine's) uses it.
"""

from __future__ import annotations

import hashlib
import itertools
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np

from lfm2serve.errors import LeaseError
from lfm2serve.memory.snapshots import SNAPSHOT_PAGE, Run, RunMap

REMEMBERED_EVICTIONS = 64


class Mark(StrEnum):
    """Why a state is kept there, most important first."""

    HISTORY = "history"  # the prompt without its generation prompt
    LAST_USER = "last_user"  # where the last user message starts: an edited message resumes there
    SHARED = "shared"  # system and tools, or where two prompts part
    REPLY = "reply"  # what ran of the reply and comes back from the client
    PROMPT = "prompt"  # a raw prompt's length - 1

    @property
    def rank(self) -> int:
        return list(Mark).index(self)


CHAT_ENDS = (Mark.HISTORY, Mark.REPLY)


@dataclass(eq=False, slots=True)
class KeptState:
    """K/V rows [0, at) and conv states after them, for exactly these tokens (int32 bytes).

    runs: snapshot pages. conv_rows: conv inputs kept (2, or a whole ring); first_input: the lowest position among them.
    Only a `ready` state can hit; one that is `copied` may be evicted. pins: streams that resume it just now.
    superseded: a newer state of the same chat extends it; never a `lasting` one, which other requests start from too.
    """

    tokens: bytes
    at: int
    mark: Mark
    runs: tuple[Run, ...]
    conv_rows: int
    last_used: int
    first_input: int
    digest: bytes = b""
    copied: bool = False
    ready: bool = False
    pins: int = 0
    lasting: bool = False
    superseded: bool = False

    @property
    def pages(self) -> int:
        return sum(run.count for run in self.runs)


@dataclass(frozen=True, slots=True)
class Lookup:
    """state: the longest one that is a strict prefix. shared: tokens in common with any kept state, if longer than
    that and short of the whole prompt; missed: why a longer state didn't hit ("diverged at token k", "evicted"), None
    when none was there."""

    state: KeptState | None
    shared: int
    missed: str | None


@dataclass(slots=True)
class CacheCounters:
    """By kind of mark; bytes are of snapshot pages."""

    lookups: int = 0
    hits: Counter[str] = field(default_factory=Counter)
    tokens_saved: Counter[str] = field(default_factory=Counter)
    keeps: Counter[str] = field(default_factory=Counter)
    refusals: Counter[str] = field(default_factory=Counter)
    evictions: Counter[str] = field(default_factory=Counter)
    failures: int = 0


def token_bytes(tokens: Sequence[int]) -> bytes:
    """Tokens as they are compared: int32, little endian."""
    return np.array(tokens, "<i4").tobytes()


def digest(tokens: bytes) -> bytes:
    return hashlib.blake2b(tokens, digest_size=16).digest()


def common(a: bytes, b: bytes) -> int:
    """Tokens that two prompts have in common from the start."""
    size = min(len(a), len(b)) // 4
    differ = np.frombuffer(a, "<i4", size) != np.frombuffer(b, "<i4", size)
    return int(differ.argmax()) if differ.any() else size


class PromptCache:
    """Kept states inside a budget of snapshot pages. state_bytes(at, conv_rows): size of a state."""

    def __init__(self, pages: int, state_bytes: Callable[[int, int], int]) -> None:
        self.pages = RunMap(pages)
        self.counters = CacheCounters()
        self._state_bytes = state_bytes
        self._states: dict[bytes, KeptState] = {}
        self._evicted: deque[bytes] = deque(maxlen=REMEMBERED_EVICTIONS)
        self._clock = itertools.count(1)

    @property
    def states(self) -> list[KeptState]:
        return list(self._states.values())

    @property
    def held_bytes(self) -> int:
        """Bytes of the pages that kept states hold; the rest of the budget is spare."""
        return (self.pages.total - self.pages.free) * SNAPSHOT_PAGE

    @property
    def spare_bytes(self) -> int:
        return self.pages.free * SNAPSHOT_PAGE

    def lookup(self, tokens: bytes) -> Lookup:
        """The longest ready state that leaves at least one row of the prompt to run."""
        best: KeptState | None = None
        shared = 0
        for state in self._states.values():
            if not state.ready:
                continue
            if len(state.tokens) < len(tokens) and tokens.startswith(state.tokens):
                if best is None or state.at > best.at:
                    best = state
            elif tokens[: 4 * shared + 4] == state.tokens[: 4 * shared + 4]:
                shared = max(shared, common(tokens, state.tokens))
        reach = best.at if best else 0
        shared = min(shared, len(tokens) // 4 - 1)  # a row is left to run, also of a prompt that a longer state holds
        shared = shared if shared > reach else 0
        missed = f"diverged at token {shared}" if shared else None
        reach = max(reach, shared)
        gone = [t for t in self._evicted if 4 * reach < len(t) < len(tokens) and tokens.startswith(t)]
        return Lookup(best, shared, "evicted" if gone else missed)

    def resume(self, state: KeptState, tokens: bytes) -> None:
        """Pin a state for a stream that starts from it; LeaseError when it isn't what it says."""
        if not state.ready or len(state.tokens) != 4 * state.at or digest(tokens[: 4 * state.at]) != state.digest:
            raise LeaseError(f"a kept state of {state.at} tokens doesn't belong to the prompt that resumes it")
        state.pins += 1
        state.last_used = next(self._clock)

    def hit(self, state: KeptState) -> None:
        """The restore has succeeded."""
        self.counters.hits[state.mark] += 1
        self.counters.tokens_saved[state.mark] += state.at

    def unpin(self, state: KeptState) -> None:
        state.pins -= 1

    def reserve(self, tokens: bytes, mark: Mark, conv_rows: int) -> KeptState | None:
        """Lease pages for a state that is about to be made; evicts what it must, or nothing.

        None: the same state is there (or being made) already, or it can't fit.
        """
        known = self._states.get(tokens)
        if known is not None:
            if known.ready:
                known.last_used = next(self._clock)
                known.mark = min(known.mark, mark, key=lambda m: m.rank)
            if mark not in CHAT_ENDS:
                known.lasting, known.superseded = True, False
            return None
        at = len(tokens) // 4
        need = self._pages_for(at, conv_rows)
        if not self._make_room(need):
            self.counters.refusals[mark] += 1
            return None
        runs = self.pages.lease(need)
        if runs is None:
            raise LeaseError(f"{need} snapshot pages were made free and can't be leased")
        state = KeptState(tokens, at, mark, runs, conv_rows, next(self._clock), max(0, at - conv_rows))
        state.lasting = mark not in CHAT_ENDS
        self._states[tokens] = state
        return state

    def fits(self, at: int, conv_rows: int) -> bool:
        """Whether the budget can hold such a state at all."""
        return self._pages_for(at, conv_rows) <= self.pages.total

    def _pages_for(self, at: int, conv_rows: int) -> int:
        return -(-self._state_bytes(at, conv_rows) // SNAPSHOT_PAGE)

    def _make_room(self, need: int) -> bool:
        """Evict superseded states, then the least recently used, until `need` pages are free."""
        if need > self.pages.total:
            return False
        victims = [state for state in self._states.values() if state.copied and not state.pins]
        if need > self.pages.free + sum(state.pages for state in victims):
            return False
        for state in sorted(victims, key=lambda state: (not state.superseded, state.last_used)):
            if need <= self.pages.free:
                break
            self.counters.evictions[state.mark] += 1
            self._evicted.append(state.tokens)
            self.drop(state)
        return True

    def complete(self, state: KeptState) -> None:
        """The copy has succeeded: the state can hit, and states of the same chat that it extends are superseded."""
        state.copied = state.ready = True
        state.digest = digest(state.tokens)  # no sooner: here the device is busy
        self.counters.keeps[state.mark] += 1
        if state.mark in CHAT_ENDS:
            for other in self._states.values():
                if not other.lasting and other.at < state.at and state.tokens.startswith(other.tokens):
                    other.superseded = True

    def holds(self, state: KeptState) -> bool:
        """Whether a state is still there: one that waits may have been evicted."""
        return self._states.get(state.tokens) is state

    def cut(self, state: KeptState, at: int) -> bool:
        """Shorten a state that can't hit yet to its first `at` tokens; False when that state is there already.

        The K/V rows beyond stay in its pages and are never read; pages that this frees are given back when it goes.
        """
        tokens = state.tokens[: 4 * at]
        if at < 1 or tokens in self._states:
            return False
        del self._states[state.tokens]
        state.tokens, state.at = tokens, at
        self._states[tokens] = state
        return True

    def failed(self, state: KeptState) -> None:
        """A copy has failed: nothing of the state is left."""
        self.counters.failures += 1
        self.drop(state)

    def drop(self, state: KeptState) -> None:
        """Forget a state and give its pages back; harmless when it is gone already."""
        if self.holds(state):
            del self._states[state.tokens]
            self.pages.release(state.runs)

    def clear(self) -> int:
        """Drop every state that nobody resumes or makes; returns how many."""
        gone = [state for state in self._states.values() if state.copied and not state.pins]
        for state in gone:
            self.drop(state)
        return len(gone)
