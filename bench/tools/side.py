"""One turn of one side: a process that measures, and prints its figures as JSON at its end."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping, Sequence

from bench import PYTHONPATH, ROOT
from bench.tools.figures import Facts
from bench.tools.process_tree import ProcessTree


class SideFailed(Exception):
    """One side gave no figure; the text says which and why."""


def figures_of(
    title: str,
    command: Sequence[str],
    *,
    ours: bool,
    seconds: float,
    env: Mapping[str, str] | None = None,
    unset: Sequence[str] = (),
) -> Facts:
    """Run one side, and read its figures.

    Args:
        title: Who measures what, for complaints.
        command: What to start.
        ours: Whether it imports carpool.
        seconds: How long it measures.
        env: What its environment has besides ours.
        unset: What of ours its environment has not.

    Raises:
        SideFailed: It ended with an error, or not at all.
    """
    inherited = {name: value for name, value in os.environ.items() if name not in unset}
    process = subprocess.Popen(
        command,
        env={**inherited, "PYTHONPATH": PYTHONPATH if ours else str(ROOT), **(env or {})},
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
