"""Who runs next: admission in order, prompt steps that respect running streams, decode rounds over all of them."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from lfm2serve.errors import ArenaMemory
from lfm2serve.memory.arena import Arena
from lfm2serve.memory.pages import SLACK_ROWS, PagePool
from lfm2serve.stream import Stream

EVEN_ROWS = 64  # a product's tiles
MARGIN = 0.9  # of the longest gap: a step takes longer the more tokens are behind it
MIN_ROWS = 8  # a prompt step is never smaller, however short the gap that is asked for


@dataclass(frozen=True, slots=True)
class Chunk:
    """The next `rows` rows of a stream, and the draft tokens that are tried behind them."""

    stream: Stream
    rows: int
    draft: Sequence[int] = ()

    @property
    def completes(self) -> bool:
        """Whether the next token can be drawn when these rows have run."""
        return self.rows == self.stream.rows_left


class Pace:
    """How many prompt rows fit between two decode rounds, learned from the steps that ran.

    A step's time is a line over its rows, fitted to the last ones: where every expert is read, few rows cost almost as
    much as many. It is trusted for twice the rows that were ever timed, no further; and beyond the last step's rows
    each is taken to cost what it did there. round_s: what a decode round takes.
    """

    def __init__(self, max_gap_s: float, largest: int) -> None:
        self.round_s = 0.0
        self._max_gap_s = max_gap_s
        self._largest = largest
        self._steps = 0
        self._last_row_s = 0.0  # of the last step
        self._last_rows = 0
        self._most = 0  # rows of the largest step that was timed
        self._rows = self._seconds = self._rows_rows = self._rows_seconds = 0.0  # means over the last steps

    def prompt_step(self, rows: int, seconds: float) -> None:
        self._steps += 1
        self._last_rows, self._last_row_s = rows, seconds / rows
        self._most = max(self._most, rows)
        share = max(1.0 / self._steps, 0.2)
        self._rows += share * (rows - self._rows)
        self._seconds += share * (seconds - self._seconds)
        self._rows_rows += share * (rows * rows - self._rows_rows)
        self._rows_seconds += share * (rows * seconds - self._rows_seconds)

    def decode_round(self, seconds: float) -> None:
        self.round_s = _blend(self.round_s, seconds)

    def rows_beside_decoding(self) -> int:
        """Rows that keep a running stream's gap under the bound; few until a step was timed."""
        if not self._seconds:
            return min(4 * MIN_ROWS, self._largest)
        fixed, row_s = self._line()
        spare = MARGIN * self._max_gap_s - self.round_s
        rows = int((spare - fixed) / row_s)
        if rows > self._last_rows and self._last_row_s:
            rows = max(self._last_rows, min(rows, int(spare / self._last_row_s)))
        rows = rows // MIN_ROWS * MIN_ROWS
        return max(MIN_ROWS, min(rows, 2 * self._most, self._largest))

    def _line(self) -> tuple[float, float]:
        """Seconds of a step: fixed, and for each row."""
        spread = self._rows_rows - self._rows**2
        if spread > (0.05 * self._rows) ** 2:
            row_s = (self._rows_seconds - self._rows * self._seconds) / spread
            fixed = self._seconds - row_s * self._rows
            if row_s > 0.0 and fixed > 0.0:
                return fixed, row_s
        return 0.0, self._seconds / self._rows


def _blend(old: float, new: float) -> float:
    return new if not old else 0.8 * old + 0.2 * new


class Scheduler:
    """The queue, the slots and the streams in flight. Decides; runs nothing.

    waiting: no slot yet, in order of arrival; the first may have a lease whose pages are given memory. filling: rows of
    the prompt left, oldest first. running: decoding. background: passes that prepare states, run one at a time
    (`warming`) while nothing else is there.
    """

    def __init__(
        self, pool: PagePool, arena: Arena, slots: int, *, prompt_chunk: int | None, largest_chunk: int,
        max_gap_s: float,
    ) -> None:  # fmt: skip
        self.pool = pool
        self.arena = arena
        self.waiting: deque[Stream] = deque()
        self.filling: list[Stream] = []
        self.running: list[Stream] = []
        self.background: deque[Stream] = deque()
        self.warming: Stream | None = None
        self.pace = Pace(max_gap_s, largest_chunk)
        self._free_slots = list(range(slots - 1, -1, -1))
        self._prompt_chunk = prompt_chunk
        self._largest = largest_chunk
        self._short = False  # the device has no memory for the next lease, until something ends

    @property
    def idle(self) -> bool:
        return not (self.foreground or self.background or self.warming)

    @property
    def preparing(self) -> list[Stream]:
        """The passes that prepare states, the one that runs first."""
        return [*([self.warming] if self.warming else []), *self.background]

    @property
    def foreground(self) -> bool:
        """Whether anybody waits for a token."""
        return bool(self.waiting or self.filling or self.running)

    def admit(self) -> list[Stream]:
        """Lease pages and a slot to the streams at the head of the queue that fit now.

        ArenaMemory: the device has no memory for the first one's pages, and nobody runs who could make room.
        """
        admitted = []
        while self.waiting and self._free_slots:
            stream = self.waiting[0]
            if not self._seat(stream):
                break
            self.waiting.popleft()
            self.filling.append(stream)
            admitted.append(stream)
        return admitted

    def admit_background(self) -> Stream | None:
        """Start the oldest background pass, if nobody else is there and none runs. ArenaMemory as in `admit`."""
        if self.foreground or self.warming or not self.background or not self._seat(self.background[0]):
            return None
        self.warming = self.background.popleft()
        return self.warming

    def _seat(self, stream: Stream) -> bool:
        beside = bool(self.filling or self.running)
        if self._short and beside:
            return False
        if stream.lease is None:
            stream.lease = self.pool.ask(stream.id, stream.prompt_len + stream.max_tokens + SLACK_ROWS)
        if stream.lease is None:
            return False
        try:
            if not self.arena.ready(stream.lease.pages, alone=not beside):
                return False
        except ArenaMemory:
            self.pool.release(stream.id)
            stream.lease = None
            self._short = True
            if beside:
                return False
            raise
        stream.slot = self._free_slots.pop()
        stream.metrics.admitted = time.monotonic()
        return True

    def next_chunks(self) -> list[Chunk]:
        """The rows of the next prompt step: of the oldest filling streams, packed up to the budget."""
        if not self.filling:
            if self.warming is None or self.foreground:
                return []
            return [Chunk(self.warming, min(self.warming.rows_left, self.pace.rows_beside_decoding()))]
        first = self.filling[0]
        if first.alone:
            return [Chunk(first, min(first.rows_left, self._budget([first])))]
        budget = self._budget(self.filling)
        chunks = []
        for stream in self.filling:
            rows = min(stream.rows_left, budget)
            if rows == 0 or stream.alone:
                break
            chunks.append(Chunk(stream, rows))
            budget -= rows
        return chunks

    def _budget(self, streams: Sequence[Stream]) -> int:
        """Rows of the next prompt step: as few steps as the largest size allows, of even sizes."""
        if self._prompt_chunk:
            return self._prompt_chunk
        most = self.pace.rows_beside_decoding() if self.running else self._largest
        rows = sum(stream.rows_left for stream in streams)
        even = -(-rows // -(-rows // most))
        return min(most, -(-even // EVEN_ROWS) * EVEN_ROWS)

    def filled(self, stream: Stream) -> None:
        """A stream's prompt rows have all run: it decodes from now on."""
        self.filling.remove(stream)
        stream.alone = False
        self.running.append(stream)

    def restart(self, stream: Stream) -> None:
        """Run a stream's rows again from the first, by itself: what a failed step left behind is overwritten."""
        if stream in self.running:
            self.running.remove(stream)
            self.filling.insert(0, stream)
        stream.rows_done = 0
        stream.alone = True

    def remove(self, stream: Stream) -> None:
        """Forget a stream wherever it is; its pages and slot are free at once."""
        for queue in (self.waiting, self.filling, self.running, self.background):
            if stream in queue:
                queue.remove(stream)
        if self.warming is stream:
            self.warming = None
        self.pool.release(stream.id)
        stream.lease = None
        self._short = False
        self.arena.ahead(self.pool.upcoming())
        if stream.slot >= 0:
            self._free_slots.append(stream.slot)
            stream.slot = -1
