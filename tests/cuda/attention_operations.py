"""What the attention kernels must do, against the NumPy twin: see operations.py."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernels_numba import reference
from kernels_numba.batch import PAGE_ROWS, Batch
from kernels_numba.cuda import attention, attention_decode, attention_ranges, attention_wgmma, rope
from kernels_numba.reference import bf16_bits

from .operations import EPS, NAN_PAIR, Array, Run, close, i32, normal, pairs, poisoned, values_of, with_padding


class Streams:
    """K/V of a few streams in a pool whose unused rows hold NaN."""

    def __init__(self, rng: np.random.Generator, lengths: list[int], kv_heads: int, pages: Array | None = None) -> None:
        self.kv_heads, self.layers, self.layer = kv_heads, 2, 1
        self.pages = reference.shuffled_pages(rng, len(lengths), max(lengths)) if pages is None else pages
        self.k = [normal(rng, n, kv_heads, 64) for n in lengths]
        self.v = [normal(rng, n, kv_heads, 64) for n in lengths]
        self.fill()

    def fill(self) -> None:
        pool = np.full((self.pages.size, self.layers, 2, self.kv_heads, PAGE_ROWS, 8, 8), 0xFFFF, np.uint16)
        for slot, kv in enumerate(zip(self.k, self.v, strict=True)):
            p = np.arange(len(kv[0]))
            order = np.arange(8)[None, :] ^ (p & 7)[:, None]
            for kind, x in enumerate(kv):
                for head in range(self.kv_heads):
                    pieces = bf16_bits(x[:, head]).reshape(-1, 8, 8)
                    stored = np.take_along_axis(pieces, order[:, :, None], 1)
                    pool[self.pages[slot, p // PAGE_ROWS], self.layer, kind, head, p % PAGE_ROWS] = stored
        self.pool = pool.reshape(-1).view(np.uint32)

    def expected(self, q: Array, slot: int, position: int, group: int) -> Array:
        """One row's result, q [heads, 64]."""
        out = np.empty(q.shape)
        for head in range(len(q)):
            keys, values = self.k[slot][: position + 1, head // group], self.v[slot][: position + 1, head // group]
            scores = keys @ q[head] * 0.125
            p = np.exp(scores - scores.max())
            out[head] = p @ values / p.sum()
        return out.reshape(-1)


def attention_by_rows(
    run: Run, streams: Streams, q: Array, batch: Batch, group: int, tile: int, way: attention.Way, each: int = 0
) -> NDArray[np.uint32]:
    """A prompt's kernel with tiles of `tile` rows; each: in parts of so many ranges, merged afterwards."""
    bounds = [(int(a), int(b)) for a, b in zip(batch.seg_start, batch.seg_start[1:], strict=False)]
    slots, rows, heads = batch.seg_slot, len(batch.tokens), streams.kv_heads * group
    tiles = [(r, min(tile, b - r)) for s, (a, b) in enumerate(bounds) if slots[s] >= 0 for r in range(a, b, tile)]
    start, ranges = planned(run, batch) if each else (np.zeros(rows + 1, i32), 1)
    partial, scale = np.full(ranges * heads * 64, np.nan, np.float32), np.full(ranges * heads * 2, np.nan, np.float32)
    parts = -(-int(batch.positions.max() // 128 + 1) // each) if each else 1
    out = poisoned(q.size)
    run(
        way.kernel, (len(tiles), streams.kv_heads, parts), way.threads, pairs(q), streams.pool,
        i32(streams.layer), i32(streams.layers), i32(streams.kv_heads), i32(group), batch.positions, batch.row_segment,
        batch.seg_slot, streams.pages.reshape(-1).copy(), i32(streams.pages.shape[1]),
        np.array([t[0] for t in tiles], i32), np.array([t[1] for t in tiles], i32), i32(each), start, partial, scale,
        out, shared=way.shared,
    )  # fmt: skip
    return merged(run, partial, scale, start, batch, heads, out, 32) if each else out


def planned(run: Run, batch: Batch) -> tuple[NDArray[np.int32], int]:
    """Where each row's ranges begin, and how many there are."""
    rows = len(batch.tokens)
    start = np.full(rows + 1, -9, i32)
    run(attention_ranges.attention_plan, 1, 256, batch.positions, batch.row_segment, batch.seg_slot, i32(rows), start)
    live = batch.seg_slot[batch.row_segment] >= 0
    assert start.tolist() == np.cumsum(np.concatenate([[0], (batch.positions // 128 + 1) * live])).tolist()
    return start, int(start[-1])


def merged(
    run: Run, partial: Array, scale: Array, start: Array, batch: Batch, heads: int, out: NDArray[np.uint32],
    at_once: int,
) -> NDArray[np.uint32]:  # fmt: skip
    rows = len(batch.tokens)
    run(
        attention_ranges.attention_merge, (rows, heads), attention_ranges.MERGE_THREADS, partial, scale, start,
        i32(rows), batch.positions, batch.row_segment, batch.seg_slot, i32(heads), i32(at_once), out,
        shared=at_once * attention_ranges.MERGE_BYTES,
    )  # fmt: skip
    return out


def attention_by_ranges(
    run: Run, streams: Streams, q: Array, batch: Batch, group: int, blocks: int, at_once: int
) -> NDArray[np.uint32]:
    rows, heads = len(batch.tokens), streams.kv_heads * group
    start, ranges = planned(run, batch)
    partial, scale = np.full(ranges * heads * 64, np.nan, np.float32), np.full(ranges * heads * 2, np.nan, np.float32)
    run(
        attention_ranges.attention_ranges, (blocks, streams.kv_heads), 32, pairs(q), streams.pool, i32(streams.layer),
        i32(streams.layers), i32(streams.kv_heads), i32(group), batch.positions, batch.row_segment, batch.seg_slot,
        streams.pages.reshape(-1).copy(), i32(streams.pages.shape[1]), i32(rows), start, partial, scale,
        shared=2 * attention.RANGE_BYTES,
    )  # fmt: skip
    return merged(run, partial, scale, start, batch, heads, poisoned(q.size), at_once)


def check_attention(
    run: Run, rng: np.random.Generator, group: int, kv_heads: int, segments: list[Any], hopper: bool
) -> None:
    """Prompt and decode kernels against the reference, and the same bits of each row however it is computed."""
    lengths = [max([p + n for s, p, n in segments if s == slot], default=1) for slot in range(3)]
    streams = Streams(rng, lengths, kv_heads)
    batch = with_padding(reference.make_batch(segments, 3, streams.pages), 1)
    rows, heads = len(batch.tokens), group * kv_heads
    q = normal(rng, rows, heads * 64, scale=2)
    ways = [attention.WAY, *([attention_wgmma.WAY] if hopper else [])]
    most = attention.QUERIES // group
    out = attention_by_rows(run, streams, q, batch, group, most, attention.WAY)
    shown = values_of(out, rows, heads * 64)[:-1]
    for row in range(rows - 1):
        slot, p = int(batch.seg_slot[batch.row_segment[row]]), int(batch.positions[row])
        close(shown[row], streams.expected(q[row].reshape(heads, 64), slot, p, group), steps=2)
    words = out.reshape(rows, -1)[:-1]
    for way in ways:
        most = way.queries // group
        for tile, each in ((1, 0), (5, 0), (most - 1, 0), (most, 0), (7, 1), (most, 3)):
            other = attention_by_rows(run, streams, q, batch, group, tile, way, each).reshape(rows, -1)
            assert np.array_equal(other[:-1], words), f"{way.kernel.name}, tiles of {tile} rows, parts of {each}"
    for blocks, at_once in ((3, 32), (200, 64), (7, 256)):
        other = attention_by_ranges(run, streams, q, batch, group, blocks, at_once).reshape(rows, -1)
        assert np.array_equal(other[:-1], words), f"ranges on {blocks} blocks, {at_once} at once"
        assert not other[-1].any()
    streams.pages = rng.permutation(streams.pages.reshape(-1)).reshape(streams.pages.shape)
    streams.fill()
    for way in ways:
        other = attention_by_rows(run, streams, q, batch, group, way.queries // group, way)
        assert np.array_equal(other.reshape(rows, -1)[:-1], words), "pages"


def check_attention_decode(
    run: Run, rng: np.random.Generator, group: int, kv_heads: int, segments: list[Any], blocks: int
) -> None:
    """One kernel leaves the bits of two: `attention_inputs`, then `attention_ranges`. segments: (slot, first position,
    rows); what the cache doesn't hold yet is NaN."""
    slots, heads = 3, group * kv_heads
    pages = reference.shuffled_pages(rng, slots, max(p + n for _, p, n in segments))
    lengths = [max((p for s, p, _ in segments if s == slot), default=0) for slot in range(slots)]
    streams = Streams(rng, lengths, kv_heads, pages)
    batch = with_padding(reference.make_batch(segments, slots, pages), 1)
    rows, every = len(batch.tokens), heads + 2 * kv_heads
    qkv, q_norm, k_norm = normal(rng, rows, every * 64), normal(rng, 64), normal(rng, 64)
    cos, sin = rope.rope_tables(1e6, pages.shape[1] * PAGE_ROWS)
    given = (pairs(qkv), pairs(q_norm), pairs(k_norm), EPS, pairs(cos), pairs(sin))
    starts = np.cumsum([0, *((batch.positions // 128 + 1) * (batch.seg_slot[batch.row_segment] >= 0))]).astype(i32)
    layers = (i32(streams.layer), i32(streams.layers))
    where = (pages.reshape(-1).copy(), i32(pages.shape[1]))
    results = []
    for together in (False, True):
        streams.fill()
        partial = np.full(starts[-1] * heads * 64, NAN_PAIR, np.uint32)
        scale = np.full(starts[-1] * heads * 2, np.nan, np.float32)
        share = (*layers, i32(kv_heads), i32(group), batch.positions, batch.row_segment)
        if together:
            run(
                attention_decode.attention_decode, (blocks, kv_heads), 32, *given, streams.pool, *share,
                batch.seg_start, batch.seg_slot, *where, i32(rows), partial, scale, shared=attention_decode.SHARED,
            )  # fmt: skip
        else:
            q = poisoned(rows * heads * 64)
            run(
                rope.attention_inputs, (rows, -(-every // rope.WARPS)), rope.THREADS, *given, streams.pool, *layers,
                batch.positions, batch.row_segment, batch.seg_slot, *where, i32(heads), i32(kv_heads), q,
            )  # fmt: skip
            run(
                attention_ranges.attention_ranges, (blocks, kv_heads), 32, q, streams.pool, *share, batch.seg_slot,
                *where, i32(rows), starts, partial, scale, shared=2 * attention.RANGE_BYTES,
            )  # fmt: skip
        assert np.isfinite(partial.view(np.float32)).all()
        results.append((partial, scale.view(np.uint32), streams.pool.copy()))
    for alone, both in zip(*results, strict=True):
        assert np.array_equal(alone, both)
