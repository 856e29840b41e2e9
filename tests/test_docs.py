"""Every command and every line of Python in docs/, run in order, page by page, on the demo model.

A comment right before a block says what is special about it:
<!-- server --> it starts a server, which the later blocks ask; <!-- not run: why --> what it needs isn't here (its
lfm2serve commands are parsed, though); <!-- output --> what the block before it prints, where "..." is anything.
"""

from __future__ import annotations

import contextlib
import gc
import io
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

ROOT = Path(__file__).parent.parent
PAGES = sorted((ROOT / "docs").glob("*.md"))
PORT = "8000"  # in the pages
COMPILING_S = 600  # a first run compiles kernels

# Blocks that are only read. One more wants a reason here, one less is to be welcomed.
NOT_RUN = {"architecture.md": 1, "benchmarks.md": 4, "growing.md": 5, "install.md": 2, "reproducibility.md": 1}

BLOCK = re.compile(r"(?:^<!-- (?P<mark>[^\n]+) -->\n)?^```(?P<kind>\w+)\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """mark: what the comment before it says. line: where it begins in its page."""

    kind: str
    mark: str
    code: str
    line: int


def blocks(page: Path) -> list[Block]:
    text = page.read_text()
    found = [
        Block(match["kind"], match["mark"] or "", match["code"], text[: match.start("code")].count("\n") + 1)
        for match in BLOCK.finditer(text)
    ]
    assert text.count("\n```") == 2 * len(found), "a block without a kind, or one that isn't closed"
    return found


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the commands run: `lfm2serve`, `python` and `examples/` are there, whatever is installed."""
    home = tmp_path_factory.mktemp("docs")
    (home / "examples").symlink_to(ROOT / "examples")
    (home / "bin").mkdir()
    stand_in = f'exec {shlex.quote(sys.executable)} {shlex.quote(str(Path(__file__).with_name("small_curl.py")))} "$@"'
    python = f'exec {shlex.quote(sys.executable)} "$@"'
    programs = {"python": python, "lfm2serve": python.replace('"$@"', '-m lfm2serve "$@"')}
    if shutil.which("curl") is None:
        programs["curl"] = stand_in
    for name, command in programs.items():
        program = home / "bin" / name
        program.write_text(f"#!/bin/sh\n{command}\n")
        program.chmod(0o755)
    return home


@pytest.fixture(scope="module")
def environment(home: Path) -> dict[str, str]:
    path = os.pathsep.join([str(home / "bin"), os.environ["PATH"]])
    found = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "PATH": path, "PYTHONPATH": found, "COLUMNS": "120", "CUDA_VISIBLE_DEVICES": ""}


class Servers:
    """The servers that pages have started; pages with the same command share one."""

    def __init__(self, home: Path, environment: dict[str, str]) -> None:
        self._home = home
        self._environment = environment
        self._running: dict[str, tuple[subprocess.Popen[bytes], str]] = {}

    def start(self, command: str) -> str:
        """The port of a server that was started with this command."""
        if command not in self._running:
            with socket.create_server(("127.0.0.1", 0)) as probe:
                port = str(probe.getsockname()[1])
            log = self._home / f"server-{port}.log"
            with log.open("wb") as sink:
                process = subprocess.Popen(
                    ["bash", "-c", f"exec {command.strip()} --port {port}"],
                    cwd=self._home,
                    env=self._environment,
                    stderr=sink,
                )
            self._running[command] = process, port
            end = time.monotonic() + COMPILING_S
            while " on http" not in log.read_text():
                assert process.poll() is None and time.monotonic() < end, log.read_text()
                time.sleep(0.05)
        return self._running[command][1]

    def stop(self) -> None:
        for process, _ in self._running.values():
            process.terminate()
        for process, _ in self._running.values():
            process.wait(60)


@pytest.fixture(scope="module")
def servers(home: Path, environment: dict[str, str]) -> Iterator[Servers]:
    servers = Servers(home, environment)
    yield servers
    servers.stop()


def shell(code: str, home: Path, environment: dict[str, str]) -> str:
    command = ["bash", "-euo", "pipefail", "-c", code]
    done = subprocess.run(command, cwd=home, env=environment, capture_output=True, text=True, timeout=COMPILING_S)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def python(code: str, place: str, names: dict[str, Any]) -> str:
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown):
        exec(compile(code, place, "exec"), names)
    return shown.getvalue()


def pattern(expected: str) -> str:
    """A regular expression of a block of output."""
    parts = [r"\s+".join(re.escape(word) for word in part.split()) for part in expected.split("...")]
    return r"\s*" + ".*?".join(parts) + r"\s*"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_page(
    page: Path, home: Path, environment: dict[str, str], servers: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # what the pages print is of a CPU
    port, shown, names = PORT, "", dict[str, Any](__name__="__main__")
    for block in blocks(page):
        code, place = block.code.replace(f":{PORT}", f":{port}"), f"docs/{page.name}, line {block.line}"
        if block.mark == "output":
            assert re.fullmatch(pattern(block.code), shown, re.DOTALL), f"{place}: it prints\n{shown}"
        elif block.mark == "server":
            port = servers.start(block.code)
        elif not block.mark and block.kind == "bash":
            shown = shell(code, home, environment)
        elif not block.mark and block.kind == "python":
            shown = python(code, place, names)
    names.clear()
    gc.collect()  # clients that a page leaves open close here


def test_marks_and_blocks_that_are_not_run() -> None:
    left_out: Counter[str] = Counter()
    for page in PAGES:
        for block in blocks(page):
            assert block.mark in ("", "server", "output") or block.mark.startswith("not run: "), block
            assert block.kind in ("bash", "python", "text", "json", "yaml", "promql"), block
            left_out[page.name] += block.mark.startswith("not run")
    assert {name: count for name, count in left_out.items() if count} == {n: c for n, c in NOT_RUN.items() if c}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_commands_that_are_not_run_would_be_understood(page: Path) -> None:
    from lfm2serve.bench.cli import app as bench
    from lfm2serve.cli import app

    for block in blocks(page):
        if not block.mark.startswith("not run") or block.kind != "bash":
            continue
        for line in block.code.replace("\\\n", " ").splitlines():
            program, *arguments = shlex.split(line, comments=True) or [""]
            if program == "lfm2serve":
                group = get_command(app)
                if arguments[0] == "bench":
                    group, arguments = get_command(bench), arguments[1:]
                command = group.commands[arguments[0]]  # type: ignore[attr-defined]
                command.make_context(arguments[0], arguments[1:])


def test_links_lead_somewhere() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text()):
            assert "://" in target or (page.parent / target).exists(), f"docs/{page.name}: {target}"


def test_every_page_is_in_the_index() -> None:
    index = (ROOT / "docs" / "README.md").read_text()
    assert [page.name for page in PAGES if page.name != "README.md" and f"({page.name})" not in index] == []
