"""`lfm2serve bench chat`: what it finds on a small model, and that it says so where something is wrong."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from shutil import copytree, ignore_patterns
from typing import Any

import pytest
from typer.testing import CliRunner

from lfm2serve.bench import chat
from lfm2serve.bench.cli import app
from lfm2serve.options import EngineOptions

QUICK = ["--threads", "1", "--length", "220", "--tokens", "5", "--repeats", "1"]


def test_a_chat_model_keeps_every_promise(tiny_moe: Path) -> None:
    result = CliRunner().invoke(app, ["chat", str(tiny_moe), *QUICK, "--json"])
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["failures"] == [] and report["device"] == "cpu"
    figures = {figure["measure"]: figure for figure in report["figures"]}
    equal = [figure for measure, figure in figures.items() if measure.startswith("replies equal")]
    assert len(equal) == 5 and all(figure["value"] == 32 for figure in equal)
    assert all(figure["beside"].startswith("24 of 32 resumed") for figure in equal[:4])
    passes = figures["prompt passes with two marks in the last chunk"]
    assert passes["value"] == 1 and passes["beside"] == "1 with none"
    assert all(figure["value"] != 0 for figure in figures.values() if figure["unit"] in ("ms", "us", "x"))


def test_a_base_model_goes_on_with_its_text(tiny_dense: Path, tmp_path: Path) -> None:
    base = copytree(tiny_dense, tmp_path / "base", ignore=ignore_patterns("chat_template.jinja"))
    config = json.loads((base / "tokenizer_config.json").read_text())
    config.pop("chat_template", None)
    (base / "tokenizer_config.json").write_text(json.dumps(config))
    report = chat.measure(str(base), EngineOptions(threads=1), length=220, tokens=5, repeats=1)
    assert report.failures == []
    assert report.figures[0].beside.startswith("24 of 32 resumed, 24 exactly at the rows that ran")


def test_a_reply_that_differs_is_a_failure(tiny_dense: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    talk = chat.talk

    def broken(*args: Any, **how: Any) -> list[list[chat.Turn]]:
        chats = talk(*args, **how)
        if how["draft"]:
            chats[3][2] = replace(chats[3][2], digest="another")
            chats[5][1] = replace(chats[5][1], cached=0)
        return chats

    monkeypatch.setattr(chat, "talk", broken)
    result = CliRunner().invoke(app, ["chat", str(tiny_dense), *QUICK, "--json"])
    assert result.exit_code == 1
    failures = json.loads(result.stdout)["failures"]
    assert "kept states and drafts: 1 of 32 replies differ" in failures
    assert "kept states and drafts: 1 later turns resumed too little" in failures
    assert not any(failure.startswith("kept states: ") for failure in failures)
