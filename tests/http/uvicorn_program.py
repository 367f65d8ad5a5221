"""`uvicorn` as a program, and the apps that it is given."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress

from carpool import Service, Stage
from carpool.http.app import App
from tests.support.http import models
from tests.support.models import Pid
from tests.support.waiting import PATIENCE_S, wait_until


def listens(port: int) -> bool:
    """Whether a new client is let in."""
    with suppress(ConnectionError):
        socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S).close()
        return True
    return False


def pids() -> App:
    """An app that says which worker answers."""
    return App(Service(Stage(Pid), name="pids"))


def broken() -> App:
    """An app that cannot start."""
    return App(models.broken)


class Program:
    """`uvicorn` in a process of its own.

    Args:
        factory: At the top of a module.
        options: Of its command line.

    Attributes:
        log: What it has said so far.
    """

    def __init__(self, factory: Callable[[], App], *options: str) -> None:
        target = f"{factory.__module__}:{factory.__name__}"
        command = [sys.executable, "-m", "uvicorn", "--factory", target, "--host", "127.0.0.1", "--port", "0", *options]
        env = {**os.environ, "NO_COLOR": "1"}
        self.process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=env, start_new_session=True
        )
        self.log = ""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __enter__(self) -> Program:
        return self

    def __exit__(self, *exc: object) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)  # whatever a failed test leaves; all are gone otherwise
        self.wait()

    def port(self) -> int:
        """Where it listens; waits until it does."""
        wait_until(lambda: "Uvicorn running on" in self.log)
        found = re.search(r"Uvicorn running on http://127\.0\.0\.1:(\d+)", self.log)
        assert found, self.log
        port = int(found[1])
        wait_until(lambda: listens(port))  # with several processes it says so too early
        return port

    def wait(self) -> int:
        """Its exit status, once all it had to say has been read."""
        status = self.process.wait(PATIENCE_S)
        self._reader.join(PATIENCE_S)
        assert not self._reader.is_alive(), "something still holds its stderr"
        return status

    def _read(self) -> None:
        assert self.process.stderr is not None
        with self.process.stderr as lines:
            for line in lines:
                self.log += line
