"""Many items from one caller: in order, a bounded number inside at a time, in constant memory.

A stream is a queue of requests in the order of their items: the feeder puts them in, and the
consumer takes the first one out once it is done.

Sync streams keep their requests on the loop's thread and pass only items and results across, in
bunches. An item that could change is pickled where it is read, since its input may use one buffer
again and again.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterable, AsyncIterator, Iterable, Iterator
from typing import Any, Final

from carpool.engine.drive.aio import Driver
from carpool.engine.drive.callers import (
    GRACE_S,
    NO_ANSWER,
    TaskCaller,
    Weigh,
    error_of,
    load_result,
    request_for,
    result_of,
    with_cause,
)
from carpool.engine.drive.loop_thread import LoopThread
from carpool.engine.foreign import as_model_error
from carpool.engine.request import DONE, Request
from carpool.engine.wire.payload import LARGE, SCALARS, Memory, size_of
from carpool.errors import DeadlineExceeded

_BYTES_IN_FLIGHT = 16 * 2**20  # of large items; more only pushes them out of the processor's cache

MOST_WAITING: Final = 16 * 2**20
"""Bytes of answers that may wait for their consumer before nothing more is let in."""


class StreamWindow:
    """How many requests of one stream may be inside at a time: at least enough to keep every worker
    busy, and at most so many that small items can travel together.

    Attributes:
        limit: How many may be inside now.
        small: Items and answers of at most so many bytes never make it fewer.
        fits: How many may be inside so that their answers hold `MOST_WAITING` together, if they are
            as large as the last ones; but not fewer than `least`.
        is_heavy: Whether the bytes of answers that wait have to be counted, as the last ones were
            large.
        has_large_items: Whether some of the last items were large: then no answer widens it.
    """

    def __init__(self, least: int, most: int) -> None:
        self.limit = least
        self.small = _BYTES_IN_FLIGHT // most
        self.fits = MOST_WAITING
        self.is_heavy = self.has_large_items = False
        self._least = least
        self._most = most
        self._usual = 0  # bytes of an answer

    @property
    def is_wide(self) -> bool:
        return self.limit == self._most

    def narrow(self, nbytes: int) -> None:
        self.limit = max(self._least, min(self.limit, _BYTES_IN_FLIGHT // nbytes))

    def note_answers(self, n: int, nbytes: int) -> None:
        """Let as many in as `n` answers allow that hold `nbytes` bytes together."""
        usual = self._usual = max(nbytes // n, self._usual // 2)
        self.is_heavy = usual * self._most > MOST_WAITING
        self.fits = max(self._least, MOST_WAITING // max(1, usual))
        limit = self.limit if self.has_large_items else min(2 * self.limit, self._most)
        self.limit = min(limit, self.fits)


class AsyncStream:
    """A stream on the driver's own loop.

    Args:
        limit_s: Seconds that each item has to be answered.
        window: How many requests may be inside at a time.
        weigh: Writes on a request what its item counts for, if not 1.
    """

    def __init__(self, driver: Driver, limit_s: float, window: StreamWindow, weigh: Weigh | None = None) -> None:
        self._driver = driver
        self._limit_s = limit_s
        self._window = window
        self._weigh = weigh
        self._memory = Memory()
        self._requests: deque[Request] = deque()  # inside, in order

        # the consumer: the task that iterates
        self._has_left = False
        self._consumer = TaskCaller()  # waits for the first request

        # the feeder: a task of the stream's own
        self._has_input_ended = False
        self._input_error: BaseException | None = None
        self._feeder = TaskCaller()  # waits for room
        self._n_uncounted = 0  # items that were let in since answers were counted

    async def run(
        self, xs: Iterable[Any] | AsyncIterable[Any], return_exceptions: bool, handle: object
    ) -> AsyncIterator[Any]:
        """Yield the results, in order.

        Args:
            return_exceptions: Whether errors of items are yielded instead of raised.
            handle: Of the service; kept until the end, since it would close if it were collected.
        """
        if asyncio.get_running_loop() is not self._driver.loop:
            raise RuntimeError("this stream belongs to the event loop that its service was started on")
        feeding = asyncio.ensure_future(self._feed(xs))
        requests = self._requests
        try:
            while not self._has_input_ended or requests:
                while requests and requests[0].state == DONE:
                    request = requests.popleft()
                    nbytes = _answer_bytes(request)
                    if nbytes > self._window.small or not self._window.is_wide:
                        self._window.note_answers(1, nbytes)
                    if self._feeder.done is not None and len(requests) <= self._window.limit // 2:
                        self._feeder.set()
                    yield _outcome(request) if return_exceptions else result_of(request)
                await self._wait_for_first()
            if self._input_error is not None:
                raise self._input_error
        finally:
            self._has_left = True
            feeding.cancel()
            for request in requests:
                self._driver.cancel(request)

    async def _wait_for_first(self) -> None:
        if self._requests:
            self._requests[0].caller = self._consumer  # only the answer of the first one wakes it
        elif self._has_input_ended:
            return
        await self._consumer.wait()

    async def _feed(self, xs: Iterable[Any] | AsyncIterable[Any]) -> None:
        try:
            if isinstance(xs, AsyncIterable):
                async for x in xs:
                    while self._is_full:
                        await self._feeder.wait()
                    self._put(x)
            else:
                for x in xs:
                    while self._is_full:
                        await self._feeder.wait()
                    self._put(x)
        except BaseException as error:
            self._input_error = error
            if self._has_left:  # the stream itself ends it
                raise
        finally:
            self._has_input_ended = True
            self._consumer.set()

    @property
    def _is_full(self) -> bool:
        n = len(self._requests)
        if n >= self._window.limit:
            return True
        if not self._window.is_heavy or 8 * self._n_uncounted < n:  # to count for each item would take too long
            return False
        if sum(map(_answer_bytes, self._requests)) > MOST_WAITING:
            return True
        self._n_uncounted = 0
        return False

    def _put(self, x: Any) -> None:
        request = _request_of(x, self._driver.clock() + self._limit_s, self._weigh, self._memory)
        self._requests.append(request)
        self._n_uncounted += 1
        self._window.has_large_items = request.nbytes >= LARGE
        if self._window.has_large_items:
            self._window.narrow(request.nbytes)
        if request.state != DONE:
            self._driver.submit(request)
        if len(self._requests) == 1:
            self._consumer.set()


class _Shared:
    """What the three threads of a `ThreadStream` share.

    There is no lock: each field has one thread that writes it, unless it says otherwise, and every
    change is one step.

    Attributes:
        heavy: Pairs of a number of results and of their bytes, while results are large. The loop
            appends, the feeder takes.
        n_bytes: How many bytes all results held. The loop writes it.
        read: Items on their way to the loop, as requests or, if they cannot change, as they are.
            The feeder appends, the loop takes.
        results: On their way to the consumer. The loop appends, the consumer takes.
        n_read: How many items have been read. The feeder writes it.
        n_taken: How many results have been taken. The consumer writes it.
        is_feeder_waiting: Whether the feeder waits for room. The feeder writes it.
        has_input_ended: Whether no item comes any more. The feeder writes it, after `input_error`.
        input_error: What the input has raised. The feeder writes it.
        has_consumer_left: Whether no result is wanted any more. The consumer writes it.
        is_submit_posted: Whether the loop is going to look at `read`: it clears it before that.
        news: Set when there are results or the input has ended. The consumer waits for it.
        room: Set when there may be room, or the consumer has left. The feeder waits for it.
    """

    def __init__(self) -> None:
        self.heavy: deque[tuple[int, int]] = deque()
        self.read: deque[Any] = deque()
        self.results: deque[Any] = deque()
        self.n_bytes = self.n_read = self.n_taken = 0
        self.is_feeder_waiting = self.has_input_ended = self.has_consumer_left = self.is_submit_posted = False
        self.input_error: BaseException | None = None
        self.news = threading.Event()
        self.room = threading.Event()


class ThreadStream:
    """A stream for a thread that is not the driver's. A thread of the stream's own reads the input.

    Three threads work on it:

    1. The consumer takes results, or waits for news, until it has left.
    2. The feeder puts items in, or waits for room, until the input has ended.
    3. The driver's loop, on which requests live and die, is idle, or a call of `_submit` is posted.

    To wake one another would cost most. The other arguments are those of `AsyncStream`.
    """

    def __init__(
        self,
        thread: LoopThread,
        driver: Driver,
        limit_s: float,
        window: StreamWindow,
        weigh: Weigh | None = None,
    ) -> None:
        self._thread = thread
        self._driver = driver
        self._limit_s = limit_s
        self._window = window  # the feeder narrows it, all else of it is the loop's
        self._weigh = weigh

        self._shared = _Shared()

        self._memory = Memory()  # the feeder's: the loop makes requests of scalars only, which need none
        self._requests: deque[Request] = deque()  # the loop's: those inside, in order
        self._n_harvested = 0  # the loop's
        self._bytes_taken = 0  # the feeder's: of results, as far as they are counted

    # -- the consumer's thread

    def run(self, xs: Iterable[Any], return_exceptions: bool, handle: object) -> Iterator[Any]:
        feeder = threading.Thread(target=self._feed, args=(xs,), name="carpool-stream", daemon=True)
        feeder.start()
        shared = self._shared
        results = shared.results
        try:
            while True:
                while results:
                    result = results.popleft()
                    shared.n_taken += 1
                    if (
                        shared.is_feeder_waiting
                        and shared.n_read - shared.n_taken <= self._window.limit // 2
                        and not shared.room.is_set()  # it takes a while until the feeder runs
                    ):
                        shared.room.set()
                    if type(result) is _Raised:
                        result = with_cause(result.error)
                        if not return_exceptions:
                            try:
                                raise result
                            finally:
                                del result  # or it and this frame would hold each other
                    yield result
                shared.news.clear()
                if not results:  # checked after the clearing, so that no news is missed
                    if shared.has_input_ended and shared.n_taken == shared.n_read:
                        break
                    self._wait_for_news()
            if shared.input_error is not None:
                raise shared.input_error
        finally:
            shared.has_consumer_left = True
            shared.room.set()
            self._thread.post(self._cancel)
            del handle  # an error of the input shows this frame, and whoever keeps it does not keep the service open

    def _wait_for_news(self) -> None:
        """Raises DeadlineExceeded if the loop does not answer in time."""
        shared = self._shared
        is_result_owed = shared.n_read > shared.n_taken  # else it is the input that takes its time
        most_s = min(self._limit_s + GRACE_S, threading.TIMEOUT_MAX)
        if not shared.news.wait(most_s) and is_result_owed and not shared.results:
            raise DeadlineExceeded(NO_ANSWER)

    # -- the feeder's thread

    def _feed(self, xs: Iterable[Any]) -> None:
        as_they_are = SCALARS if self._weigh is None else frozenset()
        shared, window = self._shared, self._window
        try:
            for x in xs:
                if shared.n_read - shared.n_taken >= window.limit or window.is_heavy:
                    self._wait_for_room()
                if shared.has_consumer_left:
                    return
                if type(x) not in as_they_are:
                    x = _request_of(x, self._driver.clock() + self._limit_s, self._weigh, self._memory)
                    if x.nbytes >= LARGE:
                        window.narrow(x.nbytes)
                shared.n_read += 1
                shared.read.append(x)
                if not shared.is_submit_posted:
                    shared.is_submit_posted = True
                    self._thread.post(self._submit)
        except BaseException as error:
            shared.input_error = error
        finally:
            shared.has_input_ended = True
            shared.news.set()

    def _wait_for_room(self) -> None:
        shared = self._shared
        while self._is_full and not shared.has_consumer_left:
            shared.room.clear()
            shared.is_feeder_waiting = True
            # checked after the clearing, so that no room is missed
            if self._is_full and not shared.has_consumer_left:
                shared.room.wait()
            shared.is_feeder_waiting = False

    @property
    def _is_full(self) -> bool:
        shared = self._shared
        if shared.n_read - shared.n_taken >= self._window.limit:
            return True
        heavy, n_taken = shared.heavy, shared.n_taken
        while heavy and heavy[0][0] <= n_taken:
            _, self._bytes_taken = heavy.popleft()
        return len(heavy) > 0 and shared.n_bytes - self._bytes_taken > MOST_WAITING

    # -- the loop's thread

    def _submit(self) -> None:
        shared = self._shared
        shared.is_submit_posted = False
        read = shared.read
        requests: list[Request] = []
        largest = 0
        deadline = self._driver.clock() + self._limit_s
        while read and not shared.has_consumer_left:
            x = read.popleft()
            request = x if type(x) is Request else _request_of(x, deadline, None, self._memory)
            if request.nbytes > largest:
                largest = request.nbytes
            requests.append(request)
        self._window.has_large_items = largest >= LARGE
        self._requests += requests
        self._driver.submit_all(requests)
        self._harvest()

    def answered(self, request: Request) -> None:
        """Pass results on, since the first request is done."""
        self._harvest()

    def _harvest(self) -> None:
        requests, results = self._requests, self._shared.results
        n, nbytes = len(requests), 0
        while requests and requests[0].state == DONE:
            request = requests.popleft()
            result = request.result
            kind = type(result)
            if request.error is not None:
                results.append(_Raised(error_of(request)))
            elif kind in SCALARS:
                results.append(result)  # as `load_result` does, without a call
            else:
                nbytes += len(result) if kind is bytes else size_of(result)  # type: ignore[arg-type]
                try:
                    results.append(load_result(result))
                except Exception as error:
                    results.append(_Raised(error))
        n -= len(requests)
        if requests:
            requests[0].caller = self
        if n:
            self._note_harvest(n, nbytes)
            self._shared.news.set()

    def _note_harvest(self, n: int, nbytes: int) -> None:
        window, shared = self._window, self._shared
        window.note_answers(n, nbytes)
        if window.is_heavy and not shared.heavy:
            shared.heavy.append((self._n_harvested, shared.n_bytes))
        self._n_harvested += n
        shared.n_bytes += nbytes
        if window.is_heavy:
            shared.heavy.append((self._n_harvested, shared.n_bytes))

    def _cancel(self) -> None:
        for request in self._requests:
            self._driver.cancel(request)


class _Raised:
    """An item's error, in its place among the results."""

    __slots__ = ("error",)

    def __init__(self, error: Exception) -> None:
        self.error = error


def _request_of(x: Any, deadline: float, weigh: Weigh | None, memory: Memory) -> Request:
    """Return a copied item as a request, which is done if copying or weighing has failed."""
    try:
        request = request_for(x, deadline, weigh, memory)
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


def _answer_bytes(request: Request) -> int:
    result = request.result
    return 0 if type(result) in SCALARS else size_of(result)  # type: ignore[arg-type]


def _outcome(request: Request) -> Any:
    if request.error is not None:
        return error_of(request)
    try:
        return result_of(request)
    except Exception as error:
        return error
