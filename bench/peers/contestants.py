"""Who takes part over HTTP: how each server is started, what it is asked, and what it must answer.

There are three workloads. `echo` is `{"x": 1.5}` -> `{"y": 3.0}` in batches of up to 64; `raw` is a
body of megabytes that comes back as it was. Everything else stays at each server's default. `sleep`
is `echo` with a model that takes its time, and each server is told the SLO of 60 ms.
"""

from __future__ import annotations

import shutil
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from bench import PYTHONPATH, ROOT
from bench.peers.install import python_of, versions
from bench.peers.locks import KEY, certificate, key_file

Workload = Literal["echo", "raw", "sleep"]

MODELS = "bench.peers.servers.carpool_models"
SERVERS = Path(__file__).parent / "servers"
MOSEC_WAITS_MS = (1, 2, 5, 10)
NAMES = (
    "bare_echo",
    "mosec",
    *(f"mosec:{ms}" for ms in MOSEC_WAITS_MS),
    "litserve",
    "bentoml",
    "ray",
    "carpool:greedy",
)
LOCKED = ("carpool_keys", "carpool_tls", "mosec_behind_nginx")
"""Servers that ask for a key, or speak TLS."""
RAW_BODY = bytes(range(250)) * 24_000  # 6 MB


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """One request, and the only right answer to it: a JSON value, or bytes that must be equal."""

    path: str = "/predict"
    body: bytes
    answer: object
    content_type: str = "application/json"
    headers: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """How to start one server. `{port}` in the command stands for its port on 127.0.0.1."""

    name: str
    command: list[str]
    exchange: Exchange
    env: dict[str, str] = field(default_factory=dict)
    directory: Path = SERVERS
    scheme: Literal["http", "https"] = "http"


def launch(name: str, workload: Workload) -> Launch | None:
    """How to start this contestant for a workload, or None if it cannot serve it.

    `carpool:greedy` has another policy than the default; `mosec:5` waits for up to 5 ms, and in
    `mosec:5:64` only 64 requests may wait. `carpool_keys` asks for a key, `carpool_tls` speaks TLS,
    and `mosec_behind_nginx` has nginx do that.
    """
    peer, _, option = name.partition(":")
    if peer == "litserve" and workload == "raw":
        return None  # it reads every body as JSON or as a form
    known, _, how = peer.partition("_") if peer in LOCKED else (peer, "", "")
    plain = Launch(
        name=name,
        command=command(known, workload, option),
        exchange=exchanges(known)[workload],
        env=environment(known, option),
        directory=ROOT if known == "carpool" else SERVERS,
    )
    return locked(plain, how) if how else plain


def locked(plain: Launch, how: str) -> Launch:
    """How to start a server that asks for a key, or speaks TLS."""
    match how:
        case "keys":
            keys = [f"--api-keys={key_file()}"]
            exchange = replace(plain.exchange, headers={"Authorization": f"Bearer {KEY}"})
            return replace(plain, command=[*plain.command, *keys], exchange=exchange)
        case "tls":
            cert, key = certificate()
            options = [f"--tls-cert={cert}", f"--tls-key={key}"]
            return replace(plain, command=[*plain.command, *options], scheme="https")
        case _:
            before = [sys.executable, "behind_nginx.py", "{port}", *map(str, certificate())]
            behind = ["{behind}" if word == "{port}" else word for word in plain.command]
            return replace(plain, command=[*before, *behind], scheme="https")


def serving(target: str, exchange: Exchange | None = None) -> Launch:
    """How to start carpool with another service than those of the workloads.

    Args:
        target: What `carpool serve` gets, `module:service`.
        exchange: What is asked and answered; that of `echo` if nothing is said.
    """
    ours = launch("carpool", "echo")
    assert ours is not None
    words = [target if word == f"{MODELS}:echo" else word for word in ours.command]
    return replace(ours, name=target, command=words, exchange=exchange or ours.exchange)


def command(peer: str, workload: Workload, option: str = "") -> list[str]:
    """The command line, relative to the server's directory."""
    python = str(python_of(peer))
    address = ["127.0.0.1", "--port", "{port}"]
    match peer:
        case "carpool":
            return [*carpool(), "serve", f"{MODELS}:{workload}", "--host", *address]
        case "mosec":
            # Its time-out is of a whole request, in ms; its capacity is how many may wait.
            capacity = ["--capacity", waiting] if (waiting := option.partition(":")[2]) else []
            slo = ["--timeout", "60"] if workload == "sleep" else []
            return [python, "mosec_server.py", workload, "--address", *address, *slo, *capacity]
        case "bentoml":
            service = f"bentoml_server:{workload.capitalize()}"
            return [python, "-m", "bentoml", "serve", service, "--working-dir", ".", "--host", *address]
        case "ray":
            return [python, "ray_server.py", workload, "{port}"]
        case "litserve":
            return [python, "litserve_server.py", "{port}"]
        case "bare_echo":
            return [python, "bare_echo.py", "{port}"]
        case _:
            raise ValueError(f"no such contestant: {peer}")


def environment(peer: str, option: str) -> dict[str, str]:
    """Variables that the server's environment has besides ours."""
    match peer:
        case "carpool":
            policy = {"BENCH_POLICY": option} if option else {}
            return {"PYTHONPATH": PYTHONPATH, **policy}
        case "mosec":
            return {"MAX_WAIT_TIME_MS": option.partition(":")[0]}
        case "bentoml":
            return {"BENTOML_DO_NOT_TRACK": "true"}
        case "ray":
            # Nothing but the second keeps Ray's own sockets on the loopback address as well.
            return {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
        case _:
            return {}


def carpool() -> list[str]:
    """The command beside our interpreter if carpool is installed, else the module."""
    script = Path(sys.executable).with_name("carpool")
    return [str(script)] if script.exists() else [sys.executable, "-m", "carpool"]


def exchanges(peer: str) -> dict[Workload, Exchange]:
    """What is sent and expected by workload; peers differ only in dialect."""
    path = "/inference" if peer == "mosec" else "/predict"
    sent, answer = b'{"x": 1.5}', {"y": 3.0}
    echo = Exchange(path=path, body=sent, answer=answer)
    if peer == "bentoml":
        echo = Exchange(path=path, body=b'{"items": [%b]}' % sent, answer=[answer])
    elif peer == "bare_echo":
        echo = Exchange(path=path, body=sent, answer={"x": 1.5})
    raw = Exchange(path=path, body=RAW_BODY, answer=RAW_BODY, content_type="application/octet-stream")
    return {"echo": echo, "raw": raw, "sleep": echo}


def is_installed(name: str) -> bool:
    """Whether the contestant can be started at all."""
    peer = name.partition(":")[0]
    if peer in LOCKED:
        peer = peer.partition("_")[0]
    if name == "mosec_behind_nginx" and not shutil.which("nginx"):
        return False
    return peer == "carpool" or bool(versions(peer))
