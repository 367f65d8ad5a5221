"""The virtual driver: the same core under a clock that jumps, with stub workers of given costs.

It has a heap of events instead of a loop, so a minute of traffic takes no longer than its
decisions. All events of one moment are delivered before anything is decided, as in one turn of a
real loop; arrivals that are known to come in order are drawn one by one from a feed and never enter
the heap.

A worker of a stage of steps reads orders between two steps as a real one does; starting and
stepping take the seconds that the costs say.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from math import inf
from typing import Any, NamedTuple, Protocol

from carpool.engine.clock import VirtualClock
from carpool.engine.core.batch import Batch, Reply
from carpool.engine.core.core import Core
from carpool.engine.core.running_set import (
    END,
    EVERY_STEP,
    FAILED,
    LAST,
    MORE,
    ON_LEAVING,
    Order,
    Parts,
    SetReport,
    stream_of,
)
from carpool.engine.core.stepper import Crew, Stepper
from carpool.engine.foreign import named_text_of, traceback_of
from carpool.engine.request import Request
from carpool.errors import CarpoolError, ModelError

Answer = Callable[[Any], Iterable[object]]
"""Returns the parts of the answer to an item. None among them stands for a step that makes no part
of it, an exception for the failure of the stream."""


class StepCosts(NamedTuple):
    """What a stage of steps costs, and answers.

    Attributes:
        start_s: Seconds of starting streams, by the sum of their lengths.
        step_s: Seconds of a step, by the number of streams stepped.
        answer: Returns the parts of the answer to an item; a stream that is resumed goes on behind
            those that it has made. By default an item is their number.
    """

    start_s: Callable[[int], float]
    step_s: Callable[[int], float]
    answer: Answer = range


class _State:
    """One stream in a worker: the parts still to come, the next of them, and those so far of one
    that is collected.
    """

    __slots__ = ("collected", "following", "parts", "request")

    def __init__(self, request: Request, answer: Answer) -> None:
        stream = stream_of(request)
        self.request = request
        self.parts: Iterator[object] = iter(answer(request.item))
        self.collected: list[object] = []
        for _ in stream.kept:
            next(part for part in self.parts if part is not None)
        self.following = next(self.parts, _END)

    def advance(self) -> tuple[int, object] | None:
        """Return what one more step makes of the stream, and of which kind; None for nothing."""
        part, self.following = self.following, next(self.parts, _END)
        is_last = self.following is _END
        if isinstance(part, Exception):
            return FAILED, part
        value = None if part is _END else part
        if stream_of(self.request).is_collected:
            if value is not None:
                self.collected.append(value)
            return (LAST, self.collected) if is_last else None
        if value is None:
            return (END, None) if is_last else None
        return LAST if is_last else MORE, value


_END = object()


class VirtualStepWorker:
    """One worker of a stage of steps, which has events happen by `at`.

    Attributes:
        steps: How many steps it has made.
        rows: The sum of the streams that it has stepped in them.
    """

    def __init__(
        self,
        stage: int,
        place: int,
        costs: StepCosts,
        at: Callable[[float, Callable[[], None]], None],
        report: Callable[[SetReport], None],
    ) -> None:
        self.steps = 0
        self.rows = 0
        self._stage = stage
        self._place = place
        self._costs = costs
        self._at = at
        self._report = report
        self._orders: deque[Order] = deque()
        self._states: dict[int, _State] = {}
        self._resting: dict[int, _State] = {}
        self._seen = 0
        self._stop_when = 0
        self._is_busy = False
        self._is_lost = False

    def take(self, now: float, order: Order) -> None:
        self._orders.append(order)
        if not self._is_busy:
            self._go_on(now)

    def lose(self) -> None:
        self._is_lost = True

    def _go_on(self, now: float) -> None:
        length = joined = 0
        while self._orders:
            order = self._orders.popleft()
            length += self._follow(order)
            joined += len(order.join)
        self._is_busy = True
        start_s = self._costs.start_s(length) if joined else 0.0
        n = len(self._states)
        step_s = self._costs.step_s(n) if n else 0.0
        ends_at = now + start_s + step_s
        self._at(ends_at, lambda: self._end_step(ends_at, step_s, length, start_s))

    def _follow(self, order: Order) -> int:
        states, resting = self._states, self._resting
        self._seen, self._stop_when = order.number, order.stop_when
        for id in order.leave:
            states.pop(id, None)
            resting.pop(id, None)
        length = 0
        for request in order.join:
            stream = stream_of(request)
            states[request.id] = _State(request, self._costs.answer)
            length += stream.length + len(stream.kept)
        for ids, before, after in ((order.pause, states, resting), (order.resume, resting, states)):
            for id in ids:
                if id in before:
                    after[id] = before.pop(id)
        return length

    def _end_step(self, now: float, step_s: float, length: int, start_s: float) -> None:
        if self._is_lost:
            return
        states = self._states
        n = len(states)
        said = [(id, *made) for id, state in states.items() if (made := state.advance()) is not None]
        parts = Parts(*zip(*said, strict=True))
        ended = [id for id, kind, _ in said if kind != MORE]
        for id in ended:
            del states[id]
        if n:
            self.steps += 1
            self.rows += n
        stops = not states or self._stop_when == EVERY_STEP or (self._stop_when == ON_LEAVING and len(ended) > 0)
        report = SetReport(self._stage, self._place, self._seen, stops, parts, n, step_s, length, start_s)
        if self._orders or not stops:
            self._go_on(now)
        else:
            self._is_busy = False
        self._report(report)


Cost = Callable[[int], float]
"""Returns the seconds that a batch of n requests takes."""

BatchCost = Callable[[Batch, float], float]
"""Returns the seconds that a batch takes if it is handed over now, to a worker of `batch.stage`."""

Compute = Callable[[list[Any]], Sequence[Any]]
"""Returns a stub worker's results for the items of a batch.

An exception in the place of a result fails its item: a `CarpoolError` as it is, any other as the
cause of a `ModelError`.
"""

TICK_S = 1e-6  # no timer of a real loop is finer; a policy that asks to be woken at once cannot stop the clock


class Watcher(Protocol):
    """Watches what is done, so that the driver need not keep it all."""

    def started(self, now: float, batch: Batch, busy_s: float) -> None:
        """Take note that a batch, which takes `busy_s` seconds, was handed over."""

    def answered(self, now: float, requests: Sequence[Request]) -> None:
        """Take note of requests that are answered or refused; their callers come next."""


class VirtualDriver:
    """Drives a core in virtual time.

    Args:
        core: Decides.
        costs: Per stage the seconds of a batch of n; or one function of the batch and the time, for
            all stages.
        workers: Per stage how many there are; all are ready at once. One each if not given.
        computes: Per stage what they answer; the items themselves if not given.
        hop_s: Seconds that a batch spends on its way to the worker and back, on top of its cost,
            unless it went ahead.
        hop_item_s: Seconds for which each unit of its size does so besides, half of it there and
            half back; one that went ahead was there in time.
        turn_s: Seconds from an event to what is done about it, shared by the events meanwhile; a
            reply that finds a full batch waiting, or no request, cuts them short.
        watcher: Watches batches and answers; without one they are kept in `batches` and `answers`.
        turns: Returns which results of a batch say themselves where they go, see `Reply.turns`;
            none do if it is not given.
        steps: What the last stage costs and answers, if it is one of steps; `costs` then holds
            those of the stages before it.

    Attributes:
        core: Decides.
        clock: The virtual time.
        batches: Every batch that was run, in order.
        answers: Every request that was answered, in order.
        wake_ups: How often the core was asked only because time had passed.
        step_workers: The workers of a stage of steps, by place.
        drained: Called with the stage and the place of a worker that was to go and has gone.
        completed: Called with each batch that is done and the seconds that it took.
    """

    def __init__(
        self,
        core: Core,
        costs: Sequence[Cost] | BatchCost,
        workers: Sequence[int] | None = None,
        computes: Sequence[Compute] | None = None,
        *,
        hop_s: float = 0.0,
        hop_item_s: float = 0.0,
        turn_s: float = 0.0,
        watcher: Watcher | None = None,
        turns: Callable[[Batch], Mapping[int, object] | None] | None = None,
        steps: StepCosts | None = None,
    ) -> None:
        stages = range(len(core.crews))
        self.core = core
        self.clock = VirtualClock()
        self.batches: list[Batch] = []
        self.answers: list[Request] = []
        self.wake_ups = 0
        self._cost = costs if callable(costs) else lambda batch, now: costs[batch.stage](len(batch))
        self._computes = computes
        self._hop_s = hop_s
        self._hop_item_s = hop_item_s
        self._turn_s = turn_s
        self._watcher = watcher or _Keeper(self)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._feed: Iterator[tuple[float, Request]] = iter(())
        self._next: Request | None = None  # the next one of the feed
        self._next_at = inf
        self._arrivals: list[Request] = []  # in this turn
        self._has_news = True  # anything has happened since the last poll
        self._wake_at = 0.0
        self._busy: dict[tuple[int, int], Batch] = {}
        self._ahead: dict[tuple[int, int], list[Batch]] = {}
        self._turns = turns or (lambda batch: None)
        self._steps = steps
        self._stage_of_steps = -1  # if there is one
        self.step_workers: dict[int, VirtualStepWorker] = {}
        self.drained: Callable[[int, int], None] = lambda stage, place: None
        self.completed: Callable[[Batch, float], None] = lambda batch, busy_s: None
        self._places = [itertools.count() for _ in stages]
        self._coming: set[tuple[int, int]] = set()  # (stage, place) of workers that are not ready yet
        for stage, n in zip(stages, workers or [1] * len(stages), strict=True):
            for _ in range(n):
                self._make_ready(stage, next(self._places[stage]))

    def at(self, when: float, event: Callable[[], None]) -> None:
        """Have an event happen at `when`; those of one moment happen in the order of the calls."""

        def happen() -> None:
            event()
            self._notice()

        self._at(when, happen)

    def submit(self, item: Any, timeout_s: float = inf, **attributes: Any) -> Request:
        """Have a new request arrive now, and return it.

        Args:
            item: The request's.
            timeout_s: How long it may take.
            attributes: Set on the request, such as `lane`, `patient`, `nbytes` or `caller`.
        """
        request = _made(item, self.clock.now + timeout_s, attributes)
        self.enter(request)
        return request

    def arrive(self, when: float, item: Any, timeout_s: float = inf, **attributes: Any) -> Request:
        """Have a new request arrive at `when`, and return it."""
        request = _made(item, when + timeout_s, attributes)
        self.at(when, lambda: self.enter(request))
        return request

    def enter(self, request: Request) -> None:
        """Have an existing request arrive now."""
        self._arrivals.append(request)
        self._notice()

    def feed(self, requests: Iterable[tuple[float, Request]]) -> None:
        """Have requests arrive, each at its time; the times rise.

        A request is drawn when the one before it has arrived.
        """
        self._feed = iter(requests)
        self._next_at, self._next = next(self._feed, (inf, None))

    def lose(self, stage: int, place: int, back_after_s: float = 0.0) -> None:
        """Have a worker die now, with its batches; its successor is ready `back_after_s` later."""
        self._busy.pop((stage, place), None)
        self._ahead.pop((stage, place), None)
        if stage == self._stage_of_steps:
            self.step_workers.pop(place).lose()
        self.core.worker_lost(self.clock.now, stage, place)
        self._notice()
        self.at(self.clock.now + back_after_s, lambda: self._make_ready(stage, place))

    def add(self, stage: int, after_s: float = 0.0) -> int:
        """Have one more worker be ready `after_s` seconds from now, and return its place."""
        place = next(self._places[stage])
        self._coming.add((stage, place))
        self.at(self.clock.now + after_s, lambda: self._has_come(stage, place))
        return place

    def drain(self, stage: int, place: int) -> None:
        """Have a worker get nothing more from now on; it goes when it has finished what it has."""
        if (stage, place) in self._coming:
            self._coming.remove((stage, place))
            self.drained(stage, place)
            return
        self.core.drain(stage, place)
        self._notice()

    def _has_come(self, stage: int, place: int) -> None:
        if (stage, place) in self._coming:
            self._coming.remove((stage, place))
            self._make_ready(stage, place)

    def recycle(self, place: int) -> None:
        """Replace a worker of the stage of steps now, in the midst of its streams."""
        stage = len(self.core.crews) - 1
        self.step_workers.pop(place).lose()
        self.core.worker_left(self.clock.now, stage, place)
        self._make_ready(stage, place)
        self._notice()

    def run(self, until: float = inf) -> None:
        """Let time pass until nothing is left to happen, or up to `until`."""
        clock, events = self.clock, self._events
        while True:
            when = self._wake_at if self._wake_at < self._next_at else self._next_at
            if events and events[0][0] < when:
                when = events[0][0]
            if when > until or when == inf:
                break
            if when > clock.now:
                clock.now = when
            if self._next_at <= when:
                self._draw(when)
            while events and events[0][0] <= when:
                heapq.heappop(events)[2]()
            if self._wake_at <= when:
                self._poll(clock.now)
        if until != inf:
            clock.advance_to(until)

    def _make_ready(self, stage: int, place: int) -> None:
        if isinstance(self.core.crews[stage], Stepper):
            self._stage_of_steps = stage
            if self._steps is None:
                raise ValueError("the last stage is one of steps: give its costs as `steps`")
            self.step_workers[place] = VirtualStepWorker(stage, place, self._steps, self._at, self._reported)
        self.core.worker_ready(stage, place)

    def _reported(self, report: SetReport) -> None:
        self.core.reported(self.clock.now, report)
        self._notice()
        if report.stopped and self._turn_s:
            self._poll(self.clock.now)

    def _at(self, when: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (when, next(self._order), event))

    def _notice(self) -> None:
        self._has_news = True
        end = self.clock.now + self._turn_s
        if end < self._wake_at:
            self._wake_at = end

    def _draw(self, until: float) -> None:
        arrivals, feed = self._arrivals, self._feed
        while self._next is not None and self._next_at <= until:
            arrivals.append(self._next)
            self._next_at, self._next = next(feed, (inf, None))
        self._notice()

    def _poll(self, now: float) -> None:
        core = self.core
        if self._has_news:
            self._has_news = False
            if self._arrivals:
                core.flow.submit(now, self._arrivals)
                self._arrivals.clear()
        else:
            self.wake_ups += 1
        todo = core.poll(now)
        self._wake_at = todo.wake_at if todo.wake_at > now else now + TICK_S
        for batch in todo.run:
            if batch.ahead:
                self._ahead.setdefault((batch.stage, batch.place), []).append(batch)
            else:
                self._run(now, batch, self._hop_s + self._hop_item_s * batch.size)
        for order in todo.orders:
            self.step_workers[order.place].take(now, order)
        for stage, place in todo.kill:
            self.lose(stage, place)
        for stage, place in todo.drained:
            if stage == self._stage_of_steps:
                del self.step_workers[place]
            self.drained(stage, place)
        for request, part in todo.parts:
            request.tell_part(part)
        if todo.answer:
            self._watcher.answered(now, todo.answer)
            for request in todo.answer:
                if request.caller is not None:
                    request.caller.answered(request)

    def _run(self, now: float, batch: Batch, hop_s: float) -> None:
        busy_s = self._cost(batch, now)
        self._busy[batch.stage, batch.place] = batch
        self._watcher.started(now, batch, busy_s)
        self._at(now + hop_s + busy_s, lambda: self._complete(batch, busy_s))

    def _complete(self, batch: Batch, busy_s: float) -> None:
        if self._busy.get((batch.stage, batch.place)) is not batch:
            return  # the worker was lost meanwhile
        del self._busy[batch.stage, batch.place]
        results: Sequence[Any] = [request.item for request in batch.requests]
        errors: dict[int, Exception] | None = None
        if self._computes is not None:
            results = self._computes[batch.stage](list(results))
            errors = {i: _shown(y) for i, y in enumerate(results) if isinstance(y, BaseException)} or None
        reply = Reply(batch.stage, batch.place, batch.id, batch.ids, results, errors, busy_s, turns=self._turns(batch))
        self.completed(batch, busy_s)
        self.core.completed(self.clock.now, reply)
        if behind := self._ahead.get((batch.stage, batch.place)):
            following = behind.pop(0)  # it lay with the worker before the reply left
            self._run(self.clock.now, following, 0.5 * self._hop_item_s * following.size)
        self._replied(self.core.crews[batch.stage])

    def _replied(self, crew: Crew) -> None:
        """Poll as `Driver.completed` does after a reply."""
        is_idle = not self._has_news and not self.core.waiting
        self._notice()
        if self._turn_s and (is_idle or crew.queue.size >= crew.lobby.batch_limit):
            self._poll(self.clock.now)


def _made(item: Any, deadline: float, attributes: Mapping[str, Any]) -> Request:
    request = Request(item, deadline)
    for name, value in attributes.items():
        setattr(request, name, value)
    return request


def _shown(error: BaseException) -> CarpoolError:
    if isinstance(error, CarpoolError):
        return error
    shown = ModelError(named_text_of(error), type_name=type(error).__name__, traceback=traceback_of(error))
    shown.__cause__ = error
    return shown


class _Keeper:
    def __init__(self, driver: VirtualDriver) -> None:
        self._driver = driver

    def started(self, now: float, batch: Batch, busy_s: float) -> None:
        self._driver.batches.append(batch)

    def answered(self, now: float, requests: Sequence[Request]) -> None:
        self._driver.answers += requests
