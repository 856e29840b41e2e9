"""An engine that says what it is told, when it is told: for what a real model can't be made to say."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from kernels_numba.cpu import CpuBackend
from lfm2serve.chat.template import ChatTemplate
from lfm2serve.chat.tokenizer import Tokenizer
from lfm2serve.config import GenerationDefaults, ModelConfig
from lfm2serve.counters import CacheStats, EngineCounters, EngineStats
from lfm2serve.devices import find_device
from lfm2serve.errors import EngineDead, Lfm2Error
from lfm2serve.memory.arena import Arena
from lfm2serve.memory.pages import Census
from lfm2serve.memory.plan import make_plan
from lfm2serve.memory.prompt_cache import CacheCounters, Mark
from lfm2serve.options import EngineOptions
from lfm2serve.runtime import Runtime
from lfm2serve.sampling import SamplingParams
from lfm2serve.stream import Sink, StreamEvent, StreamMetrics, TokenLogprobs

Step = list[int] | float | Exception  # tokens of one event, seconds of silence, or a failure
Script = Callable[[list[int], SamplingParams, int], Iterator[Step]]


class FakeStream:
    def __init__(self, prompt: Sequence[int], params: SamplingParams, sink: Sink, served: dict[str, Any]) -> None:
        self.params = params
        self.sink = sink
        self.cancelled = threading.Event()
        self.metrics = StreamMetrics(arrival=time.monotonic(), prompt_tokens=len(prompt), **served)


class FakeEngine:
    """`script(prompt, params, choice)` yields what each stream does; a script that ends gives eos."""

    context = 4096
    pages = 100

    def __init__(self, vocab: int, eos: int) -> None:
        self.vocab = vocab
        self.eos = eos
        self.fault: str | None = None
        self.turn_started: float | None = None
        self.alive = True
        self.script: Script = lambda prompt, params, choice: iter(())
        self.refuse_after: int | None = None  # submits that still work
        self.top_logprob = -0.5
        self.submitted: list[dict[str, Any]] = []
        self.cancels: list[int] = []
        self.served: dict[str, Any] = {}  # further metrics of every stream
        self.arena = Arena(self.pages, 1)
        self.told: list[tuple[int, list[int] | None]] = []  # what comes back of each stream; None: nothing
        self._streams: dict[int, FakeStream] = {}
        self._changed = threading.Condition()

    def submit(self, prompt: Sequence[int], params: SamplingParams, sink: Sink, **how: Any) -> int:
        if self.refuse_after == 0:
            raise EngineDead("no more")
        if self.refuse_after is not None:
            self.refuse_after -= 1
        self.submitted.append({"prompt": list(prompt), "params": params, **how})
        stream_id = len(self.submitted)
        stream = FakeStream(prompt, params, sink, self.served)
        with self._changed:
            self._streams[stream_id] = stream
        threading.Thread(target=self._play, args=(stream_id, stream, list(prompt), how["choice"]), daemon=True).start()
        return stream_id

    def cancel(self, stream_id: int, *, whole: bool = False) -> None:
        with self._changed:
            self.cancels.append(stream_id)
            if stream_id in self._streams:
                self._streams[stream_id].cancelled.set()

    def returned(self, stream_id: int, token_ids: Sequence[int]) -> None:
        self.told.append((stream_id, list(token_ids)))

    def forget(self, stream_id: int) -> None:
        self.told.append((stream_id, None))

    def clear_prompt_cache(self) -> int:
        return 3

    def _play(self, stream_id: int, stream: FakeStream, prompt: list[int], choice: int) -> None:
        params, metrics = stream.params, stream.metrics
        metrics.admitted = time.monotonic()
        if params.prompt_logprobs is not None:
            scored = [None, *(self._logprobs(token, params.prompt_logprobs) for token in prompt[1:])]
            stream.sink(StreamEvent(stream_id, metrics, prompt_logprobs=scored))
        for step in self.script(prompt, params, choice):
            if isinstance(step, float):
                stream.cancelled.wait(step)
            if stream.cancelled.is_set() or metrics.output_tokens == params.max_tokens:
                break
            if isinstance(step, Exception):
                error = step if isinstance(step, Lfm2Error) else Lfm2Error(str(step))
                return self._end(stream_id, stream, [], "error", error)
            if isinstance(step, list):
                self._say(stream_id, stream, step)
        if stream.cancelled.is_set():
            return self._end(stream_id, stream, [], "abort")
        if metrics.output_tokens == params.max_tokens:
            return self._end(stream_id, stream, [], "length")
        metrics.first_token = metrics.first_token or time.monotonic()
        metrics.output_tokens += 1
        self._end(stream_id, stream, [self.eos], "stop")

    def _say(self, stream_id: int, stream: FakeStream, tokens: list[int]) -> None:
        metrics = stream.metrics
        metrics.first_token = metrics.first_token or time.monotonic()
        metrics.output_tokens += len(tokens)
        stream.sink(StreamEvent(stream_id, metrics, tokens, self._all_logprobs(stream, tokens)))

    def _end(
        self, stream_id: int, stream: FakeStream, tokens: list[int], reason: str, error: Lfm2Error | None = None
    ) -> None:
        stream.metrics.finished = time.monotonic()
        with self._changed:
            del self._streams[stream_id]
        logprobs = self._all_logprobs(stream, tokens)
        stream.sink(StreamEvent(stream_id, stream.metrics, tokens, logprobs, finish_reason=reason, error=error))
        with self._changed:
            self._changed.notify_all()

    def _all_logprobs(self, stream: FakeStream, tokens: list[int]) -> list[TokenLogprobs] | None:
        count = stream.params.logprobs
        return None if count is None else [self._logprobs(token, count) for token in tokens]

    def _logprobs(self, token: int, count: int) -> TokenLogprobs:
        top = [(token, self.top_logprob), *((300 + n, float("-inf")) for n in range(1, count))]
        return TokenLogprobs(self.top_logprob, 1, tuple(top[:count]))

    def census(self) -> Census:
        with self._changed:
            held = dict.fromkeys(self._streams, 1)
        return Census(self.pages, self.pages - len(held), len(held), 0, held)

    def stats(self) -> EngineStats:
        census = self.census()
        cache = CacheStats(0, 0, 0, 0, 0.0, CacheCounters())
        return EngineStats(0, 0, census.leased, 0, census, cache, EngineCounters())

    def kept_states(self) -> list[tuple[Mark, int, int]]:
        return [(Mark.HISTORY, 100, 2)]

    def drain(self, timeout: float | None = None) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: not self._streams, timeout)

    def close(self) -> None:
        self.alive = False

    def reset(self) -> None:
        """As new, between tests."""
        self.script = lambda prompt, params, choice: iter(())
        self.refuse_after, self.fault, self.alive, self.top_logprob = None, None, True, -0.5
        self.turn_started = None
        self.submitted.clear()
        self.cancels.clear()
        self.told.clear()
        self.served.clear()


def fake_runtime(path: Path) -> Runtime:
    """A runtime with a checkpoint's tokenizer and template, and a fake engine."""
    tokenizer = Tokenizer.from_dir(path)
    config = ModelConfig.from_dir(path)
    eos = tokenizer.token_id("<|im_end|>")
    assert eos is not None
    return Runtime(
        name="fake-model",
        path=path,
        config=config,
        options=EngineOptions(),
        tokenizer=tokenizer,
        template=ChatTemplate.from_dir(path, tokenizer),
        generation=GenerationDefaults.from_dir(path),
        plan=make_plan(config, EngineOptions(), weight_bytes=0, target=find_device(EngineOptions(device="cpu"))),
        engine=FakeEngine(tokenizer.size, eos),  # type: ignore[arg-type]
        backend=CpuBackend(),
    )


def says(text: str, tokenizer: Tokenizer, per_event: int = 1, pause: float = 0.0) -> Script:
    """A script that speaks a text, so many tokens an event, with a pause before each."""

    def script(prompt: list[int], params: SamplingParams, choice: int) -> Iterator[Step]:
        ids = tokenizer.encode(text)
        for start in range(0, len(ids), per_event):
            if pause:
                yield pause
            yield ids[start : start + per_event]

    return script


def says_after(first: str, gate: threading.Event, then: str, tokenizer: Tokenizer) -> Script:
    """A script that speaks the second text once the gate is open: two events, however busy the machine is."""

    def script(prompt: list[int], params: SamplingParams, choice: int) -> Iterator[Step]:
        yield tokenizer.encode(first)
        assert gate.wait(30)
        yield tokenizer.encode(then)

    return script
