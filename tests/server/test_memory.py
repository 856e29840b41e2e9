"""What the world sees of the memory: a device that is full over HTTP, and the plan in a notebook."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from lfm2serve import LLM
from lfm2serve.errors import ArenaMemory
from lfm2serve.sampling import SamplingParams

from .conftest import Live
from .fake import Step


def test_a_device_without_memory_is_503(fake: Live) -> None:
    def script(prompt: list[int], params: SamplingParams, choice: int) -> Iterator[Step]:
        yield ArenaMemory("the device has no memory for the next 100 bytes, 7 are free", asked=100, free=7)

    fake.engine.script = script
    for path, fields in (
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}]}),
        ("/v1/completions", {"prompt": "Hi"}),
    ):
        answer = fake.post(path, model="m", **fields)
        error = answer.json()["error"]
        assert answer.status_code == 503 and error["code"] == "out_of_memory"
        assert error["type"] == "service_unavailable" and "100 bytes, 7 are free" in error["message"]


def test_a_loaded_models_memory_is_a_table(tiny_dense: Path) -> None:
    with LLM(tiny_dense, progress=False, max_streams=2, context=1024) as llm:
        table = llm.memory
        assert "page pool" in str(table) and table._repr_html_().startswith("<table>")
        assert table.to_dict()["mapped"] is None, "the system gives a CPU's pages their memory"
