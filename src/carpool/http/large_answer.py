"""Large answers, which are made beside the loop: others are served meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from carpool.errors import CarpoolError
from carpool.foreign import as_model_error

if TYPE_CHECKING:
    from carpool.http.exchange import ErrorResponder, Exchange, HttpResponse

LARGE_ANSWER: Final = 2**18
"""Bytes of results from which on an answer is made in a thread: to write as many takes some
milliseconds, and the way there and back 0.1 ms."""


def respond(
    exchange: Exchange, responder: ErrorResponder, nbytes: int, make: Callable[[], HttpResponse], what: str
) -> None:
    """Answer an exchange with what `make` returns, which is called in a thread if that takes long.

    Args:
        exchange: Gets the response.
        responder: Compresses it, and puts an error into HTTP.
        nbytes: How many bytes the results have of which it is made.
        make: Makes the response; it may raise anything.
        what: What makes it, for the log.
    """
    if nbytes < LARGE_ANSWER:
        exchange.respond(_made(exchange, responder, make, what))
        return
    head = exchange.head

    def made() -> HttpResponse:
        return responder.compressed(head, _made(exchange, responder, make, what))

    loop = asyncio.get_running_loop()
    try:
        making = loop.run_in_executor(None, made)
    except RuntimeError:  # the loop is about to end, and takes no more work for its threads
        exchange.respond(made())
        return
    making.add_done_callback(lambda done: None if done.cancelled() else exchange.respond(done.result()))


def _made(exchange: Exchange, responder: ErrorResponder, make: Callable[[], HttpResponse], what: str) -> HttpResponse:
    """Return what `make` returns, or the response to what it raises."""
    try:
        return make()
    except CarpoolError as error:
        return responder.error(exchange.head, error)
    except BaseException as error:  # a protocol may be the user's
        return responder.error(exchange.head, as_model_error(error, what))
