"""How much memory processes have had at the most, as the system counts it."""

from __future__ import annotations

from pathlib import Path

import pytest


def forget_peaks(pids: list[int]) -> dict[str, int]:
    """Have the system begin anew with the most memory of this process and of workers; return how
    much they have now.
    """
    processes = ["self", *map(str, pids)]
    for process in processes:
        try:
            Path(f"/proc/{process}/clear_refs").write_text("5")
        except OSError:
            pytest.skip("the system does not let us see the peak of memory")
    return {process: peak_of(process) for process in processes}


def peak_of(process: str) -> int:
    """The most bytes of memory that a process has had since."""
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))
