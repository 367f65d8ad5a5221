"""Runs `python ARGUMENTS` in a fork of a process that has imported carpool's command line already.

A fresh interpreter spends a quarter of a second of the processor on imports before it reads its arguments. The process
that is forked has done nothing but these: it has no thread, no loop and no service. A fork is a process like any other,
with arguments, environment, folder, streams, signals and exit status of its own, but it is not the test's child. Tests
of the start itself, of warnings and of `-X importtime` take a fresh interpreter, and so do all worker processes.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import warnings
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import IO, Any, NoReturn

from tests.support.waiting import PATIENCE_S

_IMPORTED = (
    *("carpool.cli", "carpool.cli.profile_command", "carpool.simulate.command", "carpool.simulate.plan"),
    *("carpool.http.serve", "carpool.http.server", "carpool.service.thread_handle"),
)
_MOST_BYTES = 2**20


class Process:
    """A command that runs, with as much of `subprocess.Popen` as tests use.

    Args:
        arguments: Those of `python`: `-m` and a module, or a program, and theirs; before them perhaps `-W error`.
        streams: Files for its input, output and errors.
        env: Its environment.
        cwd: Its folder.

    Attributes:
        pid: Its number.
        returncode: Its exit status, or the negative number of the signal that has ended it; None until `poll` or
            `wait` has seen its end.
    """

    def __init__(
        self, *arguments: str, streams: tuple[int, int, int], env: Mapping[str, str], cwd: Path | None = None
    ) -> None:
        self.returncode: int | None = None
        request = {"arguments": arguments, "cwd": str(cwd or Path.cwd()), "env": dict(env)}
        news, theirs = os.pipe()
        socket.send_fds(_prepared(), [json.dumps(request).encode() + b"\n"], [*streams, theirs])
        os.close(theirs)
        self._news = open(news)  # noqa: SIM115
        self.pid = int(self._news.readline())

    def poll(self) -> int | None:
        """Its exit status; None as long as it runs."""
        if self.returncode is None and select.select([self._news], [], [], 0)[0]:
            self._read_end()
        return self.returncode

    def wait(self, timeout: float = PATIENCE_S) -> int:
        """Its exit status, once it has ended."""
        if self.returncode is None:
            if not select.select([self._news], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
            self._read_end()
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send it a signal, if it has not ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self) -> None:
        """Ask it to end."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """End it at once."""
        self.send_signal(signal.SIGKILL)

    def _read_end(self) -> None:
        with self._news as news:
            self.returncode = int(news.readline())


def run(
    *arguments: str, env: Mapping[str, str], cwd: Path | None = None, stdin: bytes = b"", timeout: float = PATIENCE_S
) -> subprocess.CompletedProcess[bytes]:
    """Run `python ARGUMENTS` to its end; its output and errors are those of the result."""
    with tempfile.TemporaryFile() as into, tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        into.write(stdin)
        into.seek(0)
        process = Process(*arguments, streams=(into.fileno(), out.fileno(), err.fileno()), env=env, cwd=cwd)
        try:
            status = process.wait(timeout)
        finally:
            process.kill()
        out.seek(0)
        err.seek(0)
        return subprocess.CompletedProcess(arguments, status, out.read(), err.read())


def carpool_command(
    *arguments: str, cwd: Path | None = None, timeout: float = PATIENCE_S, **env: str
) -> subprocess.CompletedProcess[str]:
    """Run `carpool ARGUMENTS` to its end, for a plain terminal of 100 columns unless `env` has others."""
    own = {**os.environ, "COLUMNS": "100", "NO_COLOR": "1", **env}
    done = run("-m", "carpool", *arguments, env=own, cwd=cwd, timeout=timeout)
    return subprocess.CompletedProcess(arguments, done.returncode, done.stdout.decode(), done.stderr.decode())


@cache
def _prepared() -> socket.socket:
    """The way to the process that is forked, which ends with this one.

    It is started by a shell that ends at once, and so is no child of this process, which some tests count.
    """
    ours, theirs = socket.socketpair()
    command = ["/bin/sh", "-c", '"$0" "$@" &', sys.executable, "-m", __name__, str(theirs.fileno())]
    subprocess.run(command, pass_fds=[theirs.fileno()], check=True, cwd=Path(__file__).parents[2])
    theirs.close()
    atexit.register(ours.close)
    return ours


# -- the other end


def _fork_forever(requests: socket.socket) -> dict[str, Any]:
    """Fork for each request, and say how each fork ends; return the request, in a fork only."""
    ends, wakes = os.pipe()
    os.set_blocking(wakes, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wakes, warn_on_full_buffer=False)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal, which is for the tests
    running: dict[int, IO[str]] = {}
    while True:
        ready, _, _ = select.select([requests, ends], [], [])
        if ends in ready:
            os.read(ends, _MOST_BYTES)
            for pid in list(running):
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    with running.pop(pid) as news, contextlib.suppress(BrokenPipeError):
                        print(os.waitstatus_to_exitcode(status), file=news, flush=True)
        if requests in ready:
            data, files, _, _ = socket.recv_fds(requests, _MOST_BYTES, 4)
            if not data:
                sys.exit()
            while not data.endswith(b"\n"):
                data += requests.recv(_MOST_BYTES)
            *streams, news_file = files
            pid = os.fork()
            if not pid:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                signal.signal(signal.SIGINT, signal.default_int_handler)
                requests.close()
                for news in running.values():
                    news.close()
                for fd in (ends, wakes, news_file):
                    os.close(fd)
                for target, fd in enumerate(streams):
                    os.dup2(fd, target)
                    os.close(fd)
                return dict(json.loads(data))
            for fd in streams:
                os.close(fd)
            running[pid] = open(news_file, "w")  # noqa: SIM115
            print(pid, file=running[pid], flush=True)


def _become(arguments: list[str], cwd: str, env: dict[str, str]) -> None:
    """Run what `python ARGUMENTS` runs."""
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    if arguments[:2] == ["-W", "error"]:
        warnings.simplefilter("error")
        del arguments[:2]
    is_module = arguments[0] == "-m"
    first, *rest = arguments[1:] if is_module else arguments
    folders = [each for each in env.get("PYTHONPATH", "").split(os.pathsep) if each]
    sys.path[:] = list(dict.fromkeys([cwd if is_module else str(Path(first).parent.absolute()), *folders, *sys.path]))
    sys.orig_argv = [sys.executable, *arguments]
    sys.argv = [first, *rest]
    if is_module:
        runpy.run_module(first, run_name="__main__", alter_sys=True)
        return
    program = ModuleType("__main__")
    program.__file__ = first
    sys.modules["__main__"] = sys.modules["__mp_main__"] = program  # where workers say that its classes are
    exec(compile(Path(first).read_bytes(), first, "exec"), program.__dict__)


def _main() -> NoReturn:
    for name in _IMPORTED:
        importlib.import_module(name)
    gc.freeze()
    with socket.socket(fileno=int(sys.argv[1])) as requests:
        request = _fork_forever(requests)
    status: object = None
    try:
        _become(**request)
    except SystemExit as end:
        status = end.code
    if not isinstance(status, int | None):
        sys.exit(status)
    # as the forks of multiprocessing end: taking down the modules would copy the memory that is shared
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status or 0)


if __name__ == "__main__":
    _main()
