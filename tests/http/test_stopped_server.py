"""A server whose process stands still for a while blames nobody for it who has sent in time."""

from __future__ import annotations

import os
import signal
import socket
import time

import pytest

from tests.effort import slow_where
from tests.support.http.front import post
from tests.support.serving import serve

WAITS_S = "1.5"  # for the head or body of a request, and for the next one: long enough for a busy machine to come to it
STOPPED_S = 2.0  # longer than that

HEAD = post(b"0.0", "/predict", "Content-Type: application/json")


@slow_where(lambda sent_before: sent_before in (0, 20))
@pytest.mark.parametrize("sent_before", [0, 20, len(HEAD) - 1], ids=["nothing", "half the head", "half the body"])
def test_a_request_that_came_while_the_server_stood_still_is_answered(sent_before: int) -> None:
    """A request that comes, or is completed, while the process is stopped is answered once it goes
    on, although its time has passed by then: its timers are called before its sockets are read.
    """
    settings = ("--header-timeout-s", WAITS_S, "--body-timeout-s", WAITS_S, "--idle-timeout-s", WAITS_S)
    with (
        serve("tests.support.serving_models:sleeps", *settings) as served,
        socket.create_connection((served.host, served.port), timeout=10) as connection,
    ):
        connection.sendall(HEAD[:sent_before])
        assert served.ask("POST", "/predict", 0.0)[0] == 200  # so the other connection has been opened
        os.kill(served.process.pid, signal.SIGSTOP)
        try:
            connection.sendall(HEAD[sent_before:])
            time.sleep(STOPPED_S)
        finally:
            os.kill(served.process.pid, signal.SIGCONT)
        assert connection.recv(64).startswith(b"HTTP/1.1 200")


def test_a_quiet_connection_outlives_a_stop_of_its_server() -> None:
    """A connection that was open for the next request while the process was stopped gets the answer
    to what was sent meanwhile.
    """
    with (
        serve("tests.support.serving_models:sleeps", "--idle-timeout-s", WAITS_S) as served,
        socket.create_connection((served.host, served.port), timeout=10) as connection,
    ):
        connection.sendall(HEAD)
        assert connection.recv(4096).startswith(b"HTTP/1.1 200")
        os.kill(served.process.pid, signal.SIGSTOP)
        try:
            connection.sendall(HEAD)
            time.sleep(2 * STOPPED_S)
        finally:
            os.kill(served.process.pid, signal.SIGCONT)
        assert connection.recv(64).startswith(b"HTTP/1.1 200")
