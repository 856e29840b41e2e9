"""The CPU backend: bf16 weights as stored, float32 arithmetic, Numba kernels. See `CpuBackend`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np
from numba import config
from numpy.typing import NDArray

from ..batch import PAGE_ROWS, RING_ROWS, Batch, SampleResult, SampleRows
from ..weights import NUMPY, HostWeights
from . import attention as _attention
from . import conv as _conv
from . import linear as _linear
from . import moe as _moe
from . import norm as _norm
from . import rope as _rope
from . import sample as _sample
from .calls import Calls, alone
from .memory import Arena, mapped
from .team import Team

Floats = NDArray[np.float32]
Bits = NDArray[np.uint16]
HEAD = _rope.HEAD

_PART_VALUES = 1 << 15  # elementwise work is cut into parts of no fewer values
_PART_PRODUCTS = 1 << 18  # and products into parts of no fewer multiplications
_PARTS_PER_THREAD = 4  # so that a thread that was held up leaves its share to the others


@dataclass(frozen=True)
class KVCache:
    """Keys and values of every attention layer in pages of PAGE_ROWS positions.

    `data` [pages, layers, 2, kv_heads, PAGE_ROWS * 64]: a page is one run of memory. Values lie as [PAGE_ROWS, 64];
    keys as [PAGE_ROWS / 64, 64, 64], so that neighbouring positions of one dimension are vectors.
    """

    data: NDArray[Any]
    mapper: None = None  # the system gives a page its memory when it is first written

    @property
    def nbytes(self) -> int:
        return int(self.data.nbytes)

    @property
    def page_bytes(self) -> int:
        return int(self.data[0].nbytes) if len(self.data) else 0


class PenaltyTables:
    """Which tokens each slot's prompt holds and how often its reply does. `views`: for SampleRows' two tables."""

    def __init__(self, slots: int, width: int) -> None:
        self.views = (np.zeros((slots, width), np.uint8), np.zeros((slots, width), np.int32))

    def open(self, slot: int, prompt: Sequence[int]) -> None:
        """Forget a slot's last owner and take in a prompt."""
        seen, count = self.views
        seen[slot] = 0
        seen[slot, prompt] = 1
        count[slot] = 0

    def record(self, slot: int, token: int) -> None:
        """Count a token of a slot's reply."""
        self.views[1][slot, token] += 1


class CpuBackend:
    """Every operation of the network over packed rows, each row's result independent of the other rows.

    `dtype` "bfloat16" rounds each operation's result to bf16 (held in float32 arrays) where the reference
    implementation does, and keeps K/V and convolution inputs as bf16 bits; "float32" rounds nothing. `threads` is at
    most Numba's NUMBA_NUM_THREADS, which is also the default. Weights are uint16 arrays of bf16 bits [out, in], in a
    multiple of 16, best in arrays that NumPy allocated (it asks for huge pages); norm and convolution weights are
    float32 (see `norm_weight`). Activations are float32 [rows, features], C-contiguous. Safe to call from several
    threads; calls run one after another.
    """

    name = "cpu"
    PAGE = PAGE_ROWS
    RING = RING_ROWS

    def __init__(self, dtype: str = "bfloat16", threads: int | None = None) -> None:
        if dtype not in ("bfloat16", "float32"):
            raise ValueError(f"dtype must be bfloat16 or float32, not {dtype!r}")
        most = config.NUMBA_NUM_THREADS
        if threads is not None and not 1 <= threads <= most:
            raise ValueError(f"threads must be in [1, {most}], not {threads}")
        self.dtype = dtype
        self.threads = most if threads is None else threads
        self._bf16 = dtype == "bfloat16"
        self._store: type[np.generic] = np.uint16 if self._bf16 else np.float32
        self._scratch: dict[str, NDArray[Any]] = {}
        self._call = Calls(self.threads)

    # ------------------------------------------------------------------------------------------------------- memory

    def norm_weight(self, bits: Bits) -> Floats:
        """A small weight (norm [H], convolution [H, 3]) widened to float32."""
        return (np.ascontiguousarray(bits).astype(np.uint32) << 16).view(np.float32)

    def weight_sink(self, nbytes: int) -> HostWeights:
        """Takes `nbytes` of weights; see `WeightSink`. They lie in one run of huge pages, which is read fastest."""
        arena = Arena(nbytes)
        return HostWeights(lambda name, shape, dtype: arena.take(shape, NUMPY[dtype]))

    def allocate_kv(self, pages: int, attention_layers: int, kv_heads: int, *, lazy: bool = False) -> KVCache:
        """Pages for `attention_layers` layers; lazy or not, memory is taken when a page is first written."""
        shape = (pages, attention_layers, 2, kv_heads, PAGE_ROWS * HEAD)
        return KVCache(mapped(int(np.prod(shape)) * np.dtype(self._store).itemsize).view(self._store).reshape(shape))

    def allocate_ring(self, conv_layers: int, slots: int, hidden: int) -> NDArray[Any]:
        """Convolution inputs [conv_layers, slots, RING_ROWS, hidden] by position % RING_ROWS."""
        return np.zeros((conv_layers, slots, RING_ROWS, hidden), self._store)

    def allocate_taps(self, taps: int, conv_layers: int, hidden: int) -> NDArray[Any]:
        """Convolution states [taps, conv_layers, 2, hidden] for `conv_taps`."""
        return np.zeros((taps, conv_layers, 2, hidden), self._store)

    def allocate_bytes(self, nbytes: int) -> NDArray[np.uint8]:
        """Memory for `copy`; taken when it is first written."""
        return np.empty(nbytes, np.uint8)

    def bytes_of(self, array: NDArray[Any]) -> NDArray[np.uint8]:
        """An array's memory, for `copy`."""
        return array.reshape(-1).view(np.uint8)

    def read(self, array: NDArray[Any]) -> NDArray[Any]:
        """An array on the host: itself."""
        self._call.settle()
        return array

    def upload(self, tensors: Iterable[tuple[str, NDArray[Any]]]) -> dict[str, NDArray[Any]]:
        """A checkpoint's weights as the operations take them: as they are."""
        return dict(tensors)

    def random_weights(self, shapes: Iterable[tuple[str, tuple[int, ...]]]) -> None:
        """Nothing: the caller makes them in host memory."""

    def free(self, array: Any) -> None:
        """Nothing: an array's memory goes with it."""

    def penalty_tables(self, slots: int, width: int) -> PenaltyTables:
        return PenaltyTables(slots, width)

    def close(self) -> None:
        """Nothing is held beyond the arrays that were handed out."""

    def rope_tables(self, theta: float, max_position: int) -> tuple[Floats, Floats]:
        """cos and sin [max_position, 32] in the activations' precision."""
        cos, sin = _rope.rope_tables(theta, max_position)
        return (_round_bf16(cos), _round_bf16(sin)) if self._bf16 else (cos, sin)

    @property
    def _team(self) -> Team:
        return self._call.team

    def _space(self, name: str, shape: tuple[int, ...], dtype: type[np.generic] = np.float32) -> NDArray[Any]:
        """Scratch that is kept between calls and grows; only for use inside one call."""
        size = int(np.prod(shape))
        buffer = self._scratch.get(name)
        if buffer is None or buffer.size < size:
            buffer = self._scratch[name] = np.empty(size, dtype)
        return buffer[:size].reshape(shape)

    def _parts(self, work: int, least: int = _PART_VALUES) -> int:
        """How many parts of `least` or more to cut work into; wakes the team if there are several."""
        parts = min(work // least, self.threads * _PARTS_PER_THREAD)
        if parts < 2 or self.threads == 1:
            return 1
        self._call.wake()
        return parts

    def together(self) -> AbstractContextManager[None]:
        """Inside the block this thread's operations wait and are computed as one: the interpreter's other threads run
        meanwhile, and none can hold the next operation up. Arrays have their values behind the block; what `sample`
        and `token_logprobs` give can be read at once."""
        return self._call.together()

    # --------------------------------------------------------------------------------------------------- operations

    def attach(self) -> None:
        """Called on a thread that uses the backend from now on; any thread may."""

    def begin(self, batch: Batch, tap_rows: NDArray[np.int32] | None = None) -> Batch:
        """The batch as the operations take it; called before its first operation."""
        return batch

    def take(self, x: Floats, rows: Sequence[int]) -> Floats:
        """Rows of an array."""
        if len(rows) == len(x) and list(rows) == list(range(len(x))):
            return x
        self._call.settle()
        return x[rows]

    def embed(self, tokens: NDArray[np.int32], weight: Bits) -> Floats:
        """Rows of the embedding [V, H]; tokens must be in [0, V)."""
        out = self._call.empty((len(tokens), weight.shape[1]))
        self._call(_norm.embed, self._team.state, tokens, weight, out, self._parts(out.size))
        return out

    def rms_norm(self, x: Floats, weight: Floats, eps: float) -> Floats:
        """r(w * r(x / sqrt(mean(x**2) + eps)))."""
        out = self._call.empty(x.shape)
        self._call(_norm.rms_norm, self._team.state, x, weight, np.float32(eps), out, self._bf16, self._parts(x.size))
        return out

    def linear(self, x: Floats, weight: Bits, residual: Floats | None = None) -> Floats:
        """r(x wT) [R, N], or r(residual + r(x wT))."""
        out = self._call.empty((x.shape[0], weight.shape[0]))
        add = residual is not None
        self._call(
            _linear.linear,
            self._team.state,
            x,
            weight,
            residual if add else out,
            add,
            out,
            self._bf16,
            self._parts(x.shape[0] * weight.size, _PART_PRODUCTS),
        )
        return out

    def short_conv(self, bcx: Floats, conv_weight: Floats, ring: NDArray[Any], layer: int, batch: Batch) -> Floats:
        """The gated convolution of rows B, C, x [R, 3H] with conv_weight [H, 3]; keeps the rows' inputs in the ring.

        Inputs before a segment come from the ring's `layer` and the segment's slot; before position 0 they are zero.
        """
        out = self._call.empty((bcx.shape[0], conv_weight.shape[0]))
        self._call(
            _conv.short_conv,
            self._team.state,
            bcx,
            conv_weight,
            ring,
            layer,
            batch.positions,
            batch.seg_start,
            batch.seg_slot,
            out,
            self._bf16,
            self._parts(bcx.size),
        )
        return out

    def conv_taps(
        self, bcx: Floats, ring: NDArray[Any], layer: int, batch: Batch, rows: NDArray[np.int32], taps: NDArray[Any]
    ) -> None:
        """Copy the convolution's state after each of `rows` [T] to taps [>= T, layers, 2, H]: the inputs of the row's
        predecessor and of the row itself. Before `short_conv`, which overwrites the ring."""
        self._call(
            _conv.conv_taps,
            bcx,
            ring,
            layer,
            batch.positions,
            batch.row_segment,
            batch.seg_start,
            batch.seg_slot,
            rows,
            taps,
            self._bf16,
        )

    def copy(self, target: NDArray[np.uint8], source: NDArray[np.uint8], plan: Sequence[tuple[int, int, int]]) -> None:
        """Copy bytes; plan: (offset in source, offset in target, bytes) of each run."""
        self._call.settle()
        for start, place, size in plan:
            target[place : place + size] = source[start : start + size]

    def attention_inputs(
        self,
        qkv: Floats,
        q_norm: Floats,
        k_norm: Floats,
        eps: float,
        cos: Floats,
        sin: Floats,
        kv: KVCache,
        layer: int,
        batch: Batch,
        heads: int,
        kv_heads: int,
    ) -> Floats:
        """Queries [R, heads * 64] normed and rotated; the rows' keys and values are written to the cache's `layer`."""
        q = self._call.empty((qkv.shape[0], heads * HEAD))
        self._call(
            _rope.attention_inputs,
            self._team.state,
            qkv,
            q_norm,
            k_norm,
            np.float32(eps),
            cos,
            sin,
            kv.data.reshape(-1),
            (kv.data.shape[1], kv_heads),
            layer,
            batch.positions,
            batch.row_segment,
            batch.seg_slot,
            batch.page_table,
            q,
            self._bf16,
            self._parts(qkv.size),
        )
        return q

    def attention(self, q: Floats, kv: KVCache, layer: int, batch: Batch, heads: int, kv_heads: int) -> Floats:
        """Causal attention [R, heads * 64] of each row over the cached positions [0, its own] of its stream."""
        out = self._call.empty((q.shape[0], heads * HEAD))
        work = q.size * (int(batch.positions.max()) + 1)
        self._call(
            _attention.attention,
            self._team.state,
            q,
            kv.data.reshape(-1),
            (kv.data.shape[1], kv_heads),
            layer,
            batch.positions,
            batch.seg_start,
            batch.seg_slot,
            batch.page_table,
            out,
            self._bf16,
            self._parts(work // 8),
        )
        return out

    def swiglu(self, x: Floats, w13: Bits, w2: Bits, residual: Floats) -> Floats:
        """r(residual + r(w2 r(r(silu(w1 x)) * r(w3 x)))); w13 [2F, H] holds w1's rows, then w3's."""
        out = self._call.empty(residual.shape)
        with alone():
            act = self._space("act", (x.shape[0], w2.shape[1]))
            self._call(
                _linear.swiglu,
                self._team.state,
                x,
                w13,
                w2,
                residual,
                act,
                out,
                self._bf16,
                self._parts(x.shape[0] * w2.size, _PART_PRODUCTS),
            )
        return out

    def moe_route(
        self, x: Floats, gate: Bits, expert_bias: Floats | None, top_k: int, norm_topk: bool, scaling: float
    ) -> tuple[NDArray[np.int32], Floats]:
        """The experts of each row, ids [R, top_k] ascending, and their weights."""
        logits = self.linear(x, gate)
        ids = np.empty((x.shape[0], top_k), np.int32)
        weights = np.empty((x.shape[0], top_k), np.float32)
        has_bias = expert_bias is not None
        bias = expert_bias if has_bias else np.zeros(0, np.float32)
        self._call(_moe.route, logits, bias, has_bias, norm_topk, np.float32(scaling), ids, weights, self._bf16)
        return ids, weights

    def moe(
        self,
        x: Floats,
        gate: Bits,
        expert_bias: Floats | None,
        w13: Bits,
        w2: Bits,
        top_k: int,
        norm_topk: bool,
        scaling: float,
        residual: Floats,
    ) -> Floats:
        """r(residual + r(sum of r(weight * expert(x)))) over the chosen experts; w13 [E, 2I, H], w2 [E, H, I]."""
        ids, weights = self.moe_route(x, gate, expert_bias, top_k, norm_topk, scaling)
        out = self._call.empty(residual.shape)
        copies = x.shape[0] * top_k
        with alone():
            self._call(
                _moe.run_experts,
                self._team.state,
                x,
                ids,
                weights,
                w13,
                w2,
                residual,
                self._space("grouped", (copies, x.shape[1])),
                self._space("act", (copies, w2.shape[2])),
                self._space("expert_out", (copies, x.shape[1])),
                out,
                self._bf16,
                self._parts(copies * w2[0].size, _PART_PRODUCTS),
            )
        return out

    def layer_runs(self, layers: Sequence[Any], top_k: int, normalize: bool, scaling: float, eps: float) -> None:
        """No layers run as one operation here."""
        return None

    def logits(self, x: Floats, weight: Bits, out: Floats | None = None) -> Floats:
        """[n, V], rounded as any product; in `out` where that is given."""
        result = self.linear(x, weight)
        if out is None:
            return result
        self._call.settle()
        out[:] = result
        return out

    # ----------------------------------------------------------------------------------------------------- sampling

    def sample(self, logits: Floats, rows: SampleRows, meanwhile: Callable[[], object] | None = None) -> SampleResult:
        """One token a row; see `SampleRows` for the meaning and order of the controls. meanwhile: called once the
        draws are queued, which here is when they are made."""
        count, width = logits.shape
        best = max(0, int(rows.top_n.max(initial=-1)))
        result = SampleResult(
            token=np.empty(count, np.int32),
            logprob=np.full(count, np.nan, np.float32),
            rank=np.zeros(count, np.int32),
            top_ids=np.full((count, best), -1, np.int32),
            top_logprobs=np.full((count, best), np.nan, np.float32),
        )
        with alone():
            parts = self._parts_of_rows(count)
            controls = (
                *(rows.temperature, rows.top_k, rows.top_p, rows.min_p, rows.repetition, rows.presence, rows.frequency),
                *(rows.seed, rows.choice, rows.position, rows.slot, rows.top_n),
            )
            lists = (
                *(rows.bias_start, rows.bias_id, rows.bias_value, rows.ban_start, rows.ban_id),
                *(rows.ahead_start, rows.ahead_id, rows.mask_row, rows.mask),
            )
            tables = (rows.prompt_seen, rows.output_count)
            scratch = (self._space("adjusted", (parts, width)), *self._sampling_space(parts, width))
            self._call(
                _sample.sample,
                self._team.state,
                logits,
                controls,
                tables,
                lists,
                rows.vocab,
                scratch,
                tuple(result),
                parts,
            )
            self._call.settle()
        if meanwhile is not None:
            meanwhile()
        return result

    def timed(self, work: Callable[[], object]) -> float:
        """Seconds that `work` takes."""
        started = time.perf_counter()
        work()
        return time.perf_counter() - started

    def decode_rounds(
        self,
        forward: Any,
        tables: PenaltyTables,
        *,
        width: int,
        vocab: int,
        page_table: NDArray[np.int32],
        slots: int,
        context: int,
    ) -> None:
        """Nothing: on a CPU there is no launch to save."""

    def token_logprobs(
        self, logits: Floats, targets: NDArray[np.int32], top_n: NDArray[np.int32], vocab: int
    ) -> tuple[Floats, NDArray[np.int32], NDArray[np.int32], Floats]:
        """Log-probability and rank [n] of each target, and the ids and log-probabilities [n, T] of the best `top_n`."""
        count, width = logits.shape
        best = max(0, int(top_n.max(initial=0)))
        result = (
            np.empty(count, np.float32),
            np.empty(count, np.int32),
            np.full((count, best), -1, np.int32),
            np.full((count, best), np.nan, np.float32),
        )
        with alone():
            parts = self._parts_of_rows(count)
            self._call(
                _sample.token_logprobs,
                self._team.state,
                logits,
                targets,
                top_n,
                vocab,
                self._sampling_space(parts, width),
                result,
                parts,
            )
            self._call.settle()
        return result

    def _parts_of_rows(self, rows: int) -> int:
        parts = min(rows, self.threads)
        if parts > 1:
            self._call.wake()
        return parts

    def _sampling_space(self, parts: int, width: int) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
        return (
            self._space("weights", (parts, width)),
            self._space("keys", (parts, width), np.uint32),
            self._space("ids", (parts, width), np.int32),
        )


def _round_bf16(values: Floats) -> Floats:
    """Nearest-even bf16, held in float32; finite values only."""
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)).view(np.float32)


__all__ = ["PAGE_ROWS", "RING_ROWS", "Batch", "CpuBackend", "KVCache", "SampleResult", "SampleRows"]
