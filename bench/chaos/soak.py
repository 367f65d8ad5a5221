"""One soak: a server, its clients and the nemesis, and then what was lost and what is left."""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from bench import ROOT
from bench.chaos import leaks
from bench.chaos.asks import HOST, Asks
from bench.chaos.checker import Findings, check
from bench.chaos.journal import GONE, Journal
from bench.chaos.limits import MAX_BODY_MB, TIMEOUT_S
from bench.chaos.nemesis import Nemesis
from bench.chaos.nodes import Nodes, cluster
from bench.chaos.targets import Target
from bench.chaos.witness import FOLDER_VARIABLE
from bench.tools.server import NotServing, Started, started, tail

WARM_UP_S = 8.0
STOP_S = 30.0  # that a server may take to end by itself
CLIENT_PROCESSES = 2
CLOSED, THINK_S, RATE = 64, 0.04, 600.0
"""Per client process: closed-loop clients and their mean pause, and the rate of the open loop."""

_OUTCOMES = {"200": "ok", "429": "overloaded", "500": "model_error", "503": "unavailable", "504": "expired"}
_BACK_TO_ZERO = ("in_flight_requests", "queue_length", "queue_bytes", "in_flight_batches")


@dataclass(slots=True)
class Outcome:
    """All that a soak has found.

    Attributes:
        findings: What the journals say.
        leaks: What is held that was not held before.
        metrics: Where the server's own counts differ from the clients'.
        healthy: Whether an ordinary request was answered right at the end.
        exit_code: Of the server after SIGTERM; None if it had to be killed.
        unsent: Requests of the open loop for which there was no connection.
        seconds: How long the nemesis was at it.
    """

    findings: Findings
    leaks: list[str] = field(default_factory=list)
    metrics: list[str] = field(default_factory=list)
    healthy: bool = False
    exit_code: int | None = None
    unsent: int = 0
    seconds: float = 0.0


@dataclass(slots=True)
class Progress:
    """What all clients have done so far: requests asked, answered with 200, otherwise, not sent."""

    asked: int = 0
    good: int = 0
    bad: int = 0
    unsent: int = 0


def soak(
    target: Target,
    seconds: float,
    seed: int,
    folder: Path,
    show: Callable[[float, Progress, int], None],
    warm_up_s: float = WARM_UP_S,
) -> Outcome:
    """Run a soak.

    Args:
        target: The server.
        seconds: How long the nemesis is at it.
        seed: Of clients and nemesis.
        folder: For the journals and the server's log; empty.
        show: Called about once a second with the seconds gone, the clients' progress and the number
            of faults.
        warm_up_s: Load without faults before it is noted what the server holds.

    Raises:
        NotServing: The server did not start.
    """
    journal = Journal(folder / "client-nemesis.log")
    with _cluster(target, folder) as (nodes, env), _serving(target, folder, env) as server:
        port, process = server.port, server.process
        asks = Asks(f"{seed} nemesis", target.path, TIMEOUT_S, target.deadline_header)
        nemesis = Nemesis(port, folder, f"{seed}", asks, MAX_BODY_MB * 2**20, journal, nodes, target.pace)
        _wait_until_healthy(nemesis, process, folder)
        _run_clients(target, port, folder, f"{seed} warm-up", warm_up_s, lambda gone, progress: None)
        time.sleep(2)
        before = leaks.look(server.tree, server.scratch)
        began = time.monotonic()
        nemesis.start()

        def look(gone: float, progress: Progress) -> None:
            show(gone, progress, sum(nemesis.counts.values()))
            if nodes is not None:
                nodes.mend()

        clients = _run_clients(target, port, folder, f"{seed}", seconds, look)
        nemesis.stop()
        took_s = time.monotonic() - began
        after = leaks.settle(lambda: leaks.look(server.tree, server.scratch), before, with_ray=target.on_ray)
        healthy = process.poll() is None and nemesis.healthy()
        journal.close()
        findings = check(folder, most_runs=target.most_runs)
        metrics = _compare(findings, _metrics(port)) if target.metrics and healthy else []
    found = leaks.leaked(before, after, with_ray=target.on_ray)
    return Outcome(findings, found, metrics, healthy, process.returncode, clients.unsent, took_s)


# -- the server


@contextlib.contextmanager
def _cluster(target: Target, folder: Path) -> Iterator[tuple[Nodes | None, dict[str, str]]]:
    """The Ray cluster of a server that runs on one, and what its environment has besides."""
    if not target.on_ray:
        yield None, {}
        return
    with tempfile.TemporaryDirectory(prefix="ray") as short, cluster(Path(short), _env(target, folder)) as found:
        yield found


def _env(target: Target, folder: Path) -> dict[str, str]:
    return {FOLDER_VARIABLE: str(folder), **target.env}


@contextlib.contextmanager
def _serving(target: Target, folder: Path, more: dict[str, str]) -> Iterator[Started]:
    env = {**_env(target, folder), **more}
    with started(target.command, target.folder, env, folder / "server.log") as server:
        yield server
        server.process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.process.wait(STOP_S)


def _wait_until_healthy(nemesis: Nemesis, process: subprocess.Popen[bytes], folder: Path) -> None:
    if not nemesis.healthy() or process.poll() is not None:
        raise NotServing(f"the server does not answer:\n{tail(folder / 'server.log')}")


def _metrics(port: int) -> dict[str, float]:
    """The server's counts: requests by outcome, and the gauges that must be back at zero."""
    connection = http.client.HTTPConnection(HOST, port, timeout=10)
    connection.request("GET", "/metrics")
    text = connection.getresponse().read().decode()
    connection.close()
    counts = {
        name: float(value)
        for name, value in re.findall(r'^carpool_requests_total\{.*outcome="(\w+)".*\} (\S+)$', text, re.MULTILINE)
    }
    for gauge in _BACK_TO_ZERO:
        values = re.findall(rf"^carpool_{gauge}\{{.*\}} (\S+)$", text, re.MULTILINE)
        counts[gauge] = sum(map(float, values)) if values else float("nan")
    return counts


def _compare(findings: Findings, counts: dict[str, float]) -> list[str]:
    """Where the server's counts cannot be those of the clients.

    What clients have received must be counted; what is counted beyond that must be of clients that
    have left.
    """
    statuses = findings.statuses()
    # until it is ready, a service only refuses, and counts nothing
    statuses["503"] -= findings.ended.get("healthy", Counter())["503"]
    found = [f"{name} is {counts[name]:g} and not 0" for name in _BACK_TO_ZERO if counts[name] != 0]
    surplus = counts["cancelled"]
    for status, outcome in _OUTCOMES.items():
        if counts[outcome] < statuses[status]:
            found.append(f"{statuses[status]} clients got a {status}, but {counts[outcome]:g} are counted as {outcome}")
        surplus += counts[outcome] - statuses[status]
    gone = statuses[GONE] + findings.wrongs.counts["lost"]
    if surplus > gone:
        found.append(f"{surplus:g} requests are counted that nobody has sent, {gone} clients have left")
    return found


# -- the clients


def _run_clients(
    target: Target, port: int, folder: Path, seed: str, seconds: float, show: Callable[[float, Progress], None]
) -> Progress:
    """All client processes, from start to end."""
    counts: dict[int, list[int]] = {}
    processes = [_start_client(target, port, folder, f"{seed} {i}", seconds) for i in range(CLIENT_PROCESSES)]
    readers = [threading.Thread(target=_read, args=(i, p, counts), daemon=True) for i, p in enumerate(processes)]
    for reader in readers:
        reader.start()
    began = time.monotonic()
    try:
        while any(process.poll() is None for process in processes):
            time.sleep(1)
            show(min(seconds, time.monotonic() - began), _sum(counts))
    finally:
        for process in processes:
            process.kill()
            process.wait()
    for reader in readers:
        reader.join()
    if failed := [process.returncode for process in processes if process.returncode]:
        raise RuntimeError(f"client processes ended with {failed}")
    return _sum(counts)


def _start_client(target: Target, port: int, folder: Path, seed: str, seconds: float) -> subprocess.Popen[str]:
    name = seed.replace(" ", "-")
    return subprocess.Popen(
        [
            *(sys.executable, "-m", "bench.chaos.clients", str(port), "--journal", str(folder / f"client-{name}.log")),
            *("--seed", seed, "--seconds", str(seconds), "--path", target.path, "--timeout", str(TIMEOUT_S)),
            *("--closed", str(round(CLOSED * target.load)), "--think", str(THINK_S)),
            *("--rate", str(RATE * target.load)),
            *("--deadline-header", target.deadline_header),
        ],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )


def _read(number: int, process: subprocess.Popen[str], counts: dict[int, list[int]]) -> None:
    assert process.stdout is not None
    with process.stdout as lines:
        for line in lines:
            counts[number] = json.loads(line)


def _sum(counts: dict[int, list[int]]) -> Progress:
    return Progress(*[sum(column) for column in zip(*counts.values(), strict=True)])


def healthy_shares(findings: Findings) -> tuple[float, float]:
    """Of the ordinary requests, those answered with 200 and those refused with 429."""
    ordinary: Counter[str] = findings.ended.get("ok", Counter())
    total = ordinary.total() or 1
    return ordinary["200"] / total, ordinary["429"] / total
