"""`carpool.Client`: asks a carpool server, from threads. It drives an `AsyncClient` on a loop in a
thread of its own.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Generator, Iterable, Iterator
from contextlib import closing
from types import TracebackType
from typing import Any, Final, TypeVar, Unpack, overload

from carpool.client.aio import AsyncClient, ClientOptions
from carpool.client.budget import RetryBudget
from carpool.client.bunches import ThreadInput
from carpool.clock import monotonic
from carpool.errors import CarpoolError

T = TypeVar("T")

_TASKS_END_S: Final = 1.0
"""How long tasks may take to end once the connections are closed, before they are cancelled."""


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
        self._loop = asyncio.new_event_loop()
        self._is_closed = False
        self._thread = threading.Thread(target=self._loop.run_forever, name="carpool client", daemon=True)
        self._thread.start()

        async def make() -> AsyncClient:
            return AsyncClient(url, **options)

        try:
            self._client = self._wait(make())
        except BaseException:
            self._end()
            raise

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close all connections."""
        if not self._is_closed:
            try:
                self._wait(self._client.close())
            finally:
                self._end()

    @property
    def budget(self) -> RetryBudget:
        """How many requests and retries were made."""
        return self._client.budget

    def wait_until_ready(self, timeout_s: float = 60.0) -> None:
        """Wait until the client's model can answer; see `AsyncClient.wait_until_ready`."""
        self._wait(self._client.wait_until_ready(timeout_s))

    @overload
    def predict(self, x: Any, *, as_type: type[T], timeout_s: float | None = None, priority: int = 0) -> T: ...
    @overload
    def predict(self, x: Any, *, as_type: Any = Any, timeout_s: float | None = None, priority: int = 0) -> Any: ...
    def predict(self, x: Any, *, as_type: Any = Any, timeout_s: float | None = None, priority: int = 0) -> Any:
        """Return the model's answer to one item; see `AsyncClient.predict`."""
        return self._wait(self._client.predict(x, as_type=as_type, timeout_s=timeout_s, priority=priority))

    def predict_stream(
        self, x: Any, *, as_type: Any = Any, timeout_s: float | None = None, priority: int = 0
    ) -> Iterator[Any]:
        """Yield the parts of the model's answer to one item; see `AsyncClient.predict_stream`."""
        return self._iterated(
            lambda: self._client.predict_stream(x, as_type=as_type, timeout_s=timeout_s, priority=priority)
        )

    def predict_many(
        self,
        xs: Iterable[Any],
        *,
        as_type: Any = Any,
        return_exceptions: bool = False,
        priority: int | None = None,
    ) -> Iterator[Any]:
        """Yield the answers to many items, in their order; see `AsyncClient.predict_many`.

        The items are taken from `xs` in a thread of their own, one after the other.
        """
        with closing(self.bunches(xs, as_type=as_type, priority=priority)) as bunches:
            for bunch in bunches:
                for result in bunch:
                    if isinstance(result, CarpoolError) and not return_exceptions:
                        raise result
                    yield result

    def bunches(
        self, xs: Iterable[Any], *, as_type: Any = Any, priority: int | None = None
    ) -> Generator[list[Any], None, None]:
        """Yield the same in lists, each of what came together; errors stand in their places."""
        taken = self._wait(_read_in_thread(xs))
        yield from self._iterated(lambda: self._client.bunches(taken, as_type, priority))

    def _iterated(self, make: Callable[[], AsyncIterator[T]]) -> Iterator[T]:
        """Yield what an iterator on the loop yields."""
        iterator = make()
        try:
            while True:
                try:
                    item = self._wait(_next(iterator))
                except StopAsyncIteration:
                    return
                yield item
        finally:
            if not self._is_closed:
                self._wait(iterator.aclose())  # type: ignore[attr-defined] # it is a generator

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        """Have the loop do something, and wait for it."""
        if self._is_closed:
            work.close()
            raise RuntimeError("this client has been closed: make a new one")
        doing = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return doing.result()
        except BaseException:
            doing.cancel()
            raise

    def _end(self) -> None:
        self._is_closed = True
        asyncio.run_coroutine_threadsafe(_end_tasks(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def _end_tasks() -> None:
    """Wait until nothing is left on the loop: it closes a generator that was dropped in a task.

    One that does not end by itself, although all connections are closed, is cancelled.
    """
    own, until = asyncio.current_task(), monotonic() + _TASKS_END_S
    while (left := asyncio.all_tasks() - {own}) and monotonic() < until:  # one that ends may have dropped another
        await asyncio.wait(left, timeout=_TASKS_END_S)
    for task in left:
        task.cancel()
    if left:
        await asyncio.wait(left, timeout=_TASKS_END_S)
    await asyncio.get_running_loop().shutdown_asyncgens()


async def _next(iterator: AsyncIterator[T]) -> T:
    return await anext(iterator)


async def _read_in_thread(xs: Iterable[Any]) -> ThreadInput:
    return ThreadInput(xs)
