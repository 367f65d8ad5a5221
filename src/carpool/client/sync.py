"""`carpool.Client`: asks a carpool server, from threads. It drives an `AsyncClient` on a loop in a
thread of its own.
"""

from __future__ import annotations

import asyncio
import os
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Coroutine, Generator, Iterable, Iterator
from concurrent.futures import CancelledError
from contextlib import closing, suppress
from functools import partial
from types import TracebackType
from typing import Any, TypeVar, Unpack, overload

from carpool.client.aio import AsyncClient, ClientOptions
from carpool.client.bunches import InputFailed, ThreadInput
from carpool.client.waits import RetryBudget, closed
from carpool.engine.clock import monotonic
from carpool.engine.drive.loop_thread import LoopThread
from carpool.errors import CarpoolError, Unavailable

T = TypeVar("T")

_TASKS_END_S = 1.0  # which tasks have to end by themselves, once the connections are closed
_SILENT_S = 10.0  # for which the loop may do nothing while a closer waits for its end


class Client:
    """A client of a carpool server, for threads.

    Use it as `with carpool.Client("http://host:8000") as client`, and one for many requests and
    threads: it keeps connections open. Its methods are those of `AsyncClient`, which says more.

    Args:
        url: Where the server is; or a `carpool.http.App`, which is asked without a socket, for
            tests.
        options: Those of `AsyncClient`: `model`, `api_key`, `timeout_s`, `uds`, `retries`, `verify`
            and `headers`.

    Attributes:
        url: Where the server is; empty for an app.
    """

    def __init__(self, url: Any = "http://127.0.0.1:8000", **options: Unpack[ClientOptions]) -> None:
        self.url = url if isinstance(url, str) else ""
        self._make = partial(AsyncClient, url, **options)
        self._is_closed = False
        self._begin()

    def _begin(self) -> None:
        self._client = self._make()
        self._thread = LoopThread("carpool client", _Loop())
        self._open: set[AsyncIterator[Any]] = set()  # answers that are being read
        self._ending: weakref.finalize[..., Client] = weakref.finalize(
            self, _drop, self._thread, self._client, self._open
        )
        self._ending.atexit = False

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close all connections. Calls of other threads that are under way raise `Unavailable`."""
        thread, was_closed = self._thread, self._is_closed
        self._is_closed = True
        if thread.is_parents:
            return
        if not was_closed:
            self._ending.detach()
            try:
                thread.run(_close(self._client, self._open))
            finally:
                thread.post(thread.stop)
        thread.wait_until_ended(_SILENT_S)

    @property
    def budget(self) -> RetryBudget:
        """How many requests and retries were made."""
        return self._client.budget

    def wait_until_ready(self, timeout_s: float = 60.0) -> None:
        """Wait until the client's model can answer; see `AsyncClient.wait_until_ready`."""
        self._wait(lambda client: client.wait_until_ready(timeout_s))

    @overload
    def predict(self, x: Any, *, as_type: type[T], timeout_s: float | None = None, priority: int = 0) -> T: ...
    @overload
    def predict(self, x: Any, *, as_type: Any = Any, timeout_s: float | None = None, priority: int = 0) -> Any: ...
    def predict(self, x: Any, *, as_type: Any = Any, timeout_s: float | None = None, priority: int = 0) -> Any:
        """Return the model's answer to one item; see `AsyncClient.predict`."""
        return self._wait(lambda client: client.predict(x, as_type=as_type, timeout_s=timeout_s, priority=priority))

    def predict_stream(
        self, x: Any, *, as_type: Any = Any, timeout_s: float | None = None, priority: int = 0
    ) -> Iterator[Any]:
        """Yield the parts of the model's answer to one item; see `AsyncClient.predict_stream`."""
        return self._iterated(
            lambda client: client.predict_stream(x, as_type=as_type, timeout_s=timeout_s, priority=priority)
        )

    def predict_many(
        self,
        xs: Iterable[Any],
        *,
        as_type: Any = Any,
        return_exceptions: bool = False,
        priority: int | None = None,
        timeout_s: float | None = None,
    ) -> Iterator[Any]:
        """Yield the answers to many items, in their order; see `AsyncClient.predict_many`.

        The items are taken from `xs` in a thread of their own, one after the other.
        """
        with closing(self.bunches(xs, as_type=as_type, priority=priority, timeout_s=timeout_s)) as bunches:
            for bunch in bunches:
                for result in bunch:
                    if isinstance(result, CarpoolError) and not return_exceptions:
                        raise result
                    yield result

    def bunches(
        self,
        xs: Iterable[Any],
        *,
        as_type: Any = Any,
        priority: int | None = None,
        timeout_s: float | None = None,
    ) -> Generator[list[Any], None, None]:
        """Yield the same in lists, each of what came together; errors stand in their places."""
        try:
            yield from self._iterated(lambda client: client.bunches(ThreadInput(xs), as_type, priority, timeout_s))
        except InputFailed as failed:
            raise failed.error from None

    def _iterated(self, make: Callable[[AsyncClient], AsyncIterator[T]]) -> Iterator[T]:
        thread, client = self._running()
        iterator, opened = make(client), self._open
        opened.add(iterator)

        def leave() -> None:
            if not thread.is_stopping:  # else the end of the loop closes the iterator
                thread.loop.create_task(_leave(iterator, opened))

        try:
            while True:
                try:
                    item = self._run(thread, _next(iterator))
                except StopAsyncIteration:
                    if self._is_closed:  # which may have ended it before its end
                        raise closed() from None
                    return
                yield item
        finally:
            if thread.is_parents:
                opened.discard(iterator)
            else:
                with suppress(RuntimeError):  # the loop has ended
                    # nothing is waited for: the collector may be what has come here, in any thread
                    thread.loop.call_soon_threadsafe(leave)

    def _wait(self, ask: Callable[[AsyncClient], Coroutine[Any, Any, T]]) -> T:
        thread, client = self._running()
        return self._run(thread, ask(client))

    def _running(self) -> tuple[LoopThread, AsyncClient]:
        """Return the loop and the client on it; in a forked child new ones.

        Raises:
            RuntimeError: The client is closed.
        """
        with _beginning:
            if self._is_closed:
                raise RuntimeError("this client has been closed: make a new one")
            if self._thread.is_parents:
                self._ending()
                self._begin()
            return self._thread, self._client

    def _run(self, thread: LoopThread, work: Coroutine[Any, Any, T]) -> T:
        if thread.is_parents:
            work.close()
            raise Unavailable("this answer is one of the parent process: ask again", code="closed")
        try:
            return thread.run(work)
        except (CancelledError, RuntimeError, Unavailable) as error:
            work.close()  # if the loop had ended before it was begun
            if self._is_closed:
                raise closed() from error
            raise


class _Loop(asyncio.SelectorEventLoop):
    """A loop that closes its connections with itself.

    The libraries below forget one whose maker is cancelled in that turn.
    """

    def __init__(self) -> None:
        super().__init__()
        self._made: weakref.WeakSet[asyncio.Transport] = weakref.WeakSet()

    async def create_connection(self, *args: Any, **options: Any) -> Any:
        made = await super().create_connection(*args, **options)
        self._made.add(made[0])
        return made

    async def create_unix_connection(self, *args: Any, **options: Any) -> Any:
        made = await super().create_unix_connection(*args, **options)
        self._made.add(made[0])
        return made

    def close(self) -> None:
        if not self.is_closed() and self._made:
            for transport in list(self._made):
                transport.abort()
            self.run_until_complete(asyncio.sleep(0))  # their sockets are closed in the next turn
        super().close()


_beginning = threading.Lock()
_of_parents: list[tuple[LoopThread, AsyncClient]] = []
"""Objects that a fork has left to the parent. They are kept: their end would close the parent's
connections."""


def _forked() -> None:
    global _beginning
    _beginning = threading.Lock()  # a thread of the parent may have held it


os.register_at_fork(after_in_child=_forked)


def _drop(thread: LoopThread, client: AsyncClient, iterators: set[AsyncIterator[Any]]) -> None:
    """End the loop of a client that was dropped, without waiting for it."""

    async def end() -> None:
        try:
            await _close(client, iterators)
        finally:
            thread.stop()

    if thread.is_parents:
        _of_parents.append((thread, client))
    else:
        thread.post(lambda: thread.loop.create_task(end()))


async def _close(client: AsyncClient, iterators: set[AsyncIterator[Any]]) -> None:
    for iterator in list(iterators):
        await _leave(iterator, iterators)
    await client.close()
    own, until = asyncio.current_task(), monotonic() + _TASKS_END_S
    while (left := asyncio.all_tasks() - {own}) and monotonic() < until:  # one that ends may have dropped another
        await asyncio.wait(left, timeout=_TASKS_END_S)
    for iterator in list(iterators):  # those that were being read; the end of the loop would close them inside out
        await _leave(iterator, iterators)


async def _leave(iterator: AsyncIterator[Any], opened: set[AsyncIterator[Any]]) -> None:
    """Close the connection of an answer that is read no further; it is open no more then."""
    with suppress(RuntimeError):  # it is being read: that ends by itself, or with the client
        await iterator.aclose()  # type: ignore[attr-defined] # it is a generator
        opened.discard(iterator)


async def _next(iterator: AsyncIterator[T]) -> T:
    return await anext(iterator)
