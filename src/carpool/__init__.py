"""carpool: dynamic batching for Python model serving.

Many callers each bring one item, the items share one vectorised call, and each caller gets its own
answer. Declare a `Service` of `Stage`s, or put `@carpool.batch` above a function.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from carpool.batch_function.decorator import batch
from carpool.batch_function.threads import Ticket
from carpool.call.lock import Lock
from carpool.call.padding import pad
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
from carpool.http_request import HTTPRequest
from carpool.http_response import HTTPError, Response
from carpool.model import Model
from carpool.parts import END, End, Last
from carpool.policy import AIMD, Adaptive, Cork, Deadline, Greedy, Policy, Static
from carpool.service.elsewhere import PLACES
from carpool.service.handle import AsyncHandle, Handle
from carpool.service.join import Join
from carpool.service.service import FRONTS, Service
from carpool.service.stage import Stage
from carpool.version import __version__ as __version__
from carpool.worker.place import worker_index

if TYPE_CHECKING:
    from carpool import http, openai, simulate
    from carpool import ray as ray
    from carpool.client.aio import AsyncClient
    from carpool.client.sync import Client
    from carpool.http.asgi import lifespan
    from carpool.http.serve import serve
    from carpool.metrics import collector

__all__ = [
    "AIMD",
    "END",
    "Adaptive",
    "AsyncClient",
    "AsyncHandle",
    "CarpoolError",
    "Client",
    "Cork",
    "Deadline",
    "DeadlineExceeded",
    "End",
    "Greedy",
    "HTTPError",
    "HTTPRequest",
    "Handle",
    "InvalidRequest",
    "Join",
    "Last",
    "Lock",
    "Model",
    "ModelError",
    "Overloaded",
    "Policy",
    "Response",
    "Service",
    "Stage",
    "StartupError",
    "Static",
    "Ticket",
    "Unavailable",
    "ValidationError",
    "batch",
    "collector",
    "http",
    "lifespan",
    "openai",
    "pad",
    "serve",
    "simulate",
    "worker_index",
]


# what services ask for by name; like the names below, imported at its first use
PLACES["ray"] = lambda: importlib.import_module("carpool.ray").Cluster()
FRONTS["http"] = lambda: importlib.import_module("carpool.http.serve").serve


def __dir__() -> list[str]:
    """Return what users need, which completion then offers, without the modules of the package."""
    return [*__all__, "__version__"]


def __getattr__(name: str) -> Any:
    """Import what is large, or needs an extra, at its first use, which keeps this fast."""
    if name == "http":
        return importlib.import_module("carpool.http")
    if name == "ray":
        return importlib.import_module("carpool.ray")
    if name == "simulate":
        return importlib.import_module("carpool.simulate")
    if name == "lifespan":
        return importlib.import_module("carpool.http.asgi").lifespan
    if name == "serve":
        return importlib.import_module("carpool.http.serve").serve
    if name in ("Client", "AsyncClient"):
        return getattr(importlib.import_module("carpool.client"), name)
    if name == "openai":
        return importlib.import_module("carpool.openai")
    if name == "collector":
        return importlib.import_module("carpool.metrics").collector
    raise AttributeError(f"module 'carpool' has no attribute {name!r}")
