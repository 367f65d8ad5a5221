"""A service as an application of Ray Serve: `carpool.ray.app("program:service")`.

Each replica holds a coordinator, with its own queue and its own workers, which are actors that it
owns and that end with it. Serve does the rest: replicas, upgrades, its proxy and its dashboard.
"""

from __future__ import annotations

import importlib
from typing import Any

from ray import serve

from carpool.errors import Unavailable
from carpool.http.app import App
from carpool.http.endpoint import Endpoint
from carpool.ray.cluster import Cluster
from carpool.service.service import Service

_app: App | None = None
"""In the process of a replica: the service that it serves."""


def app(target: str, *, on: Cluster | None = None, replicas: int | None = None, **options: Any) -> Any:
    """Return a service as an application for `serve run`, `serve deploy` or a RayService.

    Its replicas answer over HTTP at the addresses that `carpool serve` has, and `predict` of a
    `DeploymentHandle` as that of `AsyncHandle` does.

    Args:
        target: The service, as "module:attribute". Replicas import it.
        on: What differs on the cluster from the declaration. It must be the one that Serve runs on.
        replicas: How many replicas there are; each has all the workers that the service declares.
        options: Further options of the deployment, as Serve names them.

    Raises:
        ValueError: `target` does not name a service.
    """
    service, cluster = service_at(target), on or Cluster()
    cluster.moved(service)  # raises now where it cannot be

    def build() -> App:
        """Make the app in the replica, since it belongs to the process in which it runs."""
        return new_app(target, cluster)

    options.setdefault("name", service.name)
    options.setdefault("max_ongoing_requests", most_ongoing(service))
    if replicas is not None:
        options["num_replicas"] = replicas
    return serve.deployment(serve.ingress(build)(Replica), **options).bind()


def new_app(target: str, cluster: Cluster) -> App:
    """Make the app of this replica. `build` calls it by name, since Serve sends that as a copy."""
    global _app
    _app = App(service_at(target), on=cluster)
    return _app


class Replica:
    """The methods of a replica that Serve calls, besides HTTP."""

    async def predict(self, x: Any, *, timeout_s: float | None = None, priority: int = 0) -> Any:
        """Return the model's answer to one item; see `AsyncHandle.predict`."""
        endpoint = _endpoint()
        if endpoint.handle is None:
            raise Unavailable("the service is starting", code="starting")
        return await endpoint.handle.predict(x, timeout_s=timeout_s, priority=priority)

    async def check_health(self) -> None:
        """Raise if a stage has failed for good: Serve then replaces the replica."""
        driver = _endpoint().driver
        if driver is not None and driver.has_failed:
            raise Unavailable("a stage of the service has failed", code="stage_failed")

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Return what a policy of Serve for the number of replicas may go by.

        `queued` is how many requests wait, `busy_workers` how many of the `workers` of the first
        stage are at work, and `predicted_wait_s` how long a request that comes now would wait.
        """
        driver = _endpoint().driver
        if driver is None:
            return {}
        first, stats = driver.core.batchers[0], driver.stats.stages[0]
        ready = 0 if stats.roster is None else stats.roster.ready
        return {
            "queued": float(len(first.queue)),
            "busy_workers": float(len(first.in_flight)),
            "workers": float(ready),
            "predicted_wait_s": first.predicted_wait_s(driver.clock(), first.queue.size),
        }


def service_at(target: str) -> Service:
    """Return the service at "module:attribute". Raises ValueError if there is none."""
    module, colon, attribute = target.partition(":")
    if not (module and colon and attribute):
        raise ValueError(f"{target!r} does not name a service: write module:attribute, for example program:service")
    found = getattr(importlib.import_module(module), attribute, None)
    if not isinstance(found, Service):
        raise ValueError(f"{target} is a {type(found).__name__}, not a carpool.Service")
    return found


def most_ongoing(service: Service) -> int:
    """Return how many requests a replica may have: those that wait, and those with workers.

    Serve must not hold them back, since batches form of what waits here.
    """
    with_workers = sum(2 * stage.most_workers * (stage.max_batch_size or 1) for stage in service.stages)
    return service.stages[0].max_queue_size + with_workers


def _served() -> App:
    if _app is None:
        raise Unavailable("the replica has not begun to serve", code="starting")
    return _app


def _endpoint() -> Endpoint:
    """Return the service of this replica, although others may be served beside it. Raises
    Unavailable."""
    for endpoint in _served().endpoints:
        if endpoint.is_first and not endpoint.is_leaving:
            return endpoint
    raise Unavailable("the service of the replica has been removed", code="stopped", retry_after_s=None)
