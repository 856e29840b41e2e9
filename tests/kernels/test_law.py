"""One row, one value: a row gets the same bits alone, in any batch, chunk, page order and thread count."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels_numba.cpu import CpuBackend
from kernels_numba.reference import HEAD, make_batch, shuffled_pages

from .helpers import DTYPES, THREADS, activations, assert_same_bits, weights
from .test_operations import ROWS, moe_inputs

EPS = 1e-5


def backends(dtype: str) -> tuple[CpuBackend, CpuBackend]:
    return CpuBackend(dtype, 1), CpuBackend(dtype, THREADS)


def blocks(total: int) -> list[slice]:
    """Ways to cut `total` rows: each row alone for some, and uneven neighbours."""
    cuts = [slice(i, i + 1) for i in {0, 1, total // 2, total - 1} if i < total]
    start, width = 0, 1
    while start < total:
        cuts.append(slice(start, min(total, start + width)))
        start, width = start + width, width * 2 + 1
    return cuts


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", ROWS)
def test_products_and_norms(rows: int, dtype: str) -> None:
    rng = np.random.default_rng(rows)
    hidden, features = 272, 304
    single, team = backends(dtype)
    x, residual = activations(rng, dtype, rows, hidden), activations(rng, dtype, rows, hidden)
    w, w13 = weights(rng, hidden, hidden), weights(rng, 2 * features, hidden)
    w2, norm = weights(rng, hidden, features), team.norm_weight(weights(rng, hidden, scale=1.0))

    def everything(backend: CpuBackend, at: slice) -> list[np.ndarray]:
        return [
            backend.linear(x[at], w),
            backend.linear(x[at], w, residual[at]),
            backend.swiglu(x[at], w13, w2, residual[at]),
            backend.rms_norm(x[at], norm, EPS),
        ]

    whole = everything(team, slice(None))
    for at in blocks(rows):
        for backend in (single, team):
            for part, expected in zip(everything(backend, at), whole, strict=True):
                assert_same_bits(part, expected[at])


@pytest.mark.parametrize("rows", [1, 8, 40])
def test_a_column_does_not_depend_on_how_many_there_are(rows: int) -> None:
    rng = np.random.default_rng(rows)
    x, w = activations(rng, "float32", rows, 4608), weights(rng, 500, 4608)
    whole = CpuBackend("float32").linear(x, w)
    for columns in (1, 7, 8, 9, 95, 97, 250):
        assert_same_bits(CpuBackend("float32").linear(x, w[:columns]), np.ascontiguousarray(whole[:, :columns]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("experts, top_k", [(8, 2), (32, 4)])
def test_experts(experts: int, top_k: int, dtype: str) -> None:
    rng = np.random.default_rng(experts)
    x, gate, bias, w13, w2, residual = moe_inputs(rng, dtype, 65, experts, hidden=272, features=112)
    single, team = backends(dtype)
    whole = team.moe(x, gate, bias, w13, w2, top_k, True, 1.0, residual)
    for at in blocks(len(x)):
        for backend in (single, team):
            assert_same_bits(backend.moe(x[at], gate, bias, w13, w2, top_k, True, 1.0, residual[at]), whole[at])


@pytest.mark.parametrize("dtype", DTYPES)
@given(data=st.data())
@settings(max_examples=25, deadline=None)
def test_mixers_over_chunks_neighbours_and_pages(dtype: str, data: st.DataObject) -> None:
    """Two streams' rows in drawn chunks, side by side or alone, in shuffled pages, equal one pass over the whole."""
    heads, kv_heads, hidden, length = 6, 2, 64, 1060
    rng = np.random.default_rng(11)
    width = (heads + 2 * kv_heads) * HEAD
    qkv = [activations(rng, dtype, length, width) for _ in range(2)]
    bcx = [activations(rng, dtype, length, 3 * hidden) for _ in range(2)]
    single, team = backends(dtype)
    q_norm, k_norm = (team.norm_weight(weights(rng, HEAD, scale=2.0)) for _ in range(2))
    taps = team.norm_weight(weights(rng, hidden, 3, scale=1.0))
    cos, sin = team.rope_tables(1e6, length)

    def mix(backend: CpuBackend, pages: np.ndarray, rounds: list[list[tuple[int, int, int]]]) -> list[list[np.ndarray]]:
        kv, ring = backend.allocate_kv(pages.size, 1, kv_heads), backend.allocate_ring(1, 2, hidden)
        kv.data.fill(0x7FC0 if dtype == "bfloat16" else np.nan)
        results: list[list[np.ndarray]] = [[], []]
        for segments in rounds:
            batch = make_batch(segments, 2, pages)
            rows = [slice(p, p + n) for _, p, n in segments]
            inputs = np.concatenate([qkv[slot][at] for (slot, _, _), at in zip(segments, rows, strict=True)])
            gated = np.concatenate([bcx[slot][at] for (slot, _, _), at in zip(segments, rows, strict=True)])
            q = backend.attention_inputs(inputs, q_norm, k_norm, EPS, cos, sin, kv, 0, batch, heads, kv_heads)
            out = np.hstack(
                [backend.attention(q, kv, 0, batch, heads, kv_heads), backend.short_conv(gated, taps, ring, 0, batch)]
            )
            for i, (slot, _, _) in enumerate(segments):
                results[slot].append(out[batch.seg_start[i] : batch.seg_start[i + 1]])
        return results

    lengths = [data.draw(st.sampled_from([1, 17, 65, 200, 513, length])) for _ in range(2)]
    straight = np.arange(6, dtype=np.int32).reshape(2, 3)
    whole = mix(single, straight, [[(0, 0, lengths[0])], [(1, 0, lengths[1])]])

    rounds, at = [], [0, 0]
    while at != lengths:
        segments = []
        for slot in data.draw(st.sampled_from([(0, 1), (1, 0), (0,), (1,)])):
            left = lengths[slot] - at[slot]
            rows = min(left, data.draw(st.sampled_from([1, 2, 3, 16, 31, 64, 250, 700])))
            if rows:
                segments.append((slot, at[slot], rows))
                at[slot] += rows
        if segments:
            rounds.append(segments)
    pages = shuffled_pages(np.random.default_rng(data.draw(st.integers(0, 99))), 2, 1500)
    pieces = mix(team if data.draw(st.booleans()) else single, pages, rounds)
    for slot in range(2):
        assert_same_bits(np.concatenate(pieces[slot]), np.concatenate(whole[slot]))


def test_a_row_does_not_see_what_unused_rows_hold() -> None:
    """Later rows of the same stream may be infinite or NaN: earlier rows keep their bits."""
    rng = np.random.default_rng(4)
    backend = CpuBackend("bfloat16")
    qkv = activations(rng, "bfloat16", 40, 4 * HEAD)
    ones = np.ones(HEAD, np.float32)
    cos, sin = backend.rope_tables(1e6, 64)
    batch = make_batch([(0, 0, 40)], 1, np.zeros((1, 1), np.int32))
    results = []
    for poison in (0.0, np.nan, np.inf):
        qkv[30:] = poison
        kv = backend.allocate_kv(1, 1, 1)
        q = backend.attention_inputs(qkv, ones, ones, EPS, cos, sin, kv, 0, batch, 2, 1)
        results.append(backend.attention(q, kv, 0, batch, 2, 1)[:30])
    assert_same_bits(results[1], results[0])
    assert_same_bits(results[2], results[0])


def test_calls_from_several_threads_at_once() -> None:
    import threading

    rng = np.random.default_rng(6)
    x, w = activations(rng, "bfloat16", 33, 1024), weights(rng, 512, 1024)
    expected = CpuBackend("bfloat16").linear(x, w)
    results: list[np.ndarray] = []

    def work() -> None:
        backend = CpuBackend("bfloat16")
        results.extend(backend.linear(x, w) for _ in range(20))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 80
    for result in results:
        assert_same_bits(result, expected)
