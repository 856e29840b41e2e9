"""What each kernel beside the products must do, against the NumPy twins. The same checks run on a GPU and, for kernels
without tensor cores, in Numba's CUDA simulator: `run(kernel, grid, block, *arguments, shared=0)` launches a kernel on
NumPy arrays and leaves its results in them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernels_numba import reference
from kernels_numba.batch import FED_BACK, PAGE_ROWS, Batch, SampleRows
from kernels_numba.cuda import (
    conv,
    embed,
    logprobs,
    norm,
    rope,
    route,
    route_rows,
    sample,
    sample_parts,
)
from kernels_numba.reference import Reference, bf16_bits, round_bf16, widen

Run = Callable[..., None]
Array = NDArray[Any]
EPS = np.float32(1e-5)
NAN_PAIR = 0xFFFFFFFF
i32 = np.int32


def pairs(values: Array) -> NDArray[np.uint32]:
    """bf16 values as the kernels take them: two in 32 bits, flat."""
    return bf16_bits(np.ascontiguousarray(values)).reshape(-1).view(np.uint32).copy()


def values_of(words: NDArray[np.uint32], *shape: int) -> Array:
    return widen(words.view(np.uint16)).reshape(shape)


def poisoned(count: int) -> NDArray[np.uint32]:
    """`count` bf16 NaNs."""
    return np.full(count // 2, NAN_PAIR, np.uint32)


def normal(rng: np.random.Generator, *shape: int, scale: float = 1.0) -> Array:
    return round_bf16(rng.standard_normal(shape) * scale)


def close(actual: Array, expected: Array, steps: float = 1.0) -> None:
    """Each value within `steps` bf16 steps of its own size or half of one of the largest's, and none NaN."""
    assert np.isfinite(actual).all()
    allowed = steps * (2.0**-7 * np.abs(expected) + 2.0**-9 * np.abs(expected).max(initial=1e-3))
    assert (np.abs(actual - expected) <= allowed).all(), np.abs(actual - expected).max()


def with_padding(batch: Batch, count: int) -> Batch:
    """`count` padding rows after the batch's."""
    rows, segments = len(batch.tokens), len(batch.seg_slot)
    more = np.arange(1, count + 1)
    return batch._replace(
        tokens=np.concatenate([batch.tokens, np.zeros(count, i32)]),
        positions=np.concatenate([batch.positions, np.zeros(count, i32)]),
        row_segment=np.concatenate([batch.row_segment, (segments - 1 + more).astype(i32)]),
        seg_start=np.concatenate([batch.seg_start, (rows + more).astype(i32)]),
        seg_slot=np.concatenate([batch.seg_slot, np.full(count, -1, i32)]),
    )


def check_embed(run: Run, rng: np.random.Generator, rows: int, hidden: int) -> None:
    from kernels_numba.cuda.pack import pack_on_host

    weight = bf16_bits(normal(rng, 50, hidden))
    packed = pack_on_host(weight)
    tokens = rng.integers(0, 50, rows).astype(i32)
    drawn = rng.integers(0, 50, 4).astype(i32)
    segment, slot = np.arange(rows, dtype=i32), rng.integers(0, 4, rows).astype(i32)
    expected = weight[tokens]
    if rows > 2:
        tokens[1], slot[2] = FED_BACK, -1
        expected[1], expected[2] = weight[drawn[slot[1]]], 0
    out = poisoned(rows * hidden)
    run(embed.embed, rows, embed.THREADS, tokens, drawn, segment, slot, packed.view(np.uint32), i32(hidden), out)
    assert np.array_equal(out.view(np.uint16).reshape(rows, hidden), expected)


def check_norm(run: Run, rng: np.random.Generator, rows: int, hidden: int) -> None:
    x, w = normal(rng, rows, hidden, scale=3), normal(rng, hidden)
    out = poisoned(rows * hidden)
    run(norm.rms_norm, rows, norm.THREADS, pairs(x), pairs(w), EPS, i32(hidden), out)
    close(values_of(out, rows, hidden), Reference("bfloat16").rms_norm(x, w, float(EPS)))
    alone = poisoned(hidden)
    run(norm.rms_norm, 1, norm.THREADS, pairs(x[-1:]), pairs(w), EPS, i32(hidden), alone)
    assert np.array_equal(alone, out.reshape(rows, -1)[-1])


def check_attention_inputs(run: Run, rng: np.random.Generator, heads: int, kv_heads: int, segments: list[Any]) -> None:
    slots, layers, layer = 3, 2, 1
    pages = reference.shuffled_pages(rng, slots, max(p + n for _, p, n in segments))
    batch = with_padding(reference.make_batch(segments, slots, pages), 2)
    rows, every = len(batch.tokens), heads + 2 * kv_heads
    qkv, q_norm, k_norm = normal(rng, rows, every * 64), normal(rng, 64), normal(rng, 64)
    length = pages.shape[1] * PAGE_ROWS
    cos, sin = rope.rope_tables(1e6, length)
    results = []
    blocks = -(-every // rope.WARPS)
    for kernel, grid, more in (
        (rope.attention_inputs, (rows, blocks), []),
        (rope.attention_inputs_rows, -(-rows // rope.BLOCK_ROWS), [i32(rows)]),
    ):
        q, pool = poisoned(rows * heads * 64), poisoned(pages.size * layers * 2 * kv_heads * PAGE_ROWS * 64)
        run(
            kernel, grid, rope.THREADS, pairs(qkv), pairs(q_norm), pairs(k_norm), EPS, pairs(cos), pairs(sin), pool,
            i32(layer), i32(layers), batch.positions, batch.row_segment, batch.seg_slot, pages.reshape(-1),
            i32(pages.shape[1]), i32(heads), i32(kv_heads), *more, q,
        )  # fmt: skip
        results.append((q, pool))
    assert np.array_equal(q, results[0][0]) and np.array_equal(pool, results[0][1])
    twin, history = Reference("bfloat16"), reference.History({})
    real = len(batch.tokens) - 2
    expected = twin.attention_inputs(
        qkv[:real], q_norm, k_norm, float(EPS), *twin.rope_tables(1e6, length), history, layer, batch, heads, kv_heads
    )
    close(values_of(q, rows, heads * 64)[:real], expected)
    lines = pool.view(np.uint16).reshape(pages.size, layers, 2, kv_heads, PAGE_ROWS, 64)
    untouched = np.ones((pages.size, PAGE_ROWS), bool)
    for row in range(real):
        slot, p = int(batch.seg_slot[batch.row_segment[row]]), int(batch.positions[row])
        page = pages[slot, p // PAGE_ROWS]
        untouched[page, p % PAGE_ROWS] = False
        nth = p - next(first for s, first, _ in segments if s == slot)
        for kind, name in enumerate("kv"):
            stored = widen(unswizzled(lines[page, layer, kind, :, p % PAGE_ROWS], p))
            close(stored, history.of(name, layer, slot)[nth])
    assert (lines[:, 1 - layer] == 0xFFFF).all() and (lines.swapaxes(1, 4)[untouched] == 0xFFFF).all()


def unswizzled(line: Array, position: int) -> Array:
    """A stored key or value [..., 64] in the order of its dims."""
    pieces = line.reshape(*line.shape[:-1], 8, 8)
    return pieces[..., np.arange(8) ^ (position & 7), :].reshape(line.shape)


def check_conv(run: Run, rng: np.random.Generator, hidden: int, steps: list[list[Any]], tile: int) -> None:
    """Several steps over slots whose ring holds NaN at first."""
    slots, layers, layer = 3, 2, 1
    ring, weight = poisoned(layers * slots * 32 * hidden), normal(rng, hidden, 3)
    history, twin = reference.History({}), Reference("bfloat16")
    pages = reference.shuffled_pages(rng, slots, 1)
    for segments in steps:
        batch = reference.make_batch(segments, slots, pages)
        real = len(batch.tokens)
        batch = with_padding(batch, 3)
        rows = real + 3
        bcx = normal(rng, rows, 3 * hidden)
        out = poisoned(rows * hidden)
        run(
            conv.short_conv, (-(-rows // tile), -(-hidden // 2 // conv.THREADS)), conv.THREADS, pairs(bcx),
            pairs(weight.T), ring, i32(layer), i32(slots), batch.positions, batch.row_segment, batch.seg_start,
            batch.seg_slot, i32(rows), i32(hidden), i32(tile), out,
        )  # fmt: skip
        close(values_of(out, rows, hidden)[:real], twin.short_conv(bcx[:real], weight, history, layer, batch))
        kept = ring.view(np.uint16).reshape(layers, slots, 32, hidden)
        assert (kept[1 - layer] == 0xFFFF).all()
        for slot, first, count in segments:
            seen = history.of("u", layer, slot)
            for position in range(max(0, first + count - 32), first + count):
                assert np.array_equal(widen(kept[layer, slot, position % 32]), seen[position])


def check_routing(
    run: Run,
    rng: np.random.Generator,
    rows: int,
    experts: int,
    top_k: int,
    hidden: int,
    chooser: Any = None,
) -> None:
    """Norm, choice, grouping and sum. chooser: a kernel of (logits, bias, top_k, ids, weights) in place of
    norm_route."""
    bias = (rng.standard_normal(experts) * 1e-2).astype(np.float32)
    segment, slot = np.arange(rows, dtype=i32), np.zeros(rows, i32)
    padding = [r for r in range(rows) if r % 7 == 3]
    slot[padding] = -1
    live = [r for r in range(rows) if r not in padding]
    ids, weights = np.full(rows * top_k, 77, i32), np.full(rows * top_k, np.nan, np.float32)
    starts, place = np.full(experts + 1, -9, i32), np.full(rows * top_k, -9, i32)
    pair_row, pair_weight = np.full(rows * top_k, -9, i32), np.full(rows * top_k, np.nan, np.float32)
    twin = Reference("bfloat16")
    if chooser is None:
        h, gate, w = normal(rng, rows, hidden), normal(rng, experts, hidden, scale=hidden**-0.5), normal(rng, hidden)
        x, plain = poisoned(rows * hidden), poisoned(rows * hidden)
        arguments = [
            pairs(gate), bias, i32(1), segment, slot, i32(rows), i32(hidden), i32(experts), i32(top_k), i32(1),
            np.float32(1),
        ]  # fmt: skip
        blocks = -(-rows // route.ROUTE_ROWS)
        tiles = -(-experts // route.TILE) if blocks <= route.SPREAD_BLOCKS else 1
        scratch, arrived = np.full(blocks * 8 * 64, np.nan, np.float32), np.zeros(blocks, np.uint32)
        run(
            route.norm_route, (blocks, tiles), route.ROUTE_THREADS, pairs(h), pairs(w), EPS, x, *arguments, scratch,
            arrived, ids, weights, starts, pair_row, pair_weight, place,
        )  # fmt: skip
        assert not arrived.any()
        run(norm.rms_norm, rows, norm.THREADS, pairs(h), pairs(w), EPS, i32(hidden), plain)
        assert np.array_equal(x, plain)
        logits = values_of(x, rows, hidden) @ gate.T
        if rows >= route_rows.MANY_ROWS and experts % route.TILE == 0:
            many, many_ids, many_weights = poisoned(rows * hidden), np.full_like(ids, 77), np.full_like(weights, np.nan)
            run(
                route_rows.norm_route_rows, -(-rows // route_rows.MANY_ROWS), route.ROUTE_THREADS, pairs(h), pairs(w),
                EPS, many, *arguments, many_ids, many_weights,
            )  # fmt: skip
            assert np.array_equal(many, x)
            assert np.array_equal(many_ids, ids) and np.array_equal(many_weights, weights)
        if blocks > 1:
            assert (starts == -9).all() and (place == -9).all()
        else:
            few = (starts.copy(), pair_row.copy(), pair_weight.copy(), place.copy())
        # a row alone
        row = live[-1]
        alone, alone_weights = np.full(top_k, 77, i32), np.full(top_k, np.nan, np.float32)
        arguments[3:6] = [np.zeros(1, i32), np.zeros(1, i32), i32(1)]
        none = [
            np.full(experts + 1, -9, i32),
            np.full(top_k, -9, i32),
            np.full(top_k, np.nan, np.float32),
            np.full(top_k, -9, i32),
        ]
        run(
            route.norm_route, 1, route.ROUTE_THREADS, pairs(h[row]), pairs(w), EPS, poisoned(hidden), *arguments,
            scratch, arrived, alone, alone_weights, *none,
        )  # fmt: skip
        assert np.array_equal(alone, ids.reshape(rows, top_k)[row])
        assert np.array_equal(alone_weights, weights.reshape(rows, top_k)[row])
    else:
        logits = round_bf16(rng.standard_normal((rows, experts)) * 0.05)  # many ties
        run(
            chooser,
            rows,
            32,
            logits.astype(np.float32),
            bias,
            i32(top_k),
            ids.reshape(rows, top_k),
            weights.reshape(rows, top_k),
        )
        ids.reshape(rows, top_k)[padding] = -1
    twin.linear = lambda x, gate, residual=None: round_bf16(logits)  # type: ignore[method-assign]
    expected, expected_weights = twin.moe_route(logits, None, bias, top_k, True, 1.0)
    ids, weights = ids.reshape(rows, top_k), weights.reshape(rows, top_k)
    assert (ids[padding] == -1).all()
    same = [r for r in live if np.array_equal(ids[r], expected[r])]
    # a logit on a rounding boundary may fall on either side
    assert len(same) == len(live) if chooser is not None else len(same) >= 0.9 * len(live)
    close(weights[same], expected_weights[same])

    run(
        route.group_rows, experts, route.GROUP_THREADS, ids.reshape(-1).copy(), weights.reshape(-1).copy(), i32(rows),
        i32(top_k), i32(experts), starts, pair_row, pair_weight, place,
    )  # fmt: skip
    members = [[(r, j) for r in range(rows) for j in range(top_k) if ids[r, j] == e] for e in range(experts)]
    assert starts.tolist() == np.cumsum([0] + [len(m) for m in members]).tolist()
    flat = [pair for m in members for pair in m]
    assert pair_row[: len(flat)].tolist() == [r for r, _ in flat]
    assert pair_weight[: len(flat)].tolist() == [weights[pair] for pair in flat]
    if chooser is None and blocks == 1:
        assert all(
            np.array_equal(a[: len(b)], b)
            for a, b in zip(few, (starts, pair_row[: len(flat)], pair_weight[: len(flat)], place), strict=True)
        )
    where = {pair: i for i, pair in enumerate(flat)}
    assert place.tolist() == [where.get((r, j), -1) for r in range(rows) for j in range(top_k)]

    y, h, w = normal(rng, rows * top_k, hidden), normal(rng, rows, hidden), normal(rng, hidden)
    y[len(flat) :] = np.nan
    out, fused, normed = poisoned(rows * hidden), poisoned(rows * hidden), poisoned(rows * hidden)
    words = bf16_bits(np.nan_to_num(y))
    words[len(flat) :] = 0x7FFF
    words = words.reshape(-1).view(np.uint32)
    run(route.combine_experts, rows, 256, words, place, pairs(h), i32(top_k), i32(hidden), out)
    run(
        route.combine_experts_norm,
        rows,
        256,
        words,
        place,
        pairs(h),
        i32(top_k),
        pairs(w),
        EPS,
        i32(hidden),
        fused,
        normed,
    )
    expected = h.copy()
    for row in live:
        total = np.float32(0)
        for j in range(top_k):
            total = np.float32(total + np.float32(y[where[row, j]])[:])
        expected[row] = round_bf16(h[row] + round_bf16(total))
    assert np.array_equal(values_of(out, rows, hidden), expected)
    assert np.array_equal(fused, out)
    close(values_of(normed, rows, hidden), twin.rms_norm(expected, w, float(EPS)))


def random_controls(rng: np.random.Generator, n: int, width: int, vocab: int) -> SampleRows:
    slots = n + 1

    def pick(*options: float, dtype: Any = np.float32) -> Array:
        return rng.choice(options, n).astype(dtype)

    def lists(most: int) -> tuple[Array, Array]:
        counts = rng.integers(0, most, n)
        ids = [rng.choice(vocab, count, replace=False) for count in counts]
        return np.concatenate([[0], np.cumsum(counts)]).astype(i32), np.concatenate([*ids, [0]]).astype(i32)

    bias_start, bias_id = lists(4)
    ban_start, ban_id = lists(4)
    ahead_start, ahead_id = lists(3)
    counts = (rng.random((slots, width)) < 0.05) * rng.integers(1, 4, (slots, width))
    return SampleRows(
        temperature=pick(0, 0.3, 1, 2),
        top_k=pick(0, 1, 5, 50, dtype=i32),
        top_p=pick(1, 0.9, 0.3, 1e-6),
        min_p=pick(0, 0.05, 0.3),
        repetition=pick(1, 2),  # penalties that are exact in float32 as in float64, so that ties stay ties
        presence=pick(0, 0.5),
        frequency=pick(0, 0.25),
        seed=rng.integers(0, 2**63, n).astype(np.uint64),
        choice=rng.integers(0, 3, n).astype(np.uint32),
        position=rng.integers(0, 5000, n).astype(np.uint32),
        slot=rng.permutation(slots)[:n].astype(i32),
        prompt_seen=(rng.random((slots, width)) < 0.1).astype(np.uint8),
        output_count=counts.astype(i32),
        bias_start=bias_start,
        bias_id=bias_id,
        bias_value=(rng.standard_normal(len(bias_id)) * 4).astype(np.float32),
        ban_start=ban_start,
        ban_id=ban_id,
        ahead_start=ahead_start,
        ahead_id=ahead_id,
        mask_row=np.where(rng.random(n) < 0.4, rng.permutation(n), -1).astype(i32),
        mask=rng.integers(0, 2**32, (n, -(-vocab // 32)), np.uint32),
        vocab=vocab,
        top_n=pick(-1, 0, 3, dtype=i32),
    )


CONTROLS = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition",
    "presence",
    "frequency",
    "seed",
    "choice",
    "position",
    "slot",
    "mask_row",
)
LISTS = ("bias_start", "bias_id", "bias_value", "ban_start", "ban_id", "ahead_start", "ahead_id", "top_n")


def check_sample(
    run: Run, rng: np.random.Generator, n: int, width: int, vocab: int, scale: float, ties: bool, parts: Sequence[int]
) -> None:
    """Draws against the twin's, and the same whatever the number of blocks a row."""
    logits = rng.standard_normal((n, width)) * scale
    logits = round_bf16(np.round(logits * 2) / 2 if ties else logits).astype(np.float32)
    logits[:, vocab:] = 1e9
    rows, most = random_controls(rng, n, width, vocab), 3
    counts = rows.output_count.copy().reshape(-1)
    results = []
    for each in parts:
        drawn, token, rank = np.full(n + 1, -7, i32), np.full(n, -7, i32), np.full(n, -7, i32)
        logprob, top_ids, top = np.zeros(n, np.float32), np.full(n * most, -7, i32), np.zeros(n * most, np.float32)
        exchange, arrived = np.full(n * each * 2 * sample_parts.BINS, 7, np.uint64), np.zeros(2 * n, np.uint32)
        run(
            sample.sample, (n, each), sample_parts.THREADS, logits.reshape(-1), i32(width), i32(vocab),
            np.full(n * width, np.nan, np.float32), *(getattr(rows, name) for name in CONTROLS),
            rows.mask.reshape(-1), i32(rows.mask.shape[1]), rows.prompt_seen.reshape(-1), counts,
            *(getattr(rows, name) for name in LISTS), i32(most), drawn, token, logprob, rank, top_ids, top, exchange,
            arrived,
        )  # fmt: skip
        assert not arrived.any()
        results.append([x.tobytes() for x in (drawn, token, logprob, rank, top_ids, top)])
        assert results[0] == results[-1], f"{each} parts"
    for row in range(n):
        allowed = possible_draws(logits, rows, row)
        assert token[row] in allowed
        assert drawn[rows.slot[row]] == token[row]
        wanted = int(rows.top_n[row])
        if wanted < 0:
            assert np.isnan(logprob[row]) and rank[row] == 0
        else:
            value, place, ids, best = reference.log_probabilities(logits[row], vocab, int(token[row]), wanted)
            assert abs(logprob[row] - value) < 2e-5 and rank[row] == place
            assert top_ids.reshape(n, most)[row, :wanted].tolist() == ids
            assert np.allclose(top.reshape(n, most)[row, :wanted], best, atol=2e-5)
        assert (top_ids.reshape(n, most)[row, max(wanted, 0) :] == -1).all()
    assert np.array_equal(counts, rows.output_count.reshape(-1)), "only the host counts"
    again, each = np.full(n, -7, i32), parts[-1]
    targets, top_n = token.copy(), np.full(n, 2, i32)
    exchange, arrived = np.full(n * each * 2 * sample_parts.BINS, 7, np.uint64), np.zeros(2 * n, np.uint32)
    run(
        logprobs.token_logprobs, (n, each), sample_parts.THREADS, logits.reshape(-1), i32(width), i32(vocab), targets,
        top_n, i32(most), logprob, again, top_ids, top, exchange, arrived,
    )  # fmt: skip
    assert not arrived.any()
    for row in range(n):
        value, place, ids, _ = reference.log_probabilities(logits[row], vocab, int(token[row]), 2)
        assert (
            abs(logprob[row] - value) < 2e-5
            and again[row] == place
            and top_ids.reshape(n, most)[row].tolist() == [*ids, -1]
        )


def possible_draws(logits: Array, rows: SampleRows, row: int) -> set[int]:
    """The ids that the twin draws with random numbers up to 1e-4 away."""
    weights = reference.kept_weights(logits, rows, row)
    sums = np.cumsum(weights) / weights.sum()
    u = reference.uniform(int(rows.seed[row]), int(rows.choice[row]), int(rows.position[row]))
    first, last = (int(np.searchsorted(sums, min(max(u + d, 0), 1 - 1e-12), side="right")) for d in (-1e-4, 1e-4))
    return {at for at in range(first, last + 1) if weights[at] > 0}
