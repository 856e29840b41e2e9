"""Kernels that the disk cache lacks are compiled at start, in processes of their own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

import kernels_numba.cuda  # noqa: F401  (registers the kernels)
from kernels_numba.cuda import compiler


@pytest.fixture(autouse=True)
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    compiler._cache_directory.cache_clear()
    yield
    compiler._cache_directory.cache_clear()


def test_missing_kernels_are_compiled_into_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = [compiler.KERNELS[name] for name in ("take_rows", "mark_tokens")]
    compiler.prepare(kernels, "sm_90a")
    assert all(kernel.cached("sm_90a").read_bytes().startswith(b"\x7fELF") for kernel in kernels)

    def again(*args: object, **how: object) -> None:
        raise AssertionError("nothing is missing")

    monkeypatch.setattr(compiler.subprocess, "Popen", again)
    compiler.prepare(kernels, "sm_90a")


def test_a_kernel_that_does_not_compile_is_named() -> None:
    unknown = replace(compiler.KERNELS["take_rows"], name="no_such_kernel")
    with pytest.raises(compiler.CompileError, match="kernels no_such_kernel for sm_80: KeyError"):
        compiler.prepare([unknown], "sm_80")
