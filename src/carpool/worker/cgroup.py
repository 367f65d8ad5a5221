"""The CPU limit of a container: how many cores' time its control groups leave to this process (Linux)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath

_ROOT = Path("/")
_COLONS = 2  # in a line: of a hierarchy, its controllers, and the group


def cpu_limit(root: Path = _ROOT) -> float | None:
    """Cores' worth of time; None where nothing limits it, or the system cannot tell.

    Args:
        root: where `proc` and `sys` lie.
    """
    try:
        groups = (root / "proc/self/cgroup").read_text()
    except (OSError, ValueError):
        return None
    limits = []
    for _, controllers, group in [line.split(":", 2) for line in groups.splitlines() if line.count(":") >= _COLONS]:
        if not controllers:
            limits += [_limit_2(folder) for folder in _folders(root / "sys/fs/cgroup", group)]
        elif "cpu" in controllers.split(","):
            limits += [_limit_1(folder) for folder in _folders(root / "sys/fs/cgroup" / controllers, group)]
    return min((limit for limit in limits if limit is not None), default=None)


def _folders(mount: Path, group: str) -> Iterator[Path]:
    """The group's and those around it: each may have a limit. In a container the mount is often its own group."""
    inner = PurePosixPath(group.lstrip("/"))
    return (mount / each for each in (inner, *inner.parents))


def _limit_2(folder: Path) -> float | None:
    """Of the second version of control groups."""
    try:
        quota, period = (folder / "cpu.max").read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError, ZeroDivisionError):
        return None


def _limit_1(folder: Path) -> float | None:
    """Of the first."""
    try:
        quota = int((folder / "cpu.cfs_quota_us").read_text())
        return None if quota <= 0 else quota / int((folder / "cpu.cfs_period_us").read_text())
    except (OSError, ValueError, ZeroDivisionError):
        return None
