"""Chromium: a headless browser that tests steer by the DevTools protocol, over one WebSocket."""

import base64
import json
import os
import shutil
import subprocess
import tempfile
import time
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from websockets.sync.client import connect

START_TIMEOUT_S = 60.0
WAIT_S = 60.0
POLL_S = 0.03

PROGRAMS = ("chromium", "chromium-browser", "google-chrome")

OPTIONS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage",
    "--hide-scrollbars", "--remote-debugging-port=0", "about:blank",
)  # fmt: skip


def find_chromium() -> str:
    """Return the program; skip the test where it is missing, unless ORCHARD_CHROMIUM is `required`."""
    found = next(filter(None, map(shutil.which, PROGRAMS)), None)
    if found is None:
        assert os.environ.get("ORCHARD_CHROMIUM") != "required", f"there is none of {', '.join(PROGRAMS)}"
        pytest.skip("there is no chromium, and ORCHARD_CHROMIUM is not `required`")
    return found


class PageError(Exception):
    """A script in the page has failed."""


class Chromium:
    """A browser with an empty profile."""

    def __init__(self, program: str):
        self._dir = Path(tempfile.mkdtemp(prefix="orc-chromium-"))
        command = [program, f"--user-data-dir={self._dir}", *OPTIONS]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self._open = ExitStack()
        self._socket = self._open.enter_context(connect(self._address(), max_size=None, compression=None))
        self._ids = count(1)
        self._events: dict[str, list[dict[str, Any]]] = {}

    def _address(self) -> str:
        file = self._dir / "DevToolsActivePort"
        deadline = time.monotonic() + START_TIMEOUT_S
        while not (file.exists() and len(lines := file.read_text().split("\n")) >= 2):
            assert self._process.poll() is None, f"chromium ended with {self._process.returncode}"
            assert time.monotonic() < deadline, "chromium does not start"
            time.sleep(POLL_S)
        return f"ws://127.0.0.1:{lines[0]}{lines[1]}"

    def call(self, method: str, session: str = "", **params: Any) -> dict[str, Any]:
        """Call a method of the protocol, of a window or of the browser. Events that arrive meanwhile are kept."""
        id = next(self._ids)
        named = {"sessionId": session} if session else {}
        self._socket.send(json.dumps({"id": id, "method": method, "params": params, **named}))
        while True:
            message = json.loads(self._socket.recv(WAIT_S))
            if message.get("id") == id:
                if "error" in message:
                    raise PageError(f"{method}: {message['error']}")
                return message["result"]
            if "method" in message:
                self._events.setdefault(message.get("sessionId", ""), []).append(message)

    def events(self, session: str, method: str) -> list[dict[str, Any]]:
        """Return the parameters of all events of a kind so far."""
        self.call("Browser.getVersion")  # reads what has arrived
        return [event["params"] for event in self._events.get(session, ()) if event["method"] == method]

    def open(self, url: str, *, width: int = 1200, height: int = 800, dark: bool = False) -> "Window":
        """Open a page in a window of its own, which shares no cookies and no storage with others."""
        context = self.call("Target.createBrowserContext")["browserContextId"]
        target = self.call("Target.createTarget", url="about:blank", browserContextId=context)["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        window = Window(self, session, context)
        for domain in ("Page", "Runtime", "Network", "Log"):
            window.call(f"{domain}.enable")
        window.resize(width, height)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        window.call("Emulation.setEmulatedMedia", features=[scheme])
        window.go(url)
        return window

    def close(self) -> None:
        """End the browser and remove its profile."""
        self._open.close()
        self._process.kill()
        self._process.wait()
        shutil.rmtree(self._dir, ignore_errors=True)


class Window:
    """A window with one page."""

    def __init__(self, browser: Chromium, session: str, context: str):
        self._browser = browser
        self._session = session
        self._context = context

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        return self._browser.call(method, self._session, **params)

    def go(self, url: str) -> None:
        """Load an address and wait until the page has started."""
        self.call("Page.navigate", url=url)
        self.wait("document.documentElement?.dataset.ready === 'true'")

    def resize(self, width: int, height: int) -> None:
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.call("Emulation.setDeviceMetricsOverride", **size)

    def run(self, script: str) -> Any:
        """Return the value of an expression, awaited if it is a promise. Raises PageError."""
        found = self.call(
            "Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True, userGesture=True
        )
        if "exceptionDetails" in found:
            details = found["exceptionDetails"]
            raise PageError(details.get("exception", {}).get("description") or details["text"])
        return found["result"].get("value")

    def wait(self, condition: str, timeout_s: float = WAIT_S) -> Any:
        """Wait until an expression is true and return its value."""
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                if value := self.run(f"((found) => found instanceof Node || found)({condition})"):
                    return value
            except PageError as error:
                if "context" not in str(error):  # the page is being loaded
                    raise
            if time.monotonic() > deadline:
                raise AssertionError(f"not within {timeout_s} s: {condition}\n{self.text('body')}\n{self.faults()}")
            time.sleep(POLL_S)

    def text(self, selector: str) -> str:
        """Return the visible text of the last element that a selector finds, '' without one."""
        return self.run(f"[...document.querySelectorAll({json.dumps(selector)})].at(-1)?.innerText ?? ''")

    def wait_text(self, selector: str, text: str, timeout_s: float = WAIT_S) -> str:
        """Wait until the last element that a selector finds contains a text; return all of its text."""
        place = f"[...document.querySelectorAll({json.dumps(selector)})].at(-1)"
        return self.wait(f"{place}?.innerText.includes({json.dumps(text)}) && {place}.innerText", timeout_s)

    def click(self, selector: str, text: str = "") -> None:
        """Click on the last element that a selector finds, or on the last one with this text, as a user does."""
        found = f"[...document.querySelectorAll({json.dumps(selector)})]"
        found += f".filter((one) => one.checkVisibility() && one.textContent.includes({json.dumps(text)})).at(-1)"
        self.wait(f"Boolean({found})")
        place = self.run(
            f"(() => {{ const one = {found}; one.scrollIntoView({{block: 'center'}}); "
            "const {x, y, width, height} = one.getBoundingClientRect(); return [x + width / 2, y + height / 2]; })()"
        )
        at = {"x": place[0], "y": place[1], "button": "left", "clickCount": 1}
        self.call("Input.dispatchMouseEvent", type="mousePressed", **at)
        self.call("Input.dispatchMouseEvent", type="mouseReleased", **at)

    def type(self, selector: str, text: str) -> None:
        """Put a text into a field, in the place of what is there."""
        self.run(f"[...document.querySelectorAll({json.dumps(selector)})].at(-1).select()")
        self.run(f"[...document.querySelectorAll({json.dumps(selector)})].at(-1).focus()")
        self.call("Input.insertText", text=text)

    def press(self, key: str) -> None:
        """Press and release a key, such as Enter, in the focused element."""
        codes = {"Enter": (13, "\r"), "Escape": (27, ""), "Tab": (9, ""), "ArrowRight": (39, ""), "ArrowLeft": (37, "")}
        code, text = codes[key]
        pressed = {"key": key, "code": key, "windowsVirtualKeyCode": code}
        self.call("Input.dispatchKeyEvent", type="keyDown", **pressed, **({"text": text} if text else {}))
        self.call("Input.dispatchKeyEvent", type="keyUp", **pressed)

    def requested(self) -> list[str]:
        """Return the addresses of all requests so far, without data: and blob:."""
        events = self._browser.events(self._session, "Network.requestWillBeSent")
        urls = [event["request"]["url"] for event in events]
        return [url for url in urls if not url.startswith(("data:", "blob:"))]

    def faults(self) -> list[str]:
        """Return the errors of scripts and of the page's policy so far."""
        thrown = self._browser.events(self._session, "Runtime.exceptionThrown")
        logged = [event["entry"] for event in self._browser.events(self._session, "Log.entryAdded")]
        return [
            *(json.dumps(event["exceptionDetails"])[:500] for event in thrown),
            *(entry["text"] for entry in logged if entry["level"] == "error" and entry["source"] != "network"),
        ]

    def picture(self, path: Path) -> None:
        """Write a PNG of the window."""
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))

    def close(self) -> None:
        self._browser.call("Target.disposeBrowserContext", browserContextId=self._context)
