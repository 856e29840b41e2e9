"""The whole network on the GPU: transformers' values, and the same bits of a row however it is computed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kernels_numba.batch import FED_BACK, PAGE_ROWS, Batch, SampleRows
from kernels_numba.cuda import CudaBackend
from lfm2serve.checkpoint import Checkpoint
from lfm2serve.memory.states import StreamStates
from lfm2serve.model import Model

pytestmark = pytest.mark.gpu

DATA = Path(__file__).parents[1] / "data"
NAMES = ("tiny-lfm2moe", "tiny-lfm2")
SLOTS, PAGES = 6, 3  # pages a slot
BF16_BOUND = 0.4  # of logits with a spread of 4 to 5: the order of sums differs from torch's


class Network:
    """A tiny checkpoint on the GPU with a few streams."""

    def __init__(self, name: str) -> None:
        checkpoint = Checkpoint(DATA / name)
        self.config = config = checkpoint.config
        kinds = {"bf16": np.uint16, "f32": np.float32}
        tensors = checkpoint.load(lambda _, shape, dtype: np.empty(shape, kinds[dtype]))
        self.backend = be = CudaBackend(scratch_bytes=256 << 20)
        self.model = Model(config, tensors, be, max_rows=PAGES * PAGE_ROWS)
        self.states = StreamStates(
            config, be, slots=SLOTS, pages=SLOTS * PAGES, max_rows=PAGES * PAGE_ROWS, snapshot_pages=2
        )
        pages = np.random.default_rng(5).permutation(SLOTS * PAGES).astype(np.int32).reshape(SLOTS, PAGES)
        self.page_table = self.states.page_table
        self.page_table[:] = pages
        self.tables = be.penalty_tables(SLOTS, config.vocab_size)
        self.poison()

    def poison(self) -> None:
        """NaN in every state."""
        for array in (self.states.kv.data, self.states.ring):
            self.backend.device.fill(array, 0xFF)

    def batch(self, segments: Sequence[tuple[int, int, Sequence[int]]]) -> Batch:
        """(slot, first position, tokens) of each segment."""
        counts = [len(ids) for _, _, ids in segments]
        return Batch(
            tokens=np.concatenate([np.asarray(ids, np.int32) for _, _, ids in segments]),
            positions=np.concatenate([np.arange(p, p + len(ids), dtype=np.int32) for _, p, ids in segments]),
            row_segment=np.repeat(np.arange(len(segments), dtype=np.int32), counts),
            seg_start=np.cumsum([0, *counts]).astype(np.int32),
            seg_slot=np.array([slot for slot, _, _ in segments], np.int32),
            page_table=self.page_table,
        )

    def logits(
        self, segments: Sequence[tuple[int, int, Sequence[int]]], taps: Sequence[int] | None = None
    ) -> np.ndarray:
        """Logits of every row."""
        rows = None if taps is None else np.array(taps, np.int32)
        h = self.model.forward(self.batch(segments), self.states, rows)
        return self.backend.read(self.model.logits(h))

    def in_chunks(self, slot: int, ids: Sequence[int], sizes: Sequence[int]) -> np.ndarray:
        out, at = [], 0
        for size in sizes:
            if at < len(ids):
                out.append(self.logits([(slot, at, ids[at : at + size])]))
            at += size
        return np.concatenate(out)


@pytest.fixture(scope="module", params=NAMES)
def network(request: pytest.FixtureRequest) -> Network:
    return Network(request.param)


def same(a: np.ndarray, b: np.ndarray) -> bool:
    return a.shape == b.shape and a.tobytes() == b.tobytes()


def greedy(n: int, slots: Sequence[int], vocab: int, **fields: Any) -> SampleRows:
    def fill(value: float, dtype: Any = np.float32) -> np.ndarray:
        return np.full(n, value, dtype)

    none = np.zeros(0, np.int32)
    starts = np.zeros(n + 1, np.int32)
    rows = SampleRows(
        temperature=fill(0), top_k=fill(0, np.int32), top_p=fill(1), min_p=fill(0), repetition=fill(1),
        presence=fill(0), frequency=fill(0), seed=fill(7, np.uint64), choice=fill(0, np.uint32),
        position=fill(0, np.uint32), slot=np.array(slots, np.int32), prompt_seen=np.zeros((SLOTS, vocab), np.uint8),
        output_count=np.zeros((SLOTS, vocab), np.int32), bias_start=starts, bias_id=none,
        bias_value=np.zeros(0, np.float32), ban_start=starts, ban_id=none, ahead_start=starts, ahead_id=none,
        mask_row=fill(-1, np.int32), mask=np.zeros((0, 1), np.uint32), vocab=vocab, top_n=fill(-1, np.int32),
    )  # fmt: skip
    return rows._replace(**fields)


def test_logits_are_those_of_transformers(network: Network) -> None:
    name = "tiny-lfm2moe" if network.config.num_experts else "tiny-lfm2"
    stored = np.load(DATA / name / "reference.npz")
    logits = network.logits([(0, 0, stored["ids"].tolist())])
    assert np.abs(logits - stored["logits_bf16"]).max() < BF16_BOUND


def test_rows_have_the_same_bits_in_any_chunks(network: Network) -> None:
    rng = np.random.default_rng()
    ids = rng.integers(0, network.config.vocab_size, 700).tolist()
    network.poison()
    whole = network.logits([(1, 0, ids)])
    assert np.isfinite(whole).all()
    for sizes in ((1, 3, 696), (16,) * 44, (130, 1, 1, 500, 68), (699, 1), (33,) * 22):
        network.poison()
        assert same(network.in_chunks(2, ids, sizes), whole), sizes
    network.poison()
    assert same(network.in_chunks(3, ids[:70], (1,) * 70), whole[:70]), "one by one"


def test_rows_do_not_see_their_neighbours(network: Network) -> None:
    rng = np.random.default_rng()
    vocab = network.config.vocab_size
    streams = [rng.integers(0, vocab, n).tolist() for n in (700, 3, 129, 520)]
    network.poison()
    alone = [network.logits([(slot, 0, ids)]) for slot, ids in enumerate(streams)]
    network.poison()
    first = network.logits([(slot, 0, ids[: len(ids) // 2 or 1]) for slot, ids in enumerate(streams)])
    rest = network.logits([(slot, len(ids) // 2 or 1, ids[len(ids) // 2 or 1 :]) for slot, ids in enumerate(streams)])
    at_first = at_rest = 0
    for ids, expected in zip(streams, alone, strict=True):
        half = len(ids) // 2 or 1
        assert same(first[at_first : at_first + half], expected[:half])
        assert same(rest[at_rest : at_rest + len(ids) - half], expected[half:])
        at_first, at_rest = at_first + half, at_rest + len(ids) - half


def test_decode_rounds_in_graphs_equal_eager_ones(network: Network) -> None:
    rng = np.random.default_rng()
    be, vocab = network.backend, network.config.vocab_size

    def forward(batch: Any, logits: Any = None) -> Any:
        return network.model.logits(network.model.forward(batch, network.states), logits)

    rounds = be.decode_rounds(
        forward, network.tables, width=network.model.vocab_rows, vocab=vocab, page_table=network.page_table,
        slots=SLOTS, context=PAGES * PAGE_ROWS,
    )  # fmt: skip
    assert len(rounds.buckets) > 3
    prompts = [rng.integers(0, vocab, n).tolist() for n in (600, 1, 40, 127, 255)]
    # fed back on the device, several streams at once, with penalties
    controls: dict[str, Any] = {
        "temperature": np.array([0, 1, 0.7, 0, 1], np.float32), "top_p": np.array([1, 1, 0.9, 1, 0.5], np.float32),
        "repetition": np.array([1, 1, 1.1, 1.2, 1], np.float32), "top_n": np.array([2, -1, 0, -1, 1], np.int32),
    }  # fmt: skip

    def replies(graphs: bool, fed_back: bool, group: Sequence[int]) -> list[list[int]]:
        network.poison()
        for slot in group:
            network.tables.open(slot, prompts[slot])
            network.logits([(slot, 0, prompts[slot][:-1])]) if len(prompts[slot]) > 1 else None
        tokens = [[prompts[slot][-1]] for slot in group]
        under_way = None

        def take(drawn: list[int]) -> None:
            for slot, reply, token in zip(group, tokens, drawn, strict=True):
                reply.append(token)
                network.tables.record(slot, token)

        for step in range(8):
            positions = [len(prompts[slot]) - 1 + step for slot in group]
            given = [FED_BACK if fed_back and step else t[-1] for t in tokens]
            batch = network.batch([(s, p, [t]) for s, p, t in zip(group, positions, given, strict=True)])
            rows = greedy(
                len(group), group, vocab, prompt_seen=network.tables, output_count=network.tables,
                position=np.array(positions, np.uint32) + 1, **{k: v[list(group)] for k, v in controls.items()},
            )  # fmt: skip
            if not graphs:
                take(be.sample(forward(batch), rows).token.tolist())
                continue
            assert rounds.fits(batch)
            begun = rounds.begin(batch)
            if under_way is not None:  # fed back: this round's network is queued before that one's tokens are known
                take(under_way.result().token.tolist())
            rounds.draw(begun, rows)
            under_way = begun if fed_back else None
            if not fed_back:
                take(begun.result().token.tolist())
        if under_way is not None:
            take(under_way.result().token.tolist())
        return tokens

    every = range(5)
    eager = replies(False, False, every)
    assert replies(True, False, every) == eager
    assert replies(True, True, every) == eager
    for slot in every:
        assert replies(True, True, [slot]) == [eager[slot]]


def test_a_masked_row_draws_what_its_mask_allows_in_graphs_too(network: Network) -> None:
    be, vocab, width = network.backend, network.config.vocab_size, network.model.vocab_rows
    rounds = be.decode_rounds(
        lambda batch, logits: network.model.logits(network.model.forward(batch, network.states), logits),
        network.tables, width=width, vocab=vocab, page_table=network.page_table, slots=SLOTS, context=PAGE_ROWS,
    )  # fmt: skip
    allowed = np.random.default_rng().choice(vocab, 3, replace=False)
    mask = np.zeros((1, -(-width // 32)), np.uint32)
    for token in allowed.tolist():
        mask[0, token // 32] |= np.uint32(1 << (token % 32))
    batch = network.batch([(slot, 0, [5]) for slot in range(3)])
    plain = greedy(3, range(3), vocab)
    masked = plain._replace(mask_row=np.array([-1, 0, -1], np.int32), mask=mask)
    drawn = []
    for rows in (plain, masked, plain):
        begun = rounds.begin(batch)
        rounds.draw(begun, rows)
        drawn.append(begun.result().token.tolist())
    logits = network.logits([(0, 0, [5])])[0]
    assert drawn[0] == drawn[2] == [int(logits[:vocab].argmax())] * 3
    assert drawn[1] == [drawn[0][0], int(allowed[logits[allowed].argmax()]), drawn[0][2]]
    assert (
        be.sample(be.take(network.model.logits(network.model.forward(batch, network.states)), range(3)), masked)[
            0
        ].tolist()
        == drawn[1]
    )


def test_taps_and_copies(network: Network) -> None:
    rng = np.random.default_rng()
    be, hidden = network.backend, network.config.hidden_size
    ids = rng.integers(0, network.config.vocab_size, 90).tolist()
    layers = len(network.config.conv_layers)
    network.poison()
    network.logits([(0, 0, ids[:1])], taps=[0])
    first = be.read(network.states.taps)[0]
    assert not first[:, 0].any()  # nothing before position 0
    network.logits([(0, 1, ids[1:50]), (1, 0, ids)], taps=[0, 48, 49 + 49])
    taps = be.read(network.states.taps)
    ring = be.read(network.states.ring).reshape(layers, SLOTS, 32, hidden)
    assert np.array_equal(taps[0][:, 0], first[:, 1])
    assert np.array_equal(taps[1], ring[:, 0, [48 % 32, 49 % 32]])
    assert np.array_equal(taps[2], taps[1])
    source, target = be.allocate_bytes(4096), be.allocate_bytes(4096)
    data = rng.integers(0, 256, 4096).astype(np.uint8)
    be.device.write(source, data)
    be.device.fill(target, 7)
    be.copy(target, source, [(16, 1024, 512), (2048, 0, 16)])
    expected = np.full(4096, 7, np.uint8)
    expected[1024:1536], expected[:16] = data[16:528], data[2048:2064]
    assert np.array_equal(be.read(target), expected)
