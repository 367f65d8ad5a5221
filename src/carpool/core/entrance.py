"""The way into a pipeline: new requests are admitted, wait at the door for room, or are refused.

They come in lots. A lot is what one caller waits for as a whole, mostly a single request; it is
admitted as a whole.

Only the first stage has a door. Those that wait there are patient requests for which the first
queue had no room. A request of a higher priority may displace some of a full queue: they are
refused after all, or go back to the door.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from math import inf

from carpool.core.endings import Endings
from carpool.core.journal import Journal
from carpool.core.lobby import is_late_unserved
from carpool.core.queue import Queue
from carpool.core.stepper import Crew
from carpool.core.trail import AT_THE_DOOR
from carpool.errors import CarpoolError, Overloaded
from carpool.policy.admission import DISPLACED, UNSERVED_RETRY_S, Admission, overloaded, retry_after_s
from carpool.policy.base import TOO_LATE
from carpool.request import NEW, QUEUED, RUNNING, Request

NOBODY: Sequence[Request] = ()


class Entrance:
    """Admits requests to the first stage.

    Args:
        batchers: Of all stages, first to last.
        endings: Ends what is refused.
        slo_s: How soon after their admission requests are due; infinity leaves it at their
            deadlines.
        journal: Records what happens to each request, if given.

    Attributes:
        admitted: How many requests have been admitted; also the id of the last one.
        door: The requests that wait for room; it has no limit but the number of callers.
    """

    def __init__(self, batchers: Sequence[Crew], endings: Endings, slo_s: float, journal: Journal | None) -> None:
        self.admitted = 0
        self.door = Queue()
        self._batchers = batchers
        self._first = batchers[0]
        self._endings = endings
        self._slo_s = slo_s
        self._journal = journal
        self._admission = Admission(self._first.queue.max_size, self._first.queue.max_bytes)

    # -- new requests

    def submit(self, now: float, requests: Sequence[Request], closed: CarpoolError | None, alike: bool) -> None:
        """Admit or refuse new requests, lot by lot: see `Pipeline.submit`.

        Args:
            now: The time.
            requests: In the order of their arrival; those that were cancelled before are passed
                over.
            closed: Why all of them are refused; None if the service is open.
            alike: Whether they are known to be new and alike.

        Raises:
            ValueError: One of them was submitted before; then none is taken.
        """
        if closed is None and self._all_fit(now, requests, alike):
            return
        _check_new(requests)
        for request in requests:
            if request.state == NEW:
                lot = request.companions
                self._admit(now, [each for each in lot if each.state == NEW] if lot else (request,), closed)

    def _all_fit(self, now: float, requests: Sequence[Request], alike: bool) -> bool:
        """Admit all requests at once, if all are new, there is room for all, and none may be late.

        Fast path of the rest of `submit`: the same outcome, see tests/core/test_fast_paths.py, for
        a sixth of its bytecodes where 64 come together, and a twentieth where they are alike, as
        only the first one is looked at then. All that is left of the attempt, if it returns False,
        is `admitted`, `arrived` and `due` of some requests, which `_admit` sets to the same values.
        """
        first = self._first
        queue, n = first.queue, len(requests)
        if queue.count + n > queue.max_size or self.door.count or self._journal is not None or not n:
            return False
        latest = now + self._slo_s
        soonest, nbytes = inf, 0
        id = before = self.admitted
        if alike:
            one = requests[0]
            soonest = one.deadline
            due = min(one.due, soonest, inf if one.bulk else latest)
            nbytes = sum([request.nbytes for request in requests])
            for request in requests:
                id += 1
                request.id = id
                request.admitted = request.arrived = now
            if due != one.due:
                for request in requests:
                    request.due = due
        else:
            for request in requests:
                if request.id or request.state:  # of which NEW is 0
                    break
                id += 1
                request.id = id
                request.admitted = now
                request.arrived = now
                deadline = request.deadline
                due = request.due
                if deadline < soonest:
                    soonest = deadline
                if deadline < due:
                    request.due = due = deadline
                if latest < due and not request.bulk:
                    request.due = latest
                nbytes += request.nbytes
        is_hurried = False
        if soonest != inf:
            units = n if alike else sum([request.size for request in requests])
            is_hurried = soonest - now < first.longest_wait_s(units) + first.lobby.view.onward_s
        if is_hurried or id - before < n or queue.nbytes + nbytes > queue.max_bytes:
            _clear_ids(requests[: id - before])
            return False
        self.admitted = id
        first.enter(now, requests, soonest, nbytes if alike else None)
        return True

    def _admit(self, now: float, lot: Sequence[Request], closed: CarpoolError | None) -> None:
        """Admit a lot to the first queue or to the door, or refuse it.

        The requests of a lot have one deadline. Only a single request displaces others. Patient
        ones that can fit at all come in one by one, as there is room.
        """
        self._stamp(now, lot)
        first, one, is_single = self._first, lot[0], len(lot) == 1
        has_room, give_way, refusal = True, NOBODY, closed
        if closed is None:
            if is_single and not first.queue.has_room(one.nbytes):
                has_room = False
                give_way = first.in_the_way(one)
            refusal = self._refusal(now, lot, give_way)
        if refusal is not None:
            is_own = is_single and refusal is not closed
            for request in lot:
                self._endings.refuse(request, refusal if is_own else copy.copy(refusal))
        elif one.patient and not is_single:
            for request in lot:
                self._admit(now, (request,), None)
        else:
            waits = is_single and not give_way and (self.door.count > 0 or not has_room)
            self._number(lot)
            for other in give_way:
                self._displace(now, other)
            if waits:
                one.stage = AT_THE_DOOR
                self.door.push(lot)
            else:
                first.enter(now, lot)
            if self._journal is not None:
                for request in lot:
                    self._journal.record(now, "waits for room" if waits else "admitted", request.id)

    def admit_lone(self, began: float, request: Request, id: int) -> None:
        """Admit a request that a worker has had since it `began`, under this id."""
        self._stamp(began, (request,))
        self.admitted += 1
        request.id = id
        request.state = RUNNING

    def _stamp(self, now: float, lot: Sequence[Request]) -> None:
        """Write on requests when they came, and when they are due."""
        for request in lot:
            request.admitted = request.arrived = now
            request.due = min(request.due, request.deadline, inf if request.bulk else now + self._slo_s)

    def _number(self, lot: Sequence[Request]) -> None:
        """Give requests their ids."""
        for request in lot:
            self.admitted += 1
            request.id = self.admitted

    def _refusal(self, now: float, lot: Sequence[Request], give_way: Sequence[Request]) -> CarpoolError | None:
        """Return why a lot must not join the first queue, or wait for room; None if it may.

        Args:
            now: The time.
            lot: The newcomers.
            give_way: The requests that would leave the queue for them.
        """
        first, last = self._first, lot[-1]
        queue = first.queue
        units_before: float = queue.ahead_of(last, now)
        if queue.weighted:
            units_before *= queue.size / queue.count
        outside, outside_bytes = self.door.count, self.door.nbytes  # no newcomer gets past them
        if give_way:
            outside = -len(give_way)
            outside_bytes = -sum([other.nbytes for other in give_way])
        units_before += max(0, outside)
        if len(lot) > 1:
            units_before += sum([request.size for request in lot]) - last.size
        refusal = self._admission.refusal(
            now,
            lot,
            queued=queue.count + outside,
            queued_bytes=queue.nbytes + outside_bytes,
            busy=first.busy,
            wait_s=first.predicted_wait_s(now, units_before),
            fastest_s=self._fastest_s(),
        )
        if isinstance(refusal, Overloaded) and refusal.retry_after_s is not None:
            refusal.retry_after_s = self._if_served(refusal.retry_after_s)
        return refusal

    def _displace(self, now: float, request: Request) -> None:
        """Have a request of the first queue make room: it is refused, or waits at the door."""
        self._first.lobby.displace(now, request)
        if not request.patient:
            self.drop(now, [(request, DISPLACED)])
            return
        request.stage = AT_THE_DOOR
        self.door.put_back([request])
        if self._journal is not None:
            self._journal.record(now, "waits for room again", request.id)

    # -- those at the door

    @property
    def lets_in(self) -> bool:
        """Whether a request waits at the door and there is room for it."""
        return self.door.count > 0 and self._first.queue.has_room(self.door.peek(1)[0].nbytes)

    def fill(self, now: float) -> bool:
        """Let requests in from the door while there is room; report whether any came in."""
        before = self._first.queue.count
        while self.lets_in:
            (request,) = self.door.take(1, now)
            request.stage = 0
            request.arrived = now
            self._first.enter(now, [request])
            if self._journal is not None:
                self._journal.record(now, "let in", request.id)
        return self._first.queue.count > before

    # -- while no worker is there

    def refuse_unserved(self, now: float) -> float:
        """Refuse what is late for its SLO since a stage that it has yet to pass has no worker.

        Policies are asked what a worker is to do, so most of them would keep it until its deadline.

        Returns:
            When the next request will be late; infinity if none will.
        """
        since = again_at = inf
        for batcher in reversed(self._batchers):
            since = min(since, batcher.lobby.unserved_since(now, batcher.has_worker))
            if since < inf and batcher.queue.count:
                late, due = batcher.late_unserved(now, since)
                again_at = min(again_at, due)
                if late:
                    batcher.lobby.drop(now, late)
                    self.drop(now, [(request, TOO_LATE) for request in late])
        if since < inf and self.door.count:
            late = [request for request in self.door if is_late_unserved(now, request, since)]
            for request in late:
                self.door.remove(request)
            self.drop(now, [(request, TOO_LATE) for request in late])
            again_at = min([again_at, *[request.due for request in self.door if request.due > now]])
        return again_at

    # -- those that are dropped

    def drop(self, now: float, dropped: Sequence[tuple[Request, str]]) -> None:
        """End requests unserved that were admitted before, and tell their callers why."""
        again_s = self.retry_after_s(now)
        for request, why in dropped:
            error = overloaded(request, why)
            error.retry_after_s = again_s
            self._endings.fail(now, request, error)

    def retry_after_s(self, now: float) -> float:
        """Return after how many seconds a caller that is refused now should try again."""
        wait_s = self._first.predicted_wait_s(now, self._first.queue.size + self.door.count)
        return self._if_served(retry_after_s(wait_s, self._fastest_s()))

    def _if_served(self, again_s: float) -> float:
        """Return these seconds, or `UNSERVED_RETRY_S` if that is more and a stage has no worker."""
        is_served = all(batcher.has_worker for batcher in self._batchers)
        return again_s if is_served else max(again_s, UNSERVED_RETRY_S)

    def _fastest_s(self) -> float:
        """Return the least time from the first queue's head to the answer."""
        return sum([batcher.times.fastest_s for batcher in self._batchers])


def _clear_ids(requests: Sequence[Request]) -> None:
    """Take back the ids of requests that are not admitted together."""
    for request in requests:
        request.id = 0


def _check_new(requests: Sequence[Request]) -> None:
    """Raise ValueError if one of the requests was submitted before, or is there twice."""
    seen: set[Request] = set()
    for request in requests:
        if request.id or request.state in (QUEUED, RUNNING) or request in seen:
            raise ValueError(f"{request!r} was submitted before")
        seen.add(request)
