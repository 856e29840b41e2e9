"""Compiled kernels on disk: a second process loads them, and any change of the package's sources makes them stale."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import kernels_numba

PROGRAM = """
import sys
import numpy as np
from kernels_numba.cpu import CpuBackend, linear, norm
backend = CpuBackend("bfloat16")
x = backend.embed(np.array([1, 2], np.int32), np.full((4, 64), 0x3F80, np.uint16))
x = backend.linear(x, np.full((64, 64), 0x3F80, np.uint16))
assert (x == 64).all()
stats = [f.stats for f in (norm.embed, linear.linear)]
print(sum(sum(s.cache_hits.values()) for s in stats), sum(sum(s.cache_misses.values()) for s in stats))
"""


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A copy of the package without compiled files."""
    copy = tmp_path / "site" / "kernels_numba"
    shutil.copytree(Path(kernels_numba.__file__).parent, copy, ignore=shutil.ignore_patterns("__pycache__"))
    return copy


def run(package: Path, **environment: str) -> tuple[int, int, str]:
    """Overloads loaded, overloads compiled, and what was logged, of a new process."""
    base = {name: value for name, value in os.environ.items() if name != "NUMBA_CACHE_DIR"}
    process = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={**base, "PYTHONPATH": str(package.parent), **environment},
        cwd=package.parent,
        capture_output=True,
        text=True,
        check=True,
    )
    hits, misses = process.stdout.split()
    return int(hits), int(misses), process.stderr


def test_a_second_process_loads_and_an_edit_anywhere_recompiles(package: Path, tmp_path: Path) -> None:
    directory = str(tmp_path / "cache")
    assert run(package, NUMBA_CACHE_DIR=directory) == (0, 2, "")
    assert list(Path(directory).rglob("*.nbc")) and not list(package.rglob("*.nbc"))
    assert run(package, NUMBA_CACHE_DIR=directory) == (2, 0, "")
    simd = package / "cpu" / "simd.py"
    simd.write_text(simd.read_text() + "\n# a change in a file that defines no kernel\n")
    assert run(package, NUMBA_CACHE_DIR=directory) == (0, 2, "")


def test_without_a_directory_for_the_cache_kernels_still_run(package: Path, tmp_path: Path) -> None:
    blocker = tmp_path / "file"
    blocker.write_text("")
    (package / "__pycache__").write_text("")
    (package / "cpu" / "__pycache__").write_text("")
    environment = {"HOME": str(blocker), "XDG_CACHE_HOME": str(blocker), "PYTHONDONTWRITEBYTECODE": "1"}
    hits, misses, log = run(package, **environment)
    assert (hits, misses) == (0, 2)
    assert "not kept" in log
