"""The command line: what goes to which stream, exit codes, and the chat loop."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from lfm2serve import LLM, SamplingParams, __version__
from lfm2serve.checkpoint import Checkpoint
from lfm2serve.cli import run
from lfm2serve.flags import HELP, SamplingFlags
from lfm2serve.options import EngineOptions
from lfm2serve.repl import ChatLoop

SMALL = ["--max-streams", "1", "--context", "1024"]
ENDLESS = ["--raw", "--temperature", "0", "--max-tokens", "4000"]  # this prompt never meets an eos
PARAMS = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(tiny_moe: Path) -> Iterator[LLM]:
    with LLM(tiny_moe, progress=False) as llm:
        yield llm


def generate(model: Path, *arguments: str) -> int:
    return run(["generate", str(model), *arguments, *SMALL])


@contextmanager
def started(*arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    """The command in a process of its own, with pipes for both outputs; ended and cleaned up at the end."""
    command = [sys.executable, "-m", "lfm2serve", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        try:
            yield process
        finally:
            process.kill()


def stdin_of(text: str | bytes) -> io.TextIOWrapper:
    raw = text if isinstance(text, bytes) else text.encode()
    return io.TextIOWrapper(io.BytesIO(raw), encoding="utf-8")


# ---- generate ----


def test_generate_prints_the_reply_and_nothing_else(
    llm: LLM, tiny_moe: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    [expected] = llm.chat([{"role": "user", "content": "Where is Lima?"}], SamplingParams(temperature=0, max_tokens=9))
    capfd.readouterr()
    assert generate(tiny_moe, "Where is Lima?", "--temperature", "0", "--max-tokens", "9") == 0
    assert capfd.readouterr() == (expected.outputs[0].text, "")


def test_raw_completes_the_prompt_as_it_is(llm: LLM, tiny_moe: Path, capfd: pytest.CaptureFixture[str]) -> None:
    [expected] = llm.generate("Where is Lima?", SamplingParams(temperature=0, max_tokens=9))
    assert generate(tiny_moe, "Where is Lima?", "--raw", "--temperature", "0", "--max-tokens", "9") == 0
    assert capfd.readouterr().out == expected.outputs[0].text


def test_json_has_what_a_machine_wants(llm: LLM, tiny_moe: Path, capfd: pytest.CaptureFixture[str]) -> None:
    flags = ["--json", "--temperature", "1.5", "--seed", "11", "--max-tokens", "6", "--system", "Be brief."]
    assert generate(tiny_moe, "Where is Lima?", *flags) == 0
    out, err = capfd.readouterr()
    value = json.loads(out)
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Where is Lima?"}]
    [expected] = llm.chat(messages, SamplingParams(temperature=1.5, seed=11, max_tokens=6))
    [reply] = expected.outputs
    assert err == "" and out.count("\n") == 1
    assert (value["text"], value["token_ids"], value["seed"]) == (reply.text, reply.token_ids, 11)
    assert (value["finish_reason"], value["model"]) == (reply.finish_reason, str(tiny_moe))
    prompt, generated = len(expected.prompt_token_ids), len(reply.token_ids)
    assert value["usage"] == {
        "prompt_tokens": prompt,
        "completion_tokens": generated,
        "total_tokens": prompt + generated,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    times = value["timings"]
    assert set(times) == {"load_s", "queue_s", "first_token_s", "total_s"}
    assert 0 <= times["queue_s"] <= times["first_token_s"] <= times["total_s"] and times["load_s"] > 0


def test_without_a_seed_the_drawn_one_is_reported(tiny_moe: Path, capfd: pytest.CaptureFixture[str]) -> None:
    sampled = ["--json", "--temperature", "1.5", "--max-tokens", "6"]
    assert generate(tiny_moe, "Once", *sampled) == 0
    first = json.loads(capfd.readouterr().out)
    assert generate(tiny_moe, "Once", *sampled, "--seed", str(first["seed"])) == 0
    assert json.loads(capfd.readouterr().out)["token_ids"] == first["token_ids"]


def test_a_dash_reads_the_prompt_from_standard_input(
    llm: LLM, tiny_moe: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = ["--json", "--temperature", "0", "--max-tokens", "2"]
    monkeypatch.setattr(sys, "stdin", stdin_of("Wo ist Zürich?\n"))
    assert generate(tiny_moe, "-", *flags) == 0
    monkeypatch.setattr(sys, "stdin", stdin_of("Wo ist Zürich?\n"))
    assert generate(tiny_moe, "-", "--raw", *flags) == 0
    chat, raw = (json.loads(line)["usage"]["prompt_tokens"] for line in capfd.readouterr().out.splitlines())
    [as_chat] = llm.chat([{"role": "user", "content": "Wo ist Zürich?"}], PARAMS)
    [as_text] = llm.generate("Wo ist Zürich?\n", PARAMS)
    assert (chat, raw) == (len(as_chat.prompt_token_ids), len(as_text.prompt_token_ids))


def test_progress_is_shown_to_who_watches(
    tiny_moe: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lfm2serve.terminal.is_watched", lambda stream: True)
    assert generate(tiny_moe, "Once", "--temperature", "0", "--max-tokens", "1") == 0
    assert "Loading weights" in (err := capfd.readouterr().err) and "3.5 MB of 3.5 MB" in err


def test_verbose_says_what_is_done(tiny_moe: Path) -> None:
    flags = ["-v", "--temperature", "0", "--max-tokens", "1", *SMALL]
    with started("generate", str(tiny_moe), "Once", *flags) as process:
        out, err = process.communicate()
    assert process.returncode == 0 and b"page pool" in err and b"page pool" not in out


# ---- errors ----


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["generate", "MODEL"], 2, "Missing argument 'PROMPT'"),
        (["sing", "MODEL"], 2, "No such command 'sing'"),
        (["generate", "MODEL", "hi", "--loud"], 2, "No such option: --loud"),
        (["generate", "MODEL", "hi", "--device", "tpu"], 2, "'tpu' is not one of 'auto', 'cpu', 'cuda'"),
        (["generate", "MODEL", "hi", "--device", "cuda"], 2, "device cuda"),
        (["info", "MODEL", "--device", "cuda"], 2, "device cuda"),
        (["generate", "MODEL", "hi", "--temperature", "-1"], 2, "temperature=-1.0"),
        (["generate", "MODEL", "hi", "--top-k", "much"], 2, "--top-k"),
        (["generate", "MODEL", "hi", "--kv-pages", "0"], 2, "kv_pages=0"),
        (["generate", "MODEL", "hi", "--context", "64", "--max-tokens", "64"], 2, "the context is 64 tokens"),
        (["generate", "MODEL", "hi", "--memory-limit-gib", "0.001"], 2, "--memory-limit-gib"),
        (["generate", "MODEL", "hi", "--raw", "--system", "Be brief."], 2, "--system"),
        (["generate", "MODEL", "bad \udcff bytes"], 2, "isn't valid UTF-8"),
        (["generate", "no-such-model", "hi"], 2, "no-such-model"),
        (["chat", "no-such-model"], 2, "no-such-model"),
        (["info", "no-such-model"], 2, "no-such-model"),
        (["serve", "no-such-model", "--port", "0"], 2, "no-such-model"),
        (["serve", "MODEL", "--port", "70000"], 2, "--port"),
        (["serve", "MODEL", "--host", "203.0.113.1"], 1, "203.0.113.1"),
    ],
)
def test_an_error_is_one_line_and_its_exit_code(
    arguments: list[str],
    code: int,
    message: str,
    tiny_moe: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kernels_numba.cuda.driver.device_count", lambda: 0)
    assert run([str(tiny_moe) if argument == "MODEL" else argument for argument in arguments]) == code
    out, err = capfd.readouterr()
    assert out == "" and err.count("\n") == 1
    assert err.startswith("lfm2serve: error: ") and message in err


def test_bytes_that_are_no_text_are_refused(
    tiny_moe: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", stdin_of(b"\xff\xfe"))
    assert generate(tiny_moe, "-") == 2
    assert "isn't valid UTF-8" in capfd.readouterr().err


def test_a_bug_is_one_line_too(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*arguments: object, **options: object) -> None:
        raise ZeroDivisionError("oops")

    monkeypatch.setattr("lfm2serve.describe.describe", broken)
    assert run(["info", "demo"]) == 1
    assert capfd.readouterr().err == "lfm2serve: error: internal error: ZeroDivisionError: oops (-v shows where)\n"


def test_a_reader_that_leaves_ends_it_quietly(tiny_moe: Path) -> None:
    with started("generate", str(tiny_moe), "Once", *ENDLESS) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.read(1)
        process.stdout.close()
        assert (process.stderr.read(), process.wait()) == (b"", 1)


def test_ctrl_c_ends_it_with_130(tiny_moe: Path) -> None:
    with started("generate", str(tiny_moe), "Once", *ENDLESS) as process:
        assert process.stdout is not None
        process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate()
        assert (process.returncode, err) == (130, b"")


# ---- help and info ----


def test_help_lists_every_option_of_the_library(capfd: pytest.CaptureFixture[str]) -> None:
    assert {field.name for group in (EngineOptions, SamplingFlags) for field in fields(group)} == set(HELP)
    assert run(["generate", "--help"]) == 0
    out = capfd.readouterr().out
    assert all("--" + name.replace("_", "-") in out for name in HELP)


def test_flags_reach_the_engine(tiny_moe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[EngineOptions] = []

    def describe(model: str, options: EngineOptions, **found: bool) -> str:
        seen.append(options)
        return model

    monkeypatch.setattr("lfm2serve.describe.describe", describe)
    flags = (
        "--kv fixed --context 700 --kv-pages 9 --prompt-chunk 32 --max-gap-ms 7.5 --default-max-tokens 5 --threads 1"
    )
    assert run(["info", str(tiny_moe), *flags.split(), "--dtype", "float32", "--no-drafts"]) == 0
    assert run(["info", str(tiny_moe)]) == 0
    assert seen == [
        EngineOptions(
            kv="fixed",
            context=700,
            kv_pages=9,
            prompt_chunk=32,
            max_gap_ms=7.5,
            default_max_tokens=5,
            threads=1,
            dtype="float32",
            drafts=False,
        ),
        EngineOptions(),
    ]


def test_without_a_command_help_is_shown(capfd: pytest.CaptureFixture[str]) -> None:
    assert run([]) == 2
    out, err = capfd.readouterr()
    assert "generate" in out + err and "error" not in out + err


def test_info_reads_no_weights(
    tiny_moe: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(Checkpoint, "fill")
    assert run(["info", str(tiny_moe), "--json"]) == 0
    facts = json.loads(capfd.readouterr().out)
    assert facts["config"]["num_experts"] == 6 and facts["parameters"] == 1_743_872
    assert facts["weight_bytes"] == facts["memory"]["weights"] and facts["kv_bytes_per_token"] == 1024
    assert facts["chat_template"] is True and facts["refused"] is None
    assert run(["info", str(tiny_moe)]) == 0
    out = capfd.readouterr().out
    assert "1,743,872 parameters" in out and "2 of 6 for a token" in out and "page pool" in out


def test_info_says_what_does_not_fit(tiny_dense: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["info", str(tiny_dense), "--memory-limit-gib", "0.001"]) == 0
    assert "doesn't fit: --memory-limit-gib" in capfd.readouterr().out


def test_the_module_is_the_command() -> None:
    with started("--version") as process:
        assert process.communicate() == (f"lfm2serve {__version__}\n".encode(), b"")


# ---- chat ----


def talk(
    llm: LLM, lines: str, monkeypatch: pytest.MonkeyPatch, params: SamplingParams = PARAMS, system: str | None = None
) -> list[list[dict[str, Any]]]:
    """Run the chat on piped lines; returns the conversation of every reply that was asked for."""
    asked: list[list[dict[str, Any]]] = []
    stream = llm.stream

    def spy(messages: Any, *arguments: Any) -> Any:
        asked.append(messages)
        return stream(messages, *arguments)

    monkeypatch.setattr(llm, "stream", spy)
    monkeypatch.setattr(sys, "stdin", stdin_of(lines))
    ChatLoop(llm, params, system).run()
    assert llm._open_runtime().engine.drain(timeout=30)
    assert llm.census().clean
    return asked


def test_chat_remembers_the_conversation(
    llm: LLM, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = talk(llm, "I am Ada.\n\nWho am I?\n", monkeypatch, system="Be brief.")
    [first] = llm.chat(asked[0], PARAMS)
    reply = {"role": "assistant", "content": first.outputs[0].text}
    assert asked[0] == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "I am Ada."}]
    assert asked[1] == [*asked[0], reply, {"role": "user", "content": "Who am I?"}]
    [second] = llm.chat(asked[1], PARAMS)
    assert capfd.readouterr() == (f"{first.outputs[0].text}\n{second.outputs[0].text}\n", "")


def test_chat_commands(llm: LLM, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    lines = "one\n/clear\ntwo\n/system Be kind.\nthree\n/system\nfour\n/etc is a folder\n/help\n/exit\nfive\n"
    asked = talk(llm, lines, monkeypatch)
    assert [[m["content"] for m in messages if m["role"] != "assistant"] for messages in asked] == [
        ["one"],
        ["two"],
        ["Be kind.", "two", "three"],
        ["two", "three", "four"],
        ["two", "three", "four", "/etc is a folder"],
    ]
    assert "/clear" in capfd.readouterr().out


def test_a_turn_that_fails_is_taken_back(
    llm: LLM, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = talk(llm, f"one\n{'word ' * 4200}\ntwo\n", monkeypatch)
    assert [m["content"] for m in asked[2] if m["role"] == "user"] == ["one", "two"]
    err = capfd.readouterr().err
    assert "context is 4096 tokens" in err and "/clear" in err


def test_ctrl_c_stops_the_reply_and_not_the_chat(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupting(io.StringIO):
        """Standard output that sends Ctrl-C once some of the reply has been written."""

        pressed = False

        def write(self, text: str) -> int:
            if len(self.getvalue()) > 5 and not self.pressed:
                self.pressed = True
                os.kill(os.getpid(), signal.SIGINT)
            return super().write(text)

    screen = Interrupting()
    monkeypatch.setattr(sys, "stdout", screen)
    asked = talk(llm, "one\ntwo\n", monkeypatch, PARAMS.with_(max_tokens=1500))
    first = asked[1][1]["content"]
    assert screen.pressed and len(first) < len(screen.getvalue()) / 2
    assert screen.getvalue().startswith(first) and len(asked) == 2


# ---- serve ----


def test_serve_answers_until_it_is_told_to_end(tiny_moe: Path) -> None:
    with started("serve", str(tiny_moe), "--port", "0", "--served-model-name", "tiny", *SMALL) as process:
        assert process.stderr is not None
        url = next(line.split()[-1] for line in process.stderr if b" on http://127.0.0.1:" in line).decode()
        with urllib.request.urlopen(f"{url}/models") as response:
            assert [model["id"] for model in json.load(response)["data"]] == ["tiny"]
        process.terminate()
        out, err = process.communicate()
        assert (process.returncode, out) == (0, b"") and b"Traceback" not in err
