"""What answers at the addresses of models: a body becomes requests to the model's driver.

`HeadAdmission` has read off the head what is asked of which model (`Ask`). By now the body has been
received, too.
"""

from __future__ import annotations

import asyncio
from typing import Protocol

from carpool.drive.streams import StreamWindow
from carpool.errors import CarpoolError
from carpool.http.bulk import BulkItems, feed_bulk
from carpool.http.codec import format_of_entries
from carpool.http.converted import submission_of
from carpool.http.endpoint import Endpoint
from carpool.http.exchange import Ask, Exchange, Head, HttpResponse
from carpool.http.many import ItemList, split
from carpool.http.protocol_routes import ProtocolRoutes
from carpool.http.streaming import HttpStream

_LINES_INSIDE = 1024


class RefusingApp(Protocol):
    """What these routes ask of an app.

    Attributes:
        max_body_bytes: Size of the largest request body.
    """

    max_body_bytes: int

    def refuse(self, head: Head | None, error: CarpoolError) -> HttpResponse:
        """Return the response to a request that is broken off after its admission, and count it."""


class PredictRoutes:
    """The routes of an app's models.

    Args:
        app: Words refusals, and counts them.
        protocols: Runs the items of bodies that are converted here.
        is_patient: Whether requests wait while the queue is full.
    """

    def __init__(self, app: RefusingApp, protocols: ProtocolRoutes, is_patient: bool) -> None:
        self._app = app
        self._protocols = protocols
        self._is_patient = is_patient

    def predict(self, exchange: Exchange) -> None:
        """Hand a request to its model's driver.

        Only the deadline is set here. By when the SLO wants it answered, the pipeline says.
        """
        ask = exchange.head.ask
        assert ask is not None
        driver, weigher = ask.endpoint.driver, ask.endpoint.weigher
        assert driver is not None
        exchange.format = ask.format
        exchange.accept = ask.accept
        exchange.lane = ask.lane
        if weigher is not None:
            try:
                weigher.weigh_encoded(exchange, exchange.body, exchange.format)
            except CarpoolError as error:
                exchange.respond(self._app.refuse(exchange.head, error))
                return
        exchange.deadline = driver.clock() + ask.timeout_s
        exchange.patient = self._is_patient
        if ask.framing is not None:
            _ask_for_parts(exchange, ask, driver.clock())
        driver.submit([exchange])

    def predict_whole_request(self, exchange: Exchange) -> None:
        """Hand over a request to a model whose `decode` asks for the head beside the body."""
        ask = exchange.head.ask
        assert ask is not None
        exchange.item = [ask.packed, exchange.body]
        exchange.nbytes += len(ask.packed)
        self.predict(exchange)

    def predict_converted(self, endpoint: Endpoint, exchange: Exchange) -> None:
        """Convert the body of a request, and hand its items to the model's driver."""
        headers = exchange.head.headers
        sent, wanted = headers.get(b"content-type"), headers.get(b"accept")
        try:
            submission = submission_of(endpoint, exchange.body, sent, wanted)
        except CarpoolError as error:
            exchange.respond(self._app.refuse(exchange.head, error))
            return
        self._protocols.submit(exchange, submission)

    def predict_list(self, exchange: Exchange) -> None:
        """Hand the items of a list to their model's driver."""
        ask = exchange.head.ask
        assert ask is not None
        driver, weigher = ask.endpoint.driver, ask.endpoint.weigher
        assert driver is not None
        format = format_of_entries(exchange.head.headers.get(b"content-type"))
        try:
            bodies = split(exchange.body, format, ask.endpoint.allowance(len(exchange.body)))
        except CarpoolError as error:
            exchange.respond(self._app.refuse(exchange.head, error))
            return
        whole = ItemList(exchange, ask, bodies, driver.clock() + ask.timeout_s, self._is_patient)
        if weigher is not None:
            for item, body in zip(whole.items, bodies, strict=True):
                try:
                    weigher.weigh_encoded(item, body, format)
                except CarpoolError as error:
                    item.error = error
                    driver.refused(error)
        exchange.item = whole  # for `cancel`
        driver.submit(whole.begin())

    def predict_bulk(self, exchange: Exchange) -> None:
        """Have the lines of a body taken as they come, each as an item."""
        ask = exchange.head.ask
        assert ask is not None
        driver, handle = ask.endpoint.driver, ask.endpoint.handle
        assert driver is not None
        window = StreamWindow(_LINES_INSIDE, _LINES_INSIDE) if handle is None else handle.window(None)
        soon = asyncio.get_running_loop().call_soon
        unfed = exchange.item if type(exchange.item) is list else []
        exchange.item = BulkItems(exchange, ask, driver, window, self._app.max_body_bytes, soon)
        for piece in unfed:
            feed_bulk(exchange, piece)


def _ask_for_parts(exchange: Exchange, ask: Ask, now: float) -> None:
    """Have an answer told in parts; that of a model which makes none is a single one."""
    exchange.stream = HttpStream(now, now + ask.stream_s)
    exchange.watch_silence()
    service = ask.endpoint.service
    if service.stages[-1].traits.in_parts:
        exchange.deadline = now + service.timeout_s
