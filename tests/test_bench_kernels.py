"""`lfm2serve bench kernels`: what it finds on small widths, and that it says so where a kernel is wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from kernels_numba.cpu import CpuBackend
from lfm2serve import dummy
from lfm2serve.bench.cli import app

QUICK = ["kernels", "--model", "tiny", "--device", "cpu", "--threads", "1", "--repeats", "1", "--timed", "2"]


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch, tiny_moe: Path) -> None:
    monkeypatch.setitem(dummy.SHAPES, "tiny", json.loads((tiny_moe / "config.json").read_text()))


def run(*more: str) -> tuple[int, dict[str, Any]]:
    result = CliRunner().invoke(app, [*QUICK, *more, "--json"])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, json.loads(result.stdout)


def test_every_operation_is_right_and_keeps_the_law() -> None:
    code, report = run("--rows", "1,15,17,33,129,513")
    assert code == 0 and report["failures"] == []
    figures = {figure["measure"]: figure for figure in report["figures"]}
    checks = {measure: figure for measure, figure in figures.items() if ": sizes " in measure}
    assert len(checks) == 2 * 17
    for measure, figure in checks.items():
        few = any(what in measure for what in ("decode rows", "logits", "and its convolution"))
        assert (figure["value"], figure["unit"]) == (4 if few else 6, f"of {4 if few else 6}"), measure
    assert figures["draws that NumPy may make"]["value"] == 24
    times = [figure for figure in report["figures"] if figure["unit"] == "us"]
    assert len(times) == 17 and all(t["value"] > 0 and t["beside"].endswith("of the roofline") for t in times)


def test_the_same_seed_asks_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bytes] = []
    embed = CpuBackend.embed

    def noted(self: CpuBackend, tokens: Any, weight: Any) -> Any:
        asked.append(embed(self, tokens, weight).tobytes())
        return embed(self, tokens, weight)

    monkeypatch.setattr(CpuBackend, "embed", noted)
    first = run("--rows", "3", "--seed", "5")[1]["figures"][0]
    kept, asked[:] = list(asked), []
    run("--rows", "3", "--seed", "5")
    assert first["value"] == 5 and asked[:5] == kept[:5]
    asked[:] = []
    run("--rows", "3", "--seed", "6")
    assert asked[:5] != kept[:5]


def test_a_wrong_kernel_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    rms_norm = CpuBackend.rms_norm

    def off(self: CpuBackend, x: Any, weight: Any, eps: float) -> Any:
        out = rms_norm(self, x, weight, eps)
        out[-1, 3] *= np.float32(1.05)  # of the last row, whichever that is
        return out

    monkeypatch.setattr(CpuBackend, "rms_norm", off)
    code, report = run("--rows", "4,20")
    assert code == 1
    wrong = [failure for failure in report["failures"] if failure.startswith("RMSNorm")]
    assert len(wrong) == 2 and "differ from NumPy" in wrong[0] and "other bits in 1 sizes" in wrong[1]


def test_rows_that_nobody_writes_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    short_conv = CpuBackend.short_conv

    def lazy(self: CpuBackend, bcx: Any, weight: Any, ring: Any, layer: int, batch: Any) -> Any:
        out = short_conv(self, bcx, weight, ring, layer, batch)
        out[len(out) // 2] = np.nan
        return out

    monkeypatch.setattr(CpuBackend, "short_conv", lazy)
    code, report = run("--rows", "4")
    assert code == 1 and any(f.startswith("convolution, one stream: 1 sizes differ") for f in report["failures"])


def test_wrong_tokens_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    sample = CpuBackend.sample

    def shifted(self: CpuBackend, logits: Any, rows: Any, *more: Any) -> Any:
        drawn = sample(self, logits, rows, *more)
        return drawn._replace(token=np.asarray((drawn.token + 1) % logits.shape[1], np.int32))

    monkeypatch.setattr(CpuBackend, "sample", shifted)
    code, report = run("--rows", "4")
    assert code == 1 and any("aren't those that NumPy draws" in failure for failure in report["failures"])
