"""The routes by which an operator changes the services of an app while they run.

They answer clients on this machine only, and only to `Content-Type: application/json`: a page in a
browser cannot send that to another origin without being allowed to.

    POST /admin/reload   {"service": "Digits", "rolling": false, "grace_s": 30}
    POST /admin/scale    {"service": "Digits", "stage": "Digits", "workers": 4}
    POST /admin/services/add     {"target": "program:service"}
    POST /admin/services/remove  {"service": "Digits"}

Of the first two all members but `workers` may be left out, and so may `stage` where the service has
one. Without `service` all of them are reloaded, and the only one is scaled. The answer comes when
it is done.
"""

from __future__ import annotations

import asyncio
import ipaddress
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import msgspec

from carpool.engine.foreign import named_text_of, text_of, traceback_of
from carpool.engine.hints import schema
from carpool.engine.logger import logger
from carpool.engine.observe.log import printable
from carpool.errors import CarpoolError, InvalidRequest, StartupError, Unavailable
from carpool.http.codec import Refusal, as_json
from carpool.http.endpoint import Endpoint
from carpool.http.exchange import JSON_TYPE, Exchange, Head, HttpResponse
from carpool.http.service_list import ServiceList

RELOAD = b"/admin/reload"
SCALE = b"/admin/scale"
ADD_SERVICE = b"/admin/services/add"
REMOVE_SERVICE = b"/admin/services/remove"


class ReloadOrder(msgspec.Struct, forbid_unknown_fields=True):
    """What is to be reloaded.

    Attributes:
        service: The name of a service; None for all.
        rolling: Whether one worker is replaced at a time; None for what the server was told.
        grace_s: How long answers in parts may go on in old workers, in seconds.
    """

    service: str | None = None
    rolling: bool | None = None
    grace_s: float = 30.0


class ScaleOrder(msgspec.Struct, forbid_unknown_fields=True):
    """How many workers a stage is to have.

    Attributes:
        workers: How many, or the fewest and the most.
        stage: The name of the stage; None for the only one.
        service: The name of the service; None for the only one.
        grace_s: How long answers in parts may go on in workers that go, in seconds.
    """

    workers: int | tuple[int, int]
    stage: str | None = None
    service: str | None = None
    grace_s: float = 30.0


class AddOrder(msgspec.Struct, forbid_unknown_fields=True):
    """Which service is to be served besides those that are.

    Attributes:
        target: The service, as module:attribute.
    """

    target: str


class RemoveOrder(msgspec.Struct, forbid_unknown_fields=True):
    """Which service is to be served no more.

    Attributes:
        service: The name of the service.
    """

    service: str


class Admin:
    """Changes the services of an app.

    Args:
        endpoints: The services.
        error: Returns the response to a request that failed.
        begin: Has a coroutine run beside the requests, as long as the app runs.
        services: Adds services and removes them.

    Attributes:
        rolling: Whether a reload replaces one worker at a time where nothing else is said.
    """

    def __init__(
        self,
        endpoints: Sequence[Endpoint],
        error: Callable[[Head, Exception], HttpResponse],
        begin: Callable[[Coroutine[Any, Any, None]], None],
        services: ServiceList,
    ) -> None:
        self.rolling = False
        self._endpoints = endpoints
        self._error = error
        self._begin = begin
        self._services = services

    @property
    def routes(self) -> dict[bytes, Callable[[Exchange], None]]:
        """What answers to POST, by path."""
        return {
            RELOAD: self._reload,
            SCALE: self._scale,
            ADD_SERVICE: self._add_service,
            REMOVE_SERVICE: self._remove_service,
        }

    async def reload(self, order: ReloadOrder) -> None:
        """Replace the workers of services by new ones, which load anew.

        Every service is tried, whatever becomes of the others.

        Raises:
            CarpoolError: A service could not be reloaded: the first one of them.
        """
        rolling = self.rolling if order.rolling is None else order.rolling
        failed: CarpoolError | None = None
        for endpoint in self._chosen(order.service):
            about = {"model": endpoint.name}
            logger.info("service %s is being reloaded", endpoint.name, extra=about)
            try:
                if endpoint.handle is None:
                    raise Unavailable(f"service {endpoint.name} is starting", code="starting")
                await endpoint.handle.reload(rolling=rolling, grace_s=order.grace_s)
            except CarpoolError as error:
                what = "some old workers stay" if rolling else "the old workers stay"
                logger.error(
                    "service %s was not reloaded, and %s: %s", endpoint.name, what, text_of(error), extra=about
                )
                failed = failed or error
            else:
                logger.info("service %s was reloaded", endpoint.name, extra=about)
                if joined := sum(_joined(endpoint).values()):
                    text = "service %s has %d joined worker%s with the old model: restart them where they run"
                    logger.warning(text, endpoint.name, joined, "" if joined == 1 else "s", extra=about)
        if failed is not None:
            raise failed

    async def scale(self, order: ScaleOrder) -> None:
        """Change the number of workers of a stage.

        Raises:
            CarpoolError: That could not be done.
            ValueError: There is no such stage, or not that many workers.
        """
        endpoints = self._chosen(order.service)
        if len(endpoints) > 1:
            names = ", ".join(endpoint.name for endpoint in endpoints)
            raise ValueError(f'say which service: "service" may be one of {names}')
        handle, stages = endpoints[0].handle, endpoints[0].service.stages
        if handle is None:
            raise Unavailable(f"service {endpoints[0].name} is starting", code="starting")
        if order.stage is None and len(stages) > 1:
            raise ValueError(f'say which stage: "stage" may be one of {", ".join(stage.name for stage in stages)}')
        await handle.scale(stages[0].name if order.stage is None else order.stage, order.workers, grace_s=order.grace_s)

    # -- the routes

    def _reload(self, exchange: Exchange) -> None:
        self._do(exchange, ReloadOrder, self.reload)

    def _scale(self, exchange: Exchange) -> None:
        self._do(exchange, ScaleOrder, self.scale)

    def _add_service(self, exchange: Exchange) -> None:
        async def add(order: AddOrder) -> None:
            await self._services.add(order.target)

        self._do(exchange, AddOrder, add)

    def _remove_service(self, exchange: Exchange) -> None:
        async def remove(order: RemoveOrder) -> None:
            await self._services.remove(order.service)

        self._do(exchange, RemoveOrder, remove)

    def _do(self, exchange: Exchange, kind: type[Any], change: Callable[[Any], Coroutine[Any, Any, None]]) -> None:
        """Read an order, and have it carried out."""
        try:
            _check_client(exchange)
            order = msgspec.json.decode(bytes(exchange.body) or b"{}", type=kind)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            unread = schema.as_our_error(error, "JSON", kind, b"")
            exchange.respond(self._error(exchange.head, InvalidRequest(text_of(unread))))
        except CarpoolError as error:
            exchange.respond(self._error(exchange.head, error))
        else:
            self._begin(self._answer(exchange, change(order)))

    async def _answer(self, exchange: Exchange, change: Coroutine[Any, Any, None]) -> None:
        """Wait for a change, and tell the operator what came of it."""
        try:
            await change
        except (StartupError, Unavailable) as error:
            response = self._failure(error.status, error.code, text_of(error))
        except (CarpoolError, ValueError, TypeError) as error:
            response = self._error(exchange.head, InvalidRequest(text_of(error)))
        except BaseException as error:
            if _is_cancelled(error):  # the app stops
                shutting_down = Unavailable("the service is shutting down", code="draining")
                exchange.respond(self._error(exchange.head, shutting_down))
                raise
            logger.error("an order could not be carried out:\n%s", printable(traceback_of(error)))
            response = self._failure(500, "internal_error", named_text_of(error))
        else:
            response = HttpResponse(200, as_json({"workers": self._workers(), **self._guests()}))
        exchange.respond(response)

    def _failure(self, status: int, code: str, text: str) -> HttpResponse:
        """Return the answer to an order that was not carried out, or not all of it."""
        told = {"code": code, "message": text, "workers": self._workers()}
        return HttpResponse(status, as_json({"error": told}))

    def _workers(self) -> dict[str, dict[str, int]]:
        """Return how many workers each stage of each service has."""
        return {
            endpoint.name: {
                stage.name: len(stage.roster.established) if stage.roster is not None else 0
                for stage in endpoint.driver.stats.stages
            }
            for endpoint in self._endpoints
            if endpoint.driver is not None and not endpoint.is_leaving
        }

    def _guests(self) -> dict[str, Any]:
        """Return how many workers have joined each stage, where any have."""
        joined = {each.name: _joined(each) for each in self._endpoints if not each.is_leaving}
        joined = {name: stages for name, stages in joined.items() if stages}
        return {"joined": joined} if joined else {}

    def _chosen(self, service: str | None) -> list[Endpoint]:
        """Return the services of that name, or all. Raises ValueError if there is none."""
        chosen = [each for each in self._endpoints if service in (None, each.name) and not each.is_leaving]
        if not chosen:
            known = ", ".join(endpoint.name for endpoint in self._endpoints if not endpoint.is_leaving)
            raise ValueError(f"there is no service {service!r}; there is {known}")
        return chosen


def _joined(endpoint: Endpoint) -> dict[str, int]:
    """Return how many workers have joined each stage, without those that none has joined."""
    stages = [] if endpoint.driver is None else endpoint.driver.stats.stages
    guests = {stage.name: stage.roster.guests for stage in stages if stage.roster is not None}
    return {name: n for name, n in guests.items() if n}


def _is_cancelled(error: BaseException) -> bool:
    """Report whether an error is the cancellation of the present task, and nobody else's."""
    task = asyncio.current_task()
    return isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling() > 0


def _check_client(exchange: Exchange) -> None:
    """Refuse clients on other machines, and what pages in browsers could send. Raises Refusal."""
    if not is_local(exchange.client_host):
        raise Refusal(403, "not_local")
    kind = exchange.head.headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
    if kind != JSON_TYPE:
        raise InvalidRequest("send the order as Content-Type: application/json", status=415)


def is_local(host: str | None) -> bool:
    """Report whether an address is that of a client on this machine; None if it is not known."""
    if host is None:
        return False
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return not host  # that of a client on a Unix socket
    mapped = getattr(address, "ipv4_mapped", None)
    return bool((mapped or address).is_loopback)
