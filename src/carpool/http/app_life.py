"""An app's life: its services are started, drained and stopped, and perhaps started once more."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from carpool.errors import CarpoolError, Unavailable
from carpool.http import asgi
from carpool.http.codec import NotReady
from carpool.http.endpoint import Endpoint
from carpool.http.exchange import ServedModel
from carpool.http.observer import Observer


class AppLife:
    """The part of an `App` that starts and stops.

    Args:
        endpoints: The services as the app serves them, in order.
        observer: Watches requests and their answers; None if nothing asks for it.

    Attributes:
        endpoints: The services as the app serves them, in order.
        observer: Watches requests and their answers; None if nothing asks for it.
        refusing: Why requests are refused that `refusal_of` does not except; None while all
            services run.
        coming: Services that are being started while the others run, and are not served yet.
        is_leaving: Whether the app still answers, but will be drained in a moment.
    """

    def __init__(self, endpoints: list[Endpoint], observer: Observer | None) -> None:
        self.endpoints = endpoints
        self.coming: list[Endpoint] = []
        self.observer = observer
        self.refusing: CarpoolError | None = Unavailable("the service is starting", code="starting")
        self._draining = self.is_leaving = False
        self._loop: asyncio.AbstractEventLoop | None = None  # the app was started on it
        self._starting: asyncio.Task[None] | None = None
        self._checks: set[asyncio.Task[None]] = set()
        self._at_start: list[Callable[[], None]] = []
        self._at_stop: list[Callable[[], None]] = []
        self._services_changed: asyncio.Future[None] | None = None

    async def start(self) -> None:
        """Start all services, also once more after a stop; until then requests are answered 503.

        Raises:
            StartupError: A worker could not load its model.
            RuntimeError: The app is running already.
        """
        await self._reset()
        await self._begin()

    def announce_end(self) -> None:
        """Have `/readyz` say from now on that the app drains, although it still answers."""
        self.is_leaving = True

    def drain(self) -> None:
        """Answer new requests 503 from now on, and `/readyz`, too; those inside go on."""
        self._draining = True
        self.refusing = Unavailable("the service is shutting down", code="draining")
        for endpoint in self.endpoints:
            if endpoint.driver is not None:
                endpoint.driver.close(self.refusing)

    async def stop(self, drain: bool = True) -> None:
        """Stop all services; with `drain` the requests inside are answered first."""
        self.drain()
        for end in self._at_stop:
            end()
        for task in self._checks:
            task.cancel()
        stops = [endpoint.stop(drain) for endpoint in self.endpoints]
        await asyncio.gather(*stops, *[endpoint.stop(drain=False) for endpoint in self.coming])

    async def failed(self) -> None:
        """Wait, once the app has started, until none of its services can answer any more."""
        loop = asyncio.get_running_loop()
        while healthy := [each.driver for each in self.endpoints if each.driver is not None and not each.has_failed]:
            self._services_changed = loop.create_future()
            failures = [asyncio.ensure_future(driver.failed()) for driver in healthy]
            try:
                await asyncio.wait([self._services_changed, *failures], return_when=asyncio.FIRST_COMPLETED)
            finally:
                for failure in failures:
                    failure.cancel()

    def services_changed(self) -> None:
        """Have it noticed that services were added or removed."""
        if self._services_changed is not None and not self._services_changed.done():
            self._services_changed.set_result(None)

    async def ensure_started(self, *, anew: bool = False) -> None:
        """Start the app unless it has been started, and wait until it is up.

        A mounted app without a lifespan is started like this by its first request. If the event
        loop on which it was started has ended, it is started again, since test clients without a
        lifespan run each request on an event loop of its own.

        Args:
            anew: Whether an app that was stopped is started again, as a second lifespan asks for;
                otherwise it stays stopped.

        Raises:
            StartupError: A worker could not load its model. Later calls raise it, too.
            RuntimeError: The app runs on another event loop that has not been closed.
        """
        if (anew and self._draining) or self.is_elsewhere:
            await self._reset()
        if self._starting is None and not self._draining:
            asgi.warn_of_siblings()
            self._begin()
        if self._starting is not None:
            await asyncio.shield(self._starting)

    def _begin(self) -> asyncio.Task[None]:
        """Begin to start unless that was done; return the task, for which several may wait."""
        if self._starting is None:
            self._loop = asyncio.get_running_loop()
            self._starting = self._loop.create_task(self._start())
        return self._starting

    async def _start(self) -> None:
        for begin in self._at_start:
            begin()
        try:
            if not self._draining:
                await asyncio.gather(*[self._start_service(endpoint) for endpoint in self.endpoints])
            if self._draining:
                raise Unavailable("the service was closed while it was starting", code="draining")
        except BaseException:
            await self.stop(drain=False)
            raise
        self.refusing = None

    async def _start_service(self, endpoint: Endpoint) -> None:
        await endpoint.start()
        if self.observer is not None and endpoint.driver is not None:
            self.observer.watch(endpoint.driver)

    def refusal_of(self, endpoint: ServedModel | None) -> CarpoolError | None:
        """Return why a request is refused now; None if it is not.

        While the app starts, a service that is up does not wait for those that are still loading.

        Args:
            endpoint: Whom the request asks; None if its body will say.
        """
        if self.refusing is None or self._draining:
            return self.refusing
        asked = self.endpoints if endpoint is None else [endpoint]
        if any(each.driver is not None for each in asked):
            return None
        problems = self.problems()
        return NotReady("starting", {each.name: problems[each.name] for each in asked if each.name in problems})

    @property
    def is_elsewhere(self) -> bool:
        """Whether the app was started on another event loop than the running one."""
        return self._loop is not None and self._loop is not asyncio.get_running_loop()

    async def _reset(self) -> None:
        """Get ready to start anew. Raises RuntimeError if the app has not been stopped."""
        if self._loop is None:
            return
        if self.is_elsewhere and not self._loop.is_closed():
            raise RuntimeError("this app was started on another event loop, which is still running: use it there")
        if not (self._draining or self.is_elsewhere):
            raise RuntimeError("this app is running already")
        starting = self._starting
        if starting is not None and not self.is_elsewhere:
            await asyncio.wait([starting])  # a start that was interrupted ends what it had begun
        await asyncio.gather(*[endpoint.stop(drain=False) for endpoint in self.endpoints])
        if self._starting is not starting:
            return  # another caller was faster
        for endpoint in self.endpoints:
            endpoint.reset()
        self.refusing = Unavailable("the service is starting", code="starting")
        self._loop = self._starting = None
        self._draining = self.is_leaving = False

    @property
    def served(self) -> list[Endpoint]:
        """The services that take requests."""
        return [endpoint for endpoint in self.endpoints if not endpoint.is_leaving]

    def problems(self) -> dict[str, str]:
        """Return what keeps services from answering now, by their names."""
        problems = {endpoint.name: endpoint.problem for endpoint in self.served}
        return {name: problem for name, problem in problems.items() if problem is not None}

    def unreadiness(self, problems: Mapping[str, str]) -> NotReady | None:
        """Return why no request should be sent to the app now; None if one service would answer.

        Args:
            problems: What keeps services from answering.
        """
        if self._draining or self.is_leaving:
            return NotReady("draining")
        if self.refusing is not None:
            return NotReady("starting", problems)
        return NotReady("not_ready", problems) if len(problems) == len(self.served) else None

    def problem(self) -> str | None:
        """Return why no service of the app could answer now, in words; None if one could."""
        unready = self.unreadiness(self.problems())
        return None if unready is None else str(unready)

    def run_beside(self, work: Coroutine[Any, Any, None]) -> None:
        """Have something done beside the requests, until the app stops."""
        task = asyncio.ensure_future(work)
        self._checks.add(task)
        task.add_done_callback(self._checks.discard)
