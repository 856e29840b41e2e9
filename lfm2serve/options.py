"""The settings of an engine, checked once at construction."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Literal

from lfm2serve.errors import InvalidRequest

Device = Literal["auto", "cpu", "cuda"]
Dtype = Literal["auto", "bfloat16", "float32"]
KvMode = Literal["paged", "fixed", "eager"]


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """What a user may set about one loaded model; `serve`, `generate`, `chat` and `LLM` share it.

    device: "auto" is the GPU where one can be used. gpu: which of several. dtype: of activations and K/V ("auto" is
    bfloat16; weights stay bfloat16). context: longest prompt + reply, in tokens (None: what the model and the pool
    allow). max_streams: replies that run at once. kv: "paged" (on a GPU the pages get memory as streams reach them),
    "eager" (all of them at load), or "fixed" (one contiguous range of pages a stream). kv_pages: pages of 512
    positions in the pool, or kv_gib: its size (both None: from the memory plan). prompt_chunk: rows of one prompt step
    (None: chosen by max_gap_ms). max_gap_ms: how long running streams may wait for a prompt step.
    default_max_tokens: reply limit where a request names none. memory_limit_gib: for weights, scratch, pages and kept
    states together. reserve_gib: of the device's memory, left free for others (None: 1 on a GPU, 0 on a CPU).
    prompt_cache_gib: for kept states (None: from the memory plan, 0: off). warm_pass: prepare the next turn's state
    after a reply that comes back as other tokens. drafts: draft by lookup in a stream's own tokens. threads: CPU
    threads (None: all cores).
    """

    device: Device = "auto"
    gpu: int = 0
    dtype: Dtype = "auto"
    context: int | None = None
    max_streams: int = 64
    kv: KvMode = "paged"
    kv_pages: int | None = None
    kv_gib: float | None = None
    prompt_chunk: int | None = None
    max_gap_ms: float = 50.0
    default_max_tokens: int = 4096
    memory_limit_gib: float | None = None
    reserve_gib: float | None = None
    prompt_cache_gib: float | None = None
    warm_pass: bool = True
    drafts: bool = True
    threads: int | None = None

    def __post_init__(self) -> None:
        def check(ok: bool, name: str, rule: str) -> None:
            if not ok:
                raise InvalidRequest(f"{name}={getattr(self, name)!r}: {rule}", param=name)

        check(self.device in ("auto", "cpu", "cuda"), "device", "must be auto, cpu or cuda")
        check(self.dtype in ("auto", "bfloat16", "float32"), "dtype", "must be auto, bfloat16 or float32")
        check(self.kv in ("paged", "fixed", "eager"), "kv", "must be paged, fixed or eager")
        for name in ("context", "kv_pages", "prompt_chunk", "threads"):
            value = getattr(self, name)
            check(
                value is None or (isinstance(value, int) and value >= 1), name, "must be a whole number of at least 1"
            )
        check(1 <= self.max_streams <= 4096, "max_streams", "must be between 1 and 4096")
        check(self.gpu >= 0, "gpu", "must not be negative")
        check(self.max_gap_ms > 0, "max_gap_ms", "must be positive")
        check(self.default_max_tokens >= 1, "default_max_tokens", "must be at least 1")
        for name in ("memory_limit_gib", "kv_gib"):
            size = getattr(self, name)
            check(size is None or size > 0, name, "must be positive")
        for name in ("reserve_gib", "prompt_cache_gib"):
            size = getattr(self, name)
            check(size is None or size >= 0, name, "must not be negative")
        check(self.kv_gib is None or self.kv_pages is None, "kv_gib", "says the same as kv_pages; give one of them")

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> EngineOptions:
        """Options from keyword arguments; an unknown name is an InvalidRequest that lists the known ones."""
        known = [field.name for field in fields(cls)]
        for name in values:
            if name not in known:
                raise InvalidRequest(f"unknown option {name!r}; known: {', '.join(known)}", param=name)
        return cls(**values)
