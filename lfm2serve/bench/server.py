"""The server beside its own engine: tokens a second with streaming clients, and what clients that vanish leave."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from lfm2serve.bench.chat import ChatReport
from lfm2serve.bench.clients import story
from lfm2serve.options import EngineOptions
from lfm2serve.runtime import Runtime, load_runtime
from lfm2serve.sampling import SamplingParams
from lfm2serve.server.app import create_app
from lfm2serve.server.options import ServerOptions
from lfm2serve.server.run import SERVING, serving


def measure(
    model: str, options: EngineOptions, *, dummy_weights: bool, clients: int, tokens: int, vanish: int, repeats: int
) -> ChatReport:
    """clients: streams at once, `tokens` long each. vanish: clients that begin a reply and are gone."""
    runtime = load_runtime(model, options, dummy_weights=dummy_weights)
    try:
        report = ChatReport(model, runtime.backend.__class__.__name__.removesuffix("Backend").upper())
        app = create_app(runtime, options=ServerOptions(max_queue=max(1024, vanish), page=False))
        with serving(app) as base:
            url = base + ("/v1/completions" if runtime.template is None else "/v1/chat/completions")
            _throughput(report, runtime, url, clients, tokens, repeats)
            if vanish:
                _vanishing(report, runtime, url, vanish)
        return report
    finally:
        runtime.close()


def _throughput(report: ChatReport, runtime: Runtime, url: str, clients: int, tokens: int, repeats: int) -> None:
    """Turn by turn, so that a machine that slows down slows both.

    Both sides are measured over the same thing: the same texts with the same seeds, so the same tokens by the law,
    from the first request, which has to be rendered and tokenised, to the last token.
    """
    _offline(runtime, clients, 8)
    run_clients("stream", url, clients, 8)
    offline, served, chunks, busy = [], [], [], []
    for _ in range(repeats):
        offline.append(_offline(runtime, clients, tokens))
        before = _loop_seconds()
        got = run_clients("stream", url, clients, tokens)
        busy.append((_loop_seconds() - before) / got["tokens"])
        report.expect(got["tokens"] == clients * tokens, f"{got['tokens']} tokens came of {clients * tokens}")
        served.append(got["tokens"] / got["seconds"])
        chunks.append(got["tokens"] / got["chunks"])
    alone, through = statistics.median(offline), statistics.median(served)
    report.add(f"engine alone, {clients} streams", alone, "tok/s")
    report.add(f"through the server, {clients} streaming clients", through, "tok/s", f"{100 * through / alone:.1f} %")
    report.add("tokens in a chunk", statistics.mean(chunks), "", "more than one where the server's loop rests")
    report.add("the server's own time a token", 1e6 * statistics.median(busy), "us", "CPU time of its thread")


def _offline(runtime: Runtime, streams: int, tokens: int) -> float:
    """Tokens a second of the same requests, given to the engine directly."""
    params = runtime.default_params(max_tokens=tokens, ignore_eos=True)
    started = time.perf_counter()
    for number in range(streams):
        _submit(runtime, params, number)
    runtime.engine.drain()
    return streams * tokens / (time.perf_counter() - started)


def _submit(runtime: Runtime, params: SamplingParams, number: int) -> None:
    """What client `number` asks for, without HTTP."""
    text = story(number)
    if runtime.template is None:
        prompt = runtime.encode_prompt(text)
    else:
        prompt = runtime.encode_chat([{"role": "user", "content": text}])
    runtime.engine.submit(prompt, params, lambda event: None, seed=number, draft=False, prompt_cache=False)


def run_clients(what: str, url: str, number: int, tokens: int) -> dict[str, Any]:
    command = [sys.executable, "-m", "lfm2serve.bench.clients", what, url, str(number), str(tokens)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr.strip().splitlines()[-1])
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def _vanishing(report: ChatReport, runtime: Runtime, url: str, number: int) -> None:
    run_clients("vanish", url, number, 400)  # what every connection's first takes is there now
    _settle(runtime)
    before = resident_mib()
    got = run_clients("vanish", url, number, 400)
    settled = _settle(runtime)
    report.expect(settled, f"the census isn't clean: {runtime.engine.census()}")
    gained = resident_mib() - before
    report.add(f"{number:,} clients that vanish: memory gained", gained, "MiB", f"in {got['seconds']:.1f} s")


def _loop_seconds() -> float:
    """CPU time of the server's thread so far."""
    [thread] = [thread for thread in threading.enumerate() if thread.name == SERVING]
    return int(Path(f"/proc/self/task/{thread.native_id}/schedstat").read_text().split()[0]) / 1e9


def _settle(runtime: Runtime) -> bool:
    return runtime.engine.drain(60) and runtime.engine.census().clean


def resident_mib() -> float:
    """Memory of this process."""
    fields = Path("/proc/self/statm").read_text().split()
    return int(fields[1]) * 4096 / 2**20
