"""The memory plan: where every byte goes, settled before a weight is read."""

from __future__ import annotations

import html
from dataclasses import asdict, dataclass, replace
from typing import Any

from kernels_numba.batch import PAGE_ROWS, RING_ROWS
from lfm2serve.config import ModelConfig
from lfm2serve.devices import GIB, Target, graph_bytes, reserve_bytes, scratch_bytes
from lfm2serve.errors import MemoryPlanError
from lfm2serve.memory.arena import PIECE_BYTES
from lfm2serve.memory.pages import SLACK_ROWS, pages_for
from lfm2serve.memory.snapshots import SNAPSHOT_PAGE
from lfm2serve.options import EngineOptions

POOL_SHARE = 0.7  # of what weights and scratch leave; the rest is for kept states
FIRST_STREAMS = 4  # whose pages have memory at load
FIRST_PROMPT = 2048  # tokens that their prompts are taken to have
TABLE_BYTES = 5  # a token and slot: what the prompt has, and how often the reply does


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes by purpose, and what they allow. limit is None where neither the user nor the device sets one.

    scratch: of a step; graphs: of decode rounds and loaded kernels; streams: conv states and sampling tables of all
    slots. pages: of PAGE_ROWS positions; range_pages: contiguous pages of one lease (1 = paged). mapped: bytes of the
    page pool that have memory (in a plan: at load), None where the system gives it as pages are written. reserve: what
    stays free on the device. context: longest prompt + reply, in tokens. slots: streams at once.
    """

    limit: int | None
    reserve: int
    weights: int
    scratch: int
    graphs: int
    streams: int
    page_bytes: int
    pages: int
    range_pages: int
    mapped: int | None
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
        """The most that is ever used, with all of the pool mapped."""
        return self.weights + self.scratch + self.graphs + self.streams + self.pool + self.prompt_cache

    @property
    def first_pieces(self) -> int:
        """Pieces of the pool that have memory at load."""
        return -(-(self.mapped or 0) // PIECE_BYTES)

    def with_mapped(self, mapped: int) -> MemoryPlan:
        """The plan as it stands now: `mapped` bytes of the pool have memory."""
        return self if self.mapped is None else replace(self, mapped=mapped)

    def table(self) -> list[tuple[str, int, str]]:
        """Rows of (purpose, bytes, remark)."""
        lazily = "memory as pages are written" if self.mapped is None else f"{self.mapped / GIB:.2f} GiB mapped"
        rows = [
            ("weights", self.weights, "bfloat16, as stored"),
            ("scratch", self.scratch, "activations and logits of the largest step"),
            ("graphs", self.graphs, "decode rounds and loaded kernels"),
            ("streams", self.streams, f"conv states and sampling tables of {self.slots}"),
            (
                "page pool",
                self.pool,
                f"{self.pages} pages of {PAGE_ROWS} positions, {self.pages * PAGE_ROWS} tokens; {lazily}",
            ),
            ("prompt cache", self.prompt_cache, f"kept states, {self.snapshot_pages} snapshot pages"),
            ("total", self.total, f"context {self.context} tokens"),
        ]
        if self.limit is not None:
            kept = f"; {self.reserve / GIB:.2f} GiB stay free beside it" if self.reserve else ""
            rows.append(("left", self.limit - self.total, f"of a limit of {self.limit / GIB:.2f} GiB{kept}"))
        return rows

    def __str__(self) -> str:
        return "\n".join(f"{what:<13} {size / GIB:8.3f} GiB  {remark}" for what, size, remark in self.table())

    def _repr_html_(self) -> str:
        """The table in a notebook."""
        cells = [
            f"<tr><th style='text-align:left'>{what}</th><td style='text-align:right'>{size / GIB:.3f} GiB</td>"
            f"<td style='text-align:left'>{html.escape(remark)}</td></tr>"
            for what, size, remark in self.table()
        ]
        return f"<table>{''.join(cells)}</table>"

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON; all but pages, context and slots are bytes."""
        return {**asdict(self), "pool": self.pool, "total": self.total}


def make_plan(config: ModelConfig, options: EngineOptions, weight_bytes: int, target: Target) -> MemoryPlan:
    """Divide a device's memory. MemoryPlanError names the flag to change where something can't fit.

    weight_bytes: of the loaded weights.
    """
    width = 4 if options.dtype == "float32" else 2
    slots = options.max_streams
    page_bytes = PAGE_ROWS * config.kv_bytes_per_token(width)
    ring = len(config.conv_layers) * RING_ROWS * config.hidden_size * width
    streams = slots * (ring + TABLE_BYTES * config.vocab_size)
    scratch, graphs = scratch_bytes(target, config, options), graph_bytes(target, options)
    fixed = weight_bytes + scratch + graphs + streams
    reserve = reserve_bytes(target, options)
    limit = None if options.memory_limit_gib is None else int(options.memory_limit_gib * GIB)
    if limit is None and target.states_bytes is None:
        limit = target.memory - reserve
    budget = limit - fixed if limit is not None else target.states_bytes or 0
    if limit is not None and budget < page_bytes:
        raise MemoryPlanError(
            f"{_limit_flag(options, limit, target)}: weights, scratch and streams take {fixed / GIB:.2f} GiB and a "
            f"page of the pool {page_bytes / GIB:.4f} GiB; raise it, lower --max-streams, or take a smaller model"
        )
    longest = config.max_position_embeddings
    if options.context is not None and options.context > longest:
        raise MemoryPlanError(
            f"--context {options.context}: the model has {longest} positions (max_position_embeddings)"
        )
    pages, cache = _divide(config, options, budget, limit, page_bytes)
    context, range_pages = _context(config, options, pages)
    pages = pages // range_pages * range_pages
    mapped = _first_bytes(options, context, pages, page_bytes, target)
    plan = MemoryPlan(
        limit, reserve, weight_bytes, scratch, graphs, streams, page_bytes, pages, range_pages, mapped, cache, context,
        slots,
    )  # fmt: skip
    if plan.total > target.memory - reserve:
        flags = ["--memory-limit-gib"] * (options.memory_limit_gib is not None)
        flags += [_pool_flag(options)] * ((options.kv_pages or options.kv_gib) is not None)
        flags += ["--prompt-cache-gib"] * bool(options.prompt_cache_gib) + ["--reserve-gib"] * bool(reserve)
        kept = f" less --reserve-gib {reserve / GIB:.2f}" if reserve else ""
        raise MemoryPlanError(
            f"{plan.total / GIB:.2f} GiB are needed ({weight_bytes / GIB:.2f} of weights) and {target.name} has "
            f"{target.memory / GIB:.2f} GiB{kept}: lower {', '.join([*flags, '--max-streams'])} or take a smaller model"
        )
    return plan


def _divide(
    config: ModelConfig, options: EngineOptions, budget: int, limit: int | None, page_bytes: int
) -> tuple[int, int]:
    """Pages of the pool, and bytes of the prompt cache."""
    asked = None if options.prompt_cache_gib is None else int(options.prompt_cache_gib * GIB)
    fixed_pages = options.kv_pages
    if options.kv_gib is not None:
        fixed_pages = int(options.kv_gib * GIB) // page_bytes
        if fixed_pages < 1:
            raise MemoryPlanError(f"--kv-gib {options.kv_gib:g}: a page takes {page_bytes / GIB:.4f} GiB")
    if limit is not None and (asked or 0) + page_bytes * (fixed_pages or 1) > budget:
        pool = f"{_pool_flag(options)} ({page_bytes * (fixed_pages or 1) / GIB:.2f} GiB)"
        raise MemoryPlanError(
            f"{pool} and --prompt-cache-gib {options.prompt_cache_gib or 0:g} don't fit into the {budget / GIB:.2f} "
            f"GiB that weights, scratch and streams leave; lower one of them or raise --memory-limit-gib"
        )
    useful = options.max_streams * pages_for((options.context or config.max_position_embeddings) + SLACK_ROWS)
    share = int(budget * POOL_SHARE) if asked is None or limit is None else budget - asked
    pages = fixed_pages or min(useful, share // page_bytes)
    if asked is None:
        asked = max(0, budget - pages * page_bytes) if fixed_pages else int(budget * (1 - POOL_SHARE))
    return pages, asked // SNAPSHOT_PAGE * SNAPSHOT_PAGE


def _context(config: ModelConfig, options: EngineOptions, pages: int) -> tuple[int, int]:
    """The context that a pool of `pages` can serve, and the pages of one lease's contiguous range (1: paged)."""
    longest = config.max_position_embeddings
    raised = f"raise {_pool_flag(options)} or --memory-limit-gib"
    if options.kv != "fixed":
        room = pages * PAGE_ROWS - SLACK_ROWS
        if room < (options.context or 1):
            raise MemoryPlanError(
                f"--context {options.context or 1}: the pool's {pages} pages hold {max(0, room)} tokens; {raised}"
            )
        return options.context or min(longest, room), 1
    context = options.context or min(longest, pages // options.max_streams * PAGE_ROWS - SLACK_ROWS)
    if context < 1 or pages_for(context + SLACK_ROWS) > pages:
        raise MemoryPlanError(
            f"--kv fixed: {pages} pages don't hold {options.max_streams} ranges; lower --max-streams or --context, "
            f"or {raised}"
        )
    return context, pages_for(context + SLACK_ROWS)


def _first_bytes(options: EngineOptions, context: int, pages: int, page_bytes: int, target: Target) -> int | None:
    """Bytes of the pool that have memory at load: all, or whole pieces for the first streams."""
    if target.kind == "cpu":
        return None
    if options.kv == "eager" or not target.virtual_memory:
        return pages * page_bytes
    rows = context if options.kv == "fixed" else min(context, FIRST_PROMPT + options.default_max_tokens)
    need = min(FIRST_STREAMS, options.max_streams) * pages_for(rows + SLACK_ROWS) * page_bytes
    return min(pages * page_bytes, -(-need // PIECE_BYTES) * PIECE_BYTES)


def _limit_flag(options: EngineOptions, limit: int, target: Target) -> str:
    """What the user would change about the limit."""
    if options.memory_limit_gib is not None:
        return f"--memory-limit-gib {limit / GIB:.2f}"
    reserve = reserve_bytes(target, options) / GIB
    return f"{target.name} has {target.memory / GIB:.2f} GiB free, less --reserve-gib {reserve:.2f}"


def _pool_flag(options: EngineOptions) -> str:
    """The flag that sets the pool's size."""
    if options.kv_gib is not None:
        return f"--kv-gib {options.kv_gib:g}"
    return "--kv-pages" if options.kv_pages is None else f"--kv-pages {options.kv_pages}"
