"""Runs simulated/ in processes where Numba compiles nothing and interprets every thread: two, each takes one core."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

FIRST = "attention_inputs or embed or norm or conv"


def test_kernels_in_the_simulator() -> None:
    folder = Path(__file__).parent / "simulated"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-o", "python_files=check_*.py"]
    processes = [
        subprocess.Popen(
            [*command, "-k", which, str(folder)],
            env={**os.environ, "NUMBA_ENABLE_CUDASIM": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for which in (FIRST, f"not ({FIRST})")
    ]
    said = [process.communicate(timeout=600)[0] for process in processes]
    for process, text in zip(processes, said, strict=True):
        assert process.returncode == 0, text[-4000:]
