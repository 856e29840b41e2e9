"""Drives the page at / in headless Chromium, as a user would, and leaves screenshots.

python -m tests.server.in_chromium DIRECTORY: needs `chromium` on the path. Its exit code is 0 when all went well.
"""

from __future__ import annotations

import base64
import faulthandler
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

FIVE_AT_ONCE = """
// a sixth would wait: Chromium opens six connections to one server, and the live view has one
globalThis.done = false;
const load = (i) => fetch("v1/completions", {
  method: "POST", headers: {"content-type": "application/json"},
  body: JSON.stringify({prompt: "Once ".repeat(100 * (i + 1)), max_tokens: 2500, ignore_eos: true, draft: false}),
});
Promise.all([0, 1, 2, 3, 4].map(load)).then(() => globalThis.done = true);
0
"""
DESKTOP = (1280, 800, False)
PHONE = (390, 844, True)


class Browser:
    """One tab, by Chromium's debugging protocol over a pair of pipes: messages end with a zero byte."""

    def __init__(self, url: str, profile: str) -> None:
        to_it, self._write = os.pipe()
        self._read, from_it = os.pipe()

        def as_3_and_4() -> None:
            a, b = os.dup(to_it), os.dup(from_it)
            os.dup2(a, 3)
            os.dup2(b, 4)

        program = shutil.which("chromium") or "chromium"
        flags = [
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--remote-debugging-pipe",
            f"--user-data-dir={profile}",
        ]
        self._process = subprocess.Popen(
            [program, *flags, "about:blank"], preexec_fn=as_3_and_4, close_fds=False, stderr=subprocess.DEVNULL
        )
        os.close(to_it)
        os.close(from_it)
        self._rest = b""
        self._number = 0
        self._session: str | None = None
        self.complaints: list[str] = []
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.send(f"{domain}.enable")
        self.send("Page.navigate", url=url)

    def send(self, method: str, **params: Any) -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                result: dict[str, Any] = answer["result"]
                return result
            if answer.get("method") in ("Runtime.exceptionThrown", "Log.entryAdded"):
                self.complaints.append(json.dumps(answer["params"]))

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            piece = os.read(self._read, 1 << 16)
            assert piece, "chromium has ended"
            self._rest += piece
        message, self._rest = self._rest.split(b"\0", 1)
        answer: dict[str, Any] = json.loads(message)
        return answer

    def run(self, script: str) -> Any:
        """The value of a JavaScript expression."""
        result = self.send("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def wait(self, condition: str, seconds: float = 30) -> None:
        end = time.monotonic() + seconds
        while not self.run(condition):
            assert time.monotonic() < end, f"never: {condition}\n{self.run('document.body.innerText')}"
            time.sleep(0.05)

    def key(self, key: str, **more: Any) -> None:
        codes = {"Enter": 13, "Escape": 27, "Tab": 9}
        text = {"text": "\r"} if key == "Enter" else {}
        event = {"key": key, "code": key, "windowsVirtualKeyCode": codes[key], **more}
        self.send("Input.dispatchKeyEvent", type="keyDown", **event, **text)
        self.send("Input.dispatchKeyEvent", type="keyUp", **event)

    def type(self, text: str) -> None:
        self.send("Input.insertText", text=text)

    def size(self, width: int, height: int, mobile: bool) -> None:
        self.send(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, mobile=mobile,
            deviceScaleFactor=2 if mobile else 1,
        )  # fmt: skip

    def colours(self, scheme: str) -> None:
        self.send("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def picture(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.send("Page.captureScreenshot", format="png")["data"]))

    def close(self) -> None:
        self._process.terminate()
        self._process.wait()
        os.close(self._write)
        os.close(self._read)


@contextmanager
def demo(*flags: str) -> Iterator[str]:
    command = [sys.executable, "-m", "lfm2serve", "serve", "demo", "--port", "0", *flags]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        try:
            assert server.stderr is not None
            yield next(line.split()[-1] for line in server.stderr if " on http://" in line).removesuffix("v1")
        finally:
            server.terminate()


def said(browser: Browser, turn: int) -> str:
    text: str = browser.run(f"document.querySelectorAll('.turn')[{turn}].querySelector('.said').textContent")
    return text


def idle(browser: Browser) -> None:
    browser.wait("!running && !document.querySelector('.busy')")


def a_visit(browser: Browser, pictures: Path) -> None:
    """Chat, stop, edit and resend, settings, the memory, by keyboard wherever a keyboard can."""
    browser.size(*DESKTOP)
    browser.wait("document.readyState === 'complete' && $('state').textContent === 'live'")
    assert browser.run("document.activeElement.id") == "text"
    for question, answer in (("What is the capital of Peru?", "Lima"), ("And of Japan?", "Tokyo")):
        browser.type(question)
        browser.key("Enter")
        idle(browser)
        turns = browser.run("turns.length")
        assert answer in said(browser, turns - 1), said(browser, turns - 1)
    browser.wait("$('events').children.length > 1 && $('kept').children.length > 1")
    assert "tokens resumed" in browser.run("document.querySelectorAll('.foot')[3].textContent")
    browser.picture(pictures / "desktop-light.png")

    browser.run("document.querySelectorAll('.user .link')[0].click()")
    assert browser.run("document.activeElement.getAttribute('aria-label')") == "Edit message"
    browser.key("Escape")
    assert browser.run("turns.length") == 4 and not browser.run("!!document.querySelector('.edit')")
    browser.run("document.querySelectorAll('.user .link')[0].click(); document.activeElement.select()")
    browser.picture(pictures / "desktop-edit.png")
    browser.type("What is the capital of Italy?")
    browser.key("Enter")
    idle(browser)
    assert browser.run("turns.length") == 2 and "Rome" in said(browser, 1)

    browser.run("$('open-settings').click()")
    browser.picture(pictures / "desktop-settings.png")
    browser.run("form.elements.temperature.value = '2'; form.elements.max_tokens.value = '3000'")
    browser.key("Escape")
    browser.wait("!$('settings').open && JSON.parse(localStorage.lfm2serve).temperature === '2'")
    browser.run("form.elements.seed.value = '5'; document.querySelectorAll('.assistant .link')[0].click()")
    browser.wait("!!running")
    browser.key("Escape")
    idle(browser)
    assert "Stop" not in browser.run("document.querySelector('form.write').innerText")
    browser.wait("$('running').textContent === '0'")

    browser.colours("dark")
    browser.run(FIVE_AT_ONCE)
    browser.wait("$('streams').children.length === 5")
    browser.picture(pictures / "desktop-dark.png")
    browser.size(*PHONE)
    browser.run("document.querySelector('#views [data-view=memory]').click()")
    browser.picture(pictures / "phone-memory-dark.png")
    browser.colours("light")
    browser.picture(pictures / "phone-memory-light.png")
    assert browser.run("[innerWidth, document.documentElement.scrollWidth]") == [390, 390], "nothing sticks out"
    browser.run("document.querySelector('#views [data-view=chat]').click()")
    browser.wait("done", 120)
    browser.run("form.elements.temperature.value = ''; $('new').click()")
    for question in ("What is the capital of Peru?", "How many days are in a week?"):
        browser.type(question)
        browser.key("Enter")
        idle(browser)
    browser.picture(pictures / "phone-light.png")
    browser.colours("dark")
    browser.picture(pictures / "phone-dark.png")
    assert browser.run("[innerWidth, document.documentElement.scrollWidth]") == [390, 390], "nothing sticks out"
    order = []
    browser.run("document.body.focus(); document.activeElement.blur()")
    for _ in range(20):
        browser.key("Tab")
        order.append(browser.run("document.activeElement.id || document.activeElement.tagName"))
    assert {"new", "open-settings", "text"} <= set(order), order


def a_locked_server(browser: Browser, key: str) -> None:
    browser.wait("document.readyState === 'complete' && $('state').textContent.includes('API key')")
    browser.run("$('text').focus()")
    browser.type("Hi")
    browser.key("Enter")
    browser.wait("!!document.querySelector('.error') && !running")
    assert "API key" in browser.run("document.querySelector('.error').textContent")
    browser.run(f"form.elements.key.value = '{key}'; settle(); connect(); 0")
    browser.wait("$('state').textContent === 'live'")
    browser.run("document.querySelector('.assistant .link').click()")
    idle(browser)
    assert said(browser, 1) and browser.run("localStorage.lfm2serve.includes('secret-key')") is False


def main() -> None:
    pictures = Path(sys.argv[1])
    pictures.mkdir(parents=True, exist_ok=True)
    faulthandler.dump_traceback_later(120, exit=True)  # a browser that hangs must not keep anybody waiting
    for flags, visit in (((), "open"), (("--api-key", "secret-key"), "locked")):
        with demo(*flags) as url, tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
            browser = Browser(url, profile)
            try:
                if visit == "open":
                    a_visit(browser, pictures)
                    assert not browser.complaints, browser.complaints
                else:
                    a_locked_server(browser, "secret-key")
            finally:
                browser.close()
    print("the page works; pictures in", pictures)


if __name__ == "__main__":
    main()
