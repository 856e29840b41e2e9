"""Snapshot pages: where kept states live, and the copies that fill and read them.

One arena of 2 MiB pages, allocated once. A kept state is a string of bytes laid over the pages it leases, run by run;
keeping, restoring and dropping one allocates nothing.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from lfm2serve.errors import LeaseError

SNAPSHOT_PAGE = 2 << 20  # bytes


@dataclass(frozen=True, slots=True)
class Run:
    """`count` neighbouring pages (or bytes) from `start` on."""

    start: int
    count: int

    @property
    def end(self) -> int:
        return self.start + self.count


class RunMap:
    """Which of `pages` pages are free, as merged runs; leases as few runs as it can.

    Takes the smallest free run that holds a lease whole, else the largest runs first.
    """

    def __init__(self, pages: int) -> None:
        self.total = pages
        self.free = pages
        self._starts = [0] if pages else []  # free runs, in order, never touching
        self._counts = {0: pages} if pages else {}

    def lease(self, count: int) -> tuple[Run, ...] | None:
        """Pages in ascending runs; None when too few are free. ValueError: count < 1."""
        if count < 1:
            raise ValueError(f"a lease of {count} pages")
        if count > self.free:
            return None
        whole = [start for start in self._starts if self._counts[start] >= count]
        if whole:
            return (self._take(min(whole, key=lambda start: (self._counts[start], start)), count),)
        runs = []
        for start in sorted(self._starts, key=lambda s: (-self._counts[s], s)):
            runs.append(self._take(start, min(count, self._counts[start])))
            count -= runs[-1].count
            if not count:
                break
        return tuple(sorted(runs, key=lambda run: run.start))

    def _take(self, start: int, count: int) -> Run:
        left = self._counts.pop(start) - count
        place = bisect_left(self._starts, start)
        if left:
            self._starts[place] = start + count
            self._counts[start + count] = left
        else:
            del self._starts[place]
        self.free -= count
        return Run(start, count)

    def release(self, runs: Iterable[Run]) -> None:
        """Give pages back; LeaseError when one of them is free already or isn't of this map."""
        for run in runs:
            self._put(run)

    def _put(self, run: Run) -> None:
        place = bisect_left(self._starts, run.start)
        before = self._starts[place - 1] if place else None
        after = self._starts[place] if place < len(self._starts) else None
        overlaps = before is not None and before + self._counts[before] > run.start
        if run.start < 0 or run.end > self.total or overlaps or (after is not None and after < run.end):
            raise LeaseError(f"snapshot pages {run.start}..{run.end} given back twice")
        self.free += run.count
        count = run.count
        if after == run.end:
            count += self._counts.pop(after)
            del self._starts[place]
        if before is not None and before + self._counts[before] == run.start:
            self._counts[before] += count
        else:
            self._starts.insert(place, run.start)
            self._counts[run.start] = count

    def runs(self) -> list[Run]:
        """The free runs, in order."""
        return [Run(start, self._counts[start]) for start in self._starts]


def merge(runs: Iterable[Run]) -> list[Run]:
    """The same bytes in the same order, neighbours joined."""
    merged: list[Run] = []
    for run in runs:
        if merged and merged[-1].end == run.start:
            merged[-1] = Run(merged[-1].start, merged[-1].count + run.count)
        elif run.count:
            merged.append(run)
    return merged


def byte_runs(pages: Iterable[int], page_bytes: int) -> list[Run]:
    """Where a sequence of equally large pages lies, in bytes, neighbours joined."""
    return merge(Run(page * page_bytes, page_bytes) for page in pages)


def copy_plan(source: Sequence[Run], target: Sequence[Run]) -> list[tuple[int, int, int]]:
    """(source offset, target offset, bytes) of the copies that lay source over target, as few as both sides allow.

    ValueError: the target is shorter than the source.
    """
    source, target = merge(source), merge(target)
    copies = []
    place, used = 0, 0
    for run in source:
        done = 0
        while done < run.count:
            if place == len(target):
                raise ValueError("the target is shorter than the source")
            size = min(run.count - done, target[place].count - used)
            copies.append((run.start + done, target[place].start + used, size))
            done += size
            used += size
            if used == target[place].count:
                place, used = place + 1, 0
    return copies


def cut(runs: Sequence[Run], start: int, count: int) -> list[Run]:
    """The part [start, start + count) of the string that lies over `runs`."""
    parts = []
    for run in runs:
        low, high = max(start, 0), min(start + count, run.count)
        if low < high:
            parts.append(Run(run.start + low, high - low))
        start -= run.count
    return parts
