"""The way into a pipeline: new requests are admitted, wait at the door for room, or are refused.

Only the first stage has a door. Those that wait there are patient requests for which the first
queue had no room, and those that a policy's exception has kept from entering. A request of a higher
priority may displace some of a full queue: they are refused after all, or go back to the door.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from math import inf

from carpool.core.batcher import Batcher
from carpool.core.endings import Endings
from carpool.core.journal import Journal
from carpool.core.queue import Queue
from carpool.core.trail import AT_THE_DOOR
from carpool.errors import CarpoolError
from carpool.policy.admission import DISPLACED, Admission, overloaded, retry_after_s
from carpool.request import NEW, QUEUED, RUNNING, Request


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

    def __init__(self, batchers: Sequence[Batcher], endings: Endings, slo_s: float, journal: Journal | None) -> None:
        self.admitted = 0
        self.door = Queue()
        self._batchers = batchers
        self._first = batchers[0]
        self._endings = endings
        self._slo_s = slo_s
        self._journal = journal
        self._admission = Admission(self._first.queue.max_size, self._first.queue.max_bytes)

    # -- new requests

    def admit(self, now: float, requests: Sequence[Request], closed: CarpoolError | None) -> None:
        """Admit or refuse new requests, one after the other.

        Args:
            now: The time.
            requests: In the order of their arrival; those that were cancelled before are passed
                over.
            closed: Why all of them are refused; None if the service is open.

        Raises:
            ValueError: One of them was submitted before; then none is taken.
        """
        _check_new(requests)
        try:
            for request in requests:
                if request.state == NEW:
                    companions = request.companions
                    if companions:
                        self._admit_together(now, [each for each in companions if each.state == NEW], closed)
                    else:
                        self._admit_one(now, request, closed)
        except BaseException:  # of the policy
            self.keep(now, requests)
            raise

    def admit_all(self, now: float, requests: Sequence[Request]) -> bool:
        """Admit all requests together, or none of them.

        Fast path of `admit`: the same outcome, see tests/core/test_fast_paths.py. It admits them
        where all are new, there is room for all, and none may be too late. If it returns False,
        `admit` is to be called with the same `now`. All that is left of the attempt then is
        `admitted`, `arrived` and `due` of some requests, which `admit` sets to the same values.
        """
        if self.door.count or self._journal is not None:
            return False
        first = self._first
        latest = now + self._slo_s
        soonest, nbytes = inf, 0
        id = self.admitted
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
        n = id - self.admitted
        is_hurried = False
        if soonest != inf:
            units = sum([request.size for request in requests])
            try:
                is_hurried = soonest - now < first.longest_wait_s(units) + first.view.onward_s
            except BaseException:  # of the policy
                _clear_ids(requests[:n])
                raise
        if n < len(requests) or not n or is_hurried or not first.queue.has_room(nbytes, n):
            _clear_ids(requests[:n])
            return False
        self.admitted = id
        first.enter(now, requests, soonest)
        return True

    def admit_alike(self, now: float, requests: Sequence[Request]) -> bool:
        """Admit all of some requests that are alike, or none of them.

        Fast path of `admit_all` for new requests of one lane, one due and one deadline, each of
        size 1: the same outcome, see tests/core/test_fast_paths.py.
        """
        if self.door.count or self._journal is not None:
            return False
        first, alike, n = self._first, requests[0], len(requests)
        deadline = alike.deadline
        nbytes = sum([request.nbytes for request in requests])
        is_hurried = deadline - now < first.longest_wait_s(n) + first.view.onward_s
        if is_hurried or not first.queue.has_room(nbytes, n):
            return False
        due = min(alike.due, deadline, inf if alike.bulk else now + self._slo_s)
        id = self.admitted
        for request in requests:
            id += 1
            request.id = id
            request.admitted = request.arrived = now
        if due != alike.due:
            for request in requests:
                request.due = due
        self.admitted = id
        first.enter(now, requests, deadline, nbytes)
        return True

    def admit_lone(self, now: float, request: Request) -> None:
        """Admit a request that a worker has had since `now`: it is not refused any more."""
        self.admitted += 1
        request.id = self.admitted
        request.admitted = request.arrived = now
        request.due = min(request.due, request.deadline, now + self._slo_s)
        self._first.enter(now, [request])

    def keep(self, now: float, requests: Sequence[Request]) -> None:
        """Let the requests that were not taken in before the policy raised wait at the door."""
        for request in requests:
            if request.state == NEW:
                if not request.id:
                    self.admitted += 1
                    request.id = self.admitted
                request.stage = AT_THE_DOOR
                request.admitted = request.arrived = now
                self.door.push([request])

    def _admit_one(self, now: float, request: Request, closed: CarpoolError | None) -> None:
        """Admit a request to the first queue or to the door, or refuse it."""
        first = self._first
        request.admitted = request.arrived = now
        request.due = min(request.due, request.deadline, inf if request.bulk else now + self._slo_s)
        if closed is not None:
            self._endings.refuse(request, copy.copy(closed))
            return
        has_room = first.queue.has_room(request.nbytes)
        is_full = self.door.count > 0 or not has_room
        give_way = [] if has_room else first.in_the_way(request)
        refusal = self._refusal(now, request, give_way)
        if refusal is not None:
            self._endings.refuse(request, refusal)
            return
        self.admitted += 1
        request.id = self.admitted
        waits = is_full and not give_way
        if waits:
            request.stage = AT_THE_DOOR
            self.door.push([request])
        else:
            for other in give_way:
                self._displace(now, other)
            first.enter(now, [request])
        if self._journal is not None:
            self._journal.record(now, "waits for room" if waits else "admitted", request.id)

    def _admit_together(self, now: float, requests: Sequence[Request], closed: CarpoolError | None) -> None:
        """Admit requests of one caller, who waits for all of them, or refuse all.

        They are in one lane and have one deadline. They displace no other requests.
        """
        for request in requests:
            request.admitted = request.arrived = now
            request.due = min(request.due, request.deadline, inf if request.bulk else now + self._slo_s)
        refusal = closed or self._refusal_of_all(now, requests)
        if refusal is not None:
            for request in requests:
                self._endings.refuse(request, copy.copy(refusal))
            return
        for request in requests:
            if request.patient:
                self._admit_one(now, request, None)
                continue
            self.admitted += 1
            request.id = self.admitted
            self._first.enter(now, [request])
            if self._journal is not None:
                self._journal.record(now, "admitted", request.id)

    def _refusal_of_all(self, now: float, requests: Sequence[Request]) -> CarpoolError | None:
        """Return why requests must not join the first queue together; None if they may."""
        first = self._first
        queue, last = first.queue, requests[-1]
        ahead: float = queue.ahead_of(last, now)
        if queue.weighted:
            ahead *= queue.size / queue.count
        ahead += self.door.count + sum([request.size for request in requests]) - last.size
        return self._admission.refusal_of_all(
            now,
            requests,
            queued=queue.count + self.door.count,
            queued_bytes=queue.nbytes + self.door.nbytes,
            busy=len(first.in_flight),
            wait_s=first.predicted_wait_s(now, ahead),
            fastest_s=self._fastest_s(),
        )

    def _refusal(self, now: float, request: Request, give_way: Sequence[Request]) -> CarpoolError | None:
        """Return why a new request must not join the first queue, or wait for room; None if it may.

        Args:
            now: The time.
            request: The newcomer.
            give_way: The requests that would leave the queue for it.
        """
        first = self._first
        queue = first.queue
        units_before: float = queue.ahead_of(request, now)
        if queue.weighted:
            units_before *= queue.size / queue.count
        outside, outside_bytes = self.door.count, self.door.nbytes  # no newcomer gets past them
        if give_way:
            outside = -len(give_way)
            outside_bytes = -sum([other.nbytes for other in give_way])
        return self._admission.refusal(
            now,
            request,
            queued=queue.count + outside,
            queued_bytes=queue.nbytes + outside_bytes,
            busy=len(first.in_flight),
            wait_s=first.predicted_wait_s(now, units_before + max(0, outside)),
            fastest_s=self._fastest_s(),
        )

    def _displace(self, now: float, request: Request) -> None:
        """Have a request of the first queue make room: it is refused, or waits at the door."""
        self._first.displace(now, request)
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

    # -- those that are dropped

    def drop(self, now: float, dropped: Sequence[tuple[Request, str]]) -> None:
        """End requests unserved that were admitted before, and tell their callers why."""
        errors = [overloaded(request, why) for request, why in dropped]
        for (request, _), error in zip(dropped, errors, strict=True):
            self._endings.fail(now, request, error)
        again_s = self.retry_after_s(now)  # asks the policy, which may raise, so this comes last
        for error in errors:
            error.retry_after_s = again_s

    def retry_after_s(self, now: float) -> float:
        """Return after how many seconds a caller that is refused now should try again."""
        wait_s = self._first.predicted_wait_s(now, self._first.queue.size + self.door.count)
        return retry_after_s(wait_s, self._fastest_s())

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
