"""`carpool serve` or uvicorn in a process of its own, for tests that need the real thing."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from tests.support.prepared import Process

READY = r"(?:ready|Uvicorn running) on http://([^:/\"]+):(\d+)"


class Served:
    """A server that is up.

    Attributes:
        log: Its log lines so far.
    """

    def __init__(self, process: Process, stderr: IO[str]) -> None:
        self.process = process
        self.stderr = stderr
        self.log: list[str] = []
        self.host, self.port = "", 0
        self._reader = threading.Thread(target=self._read_on, daemon=True)

    def wait_until_ready(self) -> None:
        for line in self.stderr:
            self.log.append(line)
            if found := re.search(READY, line):
                self.host, self.port = found[1], int(found[2])
                self._reader.start()
                return
        raise AssertionError("the server did not start:\n" + "".join(self.log))

    def ask(
        self, method: str, path: str, body: Any = None, **headers: str
    ) -> tuple[int, bytes, http.client.HTTPMessage]:
        """One request on a connection of its own; a body that is no bytes goes as JSON."""
        connection = http.client.HTTPConnection(self.host, self.port, timeout=30)
        if body is not None and not isinstance(body, bytes):
            body = json.dumps(body).encode()
            headers.setdefault("content_type", "application/json")
        connection.request(method, path, body, {name.replace("_", "-"): value for name, value in headers.items()})
        response = connection.getresponse()
        try:
            return response.status, response.read(), response.headers
        finally:
            connection.close()

    def wait(self) -> int:
        """Its exit status, once it has ended and all of its log has been read."""
        status = self.process.wait(timeout=40)
        if self._reader.ident is None:
            self._reader.start()
        self._reader.join(timeout=40)
        return status

    def _read_on(self) -> None:
        for line in self.stderr:
            self.log.append(line)


def serve(*arguments: str, ready: bool = True, folder: Path | None = None) -> contextlib.AbstractContextManager[Served]:
    """Run `carpool serve ARGUMENTS --port 0 --log json` in a folder, from ready to stopped, for clients that call it by
    any name.
    """
    usual = ("--port", "0", "--log", "json", "--allow-host", "*")
    return _run("-m", "carpool", "serve", *arguments, *usual, ready=ready, folder=folder)


def run_module(name: str) -> contextlib.AbstractContextManager[Served]:
    """Run a module that serves, from ready to stopped."""
    return _run("-m", name)


def run_program(path: Path) -> contextlib.AbstractContextManager[Served]:
    """Run a program that serves, in its folder, from ready to stopped."""
    return _run(path.name, folder=path.parent)


def uvicorn(*arguments: str) -> contextlib.AbstractContextManager[Served]:
    """Run `uvicorn ARGUMENTS --port 0`, from ready to stopped."""
    return _run("-m", "uvicorn", *arguments, "--host", "127.0.0.1", "--port", "0", "--no-access-log")


@contextlib.contextmanager
def _run(*arguments: str, ready: bool = True, folder: Path | None = None) -> Iterator[Served]:
    path = os.pathsep.join(filter(None, [str(folder or Path.cwd()), os.environ.get("PYTHONPATH")]))
    env = {**os.environ, "PYTHONPATH": path}
    ours, theirs = os.pipe()
    process = Process(*arguments, streams=(0, 1, theirs), env=env, cwd=folder)
    os.close(theirs)
    served = Served(process, open(ours))  # noqa: SIM115
    try:
        if ready:
            served.wait_until_ready()
        yield served
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        try:
            served.wait()
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise
        finally:
            served.stderr.close()
