"""The way into a service: new requests are admitted, wait at a door for room, or are refused.

They come in lots. A lot is what one caller waits for as a whole, mostly a single request; it is
admitted as a whole.

Those at a door are patient requests for which there was no room where they begin. There is one door
for each place at which the graph may begin. A request of a higher priority may displace some of a
full queue: they are refused after all, or go back to the door.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from math import inf

from carpool.engine.core.content import Content, Plain
from carpool.engine.core.graph import Declared, Door, Graph, Node, OnTheWay, Switch, fastest_s, unserved_since, ways_of
from carpool.engine.core.lobby import is_late_unserved
from carpool.engine.core.queue import Queue
from carpool.engine.core.transit import Transit, way_of
from carpool.engine.fast_paths import fast_path
from carpool.engine.policy.admission import DISPLACED, UNSERVED_RETRY_S, Admission, overloaded, retry_after_s
from carpool.engine.policy.base import FULL, TOO_LATE
from carpool.engine.request import NEW, QUEUED, RUNNING, Request
from carpool.errors import CarpoolError, Overloaded

NOBODY: Sequence[Request] = ()


class Flow:
    """One service: its graph, its doors, its one admission, and its accounts.

    Args:
        declared: What its graph is made of.
        transit: Ends what is refused, and has others begin.
        slo_s: How soon after their admission requests are due; None leaves it at their deadlines.

    Attributes:
        closed_because: Why new requests are refused; None while they are not.
        is_held: Whether requests wait at the doors for now, of a graph that is no line.
        admitted: How many requests have been admitted; of these, `answered` have been, `failed`
            with an error, and `cancelled` were.
        alone: How many went alone, and were admitted and answered that way.
    """

    def __init__(
        self,
        declared: Declared,
        transit: Transit,
        *,
        slo_s: float | None = None,
        content: Content | None = None,
    ) -> None:
        self.slo_s = inf if slo_s is None else slo_s
        self.content: Content = Plain() if content is None else content
        self.measure = self.content.measure
        self.closed_because: CarpoolError | None = None
        self.is_held = False
        self.admitted = self.refused = self.answered = self.failed = self.cancelled = self.alone = 0
        self._transit = transit
        self.graph = Graph(declared, self)
        self.on_the_way = OnTheWay(self)
        self.doors = [
            Door(self, way, begins=True) for way in dict.fromkeys([way.after for way in ways_of(self.graph.start)])
        ]
        self._first: Node | None = None
        self._admissions = {
            node: Admission(node.crew.queue.max_size, node.crew.queue.max_bytes)
            for door in self.doors
            for node in door.heads
        }

    def settle(self) -> None:
        """Work out what depends on the nodes of other services in the same stages."""
        for node in self.graph.nodes:
            node.settle()
        start = self.graph.start
        self._first = start if isinstance(start, Node) and start.begins else None
        self.doors[0].behind = None if self._first is None else self._first.crew.queue

    @property
    def is_line(self) -> bool:
        return self._first is not None and not self.graph.blocks and all(node.is_in_line for node in self.graph.nodes)

    @property
    def door(self) -> Queue:
        return self.doors[0].queue

    @property
    def unanswered(self) -> int:
        return self.admitted - self.answered - self.cancelled

    @property
    def waiting(self) -> int:
        return sum([door.queue.count for door in self.doors])

    # -- new requests

    def submit(self, now: float, requests: Sequence[Request], alike: bool = False) -> None:
        """Take in new requests, in the order of their arrival.

        One that is refused is answered with the error at once. Those that are `companions` of each
        other are taken in together, or refused. Those that were cancelled before are passed over.

        Args:
            alike: Whether all are known to be new, of one lane, one due and one deadline, each of
                size 1 and without companions.

        Raises:
            ValueError: One of them was submitted before; then none is taken.
        """
        if self.closed_because is None and self._admit_at_once(now, requests, alike):
            return
        _check_new(requests)
        for request in requests:
            if request.state == NEW:
                lot = request.companions
                self._admit(now, [each for each in lot if each.state == NEW] if lot else (request,))

    @fast_path("admit_at_once", declined=False)
    def _admit_at_once(self, now: float, requests: Sequence[Request], alike: bool) -> bool:
        """Admit all requests at once, if all are new, there is room for all, and none may be late:
        the earliest deadline is not nearer than the wait behind all of them and a usual batch, and
        the policy does not predict waits itself.

        Fast path of the rest of `submit`: the same outcome (tests/engine/core/test_fast_paths.py)
        for a sixth of its bytecodes where 64 come together, a twentieth where they are alike, as
        only the first one is looked at then. Those that are in order join the queue together. On
        False, some requests keep their new `admitted`, `arrived` and `due`; `_admit` sets them to
        the same values.
        """
        node = self._first
        if node is None or self.is_held:
            return False
        first = node.crew
        queue, n, transit = first.queue, len(requests), self._transit
        if queue.count + n > queue.max_size or self.doors[0].queue.count or transit.journal is not None or not n:
            return False
        latest = now + self.slo_s
        one, nbytes = requests[0], 0
        soonest, in_order, dues_differ = one.deadline, True, False
        id = before = transit.last_id
        if alike:
            due = min(one.due, soonest, inf if one.bulk else latest)
            dues_differ = due != soonest
            nbytes = sum([request.nbytes for request in requests])
            for id, request in enumerate(requests, before + 1):
                request.id = id
                request.node = node
                request.admitted = request.arrived = now
            if due != one.due:
                for request in requests:
                    request.due = due
        else:
            lane, last_deadline, last_due = one.lane, soonest, -inf
            for request in requests:
                if request.id or request.state:  # of which NEW is 0
                    break
                id += 1
                request.id = id
                request.node = node
                request.admitted = now
                request.arrived = now
                deadline = request.deadline
                due = request.due
                if due != deadline:
                    dues_differ = True
                    if deadline < due:
                        request.due = due = deadline
                if latest < due and not request.bulk:
                    dues_differ = True
                    request.due = due = latest
                if deadline < last_deadline:
                    in_order = False
                    if deadline < soonest:
                        soonest = deadline
                if due < last_due or request.lane is not lane or request.size != 1:
                    in_order = False
                last_deadline = deadline
                last_due = due
                nbytes += request.nbytes
        is_hurried = False
        if soonest != inf:
            units = queue.size + (n if in_order else sum([request.size for request in requests]))
            is_hurried = first.lobby.predicts or (
                soonest - now < first.predicted_wait_s(now, units) + first.times.usual_s + first.lobby.view.onward_s
            )
        if is_hurried or id - before < n or queue.nbytes + nbytes > queue.max_bytes:
            for request in requests[: id - before]:
                request.id, request.node = 0, None
            return False
        transit.last_id = id
        self.admitted += n
        first.enter(now, requests, soonest, nbytes if in_order else None, dues_differ)
        return True

    def _admit(self, now: float, lot: Sequence[Request]) -> None:
        """Admit a lot to where the graph begins or to a door, or refuse it.

        The requests of a lot have one deadline. Only a single request displaces others. Patient
        ones that can fit at all come in one by one, as there is room. Mostly the lot is one
        request and there is one door; only a graph that begins with a switch has several.
        """
        self._stamp(now, lot)
        one, is_single, refusal = lot[0], len(lot) == 1, self.closed_because
        by_door: dict[Door, Sequence[Request]] = {self.doors[0]: lot}
        has_room, give_way = True, NOBODY
        if refusal is None and isinstance(self.graph.start, Switch):
            try:
                by_door = self._by_door(lot, self.graph.start)
            except CarpoolError as error:
                refusal = error.with_traceback(None)
        if refusal is None:
            first = next(iter(by_door))  # the only one of a single request
            if is_single and not first.has_room(one.nbytes):
                has_room = False
                give_way = NOBODY if self._first is None else self._first.crew.lobby.in_the_way(one)
            for door, part in by_door.items():  # what comes in by another one may need the same room
                beside: dict[Node, list[Request]] = {}
                for there in by_door if len(by_door) > 1 else ():
                    for node in there.needs if there is not door else ():
                        beside.setdefault(node, []).extend(by_door[there])
                refusal = refusal or self._refusal(now, part, door, give_way, beside)
        if refusal is not None:
            is_own = is_single and refusal is not self.closed_because
            self.refused += len(lot)
            for request in lot:
                self._transit.refuse(request, refusal if is_own else copy.copy(refusal))
        elif one.patient and not is_single:
            for request in lot:
                self._admit(now, (request,))
        else:
            waits = self.is_held or (is_single and not give_way and (first.queue.count > 0 or not has_room))
            self._number(lot)
            for other in give_way:
                self._displace(now, other)
            if self._transit.journal is not None:
                for request in lot:
                    self._transit.journal.record(now, "waits for room" if waits else "admitted", request.id)
            if waits:
                for door, part in by_door.items():
                    for request in part:
                        request.node = door
                    door.queue.push(part)
            else:
                for door, part in by_door.items():
                    self._transit.begin(now, part, door)

    def admit_lone(self, began: float, request: Request, id: int) -> None:
        self._stamp(began, (request,))
        self._transit.last_id += 1
        self.admitted += 1
        request.id = id
        request.node = self._first
        request.state = RUNNING

    def went_alone(self, ok: bool) -> None:
        """Count a lone request that was answered, and had no need of being admitted."""
        self._transit.last_id += 1
        self.admitted += 1
        self.answered += 1
        self.alone += 1
        if not ok:
            self.failed += 1

    def _by_door(self, lot: Sequence[Request], start: Switch) -> dict[Door, Sequence[Request]]:
        """Return the requests of a lot by their doors. Raises what `way_of` does."""
        found: dict[Door, list[Request]] = {}
        refuses = False
        for request in lot:
            way = way_of(start, request.item, request.format, self.content)
            refuses = refuses or way.refuses
            found.setdefault(next(door for door in self.doors if door.start is way.after), []).append(request)
        for request in lot if refuses else ():
            request.patient = False  # all of them, as they come in as one
        return {**found}

    def _stamp(self, now: float, lot: Sequence[Request]) -> None:
        for request in lot:
            request.admitted = request.arrived = now
            request.due = min(request.due, request.deadline, inf if request.bulk else now + self.slo_s)

    def _number(self, lot: Sequence[Request]) -> None:
        transit = self._transit
        for request in lot:
            transit.last_id += 1
            request.id = transit.last_id
        self.admitted += len(lot)

    def _refusal(
        self,
        now: float,
        part: Sequence[Request],
        door: Door,
        give_way: Sequence[Request],
        beside: Mapping[Node, Sequence[Request]],
    ) -> CarpoolError | None:
        """Return why the part of a lot that comes to a door must not come in, or wait for room
        there; None if it may.

        Args:
            give_way: The requests that would leave the queue for them.
            beside: By node, the rest of the lot that needs room there.
        """
        if part[0].patient:  # it is refused only where it could never fit
            for node in door.heads:
                refusal = self._admissions[node].refusal(
                    now, [*part, *beside.get(node, ())], queued=0, queued_bytes=0, busy=0, wait_s=0.0, fastest_s=0.0
                )
                if refusal is not None:
                    return refusal
            return None
        outside, outside_bytes = door.queue.count, door.queue.nbytes  # no newcomer gets past them
        if give_way:
            outside = -len(give_way)
            outside_bytes = -sum([other.nbytes for other in give_way])
        fastest = fastest_s(door.start)
        for node in door.heads:
            crew, lot = node.crew, [*part, *beside.get(node, ())]
            last = lot[-1]
            more = max(0, outside) + (sum([request.size for request in lot]) - last.size if len(lot) > 1 else 0)
            queue = crew.queue
            units_before: float = queue.ahead_of(last, now)
            if queue.weighted:
                units_before *= queue.size / queue.count
            refusal = self._admissions[node].refusal(
                now,
                lot,
                queued=node.queued + outside,
                queued_bytes=node.nbytes + outside_bytes,
                busy=len(crew.in_flight),
                wait_s=crew.predicted_wait_s(now, units_before + more),
                fastest_s=fastest,
            )
            if refusal is not None:
                if isinstance(refusal, Overloaded) and refusal.retry_after_s is not None:
                    refusal.retry_after_s = self._if_served(refusal.retry_after_s)
                return refusal
        if self._first is not None:
            return None
        if not door.queue.count and door.has_room(sum([request.nbytes for request in part]), len(part), beside):
            return None
        if self.is_held:
            n = door.queue.count + len(part)
            if all(n + len(beside.get(node, ())) <= node.crew.queue.max_size for node in door.heads):
                return None
        return Overloaded(FULL, retry_after_s=self.retry_after_s(now), reason="queue_full")

    def _displace(self, now: float, request: Request) -> None:
        request.node.crew.lobby.displace(now, request)
        if not request.patient:
            self.drop(now, [(request, DISPLACED)])
            return
        request.node = self.doors[0]
        self.door.put_back([request])
        if self._transit.journal is not None:
            self._transit.journal.record(now, "waits for room again", request.id)

    # -- those at the doors

    @property
    def lets_in(self) -> bool:
        return any(door.queue.count and door.has_room(door.queue.peek(1)[0].nbytes) for door in self.doors)

    def fill(self, now: float) -> bool:
        has_any = False
        for door in self.doors:
            while door.queue.count and door.has_room(door.queue.peek(1)[0].nbytes):
                (request,) = door.queue.take(1, now)
                request.arrived = now
                if self._transit.journal is not None:
                    self._transit.journal.record(now, "let in", request.id)
                self._transit.begin(now, [request], door)
                has_any = True
        return has_any

    # -- while no worker is there

    def refuse_unserved(self, now: float) -> float:
        """Refuse what is late for its SLO since a stage that it has yet to pass has no worker.

        Policies are asked what a worker is to do, so most of them would keep it until its deadline.

        Returns:
            When the next request will be late; infinity if none will.
        """
        again_at = inf
        for node in self.graph.nodes:
            node.unserved_since = since = min(
                node.crew.lobby.unserved_since(now, node.crew.has_worker), unserved_since(node.after, node.block)
            )
            if since < inf and node.queued:
                late, due = node.crew.lobby.late_unserved(now, since)
                if node.is_shared:
                    late = [request for request in late if request.node is node]
                again_at = min(again_at, due)
                if late:
                    node.crew.lobby.drop(now, late)
                    self.drop(now, [(request, TOO_LATE) for request in late])
        for door in self.doors:
            since = unserved_since(door.start)
            if since < inf and door.queue.count:
                late = [request for request in door.queue if is_late_unserved(now, request, since)]
                for request in late:
                    door.queue.remove(request)
                self.drop(now, [(request, TOO_LATE) for request in late])
                again_at = min([again_at, *[request.due for request in door.queue if request.due > now]])
        return again_at

    # -- those that are dropped

    def drop(self, now: float, dropped: Sequence[tuple[Request, str]]) -> None:
        """End admitted requests unserved, each with its reason."""
        again_s = self.retry_after_s(now)
        for request, why in dropped:
            error = overloaded(request, why)
            error.retry_after_s = again_s
            self._transit.fail(now, request, error)

    def retry_after_s(self, now: float) -> float:
        """Return after how many seconds a caller that is refused now should try again."""
        wait_s = 0.0
        for door in self.doors:
            for node in door.heads:
                wait_s = max(wait_s, node.crew.predicted_wait_s(now, node.crew.queue.size + door.queue.count))
        return self._if_served(retry_after_s(wait_s, fastest_s(self.graph.start)))

    def _if_served(self, again_s: float) -> float:
        """Return these seconds, or `UNSERVED_RETRY_S` if that is more and a stage has no worker."""
        is_served = all(node.crew.has_worker for node in self.graph.nodes)
        return again_s if is_served else max(again_s, UNSERVED_RETRY_S)


def _check_new(requests: Sequence[Request]) -> None:
    seen: set[Request] = set()
    for request in requests:
        if request.id or request.state in (QUEUED, RUNNING) or request in seen:
            raise ValueError(f"{request!r} was submitted before")
        seen.add(request)
