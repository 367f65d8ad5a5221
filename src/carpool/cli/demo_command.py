"""The demo of `carpool demo`: the digits example, served over HTTP to many clients at once.

Every answer is checked: it must be the one that the model gives alone, image by image. The figures
come from the clients and from the server's own metrics.
"""

from __future__ import annotations

import contextlib
import http.client
import importlib
import importlib.util
import json
import re
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

CLIENTS = 64
ROUNDS = 10  # how often every held-out image is sent
_START_TIMEOUT_S = 60.0


@dataclass(slots=True)
class Tally:
    """The answers that the clients got, by the index of the image, with their latencies, and status
    and body of each response that was none.
    """

    answers: dict[int, list[int]] = field(default_factory=dict)
    latencies_s: list[float] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)


def run(console: Console) -> int:
    name = _example()
    digits = importlib.import_module(name)
    _, _, images, labels = digits.halves()
    console.print(f"The model alone: one call for each of {len(images)} held-out images ...")
    model = digits.Digits()
    model.setup()
    alone = [int(model.predict([image.tolist()])[0]) for image in images]
    console.print(f"The same images, {ROUNDS} times over, from {CLIENTS} concurrent HTTP clients:")
    with _server(f"{name}:service") as (host, port):
        tally, took_s = _send_all(host, port, [image.tolist() for image in images], console)
        sizes = _batch_sizes(host, port)
    return _report(console, tally, took_s, sizes, alone, [int(label) for label in labels])


def _example() -> str:
    """Return the example's module, which is in the installed package or in a checkout."""
    for name in ("carpool.examples.digits", "examples.digits"):
        with contextlib.suppress(ModuleNotFoundError):
            if importlib.util.find_spec(name) is not None:
                return name
    raise SystemExit("carpool: the demo's example is missing: reinstall carpool, or run it from a checkout")


@contextlib.contextmanager
def _server(target: str) -> Iterator[tuple[str, int]]:
    """Run `carpool serve` in a process of its own, and give its host and port while it is ready."""
    command = [sys.executable, "-m", "carpool", "serve", target, "--port", "0", "--log", "json"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    log: list[str] = []
    try:
        for line in process.stderr:
            log.append(line)
            found = re.search(r"ready on http://([^:/\"]+):(\d+)", line)
            if found:
                break
        else:
            raise SystemExit("carpool: the server did not start:\n" + "".join(log))
        threading.Thread(target=process.stderr.read, daemon=True).start()
        yield found[1], int(found[2])
    finally:
        process.send_signal(signal.SIGTERM)
        status = process.wait(timeout=_START_TIMEOUT_S)
    if status:
        raise SystemExit(f"carpool: the server ended with status {status}")


def _send_all(host: str, port: int, images: list[list[float]], console: Console) -> tuple[Tally, float]:
    tally, lock = Tally(), threading.Lock()
    jobs = iter([i for _ in range(ROUNDS) for i in range(len(images))])  # the clients share them
    bodies = [json.dumps(image) for image in images]
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("requests", total=ROUNDS * len(images))
        arguments = (host, port, bodies, jobs, tally, lock, lambda: progress.advance(task))
        clients = [threading.Thread(target=_send, args=arguments) for _ in range(CLIENTS)]
        started = time.perf_counter()
        for thread in clients:
            thread.start()
        for thread in clients:
            thread.join()
        return tally, time.perf_counter() - started


def _send(
    host: str,
    port: int,
    bodies: list[str],
    jobs: Iterator[int],
    tally: Tally,
    lock: threading.Lock,
    advance: Callable[[], None],
) -> None:
    connection = http.client.HTTPConnection(host, port)
    while True:
        with lock:
            i = next(jobs, None)
        if i is None:
            connection.close()
            return
        started = time.perf_counter()
        connection.request("POST", "/predict", bodies[i], {"content-type": "application/json"})
        response = connection.getresponse()
        body = response.read()
        latency_s = time.perf_counter() - started
        with lock:
            if response.status == 200:
                tally.answers.setdefault(i, []).append(json.loads(body))
                tally.latencies_s.append(latency_s)
            else:
                tally.failures.append(f"{response.status} {body.decode()}")
        advance()


def _batch_sizes(host: str, port: int) -> tuple[int, int]:
    connection = http.client.HTTPConnection(host, port)
    connection.request("GET", "/metrics")
    text = connection.getresponse().read().decode()
    connection.close()
    requests = re.search(r"^carpool_batch_size_sum\{.*\} ([\d.]+)", text, re.MULTILINE)
    batches = re.search(r"^carpool_batch_size_count\{.*\} ([\d.]+)", text, re.MULTILINE)
    assert requests is not None
    assert batches is not None
    return int(float(requests[1])), int(float(batches[1]))


def _report(
    console: Console, tally: Tally, took_s: float, sizes: tuple[int, int], alone: list[int], labels: list[int]
) -> int:
    answers = [(i, answer) for i, given in tally.answers.items() for answer in given]
    right = sum(answer == labels[i] for i, answer in answers)
    different = sum(answer != alone[i] for i, answer in answers)
    lost = ROUNDS * len(alone) - len(answers)
    percentiles = statistics.quantiles(tally.latencies_s, n=100) if len(answers) > 1 else [0.0] * 99
    table = Table(show_header=False, box=None, padding=(0, 2))
    rows: list[tuple[str, Any]] = [
        ("requests answered", f"{len(answers)} of {ROUNDS * len(alone)}"),
        ("accuracy on the held-out half", f"{right / max(1, len(answers)):.1%}"),
        ("answers that differ from the model alone", different),
        ("mean batch size", f"{sizes[0] / max(1, sizes[1]):.1f}"),
        ("latency p50 / p99", f"{percentiles[49] * 1e3:.1f} / {percentiles[98] * 1e3:.1f} ms"),
        ("requests per second", f"{len(answers) / took_s:.0f}"),
    ]
    for name, value in rows:
        table.add_row(name, str(value))
    console.print(table)
    if lost or different or tally.failures:
        console.print(f"[red]{lost} requests without an answer, {different} with a wrong one[/]")
        for failure in tally.failures[:3]:
            console.print(f"  {failure}", markup=False)
        return 1
    console.print("[green]Every client got exactly the answer that the model gives alone.[/]")
    return 0
