"""`lfm2serve bench ...`"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from lfm2serve.options import EngineOptions

if TYPE_CHECKING:
    from lfm2serve.bench.chat import ChatReport
    from lfm2serve.bench.memory import Receipt

app = typer.Typer(
    help="Measure this machine: the figures behind the README.", no_args_is_help=True, add_completion=False
)

ModelOption = Annotated[str, typer.Option("--model", help="A model's shape, with random weights.")]
DeviceOption = Annotated[str, typer.Option("--device", help="auto, cpu or cuda.")]
ThreadsOption = Annotated[int | None, typer.Option("--threads", min=1, help="CPU threads (default: all cores).")]
KvOption = Annotated[float, typer.Option("--kv-gib", min=0.01, help="Size of the page pool.")]
JsonOption = Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")]


@app.callback()
def _group() -> None:
    """Measure this machine: the figures behind the README."""


def _shape_name(model: str) -> str:
    from lfm2serve.dummy import SHAPES

    if model not in SHAPES:
        raise typer.BadParameter(f"{model!r}: one of {', '.join(SHAPES)}", param_hint="--model")
    return model


def _numbers(text: str, flag: str) -> list[int]:
    try:
        numbers = [int(item) for item in text.split(",") if item]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < 1:
        raise typer.BadParameter(f"{text!r}: must be whole numbers with commas between them", param_hint=flag)
    return numbers


def _options(device: str, threads: int | None, **more: object) -> EngineOptions:
    return EngineOptions.from_dict({"device": device, "threads": threads, **more})


def _show(title: str, headings: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> None:
    table = Table(title=title)
    for heading in headings:
        table.add_column(heading)
    for row in rows:
        table.add_row(*row)
    Console().print(table)


@app.command()
def throughput(
    model: ModelOption = "lfm2-350m",
    device: DeviceOption = "auto",
    threads: ThreadsOption = None,
    streams: Annotated[str, typer.Option(help="Numbers of streams that decode together.")] = "1,8",
    prompts: Annotated[str, typer.Option(help="Lengths of prompts that run alone.")] = "512",
    context: Annotated[str, typer.Option(help="Tokens of each stream before it decodes; several are compared.")] = "32",
    fixed: Annotated[bool, typer.Option("--fixed", help="Also decode with one fixed range of K/V a stream.")] = False,
    tokens: Annotated[int, typer.Option(min=2, help="Tokens decoded by each stream.")] = 64,
    repeats: Annotated[int, typer.Option(min=1, help="Medians are taken of so many.")] = 3,
    as_json: JsonOption = False,
) -> None:
    """Decode and prompt speed, beside what memory and (on a CPU) NumPy allow."""
    from lfm2serve.bench.throughput import measure

    counts, lengths = _numbers(streams, "--streams"), _numbers(prompts, "--prompts")
    report = measure(
        _shape_name(model), _options(device, threads),
        streams=counts, prompts=lengths, contexts=_numbers(context, "--context"), tokens=tokens, repeats=repeats,
        fixed=fixed,
    )  # fmt: skip
    if as_json:
        print(json.dumps(report.to_dict()))
        return
    rows = [(f.measure, f"{f.value:,.4g} {f.unit}", f.beside) for f in report.figures]
    _show(f"{model} on {report.device}, bfloat16, random weights", ("measure", "figure", "beside"), rows)


@app.command()
def law(
    model: ModelOption = "lfm2-350m",
    device: DeviceOption = "auto",
    threads: ThreadsOption = None,
    lengths: Annotated[
        str, typer.Option(help="Prompt lengths; every other one is sampled.")
    ] = "1,2,17,128,129,500,513,900",
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of each reply.")] = 32,
    chunks: Annotated[str, typer.Option(help="Sizes of prompt steps.")] = "64,512",
    together: Annotated[str, typer.Option(help="Numbers of requests at once.")] = "4,8",
    randoms: Annotated[int, typer.Option(min=0, help="Random combinations after one factor at a time.")] = 5,
    limit: Annotated[float, typer.Option(help="Start no further way after so many seconds.")] = 480.0,
    as_json: JsonOption = False,
) -> None:
    """Compute the same replies in many ways and compare their tokens and bits. Exit code 1 where any differs."""
    from dataclasses import asdict

    from lfm2serve.bench.law import compare

    sizes, counts = _numbers(lengths, "--lengths"), _numbers(together, "--together")
    options = _options(device, threads, context=max(sizes) + tokens, max_streams=max(counts), kv_pages=None)
    outcomes = list(
        compare(
            _shape_name(model), options,
            lengths=sizes, tokens=tokens, chunks=_numbers(chunks, "--chunks"), together=counts, randoms=randoms,
            limit_s=limit,
        )
    )  # fmt: skip
    if as_json:
        print(json.dumps([asdict(outcome) for outcome in outcomes]))
    else:
        rows = [(o.way, f"{o.equal} of {o.replies}", f"{o.seconds:.1f} s") for o in outcomes]
        _show(f"{model}: replies equal to the reference in tokens and bits", ("way", "equal", "time"), rows)
    if not all(outcome.ok for outcome in outcomes):
        raise typer.Exit(1)


@app.command()
def kernels(
    model: ModelOption = "lfm2-350m",
    device: DeviceOption = "auto",
    threads: ThreadsOption = None,
    rows: Annotated[
        str, typer.Option(help="Numbers of rows that are checked.")
    ] = "1,15,16,17,31,33,63,65,127,129,500,512,513",
    timed: Annotated[str, typer.Option(help="Numbers of rows that are timed.")] = "1,8,64,512",
    every: Annotated[
        bool, typer.Option("--every", help="On a GPU: time every kernel that can compute a product.")
    ] = False,
    repeats: Annotated[int, typer.Option(min=1, help="Medians are taken of so many.")] = 7,
    seed: Annotated[int | None, typer.Option(min=0, help="Of the random inputs (default: fresh ones).")] = None,
    as_json: JsonOption = False,
) -> None:
    """Each operation's kernels against NumPy and each other, and their times. Exit code 1 where a check fails."""
    from lfm2serve.bench.kernels import measure
    from lfm2serve.dummy import shape

    report = measure(
        shape(_shape_name(model)), model, _options(device, threads), rows=_numbers(rows, "--rows"),
        timed=_numbers(timed, "--timed"), repeats=repeats, every=every, seed=seed,
    )  # fmt: skip
    _print_receipt(report, as_json, ": kernels on random inputs")


@app.command()
def chat(
    model: Annotated[str, typer.Argument(help='"demo", a checkpoint directory, a hub id, or a shape.')] = "demo",
    device: DeviceOption = "auto",
    threads: ThreadsOption = None,
    length: Annotated[int, typer.Option(min=200, help="Tokens of the long prompts.")] = 2048,
    tokens: Annotated[int, typer.Option(min=2, help="Tokens of each reply in a chat, at most.")] = 24,
    repeats: Annotated[int, typer.Option(min=1, help="Medians are taken of so many.")] = 5,
    as_json: JsonOption = False,
) -> None:
    """Chats with kept states and drafts: equal to fresh ones, and what is saved. Exit code 1 where a reply differs."""
    from lfm2serve.bench.chat import measure
    from lfm2serve.sources import is_shape

    report = measure(
        model, _options(device, threads), dummy_weights=is_shape(model), length=length, tokens=tokens, repeats=repeats
    )
    _print_receipt(report, as_json, ": kept states and drafts")


@app.command()
def memory(
    model: ModelOption = "lfm2-350m",
    device: DeviceOption = "auto",
    threads: ThreadsOption = None,
    kv_gib: KvOption = 1.0,
    cache_gib: Annotated[float, typer.Option(min=0, help="Size of the prompt cache.")] = 0.5,
    streams: Annotated[int, typer.Option(min=1, help="Streams that decode together.")] = 4,
    context: Annotated[int, typer.Option(min=1, help="Tokens of each stream before it decodes.")] = 1024,
    tokens: Annotated[int, typer.Option(min=2, help="Tokens decoded by each stream.")] = 32,
    as_json: JsonOption = False,
) -> None:
    """What is mapped after load, the plan beside what the device says, and pages in pieces against one allocation."""
    from lfm2serve.bench.memory import measure

    options = _options(
        device, threads, kv_gib=kv_gib, prompt_cache_gib=cache_gib, max_streams=streams, context=context + tokens
    )
    _print_receipt(measure(_shape_name(model), options, streams=streams, context=context, tokens=tokens), as_json)


@app.command()
def gaps(
    model: ModelOption = "lfm2-350m",
    device: DeviceOption = "auto",
    threads: ThreadsOption = None,
    kv_gib: KvOption = 1.0,
    prompts: Annotated[str, typer.Option(help="Lengths of prompts that come while a stream decodes.")] = "1000,2000",
    max_gap_ms: Annotated[float, typer.Option(min=1, help="How long running replies may wait for a prompt step.")] = 50,
    as_json: JsonOption = False,
) -> None:
    """What a running stream feels while long prompts open into unmapped pages. Exit code 1 where a reply differs."""
    from lfm2serve.bench.gaps import FIRST, MOST, measure

    lengths = _numbers(prompts, "--prompts")
    options = _options(
        device, threads, kv_gib=kv_gib, prompt_cache_gib=0.0, max_streams=2, context=max(*lengths, MOST) + 2 * FIRST
    )
    _print_receipt(measure(_shape_name(model), options, prompts=lengths, max_gap_ms=max_gap_ms), as_json)


def _print_receipt(report: Receipt | ChatReport, as_json: bool, what: str = ", random weights") -> None:
    """The figures, and what is wrong: then the exit code is 1."""
    if as_json:
        print(json.dumps(report.to_dict()))
    else:
        rows = [(f.measure, f"{f.value:,.4g} {f.unit}".strip(), f.beside) for f in report.figures]
        _show(f"{report.model} on {report.device}{what}", ("measure", "figure", "beside"), rows)
        for failure in report.failures:
            Console(stderr=True).print(failure)
    if report.failures:
        raise typer.Exit(1)


@app.command()
def server(
    model: Annotated[str, typer.Argument(help='"demo", a checkpoint directory, a hub id, or a shape.')] = "demo",
    device: DeviceOption = "auto",
    threads: ThreadsOption = None,
    clients: Annotated[int, typer.Option(min=1, help="Streaming clients at once.")] = 64,
    tokens: Annotated[int, typer.Option(min=2, help="Tokens of each reply.")] = 1024,
    vanish: Annotated[int, typer.Option(min=0, help="Clients that begin a reply and are gone.")] = 1000,
    repeats: Annotated[int, typer.Option(min=1, help="Medians are taken of so many.")] = 5,
    as_json: JsonOption = False,
) -> None:
    """Tokens a second through the server beside its engine alone, and what clients that vanish leave behind."""
    from lfm2serve.bench.server import measure
    from lfm2serve.sources import is_shape

    report = measure(
        model, _options(device, threads, max_streams=clients), dummy_weights=is_shape(model), clients=clients,
        tokens=tokens, vanish=vanish, repeats=repeats,
    )  # fmt: skip
    _print_receipt(report, as_json, ": the server")
