"""Where the front is the limit: HTTP with a trivial model on the CPU, beside mosec."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from bench import PYTHONPATH, ROOT
from bench.gpu.beside import WRK_THREADS
from bench.gpu.tasks import is_small
from bench.peers.contestants import Exchange, Launch
from bench.tools import wrk
from bench.tools.comparison import say
from bench.tools.process_tree import TICK_S
from bench.tools.server import NotServing, Server, ask, running

Row = dict[str, Any]
BODY, ANSWER = b'{"x": 1.5}', {"y": 3.0}
CONNECTIONS = (64, 256, 1024)
WORKERS = (1, 4, 12)


def rows(seconds: float, sides: Sequence[str]) -> Iterator[Row]:
    """Yield a row for each server, number of workers and number of connections."""
    cores = len(os.sched_getaffinity(0))
    for workers in (1,) if is_small() else [n for n in WORKERS if n == 1 or n < cores]:
        for launch in launches(workers):
            try:
                with running(launch) as server:
                    for connections in CONNECTIONS[: 1 if is_small() else None]:
                        yield _loaded(launch.name, server, workers, connections, seconds)
            except NotServing as problem:
                yield {"side": f"{launch.name}, {workers} w", "problem": str(problem)[-1500:]}


def launches(workers: int) -> Iterator[Launch]:
    env = {"PYTHONPATH": PYTHONPATH, "BENCH_GPU_BATCH": "64", "BENCH_GPU_WORKERS": str(workers)}
    command = [sys.executable, "-m", "carpool", "serve", "bench.gpu.services:double", "--port", "{port}"]
    command += ["--max-connections", "2048"]
    exchange = Exchange(body=BODY, answer=ANSWER)
    yield Launch(name="carpool", command=command, exchange=exchange, env=env, directory=ROOT)
    if not is_small():
        program = str(Path(__file__).parent / "servers" / "mosec_tensors.py")
        command = [sys.executable, program, "double", "--address", "127.0.0.1", "--port", "{port}"]
        exchange = Exchange(path="/inference", body=BODY, answer=ANSWER)
        more = {"MAX_WAIT_TIME_MS": "1"}
        yield Launch(name="mosec, 1 ms", command=command, exchange=exchange, env={**env, **more}, directory=ROOT)


def _loaded(name: str, server: Server, workers: int, connections: int, seconds: float) -> Row:
    """One server at one number of connections; processor time of its leader and of all others."""

    def load(seconds: float) -> wrk.Run:
        if is_small():
            return some_requests(server)
        return wrk.run(server, connections=connections, seconds=max(1, round(seconds)), threads=WRK_THREADS)

    load(1)
    before = shares_of_cpu(server)
    run = load(seconds)
    leader, others = (after - was for after, was in zip(shares_of_cpu(server), before, strict=True))
    say(f"  {name}, {workers} workers, {connections} connections: {run.requests_per_s:,.0f} requests/s")
    return {
        "side": f"{name}, {workers} w, {connections} c",
        "items_per_s": run.requests_per_s,
        "seconds": run.duration_s,
        "p50_s": run.p50_s,
        "p99_s": run.p99_s,
        "busiest_share": leader / run.duration_s,
        "front_cpu_s": leader,
        "worker_cpu_s": others,
        "failed": run.failed,
    }


def shares_of_cpu(server: Server) -> tuple[float, float]:
    """Processor seconds of the process that speaks HTTP, and of all others.

    That is carpool's leader, and of mosec's processes the one of its name.
    """
    front = others = 0.0
    for process in server.members():
        name = Path(f"/proc/{process.pid}/comm").read_text().strip()
        is_front = name == "mosec" or (server.launch.name == "carpool" and process.pid == server.leader.pid)
        if is_front:
            front += process.cpu_ticks * TICK_S
        else:
            others += process.cpu_ticks * TICK_S
    return front, others


def some_requests(server: Server) -> wrk.Run:
    """Ask one request after the other, and compare each answer: a smoke test needs no wrk."""
    taken = []
    for _ in range(50):
        began = time.perf_counter()
        status, body = ask(server.port, server.launch.exchange)
        taken.append(time.perf_counter() - began)
        if status != 200 or json.loads(body) != ANSWER:
            raise NotServing(f"{server.launch.name} answered {status}: {body[:200]!r}")
    taken.sort()
    return wrk.Run(
        answers=len(taken), duration_s=sum(taken), p50_s=taken[len(taken) // 2], p99_s=taken[-1], cpu_s=0.0, failed=0
    )
