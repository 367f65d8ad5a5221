"""What the transport delivers to while a large body is received straight into its memory."""

from __future__ import annotations

import asyncio
from typing import Protocol

_NOTHING = memoryview(b"")


class BodyReceiver(Protocol):
    """The connection whose place a `LargeBody` takes."""

    def large_body_received(self, nbytes: int, is_full: bool) -> None:
        """Take note that more of the body is in its memory."""

    def connection_lost(self, error: Exception | None) -> None:
        """Take note that the connection is gone."""

    def eof_received(self) -> bool:
        """Take note that the client sends no more; return whether the transport stays open."""

    def pause_writing(self) -> None:
        """Write no more for now."""

    def resume_writing(self) -> None:
        """Write on."""


class LargeBody(asyncio.BufferedProtocol):
    """Stands in for a connection while a large body is received into place.

    Args:
        connection: The connection on which the body comes.
        rest: The memory that is still to be filled.
    """

    def __init__(self, connection: BodyReceiver, rest: memoryview) -> None:
        self._connection = connection
        self._rest = rest

    def let_go(self) -> None:
        """Let go of the memory, since uvloop keeps its last buffered protocol.

        Even an empty part of the memory would keep all of it.
        """
        self._rest = _NOTHING

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._rest

    def buffer_updated(self, nbytes: int) -> None:
        self._rest = self._rest[nbytes:]
        self._connection.large_body_received(nbytes, is_full=not self._rest)

    def connection_lost(self, error: Exception | None) -> None:
        self._connection.connection_lost(error)

    def eof_received(self) -> bool:
        return self._connection.eof_received()

    def pause_writing(self) -> None:
        self._connection.pause_writing()

    def resume_writing(self) -> None:
        self._connection.resume_writing()
