"""Prometheus metrics: vLLM's names where the meaning is the same, lfm2serve's own for pages and rounds."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Iterator
from itertools import accumulate
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from lfm2serve.counters import CacheStats
from lfm2serve.memory.prompt_cache import Mark
from lfm2serve.stream import StreamEvent

if TYPE_CHECKING:
    from lfm2serve.engine import Engine

LABELS = ["model_name"]
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
GAPS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
TOKENS = (1, 10, 50, 100, 250, 500, 1000, 2500, 5000, 10000, 25000, 50000, 100000)


class EngineCollector(Collector):
    """Reads the engine's counters when Prometheus asks."""

    def __init__(self, engine: Engine, model: str) -> None:
        self._engine = engine
        self._model = model

    def collect(self) -> Iterator[Metric]:
        stats = self._engine.stats()
        census, done = stats.census, stats.counters
        gauges = {
            "vllm:num_requests_running": ("Replies that hold pages.", stats.filling + stats.running),
            "vllm:num_requests_waiting": ("Requests that wait for pages or a slot.", stats.waiting),
            "vllm:kv_cache_usage_perc": ("Share of K/V pages in use, 1 = all.", census.leased / max(1, census.total)),
            "lfm2serve:background_passes": (
                "Passes that prepare a chat's next turn, and wait or run.",
                stats.background,
            ),
            "lfm2serve:prompt_cache_states": ("Kept states.", stats.cache.states),
            "lfm2serve:turn_seconds": ("How long the engine's turn that runs now has taken.", self._turn_seconds()),
        }
        counters = {
            "vllm:prompt_tokens": ("Prompt tokens that ran; cached ones aren't among them.", done.prompt_tokens),
            "vllm:generation_tokens": ("Tokens generated.", done.generated_tokens),
            "lfm2serve:decode_rounds": ("Decode rounds.", done.decode_rounds),
            "lfm2serve:prompt_steps": ("Prompt steps.", done.prompt_steps),
            "vllm:spec_decode_num_draft_tokens": ("Tokens drafted.", done.draft_tokens),
            "vllm:spec_decode_num_accepted_tokens": ("Tokens drafted and drawn.", done.accepted_tokens),
            "lfm2serve:warm_passes": ("Background passes for a chat's next turn.", done.warm_passes),
            "lfm2serve:prompt_cache_lookups": ("Prompts that looked for a kept state.", stats.cache.counters.lookups),
            "lfm2serve:prompt_cache_failures": ("Keeps and restores that failed.", stats.cache.counters.failures),
            "lfm2serve:prompt_cache_copies": ("Copies of keeps and restores.", stats.cache.copies),
            "lfm2serve:prompt_cache_copy_seconds": ("Time of these copies.", stats.cache.copy_s),
            "lfm2serve:failed_steps": ("Steps that raised; their streams ran again alone.", done.failed_steps),
            "lfm2serve:failed_streams": ("Replies that ended with an error of ours.", done.failed_streams),
            "lfm2serve:census_errors": ("Idle checks that found pages missing: a bug.", done.census_errors),
        }
        for name, (help_text, value) in gauges.items():
            gauge = GaugeMetricFamily(name, help_text, labels=LABELS)
            gauge.add_metric([self._model], value)
            yield gauge
        for name, (help_text, value) in counters.items():
            counter = CounterMetricFamily(name, help_text, labels=LABELS)
            counter.add_metric([self._model], value)
            yield counter
        pages = GaugeMetricFamily("lfm2serve:pages", "K/V pages of the pool by state.", labels=[*LABELS, "state"])
        for state in ("free", "leased", "promised"):
            pages.add_metric([self._model, state], getattr(census, state))
        yield pages
        yield from self._arena()
        yield from self._by_mark(stats.cache)

    def _turn_seconds(self) -> float:
        started = self._engine.turn_started
        return 0.0 if started is None else time.monotonic() - started

    def _arena(self) -> Iterator[Metric]:
        """The pool's memory, piece by piece."""
        stats = self._engine.arena.stats()
        size = GaugeMetricFamily("lfm2serve:arena_bytes", "The page pool's memory.", labels=[*LABELS, "state"])
        pieces = GaugeMetricFamily("lfm2serve:arena_pieces", "Pieces of the page pool.", labels=[*LABELS, "state"])
        for state, count, held in (
            ("mapped", stats.mapped_pieces, stats.mapped),
            ("unmapped", stats.pieces - stats.mapped_pieces, stats.reserved - stats.mapped),
        ):
            size.add_metric([self._model, state], held)
            pieces.add_metric([self._model, state], count)
        maps = CounterMetricFamily("lfm2serve:arena_maps", "Pieces given memory.", labels=[*LABELS, "by"])
        maps.add_metric([self._model, "helper"], stats.by_helper)
        maps.add_metric([self._model, "engine"], stats.by_caller)
        failures = CounterMetricFamily("lfm2serve:arena_failures", "Pieces that found no memory.", labels=LABELS)
        failures.add_metric([self._model], stats.failed)
        yield from (size, pieces, maps, failures)

    def _by_mark(self, cache: CacheStats) -> Iterator[Metric]:
        """What the prompt cache did with each kind of mark."""
        kept = GaugeMetricFamily(
            "lfm2serve:prompt_cache_bytes", "The prompt cache's memory.", labels=[*LABELS, "state"]
        )
        for state in ("held", "spare"):
            kept.add_metric([self._model, state], getattr(cache, f"{state}_bytes"))
        yield kept
        events = {
            "hits": "Prompts that resumed a kept state.",
            "tokens_saved": "Prompt tokens that didn't run again.",
            "keeps": "States kept.",
            "refusals": "States that found no room.",
            "evictions": "States that made room.",
        }
        for name, text in events.items():
            counter = CounterMetricFamily(f"lfm2serve:prompt_cache_{name}", text, labels=[*LABELS, "mark"])
            counted = getattr(cache.counters, name)
            for mark in Mark:
                counter.add_metric([self._model, mark], counted[mark])
            yield counter


class Histogram(Collector):
    """Counts observations by size; several equal ones at once cost what one does. For one thread, the event loop's."""

    def __init__(self, name: str, text: str, buckets: tuple[float, ...], model: str) -> None:
        self._name = name
        self._text = text
        self._model = model
        self._bounds = buckets
        self._counts = [0] * (len(buckets) + 1)
        self._sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self._counts[bisect_left(self._bounds, value)] += times
        self._sum += value * times

    def collect(self) -> Iterator[Metric]:
        names = [*(str(float(bound)) for bound in self._bounds), "+Inf"]
        buckets = list(zip(names, accumulate(self._counts), strict=True))
        family = HistogramMetricFamily(self._name, self._text, labels=LABELS)
        family.add_metric([self._model], buckets, self._sum)
        yield family


class ServerMetrics:
    """The metrics of one app, in a registry of its own."""

    def __init__(self, engine: Engine, model: str) -> None:
        self._registry = registry = CollectorRegistry()
        self._model = model
        registry.register(EngineCollector(engine, model))
        ProcessCollector(registry=registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            made = Histogram(name, text, buckets, model)
            registry.register(made)
            return made

        self._first_token = histogram("vllm:time_to_first_token_seconds", "From arrival to the first token.", SECONDS)
        self._gap = histogram("vllm:inter_token_latency_seconds", "Between a reply's tokens.", GAPS)
        self._whole = histogram("vllm:e2e_request_latency_seconds", "From arrival to the last token.", SECONDS)
        self._queued = histogram("vllm:request_queue_time_seconds", "Waiting for pages or a slot.", SECONDS)
        self._prompt = histogram("vllm:request_prompt_tokens", "Tokens of a prompt.", TOKENS)
        self._reply = histogram("vllm:request_generation_tokens", "Tokens of a reply.", TOKENS)
        self._responses = Counter(
            "lfm2serve:http_responses", "Responses by status.", [*LABELS, "status"], registry=registry
        )
        self._ends = Counter(
            "vllm:request_success", "Finished replies by reason.", [*LABELS, "finished_reason"], registry=registry
        )

    def responded(self, status: int) -> None:
        """A request has ended, with this HTTP status."""
        self._responses.labels(self._model, str(status)).inc()

    def tokens(self, event: StreamEvent, at: float, previous: float | None) -> None:
        """A reply gained tokens at the monotonic time `at`; its tokens before those came at `previous`."""
        gaps = len(event.tokens)
        if previous is None:
            previous, gaps = event.metrics.first_token or at, gaps - 1
            self._first_token.observe(previous - event.metrics.arrival)
        if gaps:
            self._gap.observe((at - previous) / gaps, gaps)

    def finished(self, event: StreamEvent, reason: str) -> None:
        """A reply's last event; `reason` is what the client was told."""
        metrics = event.metrics
        self._ends.labels(self._model, reason).inc()
        self._prompt.observe(metrics.prompt_tokens)
        self._reply.observe(metrics.output_tokens)
        if metrics.admitted is not None:
            self._queued.observe(metrics.admitted - metrics.arrival)
        if metrics.finished is not None:
            self._whole.observe(metrics.finished - metrics.arrival)

    def exposition(self) -> bytes:
        """The Prometheus text format."""
        return generate_latest(self._registry)
