"""Many streams: a round's calls are made as one, and every reply is the one that it would have been alone."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from tests.law import harness
from tests.law.harness import Request, Way, ask, check, engine_for, prompt

STREAMS = 20


@pytest.mark.parametrize("threads", [1, 2])
def test_many_streams_are_each_as_alone(tiny_moe: Path, monkeypatch: pytest.MonkeyPatch, threads: int) -> None:
    blocks = 0
    plain = harness.RecordingBackend.together

    def counted(backend: harness.RecordingBackend) -> AbstractContextManager[None]:
        nonlocal blocks
        blocks += 1
        return plain(backend)

    requests = [
        Request(prompt(5 + 7 * n, n), seed=n, max_tokens=24, temperature=0.8 * (n % 2), penalties=n % 3 == 0)
        for n in range(STREAMS)
    ]
    with engine_for(tiny_moe, Way(slots=STREAMS, threads=threads)) as (engine, backend):
        monkeypatch.setattr(harness.RecordingBackend, "together", counted)
        results = ask(engine, *requests)
        assert blocks >= 8, "nothing was done together"
        for request, result in zip(requests, results, strict=True):
            check(tiny_moe, backend, request, result)
