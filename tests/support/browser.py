"""Headless Chromium, driven by ChromeDriver over WebDriver's HTTP: what tests of the report page see and do."""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

READY = "return document.documentElement.dataset.ready === 'yes'"  # the report page
LOADED = "return document.readyState === 'complete'"
MISSING = next((f"{name} is not installed" for name in ("chromium", "chromedriver") if not shutil.which(name)), "")
_FLAGS = (
    "--headless=new --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --disable-dev-shm-usage --force-color-profile=srgb"
)
KEYS = {"ArrowDown": "\ue015", "ArrowUp": "\ue013", "ArrowLeft": "\ue012", "ArrowRight": "\ue014", "Enter": "\ue007",
        "Escape": "\ue00c", "Tab": "\ue004", "End": "\ue010", "Home": "\ue011", "PageDown": "\ue00f"}  # fmt: skip


class Browser:
    """A session: `open` a page, `js` in it, `click`, `type` and `keys` as a user."""

    def __init__(self, address: str) -> None:
        options = {"args": _FLAGS.split(), "binary": shutil.which("chromium")}
        wanted = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
        self._address = address
        self._session = self._call("POST", "", {"capabilities": {"alwaysMatch": wanted}})["sessionId"]

    def _call(self, method: str, path: str, body: Any = None) -> Any:
        session = f"/{self._session}" if hasattr(self, "_session") else ""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"{self._address}/session{session}{path}", data, method=method)
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return json.load(answer)["value"]
        except urllib.error.HTTPError as error:
            raise AssertionError(json.load(error)["value"]["message"]) from None

    def cdp(self, command: str, **params: Any) -> Any:
        """A command of Chrome's DevTools protocol."""
        return self._call("POST", "/goog/cdp/execute", {"cmd": command, "params": params})

    def open(
        self, address: str | Path, *, width: int = 1280, height: int = 900, dark: bool = False, ready: str = READY
    ) -> None:
        """Load a page, in a window of this size, and wait until it has drawn itself."""
        self.size(width, height)
        features = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        features += [{"name": "prefers-reduced-motion", "value": "reduce"}]  # a click does not wait for a smooth scroll
        self.cdp("Emulation.setEmulatedMedia", features=features)
        self._call("POST", "/url", {"url": address.absolute().as_uri() if isinstance(address, Path) else address})
        self.wait(ready)

    def size(self, width: int, height: int) -> None:
        """The size of the view, in CSS pixels."""
        self.cdp("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def js(self, script: str, *args: Any) -> Any:
        """The value that the body of a function returns in the page; a promise is awaited."""
        return self._call("POST", "/execute/sync", {"script": script, "args": args})

    def wait(self, script: str, *args: Any, seconds: float = 20) -> Any:
        """Call `js` until it returns something true."""
        end = time.monotonic() + seconds
        while not (value := self.js(script, *args)):
            assert time.monotonic() < end, f"never true: {script}"
            time.sleep(0.02)
        return value

    def _find(self, selector: str) -> str:
        return str(next(iter(self._call("POST", "/element", {"using": "css selector", "value": selector}).values())))

    def click(self, selector: str) -> None:
        """Scroll to the element, and click its middle."""
        self._call("POST", f"/element/{self._find(selector)}/click", {})

    def type(self, selector: str, text: str) -> None:
        """Focus the element, and type; names of keys are in `KEYS`."""
        self._call("POST", f"/element/{self._find(selector)}/value", {"text": text})

    def choose(self, selector: str, value: str) -> None:
        """Choose an option of a select, by its value."""
        self.click(f"{selector} option[value='{value}']")

    def mouse(self, *moves: tuple[str, int, int]) -> None:
        """Actions of the mouse at points of the view: ("move" | "down" | "up", x, y)."""
        actions: list[dict[str, Any]] = []
        for kind, x, y in moves:
            actions.append({"type": "pointerMove", "duration": 20, "x": x, "y": y})
            if kind != "move":
                actions.append({"type": f"pointer{kind.title()}", "button": 0})
        pointer = {"type": "pointer", "id": "mouse", "parameters": {"pointerType": "mouse"}, "actions": actions}
        self._call("POST", "/actions", {"actions": [pointer]})

    def keys(self, *names: str) -> None:
        """Press keys, where the focus is."""
        pressed = [KEYS.get(name, name) for name in names]
        actions = [{"type": kind, "value": key} for key in pressed for kind in ("keyDown", "keyUp")]
        self._call("POST", "/actions", {"actions": [{"type": "key", "id": "keys", "actions": actions}]})

    def text(self, selector: str) -> str:
        """The text that is shown in the element."""
        return str(self.js("return document.querySelector(arguments[0]).innerText", selector))

    def content(self, selector: str) -> str:
        """The text in the element, also where it is out of view or folded."""
        return str(self.js("return document.querySelector(arguments[0]).textContent", selector))

    def picture(self, path: Path) -> None:
        """Save the view as a PNG."""
        path.write_bytes(base64.b64decode(self._call("GET", "/screenshot")))

    def pdf(self) -> bytes:
        """The page as it is printed."""
        return base64.b64decode(self.cdp("Page.printToPDF", printBackground=True)["data"])

    def errors(self) -> list[str]:
        """What the console has said since the last call, warnings included."""
        return [entry["message"] for entry in self._call("POST", "/se/log", {"type": "browser"})]

    def quit(self) -> None:
        """End the session."""
        self._call("DELETE", "")


@contextmanager
def opened() -> Iterator[Browser]:
    """A browser with an empty profile."""
    with tempfile.TemporaryDirectory() as home:
        command = ["chromedriver", "--port=0"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=home) as driver:
            try:
                yield from _driven(driver, Browser)
            finally:
                driver.terminate()


def _driven(driver: subprocess.Popen[str], kind: Callable[[str], Browser]) -> Iterator[Browser]:
    assert driver.stdout is not None
    for line in driver.stdout:
        if "successfully on port" in line:
            browser = kind(f"http://127.0.0.1:{line.rstrip().rstrip('.').rpartition(' ')[2]}")
            try:
                yield browser
            finally:
                browser.quit()
            return
    raise RuntimeError("chromedriver does not start")
