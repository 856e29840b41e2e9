"""How many replies may be in flight: what comes beyond is refused at once, with a hint when to come back."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from lfm2serve.errors import InvalidRequest
from lfm2serve.server.errors import QueueFull

REMEMBERED_ENDS = 32
LONGEST_WAIT_S = 60


class Places:
    """`running` replies that may run at once and `waiting` behind them. One thread (the event loop's) uses it."""

    def __init__(self, running: int, waiting: int) -> None:
        self.total = running + waiting
        self.taken = 0
        self._waiting = waiting
        self._ends: deque[float] = deque(maxlen=REMEMBERED_ENDS)

    @contextmanager
    def take(self, count: int) -> Iterator[None]:
        """Hold `count` places. InvalidRequest: more than there are. QueueFull: more than are free."""
        if count > self.total:
            raise InvalidRequest(f"{count} replies in one request; {self.total} may be in flight here", param="n")
        self.check(count)
        self.taken += count
        try:
            yield
        finally:
            self.taken -= count
            self._ends.extend([time.monotonic()] * min(count, REMEMBERED_ENDS))

    def check(self, count: int = 1) -> None:
        """QueueFull where `count` places aren't free."""
        if self.taken + count > self.total:
            message = f"{self.taken} replies are in flight and {self.total} may be (--max-queue); try again later"
            raise QueueFull(message, self._retry_after_s())

    def _retry_after_s(self) -> int:
        """How long the queue takes at the pace of the latest replies' ends."""
        pace = (time.monotonic() - self._ends[0]) / len(self._ends) if self._ends else 1.0
        return min(LONGEST_WAIT_S, max(1, math.ceil(pace * self._waiting)))
