"""The CPU limit of a container: how many cores' time this process gets from its control groups
(Linux).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath

_ROOT = Path("/")
_COLONS = 2  # a line has three fields: a hierarchy's number, its controllers, and the group


def cpu_limit(root: Path = _ROOT) -> float | None:
    """Return how many cores' time there is; None if nothing limits it, or the system cannot tell.

    Args:
        root: The folder of `proc` and `sys`.
    """
    try:
        groups = (root / "proc/self/cgroup").read_text()
    except (OSError, ValueError):
        return None
    limits = []
    for _, controllers, group in [line.split(":", 2) for line in groups.splitlines() if line.count(":") >= _COLONS]:
        if not controllers:
            limits += [_limit_v2(folder) for folder in _folders(root / "sys/fs/cgroup", group)]
        elif "cpu" in controllers.split(","):
            mounts = [
                root / "sys/fs/cgroup" / name for name in (controllers, "cpu")
            ]  # the kernel's order may be another
            limits += [_limit_v1(folder) for mount in mounts for folder in _folders(mount, group)]
    return min((limit for limit in limits if limit is not None), default=None)


def _folders(mount: Path, group: str) -> Iterator[Path]:
    """Return the folders of a group and of those around it, each of which may have a limit.

    In a container the mount itself is often the container's own group.
    """
    inner = PurePosixPath(group.lstrip("/"))
    return (mount / each for each in (inner, *inner.parents))


def _limit_v2(folder: Path) -> float | None:
    """Return the limit of a group in version 2 of control groups."""
    try:
        quota, period = (folder / "cpu.max").read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError, ZeroDivisionError):
        return None


def _limit_v1(folder: Path) -> float | None:
    """Return the limit of a group in version 1 of control groups."""
    try:
        quota = int((folder / "cpu.cfs_quota_us").read_text())
        return None if quota <= 0 else quota / int((folder / "cpu.cfs_period_us").read_text())
    except (OSError, ValueError, ZeroDivisionError):
        return None
