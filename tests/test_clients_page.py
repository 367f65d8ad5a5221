"""The snippets of docs/clients.md run as their users write them; those of other packages where these are installed."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from conformance.__main__ import CLIENTS, PROGRAMS, at, served_by_the_page, snippets

PAGE = (Path(__file__).parents[1] / "docs" / "clients.md").read_text()
PACKAGES = {"carpool": "httpx", "triton": "tritonclient", "kserve": "kserve", "openai": "openai", "mlflow": "mlflow"}
CARPOOL = ["42.0", "42.0", "999000.0", "hello ", "there "]


def test_snippets_run() -> None:
    """Each snippet ends well, and those of carpool and curl say what they should."""
    with served_by_the_page(PAGE) as url:
        for name, package in PACKAGES.items():
            if importlib.util.find_spec(package) is not None:
                command = [sys.executable, "-W", "error", "-c", at(url, snippets(PAGE)[name])]
                done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
                assert done.returncode == 0, done.stderr
                assert name != "carpool" or done.stdout.splitlines() == CARPOOL
        if shutil.which("curl"):
            script = at(url, snippets(PAGE)["curl"]).replace("curl ", "curl -s ").replace("\ncurl", "\necho; curl")
            done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=60, check=False)
            first, second, error, _, last = done.stdout.splitlines()
            assert (first, second) == ("42.0" + "2.0", "4.0")  # a JSON answer has no line end
            assert json.loads(error)["error"]["status"] == 422 and json.loads(last) == {"predictions": [2.0, 4.0]}


@pytest.mark.parametrize("name", CLIENTS)
def test_each_client_has_a_program_and_a_snippet(name: str) -> None:
    """What `make conformance` runs is there, and each client but the one that is no client has its snippet."""
    assert (Path(__file__).parents[1] / "conformance" / "clients" / f"{PROGRAMS[name]}.py").exists()
    assert name in snippets(PAGE) or name == "schemathesis"
