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

A service is added once its workers are ready, and is removed once the requests inside are answered.
If anything fails before, the app stays as it was. With
`carpool serve --watch` the services are reloaded when a source file changes.
"""

from __future__ import annotations

import asyncio
import copy
import ipaddress
import itertools
import os
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
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
from carpool.http.routes import AppView
from carpool.service.overrides import BrokenModule, NotFound, service_named
from carpool.service.service import Service

RELOAD = b"/admin/reload"
SCALE = b"/admin/scale"
ADD_SERVICE = b"/admin/services/add"
REMOVE_SERVICE = b"/admin/services/remove"


class ReloadOrder(msgspec.Struct, forbid_unknown_fields=True):
    """An order to reload services.

    Attributes:
        service: The name of a service; None for all.
        rolling: Whether one worker is replaced at a time; None for the server's setting.
        grace_s: How long answers in parts may go on in old workers, in seconds.
    """

    service: str | None = None
    rolling: bool | None = None
    grace_s: float = 30.0


class ScaleOrder(msgspec.Struct, forbid_unknown_fields=True):
    """How many workers a stage is to have.

    Attributes:
        grace_s: How long answers in parts may go on in workers that go, in seconds.
    """

    workers: int | tuple[int, int]
    stage: str | None = None
    service: str | None = None
    grace_s: float = 30.0


class AddOrder(msgspec.Struct, forbid_unknown_fields=True):
    """Which service is to be served besides those that are."""

    target: str


class RemoveOrder(msgspec.Struct, forbid_unknown_fields=True):
    """Which service is to be served no more."""

    service: str


class Admin:
    """Changes the services of an app.

    Args:
        begin: Has a coroutine run beside the requests, as long as the app runs.

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
        orders: dict[bytes, tuple[type[Any], Callable[[Any], Coroutine[Any, Any, object]]]] = {
            RELOAD: (ReloadOrder, self.reload),
            SCALE: (ScaleOrder, self.scale),
            ADD_SERVICE: (AddOrder, lambda order: self._services.add(order.target)),
            REMOVE_SERVICE: (RemoveOrder, lambda order: self._services.remove(order.service)),
        }
        return {path: partial(self._do, kind, change) for path, (kind, change) in orders.items()}

    async def reload(self, order: ReloadOrder) -> None:
        """Replace the workers of services by new ones.

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

    def _do(self, kind: type[Any], change: Callable[[Any], Coroutine[Any, Any, object]], exchange: Exchange) -> None:
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

    async def _answer(self, exchange: Exchange, change: Coroutine[Any, Any, object]) -> None:
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
        body = {"code": code, "message": text, "workers": self._workers()}
        return HttpResponse(status, as_json({"error": body}))

    def _workers(self) -> dict[str, dict[str, int]]:
        return {
            endpoint.name: {
                stage.name: len(stage.roster.established) if stage.roster is not None else 0
                for stage in endpoint.driver.stats.stages
            }
            for endpoint in self._endpoints
            if endpoint.driver is not None and not endpoint.is_leaving
        }

    def _guests(self) -> dict[str, Any]:
        joined = {each.name: _joined(each) for each in self._endpoints if not each.is_leaving}
        joined = {name: stages for name, stages in joined.items() if stages}
        return {"joined": joined} if joined else {}

    def _chosen(self, service: str | None) -> list[Endpoint]:
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
    """Refuse clients on other machines, and requests that pages in browsers could send. Raises
    Refusal."""
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


class ServiceList:
    """Changes which services an app has."""

    def __init__(self, app: AppView) -> None:
        self._app = app

    async def add(self, target: str) -> Endpoint:
        """Load a service and start it, then serve it; it answers at /predict if no other one does.

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
    try:
        return service_named(target)
    except NotFound:
        raise
    except BaseException as error:
        cause = error.error if isinstance(error, BrokenModule) else error
        logger.error("%s could not be imported:\n%s", printable(repr(target)), printable(traceback_of(cause)))
        module = target.partition(":")[0]
        raise ValueError(f"module {module!r} cannot be imported: {type(cause).__name__}: {text_of(cause)}") from None


def check_services(services: tuple[Service, ...]) -> None:
    """Raise ValueError or TypeError unless the services have different names, no stage in common,
    and items for HTTP.
    """
    if not services:
        raise ValueError("App needs at least one service")
    for service in services:
        if not hasattr(service, "stages"):
            raise TypeError(f"App takes services, not {service!r}: wrap a model as App(Service(model))")
    names = [service.name for service in services]
    twice = {name for name in names if names.count(name) > 1}
    if twice:
        raise ValueError(f"two services are called {twice.pop()!r}: give one of them another name with name=")
    for service in services:
        _check_types(service)
    for a, b in itertools.combinations(services, 2):
        for stage in a.stages:
            if any(stage is other for other in b.stages):
                raise ValueError(
                    f"services {a.name} and {b.name} share stage {stage.name}, and a stage cannot belong to several"
                    " services yet: give each of them a Stage object of its own"
                )


def _check_types(service: Service) -> None:
    """Raise TypeError if JSON cannot express the items, and the model names no format for them."""
    first, last = service.takes, service.gives
    if not first.accepts:
        _check_hint(f"{first.name} takes", first.input_type, schema.why_unreadable(first.input_type), "accepts")
    if not last.produces:
        _check_hint(f"{last.name} returns", last.output_type, schema.why_unwritable(last.output_type), "produces")


def _check_hint(use: str, hint: Any, problem: str | None, attribute: str) -> None:
    if problem is not None:
        raise TypeError(
            f"model {use} {schema.type_name(hint)} by its hint, which cannot be checked over HTTP: {problem}. Give a"
            " hint that can be (of a union only one such type, or msgspec.Structs with tags), leave the hint out, or"
            f" name a format of the model's own with {attribute}. Python callers need none of this"
        )


_EVERY_S = 0.5
_MOST_LOADS = 3
_SKIPPED = frozenset({"__pycache__", "node_modules", "venv"})


class SourceFiles:
    """The Python files below a folder, but for hidden ones and installed packages, as they were
    when they were last looked at.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._times = self._look()

    def changed(self) -> list[str]:
        """Return the files that have changed, come or gone since the last look, by their names."""
        before, self._times = self._times, self._look()
        return self._unlike(before, before.keys() | self._times.keys())

    def rewritten(self) -> list[str]:
        """Return the files that were there at the last look, and have changed since."""
        before, self._times = self._times, self._look()
        return self._unlike(before, before.keys() & self._times.keys())

    def _unlike(self, before: dict[str, int], paths: Iterable[str]) -> list[str]:
        """Return those of some files that are not as they were before, by their names."""
        return sorted(
            os.path.relpath(path, self._folder) for path in paths if before.get(path) != self._times.get(path)
        )

    def _look(self) -> dict[str, int]:
        return dict(_written(str(self._folder)))


async def reload_on_change(admin: Admin, files: SourceFiles) -> None:
    """Reload all services whenever source files have changed and stay as they are for a moment.

    What models write while they load is no reason: neither files that come or go meanwhile (kernels
    that are generated, code that is fetched), nor one that changes in three loads in a row.
    """
    changed = await asyncio.to_thread(files.rewritten)
    loads = dict.fromkeys(changed, 1)  # by file: in how many loads in a row it has changed
    while True:
        await asyncio.sleep(_EVERY_S)
        more = await asyncio.to_thread(files.changed)
        if more:
            changed = [*changed, *more]
        elif changed:
            logger.info("changed: %s", ", ".join(dict.fromkeys(changed)))
            try:
                await admin.reload(ReloadOrder())
            except CarpoolError:
                logger.info("the next change is waited for")  # why it failed has been logged
            loads = {name: loads.get(name, 0) + 1 for name in await asyncio.to_thread(files.rewritten)}
            changed = [name for name, n in loads.items() if n < _MOST_LOADS]
            if by_loading := [name for name, n in loads.items() if n >= _MOST_LOADS]:
                logger.info("no reason to reload, as loading itself writes it: %s", ", ".join(by_loading))


def _written(folder: str) -> Iterator[tuple[str, int]]:
    try:
        entries = list(os.scandir(folder))
    except OSError:  # it has just gone, or may not be read
        return
    for entry in entries:
        try:
            if entry.is_dir(follow_symlinks=False):
                is_installed = os.path.exists(os.path.join(entry.path, "pyvenv.cfg"))
                if not entry.name.startswith(".") and entry.name not in _SKIPPED and not is_installed:
                    yield from _written(entry.path)
            elif entry.name.endswith(".py"):
                yield entry.path, entry.stat().st_mtime_ns
        except OSError:  # it has just gone
            continue
