"""What an engine has done and holds, for metrics and benchmarks."""

from __future__ import annotations

from dataclasses import dataclass

from lfm2serve.memory.pages import Census
from lfm2serve.memory.prompt_cache import CacheCounters


@dataclass(slots=True)
class EngineCounters:
    """What the engine has done since it started. host_s: time of decode rounds outside the backend's operations."""

    prompt_tokens: int = 0
    generated_tokens: int = 0
    prompt_steps: int = 0
    decode_rounds: int = 0
    decode_rows: int = 0
    decode_s: float = 0.0
    host_s: float = 0.0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    warm_passes: int = 0
    failed_steps: int = 0
    failed_streams: int = 0
    census_errors: int = 0


@dataclass(frozen=True, slots=True)
class CacheStats:
    """The prompt cache at one moment; bytes are of snapshot pages, copies of kept and restored states together."""

    states: int
    held_bytes: int
    spare_bytes: int
    copies: int
    copy_s: float
    counters: CacheCounters


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Streams by state, pages, kept states and the counters, at one moment."""

    waiting: int
    filling: int
    running: int
    background: int
    census: Census
    cache: CacheStats
    counters: EngineCounters
