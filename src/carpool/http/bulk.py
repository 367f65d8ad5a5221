"""Bulk: a body of any number of lines, one item each, answered by as many lines in their order
while the body is still being sent.

At most a window of items is inside at a time. While it is full, the client does not take its
answers, or the first queue has no room for their bytes, no more of the body is wanted. So memory is
bounded in both directions: by the window, which is narrower where lines or answers are large, one
piece of the body, and one line. What has come of the body, and is not inside, counts among the
bodies that the server is receiving (`Exchange.hold`).

`BulkItems._items_of` uses the requests of answered lines again, since making one took 130 of the
485 bytecodes of a line. The lines of one piece share lane and deadline, so they are admitted and
queued together (`alike` of `Flow.submit`). Answers of quick batches wait for the next ones while
half of the window is queued, since a write and a poll cost about the same for 64 lines as for 200.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import inf
from typing import TYPE_CHECKING, Final

from carpool.engine.drive.streams import MOST_WAITING, StreamWindow
from carpool.engine.fast_paths import fast_path
from carpool.engine.request import DONE, NEW, Request
from carpool.engine.wire.payload import CUSTOM, JSON, Payload, without_adapter
from carpool.errors import CarpoolError, InvalidRequest
from carpool.http import entries
from carpool.http.exchange import Ask, Exchange, HttpResponse, error_entry
from carpool.http.items import ExchangeItems, entry_of
from carpool.http.streaming import Delivery

if TYPE_CHECKING:
    from carpool.engine.drive.aio import Driver

BULK_PRIORITY: Final = -1
"""The priority of items of a bulk request that names none: those of other requests go first."""

_SPACE: Final = ord(" ")
_NO_SPACE: Final = b"!"
"""Sorts behind each line that is empty or begins with a space, and before all others."""

_QUICK_S: Final = 0.005
"""Where batches take less than this, the answers of several are written together, and lines for
several are taken together, since that takes hardly longer than to do it for one."""
_LONGEST_WAIT_S: Final = 0.01
"""After this time answers are written although no other batch has been answered."""
_NO_ROOM_S: Final = 0.05
"""After this time a request of which nothing is inside asks again whether there is room."""
_WIDENED: Final = 4
"""How many times the usual number of items may be inside then, so that the workers have enough to
do until more lines are taken."""

Soon = Callable[[Callable[[], None]], object]


class BulkItem(Request):
    """A line of a bulk request; once that is answered, a later one of the same bulk request.

    Attributes:
        whole: All lines.
    """

    __slots__ = ("whole",)

    whole: BulkItems

    def tell(self) -> None:
        """Have the answers that are there written at the end of this turn."""
        whole = self.whole
        # all may have been written already, by a timer, or the client may have left
        if not whole.is_flush_due and whole.inside and whole.inside[0].state == DONE:
            whole.flush_soon()


class BulkItems(ExchangeItems):
    """The items of a bulk request.

    Args:
        window: How many items may be inside at a time.
        soon: Has something called at the end of this turn of the loop.

    Attributes:
        inside: The items that have no answer yet, or whose answers are not written, in their order.
    """

    def __init__(
        self, exchange: Exchange, ask: Ask, driver: Driver, window: StreamWindow, longest: int, soon: Soon
    ) -> None:
        super().__init__(exchange, ask.endpoint)
        self._ask = ask
        self._driver = driver
        self._window = window
        self._first = driver.core.crews[0]
        self._most = max(1, int(min(self._first.queue.max_size, 2**30)) // 2)
        self._longest = longest
        self._usual_length = min(longest, window.small // _WIDENED)
        self._soon = soon
        self._later = driver.loop.call_later

        # the body: a line that is not complete, and complete lines that wait for room
        self._line = bytearray()
        self._held = self._counted = 0  # bytes of both, and those that were counted
        self._lines: list[bytes] = []
        self._n_taken = 0  # how many of these have become items
        self._has_input_ended = False
        self._broken: bytes | None = None  # the last line, if the body is broken off

        # the items: where a service has one stage, and does not weigh, they can be used again
        is_one_stage = len(driver.core.crews) == 1 and driver.core.flow.is_line
        self._are_used_again = ask.endpoint.weigher is None and is_one_stage
        self._spare: list[BulkItem] = []  # what has been answered, and is to be a later line

        # the answers
        self.inside: list[BulkItem] = []
        self.is_flush_due = False
        self._is_timed = False  # answers will be written at some time, whatever comes
        self._is_paused = False
        self._has_ended = False
        exchange.delivery = Delivery(driver.clock())
        exchange.watch_silence()

    @property
    def wants_more(self) -> bool:
        """Whether more of the body can be taken now."""
        return not (self._lines or self._is_paused or self._has_input_ended)

    def feed(self, data: bytes) -> None:
        if self._has_input_ended:
            return
        self._held += len(data)
        *lines, last = data.split(b"\n")
        if lines and self._line:
            self._line += lines[0]
            lines[0] = bytes(self._line)
            self._line.clear()
        self._lines += lines
        self._line += last
        self._submit()
        if len(self._line) > self._longest:
            self.break_off(self._too_long())
        self._count_held()

    def end(self) -> None:
        if not self._has_input_ended:
            if self._line:
                self._lines.append(bytes(self._line))
                self._line.clear()
            self._submit()
            self._has_input_ended = True
            self.flush_soon()

    def break_off(self, error: CarpoolError) -> None:
        """Answer the items inside, and end with a line that says why there is no more."""
        self.break_off_with(self._ask.responder.error(self._exchange.head, error))

    def break_off_with(self, response: HttpResponse) -> None:
        """Do the same with the error of a response."""
        if self._broken is None and not self._has_ended:
            self._broken = error_entry(response, JSON, is_last=True) + b"\n"
            self._forget_body()
            if not self._has_input_ended:
                self._has_input_ended = True
                self._exchange.leave_body_unread()
            self.flush_soon()

    def _count_held(self) -> None:
        if self._held == self._counted:
            return
        self._counted = self._held
        try:
            self._exchange.hold(self._held)
        except CarpoolError as error:
            self.break_off(error)

    def _too_long(self) -> InvalidRequest:
        text = f"a line of the body is longer than {self._longest} bytes"
        return InvalidRequest(text, status=413, code="too_large")

    # -- items

    def _submit(self) -> None:
        closed = self._driver.core.flow.closed_because
        if self._lines and closed is not None:
            self.break_off(closed)
            return
        if self._is_paused:
            return
        inside = self.inside
        lines = self._take_lines()
        if lines:
            new = self._items_of(lines)
            inside += new
            if self._ask.endpoint.weigher is None:
                self._driver.submit_all(new, alike=True)
            else:
                self._driver.submit_all([item for item in new if self._is_weighed(item)])
        elif self._lines and not inside and not self._is_timed:
            self._is_timed = True
            self._later(_NO_ROOM_S, self._flush_in_time)  # no answer of this request will have it called
        if inside and inside[0].state == DONE:
            self.flush_soon()

    def _forget_lines(self) -> None:
        """Let go of all lines that wait, as they have been taken."""
        self._lines.clear()
        self._n_taken = 0
        self._held = len(self._line)

    def _forget_body(self) -> None:
        """Let go of all that waits, as nothing of it is wanted."""
        self._line.clear()
        self._forget_lines()
        self._count_held()

    @property
    def _room(self) -> int:
        room = self._most_inside - len(self.inside)
        if room > 0 and self._window.is_heavy and sum(map(_answer_bytes, self.inside)) > MOST_WAITING:
            return 0
        return room

    @property
    def _most_inside(self) -> int:
        window = self._window
        limit = window.limit * _WIDENED if window.is_wide and self._is_quick else window.limit
        return min(limit, window.fits, self._most)

    @property
    def _room_bytes(self) -> float:
        """How many bytes the lines may have that are taken now; anything fits while none waits."""
        queue, door = self._first.queue, self._driver.core.flow.door
        waiting = queue.nbytes + door.nbytes
        return queue.max_bytes - waiting if waiting else inf

    @property
    def _is_quick(self) -> bool:
        """Whether the first stage takes little time for a batch, as far as that is known."""
        return 0.0 < self._first.times.usual_s < _QUICK_S

    @property
    def _can_wait(self) -> bool:
        """Whether answers may wait for those of the next batch: the workers have enough to do."""
        return self._is_quick and len(self._lines) > 0 and 2 * self._first.queue.count >= self._most_inside

    def _take_lines(self) -> list[bytes]:
        taken = self._take_usual_lines()
        return self._take_unusual_lines() if taken is None else taken

    @fast_path("usual_lines")
    def _take_usual_lines(self) -> list[bytes] | None:
        """Take lines if none may be blank or long, and all have room; None if not.

        Fast path of `_take_unusual_lines`: the same lines, see tests/http/test_bulk_items.py.
        """
        at = self._n_taken
        taken = self._lines[at : at + max(0, self._room)]
        if not taken:
            return taken
        nbytes = sum(map(len, taken))
        if min(taken) < _NO_SPACE or nbytes > self._room_bytes:
            return None
        if nbytes > self._usual_length and max(map(len, taken)) > self._usual_length:
            return None
        self._window.has_large_items = False
        self._note_taken(at + len(taken), nbytes + len(taken))
        return taken

    def _note_taken(self, upto: int, nbytes: int) -> None:
        """Let go of lines that were taken or passed over, which held so many bytes."""
        self._n_taken = upto
        self._held -= nbytes
        if upto == len(self._lines):
            self._forget_lines()

    def _take_unusual_lines(self) -> list[bytes]:
        """Take lines where some may be blank or long."""
        taken: list[bytes] = []
        lines, at, room = self._lines, self._n_taken, self._room  # a client may send nothing but blank lines
        room_bytes, nbytes = self._room_bytes, 0
        while at < len(lines) and len(taken) < room:
            line = lines[at]
            if len(line) > self._usual_length:
                if len(line) > self._longest:
                    self.break_off(self._too_long())
                    return taken
                self._window.has_large_items = True
                self._window.narrow(len(line))
                room = self._room
            if line and not (line[0] <= _SPACE and line.isspace()):
                if len(taken) == room or len(line) > room_bytes:
                    break
                room_bytes = min(room_bytes, self._first.queue.max_bytes) - len(line)
                taken.append(line)
            at += 1
            nbytes += len(line) + 1
        self._note_taken(at, nbytes)
        return taken

    def _items_of(self, lines: list[bytes]) -> list[BulkItem]:
        """Return items for lines: those that have been answered, or new ones if there are too few.
        All that a first stage changes of a request is set here.
        """
        ask, spare, n = self._ask, self._spare, len(lines)
        packed = ask.packed if ask.format == CUSTOM else b""
        deadline, lane = self._driver.clock() + ask.timeout_s, ask.lane
        while len(spare) < n:
            spare.append(self._new_item())
        new = spare[-n:]
        del spare[-n:]
        bodies: Sequence[Payload] = lines
        sizes: Iterable[int] = map(len, lines)
        if packed:
            bodies, sizes = [[packed, line] for line in lines], [len(packed) + len(line) for line in lines]
        for item, body, nbytes in zip(new, bodies, sizes, strict=True):
            item.item = body
            item.nbytes = nbytes
            item.deadline = item.due = deadline
            item.lane = lane
            item.id = item.losses = 0
            item.state = NEW
            item.result = None
        return new

    def _new_item(self) -> BulkItem:
        item = BulkItem(b"", 0.0)
        item.whole = self
        item.format, item.accept = self._ask.format, self._ask.accept
        item.bulk = item.patient = True
        return item

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
        self._has_input_ended = self._has_ended = True
        self._forget_body()
        for item in self.inside:
            self._driver.cancel(item)
        self.inside.clear()
        self._spare.clear()

    def pause(self, is_paused: bool) -> None:
        """Write nothing and take nothing for now, or go on."""
        self._is_paused = is_paused
        if not is_paused:
            self.flush_soon()

    def flush_soon(self) -> None:
        """Write the answers that are there, and take more of the body, at the end of this turn."""
        if not self.is_flush_due:
            self.is_flush_due = True
            self._soon(self._flush)

    def _flush(self) -> None:
        """Write the answers that are there, unless they can wait for those of the next batch."""
        self.is_flush_due = False
        if self._can_wait:
            if not self._is_timed:
                self._is_timed = True
                self._later(_LONGEST_WAIT_S, self._flush_in_time)
            return
        self._flush_now()

    def _flush_in_time(self) -> None:
        """Write the answers that have waited for those of another batch."""
        self._is_timed = False
        self._flush_now()

    def _flush_now(self) -> None:
        if self._is_paused or self._has_ended:
            return
        inside = self.inside
        n = len(inside)
        for i, item in enumerate(inside):
            if item.state != DONE:
                n = i
                break
        if n:
            answered = inside[:n]
            del inside[:n]
            lines = self._written(answered)
            self._window.note_answers(n, len(lines))
            self._exchange.write_part(lines)
        self._submit()
        self._count_held()
        if self.wants_more:
            self._exchange.want_more()
        elif self._has_input_ended and not (inside or self._lines or self.is_flush_due):
            self._has_ended = True
            self._spare.clear()  # they refer to this object
            self._exchange.end_parts(self._broken or b"")

    def _written(self, answered: list[BulkItem]) -> bytes:
        """Return the lines of answers, and keep the items that can be used again."""
        results = [item.result for item in answered]
        ask = self._ask
        # nearly all are bytes that carpool has written; what has failed has no result
        if ask.accept < CUSTOM and set(map(type, results)) == {bytes}:
            lines = entries.of_results(results)  # type: ignore[arg-type]
        else:
            head = self._exchange.head
            lines = b"".join([entry_of(item, ask, head) + b"\n" for item in answered])
            answered = [item for item in answered if type(item.result) is bytes]
        may_use_again = self._are_used_again and not self._driver.core.has_untold_answers
        if may_use_again and answered and answered[0].stream is None:  # all have streams, of one answer each, or none
            self._spare += answered
        return lines


def _answer_bytes(item: BulkItem) -> int:
    """Return how many bytes an answer holds that waits for those before it."""
    return len(item.result) if type(item.result) is bytes and item.state == DONE else 0


Piece = bytes | HttpResponse | None
"""A piece of a bulk request's body, the error response that breaks it off, or None at its end."""


def feed_bulk(exchange: Exchange, piece: Piece) -> None:
    """Hand on a piece of a bulk request; its item is a list of that until the app has it."""
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
