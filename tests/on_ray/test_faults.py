"""Nodes that die, fall silent or freeze, and a head that is lost, under 32 callers: no request fails."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from typing import Any

import pytest

from tests.on_ray.faults import SILENCE_S
from tests.support.sources import ROOT

NAMESPACES = ["unshare", "--net", "--pid", "--fork", "--mount-proc", "--kill-child"]


@pytest.fixture(scope="module")
def told() -> dict[str, dict[str, Any]]:
    """What became of the requests at each fault."""
    pytest.importorskip("ray")
    if not shutil.which("unshare") or not shutil.which("ip") or subprocess.run([*NAMESPACES, "true"]).returncode:
        pytest.skip("it needs namespaces of its own: root, unshare and ip")
    program = [*NAMESPACES, sys.executable, "-m", "tests.on_ray.faults"]
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    done = subprocess.run(
        program, cwd=ROOT, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=280
    )
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"fault"')]
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    return {line["fault"]: line for line in lines}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("fault", ["raylet", "silent", "frozen", "unheard", "head"])
def test_no_request_fails(told: dict[str, dict[str, Any]], fault: str) -> None:
    """No request fails, none takes longer than `silence_s` and 1.5 seconds, and workers are replaced
    elsewhere; also if Ray places their successors on a node of which it does not know that it is silent.
    """
    outcome = told[fault]
    assert outcome["errors"] == []
    assert outcome["answers"] > 200
    assert outcome["longest_s"] <= SILENCE_S + 1.5
