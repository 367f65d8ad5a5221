"""What answers at the addresses of models: a body becomes requests to the model's driver.

`HeadAdmission` has read off the head what is asked of which model (`Ask`). By now the body has been
received, too.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol, TypeVar

from carpool.engine.drive.streams import StreamWindow
from carpool.engine.request import Stream
from carpool.errors import CarpoolError
from carpool.http.bulk import BulkItems, feed_bulk
from carpool.http.codec import format_of_entries
from carpool.http.converted import submission_of
from carpool.http.endpoint import Endpoint
from carpool.http.exchange import Ask, ErrorResponder, Exchange, Head, HttpResponse, ServedModel
from carpool.http.many import ItemList, split
from carpool.http.observer import Observer
from carpool.http.protocol_routes import ProtocolRoutes
from carpool.http.streaming import Delivery
from carpool.service.weigh import Weigher

_LINES_INSIDE = 1024

T = TypeVar("T")


class AdmittingApp(ErrorResponder, Protocol):
    """The app to which requests are admitted.

    Attributes:
        max_body_bytes: Size of the largest request body.
        accepts_compressed: Whether compressed request bodies are read.
        observer: Watches requests and their answers; None if nothing asks for it.
        root_path: What a proxy puts before each path.
    """

    max_body_bytes: int
    accepts_compressed: bool
    observer: Observer | None
    root_path: str

    def refusal_of(self, endpoint: ServedModel | None) -> CarpoolError | None:
        """Return why a request to a model is refused now; None if it is not."""

    def refuse(self, head: Head | None, error: CarpoolError) -> HttpResponse:
        """Return the response to a request that is broken off after its admission, and count it."""


class PredictRoutes:
    """The routes of an app's models.

    Args:
        app: Words refusals, and counts them.
        protocols: Runs the items of bodies that are converted here.
        is_patient: Whether requests wait while the queue is full.
    """

    def __init__(self, app: AdmittingApp, protocols: ProtocolRoutes, is_patient: bool) -> None:
        self._app = app
        self._protocols = protocols
        self._is_patient = is_patient

    def predict(self, exchange: Exchange, is_weighed: bool = False) -> None:
        """Hand a request to its model's driver, once it is noted on it what it counts for.

        Only the deadline is set here. By when the SLO wants it answered, the core says.
        """
        ask = exchange.head.ask
        assert ask is not None
        driver, weigher = ask.endpoint.driver, ask.endpoint.weigher
        assert driver is not None
        if not is_weighed:
            exchange.format = ask.format
            exchange.accept = ask.accept
            exchange.lane = ask.lane
            if weigher is not None:
                self._weigh(weigher, exchange)
                return
        exchange.deadline = driver.clock() + ask.timeout_s
        exchange.patient = self._is_patient
        if ask.framing is not None:
            _ask_for_parts(exchange, ask, driver.clock())
        driver.submit(exchange)

    def _weigh(self, weigher: Weigher, exchange: Exchange) -> None:
        """Note on an item what it counts for, and hand it over then."""
        body = exchange.body
        self._with(
            exchange,
            lambda: weigher.weigh_encoded(exchange, body, exchange.format),
            lambda _: self.predict(exchange, is_weighed=True),
        )

    def predict_whole_request(self, exchange: Exchange) -> None:
        """Hand over a request to a model whose `decode` asks for the head beside the body."""
        ask = exchange.head.ask
        assert ask is not None
        exchange.item = [ask.packed, exchange.body]
        exchange.nbytes += len(ask.packed)
        self.predict(exchange)

    def predict_converted(self, endpoint: Endpoint, exchange: Exchange) -> None:
        """Convert the body of a request, and hand its items to the model's driver."""
        headers, body = exchange.head.headers, exchange.body
        sent, wanted = headers.get(b"content-type"), headers.get(b"accept")
        self._with(
            exchange,
            lambda: submission_of(endpoint, body, sent, wanted),
            lambda submission: self._protocols.submit(exchange, submission),
        )

    def predict_list(self, exchange: Exchange) -> None:
        """Hand the items of a list to their model's driver."""
        ask = exchange.head.ask
        assert ask is not None
        driver, weigher, body = ask.endpoint.driver, ask.endpoint.weigher, exchange.body
        assert driver is not None
        format = format_of_entries(exchange.head.headers.get(b"content-type"))

        def listed() -> ItemList:
            bodies = split(body, format, ask.endpoint.allowance(len(body)))
            whole = ItemList(exchange, ask, bodies, driver.clock() + ask.timeout_s, self._is_patient)
            if weigher is not None:
                for item, own in zip(whole.items, bodies, strict=True):
                    try:
                        weigher.weigh_encoded(item, own, format)
                    except CarpoolError as error:
                        item.error = error
            return whole

        def submit(whole: ItemList) -> None:
            for item in whole.items:
                if isinstance(item.error, CarpoolError):
                    driver.refused(item.error)
            exchange.item = whole  # for `cancel`
            driver.submit_all(whole.begin())

        self._with(exchange, listed, submit)

    def _with(self, exchange: Exchange, read: Callable[[], T], then: Callable[[T], object]) -> None:
        """Go on with what is read from a body, or refuse the request."""
        head = exchange.head
        exchange.read_beside(self._app, exchange.nbytes, read, then, lambda error: self._app.refuse(head, error))

    def predict_bulk(self, exchange: Exchange) -> None:
        """Have the lines of a body taken as they come, each as an item."""
        ask = exchange.head.ask
        assert ask is not None
        driver, handle = ask.endpoint.driver, ask.endpoint.handle
        assert driver is not None
        exchange.fix_id(ask.responder.request_ids)
        window = StreamWindow(_LINES_INSIDE, _LINES_INSIDE) if handle is None else handle.window(None)
        soon = asyncio.get_running_loop().call_soon
        unfed = exchange.item if type(exchange.item) is list else []
        exchange.item = BulkItems(exchange, ask, driver, window, self._app.max_body_bytes, soon)
        for piece in unfed:
            feed_bulk(exchange, piece)


def _ask_for_parts(exchange: Exchange, ask: Ask, now: float) -> None:
    """Have an answer sent in parts; that of a model which makes none is a single one."""
    exchange.fix_id(ask.responder.request_ids)
    exchange.stream = Stream(until=now + ask.stream_s)
    exchange.delivery = Delivery(now)
    exchange.watch_silence()
    service = ask.endpoint.service
    if service.gives.in_parts:
        exchange.deadline = now + service.timeout_s
