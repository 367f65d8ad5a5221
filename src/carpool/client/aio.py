"""`carpool.AsyncClient`: asks a carpool server, from tasks."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Iterable, Mapping
from contextlib import aclosing
from math import inf
from types import TracebackType
from typing import Any, TypedDict, TypeVar, overload

import httpx

from carpool.client.app_transport import AppTransport
from carpool.client.budget import RetryBudget, is_retried, retry_after_s, wait_s
from carpool.client.bunches import ThreadInput, in_bunches
from carpool.client.duplex import Duplex, Target
from carpool.client.messages import (
    EVENTS_TYPE,
    JSON_TYPE,
    LINES_TYPE,
    MSGPACK_TYPE,
    SERVER_READINESS,
    EventReader,
    address_of,
    broken,
    entry_in,
    error_in,
    line_of,
    packed,
    read,
    readiness_address_of,
    result_in,
    without_signs_of_life,
)
from carpool.clock import monotonic
from carpool.errors import CarpoolError, DeadlineExceeded, InvalidRequest, StartupError, Unavailable
from carpool.service.checks import optional_seconds, valid_priority

T = TypeVar("T")

_READY_EVERY_S = 0.1
_MOST_CONNECTIONS = 256
_HERE = "http://app"
_MISSING = 404
_NOT_ALLOWED = 405


class ClientOptions(TypedDict, total=False):
    """The settings of an `AsyncClient`, which explains them."""

    model: str | None
    api_key: str | None
    timeout_s: float
    uds: str | None
    retries: bool
    verify: ssl.SSLContext | bool
    headers: Mapping[str, str] | None


class AsyncClient:
    """A client of a carpool server, for tasks.

    Use it as `async with carpool.AsyncClient("http://host:8000") as client`, and one for many
    requests: it keeps connections open.

    Args:
        url: Where the server is; or a `carpool.http.App`, which is asked without a socket, for
            tests.
        model: The name of the model; None for the server's first one.
        api_key: Sent as `Authorization: Bearer`.
        timeout_s: The longest time of a call, with its retries, in seconds.
        uds: The path of the server's Unix socket, in the place of the host and port of `url`.
        retries: Whether to try again what was not run: after 429 and 503, and where no connection
            can be made. Retries are at most a tenth of the requests.
        verify: How the server's certificate is checked, for https; False for not at all.
        headers: Sent with each request.

    Attributes:
        budget: How many requests and retries were made.

    Raises:
        ValueError: `url` is no address of a server.
    """

    def __init__(
        self,
        url: Any = "http://127.0.0.1:8000",
        *,
        model: str | None = None,
        api_key: str | None = None,
        timeout_s: float = 30.0,
        uds: str | None = None,
        retries: bool = True,
        verify: ssl.SSLContext | bool = True,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self._path = address_of(model)
        self._readiness_path = readiness_address_of(model)
        self._timeout_s = optional_seconds("timeout_s", timeout_s) or 30.0
        self._retries = retries
        self._sends_json = False  # the model reads no msgpack
        self.budget = RetryBudget()
        self._headers = {**(headers or {}), **({"authorization": f"Bearer {api_key}"} if api_key is not None else {})}
        limits = httpx.Limits(max_connections=_MOST_CONNECTIONS, max_keepalive_connections=_MOST_CONNECTIONS)
        transport: httpx.AsyncBaseTransport
        self._target: Target | None = None
        if isinstance(url, str):
            url = _checked(url)
            transport = httpx.AsyncHTTPTransport(verify=verify, uds=uds, limits=limits)
            self._target = Target(url, uds, _context(verify))
        else:
            transport, url = AppTransport(url), _HERE
        self._http = httpx.AsyncClient(
            base_url=url, transport=transport, headers=self._headers, timeout=None, trust_env=False
        )

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close all connections."""
        await self._http.aclose()

    async def wait_until_ready(self, timeout_s: float = 60.0) -> None:
        """Wait until the client's model can answer; without `model=`, until any model can.

        A server that has no such model is asked again until `timeout_s` is over, since services can
        be added while it runs.

        Raises:
            DeadlineExceeded: It could not within `timeout_s`; the text says why.
        """
        until = monotonic() + timeout_s
        why = "it has not answered"
        while True:
            left_s = until - monotonic()
            try:
                async with asyncio.timeout(max(left_s, 0.001)):
                    answer = await self._readiness()
                if answer.status_code == 200:
                    return
                why = str(error_in(answer.status_code, answer.headers, answer.content))
                if answer.status_code == _MISSING:
                    why = f"there is nothing at {self._readiness_path}"
            except TimeoutError:
                pass
            except (httpx.TransportError, StartupError) as error:
                why = str(error) or type(error).__name__
            if until - monotonic() <= 0:
                raise DeadlineExceeded(f"the server was not ready within {timeout_s:g} s: {why}")
            await asyncio.sleep(min(_READY_EVERY_S, max(0.0, until - monotonic())))

    async def _readiness(self) -> httpx.Response:
        """Ask whether the model can answer.

        Older servers only tell it of the whole server. They differ from one that has no such model
        in what GET gets where the model is asked: 405, and not 404.
        """
        answer = await self._http.get(self._readiness_path)
        if answer.status_code == _MISSING and (await self._http.get(self._path)).status_code == _NOT_ALLOWED:
            answer = await self._http.get(SERVER_READINESS)
        return answer

    @overload
    async def predict(self, x: Any, *, as_type: type[T], timeout_s: float | None = None, priority: int = 0) -> T: ...
    @overload
    async def predict(
        self, x: Any, *, as_type: Any = Any, timeout_s: float | None = None, priority: int = 0
    ) -> Any: ...
    async def predict(self, x: Any, *, as_type: Any = Any, timeout_s: float | None = None, priority: int = 0) -> Any:
        """Return the model's answer to one item.

        Args:
            x: The item: anything that msgpack can express, numpy arrays, dataclasses and the like.
            as_type: The type of the answer, which is checked. Numbers come without their size, so
                a bare `np.ndarray` has float64, int64 or bool; `NDArray[np.float32]` says another
                dtype.
            timeout_s: The longest time of the call, with its retries, in seconds.
            priority: From -100 to 100. Larger goes first.

        Raises:
            CarpoolError: What a Python caller of the service would get; its `request_id` is in the
                server's log.
            ValidationError: The answer is not of type `as_type`, besides.
            TypeError: The item cannot be written.
        """
        until = monotonic() + self._limit_s(timeout_s)
        answer = await self._ask_item(x, f"{MSGPACK_TYPE}, {JSON_TYPE}", until, priority)
        try:
            return result_in(answer.content, answer.headers.get("content-type", ""), as_type)
        finally:
            await answer.aclose()

    async def predict_stream(
        self, x: Any, *, as_type: Any = Any, timeout_s: float | None = None, priority: int = 0
    ) -> AsyncIterator[Any]:
        """Yield the parts of the model's answer to one item, as they come.

        A stream that breaks raises, so what ended without an error is whole.

        Args:
            x: See `predict`.
            as_type: The type of a part.
            timeout_s: The longest time until the answer is complete, in seconds; None for as long
                as the server lets it take.
            priority: See `predict`.

        Raises:
            CarpoolError: See `predict`.
            Unavailable: The stream broke off.
        """
        until = monotonic() + self._limit_s(timeout_s)
        answer = await self._ask_item(x, EVENTS_TYPE, until, priority, is_stream=True, is_told=timeout_s is not None)
        events = EventReader()
        try:
            async for data in answer.aiter_raw():
                for part in events.feed(data):
                    yield read(part, as_type, is_json=True)
                if events.failure is not None:
                    raise events.failure
        except httpx.TransportError as error:
            raise broken("the stream") from error
        finally:
            await answer.aclose()
        if not events.has_ended:
            raise broken("the stream")

    async def predict_many(
        self,
        xs: Iterable[Any] | AsyncIterable[Any],
        *,
        as_type: Any = Any,
        return_exceptions: bool = False,
        priority: int | None = None,
    ) -> AsyncIterator[Any]:
        """Yield the answers to many items, in their order, in constant memory.

        The items go in one request, of which the server answers each line while others are still on
        their way. They are read as there is room for them.

        Args:
            xs: The items.
            as_type: The type of an answer.
            return_exceptions: Whether an item's error is yielded in the place of its answer, and
                not raised, which ends the whole.
            priority: See `predict`; None for behind all requests of others.

        Raises:
            CarpoolError: See `predict`; of one item, unless they are returned.
            Unavailable: The answer broke off; items for which there is no answer may have been run.
        """
        async with aclosing(self.bunches(xs, as_type, priority)) as bunches:
            async for bunch in bunches:
                for result in bunch:
                    if isinstance(result, CarpoolError) and not return_exceptions:
                        raise result
                    yield result

    async def bunches(
        self, xs: Iterable[Any] | AsyncIterable[Any] | ThreadInput, as_type: Any = Any, priority: int | None = None
    ) -> AsyncGenerator[list[Any], None]:
        """Yield the same in lists, each of what came together; errors stand in their places."""
        headers = self._request_headers(priority, LINES_TYPE, LINES_TYPE)
        counted = _Counted(xs)
        async with aclosing(self._lines(headers, counted)) as pieces:
            rest, n = b"", 0
            async for data in pieces:
                *lines, rest = without_signs_of_life(rest + data).split(b"\n")
                bunch: list[Any] = []
                last: CarpoolError | None = None
                try:
                    for line in lines:
                        bunch.append(entry_in(line, as_type))
                except CarpoolError as error:
                    last = error
                n += len(bunch)
                if bunch:
                    yield bunch
                if last is not None:
                    raise last
        if rest or n < counted.n:
            raise broken("the answer")

    async def _lines(self, headers: dict[str, str], counted: _Counted) -> AsyncGenerator[bytes, None]:
        """Yield the pieces of the answer to a bulk request."""
        if self._target is None:
            request = self._http.build_request("POST", self._path, headers=headers, content=counted.pieces())
            answer = await self._http.send(request, stream=True)
            try:
                await _check(answer)
                async for data in answer.aiter_raw():
                    yield data
            finally:
                await answer.aclose()
            return
        duplex = await self._open_duplex(self._target)
        try:
            host = httpx.URL(self._target.url).netloc.decode()
            await duplex.begin(self._path, {"host": host, **self._headers, **headers}, counted.pieces())
            if duplex.status != 200:
                body = b"".join([piece async for piece in duplex.pieces()])
                raise error_in(duplex.status, duplex.headers, body)
            async for data in duplex.pieces():
                yield data
        finally:
            await duplex.close()

    async def _open_duplex(self, target: Target) -> Duplex:
        until, attempt = monotonic() + self._timeout_s, 0
        self.budget.note_request()
        while True:
            attempt += 1
            try:
                return await Duplex.open(target)
            except OSError as error:
                await self._before_retry(attempt, None, until, _unreachable(error))

    # -- one request

    def _limit_s(self, timeout_s: float | None) -> float:
        return self._timeout_s if timeout_s is None else (optional_seconds("timeout_s", timeout_s) or self._timeout_s)

    def _request_headers(self, priority: int | None, sent: str, wanted: str) -> dict[str, str]:
        headers = {"content-type": sent, "accept": wanted}
        if priority:
            headers["x-request-priority"] = str(valid_priority(priority))
        return headers

    async def _ask_item(
        self, x: Any, wanted: str, until: float, priority: int, *, is_stream: bool = False, is_told: bool = True
    ) -> httpx.Response:
        """Return a good answer to an item. Raises `CarpoolError`.

        It is sent as msgpack, or as JSON to a model whose own `decode` reads that and no msgpack.
        """
        if not self._sends_json:
            headers = self._request_headers(priority, MSGPACK_TYPE, wanted)
            try:
                return await self._ask(packed(x), headers, until, is_stream=is_stream, is_told=is_told)
            except InvalidRequest as error:
                if error.code != "unsupported_media_type":
                    raise
        headers = self._request_headers(priority, JSON_TYPE, wanted)
        answer = await self._ask(line_of(x), headers, until, is_stream=is_stream, is_told=is_told)
        self._sends_json = True
        return answer

    async def _ask(
        self, body: bytes, headers: dict[str, str], until: float, *, is_stream: bool = False, is_told: bool = True
    ) -> httpx.Response:
        """Return a good answer, after retries where they are safe. Raises `CarpoolError`."""
        self.budget.note_request()
        attempt = 0
        while True:
            attempt += 1
            left_s = until - monotonic()
            if left_s <= 0:
                raise DeadlineExceeded("the deadline passed before the server could be asked")
            if is_told and left_s < inf:
                headers["x-request-timeout-ms"] = str(max(1, int(left_s * 1000)))
            request = self._http.build_request("POST", self._path, content=body, headers=headers)
            asked_s: float | None = None
            try:
                async with asyncio.timeout(left_s + 1.0):  # the server says it first, if it can
                    answer = await self._http.send(request, stream=is_stream)
                    await _check(answer)
                return answer
            except CarpoolError as error:
                if not is_retried(error.status, error.code):
                    raise
                failure, asked_s = error, retry_after_s(answer.headers)
            except TimeoutError as error:
                raise DeadlineExceeded("the server did not answer in time") from error
            except (httpx.ConnectError, httpx.ConnectTimeout) as error:
                failure = _unreachable(error)
            except httpx.TransportError as error:
                raise broken("the answer") from error
            await self._before_retry(attempt, asked_s, until, failure)

    async def _before_retry(self, attempt: int, asked_s: float | None, until: float, failure: CarpoolError) -> None:
        """Wait for the time of a retry; raise what has failed if there is to be none."""
        delay_s = wait_s(attempt, asked_s)
        if not self._retries or monotonic() + delay_s >= until or not self.budget.take():
            raise failure
        await asyncio.sleep(delay_s)


class _Counted:
    """The items of a bulk request, as pieces of its body.

    Attributes:
        n: How many were read.
    """

    def __init__(self, xs: Iterable[Any] | AsyncIterable[Any] | ThreadInput) -> None:
        self._xs = xs
        self.n = 0

    async def pieces(self) -> AsyncIterator[bytes]:
        """Yield lines, several at a time where they come quickly."""
        async with aclosing(in_bunches(self._xs)) as bunches:
            async for bunch in bunches:
                lines = [line_of(x) for x in bunch]
                self.n += len(lines)
                yield b"".join(lines)


async def _check(answer: httpx.Response) -> None:
    """Raise the error that an answer tells, if it is no good one."""
    if answer.status_code >= 300:
        body = await answer.aread()
        await answer.aclose()
        raise error_in(answer.status_code, answer.headers, body)


def _checked(url: str) -> str:
    """Return the address of a server without a slash at its end. Raises ValueError."""
    if not url.lower().startswith(("http://", "https://")):
        raise ValueError(f"url must begin with http:// or https://, not {url!r}: write http://{url}, for example")
    return url.rstrip("/")


def _unreachable(error: Exception) -> Unavailable:
    return Unavailable(f"no connection to the server can be made: {error}", code="unreachable", retry_after_s=None)


def _context(verify: ssl.SSLContext | bool) -> ssl.SSLContext | None:
    """Return how a server is trusted; None for the usual way."""
    if isinstance(verify, ssl.SSLContext):
        return verify
    if verify:
        return None
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context
