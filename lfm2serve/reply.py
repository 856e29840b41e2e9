"""One reply in the making: the engine's events in, text out. The library and the server share it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from lfm2serve.chat.detokenize import Detokenizer, StopStrings
from lfm2serve.chat.reply_parts import Parts, Reading, ReplyParts, with_marks
from lfm2serve.chat.tokenizer import Tokenizer
from lfm2serve.chat.tool_calls import ToolCall, ToolCallDelta
from lfm2serve.errors import Lfm2Error
from lfm2serve.outputs import CompletionOutput, Logprob
from lfm2serve.sampling import SamplingParams
from lfm2serve.stream import StreamEvent, StreamMetrics, TokenLogprobs

LEAST_LOGPROB = -9999.0  # JSON knows no -inf


@dataclass(slots=True)
class ReplyDelta:
    """What one event adds to a reply. logprobs: one entry of `token_ids` each, when asked for.

    A chat's text is what is said; reasoning is the thought, without its tags.
    """

    text: str = ""
    reasoning: str = ""
    tool_calls: list[ToolCallDelta] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class ReplyBuilder:
    """Takes the events of one stream and grows its reply.

    A stop string ends the reply before the engine knows: finish_reason is then "stop", stop_reason the string, later
    events add nothing, and the caller cancels the stream. token_ids and logprobs keep every token up to the one that
    completed the stop string. Like vLLM, stop strings don't count within the first min_tokens tokens, and the text of
    the token that ended the reply is left out (a stop token's is kept with include_stop_str_in_output).

    reading: how a chat's reply is taken apart into text, reasoning and tool_calls; None: all of it is text. Stop
    strings look at the whole. A reply that made a call and stopped by itself has finish_reason "tool_calls".
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        params: SamplingParams,
        prompt_token_ids: Sequence[int] = (),
        reading: Reading | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._params = params
        self._prompt = prompt_token_ids
        marks = reading.marks(tokenizer) if reading is not None else {}
        self._detokenizer = Detokenizer(tokenizer, params.skip_special_tokens, marks)
        self._stop_of = {spelling: stop for stop in params.stop for spelling in with_marks(stop, marks.values())}
        self._stops = StopStrings(list(self._stop_of), params.include_stop_str_in_output) if params.stop else None
        self._parts = ReplyParts(tokenizer, reading) if reading is not None else None
        self._pieces: list[str] = []
        self._thoughts: list[str] = []
        self._calls: list[tuple[str, str, list[str]]] = []  # id, name, pieces of the arguments
        self.token_ids: list[int] = []
        self.logprobs: list[dict[int, Logprob]] | None = None if params.logprobs is None else []
        self.cumulative_logprob: float | None = None if params.logprobs is None else 0.0
        self.prompt_logprobs: list[dict[int, Logprob] | None] | None = None
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.error: Lfm2Error | None = None
        self.metrics: StreamMetrics | None = None

    @property
    def text(self) -> str:
        """The reply so far."""
        return _joined(self._pieces)

    @property
    def reasoning(self) -> str:
        """The thought so far."""
        return _joined(self._thoughts)

    @property
    def tool_calls(self) -> list[ToolCall]:
        """The calls so far."""
        return [ToolCall(call_id, name, _joined(pieces)) for call_id, name, pieces in self._calls]

    def feed(self, event: StreamEvent) -> ReplyDelta:
        """Take one event and say what it adds."""
        self.metrics = event.metrics
        if self.finish_reason is not None:
            return ReplyDelta()
        if event.prompt_logprobs is not None:
            scored = zip(self._prompt, event.prompt_logprobs, strict=True)
            self.prompt_logprobs = [None if entry is None else self._logprobs(token, entry) for token, entry in scored]
        text, kept, hit = self._read(event)
        delta = ReplyDelta(
            token_ids=event.tokens[:kept], finish_reason=event.finish_reason, stop_reason=event.stop_reason
        )
        if hit is not None:
            delta.finish_reason, delta.stop_reason = "stop", self._stop_of[hit]
        self._take_apart(text, delta)
        if self.logprobs is not None and event.logprobs is not None:
            pairs = zip(delta.token_ids, event.logprobs[:kept], strict=True)
            delta.logprobs = [self._logprobs(token, entry) for token, entry in pairs]
        self._take(delta)
        self.error = event.error
        return delta

    def _take_apart(self, text: str, delta: ReplyDelta) -> None:
        """Put a text into the delta, as what it is."""
        if self._parts is None:
            delta.text = text
            return
        self._put(self._parts.push(text), delta)
        if delta.finish_reason is not None:
            self._put(self._parts.finish(), delta)
            if self._parts.called and delta.finish_reason == "stop":
                delta.finish_reason = "tool_calls"

    def _put(self, parts: Parts, delta: ReplyDelta) -> None:
        delta.text += parts.text
        delta.reasoning += parts.reasoning
        for call in parts.calls:
            delta.tool_calls.append(call)
            if call.id is not None and call.name is not None:
                self._calls.append((call.id, call.name, []))
            self._calls[call.index][2].append(call.arguments)

    def _read(self, event: StreamEvent) -> tuple[str, int, str | None]:
        """The text of an event, how many of its tokens belong to the reply, and the stop string that ended it."""
        readable = list(event.tokens)
        if event.finish_reason == "stop" and not self._shows_stop(event):
            del readable[-1:]
        if self._stops is None:
            text = self._detokenizer.push(readable)
            if event.finish_reason is not None:
                text += self._detokenizer.finish()
            return text, len(event.tokens), None
        pieces: list[str] = []
        for count, token in enumerate(readable, start=1):
            search = len(self.token_ids) + count > self._params.min_tokens
            safe, hit = self._stops.push(self._detokenizer.push((token,)), search)
            pieces.append(safe)
            if hit is not None:
                return "".join(pieces), count, hit
        if event.finish_reason is not None:
            safe, hit = self._stops.push(self._detokenizer.finish())
            pieces += [safe, self._stops.finish()]
            return "".join(pieces), len(event.tokens), hit
        return "".join(pieces), len(event.tokens), None

    def _shows_stop(self, event: StreamEvent) -> bool:
        return self._params.include_stop_str_in_output and event.stop_reason is not None

    def _take(self, delta: ReplyDelta) -> None:
        if delta.text:
            self._pieces.append(delta.text)
        if delta.reasoning:
            self._thoughts.append(delta.reasoning)
        self.token_ids += delta.token_ids
        if self.logprobs is not None and self.cumulative_logprob is not None and delta.logprobs is not None:
            self.logprobs += delta.logprobs
            self.cumulative_logprob += sum(
                entry[token].logprob for token, entry in zip(delta.token_ids, delta.logprobs, strict=True)
            )
        self.finish_reason, self.stop_reason = delta.finish_reason, delta.stop_reason

    def _logprobs(self, token: int, entry: TokenLogprobs) -> dict[int, Logprob]:
        """vLLM's shape: the token itself first, then the most likely ones, best first."""
        text = self._tokenizer.token_text
        result = {token: Logprob(max(entry.logprob, LEAST_LOGPROB), entry.rank, text(token))}
        for rank, (other, logprob) in enumerate(entry.top, start=1):
            if other != token:
                result[other] = Logprob(max(logprob, LEAST_LOGPROB), rank, text(other))
        return result

    def completion(self, index: int) -> CompletionOutput:
        """The reply so far in vLLM's shape."""
        return CompletionOutput(
            index=index,
            text=self.text,
            reasoning=self.reasoning or None,
            tool_calls=self.tool_calls,
            token_ids=list(self.token_ids),
            cumulative_logprob=self.cumulative_logprob,
            logprobs=None if self.logprobs is None else list(self.logprobs),
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
        )


def _joined(pieces: list[str]) -> str:
    if len(pieces) > 1:
        pieces[:] = ["".join(pieces)]
    return pieces[0] if pieces else ""
