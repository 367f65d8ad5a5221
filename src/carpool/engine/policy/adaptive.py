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
   loads above a half a worker's time counts for the others that it could serve;
5. *gather* (`policy/clients.py`): clients in a closed loop are about to return: wait for them;
6. *size* (`policy/size.py`): the number that makes the sum of delays least, not always all; now and
   then a size that may be better than it seems.

With `prefer="efficiency"` requests with an SLO are held back in the place of 5, until their batch
could not grow any more in time, as Symphony's are (Chen et al., arXiv 2308.07470). In 6 the seconds
for each item alone count then.

Where requests have lengths and these vary, batches are composed by length (`policy/compose.py`),
which takes the place of rules 3, 4 and 6, unless that saves little; then all is as above. A batch
that cannot get better is sent ahead to a worker that is still busy, if it is in time.

In rule 3: with the capacity μ and batches of t seconds, what waits beyond μ·(S - t) can never be
served within the SLO S. (No policy that serves all can use more than (1 - 2·a/S)/b, since a request
that just misses a batch waits for it and for the next one; one that drops early gets (1 - a/S)/b.)
So dropping the oldest of it costs nothing and makes room for requests that can be. And the longer
an overload lasts, the less likely it is to end just now, when a backlog would still be of use
(Lindy's law; CoDel, Nichols & Jacobson 2012, drops by the same reasoning): so the part that is kept
shrinks with time. Clients in a closed loop come no faster than they are served, so their backlog
stands instead of growing; of that those go whom noise would make late. In rule 4 a smaller batch
for the first alone is Clockwork's (Gujarati et al., OSDI 2020), to give it up always is the early
drop of Nexus (Shen et al., SOSP 2019).

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
from carpool.engine.policy.clients import FEW
from carpool.engine.policy.cost import LEARNED, SURE, CostModel
from carpool.engine.policy.length_cost import LengthCost
from carpool.engine.request import Request

_PATIENCE: Final = {"goodput": (8.0, 0.25), "latency": (0.5, 0.0)}
"""After how many SLOs of overload half of the servable backlog is kept, and the least share of it.
With half as many, two overloads have 3 and 6 % less goodput; with twice as many, the penalised mean
of nine is up to 10 % longer. Half of the share changes nothing there."""
_CROWD: Final = 32
"""Arrivals of late that have a worker's time count where the first is in a hurry. By those of the
load alone, fewer are refused, and the p99 of two workers at a load of a half is 0.3 % longer."""


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
            decision = self._ahead(view, view.free_in_s)
        elif not view.free or not len(view.queue):
            return NOTHING
        else:
            decision = self._of_idle(view)
            self._busy = view.busy + (decision.take > 0)
        if decision.take:
            self._rule = decision.reason
        return decision

    def _of_idle(self, view: View) -> Decision:
        """Return what goes to an idle worker."""
        queue = view.queue
        is_lone = len(queue) == 1 and not view.busy and not self.gather.window_s
        n = min(queue.size, self.limit)
        if (self._was_trifle or is_lone) and self._has_time(view, n):
            return Decision(take=n, reason="free" if n < self.limit else "full")  # no rule has a reason against it
        if self._by_length is not None and (composed := self._by_length.decide(view)) is not None:
            return composed
        if self.cost.samples < LEARNED:
            left = Candidates(queue)
            left.drop_due_before(view.now)  # what is late already; it is too early to judge by more
            return Decision(left.dropped, min(left.size, self.limit), "cold" if left.size else "")
        self._sizes.refresh()
        return self._warm(view)

    def _ahead(self, view: View, free_in_s: float) -> Decision:
        """Return what goes to a busy worker.

        That is the best size for all that wait, if it is in time; and a full batch where two of
        them are inside for each worker, as a smaller one would leave it idle meanwhile. Such
        batches go while nothing is learned, too, once two have measured how long the way is.

        What comes until the worker is free could not join the batch, or would save less than the
        worker loses while it is idle, so nothing is lost; in all other cases `decide` is to judge
        by what waits then.
        """
        queue, sizes, cost, waiting = view.queue, self._sizes, self.cost, view.queue.size
        if self._by_length is not None and (cost.samples < LEARNED or self._by_length.composes(view)):
            return NOTHING
        workers = max(1, self._busy)
        each = (view.running + waiting) / workers  # what is inside for each of them
        if cost.samples < LEARNED:
            is_flood = waiting >= self.limit and each >= 2 * self.limit and queue.earliest_due == inf
            return Decision(take=self.limit, reason="cold") if is_flood and cost.samples >= 2 else NOTHING
        sizes.refresh()
        most = self.limit if self._was_trifle else sizes.most_of(waiting)
        n = min(waiting, most)
        slack_s = queue.earliest_due - view.now - free_in_s - view.onward_s
        if slack_s < cost.following_s(n) * cost.margin or (n < most and not self._is_as_good(view, n, most)):
            return NOTHING
        reason = "full" if n == most else "free"
        if not self._was_trifle:
            if self._fair_share(view.now, waiting, most, workers) < n:
                return NOTHING  # another worker may be free before this one
            chosen = sizes.choose(waiting, n, self._load(view.now, workers), slack_s)
            if sizes.is_try(chosen):
                n, reason = chosen, "probe"
            elif chosen != n and each < 2 * most:
                return NOTHING
        return Decision(take=n, reason=reason)

    def _is_as_good(self, view: View, n: int, most: int) -> bool:
        """Report whether to send `n` ahead serves as many a second as to wait for `most`.

        The worker is idle before the latter. No other request may come before.
        """
        if self._was_trifle or not self.inside.are_all(view.running + len(view.queue)):
            return False
        cost, way = self.cost, self.cost.way
        in_worker_s = max(0.0, cost.seconds(n) - way.seconds(n)), max(0.0, cost.seconds(most) - way.seconds(most))
        return in_worker_s[0] * most <= (in_worker_s[1] + view.gap_s) * n

    def _has_time(self, view: View, n: int) -> bool:
        """Report whether all that waits can go without more ado, as no request is in a hurry.

        It is asked for a lone request on an idle server, and for trifles.
        """
        cost = self.cost
        if cost.samples < LEARNED or (self.is_patient and self._defers(view.queue)):
            return False
        self._overloaded_since = None
        return view.queue.earliest_due - view.now - view.onward_s >= cost.seconds(n) * cost.margin

    def _warm(self, view: View) -> Decision:
        """Decide by what was learned: rules 2 to 6 of the list above, one after the other."""
        now, queue = view.now, view.queue
        cost, sizes, workers = self.cost, self._sizes, view.free + view.busy
        left = Candidates(queue)
        at = now + view.onward_s  # an answer takes this much longer than its batch
        self._drop_hopeless(left, at, sizes.most_of(left.size), queue.weighted)
        if not left.size:
            return self._hopeless(left.dropped, at - now + cost.seconds(1))
        load, most = self._load(now, workers), sizes.most_of(left.size)
        if load < 1.0:
            self._overloaded_since = None
        if left.size > most and left.due < inf:
            if load > 1.0:
                left.drop_first(left.size - self._worth_keeping(now, at, left, most, workers))
                if not left.size:
                    return Decision(drop=left.dropped)  # each one left would be larger than all that is worth keeping
            self._trim_edge(now, at, left, most, workers)
        defers = self.is_patient and self._defers(queue)
        share = most if defers else self._fair_share(now, left.size, most, workers)
        n = min(left.size, share)
        slack_s = left.due - at
        if slack_s < cost.seconds(n) * cost.margin:
            tried = sizes.worth_trying(n, left.size, n, load, slack_s)
            if tried:
                return Decision(left.dropped, tried, "probe")
            load = max(load, self._load(now, workers, _CROWD))
            return self._tight(at, left, share, load, workers)
        if defers:
            until = self._more_until(view, left, n, most)
            load = 1.0  # so that the size with the fewest seconds for each item goes
        else:
            until = self._back_until(view, left.size, share, slack_s)
            if until is None and workers == 1 and sizes.is_due:
                until = self._back_for_try(view, left.size, slack_s)
        if until is not None:
            return Decision(drop=left.dropped, wake_at=until)
        chosen = sizes.choose(left.size, share, load, slack_s)
        reason = "full" if chosen == most else "free" if chosen == left.size else "size"
        return Decision(drop=left.dropped, take=chosen, reason="probe" if sizes.is_try(chosen) else reason)

    def _more_until(self, view: View, left: Candidates, n: int, most: int) -> float | None:
        """Return until when a batch of `n` waits to grow; None to go now."""
        cost = self.cost
        if n >= min(most, 2 * cost.largest):  # what much larger batches cost is a guess
            return None
        return self._held_until(view, left.due, cost.seconds(n + 1), cost.cv)

    def _load(self, now: float, workers: int, n: int = FEW) -> float:
        """Return what has come lately, by `n` arrivals, as a share of what can be served."""
        return self.arrivals.rate(now, n) * self._unit / (workers * self._sizes.rate)

    def _drop_hopeless(self, left: Candidates, at: float, most: int, weighted: bool) -> None:
        """Refuse what could not be answered in time even by a batch of its own."""
        cost = self.cost
        left.drop_due_before(at + cost.seconds(1))
        if weighted and left.due - at < cost.seconds(min(left.size, most)) * cost.margin:
            left.drop([request for request in left.requests if request.due - at < cost.seconds(request.size)])

    def _worth_keeping(self, now: float, at: float, left: Candidates, most: int, workers: int) -> int:
        """Return how much of a backlog is worth keeping in an overload: see rule 3 above."""
        if self._overloaded_since is None:
            self._overloaded_since = now
        room_s = left.last_due - at
        servable = workers * self._sizes.rate * (room_s - self.cost.seconds(most))
        if servable == inf:
            return left.size
        patience, least = _PATIENCE[self.overload]
        kept = max(least, 1.0 / (1.0 + (now - self._overloaded_since) / (patience * room_s)))
        return max(self._filling(most, workers), int(servable * kept))

    def _filling(self, most: int, workers: int) -> int:
        """Return what must wait so that batches are full, or a larger one can be tried.

        Chance may bring less meanwhile: in bursts, 7 to 15 % fewer are served without the root.
        """
        return max(self._sizes.wanted, int(sqrt(workers) * (most + 2.0 * sqrt(most))) + 1)

    def _trim_edge(self, now: float, at: float, left: Candidates, most: int, workers: int) -> None:
        """Refuse those whom noise would make late, while others fill the batches."""
        head = left.requests[0]
        slo_s = head.due - head.arrived
        edge_s = self.cost.seconds(most) * (1.0 + SURE * self.cost.cv) + at - now
        if edge_s < slo_s:  # else all are at the edge when they come
            urgent = left.due_by(now + 1.001 * slo_s)  # what is due later does not keep these waiting
            left.drop_first(urgent - self._filling(most, workers), due_by=now + edge_s)

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
            price = min(1.0, max(0.0, 2.0 * load - 1.0))  # below a load of a half, time is free
            if (1.0 - price) * (n - len(late) + len(then)) > n - price * self._sizes.rate * seconds:
                left.drop(late)
                return Decision(left.dropped, min(left.size, most), "shed")
        return Decision(left.dropped, n, "tight")

    def _fair_share(self, now: float, waiting: int, most: int, workers: int) -> int:
        """Return the most that one of several workers takes; `most` for one worker alone.

        Clients that come back together, and are waited for, are as many groups as there are
        workers; if more wait than there are of them, others have come.
        """
        if workers <= 1:
            return most
        clients = round(self.gather.clients * self._unit)
        if self.gather.window_s and waiting <= clients:
            return min(most, -(-clients // workers))
        return min(most, self._sizes.share(waiting, self.arrivals.steady_rate(now) * self._unit, workers))


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
        self.size = queue.size
        self.due = queue.earliest_due
        if queue.lanes > 1:
            self._keep(queue.peek(len(queue)))

    def _keep(self, requests: Sequence[Request]) -> None:
        self._requests = requests
        self.size = sum([request.size for request in requests])
        self.due = min([request.due for request in requests], default=inf)

    @property
    def requests(self) -> Sequence[Request]:
        """Those left, in the order in which they would be taken."""
        if self._requests is None:
            self._requests = self._queue.peek(len(self._queue))
        return self._requests

    @property
    def last_due(self) -> float:
        """When the one left is due that is due last: of several lanes it need not be the last."""
        if self._queue.lanes == 1:
            return self.requests[-1].due
        return max([request.due for request in self.requests])

    def drop(self, requests: list[Request]) -> None:
        """Refuse these requests."""
        gone = set(requests)
        self.dropped += requests
        self._keep([request for request in self.requests if request not in gone])

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
