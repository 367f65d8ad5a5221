"""Adds services to an app that runs, and removes them.

A service is added once its workers are ready, and is removed once the requests inside are answered.
If anything fails before, the app stays as it was.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Sequence
from typing import Protocol

from carpool.engine.foreign import text_of, traceback_of
from carpool.engine.logger import logger
from carpool.engine.observe.log import printable
from carpool.errors import CarpoolError
from carpool.http.endpoint import Endpoint
from carpool.http.servable import check_services
from carpool.service.named import BrokenModule, NotFound, service_named
from carpool.service.service import Service


class ChangingApp(Protocol):
    """The app whose services change.

    Attributes:
        endpoints: The services as the app serves them, in order.
        coming: Those that are being started, and are not served yet.
        refusing: Why requests are refused now; None while the services run.
    """

    endpoints: list[Endpoint]
    coming: list[Endpoint]
    refusing: CarpoolError | None

    def new_endpoint(self, service: Service, *, is_first: bool) -> Endpoint:
        """Make an endpoint of a service. Raises ValueError if the app cannot serve it."""

    def check_addresses(self, endpoints: Sequence[Endpoint]) -> None:
        """Raise ValueError if two of these services have one address."""

    def serve_at(self, endpoints: Sequence[Endpoint]) -> None:
        """Answer at the addresses of these services from now on, and of no others."""


class ServiceList:
    """Changes which services an app has.

    Args:
        app: The app.
    """

    def __init__(self, app: ChangingApp) -> None:
        self._app = app

    async def add(self, target: str) -> Endpoint:
        """Load a service and start it, then serve it; it answers at /predict if no other one does.

        Args:
            target: The service, as module:attribute.

        Raises:
            ValueError: There is no such service, or it cannot be served beside the others.
            TypeError: JSON and msgpack cannot express a type hint of it.
            CarpoolError: It does not start, or the app is starting or draining.
        """
        app = self._app
        self._check_running()
        service = await asyncio.to_thread(_imported, target)
        self._check_running()  # importing takes its time
        known = [*app.endpoints, *app.coming]
        check_services((*(endpoint.service for endpoint in known), service))
        is_first = not any(endpoint.is_first for endpoint in known)
        endpoint = app.new_endpoint(service, is_first=is_first)
        app.check_addresses([*known, endpoint])
        app.coming.append(endpoint)
        logger.info("service %s is being added", endpoint.name, extra={"model": endpoint.name})
        try:
            await endpoint.start()
            self._check_running()
            app.serve_at([*_staying(app.endpoints), endpoint])
            app.endpoints.append(endpoint)
        except BaseException:
            await endpoint.stop(drain=False)
            raise
        finally:
            app.coming.remove(endpoint)
        logger.info("service %s was added", endpoint.name, extra={"model": endpoint.name})
        return endpoint

    async def remove(self, name: str) -> None:
        """Serve a service no more, and end it once the requests inside are answered.

        Raises:
            ValueError: There is no such service, or no other one.
            CarpoolError: The app is starting or draining.
        """
        app = self._app
        self._check_running()
        staying = _staying(app.endpoints)
        endpoint = next((each for each in staying if each.name == name), None)
        if endpoint is None:
            raise ValueError(f"there is no service {name!r}; there is {', '.join(each.name for each in staying)}")
        if len(staying) == 1:
            raise ValueError(f"{name} is the only service: add another one first, or stop the server")
        app.serve_at([each for each in staying if each is not endpoint])
        endpoint.is_leaving = True
        logger.info("service %s is being removed", name, extra={"model": name})
        try:
            await endpoint.stop(drain=True)
        finally:
            app.endpoints.remove(endpoint)
        logger.info("service %s was removed", name, extra={"model": name})

    def _check_running(self) -> None:
        if self._app.refusing is not None:
            raise copy.copy(self._app.refusing)


def _staying(endpoints: Sequence[Endpoint]) -> list[Endpoint]:
    return [endpoint for endpoint in endpoints if not endpoint.is_leaving]


def _imported(target: str) -> Service:
    """Return a service, whose module may raise anything. Raises ValueError."""
    try:
        return service_named(target)
    except NotFound:
        raise
    except BaseException as error:
        cause = error.error if isinstance(error, BrokenModule) else error
        logger.error("%s could not be imported:\n%s", printable(repr(target)), printable(traceback_of(cause)))
        module = target.partition(":")[0]
        raise ValueError(f"module {module!r} cannot be imported: {type(cause).__name__}: {text_of(cause)}") from None
