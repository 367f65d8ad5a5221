"""One turn of one side: a process of its own, which measures and prints its figures as JSON on its last line."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.process_tree import ProcessTree

ROOT = Path(__file__).parent.parent
Facts = dict[str, Any]


class SideFailed(Exception):
    """One side did not bring its figure."""


def figures_of(title: str, command: Sequence[str], *, ours: bool, seconds: float) -> Facts:
    """Run one side, and read its figures.

    Args:
        title: who measures what, for complaints.
        command: what to start.
        ours: whether it imports carpool.
        seconds: how long it measures.

    Raises:
        SideFailed: it ended with an error, or not at all.
    """
    paths = [str(ROOT), str(ROOT / "src")] if ours else [str(ROOT)]
    process = subprocess.Popen(
        command,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    tree = ProcessTree(process.pid)
    try:
        # Filling, draining and starting take time besides the measuring, 6 MB arrays most of all.
        answer, complaint = process.communicate(timeout=10 * seconds + 60)
    except subprocess.TimeoutExpired:
        raise SideFailed(f"{title}: no end after {10 * seconds + 60:.0f} s") from None
    finally:
        tree.kill()
        process.wait()
    if process.returncode != 0:
        raise SideFailed(f"{title}: status {process.returncode}\n{complaint[-2000:]}")
    figures: Facts = json.loads(answer.splitlines()[-1])
    return figures
