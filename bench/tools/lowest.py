"""Prints the lowest versions that pyproject.toml allows of all that `carpool[dev]` needs, for pip.

`make test-lowest` installs these, by `pip install --constraint`.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from typing import Any, Final

from bench import ROOT

_REQUIREMENT: Final = re.compile(
    r"(?P<name>[\w.-]+)(?:\[(?P<extras>[\w,-]+)\])?(?:>=(?P<least>[\w.]+))?[^;]*(?P<where>;.*)?"
)


def project() -> dict[str, Any]:
    """Return what pyproject.toml says of the package."""
    found: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return found


def lowest(of: dict[str, Any], extra: str) -> list[str]:
    """Return the requirements of a package and of one of its extras, each at its lowest version.

    Args:
        of: What its pyproject.toml says of the package.
        extra: The name of the extra.

    Raises:
        ValueError: A requirement names no lowest version.
    """
    found = set()
    for requirement in (*of["dependencies"], *_all_of(of, extra)):
        parts = _REQUIREMENT.fullmatch(requirement)
        if parts is None or parts["least"] is None:
            raise ValueError(f"{requirement} names no lowest version: write name>=version")
        found.add(f"{parts['name']}=={parts['least']}{parts['where'] or ''}")
    return sorted(found)


def _all_of(of: dict[str, Any], extra: str) -> Iterator[str]:
    """Yield the requirements of an extra, and of those that it names of the package itself."""
    for requirement in of["optional-dependencies"][extra]:
        parts = _REQUIREMENT.fullmatch(requirement)
        if parts is not None and parts["name"] == of["name"]:
            for inner in parts["extras"].split(","):
                yield from _all_of(of, inner)
        else:
            yield requirement


if __name__ == "__main__":
    print("\n".join(lowest(project(), "dev")))
