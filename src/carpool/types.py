"""The types of what handles and batched functions return, for your own type hints.

You need them only where you name such a type, as in `def show(stats: ServiceSnapshot) -> None`; the
objects come from `stats()`, `story()` and `predict_stream(x)`. How streams of parts are read is in
"Answers in parts" in the docs.
"""

from __future__ import annotations

from carpool.engine.core.journal import Entry
from carpool.engine.drive.callers import AsyncParts, ThreadParts
from carpool.engine.observe.function_stats import FunctionSnapshot
from carpool.engine.observe.snapshot import ServiceSnapshot, StageSnapshot, StreamSnapshot

__all__ = [
    "AsyncParts",
    "Entry",
    "FunctionSnapshot",
    "ServiceSnapshot",
    "StageSnapshot",
    "StreamSnapshot",
    "ThreadParts",
]
