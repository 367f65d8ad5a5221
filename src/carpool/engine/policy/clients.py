"""Who comes, and who comes back: arrivals, clients about to return, and whether all are inside.

**Arrivals.** Rates are measured up to now, so that silence counts too. What comes at one moment is
one entry, so that bursts, and the arrivals of one turn of a loop, cost next to nothing. Nothing is
worked out before it is asked for.

**Gathering** is the one case in which an idle worker should wait. Clients in a closed loop send
their next request a short while after their answer. Work-conserving batching splits N such clients
into two groups that alternate, so that batches are half as large as they could be. If a share G of
the clients is back within w after a batch, waiting for w makes batches of k = N/(2-G), and the
throughput is k/(w + t(k)); at w = 0 it is (N/2)/t(N/2), which for t = a + b·n is N/(2·a + b·N), as
little as half of the N/(a + b·N) of waiting for all. So G is learned for a few windows, and the
best of them is waited for.

Only a real cluster counts: within the window more must arrive than the traffic at other times would
bring. For Poisson traffic that is never so, and nothing waits, as the best rule there is a
threshold on the number waiting that is rarely reached (Deb & Serfozo 1973).

**Inside.** In a closed loop whose clients come back at once, all of them are inside now and then.
Once they are, it is known that no other request comes before a batch ends. What is looked at is the
greatest number inside while some batches end, twice as many as there are workers: if two end soon
after each other, the clients of the first are not back yet.

Traffic that does not wait for answers has no such number: the greatest of a few Poisson counts
still deviates by about half of the root of the usual one. In a later stage requests may still come
from the one before it, and then a batch goes ahead that could have been larger.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from math import inf, sqrt
from typing import TYPE_CHECKING, NamedTuple

from carpool.engine.policy.cost import GAIN, KEEP, SURE, CostModel

if TYPE_CHECKING:
    from carpool.engine.policy.length_cost import LengthCost

_SHORT, _LONG, _STEADY = 32, 256, 1024
"""Arrivals that a rate is measured by. With half as many, rates scatter by two fifths more; with
twice as many, an overload and its end are seen as much later."""
_MOST_MOMENTS = 4 * _STEADY  # that are remembered, so that most of a large batch is among them
_GRID = (1 / 16, 1 / 8, 3 / 16, 1 / 4, 3 / 8, 1 / 2, 3 / 4, 1.0)
"""Windows, as shares of the longest one: of the time that one batch saves against two of half its
size, which is the most that waiting can be worth."""
_CLUSTER = 2.0
"""Times the arrivals of other times that a window must bring. With half as many, chance crowds
count; with twice as many, clients that are back late in a window do not."""
_WEIGHT = 0.1
"""Of a look at how many are inside; of the first ones, without which nothing is known, the mean is
taken. With half of it, it takes twice as long until clients are known; with twice as much, other
traffic is more often taken for clients."""
_UNVARIED = 0.1
"""Of the root of the usual number: by so much it may vary and count as always the same. Poisson
traffic varies by half of that root. With half of it, fewer loops are known; with twice as much,
less is left to tell traffic from loops."""
_NEARLY = 0.02
"""Of the usual number: so many more or less do not count. With half of it, a client that has just
gone has batches wait; with twice as much, batches go ahead although a few may come."""


class Arrivals:
    """The latest arrivals.

    Attributes:
        total: How many there were in all.
    """

    def __init__(self) -> None:
        self.total = 0
        self._times: list[float] = []
        self._totals: list[int] = []  # how many had come by each of these times
        self._forgotten = 0  # how many came before them

    def add(self, now: float, n: int) -> None:
        """Note that `n` requests have arrived."""
        self.total += n
        self._times.append(now)
        self._totals.append(self.total)
        if len(self._times) > _MOST_MOMENTS:
            half = _MOST_MOMENTS // 2
            self._forgotten = self._totals[half - 1]
            del self._times[:half], self._totals[:half]

    def until(self, when: float, before: int = 0) -> int:
        """Return how many requests had come by `when`.

        It is quicker where at least `before` of them are known to have come by then.
        """
        i = bisect_right(self._times, when, max(0, len(self._times) - (self.total - before)))
        return self._totals[i - 1] if i else self._forgotten

    def short_rate(self, now: float) -> float:
        """Return the requests per second, by the last 32."""
        return self._rate(now, _SHORT)

    def long_rate(self, now: float) -> float:
        """Return the requests per second, by the last 256."""
        return self._rate(now, _LONG)

    def steady_rate(self, now: float) -> float:
        """Return arrivals per second, by the last 1024, or by fewer that surely came faster.

        By a noisier rate batches grow with every chance crowd, which costs a tenth of the p99; by a
        slower one they are too small for a while when the rate has risen.
        """
        rates = [self._rate(now, n) * (1.0 - SURE / sqrt(n)) for n in (_SHORT, _LONG)]
        return max(self._rate(now, _STEADY), *rates)

    def _rate(self, now: float, n: int) -> float:
        """Return the requests per second by the last `n`, counted from the moment before them.

        0 if all came at one moment.
        """
        totals = self._totals
        if not totals:
            return 0.0
        i = max(0, bisect_right(totals, self.total - n, max(0, len(totals) - n - 1)) - 1)  # each moment brings some
        return (self.total - totals[i]) / max(now - self._times[i], 1e-9)


class Round(NamedTuple):
    """One batch, and what came until the next one was completed.

    Attributes:
        at: When it was completed.
        served: How many requests it answered.
        arrived: How many requests had arrived in all by then.
        end: When the next batch was completed.
        total: How many requests had arrived in all by the end.
    """

    at: float
    served: int
    arrived: int
    end: float
    total: int


class Gather:
    """Learns how soon after a batch its clients return, and how long to wait for them.

    Args:
        arrivals: Is asked how many requests had come by when.

    Attributes:
        window_s: How long after a batch it pays to wait for the clients that it served; 0 when it
            does not.
        served: How many requests the last batch answered; 0 if there is nothing to wait for.
        clients: Smoothed: those just served and those waiting, if they are in a closed loop.
    """

    def __init__(self, arrivals: Arrivals) -> None:
        self._arrivals = arrivals
        self._arrived = 0  # by the time the last batch was completed
        self.window_s = 0.0
        self._at = 0.0  # when the last batch was completed
        self.served = 0
        self._scale_s = 0.0  # the longest window; for a cost of a + b·n it is a
        self._returned = [0.0] * len(_GRID)  # per window, over the batches so far
        self._answered = self._batches = 0.0  # requests that could return, and their batches, fading
        self._stray = self._stray_s = 0.0  # arrivals outside of the windows, and the time outside of them
        self._rate = 0.0  # requests per second that arrive outside of the windows
        self._batch = 1.0  # smoothed requests of a batch
        self._groups = 2  # that clients split into without waiting: one more than there are workers
        self.clients = 1.0

    @property
    def until(self) -> float:
        """When the wait ends."""
        return self._at + self.window_s

    @property
    def expected(self) -> int:
        """How many of the clients last served are not back yet."""
        return max(0, self.served - (self._arrivals.total - self._arrived))

    def completed(self, now: float, n: int) -> None:
        """Note that a batch of `n` requests is done."""
        self._at = now
        self.served = n
        self._arrived = self._arrivals.total

    def close_round(self, now: float, n: int, waiting: int, others: int = 0) -> Round | None:
        """Close the account of the previous batch and update the estimate of clients.

        Call it when a batch is done, before `completed`.

        Args:
            now: The time.
            n: How many requests the batch that is now done has answered.
            waiting: How many requests are queued.
            others: How many other batches run.

        Returns:
            What came of the previous batch, for `learn`; None if nothing is known of it.
        """
        self._batch += _WEIGHT * (n - self._batch)
        self.clients += _WEIGHT * (n + waiting + others * self._batch - self.clients)
        self._groups = 2 + others
        if not self.served:
            return None
        return Round(self._at, self.served, self._arrived, now, self._arrivals.total)

    def stop(self) -> None:
        """Forget the last batch, whose account cannot be closed as the next ones go unreported."""
        self.served = 0

    def learn(self, closed: Round, unit: float, cost: CostModel | LengthCost, most: float = inf) -> None:
        """Choose the window anew after a round.

        Args:
            closed: A batch and what came of it.
            unit: The mean size of a request.
            cost: Of batches.
            most: The largest batch that is made on purpose, in units.
        """
        scale_s, at, before, arrivals = self._scale_s, closed.at, closed.arrived, self._arrivals
        half = at + 0.5 * scale_s
        self._stray = KEEP * self._stray + closed.total - min(arrivals.until(half, before), closed.total)
        self._stray_s = KEEP * self._stray_s + max(0.0, closed.end - half)
        self._answered = KEEP * self._answered + closed.served
        self._batches = KEEP * self._batches + 1.0
        self._rate = self._stray / self._stray_s if self._stray_s > scale_s else 0.0
        returned = self._returned
        for j, share in enumerate(_GRID):
            by_then = min(arrivals.until(at + share * scale_s, before), closed.total)
            returned[j] = KEEP * returned[j] + by_then - before
        self.window_s = self._best_window(unit, cost, min(most, cost.limit) / unit)

    def best_until(self, now: float, saved_s: Callable[[float], float]) -> float | None:
        """Return until when to wait for the clients served last, as far as that saves seconds.

        Args:
            now: The time.
            saved_s: Returns the seconds of the next batch that are saved if so many are back.

        Returns:
            The end of the window that saves most, or None if none saves more than it takes.
        """
        expected = self.expected
        if not expected or not self._answered:
            return None
        background = self._background
        most_s, best = 0.0, None
        for returned, share in zip(self._returned, _GRID, strict=True):
            until = self._at + share * self._scale_s
            if returned <= background * share or until <= now:
                continue
            more = expected - self.served * (1.0 - min(1.0, returned / self._answered))
            left_s = saved_s(more) - (until - now) if more > 0.0 else 0.0
            if left_s > most_s:
                most_s, best = left_s, until
            if returned >= self._answered:
                break  # all are back by then, and longer windows bring no more
        return best

    @property
    def _background(self) -> float:
        """How many arrivals in the longest windows of all batches would be no sign of a cluster."""
        return _CLUSTER * self._rate * self._scale_s * self._batches

    def _best_window(self, unit: float, cost: CostModel | LengthCost, limit: float) -> float:
        """Return the window with the best throughput; 0 if waiting does not promise enough."""
        half = min(limit, max(1.0, self.clients / self._groups))
        half_s = cost.seconds(half * unit)
        background = self._background
        # groups that a needless wait has made uneven stay so
        best, window_s = half / (GAIN * half_s), 0.0
        for returned, share in zip(self._returned, _GRID, strict=True):
            if returned <= background * share:
                continue
            batch = min(limit, max(1.0, self.clients / (self._groups - min(1.0, returned / self._answered))))
            throughput = batch / (share * self._scale_s + cost.seconds(batch * unit))
            if throughput > best:
                best, window_s = throughput, share * self._scale_s
        saved_s = 2.0 * half_s - cost.seconds(2.0 * half * unit) if 2.0 * half <= limit else 0.0
        self._scale_s = max(cost.setup_s, saved_s)
        return window_s


class Inside:
    """Learns how many requests are inside when all clients are."""

    def __init__(self) -> None:
        self._usual = 0.0  # the smoothed number
        self._deviation = 0.0  # smoothed distance from it
        self._looks = 0
        self._most = self._ended = 0  # the greatest number since the last look, and how many batches have ended

    def note(self, inside: int, workers: int) -> None:
        """Note how many are inside when a batch ends, that of the batch included.

        Args:
            inside: So many requests.
            workers: How many run batches.
        """
        self._ended += 1
        if inside > self._most:
            self._most = inside
        if self._ended >= 2 * workers:
            self._look(self._most)
            self._most = self._ended = 0

    def _look(self, most: int) -> None:
        """Learn from the greatest number since the last look."""
        self._looks += 1
        if self._looks == 1:
            self._usual = most
        distance = most - self._usual
        weight = max(_WEIGHT, 1.0 / self._looks)
        self._usual += weight * distance
        self._deviation += weight * (abs(distance) - self._deviation)

    @property
    def clients(self) -> float:
        """How many clients there are, if all are inside now and then; 0 if that is not known."""
        is_steady = self._looks * _WEIGHT >= 1.0 and self._deviation <= _UNVARIED * sqrt(self._usual)
        return self._usual if is_steady else 0.0

    def are_all(self, inside: int) -> bool:
        """Report whether all clients are inside, so that no request comes before a batch ends."""
        usual = self.clients
        return usual > 0.0 and abs(usual - inside) <= max(0.5, _NEARLY * usual)
