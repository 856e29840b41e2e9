"""The replies of one HTTP request: their streams in the engine, brought to the event loop and never left behind."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
import time
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Self

from anyio import to_thread

from lfm2serve.chat.reply_parts import Reading
from lfm2serve.conversation import Conversation, message_of
from lfm2serve.errors import EngineDead
from lfm2serve.reply import ReplyBuilder, ReplyDelta
from lfm2serve.sampling import SamplingParams
from lfm2serve.server.metrics import ServerMetrics
from lfm2serve.stream import StreamEvent
from lfm2serve.structured import Grammar, Thinking

if TYPE_CHECKING:
    from lfm2serve.runtime import Runtime

log = logging.getLogger(__name__)

REST = 20.0  # of the loop, for each second that it was busy
SHORT_REST_S, LONGEST_REST_S = 0.005, 0.05
LATE_S = 0.02  # behind a long rest, for the engine to begin a round
SHUTTING_DOWN = "the server is shutting down; the reply was cancelled"


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt: its token ids, and its text where it came as text; a chat's has the conversation behind it, and how
    its replies are read."""

    token_ids: list[int]
    text: str | None = None
    conversation: Conversation | None = None
    reading: Reading | None = None


class Bridge:
    """Carries events from the engine's thread to the event loop.

    The events of one turn share one wake-up, and the loop rests for REST times as long as it was busy with the last
    ones; what a reply gained meanwhile becomes one event. With few clients that is nothing; with many it leaves the
    interpreter to the engine. Behind a long rest the loop begins again when the engine posts, which it does when its
    thread is about to leave the interpreter alone for a while.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._posted: deque[tuple[Reply, StreamEvent, float]] = deque()
        self._awake = False  # `_wake` or `_deliver` will run
        self._rests_until = 0.0
        self._quiet_until = 0.0  # the end of a long rest, in which a post needn't wake the loop: `_late` will
        self._late: asyncio.TimerHandle | None = None
        self._busy = time.thread_time()  # of the loop, which makes the bridge; as of the last delivery
        self._bell: int | None = None
        if sys.platform == "linux":
            self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            weakref.finalize(self, os.close, self._bell)
            loop.add_reader(self._bell, self._heard, self._bell)

    def post(self, reply: Reply, event: StreamEvent) -> None:
        """Called on the engine's thread."""
        now = time.monotonic()
        self._posted.append((reply, event, now))
        if not self._awake and now >= self._quiet_until:
            self._awake = True
            self._ring()

    def _ring(self) -> None:
        """Wake the loop. Behind a write to a socket, which is asyncio's way, Linux takes the writer to be done and
        gives its core to the loop; not so behind an eventfd."""
        if self._bell is not None:
            os.eventfd_write(self._bell, 1)
            return
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is left to tell
            self.loop.call_soon_threadsafe(self._wake)

    def _heard(self, bell: int) -> None:
        os.eventfd_read(bell)
        self._wake()

    def _wake(self) -> None:
        if time.monotonic() < self._rests_until:
            self.loop.call_later(self._rests_until - time.monotonic(), self._deliver)
        else:
            self._deliver()

    def _deliver(self) -> None:
        busy = time.thread_time()
        rest = min(LONGEST_REST_S, REST * (busy - self._busy))
        self._busy = busy
        self._rests_until = time.monotonic() + rest
        if self._late is not None:
            self._late.cancel()
            self._late = None
        if self._posted and rest > SHORT_REST_S:
            self._quiet_until = self._rests_until
            self._late = self.loop.call_later(rest + LATE_S, self._deliver)
        self._awake = False  # before the reading, so that a later post wakes us again
        gained: dict[Reply, list[tuple[StreamEvent, float]]] = {}
        while self._posted:
            reply, event, at = self._posted.popleft()
            gained.setdefault(reply, []).append((event, at))
        for reply, posted in gained.items():
            last, at = posted[-1]
            if len(posted) > 1 and last.finish_reason in ("error", "abort"):
                posted.pop()
                self._hand_over(reply, _joined([event for event, _ in posted]), posted[-1][1])
            elif len(posted) > 1:
                last = _joined([event for event, _ in posted])
            self._hand_over(reply, last, at)

    def _hand_over(self, reply: Reply, event: StreamEvent, at: float) -> None:
        try:
            reply.receive(event, at)
        except Exception as error:
            log.exception("a reply failed; the others go on")
            reply.group.fail(error)


def _joined(events: Sequence[StreamEvent]) -> StreamEvent:
    """The events of one stream as one."""
    last, logprobs, scored = events[-1], None, None
    tokens: list[int] = []
    for event in events:
        tokens += event.tokens
        if event.logprobs is not None:
            logprobs = event.logprobs if logprobs is None else logprobs + event.logprobs
        if event.prompt_logprobs is not None:
            scored = event.prompt_logprobs
    ended = last.finish_reason, last.stop_reason, last.error
    return StreamEvent(last.stream_id, last.metrics, tokens, logprobs, scored, *ended)


class Reply:
    """One choice of the request: `index` in the response, its prompt, and what was built of it so far."""

    def __init__(self, group: ReplyGroup, index: int, prompt: Prompt, builder: ReplyBuilder) -> None:
        self.group = group
        self.index = index
        self.prompt = prompt
        self.builder = builder
        self.stream_id = -1
        self.cached_tokens = 0
        self.done = False  # ended or cancelled: what still comes adds nothing
        self.returned = False  # the engine knows what the client will send back
        self._last_token_at: float | None = None

    @property
    def message(self) -> dict[str, Any]:
        """A chat's reply as its client gets it, and sends it back."""
        return message_of(self.builder)

    def receive(self, event: StreamEvent, at: float) -> None:
        """Called on the event loop, also for what arrives after the request is over."""
        if event.tokens:
            self.group.metrics.tokens(event, at, self._last_token_at)
            self._last_token_at = at
        if not self.done:
            self._grow(event)
        if event.finish_reason is not None:
            # A stop string ends a reply here while the engine only sees a cancel.
            self.group.metrics.finished(event, self.builder.finish_reason or event.finish_reason)

    def _grow(self, event: StreamEvent) -> None:
        self.cached_tokens = event.metrics.cached_tokens
        if event.finish_reason in ("error", "abort"):
            self.done = True
            self.group.fail(event.error or EngineDead(SHUTTING_DOWN))
            return
        delta = self.builder.feed(event)
        if delta.finish_reason is not None:
            self.done = True
            if event.finish_reason is None:  # a stop string: the engine doesn't know yet
                self.group.cancel(self, whole=True)
        self.group.put(self, delta)


class ReplyGroup:
    """Owns every stream of one HTTP request: leaving the `with` block, however, cancels those that still run."""

    def __init__(self, runtime: Runtime, metrics: ServerMetrics, bridge: Bridge) -> None:
        self.replies: list[Reply] = []
        self.metrics = metrics
        self._engine = runtime.engine
        self._tokenizer = runtime.tokenizer
        self._bridge = bridge
        self._queue: deque[tuple[Reply, ReplyDelta] | Exception] = deque()
        self._reader: asyncio.Future[None] | None = None  # of who waits in `next`
        self._unread = 0  # replies whose end `next` hasn't given yet

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        for reply in self.replies:
            if not reply.done:
                reply.done = True
                self.cancel(reply)
            if reply.prompt.conversation is not None and not reply.returned:
                reply.prompt.conversation.abandoned(reply.stream_id)

    def submit(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        seed: int,
        *,
        draft: bool,
        prompt_cache: bool,
        grammar: Grammar | None = None,
    ) -> None:
        """Start n replies to each prompt, each of which follows the grammar.

        They share the seed; a reply's place among its prompt's n joins the key.
        """
        for prompt in prompts:
            thinking = prompt.conversation.thinking if prompt.conversation is not None else Thinking.NEVER
            for choice in range(params.n):
                reading = grammar.reading(prompt.reading) if grammar is not None else prompt.reading
                builder = ReplyBuilder(self._tokenizer, params, prompt.token_ids, reading)
                reply = Reply(self, len(self.replies), prompt, builder)
                reply.stream_id = self._engine.submit(
                    prompt.token_ids,
                    params,
                    partial(self._bridge.post, reply),
                    seed=seed,
                    choice=choice,
                    marks=prompt.conversation.marks if prompt.conversation is not None else None,
                    draft=draft,
                    prompt_cache=prompt_cache,
                    constraint=grammar.start(thinking) if grammar is not None else None,
                )
                self.replies.append(reply)
                self._unread += 1

    def cancel(self, reply: Reply, whole: bool = False) -> None:
        self._engine.cancel(reply.stream_id, whole=whole)

    def put(self, reply: Reply, delta: ReplyDelta) -> None:
        self._put((reply, delta))

    def fail(self, error: Exception) -> None:
        """Make `next` raise this once everything before it is read."""
        self._put(error)

    def _put(self, item: tuple[Reply, ReplyDelta] | Exception) -> None:
        self._queue.append(item)
        if self._reader is not None:
            _resolve(self._reader)

    @property
    def running(self) -> bool:
        return self._unread > 0

    @property
    def ready(self) -> bool:
        """Whether `next` has something to give at once."""
        return bool(self._queue)

    async def next(self, patience_s: float) -> tuple[Reply, ReplyDelta]:
        """What one of the replies gained. TimeoutError: nothing for so many seconds. Lfm2Error: one of them failed.

        A chat's next turn may follow its reply's end at once, so before that is given the engine knows what comes back.
        """
        if not self._queue and not await self._gains(patience_s):
            if not self._engine.alive:
                raise EngineDead(self._engine.fault or "the engine has stopped")
            raise TimeoutError
        item = self._queue.popleft()
        if isinstance(item, Exception):
            raise item
        reply, delta = item
        if delta.finish_reason is not None:
            self._unread -= 1
            if reply.prompt.conversation is not None:
                await to_thread.run_sync(reply.prompt.conversation.answered, reply.stream_id, reply.message)
                reply.returned = True
        return item

    async def _gains(self, patience_s: float) -> bool:
        """Wait for the queue to have something; False: it still hasn't. asyncio.timeout would cost more than that."""
        loop = asyncio.get_running_loop()
        reader = self._reader = loop.create_future()
        timer = loop.call_later(patience_s, _resolve, reader)
        try:
            await reader
        finally:
            timer.cancel()
            self._reader = None
        return bool(self._queue)

    async def finish(self, patience_s: float) -> None:
        """Wait for all replies."""
        while self.running:
            with contextlib.suppress(TimeoutError):
                await self.next(patience_s)


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
