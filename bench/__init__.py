"""Benchmarks of carpool: `python -m bench` lists them all, `README.md` says what they need."""

import os
from pathlib import Path

ROOT = Path(__file__).parent.parent
"""The repository, in which every program runs."""

PYTHONPATH = f"{ROOT / 'src'}{os.pathsep}{ROOT}"
"""Makes another process import carpool from the sources beside this folder, installed or not."""

CACHE = Path(os.environ.get("CARPOOL_BENCH_ENVS") or Path.home() / ".cache" / "carpool-bench")
"""The peers' environments and the simulated runs that are remembered lie here."""
