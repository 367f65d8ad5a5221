"""`carpool.AsyncClient`: asks a carpool server, from tasks."""

from __future__ import annotations

import asyncio
import ssl
import weakref
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Iterable, Mapping
from contextlib import aclosing, suppress
from math import inf
from types import TracebackType
from typing import Any, TypedDict, TypeVar, overload

import anyio._backends._asyncio  # noqa: F401 # as httpcore
import httpcore  # noqa: F401 # httpx imports it at its first use; a fork meanwhile would have the child wait for ever
import httpx
import sniffio  # noqa: F401 # as httpcore; where it is missing each request looks for it several times

from carpool.client.bunches import InputFailed, ThreadInput, in_bunches
from carpool.client.messages import (
    EVENTS_TYPE,
    JSON_TYPE,
    LINES_TYPE,
    MSGPACK_TYPE,
    SERVER_READINESS,
    EventReader,
    LineSplitter,
    address_of,
    broken,
    entry_in,
    error_in,
    line_of,
    packed,
    read,
    readiness_address_of,
    result_in,
)
from carpool.client.transports import AppTransport, Duplex, Target
from carpool.client.waits import RetryBudget, Wait, Waits, is_retried, retry_after_s, wait_s
from carpool.engine.clock import monotonic
from carpool.errors import CarpoolError, DeadlineExceeded, InvalidRequest, StartupError, Unavailable
from carpool.service.checks import optional_seconds, valid_priority

T = TypeVar("T")

_READY_EVERY_S = 0.1
_GRACE_S = 1.0  # for the server to say by itself that the time is over
_END_S = 0.1  # how long the connection is read on behind an answer that is whole
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
        self._waits = Waits()
        self._app: Any = None
        self._target: Target | None = None
        if isinstance(url, str):
            url = _checked(url)
            tls = httpx.create_ssl_context(verify) if httpx.URL(url).scheme == "https" else None
            self._target = Target(url, uds, tls)
        else:
            self._app = url
        self._http: httpx.AsyncClient | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close all connections. A call that is under way raises `Unavailable`."""
        if not self._waits.is_closed:
            http = self._connected()
            self._dropping.detach()
            self._waits.close()
            await http.aclose()

    async def wait_until_ready(self, timeout_s: float = 60.0) -> None:
        """Wait until the client's model can answer; without `model=`, until any model can.

        A server that has no such model is asked again until `timeout_s` is over, since services can
        be added while it runs.

        Raises:
            DeadlineExceeded: It could not within `timeout_s`; the text says why.
        """
        self._waits.check()
        until = monotonic() + timeout_s
        why = "it has not answered"
        while True:
            left_s = until - monotonic()
            try:
                async with self._waits.at_most(max(left_s, 0.001)):
                    answer = await self._readiness()
                if answer.status_code == 200:
                    return
                why = str(error_in(answer.status_code, answer.headers, answer.content))
                if answer.status_code == _MISSING:
                    why = f"there is nothing at {self._readiness_path}"
            except DeadlineExceeded:
                pass
            except (httpx.RequestError, StartupError) as error:
                why = str(error) or type(error).__name__
            if until - monotonic() <= 0:
                raise DeadlineExceeded(f"the server was not ready within {timeout_s:g} s: {why}")
            await asyncio.sleep(min(_READY_EVERY_S, max(0.0, until - monotonic())))

    async def _readiness(self) -> httpx.Response:
        """Ask whether the model can answer.

        Older servers only report it of the whole server. GET gets 405 there, and 404 where there is
        no such model.
        """
        http = self._connected()
        answer = await http.get(self._readiness_path)
        if answer.status_code == _MISSING and (await http.get(self._path)).status_code == _NOT_ALLOWED:
            answer = await http.get(SERVER_READINESS)
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
            CarpoolError: The one that a Python caller of the service would get; its `request_id` is
                in the server's log.
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
                as the server lets it take, if it is not silent for the client's `timeout_s`.
            priority: See `predict`.

        Raises:
            CarpoolError: See `predict`.
            Unavailable: The stream broke off.
        """
        limit_s = self._limit_s(timeout_s)
        until = monotonic() + limit_s
        answer = await self._ask_item(x, EVENTS_TYPE, until, priority, is_stream=True, is_told=timeout_s is not None)
        events = EventReader()
        try:
            async with aclosing(answer.aiter_bytes()) as pieces:  # type: ignore[type-var] # it is a generator
                while not events.has_ended:
                    left_s = limit_s if timeout_s is None else until - monotonic()
                    async with self._waits.at_most(left_s + _GRACE_S):
                        data = await anext(pieces, None)
                    if data is None:
                        raise broken("the stream")
                    for part in events.feed(data):
                        yield read(part, as_type, is_json=True)
                    if events.failure is not None:
                        raise events.failure
                with suppress(CarpoolError, httpx.RequestError):  # read to its end it can be used again
                    async with self._waits.at_most(_END_S):
                        await anext(pieces, None)
        except httpx.RequestError as error:
            raise broken("the stream") from error
        finally:
            await answer.aclose()

    async def predict_many(
        self,
        xs: Iterable[Any] | AsyncIterable[Any],
        *,
        as_type: Any = Any,
        return_exceptions: bool = False,
        priority: int | None = None,
        timeout_s: float | None = None,
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
            timeout_s: The longest time, in seconds, for which the server may be silent while items
                wait for their answers; None for the client's.

        Raises:
            CarpoolError: See `predict`; of one item, unless they are returned.
            Unavailable: The answer broke off; items for which there is no answer may have been run.
            ValueError: An item holds NaN or an infinity, which lines of JSON cannot express;
                `predict` sends them.
            BaseException: The input has raised it.
        """
        async with aclosing(self.bunches(xs, as_type, priority, timeout_s)) as bunches:
            async for bunch in bunches:
                for result in bunch:
                    if isinstance(result, CarpoolError) and not return_exceptions:
                        raise result
                    yield result

    async def bunches(
        self,
        xs: Iterable[Any] | AsyncIterable[Any] | ThreadInput,
        as_type: Any = Any,
        priority: int | None = None,
        timeout_s: float | None = None,
    ) -> AsyncGenerator[list[Any], None]:
        """Yield the same in lists, each of what came together; errors stand in their places."""
        try:
            async with aclosing(self._bunches(xs, as_type, priority, timeout_s)) as bunches:
                async for bunch in bunches:
                    yield bunch
        except InputFailed as failed:
            if isinstance(xs, ThreadInput):  # whoever made it raises the error in the caller's thread
                raise
            raise failed.error from None

    async def _bunches(
        self,
        xs: Iterable[Any] | AsyncIterable[Any] | ThreadInput,
        as_type: Any,
        priority: int | None,
        timeout_s: float | None,
    ) -> AsyncGenerator[list[Any], None]:
        self._waits.check()
        items = _SentItems(xs, self._limit_s(timeout_s) + _GRACE_S)
        lines = LineSplitter()
        async with aclosing(self._answer_to(items, priority)) as pieces:
            while True:
                async with self._waits.at_most(items.limit_s if items.is_owed else None) as items.wait:
                    data = await anext(pieces, None)
                if data is None:
                    break
                bunch: list[Any] = []
                last: CarpoolError | None = None
                try:
                    for line in lines.feed(data):
                        bunch.append(entry_in(line, as_type))
                except CarpoolError as error:
                    last = error
                if items.n_answered + len(bunch) > items.n:  # one for which there are no more, or rubbish
                    bunch, beyond = bunch[: items.n - items.n_answered], bunch[items.n - items.n_answered]
                    last = beyond if isinstance(beyond, CarpoolError) else broken("the answer")
                items.n_answered += len(bunch)
                if bunch:
                    yield bunch
                if last is not None:
                    raise last
        if lines.has_rest or items.n_answered < items.n or not items.has_ended:
            raise broken("the answer")

    async def _answer_to(self, items: _SentItems, priority: int | None) -> AsyncGenerator[bytes, None]:
        http = self._connected()
        headers = {**self._request_headers(priority, LINES_TYPE, LINES_TYPE), "accept-encoding": "identity"}
        async with aclosing(items.pieces()) as body:
            request = http.build_request("POST", self._path, headers=headers, content=body)
            if self._target is None:
                answer = await http.send(request, stream=True)
                try:
                    await _check(answer)
                    async with aclosing(answer.aiter_raw()) as pieces:  # type: ignore[type-var] # it is a generator
                        async for data in pieces:
                            yield data
                finally:
                    await answer.aclose()
                return
            duplex = await self._open_duplex(self._target)
            try:
                await duplex.begin(request, body)
                async with aclosing(duplex.pieces()) as pieces:
                    if duplex.status != 200:
                        async with self._waits.at_most(items.limit_s):
                            answered = b"".join([piece async for piece in pieces])
                        raise error_in(duplex.status, duplex.headers, answered)
                    async for data in pieces:
                        yield data
            finally:
                await duplex.close()

    async def _open_duplex(self, target: Target) -> Duplex:
        until, attempt = monotonic() + self._timeout_s, 0
        self.budget.note_request()
        while True:
            attempt += 1
            try:
                async with self._waits.at_most(until - monotonic() + _GRACE_S):
                    return await Duplex.open(target)
            except OSError as error:
                await self._before_retry(attempt, None, until, _unreachable(error))

    def _connected(self) -> httpx.AsyncClient:
        """Return the connections of the running loop. Those of another loop, which has ended or is
        that of a parent process, are left to it.
        """
        self._waits.check()
        loop = asyncio.get_running_loop()
        if self._http is None or self._loop is not loop:
            if self._loop is not None and self._loop.is_closed():
                self._dropping.detach()  # there is nothing left to close
            transport: httpx.AsyncBaseTransport
            if self._target is None:
                transport, url = AppTransport(self._app), _HERE
            else:
                limits = httpx.Limits(max_connections=_MOST_CONNECTIONS, max_keepalive_connections=_MOST_CONNECTIONS)
                verify: ssl.SSLContext | bool = self._target.tls or False
                transport = _Transport(verify=verify, uds=self._target.uds, limits=limits)
                url = self._target.url
            self._loop = loop
            self._http = httpx.AsyncClient(
                base_url=url, transport=transport, headers=self._headers, timeout=None, trust_env=False
            )
            self._dropping: weakref.finalize[..., AsyncClient] = weakref.finalize(self, _drop, loop, self._http)
            self._dropping.atexit = False
        return self._http

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
        http = self._connected()
        self.budget.note_request()
        attempt = 0
        while True:
            attempt += 1
            left_s = until - monotonic()
            if left_s <= 0:
                raise DeadlineExceeded("the deadline passed before the server could be asked")
            if is_told and left_s < inf:
                headers["x-request-timeout-ms"] = str(max(1, int(left_s * 1000)))
            request = http.build_request("POST", self._path, content=body, headers=headers)
            asked_s: float | None = None
            try:
                async with self._waits.at_most(left_s + _GRACE_S):
                    answer = await http.send(request, stream=is_stream)
                    await _check(answer)
                return answer
            except CarpoolError as error:
                if not is_retried(error.status, error.code):
                    raise
                failure, asked_s = error, retry_after_s(answer.headers)
            except (httpx.ConnectError, httpx.ConnectTimeout) as error:
                failure = _unreachable(error)
            except httpx.RequestError as error:
                raise broken("the answer") from error
            await self._before_retry(attempt, asked_s, until, failure)

    async def _before_retry(self, attempt: int, asked_s: float | None, until: float, failure: CarpoolError) -> None:
        delay_s = wait_s(attempt, asked_s)
        if not self._retries or monotonic() + delay_s >= until or not self.budget.take():
            raise failure
        async with self._waits.at_most(None):
            await asyncio.sleep(delay_s)


class _Transport(httpx.AsyncHTTPTransport):
    """Connects as httpx does; a connection that is cut as it is made counts as none."""

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        try:
            return await super().handle_async_request(request)
        except AttributeError as error:  # of anyio, which asks for the address of a socket that is gone
            raise httpx.ConnectError("the connection was cut as it was made", request=request) from error


class _SentItems:
    """The items of a bulk request, as pieces of its body.

    Args:
        limit_s: How long the server may be silent while it owes an answer, in seconds.

    Attributes:
        n_answered: How many of them have their answers.
        has_ended: Whether all of them, and the end of the body, were handed over to be sent.
        wait: The wait for the answer that is under way, or the last one.
    """

    def __init__(self, xs: Iterable[Any] | AsyncIterable[Any] | ThreadInput, limit_s: float) -> None:
        self._xs = xs
        self.limit_s = limit_s
        self.n = self.n_answered = 0
        self.has_ended = False
        self.wait: Wait | None = None

    @property
    def is_owed(self) -> bool:
        return self.has_ended or self.n > self.n_answered

    async def pieces(self) -> AsyncGenerator[bytes, None]:
        """Yield lines, several at a time where they come quickly. Raises `InputFailed`."""
        try:
            async with aclosing(in_bunches(self._xs)) as bunches:
                async for bunch in bunches:
                    lines = [line_of(x) for x in bunch]
                    self._owe(len(lines))
                    yield b"".join(lines)
        except (InputFailed, asyncio.CancelledError, GeneratorExit):
            raise
        except BaseException as error:  # an input is the user's
            raise InputFailed(error) from error
        self.has_ended = True
        self._owe(0)

    def _owe(self, n: int) -> None:
        was_owed = self.n > self.n_answered
        self.n += n
        if not was_owed and self.wait is not None:
            self.wait.limit(self.limit_s)


async def _check(answer: httpx.Response) -> None:
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


def _drop(loop: asyncio.AbstractEventLoop, http: httpx.AsyncClient) -> None:
    """Close the connections of a client that was dropped, unless their loop has ended."""
    with suppress(RuntimeError):
        loop.call_soon_threadsafe(lambda: loop.create_task(http.aclose()))
