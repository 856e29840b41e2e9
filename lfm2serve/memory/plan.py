"""The memory plan: where every byte goes, settled before a weight is read."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from kernels_numba.batch import PAGE_ROWS, RING_ROWS
from lfm2serve.config import ModelConfig
from lfm2serve.devices import GIB, Target, scratch_bytes
from lfm2serve.errors import MemoryPlanError
from lfm2serve.memory.pages import SLACK_ROWS, pages_for
from lfm2serve.memory.snapshots import SNAPSHOT_PAGE
from lfm2serve.options import EngineOptions

POOL_SHARE = 0.7  # of what weights and scratch leave; the rest is for kept states


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes by purpose, and what they allow. limit is None where the user set none.

    pages: of PAGE_ROWS positions; range_pages: contiguous pages of one lease (1 = paged). context: longest prompt +
    reply, in tokens. slots: streams at once.
    """

    limit: int | None
    weights: int
    scratch: int
    conv_states: int
    page_bytes: int
    pages: int
    range_pages: int
    prompt_cache: int
    context: int
    slots: int

    @property
    def pool(self) -> int:
        return self.pages * self.page_bytes

    @property
    def snapshot_pages(self) -> int:
        return self.prompt_cache // SNAPSHOT_PAGE

    @property
    def total(self) -> int:
        return self.weights + self.scratch + self.conv_states + self.pool + self.prompt_cache

    def table(self) -> list[tuple[str, int, str]]:
        """Rows of (purpose, bytes, remark)."""
        rows = [
            ("weights", self.weights, "bfloat16, as stored"),
            ("scratch", self.scratch, "activations and logits of the largest step"),
            ("conv states", self.conv_states, f"{self.slots} streams"),
            ("page pool", self.pool, f"{self.pages} pages of {PAGE_ROWS} positions, {self.pages * PAGE_ROWS} tokens"),
            ("prompt cache", self.prompt_cache, f"kept states, {self.snapshot_pages} snapshot pages"),
            ("total", self.total, f"context {self.context} tokens"),
        ]
        if self.limit is not None:
            rows.append(("left", self.limit - self.total, f"of a limit of {self.limit / GIB:.2f} GiB"))
        return rows

    def to_dict(self) -> dict[str, int | None]:
        return {**asdict(self), "pool": self.pool, "total": self.total}


def make_plan(config: ModelConfig, options: EngineOptions, weight_bytes: int, target: Target) -> MemoryPlan:
    """Divide a device's memory. MemoryPlanError names the flag to change where something can't fit.

    weight_bytes: of the loaded weights.
    """
    width = 4 if options.dtype == "float32" else 2
    limit = None if options.memory_limit_gib is None else int(options.memory_limit_gib * GIB)
    slots = options.max_streams
    page_bytes = PAGE_ROWS * config.kv_bytes_per_token(width)
    conv_states = len(config.conv_layers) * slots * RING_ROWS * config.hidden_size * width
    scratch = scratch_bytes(target, config, options)
    fixed = weight_bytes + scratch + conv_states
    if limit is None and target.states_bytes is None:
        limit = target.memory
    budget = limit - fixed if limit is not None else target.states_bytes or 0
    if limit is not None and budget < page_bytes:
        raise MemoryPlanError(
            f"--memory-limit-gib {limit / GIB:.2f}: weights, scratch and conv states take {fixed / GIB:.2f} GiB "
            f"and a page of the pool {page_bytes / GIB:.4f} GiB"
        )
    longest = config.max_position_embeddings
    if options.context is not None and options.context > longest:
        raise MemoryPlanError(
            f"--context {options.context}: the model has {longest} positions (max_position_embeddings)"
        )
    useful = slots * pages_for((options.context or longest) + SLACK_ROWS)
    asked = None if options.prompt_cache_gib is None else int(options.prompt_cache_gib * GIB)
    if limit is not None and (asked or 0) + page_bytes * (options.kv_pages or 1) > budget:
        raise MemoryPlanError(
            f"--kv-pages {options.kv_pages or 1} and --prompt-cache-gib {options.prompt_cache_gib or 0:g} don't fit "
            f"into the {budget / GIB:.2f} GiB that --memory-limit-gib leaves"
        )
    share = int(budget * POOL_SHARE) if asked is None or limit is None else budget - asked
    pages = options.kv_pages or min(useful, share // page_bytes)
    context, range_pages = _context(config, options, pages)
    pages = pages // range_pages * range_pages
    if asked is None:
        asked = max(0, budget - pages * page_bytes) if options.kv_pages else int(budget * (1 - POOL_SHARE))
    cache = asked // SNAPSHOT_PAGE * SNAPSHOT_PAGE
    plan = MemoryPlan(limit, weight_bytes, scratch, conv_states, page_bytes, pages, range_pages, cache, context, slots)
    if plan.total > target.memory:
        raise MemoryPlanError(
            f"{plan.total / GIB:.2f} GiB are needed ({weight_bytes / GIB:.2f} of weights) and {target.name} has "
            f"{target.memory / GIB:.2f}: lower --memory-limit-gib, --kv-pages or --max-streams, or take a smaller model"
        )
    return plan


def _context(config: ModelConfig, options: EngineOptions, pages: int) -> tuple[int, int]:
    """The context that a pool of `pages` can serve, and the pages of one lease's contiguous range (1: paged)."""
    longest = config.max_position_embeddings
    if options.kv == "paged":
        room = pages * PAGE_ROWS - SLACK_ROWS
        if options.context is not None and options.context > room:
            raise MemoryPlanError(
                f"--context {options.context}: the pool's {pages} pages hold {max(0, room)} tokens; raise --kv-pages "
                f"or --memory-limit-gib"
            )
        return options.context or min(longest, room), 1
    context = options.context or min(longest, pages // options.max_streams * PAGE_ROWS - SLACK_ROWS)
    if context < 1 or pages_for(context + SLACK_ROWS) > pages:
        raise MemoryPlanError(
            f"--kv fixed: {pages} pages don't hold {options.max_streams} ranges; lower --max-streams or --context, "
            f"or raise --kv-pages"
        )
    return context, pages_for(context + SLACK_ROWS)
