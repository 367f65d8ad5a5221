"""The parts that run a network: the bare loop, carpool, and other servers."""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from bench import PYTHONPATH, ROOT
from bench.gpu import meter
from bench.gpu.side import answers_file, are_like, some_items
from bench.gpu.tasks import TASKS, Task
from bench.peers.contestants import Exchange, Launch
from bench.tools import wrk
from bench.tools.comparison import say
from bench.tools.server import NotServing, running
from bench.tools.side import figures_of

Row = dict[str, Any]
CONNECTIONS = (64, 256)
BODIES = 64
WRK_THREADS = max(1, min(4, (os.cpu_count() or 1) // 4))
SIDES = ("program", "http", "mosec", "litserve")
_BOUNDARY = "gpu-bench"


class Answer:
    """What a server must answer to the first item; equal to each body that is like it."""

    def __init__(self, right: np.ndarray[Any, Any]) -> None:
        self.right = right

    def __eq__(self, body: object) -> bool:
        if not isinstance(body, bytes):
            return False
        is_npy = body.startswith(b"\x93NUMPY")
        found = np.load(io.BytesIO(body)) if is_npy else np.frombuffer(body, np.float32)
        return are_like(found, self.right)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"{self.right.size} numbers like {self.right[:3]} ..."


def npy(item: np.ndarray[Any, Any]) -> bytes:
    file = io.BytesIO()
    np.save(file, item)
    return file.getvalue()


def form(item: np.ndarray[Any, Any]) -> bytes:
    """The item as the file of a form."""
    head = f'--{_BOUNDARY}\r\nContent-Disposition: form-data; name="item"; filename="item"\r\n\r\n'
    return head.encode() + item.tobytes() + f"\r\n--{_BOUNDARY}--\r\n".encode()


def launches(task: Task, batch: int, right: np.ndarray[Any, Any]) -> Iterator[tuple[str, Launch, list[bytes]]]:
    """Yield each server with its settings, and the bodies that it is asked."""
    items, answer = some_items(task)[:BODIES], Answer(right)
    shared = {name: value for name, value in os.environ.items() if name.startswith("BENCH_GPU_")}
    env = {"PYTHONPATH": PYTHONPATH, "BENCH_GPU_BATCH": str(batch), **shared}

    def launch(name: str, command: list[str], exchange: Exchange, more: dict[str, str]) -> Launch:
        return Launch(name=name, command=command, exchange=exchange, env={**env, **more}, directory=ROOT)

    arrays = [npy(item) for item in items]
    raw = [item.tobytes() for item in items]
    of_arrays = Exchange(body=arrays[0], answer=answer, content_type="application/x-npy")
    of_raw = Exchange(body=raw[0], answer=answer, content_type="application/octet-stream")
    for workers, title, service, exchange, bodies in (
        (1, ".npy", task.name, of_arrays, arrays),
        *((workers, "raw", f"{task.name}_raw", of_raw, raw) for workers in task.workers),
    ):
        command = [sys.executable, "-m", "carpool", "serve", f"bench.gpu.services:{service}", "--port", "{port}"]
        more = {"BENCH_GPU_WORKERS": str(workers)}
        yield f"carpool, HTTP {title}, {workers} w", launch("http", command, exchange, more), bodies
    folder = Path(__file__).parent / "servers"
    exchange = replace(of_raw, path="/inference")
    address = ["--address", "127.0.0.1", "--port", "{port}", "--timeout", "60000"]
    command = [sys.executable, str(folder / "mosec_tensors.py"), task.name, *address]
    for workers in task.workers:
        more = {"MAX_WAIT_TIME_MS": "5", "BENCH_GPU_WORKERS": str(workers)}
        yield f"mosec, 5 ms, {workers} w", launch("mosec", command, exchange, more), raw
    bodies = [form(item) for item in items]
    exchange = Exchange(body=bodies[0], answer=answer, content_type=f"multipart/form-data; boundary={_BOUNDARY}")
    command = [sys.executable, str(folder / "litserve_tensors.py"), task.name, "{port}"]
    more = {"MAX_WAIT_TIME_MS": "5", "LITSERVE_FRONTS": "4"}
    yield "LitServe, 5 ms, 4 fronts", launch("litserve", command, exchange, more), bodies


@contextmanager
def scratch() -> Iterator[Path]:
    """A folder for the meters, which all processes that are started find."""
    folder = Path(tempfile.mkdtemp(prefix="gpu-"))
    meters = folder / "meters"
    meters.mkdir()
    os.environ[meter.FOLDER] = str(meters)
    try:
        yield folder
    finally:
        del os.environ[meter.FOLDER]
        shutil.rmtree(folder)


def forget(folder: Path) -> None:
    """Remove the meters of workers that have ended."""
    for path in Path(folder, "meters").iterdir():
        path.unlink()


def rows(name: str, seconds: float, sides: Sequence[str]) -> Iterator[Row]:
    """Yield the rows of one task: the bare loop, and the sides that are asked for."""
    task = TASKS[name]
    with scratch() as folder:

        def side(kind: str, batch: int, limit_s: float) -> Row:
            command = [sys.executable, "-m", "bench.gpu.side", kind, name, str(limit_s), str(folder)]
            env = {"BENCH_GPU_BATCH": str(batch)}
            forget(folder)
            return figures_of(f"{name}, {kind}", command, ours=True, seconds=limit_s + 3, env=env)

        best = side("offline", 0, 2 * seconds)
        limit = best["items_per_s"]
        yield {"side": "the bare loop", **best, "share": 1.0}
        say(f"  the bare loop: {limit:,.0f} items/s in batches of {best['batch']}")
        for load, row in side("program", best["batch"], seconds).items() if "program" in sides else ():
            say(f"  carpool, {load}: {row['items_per_s']:,.0f} items/s")
            yield {"side": f"carpool, {load}", **row, "share": row["items_per_s"] / limit}
        right = np.load(answers_file(folder))[0]
        for title, launch, bodies in launches(task, best["batch"], right):
            if launch.name not in sides:
                continue
            forget(folder)
            try:
                with running(launch) as server:
                    for connections in CONNECTIONS:
                        yield _loaded(title, server, bodies, connections, seconds, folder, limit)
            except (NotServing, OSError, subprocess.CalledProcessError) as problem:
                yield {"side": title, "problem": str(problem)[-1500:]}


def _loaded(
    title: str, server: Any, bodies: list[bytes], connections: int, seconds: float, folder: Path, limit: float
) -> Row:
    """One server at one number of connections, after a warm-up."""
    meters = folder / "meters"

    def load(seconds: float) -> wrk.Run:
        whole = max(1, round(seconds))
        return wrk.run(server, connections=connections, seconds=whole, threads=WRK_THREADS, bodies=bodies)

    load(seconds / 3)
    before = meter.read(meters)
    run = load(seconds)
    counts = meter.read(meters) - before
    say(f"  {title}, {connections} connections: {run.requests_per_s:,.0f} items/s")
    return {
        "side": f"{title}, {connections} c",
        "items_per_s": run.requests_per_s,
        "seconds": run.duration_s,
        "p50_s": run.p50_s,
        "p99_s": run.p99_s,
        "front_cpu_s": max(0.0, run.cpu_s - counts.cpu_s),
        "counts": asdict(counts),
        "failed": run.failed,
        "share": run.requests_per_s / limit,
    }
