"""Workers that join a service of a test by themselves: processes that know where its gate is."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import carpool
from carpool import Parallel, Route, Service, Stage
from carpool.engine.worker import remote
from carpool.engine.worker.address import parse_address
from carpool.service.join import token_of
from carpool.service.work import work
from tests.support.contract import Contract
from tests.support.waiting import wait_until

ROOT = Path(__file__).parents[2]
TOKEN = b"a token that both sides know"


class Where(carpool.Model):
    """Answers with the process in which it runs, after a while."""

    def setup(self) -> None:
        if os.environ.get("CANNOT_LOAD"):
            raise RuntimeError("there are no weights here")

    def predict(self, xs: list[Any]) -> list[Any]:
        for x in xs:
            if x == "die":
                os.kill(os.getpid(), signal.SIGKILL)
            if x == "hang":
                time.sleep(60)
        time.sleep(float(os.environ.get("TAKES_S", 0)))
        return [(os.getpid(), x) for x in xs]


def contract(cost_s: float = 0.0, max_batch_size: int = 8) -> Service:
    """The service of the contract suite, with workers that join."""
    kwargs = {"cost_s": cost_s}
    stage = Stage(Contract, kwargs=kwargs, max_batch_size=max_batch_size, workers=0, join=True, policy="greedy")
    return Service(stage, name="contract")


def where(**settings: Any) -> Service:
    """A service whose answers name the process of the worker."""
    return Service(Stage(Where, max_batch_size=4, workers=0, join=True, policy="greedy", **settings), name="where")


def branches() -> Service:
    """A service whose answers name the processes of its branches; workers of one stage, which stands
    in two places, join.
    """
    there = Stage(Where, name="there", max_batch_size=4, workers=0, join=True, policy="greedy")
    here = Stage(Where, name="here", max_batch_size=4, run_in="thread")
    choices = Route({"on": there, "off": []}, choose=_whether)
    return Service(Parallel({"here": here, "there": [there, choices]}), name="branches")


def _whether(answer: tuple[int, Any]) -> str:
    return "on" if answer[1] in ("twice", "die") else "off"


@contextlib.contextmanager
def joined(service: str, address: str | None, token_file: Path | None = None, **env: str) -> Iterator[int]:
    """A process that joins as a worker of one of these services, inside the block; its id.

    It ends with the block, if it has not before.
    """
    process = start(service, address, token_file, **env)
    try:
        yield process.pid
    finally:
        process.kill()
        process.wait()


def start(service: str, address: str | None, token_file: Path | None = None, **env: str) -> subprocess.Popen[bytes]:
    """Start a process that joins as a worker; whoever calls this ends it."""
    assert address is not None
    program = [sys.executable, "-m", "tests.support.joining", service, address, str(token_file or "")]
    return subprocess.Popen(program, cwd=ROOT, env={**os.environ, **env}, start_new_session=True)


def wait_for_workers(handle: Any, n: int, stage: int = 0) -> None:
    """Wait until so many workers of a stage are ready."""
    wait_until(lambda: handle.stats().stages[stage].workers.get("ready", 0) == n)


def main() -> None:
    name, address, token_file = sys.argv[1:]
    services = {"contract": lambda: contract(float(os.environ.get("COST_S", 0))), "branches": branches}
    service = services.get(name, where)()
    (stage,) = [stage for stage in service.stages if stage.join]
    where_to = parse_address(address)
    token = token_of(where_to, token_file or None)
    try:
        work(service, stage, remote.Way(where_to, token), wait_s=10)
    except carpool.StartupError as error:
        raise SystemExit(str(error)) from None


if __name__ == "__main__":
    main()
