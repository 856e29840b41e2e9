"""The arena: the page pool's memory, put behind its addresses piece by piece as streams reach it.

The pool's buffer is a reserved range of addresses. A piece of it has memory once the device has created, mapped and
zeroed it; pages and page ids know nothing of pieces. Pieces are only ever mapped for a lease, before any of its rows
runs: by a helper thread while others are served, by the engine's own thread where nobody is.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from itertools import islice
from typing import Protocol

from lfm2serve.errors import ArenaMemory

log = logging.getLogger("lfm2serve.memory")

PIECE_BYTES = 256 << 20
AHEAD = 2  # pieces that are looked after once a stream has ended


class Mapper(Protocol):
    """Memory for parts of one reserved range of addresses; any thread may call it, several at once for several parts.

    map: gives [start, start + nbytes) zeroed memory, or raises with nothing left behind. An error whose `fatal` is true
    says that the device can't be used any more.
    """

    def map(self, start: int, nbytes: int) -> None: ...

    def unmap(self, start: int, nbytes: int) -> None: ...

    def free_bytes(self) -> int: ...


class _State(Enum):
    UNMAPPED = auto()
    QUEUED = auto()
    IN_HAND = auto()
    MAPPED = auto()


@dataclass(frozen=True, slots=True)
class ArenaStats:
    """reserved, mapped: bytes of the pool. by_helper, by_caller: pieces mapped beside running streams, and on a
    caller's own thread; failed: attempts."""

    reserved: int
    mapped: int
    pieces: int
    mapped_pieces: int
    by_helper: int
    by_caller: int
    failed: int


class Arena:
    """Which pieces of a pool of `pages` equally large pages have memory.

    mapper: None where the pool is one allocation (a CPU, whose system does the same by itself; a GPU without virtual
    memory management; `--kv eager`): everything counts as mapped. piece_bytes: the last piece may be smaller. `ready`
    and `ahead` are for one thread at a time (the engine's); `stats` is for any.
    """

    def __init__(
        self, pages: int, page_bytes: int, mapper: Mapper | None = None, *, piece_bytes: int = PIECE_BYTES
    ) -> None:
        self.nbytes = pages * page_bytes
        self._page_bytes = page_bytes
        self._mapper = mapper
        self._piece_bytes = piece_bytes if mapper is not None else max(1, self.nbytes)
        count = -(-self.nbytes // self._piece_bytes)
        self._states = [_State.UNMAPPED if mapper is not None else _State.MAPPED] * count
        self._queue: deque[int] = deque()  # of the helper
        self._wanted: set[int] = set()  # posted for a lease that waits: a failure is told to it
        self._failed: dict[int, Exception] = {}
        self._changed = threading.Condition()  # guards everything here but the mapping itself
        self._by_helper = self._by_caller = self._failures = 0
        self._closing = False
        self._helper: threading.Thread | None = None

    # ---- what the pool's users ask ----

    def pieces_of(self, pages: Iterable[int]) -> Iterator[int]:
        """The pieces under some pages, in the order of the pages, each once."""
        seen = set()
        for page in pages:
            first = page * self._page_bytes
            for piece in range(first // self._piece_bytes, (first + self._page_bytes - 1) // self._piece_bytes + 1):
                if piece not in seen:
                    seen.add(piece)
                    yield piece

    def ready(self, pages: Sequence[int], *, alone: bool) -> bool:
        """Whether all of a lease's pages have memory; asked before any of its rows runs, until it is so.

        alone: nothing else runs, so what is missing is mapped here and now, and on failure what this call has mapped
        is given back. Beside others it is posted to the helper, and the caller asks again later.

        ArenaMemory: the device has no memory for one of them. The caller gives the lease back.
        """
        missing = [piece for piece in self.pieces_of(pages) if self._states[piece] is not _State.MAPPED]
        if missing and alone:
            self._map_all(missing)
        elif missing:
            self._post_wanted(missing)
        return alone or not missing

    def ahead(self, upcoming: Iterable[int], pieces: int = AHEAD) -> None:
        """Post the first `pieces` pieces under the pages that will be handed out next: at load, and after a release.

        What failed before may be tried again from now on.
        """
        if self._mapper is None:
            return
        with self._changed:
            self._failed = {piece: error for piece, error in self._failed.items() if _fatal(error)}
            self._wanted.clear()
            self._post(islice(self.pieces_of(upcoming), pieces))

    def stats(self) -> ArenaStats:
        with self._changed:
            mapped = [piece for piece, state in enumerate(self._states) if state is _State.MAPPED]
            size = sum(self._bounds(piece)[1] for piece in mapped)
            counts = (self._by_helper, self._by_caller, self._failures)
            return ArenaStats(self.nbytes, size, len(self._states), len(mapped), *counts)

    def settle(self, timeout: float | None = None) -> bool:
        """Wait until the helper has nothing to do; False when that took longer than `timeout` s."""
        busy = (_State.QUEUED, _State.IN_HAND)
        with self._changed:
            return self._changed.wait_for(lambda: not any(state in busy for state in self._states), timeout)

    def close(self) -> None:
        """End the helper; the memory stays with the mapper. Idempotent."""
        with self._changed:
            self._closing = True
            self._queue.clear()
            self._changed.notify_all()
        if self._helper is not None:
            self._helper.join()

    # ---- the caller's thread ----

    def _map_all(self, missing: Sequence[int]) -> None:
        done: list[int] = []
        try:
            for piece in missing:
                if self._claim(piece):
                    self._map(piece)
                    done.append(piece)
        except ArenaMemory:
            for piece in reversed(done):
                self._unmap(piece)
            raise

    def _claim(self, piece: int) -> bool:
        """Take a piece in hand, also a queued one; one that the helper has is waited for. False: it has memory now."""
        with self._changed:
            self._changed.wait_for(lambda: self._states[piece] is not _State.IN_HAND)
            if self._states[piece] is _State.MAPPED:
                return False
            self._withdraw(piece)
            self._states[piece] = _State.IN_HAND
            return True

    def _post_wanted(self, missing: Sequence[int]) -> None:
        with self._changed:
            failed = [self._failed.pop(piece) for piece in missing if piece in self._failed]
            if not failed:
                self._wanted.update(missing)
                self._post(missing)
                return
            for piece in missing:
                self._withdraw(piece)
        raise failed[0]

    def _withdraw(self, piece: int) -> None:
        """Nobody waits for the helper to map this piece any more."""
        self._wanted.discard(piece)
        self._failed.pop(piece, None)
        if self._states[piece] is _State.QUEUED:
            self._queue.remove(piece)
            self._states[piece] = _State.UNMAPPED

    def _post(self, pieces: Iterable[int]) -> None:
        for piece in pieces:
            if self._states[piece] is _State.UNMAPPED and not self._closing:
                self._states[piece] = _State.QUEUED
                self._queue.append(piece)
        if self._queue and self._helper is None:
            self._helper = threading.Thread(target=self._help, name="lfm2serve-arena", daemon=True)
            self._helper.start()
        self._changed.notify_all()

    # ---- either thread ----

    def _bounds(self, piece: int) -> tuple[int, int]:
        start = piece * self._piece_bytes
        return start, min(self._piece_bytes, self.nbytes - start)

    def _map(self, piece: int) -> None:
        """Give a piece in hand its memory; only then it counts as mapped."""
        assert self._mapper is not None
        start, nbytes = self._bounds(piece)
        try:
            self._mapper.map(start, nbytes)
        except Exception as error:
            told = error if _fatal(error) else self._out_of_memory(nbytes, error)
            self._finish(piece, _State.UNMAPPED, told)
            if told is error:
                raise
            raise told from error
        self._finish(piece, _State.MAPPED, None)

    def _finish(self, piece: int, state: _State, error: Exception | None) -> None:
        with self._changed:
            self._states[piece] = state
            self._failures += error is not None
            if state is _State.MAPPED and threading.current_thread() is self._helper:
                self._by_helper += 1
            elif state is _State.MAPPED:
                self._by_caller += 1
            if error is not None and (piece in self._wanted or _fatal(error)):
                self._failed[piece] = error
            self._wanted.discard(piece)
            self._changed.notify_all()

    def _out_of_memory(self, asked: int, error: Exception) -> ArenaMemory:
        assert self._mapper is not None
        free = self._mapper.free_bytes()
        return ArenaMemory(
            f"the device has no memory for the next {asked:,} bytes of the page pool, {free:,} are free ({error}); try "
            f"again later, or start with a smaller --memory-limit-gib or --kv-gib",
            asked=asked,
            free=free,
        )

    def _unmap(self, piece: int) -> None:
        assert self._mapper is not None
        self._mapper.unmap(*self._bounds(piece))
        self._finish(piece, _State.UNMAPPED, None)

    # ---- the helper ----

    def _help(self) -> None:
        while (piece := self._next()) is not None:
            try:
                self._map(piece)
            except Exception as error:  # whoever waits for the piece is told by `ready`
                log.warning("a piece of the page pool could not be mapped ahead: %s", error)

    def _next(self) -> int | None:
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._closing)
            if self._closing:
                return None
            piece = self._queue.popleft()
            self._states[piece] = _State.IN_HAND
            return piece


def _fatal(error: Exception) -> bool:
    """Whether the device can't be used any more."""
    return bool(getattr(error, "fatal", False))
