"""The examples and the README's Python, run as a user would, on the demo model."""

from __future__ import annotations

import os
import queue
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
import pytest
from jupyter_client.blocking.client import BlockingKernelClient
from jupyter_client.manager import start_new_kernel
from nbclient import NotebookClient

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes and kernels started here find the package also where it isn't installed."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("PYDEVD_DISABLE_FILE_VALIDATION", "1")


def example(name: str, *arguments: str) -> str:
    command = [sys.executable, str(EXAMPLES / name), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def test_single_prompt() -> None:
    assert "Lima" in example("single_prompt.py")
    assert "Tokyo" in example("single_prompt.py", "What is the capital of Japan?")


def test_chat() -> None:
    said = example("chat.py").splitlines()
    assert "Tokyo" in said[3] and "Ada" in said[5]


def test_openai_client() -> None:
    command = [sys.executable, "-m", "lfm2serve", "serve", "demo", "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        try:
            assert server.stderr is not None
            url = next(line.split()[-1] for line in server.stderr if " on http://" in line)
            shown = example("openai_client.py", url)
        finally:
            server.terminate()
    assert "Lima" in shown and re.search(r"\d+ tokens in, \d+ out", shown)


def test_the_readmes_python_runs(capfd: pytest.CaptureFixture[str]) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    library, structured = (block for block in blocks if "LLM(" in block)
    exec(compile(library, "README.md", "exec"), {})
    out = capfd.readouterr().out
    assert "Lima" in out and "Tokyo" in out
    exec(compile(structured, "README.md", "exec"), {})
    assert capfd.readouterr().out == "Lima\n"


def test_notebook() -> None:
    notebook = nbformat.read(EXAMPLES / "notebook.ipynb", as_version=4)
    NotebookClient(notebook, timeout=300, kernel_name="python3").execute()
    shown = "".join(
        output.get("text") or output["data"]["text/plain"]
        for cell in notebook.cells
        if cell.cell_type == "code"
        for output in cell.outputs
    )
    for expected in ("Lima", "Tokyo", "Ada", "same tokens: True", "same log-probabilities: True", "LLM(closed)"):
        assert expected in shown
    assert "Census(total=576" in shown and "LLM('demo', lfm2_moe" in shown


@pytest.fixture
def kernel() -> Iterator[tuple[BlockingKernelClient, object]]:
    manager, client = start_new_kernel(kernel_name="python3")
    try:
        yield client, manager
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


def test_the_stop_button_of_a_notebook(kernel: tuple[BlockingKernelClient, object]) -> None:
    client, manager = kernel

    def run(code: str) -> dict[str, object]:
        return client.execute_interactive(code, timeout=300, output_hook=shown.append)["content"]

    def printed() -> str:
        return "".join(message["content"].get("text", "") for message in shown)

    shown: list[dict[str, Any]] = []
    assert run("from lfm2serve import LLM, SamplingParams\nllm = LLM('demo')\nllm.generate('a')")["status"] == "ok"
    endless = "SamplingParams(max_tokens=4000, ignore_eos=True)"
    code = f"print('started', flush=True); llm.generate(['Once'] * 20, {endless})"
    client.execute(code, stop_on_error=False)  # an error would abort what is asked right behind it
    while "started" not in printed():
        try:
            shown.append(client.get_iopub_msg(timeout=1))
        except queue.Empty:
            time.sleep(0.01)
    manager.interrupt_kernel()  # type: ignore[attr-defined]
    reply = client.get_shell_msg(timeout=60)["content"]
    assert (reply["status"], reply["ename"]) == ("error", "KeyboardInterrupt")
    shown.clear()
    code = "[o] = llm.generate('b', SamplingParams(max_tokens=3, ignore_eos=True))\n"
    code += "print(llm.census().clean, len(o.outputs[0].token_ids))"
    assert run(code)["status"] == "ok"
    assert printed() == "True 3\n"
