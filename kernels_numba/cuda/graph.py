"""Decode rounds as CUDA graphs: each bucket of rows has one of the network and one of the draw behind it.

Everything a round reads lies in fixed device memory, filled by one copy a graph from page-locked memory; rows of a
bucket that a round doesn't use are padding (slot -1), which read and write no stream's state. A network may be queued
before the host knows the tokens that the round before draws: FED_BACK rows take them on the device. What fits no graph,
or a device where capture fails, runs the same kernels one by one, with the same bits.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
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
DEPENDENT_ROWS = 64  # buckets up to this start each kernel before the one before has ended
ROUNDS = 2  # rounds whose inputs or results may be on their way

Forward = Callable[[DeviceBatch, "Activations"], object]
"""Runs the network over a batch and writes the logits of all its rows to the array."""


def most_round_rows(slots: int) -> int:
    """Rows of the largest bucket that `slots` streams use: their own, and as many draft rows."""
    largest = min(BUCKETS[-1], 2 * max(slots, 8))
    return next(rows for rows in BUCKETS if rows >= largest)


@contextmanager
def capture(stream: Stream) -> Iterator[Callable[[], Any]]:
    """Work queued on the stream inside goes into a graph; afterwards the yielded function instantiates it."""
    from cuda.bindings import driver

    call("cuStreamBeginCapture", stream.handle, driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL)
    graph = None

    def instantiate() -> Any:
        try:
            return call("cuGraphInstantiate", graph, 0)
        finally:
            call("cuGraphDestroy", graph)

    try:
        yield instantiate
    except BaseException:
        driver.cuStreamEndCapture(stream.handle)  # leaves the stream usable
        raise
    graph = call("cuStreamEndCapture", stream.handle)


@dataclass(frozen=True, slots=True)
class _Field:
    offset: int
    count: int
    dtype: np.dtype[Any]


KINDS = {"<i4": "i32", "<u4": "u32", "<f4": "f32", "<u8": "u64"}


class _Inputs:
    """What one graph reads: named arrays in a block of device memory, and the page-locked blocks that fill it."""

    def __init__(self, backend: CudaBackend, sizes: Iterable[tuple[str, int, str]]) -> None:
        self._backend = backend
        self._fields: dict[str, _Field] = {}
        self.nbytes = 0
        for name, count, dtype in sizes:
            kind = np.dtype(dtype)
            self._fields[name] = _Field(self.nbytes, count, kind)
            self.nbytes += -(-count * kind.itemsize // 16) * 16
        self._block = backend.allocate((self.nbytes,), "u8")
        self._pinned = [PinnedBuffer(self.nbytes) for _ in range(ROUNDS)]
        self.hosts = [self._views(pinned.array) for pinned in self._pinned]
        self.device = {
            name: DeviceArray(self._block.pointer + f.offset, (f.count,), KINDS[f.dtype.str])
            for name, f in self._fields.items()
        }

    def _views(self, block: np.ndarray) -> dict[str, np.ndarray]:
        return {
            name: block[f.offset : f.offset + f.count * f.dtype.itemsize].view(f.dtype)
            for name, f in self._fields.items()
        }

    def send(self, turn: int) -> None:
        """Queue the copy of a host block."""
        call(
            "cuMemcpyHtoDAsync",
            self._block.pointer,
            self._pinned[turn].pointer,
            self.nbytes,
            self._backend.stream.handle,
        )

    def free(self) -> None:
        self._backend.free(self._block)
        for pinned in self._pinned:
            pinned.free()


def _network_sizes(rows: int) -> Iterator[tuple[str, int, str]]:
    yield from ((name, rows, "<i4") for name in ("tokens", "positions", "row_segment"))
    yield "seg_start", rows + 2, "<i4"
    yield "seg_slot", rows + 1, "<i4"


def _draw_sizes(rows: int) -> Iterator[tuple[str, int, str]]:
    kinds = {"seed": "<u8", "choice": "<u4", "position": "<u4", "top_k": "<i4", "slot": "<i4", "mask_row": "<i4"}
    yield from ((name, rows, kinds.get(name, "<f4")) for name in CONTROLS)
    for name in LISTS:
        count = rows + 1 if name.endswith("start") else LIST_ENTRIES
        yield name, count, "<f4" if name == "bias_value" else "<i4"
    yield "top_n", rows, "<i4"


class _Bucket:
    """The two graphs of a number of rows, and their fixed memory."""

    def __init__(self, rounds: DecodeRounds, rows: int) -> None:
        be = rounds.backend
        self.rows = rows
        self.network = _Inputs(be, _network_sizes(rows))
        self.draw = _Inputs(be, _draw_sizes(rows))
        self.words = rows * (3 + 2 * MOST_TOP)
        self.result = be.allocate((self.words,), "i32")
        self.logits = rounds.logits.part(0, rows)
        self.graphs: list[Any] = []
        fill_network(self.network.hosts[0], rows, None)  # every row is padding
        fill_draw(self.draw.hosts[0], rows, None)
        self.network.send(0)
        self.draw.send(0)

    def capture(self, rounds: DecodeRounds) -> None:
        """Make the graphs."""
        be = rounds.backend
        for run in (self._network, self._draw):
            run(rounds)  # once as it is: loads every kernel
            be.stream.synchronize()
            be.dependent = self.rows <= DEPENDENT_ROWS
            try:
                with capture(be.stream) as finished:
                    run(rounds)
            finally:
                be.dependent = False
            self.graphs.append(finished())

    def _network(self, rounds: DecodeRounds) -> None:
        be, inputs = rounds.backend, self.network.device
        batch = DeviceBatch(
            self.rows, inputs["tokens"], inputs["positions"], inputs["row_segment"], inputs["seg_start"],
            inputs["seg_slot"], ranges=min(rounds.ranges, self.rows * rounds.most_ranges),
        )  # fmt: skip
        be.plan_attention(batch)
        rounds.forward(batch, self.logits)

    def _draw(self, rounds: DecodeRounds) -> None:
        inputs, tables = self.draw.device, rounds.tables
        controls = [inputs[name] for name in (*CONTROLS, *LISTS, "top_n")]
        result = split_results(self.result, self.rows, MOST_TOP)
        rounds.backend.draw(
            self.logits, rounds.vocab, controls, tables.prompt_seen, tables.output_count, MOST_TOP, result, rounds.masks
        )

    def close(self, backend: CudaBackend) -> None:
        for graph in self.graphs:
            call("cuGraphExecDestroy", graph)
        backend.free(self.result)
        self.network.free()
        self.draw.free()


def fill_network(host: dict[str, np.ndarray], bucket: int, batch: Batch | None) -> None:
    """Write what the network reads; rows past the batch's become padding."""
    count = 0 if batch is None else len(batch.tokens)
    segments = 0 if batch is None else len(batch.seg_slot)
    host["tokens"][count:] = 0
    host["positions"][count:] = 0
    host["row_segment"][count:] = segments
    host["seg_start"][segments] = count
    host["seg_start"][segments + 1] = bucket
    host["seg_slot"][segments] = -1
    if batch is None:
        return
    for name in ("tokens", "positions", "row_segment"):
        host[name][:count] = getattr(batch, name)
    host["seg_start"][:segments] = batch.seg_start[:segments]
    host["seg_slot"][:segments] = batch.seg_slot


def fill_draw(host: dict[str, np.ndarray], bucket: int, rows: SampleRows | None) -> None:
    """Write what the draw reads; rows past the given become padding."""
    count = 0 if rows is None else len(rows.slot)
    host["slot"][count:] = -1
    host["mask_row"][count:] = -1
    host["top_n"][count:] = -1
    host["repetition"][count:] = 1
    for name in ("temperature", "presence", "frequency"):
        host[name][count:] = 0
    for name in LISTS:
        if name.endswith("start"):
            host[name][count:] = 0
    if rows is None:
        return
    for name in (*CONTROLS, "top_n"):
        host[name][:count] = getattr(rows, name)
    for name in LISTS:
        values = getattr(rows, name)
        host[name][: len(values)] = values
        if name.endswith("start"):
            host[name][count:] = values[-1]


class Round:
    """A decode round: its network is queued, then its draw; `result` waits for it."""

    def __init__(self, bucket: _Bucket, count: int, turn: int, network: Event) -> None:
        self.bucket, self.count, self.turn = bucket, count, turn
        self._network = network
        self._drawn: SampleResult | None = None
        self._event: Event | None = None
        self._host: np.ndarray | None = None
        self._most = 0

    @property
    def network_done(self) -> bool:
        """Whether the device is through with the network, and waits for the draw."""
        return self._network.done()

    def result(self) -> SampleResult:
        if self._drawn is None:
            assert self._event is not None and self._host is not None, "a round is drawn before its result is taken"
            self._event.synchronize()
            every, n, most = host_results(self._host, self.bucket.rows, MOST_TOP), self.count, self._most
            self._drawn = SampleResult(
                every.token[:n],
                every.logprob[:n],
                every.rank[:n],
                every.top_ids[:n, :most].copy(),
                every.top_logprobs[:n, :most].copy(),
            )
        return self._drawn

    def drawn(self, result: SampleResult) -> None:
        """It was drawn without a graph."""
        self._drawn = result

    def queued(self, event: Event, host: np.ndarray, most: int) -> None:
        """Its draw is queued: the result lies in `host` once the event has come."""
        self._event, self._host, self._most = event, host, most


class DecodeRounds:
    """Decode rounds of up to the largest bucket's rows, each two graph launches: `begin`, then `draw`.

    Rounds are drawn in the order in which they began, and one may begin while the one before is being drawn: at most
    two are under way. forward: the network, from a DeviceBatch to all rows' logits [rows, width]. ranges: attention
    ranges of all rows of a round together at most; most_ranges: of one row. Captures the graphs of each bucket at
    construction.
    """

    def __init__(
        self,
        backend: CudaBackend,
        forward: Forward,
        tables: PenaltyTables,
        *,
        buckets: Sequence[int],
        width: int,
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
        self.logits = backend.scratch.take((largest, width), "f32")
        self.masks = backend.allocate((largest, -(-width // 32)), "u32")
        self._masks = [PinnedBuffer(self.masks.nbytes) for _ in range(ROUNDS)]
        self._results = [PinnedBuffer(largest * (3 + 2 * MOST_TOP) * 4) for _ in range(ROUNDS)]
        self._networks = [backend.device.event(timing=False) for _ in range(ROUNDS)]
        self._draws = [backend.device.event(timing=False) for _ in range(ROUNDS)]
        self._turn = 0
        self.buckets: list[_Bucket] = []
        try:
            for rows in sorted(buckets):
                bucket = _Bucket(self, rows)
                try:
                    bucket.capture(self)
                except BaseException:
                    bucket.close(backend)
                    raise
                self.buckets.append(bucket)
        except CudaError as error:
            _log.warning("decode rounds of more than %d rows run without graphs (%s)", self.most_rows, str(error))

    @property
    def most_rows(self) -> int:
        return self.buckets[-1].rows if self.buckets else 0

    def close(self) -> None:
        """Give up graphs and memory. Idempotent."""
        self.backend.stream.synchronize()
        buckets, self.buckets = self.buckets, []
        for bucket in buckets:
            bucket.close(self.backend)
        pinned, self._results, self._masks = [*self._results, *self._masks], [], []
        for buffer in pinned:
            buffer.free()
        if self.__dict__.pop("logits", None) is not None:
            self.backend.free(self.masks)

    def fits(self, batch: Batch) -> bool:
        """Whether a graph can run this batch."""
        count = len(batch.tokens)
        return count <= self.most_rows and count_ranges(batch) <= min(
            self.ranges, self._bucket(count).rows * self.most_ranges
        )

    def _bucket(self, count: int) -> _Bucket:
        return next(bucket for bucket in self.buckets if count <= bucket.rows)

    def begin(self, batch: Batch) -> Round:
        """Queue the network over a batch that `fits`. A row's token may be FED_BACK: the one that the round
        before draws for its slot."""
        be, bucket, turn = self.backend, self._bucket(len(batch.tokens)), self._turn
        self._turn = (turn + 1) % ROUNDS
        be.device.make_current()
        be.send_page_table(batch.page_table, batch.seg_slot)
        self._draws[turn].synchronize()  # the round before last: its inputs are free again
        fill_network(bucket.network.hosts[turn], bucket.rows, batch)
        bucket.network.send(turn)
        call("cuGraphLaunch", bucket.graphs[0], be.stream.handle)
        self._networks[turn].record(be.stream)
        return Round(bucket, len(batch.tokens), turn, self._networks[turn])

    def draw(self, begun: Round, rows: SampleRows) -> None:
        """Queue the draw of a token behind each of a round's rows; without a graph where the wishes are too many."""
        be, bucket, turn = self.backend, begun.bucket, begun.turn
        most = max(0, int(rows.top_n.max(initial=-1)))
        entries = max(len(rows.bias_id), len(rows.ban_id), len(rows.ahead_id))
        if most > MOST_TOP or entries > LIST_ENTRIES:
            begun.drawn(be.sample(bucket.logits.part(0, begun.count), rows))
            return
        self.tables.flush()
        if len(rows.mask):
            words = self._masks[turn].array.view(np.uint32).reshape(self.masks.shape)
            words[: len(rows.mask)] = rows.mask
            call("cuMemcpyHtoDAsync", self.masks.pointer, self._masks[turn].pointer, rows.mask.nbytes, be.stream.handle)
        fill_draw(bucket.draw.hosts[turn], bucket.rows, rows)
        bucket.draw.send(turn)
        call("cuGraphLaunch", bucket.graphs[1], be.stream.handle)
        host = self._results[turn].array[: bucket.words * 4].view(np.int32)
        be.device.read(bucket.result, host, be.stream)
        self._draws[turn].record(be.stream)
        begun.queued(self._draws[turn], host, most)
