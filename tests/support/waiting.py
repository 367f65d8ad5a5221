"""Waiting for what comes about a little later, with a limit against hangs, and for what is let go of."""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable

PATIENCE_S = 20.0
"""How long a test waits for what should come soon: it is a hang by then, also on a machine with much else to do."""


def wait_until(condition: Callable[[], object], timeout_s: float = PATIENCE_S) -> None:
    """Wait until a condition is true; fail if it is not in time."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"it did not come true within {timeout_s:g} s"
        time.sleep(0.002)


def let_go() -> None:
    """Have what nobody refers to go: without the GIL that may be left to the collector, as counts are not exact."""
    if sys.version_info >= (3, 13) and not sys._is_gil_enabled():
        gc.collect()
