"""`lfm2serve bench ...`"""

from __future__ import annotations

import json
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

app = typer.Typer(help="Measure this machine: the figures behind the README.", no_args_is_help=True, add_completion=False)


@app.callback()
def _group() -> None:
    """Measure this machine: the figures behind the README."""


@app.command()
def throughput(
    model: Annotated[str, typer.Option(help="lfm2-350m, lfm2-700m or lfm2-1.2b: the shape, with random weights.")] = "lfm2-350m",
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads (default: all cores).")] = None,
    tokens: Annotated[int, typer.Option(min=2, help="Tokens decoded by each stream.")] = 64,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")] = False,
) -> None:
    """Decode and prompt speed, beside the memory's and NumPy's."""
    from lfm2serve.bench.shapes import SHAPES
    from lfm2serve.bench.throughput import measure

    if model not in SHAPES:
        raise typer.BadParameter(f"{model!r}: one of {', '.join(SHAPES)}", param_hint="--model")
    result = measure(model, threads, tokens)
    if as_json:
        print(json.dumps(result.to_dict()))
        return
    table = Table(title=f"{model}, bfloat16, random weights")
    for heading in ("measure", "figure", "beside"):
        table.add_column(heading)
    for row in result.rows():
        table.add_row(*row)
    Console().print(table)
