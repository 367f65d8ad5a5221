"""How many of the waiting requests to take: not always all of them.

**The working size** is the smallest batch of nearly the best efficiency n/t(n); larger ones only cost latency, and
beyond a knee also throughput. Under noise, where the best cannot be told, it is the largest that is not clearly worse.

**The size of one batch** when x wait: all of them finish together at the end, so it can be better to serve some first.
By one step of policy improvement over serving all, with the rest of the work drained at the capacity μ and the load ρ,
the expected total delay of taking n is

    J(n) = x·(t(n) - n/μ) / ((1-ρ)·n) + n/(2μ),

which for t = a + b·n is least at n* = sqrt(2·a·x·μ/(1-ρ)), and for stepped costs goes to the end of a tile. Candidates
are all, n*, the most efficient size up to each, and the end of the last tile. Derivation and a check against the
optimum: docs/policies-evidence.md#theory.

**Several workers** share what waits. If each takes all that it finds, the batches of m workers are uneven: a worker
that was away for long finds much, and is away for even longer. In an even rotation at the rate λ each batch is of
n̄ = λ·t(n̄)/m, which for t = a + b·n is n̄ = λa/(m - λb). With x waiting, batches of n drain the queue at m·n/t(n) - λ;
the delay until that is done, of those that wait and of those that come, is least at

    n* = n̄ + sqrt(x·t(n̄)/(2·b·m)).

Of x only half is put in, since in the rotation some wait, too; between a quarter and all of it, figures hardly differ.
No worker takes more than n*, or than the m-th part of what waits if that is more. As the load comes near m/b, n̄ grows
beyond all bounds, and batches are as large as those of one worker alone; so they are once an overload is noticed, and
while clients that come back together are waited for.
Figures: docs/policies-evidence.md#several-workers.

**Probes**: while more than the working size waits, now and then a neighbouring size that was hardly ever tried is run,
so that knees and tiles are found without a profile. While less waits, a smaller size that was never run may be, once,
as a tile may end there: where it would be better if it took no longer than the next one below it that was measured, or
15 % less than expected if that is more.
"""

from __future__ import annotations

from math import sqrt
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from carpool.policy.cost import CostModel

_GOOD_ENOUGH, _STILL_GOOD = 0.995, 0.99  # of the best efficiency: to become the working size, and to stay it
_NOISY_CV = 0.033  # above this the best size cannot be told from its neighbours
_NOISE_SHARE = 0.3  # of the coefficient of variation: what a difference must exceed to count
_WORTH = 0.99  # a candidate must beat taking all by 1 %
_TILE = 0.97  # an item more that costs this much of the efficiency begins a tile
_OPTIMISM = 0.85  # a size never tried is taken to cost this much of what is expected
_EXCESS = 0.5  # of what waits: the rest would wait in the even rotation of several workers, too
_PROBES = (1.6, 1.25, 0.8, 1.0, 0.93, 0.65)  # times the working size; 1.0 stands for one more than it
_FIRST_PAUSE, _LAST_PAUSE = 8, 128  # batches between probes
_AGEING = 200  # sizes looked at, after which old samples lose their weight


class BatchSize:
    """Chooses batch sizes by a learned cost.

    Attributes:
        working: the largest batch that is made on purpose; best: the most efficient size.
        capacity: items per second of one worker, at the best size.
    """

    def __init__(self, cost: CostModel) -> None:
        self._cost = cost
        self._version = -1
        self.working = self.best = cost.limit
        self.capacity = 1.0
        # Per knot: its relative time, or the least that it may be if it was never measured,
        self._hoped: list[float] = []
        # by that the most efficient size up to it,
        self._prefix: list[int] = []
        # and the last size below it after which efficiency falls.
        self._tile_end: list[int] = []
        self._next_probe = _FIRST_PAUSE
        self._pause = _FIRST_PAUSE
        self._probe = 0
        self._tried = 0  # how many of the factors were looked at last
        self._asked_at = -1  # the cost's samples when a probe was last due
        self._probed_at = 0  # the working size at the last probe
        self._hope = 0  # the size that is tried below the working size, if it is
        self._hoped_for: set[int] = set()  # those that were, whatever came of it

    def refresh(self) -> None:
        """Look at the cost's tables again if they have changed."""
        cost = self._cost
        if self._version == cost.version:
            return
        self._version = cost.version
        shape = cost.shape
        knots, at, counts = shape.knots, shape.at, shape.counts
        best = best_hoped = seen = 0.0
        best_size = hoped_size = 1
        believe_all = cost.cv > 0.1
        all_hoped = self._hoped = []
        prefix = self._prefix = []
        ends = self._tile_end = []
        end, before, last = 0, 0, 0.0
        for n, y, count in zip(knots, at, counts, strict=True):
            if n / y >= best * 0.9999:
                best, best_size = n / y, n
            if count > 0.0 or believe_all:
                seen = hoped = y
            else:
                hoped = max(seen, _OPTIMISM * y)
            if n / hoped >= best_hoped * 0.9999:
                best_hoped, hoped_size = n / hoped, n
            all_hoped.append(hoped)
            prefix.append(hoped_size)
            if n / y < _TILE * last:
                end = before
            before, last = n, n / y
            ends.append(end)
        self.best = best_size
        self.capacity = best / cost.level
        self._choose_working(best)

    def _choose_working(self, best: float) -> None:
        shape = self._cost.shape
        efficiency = [n / y for n, y in zip(shape.knots, shape.at, strict=True)]
        if self._cost.cv > _NOISY_CV:
            enough = (1.0 - _NOISE_SHARE * self._cost.cv) * best
            self.working = max(n for n, e in zip(shape.knots, efficiency, strict=True) if e >= enough)
        elif efficiency[shape.index(self.working)] < _STILL_GOOD * best:
            enough = _GOOD_ENOUGH * best
            self.working = next(n for n, e in zip(shape.knots, efficiency, strict=True) if e >= enough)

    def most(self, waiting: int) -> int:
        """The largest batch to make of so many: the working size, or all if that is little more."""
        working = self.working
        return waiting if working < waiting <= min(self.best, working + (working >> 2)) else working

    def share(self, waiting: int, rate: float, workers: int) -> int:
        """The most that one of several workers takes of `waiting`, while `rate` arrives per second."""
        cost = self._cost
        setup_s, item_s = cost.setup_s, cost.shape.slope * cost.level
        spare = workers - rate * item_s
        if spare <= 0.0 or item_s <= 0.0:
            return cost.limit  # batches can only grow
        even = max(1.0, rate * setup_s / spare)
        n = even + sqrt(_EXCESS * waiting * (setup_s + item_s * even) / (2.0 * item_s * workers))
        return min(waiting, int(max(n, waiting / workers) + 0.5))

    def choose(self, waiting: int, most: int, load: float, capacity: float) -> int:
        """The size for `waiting` items, at most `most`, at a load of `load` (1 is all that can be served)."""
        cost = self._cost
        everything = min(waiting, most)
        if everything == 1 or self.best_at_once(waiting, everything, capacity):
            return everything
        free = max(0.05, 1.0 - load)
        closed_form = int(sqrt(2.0 * cost.setup_s * waiting * capacity / free) + 0.5)
        index = cost.shape.index
        i = index(everything)
        candidates = {everything, self._prefix[i]}
        if 1 <= closed_form < everything:
            candidates |= {closed_form, self._prefix[index(closed_form)]}
        if self._tile_end[i] > 0:
            candidates.add(self._tile_end[i])
        if len(candidates) == 1:
            return everything
        drain = waiting * cost.seconds(everything) / (free * everything)
        delay = drain - waiting / (free * capacity) + 0.5 * everything / capacity
        least, best = _WORTH * delay - _NOISE_SHARE * cost.cv * drain, everything
        may_try = waiting < self.working and cost.samples >= self._next_probe
        for n in candidates - {everything}:
            seconds = self._hoped_s(n) if may_try else cost.seconds(n)
            delay = waiting * (seconds - n / capacity) / (free * n) + 0.5 * n / capacity
            if delay < least:
                least, best = delay, n
        return best

    def _unknown(self, n: int) -> bool:
        """Whether that very size has an entry in the table, and was neither measured nor tried."""
        shape = self._cost.shape
        i = shape.index(n)
        return shape.counts[i] == 0.0 and shape.knots[i] == n and n not in self._hoped_for

    def _hoped_s(self, n: int) -> float:
        """How long a batch of `n` takes, or the least it may take if that is unknown."""
        seconds = self._cost.seconds(n)
        if not self._unknown(n):
            return seconds
        shape = self._cost.shape
        i = shape.index(n)
        return seconds * min(1.0, self._hoped[i] / shape.at[i])

    def best_at_once(self, waiting: int, everything: int, capacity: float) -> bool:
        """Whether `choose` takes everything at any load: n* is least with no load, and no tile ends on the way."""
        i = self._cost.shape.index(everything)
        return (
            self._prefix[i] == everything
            and not self._tile_end[i]
            and 2.0 * self._cost.setup_s * waiting * capacity >= everything * everything
        )

    # -- probes

    def probe(self, n: int, waiting: int, slack_s: float) -> int:
        """`n`, or now and then a size that deserves a try, if so many wait and the slack allows it."""
        cost = self._cost
        if cost.samples < self._next_probe:
            return n
        if waiting <= n or n < self.working:
            if n < waiting and self._unknown(n):  # `choose` hopes for it
                self._asked_at, self._hope = cost.samples, n
            return n
        self._asked_at, self._hope = cost.samples, 0
        for k in range(len(_PROBES)):
            self._tried = k + 1
            factor = _PROBES[(self._probe + k) % len(_PROBES)]
            size = min(n + 1 if factor == 1.0 else int(n * factor + 0.5), waiting, cost.limit)
            known = cost.measured(max(size, 1))
            if size != n and size >= 1 and known < 2.0 and slack_s >= cost.seconds(size) * cost.margin:
                return size
        return n

    def completed(self) -> None:
        """A batch is done: a probe that was due has had its chance."""
        cost = self._cost
        if not self._next_probe <= self._asked_at < cost.samples:
            return
        if self._hope:
            self._hoped_for.add(self._hope)
            self._next_probe = cost.samples + self._pause
            return
        moved = abs(self.working - self._probed_at) > 0.03 * self.working or abs(cost.trend) > 0.15
        self._pause = _FIRST_PAUSE if moved else min(_LAST_PAUSE, 2 * self._pause)
        self._probed_at = self.working
        self._next_probe = cost.samples + self._pause
        self._probe += self._tried
        if self._probe >= _AGEING:
            self._probe = 0
            self._hoped_for.clear()
            cost.shape.age(self.working)
