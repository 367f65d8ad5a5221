"""carpool: dynamic batching for Python model serving.

Many callers each bring one item, the items share one vectorised call, and each caller gets its own
answer. Declare a `Service` of `Stage`s, or put `@carpool.batch` above a function.
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

if os.getpid() == 1:  # as in a container; signals are lost until it takes them, and all else takes its time
    from carpool.engine import process_one

    if process_one.is_command():
        process_one.become_init()

from carpool.engine.http_request import HTTPRequest
from carpool.engine.http_response import HTTPError, Response
from carpool.engine.parts import END, End, Last
from carpool.engine.policy import AIMD, Adaptive, Cork, Deadline, Greedy, Policy, Static
from carpool.engine.turns import Done, To
from carpool.engine.worker.place import worker_index
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
from carpool.service.elsewhere import PLACES
from carpool.service.graph import ForEach, Parallel, Route
from carpool.service.service import FRONTS, Service
from carpool.service.stage import Stage
from carpool.version import __version__ as __version__

if TYPE_CHECKING:
    from carpool import http, openai, simulate
    from carpool import ray as ray
    from carpool.batch_function.decorator import batch
    from carpool.batch_function.threads import Ticket
    from carpool.client.aio import AsyncClient
    from carpool.client.sync import Client
    from carpool.engine.call.lock import Lock
    from carpool.engine.call.merge import pad
    from carpool.http.asgi import lifespan
    from carpool.http.serve import serve
    from carpool.metrics import collector
    from carpool.service.handle import AsyncHandle
    from carpool.service.join import Join
    from carpool.service.thread_handle import Handle

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
    "Done",
    "End",
    "ForEach",
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
    "Parallel",
    "Policy",
    "Response",
    "Route",
    "Service",
    "Stage",
    "StartupError",
    "Static",
    "Ticket",
    "To",
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


_WHERE = {
    "AsyncClient": "carpool.client",
    "AsyncHandle": "carpool.service.handle",
    "Client": "carpool.client",
    "Handle": "carpool.service.thread_handle",
    "Join": "carpool.service.join",
    "Lock": "carpool.engine.call.lock",
    "Ticket": "carpool.batch_function.threads",
    "batch": "carpool.batch_function.decorator",
    "collector": "carpool.metrics",
    "lifespan": "carpool.http.asgi",
    "pad": "carpool.engine.call.merge",
    "serve": "carpool.http.serve",
}
_FOLDERS = frozenset({"http", "openai", "policy", "ray", "simulate", "wire"})


def __getattr__(name: str) -> Any:
    """Import at its first use what is large, or needs an extra.

    A program pays for what it uses, and a worker process, which imports the modules that declare
    models and services, for nothing that runs them.
    """
    if name in _WHERE:
        return getattr(importlib.import_module(_WHERE[name]), name)
    if name in _FOLDERS:
        return importlib.import_module(f"carpool.{name}")
    raise AttributeError(f"module 'carpool' has no attribute {name!r}")
