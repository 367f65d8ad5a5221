"""Services on a Ray cluster: `service.run(on="ray")`, `carpool serve --on ray`; see docs/ray.md.

Ray places the workers, as actors; this process keeps queue, policy and batches and talks to each
worker over a connection of its own. It needs `pip install 'carpool[ray]'`.
"""

from __future__ import annotations

try:
    from carpool.ray.cluster import Cluster
except ModuleNotFoundError as error:
    if error.name != "ray":
        raise
    raise ImportError("Ray is missing: pip install 'carpool[ray]'", name="ray") from None

__all__ = ["Cluster"]
