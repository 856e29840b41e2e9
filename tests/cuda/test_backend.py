"""What the CUDA backend queues, without a GPU: arguments that fit the kernels, few kernels a layer, no memory kept."""

from __future__ import annotations

import gc
from collections import Counter
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kernels_numba.batch import SampleRows
from kernels_numba.cuda import CudaBackend, graph, inputs, loading, memory, sampler
from kernels_numba.cuda.driver import CudaError, CudaOutOfMemory
from kernels_numba.cuda.scratch import Scratch
from lfm2serve.memory.states import TAPS
from tests.cuda.recorder import FakeStaging, Recorder
from tests.cuda.test_network import NAMES, SLOTS, Network, greedy


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    device = Recorder()

    class Pinned:
        def __init__(self, nbytes: int) -> None:
            self.pointer, self.array = 0, np.zeros(nbytes, np.uint8)

        def free(self) -> None:
            self.array = np.zeros(0, np.uint8)

    def call(function: str, *arguments: Any) -> Any:
        device.launched.append(function)

    monkeypatch.setattr(memory, "Device", SimpleNamespace(open=lambda ordinal: device))
    monkeypatch.setattr(loading, "Staging", FakeStaging)
    monkeypatch.setattr(loading, "PIECE_BYTES", 1 << 20)
    monkeypatch.setattr(loading.DeviceWeights, "piece_bytes", 1 << 20)
    for module in (sampler, inputs, graph):
        monkeypatch.setattr(module, "PinnedBuffer", Pinned)
    for module in (inputs, graph):
        monkeypatch.setattr(module, "call", call)
    return device


@pytest.fixture(params=NAMES)
def network(request: pytest.FixtureRequest, recorder: Recorder) -> Network:
    return Network(request.param)


def test_scratch_is_handed_out_once_and_comes_back(recorder: Recorder) -> None:
    scratch = Scratch(recorder.allocate((4096,), "u8"))
    a, b, c = (scratch.take((300,), "f32") for _ in range(3))
    assert len({x.memory.pointer for x in (a, b, c)}) == 3 and scratch.free_bytes == 4096 - 3 * 1280
    middle = b.memory.pointer
    part = b.part(1, 3)
    del b
    assert scratch.free_bytes == 4096 - 3 * 1280, "a part keeps the whole"
    del part
    again = scratch.take((310,), "f32")
    assert again.memory.pointer == middle
    with pytest.raises(CudaOutOfMemory, match="a step needs"):
        scratch.take((300,), "f32")
    del a, c, again
    assert scratch.take((1024,), "f32").memory.nbytes == 4096


def test_steps_queue_what_the_kernels_take_and_keep_no_memory(network: Network, recorder: Recorder) -> None:
    be, config = network.backend, network.config
    for segments, taps in (
        ([(0, 0, [1] * 40), (1, 0, [2])], [5]),
        ([(0, 40, [1]), (1, 1, [2])], None),
        ([(0, 41, [1] * 9)], [8]),
        ([(0, 50, [1])], None),
    ):
        recorder.launched.clear()
        network.logits(segments, taps)
        counts = Counter(recorder.launched)
        layers = config.num_hidden_layers
        assert counts["conv_taps"] == (len(config.conv_layers) if taps else 0)
        decode = max(len(ids) for *_, ids in segments) < 40
        assert counts["attention_decode"] == (layers - len(config.conv_layers) if decode else 0)
        assert not (decode and counts["attention_inputs"] + counts["attention_plan"])
        rows = sum(len(ids) for *_, ids in segments)
        runs = {int(name[-1]): count for name, count in counts.items() if name.startswith("run_layers")}
        if runs:  # one or two rows: the layers from the attention with experts on are one kernel
            assert runs == {rows: len(network.model.runs.runs)} and runs[rows] == 1
            assert not [name for name in counts if "route" in name or "experts" in name]
            assert counts["rms_norm"] == 6 and counts["ring_conv_8"] == 1 and counts["attention_decode"] == 2
            continue
        assert rows > 2 or not config.num_experts
        inside = sum(count for name, count in counts.items() if name.startswith(("ring_conv", "ring_sum_conv")))
        assert counts["short_conv"] + inside == len(config.conv_layers)
        moe = layers - config.num_dense_layers if config.num_experts else 0
        sums = counts["combine_experts_norm"] + counts["ring_sum"] + counts["ring_sum_conv"]
        assert counts["norm_route"] + counts["route_logits"] == moe and counts["combine_experts"] == 0
        assert counts["rms_norm"] + sums == layers + (layers - moe) + 1
        assert sums == moe
        assert be.scratch.free_bytes > be.scratch.nbytes - 4096  # the batch stays until the next
    h = network.model.forward(network.batch([(0, 51, [1, 2])]), network.states)
    del h  # nobody wants the logits
    assert be.scratch.free_bytes > be.scratch.nbytes - 4096


def test_sampling_queues_what_the_kernel_takes(network: Network, recorder: Recorder) -> None:
    be, vocab = network.backend, network.config.vocab_size
    logits = be.scratch.take((3, vocab), "f32")
    plain = greedy(3, [2, 0, 1], vocab)
    penal = plain._replace(repetition=np.array([1, 1.1, 1], np.float32), top_n=np.array([-1, 3, 0], np.int32))
    for rows in (plain, penal, penal._replace(prompt_seen=network.tables, output_count=network.tables)):
        result = be.sample(logits, rows)
        assert result.token.shape == (3,) and result.top_ids.shape == (3, max(0, rows.top_n.max()))
    network.tables.open(2, [1, 2, 3])
    network.tables.record(2, 7)
    network.tables.flush()
    assert recorder.launched[-3:].count("count_tokens") == 1 and "mark_tokens" in recorder.launched
    found = be.token_logprobs(logits, np.zeros(3, np.int32), np.array([2, 2, 2], np.int32), vocab)
    assert found[2].shape == (3, 2)
    del logits
    assert be.scratch.free_bytes == be.scratch.nbytes


def test_what_else_is_queued_waits_for_no_draw_and_no_draw_for_it(network: Network, recorder: Recorder) -> None:
    be, vocab = network.backend, network.config.vocab_size
    order = recorder.launched
    be._ready = SimpleNamespace(  # type: ignore[assignment]
        record=lambda stream: order.append("on its way back"), synchronize=lambda: order.append("waited")
    )
    for top in (0, be._results.array.nbytes // 12):  # type: ignore[union-attr]
        rows = greedy(3, [2, 0, 1], vocab)._replace(top_n=np.full(3, top, np.int32))
        logits = be.scratch.take((3, vocab), "f32")
        order.clear()
        be.sample(logits, rows, lambda: order.append("copies"))
        small = ["sample", "on its way back", "copies", "waited"]
        assert [name for name in order if name in small] == (small if not top else ["sample", "copies"])


def test_states_of_a_step_are_kept_while_its_network_still_runs(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[bool] = []
    waiting = SimpleNamespace(record=lambda stream: None, synchronize=lambda: waits.append(True))
    monkeypatch.setattr(recorder, "event", lambda timing=True: waiting)
    be = CudaBackend(scratch_bytes=1 << 20)
    pages, kept = (be.allocate_bytes(1 << 30) for _ in range(2))
    for _ in range(2 * TAPS):
        be.copy(kept, pages, [(0, 4096, 300 << 20), (400 << 20, 0, 4096)])
    assert recorder.launched.count("copy_runs") == 2 * TAPS and not waits
    for _ in range(2 * TAPS):
        be.copy(kept, pages, [(0, 0, 16)])
    assert waits, "the ring is bounded"


def test_rounds_are_filled_with_padding_that_touches_nothing(network: Network, recorder: Recorder) -> None:
    be, vocab = network.backend, network.config.vocab_size

    def forward(batch: Any, logits: Any) -> Any:
        return network.model.logits(network.model.forward(batch, network.states), logits)

    def run(batch: Any, rows: SampleRows) -> Any:
        begun = rounds.begin(batch)
        rounds.draw(begun, rows)
        return begun.result()

    rounds = graph.DecodeRounds(
        be,
        forward,
        network.tables,
        buckets=(1, 4),
        width=vocab,
        vocab=vocab,
        page_table=network.page_table,
        ranges=64,
        most_ranges=12,
    )
    batch = network.batch([(3, 130, [5]), (0, 7, [6, 7])])
    starts = np.array([0, 1, 1, 1], np.int32)
    rows: SampleRows = greedy(
        3, [3, 0, 0], vocab, bias_start=starts, bias_id=np.array([9], np.int32), bias_value=np.array([2], np.float32)
    )
    assert rounds.fits(batch) and not rounds.fits(network.batch([(0, 0, [1] * 5)]))
    recorder.launched.clear()
    result = run(batch, rows)
    assert recorder.launched.count("cuGraphLaunch") == 2 and result.token.shape == (3,)
    network_host, draw_host = rounds.buckets[1].network.hosts[0], rounds.buckets[1].draw.hosts[0]
    assert network_host["tokens"].tolist() == [5, 6, 7, 0] and network_host["positions"].tolist() == [130, 7, 8, 0]
    assert network_host["row_segment"].tolist() == [0, 1, 1, 2]
    assert network_host["seg_start"][:4].tolist() == [0, 1, 3, 4]
    assert network_host["seg_slot"][:3].tolist() == [3, 0, -1] and draw_host["slot"].tolist() == [3, 0, 0, -1]
    assert draw_host["bias_start"].tolist() == [0, 1, 1, 1, 1] and draw_host["bias_id"][0] == 9
    run(network.batch([(5, 0, [1]), (4, 0, [1])]), greedy(2, [5, 4], vocab))
    run(network.batch([(2, 0, [1]), (4, 0, [1])]), greedy(2, [2, 4], vocab))
    assert network_host["seg_slot"][:3].tolist() == [2, 4, -1] and draw_host["slot"].tolist() == [2, 4, -1, -1]
    assert not draw_host["bias_start"].any() and network_host["row_segment"].tolist() == [0, 1, 2, 2]
    recorder.launched.clear()
    assert run(batch, rows._replace(top_n=np.full(3, 21, np.int32))).top_ids.shape == (3, 21)
    assert recorder.launched.count("cuGraphLaunch") == 1 and recorder.launched.count("sample") == 1
    assert len(network.page_table) == SLOTS


def test_a_capture_that_fails_leaves_nothing_behind(
    network: Network, recorder: Recorder, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    be, vocab = network.backend, network.config.vocab_size
    call, made, freed = graph.call, [], []

    def failing(function: str, *arguments: Any) -> Any:
        made.append(function)
        if function == "cuGraphInstantiate" and made.count(function) == 4:
            raise CudaError("cuGraphInstantiate: CUDA_ERROR_OUT_OF_MEMORY")
        return call(function, *arguments)

    monkeypatch.setattr(graph, "call", failing)
    monkeypatch.setattr(graph.PinnedBuffer, "free", lambda self: freed.append(self))
    held = len(recorder.allocated) - len(recorder.freed), be.scratch.free_bytes
    rounds = graph.DecodeRounds(
        be,
        lambda batch, logits: network.model.logits(network.model.forward(batch, network.states), logits),
        network.tables,
        buckets=(1, 2, 4),
        width=vocab,
        vocab=vocab,
        page_table=network.page_table,
        ranges=64,
        most_ranges=12,
    )
    assert rounds.most_rows == 1 and "more than 1 rows run without graphs" in caplog.text
    assert len(freed) == 4, "what the second bucket had is given back at once"
    assert rounds.fits(network.batch([(0, 0, [1])])) and not rounds.fits(network.batch([(0, 0, [1, 2])]))
    assert made.count("cuGraphDestroy") == made.count("cuStreamEndCapture") == 4
    rounds.close()
    assert len(freed) == 4 + 4 + 4  # the first bucket's, and those of masks and results
    assert made.count("cuGraphExecDestroy") == 3
    assert len(recorder.allocated) - len(recorder.freed) - held[0] <= 2, "the page table and the drawn tokens stay"
    gc.collect()
    assert held[1] - be.scratch.free_bytes < 4096, "the last batch stays, no logits"


def test_a_page_table_row_is_sent_to_its_last_byte_and_no_further(
    network: Network, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[tuple[int, int]] = []

    def call(function: str, *arguments: Any) -> None:
        if function == "cuMemcpyHtoDAsync":
            sent.append((arguments[0], arguments[2]))

    monkeypatch.setattr(inputs, "call", call)
    target = recorder.allocate((5, 3), "i32")
    network.backend.uploads.send([np.arange(3, dtype=np.int32)], target[4])
    network.backend.uploads.send([np.arange(3, dtype=np.int32), np.zeros(1, np.int32)], target)
    assert sent == [(target.pointer + 48, 12), (target.pointer, 16 + 4)]


def test_what_is_made_anew_gives_up_what_was_and_close_gives_up_all(network: Network, recorder: Recorder) -> None:
    be, vocab = network.backend, network.config.vocab_size

    def made() -> graph.DecodeRounds:
        tables = be.penalty_tables(SLOTS, vocab)
        table = np.zeros((SLOTS, 2), np.int32)
        return be.decode_rounds(
            lambda batch, logits: network.model.logits(network.model.forward(batch, network.states), logits), tables,
            width=vocab, vocab=vocab, page_table=table, slots=2, context=1024,
        )  # fmt: skip

    first = made()
    assert first.buckets
    held = len(recorder.allocated) - len(recorder.freed)
    made()
    assert not first.buckets and len(recorder.allocated) - len(recorder.freed) == held
    weights = be.random_weights([("embed", (512, 192)), ("layers.0.moe.bias", (6,)), ("final_norm", (192,))])
    assert be.upload(weights.items())["embed"] is weights["embed"]
    be.close()
    be.close()
    assert sorted(recorder.allocated) == sorted(recorder.freed)


def test_closing_after_the_device_was_lost_says_so_and_goes_on(
    network: Network, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def lost() -> None:
        raise CudaError("cuStreamSynchronize: CUDA_ERROR_MISALIGNED_ADDRESS")

    monkeypatch.setattr(network.backend.stream, "synchronize", lost)
    network.backend.close()
    assert "MISALIGNED" in caplog.text


def test_the_blocks_of_one_backend_only_wait_for_each_other(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampler.Sampler, "_spreads", None)
    first = CudaBackend(scratch_bytes=4 << 20)
    second = CudaBackend(scratch_bytes=4 << 20)
    grids = [[be._sampling(rows)[0] for rows in (1, 8, 64, 300)] for be in (first, second)]
    assert grids == [[(1, 16), (8, 8), (64, 1), (300, 1)], [(1, 1), (8, 1), (64, 1), (300, 1)]]
    first.close()
    third = CudaBackend(scratch_bytes=4 << 20)
    assert third._sampling(2)[0] == (2, 16) and second._sampling(2)[0] == (2, 1)
