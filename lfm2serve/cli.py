"""The command `lfm2serve`: serve | generate | chat | info | bench."""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from typer.main import get_command

from lfm2serve import __version__
from lfm2serve.errors import InvalidRequest, Lfm2Error
from lfm2serve.flags import (
    DummyFlag,
    JsonFlag,
    ModelArgument,
    OfflineFlag,
    SamplingFlags,
    SystemFlag,
    VerboseFlag,
    takes,
)
from lfm2serve.options import EngineOptions

if TYPE_CHECKING:
    from lfm2serve.llm import LLM
    from lfm2serve.outputs import RequestOutput

# numba and the kernels load inside the commands: --help and a usage error answer at once

LogFormat = Literal["text", "json"]
SERVER = "Server"  # the help's panel

INTERRUPTED = 130  # what shells report for a program that Ctrl-C ended
PASS_ON = {"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []}

app = typer.Typer(
    name="lfm2serve",
    help="Run LFM2 models in pure Python: the same bits for a prompt, whatever else runs.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and end the process: 0 done, 1 failed, 2 asked wrongly, 130 interrupted."""
    sys.exit(run(sys.argv[1:] if arguments is None else arguments))


def run(arguments: Sequence[str], command: typer.Typer = app, name: str = "lfm2serve") -> int:
    """Run a command line and return its exit code; an error is one line on standard error."""
    try:
        code = get_command(command)(list(arguments), prog_name=name, standalone_mode=False)
        sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except typer.TyperException as error:
        return _complain(error.format_message(), error.exit_code)
    except Lfm2Error as error:
        return _complain(error.message, error.exit_code)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the reader left; let the last flush succeed
        return 1
    except KeyboardInterrupt:
        return INTERRUPTED
    except Exception as error:  # a bug: still one line, and where it happened for who asked with -v
        logging.getLogger("lfm2serve").info("internal error", exc_info=error)
        return _complain(f"internal error: {type(error).__name__}: {error} (-v shows where)", 1)


def _complain(message: str, code: int) -> int:
    if message:  # none where typer has printed the help instead
        print(f"lfm2serve: error: {' '.join(message.split())}", file=sys.stderr)
    return code


def _version(wanted: bool) -> None:
    if wanted:
        print(f"lfm2serve {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


@app.command()
@takes("options", EngineOptions)
def serve(
    model: ModelArgument,
    *,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(min=0, max=65535, metavar="N", help="Port to listen on; 0 takes a free one.")
    ] = 8000,
    served_model_name: Annotated[
        str | None, typer.Option(metavar="NAME", help="Name in /v1/models.", show_default="MODEL")
    ] = None,
    api_key: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY", help="Ask for this API key; may be given several times.", rich_help_panel=SERVER),
    ] = None,
    api_key_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Ask for one of the API keys in FILE.", rich_help_panel=SERVER)
    ] = None,
    max_queue: Annotated[
        int,
        typer.Option(metavar="N", help="Replies that may wait behind those that run.", rich_help_panel=SERVER),
    ] = 1024,
    request_timeout: Annotated[
        float | None,
        typer.Option(
            metavar="S", help="Seconds that a reply may take.", rich_help_panel=SERVER, show_default="no limit"
        ),
    ] = None,
    max_body_mib: Annotated[
        float, typer.Option(metavar="M", help="Largest body of a request.", rich_help_panel=SERVER)
    ] = 32.0,
    stuck_after: Annotated[
        float,
        typer.Option(metavar="S", help="A step that takes longer makes /health fail.", rich_help_panel=SERVER),
    ] = 120.0,
    cors_origin: Annotated[
        list[str] | None,
        typer.Option(metavar="ORIGIN", help='Let pages of ORIGIN call the server; "*": all.', rich_help_panel=SERVER),
    ] = None,
    page: Annotated[bool, typer.Option("--page/--no-page", help="Show a page at /.", rich_help_panel=SERVER)] = True,
    log_format: Annotated[
        LogFormat, typer.Option(metavar="NAME", help="text or json.", rich_help_panel=SERVER)
    ] = "text",
    log_prompts: Annotated[
        bool, typer.Option("--log-prompts", help="Log prompts and replies too.", rich_help_panel=SERVER)
    ] = False,
    offline: OfflineFlag = False,
    dummy_weights: DummyFlag = False,
    verbose: VerboseFlag = False,
    options: EngineOptions,
) -> None:
    """Serve MODEL over HTTP with OpenAI's API until Ctrl-C or SIGTERM."""
    from lfm2serve.runtime import load_runtime
    from lfm2serve.server.app import create_app
    from lfm2serve.server.logs import start_logging
    from lfm2serve.server.options import ServerOptions, read_keys
    from lfm2serve.server.run import listen
    from lfm2serve.server.run import run as run_server
    from lfm2serve.terminal import LoadProgress, announce_compiling

    server_options = ServerOptions(
        api_keys=(*(api_key or ()), *(read_keys(api_key_file) if api_key_file is not None else ())),
        max_queue=max_queue,
        request_timeout_s=request_timeout,
        max_body_mib=max_body_mib,
        stuck_after_s=stuck_after,
        cors_origins=tuple(cors_origin or ()),
        page=page,
        log_prompts=log_prompts,
    )

    def ready(url: str) -> None:
        if log_format == "json":
            logging.getLogger("lfm2serve").info("%s on %s/v1", model, url)
        else:
            print(f"lfm2serve: {model} on {url}/v1", file=sys.stderr, flush=True)

    start_logging(logging.DEBUG if verbose else logging.INFO, log_format)
    announce_compiling()
    listen(host, port).close()  # an address that is taken is known before the weights are read
    runtime = load_runtime(model, options, offline=offline, progress=LoadProgress(), dummy_weights=dummy_weights)
    try:
        app = create_app(runtime, served_model_name=served_model_name, options=server_options)
        run_server(app, host, port, on_ready=ready)
    finally:
        runtime.close()


@app.command()
@takes("flags", SamplingFlags)
@takes("options", EngineOptions)
def generate(
    model: ModelArgument,
    prompt: Annotated[str, typer.Argument(metavar="PROMPT", help='What to answer; "-" reads it from standard input.')],
    *,
    system: SystemFlag = None,
    raw: Annotated[bool, typer.Option("--raw", help="Complete PROMPT as it is, without the chat template.")] = False,
    as_json: JsonFlag = False,
    offline: OfflineFlag = False,
    dummy_weights: DummyFlag = False,
    verbose: VerboseFlag = False,
    options: EngineOptions,
    flags: SamplingFlags,
) -> None:
    """Answer one PROMPT; standard output gets the reply and nothing else."""
    _start_logging(logging.INFO if verbose else logging.WARNING)
    text = _read_prompt(prompt)
    started = time.monotonic()
    with _load(model, options, offline, dummy_weights) as llm:
        loaded = time.monotonic()
        if raw or not llm.has_chat_template:
            if system is not None:
                raise InvalidRequest("--system needs a chat template and no --raw", param="system")
            request: Any = text
        else:
            request = [{"role": "system", "content": system}] if system is not None else []
            request.append({"role": "user", "content": text.removesuffix("\n")})
        params = llm.get_default_sampling_params().with_(**flags.given())
        with llm.stream(request, params) as stream:
            for delta in stream:
                if not as_json:
                    sys.stdout.write(delta.text)
                    sys.stdout.flush()
            if as_json:
                _print_json(_reply_json(model, stream.output, loaded - started))
            elif sys.stdout.isatty():
                print()


@app.command()
@takes("flags", SamplingFlags)
@takes("options", EngineOptions)
def chat(
    model: ModelArgument,
    *,
    system: SystemFlag = None,
    offline: OfflineFlag = False,
    dummy_weights: DummyFlag = False,
    verbose: VerboseFlag = False,
    options: EngineOptions,
    flags: SamplingFlags,
) -> None:
    """Talk with MODEL; it remembers the conversation. Ctrl-C stops a reply, Ctrl-D ends. /help lists commands."""
    _start_logging(logging.INFO if verbose else logging.WARNING)
    with _load(model, options, offline, dummy_weights) as llm:
        from lfm2serve.repl import ChatLoop

        ChatLoop(llm, llm.get_default_sampling_params().with_(**flags.given()), system).run()


@app.command()
@takes("options", EngineOptions)
def info(
    model: ModelArgument,
    *,
    as_json: JsonFlag = False,
    offline: OfflineFlag = False,
    dummy_weights: DummyFlag = False,
    options: EngineOptions,
) -> None:
    """Show MODEL's configuration, sizes and what will fit, without reading its weights."""
    from lfm2serve.describe import describe

    description = describe(model, options, offline=offline, dummy_weights=dummy_weights)
    if as_json:
        _print_json(description.to_dict())
    else:
        print(description)


@app.command(context_settings=PASS_ON, add_help_option=False)
def bench(context: typer.Context) -> None:
    """Measure speed, gaps and memory, each beside what the machine allows."""
    from lfm2serve.bench.cli import app as bench_app

    raise typer.Exit(run(context.args, bench_app, "lfm2serve bench"))


def _start_logging(level: int) -> None:
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr, format="%(levelname)s %(name)s: %(message)s")
    logging.getLogger("lfm2serve").setLevel(level)


def _load(model: str, options: EngineOptions, offline: bool, dummy_weights: bool) -> LLM:
    from lfm2serve.llm import LLM

    return LLM(model, offline=offline, progress=True, dummy_weights=dummy_weights, **asdict(options))


def _read_prompt(prompt: str) -> str:
    """The argument, or standard input's text for "-"."""
    try:
        if prompt == "-":
            return sys.stdin.buffer.read().decode()
        prompt.encode()
    except UnicodeError:
        raise InvalidRequest("the prompt isn't valid UTF-8", param="prompt") from None
    return prompt


def _reply_json(model: str, output: RequestOutput, load_s: float) -> dict[str, Any]:
    """A finished reply as plain values; times in seconds."""
    [reply], metrics = output.outputs, output.metrics
    prompt, generated = len(output.prompt_token_ids), len(reply.token_ids)
    timings: dict[str, float | None] = {"load_s": load_s}
    if metrics is not None:
        timings |= {
            "queue_s": metrics.time_in_queue,
            "first_token_s": metrics.first_token_latency,
            "total_s": metrics.total_time,
        }
    return {
        "model": model,
        "text": reply.text,
        "token_ids": reply.token_ids,
        "finish_reason": reply.finish_reason,
        "stop_reason": reply.stop_reason,
        "seed": output.seed,
        "usage": {
            "prompt_tokens": prompt,
            "completion_tokens": generated,
            "total_tokens": prompt + generated,
            "prompt_tokens_details": {"cached_tokens": output.num_cached_tokens},
        },
        "timings": timings,
    }


def _print_json(value: object) -> None:
    print(json.dumps(value, ensure_ascii=False))
