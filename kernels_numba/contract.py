"""The kernel contract: what every CUDA kernel takes on every architecture, held against what was recorded.

    python -m kernels_numba.contract             compile everything (no GPU needed) and compare
    python -m kernels_numba.contract --record    write what was found into contract.tsv

Registers, stack, spills and shared memory are those that NVIDIA's assembler reports. Spills are refused, also when
recording. Other compiler releases than the recorded ones may count registers differently: then only spills, stack and a
kernel that is missing are faults, and the rest is told.
"""

from __future__ import annotations

import argparse
import csv
import importlib
import multiprocessing
import os
import pkgutil
import sys
import time
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import astuple, dataclass
from pathlib import Path

from . import cuda
from .cuda.compiler import ARCHITECTURES, KERNELS, Kernel, compiler_release

CONTRACT = Path(__file__).with_name("contract.tsv")
COLUMNS = ("kernel", "architecture", "threads", "registers", "stack", "spills", "shared", "compiler")


@dataclass(frozen=True)
class Row:
    """One kernel on one architecture; bytes, and registers a thread."""

    kernel: str
    architecture: str
    threads: int
    registers: int
    stack: int
    spills: int
    shared: int
    compiler: str


def all_kernels() -> dict[str, Kernel]:
    """Every registered kernel, after importing every module of the CUDA backend."""
    for module in pkgutil.iter_modules(cuda.__path__, f"{cuda.__name__}."):
        importlib.import_module(module.name)
    return dict(sorted(KERNELS.items()))


def compile_kernel(name: str, architectures: tuple[str, ...]) -> list[Row]:
    """Compile one kernel for some architectures."""
    made = all_kernels()[name]
    rows = []
    for architecture in architectures:
        _, usage = made.compile(architecture)
        release = compiler_release()
        rows.append(Row(name, architecture, made.threads, *astuple(usage), release))
    return rows


def compile_all(architectures: Iterable[str] = ARCHITECTURES, workers: int | None = None) -> list[Row]:
    """Compile every kernel for those of `architectures` that it is written for, on all processors."""
    wanted = set(architectures)
    jobs = [(k.name, tuple(a for a in k.architectures if a in wanted)) for k in all_kernels().values()]
    jobs = [job for job in jobs if job[1]]
    workers = workers or os.cpu_count() or 1
    if workers == 1:
        return [row for job in jobs for row in compile_kernel(*job)]
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        return [row for rows in pool.map(compile_kernel, *zip(*jobs, strict=True)) for row in rows]


def read(path: Path = CONTRACT) -> list[Row]:
    """The recorded rows."""
    with path.open(newline="") as file:
        lines = csv.DictReader(file, delimiter="\t")
        return [
            Row(line["kernel"], line["architecture"], *(int(line[c]) for c in COLUMNS[2:7]), line["compiler"])
            for line in lines
        ]


def write(rows: list[Row], path: Path = CONTRACT) -> None:
    with path.open("w", newline="") as file:
        out = csv.writer(file, delimiter="\t", lineterminator="\n")
        out.writerow(COLUMNS)
        out.writerows(astuple(row) for row in rows)


def compare(found: list[Row], recorded: list[Row], *, complete: bool = True) -> tuple[list[str], list[str]]:
    """Faults, and differences that another compiler release explains.

    complete: `found` should hold every recorded row.
    """
    faults, notes = [], []
    known = {(row.kernel, row.architecture): row for row in recorded}
    for row in found:
        where = f"{row.kernel} on {row.architecture}"
        if row.spills:
            faults.append(f"{where}: {row.spills} bytes of spills")
        old = known.get((row.kernel, row.architecture))
        if old is None:
            faults.append(f"{where}: not recorded")
            continue
        for name in COLUMNS[2:7]:
            was, now = getattr(old, name), getattr(row, name)
            if was != now:
                same = row.compiler == old.compiler or name in ("threads", "stack")
                (faults if same else notes).append(f"{where}: {name} {was} recorded, {now} now ({row.compiler})")
    if complete:
        gone = set(known) - {(row.kernel, row.architecture) for row in found}
        faults += [
            f"{kernel} on {architecture}: recorded, but there is no such kernel"
            for kernel, architecture in sorted(gone)
        ]
    return faults, notes


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", action="store_true", help="write contract.tsv")
    given = parser.parse_args()
    begin = time.monotonic()
    found = compile_all()
    print(f"{len(found)} kernels and architectures compiled in {time.monotonic() - begin:.0f} s ({compiler_release()})")
    if given.record:
        spilled = [f"{row.kernel} on {row.architecture}: {row.spills} bytes of spills" for row in found if row.spills]
        if not spilled:
            write(found)
        faults, notes = spilled, []
    else:
        faults, notes = compare(found, read())
    for line in notes:
        print(f"note: {line}")
    for line in faults:
        print(f"fault: {line}", file=sys.stderr)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
