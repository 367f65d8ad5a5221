"""The handle of a running service for threads, which has an event loop in a thread of its own."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterable, Iterator
from concurrent.futures import CancelledError
from functools import partial
from threading import Lock, get_ident
from typing import Any

from carpool.engine.core.journal import Entry
from carpool.engine.core.life import STARTED_BEFORE, LifeState
from carpool.engine.drive.callers import GRACE_S, NO_ANSWER, LockCaller, ThreadParts, error_of, result_of, with_cause
from carpool.engine.drive.changes import GRACE_S as GRACE_OF_STREAMS_S
from carpool.engine.drive.lending import ANSWERED, NOT_RUN, Loan
from carpool.engine.drive.loop_thread import LoopThread
from carpool.engine.drive.streams import ThreadStream
from carpool.engine.observe.snapshot import ServiceSnapshot
from carpool.engine.request import DEFAULT_LANE, Request
from carpool.errors import DeadlineExceeded, Unavailable
from carpool.service.declaration import Declaration
from carpool.service.handle import AsyncHandle, RunSettings

_SILENT_S = 10.0  # for how long a loop that ends may be busy with its last tasks


class Handle:
    """A service for threads, made by `Service.run` and `Service.start`.

    Use it as `with service.run() as s:`, or `close` it. It has an event loop in a thread of its
    own.

    Attributes:
        service: The declaration of the service.
    """

    def __init__(self, service: Declaration, settings: RunSettings) -> None:
        self._inner = AsyncHandle(service, settings)
        self.service = self._inner.service
        self._thread: LoopThread | None = None
        self._starting = Lock()

    def __repr__(self) -> str:
        return f"<Handle {self._inner.in_short()}>"

    def _repr_html_(self) -> str:
        return self.service.as_html(f"Handle {self._inner.in_short()}")

    def __enter__(self) -> Handle:
        return self.start()

    def __exit__(self, *exc: object) -> None:
        self.close()

    @property
    def join_address(self) -> str | None:
        """Where workers join, with the port that was taken; None if nothing listens for them."""
        return self._inner.join_address

    @property
    def pids(self) -> list[int]:
        """The process ids of the live workers that this process has started."""
        return self._inner.pids

    def start(self) -> Handle:
        """Start the workers, wait until all of them are ready, and return this handle.

        Raises:
            StartupError: A worker could not load its model or run its examples; the text ends with
                the traceback of the user's code. Or the address at which workers join cannot be
                listened on.
            Unavailable: The service was closed while it was starting.
            RuntimeError: It has been started before, or this is a worker process.
        """
        if self._inner.state is not LifeState.NEW or not self._starting.acquire(blocking=False):
            raise RuntimeError(STARTED_BEFORE)
        try:
            self._inner._running.thread = self._thread = thread = LoopThread("carpool")
        except BaseException:  # the system has no thread or descriptor to give
            self._starting.release()
            raise
        try:
            thread.run(self._inner.start())
        except BaseException:
            self._end(drain=False)
            if self._inner.state is LifeState.NEW:  # it was refused before anything was started
                self._inner._running.thread = self._thread = None
                self._starting.release()
            raise
        return self

    def close(self, drain: bool = True) -> None:
        """Close the service: refuse new requests, finish those inside, then end the workers.

        Several threads may call it at once, and again; each call returns when everything has ended.
        In a forked child it does nothing.

        Args:
            drain: Whether requests inside are finished, for up to the service's `timeout_s`;
                otherwise they fail at once with `Unavailable`.

        Raises:
            RuntimeError: This is the thread of the service's own loop, which would wait for itself.
            DeadlineExceeded: User code has blocked that loop for longer than the service's
                `timeout_s`. Worker processes have been killed; call `close` again once the loop
                goes on.
        """
        if self._inner.state not in (LifeState.STARTING, LifeState.OPEN, LifeState.DRAINING):
            return
        self._refuse_own_thread("closed")
        self._end(drain)

    def predict(
        self,
        x: Any,
        *,
        timeout_s: float | None = None,
        priority: int = 0,
        on_part: Callable[[Any], object] | None = None,
    ) -> Any:
        """Return the model's answer to one item, in any thread. Waits while the queue is full.

        Args:
            x: The item. Large arrays in it are copied no earlier than they are sent: no other
                thread may change them until the answer is there.
            timeout_s: The longest time to wait, in seconds. It can only shorten the service's own.
            priority: From -100 to 100. Larger goes first, but each second that a request is passed
                over counts as one level.
            on_part: Called with each part of the answer as it comes, and nobody else is given it;
                a model that returns whole answers gives one part.

        Raises:
            ModelError: The model failed for this item.
            ValidationError: The model refused this item.
            DeadlineExceeded: The answer was not ready within `timeout_s`.
            Overloaded: The answer could not have been ready in time, so the item was refused.
            Unavailable: The service is closing, or its workers were lost.
            RuntimeError: The service has not been started, runs in another process, or this is the
                thread of its own loop.
            ValueError: `timeout_s` or `priority` is out of range.
        """
        if on_part is not None:
            return self._predict_in_parts(x, timeout_s, priority, on_part)
        inner = self._inner
        request = inner.new_request(x, timeout_s, priority)
        thread: LoopThread = self._thread  # type: ignore[assignment]
        if get_ident() == thread.ident:
            self._refuse_own_thread("asked")
        caller = LockCaller()
        request.caller = caller
        driver = inner.running_driver
        loan: Loan | None = driver.loan
        try:
            come_of_it = NOT_RUN if loan is None or request.lane is not DEFAULT_LANE else loan.run(request)
            if come_of_it == NOT_RUN:
                thread.post(partial(driver.submit, request))
            if come_of_it != ANSWERED:
                caller.wait(request, driver.clock)
        except BaseException:  # KeyboardInterrupt, for example: nobody waits for the answer any more
            thread.post(partial(driver.cancel, request))
            raise
        if request.error is not None:
            raise with_cause(error_of(request))
        return result_of(request)

    def predict_stream(self, x: Any, *, timeout_s: float | None = None, priority: int = 0) -> ThreadParts[Any]:
        """Return the parts of the model's answer to one item, as they come.

        Use it as `with s.predict_stream(x) as parts: for part in parts: ...`. The request is made
        when the block is entered, and cancelled if the block is left before the answer is complete.
        Errors are raised where the next part is taken. Of a model that returns whole answers, the
        answer is the only part.

        Args:
            x: The item; see `predict`.
            timeout_s: The longest time until the answer is complete, in seconds. The service's own
                bounds each silence: before the first part, and between parts.
            priority: See `predict`.

        Raises:
            CarpoolError: See `predict`.
            RuntimeError: See `predict`.
            ValueError: `timeout_s` or `priority` is out of range.
        """
        return self._parts_of(self._inner.new_stream(x, timeout_s, priority))

    def _parts_of(self, request: Request) -> ThreadParts[Any]:
        self._refuse_own_thread("asked")
        assert self._thread is not None
        return ThreadParts(self._thread, self._inner.running_driver, request, self.service.timeout_s, self)

    def _predict_in_parts(
        self, x: Any, timeout_s: float | None, priority: int, on_part: Callable[[Any], object]
    ) -> Any:
        collects = self.service.gives.collects
        with self._parts_of(self._inner.new_stream(x, timeout_s, priority, is_told_both=collects)) as parts:
            got = []
            for part in parts:
                on_part(part)
                got.append(part)
            return parts.whole(got)

    def stream(
        self, xs: Iterable[Any], *, max_in_flight: int | None = None, return_exceptions: bool = False
    ) -> Iterator[Any]:
        """Yield the answers to many items, in the order of the items.

        Args:
            xs: The items, read one by one as there is room, by a thread of the stream. Each is
                copied when it is read, so the input may use one buffer again and again.
            max_in_flight: The largest number of items inside at a time. Defaults to what keeps all
                workers busy. No more are read while 16 MiB of results wait to be taken.
            return_exceptions: Whether an item's error is yielded in place of its answer. Otherwise
                it is raised, which ends the stream.

        Raises:
            CarpoolError: See `predict`.
            RuntimeError: See `predict`.
            ValueError: `max_in_flight` is not a whole number of at least 1.
        """
        inner = self._inner
        window = inner.window(max_in_flight)
        driver = inner.running_driver
        self._refuse_own_thread("asked")
        assert self._thread is not None
        stream = ThreadStream(self._thread, driver, self.service.timeout_s, window, inner.weigh)
        return stream.run(xs, return_exceptions, self)

    def scale(self, stage: str, workers: int | tuple[int, int], *, grace_s: float = GRACE_OF_STREAMS_S) -> None:
        """Change the number of workers of a stage while it runs; see `AsyncHandle.scale`."""
        self._on_its_loop(lambda: self._inner.scale(stage, workers, grace_s=grace_s))

    def reload(self, *, rolling: bool = False, grace_s: float = GRACE_OF_STREAMS_S) -> None:
        """Replace all workers by new ones, which load anew; see `AsyncHandle.reload`."""
        self._on_its_loop(lambda: self._inner.reload(rolling=rolling, grace_s=grace_s))

    def _on_its_loop(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        assert self._inner.running_driver
        self._refuse_own_thread("changed")
        assert self._thread is not None
        try:
            self._thread.run(work())
        except CancelledError:  # the loop has ended before it was done
            raise Unavailable("the service was closed meanwhile", code="stopped") from None

    def stats(self) -> ServiceSnapshot:
        """Return the figures of the service so far, even after it was closed.

        Raises:
            RuntimeError: The service has not been started, or was started by another process.
            DeadlineExceeded: The service's loop was blocked for longer than its `timeout_s`.
        """
        if self._thread is None or self._thread.is_parents or self._inner.state is LifeState.FORKED:
            raise self._inner._life.refusal()
        most_s = self.service.timeout_s + GRACE_S
        try:
            return self._thread.ask(self._inner.stats, most_s)  # it reads policies, which belong to the loop
        except TimeoutError as error:
            raise DeadlineExceeded(NO_ANSWER) from error

    def story(self, request_id: int | None = None) -> list[Entry]:
        """Return the events of a request, in order; empty without a `journal_size`.

        Args:
            request_id: The number of the request; a service counts them from 1 as they come. None
                for the one that came last.
        """
        return self._inner.story(request_id)

    def _end(self, drain: bool) -> None:
        thread, running = self._thread, self._inner._running
        assert thread is not None
        thread.post(partial(running.begin_to_end, drain))
        try:
            thread.wait_until_ended(max(self.service.timeout_s, _SILENT_S) + GRACE_S)
        except TimeoutError:
            running.kill_processes()
            raise DeadlineExceeded(NO_ANSWER) from None

    def _refuse_own_thread(self, what: str) -> None:
        if self._thread is not None and get_ident() == self._thread.ident:
            raise RuntimeError(
                f"the service cannot be {what} in the thread of its own loop, which would wait for itself:"
                " async models, sinks and size= functions must not call their own service's handle"
            )
