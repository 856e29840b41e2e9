"""The page at / and what feeds it. `in_chromium.py` drives it in a browser; here is what holds without one."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import signal
import tomllib
from collections.abc import Iterator
from html.parser import HTMLParser
from typing import Any

import httpx
import pytest

from lfm2serve.memory.prompt_cache import Mark
from lfm2serve.sampling import SamplingParams
from lfm2serve.server.options import ServerOptions

from .conftest import Live, serving, wait_for
from .fake import Step
from .test_run import ROOT, ended, process


class Elements(HTMLParser):
    """Every element with its attributes, and the text inside."""

    VOID = ("meta", "link", "input", "br")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str], list[str]]] = []
        self._open: list[tuple[str, dict[str, str], list[str]]] = []
        self.feed(text)
        self.close()
        assert self._open == [], "every element is closed"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        element = (tag, {name: value or "" for name, value in attrs}, [])
        inside = [name for name, _, _ in self._open]
        element[1]["in"] = " ".join(inside)
        self.found.append(element)
        if tag not in self.VOID:
            self._open.append(element)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop()[0] == tag

    def handle_data(self, data: str) -> None:
        for _, _, texts in self._open:
            texts.append(data)

    def of(self, *tags: str) -> list[tuple[dict[str, str], str]]:
        return [(attrs, "".join(texts).strip()) for tag, attrs, texts in self.found if tag in tags]


@pytest.fixture
def page(fake: Live) -> httpx.Response:
    answer = fake.http.get("/")
    assert answer.status_code == 200 and answer.headers["content-type"] == "text/html; charset=utf-8"
    return answer


def test_it_needs_nothing_from_elsewhere(page: httpx.Response) -> None:
    elements = Elements(page.text)
    links = [attrs[name] for _, attrs, _ in elements.found for name in ("src", "href", "action") if name in attrs]
    assert links == ["data:,"] and "http" not in page.text.replace("http-equiv", "") and "url(" not in page.text
    assert len(page.content) < 40_000


def test_only_its_own_script_runs(page: httpx.Response) -> None:
    policy = dict(part.split(" ", 1) for part in page.headers["content-security-policy"].split("; "))
    assert policy["default-src"] == "'none'" and policy["connect-src"] == "'self'"
    elements = Elements(page.text)
    for tag in ("script", "style"):
        [text] = re.findall(f"<{tag}>(.*?)</{tag}>", page.text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert policy[f"{tag}-src"] == f"'sha256-{digest}'"
    names = {name for _, attrs, _ in elements.found for name in attrs}
    assert not {name for name in names if name.startswith("on") or name == "style"}, "the policy forbids them"
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(", page.text)


def test_everything_has_a_name(page: httpx.Response) -> None:
    elements = Elements(page.text)
    [(html, _)] = elements.of("html")
    assert html["lang"] == "en" and len(elements.of("h1")) == 1 and len(elements.of("main")) == 1
    assert any("width=device-width" in attrs.get("content", "") for attrs, _ in elements.of("meta"))
    for attrs, text in elements.of("button"):
        assert text and attrs["type"] in ("button", "submit")
    for attrs, _ in elements.of("input", "textarea", "select"):
        assert "aria-label" in attrs or "label" in attrs["in"].split(), attrs
    for _, attrs, _ in elements.found:
        if attrs.get("role") in ("img", "log", "group") or attrs.get("tabindex"):
            assert attrs["aria-label"], attrs
    ids = [attrs["id"] for _, attrs, _ in elements.found if "id" in attrs]
    assert len(set(ids)) == len(ids)
    used = set(re.findall(r'\$\("([\w-]+)"\)', page.text))
    assert used <= set(ids), "the script finds what it looks for"


def test_it_asks_for_paths_that_exist(page: httpx.Response, fake: Live) -> None:
    asked = set(re.findall(r'fetch\("([^"]+)"', page.text))
    routes = {route.path for route in fake.app.routes}
    assert asked == {"v1/chat/completions", "v1/memory/events"} and {"/" + path for path in asked} <= routes


def test_it_has_a_colour_for_every_mark(page: httpx.Response) -> None:
    [names] = re.findall(r"const MARKS = (\[.*?\]);", page.text)
    assert json.loads(names) == [str(mark) for mark in Mark]
    assert all(f"--{mark}:" in page.text for mark in Mark)


def test_the_package_brings_it_along() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert "server/page.html" in project["tool"]["setuptools"]["package-data"]["lfm2serve"]


def test_no_page(fake: Live) -> None:
    with serving(fake.runtime, options=ServerOptions(page=False)) as live:
        assert live.http.get("/").status_code == 404
        assert live.http.get("/v1/memory").status_code == 200


def test_the_page_is_open_and_the_memory_is_not(fake: Live) -> None:
    with serving(fake.runtime, options=ServerOptions(api_keys=("key",))) as live:
        assert live.http.get("/").status_code == 200
        for path in ("/v1/memory", "/v1/memory/events"):
            assert live.http.get(path).status_code == 401
        assert live.http.get("/v1/memory", headers={"authorization": "Bearer key"}).status_code == 200


def views(live: Live) -> Iterator[dict[str, Any]]:
    with live.http.stream("GET", "/v1/memory/events") as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        for line in answer.iter_lines():
            if line:
                yield json.loads(line.removeprefix("data: "))


def test_the_view_follows_the_streams(fake: Live) -> None:
    def silent(prompt: list[int], params: SamplingParams, choice: int) -> Iterator[Step]:
        yield 30.0

    fake.engine.script = silent
    watching = views(fake)
    assert next(watching)["pages"] | {"bytes": 0} == {
        "rows": 512, "bytes": 0, "total": 100, "free": 100, "leased": 0, "promised": 0, "streams": {},
    }  # fmt: skip
    with fake.http.stream("POST", "/v1/completions", json={"prompt": "a", "n": 3, "stream": True}):
        wait_for(lambda: next(watching)["pages"]["streams"] == {"1": 1, "2": 1, "3": 1})
        assert next(watching)["streams"]["running"] == 3
    wait_for(lambda: next(watching)["pages"]["leased"] == 0)
    watching.close()


def test_asking_for_the_events_head_only(fake: Live) -> None:
    for _ in range(2):  # on one connection
        answer = fake.http.head("/v1/memory/events")
        assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/event-stream")
    assert fake.http.get("/health").status_code == 200


def test_the_view_of_a_real_engine_adds_up(real: Live) -> None:
    before = real.http.get("/v1/memory").json()
    real.client.delete("/prompt_cache", cast_to=object)
    real.chat("Who are you?", max_tokens=4)
    real.chat("Who are you?", max_tokens=4)
    assert real.engine.drain(60), "what comes back of the replies is known"
    now = real.http.get("/v1/memory").json()
    plan = now["plan"]
    assert now["pages"]["total"] == plan["pages"] and now["pages"]["bytes"] == plan["page_bytes"]
    assert now["kept"]["total"] * now["kept"]["page_bytes"] == plan["prompt_cache"]
    states = now["kept"]["states"]
    assert states and {mark for mark, _, _ in states} <= {str(mark) for mark in Mark}
    assert sum(pages for _, _, pages in states) == now["kept"]["held"] <= now["kept"]["total"]
    hits = [sum(view["cache"]["hits"].values()) for view in (before, now)]
    assert hits[1] > hits[0] and now["time"] > before["time"]
    assert now["tokens"]["generated"] - before["tokens"]["generated"] == 8
    assert now["arena"]["mapped"] == now["arena"]["pieces"], "a CPU's pool is one allocation"


def test_watchers_do_not_hold_up_the_end() -> None:
    with (
        process(words=1, pause=0.0, drain_s=30) as (server, url),
        httpx.stream("GET", url + "/v1/memory/events", timeout=60) as answer,
    ):
        lines = answer.iter_lines()
        assert json.loads(next(lines).removeprefix("data: "))["model"] == "fake-model"
        server.send_signal(signal.SIGTERM)
        rest = list(lines)  # ends by itself, and is no broken connection
        assert len(rest) < 10
        assert "closed" in ended(server)
