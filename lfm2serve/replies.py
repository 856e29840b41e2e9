"""Requests of one library call: submitted together, collected as they come, cancelled as one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue

from lfm2serve.chat.reply_parts import Reading
from lfm2serve.conversation import Conversation, message_of
from lfm2serve.errors import EngineDead
from lfm2serve.outputs import RequestMetrics, RequestOutput
from lfm2serve.reply import ReplyBuilder, ReplyDelta
from lfm2serve.runtime import Runtime
from lfm2serve.sampling import SamplingParams
from lfm2serve.stream import StreamEvent
from lfm2serve.structured import Grammar, Thinking

ALIVE_CHECK_S = 1.0  # how often a wait for tokens looks whether the engine still lives


@dataclass(slots=True)
class Choice:
    """One reply: the engine's events go in, text comes out of `builder`.

    `ended` is set on the engine's thread with the last event: the reply's pages are back.
    """

    builder: ReplyBuilder
    stream_id: int | None = None
    cancelled: bool = False
    ended: bool = False
    returned: bool = False  # the engine knows how the conversation goes on


@dataclass(slots=True)
class Request:
    """One prompt of a call, and the conversation that it is of, if any, with how its replies are read.

    Its choices share the seed and differ by their index. prompt_cache and draft may switch these off. grammar: what
    they follow.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    params: SamplingParams
    seed: int
    conversation: Conversation | None = None
    reading: Reading | None = None
    grammar: Grammar | None = None
    prompt_cache: bool = True
    draft: bool = True
    choices: list[Choice] = field(default_factory=list)
    unread: int = 0  # choices whose last event hasn't been taken

    def output(self) -> RequestOutput:
        """The replies so far, in vLLM's shape."""
        builders = [choice.builder for choice in self.choices]
        metrics = [builder.metrics for builder in builders if builder.metrics is not None]
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=self.prompt_token_ids,
            outputs=[builder.completion(index) for index, builder in enumerate(builders)],
            finished=self.unread == 0,
            prompt_logprobs=builders[0].prompt_logprobs,
            num_cached_tokens=metrics[0].cached_tokens if metrics else 0,
            seed=self.seed,
            metrics=RequestMetrics.of(metrics) if metrics else None,
        )


class Replies:
    """The requests of one call while they run. Used by one thread; the engine's thread only fills the queue."""

    def __init__(self, runtime: Runtime, requests: Sequence[Request]) -> None:
        self._engine = runtime.engine
        self._requests = list(requests)
        self.ended_requests = 0
        self._queue: SimpleQueue[tuple[Request, Choice, StreamEvent]] = SimpleQueue()
        for request in self._requests:
            grammar, reading = request.grammar, request.reading
            reading = grammar.reading(reading) if grammar is not None else reading
            request.choices = [
                Choice(ReplyBuilder(runtime.tokenizer, request.params, request.prompt_token_ids, reading))
                for _ in range(request.params.n)
            ]
            request.unread = request.params.n

    def start(self) -> None:
        """Submit every choice. A request that can't be served raises before any of them runs."""
        for request in self._requests:
            self._engine.check(request.prompt_token_ids, request.params)
        try:
            for request in self._requests:
                for index, choice in enumerate(request.choices):
                    self._submit(request, choice, index)
        except BaseException:
            self.cancel()
            raise

    def _submit(self, request: Request, choice: Choice, index: int) -> None:
        engine, queue = self._engine, self._queue

        def sink(event: StreamEvent) -> None:
            if choice.cancelled and event.finish_reason is None:
                engine.cancel(event.stream_id)  # interrupted between the submission and the note of its id
            choice.ended = event.finish_reason is not None
            queue.put((request, choice, event))

        thinking = request.conversation.thinking if request.conversation is not None else Thinking.NEVER
        choice.stream_id = engine.submit(
            request.prompt_token_ids,
            request.params,
            sink,
            seed=request.seed,
            choice=index,
            marks=request.conversation.marks if request.conversation is not None else None,
            prompt_cache=request.prompt_cache,
            draft=request.draft,
            constraint=request.grammar.start(thinking) if request.grammar is not None else None,
        )

    @property
    def ended(self) -> bool:
        return self.ended_requests == len(self._requests)

    def next(self) -> tuple[Request, ReplyDelta]:
        """Wait for what is new. An error of a choice, or an interrupt of the wait, cancels them all."""
        try:
            return self._take()
        except BaseException:
            self.cancel()
            raise

    def _take(self) -> tuple[Request, ReplyDelta]:
        request, choice, event = self._next_event()
        if event.error is not None:
            raise event.error
        delta = choice.builder.feed(event)
        if choice.builder.finish_reason is not None and not choice.ended and not choice.cancelled:
            self._cancel(choice, whole=True)  # a stop string: the engine doesn't know of it
        if delta.finish_reason in ("stop", "tool_calls", "length") and request.conversation is not None:
            assert choice.stream_id is not None
            request.conversation.answered(choice.stream_id, message_of(choice.builder))
            choice.returned = True
        return request, delta

    def _next_event(self) -> tuple[Request, Choice, StreamEvent]:
        while True:
            try:
                request, choice, event = self._queue.get(timeout=ALIVE_CHECK_S)
            except Empty:
                if not self._engine.alive and self._queue.empty():
                    raise EngineDead(self._engine.fault or "the engine is closed") from None
                continue
            if event.finish_reason is not None:
                request.unread -= 1
                self.ended_requests += request.unread == 0
            return request, choice, event

    def cancel(self, wait: bool = True) -> None:
        """Cancel what still runs; with `wait`, return only when its pages are back."""
        running = [choice for request in self._requests for choice in request.choices if not choice.ended]
        for choice in running:
            self._cancel(choice)
        for request in self._requests:
            if request.conversation is not None:
                for choice in request.choices:
                    if choice.stream_id is not None and not choice.returned:
                        request.conversation.abandoned(choice.stream_id)
        while wait and any(choice.stream_id is not None and not choice.ended for choice in running):
            try:
                self._queue.get(timeout=ALIVE_CHECK_S)
            except Empty:
                if not self._engine.alive:
                    break
        for request in self._requests:
            request.unread = 0
        self.ended_requests = len(self._requests)

    def _cancel(self, choice: Choice, whole: bool = False) -> None:
        choice.cancelled = True
        if choice.stream_id is not None:
            self._engine.cancel(choice.stream_id, whole=whole)
