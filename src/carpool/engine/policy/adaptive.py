"""Adaptive, the default: learns what batches cost and how requests come.

It needs no parameter but the batch limit. The principle: whatever is queued goes as soon as a
worker is free, and each deviation must pay by theory or by a learned statistic. In the order in
which `decide` asks:

1. *nothing learned yet*: serve whatever waits; nothing is refused on a guess;
2. *hopeless*: what cannot be answered in time even alone is refused;
3. *overload*: of a backlog that cannot be served in time the oldest part is refused, and more of it
   the longer that lasts;
4. *tight*: if the first would be late with the others, it goes in a smaller batch; or it is given
   up, with all behind it that would be late as well. What answers more in time is done, where at
   loads above `_TIME_IS_FREE` a worker's time counts for the others that it could serve;
5. *gather* (`policy/clients.py`): clients in a closed loop are about to return: wait for them;
6. *size* (`policy/size.py`): the number that makes the sum of delays least, not always all; now and
   then a size that may be better than it seems.

With `prefer="efficiency"` requests with an SLO are held back in the place of 5, until their batch
could not grow any more in time, as Symphony's are (Chen et al., arXiv 2308.07470). In 6 the seconds
for each item alone count then.

Where requests have lengths and these vary, batches are composed by length (`policy/compose.py`),
which takes the place of rules 3, 4 and 6, unless that saves little; then all is as above. A batch
that cannot get better is sent ahead to a worker that is still busy, in an overload, too, as long as
none is to be refused.

In rule 3: with the capacity μ and batches of t seconds, what waits beyond μ·(S - t) can never be
served within the SLO S. (No policy that serves all can use more than (1 - 2·a/S)/b, since a request
that just misses a batch waits for it and for the next one; one that drops early gets (1 - a/S)/b.)
So dropping the oldest of it costs nothing and makes room for requests that can be. And the longer
an overload lasts, the less likely it is to end just now, when a backlog would still be of use
(Lindy's law; CoDel, Nichols & Jacobson 2012, drops by the same reasoning): so the part that is kept
shrinks with time. In rule 4 a smaller batch for the first alone is Clockwork's (Gujarati et al.,
OSDI 2020), to give it up always is the early drop of Nexus (Shen et al., SOSP 2019).

What is learned, and how, stands in `policy/adaptive_learning.py`; batches by length stand in
`policy/by_length.py`. Rules 2 to 4 need due times, by an SLO or by deadlines; without them,
only the others apply. Figures and when it loses: docs/policies.md.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate
from math import inf, sqrt
from typing import Any, Final

from carpool.engine.policy.adaptive_learning import AdaptiveLearning
from carpool.engine.policy.base import NOTHING, Decision, DoneBatch, QueueView, View
from carpool.engine.policy.by_length import ByLength
from carpool.engine.policy.cost import LEARNED, SURE, CostModel
from carpool.engine.policy.length_cost import LengthCost
from carpool.engine.request import Request

_PATIENCE: Final = {"goodput": (8.0, 0.25), "latency": (0.5, 0.0)}
"""After how many SLOs of overload half of the servable backlog is kept, and the least share of it.
With half as many, bursts of a few SLOs cost goodput; with twice as many, overloads cost latency."""
_TIME_IS_FREE: Final = 0.6
"""Load up to which a smaller batch for the first may serve fewer than come meanwhile. With half of
it, 0.3 % fewer are in time on three workers at a load of 0.67; with twice as much, servers collapse
under small batches."""
_STANDS: Final = 2.0
"""SLOs without a look that finds no more than one batch for each worker: then a backlog stands.
With half as many, bursts count as such; with twice as many, closed loops are late for longer."""


class Adaptive(AdaptiveLearning):
    """Batch size and waiting time found by the program, with and without an SLO.

    Args:
        max_batch_size: As for every policy; the only one that is needed.
        max_queue_delay_s: As for every policy; it bounds how long clients are waited for.
        prefer: "latency", or "efficiency": then requests with an SLO wait as long as they can still
            be in time, for the sake of larger batches, which take fewer worker-seconds.
    """

    _by_length: ByLength | None = None  # where requests have lengths

    @property
    def lone_slack_s(self) -> float:
        cost = self.cost
        if self.is_patient or cost.samples < LEARNED or (not self._was_trifle and self.gather.window_s):
            return inf
        if self._to_learn is not None and self._next_has_gone:
            return inf  # the next arrival has the last batch learned from, which may change all this
        return cost.shortest_s * cost.margin

    # -- what happened, where requests have lengths

    def left(self, now: float, request: Request) -> None:
        if self._by_length is not None and request.due < inf:
            self._by_length.left(now, request)

    def learn(self, now: float, done: DoneBatch) -> None:
        if done.longest:
            if self._by_length is None:
                self._by_length = ByLength(self)
            self._by_length.learn(now, done)
        super().learn(now, done)

    def _usual_cost(self) -> CostModel | LengthCost:
        lengths = self._by_length.cost if self._by_length is not None else None
        return self.cost if lengths is None or lengths.usual_length == lengths.longest else lengths

    def explain(self, now: float) -> dict[str, Any]:
        found = super().explain(now)
        return found | self._by_length.explain() if self._by_length is not None else found

    # -- what to do

    def decide(self, view: View) -> Decision:
        self._view = view
        if view.free_in_s is not None:
            return self._ahead(view, view.free_in_s)
        queue, busy = view.queue, view.busy
        waiting = len(queue)
        if not view.free or not waiting:
            return NOTHING
        if (self._was_trifle or (waiting == 1 and not busy and not self.gather.window_s)) and self._has_time(view):
            n = min(queue.size, self.limit)
            decision = Decision(take=n, reason="free" if n < self.limit else "full")  # no rule has a reason against it
        elif self._by_length is not None and (composed := self._by_length.decide(view)) is not None:
            decision = composed
        elif self.cost.samples < LEARNED:
            decision = self._cold(view.now, queue)
        else:
            self._sizes.refresh()
            decision = self._warm(view)
        self._busy = busy
        if decision.take:
            self._busy += 1
            self._note_gone(decision)
        return decision

    def _ahead(self, view: View, free_in_s: float) -> Decision:
        """Return what goes to a busy worker.

        That is the best size for all that wait, if it is in time, and none is to be refused; and a
        full batch where two of them are inside for each worker, as a smaller one would leave it
        idle meanwhile. Such batches go while nothing is learned, too, once two have measured how
        long the way is.

        What comes until the worker is free could not join the batch, or would save less than the
        worker loses while it is idle, so nothing is lost; in all other cases `decide` is to judge
        by what waits then.
        """
        queue, sizes, waiting = view.queue, self._sizes, view.queue.size
        samples = self.cost.samples
        if self._by_length is not None and (samples < LEARNED or self._by_length.composes(view)):
            return NOTHING
        workers = max(1, self._busy)
        each = (view.running + waiting) / workers  # what is inside for each of them
        if samples < LEARNED:
            if samples < 2 or waiting < self.limit or each < 2 * self.limit or queue.earliest_due < inf:
                return NOTHING
            decision = Decision(take=self.limit, reason="cold")
            self._note_gone(decision)
            return decision
        sizes.refresh()
        most = self.limit if self._was_trifle else sizes.most_of(waiting)
        n = min(waiting, most)
        if (
            (n < most and not self._is_as_good(view, n, most))
            or not self._refuses_none(view, free_in_s, n, most, workers)
            # else another worker may be free before this one
            or (not self._was_trifle and self._fair_share(view.now, waiting, most, workers) < n)
        ):
            return NOTHING
        reason = "full" if n == most else "free"
        if not self._was_trifle:
            slack_s = queue.earliest_due - view.now - free_in_s - view.onward_s
            chosen = sizes.choose(waiting, n, max(self._loads(view.now, workers)), slack_s)
            if sizes.is_try(chosen):
                n, reason = chosen, "probe"
            elif chosen != n and each < 2 * most:
                return NOTHING
        decision = Decision(take=n, reason=reason)
        self._note_gone(decision)
        return decision

    def _refuses_none(self, view: View, free_in_s: float, n: int, most: int, workers: int) -> bool:
        """Report whether a batch ahead is in time, and none of the others is to be refused."""
        due = view.queue.earliest_due
        if due == inf:
            return True
        at = view.now + view.onward_s
        if due - at - free_in_s < self.cost.following_s(n) * self.cost.margin:
            return False
        if self._overloaded_since is None:
            return True
        left = Candidates(view.queue)
        load = min(self._loads(view.now, workers))
        return left.size <= self._worth_keeping(view.now, at, left, most, workers, load)

    def _is_as_good(self, view: View, n: int, most: int) -> bool:
        """Report whether to send `n` ahead serves as many a second as to wait for `most`.

        The worker is idle before the latter. No other request may come before; and there are at
        most twice as many batches, as each of them is work for the service, too.
        """
        if self._was_trifle or 2 * n < most or not self.inside.are_all(view.running + len(view.queue)):
            return False
        cost, way = self.cost, self.cost.way
        in_worker_s = max(0.0, cost.seconds(n) - way.seconds(n)), max(0.0, cost.seconds(most) - way.seconds(most))
        return in_worker_s[0] * most <= (in_worker_s[1] + view.gap_s) * n

    def _note_gone(self, decision: Decision) -> None:
        self._next_has_gone = True
        self._rule = decision.reason

    def _has_time(self, view: View) -> bool:
        """Report whether all that waits can go without more ado, as no request is in a hurry.

        It is asked for a lone request on an idle server, and for trifles.
        """
        cost, queue = self.cost, view.queue
        if cost.samples < LEARNED or (self.is_patient and self._defers(queue)):
            return False
        self._overloaded_since = self._stands_since = None
        slack_s = queue.earliest_due - view.now - view.onward_s
        return slack_s >= cost.longest_s * cost.margin or (
            slack_s >= cost.seconds(min(queue.size, self.limit)) * cost.margin
        )

    def _cold(self, now: float, queue: QueueView) -> Decision:
        """Serve whatever waits and give up only what is late already: it is too early to judge."""
        late = [] if queue.earliest_due > now else [r for r in queue.peek(len(queue)) if r.due <= now]
        waiting = queue.size - sum([request.size for request in late])
        if not waiting:
            return Decision(drop=late)
        return Decision(drop=late, take=min(waiting, self.limit), reason="cold")

    def _warm(self, view: View) -> Decision:
        """Decide by what was learned: rules 2 to 6 of the list above, one after the other."""
        now, queue = view.now, view.queue
        cost, sizes, workers = self.cost, self._sizes, view.free + view.busy
        left = Candidates(queue)
        at = now + view.onward_s  # an answer takes this much longer than its batch
        self._drop_hopeless(left, at, sizes.most_of(left.size))
        if not left.size:
            return self._hopeless(left.dropped, at - now + cost.seconds(1))
        loads = self._loads(now, workers)
        most = sizes.most_of(left.size)
        if loads[1] < 1.0:
            self._overloaded_since = None
        if left.size > most and left.due < inf:
            left.drop_first(left.size - self._worth_keeping(now, at, left, most, workers, min(loads)))
            if not left.size:
                return Decision(drop=left.dropped)  # each one left would be larger than all that is worth keeping
            self._trim_edge(now, at, left, most, workers)
        else:
            self._stands_since = None
        defers = self.is_patient and self._defers(queue)
        share = most if defers else self._fair_share(now, left.size, most, workers)
        n = min(left.size, share)
        slack_s = left.due - at
        if slack_s < cost.seconds(n) * cost.margin:
            return self._tight(at, left, share, max(loads), workers)
        if defers:
            until = self._more_until(view, left, n, most)
            load = 1.0  # so that the size with the fewest seconds for each item goes
        else:
            until = self._back_until(view, left.size, share, slack_s)
            if until is None and workers == 1 and sizes.is_due:
                until = self._back_for_try(view, left.size, slack_s)
            load = max(loads)
        if until is not None:
            return Decision(drop=left.dropped, wake_at=until)
        chosen = sizes.choose(left.size, share, load, slack_s)
        reason = "probe" if sizes.is_try(chosen) else _why(chosen, most, left.size)
        return Decision(drop=left.dropped, take=chosen, reason=reason)

    def _more_until(self, view: View, left: Candidates, n: int, most: int) -> float | None:
        """Return until when a batch of `n` waits to grow; None to go now."""
        cost = self.cost
        if n >= min(most, 2 * cost.largest):  # what much larger batches cost is a guess
            return None
        return self._held_until(view, left.due, cost.seconds(n + 1), cost.cv)

    def _loads(self, now: float, workers: int) -> tuple[float, float]:
        """Return what has come lately, by few and by more, as shares of what can be served."""
        arrivals = self.arrivals
        per_unit = self._unit / (workers * self._sizes.rate)
        return arrivals.short_rate(now) * per_unit, arrivals.long_rate(now) * per_unit

    def _drop_hopeless(self, left: Candidates, at: float, most: int) -> None:
        """Refuse what could not be answered in time even by a batch of its own."""
        cost = self.cost
        left.drop_due_before(at + cost.seconds(1))
        if left.weighted and left.due - at < cost.seconds(min(left.size, most)) * cost.margin:
            left.drop([request for request in left.requests if request.due - at < cost.seconds(request.size)])

    def _worth_keeping(self, now: float, at: float, left: Candidates, most: int, workers: int, load: float) -> int:
        """Return how much of a backlog is worth keeping: see rule 3 above."""
        rate, batch_s = workers * self._sizes.rate, self.cost.seconds(most)
        room_s = left.last_due - at
        servable = rate * (room_s - batch_s)
        if load <= 1.0:
            return left.size
        if self._overloaded_since is None:
            self._overloaded_since = now
        patience, least = _PATIENCE[self.overload]
        kept = max(least, 1.0 / (1.0 + (now - self._overloaded_since) / (patience * room_s)))
        return max(_needed(most, workers), int(servable * kept)) if servable < inf else left.size

    def _trim_edge(self, now: float, at: float, left: Candidates, most: int, workers: int) -> None:
        """Refuse those at the edge of a backlog that stands, while others fill the batches.

        Clients in a closed loop come no faster than they are served, so their backlog stands
        instead of growing, with its head where noise makes many of the answers late. One that has
        stood for long (CoDel's sign of a bad queue) does not drain by itself.
        """
        head = left.requests[0]
        slo_s = head.due - head.arrived
        urgent = left.due_by(now + 1.001 * slo_s)  # what is due later does not keep these waiting
        if urgent <= most * workers:
            self._stands_since = None
        elif self._stands_since is None:
            self._stands_since = now
        elif now - self._stands_since > _STANDS * slo_s:
            edge_s = self.cost.seconds(most) * (1.0 + SURE * self.cost.cv) + at - now
            if edge_s < slo_s:  # else all are at the edge when they come
                left.drop_first(urgent - _needed(most, workers), due_by=now + edge_s)

    def _tight(self, at: float, left: Candidates, most: int, load: float, workers: int) -> Decision:
        """Serve the first, which cannot go with all others, in a smaller batch, or give it up.

        Both ways are compared by how many are answered in time while what waits is drained at the
        capacity, less a share of how many others could be served meanwhile, which grows with the
        load.
        """
        cost = self.cost
        margin = cost.margin
        n = max(1, min(cost.largest_within((left.due - at) / margin), most, left.size))
        seconds = cost.seconds(n)

        def is_late(start_s: float) -> Callable[[float, int], bool]:
            return lambda due, units: due - at - start_s < cost.seconds(min(units, most)) * margin

        late = left.late_in_line(is_late(0.0))
        if 0 < len(late) < len(left.requests):
            then = left.late_in_line(is_late(seconds / workers), behind=n)
            price = min(1.0, max(0.0, (load - _TIME_IS_FREE) / (1.0 - _TIME_IS_FREE)))
            if (1.0 - price) * (n - len(late) + len(then)) > n - price * self._sizes.rate * seconds:
                left.drop(late)
                return Decision(left.dropped, min(left.size, most), "shed")
        return Decision(left.dropped, n, "tight")

    def _fair_share(self, now: float, waiting: int, most: int, workers: int) -> int:
        """Return the most that one of several workers takes; `most` for one worker alone.

        Clients that come back together, and are waited for, are as many groups as there are
        workers; if more wait than there are of them, others have come. In an overload full batches
        serve most.
        """
        if workers <= 1 or self._overloaded_since is not None:
            return most
        if self.gather.window_s:
            clients = round(self.gather.clients * self._unit)
            if waiting <= clients:
                group = -(-clients // workers)
                return max(1, min(most, group))
        return min(most, self._sizes.share(waiting, self.arrivals.steady_rate(now) * self._unit, workers))


def _needed(most: int, workers: int) -> int:
    """Return what must wait so that batches are full, whatever chance brings meanwhile."""
    return int(sqrt(workers) * (most + 2.0 * sqrt(most))) + 1


def _why(n: int, most: int, waiting: int) -> str:
    return "full" if n == most else "free" if n == waiting else "size"


class Candidates:
    """The requests that a policy may choose from while it decides.

    The requests are listed only when a rule must look at them one by one, since most decisions need
    no more than `size` and `due`.

    Args:
        queue: What waits; it is only read.

    Attributes:
        size: How much is left, in units of the requests' sizes.
        due: When the first of those left is due.
        dropped: The requests that are to be refused.
    """

    __slots__ = ("_queue", "_requests", "dropped", "due", "size")

    def __init__(self, queue: QueueView) -> None:
        self._queue = queue
        self._requests: Sequence[Request] | None = None
        self.dropped: list[Request] = []
        if queue.lanes == 1:
            self.size = queue.size
            self.due = queue.earliest_due
        else:
            self._requests = queue.peek(len(queue))
            self.size = sum([request.size for request in self._requests])
            self.due = min([request.due for request in self._requests])

    @property
    def requests(self) -> Sequence[Request]:
        """Those left, in the order in which they would be taken."""
        if self._requests is None:
            self._requests = self._queue.peek(len(self._queue))
        return self._requests

    @property
    def weighted(self) -> bool:
        """Whether some are left, and requests in the queue have sizes other than 1."""
        return self._queue.weighted and self.size > 0

    @property
    def last_due(self) -> float:
        """When the one left is due that is due last: of several lanes it need not be the last."""
        if self._queue.lanes == 1:
            return self.requests[-1].due
        return max([request.due for request in self.requests])

    def drop(self, requests: list[Request]) -> None:
        """Refuse these requests."""
        gone = set(requests)
        self._requests = [request for request in self.requests if request not in gone]
        self.size -= sum([request.size for request in requests])
        self.due = min([request.due for request in self._requests], default=inf)
        self.dropped += requests

    def drop_due_before(self, when: float) -> None:
        """Refuse the requests that are due before `when`."""
        if self.due < when:
            self.drop([request for request in self.requests if request.due < when])

    def due_by(self, when: float) -> int:
        """Return how much of what is left is due by `when`, in units."""
        if self.size and self._queue.lanes == 1 and self.requests[-1].due <= when:
            return self.size
        return sum([request.size for request in self.requests if request.due <= when])

    def drop_first(self, units: int, due_by: float = inf) -> None:
        """Refuse `units`, or a little more, of the requests that are due by `due_by`.

        Those that are due first go first, the lowest priority ahead of the others.
        """
        if units <= 0 or self.due > due_by:
            return
        order = self.requests
        if self._queue.lanes > 1:
            order = sorted(order, key=lambda request: (request.lane.priority, request.due))
        refused = []
        for request in order:
            if units <= 0:
                break
            if request.due <= due_by:
                units -= request.size
                refused.append(request)
        self.drop(refused)

    def late_in_line(self, is_late: Callable[[float, int], bool], behind: int = 0) -> list[Request]:
        """Return those that are late before the first that is in time if a batch begins with it.

        The further back a request is, the later it is due and the smaller the batch can be, so this
        is a binary search. Across priorities some before it may be due later; these stay.

        Args:
            is_late: Reports whether a request that is due then is late, with so many units from it
                on.
            behind: How many units go before; who is among these is not late.
        """
        requests = self.requests
        before = list(accumulate((request.size for request in requests), initial=0))
        units = before[-1]
        first = low = max(1, bisect_right(before, behind) - 1) if behind else 0
        high = len(requests)
        while low < high:
            middle = (low + high) >> 1
            if is_late(requests[middle].due, units - before[middle]):
                low = middle + 1
            else:
                high = middle
        return [requests[i] for i in range(first, low) if is_late(requests[i].due, units - before[i])]
