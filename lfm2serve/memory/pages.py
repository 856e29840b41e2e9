"""The page pool: K/V pages leased to streams, in order, never twice."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field

from kernels_numba.batch import PAGE_ROWS
from lfm2serve.errors import LeaseError

SLACK_ROWS = 16  # the widest verify window, leased beyond prompt + reply limit


def pages_for(rows: int) -> int:
    """Pages that hold `rows` positions."""
    return -(-rows // PAGE_ROWS)


@dataclass(frozen=True, slots=True)
class Lease:
    """Pages owned by one stream, in the order of its positions; `rows` positions may be written."""

    stream: int
    pages: tuple[int, ...]
    rows: int


@dataclass(frozen=True, slots=True)
class Census:
    """total = free + leased, in pages. promised: pages owed to streams that wait. streams: leased pages by stream."""

    total: int
    free: int
    leased: int
    promised: int
    streams: dict[int, int] = field(default_factory=dict)

    @property
    def clean(self) -> bool:
        """What must hold after every drain."""
        return self.promised == 0 and self.free == self.total and self.leased == 0 and not self.streams


class PagePool:
    """Leases pages to streams: at once, or in the order in which they asked.

    A request that doesn't fit now is promised its pages and waits in line; nobody behind it is served first. With
    `range_pages` above 1 (`--kv fixed`) pages are handed out as contiguous ranges of that length, one a lease.
    Not thread-safe: one thread (the engine's) uses it.
    """

    def __init__(self, pages: int, range_pages: int = 1) -> None:
        if range_pages < 1 or pages < range_pages:
            raise ValueError(f"a pool of {pages} pages has no range of {range_pages}")
        self.range_pages = range_pages
        self._units = pages // range_pages
        self._free = list(range(self._units - 1, -1, -1))  # a stack: the page used last is handed out first
        self._leases: dict[int, Lease] = {}
        self._line: OrderedDict[int, int] = OrderedDict()  # stream -> rows it waits for

    @property
    def total(self) -> int:
        return self._units * self.range_pages

    @property
    def capacity_rows(self) -> int:
        """Rows of the largest lease that the empty pool can grant."""
        return (self.total if self.range_pages == 1 else self.range_pages) * PAGE_ROWS

    def shuffle(self, seed: int) -> None:
        """Hand the free pages out in a random order: by the law no reply may notice."""
        random.Random(seed).shuffle(self._free)

    def _units_for(self, rows: int) -> int:
        return pages_for(rows) if self.range_pages == 1 else 1

    def ask(self, stream: int, rows: int) -> Lease | None:
        """Lease pages for `rows` positions, or wait in line (None: ask again later, the place is kept).

        LeaseError: the stream holds a lease already, or the pool could never grant this one.
        """
        if stream in self._leases:
            raise LeaseError(f"stream {stream} asked for pages and holds {len(self._leases[stream].pages)}")
        if not 1 <= rows <= self.capacity_rows:
            raise LeaseError(f"stream {stream} asked for {rows} rows of a pool that leases {self.capacity_rows}")
        self._line.setdefault(stream, rows)
        units = self._units_for(self._line[stream])
        if next(iter(self._line)) != stream or units > len(self._free):
            return None
        rows = self._line.pop(stream)
        taken = [self._free.pop() for _ in range(units)]
        pages = tuple(unit * self.range_pages + i for unit in taken for i in range(self.range_pages))
        lease = self._leases[stream] = Lease(stream, pages, rows)
        return lease

    def release(self, stream: int) -> None:
        """Give back a stream's pages, or its place in the line. A second call is harmless."""
        self._line.pop(stream, None)
        lease = self._leases.pop(stream, None)
        if lease is not None:  # on top of the stack as they lay there
            firsts = lease.pages[:: self.range_pages]
            self._free.extend(page // self.range_pages for page in reversed(firsts))

    def upcoming(self) -> Iterator[int]:
        """The free pages in the order in which they will be handed out."""
        for unit in reversed(self._free):
            yield from range(unit * self.range_pages, (unit + 1) * self.range_pages)

    def census(self) -> Census:
        streams = {lease.stream: len(lease.pages) for lease in self._leases.values()}
        free = len(self._free) * self.range_pages
        promised = sum(self._units_for(rows) * self.range_pages for rows in self._line.values())
        return Census(self.total, free, sum(streams.values()), promised, streams)
