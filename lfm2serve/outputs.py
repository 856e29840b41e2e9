"""What the library gives back: vLLM's names and shapes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lfm2serve.chat.tool_calls import ToolCall
    from lfm2serve.stream import StreamMetrics

SHOWN_CHARACTERS = 60  # of a text, in a repr


@dataclass(slots=True)
class Logprob:
    """Log-probability of one token, of the raw logits over the tokeniser's entries (natural log, at least -9999.0).

    rank: 1 is the most likely token. decoded_token: its text by itself.
    """

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass(slots=True)
class RequestMetrics:
    """Times of one request, in time.monotonic() seconds; None where it didn't come that far. Counts are tokens.

    With several choices: the first one's start, the last one's end, and all their tokens.
    """

    arrival_time: float
    first_scheduled_time: float | None
    first_token_time: float | None
    finished_time: float | None
    num_prompt_tokens: int
    num_cached_tokens: int
    num_generation_tokens: int

    @classmethod
    def of(cls, choices: Sequence[StreamMetrics]) -> RequestMetrics:
        """The metrics of a request from those of its choices (at least one)."""

        def first(times: list[float | None]) -> float | None:
            return min((time for time in times if time is not None), default=None)

        ends = [choice.finished for choice in choices]
        return cls(
            arrival_time=min(choice.arrival for choice in choices),
            first_scheduled_time=first([choice.admitted for choice in choices]),
            first_token_time=first([choice.first_token for choice in choices]),
            finished_time=None if None in ends else max(end for end in ends if end is not None),
            num_prompt_tokens=choices[0].prompt_tokens,
            num_cached_tokens=choices[0].cached_tokens,
            num_generation_tokens=sum(choice.output_tokens for choice in choices),
        )

    @property
    def time_in_queue(self) -> float | None:
        """Seconds until the prompt pass began."""
        return None if self.first_scheduled_time is None else self.first_scheduled_time - self.arrival_time

    @property
    def first_token_latency(self) -> float | None:
        """Seconds until the first token."""
        return None if self.first_token_time is None else self.first_token_time - self.arrival_time

    @property
    def total_time(self) -> float | None:
        """Seconds until the end."""
        return None if self.finished_time is None else self.finished_time - self.arrival_time

    def __repr__(self) -> str:
        times = {
            "time_in_queue": self.time_in_queue,
            "first_token_latency": self.first_token_latency,
            "total_time": self.total_time,
        }
        shown = [f"{name}={seconds:.3f} s" for name, seconds in times.items() if seconds is not None]
        shown.append(f"prompt={self.num_prompt_tokens} tokens ({self.num_cached_tokens} cached)")
        shown.append(f"generated={self.num_generation_tokens} tokens")
        return f"RequestMetrics({', '.join(shown)})"


@dataclass(slots=True)
class CompletionOutput:
    """One reply. token_ids: with the eos or stop token that ended it; text: without.

    logprobs: one entry a token, the chosen token first. stop_reason: the stop string or stop token id that ended it
    (None for eos). finish_reason: "stop", "tool_calls", "length", "abort", "error", or None while it runs.

    A chat's text is what the model says; reasoning is its thought (None: none), tool_calls its calls.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    reasoning: str | None = None
    tool_calls: list[ToolCall] = field(default_factory=list)

    def finished(self) -> bool:
        return self.finish_reason is not None

    def __repr__(self) -> str:
        stop = f", stop_reason={self.stop_reason!r}" if self.stop_reason is not None else ""
        calls = f"calls={[call.name for call in self.tool_calls]}, " if self.tool_calls else ""
        return (
            f"CompletionOutput(index={self.index}, text={_short(self.text)}, {calls}{len(self.token_ids)} tokens, "
            f"finish_reason={self.finish_reason!r}{stop})"
        )


@dataclass(slots=True)
class RequestOutput:
    """The replies to one prompt. prompt: its text (None if it came as ids). seed: repeats the reply."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    num_cached_tokens: int = 0
    seed: int | None = None
    metrics: RequestMetrics | None = None

    def __repr__(self) -> str:
        prompt = f"{len(self.prompt_token_ids)} tokens"
        if self.prompt is not None:
            prompt = f"{_short(self.prompt)} ({prompt})"
        return f"RequestOutput(request_id={self.request_id!r}, prompt={prompt}, outputs={self.outputs!r})"


def _short(text: str) -> str:
    if len(text) <= SHOWN_CHARACTERS:
        return repr(text)
    return f"{text[:SHOWN_CHARACTERS]!r}... ({len(text)} characters)"
