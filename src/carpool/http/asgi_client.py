"""The client of an ASGI server, as far as the server's `receive` and `send` show it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, Final

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

SEND_S: Final = 30.0
"""Seconds for which a server may wait until its client takes one piece of an answer."""

_PIECE: Final = 64 * 1024  # a client that reads slowly, but steadily, takes so much in that time


class ClientStalled(Exception):
    """A client has taken nothing of its answer for `SEND_S`: the request is given up."""


def within_limits(send: Send) -> Send:
    """Return a `send` that passes bodies on in pieces, and gives each of them `SEND_S`.

    It raises `ClientStalled` once the time is up, and what the server's `send` raises as it came.
    """

    async def limited(message: Message) -> None:
        body = message.get("body", b"")
        if len(body) <= _PIECE:
            await _sent(send, message)
            return
        last = (len(body) - 1) // _PIECE * _PIECE
        for at in range(0, last, _PIECE):
            await _sent(send, {**message, "body": body[at : at + _PIECE], "more_body": True})
        await _sent(send, {**message, "body": body[last:]})

    return limited


async def _sent(send: Send, message: Message) -> None:
    try:
        async with asyncio.timeout(SEND_S) as limit:
            await send(message)
    except TimeoutError:
        if not limit.expired():  # the server has raised it
            raise
        raise ClientStalled(f"the client took nothing for {SEND_S:g} s") from None


async def disconnected(receive: Receive) -> BaseException | None:
    """Wait until the client leaves.

    Whatever the server's `receive` raises is returned, since a task that raises KeyboardInterrupt
    or SystemExit would end the loop.
    """
    try:
        while (await receive())["type"] != "http.disconnect":
            pass
    except asyncio.CancelledError:
        raise
    except BaseException as error:
        return error
    return None
