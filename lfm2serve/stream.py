"""One request's life inside the engine, and the events that tell the world about it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from lfm2serve.drafting import Drafter
from lfm2serve.errors import Lfm2Error
from lfm2serve.limits import AT_ONCE
from lfm2serve.memory.pages import Lease
from lfm2serve.memory.prompt_cache import KeptState, Mark
from lfm2serve.sampling import SamplingParams
from lfm2serve.structured import Constraint


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probability and rank (1 = most likely) of one token, and the most likely tokens, best first."""

    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]


@dataclass(slots=True)
class StreamMetrics:
    """Times are time.monotonic() seconds; counts are tokens.

    cache_hit: kind of mark whose kept state was resumed; cache_missed: why a longer one wasn't ("diverged at token k",
    "evicted").
    """

    arrival: float
    prompt_tokens: int
    admitted: float | None = None
    first_token: float | None = None
    finished: float | None = None
    cached_tokens: int = 0
    cache_hit: str | None = None
    cache_missed: str | None = None
    output_tokens: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0


@dataclass(slots=True)
class StreamEvent:
    """What happened to a stream in one turn of the engine.

    tokens: new ones, in order (the eos or stop token that ends a reply is among them); logprobs: one entry a token
    when asked for; prompt_logprobs: once, the first entry is None. finish_reason is None while the stream runs, then
    "stop", "length", "abort" or "error"; stop_reason: the entry of stop_token_ids that ended it.
    """

    stream_id: int
    metrics: StreamMetrics
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    finish_reason: str | None = None
    stop_reason: int | None = None
    error: Lfm2Error | None = None


Sink = Callable[[StreamEvent], None]


class Stream:
    """A reply in the making: its tokens, how many of their rows have run, and when it ends.

    `tokens` is the prompt and the reply so far; `rows_done` of them have K/V rows and conv states. A decode row is
    the case of one row left; a prompt chunk is the case of many. Setting rows_done to 0 starts afresh, and by the
    law the reply doesn't change. `rows_written` is one past the highest row that ran, refused drafts included;
    `first_input` is the lowest position whose conv input the state that it started from brought along.
    """

    def __init__(
        self,
        stream_id: int,
        prompt: Sequence[int],
        params: SamplingParams,
        sink: Sink,
        *,
        max_tokens: int,
        seed: int,
        choice: int,
        eos_token_ids: frozenset[int],
        marks: Sequence[tuple[int, Mark]] = (),
        keeps: bool = False,
        chat: bool = False,
        drafts: bool = False,
        background: bool = False,
        constraint: Constraint | None = None,
    ) -> None:
        self.id = stream_id
        self.tokens = list(prompt)
        whole = _in_parts(self.tokens)  # made here, since the engine's thread has others waiting
        self.prompt_len = len(self.tokens)
        self.params = params
        self.sink = sink
        self.max_tokens = max_tokens
        self.seed = seed % 2**64
        self.choice = choice
        self.eos = frozenset() if params.ignore_eos else eos_token_ids
        self.stop_ids = frozenset(params.stop_token_ids)
        self.banned_early = sorted(self.eos | self.stop_ids) if params.min_tokens else []
        self.metrics = StreamMetrics(arrival=time.monotonic(), prompt_tokens=self.prompt_len)
        self.rows_done = 0
        self.rows_written = 0
        self.first_input = 0
        self.slot = -1
        self.lease: Lease | None = None
        self.alone = False  # after a failed step: runs by itself until its rows are back
        self.cancelled = False
        self.finish_reason: str | None = None
        self.stop_reason: int | None = None
        self.scored: list[TokenLogprobs | None] | None = [None] if params.prompt_logprobs is not None else None
        self.marks = marks
        self.keeps = keeps  # states are kept for later turns
        self.chat = chat  # its reply comes back as the chat template renders it
        self.constraint = constraint
        self.background = background  # prepares a state; draws nothing
        self.drafter = Drafter(whole) if drafts else None
        self.prompt_bytes = whole.tobytes()  # as the prompt cache compares them
        self.planned: dict[int, KeptState] = {}  # states to keep on the way, by position

    @property
    def rows_left(self) -> int:
        """Rows that have to run before the next token can be drawn."""
        return len(self.tokens) - self.rows_done

    def next_rows(self, count: int) -> list[int]:
        """The tokens of the next `count` rows."""
        return self.tokens[self.rows_done : self.rows_done + count]

    @property
    def output_len(self) -> int:
        return len(self.tokens) - self.prompt_len

    @property
    def scoring(self) -> bool:
        """Whether prompt rows still need their log-probabilities."""
        return self.scored is not None and len(self.scored) < self.prompt_len

    def bans(self, ahead: int) -> list[int]:
        """Token ids that may not be drawn after `ahead` draft tokens."""
        return self.banned_early if self.output_len + ahead < self.params.min_tokens else []

    def append(self, token: int) -> None:
        """Take a drawn token and settle whether it ends the reply."""
        self.tokens.append(token)
        if self.constraint is not None:
            self.constraint.accept(token)
        count = self.metrics.output_tokens = self.output_len
        if self.metrics.first_token is None:
            self.metrics.first_token = time.monotonic()
        if token in self.eos or token in self.stop_ids:
            self.finish_reason = "stop"
            self.stop_reason = token if token in self.stop_ids and token not in self.eos else None
        elif count >= self.max_tokens:
            self.finish_reason = "length"

    def event(self, **changes: object) -> StreamEvent:
        """An event of this stream; a last one carries its own copy of the metrics."""
        metrics = replace(self.metrics) if changes.get("finish_reason") else self.metrics
        return StreamEvent(self.id, metrics, **changes)  # type: ignore[arg-type]


def _in_parts(tokens: list[int]) -> NDArray[np.int32]:
    """The tokens as an array; between its parts the engine's thread gets to run."""
    whole = np.empty(len(tokens), "<i4")
    for start in range(0, len(tokens), AT_ONCE):
        whole[start : start + AT_ONCE] = tokens[start : start + AT_ONCE]
        if start:
            time.sleep(0)
    return whole
