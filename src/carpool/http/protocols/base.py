"""What a protocol is: it says which items a request brings, and which answer their results make.

A protocol has no socket, no driver and no clock. It lists its addresses for the models of an app
(`HttpProtocol.routes`). Each address has a function that is called with a `ProtocolRequest` and
returns a response at once, or a `Submission`: items for a model, and a function that makes the
response of their results. Whatever fails, of the items or before, is put into the protocol's own
words by `HttpProtocol.error`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol

import msgspec

from carpool.engine.wire.payload import OBJECT
from carpool.errors import InvalidRequest
from carpool.http.exchange import HttpResponse

if TYPE_CHECKING:
    from carpool.engine.allowance import Allowance
    from carpool.engine.observe.snapshot import ServiceSnapshot
    from carpool.http.codec import Formats
    from carpool.model import Traits
    from carpool.service.declaration import Declaration

_LONGEST_NAMES = 200


class ModelOfApp(Protocol):
    """A model of the app as protocols see it.

    Attributes:
        name: Of the service.
        is_first: Whether it answers where no model is named: at `/predict`, and at the addresses of
            protocols for one model.
    """

    name: str
    is_first: bool

    @property
    def service(self) -> Declaration:
        """The declaration of the service."""

    @property
    def takes(self) -> Traits:
        """The traits of the first stage, which gets the items."""

    @property
    def gives(self) -> Traits:
        """The traits of the last stage, which returns the results."""

    @property
    def formats(self) -> Formats:
        """The formats that the model reads and writes at its own addresses."""

    @property
    def problem(self) -> str | None:
        """Why the service could not answer now; None if it could."""

    def allowance(self, nbytes: int) -> Allowance:
        """Return the limits of a body of so many bytes; whoever reads one counts first."""

    def snapshot(self) -> ServiceSnapshot | None:
        """Return the figures of the service so far; None while it is not running."""


class ProtocolRequest(NamedTuple):
    """A request to an address of a protocol.

    Attributes:
        path: The path, quoted as addresses are.
        headers: By name in lower case: those that the app looks at, and those that the protocol
            names in `HttpProtocol.headers`.
        body: As it was sent.
        problem: Why the app could not answer now; None if it could.
    """

    path: str
    headers: Mapping[bytes, bytes]
    body: bytes | bytearray
    problem: str | None


class ShownError(NamedTuple):
    """An error in the words of a protocol.

    Attributes:
        status: The HTTP status.
        code: The error code, as in docs/http.md.
        message: A text that may leave the machine.
        request_id: Under which the log has more.
    """

    status: int
    code: str
    message: str
    request_id: str


class _ErrorBody(msgspec.Struct):
    code: str
    message: str
    request_id: str


class _Error(msgspec.Struct):
    error: _ErrorBody


_read_error = msgspec.json.Decoder(_Error).decode


def shown_in(response: HttpResponse) -> ShownError:
    """Return the error of a response of the app, as docs/http.md describes it."""
    found = _read_error(response.body).error
    return ShownError(response.status, found.code, found.message, found.request_id)


class PartsWriter(Protocol):
    """Writes an answer in parts, as events or lines."""

    def part(self, index: int, part: Any) -> bytes:
        """Return a part of an item's answer as it is written; empty if there is nothing to write.

        Args:
            index: The position of the item in its submission.
            part: The part that the model gave; of a model that returns whole answers, the answer.
        """

    def is_over(self, index: int) -> bool:
        """Report whether an item's answer needs no further parts, so that they need not be made."""

    def end(self, index: int) -> bytes:
        """Return the end of an item's answer, behind its last part."""

    def close(self) -> bytes:
        """Return the end of the whole, behind the answers of all items."""

    def error(self, error: ShownError) -> bytes:
        """Return the error in the place of the rest after a failure; nothing follows it."""


@dataclass(frozen=True, slots=True)
class Submission:
    """Items for a model, and the use of their results.

    Attributes:
        model: Gets the items.
        items: In their order, in the form that `sent_as` says.
        respond: Makes the response of the results, in the same order, in the form that `wanted_as`
            says. If an item has failed, it is not called, and the first failure is answered.
        sent_as: How items are written: OBJECT for Python objects, JSON or MSGPACK for the bytes of
            each, RAW where the item is bytes or a text, CUSTOM for a body as `model.formats` says
            that the model's own `decode` reads it.
        wanted_as: How results are wanted: OBJECT for Python objects as the model has returned them,
            ARRAYS for builtins and numpy's arrays, whose reading imports no other library, JSON
            for the bytes of each.
            Where a `decode` of the model's own reads JSON or msgpack, or an `encode` writes it,
            items and results pass through that, and what is anything else is refused (415, 406).
        waits: Whether it may have more items than the queue holds: those for which there is no room
            wait for it, and the protocol has counted them.
        is_partial: Whether `respond` takes a `ShownError` in the place of a result.
        timeout_s: How long the answer may take; the service's own limit counts besides.
        priority: Of the items; None for that of the request's headers.
        parts: Writes the answer in parts; None for a whole answer.
    """

    model: ModelOfApp
    items: Sequence[Any]
    respond: Callable[[list[Any]], HttpResponse]
    sent_as: int = OBJECT
    wanted_as: int = OBJECT
    waits: bool = False
    is_partial: bool = False
    timeout_s: float = inf
    priority: int | None = None
    parts: PartsWriter | None = None


Answering = Callable[[ProtocolRequest], "Submission | HttpResponse"]


class ProtocolRoute(NamedTuple):
    """One address of a protocol.

    Attributes:
        method: GET or POST.
        path: The path, quoted.
        answer: Called for each request. It raises a `CarpoolError` for what it cannot take.
        model: The model that is asked, if the path says it.
        replaces: Whether it stands in the place of an address that every app has.
        summary: Its purpose, for the OpenAPI document.
        reads: The content types of bodies that it takes, for the document.
        writes: The content types of good answers, for the document.
        is_alias: Whether another address does the same, so that lists of addresses leave it out.
        fits: Reports whether the address fits the models, and is listed; None if it always does. It
            is called when somebody asks for a list.
        sent_as: As what its items are sent, as in `Submission`; CUSTOM if the body decides.
        wanted_as: As what its results are wanted; CUSTOM if the request decides. The address of a
            model is listed only if it does not go past the model's own `decode` and `encode`.
    """

    method: str
    path: str
    answer: Answering
    model: ModelOfApp | None = None
    replaces: bool = False
    summary: str = ""
    reads: Sequence[str] = ("application/json",)
    writes: Sequence[str] = ("application/json",)
    is_alias: bool = False
    fits: Callable[[], bool] | None = None
    sent_as: int = OBJECT
    wanted_as: int = OBJECT


class ShownRoute(NamedTuple):
    """An address that is listed.

    Attributes:
        protocol: The name of its protocol.
        route: The address.
    """

    protocol: str
    route: ProtocolRoute


class HttpProtocol:
    """Base class of protocols. A subclass has a name and `routes`, mostly an `error` too.

    Its functions are called on the server's loop, and in threads where a body or results have
    256 KiB or more.
    """

    name: ClassVar[str] = ""
    """How `--protocol` and `App(protocols=)` call it."""

    prefixes: ClassVar[Sequence[str]] = ()
    """The beginnings of paths at which this protocol also says that there is nothing."""

    headers: ClassVar[Sequence[str]] = ()
    """The names of further headers that it reads, in lower case."""

    def routes(self, models: Sequence[ModelOfApp]) -> Iterable[ProtocolRoute]:
        """Yield the addresses for the models of an app."""
        raise NotImplementedError

    def error(self, error: ShownError) -> HttpResponse:
        """Return the response to a request that failed; headers are added by the app."""
        raise NotImplementedError

    def in_own_words(self, response: HttpResponse) -> HttpResponse:
        """Return an error response of the app in the words of this protocol."""
        written = self.error(shown_in(response))
        return written._replace(headers=(*response.headers, *written.headers))


def model_asked(
    models: Sequence[ModelOfApp],
    name: str | None,
    fits: Callable[[ModelOfApp], bool],
    *,
    must_be_named: bool = False,
) -> ModelOfApp:
    """Return the model that a body asks: the one that it names, or else the only one that fits.

    Args:
        name: As the request names it; None if it names none.
        fits: Reports whether a model can be asked at this address.
        must_be_named: Whether it is not to be found out which one is meant.

    Raises:
        InvalidRequest: There is no model of that name (404); or none is named, and there is none
            that fits (404) or several (400).
    """
    if name is not None:
        for model in models:
            if model.name == name:
                return model
        text = f"The model {name[:100]!r} does not exist; there is {_names(models)}"
        raise InvalidRequest(text, status=404, code="model_not_found")
    fitting = [model for model in models if fits(model)]
    if not fitting:
        raise unfit("there is no model that can be asked at this address")
    if len(fitting) > 1 or must_be_named:
        raise InvalidRequest(f'say which model: "model" may be one of {_names(fitting)}')
    return fitting[0]


def first_of(models: Sequence[ModelOfApp]) -> ModelOfApp | None:
    """Return the model that is asked where none can be named; None if that has been removed."""
    return next((model for model in models if model.is_first), None)


def nobody_is_first(models: Sequence[ModelOfApp]) -> Answering:
    """Return the answer at the address of a first model that has been removed: 404."""

    def refuse(request: ProtocolRequest) -> HttpResponse:
        text = f"the first service, which answered here, was removed; there is {_names(models)}"
        raise unfit(f"{text}, at /models/NAME/predict")

    return refuse


def _names(models: Sequence[ModelOfApp]) -> str:
    names = ", ".join(model.name for model in models)
    return names if len(names) <= _LONGEST_NAMES else f"{names[:_LONGEST_NAMES]}..."


def unfit(reason: str) -> InvalidRequest:
    """Return the error of an address that does not fit the model: 404, with the reason."""
    return InvalidRequest(reason, status=404, code="not_found")
