"""Decode rounds as CUDA graphs: the whole round of a bucket of rows is captured once and replayed.

Everything a round reads lies in fixed device memory, filled by one copy from page-locked memory; rows of a bucket
that a round doesn't use are padding (slot -1), which read and write no stream's state. A round that fits no graph, or a
device where capture fails, runs the same kernels one by one, with the same bits.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ..batch import Batch, SampleResult, SampleRows
from .driver import CudaError, DeviceArray, Event, PinnedBuffer, Stream, call
from .inputs import CONTROLS, LISTS, DeviceBatch, count_ranges, host_results, split_results

if TYPE_CHECKING:
    from . import CudaBackend, PenaltyTables
    from .scratch import Activations

_log = logging.getLogger(__name__)

BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
MOST_TOP = 20  # log-probabilities a row that a graph returns
LIST_ENTRIES = 1024  # biases, bans or draft tokens of a round
DEPENDENT_ROWS = 16  # buckets up to this start each kernel before the one before has ended: it pays at few rows only
ROUNDS = 2  # rounds whose inputs or results may be on their way

Forward = Callable[[DeviceBatch], "Activations"]
"""Runs the network over a batch; the logits of all its rows."""


@contextmanager
def capture(stream: Stream) -> Iterator[Callable[[], Any]]:
    """Work queued on the stream inside goes into a graph; afterwards the yielded function instantiates it."""
    from cuda.bindings import driver

    call("cuStreamBeginCapture", stream.handle, driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL)
    graph = None

    def instantiate() -> Any:
        made = call("cuGraphInstantiate", graph, 0)
        call("cuGraphDestroy", graph)
        return made

    try:
        yield instantiate
    except BaseException:
        driver.cuStreamEndCapture(stream.handle)  # leaves the stream usable
        raise
    graph = call("cuStreamEndCapture", stream.handle)


@dataclass(frozen=True, slots=True)
class _Field:
    name: str
    offset: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any]


class _Layout:
    """Where each input of a bucket lies in its block: the batch, the controls, the lists."""

    def __init__(self, rows: int) -> None:
        self.fields: dict[str, _Field] = {}
        self.nbytes = 0
        for name in ("tokens", "positions", "row_segment"):
            self._add(name, rows, "<i4")
        self._add("seg_start", rows + 2, "<i4")
        self._add("seg_slot", rows + 1, "<i4")
        kinds = {"seed": "<u8", "choice": "<u4", "position": "<u4", "top_k": "<i4", "slot": "<i4"}
        for name in CONTROLS:
            self._add(name, rows, kinds.get(name, "<f4"))
        self._add("certain", rows, "<i4")
        for name in LISTS:
            self._add(
                name, rows + 1 if name.endswith("start") else LIST_ENTRIES, "<f4" if name == "bias_value" else "<i4"
            )
        self._add("top_n", rows, "<i4")

    def _add(self, name: str, count: int, dtype: str) -> None:
        kind = np.dtype(dtype)
        self.fields[name] = _Field(name, self.nbytes, (count,), kind)
        self.nbytes += -(-count * kind.itemsize // 16) * 16

    def device(self, block: DeviceArray) -> dict[str, DeviceArray]:
        kinds = {"<i4": "i32", "<u4": "u32", "<f4": "f32", "<u8": "u64"}
        return {
            name: DeviceArray(block.pointer + f.offset, f.shape, kinds[f.dtype.str]) for name, f in self.fields.items()
        }

    def host(self, block: np.ndarray) -> dict[str, np.ndarray]:
        return {
            name: block[f.offset : f.offset + f.shape[0] * f.dtype.itemsize].view(f.dtype)
            for name, f in self.fields.items()
        }


class _Bucket:
    """One graph and its fixed memory."""

    def __init__(self, rounds: DecodeRounds, rows: int) -> None:
        be = rounds.backend
        self.rows = rows
        self.layout = _Layout(rows)
        self.block = be.allocate((self.layout.nbytes,), "u8")
        self.pinned = [PinnedBuffer(self.layout.nbytes) for _ in range(ROUNDS)]
        self.hosts = [self.layout.host(p.array) for p in self.pinned]
        self.words = rows * (3 + 2 * MOST_TOP)
        self.result = be.allocate((self.words,), "i32")
        inputs = self.layout.device(self.block)
        be.device.write(self.block, self._idle())
        be.stream.synchronize()
        self._run(rounds, inputs)  # once as it is: compiles and loads every kernel
        be.stream.synchronize()
        be.dependent = rows <= DEPENDENT_ROWS
        try:
            with capture(be.stream) as finished:
                self._run(rounds, inputs)
        finally:
            be.dependent = False
        self.graph = finished()

    def _idle(self) -> np.ndarray:
        """Inputs of a round in which every row is padding."""
        block = np.zeros(self.layout.nbytes, np.uint8)
        fill(self.layout.host(block), self.rows, None, None, None)
        return block

    def _run(self, rounds: DecodeRounds, inputs: dict[str, DeviceArray]) -> None:
        be = rounds.backend
        batch = DeviceBatch(
            self.rows, inputs["tokens"], inputs["positions"], inputs["row_segment"], inputs["seg_start"],
            inputs["seg_slot"], ranges=min(rounds.ranges, self.rows * rounds.most_ranges),
        )  # fmt: skip
        be.plan_attention(batch)
        logits = rounds.forward(batch)
        controls = [inputs[name] for name in (*CONTROLS, "certain", *LISTS, "top_n")]
        tables = rounds.tables
        result = split_results(self.result, self.rows, MOST_TOP)
        be.draw(logits, rounds.vocab, controls, tables.prompt_seen, tables.output_count, MOST_TOP, result)


def fill(
    host: dict[str, np.ndarray], bucket: int, batch: Batch | None, rows: SampleRows | None, certain: np.ndarray | None
) -> None:
    """Write a round's inputs; rows past the batch's become padding."""
    count = 0 if batch is None else len(batch.tokens)
    segments = 0 if batch is None else len(batch.seg_slot)
    host["tokens"][count:] = 0
    host["positions"][count:] = 0
    host["row_segment"][count:] = segments
    host["seg_start"][segments] = count
    host["seg_start"][segments + 1] = bucket
    host["seg_slot"][segments] = -1
    host["slot"][count:] = -1
    host["top_n"][count:] = -1
    host["certain"][count:] = 0
    for name in ("repetition",):
        host[name][count:] = 1
    for name in ("temperature", "presence", "frequency"):
        host[name][count:] = 0
    for name in LISTS:
        if name.endswith("start"):
            host[name][count:] = 0
    if batch is None or rows is None:
        return
    for name in ("tokens", "positions", "row_segment"):
        host[name][:count] = getattr(batch, name)
    host["seg_start"][:segments] = batch.seg_start[:segments]
    host["seg_slot"][:segments] = batch.seg_slot
    for name in (*CONTROLS, "top_n"):
        host[name][:count] = getattr(rows, name)
    host["certain"][:count] = 0 if certain is None else certain
    for name in LISTS:
        values = getattr(rows, name)
        host[name][: len(values)] = values
        if name.endswith("start"):
            host[name][count:] = values[-1]


@dataclass(slots=True)
class Round:
    """A decode round on its way. `result` waits for it."""

    _event: Event
    _host: np.ndarray
    _bucket: int
    _count: int
    _most: int

    def done(self) -> bool:
        return self._event.done()

    def result(self) -> SampleResult:
        self._event.synchronize()
        every = host_results(self._host, self._bucket, MOST_TOP)
        n, most = self._count, self._most
        return SampleResult(
            every.token[:n],
            every.logprob[:n],
            every.rank[:n],
            every.top_ids[:n, :most].copy(),
            every.top_logprobs[:n, :most].copy(),
        )


class DecodeRounds:
    """Decode rounds of up to the largest bucket's rows, each one graph launch.

    forward: the network, from a DeviceBatch to all rows' logits. ranges: attention ranges of all rows of a round
    together at most; most_ranges: of one row. Captures a graph for each bucket at construction.
    """

    def __init__(
        self,
        backend: CudaBackend,
        forward: Forward,
        tables: PenaltyTables,
        *,
        buckets: Sequence[int],
        vocab: int,
        page_table: np.ndarray,
        ranges: int,
        most_ranges: int,
    ) -> None:
        self.backend, self.forward, self.tables, self.vocab = backend, forward, tables, vocab
        self.ranges, self.most_ranges = ranges, most_ranges
        backend.device.make_current()
        backend.send_page_table(page_table, np.zeros(0, np.int32))
        largest = max(buckets)
        self._results = [PinnedBuffer(largest * (3 + 2 * MOST_TOP) * 4) for _ in range(ROUNDS)]
        self._events = [backend.device.event(timing=False) for _ in range(ROUNDS)]
        self._turn = 0
        self.graphs: list[_Bucket] = []
        try:
            self.graphs = [_Bucket(self, rows) for rows in sorted(buckets)]
        except CudaError as error:
            _log.warning("decode rounds run without graphs (%s)", error)

    def close(self) -> None:
        """Give up graphs and memory. Idempotent."""
        be, graphs = self.backend, self.graphs
        be.stream.synchronize()
        self.graphs = []
        for bucket in graphs:
            call("cuGraphExecDestroy", bucket.graph)
            be.free(bucket.block)
            be.free(bucket.result)
            for pinned in bucket.pinned:
                pinned.free()
        results, self._results = self._results, []
        for pinned in results:
            pinned.free()

    def fits(self, batch: Batch, rows: SampleRows) -> bool:
        """Whether a graph can run this batch, drawing a token behind each of its rows."""
        count = len(batch.tokens)
        return (
            len(rows.slot) == count
            and any(count <= bucket.rows for bucket in self.graphs)
            and int(rows.top_n.max(initial=-1)) <= MOST_TOP
            and max(len(rows.bias_id), len(rows.ban_id), len(rows.ahead_id)) <= LIST_ENTRIES
            and count_ranges(batch) <= min(self.ranges, self._bucket(count).rows * self.most_ranges)
        )

    def _bucket(self, count: int) -> _Bucket:
        return next(bucket for bucket in self.graphs if count <= bucket.rows)

    def launch(self, batch: Batch, rows: SampleRows, certain: np.ndarray | None = None) -> Round:
        """Queue a round that `fits`. certain [rows]: see sample.py; a row may ask for embed.FED_BACK as its token."""
        be, bucket, turn = self.backend, self._bucket(len(batch.tokens)), self._turn
        self._turn = (turn + 1) % ROUNDS
        be.device.make_current()
        be.send_page_table(batch.page_table, batch.seg_slot)
        self.tables.flush()
        self._events[turn].synchronize()  # the round before last: its inputs and results are free again
        fill(bucket.hosts[turn], bucket.rows, batch, rows, certain)
        call(
            "cuMemcpyHtoDAsync",
            bucket.block.pointer,
            bucket.pinned[turn].pointer,
            bucket.layout.nbytes,
            be.stream.handle,
        )
        call("cuGraphLaunch", bucket.graph, be.stream.handle)
        host = self._results[turn].array[: bucket.words * 4].view(np.int32)
        be.device.read(bucket.result, host, be.stream)
        self._events[turn].record(be.stream)
        return Round(self._events[turn], host, bucket.rows, len(batch.tokens), max(0, int(rows.top_n.max(initial=-1))))

    def run(self, batch: Batch, rows: SampleRows) -> SampleResult:
        return self.launch(batch, rows).result()
