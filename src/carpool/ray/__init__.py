"""Services on a Ray cluster: `service.run(on="ray")`, `carpool serve --on ray`.

See "Ray" in the docs. Ray places the workers, as actors; this process keeps queue, policy and
batches and talks to each worker over a connection of its own. It needs
`pip install 'carpool[ray]'`.

No batch passes through Ray, and the core has no notion of it: `Launch.hire` makes the worker. All
calls that may block run in the thread of `Session`, so the loop never waits for a cluster that has
lost its head. A dead actor is replaced, not restarted by Ray: that takes a third of the time, and
the new actor can avoid a silent node. An actor that does not come although there is room is on a
node whose silence Ray has not seen; another is asked for, on a node with live workers.
`ray/data.py` uses none of this: Ray Data moves the rows, and each of its actors runs one stage in
its own threads.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from carpool.ray.cluster import Cluster
    from carpool.ray.data import map_batches
    from carpool.ray.serve_app import app

__all__ = ["Cluster", "app", "map_batches"]

_MODULES = {"Cluster": "carpool.ray.cluster", "app": "carpool.ray.serve_app", "map_batches": "carpool.ray.data"}


def __getattr__(name: str) -> Any:
    """Import the modules that need Ray at their first use."""
    if name not in _MODULES:
        raise AttributeError(f"module 'carpool.ray' has no attribute {name!r}")
    try:
        return getattr(importlib.import_module(_MODULES[name]), name)
    except ModuleNotFoundError as error:
        if error.name != "ray":
            raise
        raise ImportError("Ray is missing: pip install 'carpool[ray]'", name="ray") from None
