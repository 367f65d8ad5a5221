"""Modules that are imported when a test first looks into them.

Each process of a run imports all tests, most of which another one runs: what takes long to import is left until then.
A test is skipped where the package is not installed, as some have no wheel for every build of Python.
"""

from __future__ import annotations

import importlib
from importlib.util import find_spec
from typing import Any

import pytest


class Late:
    """A module that is not imported yet, with its attributes.

    Args:
        name: The full name of the module.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("_"):  # pytest asks everything whether it is a fixture
            raise AttributeError(attribute)
        package = self._name.partition(".")[0]
        if find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
        return getattr(importlib.import_module(self._name), attribute)
