"""Changing a server that runs: its admin routes, SIGHUP, the commands and --watch, under load."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import pty
import re
import signal
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from carpool.cli import operate_commands as operate
from carpool.http import admin as admin_module
from carpool.http.admin import ReloadOrder, SourceFiles, is_local
from tests.effort import slow_where
from tests.support.http.net import Client
from tests.support.processes import children
from tests.support.serving import Served, serve
from tests.support.waiting import PATIENCE_S, wait_until

PROGRAM = """
import carpool

VERSION = 1

class Tell(carpool.Model):
    examples = (1,)
    def setup(self) -> None:
        assert VERSION > 0, "a version that is broken"
    def predict(self, xs: list[int]) -> list[int]:
        return [VERSION for _ in xs]

service = carpool.Service(carpool.Stage(Tell, max_batch_size=8, workers=1))
"""


def write(folder: Path, version: int) -> None:
    """Change the program; versions are of different lengths, since Python looks at size and second only."""
    (folder / "program.py").write_text(PROGRAM.replace("= 1", f"= {version}") + "#" * (version % 97))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write(tmp_path, 1)
    return tmp_path


def version(served: Served) -> Any:
    return json.loads(served.ask("POST", "/predict", 0)[1])


ASK = b"POST /predict HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 1\r\n\r\n1"


class Load:
    """Clients that ask all the time, each on a connection of its own; whatever is not 200 is kept."""

    def __init__(self, served: Served, n: int) -> None:
        self.bad: list[Any] = []
        self.versions: list[int] = []
        self._over = threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(served,)) for _ in range(n)]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()

    def _ask(self, served: Served) -> None:
        client = Client(served.port)
        try:
            while not self._over.is_set():
                answer = client.ask(ASK)
                if answer.status == 200:
                    self.versions.append(json.loads(answer.body))
                else:
                    self.bad.append(answer)
                time.sleep(0.002)
        except BaseException as error:
            self.bad.append(error)
        finally:
            client.close()


def test_a_server_is_changed_under_load(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By the commands and by SIGHUP a server loads new code and gets other numbers of workers, while no
    client gets anything but its answer; of a broken version the operator is told, and nobody else.
    """
    with serve("program:service", folder=folder) as served:
        url = f"http://127.0.0.1:{served.port}"
        with Load(served, 8) as load:
            write(folder, 2)
            operate.reload(url=url)
            assert capsys.readouterr().out == "Tell reloaded: Tell has 1 worker\n"
            assert version(served) == 2

            write(folder, -3)
            with pytest.raises(SystemExit):
                operate.reload(url=url)
            assert "a version that is broken" in capsys.readouterr().err
            assert version(served) == 2

            write(folder, 2)
            operate.scale("Tell", "2", url=url)
            assert capsys.readouterr().out == "Tell scaled: Tell has 2 workers\n"
            assert len(children(served.process.pid)) >= 2

            write(folder, 4)
            served.process.send_signal(signal.SIGHUP)
            wait_until(lambda: version(served) == 4)
        assert load.bad == []
        assert set(load.versions) <= {1, 2, 4}
        with pytest.raises(SystemExit):
            operate.scale("Digits", "2", url=url)
        assert "has no stage 'Digits'; it has Tell" in capsys.readouterr().err
    assert any("was reloaded" in line for line in served.log)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_reloaded_a_hundred_times(folder: Path) -> None:
    """Reloaded a hundred times under 64 connections, and with ten broken versions between, no request is lost,
    refused or answered by anything but a version that was there.
    """
    with serve("program:service", folder=folder) as served, Load(served, 64) as load:
        for n in range(2, 102):
            if n % 10 == 0:
                write(folder, -n)
                status, body, _ = served.ask("POST", "/admin/reload", {})
                assert status == 503 and b"a version that is broken" in body
            write(folder, n)
            assert served.ask("POST", "/admin/reload", {})[0] == 200
            assert version(served) == n
    assert load.bad == []
    assert set(load.versions) <= set(range(1, 102))


@pytest.mark.slow
def test_a_terminal_that_is_closed_ends_the_server(folder: Path) -> None:
    """SIGHUP means "stop" where it says that the server's terminal has gone: it must not live on unseen."""
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "carpool", "serve", "program:service", "--port", "0"]
    with subprocess.Popen(command, cwd=folder, preexec_fn=lambda: os.login_tty(theirs)) as process:
        os.close(theirs)
        said = b""
        while b"ready on" not in said:
            said += os.read(ours, 4096)
        process.send_signal(signal.SIGHUP)  # the terminal is there: this is a reload
        while b"was reloaded" not in said:
            said += os.read(ours, 4096)
        os.close(ours)
        assert process.wait(timeout=20) == 0


def test_a_server_that_ignores_hang_ups_outlives_its_terminal(folder: Path) -> None:
    """Where SIGHUP was ignored at the start, as nohup has it, the server serves on without its terminal."""
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "carpool", "serve", "program:service", "--port", "0"]

    def as_nohup() -> None:
        os.setsid()
        fcntl.ioctl(theirs, termios.TIOCSCTTY)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)

    with subprocess.Popen(command, cwd=folder, preexec_fn=as_nohup, stderr=subprocess.PIPE, text=True) as process:
        os.close(theirs)
        assert process.stderr is not None
        while "ready on" not in process.stderr.readline():
            pass
        os.close(ours)
        while "the terminal has gone; serving on" not in process.stderr.readline():
            pass
        process.send_signal(signal.SIGHUP)  # this one comes from somebody
        while "was reloaded" not in process.stderr.readline():
            pass
        process.terminate()
        process.stderr.read()
        assert process.wait(PATIENCE_S) == 0


@pytest.mark.slow
def test_watching(folder: Path) -> None:
    """With --watch a change of a source file has the service reloaded."""
    with serve("program:service", "--watch", "--reload", "rolling", folder=folder) as served:
        write(folder, 5)
        wait_until(lambda: version(served) == 5)
        assert any("changed: program.py" in line for line in served.log)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server for orders that are refused."""
    folder = tmp_path_factory.mktemp("refuses")
    write(folder, 1)
    with serve("program:service", folder=folder) as one:
        yield one


@slow_where(lambda path, order, status, text: path != "/admin/scale")
@pytest.mark.parametrize(
    ("path", "order", "status", "text"),
    [
        ("/admin/scale", {"workers": 0}, 400, "at least 1"),
        ("/admin/scale", {"workers": 1_000_000}, 400, "10,000 that a stage may have"),
        ("/admin/scale", {}, 400, "workers"),
        ("/admin/scale", {"workers": 1, "stage": "x"}, 400, "has no stage 'x'"),
        ("/admin/scale", {"workers": 1, "stage": ""}, 400, "has no stage ''"),
        ("/admin/scale", {"workers": 1, "service": ""}, 400, "there is no service ''; there is Tell"),
        ("/admin/scale", {"workers": 1, "service": "x"}, 400, "there is no service 'x'; there is Tell"),
        ("/admin/scale", {"workers": 1, "typo": 2}, 400, "typo"),
        ("/admin/scale", {"workers": [2, 1]}, 400, "more workers at least than at most"),
        ("/admin/scale", b"{", 400, "JSON|truncated"),
        ("/admin/scale", b'{"stage": "\xff"}', 400, "byte 0 is not UTF-8"),
        ("/admin/scale", b"[" * 100_000, 400, "Expected `object`"),
        ("/admin/scale", b'{"workers": ' + b"[" * 100_000, 400, "Expected `int`"),
        ("/admin/reload", {"grace_s": -1}, 400, "grace_s"),
        ("/admin/reload", {"rolling": "yes"}, 400, "rolling"),
    ],
)
def test_orders_that_make_no_sense(served: Served, path: str, order: Any, status: int, text: str) -> None:
    """What is wrong with an order is said, and the server goes on."""
    answer = served.ask("POST", path, order, content_type="application/json")
    assert answer[0] == status, answer
    assert re.search(text, json.loads(answer[1])["error"]["message"])
    assert version(served) == 1


def test_only_orders_as_json_are_taken(served: Served) -> None:
    """What a form of a web page can send is refused, and so is GET."""
    assert served.ask("POST", "/admin/reload", b"{}", content_type="text/plain")[0] == 415
    assert served.ask("GET", "/admin/reload")[0] == 405


@pytest.mark.parametrize(
    ("host", "is_ours"),
    [
        ("127.0.0.1", True),
        ("127.8.8.8", True),
        ("::1", True),
        ("::ffff:127.0.0.1", True),
        ("", True),
        ("10.0.0.7", False),
        ("::ffff:10.0.0.7", False),
        ("fe80::1%eth0", False),
        ("not an address", False),
        (None, False),
    ],
)
def test_clients_of_this_machine(host: str | None, is_ours: bool) -> None:
    """Only loopback addresses and Unix sockets are of this machine; what is not known is not."""
    assert is_local(host) is is_ours


def test_a_server_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    """The commands say in one line that no server answers, and what to do; and what is wrong with a number."""
    for command in (lambda: operate.reload(url="http://127.0.0.1:9"), lambda: operate.scale("Tell", "many")):
        with pytest.raises(SystemExit):
            command()
    told = capsys.readouterr().err.splitlines()
    assert told[0].startswith("carpool: no carpool server answers at http://127.0.0.1:9")
    assert told[1] == "carpool: workers must be a number such as 4, or a range such as 1-8, not 'many'"


def test_source_files(tmp_path: Path) -> None:
    """Python files that change, come or go are told, those of hidden folders and installed packages are not."""
    for name in (".git", ".venv", "env", "deep/er", "__pycache__"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "env/pyvenv.cfg").touch()
    (tmp_path / "a.py").write_text("1")
    files = SourceFiles(tmp_path)
    assert files.changed() == []
    for name in (".git/x.py", ".venv/x.py", "env/x.py", "__pycache__/x.py", "deep/er/b.py", "notes.txt"):
        (tmp_path / name).write_text("2")
    (tmp_path / "a.py").unlink()
    assert files.changed() == ["a.py", "deep/er/b.py"]
    assert files.changed() == []


class LoadingWrites:
    """Stands in for an `Admin`: each load writes files, as models do, or somebody does meanwhile."""

    def __init__(self, folder: Path, *writes: str) -> None:
        self.loads = 0
        self._folder = folder
        self._writes = writes

    async def reload(self, order: ReloadOrder) -> None:
        self.loads += 1
        if self.loads <= len(self._writes) and (name := self._writes[self.loads - 1]):
            (self._folder / name).write_text(f"{self.loads}")
        await asyncio.sleep(0)


@pytest.mark.parametrize(
    ("writes", "loads"),
    [
        ([], 1),
        ([f"kernel_{n}.py" for n in range(50)], 1),
        (["cache.py"] * 50, 3),
        (["program.py", "", "program.py"], 2),
        (["program.py", "cache.py", "program.py"], 4),
    ],
    ids=["nothing", "new files", "one file again and again", "an edit meanwhile", "different files"],
)
def test_watching_does_not_go_in_circles(
    writes: list[str], loads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What loading itself writes has the services loaded no more than three times in a row, and not at all if the files
    are new; an edit while they are being loaded counts, and so does the next one in any case.
    """
    monkeypatch.setattr(admin_module, "_EVERY_S", 0.01)
    admin = LoadingWrites(tmp_path, *writes)
    for name in ("program.py", "cache.py"):
        (tmp_path / name).write_text("as it was")

    async def until(n: int) -> None:
        for _ in range(2000):
            if admin.loads >= n:
                return
            await asyncio.sleep(0.01)
        pytest.fail(f"there were {admin.loads} loads, not {n}")

    async def test() -> None:
        files = SourceFiles(tmp_path)
        (tmp_path / "came_while_starting.py").touch()
        watching = asyncio.create_task(admin_module.reload_on_change(admin, files))  # type: ignore[arg-type]
        await asyncio.sleep(0.1)
        assert admin.loads == 0
        (tmp_path / "program.py").write_text("an edit")
        await until(loads)
        await asyncio.sleep(0.2)  # for one more, if there were one
        assert admin.loads == loads
        admin._writes = ()
        (tmp_path / "program.py").write_text("one more edit")
        await until(loads + 1)
        watching.cancel()

    asyncio.run(test())
