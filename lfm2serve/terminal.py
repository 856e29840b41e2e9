"""What the user sees while waiting: one progress line on standard error, in a terminal or a notebook."""

from __future__ import annotations

import functools
import sys
import time
from types import TracebackType
from typing import Any, Self, TextIO

BAR_CELLS = 24
REDRAW_S = 0.1


def is_watched(stream: TextIO) -> bool:
    """Whether somebody looks at this stream while it is written: a terminal, or a notebook's cell."""
    return stream.isatty() or type(stream).__module__.partition(".")[0] == "ipykernel"


def human_bytes(count: float) -> str:
    """1234567 -> "1.2 MB" (powers of 1000)."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.2f} TB"


def human_time(seconds: float) -> str:
    """75.2 -> "1:15"."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02d}"


class ProgressLine:
    """A bar that is redrawn in place; silent where nobody watches standard error.

    total: of whatever `update` counts. The line stays when the block is left, with the time it took.
    """

    def __init__(self, title: str, total: int, *, enabled: bool = True) -> None:
        self._title = title
        self._total = total
        self._stream = sys.stderr
        self._enabled = enabled and is_watched(self._stream)
        self._started = time.monotonic()
        self._drawn = self._started  # what is done at once needs no bar on the way
        self._width = 0
        self._done = 0
        self._note = ""

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self._started

    def update(self, done: int, note: str) -> None:
        """Set how much is done and what is said beside the bar."""
        self._done, self._note = done, note
        if self._enabled and time.monotonic() - self._drawn >= REDRAW_S:
            self._draw()

    def _draw(self) -> None:
        self._drawn = time.monotonic()
        filled = BAR_CELLS if self._total == 0 else BAR_CELLS * self._done // self._total
        line = f"{self._title} {'━' * filled}{'╌' * (BAR_CELLS - filled)} {self._note} {human_time(self.elapsed)}"
        self._stream.write("\r" + line.ljust(self._width))
        self._stream.flush()
        self._width = len(line)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._enabled and self._note:
            self._draw()
            self._stream.write("\n")
            self._stream.flush()


class LoadProgress:
    """Bytes and time of loading weights, for load_runtime's `progress`."""

    def __init__(self, *, enabled: bool = True) -> None:
        self._enabled = enabled
        self._line: ProgressLine | None = None

    def __call__(self, done: int, total: int) -> None:
        if self._line is None:
            self._line = ProgressLine("Loading weights", total, enabled=self._enabled)
        rate = done / max(self._line.elapsed, 1e-3)
        self._line.update(done, f"{human_bytes(done)} of {human_bytes(total)}, {human_bytes(rate)}/s,")
        if done >= total:
            self._line.__exit__(None, None, None)


@functools.cache
def announce_compiling() -> None:
    """From now on say once, where somebody watches, why the first start on a machine is slow."""
    from numba.core import event

    class Announcer(event.Listener):
        said = False

        def on_start(self, event: Any) -> None:
            ours = event.data["dispatcher"].py_func.__module__.startswith("kernels_numba")
            if ours and not self.said and is_watched(sys.stderr):
                print("Compiling kernels for this processor (once, about a minute) ...", file=sys.stderr, flush=True)
                self.said = True

        def on_end(self, event: Any) -> None:
            pass

    event.register("numba:compile", Announcer())  # type: ignore[no-untyped-call]
