"""Each operation against its NumPy twin, over odd sizes, both activation types and NaN-poisoned memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import kernels_numba.cpu
from kernels_numba.cpu import PAGE_ROWS, RING_ROWS, Batch, CpuBackend
from kernels_numba.reference import HEAD, History, Reference, bf16_bits, make_batch, shuffled_pages, widen

from .helpers import DTYPES, activations, assert_close, weights

ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 15, 16, 17, 31, 33, 63, 65, 127, 129, 512, 513)
EPS = 1e-5


class PoisonedNumpy:
    """NumPy whose fresh arrays hold all ones bits (NaN), so that a result that was not written shows."""

    def empty(self, shape: Any, dtype: Any = np.float64) -> np.ndarray:
        array = np.empty(shape, dtype)
        array.reshape(-1).view(np.uint8).fill(0xFF)
        return array

    def empty_like(self, like: np.ndarray) -> np.ndarray:
        return self.empty(like.shape, like.dtype)

    def __getattr__(self, name: str) -> Any:
        return getattr(np, name)


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels_numba.cpu, "np", PoisonedNumpy())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", ROWS)
def test_linear(rows: int, dtype: str) -> None:
    rng = np.random.default_rng(rows)
    for out_features, in_features in ((1, 16), (7, 48), (8, 64), (33, 128), (200, 80)):
        x, w = activations(rng, dtype, rows, in_features), weights(rng, out_features, in_features)
        residual = activations(rng, dtype, rows, out_features)
        backend, reference = CpuBackend(dtype), Reference(dtype)
        assert_close(backend.linear(x, w), reference.linear(x, w), dtype)
        assert_close(backend.linear(x, w, residual), reference.linear(x, w, residual), dtype)
        assert_close(backend.logits(x, w), reference.linear(x, w), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("out_features, in_features", [(3072, 1024), (1024, 4608), (100, 8192)])
def test_linear_of_real_sizes(out_features: int, in_features: int, dtype: str) -> None:
    rng = np.random.default_rng(1)
    w = weights(rng, out_features, in_features)
    for rows in (1, 40):
        x = activations(rng, dtype, rows, in_features)
        assert_close(CpuBackend(dtype).linear(x, w), Reference(dtype).linear(x, w), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", ROWS)
def test_rms_norm(rows: int, dtype: str) -> None:
    rng = np.random.default_rng(rows)
    for hidden in (16, 64, 272):
        x, bits = activations(rng, dtype, rows, hidden, scale=3.0), weights(rng, hidden, scale=1.0)
        weight = CpuBackend(dtype).norm_weight(bits)
        assert (weight == widen(bits)).all() and weight.dtype == np.float32
        assert_close(CpuBackend(dtype).rms_norm(x, weight, EPS), Reference(dtype).rms_norm(x, weight, EPS), dtype)


def test_norm_of_zeros_is_zero() -> None:
    weight = np.ones(64, np.float32)
    assert (CpuBackend("float32").rms_norm(np.zeros((2, 64), np.float32), weight, EPS) == 0).all()


@pytest.mark.parametrize("rows", (1, 3, 600))
def test_embed_widens_the_rows(rows: int) -> None:
    rng = np.random.default_rng(rows)
    table, tokens = weights(rng, 50, 96), rng.integers(0, 50, rows).astype(np.int32)
    assert (CpuBackend("bfloat16").embed(tokens, table) == widen(table)[tokens]).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", ROWS)
def test_swiglu(rows: int, dtype: str) -> None:
    rng = np.random.default_rng(rows)
    for hidden, features in ((64, 128), (48, 272)):
        x, residual = activations(rng, dtype, rows, hidden), activations(rng, dtype, rows, hidden)
        w13, w2 = weights(rng, 2 * features, hidden), weights(rng, hidden, features)
        y = CpuBackend(dtype).swiglu(x, w13, w2, residual)
        assert_close(y, Reference(dtype).swiglu(x, w13, w2, residual), dtype, steps=2)


# ------------------------------------------------------------------------------------------------------- convolution


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("chunks", [(1, 1, 1, 5), (3, 1, 70), (31, 33, 32, 1), (65, 2), (513,)])
def test_short_conv_over_chunks(chunks: tuple[int, ...], dtype: str) -> None:
    rng = np.random.default_rng(sum(chunks))
    hidden, layers, slots = 48, 2, 3
    backend, reference, history = CpuBackend(dtype), Reference(dtype), History({})
    ring = backend.allocate_ring(layers, slots, hidden)
    assert ring.shape == (layers, slots, RING_ROWS, hidden)
    ring.fill(0x7FC0 if dtype == "bfloat16" else np.nan)  # what a slot held before is never read
    weight = backend.norm_weight(weights(rng, hidden, 3, scale=1.0))
    position = {0: 0, 2: 0}
    for chunk in chunks:
        segments = [(2, position[2], chunk), (0, position[0], chunk // 2 + 1)]
        for slot, _, rows in segments:
            position[slot] += rows
        batch = make_batch(segments, slots, np.zeros((slots, 1), np.int32))
        bcx = activations(rng, dtype, len(batch.positions), 3 * hidden)
        y = backend.short_conv(bcx, weight, ring, 1, batch)
        assert_close(y, reference.short_conv(bcx, weight, history, 1, batch), dtype)
    for slot in (0, 2):  # the ring holds the last inputs by position
        u = history.of("u", 1, slot)
        for p in range(max(0, len(u) - RING_ROWS), len(u)):
            stored = ring[1, slot, p % RING_ROWS]
            expected = bf16_bits(u[p]) if dtype == "bfloat16" else u[p].astype(np.float32)
            assert (stored == expected).all()
    assert (np.isnan(ring[0]) if dtype == "float32" else ring[0] == 0x7FC0).all(), "another layer was written"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("start", [0, 1, 2, 31, 40])
def test_taps_are_the_state_after_a_row(start: int, dtype: str) -> None:
    """A tap inside a chunk holds what the ring would hold, had the chunk ended there."""
    rng = np.random.default_rng(start)
    hidden, layers = 32, 2
    backend, pages = CpuBackend(dtype), np.zeros((2, 1), np.int32)
    weight = backend.norm_weight(weights(rng, hidden, 3, scale=1.0))
    bcx = activations(rng, dtype, start + 70, 3 * hidden)
    rows = [0, 1, 2, 33, 69]
    whole = backend.allocate_ring(layers, 2, hidden)
    if start:
        backend.short_conv(bcx[:start], weight, whole, 1, make_batch([(1, 0, start)], 2, pages))
    taps = np.full((len(rows) + 1, layers, 2, hidden), 0x7FC0 if dtype == "bfloat16" else np.nan).astype(whole.dtype)
    batch = make_batch([(0, 0, 3), (1, start, 70)], 2, pages)
    both = np.concatenate([activations(rng, dtype, 3, 3 * hidden), bcx[start:]])
    backend.conv_taps(both, whole, 1, batch, np.array([3 + row for row in rows], np.int32), taps)
    for tap, row in enumerate(rows):
        ring, end = backend.allocate_ring(layers, 2, hidden), start + row + 1
        backend.short_conv(bcx[:end], weight, ring, 1, make_batch([(1, 0, end)], 2, pages))
        for back, kept in ((2, taps[tap, 1, 0]), (1, taps[tap, 1, 1])):
            expected = ring[1, 1, (end - back) % RING_ROWS] if end >= back else np.zeros_like(kept)
            assert (kept == expected).all(), (row, back)
    untouched = taps[:, 0].ravel()
    assert (np.isnan(untouched) if dtype == "float32" else untouched == 0x7FC0).all()


@pytest.mark.parametrize("back", [1, 2, 16])
def test_conv_goes_on_from_an_earlier_position(back: int) -> None:
    """Rows taken back (a refused draft) leave the ring usable: history is read by position."""
    rng = np.random.default_rng(back)
    backend = CpuBackend("bfloat16")
    weight = backend.norm_weight(weights(rng, 32, 3, scale=1.0))
    bcx = activations(rng, "bfloat16", 40, 96)
    whole, ring = backend.allocate_ring(1, 1, 32), backend.allocate_ring(1, 1, 32)
    pages = np.zeros((1, 1), np.int32)
    expected = backend.short_conv(bcx, weight, whole, 0, make_batch([(0, 0, 40)], 1, pages))
    wrong = activations(rng, "bfloat16", back, 96)
    backend.short_conv(bcx[:24], weight, ring, 0, make_batch([(0, 0, 24)], 1, pages))
    backend.short_conv(wrong, weight, ring, 0, make_batch([(0, 24, back)], 1, pages))
    again = backend.short_conv(bcx[24:], weight, ring, 0, make_batch([(0, 24, 16)], 1, pages))
    assert (again == expected[24:]).all()


# --------------------------------------------------------------------------------------------------------- attention


@pytest.mark.parametrize("dtype", DTYPES)
def test_rope_tables(dtype: str) -> None:
    for theta in (1e4, 1e6, 1e7):
        for actual, expected in zip(
            CpuBackend(dtype).rope_tables(theta, 2000), Reference(dtype).rope_tables(theta, 2000), strict=True
        ):
            assert actual.shape == (2000, HEAD // 2) and actual.dtype == np.float32
            assert np.abs(actual - expected).max() <= (1e-7 if dtype == "float32" else 0)


def poisoned_kv(backend: CpuBackend, pages: int, layers: int, kv_heads: int):  # type: ignore[no-untyped-def]
    kv = backend.allocate_kv(pages, layers, kv_heads)
    assert not kv.data.any()
    kv.data.fill(0x7FC0 if backend.dtype == "bfloat16" else np.nan)
    return kv


def run_attention(dtype: str, heads: int, kv_heads: int, rounds: list[list[tuple[int, int, int]]], seed: int) -> None:
    """Several batches of segments (slot, position, rows) over one cache, every row against the twin."""
    rng = np.random.default_rng(seed)
    slots, layers, layer = 3, 2, 1
    backend, reference, history = CpuBackend(dtype), Reference(dtype), History({})
    pages = shuffled_pages(rng, slots, 1100)
    kv = poisoned_kv(backend, pages.size, layers, kv_heads)
    q_norm, k_norm = (backend.norm_weight(weights(rng, HEAD, scale=2.0)) for _ in range(2))
    cos, sin = backend.rope_tables(1e6, 1200)
    for segments in rounds:
        batch = make_batch(segments, slots, pages)
        qkv = activations(rng, dtype, len(batch.positions), (heads + 2 * kv_heads) * HEAD)
        q = backend.attention_inputs(qkv, q_norm, k_norm, EPS, cos, sin, kv, layer, batch, heads, kv_heads)
        expected_q = reference.attention_inputs(
            qkv, q_norm, k_norm, EPS, cos, sin, history, layer, batch, heads, kv_heads
        )
        assert_close(q, expected_q, dtype)
        out = backend.attention(q, kv, layer, batch, heads, kv_heads)
        assert_close(out, reference.attention(q, history, layer, batch, heads, kv_heads), dtype)
    other = kv.data[:, 0]
    assert (np.isnan(other) if dtype == "float32" else other == 0x7FC0).all(), "another layer was written"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads, kv_heads", [(2, 2), (4, 2), (3, 1), (6, 2), (8, 2), (5, 1)])
def test_attention_head_ratios(heads: int, kv_heads: int, dtype: str) -> None:
    run_attention(dtype, heads, kv_heads, [[(1, 0, 37), (0, 0, 3)], [(0, 3, 1), (1, 37, 1)], [(1, 38, 70)]], heads)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", ROWS)
def test_attention_rows(rows: int, dtype: str) -> None:
    run_attention(dtype, 4, 2, [[(2, 0, rows)], [(2, rows, 1)]], rows)


@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_across_page_edges(dtype: str) -> None:
    edge = PAGE_ROWS
    rounds = [[(0, 0, edge - 2), (2, 0, 5)], *([(0, edge + i, 1)] for i in (-2, -1, 0)), [(0, edge + 1, 520)]]
    run_attention(dtype, 2, 1, rounds, 5)


def test_cache_sizes() -> None:
    kv = CpuBackend("bfloat16").allocate_kv(3, 2, 8)
    assert kv.page_bytes == 2 * 2 * 8 * PAGE_ROWS * HEAD * 2
    assert kv.nbytes == 3 * kv.page_bytes
    assert CpuBackend("float32").allocate_kv(3, 2, 8).nbytes == 2 * kv.nbytes


# ----------------------------------------------------------------------------------------------------------- experts


def moe_inputs(rng: np.random.Generator, dtype: str, rows: int, experts: int, hidden: int = 64, features: int = 48):  # type: ignore[no-untyped-def]
    return (
        activations(rng, dtype, rows, hidden),
        weights(rng, experts, hidden, scale=0.3),
        rng.standard_normal(experts).astype(np.float32) * np.float32(0.2),
        weights(rng, experts, 2 * features, hidden),
        weights(rng, experts, hidden, features),
        activations(rng, dtype, rows, hidden),
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", (1, 2, 3, 15, 17, 33, 129))
@pytest.mark.parametrize("experts, top_k", [(8, 2), (32, 4), (5, 5), (3, 1)])
def test_moe(rows: int, experts: int, top_k: int, dtype: str) -> None:
    rng = np.random.default_rng(rows)
    x, gate, bias, w13, w2, residual = moe_inputs(rng, dtype, rows, experts)
    backend, reference = CpuBackend(dtype), Reference(dtype)
    for expert_bias, norm_topk, scaling in ((bias, True, 1.0), (None, False, 2.5)):
        ids, chosen = backend.moe_route(x, gate, expert_bias, top_k, norm_topk, scaling)
        expected_ids, expected = reference.moe_route(x, gate, expert_bias, top_k, norm_topk, scaling)
        assert (ids == expected_ids).mean() > (0.97 if dtype == "bfloat16" else 0.9999)
        same = (ids == expected_ids).all(1)
        assert_close(chosen[same], expected[same], dtype)
        y = backend.moe(x, gate, expert_bias, w13, w2, top_k, norm_topk, scaling, residual)
        y_expected = reference.moe(x, gate, expert_bias, w13, w2, top_k, norm_topk, scaling, residual)
        assert_close(y[same], y_expected[same], dtype, steps=3)


@pytest.mark.parametrize("dtype", DTYPES)
def test_router_ties_go_to_the_lower_expert(dtype: str) -> None:
    x = np.zeros((3, 64), np.float32)  # every sigmoid is 0.5
    gate = weights(np.random.default_rng(0), 8, 64)
    ids, chosen = CpuBackend(dtype).moe_route(x, gate, np.zeros(8, np.float32), 3, True, 1.0)
    assert (ids == [0, 1, 2]).all()
    assert np.allclose(chosen, 1 / 3, rtol=2**-8)


def test_bias_selects_and_does_not_weigh() -> None:
    x = np.zeros((1, 64), np.float32)
    bias = np.array([0, 0, 3, 0, 5, 0, 0, 1], np.float32)
    ids, chosen = CpuBackend("float32").moe_route(x, np.zeros((8, 64), np.uint16), bias, 3, False, 1.0)
    assert ids.tolist() == [[2, 4, 7]]
    assert (chosen == 0.5).all()


def test_experts_that_nobody_chose_are_not_read() -> None:
    rng = np.random.default_rng(2)
    x, gate, _, w13, w2, residual = moe_inputs(rng, "bfloat16", 5, 8)
    bias = np.array([0, 9, 0, 9, 0, 0, 0, 0], np.float32)
    expected = CpuBackend("bfloat16").moe(x, gate, bias, w13, w2, 2, True, 1.0, residual)
    for e in (0, 2, 4, 5, 6, 7):
        w13[e] = 0x7FC0
        w2[e] = 0x7FC0
    assert (CpuBackend("bfloat16").moe(x, gate, bias, w13, w2, 2, True, 1.0, residual) == expected).all()


def test_unknown_settings_are_refused() -> None:
    with pytest.raises(ValueError, match="float16"):
        CpuBackend("float16")
    with pytest.raises(ValueError, match="threads"):
        CpuBackend(threads=0)
    with pytest.raises(ValueError, match="threads"):
        CpuBackend(threads=10**6)


def test_batch_has_the_documented_fields() -> None:
    batch = make_batch([(0, 4, 2), (1, 0, 1)], 2, np.zeros((2, 1), np.int32))
    assert isinstance(batch, Batch)
    assert batch.positions.tolist() == [4, 5, 0] and batch.row_segment.tolist() == [0, 0, 1]
    assert batch.seg_start.tolist() == [0, 2, 3]
