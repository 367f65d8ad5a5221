"""Places elsewhere than on this machine where a service has its worker processes: `run(on=...)`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from carpool.service.declaration import Declaration

if TYPE_CHECKING:  # a module that only declares a service needs no statistics
    from carpool.engine.observe.stats import Stats


class Site(Protocol):
    """Where the worker processes of one running service are: the connection to a cluster."""

    @property
    def hire(self) -> Callable[..., Any]:
        """Makes a worker for a place; it is called like `WorkerProcess`."""

    def observe(self, stats: Stats) -> None:
        """Add the service, which has started, to the cluster's own metrics from now on."""

    async def close(self) -> None:
        """Let go of the cluster, once all workers have ended."""

    def abandon(self) -> None:
        """Do so without the loop, which ends or has ended."""


@runtime_checkable
class Elsewhere(Protocol):
    """A place to run services, such as `carpool.ray.Cluster`."""

    def moved(self, service: Declaration) -> Declaration:
        """Return the service as it runs there. Raises ValueError if it cannot."""

    async def open(self, service: Declaration) -> Site:
        """Connect to the place, on the running loop. Raises StartupError."""


PLACES: dict[str, Callable[[], Elsewhere]] = {}
"""The makers of places, by the names of these. `carpool/__init__.py` fills it in, since services do
not import the modules that build on them."""


def elsewhere_of(on: Any) -> Elsewhere | None:
    """Return the place that a user names with `on=`; None for this machine.

    Raises:
        ValueError: There is no such place.
        ImportError: It needs a package that is missing.
    """
    if on is None:
        return None
    if isinstance(on, str) and on in PLACES:
        return PLACES[on]()
    if not isinstance(on, Elsewhere):
        raise ValueError(f'on must be "ray" or a carpool.ray.Cluster, not {on!r}')
    return on
