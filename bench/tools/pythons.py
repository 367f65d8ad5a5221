"""Finds other Pythons on this machine, of the versions that pyproject.toml names.

`python -m bench.tools.pythons oldest` prints the path of the oldest, which `make test-lowest` uses,
and `newest` that of the newest that is newer than the one which runs this, if there is any. They
are looked for on the search path and among those that pyenv has installed.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from bench.tools.lowest import project

_NAMED: Final = re.compile(r"Programming Language :: Python :: (3\.\d+)")


def versions() -> list[str]:
    """Return the versions that pyproject.toml names, the oldest first."""
    named = [found[1] for each in project()["classifiers"] if (found := _NAMED.fullmatch(each))]
    return sorted(named, key=_number)


def found(version: str) -> str | None:
    """Return the path of an interpreter of a version; None if there is none that starts."""
    return next((path for path in _candidates(version) if _starts(path, version)), None)


def _candidates(version: str) -> Iterator[str]:
    """Yield where an interpreter may be; one that pyenv puts on the search path may not start."""
    on_path = shutil.which(f"python{version}")
    if on_path is not None:
        yield on_path
    installed = _pyenv().glob(f"versions/{version}.*/bin/python{version}")
    yield from map(str, sorted(installed, key=lambda path: _number(path.parents[1].name), reverse=True))


def _pyenv() -> Path:
    """Return the folder of pyenv, which need not be there."""
    return Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")


def _number(version: str) -> list[int]:
    """Return what versions are sorted by."""
    return [int(part) for part in re.findall(r"\d+", version)]


def _starts(path: str, version: str) -> bool:
    """Report whether an interpreter starts, is of a version, and can make environments."""
    code = "import ensurepip, sys, venv; print('%d.%d' % sys.version_info[:2])"
    done = subprocess.run([path, "-c", code], capture_output=True, text=True, check=False)
    return done.stdout.strip() == version


def main(arguments: Sequence[str]) -> None:
    """Print the path that is asked for.

    Raises:
        SystemExit: The oldest is not there. That there is none newer than this one is no error.
    """
    named = versions()
    match list(arguments):
        case ["oldest"]:
            path = found(named[0])
            if path is None:
                raise SystemExit(f"there is no Python {named[0]} on this machine: install python{named[0]}")
            print(path)
        case ["newest"]:
            own = "{}.{}".format(*sys.version_info)
            newer = [each for each in named if _number(each) > _number(own)]
            print(next(filter(None, map(found, reversed(newer))), ""))
        case _:
            raise SystemExit("say which: python -m bench.tools.pythons oldest, or newest")


if __name__ == "__main__":
    main(sys.argv[1:])
