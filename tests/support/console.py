"""Runs the console sessions of a page, line by line, as its reader would, and says what each command printed.

A session is a block of `console`. A line that begins with `$ ` is a command, and what follows it is what it prints; a
command that ends with ` &` is a server, which runs until the end of the page. Commands run in the folder of the page's
programs, with `python`, `carpool` and the like of this environment; in programs warnings are errors. Ports from 8000 to
8099 are free ones.
"""

from __future__ import annotations

import contextlib
import doctest
import http.client
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from tests.support.waiting import wait_until

_PORT = re.compile(r"\b80\d\d\b")
_LIMIT_S = 100.0


def sessions(page: str) -> list[tuple[str, str]]:
    """The commands of a page in their order, each with what the page says that it prints."""
    blocks: list[str] = re.findall(r"^```console\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    return [found for block in blocks for found in re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", block, re.MULTILINE)]


def differences(page: str, folder: Path) -> list[str]:
    """Run all commands of a page in a folder, and tell where something else was printed than the page says.

    What may differ from run to run is `...` on the page, as in doctests.
    """
    wrong: list[str] = []
    with contextlib.closing(Console(folder)) as console:
        for command, shown in sessions(page):
            printed = console.type(command)
            if not doctest.OutputChecker().check_output(shown, printed, doctest.ELLIPSIS):
                wrong.append(f"$ {command}\n--- the page shows\n{shown}--- it prints\n{printed}")
    return wrong


class Console:
    """Runs commands in a folder, and servers until it is closed."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._ports: dict[str, str] = {}
        self._servers = contextlib.ExitStack()

    def type(self, command: str) -> str:
        """Run a command and return what it prints, on both of its outputs; of a server that is nothing.

        Spaces at the end of a line are left out, and the last line is ended.
        """
        command = _PORT.sub(lambda port: self._ports.setdefault(port[0], _free_port()), command)
        if command.endswith(" &"):
            self._servers.enter_context(_server(command.removesuffix(" &"), self._folder))
            return ""
        printed = _run(re.sub(r"\bpython ", "python -W error ", command), self._folder)
        return "".join(f"{line.rstrip()}\n" for line in printed.splitlines())

    def close(self) -> None:
        """End the servers."""
        self._servers.close()


def _run(command: str, folder: Path) -> str:
    """What a command prints, on both of its outputs."""
    return subprocess.run(
        command,
        shell=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=_LIMIT_S,
        check=False,
        cwd=folder,
        env=_environment(folder),
    ).stdout


@contextlib.contextmanager
def _server(command: str, folder: Path) -> Iterator[None]:
    """A server, from the moment when it answers until it has ended."""
    words = shlex.split(command)
    port = words[words.index("--port") + 1]
    settings = dict(word.split("=", 1) for word in words if re.match(r"[A-Z_]+=", word))
    environment = {**_environment(folder), **settings}
    log = folder / "server.log"
    with log.open("w") as output:
        process = subprocess.Popen(words[len(settings) :], stdout=output, stderr=output, cwd=folder, env=environment)
    try:
        wait_until(lambda: process.poll() is not None or _answers(port), timeout_s=_LIMIT_S)
        assert process.poll() is None, f"{command} did not start:\n{log.read_text()}"
        yield
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(timeout=_LIMIT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise


def _answers(port: str) -> bool:
    """Whether a server listens and has loaded its models."""
    connection = http.client.HTTPConnection("127.0.0.1", int(port), timeout=_LIMIT_S)
    try:
        connection.request("GET", "/readyz")
        return connection.getresponse().status != 503
    except ConnectionError:
        return False
    finally:
        connection.close()


def _environment(folder: Path) -> dict[str, str]:
    """The environment in which our own commands come first and no GPU has been chosen."""
    own = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    modules = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
    return {**own, "PATH": path, "PYTHONPATH": modules}


def _free_port() -> str:
    """The number of a port that is free."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return str(listener.getsockname()[1])


def shown_programs(text: str) -> list[tuple[str, str, str]]:
    """The programs of a page that are followed by their output: their file names, texts and outputs."""
    found: list[tuple[str, str, str]] = re.findall(
        r"```python\n# (\w+\.py)\n(.*?)```\n+```text\n(.*?)```", text, re.DOTALL
    )
    return found
