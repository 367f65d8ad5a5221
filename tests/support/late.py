"""Modules that are imported when a test first looks into them.

Each process of a run imports all tests, most of which another one runs: what takes long to import is left until then.
"""

from __future__ import annotations

import importlib
from typing import Any


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
        return getattr(importlib.import_module(self._name), attribute)
