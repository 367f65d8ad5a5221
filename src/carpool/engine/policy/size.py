"""How many of the waiting requests go.

**The working size** is the smallest of nearly the best efficiency n/t(n); larger batches only cost
latency, and beyond a knee throughput, too. Amid noise, where the best cannot be told, it is the
largest that is not clearly worse.

**One worker.** All of a batch are done together at its end, so it can be better to serve some
first. By one step of policy improvement (Howard 1960) over serving all that waits, with the rest
drained at the capacity μ and the load ρ, the total delay of taking n of x is

    J(n) = x·(t(n) - n/μ) / ((1 - ρ)·n) + n / (2·μ),

which finds the end of a tile, the knee of a curve, and sqrt(2·a·x·μ / (1 - ρ)) for a + b·n. With t
= 8 ms + 0.25 ms·n and batches of up to 64 that is 52 when 64 wait and nothing else comes, and 64
from a load of a third on. Serving all that waits, its base, has a mean latency of (3/2)·a/(1 - λ·b)
+ (b/2)·(2 + λ·b)/(1 - λ²·b²) for Poisson arrivals at the rate λ, within 0.3 % of the least
possible.

**Several workers** share what waits. If each of m workers took all that it finds, the second of two
that end soon after one another would find little, and who was away for long much. In an even
rotation at the rate λ each batch is of n̄ = λ·a/(m - λ·b). With x more waiting, batches of n = n̄ +
u drain it at m·n/t(n) - λ = (m - λ·b)·u/t(n). Until then half of x waits on the mean, and a request
that is served is in a batch that takes t(n) - t(n̄) longer: together x·t(n)·(x/(2·(m - λ·b)·u) + 1 +
λ·b/(m - λ·b)) less a part without n, which is least at u = sqrt(x·t(n̄) / (2·b·m)). Some of those
that wait are no excess but the usual. Half of them is put in for x, as it gave the least p99 (a
quarter to all of it is alike within 3 %), which makes batches of n̄ + sqrt(x·t(n̄) / (4·b·m)). None
takes more, or than the m-th part of what waits if that is more.

**Tries.** A size that is not known any more may be better than it seems. So J is asked with the
least seconds that such sizes may take, once in up to 32 batches, and more often while tries bring
news, or once a size has changed. That is how a knee, a tile, or a change of one size is found. A
try costs those who wait: by what is known, J is greater with it than with the usual size. As what
is known of a size fades (`policy/cost.py`), that difference counts for less, and the one goes whose
gain outweighs it most, also where the usual size would be late. Where less waits than that size,
none goes for up to 32 batches, in an overload more is kept, and one worker waits for its clients,
if that gains more than the wait costs. Where workers share what
waits, none larger than the share is tried, which would only let its own requests wait for longer.
As soon as more is needed, the share is the working size, and all sizes are open.

**Batches that overlap.** Where the way to the worker and back takes time for each item, as it does
for megabytes, and all clients of a closed loop are inside, they go in two groups for each worker,
so that one travels while another runs, if that serves more, or in full batches where there are as
many clients. Where the way is long and all batches have one size, one of half the size is made now
and then, as nothing else shows how it grows.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from math import inf, sqrt
from operator import truediv
from typing import Final

from carpool.engine.policy.cost import GAIN, NEWS, NOISE, NOISY_CV, CostModel

_PAUSE: Final = 4
"""Batches between two tries at first, and twice as many after each that was in vain. With half as
many, the first sizes are tried twice as often; with twice as many, a size that was slow for a while
is found as much later."""
_MOST_PAUSE: Final = 32
"""The same after many in vain. With half as many, tries take up to 3 % of what can be served; with
twice as many, goodput beyond a knee in an overload is 1 % less."""
_MUCH_S, _MUCH_OF_ITEM_S = 1e-3, 50e-6
"""By which the way of a batch, and of one item, must grow to matter. With half of the latter, what
the service does for each small item seems to travel; with twice as much, 100 KB seem not to."""
_MUCH: Final = 0.1
"""Of a batch's time: what the way must be besides. With half of it, batches are halved for shorter
ways; with twice as much, ways that are up to a fifth of a batch are not hidden."""
_EVEN: Final = 1e-3
"""Spread of sizes below which nothing shows how the way grows. At half or twice, batches of half
the size are made a little later, or sooner."""


class Sizes:
    """Chooses batch sizes by a learned cost.

    Args:
        cost: Of batches, learned elsewhere.

    Attributes:
        most: The largest batch that is made on purpose.
        rate: Units per second of one worker in batches of that size.
        part: The largest that is made while batches are to overlap; infinity while they are not.
        runs_ahead: Whether a batch may go to a worker that is still busy.
        wanted: The size that is to be tried as soon as so much waits; 0 if there is none.
    """

    def __init__(self, cost: CostModel) -> None:
        self._cost = cost
        self._version = -1
        self.most: int = cost.limit
        self.rate = 1.0
        self.part = inf
        self.runs_ahead = False
        self.wanted = 0
        self._noise = 0.0  # by how much of its time a smaller size must be better
        self._all_from: dict[int, float] = {}  # by size: see `_drain_from`
        self._pause, self._changes = _PAUSE, 0
        self._next_try = 10  # in batches that were learned from
        self._tried = 0  # the size that is to be tried
        self._asked_at = -1  # when none was worth it, or less waited than its size
        self._halves = False  # whether a batch of half the size is due

    def refresh(self) -> None:
        """Read the cost again if it has changed."""
        cost = self._cost
        if self._version == cost.version:
            return
        self._version = cost.version
        if self._changes != cost.changes:
            self._changes, self._pause = cost.changes, _PAUSE
            self._next_try = min(self._next_try, cost.samples + _PAUSE)
        self._all_from.clear()
        self._noise = NOISE * cost.cv
        efficiency = list(map(truediv, cost.sizes, cost.at))
        best = max(efficiency)
        if cost.cv > NOISY_CV:
            enough = (1.0 - self._noise) * best
            self.most = max(n for n, e in zip(cost.sizes, efficiency, strict=True) if e >= enough)
        elif efficiency[bisect_right(cost.sizes, self.most) - 1] < GAIN * best:
            self.most = next(n for n, e in zip(cost.sizes, efficiency, strict=True) if e >= GAIN * best)
        if self.runs_ahead and cost.way.samples:
            best = max(n / cost.following_s(n) for n in (self.most, cost.sizes[efficiency.index(best)]))
        self.rate = best * cost.bias

    def most_of(self, waiting: int) -> int:
        """Return the largest batch to make of what waits: all of it if that is little more."""
        most = self.most
        if most < waiting <= most + (most >> 2) and waiting <= self._cost.limit:
            most = waiting
        return most if most <= self.part else int(self.part)

    # -- how many of those that wait

    def choose(self, waiting: int, most: int, load: float, slack_s: float) -> int:
        """Return the size of the next batch.

        Args:
            waiting: How many units wait.
            most: The largest size that may be made on purpose.
            load: How much comes, as a share of what can be served.
            slack_s: How long the batch may take.
        """
        everything = min(waiting, most)
        if self._halves and everything > 1:
            return (everything + 1) // 2
        if self.part < inf:
            return everything
        n = self._best(waiting, everything, load)
        return self.worth_trying(n, waiting, everything, load, slack_s) or n

    @property
    def is_due(self) -> bool:
        """Whether a size may be tried now."""
        return self._cost.samples >= self._next_try and not self._halves and self.part == inf

    def _reach(self, waiting: int, everything: int) -> int:
        """Return up to which size one may be tried.

        Where workers share what waits, a larger one would only let those in it wait for longer. As
        soon as more is needed, the shares are as large as any batch that is made on purpose.
        """
        return everything if everything < self.most_of(waiting) else min(waiting, self._cost.limit)

    def is_try(self, n: int) -> bool:
        """Report whether a batch of `n` goes because something is to be found out."""
        return self._halves or (n == self._tried and self._cost.samples >= self._next_try)

    def ran(self, n: int, seconds: float) -> None:
        """Note that a batch is learned from now, so that a try has come to its end."""
        if n != self._tried:
            return
        cost = self._cost
        expected = cost.seconds(min(n, cost.limit)) - cost.way.seconds(n)
        is_better = expected - seconds > (NEWS + 2.0 * cost.cv) * expected
        self._pause = _PAUSE if is_better else min(_MOST_PAUSE, 2 * self._pause)
        self._next_try, self._tried = cost.samples + 1 + self._pause, 0

    def _drain_from(self, everything: int) -> float:
        """Return from which x / (1 - ρ) on no smaller size has a smaller J."""
        found = self._all_from.get(everything)
        if found is None:
            found = self._all_from[everything] = self._found_drain(everything)
        return found

    def _found_drain(self, everything: int) -> float:
        cost = self._cost
        smaller = cost.sizes[: bisect_left(cost.sizes, everything)]
        if not smaller:
            return 0.0
        inverse, unit_s = 1.0 / self.rate, cost.seconds(everything) / everything
        most_s, most = inverse + GAIN * (unit_s - inverse) - self._noise * unit_s, GAIN * everything
        units_s: list[float] = list(map(truediv, cost.at, smaller))
        if min(units_s) <= most_s:
            return inf
        return max([0.5 * inverse * (most - n) / (y - most_s) for n, y in zip(smaller, units_s, strict=True)])

    def _best(self, waiting: int, everything: int, load: float) -> int:
        """Return the size with the least J."""
        cost = self._cost
        drain = waiting / max(0.05, 1.0 - load)
        if drain > self._drain_from(everything):
            return everything
        seconds = cost.seconds(everything)
        least = GAIN * self._delay(drain, everything, seconds) - self._noise * drain * seconds / everything
        best = everything
        for n, seconds in zip(cost.sizes, cost.at, strict=True):
            if n >= everything:
                break
            delay = self._delay(drain, n, seconds)
            if delay <= least:
                least, best = delay, n
        return best

    def worth_trying(self, n: int, waiting: int, everything: int, load: float, slack_s: float) -> int:
        """Return the size that is most worth a try instead of `n` now; 0 if none is.

        Where less waits than the one that promises most, no other is tried for a while.
        """
        cost = self._cost
        if not self.is_due or cost.samples == self._asked_at:
            return 0
        reach = self._reach(waiting, everything)
        holds_out = reach == waiting and cost.samples < self._next_try + self._pause
        drain = waiting / max(0.05, 1.0 - load)
        hoped_s = cost.hoped[bisect_right(cost.sizes, n) - 1]
        least = GAIN**2 * self._delay(drain, n, hoped_s) - cost.cv * drain * hoped_s / n
        usual = self._delay(drain, n, cost.seconds(n))
        most, best = 0.0, 0
        for k, seconds, hoped_s in zip(cost.sizes, cost.at, cost.hoped, strict=True):
            if k > reach and not holds_out:
                break
            gain = least - self._delay(drain, k, hoped_s)
            if gain > most and k != n and hoped_s * cost.margin <= slack_s and not cost.is_known(k):
                gain -= cost.proof(k) * max(0.0, self._delay(drain, k, seconds) - usual)
                if gain > most:
                    most, best = gain, k
        self.wanted = best if best > reach else 0
        if best and not self.wanted:
            self._tried = best
            return best
        self._asked_at = cost.samples
        return 0

    def _delay(self, drain: float, n: int, seconds: float) -> float:
        return drain * (seconds / n - 1.0 / self.rate) + 0.5 * n / self.rate

    def share(self, waiting: int, rate: float, workers: int) -> int:
        """Return the most that one of several workers takes, while `rate` units come per second."""
        cost = self._cost
        return share_of(waiting, rate, workers, cost.setup_s, cost.unit_s, cost.limit)

    # -- batches that overlap

    def learn_part(self, inside: float, unit: float, workers: int) -> None:
        """Find out whether batches are to overlap.

        Args:
            inside: How many units all clients of a closed loop ask for; 0 if others may come.
            unit: The mean size of a request.
            workers: How many there are.
        """
        cost, way = self._cost, self._cost.way
        group = inside / workers
        self.part, self._halves = inf, False
        if not self.runs_ahead or group < 2.0 * unit or not cost.samples:
            return
        whole = min(group, self.most)
        whole_s = cost.seconds(whole)
        if way.seconds(whole) < max(_MUCH_S, _MUCH * whole_s):
            return
        self._halves = way.spread < _EVEN and not way.ahead_unit_s
        if way.unit_s * unit < _MUCH_OF_ITEM_S or way.unit_s * whole < max(_MUCH_S, _MUCH * whole_s):
            return
        if group >= 2.0 * self.most:
            self.part, self._halves = self.most, False  # one full batch travels while another runs
            return
        half = max(1, round(0.5 * group + 0.25))  # the number of clients is not exact
        both_s = whole_s if group <= whole else whole_s + cost.seconds(max(1.0, group - whole))
        if GAIN * half / cost.following_s(half) > group / both_s:
            self.part, self._halves = half, False


def share_of(waiting: int, rate: float, workers: int, setup_s: float, item_s: float, limit: int) -> int:
    """Return the most that one of several workers takes of the units that wait.

    So many come a second as `rate`; a batch takes `setup_s`, and `item_s` for each unit.
    """
    spare = workers - rate * item_s
    if spare <= 0.0 or item_s <= 0.0:
        return limit  # batches can only grow
    even = max(1.0, rate * setup_s / spare)
    n = even + sqrt(waiting * (setup_s + item_s * even) / (4.0 * item_s * workers))
    return min(waiting, int(max(n, waiting / workers) + 0.5))
