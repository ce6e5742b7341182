"""A headless Chromium, spoken to by the Chrome DevTools Protocol over a pipe."""

import base64
import io
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

NAMES = ("chromium-headless-shell", "chromium", "google-chrome", "chromium-browser")
_SECONDS = 60.0


def found() -> str | None:
    return os.environ.get("JAXMNT_CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)


class Browser:
    """One page. What it says, what it asks the network for, and what it looks like."""

    def __init__(self, to_browser: int, from_browser: int):
        self._to, self._from = to_browser, from_browser
        self._number = 0
        self._buffer = b""
        self._session: str | None = None
        self.said: list[str] = []
        """Errors, warnings and violations of the page's policy."""
        self.requests: list[str] = []
        """Addresses that were asked for."""
        self._loaded = False
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters) -> dict:
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None and not method.startswith("Target."):
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + _SECONDS
        while True:
            answer = self._next(deadline)
            if answer.get("id") == self._number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return answer["result"]

    def open(self, address: str) -> float:
        """Returns when the page is drawn: the seconds that it took."""
        self.said, self.requests, self._loaded = [], [], False
        started = time.monotonic()
        self.call("Page.navigate", url=address)
        while not self._loaded:
            self._next(started + _SECONDS)
        self.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
        return time.monotonic() - started

    def evaluate(self, script: str):
        answer = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def look(self, width: int, height: int, *, dark: bool = False) -> None:
        """As on a screen of this size."""
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 500
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.evaluate("new Promise((done) => setTimeout(done, 300))")

    def press(self, key: str, text: str = "") -> None:
        more = {"text": text} if text else {}
        self.call("Input.dispatchKeyEvent", type="keyDown", key=key, **more)
        self.call("Input.dispatchKeyEvent", type="keyUp", key=key)

    def picture(self, path: Path | None = None, *, whole: bool = False) -> bytes:
        """A PNG of what is seen, or of the whole page."""
        answer = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        png = base64.b64decode(answer["data"])
        if path is not None:
            path.write_bytes(png)
        return png

    def _next(self, deadline: float) -> dict:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._from], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, "the browser says nothing"
            read = os.read(self._from, 1 << 20)
            assert read, "the browser ended"
            self._buffer += read
        line, _, self._buffer = self._buffer.partition(b"\0")
        message = json.loads(line)
        self._note(message.get("method"), message.get("params", {}))
        return message

    def _note(self, method: str | None, told: dict) -> None:
        if method == "Page.loadEventFired":
            self._loaded = True
        elif method == "Network.requestWillBeSent":
            self.requests.append(told["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            self.said.append(json.dumps(told["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled":
            self.said.append(json.dumps(told["args"]))
        elif method == "Log.entryAdded":
            self.said.append(told["entry"]["text"])


@contextmanager
def browser(folder: Path) -> Iterator[Browser]:
    """Its profile is in `folder`."""
    program = found()
    if program is None:
        pytest.skip(f"needs one of {', '.join(NAMES)}, or JAXMNT_CHROMIUM")
    to_read, to_write = os.pipe()
    from_read, from_write = os.pipe()

    command = [program, "--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe", "--no-first-run",
               "--disable-dev-shm-usage", f"--user-data-dir={folder / 'profile'}", "--hide-scrollbars"]  # fmt: skip
    # It wants its pipes as 3 and 4. A shell puts them there: JAX's threads do not go with os.fork, which Python uses if
    # it is to do that.
    put = ["bash", "-c", f'exec "$@" 3<&{to_read} 4>&{from_write}', "bash"]
    process = subprocess.Popen(
        [*put, *command], pass_fds=(to_read, from_write), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL, env=os.environ | {"HOME": str(folder)},
    )  # fmt: skip
    os.close(to_read)
    os.close(from_write)
    try:
        yield Browser(to_write, from_read)
    finally:
        process.kill()
        process.wait()
        os.close(to_write)
        os.close(from_read)


def pixels(png: bytes):
    """Rows × columns × red, green, blue."""
    import numpy as np
    from PIL import Image

    return np.asarray(Image.open(io.BytesIO(png)).convert("RGB"))
