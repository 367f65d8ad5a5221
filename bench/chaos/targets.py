"""The servers that can be soaked, each with the same model, workers, batch size and limits.

Where a server can restart its workers or end a call that hangs, it is told to.
"""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path

from bench import PYTHONPATH, ROOT
from bench.chaos.limits import BATCH, HANG_S, MAX_BODY_MB, QUEUE, TIMEOUT_S, WORKER_FAULT, WORKERS
from bench.peers.install import not_installed, python_of, versions

_MID_SEND = "worker.mid_send:kill:800"
HERE = Path(__file__).parent


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """One server.

    Attributes:
        command: With `{port}` for its port on 127.0.0.1, run in `folder`.
        path: Where the model answers.
        deadline_header: Sets a request's deadline in ms, if there is such a header.
        metrics: Whether it has carpool's `/metrics`.
        load: The part of the full load that it is given, so that it is not overloaded already
            without faults.
        settings: What it was told, for the reader of the table.
        on_ray: Whether it runs its workers on a Ray cluster, the nodes of which are killed, too.
        most_runs: By how many workers a request may be run.
        pace: How many times as long as usual the pauses between faults are.
    """

    name: str
    version: str
    command: list[str]
    folder: Path
    path: str
    settings: str
    deadline_header: str = ""
    metrics: bool = False
    load: float = 1.0
    on_ray: bool = False
    most_runs: int = 2
    pace: float = 1.0
    env: dict[str, str] = field(default_factory=dict)


def target(name: str) -> Target:
    """The server of this name.

    Raises:
        LookupError: There is no such server, or it is not installed; the text says what to do.
    """
    if name == "carpool":
        return _carpool()
    if name == "ray":
        return _carpool_on_ray()
    if name not in ("mosec", "litserve"):
        raise LookupError(f"there is no server {name!r}: choose from carpool, ray, mosec and litserve")
    if not (version := versions(name).get(name, "")):
        raise LookupError(not_installed(name))
    return _mosec(version) if name == "mosec" else _litserve(version)


def _carpool() -> Target:
    import carpool

    return Target(
        name="carpool",
        version=carpool.__version__,
        command=[
            *(sys.executable, "-m", "carpool", "serve", "bench.chaos.carpool_service:service"),
            *("--host", "127.0.0.1", "--port", "{port}", "--max-body-mb", str(MAX_BODY_MB)),
        ],
        folder=ROOT,
        path="/predict",
        deadline_header="X-Request-Timeout-Ms",
        metrics=True,
        settings=f"`timeout_s={TIMEOUT_S:g}`, `max_batch_time_s={HANG_S:g}`, `max_queue_size={QUEUE}`, otherwise its"
        f" defaults; each worker also kills itself with half of its 800th reply written (`CARPOOL_FAULT`)",
        env={"PYTHONPATH": PYTHONPATH, WORKER_FAULT: _MID_SEND},
    )


def _carpool_on_ray() -> Target:
    if importlib.util.find_spec("ray") is None:
        raise LookupError("Ray is not installed: pip install 'carpool[ray]'")
    local = _carpool()
    return replace(
        local,
        name="carpool on Ray",
        command=[*local.command, "--on", "ray"],
        settings=f"{local.settings}, on a Ray cluster of a head and three nodes",
        on_ray=True,
        # A silent machine is held against no request; two killed workers may follow.
        most_runs=3,
        load=1 / 2,
        pace=6.0,  # an actor takes seconds to start, not a tenth of one
    )


def _mosec(version: str) -> Target:
    return Target(
        name="mosec",
        version=version,
        command=[
            *(str(python_of("mosec")), "mosec_service.py", str(WORKERS), str(BATCH), str(HANG_S)),
            *("--address", "127.0.0.1", "--port", "{port}", "--timeout", f"{TIMEOUT_S * 1000:.0f}"),
            *("--capacity", str(QUEUE), "--max-request-size", str(MAX_BODY_MB * 2**20)),
        ],
        folder=HERE,
        path="/inference",
        settings=f"`--timeout {TIMEOUT_S * 1000:.0f}`, `--capacity {QUEUE}`, `max_wait_time=1`,"
        f" worker `timeout={HANG_S:g}`; it restarts dead workers by itself",
    )


def _litserve(version: str) -> Target:
    return Target(
        name="litserve",
        version=version,
        command=[
            *(str(python_of("litserve")), "litserve_service.py", "{port}", str(WORKERS), str(BATCH)),
            *(str(TIMEOUT_S), str(MAX_BODY_MB * 2**20)),
        ],
        folder=HERE,
        path="/predict",
        load=1 / 6,
        settings=f"`timeout={TIMEOUT_S:g}`, `restart_workers=True`, `max_payload_size`; it has no limit for one call."
        " It is given a sixth of the load of the others, which it can serve while nothing is wrong",
    )
