"""Who runs next: order of admission, packing of prompt steps, pace beside running streams."""

from __future__ import annotations

import pytest

from lfm2serve.memory.arena import Arena
from lfm2serve.memory.pages import PagePool
from lfm2serve.sampling import SamplingParams
from lfm2serve.scheduler import MIN_ROWS, Pace, Scheduler
from lfm2serve.stream import Stream

GAP = 0.05


def stream(ident: int, length: int, max_tokens: int = 10) -> Stream:
    return Stream(
        ident, [1] * length, SamplingParams(), lambda event: None,
        max_tokens=max_tokens, seed=0, choice=0, eos_token_ids=frozenset(),
    )  # fmt: skip


def scheduler(pages: int = 100, slots: int = 4, prompt_chunk: int | None = None) -> Scheduler:
    return Scheduler(
        PagePool(pages), Arena(pages, 1), slots, prompt_chunk=prompt_chunk, largest_chunk=512, max_gap_s=GAP
    )


def test_admission_is_in_order_and_bounded_by_slots() -> None:
    sched = scheduler(slots=2)
    sched.waiting.extend(stream(i, 10) for i in range(3))
    assert [s.id for s in sched.admit()] == [0, 1]
    assert len({s.slot for s in sched.filling}) == 2
    sched.remove(sched.filling[0])
    assert [s.id for s in sched.admit()] == [2]


def test_a_large_request_at_the_head_waits_and_is_not_overtaken() -> None:
    sched = scheduler(pages=3)
    sched.waiting.extend([stream(0, 600), stream(1, 600), stream(2, 10)])
    assert [s.id for s in sched.admit()] == [0]
    assert sched.pool.census().promised == 2
    assert not sched.admit()
    sched.remove(sched.filling[0])
    assert [s.id for s in sched.admit()] == [1, 2]
    assert sched.pool.census().promised == 0


def test_a_prompt_step_packs_the_oldest_first_up_to_its_rows() -> None:
    sched = scheduler(prompt_chunk=25)
    sched.waiting.extend([stream(0, 10), stream(1, 10), stream(2, 10)])
    sched.admit()
    assert [(c.stream.id, c.rows, c.completes) for c in sched.next_chunks()] == [
        (0, 10, True),
        (1, 10, True),
        (2, 5, False),
    ]


def test_alone_a_prompt_runs_in_the_largest_chunks_and_beside_others_in_small_ones() -> None:
    sched = scheduler()
    sched.waiting.append(stream(0, 2000))
    sched.admit()
    assert sched.next_chunks()[0].rows == 512
    sched.filled(sched.filling[0])
    sched.waiting.append(stream(1, 2000))
    sched.admit()
    assert sched.next_chunks()[0].rows == 4 * MIN_ROWS


def test_the_pace_keeps_the_gap_and_never_stops_a_prompt() -> None:
    pace = Pace(GAP, 512)
    pace.prompt_step(100, 0.1)  # 1 ms a row
    pace.decode_round(0.01)
    rows = pace.rows_beside_decoding()
    assert rows % MIN_ROWS == 0 and 0.001 * rows + 0.01 <= GAP < 0.001 * (rows + 2 * MIN_ROWS) + 0.01
    pace.decode_round(10.0)
    assert pace.rows_beside_decoding() == MIN_ROWS
    quick = Pace(GAP, 512)
    quick.prompt_step(1000, 0.001)
    assert quick.rows_beside_decoding() == 512


@pytest.mark.parametrize("lengths", [[64_000, 120_000], [120_000, 64_000], [3000, 64_000, 500, 120_000]])
def test_a_prompt_behind_a_longer_one_keeps_the_gap(lengths: list[int]) -> None:
    """The time of a step as it is on a large GPU: experts that are read once, rows, and the tokens behind each row."""
    pace = Pace(GAP, 16_384)
    round_s = 0.0023
    pace.decode_round(round_s)
    for length in [512, *lengths]:
        done = 0
        while done < length:
            rows = min(pace.rows_beside_decoding(), length - done)
            seconds = max(0.0095, 0.004 + 8.6e-6 * rows) + 2.25e-10 * rows * (done + rows / 2)
            pace.prompt_step(rows, seconds)
            done += rows
            assert seconds + round_s < 1.1 * GAP


def test_a_stream_that_starts_again_runs_by_itself() -> None:
    sched = scheduler()
    sched.waiting.extend([stream(0, 10), stream(1, 20)])
    for admitted in sched.admit():
        admitted.rows_done = admitted.rows_left
        sched.filled(admitted)
    again = sched.running[1]
    again.append(5)
    sched.restart(again)
    assert sched.running == [s for s in sched.running if s is not again]
    chunks = sched.next_chunks()
    assert [(c.stream.id, c.rows) for c in chunks] == [(1, 21)] and chunks[0].completes
    sched.filled(again)
    assert not again.alone


@pytest.mark.parametrize("where", ["waiting", "filling", "running"])
def test_removing_a_stream_frees_slot_and_pages_wherever_it_is(where: str) -> None:
    sched = scheduler(slots=1)
    victim = stream(0, 10)
    sched.waiting.append(victim)
    if where != "waiting":
        sched.admit()
    if where == "running":
        sched.filled(victim)
    sched.remove(victim)
    assert sched.idle and sched.pool.census().clean
    sched.waiting.append(stream(1, 10))
    assert sched.admit()


def test_pace_learns_what_a_step_costs_before_its_first_row() -> None:
    """Where all experts are read, a step of few rows takes 10 ms too; the next size must not be guessed from that."""
    pace = Pace(0.05, 8192)
    pace.decode_round(0.003)
    assert pace.rows_beside_decoding() == 32
    for rows in (32, 104):
        pace.prompt_step(rows, 0.010 + 12e-6 * rows)
    for most in (208, 416, 832, 1664, 3328, 3328):  # as far as it was measured, twice each time
        rows = pace.rows_beside_decoding()
        assert 0.003 + 0.010 + 12e-6 * rows <= GAP and rows <= most
        pace.prompt_step(rows, 0.010 + 12e-6 * rows)
    assert 0.003 + 0.010 + 12e-6 * rows > 0.8 * GAP
    for _ in range(9):  # a step that was disturbed is forgotten
        pace.prompt_step(3000, 0.2)
    for _ in range(40):
        rows = pace.rows_beside_decoding()
        pace.prompt_step(rows, 0.010 + 12e-6 * rows)
    assert 2000 < pace.rows_beside_decoding() <= 2700
