"""Find the directory of a checkpoint: the packaged demo, a local directory, or a model of the Hugging Face hub."""

from __future__ import annotations

import importlib
import importlib.resources
import re
from pathlib import Path

from lfm2serve.errors import CheckpointError

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
WANTED = ["*.json", "*.jinja", "*.safetensors"]
UNWANTED = ["*/*"]  # other formats live in folders of their own


def resolve(model: str | Path, offline: bool = False, progress: bool = True) -> Path:
    """The directory of `model`: "demo" (comes with the package), a directory, or a hub id such as LiquidAI/LFM2-350M.

    A hub model is downloaded into the hub's own cache, where an interrupted download goes on.
    offline: take what the cache holds and never ask the hub. progress: the hub's progress bars on standard error.
    CheckpointError: no such model, or it can't be downloaded.
    """
    name = str(model)
    if name == "demo":
        return _demo()
    path = Path(model).expanduser()
    if path.is_dir():
        return path
    if path.exists():
        raise CheckpointError(f"{name}: is a file; name the directory that holds config.json")
    if not HUB_ID.fullmatch(name):
        raise CheckpointError(f"no such model: {name} is neither a directory nor a hub id (organisation/name)")
    return _download(name, offline, progress)


def _demo() -> Path:
    path = Path(str(importlib.resources.files("lfm2serve"))) / "demo"
    if not (path / "config.json").is_file():
        raise CheckpointError("demo: this installation came without the demo model")
    return path


def _download(repo: str, offline: bool, progress: bool) -> Path:
    try:
        hub = importlib.import_module("huggingface_hub")
        errors = importlib.import_module("huggingface_hub.errors")
        utils = importlib.import_module("huggingface_hub.utils")
    except ImportError as error:
        raise CheckpointError(f"{repo}: models of the hub need huggingface-hub: pip install lfm2serve[hub]") from error
    hide = not progress and not utils.are_progress_bars_disabled()
    if hide:
        utils.disable_progress_bars()
    try:
        return Path(
            hub.snapshot_download(repo, local_files_only=offline, allow_patterns=WANTED, ignore_patterns=UNWANTED)
        )
    except errors.GatedRepoError as error:
        problem = "the hub wants its licence accepted on the model's page, and a login (hf auth login)"
        raise CheckpointError(f"{repo}: {problem}") from error
    except errors.RepositoryNotFoundError as error:
        raise CheckpointError(f"no such model: the hub has no {repo}, or it is private") from error
    except errors.LocalEntryNotFoundError as error:
        problem = "not (wholly) in the local cache" + (" (offline)" if offline else ", and the hub can't be reached")
        raise CheckpointError(f"{repo}: {problem}") from error
    except Exception as error:  # each transport of the hub raises exceptions of its own
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise CheckpointError(f"{repo}: download failed ({reason})") from error
    finally:
        if hide:
            utils.enable_progress_bars()
