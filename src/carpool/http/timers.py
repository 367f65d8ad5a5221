"""The timers of one connection: how long a client may take, and the consequence if it takes longer.

The times are in `Limits`. There are five timers:

* *idle* runs always, in periods of `idle_s`, so that a request need not touch it. A connection on
  which nothing has happened for a whole period is cut off, also if its client has not taken an
  answer.
* *receiving* runs from the opening to the first byte, then from a request's first byte to the end
  of its head (`header_s`), and from there to the end of its body (`body_s`). A request that takes
  longer is refused with 408; a connection without a request is closed.
* *writing* runs in periods of `write_s` while answers wait for a slow client. A client that takes
  nothing for a whole period is cut off.
* *lingering* runs after the answer to a request that was not read to its end, so that the answer
  arrives before the connection is reset; then the connection is cut off.
* *probing* runs once the client has ended its side and is still owed answers: it may be gone.

A timer that comes late says that this process has stood still. The client is not to blame for that,
and what it has sent meanwhile lies unread, as a loop may call its timers before it looks at its
sockets. So idle, receiving and writing look again a moment later.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from math import inf

from carpool.http.reader import RequestReader
from carpool.http.server_state import ClientConnection, Limits

_LINGER_S = 2.0
_PROBE_AFTER_S = 0.02
_PROBE_TRIES = 8
_LATE_S = 0.25  # a timer that comes later than this has been kept from it
_CATCH_UP_S = 0.1  # in which the bytes that have come meanwhile are read


class Timers:
    """The timers of one connection.

    Attributes:
        receiving: The timer of that name, if it runs.
    """

    __slots__ = (
        "_connection",
        "_idle",
        "_limits",
        "_lingering",
        "_loop",
        "_probing",
        "_reader",
        "_received_part",
        "_requests_when_quiet",
        "_unsent_when_looked",
        "_untaken",
        "_writing",
        "receiving",
    )

    def __init__(self, connection: ClientConnection, reader: RequestReader, limits: Limits) -> None:
        self._connection = connection
        self._reader = reader
        self._limits = limits
        self._loop = asyncio.get_running_loop()

        # Idle: the figures of the last look.
        self._idle: asyncio.TimerHandle | None = None
        self._requests_when_quiet = 0  # -1 if the connection was not quiet
        self._unsent_when_looked = 0

        # Receiving: the number of the request, and whether it is its body that is timed.
        self.receiving: asyncio.TimerHandle | None = None
        self._received_part = (0, False)

        # Writing: bytes that waited for the client when the period began, and those written since.
        self._writing: asyncio.TimerHandle | None = None
        self._untaken = 0

        self._lingering: asyncio.TimerHandle | None = None
        self._probing: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Start those timers that run from the opening of the connection on."""
        self.receiving = self._loop.call_later(self._limits.header_s, self._received_too_slowly)
        self._idle = self._loop.call_later(self._limits.idle_s, self._look_if_idle)

    def cancel(self) -> None:
        """Cancel all timers: the connection is gone."""
        for timer in (self._idle, self.receiving, self._writing, self._lingering, self._probing):
            if timer is not None:
                timer.cancel()

    def _again_if_late(self, timer: asyncio.TimerHandle | None, look: Callable[[], None]) -> asyncio.TimerHandle | None:
        """Return a timer that looks again soon, if this one comes late; None if it is in time."""
        if timer is None or self._loop.time() - timer.when() <= _LATE_S:
            return None
        return self._loop.call_later(_CATCH_UP_S, look)

    # -- receiving

    def bytes_received(self) -> None:
        """Set the timer by how far the reader has come."""
        requests, timer = self._connection.requests, self.receiving
        if self._reader.is_idle:
            if timer is not None and requests:
                timer.cancel()
                self.receiving = None
            return
        part = (requests, self._reader.head is not None)
        if timer is not None:
            if self._received_part == part:
                return
            timer.cancel()
        self._received_part = part
        seconds = self._limits.body_s if part[1] else self._limits.header_s
        self.receiving = self._loop.call_later(seconds, self._received_too_slowly)

    def reading_resumed(self) -> None:
        """Give a half received request its whole time once more, since it was we who did not
        read."""
        self._received_part = (0, False)
        self.bytes_received()

    def _received_too_slowly(self) -> None:
        self.receiving = self._again_if_late(self.receiving, self._received_too_slowly)
        if self.receiving is not None:
            return
        if self._reader.is_idle:  # not a byte since the opening
            self._connection.close()
        elif self._connection.is_reading_paused:
            self.receiving = self._loop.call_later(self._limits.header_s, self._received_too_slowly)
        else:
            self._connection.received_too_slowly()

    # -- writing

    def writing_paused(self) -> None:
        """Watch whether the client takes anything of the answers that wait for it."""
        self._untaken = self._connection.unsent
        self._writing = self._loop.call_later(self._limits.write_s, self._look_if_taken)

    def writing_resumed(self) -> None:
        """Stop watching: the client has taken most of its answers."""
        if self._writing is not None:
            self._writing.cancel()

    def written_while_paused(self, nbytes: int) -> None:
        """Note that more bytes wait for a slow client."""
        self._untaken += nbytes

    def _look_if_taken(self) -> None:
        again = self._again_if_late(self._writing, self._look_if_taken)
        if again is not None:
            self._writing = again
            return
        before, self._untaken = self._untaken, self._connection.unsent
        if self._untaken < before:
            self._writing = self._loop.call_later(self._limits.write_s, self._look_if_taken)
        else:
            self._connection.abort()

    # -- the end

    def linger(self) -> None:
        """Cut the connection off in a moment, when the last answer will have arrived."""
        self._lingering = self._loop.call_later(_LINGER_S, self._end_lingering, inf)

    def _end_lingering(self, before: float) -> None:
        """Cut the connection off unless there are answers that the client takes, however slowly."""
        unsent = self._connection.unsent
        if 0 < unsent < before:
            self._lingering = self._loop.call_later(self._limits.write_s, self._end_lingering, unsent)
        else:
            self._connection.abort()

    def probe(self) -> None:
        """Find out in a moment, and then ever more rarely, whether the client is still there."""
        if self._probing is None:
            self._probing = self._loop.call_later(_PROBE_AFTER_S, self._probe, 0)

    def _probe(self, tries: int) -> None:
        if self._connection.probe(is_first=tries == 0) and tries < _PROBE_TRIES:
            self._probing = self._loop.call_later(_PROBE_AFTER_S * 2**tries, self._probe, tries + 1)

    # -- idle

    def _look_if_idle(self) -> None:
        """Cut off a connection that was quiet at the last look and has seen no request since."""
        again = self._again_if_late(self._idle, self._look_if_idle)
        if again is not None:
            self._idle = again
            return
        connection = self._connection
        before, self._unsent_when_looked = self._unsent_when_looked, connection.unsent
        is_quiet = connection.is_quiet and not self._unsent_when_looked < before
        if is_quiet and connection.requests == self._requests_when_quiet:
            connection.abort()
            return
        self._requests_when_quiet = connection.requests if is_quiet else -1
        self._idle = self._loop.call_later(self._limits.idle_s, self._look_if_idle)
