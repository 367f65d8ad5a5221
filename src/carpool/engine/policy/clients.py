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
after each other, the clients of the first are not back yet. Ten such looks must be nearly alike.

Traffic that does not wait for answers has no such number: the greatest of a few Poisson counts
still deviates by about half of the root of the usual one, and ten of them differ by more. In a
later stage requests may still come from the one before it, and then a batch goes ahead that could
have been larger.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator
from math import sqrt
from typing import TYPE_CHECKING, Final

from carpool.engine.policy.cost import GAIN, KEEP, SURE, CostModel

if TYPE_CHECKING:
    from carpool.engine.policy.length_cost import LengthCost

FEW, _MANY = 256, 1024
"""Arrivals that a rate is measured by. With an eighth of the former, penalised means are 0.6 %
longer; with the former for both, the p99 of four workers at a load of 0.8 is 14 % longer."""
_GRID: Final = (1 / 16, 1 / 8, 3 / 16, 1 / 4, 3 / 8, 1 / 2, 3 / 4, 1.0)
"""Windows, as shares of the longest one: of the set-up of a batch, which is the most that waiting
can be worth. With half as many windows, two closed loops have 4 % less goodput."""
_CLUSTER: Final = 2.0
"""Times the arrivals of other times that a window must bring. With half as many, the penalised mean
on tiles is 14 % longer; with twice as many, one loop has 2 % less goodput, and three more."""
_NEARLY: Final = 0.25
"""Of the root of a number: by less it may vary and count as always the same. Poisson traffic varies
by more than that root. With half of it, one loop behind a long way has 2 % less goodput; with twice
as much, Poisson traffic is near."""


class Arrivals:
    """The latest arrivals.

    Attributes:
        total: How many there were in all.
    """

    def __init__(self) -> None:
        self.total = 0
        self._times: list[float] = []
        self._totals: list[int] = []  # how many had come by each of these times

    def add(self, now: float, n: int) -> None:
        """Note that `n` requests have arrived."""
        self.total += n
        self._times.append(now)
        self._totals.append(self.total)
        if len(self._times) > 4 * _MANY:
            del self._times[: 2 * _MANY], self._totals[: 2 * _MANY]

    def until(self, when: float) -> int:
        """Return how many requests had come by `when`; 0 if that is long ago."""
        i = bisect_right(self._times, when)
        return self._totals[i - 1] if i else 0

    def rate(self, now: float, n: int = FEW) -> float:
        """Return the requests per second by the last `n`, counted from the moment before them.

        0 if all came at one moment.
        """
        totals = self._totals
        if not totals:
            return 0.0
        i = max(0, bisect_right(totals, self.total - n) - 1)
        return (self.total - totals[i]) / max(now - self._times[i], 1e-9)

    def steady_rate(self, now: float) -> float:
        """Return the requests per second by many, or by fewer that surely came faster.

        By a noisier rate batches grow with every chance crowd, which costs a tenth of the p99; by a
        slower one they are too small for a while when the rate has risen.
        """
        return max(self.rate(now, _MANY), self.rate(now) * (1.0 - SURE / sqrt(FEW)))


class Gather:
    """Learns how soon after a batch its clients return, and how long to wait for them.

    Args:
        arrivals: Is asked how many requests had come by when.

    Attributes:
        window_s: How long after a batch it pays to wait for the clients that it served; 0 when it
            does not.
        served: How many requests the last batch answered; 0 if there is nothing to wait for.
        clients: Smoothed number inside when a batch ends: all clients of a closed loop.
    """

    def __init__(self, arrivals: Arrivals) -> None:
        self._arrivals = arrivals
        self.window_s = 0.0
        self.clients = 1.0
        self.served = 0
        self._at = 0.0  # when the last batch was completed
        self._arrived = 0  # by then
        self._longest_s = 0.0  # the longest window
        self._returned = [0.0] * len(_GRID)  # per window, over the batches so far, which fade
        self._answered = self._batches = 0.0  # requests that could return, and their batches
        self._stray = self._stray_s = 0.0  # arrivals outside of the windows, and the time outside of them

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

    def stop(self) -> None:
        """Forget the last batch, as the next ones go unreported."""
        self.served = 0

    def learn(
        self, now: float, inside: int, workers: int, unit: float, cost: CostModel | LengthCost, most: float
    ) -> None:
        """Learn who came between two batches, and choose the window anew.

        Call it when the second is done, before `completed`.

        Args:
            now: The time.
            inside: How many requests it has answered, wait, or run.
            workers: How many run batches. Without waiting, clients split into one group more.
            unit: The mean size of a request.
            cost: Of batches.
            most: The largest batch that is made on purpose, in units.
        """
        self.clients += 2.0 * (1.0 - KEEP) * (inside - self.clients)
        if not self.served:
            return

        def came(share: float) -> int:
            """Return how many had come by the end of a window, or before."""
            return max(self._arrived, self._arrivals.until(self._at + share * self._longest_s))

        self._stray = KEEP * self._stray + self._arrivals.total - came(0.5)
        self._stray_s = KEEP * self._stray_s + max(0.0, now - self._at - 0.5 * self._longest_s)
        self._answered = KEEP * self._answered + self.served
        self._batches = KEEP * self._batches + 1.0
        self._returned = [
            KEEP * n + came(share) - self._arrived for n, share in zip(self._returned, _GRID, strict=True)
        ]
        self._choose_window(workers + 1, unit, cost, most / unit)

    def _windows(self) -> Iterator[tuple[float, float]]:
        """Yield each window that brings a cluster, and the share of clients that is back then."""
        rate = self._stray / self._stray_s if self._stray_s > self._longest_s else 0.0
        others = _CLUSTER * rate * self._longest_s * self._batches
        for returned, share in zip(self._returned, _GRID, strict=True):
            if returned > others * share:
                yield share * self._longest_s, min(1.0, returned / self._answered)

    def _choose_window(self, groups: int, unit: float, cost: CostModel | LengthCost, limit: float) -> None:
        """Choose the window with the best throughput; 0 if waiting does not promise enough."""
        half = min(limit, max(1.0, self.clients / groups))
        # groups that a needless wait has made uneven stay so
        best, self.window_s = half / (GAIN * cost.seconds(half * unit)), 0.0
        for window_s, back in self._windows():
            batch = min(limit, max(1.0, self.clients / (groups - back)))
            throughput = batch / (window_s + cost.seconds(batch * unit))
            if throughput > best:
                best, self.window_s = throughput, window_s
        self._longest_s = cost.setup_s

    def best_until(self, now: float, saved_s: Callable[[float], float]) -> float | None:
        """Return until when to wait for the clients served last, as far as that saves seconds.

        Args:
            now: The time.
            saved_s: Returns the seconds of the next batch that are saved if so many are back.

        Returns:
            The end of the window that saves most, or None if none saves more than it takes.
        """
        expected = self.expected
        most_s, best = 0.0, None
        for window_s, back in self._windows() if expected else ():
            until, more = self._at + window_s, expected - self.served * (1.0 - back)
            left_s = saved_s(more) - (until - now) if more > 0.0 and until > now else 0.0
            if left_s > most_s:
                most_s, best = left_s, until
        return best


class Inside:
    """Learns how many requests are inside when all clients are."""

    def __init__(self) -> None:
        self._looks: deque[int] = deque(maxlen=10)  # the greatest numbers, each of some batches
        self._most = self._ended = 0  # the greatest since the last look, and how many batches have ended

    def note(self, inside: int, workers: int) -> None:
        """Note how many are inside when a batch ends, that of the batch included.

        Args:
            inside: So many requests.
            workers: How many run batches.
        """
        self._ended += 1
        self._most = max(self._most, inside)
        if self._ended >= 2 * workers:
            self._looks.append(self._most)
            self._most = self._ended = 0

    @property
    def clients(self) -> int:
        """How many clients there are, if all are inside now and then; 0 if that is not known."""
        looks = self._looks
        most = max(looks, default=0)
        return most if len(looks) == looks.maxlen and most - min(looks) < _NEARLY * sqrt(most) else 0

    def are_all(self, inside: int) -> bool:
        """Report whether all clients are inside, so that no request comes before a batch ends."""
        clients = self.clients
        return abs(clients - inside) < _NEARLY * sqrt(clients)
