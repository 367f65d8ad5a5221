"""The stepper of a stage that answers in parts: a queue, a policy, a running set for each worker.

A worker steps its set without being asked; each step makes a part for every stream of the set, or
for some. An `Order` (who leaves, joins, pauses, goes on) takes effect at the worker's next
boundary, which lies between two steps, and a `SetReport` follows each step. A stream is a `Request`
whose slot `stream` holds a `Stream`; ids are those of requests, `place` is that of the worker.

Promises, whatever the policy says:

* no set is above its limits (`rows` streams, `limit` units that they may come to hold), from the
  order that joins to the report that ends; one that is larger than the limit runs alone;
* a part counts only for a stream of that worker's set, and nothing comes after an end;
* no stream joins after its deadline;
* a stream that has left is out before the next step that has not begun;
* a stream that has had parts runs again only where the model can resume it.

The calls, which `core/core.py` makes for drivers (events first, then what to do):

    Stepper(name, policy, queue, *, rows, limit=inf, resumable=False, silence_s=inf,
            max_stream_s=inf, max_batch_time_s=inf, patience_s=inf, idempotent=True, weigh=None,
            measure=None)
    enter(now, requests)                          # Flow.submit(now, requests)
    leave(now, request), abandon(now, request)    # Core.cancel(now, request)
    pause(now, request, is_paused)                # Core.pause(now, request, is_paused)
    reported(now, report) -> (parts, ended)       # Core.reported(now, report)
    worker_ready(place)                           # Core.worker_ready(stage, place)
    worker_gone(now, place, unsent) -> Lost       # Core.worker_lost, Core.worker_left
    drain(place), is_empty(place)                 # Core.drain(stage, place); see `Todo.drained`
    trained_steps(now, rows, step_s, length, start_s)  # Core.trained_steps(...); a warm-up
    poll(now, refuse)                             # Core.poll(now); see `Todo`

    Order(stage, place, number, join, leave, pause, resume, ask)
    SetReport(stage, place, seen, stopped, parts, rows, step_s, length, start_s, returned)
    Part(id, value, last, error)

What a worker does with an order: those that leave are stopped, those that join are started
(`start`, or `resume` with `request.stream.kept` where that is not empty) in one call, then pauses
and resumptions are noted, then it steps all that do not pause. It reports after each step. An
order that leaves it nothing to step is reported too, with `rows` = 0 and `stopped`. What it does
after a step depends on the `ask` of the last order that it has seen: `GO_ON` (run ahead),
`ON_LEAVING` (stop for the next order if a stream has ended in this step) or `EVERY_STEP` (always
stop). It also stops when it has nothing to step. A worker that has stopped reads orders until it
has something to step; the coordinator answers a report with `stopped` at once.

When memory runs out, a worker stops the newest half of its streams (where it cannot resume, those
without parts first) and names them as `returned`; a stream that runs out alone fails instead.

A stream with `is_collected` hands on no parts: its worker keeps them and sends the whole answer as
the value of one `Part` with `last`. If its worker is lost it starts again, as nothing of it has
been told.

It has three layers, and each knows only those before it: where streams are
(`core/stage_streams.py`), what workers report (`core/step_reports.py`), and who joins and what is
ordered, which is this file.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from math import inf
from typing import Final

from carpool.core.graph import Node
from carpool.core.lane_order import key_of
from carpool.core.running_set import EVERY_STEP, GO_ON, ON_LEAVING, Order, RunningSet, stream_of
from carpool.core.step_reports import StepReports
from carpool.policy.base import TOO_LATE
from carpool.request import Lane, Request

_STOP_S: Final = 150e-6  # what it costs that a worker stops for its next order
_STOP_SHARE: Final = 0.05  # of a step, which a stop may cost


class Stepper(StepReports):
    """One stage's decisions, where requests join and leave a running set at every step.

    It is a batcher for the pipeline, and has no batches: `next_batch` writes orders.

    A stream whose worker was lost runs again on probation: alone, for its start and one step, while
    all others of the set rest. So only that stream is to blame if a second worker is lost. If it
    has to make steps again of which no part tells, and a second worker is lost with it in company
    as it has just made them, it makes all of them alone (`RunningSet.note_loss`), unless another
    stream is found guilty meanwhile.

    Its arguments are those of `StageStreams`.
    """

    def __repr__(self) -> str:
        return f"<Stepper {self.name} queued={len(self.queue)} running={self._running} sets={len(self.sets)}>"

    # -- what to do

    def next_batch(
        self, now: float, room: float, dropped: list[tuple[Request, str]], rooms: Mapping[Node, float] | None = None
    ) -> None:
        """Write the orders of this poll, which `take_orders` returns; there are no batches."""
        self.poll(now, dropped)

    def poll(self, now: float, refuse: list[tuple[Request, str]]) -> None:
        """Let requests join, and write the orders that are to be sent.

        Args:
            now: The time.
            refuse: The requests that cannot be in time are appended here, and why.
        """
        self.wake_at = None
        if self.queue.count:
            self._refuse_late(now, refuse)
            self._let_in(now)
            due = self.queue.earliest_due
            self.wake_at = due if now < due < inf else None
        for running in self.sets.values():
            if running.is_clearing and not self._has_suspect_waiting:
                running.is_clearing = False
                running.is_restless = True
            self._write_order(now, running)

    def take_orders(self) -> list[Order]:
        """Return the orders that are to be sent, once."""
        orders, self.orders = self.orders, []
        return orders

    def _refuse_late(self, now: float, refuse: list[tuple[Request, str]]) -> None:
        """Drop the queued requests whose first parts cannot come in time any more.

        Where nothing runs, one is let through all the same: what it takes may have been learned
        wrongly, and this is how that is noticed.
        """
        try:
            late = self._find_late(now)
        except BaseException as error:
            self._failed(error)
            return
        if late and not self._running:
            del late[0]
        if late:
            self.drop(now, late)
            refuse += [(request, TOO_LATE) for request in late]

    def _find_late(self, now: float) -> list[Request]:
        """Return the queued requests whose first parts cannot come in time any more."""
        queue, policy = self.queue, self.policy
        horizon = now + policy.first_part_s(self._longest)
        if queue.earliest_due >= horizon:
            return []
        late: list[Request] = []
        has_one_lane = queue.lanes == 1
        for request in queue:
            if request.due >= horizon:
                if has_one_lane:
                    break
            elif not stream_of(request).parts and policy.is_late(now, request):
                late.append(request)
        return late

    @property
    def _has_suspect_waiting(self) -> bool:
        return self.queue.suspect_lanes > 0 and self.queue.next_is_suspect

    def _let_in(self, now: float) -> None:
        """Have requests join running sets, the emptiest set first.

        Where workers hold one stream each, none is sent behind a step that is still made for one
        that has left: another worker may be free before that one is.
        """
        may_wait = self.rows == 1 and len(self.sets) > 1
        open_sets = [running for running in self.sets.values() if running.is_open]
        if len(open_sets) > 1:
            open_sets.sort(key=_by_room)
        for running in open_sets:
            if not self.queue.count:
                break
            if self._has_suspect_waiting:
                self._try_suspect(now, running)
            elif not running.is_clearing and not (may_wait and running.owes_report):
                self._join(now, running, self._ask_policy(now, running))

    def _ask_policy(self, now: float, running: RunningSet) -> int:
        """Return how many requests join a set."""
        heads = self._heads(running)
        if not heads:
            return 0
        try:
            n = operator.index(self.policy.join(now, heads, running))
            if not 0 <= n <= len(heads):
                raise RuntimeError(f"{self._whose_policy} has {n} of {len(heads)} requests join a set")
        except BaseException as error:
            self._failed(error)
            n = len(heads)
        if not n and self.closing and not running.members:
            return len(heads)
        return n

    def _heads(self, running: RunningSet) -> list[Request]:
        """Return as many of the next requests as a set has room for."""
        room = self.rows - len(running.members)
        if room <= 0:
            return []
        heads = self.queue.peek(room)
        if running.members and not _may_share(running, heads[0].lane):
            return []
        if self.limit == inf and self.safe_size.limit == inf:
            return heads
        n = _fitting(running, heads, self.limit)
        size = running.size + sum([request.size for request in heads[:n]])
        if n and size > self.safe_size.limit:
            n = _fitting(running, heads[:n], self._safe_limit(size))
        return heads[:n]

    def _safe_limit(self, size: int) -> float:
        """Return how large a set may become that would become `size`, above what is known to fit.

        Now and then it may grow further than that; this is judged once for each stream that ends.
        """
        if self._judged_ends == self._ends or any(running.untested for running in self.sets.values()):
            return self.safe_size.limit
        self._judged_ends = self._ends
        return self.safe_size.allowed(size)

    def _try_suspect(self, now: float, running: RunningSet) -> None:
        """Have the next request, which is under suspicion, join a set on probation.

        No other stream of the set may be running then, so the set is cleared first: an order has
        all others rest, and once the worker has followed it the suspect joins.
        """
        (suspect,) = self.queue.peek(1)
        members = running.members
        if members:
            size = running.size + suspect.size
            is_full = len(members) >= self.rows or size > min(self.limit, self.safe_size.limit)
            if is_full or not _may_share(running, suspect.lane):
                running.is_restless = running.is_restless or running.is_clearing
                running.is_clearing = False
                return
        if running.owes_report:
            running.is_restless = running.is_restless or not running.is_clearing
            running.is_clearing = True
            return
        running.is_clearing = False
        running.is_restless = True
        self._join(now, running, 1)
        running.suspect = suspect
        running.suspected_by = running.number + 1

    def _join(self, now: float, running: RunningSet, n: int) -> None:
        """Have the next `n` requests of the queue join a set."""
        if not n:
            return
        for request in self.queue.take(n, now):
            stream = stream_of(request)
            stream.place = running.place
            stream.joined = now
            stream.first_step, stream.first_parts = -1, stream.parts
            running.members[request.id] = request
            running.size += request.size
            running.starting += stream.length + stream.parts
            running.to_join.append(request)
            if stream.kept:
                self.resumed += 1
            if stream.is_paused:
                running.is_restless = True
                request.deadline = stream.until
        self._running += n
        if not running.owes_report:
            running.unwanted_since = inf
        if running.size > self.safe_size.limit:
            running.untested = running.size

    def _write_order(self, now: float, running: RunningSet) -> None:
        """Write the order to a worker, if there is something to tell it."""
        pause: list[int] = []
        resume: list[int] = []
        if running.is_restless:
            running.change_rests(pause, resume)
        ask = self._ask_for(running)
        has_news = running.to_join or running.to_leave or pause or resume
        if not has_news and not (running.active and (running.is_stopped or ask != running.ask)):
            return
        if not running.owes_report:
            running.heard = now
        running.number += 1
        running.is_stopped = False
        running.ask = ask
        order = Order(self.stage, running.place, running.number, running.to_leave, running.to_join, pause, resume, ask)
        if order.join or pause or resume:
            running.unfollowed.append(order)
        self.orders.append(order)
        running.to_leave, running.to_join = [], []
        look_at = now + self.times.least_s
        if look_at < self.attention_at:
            self.attention_at = look_at

    def _ask_for(self, running: RunningSet) -> int:
        """Return what a worker is to do after its next step: see `Order.ask`.

        While others wait it stops, so that they can join one step earlier, if a stop costs little
        of a step; where no row is free, they have to wait until a stream has ended.
        """
        if running.suspect is not None:
            return EVERY_STEP
        if not self.queue.count or not running.is_open:
            return GO_ON
        if len(running.members) >= self.rows or self.step_s * _STOP_SHARE < _STOP_S:
            return ON_LEAVING
        return EVERY_STEP


def _by_room(running: RunningSet) -> tuple[bool, int, int, bool]:
    """Return the key by which the emptiest set comes first, after one that is being cleared.

    Of equally empty sets those come first of which no step is under way: one that a stream has just
    left may be busy for long with a step for nobody.
    """
    return not running.is_clearing, running.size, len(running), running.owes_report


def _fitting(running: RunningSet, heads: Sequence[Request], limit: float) -> int:
    """Return how many requests fit into a set; the first one always does into an empty set."""
    n, size = 0, running.size
    for request in heads:
        size += request.size
        if size > limit and (n or running.members):
            break
        n += 1
    return n


def _may_share(running: RunningSet, lane: Lane) -> bool:
    """Report whether requests of a lane may share a set with those that it has."""
    own = next(iter(running)).lane
    return key_of(own) == key_of(lane) and own.bucket == lane.bucket
