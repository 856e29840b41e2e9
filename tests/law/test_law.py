"""The law: a reply's tokens and the bits of its logits don't depend on how they were computed."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.law.harness import Collector, Request, Result, Way, engine_for, prompt, run, solo

LENGTHS = st.one_of(
    st.integers(1, 40), st.sampled_from([1, 2, 3, 31, 32, 33, 127, 128, 129, 500, 511, 512, 513, 530, 1030])
)
WAYS = st.builds(
    Way,
    prompt_chunk=st.one_of(st.none(), st.sampled_from([1, 2, 3, 7, 16, 64, 129, 300])),
    slots=st.integers(1, 6),
    kv=st.sampled_from(["paged", "fixed"]),
    shuffle=st.one_of(st.none(), st.integers(0, 9)),
    threads=st.sampled_from([None, 1, 2]),
    queued=st.booleans(),
)
law = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@st.composite
def requests(draw: st.DrawFn) -> list[Request]:
    count = draw(st.integers(1, 5))
    return [
        Request(
            prompt(draw(LENGTHS), draw(st.integers(0, 3))),
            seed=1000 + i,
            max_tokens=draw(st.integers(1, 20)),
            temperature=draw(st.sampled_from([0.0, 0.8])),
        )
        for i in range(count)
    ]


def check(path: Path, way: Way, asked: list[Request], results: list[Result]) -> None:
    for request, result in zip(asked, results, strict=True):
        expected = solo(path, request, way.dtype)
        assert len(expected.bits) == request.max_tokens
        assert result.tokens == expected.tokens
        assert result == expected


@law
@given(way=WAYS, asked=requests(), together=st.booleans())
def test_any_way_gives_the_solo_reply_moe(tiny_moe: Path, way: Way, asked: list[Request], together: bool) -> None:
    check(tiny_moe, way, asked, run(tiny_moe, way, asked, together=together))


@law
@given(way=WAYS, asked=requests(), together=st.booleans())
def test_any_way_gives_the_solo_reply_dense(tiny_dense: Path, way: Way, asked: list[Request], together: bool) -> None:
    check(tiny_dense, way, asked, run(tiny_dense, way, asked, together=together))


def test_float32_keeps_the_law_too(tiny_moe: Path) -> None:
    way = Way(dtype="float32", prompt_chunk=5, shuffle=1)
    asked = [Request(prompt(20 + i, i), seed=i, temperature=0.5 * (i % 2)) for i in range(4)]
    check(tiny_moe, way, asked, run(tiny_moe, way, asked))


@law
@given(way=WAYS, asked=requests(), after=st.integers(0, 6), late=requests())
def test_cancelled_and_joining_neighbours_change_nothing(
    tiny_moe: Path, way: Way, asked: list[Request], after: int, late: list[Request]
) -> None:
    late = [replace(request, seed=2000 + i) for i, request in enumerate(late)]
    leaving = [replace(request, seed=3000 + i, cancel_after=after, max_tokens=40) for i, request in enumerate(asked)]
    with engine_for(tiny_moe, way) as (engine, backend):
        collector = Collector(engine)
        for pair in zip(asked, leaving, strict=True):
            for request in pair:
                collector.submit(request)
        for request in late:
            collector.submit(request)
        results = collector.wait()
    staying = results[0 : 2 * len(asked) : 2] + results[2 * len(asked) :]
    for request, result in zip([*asked, *late], staying, strict=True):
        backend.give(request, result)
    check(tiny_moe, way, [*asked, *late], staying)
    for result in results[1 : 2 * len(asked) : 2]:
        assert result.finish_reason in ("abort", "length")


def test_a_failing_neighbour_takes_nobody_with_it(tiny_moe: Path) -> None:
    bad = Request((399, 50, 60), seed=1)
    good = [Request(prompt(30 * i + 3, i), seed=10 + i, max_tokens=16, temperature=0.7 * (i % 2)) for i in range(4)]
    asked = [good[0], good[1], bad, good[2], good[3]]
    results = run(tiny_moe, Way(prompt_chunk=40), asked, poison=frozenset({399}))
    assert results[2].finish_reason == "error" and not results[2].tokens
    check(tiny_moe, Way(), good, [*results[:2], *results[3:]])


def test_streams_that_were_decoding_when_a_step_failed_start_again_and_end_the_same(tiny_moe: Path) -> None:
    request = Request(prompt(40, 1), seed=5, max_tokens=60, temperature=0.8)
    expected = solo(tiny_moe, request)
    with engine_for(tiny_moe, Way()) as (engine, backend):
        model = engine._steps._model
        forward, calls = model.forward, []

        def flaky(batch: object, states: object, tap_rows: object) -> object:
            calls.append(len(batch.seg_slot))  # type: ignore[attr-defined]
            if len(calls) in (6, 7, 12, 18) and calls[-1] > 1:
                raise RuntimeError("injected fault")
            return forward(batch, states, tap_rows)  # type: ignore[arg-type]

        model.forward = flaky  # type: ignore[method-assign, assignment]
        collector = Collector(engine)
        collector.submit(request)
        collector.submit(replace(request, seed=6, prompt=prompt(9, 2)))
        first, _ = collector.wait()
        assert engine.stats().counters.failed_steps >= 2
    backend.give(request, first)
    assert first == expected


def test_choices_of_one_request_differ_and_each_equals_its_solo_draw(tiny_moe: Path) -> None:
    request = Request(prompt(12, 3), seed=77, temperature=1.0, max_tokens=10)
    with engine_for(tiny_moe, Way()) as (engine, _):
        collector = Collector(engine)
        for choice in range(4):
            collector.submit(request, choice)
        together = [result.tokens for result in collector.wait()]
    assert len({tuple(tokens) for tokens in together}) == 4
    for choice in range(4):
        with engine_for(tiny_moe, Way(slots=1)) as (engine, _):
            collector = Collector(engine)
            collector.submit(request, choice)
            assert collector.wait()[0].tokens == together[choice]


def test_a_decoded_row_is_worth_a_prompt_row(tiny_moe: Path, tiny_dense: Path) -> None:
    for path in (tiny_moe, tiny_dense):
        request = Request(prompt(500, 4), seed=9, max_tokens=30)
        first = solo(path, request)
        longer = Request(request.prompt + tuple(first.tokens[:20]), seed=9, max_tokens=10)
        again = solo(path, longer)
        assert again.tokens == first.tokens[20:]
        assert again.bits == {pos: bits for pos, bits in first.bits.items() if pos >= 520}


def test_pages_that_are_short_make_streams_wait_and_change_nothing(tiny_moe: Path) -> None:
    asked = [Request(prompt(400 + i, i), seed=50 + i, max_tokens=8) for i in range(8)]
    way = Way(pages=3, prompt_chunk=150)
    check(tiny_moe, way, asked, run(tiny_moe, way, asked))


def test_a_slot_taken_over_never_shows_its_last_owner(tiny_dense: Path) -> None:
    asked = [Request(prompt(n, n), seed=100 + n, max_tokens=5) for n in (50, 1, 40, 2, 30, 3, 1, 2)]
    way = Way(slots=1)
    check(tiny_dense, way, asked, run(tiny_dense, way, asked))


def test_short_prompts_packed_in_one_step_equal_solo(tiny_moe: Path) -> None:
    asked = [Request(prompt(n, 1), seed=200 + n, max_tokens=6) for n in (1, 2, 3, 50)]
    check(tiny_moe, Way(), asked, run(tiny_moe, Way(), asked))


@pytest.mark.parametrize("threads", [1, 2])
def test_a_new_process_gives_the_same_bits(tiny_moe: Path, threads: int) -> None:
    request = Request(prompt(70, 6), seed=300, temperature=0.9)
    script = (
        "import json, sys; from pathlib import Path; from tests.law.harness import *\n"
        "spec = json.loads(sys.argv[2]); spec['prompt'] = tuple(spec['prompt'])\n"
        "r = run(Path(sys.argv[1]), Way(prompt_chunk=9, threads=int(sys.argv[3])), [Request(**spec)])[0]\n"
        "print(json.dumps([r.tokens, sorted(r.bits.items())]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(tiny_moe), json.dumps(asdict(request)), str(threads)],
        capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2],
    )  # fmt: skip
    expected = solo(tiny_moe, request)
    assert json.loads(done.stdout) == [expected.tokens, [list(item) for item in sorted(expected.bits.items())]]
