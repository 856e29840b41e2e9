"""What `bench kernels` runs: each operation of the network on random inputs, what NumPy says it gives, and its work.

Row r of an operation's input is the same however many rows run, so its result must be, too. Inputs come through `embed`
from tables of random rows, so that only the backend's own operations touch its arrays.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernels_numba.batch import PAGE_ROWS, Batch
from kernels_numba.reference import HEAD, History, Reference, bf16_bits, make_batch, widen
from lfm2serve.backend import Array, Backend
from lfm2serve.config import CONV_TAPS, ModelConfig

STREAMS = 64
"""Streams that decode together: as many rows of one stream each are decode rows."""
BEFORE = 505
"""Positions that the long stream has behind it: its rows cross a page's edge."""
BEHIND = (0, 1, 5, 63, 127, 128, 129, 33, 2, 511, 64, 512, 126, 513, 3, 255)
"""Positions that the streams have behind them, in turn."""
SCALING = 1.0

Bits = NDArray[np.uint16]
Values = NDArray[np.float64]
Work = Callable[[], Array]


@dataclass(frozen=True)
class Operation:
    """prepare: begins a batch of so many rows and returns what runs them. expected: of the first rows, computed once
    for the most that are checked. most: rows that it can have. steps: how far a value may be from NumPy's, in bf16
    steps of itself and quarters of one of the largest; 0 is equal. nbytes, flops: of memory and arithmetic that so many
    rows need. close: rows whose experts are chosen by less than a rounding."""

    name: str
    prepare: Callable[[int], Work]
    expected: Callable[[int], Values]
    nbytes: Callable[[int], float]
    flops: Callable[[int], float] = lambda rows: 0.0
    most: int | None = None
    steps: float = 1.0
    close: Callable[[int], NDArray[np.bool_]] | None = None


class Operations:
    """The operations of a model's widths on a backend. rows: the most that run; spread: bytes that a weight's copies
    take together at least, used in turn, so that a cache doesn't hold them."""

    def __init__(self, backend: Backend, config: ModelConfig, rows: int, *, spread: int = 0, seed: int | None = None):
        self.backend, self.config, self.rows, self.spread = backend, config, rows, spread
        self.random = np.random.default_rng(seed)
        self.twin = Reference("bfloat16")
        self._turn = 0
        self._slots = STREAMS + 1
        lengths = [BEHIND[n % len(BEHIND)] + 1 for n in range(STREAMS)] + [BEFORE + rows]
        pages = [-(-length // PAGE_ROWS) for length in lengths]
        order = self.random.permutation(sum(pages)).astype(np.int32)
        self.table = np.zeros((self._slots, max(pages)), np.int32)
        for slot, count in enumerate(pages):
            self.table[slot, :count], order = order[:count], order[count:]
        self.context = max(lengths)
        self.cos, self.sin = backend.rope_tables(config.rope_theta, self.context)
        self.kv = backend.allocate_kv(sum(pages), 1, config.num_key_value_heads)
        self.ring = backend.allocate_ring(1, self._slots, config.hidden_size)

    # ------------------------------------------------------------------------------------------------------- inputs

    def normal(self, *shape: int, scale: float = 1.0) -> Bits:
        """bf16 bits; large arrays repeat some drawn ones."""
        size = math.prod(shape)
        drawn = bf16_bits(self.random.standard_normal(min(size, 1 << 22)) * scale)
        return np.resize(drawn, size).reshape(shape)

    def upload(self, name: str, values: NDArray[Any]) -> Array:
        return self.backend.upload({name: values}.items())[name]

    def weights(self, *shape: int, name: str = "weight") -> tuple[Bits, Work]:
        """Weights [.., depth], and what gives the next of their copies on the backend."""
        bits = self.normal(*shape, scale=shape[-1] ** -0.5)
        copies = min(16, max(1, -(-self.spread // bits.nbytes)))
        held = [self.upload(name, bits) for _ in range(copies)]

        def turn() -> Array:
            self._turn += 1
            return held[self._turn % len(held)]

        return bits, turn

    def inputs(self, width: int, scale: float = 1.0) -> tuple[Bits, Array]:
        """Rows of activations, and the table that `embed` takes them from."""
        bits = self.normal(self.rows, width, scale=scale)
        return bits, self.upload("embed", bits)

    def norm(self, width: int) -> tuple[Values, Array]:
        bits = bf16_bits(1 + 0.2 * self.random.standard_normal(width))
        return widen(bits), self.backend.norm_weight(bits)

    def one_prompt(self, rows: int) -> Batch:
        """Rows of the long stream, behind what it has seen."""
        return self._batch([(STREAMS, BEFORE, rows)])

    def streams(self, rows: int) -> Batch:
        """One row each of as many streams."""
        return self._batch([(slot, BEHIND[slot % len(BEHIND)], 1) for slot in range(rows)])

    def free(self, rows: int) -> Batch:
        """Rows that know nothing of positions: decode rows while they can be."""
        return self.streams(rows) if rows <= STREAMS else self.one_prompt(rows)

    def before(self) -> tuple[Batch, Batch]:
        """What the streams and the long one have seen, to be run first."""
        seen = [(slot, 0, BEHIND[slot % len(BEHIND)]) for slot in range(STREAMS) if BEHIND[slot % len(BEHIND)]]
        return self._batch(seen), self._batch([(STREAMS, 0, BEFORE)])

    def _batch(self, segments: list[tuple[int, int, int]]) -> Batch:
        batch = make_batch(segments, self._slots, self.table)
        return batch._replace(tokens=np.arange(len(batch.tokens), dtype=np.int32) % self.rows)

    def begin(self, batch: Batch, *tables: Array) -> tuple[Any, list[Array]]:
        """The batch on the backend, and its rows of each table."""
        begun = self.backend.begin(batch)
        return begun, [self.backend.embed(begun.tokens, table) for table in tables]

    # --------------------------------------------------------------------------------------------------- operations

    def every(self) -> Iterator[Operation]:
        c = self.config
        yield from self._rows()
        yield self._product("product", 3 * c.hidden_size, c.hidden_size)
        yield self._product("product with residual", c.hidden_size, c.hidden_size, residual=True)
        yield self._swiglu()
        yield from self._convolutions()
        yield from self._attention()
        if c.num_experts:
            yield from self._experts()
        yield self._logits()

    def _rows(self) -> Iterator[Operation]:
        be, hidden, eps = self.backend, self.config.hidden_size, self.config.norm_eps
        x, table = self.inputs(hidden, 3.0)
        weight, on_backend = self.norm(hidden)
        two = lambda rows: 4.0 * rows * hidden  # noqa: E731  read and written

        def embed(rows: int) -> Work:
            begun = be.begin(self.free(rows))
            return lambda: be.embed(begun.tokens, table)

        yield Operation("embedding", embed, lambda rows: widen(x[:rows]), two, steps=0)

        def norm(rows: int) -> Work:
            _, (given,) = self.begin(self.free(rows), table)
            return lambda: be.rms_norm(given, on_backend, eps)

        yield Operation("RMSNorm", norm, lambda rows: self.twin.rms_norm(widen(x[:rows]), weight, eps), two)

    def _product(self, name: str, outputs: int, depth: int, residual: bool = False) -> Operation:
        be = self.backend
        (x, table), (w, turn) = self.inputs(depth), self.weights(outputs, depth)
        extra, more = self.inputs(outputs)

        def prepare(rows: int) -> Work:
            _, (given, rest) = self.begin(self.free(rows), table, more)
            return lambda: be.linear(given, turn(), rest if residual else None)

        def expected(rows: int) -> Values:
            return self.twin.linear(widen(x[:rows]), w, widen(extra[:rows]) if residual else None)

        return Operation(
            f"{name}, {outputs} x {depth}", prepare, expected,
            lambda rows: 2.0 * (outputs * depth + rows * (depth + outputs * (1 + residual))),
            lambda rows: 2.0 * rows * outputs * depth,
        )  # fmt: skip

    def _swiglu(self) -> Operation:
        be, hidden, features = self.backend, self.config.hidden_size, self.config.intermediate_size
        (x, table), (extra, more) = self.inputs(hidden), self.inputs(hidden)
        (w13, up), (w2, down) = self.weights(2 * features, hidden, name="mlp.w13"), self.weights(hidden, features)

        def prepare(rows: int) -> Work:
            _, (given, rest) = self.begin(self.free(rows), table, more)
            return lambda: be.swiglu(given, up(), down(), rest)

        return Operation(
            f"SwiGLU, {features} features", prepare,
            lambda rows: self.twin.swiglu(widen(x[:rows]), w13, w2, widen(extra[:rows])),
            lambda rows: 2.0 * (3 * hidden * features + rows * (3 * hidden + 2 * features)),
            lambda rows: 6.0 * rows * hidden * features, steps=2,
        )  # fmt: skip

    def _convolutions(self) -> Iterator[Operation]:
        be, hidden = self.backend, self.config.hidden_size
        filters = self.normal(hidden, CONV_TAPS)
        on_backend = be.norm_weight(filters)
        (x, table), (w, turn) = self.inputs(hidden), self.weights(3 * hidden, hidden)
        bcx, wide = self.inputs(3 * hidden)
        pre, pre_table = self.inputs(3 * hidden)

        def start() -> None:
            for batch in self.before():
                tail = self._tail(batch, CONV_TAPS)
                begun, (given,) = self.begin(tail, pre_table)
                self.done(be.short_conv(given, on_backend, self.ring, 0, begun))

        def prepare(rows: int, streams: bool, projected: bool) -> Work:
            start()
            batch = self.streams(rows) if streams else self.one_prompt(rows)
            begun, (given,) = self.begin(batch, table if projected else wide)
            if projected:
                return lambda: be.short_conv(be.linear(given, turn()), on_backend, self.ring, 0, begun)
            return lambda: be.short_conv(given, on_backend, self.ring, 0, begun)

        def expected(rows: int, streams: bool, projected: bool) -> Values:
            history = History({})
            for batch in self.before():
                tail = self._tail(batch, CONV_TAPS)
                self.twin.short_conv(widen(pre[tail.tokens]), widen(filters), history, 0, tail)
            batch = self.streams(rows) if streams else self.one_prompt(rows)
            given = self.twin.linear(widen(x[:rows]), w) if projected else widen(bcx[:rows])
            return self.twin.short_conv(given, widen(filters), history, 0, batch)

        for streams, what, most in ((False, "one stream", None), (True, "decode rows", STREAMS)):
            for projected in (False, True):

                def run(rows: int, streams: bool = streams, projected: bool = projected) -> Work:
                    return prepare(rows, streams, projected)

                def twin(rows: int, streams: bool = streams, projected: bool = projected) -> Values:
                    return expected(rows, streams, projected)

                def moved(rows: int, projected: bool = projected) -> float:
                    return 6.0 * hidden * hidden + 4.0 * rows * hidden if projected else 8.0 * rows * hidden

                def flops(rows: int, projected: bool = projected) -> float:
                    return 6.0 * rows * hidden * hidden if projected else 0.0

                yield Operation(
                    f"{'product and convolution' if projected else 'convolution'}, {what}", run, twin, moved, flops,
                    most=most, steps=2 if projected else 1,
                )  # fmt: skip

    def _tail(self, batch: Batch, rows: int) -> Batch:
        """The last rows of each segment."""
        segments = []
        for n, slot in enumerate(batch.seg_slot):
            first, last = int(batch.seg_start[n]), int(batch.seg_start[n + 1])
            kept = min(rows, last - first)
            segments.append((int(slot), int(batch.positions[last - 1]) + 1 - kept, kept))
        return self._batch(segments)

    def _attention(self) -> Iterator[Operation]:
        be, c = self.backend, self.config
        heads, kv_heads, eps, width = c.num_attention_heads, c.num_key_value_heads, c.norm_eps, c.qkv_rows
        (q_weight, q_norm), (k_weight, k_norm) = self.norm(HEAD), self.norm(HEAD)
        qkv, table = self.inputs(width)
        pre, pre_table = self.inputs(width)
        cos, sin = self.twin.rope_tables(c.rope_theta, self.context)

        def attention_inputs(given: Array, begun: Any) -> Array:
            return be.attention_inputs(
                given, q_norm, k_norm, eps, self.cos, self.sin, self.kv, 0, begun, heads, kv_heads
            )

        def twin_inputs(given: Values, batch: Batch, history: History) -> Values:
            return self.twin.attention_inputs(
                given, q_weight, k_weight, eps, cos, sin, history, 0, batch, heads, kv_heads
            )

        def history_of(streams: bool) -> History:
            history = History({})
            batch = self.before()[0 if streams else 1]
            twin_inputs(widen(pre[batch.tokens]), batch, history)
            return history

        def prepare(rows: int, streams: bool, attend: bool) -> Work:
            if attend:
                begun, (given,) = self.begin(self.before()[0 if streams else 1], pre_table)
                self.done(attention_inputs(given, begun))
            begun, (given,) = self.begin(self.streams(rows) if streams else self.one_prompt(rows), table)
            if not attend:
                return lambda: attention_inputs(given, begun)
            q = attention_inputs(given, begun)
            return lambda: be.attention(q, self.kv, 0, begun, heads, kv_heads)

        def expected(rows: int, streams: bool, attend: bool) -> Values:
            batch = self.streams(rows) if streams else self.one_prompt(rows)
            history = history_of(streams) if attend else History({})
            q = twin_inputs(widen(qkv[:rows]), batch, history)
            return self.twin.attention(q, history, 0, batch, heads, kv_heads) if attend else q

        line = 4.0 * kv_heads * HEAD  # bytes of a position's key and value

        def context(rows: int, streams: bool) -> list[int]:
            batch = self.streams(rows) if streams else self.one_prompt(rows)
            return [int(position) + 1 for position in batch.positions]

        for streams, what, most in ((False, "one stream", None), (True, "decode rows", STREAMS)):
            for attend in (False, True):

                def run(rows: int, streams: bool = streams, attend: bool = attend) -> Work:
                    return prepare(rows, streams, attend)

                def twin(rows: int, streams: bool = streams, attend: bool = attend) -> Values:
                    return expected(rows, streams, attend)

                def moved(rows: int, streams: bool = streams, attend: bool = attend) -> float:
                    if not attend:
                        return rows * (2.0 * width + 2.0 * heads * HEAD + line)
                    seen = context(rows, streams)
                    return (sum(seen) if streams else max(seen)) * line + 4.0 * rows * heads * HEAD

                def work(rows: int, streams: bool = streams, attend: bool = attend) -> float:
                    return 4.0 * heads * HEAD * sum(context(rows, streams)) if attend else 0.0

                yield Operation(
                    f"{'attention' if attend else 'q/k norm, rotation, cache'}, {what}", run, twin, moved, work,
                    most=most, steps=2 if attend else 1,
                )  # fmt: skip

    def _experts(self) -> Iterator[Operation]:
        be, c = self.backend, self.config
        hidden, experts, features, top_k = (
            c.hidden_size, c.num_experts, c.moe_intermediate_size, c.num_experts_per_tok,
        )  # fmt: skip
        (h, table), (extra, more) = self.inputs(hidden), self.inputs(hidden)
        weight, norm = self.norm(hidden)
        next_weight, next_norm = self.norm(hidden)
        gate, gate_turn = self.weights(experts, hidden, name="moe.gate")
        w13, up = self.weights(experts, 2 * features, hidden, name="moe.w13")
        w2, down = self.weights(experts, hidden, features, name="moe.w2")
        w, turn = self.weights(hidden, hidden)
        bias = (self.random.standard_normal(experts) * 1e-2).astype(np.float32)
        bias[1::7] = -8  # nobody's
        on_backend = self.upload("moe.bias", bias)

        def experts_of(given: Array, rest: Array) -> Array:
            x = be.rms_norm(given, norm, c.norm_eps)
            return be.moe(x, gate_turn(), on_backend, up(), down(), top_k, c.norm_topk_prob, SCALING, rest)

        def prepare(rows: int, more_work: bool) -> Work:
            _, (given, rest) = self.begin(self.free(rows), table, more)
            if not more_work:
                return lambda: experts_of(given, rest)
            return lambda: be.linear(be.rms_norm(experts_of(given, rest), next_norm, c.norm_eps), turn())

        @cache
        def sums(rows: int) -> Values:
            x = self.twin.rms_norm(widen(h[:rows]), weight, c.norm_eps)
            ids, weights = self.twin.moe_route(x, gate, bias, top_k, c.norm_topk_prob, SCALING)
            total = np.zeros((rows, hidden))
            for e in range(experts):  # ascending, as the sum goes
                row, j = np.nonzero(ids == e)
                if len(row):
                    total[row] += self.twin.r(weights[row, j, None] * self.twin.swiglu(x[row], w13[e], w2[e], None))
            return self.twin.r(widen(extra[:rows]) + self.twin.r(total))

        def following(rows: int) -> Values:
            return self.twin.linear(self.twin.rms_norm(sums(rows), next_weight, c.norm_eps), w)

        filters, (first, first_turn) = self.normal(hidden, CONV_TAPS), self.weights(3 * hidden, hidden)
        on_device = be.norm_weight(filters)

        def begins(rows: int) -> Batch:
            return self._batch([(slot, 0, 1) for slot in range(rows)])

        def prepare_convolved(rows: int) -> Work:
            begun, (given, rest) = self.begin(begins(rows), table, more)

            def run() -> Array:
                x = be.rms_norm(experts_of(given, rest), next_norm, c.norm_eps)
                return be.short_conv(be.linear(x, first_turn()), on_device, self.ring, 0, begun)

            return run

        def convolved(rows: int) -> Values:
            bcx = self.twin.linear(self.twin.rms_norm(sums(rows), next_weight, c.norm_eps), first)
            return self.twin.short_conv(bcx, widen(filters), History({}), 0, begins(rows))

        def close(rows: int) -> NDArray[np.bool_]:
            x = self.twin.rms_norm(widen(h[:rows]), weight, c.norm_eps)
            choice = np.sort(1 / (1 + np.exp(-self.twin.linear(x, gate))) + bias, axis=1)
            margin: NDArray[np.bool_] = choice[:, -top_k] - choice[:, -top_k - 1] < 2.0**-7
            return margin

        def moved(rows: int) -> float:
            read = np.count_nonzero(bias > -1) * (1 - (1 - top_k / np.count_nonzero(bias > -1)) ** rows)
            return float(read * 6 * hidden * features + 2.0 * experts * hidden + 6.0 * rows * hidden)

        def flops(rows: int) -> float:
            return 2.0 * rows * (3 * top_k * hidden * features + experts * hidden)

        yield Operation(
            f"norm, router, {experts} experts of {features}", lambda rows: prepare(rows, False),
            sums, moved, flops, steps=2, close=close,
        )  # fmt: skip
        yield Operation(
            "the same, their sum, norm and product of the next layer", lambda rows: prepare(rows, True),
            following, lambda rows: moved(rows) + 2.0 * hidden * hidden,
            lambda rows: flops(rows) + 2.0 * rows * hidden * hidden, steps=4, close=close,
        )  # fmt: skip
        yield Operation(
            "the same, and its convolution", prepare_convolved, convolved, lambda rows: moved(rows) + 6.0 * hidden**2,
            lambda rows: flops(rows) + 6.0 * rows * hidden**2, most=STREAMS, steps=4, close=close,
        )  # fmt: skip

    def _logits(self) -> Operation:
        be, hidden, vocab = self.backend, self.config.hidden_size, self.config.vocab_size
        (x, table), (w, turn) = self.inputs(hidden), self.weights(vocab, hidden)

        def prepare(rows: int) -> Work:
            _, (given,) = self.begin(self.free(rows), table)
            return lambda: be.logits(given, turn())

        return Operation(
            f"logits, {vocab} x {hidden}", prepare, lambda rows: self.twin.linear(widen(x[:rows]), w),
            lambda rows: 2.0 * vocab * hidden + rows * (2.0 * hidden + 4.0 * vocab),
            lambda rows: 2.0 * rows * vocab * hidden, most=STREAMS,
        )  # fmt: skip

    # --------------------------------------------------------------------------------------------------------- results

    def done(self, out: Array) -> Array:
        """The result, with all its work queued: a GPU leaves some of it to whoever reads it."""
        getattr(out, "array", None)
        return out

    def values(self, out: Array) -> NDArray[Any]:
        """A result on the host."""
        return np.asarray(self.backend.read(self.done(out))).copy()
