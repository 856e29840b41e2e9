"""The CUDA backend: bf16 weights and activations, every kernel in Numba. See `CudaBackend`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..batch import PAGE_ROWS, RING_ROWS, Batch
from . import attention as _attention
from . import attention_decode as _decode
from . import attention_ranges as _ranges
from . import attention_wgmma as _attention_wgmma
from . import conv as _conv
from . import copies as _copies
from . import decode_route as _decode_route
from . import embed as _embed
from . import rope as _rope
from . import route as _route
from . import route_rows as _route_rows
from .compiler import KERNELS
from .driver import CudaError, DeviceArray
from .graph import BUCKETS, DecodeRounds, most_round_rows
from .inputs import DeviceBatch, attention_tiles, count_ranges
from .layer_runs import LayerRuns, find_runs
from .lazy import ExpertSum, Normed, Projected, Queries
from .linear import bind_conv, bind_linear, bind_sum_conv, conv_plan, sum_conv_plan
from .memory import HEAD, KVCache, PenaltyTables
from .moe_products import Choice, bind_choice, bind_experts_down, bind_experts_up, choice_plans
from .pack import PackedWeight
from .sampler import Sampler
from .scratch import Activations

_log = logging.getLogger(__name__)

VERIFY_ROWS = 16  # segments of up to so many rows are decode rows to attention
DECODE_ROWS = 64  # a product of so few may become part of the kernel that reads it
RANGE_BYTES = 32 * (HEAD + 2) * 4  # a range's partial results, at 32 heads
RANGE_NS = 1700  # of a prompt's tile over one range
BYTES_A_NS = 3500  # partial results, to memory and back


class CudaBackend(Sampler):
    """Every operation of the network over packed rows, each row's result independent of the other rows.

    The methods are CpuBackend's; arrays are on the device. Activations are bf16 [rows, features] in scratch memory,
    logits float32. All work is queued on one stream, in order; only `sample`, `token_logprobs` and `read` wait for
    it. For one thread. scratch_bytes bounds what one step computes (see `scratch_need`); nothing is allocated after
    the start.
    """

    name = "cuda"
    dtype = "bfloat16"
    PAGE = PAGE_ROWS
    RING = RING_ROWS

    def __init__(self, ordinal: int = 0, *, scratch_bytes: int = 1 << 30) -> None:
        super().__init__(ordinal, scratch_bytes)
        self.device.load(KERNELS.values())
        self._rounds: DecodeRounds | None = None
        self._batch: DeviceBatch | None = None
        self._table: NDArray[np.int32] | None = None
        self._table_host: NDArray[np.int32] | None = None
        self._table_device: DeviceArray | None = None
        self.most_ranges = scratch_bytes // 4 // RANGE_BYTES
        """ranges of attention that decode rows may spread over; more are walked through tile by tile, with the same
        bits"""
        wide = self.device.supports(_attention_wgmma.attention_wgmma)
        self._prompt_attention = _attention_wgmma.WAY if wide else _attention.WAY
        self._plan_rows = _ranges.PLAN_ROWS if self.device.supports(_decode.attention_decode) else 0
        """rows up to which a decode step's attention takes `attention_inputs` into its kernel and counts for itself"""
        self._no_bias = self.zeros((_route.MOST_EXPERTS,), "f32")
        self._arrived = self.zeros((_route.SPREAD_BLOCKS,), "u32")

    def close(self) -> None:
        """As the base's; after a fatal error the driver frees nothing, and the memory goes with the process."""
        self._spread_no_more()
        try:
            self._give_up_rounds()
            super().close()
        except CudaError as error:
            _log.warning("the device was lost (%s): its memory comes back when the process ends", error)
            self._owned = {}

    def penalty_tables(self, slots: int, width: int) -> PenaltyTables:
        """New tables; those made before are given up, and the decode rounds that read them."""
        self._give_up_rounds()
        return super().penalty_tables(slots, width)

    def _give_up_rounds(self) -> None:
        if self._rounds is not None:
            self._rounds.close()
            self._rounds = None

    # -------------------------------------------------------------------------------------------------------- steps

    def attach(self) -> None:
        """Called on a thread that uses the backend from now on."""
        self.device.make_current()

    def together(self) -> AbstractContextManager[None]:
        """Operations are queued on the device, in order; nothing more is to be had."""
        return nullcontext()

    def timed(self, work: Callable[[], object]) -> float:
        """Seconds that the device takes for what `work` queues. For benchmarks, between steps: scratch is overwritten,
        so that all of it is queued before the device comes to it."""
        self.device.make_current()
        begin, end = self.device.event(), self.device.event()
        for _ in range(8):
            self.device.fill(self.scratch.memory, 0, self.stream)
        begin.record(self.stream)
        work()
        end.record(self.stream)
        end.synchronize()
        return end.since(begin) / 1e3

    def begin(self, batch: Batch | DeviceBatch, tap_rows: NDArray[np.int32] | None = None) -> DeviceBatch:
        """Send a batch to the device; the operations that follow run its rows."""
        self.device.make_current()
        if isinstance(batch, DeviceBatch):
            self._batch = batch
            return batch
        self.send_page_table(batch.page_table, batch.seg_slot)
        rows = len(batch.tokens)
        arrays = [batch.tokens, batch.positions, batch.row_segment, batch.seg_start, batch.seg_slot]
        taps = [] if tap_rows is None or not len(tap_rows) else [np.asarray(tap_rows, np.int32)]
        *sent, owner = self.send(*arrays, *taps)
        begun = DeviceBatch(rows, *sent[:5], tap_rows=sent[5] if taps else None, host=batch, owner=owner)
        self._batch = begun
        ranges = count_ranges(batch)
        if int(np.diff(batch.seg_start).max()) <= VERIFY_ROWS and ranges <= self.most_ranges:
            begun.ranges = ranges
            self.plan_attention(begun)
        return begun

    def plan_attention(self, batch: DeviceBatch) -> None:
        """Count the ranges of a decode batch's rows; those of few rows every block counts for itself."""
        batch.range_start = self._range_starts(batch, counted=batch.rows > self._plan_rows)

    def _range_starts(self, batch: DeviceBatch, counted: bool = True) -> DeviceArray:
        start = self.scratch.take((batch.rows + 1,), "i32")
        batch.owner = (batch.owner, start)
        if counted:
            self.launch(
                _ranges.attention_plan, 1, 256, batch.positions, batch.row_segment, batch.seg_slot, batch.rows, start
            )
        return start.array

    def send_page_table(self, table: NDArray[np.int32], slots: NDArray[np.int32]) -> None:
        """Bring the device's copy of the page table up to date for `slots`."""
        if self._table is not table:
            for old in (self._table_device, self._drawn):
                if old is not None:
                    self.free(old)
            self._table, self._table_host = table, table.copy()
            self._table_device = self.keep(table)
            self._drawn = self.zeros((len(table),), "i32")
            return
        assert self._table_host is not None and self._table_device is not None
        slots = slots[slots >= 0]
        for slot in slots[(table[slots] != self._table_host[slots]).any(1)].tolist():
            self._table_host[slot] = table[slot]
            self.uploads.send([table[slot]], self._table_device[slot])

    def take(self, x: Activations, rows: Sequence[int]) -> Activations:
        """Rows of an array, copied; the whole array itself where they are all of it, in order."""
        if len(rows) == len(x) and list(rows) == list(range(len(x))):
            return x
        index, owner = self.send(np.asarray(rows, np.int32))
        out = self.scratch.take((len(rows), x.shape[1]), "bf16")
        self.launch(_copies.take_rows, len(rows), _copies.THREADS, x, index, x.shape[1], out)
        del owner
        return out

    def part(self, x: Activations, start: int, stop: int) -> Activations:
        """Rows start ... stop - 1 of an array, in place."""
        return x.part(start, stop)

    # --------------------------------------------------------------------------------------------------- operations

    def embed(self, tokens: Any, weight: PackedWeight) -> Activations:
        """Rows of the embedding for the tokens of the batch that was begun."""
        batch = self._current
        assert tokens is batch.tokens, "embed runs the tokens of the batch that was begun"
        out = self.scratch.take((batch.rows, weight.depth), "bf16")
        self.launch(
            _embed.embed, batch.rows, _embed.THREADS, batch.tokens, self._drawn, batch.row_segment, batch.seg_slot,
            weight.data, weight.depth, out,
        )  # fmt: skip
        return out

    @property
    def _current(self) -> DeviceBatch:
        assert self._batch is not None, "no batch was begun"
        return self._batch

    def rms_norm(self, x: Activations, weight: DeviceArray, eps: float) -> Activations:
        """r(w * r(x / sqrt(mean(x**2) + eps))). Queued with what reads it first: behind `moe` the sum over experts is
        part of the same kernel, before `moe` the router takes it into its own."""
        return Normed(self, x, weight, eps)

    def linear(self, x: Activations, weight: PackedWeight, residual: Activations | None = None) -> Activations:
        """r(x wT) [R, N], or r(residual + r(x wT)); for gated weights the SwiGLU's activations."""
        if residual is None and not weight.gated and len(x) <= DECODE_ROWS:
            return Projected(self, x, weight)
        _ = x.array  # what is pending gives memory back when it is queued
        out = self.scratch.take((len(x), weight.outputs), "bf16")
        self._product(x, weight, out, residual)
        return out

    def _product(
        self, x: Activations, weight: PackedWeight, out: Activations, residual: Activations | None = None
    ) -> None:
        bind_linear(
            self.device, x.array, weight, out.array, residual=None if residual is None else residual.array,
            dependent=self.dependent,
        ).run(self.stream)  # fmt: skip

    def short_conv(
        self, bcx: Activations, conv_weight: DeviceArray, ring: DeviceArray, layer: int, batch: DeviceBatch
    ) -> Activations:
        """The gated convolution of rows B, C, x [R, 3H]; keeps the rows' inputs in the ring."""
        hidden = ring.shape[3]
        decode = batch.range_start is not None
        plan = conv_plan(self.device, len(bcx), hidden) if decode else None
        if plan is not None and isinstance(bcx, Projected) and bcx.pending:
            x, weight = bcx.claim()
            out = self.scratch.take((len(x), hidden), "bf16")
            more = (weight, out.array, conv_weight, ring[layer], batch, self.dependent)
            sum_plan = sum_conv_plan(self.device, hidden)
            summed = x.claim_sum() if isinstance(x, Normed) and sum_plan is not None else None
            if sum_plan is not None and summed is not None:
                bind_sum_conv(self.device, sum_plan, summed, *more).run(self.stream)
            else:
                bind_conv(self.device, plan, x.array, *more).run(self.stream)
            return out
        tile = 1 if decode else _conv.TILE
        out = self.scratch.take((len(bcx), hidden), "bf16")
        self.launch(
            _conv.short_conv, (-(-len(bcx) // tile), -(-hidden // 2 // _conv.THREADS)), _conv.THREADS, bcx,
            conv_weight, ring, layer, ring.shape[1], batch.positions, batch.row_segment, batch.seg_start,
            batch.seg_slot, len(bcx), hidden, tile, out,
        )  # fmt: skip
        return out

    def conv_taps(
        self, bcx: Activations, ring: DeviceArray, layer: int, batch: DeviceBatch, rows: Any, taps: DeviceArray
    ) -> None:
        """Copy the convolution's state after each of the batch's tap rows to taps [>= T, layers, 2, H]; before
        `short_conv`."""
        if batch.tap_rows is not None:
            grid = (batch.tap_rows.shape[0], -(-ring.shape[3] // 2 // _copies.THREADS))
            self.launch(
                _copies.conv_taps, grid, _copies.THREADS, bcx, ring, layer, ring.shape[0], ring.shape[1],
                batch.positions, batch.row_segment, batch.seg_start, batch.seg_slot, batch.tap_rows, ring.shape[3],
                taps,
            )  # fmt: skip

    def attention_inputs(
        self,
        qkv: Activations,
        q_norm: DeviceArray,
        k_norm: DeviceArray,
        eps: float,
        cos: DeviceArray,
        sin: DeviceArray,
        kv: KVCache,
        layer: int,
        batch: DeviceBatch,
        heads: int,
        kv_heads: int,
    ) -> Activations:
        """Queries [R, heads * 64] normed and rotated; the rows' keys and values are written to the cache's `layer`."""
        table = self._table_device
        assert table is not None
        common = (
            eps, cos, sin, kv.data, layer, kv.data.shape[1], batch.positions, batch.row_segment, batch.seg_slot, table,
            table.shape[1], heads, kv_heads,
        )  # fmt: skip
        if batch.range_start is None:
            rows, out = len(qkv), self.scratch.take((len(qkv), heads * HEAD), "bf16")
            self.launch(
                _rope.attention_inputs_rows, -(-rows // _rope.BLOCK_ROWS), _rope.THREADS, qkv, q_norm, k_norm, *common,
                rows, out,
            )  # fmt: skip
            return out
        q = Queries(self, qkv, heads, q_norm, k_norm, *common)
        if batch.rows > self._plan_rows:
            _ = q.array
        return q

    def attention(
        self, q: Activations, kv: KVCache, layer: int, batch: DeviceBatch, heads: int, kv_heads: int
    ) -> Activations:
        """Causal attention [R, heads * 64] of each row over the cached positions [0, its own] of its stream."""
        table, group = self._table_device, heads // kv_heads
        assert table is not None
        common = (
            kv.data.pointer, layer, kv.data.shape[1], kv_heads, group, batch.positions, batch.row_segment,
            batch.seg_slot, table, table.shape[1],
        )  # fmt: skip
        out = self.scratch.take(q.shape, "bf16")
        if batch.range_start is None:
            if batch.tiles is None:
                self._plan_tiles(batch, group, kv_heads)
            tiles, starts = batch.tiles, batch.part_start
            assert tiles is not None
            partial, scale, parts = None, None, 1
            if starts is not None:
                parts = -(-batch.longest // batch.each)
                partial = self.scratch.take((batch.ranges, heads, HEAD), "f32")
                scale = self.scratch.take((batch.ranges, heads, 2), "f32")
            way = self._prompt_attention
            self.launch(
                way.kernel, (tiles[0].shape[0], kv_heads, parts), way.threads, q, *common, *tiles, batch.each, starts,
                partial, scale, out, shared=way.shared,
            )  # fmt: skip
            if starts is not None:
                self._merge(partial, scale, starts, batch, heads, out)
            return out
        partial = self.scratch.take((batch.ranges, heads, HEAD), "f32")
        scale = self.scratch.take((batch.ranges, heads, 2), "f32")
        blocks = min(batch.ranges, max(1, 6 * self.device.multiprocessors // kv_heads))
        if isinstance(q, Queries) and q.pending:
            qkv, q_norm, k_norm, eps, cos, sin, *_ = q.claim()
            self.launch(
                _decode.attention_decode, (blocks, kv_heads), 32, qkv, q_norm, k_norm, eps, cos, sin, *common[:7],
                batch.seg_start, *common[7:], batch.rows, partial, scale, shared=_decode.SHARED,
            )  # fmt: skip
            self._merge(partial, scale, batch.range_start, batch, heads, out)
            return out
        self.launch(
            _ranges.attention_ranges, (blocks, kv_heads), 32, q, *common, batch.rows, batch.range_start, partial,
            scale, shared=2 * _attention.RANGE_BYTES,
        )  # fmt: skip
        self._merge(partial, scale, batch.range_start, batch, heads, out)
        return out

    def _merge(
        self, partial: Activations | None, scale: Activations | None, starts: DeviceArray, batch: DeviceBatch,
        heads: int, out: Activations,
    ) -> None:  # fmt: skip
        """Queue the merge of a batch's partial results."""
        few = batch.rows * heads <= 4 * self.device.multiprocessors
        at_once = min(_ranges.MOST_AT_ONCE if few else 96, 32 * -(-batch.ranges // (32 * batch.rows)))
        self.launch(
            _ranges.attention_merge, (batch.rows, heads), _ranges.MERGE_THREADS, partial, scale, starts,
            batch.rows, batch.positions, batch.row_segment, batch.seg_slot, heads, at_once, out,
            shared=at_once * _ranges.MERGE_BYTES,
        )  # fmt: skip

    def _plan_tiles(self, batch: DeviceBatch, group: int, kv_heads: int) -> None:
        """How a prompt's attention runs: its tiles, and where they are few behind a long context, in how many parts."""
        host, queries = batch.host, self._prompt_attention.queries
        assert host is not None
        *batch.tiles, owner = self.send(*attention_tiles(host, queries // group))
        batch.owner = (batch.owner, owner)
        blocks, ranges = len(batch.tiles[0]) * kv_heads, count_ranges(host)
        batch.longest = int(host.positions.max()) // _attention.RANGE + 1
        parts = min(batch.longest, self.device.multiprocessors // blocks)
        if parts > 1 and ranges <= self.most_ranges:
            each = -(-batch.longest // parts)
            there_and_back = 2 * ranges * kv_heads * group * (HEAD + 2) * 4 / BYTES_A_NS
            if each * RANGE_NS + there_and_back < batch.longest * RANGE_NS:
                batch.each, batch.ranges = each, ranges
                batch.part_start = self._range_starts(batch)

    def layer_runs(
        self, layers: Sequence[Any], top_k: int, normalize: bool, scaling: float, eps: float
    ) -> LayerRuns | None:
        """The model's layers that one kernel can run from an attention to the next; None: none."""
        return find_runs(self, layers, top_k, normalize, scaling, eps)

    def swiglu(self, x: Activations, w13: PackedWeight, w2: PackedWeight, residual: Activations) -> Activations:
        """r(residual + r(w2 r(r(silu(w1 x)) * r(w3 x))))."""
        return self.linear(self.linear(x, w13), w2, residual)

    def moe(
        self,
        x: Activations,
        gate: DeviceArray,
        expert_bias: DeviceArray | None,
        w13: PackedWeight,
        w2: PackedWeight,
        top_k: int,
        norm_topk: bool,
        scaling: float,
        residual: Activations,
    ) -> Activations:
        """r(residual + r(sum of r(weight * expert(x)))) over the chosen experts; x is `rms_norm`'s, not used before."""
        assert isinstance(x, Normed) and x.pending, "the router norms its rows itself"
        h, norm, eps = x.claim()
        batch, rows, hidden = self._current, len(h), h.shape[1]
        experts, pairs = w13.experts, rows * top_k
        if experts > _route.MOST_EXPERTS or hidden > _route.MOST_HIDDEN or hidden % 32 or top_k > _route.MOST_TOP:
            raise ValueError(f"{experts} experts of hidden size {hidden}, {top_k} a row: beyond what the router does")
        take = self.scratch.take
        blocks = -(-rows // _route.ROUTE_ROWS)
        plans = choice_plans(self.device, rows, w13, w2, top_k)
        if plans is not None and batch.range_start is not None:
            tiles = -(-experts // _route.TILE)
            logits, place = take((rows, _route.MOST_EXPERTS), "f32"), take((pairs,), "i32")
            self.launch(
                _decode_route.route_logits, (blocks, tiles), _route.ROUTE_THREADS, h, norm, eps, x, gate,
                batch.row_segment, batch.seg_slot, rows, hidden, experts, logits,
            )  # fmt: skip
            choice = Choice(logits.array, expert_bias, top_k, norm_topk, scaling, place.array, batch)
            act, y = take((pairs, w13.outputs), "bf16"), take((pairs, hidden), "bf16")
            for plan, given, weight, result in ((plans[0], x, w13, act), (plans[1], act, w2, y)):
                bind_choice(
                    self.device, plan, given.array, weight, result.array, choice, dependent=self.dependent
                ).run(self.stream)  # fmt: skip
            return ExpertSum(self, residual, y, place, top_k)
        ids, weights = take((pairs,), "i32"), take((pairs,), "f32")
        start, pair_row = take((experts + 1,), "i32"), take((pairs,), "i32")
        pair_weight, place = take((pairs,), "f32"), take((pairs,), "i32")
        bias, biased = (self._no_bias, 0) if expert_bias is None else (expert_bias, 1)
        given = (
            h, norm, eps, x, gate, bias, biased, batch.row_segment, batch.seg_slot, rows, hidden, experts, top_k,
            int(norm_topk), scaling,
        )  # fmt: skip
        if rows >= _route_rows.MANY_LEAST and experts % _route.TILE == 0:
            self.launch(
                _route_rows.norm_route_rows,
                -(-rows // _route_rows.MANY_ROWS),
                _route.ROUTE_THREADS,
                *given,
                ids,
                weights,
            )
        else:
            tiles = -(-experts // _route.TILE) if blocks <= _route.SPREAD_BLOCKS else 1
            logits = take((blocks * _route.ROUTE_ROWS, _route.MOST_EXPERTS), "f32") if tiles > 1 else None
            self.launch(
                _route.norm_route, (blocks, tiles), _route.ROUTE_THREADS, *given, logits, self._arrived, ids, weights,
                start, pair_row, pair_weight, place,
            )  # fmt: skip
        if blocks > 1:
            self.launch(
                _route.group_rows, experts, _route.GROUP_THREADS, ids, weights, rows, top_k, experts, start, pair_row,
                pair_weight, place,
            )  # fmt: skip
        act, y = take((pairs, w13.outputs), "bf16"), take((pairs, hidden), "bf16")
        for product in (
            bind_experts_up(
                self.device, x.array, w13, start.array, pair_row.array, act.array, dependent=self.dependent
            ),
            bind_experts_down(
                self.device, act.array, w2, start.array, pair_weight.array, y.array, dependent=self.dependent
            ),
        ):
            product.run(self.stream)
        return ExpertSum(self, residual, y, place, top_k)

    def logits(self, x: Activations, weight: PackedWeight, out: Activations | None = None) -> Activations:
        """[n, V] float32, rounded as any product; in `out` where that is given."""
        if out is None:
            out = self.scratch.take((len(x), weight.outputs), "f32")
        self._product(x, weight, out)
        return out

    def decode_rounds(
        self,
        forward: Callable[[DeviceBatch, Activations], object],
        tables: PenaltyTables,
        *,
        width: int,
        vocab: int,
        page_table: NDArray[np.int32],
        slots: int,
        context: int,
    ) -> DecodeRounds:
        """Decode rounds as graphs, for up to `slots` streams of up to `context` tokens and as many draft rows again.

        forward: writes the logits [rows, width] of all rows of a batch. Takes some milliseconds a bucket. The rounds
        made before are given up.
        """
        self._give_up_rounds()
        count = BUCKETS.index(most_round_rows(slots)) + 1
        most_ranges = -(-context // _attention.RANGE)
        ranges = min(BUCKETS[count - 1] * most_ranges, self.most_ranges)
        self._rounds = DecodeRounds(
            self,
            forward,
            tables,
            buckets=BUCKETS[:count],
            width=width,
            vocab=vocab,
            page_table=page_table,
            ranges=ranges,
            most_ranges=most_ranges,
        )
        return self._rounds


def scratch_need(
    rows: int, *, hidden: int, qkv: int, features: int, pairs: int, expert_features: int, logit_rows: int, vocab: int,
    ranges: int, heads: int,
) -> int:  # fmt: skip
    """Bytes of scratch for steps of up to `rows` rows.

    features: of the widest dense SwiGLU; pairs: experts a row (0 for dense models); logit_rows: rows that are drawn at
    once; ranges: attention ranges of all decode rows together.
    """
    widest = max(3 * hidden + hidden, qkv + 2 * heads * HEAD, features, pairs * (expert_features + hidden + 16))
    step = rows * (4 * hidden + widest) * 2  # half of it again, since free blocks don't lie together
    return step * 3 // 2 + 3 * logit_rows * vocab * 4 + ranges * heads * (HEAD + 2) * 4 + (64 << 20)


__all__ = ["CudaBackend", "KVCache", "PenaltyTables", "most_round_rows", "scratch_need"]
