"""Reloads the services of an app when a source file changes: `carpool serve --watch`."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from carpool.engine.logger import logger
from carpool.errors import CarpoolError
from carpool.http.admin import Admin, ReloadOrder

_EVERY_S = 0.5
_MOST_LOADS = 3
_SKIPPED = frozenset({"__pycache__", "node_modules", "venv"})


class SourceFiles:
    """The Python files below a folder, as they were when they were last looked at.

    Args:
        folder: The folder; hidden ones in it, and those of installed packages, are left out.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._times = self._look()

    def changed(self) -> list[str]:
        """Return the files that have changed, come or gone since the last look, by their names."""
        before, self._times = self._times, self._look()
        return self._unlike(before, before.keys() | self._times.keys())

    def rewritten(self) -> list[str]:
        """Return the files that were there at the last look, and have changed since."""
        before, self._times = self._times, self._look()
        return self._unlike(before, before.keys() & self._times.keys())

    def _unlike(self, before: dict[str, int], paths: Iterable[str]) -> list[str]:
        """Return those of some files that are not as they were before, by their names."""
        return sorted(
            os.path.relpath(path, self._folder) for path in paths if before.get(path) != self._times.get(path)
        )

    def _look(self) -> dict[str, int]:
        """Return when each file was written."""
        return dict(_written(str(self._folder)))


async def reload_on_change(admin: Admin, files: SourceFiles) -> None:
    """Reload all services whenever source files have changed and stay as they are for a moment.

    What models write while they load is no reason: neither files that come or go meanwhile (kernels
    that are generated, code that is fetched), nor one that changes in three loads in a row.

    Args:
        admin: Reloads them.
        files: As they were before the services were started.
    """
    changed = await asyncio.to_thread(files.rewritten)
    loads = dict.fromkeys(changed, 1)  # by file: in how many loads in a row it has changed
    while True:
        await asyncio.sleep(_EVERY_S)
        more = await asyncio.to_thread(files.changed)
        if more:
            changed = [*changed, *more]
        elif changed:
            logger.info("changed: %s", ", ".join(dict.fromkeys(changed)))
            try:
                await admin.reload(ReloadOrder())
            except CarpoolError:
                logger.info("the next change is waited for")  # why it failed has been logged
            loads = {name: loads.get(name, 0) + 1 for name in await asyncio.to_thread(files.rewritten)}
            changed = [name for name, n in loads.items() if n < _MOST_LOADS]
            if by_loading := [name for name, n in loads.items() if n >= _MOST_LOADS]:
                logger.info("no reason to reload, as loading itself writes it: %s", ", ".join(by_loading))


def _written(folder: str) -> Iterator[tuple[str, int]]:
    """Yield the Python files below a folder, each with the time when it was written."""
    try:
        entries = list(os.scandir(folder))
    except OSError:  # it has just gone, or may not be read
        return
    for entry in entries:
        try:
            if entry.is_dir(follow_symlinks=False):
                is_installed = os.path.exists(os.path.join(entry.path, "pyvenv.cfg"))
                if not entry.name.startswith(".") and entry.name not in _SKIPPED and not is_installed:
                    yield from _written(entry.path)
            elif entry.name.endswith(".py"):
                yield entry.path, entry.stat().st_mtime_ns
        except OSError:  # it has just gone
            continue
