"""A server without descriptors: those who are connected are served, others wait or are refused, and it recovers."""

from __future__ import annotations

import contextlib
import http.client
import os
import resource
import signal
import time
from pathlib import Path

import pytest

from tests.drive.test_faults import wait_until
from tests.serving import Served, serve


def limit_descriptors(pid: int, room: int | None) -> None:
    """So many more than it has; None for as many as before."""
    _, most = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    soft = most if room is None else len(os.listdir(f"/proc/{pid}/fd")) + room
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (soft, most))


def ask(connection: http.client.HTTPConnection) -> int:
    connection.request("POST", "/predict", b"3.0", {"Content-Type": "application/json"})
    response = connection.getresponse()
    response.read()
    return response.status


def connect(served: Served) -> http.client.HTTPConnection:
    connection = http.client.HTTPConnection(served.host, served.port, timeout=20)
    connection.connect()
    return connection


@pytest.mark.slow
def test_no_descriptors_left() -> None:
    """Room for four more connections, and fifty come: the old one is served, and later all are."""
    with serve("tests.serving_models:scale") as served, contextlib.ExitStack() as stack:
        pid = served.process.pid
        old = stack.enter_context(contextlib.closing(connect(served)))
        assert ask(old) == 200
        limit_descriptors(pid, 4)
        crowd = [stack.enter_context(contextlib.closing(connect(served))) for _ in range(50)]
        time.sleep(0.5)
        assert [ask(old) for _ in range(20)] == [200] * 20
        for one in crowd:
            one.close()
        limit_descriptors(pid, None)
        wait_until(lambda: _is_served(served))
        assert ask(old) == 200


@pytest.mark.slow
def test_a_worker_is_lost_while_there_are_no_descriptors() -> None:
    """It cannot be replaced then, and is as soon as there are some again."""
    with serve("tests.serving_models:scale") as served, contextlib.ExitStack() as stack:
        old = stack.enter_context(contextlib.closing(connect(served)))
        assert ask(old) == 200
        limit_descriptors(served.process.pid, 0)
        os.kill(worker_of(served), signal.SIGKILL)
        time.sleep(1.0)
        limit_descriptors(served.process.pid, None)
        wait_until(lambda: _is_served(served))
        assert ask(old) == 200


def worker_of(served: Served) -> int:
    """The worker process."""
    pid = served.process.pid
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        if b"carpool.worker.main" in Path(f"/proc/{child}/cmdline").read_bytes():
            return int(child)
    raise AssertionError("no worker")


def _is_served(served: Served) -> bool:
    """Whether a new client gets an answer."""
    try:
        with contextlib.closing(connect(served)) as connection:
            return ask(connection) == 200
    except (OSError, http.client.HTTPException):
        return False
