"""A worker of a stage of steps under a clock that jumps; it steps its set as a real one does.

The parts are what the user's function makes of an item; starting and stepping take what the costs
say. Between two steps the worker reads what orders there are, and it waits for one only if it has
stopped.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

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
from carpool.engine.request import Request

Answer = Callable[[Any], Iterable[object]]
"""Returns the parts of the answer to an item. None among them stands for a step that makes no part
of it, an exception for the failure of the stream."""


class StepCosts(NamedTuple):
    """What a stage of steps costs, and answers.

    Attributes:
        start_s: Seconds of starting streams, by the sum of their lengths.
        step_s: Seconds of a step, by the number of streams stepped.
        answer: Returns the parts of the answer to an item; a stream that is resumed goes on behind
            those that it has made. By default an item is the number of its parts.
    """

    start_s: Callable[[int], float]
    step_s: Callable[[int], float]
    answer: Answer = range


class _State:
    """One stream in a worker.

    Attributes:
        request: The request.
        parts: Those that are still to come.
        following: The next part; None at the end.
        collected: The parts so far of one that is collected.
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
    """One worker of a stage of steps.

    Args:
        stage: The position of its stage.
        place: Its own position in the stage.
        costs: What starting and stepping take, and what is answered.
        at: Has an event happen at a time.
        report: Takes its reports.

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
        self._ask = 0
        self._is_busy = False
        self._is_lost = False

    def take(self, now: float, order: Order) -> None:
        """Take an order, which is followed at the next boundary."""
        self._orders.append(order)
        if not self._is_busy:
            self._go_on(now)

    def lose(self) -> None:
        """Die, with all that has not been reported."""
        self._is_lost = True

    def _go_on(self, now: float) -> None:
        """Follow the orders that are there, and begin a step."""
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
        """Do what an order says, and return the length of what it has started."""
        states, resting = self._states, self._resting
        self._seen, self._ask = order.number, order.ask
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
        """Report a step, and go on if the last order allows for it."""
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
        stops = not states or self._ask == EVERY_STEP or (self._ask == ON_LEAVING and len(ended) > 0)
        report = SetReport(self._stage, self._place, self._seen, stops, parts, n, step_s, length, start_s)
        if self._orders or not stops:
            self._go_on(now)
        else:
            self._is_busy = False
        self._report(report)
