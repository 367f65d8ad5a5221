"""A headless Chromium, told what to do by its DevTools protocol over a pipe, without a library for it."""

from __future__ import annotations

import base64
import contextlib
import itertools
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from tests.support.waiting import wait_until

PATH = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)

EXEC = """
import fcntl, os, sys
high = [fcntl.fcntl(int(fd), fcntl.F_DUPFD, 10) for fd in sys.argv[1:3]]
for fd, number in zip(high, (3, 4)):
    os.dup2(fd, number)
os.execv(sys.argv[3], sys.argv[3:])
"""
"""Becomes Chromium, which reads commands from descriptor 3 and answers to 4."""


class Tab:
    """One page."""

    def __init__(self, commands: BinaryIO, answers: BinaryIO) -> None:
        self._commands = commands
        self._answers = answers
        self._numbers = itertools.count(1)
        self._session: dict[str, str] = {}

    def prepare(self, script: str) -> None:
        """Have a script run before those of the page that is opened next."""
        self._attach()
        self.command("Page.enable")
        self.command("Page.addScriptToEvaluateOnNewDocument", source=script)

    def picture(self, path: Path, width: int, height: int, *, dark: bool = False) -> None:
        """Make a picture of the whole page, as it is on a screen of this size."""
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.command("Emulation.setEmulatedMedia", features=[scheme])
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
        self.command("Emulation.setDeviceMetricsOverride", **size)
        self.value("new Promise((done) => setTimeout(done, 1500))")
        shot = self.command("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(shot["data"]))

    def _attach(self) -> None:
        if not self._session:
            target = self.command("Target.createTarget", url="about:blank")["targetId"]
            found = self.command("Target.attachToTarget", targetId=target, flatten=True)
            self._session = {"sessionId": found["sessionId"]}

    def open(self, url: str) -> None:
        """Open a page, and wait until it is there."""
        self._attach()
        self.command("Page.navigate", url=url)
        wait_until(lambda: self.value("location.href + document.readyState") == f"{url}complete")

    def value(self, expression: str) -> Any:
        """The value of a JavaScript expression, once it is there if it is a promise."""
        more = {"returnByValue": True, "awaitPromise": True}
        return self.command("Runtime.evaluate", expression=expression, **more)["result"].get("value")

    def command(self, method: str, **params: Any) -> Any:
        """Send a command, and return its result."""
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": params, **self._session}
        self._commands.write(json.dumps(message).encode() + b"\0")
        self._commands.flush()
        while True:
            answer = json.loads(self._read())
            if answer.get("id") == number:
                assert "error" not in answer, answer
                return answer["result"]

    def _read(self) -> bytes:
        read = bytearray()
        while not read.endswith(b"\0"):
            byte = self._answers.read(1)
            assert byte, "Chromium has ended"
            read += byte
        return bytes(read[:-1])


@contextlib.contextmanager
def run(folder: Path) -> Iterator[Tab]:
    """Run Chromium, with its files in a folder."""
    assert PATH is not None
    commands_in, commands = os.pipe()
    answers, answers_out = os.pipe()
    options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
    options += ["--remote-debugging-pipe", f"--user-data-dir={folder}"]
    process = subprocess.Popen(
        [sys.executable, "-c", EXEC, str(commands_in), str(answers_out), PATH, *options],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        pass_fds=(commands_in, answers_out),
    )
    os.close(commands_in)
    os.close(answers_out)
    with open(commands, "wb") as writer, open(answers, "rb") as reader:
        try:
            yield Tab(writer, reader)
        finally:
            with contextlib.suppress(OSError, AssertionError):
                Tab(writer, reader).command("Browser.close")
            try:
                process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
