"""The package itself: a quick import, public names, declared dependencies, and a README that tells the truth."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from dataclasses import fields
from pathlib import Path

import pytest

import lfm2serve
from lfm2serve.flags import HELP
from lfm2serve.options import EngineOptions

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def imported(package: str) -> set[str]:
    """Top-level names of the third-party modules that a package's sources import."""
    names = set()
    for file in (ROOT / package).rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                names |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
                names.add(node.module.partition(".")[0])
    return names - sys.stdlib_module_names - {"lfm2serve", "kernels_numba"}


def test_importing_the_package_loads_nothing_heavy() -> None:
    code = "import sys, lfm2serve; print(sorted({'numba', 'numpy', 'starlette', 'tokenizers'} & set(sys.modules)))"
    assert (
        subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout
        == "[]\n"
    )


def test_public_names() -> None:
    names = {"LLM", "SamplingParams", "StructuredOutputsParams", "RequestOutput", "CompletionOutput", "__version__"}
    assert names == set(lfm2serve.__all__)
    assert set(lfm2serve.__all__) <= set(dir(lfm2serve))
    assert lfm2serve.LLM.__module__ == "lfm2serve.llm"
    with pytest.raises(AttributeError, match="no attribute 'Sampling'"):
        lfm2serve.Sampling  # noqa: B018
    assert f"## {lfm2serve.__version__}" in (ROOT / "CHANGELOG.md").read_text()


def test_every_import_is_a_declared_dependency() -> None:
    provided = {  # by distribution, where the module has another name, or comes with another distribution
        "numba-cuda": {"numba", "cuda"},
        "numba": {"numba", "llvmlite"},
        "prometheus-client": {"prometheus_client"},
        "huggingface-hub": {"huggingface_hub"},
        "typer": {"typer", "rich"},
        "starlette": {"starlette", "anyio"},
        "pydantic": {"pydantic", "pydantic_core"},
    }
    extras = PROJECT["optional-dependencies"]
    declared = [*PROJECT["dependencies"], *extras["hub"], *extras["structured"]]
    names = [re.split(r"[\[><=]", requirement)[0] for requirement in declared]
    allowed = set().union(*(provided.get(name, {name}) for name in names))
    assert imported("lfm2serve") | imported("kernels_numba") <= allowed
    assert not {"torch", "transformers"} & allowed


def test_the_readme_names_every_option() -> None:
    assert {field.name for field in fields(EngineOptions)} < set(HELP)
    assert [name for name in HELP if "--" + name.replace("_", "-") not in README] == []


def test_the_readme_opens_with_two_commands() -> None:
    run, test = re.findall(r"<!-- (\w+) -->\n```sh\n([^\n]*)\n```", README)
    make = "python3 -m venv .venv && .venv/bin/pip install"
    assert run == ("run", f'{make} . && .venv/bin/lfm2serve generate demo "What is the capital of Peru?"')
    assert test == ("test", f"{make} -e '.[test,hub]' && .venv/bin/python -m pytest -q")


def test_the_readmes_map_names_every_file() -> None:
    house = README.split("## How it works")[1]
    files = {path.name for path in (ROOT / "lfm2serve").glob("*.py")} - {"__init__.py", "__main__.py", "errors.py"}
    assert [name for name in sorted(files) if name not in house] == []
