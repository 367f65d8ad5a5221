"""One running server: started in its own session, asked until it answers, ended with its family."""

from __future__ import annotations

import http.client
import json
import os
import shutil
import socket
import ssl
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from bench.peers.contestants import Exchange, Launch
from bench.tools.process_tree import Process, ProcessTree

HOST = "127.0.0.1"
START_TIMEOUT_S = 90
STOP_TIMEOUT_S = 8
REFUSED = (400, 405, 413, 415, 422)
"""Statuses that say that the request is wrong: asking again would change nothing."""


class NotServing(Exception):
    """The server did not start, or answered wrongly."""


class Server:
    """A server that is up and has given one right answer."""

    def __init__(self, launch: Launch, port: int, tree: ProcessTree) -> None:
        self.launch = launch
        self.port = port
        self._tree = tree

    @property
    def url(self) -> str:
        return f"{self.launch.scheme}://{HOST}:{self.port}{self.launch.exchange.path}"

    @property
    def leader(self) -> Process:
        """The process that was started."""
        return self._tree.leader

    def members(self) -> list[Process]:
        """It and all that it has started."""
        return self._tree.members()

    def cpu_s(self) -> float:
        """Processor time used so far by the server and everything it started."""
        return self._tree.cpu_s()

    def idle_share(self, seconds: float = 1) -> float:
        """The part of one core that it takes while nobody asks it anything."""
        before, begin = self.cpu_s(), time.monotonic()
        time.sleep(seconds)
        return (self.cpu_s() - before) / (time.monotonic() - begin)


@dataclass(frozen=True, slots=True)
class Started:
    """A server's process.

    Attributes:
        port: The one that it was told to listen on; scratch: its folder for temporary files.
        tree: It and everything it starts.
    """

    process: subprocess.Popen[bytes]
    port: int
    tree: ProcessTree
    scratch: Path


@contextmanager
def started(command: Sequence[str], folder: Path | None, env: Mapping[str, str], log: Path | None) -> Iterator[Started]:
    """Start a server in a session of its own, and end it and its whole family afterwards.

    Args:
        command: `{port}` in it stands for a free one.
        folder: Where it runs; None for here.
        env: What its environment has besides.
        log: Where what it says goes; None for `server.log` in its scratch folder.
    """
    # Short, because Unix socket addresses below it are limited to 107 bytes.
    scratch = Path(tempfile.mkdtemp(prefix="cb-"))
    port = free_port()
    try:
        with (log or scratch / "server.log").open("wb") as output:
            process = subprocess.Popen(
                [part.replace("{port}", str(port)) for part in command],
                env={**clean_environment(), "TMPDIR": str(scratch), **env},
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        tree = ProcessTree(process.pid)
        try:
            yield Started(process, port, tree, scratch)
        finally:
            stop(process, tree)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


@contextmanager
def running(launch: Launch) -> Iterator[Server]:
    """Start a server, wait until it answers rightly, and end it and its whole family afterwards."""
    with started(launch.command, launch.directory, launch.env, None) as server:
        wait_until_right(launch, server.port, server.process, server.scratch / "server.log")
        yield Server(launch, server.port, server.tree)


def stop(process: subprocess.Popen[bytes], tree: ProcessTree) -> None:
    """Ask the leader to end, then make sure that it and all the others have."""
    deadline = time.monotonic() + STOP_TIMEOUT_S
    try:
        process.terminate()
        while process.poll() is None and time.monotonic() < deadline:
            tree.members()  # who becomes an orphan while its parents end must have been seen before
            time.sleep(0.05)
    finally:
        tree.kill()
        process.wait()


def wait_until_right(launch: Launch, port: int, process: subprocess.Popen[bytes], log: Path) -> None:
    """Ask until an answer comes with status 200; a wrong answer is an error at once."""
    deadline = time.monotonic() + START_TIMEOUT_S
    problem = "nothing listens on its port"
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise NotServing(f"{launch.name} ended with status {process.returncode}:\n{tail(log)}")
        try:
            status, body = ask(port, launch.exchange, launch.scheme)
        except (OSError, http.client.HTTPException) as error:
            problem = repr(error)
        else:
            if status == 200:
                return check(launch, body)
            problem = f"status {status}: {body[:200]!r}"
            if status in REFUSED:
                break
        time.sleep(0.1)
    raise NotServing(f"{launch.name} was not ready within {START_TIMEOUT_S} s ({problem}):\n{tail(log)}")


def ask(port: int, exchange: Exchange, scheme: str = "http") -> tuple[int, bytes]:
    """One request on a connection of its own: status and body."""
    if scheme == "https":
        anybody = ssl._create_unverified_context()  # as wrk does: the certificate is one of ours
        connection: http.client.HTTPConnection = http.client.HTTPSConnection(HOST, port, timeout=10, context=anybody)
    else:
        connection = http.client.HTTPConnection(HOST, port, timeout=10)
    headers = {"Content-Type": exchange.content_type, "Accept": exchange.content_type, **exchange.headers}
    try:
        connection.request("POST", exchange.path, body=exchange.body, headers=headers)
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


def check(launch: Launch, body: bytes) -> None:
    """Whoever answers wrongly is not timed."""
    right = launch.exchange.answer
    try:
        answer = body if isinstance(right, bytes) else json.loads(body)
    except ValueError:
        answer = body
    if answer != right:
        raise NotServing(f"{launch.name} answered {body[:200]!r}, not {str(right)[:200]}")


def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
        return port


def clean_environment() -> dict[str, str]:
    """Our environment without what would lead another interpreter to our packages."""
    return {name: value for name, value in os.environ.items() if name not in {"PYTHONPATH", "VIRTUAL_ENV"}}


def tail(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-15:])
