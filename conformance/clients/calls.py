"""Counts the calls of a client, for the programs beside this one; it needs nothing but Python."""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable
from typing import Any

CALLS: list[dict[str, Any]] = []


def call(function: Callable[[], Any]) -> Callable[[], Any]:
    """Run one check of a client, whose name is what it calls."""
    name = function.__name__.replace("_", " ")
    try:
        function()
        CALLS.append({"call": name, "ok": True})
    except BaseException as error:
        traceback.print_exc()
        CALLS.append({"call": name, "ok": False, "why": f"{type(error).__name__}: {error}"[:2000]})
    return function


def raises(kind: Any, function: Callable[[], Any]) -> Any:
    """Return the exception of this kind that a function raises."""
    try:
        function()
    except kind as error:
        return error
    raise AssertionError(f"{kind} was not raised")


def tell(client: str, version: str) -> None:
    """Print what was found, as the last line."""
    print(json.dumps({"client": client, "version": version, "calls": CALLS}))
    sys.exit(not all(each["ok"] for each in CALLS))


URL = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
ADDRESS = URL.removeprefix("http://")
