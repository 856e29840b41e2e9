"""Finding a model: directories, the packaged demo, and the hub (behind a fake of its one call, or a real cache)."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import errors, utils

from lfm2serve import hub
from lfm2serve.checkpoint import Checkpoint, resolve
from lfm2serve.errors import CheckpointError

REPO = "LiquidAI/LFM2-350M"
Fake = Callable[..., str]


def refused(model: str | Path, message: str, **how: Any) -> None:
    with pytest.raises(CheckpointError, match=message) as caught:
        resolve(model, **how)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300


def install(monkeypatch: pytest.MonkeyPatch, fake: Fake) -> None:
    monkeypatch.setattr(huggingface_hub, "snapshot_download", fake)


@pytest.fixture
def no_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_args: Any, **_kwargs: Any) -> str:
        raise AssertionError("the hub was asked")

    install(monkeypatch, fail)


@pytest.mark.usefixtures("no_hub")
def test_a_directory(tiny_dense: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve(tiny_dense) == tiny_dense
    assert resolve(str(tiny_dense)) == tiny_dense
    (tmp_path / "org" / "name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert resolve("org/name") == Path("org/name")  # a directory comes before the hub
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve("~/org") == tmp_path / "org"


@pytest.mark.usefixtures("no_hub")
@pytest.mark.parametrize("model", ["./nowhere", "../nowhere", "/nowhere/at/all", "nowhere", "a/b/c", "~/nowhere", "a/"])
def test_a_path_that_is_not_there(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    refused(model, "^no such model: .*neither a directory nor a hub id")


@pytest.mark.usefixtures("no_hub")
def test_a_file_is_no_checkpoint(tiny_dense: Path) -> None:
    refused(tiny_dense / "config.json", r"config\.json: is a file; name the directory")


@pytest.mark.usefixtures("no_hub")
def test_an_installation_without_the_demo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub.importlib.resources, "files", lambda package: tmp_path)
    refused("demo", "^demo: this installation came without the demo model")
    (tmp_path / "demo").mkdir()
    (tmp_path / "demo" / "config.json").write_text("{}")
    assert resolve("demo") == tmp_path / "demo"


@pytest.mark.parametrize("offline", [False, True])
def test_only_the_files_that_are_needed_are_asked_for(
    offline: bool, tiny_dense: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def fake(*args: Any, **kwargs: Any) -> str:
        calls.append((args, kwargs))
        return str(tiny_dense)

    install(monkeypatch, fake)
    assert Checkpoint(resolve(REPO, offline=offline)).config.model_type == "lfm2"
    ((args, kwargs),) = calls
    assert args == (REPO,)
    assert kwargs["local_files_only"] is offline
    files = [
        "config.json",
        "generation_config.json",
        "chat_template.jinja",
        "model-00001-of-00002.safetensors",
        "model.safetensors.index.json",
        "tokenizer.json",
        "README.md",
        "pytorch_model.bin",
        "model.gguf",
        "onnx/config.json",
        "original/model.safetensors",
    ]
    kept = utils.filter_repo_objects(
        files, allow_patterns=kwargs["allow_patterns"], ignore_patterns=kwargs["ignore_patterns"]
    )
    assert list(kept) == files[:6]


@pytest.mark.parametrize("progress", [True, False])
def test_the_hub_s_progress_bars_are_left_as_they_were(
    progress: bool, tiny_dense: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[bool] = []

    def fake(*_args: Any, **_kwargs: Any) -> str:
        seen.append(utils.are_progress_bars_disabled())
        return str(tiny_dense)

    install(monkeypatch, fake)
    before = utils.are_progress_bars_disabled()
    resolve(REPO, progress=progress)
    assert seen == [before or not progress]
    assert utils.are_progress_bars_disabled() is before


@pytest.mark.parametrize(
    ("error", "how", "message"),
    [
        (errors.RepositoryNotFoundError, {}, rf"^no such model: the hub has no {REPO}, or it is private"),
        (errors.GatedRepoError, {}, rf"^{REPO}: the hub wants its licence accepted .*login"),
        (
            errors.LocalEntryNotFoundError,
            {},
            rf"^{REPO}: not \(wholly\) in the local cache, and the hub can't be reached",
        ),
        (errors.LocalEntryNotFoundError, {"offline": True}, rf"^{REPO}: not \(wholly\) in the local cache \(offline\)"),
        (OSError, {}, rf"^{REPO}: download failed \(first line\)"),
        (RuntimeError, {}, rf"^{REPO}: download failed \(first line\)"),
    ],
)
def test_hub_failures_are_one_line(
    error: type[Exception], how: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fake(*_args: Any, **_kwargs: Any) -> str:
        failure = error.__new__(error, "first line\nsecond line")
        failure.args = ("first line\nsecond line",)
        raise failure

    install(monkeypatch, fake)
    refused(REPO, message, **how)


def test_without_the_hub_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    refused(REPO, rf"^{REPO}: .*pip install lfm2serve\[hub\]")


def test_offline_from_a_real_cache(tiny_dense: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commit = "0123456789abcdef0123456789abcdef01234567"
    repo = tmp_path / f"models--{REPO.replace('/', '--')}"
    snapshot = repo / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(commit)
    (repo / "blobs").mkdir()
    for i, file in enumerate(sorted(tiny_dense.iterdir())):
        (repo / "blobs" / str(i)).write_bytes(file.read_bytes())
        (snapshot / file.name).symlink_to(f"../../blobs/{i}")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    found = resolve(REPO, offline=True)
    assert found.samefile(snapshot)
    assert Checkpoint(found).config.parameters == Checkpoint(tiny_dense).config.parameters
    refused("LiquidAI/LFM2-700M", r"^LiquidAI/LFM2-700M: not \(wholly\) in the local cache \(offline\)", offline=True)
