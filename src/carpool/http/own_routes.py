"""Answers in parts in routes of one's own, in a FastAPI or Starlette app."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from typing import Any, Final

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from carpool.errors import CarpoolError
from carpool.foreign import as_model_error
from carpool.hints.schema import json_writer
from carpool.http.codec import wishes
from carpool.http.error_answers import ErrorAnswers
from carpool.http.streaming import BY_TYPE, SILENCE_S, SSE, Framing, framed

_END: Final = object()  # there are no more parts
_SILENCE: Final = object()  # no part has come for a long time
_write: Final = json_writer(Any)


async def stream_response(
    parts: AsyncIterator[Any], *, accept: str | None = None, timeout_status: int = 504, debug: bool = False
) -> StreamingResponse:
    """Return a response that tells parts as `carpool serve` does, once the first of them is there.

    What fails before the first part is raised here, so that it has a status of its own, see
    `install_error_handlers`; a plain `StreamingResponse` has answered 200 by then. What fails later
    is told as an error in the place of the end, so a client can always tell a whole answer from a
    broken one. A silence of 15 seconds begins the response without a part, and is filled. A client
    that leaves ends the request.

        @app.post("/generate")
        async def generate(prompt: Prompt, request: Request) -> StreamingResponse:
            parts = service.predict_stream(prompt)
            return await carpool.http.stream_response(parts, accept=request.headers.get("accept"))

    Args:
        parts: What `predict_stream` returned, not yet entered, or another asynchronous iterator,
            for example a generator that awaits a batched function.
        accept: The request's `Accept` header: lines of JSON if it asks for `application/x-ndjson`,
            otherwise server-sent events.
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
    framing = next((BY_TYPE[wish] for wish in wishes((accept or "").encode()) if wish in BY_TYPE), SSE)
    reading = _Reading(parts)
    try:
        await reading.begin()
    except BaseException:
        await reading.close()
        raise

    headers = {"content-type": framing.content_type.decode(), "x-content-type-options": "nosniff"}
    headers.update((name.decode(), value.decode()) for name, value in framing.headers)
    return _PartsResponse(reading, _written(reading, framing, answers), headers)


class _Reading:
    """Takes one part after the other, and tells silences.

    Args:
        parts: Where they come from.
    """

    def __init__(self, parts: AsyncIterator[Any]) -> None:
        self._parts = parts
        self._stack = AsyncExitStack()
        self._first: list[Any] = []  # what `begin` has waited for, until it is taken
        self._coming: asyncio.Future[Any] | None = None

    async def begin(self) -> None:
        """Wait for what `next` will return first; raise what fails until then."""
        if isinstance(self._parts, AbstractAsyncContextManager):
            self._parts = await self._stack.enter_async_context(self._parts)
        elif isinstance(self._parts, AsyncGenerator):
            self._stack.push_async_callback(self._parts.aclose)
        self._first.append(await self.next())

    async def next(self) -> Any:
        """Return the next part, `_END`, or `_SILENCE` if nothing has come for `SILENCE_S`."""
        if self._first:
            return self._first.pop()
        if self._coming is None:
            self._coming = asyncio.ensure_future(_next_of(self._parts))
        await asyncio.wait((self._coming,), timeout=SILENCE_S)
        if not self._coming.done():
            return _SILENCE
        coming, self._coming = self._coming, None
        if coming.cancelled():  # what makes the parts has raised it; nobody has cancelled this task
            raise as_model_error(asyncio.CancelledError(), "the stream")
        return coming.result()

    async def close(self) -> None:
        """Give up what has not come, and leave the block of the parts."""
        if self._coming is not None:
            self._coming.cancel()
            await asyncio.wait((self._coming,))
        await self._stack.aclose()


async def _next_of(parts: AsyncIterator[Any]) -> Any:
    """Return the next part, or `_END`."""
    async for part in parts:
        return part
    return _END


async def _written(reading: _Reading, framing: Framing, answers: ErrorAnswers) -> AsyncGenerator[bytes]:
    """Yield the body: each part as it comes, and the end or the error that stands in its place."""
    n = 0
    while True:
        try:
            part = await reading.next()
            if part is _SILENCE:
                yield framing.alive
                continue
            data = framing.with_end(n) if part is _END else framed(framing, _write(part))
        except asyncio.CancelledError:
            raise
        except Exception as error:
            told = error if isinstance(error, CarpoolError) else as_model_error(error, "the stream")
            yield framing.error % answers.response(b"", told).body
            return
        yield data
        if part is _END:
            return
        n += 1


class _PartsResponse(StreamingResponse):
    """Leaves the block of the parts when the response ends, however it ends."""

    def __init__(self, reading: _Reading, body: AsyncGenerator[bytes], headers: dict[str, str]) -> None:
        super().__init__(body, headers=headers)
        self._reading = reading

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._reading.close()
