"""The addresses at which a service can be asked, and what a body means at each of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from carpool.engine.rows import is_array_type
from carpool.engine.wire.payload import JSON, adapted
from carpool.http.codec import Formats, as_routes_are
from carpool.http.converted import is_converted
from carpool.http.exchange import JSON_TYPE
from carpool.http.multipart import FORM_TYPE, can_read_forms
from carpool.http.npy import NPY_TYPE

if TYPE_CHECKING:
    from carpool.model import Traits
    from carpool.service.service import Service

BULK_TYPES = frozenset(
    {b"application/x-ndjson", b"application/ndjson", b"application/jsonl", b"application/x-jsonlines"}
)
"""The content types of bodies with an item in each line."""

MANY = "/many"
"""What follows the path of an address where a body is a list of what it is there."""


@dataclass(frozen=True, slots=True)
class Address:
    """One address of a service.

    Attributes:
        path: As clients are told it, quoted.
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
        """Return what `Formats.choose` does, with the adapter in the number of the first format.

        Args:
            content_type: The header of that name.
            accept: The header of that name.
            is_bulk: Whether the body is lines with an item each, which are JSON.
        """
        if is_bulk:
            format, written = self.of_lines.choose(JSON_TYPE, JSON_TYPE)
        else:
            format, written = self.formats.choose(content_type, accept)
        return (format if self.adapter is None else adapted(format, self.adapter)), written


def predict_path(name: str) -> str:
    """Return the path of a service."""
    return f"/models/{quote(name, safe='')}/predict"


def ready_path(name: str) -> str:
    """Return the path at which one asks whether a service would answer."""
    return f"/models/{quote(name, safe='')}/ready"


def _read_here(reads: Traits, of_entries: Formats, *, is_item: bool) -> list[str]:
    """Return the content types that no worker reads, but an address by itself.

    Args:
        reads: The traits of what is sent.
        of_entries: The formats of its lines.
        is_item: Whether it is an item, and not what an adapter makes one of.
    """
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
        service: The service.
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
