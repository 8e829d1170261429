"""Drives Chromium without a window, by its debugging pipe."""

import base64
import contextlib
import fcntl
import itertools
import json
import os
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from typing import Any

from launchpad_lite.testing import poll_until

#: Neither a sandbox, which needs rights that containers lack, nor a look at the network.
_OPTIONS = [
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--hide-scrollbars",
]


class Browser:
    """One tab."""

    def __init__(self, to: int, from_: int) -> None:
        self._to, self._from = to, from_
        self._numbers = itertools.count(1)
        self._read = b""
        #: What the browser told without being asked, as messages of the console.
        self.told: list[dict[str, Any]] = []
        self._session: str | None = None
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        attached = self.send("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for each in ("Runtime", "Page", "Log"):
            self.send(f"{each}.enable")

    def send(self, method: str, **params: Any) -> dict[str, Any]:
        """Returns the answer to a command."""
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            while b"\0" not in self._read:
                if not (data := os.read(self._from, 1 << 20)):
                    raise ConnectionError("Chromium has ended")
                self._read += data
            line, self._read = self._read.split(b"\0", 1)
            answer = json.loads(line)
            if answer.get("id") == number:
                assert "error" not in answer, answer
                return dict(answer["result"])
            self.told.append(answer)

    def evaluate(self, expression: str) -> Any:
        """Returns the value of an expression of JavaScript, or of its promise."""
        answer = self.send(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def open(self, url: str, *, width: int = 1280, height: int = 900) -> None:
        """Begins to load a page."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.send("Emulation.setDeviceMetricsOverride", **size)
        self.send("Page.navigate", url=url)

    def wait_for(self, expression: str) -> Any:
        """Returns the value of an expression once it is true."""
        return poll_until(lambda: self.evaluate(expression))

    def picture(self) -> bytes:
        """Returns what is shown, as PNG."""
        return base64.b64decode(self.send("Page.captureScreenshot", format="png")["data"])


@contextlib.contextmanager
def browser(program: str) -> Iterator[Browser]:
    """Gives a browser, whose data are removed with it."""
    (low, to), (from_, lower) = os.pipe(), os.pipe()
    # Beyond the numbers that they get in the browser.
    theirs, ours = (fcntl.fcntl(each, fcntl.F_DUPFD, 10) for each in (low, lower))
    # The path of its socket would be too long in a folder of pytest.
    with tempfile.TemporaryDirectory(dir="/tmp", ignore_cleanup_errors=True) as folder:
        command = [program, *_OPTIONS, f"--user-data-dir={folder}/data", "--remote-debugging-pipe"]
        process = subprocess.Popen(
            ["bash", "-c", f'exec "$@" 3<&{theirs} 4>&{ours}', "bash", *command],
            pass_fds=(theirs, ours),
            env={**os.environ, "TMPDIR": folder},
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        for each in (low, lower, theirs, ours):
            os.close(each)
        try:
            opened = Browser(to, from_)
            yield opened
            opened.send("Browser.close")
        finally:
            with contextlib.suppress(OSError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            os.close(to)
            os.close(from_)
