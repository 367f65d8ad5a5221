"""A Prometheus reads deploy/ and scrapes a server: a worker that is killed makes the alert that it should.

It is skipped where Debian's package `prometheus` is not installed; PROMETHEUS names a folder with its two programs.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.processes import children, guards_of
from tests.support.serving import serve
from tests.support.sources import ROOT
from tests.support.waiting import wait_until

PROGRAMS = os.pathsep.join([os.environ.get("PROMETHEUS", ""), os.environ["PATH"]])
PROMTOOL, PROMETHEUS = (shutil.which(name, path=PROGRAMS) for name in ("promtool", "prometheus"))
KEY = "a-long-enough-key"


def test_promtool_takes_the_files(tmp_path: Path) -> None:
    """Prometheus's own checker finds nothing wrong with the alerts and the settings in deploy/."""
    if PROMTOOL is None:
        pytest.skip("promtool is not installed")
    for name in ("alerts.yaml", "prometheus.yaml"):
        text = (ROOT / "deploy" / name).read_text()
        (tmp_path / name).write_text(text.replace("/etc/prometheus/", f"{tmp_path}/"))
    (tmp_path / "carpool.key").write_text(KEY)
    for what in (("rules", "alerts.yaml"), ("config", "prometheus.yaml")):
        done = subprocess.run(
            [PROMTOOL, "check", *what], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr


@contextlib.contextmanager
def prometheus(folder: Path, admin: str) -> Iterator[int]:
    """A Prometheus with the files of deploy/ that scrapes one address; its port."""
    assert PROMETHEUS is not None
    (folder / "alerts.yaml").write_text((ROOT / "deploy" / "alerts.yaml").read_text())
    (folder / "carpool.key").write_text(KEY)
    text = (ROOT / "deploy" / "prometheus.yaml").read_text()
    for old, new in (("/etc/prometheus/", f"{folder}/"), ("127.0.0.1:9000", admin), ("5s", "1s")):
        assert old in text
        text = text.replace(old, new)
    (folder / "prometheus.yaml").write_text(text)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = int(free.getsockname()[1])
    log = (folder / "log").open("w")
    process = subprocess.Popen(
        [
            PROMETHEUS,
            f"--config.file={folder}/prometheus.yaml",
            f"--storage.tsdb.path={folder}/data",
            f"--web.listen-address=127.0.0.1:{port}",
        ],
        stdout=log,
        stderr=log,
    )
    try:
        yield port
    finally:
        process.terminate()
        process.wait(30)
        log.close()


def asked(port: int, path: str) -> Any:
    """What the API of a Prometheus answers; None while it does not."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/api/v1/{path}", timeout=10) as answer:
            return json.load(answer)["data"]
    except OSError:
        return None


@pytest.mark.slow
def test_a_killed_worker_makes_its_alert(tmp_path: Path) -> None:
    """Prometheus scrapes the admin address with a key and loads the alerts, none of which fires; once a
    worker has been killed, `CarpoolWorkerDied` fires for its stage, and no alert that pages somebody.
    """
    if PROMETHEUS is None:
        pytest.skip("prometheus is not installed")
    (tmp_path / "keys").write_text(f"prometheus:{KEY}\n")
    with socket.create_server(("127.0.0.1", 0)) as free:
        admin = f"127.0.0.1:{free.getsockname()[1]}"
    keys = ("--api-keys", str(tmp_path / "keys"), "--admin-address", admin)
    with serve("tests.support.http.models:scale", *keys) as served, prometheus(tmp_path, admin) as port:

        def target() -> Any:
            targets = (asked(port, "targets") or {}).get("activeTargets") or [{}]
            return targets[0].get("health"), targets[0].get("lastError")

        wait_until(lambda: target() == ("up", ""))
        rules = asked(port, "rules")["groups"][0]["rules"]
        assert [rule["name"] for rule in rules][:3] == ["CarpoolDown", "CarpoolNoWorkerReady", "CarpoolWorkerDied"]

        def firing() -> list[tuple[str, str]]:
            return [
                (alert["labels"]["alertname"], alert["labels"].get("stage", ""))
                for alert in asked(port, "alerts")["alerts"]
                if alert["state"] == "firing"
            ]

        wait_until(lambda: asked(port, "query?query=count_over_time(up[1m])>3")["result"] != [])
        assert firing() == []
        (worker,) = set(children(served.process.pid)) - set(guards_of(served.process.pid))
        os.kill(worker, signal.SIGKILL)
        wait_until(lambda: firing() == [("CarpoolWorkerDied", "Scale")])
