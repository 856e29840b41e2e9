"""Kernels compile without a GPU and take what the contract says; `python -m kernels_numba.contract` checks all."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from kernels_numba import contract
from kernels_numba.contract import Row, compare
from kernels_numba.cuda.compiler import ARCHITECTURES, CompileError, kernel

ROW = Row("scale", "sm_80", 256, 40, 0, 0, 1024, "release 1")


def test_every_kernel_is_recorded_for_every_architecture_it_is_written_for() -> None:
    recorded = {(row.kernel, row.architecture) for row in contract.read()}
    assert recorded == {(k.name, a) for k in contract.all_kernels().values() for a in k.architectures}
    assert {architecture for _, architecture in recorded} == set(ARCHITECTURES)


def test_nothing_recorded_spills() -> None:
    assert [row for row in contract.read() if row.spills] == []


def test_products_compile_as_recorded() -> None:
    """One kernel of each kind; the whole contract is a command of its own."""
    found = [
        row
        for name in ("ring_product_8", "wgmma_product_64", "mma_product_16x64", "pack_weights")
        for row in contract.compile_kernel(name, contract.all_kernels()[name].architectures)
    ]
    faults, _ = compare(found, contract.read(), complete=False)
    assert faults == []


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"registers": 41}, "registers 40 recorded, 41 now"),
        ({"shared": 2048}, "shared 1024 recorded, 2048 now"),
        ({"spills": 8}, "8 bytes of spills"),
        ({"kernel": "other"}, "other on sm_80: not recorded"),
    ],
)
def test_a_change_is_a_fault(change: dict[str, int | str], fault: str) -> None:
    faults, notes = compare([replace(ROW, **change)], [ROW])  # type: ignore[arg-type]
    assert any(fault in line for line in faults)
    assert notes == []


def test_another_compiler_may_count_registers_differently_but_not_spill() -> None:
    faults, notes = compare([replace(ROW, registers=44, compiler="release 2")], [ROW])
    assert faults == []
    assert notes == ["scale on sm_80: registers 40 recorded, 44 now (release 2)"]
    faults, _ = compare([replace(ROW, spills=16, compiler="release 2")], [ROW])
    assert faults[0] == "scale on sm_80: 16 bytes of spills"


def test_a_kernel_that_is_gone_is_a_fault() -> None:
    assert compare([], [ROW])[0] == ["scale on sm_80: recorded, but there is no such kernel"]


def test_rows_survive_the_file(tmp_path: Path) -> None:
    path = tmp_path / "contract.tsv"
    contract.write([ROW], path)
    assert contract.read(path) == [ROW]


def test_dependent_launch_is_left_out_where_there_is_none() -> None:
    made = contract.all_kernels()["mma_product_16x64"]
    assert "griddepcontrol.wait;" in made.ptx("sm_90a")
    assert "griddepcontrol" not in made.ptx("sm_89")


def test_an_assembler_error_names_the_kernel() -> None:
    from kernels_numba.cuda.scalar import instruction

    nonsense = instruction("no.such.instruction;", "", memory=True)

    def broken(x):  # type: ignore[no-untyped-def]
        nonsense()

    made = kernel("u64", threads=32, name="broken_for_a_test")(broken)
    try:
        with pytest.raises(CompileError, match="broken_for_a_test for sm_80"):
            made.compile("sm_80")
    finally:
        contract.KERNELS.pop("broken_for_a_test")
