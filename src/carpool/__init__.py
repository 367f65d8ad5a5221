"""carpool: dynamic batching for Python. Many callers, one vectorised call, each caller its own answer."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from carpool.errors import (
    CarpoolError,
    DeadlineExceeded,
    InvalidRequest,
    ModelError,
    Overloaded,
    StartupError,
    Unavailable,
    ValidationError,
)
from carpool.model import Model
from carpool.policy import Greedy, Policy, Static
from carpool.service import Service
from carpool.stage import Stage

if TYPE_CHECKING:
    from carpool import http

__version__ = "0.1.0"

__all__ = [
    "CarpoolError",
    "DeadlineExceeded",
    "Greedy",
    "InvalidRequest",
    "Model",
    "ModelError",
    "Overloaded",
    "Policy",
    "Service",
    "Stage",
    "StartupError",
    "Static",
    "Unavailable",
    "ValidationError",
    "http",
]


def __getattr__(name: str) -> Any:
    """`carpool.http` without an import of its own, and without its cost for those who do not use it."""
    if name == "http":
        return importlib.import_module("carpool.http")
    raise AttributeError(f"module 'carpool' has no attribute {name!r}")
