"""A headless Chromium, driven through the pipe of its DevTools protocol: no package and no port is needed for it."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
FLAGS = (
    "--headless", "--remote-debugging-pipe", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu",
    "--disable-background-networking", "--no-first-run",
)  # fmt: skip
PATIENCE = 120.0  # seconds, for one answer: a busy machine may not run Chromium for a while


def find_chromium() -> str | None:
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """One page. ``problems`` are its errors, ``requests`` the addresses it asked for."""

    def __init__(self, executable: str, profile: Path) -> None:
        from_us, self._to_browser = os.pipe()
        self._from_browser, to_us = os.pipe()
        # Chromium reads commands from descriptor 3 and answers on 4.
        command = f'exec "$0" "$@" 3<&{from_us} 4>&{to_us}'
        self._process = subprocess.Popen(
            ["bash", "-c", command, executable, *FLAGS, f"--user-data-dir={profile}", "about:blank"],
            pass_fds=(from_us, to_us),
            stderr=subprocess.DEVNULL,
        )
        os.close(from_us)
        os.close(to_us)
        self._buffer, self._last, self._session = b"", 0, ""
        self.problems: list[str] = []
        self.requests: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Runtime", "Log", "Network", "Page"):
            self.call(f"{domain}.enable")

    def close(self) -> None:
        os.close(self._to_browser)  # Chromium ends when its commands do
        try:
            self._process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._from_browser)

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._last += 1
        message = {"id": self._last, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._to_browser, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next_message()
            if answer.get("id") == self._last:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return answer["result"]

    def _next_message(self) -> dict[str, Any]:
        deadline = time.monotonic() + PATIENCE
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._from_browser], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, f"Chromium has not answered for {PATIENCE:.0f} s"
            read = os.read(self._from_browser, 1 << 20)
            assert read, "Chromium has ended"
            self._buffer += read
        text, self._buffer = self._buffer.split(b"\0", 1)
        message = json.loads(text)
        self._note(message.get("method"), message.get("params", {}))
        return message

    def _note(self, event: str | None, about: dict[str, Any]) -> None:
        if event == "Network.requestWillBeSent":
            self.requests.append(about["request"]["url"])
        elif event in ("Runtime.exceptionThrown", "Log.entryAdded") or (
            event == "Runtime.consoleAPICalled" and about["type"] in ("error", "warning", "assert")
        ):
            self.problems.append(json.dumps(about)[:500])

    def open(self, path: Path, width: int, dark: bool = False) -> None:
        self.problems.clear()
        self.requests.clear()
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call("Page.navigate", url=path.as_uri())
        deadline = time.monotonic() + PATIENCE
        while self.run("document.readyState") != "complete" or self.run("location.href") != path.as_uri():
            assert time.monotonic() < deadline, f"{path} did not load"
        # Once shown, the page draws its charts again in their true size.
        self.run("new Promise(shown => requestAnimationFrame(() => requestAnimationFrame(() => shown(true))))")

    def run(self, expression: str) -> Any:
        """The value of a JavaScript expression."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, f"{expression}: {answer['exceptionDetails']}"
        return answer["result"].get("value")

    def click(self, selector: str) -> None:
        """With the mouse, in the middle of the element: fails if something lies over it."""
        x, y = self.middle(selector)
        over = f"document.elementFromPoint({x}, {y})?.closest({json.dumps(selector)}) !== null"
        assert self.run(over), f"{selector} is covered"
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def hover(self, selector: str) -> None:
        x, y = self.middle(selector)
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def middle(self, selector: str) -> tuple[float, float]:
        """Of an element, scrolled into view."""
        element = f"document.querySelector({json.dumps(selector)})"
        assert self.run(f"{element} !== null"), f"there is no {selector}"
        self.run(f"{element}.scrollIntoView({{block: 'center', behavior: 'instant'}})")
        middle = "({x, y, width, height}) => [x + width / 2, y + height / 2]"
        x, y = self.run(f"({middle})({element}.getBoundingClientRect())")
        return x, y

    def screenshot(self, path: Path, whole: bool = False) -> None:
        picture = self.call("Page.captureScreenshot", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(picture["data"]))
