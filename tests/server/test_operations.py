"""What an operator relies on: keys, limits, health, request ids, the log, cross-origin rules, a dashboard."""

from __future__ import annotations

import hmac
import json
import logging
import re
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from lfm2serve import cli
from lfm2serve.errors import InvalidRequest
from lfm2serve.sampling import SamplingParams
from lfm2serve.server.logs import JsonFormatter, TextFormatter
from lfm2serve.server.options import ServerOptions, read_keys
from lfm2serve.server.places import Places

from .conftest import Live, serving, sse, wait_for
from .fake import Step, says
from .test_errors import problem

KEYS = ("first-key", "second-key")
GRAFANA = Path(__file__).parents[2] / "examples" / "grafana.json"


def silent(prompt: list[int], params: SamplingParams, choice: int) -> Iterator[Step]:
    """A reply that has one token and then keeps its reader waiting."""
    yield [70]
    yield 30.0


@pytest.fixture
def guarded(fake: Live) -> Iterator[Live]:
    with serving(fake.runtime, options=ServerOptions(api_keys=KEYS, cors_origins=("https://a.example",))) as live:
        yield live


# ---- keys ----


def test_without_a_key_nothing_but_health_and_the_page_answers(guarded: Live) -> None:
    for method, path in (
        ("GET", "/v1/models"), ("GET", "/metrics"), ("GET", "/nothing"), ("POST", "/v1/chat/completions"),
        ("DELETE", "/v1/prompt_cache"), ("POST", "/tokenize"),
    ):  # fmt: skip
        answer = guarded.http.request(method, path)
        error = problem(answer, 401)
        assert error["type"] == "invalid_request_error" and "API key" in error["message"]
        assert answer.headers["www-authenticate"] == "Bearer"
    assert guarded.http.get("/health").status_code == 200


@pytest.mark.parametrize("key", ["third-key", "first-ke", "first-keyy", "FIRST-KEY", "first-key,second-key", "clé"])
def test_a_wrong_key(guarded: Live, key: str) -> None:
    for headers in ({"authorization": b"Bearer " + key.encode()}, {"x-api-key": key.encode()}):
        assert problem(guarded.http.get("/v1/models", headers=headers), 401)["code"] == "invalid_api_key"
    assert guarded.http.get("/v1/models", headers={"authorization": "Basic first-key"}).status_code == 401
    with pytest.raises(openai.AuthenticationError):
        guarded.client.models.list()


def test_each_key_opens(guarded: Live) -> None:
    for key in KEYS:
        for headers in ({"authorization": f"Bearer {key}"}, {"authorization": f"bearer  {key}"}, {"x-api-key": key}):
            assert guarded.http.get("/v1/models", headers=headers).status_code == 200
        assert guarded.client.with_options(api_key=key).models.list().data


def test_anthropics_clients_get_their_own_error(guarded: Live) -> None:
    body = guarded.http.post("/v1/messages").json()
    assert body["type"] == "error" and body["error"]["type"] == "authentication_error"


def test_every_key_is_compared_whole(guarded: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, int]] = []
    compare = hmac.compare_digest

    def watch(a: bytes, b: bytes) -> bool:
        seen.append((len(a), len(b)))
        return compare(a, b)

    monkeypatch.setattr(hmac, "compare_digest", watch)
    for key in (*KEYS, "x"):
        guarded.http.get("/v1/models", headers={"x-api-key": key})
    assert seen == [(32, 32)] * 2 * 3


def test_keys_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# for the lab\nabc\n\n  def  \n")
    assert read_keys(file) == ("abc", "def")
    file.write_text("# nothing\n")
    for path, why in ((file, "no key"), (tmp_path / "none", "No such file"), (tmp_path, "directory")):
        with pytest.raises(InvalidRequest, match=why):
            read_keys(path)


@pytest.mark.parametrize(
    "arguments",
    [["--api-key", "a b"], ["--api-key", ""], ["--api-key-file", "/no/such/file"], ["--max-queue", "-1"],
     ["--request-timeout", "0"], ["--max-body-mib", "0"], ["--cors-origin", "example.org"], ["--log-format", "xml"],
     ["--cors-origin", "https://example.org/"], ["--stuck-after", "-2"]],
)  # fmt: skip
def test_options_that_make_no_sense(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["serve", "demo", *arguments]) == 2
    said = capsys.readouterr().err
    assert said.startswith("lfm2serve: error: ") and said.count("\n") == 1


# ---- limits ----


def test_a_full_queue_says_when_to_come_back(fake: Live) -> None:
    slots = fake.runtime.plan.slots
    fake.engine.script = silent
    with serving(fake.runtime, options=ServerOptions(max_queue=2)) as live:
        body = {"prompt": "a", "n": slots + 1, "stream": True}
        with live.http.stream("POST", "/v1/completions", json=body) as answer:
            lines = answer.iter_lines()  # an iterator that is dropped closes its connection
            next(lines)
            with live.http.stream("POST", "/v1/completions", json=body | {"n": 1}) as last:
                wait_for(lambda: len(fake.engine.submitted) == slots + 2)
                refused = live.post("/v1/completions", prompt="a")
                assert problem(refused, 429)["code"] == "queue_full"
                assert 1 <= int(refused.headers["retry-after"]) <= 60
                with pytest.raises(openai.RateLimitError):
                    live.chat(stream=True)
                assert last.status_code == 200 and len(fake.engine.submitted) == slots + 2
                assert live.http.get("/health").status_code == 200
        wait_for(lambda: fake.engine.census().clean)
        fake.engine.script = says("fine", fake.runtime.tokenizer)
        wait_for(lambda: live.post("/v1/completions", prompt="a").status_code == 200)
        error = problem(live.post("/v1/completions", prompt="a", n=slots + 3))
        assert (error["param"], error["type"]) == ("n", "invalid_request_error")


def test_a_refused_request_takes_no_place(fake: Live) -> None:
    fake.engine.refuse_after = 0
    places: Places = fake.app.state.server.places
    for _ in range(3):
        assert fake.post("/v1/completions", prompt="a").status_code == 503
        assert fake.post("/v1/completions", prompt="a", max_tokens=-1).status_code == 400
    assert places.taken == 0


def test_a_reply_over_its_time(fake: Live) -> None:
    fake.engine.script = silent
    with serving(fake.runtime, options=ServerOptions(request_timeout_s=0.3)) as live:
        answer = live.post("/v1/completions", prompt="a", n=3)
        assert problem(answer, 504)["code"] == "request_timeout"
        assert answer.headers["x-should-retry"] == "false"
        events = sse(live.post("/v1/chat/completions", messages=[{"role": "user", "content": "a"}], stream=True).text)
        assert "choices" in json.loads(events[0]) and events[-1] == "[DONE]"
        assert json.loads(events[-2])["error"]["code"] == "request_timeout"
        wait_for(lambda: sorted(fake.engine.cancels) == [1, 2, 3, 4])
        wait_for(lambda: fake.engine.census().clean)
        fake.engine.script = says("quick", fake.runtime.tokenizer)
        assert live.complete(max_tokens=20).choices[0].text == "quick"


def test_a_body_that_never_comes(fake: Live) -> None:
    with serving(fake.runtime, options=ServerOptions(request_timeout_s=0.2)) as live:
        host, port = live.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=10) as connection:
            connection.sendall(
                b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
                b"Content-Length: 100\r\n\r\n{"
            )
            assert connection.recv(100).startswith(b"HTTP/1.1 504")


# ---- health ----


def test_health_fails_while_the_engine_is_stuck(fake: Live) -> None:
    fake.engine.turn_started = time.monotonic() - 100
    assert fake.http.get("/health").status_code == 200, "long, and within --stuck-after"
    fake.engine.turn_started = time.monotonic() - 150
    assert "stuck" in problem(fake.http.get("/health"), 503)["message"]
    fake.engine.turn_started = None
    assert fake.http.get("/health").status_code == 200


def test_a_turn_of_the_real_engine_that_hangs(real: Live) -> None:
    turn, go_on = real.engine._turn, threading.Event()
    with serving(real.runtime, options=ServerOptions(stuck_after_s=0.2)) as live:
        assert live.http.get("/health").status_code == 200, "an idle engine isn't stuck"

        def hang() -> None:
            go_on.wait(30)
            turn()

        real.engine._turn = hang
        asking = threading.Thread(target=live.complete)
        asking.start()
        try:
            wait_for(lambda: live.http.get("/health").status_code == 503)
        finally:
            real.engine._turn = turn
            go_on.set()
            asking.join()
        wait_for(lambda: live.http.get("/health").status_code == 200)


# ---- request ids and the log ----


def test_request_ids_come_back(guarded: Live) -> None:
    key = {"x-api-key": KEYS[0]}
    for method, path, headers in (
        ("GET", "/health", {}), ("GET", "/v1/models", {}), ("GET", "/nothing", key), ("POST", "/v1/completions", key),
    ):  # fmt: skip
        given = guarded.http.request(method, path, headers={"x-request-id": "job:7/a", **headers})
        assert given.headers["x-request-id"] == "job:7/a"
        made = guarded.http.request(method, path, headers=headers).headers["x-request-id"]
        assert re.fullmatch("[0-9a-f]{32}", made)
    for forged in ('a"b', "a b", "x" * 129, "é".encode()):
        answer = guarded.http.get("/health", headers={"x-request-id": forged})
        assert re.fullmatch("[0-9a-f]{32}", answer.headers["x-request-id"])


def test_ids_of_streams_and_of_bugs(fake: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    headers = {"x-request-id": "s-1"}
    body: dict[str, Any] = {"prompt": "a", "stream": True}
    assert fake.http.post("/v1/completions", json=body, headers=headers).headers["x-request-id"] == "s-1"
    monkeypatch.setattr(fake.engine, "submit", lambda *args, **how: 1 / 0)
    for _ in range(3):  # on one connection
        broken = fake.http.post("/v1/completions", json=body, headers=headers)
        assert problem(broken, 500) and broken.headers["x-request-id"] == "s-1"


def access_lines(caplog: pytest.LogCaptureFixture, request_id: str) -> list[dict[str, Any]]:
    lines = [json.loads(JsonFormatter().format(r)) for r in caplog.records if r.name == "lfm2serve.access"]
    return [line for line in lines if line.get("request_id") == request_id]


def test_the_log_has_a_line_for_each_request(fake: Live, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "lfm2serve")
    fake.engine.script = says("one two", fake.runtime.tokenizer)
    fake.engine.served["cached_tokens"] = 2
    ours = {"x-request-id": "abc"}
    prompt = fake.http.post("/tokenize", json={"prompt": "Hello"}, headers=ours).json()["count"]
    for body in ({"prompt": "Hello", "n": 2}, {"prompt": "Hello", "stream": True}, {"prompt": []}):
        fake.http.post("/v1/completions", json=body, headers=ours)
    fake.http.get("/health", headers=ours)
    wait_for(lambda: len(access_lines(caplog, "abc")) == 4)
    lines = access_lines(caplog, "abc")  # a line comes after its response: not always in the order of the requests
    lines.sort(key=lambda line: (line["status"], line["path"] != "/tokenize", line.get("stream")))
    tokenised, whole, stream, refused = lines
    assert (tokenised["path"], tokenised["status"], tokenised["method"]) == ("/tokenize", 200, "POST")
    assert whole["replies"] == 2 and whole["finish_reasons"] == ["stop", "stop"] and whole["cached_tokens"] == 4
    assert whole["prompt_tokens"] == 2 * prompt and whole["completion_tokens"] >= 6
    assert whole["duration_ms"] >= whole["first_token_ms"] >= whole["queue_ms"] >= 0
    assert (whole["stream"], stream["stream"], stream["status"]) == (False, True, 200)
    assert refused["status"] == 400 and refused["error"] == "InvalidRequest"
    assert {"time", "level", "logger", "message"} <= set(refused) and refused["level"] == "info"


@pytest.mark.parametrize("allowed", [False, True])
def test_prompts_are_logged_only_if_asked(fake: Live, caplog: pytest.LogCaptureFixture, allowed: bool) -> None:
    caplog.set_level("DEBUG", "lfm2serve")
    fake.engine.script = says("the answer", fake.runtime.tokenizer)
    with serving(fake.runtime, options=ServerOptions(log_prompts=allowed)) as live:
        live.post("/v1/completions", prompt="the question")
        live.chat("the chat")
    written = "\n".join(formatter().format(r) for r in caplog.records for formatter in (JsonFormatter, TextFormatter))
    for text in ("the question", "the answer", "the chat"):
        assert (text in written) == allowed


def test_one_line_a_record() -> None:
    try:
        raise ValueError("several\nlines")
    except ValueError:
        record = logging.LogRecord("a", logging.ERROR, "f.py", 1, "it %s\nthere", ("broke",), sys.exc_info())
    line = JsonFormatter().format(record)
    assert "\n" not in line
    parsed = json.loads(line)
    assert parsed["message"] == "it broke\nthere" and "ValueError: several\nlines" in parsed["exception"]
    record = logging.LogRecord("a", logging.INFO, "f.py", 1, "request", (), None)
    record.fields, record.request_id = {"path": "/a b", "status": 200}, "r-1"
    assert TextFormatter().format(record) == 'INFO a: request path="/a b" status=200 request_id=r-1'


# ---- pages of other origins ----


def test_no_other_origin_may_call_by_default(fake: Live) -> None:
    headers = {"origin": "https://a.example", "access-control-request-method": "POST"}
    asked = fake.http.options("/v1/completions", headers=headers)
    told = fake.http.get("/health", headers=headers)
    for answer in (asked, told):
        assert not [name for name in answer.headers if name.startswith("access-control")]
    assert asked.status_code == 405


def test_an_origin_that_may(guarded: Live) -> None:
    asks = {"access-control-request-method": "POST", "access-control-request-headers": "authorization, content-type"}
    for origin, status in (("https://a.example", 200), ("https://b.example", 400), ("null", 400)):
        asked = guarded.http.options("/v1/completions", headers={"origin": origin, **asks})
        assert asked.status_code == status, "the browser's question carries no key"
        allowed = guarded.http.get("/v1/models", headers={"origin": origin, "x-api-key": KEYS[0]})
        for answer in (asked, allowed):
            assert (answer.headers.get("access-control-allow-origin") == origin) == (status == 200)
    refused = guarded.http.get("/v1/models", headers={"origin": "https://a.example"})
    assert refused.status_code == 401 and refused.headers["access-control-allow-origin"] == "https://a.example"


# ---- metrics ----


def test_responses_are_counted_by_status(fake: Live) -> None:
    def count(status: int) -> float:
        found = [
            sample.value
            for family in text_string_to_metric_families(fake.http.get("/metrics").text)
            for sample in family.samples
            if sample.name == "lfm2serve:http_responses_total" and sample.labels["status"] == str(status)
        ]
        return sum(found)

    before = count(404)
    fake.http.get("/nothing")
    assert count(404) == before + 1


def test_the_dashboard_names_only_metrics_that_exist(real: Live) -> None:
    real.chat()
    real.http.get("/nothing")
    families = list(text_string_to_metric_families(real.http.get("/metrics").text))
    samples = {sample.name for family in families for sample in family.samples}
    dashboard = json.loads(GRAFANA.read_text())
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", [])]
    named = [name for query in queries for name in re.findall(r"(?:vllm|lfm2serve|process)[:_][a-z0-9_]+", query)]
    assert len(queries) >= 20 and set(named) <= samples
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(set(ids)) == len(ids)
    shown = {re.sub("_(bucket|sum|count|total)$", "", name) for name in named}
    names = {family.name for family in families if not family.name.endswith("_created")}
    ours = {name for name in names if name.startswith(("vllm:", "lfm2serve:"))}
    assert sorted(ours - shown) == [], "every metric has a place on the dashboard"
