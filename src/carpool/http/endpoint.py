"""One service as an app serves it: its life, its formats, and whether it could answer now."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import msgspec

from carpool.engine.allowance import Allowance
from carpool.engine.clock import monotonic
from carpool.engine.core.roster import PlaceState
from carpool.engine.drive.callers import TaskCaller, error_of
from carpool.engine.hints import schema
from carpool.engine.logger import logger
from carpool.engine.observe.log import LineSink
from carpool.engine.request import Request
from carpool.engine.rows import is_array_type
from carpool.engine.wire.outcome import CheckedResponse
from carpool.engine.wire.payload import JSON, MSGPACK, OBJECT, RAW, adapted
from carpool.http.codec import Formats, as_routes_are
from carpool.http.converted import FORM_TYPE, NPY_TYPE, can_read_forms, is_converted
from carpool.http.exchange import JSON_TYPE
from carpool.service.checks import header_of
from carpool.service.graph import firsts_of
from carpool.service.weigh import weigher_of

if TYPE_CHECKING:
    from carpool.engine.drive.aio import Driver
    from carpool.engine.observe.snapshot import ServiceSnapshot
    from carpool.model import Traits
    from carpool.service.elsewhere import Elsewhere
    from carpool.service.handle import AsyncHandle
    from carpool.service.join import Join
    from carpool.service.service import Service

_CHECK_TIMEOUT_S = 5.0


class Endpoint:
    """A service as an app serves it.

    Args:
        output: Takes each line that a worker prints.
        is_first: Whether the service is the first one of its app.

    Attributes:
        weigher: Weighs its items; None if each counts for one.
        is_first: Whether it answers where no model is named, such as at `/predict`.
        is_leaving: Whether the service is being removed, and only answers what is inside.
    """

    def __init__(
        self, service: Service, output: LineSink, join: Join | None, on: Elsewhere | None, *, is_first: bool
    ) -> None:
        self.service = service
        self._join = join
        self._on = on
        self.output = output
        self.name = service.name
        self.is_first = is_first
        self.addresses = list(addresses_of(service, is_first=is_first))
        self.formats = Formats(service.takes, service.gives)
        self.weigher = weigher_of(service.first)
        self.key_header = None if service.first is None else header_of(service.first.key)
        self.handle: AsyncHandle | None = None
        self.driver: Driver | None = None
        self.checked_at = 0.0
        self.is_leaving = False

    async def start(self) -> None:
        """Start the service, and run its examples."""
        self.handle = self.service.run_async(output=self.output, join=self._join, on=self._on)
        await self.handle.start()
        self.driver = self.handle.driver
        self.checked_at = monotonic()

    async def stop(self, drain: bool) -> None:
        """Stop the service if it was started; with `drain` it answers the requests inside first."""
        if self.handle is not None:
            await self.handle.close(drain)

    def reset(self) -> None:
        """Forget a service that has been stopped, so that it can be started again."""
        self.handle = self.driver = None

    @property
    def takes(self) -> Traits:
        return self.service.takes

    @property
    def gives(self) -> Traits:
        return self.service.gives

    def allowance(self, nbytes: int) -> Allowance:
        """Return the limits of a body of so many bytes: items that the first queue holds."""
        return Allowance(nbytes, min(stage.max_queue_size for stage in firsts_of(self.service.graph)))

    def snapshot(self) -> ServiceSnapshot | None:
        return None if self.driver is None else self.driver.snapshot()

    @property
    def has_failed(self) -> bool:
        """Whether the service cannot answer any more, or is not there for new requests."""
        return self.is_leaving or (self.driver is not None and self.driver.has_failed)

    @property
    def problem(self) -> str | None:
        """Why the service could not answer now; None if it could."""
        if self.driver is None:
            return f"{self.name} is starting"
        if self.driver.has_failed:
            return f"{self.name} has failed"
        for stage in self.driver.stats.stages:
            if stage.roster is not None and stage.roster.failed:
                return f"stage {stage.name} of {self.name} has failed"
            if not stage.workers[PlaceState.READY]:
                return f"stage {stage.name} of {self.name} has no worker that is ready"
        return None

    def is_stale(self, idle_s: float) -> bool:
        """Report whether the last good answer is so long ago that an example should be tried."""
        if self.driver is None or not self.service.takes.examples:
            return False
        return monotonic() - max(self.driver.stats.last_ok_at, self.checked_at) > idle_s

    async def try_example(self) -> str | None:
        """Have an example answered as a client would, and return its problem, or None."""
        assert self.handle is not None
        try:
            await try_first_example(self.handle, self.service.takes, self.formats, _CHECK_TIMEOUT_S)
        except Exception as error:
            about = {"model": self.name}
            logger.error("model %s no longer answers its example: %s", self.name, error, extra=about)
            return f"{self.name} no longer answers its example"
        self.checked_at = monotonic()
        return None


BULK_TYPES = frozenset(
    {b"application/x-ndjson", b"application/ndjson", b"application/jsonl", b"application/x-jsonlines"}
)
"""The content types of bodies with an item in each line."""

MANY = "/many"
"""The end of the address at which a body is a list of items, behind the path for one item."""


@dataclass(frozen=True, slots=True)
class Address:
    """One address of a service.

    Attributes:
        takes: The type of a body, or of an item of the list that the body is.
        formats: Which formats are read and written there.
        of_lines: Those of an item that is a line of a body.
        adapter: The position of the adapter that makes items of what is sent; None if that is the
            item.
        is_list: Whether a body is a list, with a place in the queue for each of its items.
    """

    path: str
    takes: Any
    formats: Formats
    of_lines: Formats
    adapter: int | None
    is_list: bool

    @property
    def key(self) -> bytes:
        """The path as `as_routes_are` has it."""
        return as_routes_are(self.path.encode())

    def is_bulk(self, content_type: bytes) -> bool:
        """Report whether a body of this type is lines with an item each."""
        kind = content_type.partition(b";")[0].strip().lower()
        return kind in BULK_TYPES and not self.is_list and not self.formats.reads_itself(kind)

    def takes_converted(self, content_type: bytes | None, accept: bytes | None) -> bool:
        """Report whether a request's body or answer is converted before it goes to the worker."""
        if self.is_list or self.adapter is not None:
            return False
        return is_converted(content_type, accept, self.formats)

    def choose(self, content_type: bytes | None, accept: bytes | None, *, is_bulk: bool = False) -> tuple[int, int]:
        """Return the result of `Formats.choose`, with the adapter in the number of the first
        format.
        """
        if is_bulk:
            format, written = self.of_lines.choose(JSON_TYPE, JSON_TYPE)
        else:
            format, written = self.formats.choose(content_type, accept)
        return (format if self.adapter is None else adapted(format, self.adapter)), written


def predict_path(name: str) -> str:
    return f"/models/{quote(name, safe='')}/predict"


def ready_path(name: str) -> str:
    """Return the path at which one asks whether a service would answer."""
    return f"/models/{quote(name, safe='')}/ready"


def _read_here(reads: Traits, of_entries: Formats, *, is_item: bool) -> list[str]:
    """Return the content types that no worker reads, but an address by itself."""
    types: list[str] = []
    is_made_here = is_item and not of_entries.owns_input
    if is_made_here and can_read_forms():
        types.append(FORM_TYPE.decode())
    if is_made_here and (reads.input_type is Any or is_array_type(reads.input_type)):
        types.append(NPY_TYPE.decode())
    return [*types, "application/x-ndjson"] if of_entries.holds(JSON, JSON) else types


def addresses_of(service: Service, *, is_first: bool) -> Iterator[Address]:
    """Yield the addresses of a service.

    Args:
        is_first: Whether it is the first one of its app, which also answers at `/predict`.
    """
    first, last = service.takes, service.gives
    paths = [predict_path(service.name), *(["/predict"] if is_first else [])]
    usual = [(path, None, first.input_type) for path in paths]
    n_adapters = 0
    for path, adapter, takes in [*usual, *[(each.path, each.adapter, each.takes) for each in service.routes]]:
        index = None
        reads = first
        if adapter is not None:
            index, n_adapters = n_adapters, n_adapters + 1
            reads = replace(first, input_type=takes, accepts=(), decodes_requests=False)
        of_entries = Formats(reads, last, of_entries=True)
        formats = Formats(reads, last, _read_here(reads, of_entries, is_item=adapter is None))
        yield Address(path, takes, formats, of_entries, index, is_list=False)
        yield Address(path + MANY, takes, of_entries, of_entries, index, is_list=True)


_READERS: dict[int, Callable[[Any], object]] = {JSON: msgspec.json.decode, MSGPACK: msgspec.msgpack.decode}


async def try_first_example(handle: AsyncHandle, traits: Traits, formats: Formats, timeout_s: float) -> None:
    """Have the first example answered in the format of a client that asks for none, or in msgpack,
    which can express more.

    Raises:
        Exception: Neither can be had.
    """
    example = traits.examples[0]
    format, body = _body_of(example, traits)
    usual = formats.usual(format)
    problem: Exception | None = None
    for accept in dict.fromkeys((usual,) if formats.owns_output else (usual, MSGPACK)):
        request = handle.new_request(example, timeout_s, 0)
        if format != OBJECT:
            request.format, request.item = format, body
        request.accept = accept
        try:
            await _answer(handle, request, accept)
            return
        except Exception as error:
            problem = problem or error
            if getattr(error, "code", None) != "bad_result":
                break
    assert problem is not None
    raise problem


async def _answer(handle: AsyncHandle, request: Request, accept: int) -> None:
    driver = handle.running_driver
    request.caller = caller = TaskCaller(driver.loop)
    driver.submit(request)
    try:
        await caller.done
    except asyncio.CancelledError:
        driver.cancel(request)
        raise
    if request.error is not None:
        raise error_of(request)
    if type(request.result) is not CheckedResponse and accept in _READERS:
        _READERS[accept](request.result)


def _body_of(example: object, traits: Traits) -> tuple[int, bytes]:
    """Return an example as a client would send it, and the format of that.

    It is sent as the Python object that it is if no client could write it, and to a model with a
    `decode`, whose result it is.
    """
    kind = traits.input_type
    if traits.accepts:
        return OBJECT, b""
    if kind is bytes and isinstance(example, bytes | bytearray | memoryview):
        return RAW, bytes(example)
    for format, make in ((JSON, schema.json_writer), (MSGPACK, schema.msgpack_writer)):
        try:
            return format, make(kind)(example)
        except BaseException:  # writers of types may be user code
            continue
    return OBJECT, b""
