"""The command line's flags, each defined once: a command takes a whole group of them as one value."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Annotated, Any, Literal, get_origin, get_type_hints

import typer

from lfm2serve.options import EngineOptions

ModelArgument = Annotated[
    str, typer.Argument(metavar="MODEL", help='"demo" (ships with lfm2serve), a checkpoint directory, or a hub id.')
]
OfflineFlag = Annotated[bool, typer.Option("--offline", help="Never ask the hub; use what was downloaded before.")]
DummyFlag = Annotated[
    bool,
    typer.Option("--dummy-weights", help="Random weights: MODEL is a built-in shape, or has config.json at least."),
]
VerboseFlag = Annotated[bool, typer.Option("--verbose", "-v", help="Say on standard error what is being done.")]
JsonFlag = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
SystemFlag = Annotated[str | None, typer.Option("--system", metavar="TEXT", help="System message of the chat.")]


@dataclass(frozen=True, slots=True)
class SamplingFlags:
    """What the user set about one reply; None: the checkpoint's generation_config.json, else off."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    max_tokens: int | None = None

    def given(self) -> dict[str, Any]:
        """The fields that were set, as keyword arguments of SamplingParams."""
        return {field.name: value for field in fields(self) if (value := getattr(self, field.name)) is not None}


HELP = {
    "device": "auto (the GPU where there is one that can be used), cpu or cuda.",
    "gpu": "Which GPU, counted from 0.",
    "dtype": "Of activations and K/V: auto (bfloat16), bfloat16 or float32.",
    "context": "Longest prompt + reply, in tokens.",
    "max_streams": "Replies that run at once; more wait in line.",
    "kv": "K/V memory: paged (given as streams reach it), eager (all at load), or fixed (one range a stream).",
    "kv_pages": "Pages of 512 positions in the pool.",
    "kv_gib": "Size of the pool, instead of --kv-pages.",
    "prompt_chunk": "Force the rows of a prompt step.",
    "max_gap_ms": "How long running replies may wait for a prompt step.",
    "default_max_tokens": "Reply limit where a request names none.",
    "memory_limit_gib": "For weights, scratch, pages and kept states together.",
    "reserve_gib": "Of the device's memory, left free for others.",
    "prompt_cache_gib": "For kept states, inside the limit; 0 keeps none.",
    "warm_pass": "Prepare the next turn's state where the reply comes back as other tokens.",
    "drafts": "Draft by lookup in a reply's own tokens; changes the speed, never the reply.",
    "threads": "CPU threads.",
    "temperature": "0 always takes the likeliest token.",
    "top_p": "Draw from the likeliest tokens that reach this probability together.",
    "top_k": "Draw from this many of the likeliest tokens.",
    "min_p": "Leave out tokens below this share of the likeliest one's probability.",
    "seed": "Makes a sampled reply repeatable.",
    "max_tokens": "Reply limit, in tokens.",
}

UNSET = {  # what a flag without a value in its dataclass means, for --help
    "context": "what the model and the pages allow",
    "kv_pages": "from the memory plan",
    "kv_gib": "from the memory plan",
    "prompt_chunk": "chosen by --max-gap-ms",
    "memory_limit_gib": "on a CPU weights + 2 GiB, on a GPU what is free",
    "reserve_gib": "1 on a GPU, 0 on a CPU",
    "prompt_cache_gib": "from the memory plan",
    "threads": "all cores",
    "seed": "drawn anew",
    "max_tokens": "--default-max-tokens",
    "temperature": "the checkpoint's",
    "top_p": "the checkpoint's",
    "top_k": "the checkpoint's",
    "min_p": "the checkpoint's",
}

PANELS = {EngineOptions: "Engine", SamplingFlags: "Reply"}


def _option(name: str, kind: Any, panel: str) -> Any:
    """The typer option of one dataclass field."""
    flag = name.replace("_", "-")
    return typer.Option(
        f"--{flag}/--no-{flag}" if kind is bool else f"--{flag}",
        metavar="" if kind is bool else "NAME" if get_origin(kind) is Literal else "N",
        help=HELP[name],
        show_default=UNSET.get(name, True),
        rich_help_panel=panel,
    )


def takes(parameter: str, group: type[EngineOptions] | type[SamplingFlags]) -> Callable[[Callable[..., None]], Any]:
    """Give a command one flag for each field of `group`; the command gets them as the argument `parameter`.

    Names, types and defaults are the dataclass's own, so the command line can't drift from the library.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        hints = get_type_hints(group)
        flags = [
            inspect.Parameter(
                field.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=field.default,
                annotation=Annotated[hints[field.name], _option(field.name, hints[field.name], PANELS[group])],
            )
            for field in fields(group)
        ]

        @functools.wraps(command)
        def with_flags(*args: Any, **kwargs: Any) -> None:
            values = {flag.name: kwargs.pop(flag.name) for flag in flags}
            command(*args, **kwargs, **{parameter: group(**values)})

        signature = inspect.signature(command, eval_str=True)
        others = [p for p in signature.parameters.values() if p.name != parameter]
        with_flags.__signature__ = signature.replace(parameters=[*others, *flags])  # type: ignore[attr-defined]
        return with_flags

    return decorate
