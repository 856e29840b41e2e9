"""The engine on a pool that gets its memory in pieces: the same bits, the gate, and failures that leave nothing behind.

The pages lie in host memory that is NaN until a piece of it is mapped and zeroed; the driver keeps account.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from kernels_numba.cuda import pieces
from kernels_numba.cuda.pieces import ReservedRange
from lfm2serve.engine import Engine
from lfm2serve.errors import ArenaMemory
from lfm2serve.memory import states
from lfm2serve.memory.arena import Arena
from lfm2serve.sampling import SamplingParams
from lfm2serve.stream import StreamEvent
from tests.cuda.fake_driver import STEPS, FakeDriver
from tests.law import harness
from tests.law.harness import Request, Way, ask, check, engine_for, prompt

PIECE = 256 << 10  # half a page of the tiny model
HELPER, ENGINE = "lfm2serve-arena", "lfm2serve-engine"
NAN = 0x7FC0


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDriver]:
    """Engines of the harness on pages in pieces of this driver."""
    fake = FakeDriver()

    class PiecesBackend(harness.RecordingBackend):
        def allocate_kv(self, *args: Any, **how: Any) -> Any:
            whole = super().allocate_kv(*args, **how)
            values = whole.data.reshape(-1).view(np.uint16)
            values[:] = NAN

            def zero(start: int, nbytes: int) -> None:
                part = values[start // 2 : (start + nbytes) // 2]
                assert (part == NAN).all(), "somebody wrote where no memory was"
                part[:] = 0

            def forget(start: int, nbytes: int) -> None:
                values[start // 2 : (start + nbytes) // 2] = NAN

            fake.zeroed, fake.unmapped = zero, forget
            reserved = ReservedRange(fake.device(), whole.data.nbytes)
            return SimpleNamespace(data=whole.data, page_bytes=whole.page_bytes, mapper=reserved)

    plain, poison, solo = harness.RecordingBackend, harness.poison_states, harness._solo

    def solo_in_one_allocation(*how: Any) -> harness.Result:
        with patch.object(harness, "RecordingBackend", plain), patch.object(harness, "poison_states", poison):
            return solo(*how)

    monkeypatch.setattr(pieces, "call", fake.call)
    monkeypatch.setattr(harness, "_solo", solo_in_one_allocation)
    monkeypatch.setattr(harness, "RecordingBackend", PiecesBackend)
    monkeypatch.setattr(harness, "poison_states", lambda states: None)
    monkeypatch.setattr(states, "Arena", partial(Arena, piece_bytes=PIECE))
    yield fake
    fake.hold.set()


class Reply:
    """One stream's events; waits for tokens or the end."""

    def __init__(self, engine: Engine, ids: tuple[int, ...], max_tokens: int, seed: int) -> None:
        self.tokens = 0
        self.end: StreamEvent | None = None
        self._changed = threading.Condition()
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        self.id = engine.submit(ids, params, self._sink, seed=seed, prompt_cache=False)

    def _sink(self, event: StreamEvent) -> None:
        with self._changed:
            self.tokens += len(event.tokens)
            self.end = event if event.finish_reason else None
            self._changed.notify_all()

    def more(self, tokens: int) -> None:
        """Wait for so many more tokens."""
        with self._changed:
            goal = self.tokens + tokens
            assert self._changed.wait_for(lambda: self.tokens >= goal or self.end, 60) and self.end is None

    def wait(self) -> StreamEvent:
        with self._changed:
            assert self._changed.wait_for(lambda: self.end is not None, 60)
        assert self.end is not None
        return self.end


LONG = Request(prompt(1300, 3), seed=70)


@pytest.mark.parametrize(
    "way",
    [
        Way(slots=4, snapshot_pages=8),
        Way(slots=3, queued=True, prompt_chunk=100, snapshot_pages=8, shuffle=5),
        Way(slots=2, kv="fixed", dtype="float32", threads=1),
    ],
)
def test_replies_have_the_same_bits_in_pieces(driver: FakeDriver, tiny_moe: Path, way: Way) -> None:
    requests = [Request(prompt(n, n), seed=n, temperature=0.8 * (n % 2)) for n in (3, 511, 700, 1203, 40, 1300)]
    with engine_for(tiny_moe, way) as (engine, backend):
        for _ in range(2):  # the second time kept states are restored into new pages
            for request, result in zip(requests, ask(engine, *requests), strict=True):
                check(tiny_moe, backend, request, result, way.dtype)
        stats = engine.arena.stats()
        assert stats.mapped_pieces == len(driver.mapped) == len(driver.maps) > 4
        assert stats.by_caller + stats.by_helper == len(driver.maps) and stats.by_helper > 0


def test_nothing_is_mapped_at_load_but_what_was_asked_for(driver: FakeDriver, tiny_moe: Path) -> None:
    with engine_for(tiny_moe, Way()) as (engine, _):
        assert engine.arena.stats().mapped == 2 * PIECE < engine.arena.stats().reserved // 10


def test_a_lease_that_reaches_unmapped_pieces_waits_while_rounds_go_on(driver: FakeDriver, tiny_moe: Path) -> None:
    with engine_for(tiny_moe, Way(queued=True)) as (engine, _):
        running = Reply(engine, prompt(5, 1), 1400, 1)
        running.more(1)
        before = len(driver.maps)
        driver.hold.clear()
        late = Reply(engine, LONG.prompt, 12, 2)
        assert driver.waits.wait(60), "the helper has the first piece in hand"
        running.more(40)
        assert late.tokens == 0 and engine.stats().waiting == 1 and len(driver.maps) == before
        third = Reply(engine, prompt(4, 2), 4, 3)
        running.more(5)
        assert third.tokens == 0, "nobody overtakes"
        driver.hold.set()
        assert late.wait().finish_reason == third.wait().finish_reason == "length"
        running.more(1)
        assert len(driver.maps) > before and {name for name, _ in driver.maps[before:]} == {HELPER}
        assert len({start for _, start in driver.maps}) == len(driver.maps), "none twice"
        engine.cancel(running.id)


def test_alone_the_engine_maps_for_itself(driver: FakeDriver, tiny_moe: Path) -> None:
    with engine_for(tiny_moe, Way()) as (engine, backend):
        driver.hold.clear()
        [result] = ask(engine, LONG)
        check(tiny_moe, backend, LONG, result)
        assert [name for name, _ in driver.maps[2:]] == [ENGINE] * 4, "three pages are six pieces; page 0 had its two"


def test_after_a_release_the_helper_maps_what_comes_next(
    driver: FakeDriver, tiny_moe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(states, "Arena", partial(Arena, piece_bytes=3 * PIECE))  # a page and a half
    with engine_for(tiny_moe, Way()) as (engine, _):
        running = Reply(engine, prompt(5, 1), 1400, 1)  # pages 0 ... 2: pieces 0 and 1
        running.more(1)
        Reply(engine, prompt(6, 1), 4, 2).wait()  # page 3: piece 2
        assert engine.arena.settle(60)
        assert driver.maps[2:] == [(HELPER, 6 * PIECE), (HELPER, 9 * PIECE)], "piece 3: page 4 is next"
        driver.hold.clear()
        Reply(engine, prompt(600, 1), 4, 3).wait()  # pages 3 and 4
        engine.cancel(running.id)
        running.wait()
        driver.hold.set()


def test_a_client_that_leaves_while_its_lease_waits_gives_it_back(driver: FakeDriver, tiny_moe: Path) -> None:
    with engine_for(tiny_moe, Way()) as (engine, backend):
        running = Reply(engine, prompt(5, 1), 1400, 1)
        running.more(1)
        driver.hold.clear()
        late = Reply(engine, LONG.prompt, 12, 2)
        assert driver.waits.wait(60)
        engine.cancel(late.id)
        assert late.wait().finish_reason == "abort"
        assert set(engine.census().streams) == {running.id}
        driver.hold.set()
        engine.cancel(running.id)
        running.wait()
        [result] = ask(engine, LONG)
        check(tiny_moe, backend, LONG, result)


@pytest.mark.parametrize("position", [1, 2, 4])
@pytest.mark.parametrize("step", STEPS)
def test_a_failure_leaves_nothing_behind_and_a_second_try_works(
    driver: FakeDriver, tiny_moe: Path, step: str, position: int
) -> None:
    with engine_for(tiny_moe, Way()) as (engine, backend):
        before = engine.census()
        driver.count_anew()
        driver.fail_at = {(step, position)}
        end = Reply(engine, LONG.prompt, 12, 1).wait()
        assert end.finish_reason == "error" and isinstance(end.error, ArenaMemory)
        assert end.error.status == 503 and "injected" in end.error.message and end.error.asked == PIECE
        assert engine.census() == before and engine.alive
        assert engine.arena.settle(60)
        assert len(driver.created) == len(driver.mapped) == engine.arena.stats().mapped_pieces
        [result] = ask(engine, LONG)
        check(tiny_moe, backend, LONG, result)


@pytest.mark.parametrize("step", STEPS)
def test_beside_a_running_stream_the_request_waits_and_is_tried_again(
    driver: FakeDriver, tiny_moe: Path, step: str
) -> None:
    with engine_for(tiny_moe, Way()) as (engine, backend):
        running = Reply(engine, prompt(5, 1), 1400, 1)
        running.more(1)
        driver.count_anew()
        driver.fail_at = {(step, n) for n in range(1, 50)}
        late = harness.Collector(engine)
        result = late.submit(LONG)
        while not engine.arena.stats().failed:
            running.more(1)
        running.more(20)
        assert set(engine.census().streams) == {running.id}, "the lease was given back"
        assert engine.stats().waiting == 1 and result.finish_reason is None
        assert engine.arena.stats().failed <= 6, "it isn't tried again before something ends"
        driver.fail_at = set()
        engine.cancel(running.id)
        late.wait()
        check(tiny_moe, backend, LONG, result)


def test_once_something_ends_it_is_tried_again_beside_the_others(driver: FakeDriver, tiny_moe: Path) -> None:
    with engine_for(tiny_moe, Way()) as (engine, backend):
        running, ending = (Reply(engine, prompt(5, n), 1400, n) for n in (1, 2))
        running.more(1)
        ending.more(1)
        driver.count_anew()
        driver.fail_at = {("cuMemCreate", n) for n in range(1, 50)}
        late = harness.Collector(engine)
        result = late.submit(LONG)
        while not engine.arena.stats().failed:
            running.more(1)
        running.more(2)
        assert engine.stats().waiting == 1
        driver.fail_at = set()
        before = len(driver.maps)
        engine.cancel(ending.id)
        late.wait()
        running.more(1)
        check(tiny_moe, backend, LONG, result)
        assert {name for name, _ in driver.maps[before:]} <= {HELPER}
        engine.cancel(running.id)


def test_what_fails_beside_others_and_alone_too_is_an_error(driver: FakeDriver, tiny_moe: Path) -> None:
    with engine_for(tiny_moe, Way()) as (engine, _):
        driver.capacity = driver.used + PIECE
        running = Reply(engine, prompt(5, 1), 200, 1)
        end = Reply(engine, LONG.prompt, 12, 2).wait()
        assert running.wait().finish_reason == "length"
        assert isinstance(end.error, ArenaMemory) and end.error.free <= PIECE
        assert Reply(engine, prompt(6, 1), 5, 3).wait().finish_reason == "length", "what is mapped still serves"


def test_a_pass_that_prepares_a_state_is_given_up_where_there_is_no_memory(driver: FakeDriver, tiny_moe: Path) -> None:
    with engine_for(tiny_moe, Way(snapshot_pages=8)) as (engine, _):
        chat = harness.Chat()
        request = chat.ask(prompt(30, 1), seed=1)
        [result] = ask(engine, request)
        assert engine.arena.settle(60)
        driver.capacity = driver.used
        engine.returned(result.stream_id, [*request.prompt, *prompt(1200, 2)])
        assert engine.drain(60) and engine.stats().counters.warm_passes == 1
        assert engine.stats().cache.counters.failures == 0


def test_a_lost_device_ends_the_engine(driver: FakeDriver, tiny_moe: Path) -> None:
    with engine_for(tiny_moe, Way(), ends=True) as (engine, _):
        driver.count_anew()
        driver.fail_at = {("cuMemSetAccess", 1), ("cuMemUnmap", 1)}
        end = Reply(engine, LONG.prompt, 12, 1).wait()
        assert end.finish_reason == "error" and "cuMemUnmap" in str(end.error)
