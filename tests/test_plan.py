"""The memory plan: what is refused, what fits, and that more memory never gives less."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels_numba.batch import PAGE_ROWS
from lfm2serve.devices import CPU_STATES_BYTES, GIB, Target
from lfm2serve.dummy import shape
from lfm2serve.errors import MemoryPlanError
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


@settings(max_examples=60, deadline=None)
@given(
    low=st.floats(1.3, 30), more=st.floats(0, 20), slots=st.integers(1, 64),
    context=st.one_of(st.none(), st.integers(1, 20_000)), kv=st.sampled_from(["paged", "fixed"]),
)  # fmt: skip
def test_more_memory_never_gives_less(low: float, more: float, slots: int, context: int | None, kv: str) -> None:
    def at(limit: float) -> tuple[int, ...] | None:
        options = EngineOptions(memory_limit_gib=limit, max_streams=slots, context=context, kv=kv)  # type: ignore[arg-type]
        try:
            got = make_plan(CONFIG, options, WEIGHTS, MACHINE)
        except MemoryPlanError:
            return None
        assert got.total <= low_bytes(limit)
        return got.pages, got.prompt_cache, got.context

    def low_bytes(limit: float) -> int:
        return int(limit * GIB)

    small, large = at(low), at(low + more)
    if small is not None:
        assert large is not None
        assert all(a <= b for a, b in zip(small, large, strict=True))
