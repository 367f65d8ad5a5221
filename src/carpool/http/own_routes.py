"""Answers in parts in routes of one's own, in a FastAPI or Starlette app."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, suppress
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from carpool.engine.foreign import as_model_error
from carpool.engine.hints.schema import json_writer
from carpool.engine.wire.payload import JSON
from carpool.errors import CarpoolError
from carpool.http.asgi import ClientStalled, disconnected, within_limits
from carpool.http.codec import wishes
from carpool.http.error_answers import ErrorAnswers
from carpool.http.exchange import error_entry
from carpool.http.streaming import BY_TYPE, SILENCE_S, SSE, Framing, framed

_END: Final = object()  # there are no more parts
_SILENCE: Final = object()  # no part has come for a long time
_LEFT: Final = object()  # the client has left before
_write: Final = json_writer(Any, "a part")
_CLIENT_LEFT: Final = 499  # for access logs: nobody reads it


async def stream_response(
    parts: AsyncIterator[Any],
    *,
    request: Request | None = None,
    accept: str | None = None,
    timeout_status: int = 504,
    debug: bool = False,
) -> StreamingResponse:
    """Return a response that streams parts as `carpool serve` does, once the first of them is
    there.

    What fails before the first part is raised here, so that it has a status of its own, see
    `install_error_handlers`; a plain `StreamingResponse` has answered 200 by then. What fails later
    is sent as an error in the place of the end, so a client can always distinguish a whole answer
    from a broken one. A silence of 15 seconds begins the response without a part, and is filled. A
    client that leaves ends the request, before the first part only where `request` is given. So
    does one that takes nothing for 30 seconds.

        @app.post("/generate")
        async def generate(prompt: Prompt, request: Request) -> StreamingResponse:
            parts = service.predict_stream(prompt)
            return await carpool.http.stream_response(parts, request=request)

    Args:
        parts: The result of `predict_stream`, not yet entered, or another asynchronous iterator,
            for example a generator that awaits a batched function.
        request: The request of the route, whose body has been read. It says what `accept` is, and
            whether the client leaves before the first part.
        accept: The request's `Accept` header, where `request` is not given: lines of JSON if it
            asks for `application/x-ndjson`, otherwise server-sent events.
        timeout_status: The status of a missed deadline, 504 or 408.
        debug: Whether error bodies show the texts of user exceptions.

    Raises:
        CarpoolError: The request has failed before its first part.
        ValueError: `timeout_status` is neither of them.
        TypeError: `debug` is not a bool, or `parts` is no asynchronous iterator.
    """
    answers = ErrorAnswers(timeout_status, debug)
    if not hasattr(parts, "__anext__"):
        kind = type(parts).__name__
        raise TypeError(f"parts must be an asynchronous iterator, such as service.predict_stream(x), not {kind}")
    if accept is None and request is not None:
        accept = request.headers.get("accept")
    framing = next((BY_TYPE[wish] for wish in wishes((accept or "").encode()) if wish in BY_TYPE), SSE)
    reading = _Reading(parts)
    leaving = None if request is None else asyncio.ensure_future(disconnected(request.receive))
    status = 200
    try:
        if not await reading.begin(leaving):
            status = _CLIENT_LEFT
            await reading.close()
    except BaseException:
        await reading.close()
        raise
    finally:
        if leaving is not None:  # from here on, the response looks itself
            leaving.cancel()
            await asyncio.wait((leaving,))

    headers = {"content-type": framing.content_type.decode(), "x-content-type-options": "nosniff"}
    headers.update((name.decode(), value.decode()) for name, value in framing.headers)
    return _PartsResponse(reading, _written(reading, framing, answers), headers, status)


class _Reading:
    """Takes one part after the other, and reports silences."""

    def __init__(self, parts: AsyncIterator[Any]) -> None:
        self._parts = parts
        self._stack = AsyncExitStack()
        self._first: list[Any] = []  # what `begin` has waited for, until it is taken
        self._coming: asyncio.Future[Any] | None = None

    async def begin(self, leaving: asyncio.Future[BaseException | None] | None) -> bool:
        """Wait for the first result of `next`; raise an error until then.

        Returns:
            Whether the client is still there.
        """
        if isinstance(self._parts, AbstractAsyncContextManager):
            self._parts = await self._stack.enter_async_context(self._parts)
        elif isinstance(self._parts, AsyncGenerator):
            self._stack.push_async_callback(self._parts.aclose)
        self._first.append(await self.next(leaving))
        return self._first[0] is not _LEFT

    async def next(self, leaving: asyncio.Future[BaseException | None] | None = None) -> Any:
        """Return the next part, `_END`, `_SILENCE` if nothing has come for `SILENCE_S`, or `_LEFT`
        once `leaving` has ended.
        """
        if self._first:
            return self._first.pop()
        if self._coming is None:
            self._coming = asyncio.ensure_future(_next_of(self._parts))
        awaited = (self._coming,) if leaving is None else (self._coming, leaving)
        await asyncio.wait(awaited, timeout=SILENCE_S, return_when=asyncio.FIRST_COMPLETED)
        if not self._coming.done():
            if leaving is None or not leaving.done():
                return _SILENCE
            if (failure := leaving.result()) is not None:  # perhaps a CancelledError
                raise failure
            return _LEFT
        coming, self._coming = self._coming, None
        if coming.cancelled():  # what makes the parts has raised it; nobody has cancelled this task
            raise as_model_error(asyncio.CancelledError(), "the stream")
        return coming.result()

    async def close(self) -> None:
        """Give up the parts that have not come, and leave their block."""
        if self._coming is not None:
            self._coming.cancel()
            await asyncio.wait((self._coming,))
        await self._stack.aclose()


async def _next_of(parts: AsyncIterator[Any]) -> Any:
    async for part in parts:
        return part
    return _END


async def _written(reading: _Reading, framing: Framing, answers: ErrorAnswers) -> AsyncGenerator[bytes]:
    """Yield the body: each part as it comes, and the end or the error that stands in its place."""
    n = 0
    while True:
        try:
            part = await reading.next()
            if part is _LEFT:
                return
            if part is _SILENCE:
                yield framing.alive
                continue
            data = framing.with_end(n) if part is _END else framed(framing, _write(part))
        except asyncio.CancelledError:
            raise
        except Exception as error:
            shown = error if isinstance(error, CarpoolError) else as_model_error(error, "the stream")
            yield framing.error % error_entry(answers.response(b"", shown), JSON)
            return
        yield data
        if part is _END:
            return
        n += 1


class _PartsResponse(StreamingResponse):
    """Leaves the block of the parts when the response ends, however it ends."""

    def __init__(self, reading: _Reading, body: AsyncGenerator[bytes], headers: dict[str, str], status: int) -> None:
        super().__init__(body, status, headers)
        self._reading = reading

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._reading.close()

    async def stream_response(self, send: Send) -> None:
        with suppress(ClientStalled):  # the server closes, as the answer is not complete
            await super().stream_response(within_limits(send))
