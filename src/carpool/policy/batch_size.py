"""How many of the waiting requests to take: not always all of them.

**The working size** is the smallest batch of nearly the best efficiency n/t(n); larger ones only
cost latency, and beyond a knee also throughput. Under noise, where the best cannot be told, it is
the largest that is not clearly worse.

**The size of one batch** when x wait: all of them finish together at the end, so it can be better
to serve some first. By one step of policy improvement (Howard 1960) over serving all, with the rest
of the work drained at the capacity μ and the load ρ, the expected total delay of taking n is

    J(n) = x·(t(n) - n/μ) / ((1-ρ)·n) + n/(2μ),

which for t = a + b·n is least at n* = sqrt(2·a·x·μ/(1-ρ)), and for stepped costs goes to the end of
a tile. Candidates are all, n*, the most efficient size up to each, and the end of the last tile. An
example: with t = 8 ms + 0.25 ms·n and batches of up to 64, so that μ = 64 / 24 ms, n* is 52 when 64
wait and nothing else comes, and 64 from a load of a third on. Derivation and a check against the
optimum: docs/policies-evidence.md#theory.

**Several workers** share what waits. If each takes all that it finds, the batches of m workers are
uneven: a worker that was away for long finds much, and is away for even longer. In an even rotation
at the rate λ each batch is of n̄ = λ·t(n̄)/m, which for t = a + b·n is n̄ = λa/(m - λb). With x
waiting, batches of n drain the queue at m·n/t(n) - λ; the delay until that is done, of those that
wait and of those that come, is least at

    n* = n̄ + sqrt(x·t(n̄)/(2·b·m)).

Of x only half is put in, since in the rotation some wait, too; between a quarter and all of it, the
figures hardly differ. No worker takes more than n*, or than the m-th part of what waits if that is
more. As the load comes near m/b, n̄ grows beyond all bounds, and batches are as large as those of
one worker alone; so they are once an overload is noticed. While no batch was as small as that part,
it is taken, so that what smaller ones cost is found out. Clients that come back together and are
waited for are cut into m groups, unless more wait than there are of them: then others have come.
Figures: docs/policies-evidence.md#several-workers.

**Batches that overlap**: where the way to the worker and back grows with the batch
(`policy/hop_cost.py`), one batch may travel while another runs, if there are two of them. Then the
working size is the smallest whose efficiency is not worse than the best by a quarter of the share
that the way has: overlapping saves twice that, as half of the way is hidden.

**Probes**: while more than the working size waits, now and then a neighbouring size that was hardly
ever run lately is tried, so that knees and tiles are found without a profile, and changes as well.
While less waits, a smaller
size that was never run may be, once, as a tile may end there: where it would be better if it took
no longer than the next one below it that was measured, or 15 % less than expected if that is more.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from carpool.policy.cost import CostModel
    from carpool.policy.shape import Shape

_GOOD_ENOUGH, _STILL_GOOD = 0.995, 0.99  # of the best efficiency: to become the working size, and to stay it
_NOISY_CV = 0.033  # above this the best size cannot be told from its neighbours
_NOISE_SHARE = 0.3  # of the coefficient of variation: what a difference must exceed to count
_WORTH = 0.99  # a candidate must beat taking all by 1 %
_TILE = 0.97  # a step in size after which only this share of the efficiency is left begins a tile
_OPTIMISM = 0.85  # a size never tried is taken to cost this share of what is expected
_EXCESS = 0.5  # of what waits: the rest would wait in the even rotation of several workers, too
_BELIEVED_CV = 0.1  # above this noise nothing is hoped of a size that was never tried
_OVERLAP = 0.25  # of the share of the way: as much efficiency is given for batches that overlap
_SAME = 0.9999  # of the best efficiency: counts as the best, and the larger size wins
_PROBES = (1.6, 1.25, 0.8, 1.0, 0.93, 0.65)  # times the working size; 1.0 stands for one more than it
_FIRST_PAUSE, _LAST_PAUSE = 8, 128  # batches between probes
_FORGIVING = 200  # sizes looked at, after which smaller ones that were hoped for in vain may be again


class BatchSize:
    """Chooses batch sizes by a learned cost.

    Args:
        cost: Of batches, learned elsewhere.

    Attributes:
        working: The largest batch that is made on purpose.
        best: The most efficient size.
        capacity: Units per second of one worker, at the best size.
        hop_share: The share of a batch's time that is on the way and grows with its size; 0 where
            it is a trifle, or nothing can overlap with it.
        hop_unit_s: By how many seconds the way grows with each unit.
        clients: How many units are asked for at the same time.
    """

    def __init__(self, cost: CostModel) -> None:
        self._cost = cost
        self._version = -1
        self.working = self.best = cost.limit
        self.capacity = 1.0
        self.hop_share = self.hop_unit_s = self.clients = 0.0
        # Per knot of the cost's table: its relative time, or the least that it may be if it was
        # never measured; going by that, the most efficient size up to the knot; and the last size
        # below it after which efficiency falls.
        self._hoped: list[float] = []
        self._prefix: list[int] = []
        self._tile_end: list[int] = []
        self._smallest = 1  # that was ever measured
        self._next_probe = _FIRST_PAUSE
        self._pause = _FIRST_PAUSE
        self._probe = 0
        self._tried = 0  # how many of the factors were looked at for the last probe
        self._asked_at = -1  # the cost's samples when a probe was last due
        self._probed_at = 0  # the working size at the last probe
        self._hope = 0  # the size below the working size that is tried; 0 if none is
        self._hoped_for: set[int] = set()  # those that were tried, whatever came of it

    def refresh(self) -> None:
        """Read the cost's tables again if they have changed."""
        cost = self._cost
        if self._version == cost.version:
            return
        self._version = cost.version
        shape = cost.shape
        self._hoped = _hoped_times(shape, cost.cv > _BELIEVED_CV)
        self._prefix = _most_efficient_so_far(shape.knots, self._hoped)
        self._tile_end = _tile_ends(shape.knots, shape.at)
        self._smallest = next((n for n, count in zip(shape.knots, shape.counts, strict=True) if count), 1)
        self.best = _most_efficient_so_far(shape.knots, shape.at)[-1]
        best = self.best / shape.at[shape.index(self.best)]
        self.capacity = best / cost.level
        self._choose_working(best)

    def _choose_working(self, best: float) -> None:
        """Set the working size, where `best` is the best relative efficiency."""
        shape = self._cost.shape
        efficiency = [n / y for n, y in zip(shape.knots, shape.at, strict=True)]
        if self.hop_share and self._choose_overlapping():
            return
        if self._cost.cv > _NOISY_CV:
            enough = (1.0 - _NOISE_SHARE * self._cost.cv) * best
            self.working = max(n for n, e in zip(shape.knots, efficiency, strict=True) if e >= enough)
        elif efficiency[shape.index(self.working)] < _STILL_GOOD * best:
            enough = _GOOD_ENOUGH * best
            self.working = next(n for n, e in zip(shape.knots, efficiency, strict=True) if e >= enough)

    def _choose_overlapping(self) -> bool:
        """Set the working size to one at which batches overlap, one on its way while another runs.

        It is the smallest that is efficient enough for what that saves. What is compared is how
        batches do that overlap: half of the growing way is then hidden.

        Returns:
            Whether it was set; not if so few requests come at a time that they would not fill two
            such batches.
        """
        shape, hidden = self._cost.shape, 0.5 * self.hop_unit_s / self._cost.level
        efficiency = [n / max(y - hidden * n, 1e-9) for n, y in zip(shape.knots, shape.at, strict=True)]
        enough = (1.0 - _OVERLAP * self.hop_share) * max(efficiency)
        size, best = next((n, e) for n, e in zip(shape.knots, efficiency, strict=True) if e >= enough)
        if 2 * size > self.clients:
            return False
        self.working, self.capacity = size, best / self._cost.level
        return True

    def overlapping_s(self, n: int) -> float:
        """Return how much of the time of a batch of `n` is hidden if it goes ahead."""
        return 0.5 * self.hop_unit_s * n if self.hop_share else 0.0

    def most(self, waiting: int) -> int:
        """Return the largest batch to make when `waiting` units wait.

        It is the working size, or all that waits if that is little more.
        """
        working = self.working
        return waiting if working < waiting <= min(self.best, working + (working >> 2)) else working

    def choose(self, waiting: int, most: int, load: float, capacity: float) -> int:
        """Return the size of the next batch.

        Args:
            waiting: How many units wait.
            most: The largest size that may be returned.
            load: How much arrives, as a share of what can be served.
            capacity: Units per second of one worker.
        """
        everything = min(waiting, most)
        if everything == 1:
            return 1
        return self._weigh_up(waiting, everything, max(0.05, 1.0 - load), capacity)

    def share(self, waiting: int, rate: float, workers: int) -> int:
        """Return the most that one of several workers takes, while `rate` arrives per second.

        It is the m-th part of what waits as long as no batch was that small: nobody knows whether
        smaller ones than those measured would be shorter.
        """
        cost = self._cost
        even = -(-waiting // workers)
        if even < self._smallest:
            return even
        return share_of(waiting, rate, workers, cost.setup_s, cost.shape.slope * cost.level, cost.limit)

    def _weigh_up(self, waiting: int, everything: int, free: float, capacity: float) -> int:
        """Return the candidate with the least total delay; `free` is the share without load."""
        cost = self._cost
        candidates = self._candidates(waiting, everything, free, capacity)
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

    def _candidates(self, waiting: int, everything: int, free: float, capacity: float) -> set[int]:
        """Return the sizes of which one is best: all, n*, and those at which efficiency is high."""
        index = self._cost.shape.index
        i = index(everything)
        closed_form = int(sqrt(2.0 * self._cost.setup_s * waiting * capacity / free) + 0.5)
        candidates = {everything, self._prefix[i]}
        if 1 <= closed_form < everything:
            candidates |= {closed_form, self._prefix[index(closed_form)]}
        if self._tile_end[i] > 0:
            candidates.add(self._tile_end[i])
        return candidates

    def _unknown(self, n: int) -> bool:
        """Report whether `n` has an own entry in the table, but was neither measured nor tried."""
        shape = self._cost.shape
        i = shape.index(n)
        return shape.counts[i] == 0.0 and shape.knots[i] == n and n not in self._hoped_for

    def _hoped_s(self, n: int) -> float:
        """Return how long a batch of `n` takes, or the least it may take if that is unknown."""
        seconds = self._cost.seconds(n)
        if not self._unknown(n):
            return seconds
        shape = self._cost.shape
        i = shape.index(n)
        return seconds * min(1.0, self._hoped[i] / shape.at[i])

    # -- probes

    def probe(self, n: int, waiting: int, slack_s: float) -> int:
        """Return `n`, or now and then a size that deserves a try instead.

        Args:
            n: The size that is to be run.
            waiting: How many units wait.
            slack_s: How long the batch may take.
        """
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
            known = cost.known(max(size, 1))
            if size != n and size >= 1 and known < 2.0 and slack_s >= cost.seconds(size) * cost.margin:
                return size
        return n

    def completed(self) -> None:
        """Note that a batch is done, so that a probe which was due has had its chance."""
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
        if self._probe >= _FORGIVING:
            self._probe = 0
            self._hoped_for.clear()


def share_of(waiting: int, rate: float, workers: int, setup_s: float, item_s: float, limit: int) -> int:
    """Return the most that one of several workers takes of what waits.

    Args:
        waiting: How many units wait.
        rate: How many arrive per second.
        workers: How many there are.
        setup_s: Seconds of a batch that do not depend on its size.
        item_s: Seconds of each unit besides.
        limit: The most that a batch may hold.
    """
    spare = workers - rate * item_s
    if spare <= 0.0 or item_s <= 0.0:
        return limit  # batches can only grow
    even = max(1.0, rate * setup_s / spare)
    n = even + sqrt(_EXCESS * waiting * (setup_s + item_s * even) / (2.0 * item_s * workers))
    return min(waiting, int(max(n, waiting / workers) + 0.5))


def _hoped_times(shape: Shape, believe_all: bool) -> list[float]:
    """Return per knot its relative time, or the least that it may be if it was never measured."""
    hoped = []
    seen = 0.0
    for time, count in zip(shape.at, shape.counts, strict=True):
        if count > 0.0 or believe_all:
            seen = time
            hoped.append(time)
        else:
            hoped.append(max(seen, _OPTIMISM * time))
    return hoped


def _most_efficient_so_far(sizes: Sequence[int], times: Sequence[float]) -> list[int]:
    """Return per size the most efficient one up to it."""
    found = []
    best, best_size = 0.0, 1
    for n, time in zip(sizes, times, strict=True):
        if n / time >= best * _SAME:
            best, best_size = n / time, n
        found.append(best_size)
    return found


def _tile_ends(sizes: Sequence[int], times: Sequence[float]) -> list[int]:
    """Return per size the last one below it after which efficiency falls; 0 if there is none."""
    ends = []
    end, previous, efficiency = 0, 0, 0.0
    for n, time in zip(sizes, times, strict=True):
        if n / time < _TILE * efficiency:
            end = previous
        previous, efficiency = n, n / time
        ends.append(end)
    return ends
