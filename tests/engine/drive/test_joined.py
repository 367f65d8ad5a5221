"""Workers that join by themselves: they come and go under load, and however one ends, no request is lost."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import carpool
from carpool import DeadlineExceeded, ModelError, Stage, StartupError, Unavailable
from carpool.engine.drive.gate import JoinedWorker
from carpool.engine.wire.handshake import Hello
from carpool.engine.worker import remote
from carpool.engine.worker.address import parse_address
from carpool.engine.worker.remote import Refused, Way
from tests.effort import slow_where
from tests.support import joining, models
from tests.support.joining import joined, wait_for_workers
from tests.support.pressing import Callers
from tests.support.processes import alive
from tests.support.waiting import wait_until


@pytest.fixture
def token(tmp_path: Path) -> Path:
    file = tmp_path / "token"
    file.write_bytes(joining.TOKEN + b"\n")
    return file


@pytest.fixture(params=["a path", "a port"])
def join(request: pytest.FixtureRequest, tmp_path: Path, token: Path) -> carpool.Join:
    if request.param == "a path":
        return carpool.Join(str(tmp_path / "gate.sock"), token_file=token)
    return carpool.Join("127.0.0.1:0", token_file=token)


@pytest.fixture
def by_port(token: Path) -> carpool.Join:
    return carpool.Join("127.0.0.1:0", token_file=token)


@pytest.mark.slow
def test_a_service_waits_for_its_workers(join: carpool.Join, token: Path) -> None:
    """A service without workers of its own starts at once. Requests wait for one until their
    deadlines, and are answered when one has come.
    """
    with joining.where().run(join=join) as handle, ThreadPoolExecutor() as callers:
        with pytest.raises(DeadlineExceeded):
            handle.predict(0, timeout_s=0.1)
        assert handle.pids == []
        waiting = callers.submit(handle.predict, 1)
        with joined("where", handle.join_address, token) as pid:
            assert waiting.result(20) == (pid, 1)
            assert handle.pids == []  # it is nobody's child here
            snapshot = handle.stats().stages[0]
            assert snapshot.workers == {"ready": 1}
            assert snapshot.restarts == 0


def test_workers_come_and_go_under_load(by_port: carpool.Join, token: Path) -> None:
    """Workers that leave in good order (SIGTERM), are killed, or come, cost no request its answer."""
    with joining.where().run(join=by_port) as handle:
        first = joining.start("where", handle.join_address, token, TAKES_S="0.002")
        wait_for_workers(handle, 1)
        with Callers(handle) as callers:
            callers.go_on()
            with joined("where", handle.join_address, token, TAKES_S="0.002") as second:
                wait_for_workers(handle, 2)
                wait_until(lambda: second in callers.pids)
                first.send_signal(signal.SIGTERM)
                assert first.wait(20) == 0
                callers.go_on()
                wait_for_workers(handle, 1)
                with joined("where", handle.join_address, token) as third:
                    wait_for_workers(handle, 2)
                    os.kill(second, signal.SIGKILL)
                    wait_for_workers(handle, 1)
                    callers.go_on()
                    assert callers.pids == {first.pid, second, third}
                    callers.stop()
        assert callers.errors == []
        assert handle.stats().stages[0].workers == {}


def test_workers_that_join_are_not_scaled_from_here(by_port: carpool.Join) -> None:
    """A stage that starts no workers itself cannot be given a number of them."""
    with joining.where().run(join=by_port) as handle, pytest.raises(ValueError, match="only workers that join"):
        handle.scale(handle.service.stages[0].name, 2)


@pytest.mark.parametrize("version", ["0.9.0", "2.0.0"])
def test_a_worker_of_another_version_is_refused(version: str, by_port: carpool.Join) -> None:
    """A worker of an older or newer version gets a refusal that names both versions, and what to do."""
    with joining.where().run(join=by_port) as handle:
        assert handle.join_address is not None
        way = Way(parse_address(handle.join_address), joining.TOKEN)
        with pytest.raises(Refused, match=re.escape(f"has carpool {carpool.__version__} and the worker {version}:")):
            remote.admitted(way, Hello(version, "where", "Where"))


@pytest.mark.slow
def test_who_leaves_idle_is_missed_by_nobody(by_port: carpool.Join, token: Path) -> None:
    """A worker that is stopped while it has nothing to do leaves at once, with exit status 0."""
    with joining.where().run(join=by_port) as handle:
        worker = joining.start("where", handle.join_address, token)
        wait_for_workers(handle, 1)
        worker.send_signal(signal.SIGINT)
        assert worker.wait(20) == 0
        wait_for_workers(handle, 0)


@slow_where(lambda join: join == "a path")
def test_a_killed_worker(join: carpool.Join, token: Path) -> None:
    """EOF: what a killed worker had is run once more by another one; a request that kills two workers
    fails, and the stage does not, however often that happens.
    """
    with joining.where().run(join=join) as handle:
        for _ in range(2):
            with joined("where", handle.join_address, token), joined("where", handle.join_address, token):
                wait_for_workers(handle, 2)
                with pytest.raises(ModelError, match="two workers of stage Where died"):
                    handle.predict("die")
                wait_for_workers(handle, 0)
        with joined("where", handle.join_address, token) as pid:
            assert handle.predict(5) == (pid, 5)


@pytest.mark.slow
def test_a_hung_call(by_port: carpool.Join, token: Path) -> None:
    """A worker whose call takes too long is given up; it writes down where it stands, and ends by itself."""
    service = joining.where(max_batch_time_s=0.3)
    with service.run(join=by_port) as handle, joined("where", handle.join_address, token) as pid:
        wait_for_workers(handle, 1)
        with ThreadPoolExecutor() as callers:
            hanging = callers.submit(handle.predict, "hang", timeout_s=3)
            wait_for_workers(handle, 0)
            with joined("where", handle.join_address, token) as second:
                wait_for_workers(handle, 1)
                assert isinstance(hanging.exception(20), Unavailable | DeadlineExceeded)
                assert second != pid


@pytest.mark.slow
def test_a_hung_worker_ends_by_itself(by_port: carpool.Join, token: Path) -> None:
    """A worker that was given up and still hangs some seconds later kills itself, with its stacks written."""
    with joining.where(max_batch_time_s=0.3).run(join=by_port) as handle:
        worker = joining.start("where", handle.join_address, token)
        wait_for_workers(handle, 1)
        with pytest.raises((Unavailable, DeadlineExceeded)):
            handle.predict("hang", timeout_s=1)
        assert worker.wait(30) == -signal.SIGKILL


@pytest.mark.slow
def test_a_model_that_cannot_be_loaded(by_port: carpool.Join, token: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A worker that cannot load its model says why, here and there; the service goes on waiting."""
    with joining.where().run(join=by_port) as handle:
        worker = joining.start("where", handle.join_address, token, CANNOT_LOAD="1")
        assert worker.wait(20) == 1
        wait_until(lambda: "could not join" in caplog.text)
        assert "there are no weights here" in caplog.text
        with joined("where", handle.join_address, token) as pid:
            assert handle.predict(5) == (pid, 5)


def test_the_log_says_where(by_port: carpool.Join, token: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Each line of the log about a worker from elsewhere has its device as a field, that of its end, too."""
    with caplog.at_level(logging.INFO, "carpool"), joining.where().run(join=by_port) as handle:
        with joined("where", handle.join_address, token, CUDA_VISIBLE_DEVICES="3"):
            wait_for_workers(handle, 1)
        wait_until(lambda: "is lost" in caplog.text)
    told = [record for record in caplog.records if "is ready after" in record.msg or "is lost" in record.msg]
    assert [getattr(record, "device", None) for record in told if hasattr(record, "worker")] == ["3", "3"]


@pytest.mark.slow
def test_the_end_of_the_service(join: carpool.Join, token: Path) -> None:
    """A worker ends when its service does: at the end of a service, and at that of its process."""
    with joining.where().run(join=join) as handle:
        worker = joining.start("where", handle.join_address, token)
        wait_for_workers(handle, 1)
    assert worker.wait(20) == 0


LOST = """
    import sys, time
    from tests.support import joining
    import carpool
    with joining.where().run(join=carpool.Join(sys.argv[1], token_file=sys.argv[2])) as handle:
        joining.wait_for_workers(handle, 1)
        print("ready", flush=True)
        time.sleep(60)
"""


def test_a_lost_coordinator(tmp_path: Path, token: Path) -> None:
    """A worker ends soon after the process of its service was killed."""
    import textwrap

    path = str(tmp_path / "gate.sock")
    program = [sys.executable, "-c", textwrap.dedent(LOST), path, str(token)]
    with subprocess.Popen(program, cwd=joining.ROOT, stdout=subprocess.PIPE) as coordinator:
        worker = joining.start("where", path, token)
        assert coordinator.stdout is not None
        assert coordinator.stdout.readline() == b"ready\n"
        coordinator.kill()
        assert worker.wait(20) == 0


def test_silence(by_port: carpool.Join, token: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker whose machine acknowledges nothing is lost, with ETIMEDOUT by the kernel; its requests
    run again elsewhere, and not alone: that the machine fell silent is not held against them.
    """
    with joining.where().run(join=by_port) as handle, ThreadPoolExecutor() as callers:
        with joined("where", handle.join_address, token) as silent:
            wait_for_workers(handle, 1)
            os.kill(silent, signal.SIGSTOP)
            pool = handle._inner._running.pools[0]
            # A window that stays closed looks like a silent machine to the kernel (TCP_USER_TIMEOUT).
            sock = pool._workers[0]._connection.sock  # type: ignore[attr-defined]
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 300)
            waiting = callers.submit(handle.predict, bytes(16 * 2**20))
            wait_for_workers(handle, 0)
            with joined("where", handle.join_address, token) as second:
                assert waiting.result(20)[0] == second
        outcomes = handle.stats().outcomes
        assert outcomes["ok"] == 1


@pytest.mark.parametrize(
    ("number", "is_silence"),
    [
        (errno.ETIMEDOUT, True),
        (errno.EHOSTUNREACH, True),
        (errno.EINVAL, True),
        (errno.EACCES, True),
        (errno.ECONNRESET, False),
        (errno.EPIPE, False),
    ],
)
def test_errors_that_mean_silence(number: int, is_silence: bool) -> None:
    """A connection that ends as nothing has been acknowledged means a silent machine, whatever error a route gives."""

    async def ended() -> JoinedWorker:
        ours, theirs = socket.socketpair()
        lost: list[str] = []
        with theirs:
            worker = JoinedWorker(ours, Hello("1", "s", "S"), lambda frame: None, lost.append, trusts_resets=True)
            worker._disconnected("it broke", OSError(number, os.strerror(number)))
            worker.abandon()
        assert len(lost) == 1
        return worker

    assert asyncio.run(ended()).fell_silent is is_silence


@pytest.mark.slow
def test_no_window_is_closed_by_what_goes_ahead(token: Path) -> None:
    """A large batch waits here while a worker on a network is busy, since a window that stays closed
    counts as silence; so calls may take longer than `silence_s`.
    """
    join = carpool.Join("127.0.0.1:0", token_file=token, silence_s=2)
    with (
        joining.where().run(join=join) as handle,
        ThreadPoolExecutor() as callers,
        joined("where", handle.join_address, token, TAKES_S="0.05") as pid,
    ):
        wait_for_workers(handle, 1)
        xs = [bytes([i]) * 2**20 for i in range(40)]
        answers = list(callers.map(handle.predict, xs))
        assert answers == [(pid, x) for x in xs]


def wrong(settings: dict[str, Any]) -> None:
    Stage(models.scale, max_batch_size=4, **settings)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"workers": 0}, "workers must be a whole number of at least 1"),
        ({"join": True, "run_in": "thread"}, "workers that join are processes"),
        ({"join": "yes"}, "join must be True or False"),
    ],
)
def test_wrong_stages(settings: dict[str, Any], text: str) -> None:
    """What cannot be is refused where the stage is declared."""
    with pytest.raises((ValueError, TypeError), match=text):
        wrong(settings)


def test_wrong_settings(tmp_path: Path, token: Path) -> None:
    """What is missing or goes with nothing is refused before anything is started."""
    short = tmp_path / "short"
    short.write_text("secret")
    with pytest.raises(ValueError, match="stage Where has no workers but those that join, so say where"):
        joining.where().run()
    with pytest.raises(ValueError, match="no stage of scale lets workers join"):
        carpool.Service(Stage(models.scale, max_batch_size=4)).run(join="./x")
    with pytest.raises(ValueError, match="name a file with a token"):
        carpool.Join("127.0.0.1:0")
    with pytest.raises(ValueError, match="must have at least 16 characters, not 6"):
        carpool.Join("127.0.0.1:0", token_file=short)
    with pytest.raises(ValueError, match="silence_s must be at least 2 seconds"):
        carpool.Join("./x", silence_s=1)
    with pytest.raises(ValueError, match="leave the certificate out for a Unix socket"):
        carpool.Join("./x", certificate="x")
    with pytest.raises(ValueError, match="needs the certificate"):
        carpool.Join("h:1", token_file=token, key="x")
    with pytest.raises(TypeError, match=r"join must be an address or a carpool\.Join"):
        joining.where().run(join=7)  # type: ignore[arg-type]


def test_an_address_that_is_taken(tmp_path: Path) -> None:
    """A service whose gate cannot be opened does not start, and the error names the address."""
    path = str(tmp_path / "gate.sock")
    with joining.where().run(join=path), pytest.raises(StartupError, match=r"workers cannot join at .*gate\.sock"):
        joining.where().start(join=path)


@pytest.mark.slow
def test_a_mixed_stage(by_port: carpool.Join, token: Path) -> None:
    """A stage may have workers of its own, for which its start waits, besides those that join."""
    service = carpool.Service(Stage(joining.Where, max_batch_size=1, join=True), name="where")
    with service.run(join=by_port) as handle:
        assert handle.stats().stages[0].workers == {"ready": 1}
        with joined("where", handle.join_address, token) as pid, ThreadPoolExecutor(8) as callers:
            wait_for_workers(handle, 2)

            def ask(x: int) -> int:
                return handle.predict(x)[0]

            deadline = time.monotonic() + 20
            pids: set[int] = set()
            while len(pids) < 2 and time.monotonic() < deadline:
                pids |= set(callers.map(ask, range(40)))
            assert pids == {pid, *handle.pids}
            assert alive(pid)


@pytest.mark.slow
def test_an_error_of_the_model_comes_with_its_traceback(by_port: carpool.Join, token: Path) -> None:
    """Errors of a worker that has joined are told like those of any other."""
    with (
        joining.contract().run(join=by_port) as handle,
        joined("contract", handle.join_address, token),
        pytest.raises(ModelError, match="one item is bad"),
    ):
        handle.predict("raise")
