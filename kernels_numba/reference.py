"""NumPy twins of the kernels, with the same signatures: float64 arithmetic, one obvious loop a row, bf16 rounding at
the same points. They share nothing with the kernels but the batch types."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .batch import PAGE_ROWS, RING_ROWS, Batch, SampleRows

HEAD = 64


def round_bf16(values: NDArray[Any]) -> NDArray[np.float64]:
    """Nearest-even bf16 of float64 values (through float32), held in float64."""
    bits = np.asarray(values, np.float32).view(np.uint32).astype(np.uint64)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32)
    return np.where(np.isnan(values), np.nan, rounded.astype(np.float64))


def widen(bits: NDArray[np.uint16]) -> NDArray[np.float64]:
    return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def bf16_bits(values: NDArray[Any]) -> NDArray[np.uint16]:
    """Nearest bf16 bits of finite values."""
    return (round_bf16(values).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


@dataclass
class History:
    """What a stream has seen: conv inputs u and K/V by (layer, slot) as growing lists of float64 rows."""

    rows: dict[tuple[str, int, int], list[NDArray[np.float64]]]

    def of(self, kind: str, layer: int, slot: int) -> list[NDArray[np.float64]]:
        return self.rows.setdefault((kind, layer, slot), [])


class Reference:
    """The twins of CpuBackend's operations; K/V and conv inputs are kept as plain lists in `History`."""

    def __init__(self, dtype: str) -> None:
        self.bf16 = dtype == "bfloat16"

    def r(self, values: NDArray[Any]) -> NDArray[np.float64]:
        return round_bf16(values) if self.bf16 else np.asarray(values, np.float64)

    def rms_norm(self, x: NDArray[Any], weight: NDArray[Any], eps: float) -> NDArray[np.float64]:
        x = x.astype(np.float64)
        y = self.r(x / np.sqrt((x * x).mean(-1, keepdims=True) + eps))
        return self.r(weight.astype(np.float64) * y)

    def linear(self, x: NDArray[Any], weight: NDArray[np.uint16], residual: Any = None) -> NDArray[np.float64]:
        y = self.r(x.astype(np.float64) @ widen(weight).T)
        return y if residual is None else self.r(residual.astype(np.float64) + y)

    def silu(self, x: NDArray[np.float64]) -> NDArray[np.float64]:
        return x / (1.0 + np.exp(-x))

    def short_conv(
        self, bcx: NDArray[Any], conv_weight: NDArray[Any], history: History, layer: int, batch: Batch
    ) -> NDArray[np.float64]:
        hidden = conv_weight.shape[0]
        taps = conv_weight.astype(np.float64)
        out = np.empty((len(bcx), hidden))
        for row in range(len(bcx)):
            b, c, x = (bcx[row, i * hidden : (i + 1) * hidden].astype(np.float64) for i in range(3))
            seen = history.of("u", layer, int(batch.seg_slot[batch.row_segment[row]]))
            seen.append(self.r(b * x))
            u = [np.zeros(hidden)] * 2 + seen
            z = self.r(taps[:, 0] * u[-3] + taps[:, 1] * u[-2] + taps[:, 2] * u[-1])
            out[row] = self.r(c * z)
        return out

    def rope_tables(self, theta: float, max_position: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        inverse = np.array([np.float32(1) / np.float32(theta ** (2 * i / HEAD)) for i in range(HEAD // 2)], np.float32)
        angle = (np.arange(max_position, dtype=np.float32)[:, None] * inverse).astype(np.float64)
        return self.r(np.cos(angle)), self.r(np.sin(angle))

    def rotate(self, x: NDArray[np.float64], cos: NDArray[Any], sin: NDArray[Any]) -> NDArray[np.float64]:
        a, b = x[..., : HEAD // 2], x[..., HEAD // 2 :]
        return np.concatenate(
            [self.r(self.r(a * cos) + self.r(-b * sin)), self.r(self.r(b * cos) + self.r(a * sin))], axis=-1
        )

    def attention_inputs(
        self,
        qkv: NDArray[Any],
        q_norm: NDArray[Any],
        k_norm: NDArray[Any],
        eps: float,
        cos: NDArray[Any],
        sin: NDArray[Any],
        history: History,
        layer: int,
        batch: Batch,
        heads: int,
        kv_heads: int,
    ) -> NDArray[np.float64]:
        out = np.empty((len(qkv), heads * HEAD))
        for row in range(len(qkv)):
            split = qkv[row].reshape(-1, HEAD)
            c, s = cos[batch.positions[row]].astype(np.float64), sin[batch.positions[row]].astype(np.float64)
            q = self.rotate(self.rms_norm(split[:heads], q_norm, eps), c, s)
            k = self.rotate(self.rms_norm(split[heads : heads + kv_heads], k_norm, eps), c, s)
            slot = int(batch.seg_slot[batch.row_segment[row]])
            history.of("k", layer, slot).append(k)
            history.of("v", layer, slot).append(split[heads + kv_heads :].astype(np.float64))
            out[row] = q.reshape(-1)
        return out

    def attention(
        self, q: NDArray[Any], history: History, layer: int, batch: Batch, heads: int, kv_heads: int
    ) -> NDArray[np.float64]:
        out = np.empty((len(q), heads * HEAD))
        for row in range(len(q)):
            slot, seen = int(batch.seg_slot[batch.row_segment[row]]), int(batch.positions[row]) + 1
            keys = np.stack(history.of("k", layer, slot)[:seen])
            values = np.stack(history.of("v", layer, slot)[:seen])
            for head in range(heads):
                source = head // (heads // kv_heads)
                scores = keys[:, source] @ q[row, head * HEAD : (head + 1) * HEAD].astype(np.float64) * 0.125
                p = np.exp(scores - scores.max())
                out[row, head * HEAD : (head + 1) * HEAD] = self.r(p @ values[:, source] / p.sum())
        return out

    def swiglu(
        self, x: NDArray[Any], w13: NDArray[np.uint16], w2: NDArray[np.uint16], residual: NDArray[Any] | None
    ) -> NDArray[np.float64]:
        features = len(w13) // 2
        gate, up = self.linear(x, w13[:features]), self.linear(x, w13[features:])
        act = self.r(self.r(self.silu(gate)) * up)
        return self.linear(act, w2, residual)

    def moe_route(
        self,
        x: NDArray[Any],
        gate: NDArray[np.uint16],
        expert_bias: NDArray[Any] | None,
        top_k: int,
        norm_topk: bool,
        scaling: float,
    ) -> tuple[NDArray[np.int32], NDArray[np.float64]]:
        scores = self.r(1.0 / (1.0 + np.exp(-self.linear(x, gate))))
        choice = scores if expert_bias is None else scores.astype(np.float32) + expert_bias
        ids = np.sort(np.argsort(-choice, axis=1, kind="stable")[:, :top_k], axis=1).astype(np.int32)
        weights = np.take_along_axis(scores, ids, 1)
        if norm_topk:
            weights = self.r(weights / self.r(self.r(weights.sum(1, keepdims=True)) + 1e-6))
        return ids, self.r(weights * scaling)

    def moe(
        self,
        x: NDArray[Any],
        gate: NDArray[np.uint16],
        expert_bias: NDArray[Any] | None,
        w13: NDArray[np.uint16],
        w2: NDArray[np.uint16],
        top_k: int,
        norm_topk: bool,
        scaling: float,
        residual: NDArray[Any],
    ) -> NDArray[np.float64]:
        ids, weights = self.moe_route(x, gate, expert_bias, top_k, norm_topk, scaling)
        out = np.empty(residual.shape)
        for row in range(len(x)):
            total = np.zeros(x.shape[1])
            for e, weight in zip(ids[row], weights[row], strict=True):
                total += self.r(weight * self.swiglu(x[row : row + 1], w13[e], w2[e], None)[0])
            out[row] = self.r(residual[row] + self.r(total))
        return out


def philox(counter: tuple[int, ...], key: tuple[int, int]) -> tuple[int, ...]:
    """Philox4x32-10 in plain integers (Salmon et al., SC 2011)."""
    c, k, mask = list(counter), list(key), 0xFFFFFFFF
    for _ in range(10):
        a, b = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(b >> 32) ^ c[1] ^ k[0], b & mask, (a >> 32) ^ c[3] ^ k[1], a & mask]
        k = [(k[0] + 0x9E3779B9) & mask, (k[1] + 0xBB67AE85) & mask]
    return tuple(c)


def uniform(seed: int, choice: int, position: int) -> float:
    words = philox((position, choice, 0, 0), (seed & 0xFFFFFFFF, seed >> 32))
    return float(((words[0] << 32) | words[1]) >> 11) * 2.0**-53


def kept_weights(logits: NDArray[np.float32], rows: SampleRows, row: int) -> NDArray[np.float64]:
    """Unnormalised weights [vocab] that row `row` draws from (one 1.0 if it is greedy), zero where not kept."""
    z = logits[row, : rows.vocab].astype(np.float64)
    for i in range(rows.bias_start[row], rows.bias_start[row + 1]):
        z[rows.bias_id[i]] += rows.bias_value[i]
    z[rows.ban_id[rows.ban_start[row] : rows.ban_start[row + 1]]] = -np.inf
    if rows.mask_row[row] >= 0:
        allowed = np.unpackbits(rows.mask[rows.mask_row[row]].view(np.uint8), bitorder="little")[: rows.vocab]
        z[allowed == 0] = -np.inf
    seen = rows.prompt_seen[rows.slot[row], : rows.vocab].astype(bool)
    ahead = rows.ahead_id[rows.ahead_start[row] : rows.ahead_start[row + 1]]  # drafts before this row count as drawn
    counts = rows.output_count[rows.slot[row], : rows.vocab] + np.bincount(ahead, minlength=rows.vocab)
    z = np.where(seen | (counts > 0), np.where(z > 0, z / rows.repetition[row], z * rows.repetition[row]), z)
    z = z - rows.presence[row] * (counts > 0) - rows.frequency[row] * counts
    order = np.argsort(-z, kind="stable")
    if rows.temperature[row] == 0:
        return np.eye(1, rows.vocab, int(order[0]))[0]
    p = np.exp((z - z.max()) / np.float64(rows.temperature[row]))
    kept = order[: rows.top_k[row]] if rows.top_k[row] > 0 else order
    if rows.top_p[row] < 1:
        above = np.concatenate([[0.0], np.cumsum(p[kept])[:-1]])
        kept = kept[(above < rows.top_p[row] * p[kept].sum()) | (np.arange(len(kept)) == 0)]
    kept = kept[p[kept] >= rows.min_p[row]]
    weights = np.zeros(rows.vocab)
    weights[kept] = p[kept]
    return weights


def draw(logits: NDArray[np.float32], rows: SampleRows, row: int) -> int:
    weights = kept_weights(logits, rows, row)
    u = uniform(int(rows.seed[row]), int(rows.choice[row]), int(rows.position[row]))
    return int(np.searchsorted(np.cumsum(weights), u * weights.sum(), side="right"))


def log_probabilities(
    row: NDArray[np.float32], vocab: int, token: int, top_n: int
) -> tuple[float, int, list[int], list[float]]:
    z = row[:vocab].astype(np.float64)
    logprobs = z - z.max() - math.log(np.exp(z - z.max()).sum())
    order = np.argsort(-z, kind="stable")
    best = order[:top_n]
    return float(logprobs[token]), int(np.where(order == token)[0][0]) + 1, best.tolist(), logprobs[best].tolist()


def make_batch(segments: list[tuple[int, int, int]], slots: int, pages: NDArray[np.int32]) -> Batch:
    """Batch of segments (slot, first position, rows); `pages` [slots, pages a stream]."""
    starts = np.cumsum([0] + [rows for _, _, rows in segments])
    return Batch(
        tokens=np.zeros(starts[-1], np.int32),
        positions=np.concatenate([np.arange(p, p + n, dtype=np.int32) for _, p, n in segments]),
        row_segment=np.repeat(np.arange(len(segments), dtype=np.int32), [n for _, _, n in segments]),
        seg_start=starts.astype(np.int32),
        seg_slot=np.array([slot for slot, _, _ in segments], np.int32),
        page_table=pages,
    )


def shuffled_pages(rng: np.random.Generator, slots: int, positions: int) -> NDArray[np.int32]:
    each = -(-positions // PAGE_ROWS)
    return rng.permutation(slots * each).astype(np.int32).reshape(slots, each)


__all__ = [
    "HEAD",
    "PAGE_ROWS",
    "RING_ROWS",
    "History",
    "Reference",
    "bf16_bits",
    "draw",
    "kept_weights",
    "log_probabilities",
    "make_batch",
    "philox",
    "round_bf16",
    "shuffled_pages",
    "uniform",
    "widen",
]
