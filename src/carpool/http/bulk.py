"""Bulk: a body of any number of lines, one item each, answered by as many lines in their order
while the body is still being sent.

At most a window of items is inside at a time. While it is full, or the client does not take its
answers, no more of the body is wanted. So memory is bounded in both directions: by the window, one
piece of the body, and one line.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from carpool.errors import CarpoolError, InvalidRequest
from carpool.http.exchange import Ask, Exchange, HttpResponse
from carpool.http.items import ExchangeItems
from carpool.http.many import entry_of
from carpool.http.streaming import HttpStream
from carpool.request import DONE, Request
from carpool.wire.payload import CUSTOM, LARGE, without_adapter

if TYPE_CHECKING:
    from carpool.drive.aio import Driver
    from carpool.drive.streams import Window

BULK_PRIORITY: Final = -1
"""The priority of items of a bulk request that names none: those of other requests go first."""

_SPACE: Final = ord(" ")

Soon = Callable[[Callable[[], None]], object]


class BulkItem(Request):
    """A line of a bulk request.

    There are millions, so `BulkItems` makes them without a constructor of their own, in its loop.

    Attributes:
        whole: all lines.
    """

    __slots__ = ("whole",)

    whole: BulkItems

    def tell(self) -> None:
        """Have the answers that are there written at the end of this turn."""
        whole = self.whole
        if not whole.is_flush_due and whole.inside[0].state == DONE:
            whole.flush_soon()


class BulkItems(ExchangeItems):
    """The items of a bulk request.

    Args:
        exchange: is answered line by line.
        ask: what is asked of which model.
        driver: of the model.
        window: how many items may be inside at a time.
        longest: bytes of the longest line.
        soon: has something called at the end of this turn of the loop.

    Attributes:
        inside: the items that have no answer yet, or whose answers are not written, in their order.
        is_flush_due: whether answers are written at the end of this turn of the loop.
    """

    def __init__(self, exchange: Exchange, ask: Ask, driver: Driver, window: Window, longest: int, soon: Soon) -> None:
        super().__init__(exchange, ask.endpoint)
        self._ask = ask
        self._driver = driver
        self._window = window
        self._most = max(1, int(min(driver.pipeline.batchers[0].queue.max_size, 2**30)) // 2)
        self._longest = longest
        self._soon = soon

        # the body: pieces of a line that is not complete, and complete lines that wait for room
        self._pieces: list[bytes] = []
        self._held = 0
        self._lines: deque[bytes] = deque()
        self._has_input_ended = False
        self._broken: bytes | None = None  # the last line, if the body is broken off

        # the answers
        self.inside: deque[BulkItem] = deque()
        self.is_flush_due = False
        self._is_paused = False
        self._has_ended = False
        exchange.stream = HttpStream(driver.clock(), driver.clock())
        exchange.watch_silence()

    @property
    def wants_more(self) -> bool:
        """Whether more of the body can be taken now."""
        return not (self._lines or self._is_paused or self._has_input_ended)

    def feed(self, data: bytes) -> None:
        """Take a piece of the body."""
        if self._has_input_ended:
            return
        first, *others = data.split(b"\n")
        self._held += len(first)
        self._pieces.append(first)
        if others:
            self._take_line()
            *lines, last = others
            self._lines.extend(lines)
            self._pieces.append(last)
            self._held = len(last)
        self._submit()
        if self._held > self._longest:
            self.break_off(self._too_long())

    def end(self) -> None:
        """Take note that the body is complete."""
        if not self._has_input_ended:
            self._take_line()
            self._submit()
            self._has_input_ended = True
            self.flush_soon()

    def break_off(self, error: CarpoolError) -> None:
        """Answer what is inside, and end with a line that says why there is no more."""
        self.break_off_with(self._ask.responder.error(self._exchange.head, error))

    def break_off_with(self, response: HttpResponse) -> None:
        """Do the same with the body of an error response as the last line."""
        if self._broken is None and not self._has_ended:
            self._broken = bytes(response.body) + b"\n"
            self._has_input_ended = True
            self._lines.clear()
            self._pieces.clear()
            self._exchange.leave_body_unread()
            self.flush_soon()

    def _take_line(self) -> None:
        """Complete the line whose pieces have come."""
        if self._pieces:
            self._lines.append(b"".join(self._pieces))
            self._pieces.clear()
            self._held = 0

    def _too_long(self) -> InvalidRequest:
        text = f"a line of the body is longer than {self._longest} bytes"
        return InvalidRequest(text, status=413, code="too_large")

    # -- items

    def _submit(self) -> None:
        """Submit lines that wait, as far as there is room."""
        closed = self._driver.pipeline.closed_because
        if self._lines and closed is not None:
            self.break_off(closed)
            return
        inside = self.inside
        new = self._new_items()
        if new:
            inside += new
            if self._ask.endpoint.weigher is not None:
                new = [item for item in new if self._is_weighed(item)]
            self._driver.submit_all(new)
        if inside and inside[0].state == DONE:
            self.flush_soon()

    def _new_items(self) -> list[BulkItem]:
        """Make items of the lines that wait, as far as there is room."""
        ask, lines, most, new = self._ask, self._lines, self._most, list[BulkItem]()
        format, accept, lane = ask.format, ask.accept, ask.lane
        deadline = self._driver.clock() + ask.timeout_s
        n_inside, longest_usual = len(self.inside), min(self._longest, LARGE - 1)
        room = min(self._window.limit, most) - n_inside
        while lines and len(new) < room:
            line = lines.popleft()
            if not line or (line[0] <= _SPACE and line.isspace()):
                continue
            n = len(line)
            if n > longest_usual:
                if n > self._longest:
                    self.break_off(self._too_long())
                    break
                self._window.narrow(n)
                room = min(self._window.limit, most) - n_inside
            item = BulkItem(line, deadline, None, n)
            item.whole = self
            item.format, item.accept, item.lane = format, accept, lane
            item.bulk = item.patient = True
            new.append(item)
        return new

    def _is_weighed(self, item: BulkItem) -> bool:
        """Weigh an item; report whether it can be, else it has failed."""
        weigher, format = self._ask.endpoint.weigher, self._ask.format
        assert weigher is not None
        try:
            weigher.weigh_encoded(item, item.item, format if format < CUSTOM else without_adapter(format)[0])
        except CarpoolError as error:
            item.error = error
            item.state = DONE
            self._driver.refused(error)
            return False
        return True

    # -- answers

    def cancel(self) -> None:
        """Give up everything: the client has left."""
        self._has_input_ended = self._has_ended = True
        self._lines.clear()
        for item in self.inside:
            self._driver.cancel(item)
        self.inside.clear()

    def pause(self, is_paused: bool) -> None:
        """Write nothing and take nothing for a client that does not take its answers, or go on."""
        self._is_paused = is_paused
        if not is_paused:
            self.flush_soon()

    def flush_soon(self) -> None:
        """Write what is there, and take more of the body, at the end of this turn."""
        if not self.is_flush_due:
            self.is_flush_due = True
            self._soon(self._flush)

    def _flush(self) -> None:
        """Write the answers whose turn it is, and take more of the body for them."""
        self.is_flush_due = False
        if self._is_paused or self._has_ended:
            return
        inside = self.inside
        written: list[bytes] = []
        while inside and inside[0].state == DONE:
            item = inside.popleft()
            result = item.result
            if type(result) is bytes and item.error is None:  # as nearly all are
                written.append(result)
            else:
                written.append(entry_of(item, self._ask, self._exchange.head))
        if written:
            written.append(b"")
            self._exchange.write_part(b"\n".join(written))
        self._submit()
        if self.wants_more:
            self._exchange.want_more()
        elif self._has_input_ended and not (inside or self._lines or self.is_flush_due):
            self._has_ended = True
            self._exchange.end_parts(self._broken or b"", is_whole=True)


Piece = bytes | HttpResponse | None
"""A piece of a bulk request's body, the error response that breaks it off, or None at its end."""


def feed_bulk(exchange: Exchange, piece: Piece) -> None:
    """Hand on what has come of a bulk request; its item is a list of that until the app has it."""
    items = exchange.item
    if type(items) is list:
        items.append(piece)
    elif type(items) is BulkItems:
        if piece is None:
            items.end()
        elif isinstance(piece, HttpResponse):
            items.break_off_with(piece)
        else:
            items.feed(piece)


def wants_more_of_bulk(exchange: Exchange) -> bool:
    """Report whether there is room for more of a bulk request."""
    return type(exchange.item) is BulkItems and exchange.item.wants_more
