"""Many items from one caller: in order, a bounded number inside at a time, in constant memory.

A stream is a queue of requests in the order of their items. The feeder puts one in when there is room, the consumer
takes the head once it is done; whatever finishes behind the head waits there. The requests themselves are the places.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterable, AsyncIterator, Iterable, Iterator
from typing import Any

from carpool.drive.aio import Driver
from carpool.drive.callers import GRACE_S, NO_ANSWER, Weigh, error_of, request_for, result_of, with_cause
from carpool.drive.loop_thread import LoopThread
from carpool.errors import DeadlineExceeded
from carpool.foreign import as_model_error
from carpool.request import DONE, Request
from carpool.wire.memory import Memory
from carpool.wire.payload import LARGE, detach
from carpool.wire.scalars import SCALARS

_BYTES_IN_FLIGHT = 16 * 2**20  # of large items; more only pushes them out of the processor's cache


class Window:
    """How many requests of one stream may be inside at a time.

    Args:
        least: enough to keep every worker busy.
        most: for small items, so that several can travel together.
    """

    def __init__(self, least: int, most: int) -> None:
        self.limit = most
        self._least = least
        self._most = most

    def narrow(self, nbytes: int) -> None:
        """There are large items, as large as this."""
        self.limit = max(self._least, min(self.limit, _BYTES_IN_FLIGHT // nbytes))

    def start_small(self) -> None:
        """Nothing is known of the items yet, and many may come before it is."""
        self.limit = self._least

    def widen(self) -> None:
        """The items were small."""
        self.limit = min(2 * self.limit, self._most)


class AsyncStream:
    """A stream on the driver's own loop.

    Args:
        driver: takes the requests.
        limit_s: time that each item has to be answered.
        window: how many requests may be inside at a time.
        weigh: how much of a batch an item takes up, if not 1.
    """

    def __init__(self, driver: Driver, limit_s: float, window: Window, weigh: Weigh | None = None) -> None:
        self._driver = driver
        self._limit_s = limit_s
        self._window = window
        self._weigh = weigh
        self._places: deque[Request] = deque()
        self._memory = Memory()
        self._left = False  # the consumer has gone
        self._fed = False  # the input has ended
        self._input_error: BaseException | None = None
        self._consumer: asyncio.Future[None] | None = None  # waits for the head
        self._feeder: asyncio.Future[None] | None = None  # waits for room

    def answered(self, request: Request) -> None:
        """The head, for which the consumer waits, is done."""
        if self._consumer is not None:
            _wake(self._consumer)

    async def run(
        self, xs: Iterable[Any] | AsyncIterable[Any], return_exceptions: bool, handle: object
    ) -> AsyncIterator[Any]:
        """The results, in order. The handle is not dropped before that."""
        if asyncio.get_running_loop() is not self._driver.loop:
            raise RuntimeError("this stream belongs to the event loop that its service was started on")
        feeding = asyncio.ensure_future(self._feed(xs))
        places = self._places
        try:
            while not self._fed or places:
                while places and places[0].state == DONE:
                    request = places.popleft()
                    if self._feeder is not None and len(places) <= self._window.limit // 2:
                        _wake(self._feeder)
                    yield _outcome(request) if return_exceptions else result_of(request)
                await self._news()
            if self._input_error is not None:
                raise self._input_error
        finally:
            self._left = True
            feeding.cancel()
            for request in places:
                self._driver.cancel(request)

    async def _news(self) -> None:
        """Wait until the head is done; while there is none, until the feeder has put one in or has ended."""
        if self._places:
            self._places[0].caller = self  # only the head's answer wakes anybody
        elif self._fed:
            return
        self._consumer = asyncio.get_running_loop().create_future()
        await self._consumer
        self._consumer = None

    async def _feed(self, xs: Iterable[Any] | AsyncIterable[Any]) -> None:
        try:
            if isinstance(xs, AsyncIterable):
                async for x in xs:
                    if len(self._places) >= self._window.limit:
                        await self._room()
                    self._put(x)
            else:
                for x in xs:
                    if len(self._places) >= self._window.limit:
                        await self._room()
                    self._put(x)
        except BaseException as error:
            self._input_error = error
            if self._left:  # it is we who end it
                raise
        finally:
            self._fed = True
            if self._consumer is not None:
                _wake(self._consumer)

    def _put(self, x: Any) -> None:
        request = _place_for(x, self._driver.clock() + self._limit_s, self._weigh, self._memory)
        self._places.append(request)
        if request.nbytes >= LARGE:
            self._window.narrow(request.nbytes)
        if request.state != DONE:
            self._driver.submit(request)
        if self._consumer is not None and len(self._places) == 1:
            _wake(self._consumer)

    async def _room(self) -> None:
        self._feeder = asyncio.get_running_loop().create_future()
        await self._feeder
        self._feeder = None


class ThreadStream:
    """A stream for a thread that is not the driver's. A thread of its own reads the input.

    Requests live and die on the loop; across threads go only items and results, in bunches. Three threads share one
    interpreter, so what would cost is waking one another. But an item that could change is made a request where it is
    read, so that an input may use one buffer again and again.
    """

    def __init__(
        self,
        thread: LoopThread,
        driver: Driver,
        limit_s: float,
        window: Window,
        weigh: Weigh | None = None,
    ) -> None:
        self._thread = thread
        self._driver = driver
        self._limit_s = limit_s
        self._window = window
        self._weigh = weigh
        window.start_small()
        self._memory = Memory()  # of the feeder
        self._given = 0  # items read; counted by the feeder
        self._taken = 0  # results handed out; counted by the consumer
        self._read: deque[Any] = deque()  # requests, and items that cannot change, on their way to the loop
        self._places: deque[Request] = deque()  # inside, in order; the loop's own
        self._results: deque[Any] = deque()  # on their way to the consumer
        self._fed = False
        self._closed = False
        self._error: BaseException | None = None  # of the input
        self._posted = False
        self._news = threading.Event()  # for the consumer
        self._room = threading.Event()  # for the feeder
        self._feeder_waits = False

    # -- the consumer's thread

    def run(self, xs: Iterable[Any], return_exceptions: bool, handle: object) -> Iterator[Any]:
        """The results, in order. The handle is not dropped before that."""
        feeder = threading.Thread(target=self._feed, args=(xs,), name="carpool-stream", daemon=True)
        feeder.start()
        results = self._results
        try:
            while True:
                while results:
                    result = results.popleft()
                    self._taken += 1
                    if self._feeder_waits and self._given - self._taken <= self._window.limit // 2:
                        self._room.set()
                    if type(result) is _Raised:
                        result = with_cause(result.error)
                        if not return_exceptions:
                            try:
                                raise result
                            finally:
                                del result  # or it and this frame would hold each other
                    yield result
                self._news.clear()
                if not results:  # looked at after the clearing, so that no news is missed
                    if self._fed and self._taken == self._given:
                        break
                    self._await_news()
            if self._error is not None:
                raise self._error
        finally:
            self._closed = True
            self._room.set()
            self._thread.post(self._cancel)
            del handle  # an error of the input shows this frame, and whoever keeps it does not keep the service open

    def _await_news(self) -> None:
        """Until a result is there or the input has ended. Raises DeadlineExceeded if the loop does not answer."""
        owed = self._given > self._taken  # else it is the input that takes its time
        most_s = min(self._limit_s + GRACE_S, threading.TIMEOUT_MAX)
        if not self._news.wait(most_s) and owed and not self._results:
            raise DeadlineExceeded(NO_ANSWER)

    # -- the feeder's thread

    def _feed(self, xs: Iterable[Any]) -> None:
        as_they_are = SCALARS if self._weigh is None else frozenset()
        try:
            for x in xs:
                if self._given - self._taken >= self._window.limit:
                    self._await_room()
                if self._closed:
                    return
                if type(x) not in as_they_are:
                    x = _place_for(x, self._driver.clock() + self._limit_s, self._weigh, self._memory)
                    if x.nbytes >= LARGE:
                        self._window.narrow(x.nbytes)
                self._given += 1
                self._read.append(x)
                if not self._posted:
                    self._posted = True
                    self._thread.post(self._submit)
        except BaseException as error:
            self._error = error
        finally:
            self._fed = True
            self._news.set()

    def _await_room(self) -> None:
        while self._given - self._taken >= self._window.limit and not self._closed:
            self._room.clear()
            self._feeder_waits = True
            if self._given - self._taken >= self._window.limit and not self._closed:
                self._room.wait()
            self._feeder_waits = False

    # -- the loop's thread

    def _submit(self) -> None:
        self._posted = False
        read = self._read
        requests: list[Request] = []
        largest = 0
        deadline = self._driver.clock() + self._limit_s
        while read and not self._closed:
            x = read.popleft()
            request = x if type(x) is Request else _place_for(x, deadline, None, self._memory)
            if request.nbytes > largest:
                largest = request.nbytes
            requests.append(request)
        if largest < LARGE:
            self._window.widen()
        self._places += requests
        self._driver.submit_all(requests)
        self._harvest()

    def answered(self, request: Request) -> None:
        """The head is done."""
        self._harvest()

    def _harvest(self) -> None:
        """Pass on the results that are done up to the first that is not; that one is to call when it is."""
        places, results = self._places, self._results
        before = len(results)
        while places and places[0].state == DONE:
            request = places.popleft()
            if request.error is not None:
                results.append(_Raised(error_of(request)))
                continue
            try:
                results.append(result_of(request))
            except Exception as error:
                results.append(_Raised(error))
        if places:
            places[0].caller = self
        if len(results) > before:
            self._news.set()

    def _cancel(self) -> None:
        for request in self._places:
            self._driver.cancel(request)


class _Raised:
    """Stands among the results for an item's error."""

    __slots__ = ("error",)

    def __init__(self, error: Exception) -> None:
        self.error = error


def _place_for(x: Any, deadline: float, weigh: Weigh | None, memory: Memory) -> Request:
    """An item, copied, as a request; one that cannot be pickled or weighed has its error already."""
    try:
        request = request_for(x, deadline, weigh)
        if type(request.item) is list and request.nbytes >= LARGE:
            request.item = detach(request.item, memory)
        request.bulk = True
        return request
    except Exception as error:
        failure: Exception = error
    except BaseException as error:  # of a `__reduce__` or a size= of the user's
        failure = as_model_error(error, "an item that could not be sent")
    request = Request(None, 0.0)
    request.state = DONE
    request.error = failure
    return request


def _outcome(request: Request) -> Any:
    """The result of a request that is done, or its error as a value."""
    if request.error is not None:
        return error_of(request)
    try:
        return result_of(request)
    except Exception as error:
        return error


def _wake(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)
