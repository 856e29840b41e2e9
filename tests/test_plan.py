"""The memory plan: what is refused, what fits, and that more memory never gives less."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels_numba.batch import PAGE_ROWS
from lfm2serve.devices import CPU_STATES_BYTES, GIB, Target
from lfm2serve.dummy import shape
from lfm2serve.errors import InvalidRequest, MemoryPlanError
from lfm2serve.memory.arena import PIECE_BYTES
from lfm2serve.memory.pages import SLACK_ROWS, pages_for
from lfm2serve.memory.plan import make_plan
from lfm2serve.options import EngineOptions

CONFIG = shape("lfm2-350m")
WEIGHTS = 709_000_000
MACHINE = Target("cpu", "this machine", 64 * GIB, CPU_STATES_BYTES, 512)


def plan(**options: object) -> object:
    return make_plan(CONFIG, EngineOptions.from_dict(options), WEIGHTS, MACHINE)


def test_two_gib_are_shared_seventy_to_thirty_unless_set() -> None:
    got = make_plan(CONFIG, EngineOptions(), WEIGHTS, MACHINE)
    assert got.page_bytes == 512 * 12 * 1024  # 12 KiB a token: facts 1.5
    assert 0.69 * 2 * GIB < got.pool <= 0.7 * 2 * GIB
    assert got.prompt_cache == pytest.approx(0.3 * 2 * GIB, rel=0.01)
    assert got.pages == int(0.7 * 2 * GIB) // got.page_bytes
    assert got.context == min(CONFIG.max_position_embeddings, got.pages * PAGE_ROWS - SLACK_ROWS)


def test_a_limit_covers_everything() -> None:
    got = make_plan(CONFIG, EngineOptions(memory_limit_gib=3), WEIGHTS, MACHINE)
    assert got.limit == 3 * GIB and got.total <= got.limit
    assert got.table()[-1][0] == "left" and got.table()[-1][1] >= 0
    assert sum(size for _, size, _ in got.table()[:-2]) == got.total


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"memory_limit_gib": 0.5}, "--memory-limit-gib"),
        ({"memory_limit_gib": 2, "kv_pages": 1000}, "--kv-pages"),
        ({"context": 200_000}, "--context"),
        ({"context": 4000, "kv_pages": 7}, "--kv-pages"),
        ({"kv": "fixed", "kv_pages": 10, "context": 8192}, "--kv fixed"),
        ({"kv": "fixed", "kv_pages": 10}, "--max-streams"),
        ({"kv_pages": 1_000_000}, "--kv-pages"),
        ({"kv_gib": 0.001}, "--kv-gib"),
        ({"kv_gib": 100}, "--kv-gib"),
        ({"kv_gib": 2, "memory_limit_gib": 2}, "--kv-gib 2 .*--memory-limit-gib"),
        ({"kv_gib": 0.1, "context": 20_000}, "--kv-gib 0.1"),
        ({"reserve_gib": 63}, "--reserve-gib"),
        ({"memory_limit_gib": 2, "prompt_cache_gib": 3}, "--prompt-cache-gib 3"),
    ],
)
def test_what_cannot_fit_is_refused_by_the_flag_to_change(options: dict[str, object], named: str) -> None:
    with pytest.raises(MemoryPlanError, match=named):
        plan(**options)


def test_weights_beyond_the_machine_are_refused_before_loading() -> None:
    with pytest.raises(MemoryPlanError, match="this machine has"):
        make_plan(CONFIG, EngineOptions(), 100 * GIB, MACHINE)


def test_fixed_gives_each_stream_a_range_of_the_context() -> None:
    got = make_plan(CONFIG, EngineOptions(kv="fixed", context=1000, max_streams=4, kv_pages=9), WEIGHTS, MACHINE)
    assert got.range_pages == pages_for(1000 + SLACK_ROWS) == 2
    assert got.pages == 8
    spread = make_plan(CONFIG, EngineOptions(kv="fixed", max_streams=4), WEIGHTS, MACHINE)
    assert spread.pages // spread.range_pages == 4
    assert spread.context + SLACK_ROWS <= spread.range_pages * PAGE_ROWS


GPU = Target("cuda", "a GPU", 100 * GIB, None, 8192, virtual_memory=True)


def test_a_gpu_less_its_reserve_is_divided_and_the_pool_begins_with_a_few_pieces() -> None:
    got = make_plan(CONFIG, EngineOptions(), WEIGHTS, GPU)
    assert got.limit == 99 * GIB and got.reserve == GIB and got.total <= got.limit and got.graphs > 0
    assert got.pool > 0.5 * got.limit and got.mapped == got.first_pieces * PIECE_BYTES < got.pool // 20
    assert got.mapped >= 4 * pages_for(2048 + 4096) * got.page_bytes
    eager = make_plan(CONFIG, EngineOptions(kv="eager"), WEIGHTS, GPU)
    plain = make_plan(CONFIG, EngineOptions(), WEIGHTS, replace(GPU, virtual_memory=False))
    assert eager.mapped == plain.mapped == got.pool
    small = make_plan(CONFIG, EngineOptions(kv_gib=0.1), WEIGHTS, GPU)
    assert small.mapped == small.pool and small.first_pieces == 1
    spared = make_plan(CONFIG, EngineOptions(reserve_gib=20), WEIGHTS, GPU)
    assert spared.limit == 80 * GIB and "20.00 GiB stay free" in str(spared)
    with pytest.raises(MemoryPlanError, match=r"a GPU has 100\.00 GiB free, less --reserve-gib 99"):
        make_plan(CONFIG, EngineOptions(reserve_gib=99.5), WEIGHTS, GPU)


def test_the_pool_is_set_in_pages_or_in_gib() -> None:
    got = make_plan(CONFIG, EngineOptions(kv_gib=1), WEIGHTS, MACHINE)
    assert got.pages == GIB // got.page_bytes and got.mapped is None
    assert got == make_plan(CONFIG, EngineOptions(kv_pages=got.pages), WEIGHTS, MACHINE)
    with pytest.raises(InvalidRequest, match="kv_pages"):
        EngineOptions(kv_gib=1, kv_pages=3)


def test_the_plan_is_a_table_everywhere() -> None:
    got = make_plan(CONFIG, EngineOptions(memory_limit_gib=4), WEIGHTS, GPU)
    lines, html, numbers = str(got).splitlines(), got._repr_html_(), got.to_dict()
    assert [line.split("  ")[0] for line in lines] == [what for what, _, _ in got.table()]
    assert html.count("<tr>") == len(lines) and all(f">{what}<" in html for what, _, _ in got.table())
    assert numbers["pool"] == got.pool and numbers["total"] == got.total and numbers["mapped"] == got.mapped
    assert got.with_mapped(GIB).to_dict()["mapped"] == GIB and "1.00 GiB mapped" in str(got.with_mapped(GIB))
    cpu = make_plan(CONFIG, EngineOptions(), WEIGHTS, MACHINE)
    assert cpu.with_mapped(GIB) is cpu and "memory as pages are written" in str(cpu)


@settings(max_examples=150, deadline=None)
@given(
    low=st.floats(1.3, 30), more=st.floats(0, 20), slots=st.integers(1, 64),
    context=st.one_of(st.none(), st.integers(1, 20_000)), kv=st.sampled_from(["paged", "fixed", "eager"]),
    cache=st.one_of(st.none(), st.floats(0, 3)), way=st.sampled_from(["limit", "reserve", "device", "pool"]),
)  # fmt: skip
def test_more_memory_never_gives_less(
    low: float, more: float, slots: int, context: int | None, kv: str, cache: float | None, way: str
) -> None:
    """Whichever way it is given: a higher limit, less kept free, a larger GPU, a larger pool."""

    def at(budget: float) -> tuple[int, ...] | None:
        options, target = EngineOptions(max_streams=slots, context=context, kv=kv, prompt_cache_gib=cache), MACHINE  # type: ignore[arg-type]
        if way == "limit":
            options = replace(options, memory_limit_gib=budget)
        elif way == "reserve":
            options, target = replace(options, reserve_gib=60 - budget), replace(GPU, memory=60 * GIB)
        elif way == "device":
            target = replace(GPU, memory=int(budget * GIB))
        else:
            options = replace(options, kv_gib=budget / 2)
        try:
            got = make_plan(CONFIG, options, WEIGHTS, target)
        except MemoryPlanError:
            return None
        assert got.limit is None or got.total <= got.limit
        assert got.total <= target.memory - got.reserve
        return got.pages, got.context, got.slots, *([got.prompt_cache] if way != "pool" else [])

    small, large = at(low), at(low + more)
    if small is not None:
        assert large is not None
        assert all(a <= b for a, b in zip(small, large, strict=True))
