"""Limits of the system on files, stacks and processes: serving goes on, or the error says what was missing."""

from __future__ import annotations

import ast
import os
import resource
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.effort import slow_where
from tests.support.processes import children, guards_of
from tests.support.serving import serve

LIMITS = {
    "files of no length": (resource.RLIMIT_FSIZE, 0),
    "small stacks": (resource.RLIMIT_STACK, 512 * 1024),
    "no core files": (resource.RLIMIT_CORE, 0),
}


@pytest.mark.fault("F58")
@slow_where(lambda limit: limit != resource.RLIMIT_FSIZE)
@pytest.mark.parametrize(("limit", "value"), LIMITS.values(), ids=LIMITS.keys())
def test_serving_goes_on_within_limits(limit: int, value: int) -> None:
    """A server and a worker that is started under tight limits of the system go on serving."""
    with serve("tests.support.http.models:scale") as served:
        pid = served.process.pid
        resource.prlimit(pid, limit, (value, value))
        (worker,) = set(children(pid)) - set(guards_of(pid))
        os.kill(worker, signal.SIGKILL)
        for n in range(5):
            assert served.ask("POST", "/predict", n)[:2] == (200, b"%d.0" % (2 * n))
        assert resource.prlimit(max(children(pid)), limit)[0] == value
        assert (
            served.ask("POST", "/predict", "x" * 5_000_000)[0] == 422
        )  # too large for a socket's buffer, and no number
    assert served.process.returncode == 0


@pytest.mark.fault("F58")
@pytest.mark.skipif(os.geteuid() != 0, reason="must become a user that runs nothing else")
def test_no_process_can_be_started() -> None:
    """If no process can be started there is a clear error at once, and no hang."""
    program = """
        import asyncio, os, resource
        import carpool, carpool.service.handle
        from tests.support import models

        async def main():
            resource.setrlimit(resource.RLIMIT_NPROC, (1, 1))
            os.setgroups([])
            os.setgid(60123)
            os.setuid(60123)
            async with carpool.Service(carpool.Stage(models.Slow, max_batch_size=4)).run_async() as service:
                print(await service.predict(0.0))

        asyncio.run(main())
    """
    ran = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        env={**os.environ, "PYTHONPATH": os.getcwd()},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ran.returncode == 1
    assert "StartupError" in ran.stderr.splitlines()[-1]
    assert "Resource temporarily unavailable" in ran.stderr.splitlines()[-1]


PROGRAM = """
    import os, sys
    import carpool
    from tests.support import models

    if __name__ == "__main__":
        before = [fd for fd in range(3) if os.path.exists(f"/proc/self/fd/{fd}")]
        for _ in range(2):
            with carpool.Service(carpool.Stage(models.Talks)).run() as service:
                answers = [service.predict("x") for _ in range(3)]
        opened = [os.readlink(f"/proc/self/fd/{fd}") for fd in range(3)]
        open(sys.argv[1], "w").write(repr((before, answers, opened.count("/dev/null"))))
"""


@pytest.mark.fault("F84")
@slow_where(lambda closed: closed.count("&") == 1)
@pytest.mark.parametrize("closed", ["0<&-", "1>&-", "2>&-", "0<&- 1>&- 2>&-"])
def test_a_program_without_standard_descriptors(closed: str, tmp_path: Path) -> None:
    """In a program without standard descriptors /dev/null takes their places, so that nothing of
    ours gets such a number, and the program ends well.
    """
    (tmp_path / "program.py").write_text(textwrap.dedent(PROGRAM))
    path = os.pathsep.join([os.getcwd(), os.environ.get("PYTHONPATH", "")])
    command = f"exec {sys.executable} {tmp_path / 'program.py'} {tmp_path / 'said'} {closed}"
    ran = subprocess.run(
        ["sh", "-c", command],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        env={**os.environ, "PYTHONPATH": path},
        timeout=60,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    before, answers, nulls = ast.literal_eval((tmp_path / "said").read_text())
    assert {0, 1, 2} - {int(part[0]) for part in closed.split()} <= set(before)  # libffi may have opened its own file
    assert answers == ["x", "x", "x"]
    assert nulls + len(before) >= 3
