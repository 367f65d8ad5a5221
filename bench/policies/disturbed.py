"""A service in virtual time that is disturbed for some seconds: what it is, and how it fares.

A scenario says what batches cost, how they get to the workers, and who asks for how much. A `World`
is one run of it: calm, or with one of the `KINDS` of disturbances, all of which end. It counts what
is answered, and how soon, so that any window of a run can be set beside that of another run.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import ceil, inf
from random import Random
from typing import NamedTuple

from carpool.engine.core.batch import Batch
from carpool.engine.core.batcher import Batcher
from carpool.engine.core.core import Core
from carpool.engine.core.queue import Queue
from carpool.engine.drive.virtual import VirtualDriver
from carpool.engine.policy import Policy
from carpool.engine.request import Caller, Request
from carpool.simulate.costs import Cost

NOTHING, START = "nothing", "start"
KINDS = {
    NOTHING: "only the dice change: a finding here is none",
    START: "nothing either, but goodput is compared with that of Greedy: a calm run can be in a bad state, too",
    "hop stalls": "the way scatters (log-normal, 0.8), and 10 % of batches stall on it for 5 ms or a batch",
    "slow": "all batches take 10 times as long",
    "slow worker": "one worker takes 10 times as long",
    "fast": "all batches take a tenth",
    "noise": "batches scatter (log-normal, 0.8), and 5 % take 20 times as long",
    "large slow": "batches above a quarter of the limit take 5 times as long",
    "small slow": "batches up to half of the limit take as long as five full ones",
    "jump": "the machine sleeps for 20 s, and the clock goes on",
    "freeze": "nothing moves in the front for 300 ms, once a second",
    "burst": "20 times as much comes",
    "huge": "items of half a batch to a whole one come besides",
    "warm-up": "the very first batches take 20 times as long",
    "compile": "the first batch of each size on each worker takes 20 times as long for the first seconds",
    "errors": "all batches fail, in a tenth of their time",
    "slow errors": "all batches fail, in 3 times their time",
    "lost": "a worker dies, and one takes its place after a second",
    "trickle": "next to nothing comes",
}
AFTER_S = 5.0  # after the end of a disturbance: what is seen from then on counts
_WARM_S = 3.0  # what comes before a disturbance
_STALL_S, _SLEEP_S, _FROZEN_S = 5e-3, 20.0, 0.3
_BACKOFF_S = 0.02  # of a client after an error
_BIN_S = 0.05  # in which answers are counted


@dataclass(frozen=True, slots=True)
class Scenario:
    """What a service is like, and who uses it.

    Attributes:
        cost: Of batches, undisturbed.
        limit: Most that one batch may hold.
        sigma: Standard deviation of the logarithm of the noise on the cost.
        workers: How many there are.
        hop_s: Seconds of the way to a worker and back.
        hop_item_s: Seconds of it for each item besides.
        runs_ahead: Whether a batch may go to a worker that is still busy.
        clients: How many there are in the closed loop.
        think_s: Mean seconds between an answer and the next request of its client.
        rho: Poisson traffic, as a share of the capacity; 0 for the closed loop.
        slo_s: Within how many seconds an answer is good.
        timeout_s: Seconds after which a request expires.
        is_fast: Whether the model is trivial, so that all happens in a shorter time.
    """

    cost: Cost
    limit: int
    sigma: float = 0.0
    workers: int = 1
    hop_s: float = 0.0
    hop_item_s: float = 0.0
    runs_ahead: bool = False
    clients: int = 0
    think_s: float = 0.0
    rho: float = 0.0
    slo_s: float = inf
    timeout_s: float = inf
    is_fast: bool = False

    def __str__(self) -> str:
        words = [f"{self.cost}, limit {self.limit}, {self.workers} worker{'s' * (self.workers > 1)}"]
        words += [f"noise {self.sigma}"] if self.sigma else []
        words += [f"way {1e3 * self.hop_s:.2g} + {1e3 * self.hop_item_s:.2g} n ms"] if self.hop_s else []
        words += ["ahead"] if self.runs_ahead else []
        loop = f"{self.clients} clients, think {1e3 * self.think_s:.3g} ms"
        words += [f"poisson {self.rho:.2f}" if self.rho else loop]
        words += [f"SLO {1e3 * self.slo_s:.4g} ms"] if self.slo_s < inf else []
        words += [f"time-out {self.timeout_s:.2g} s"] if self.timeout_s < inf else []
        return ", ".join(words)

    @property
    def capacity(self) -> float:
        """Items a second of all workers, the way included."""
        each = max(n / (self.cost(n) + self.hop_s + n * self.hop_item_s) for n in range(1, self.limit + 1))
        return self.workers * each

    @property
    def window_s(self) -> float:
        """How long to look, so that there are enough answers to count."""
        return min(4.0, max(0.5, round(40_000 / self.capacity, 1)))

    def can_be(self, kind: str) -> bool:
        """Report whether a kind of disturbance means anything here."""
        if kind == "hop stalls":
            return self.hop_s > 0
        if kind == "slow worker":
            return self.workers > 1
        return kind != "huge" or not self.is_fast

    def span(self, kind: str | None) -> tuple[float, float]:
        """Return when a disturbance begins and when it ends, in seconds."""
        warm_s = 1.0 if self.is_fast else _WARM_S
        if kind in ("warm-up", "compile"):
            return 0.0, 1.0 if kind == "warm-up" else 2.0
        if kind == "jump":
            return warm_s, warm_s + 1e-6
        if kind == "burst":
            piles_up = self.rho and self.slo_s == self.timeout_s == inf
            return warm_s, warm_s + (0.05 / self.rho if piles_up else 0.5)
        return warm_s, warm_s + (1.0 if self.is_fast else 1.5 if self.rho and self.slo_s == inf else 3.0)

    def settled_at(self, kind: str | None) -> float:
        """Return when all should be as before.

        That is 5 s after the end of the disturbance, or once what had to pile up can have been
        worked off.
        """
        begin, end = self.span(kind)
        rho, rest_s = self.rho, 0.0
        if rho and self.slo_s == inf and kind not in (NOTHING, START, "trickle", "fast", None):
            load = 20 * rho if kind == "burst" else 0.5 + rho if kind == "huge" else rho
            rest_s = load * (end - begin) / (1.0 - rho)
        return end + AFTER_S + rest_s


class Figures(NamedTuple):
    """What came of a window.

    Attributes:
        good: Answers within the SLO, per second.
        answered: All answers without an error, per second.
        mean_s: Their mean latency; infinity without any.
        batch: The mean size of batches.
    """

    good: float
    answered: float
    mean_s: float
    batch: float


class World(VirtualDriver):
    """One run of a scenario, which counts its answers itself.

    Args:
        scenario: What is run.
        policy: Decides.
        kind: The disturbance; None for a calm run.
        key: The seed of all that is random.
        span: When the disturbance begins and ends; None for the usual time of its kind.

    Attributes:
        scenario: What is run.
        dice_key: The seed of costs, ways and clients. Open traffic has `key` in any case.
    """

    def __init__(
        self, scenario: Scenario, policy: Policy, kind: str | None, key: str, span: tuple[float, float] | None = None
    ) -> None:
        self.scenario, self._kind, self._key = scenario, kind, key
        self.dice_key = key + ("/other" if kind == NOTHING else "")
        self._begin, self._end = span or scenario.span(kind)
        self._cost_dice, self._way_dice, self._client_dice = (
            Random(f"{self.dice_key}/{name}") for name in ("cost", "way", "clients")
        )
        self._slept_s = 0.0
        self._slept_through = set[Batch]()
        self._compiled = set[tuple[int, int]]()  # places and sizes
        self._counts = defaultdict[int, list[float]](lambda: [0.0] * 5)  # by the time, in units of _BIN_S
        stage = Batcher("stage", policy, Queue(inf), runs_ahead=scenario.runs_ahead)
        core = Core([stage], slo_s=None if scenario.slo_s == inf else scenario.slo_s)
        super().__init__(
            core,
            self._seconds,
            [scenario.workers],
            [lambda items: [ValueError("disturbed")] * len(items) if self._is("errors", "slow errors") else items],
            hop_s=scenario.hop_s,
            hop_item_s=scenario.hop_item_s,
            watcher=self,
        )

    def play(self, until: float) -> World:
        """Run up to a time, and return itself."""
        scenario, begin, end = self.scenario, self._begin, self._end
        streams = []
        if scenario.rho:
            rate = scenario.rho * scenario.capacity
            streams.append(self._open("base", rate, 0.0, inf))
            if self._kind == "burst":
                streams.append(self._open("burst", 19 * rate, begin, end))
        else:
            for i in range(scenario.clients):
                self.at(self._client_dice.uniform(0.0, 0.02), _Client(self, i, inf).send)
            if self._kind == "burst":
                for i in range(19 * scenario.clients):
                    self.at(begin, _Client(self, -1 - i, end).send)
        if self._kind == "huge":  # as much work again as half of the capacity
            streams.append(self._open("huge", scenario.capacity / (1.5 * scenario.limit), begin, end, is_huge=True))
        self.feed(heapq.merge(*streams, key=lambda arrival: arrival[0]))
        if self._kind == "jump":
            self._at(begin, self._sleep)
        if self._kind == "freeze":
            for second in range(ceil(end - begin)):
                self._at(begin + second, self._freeze)
        if self._kind == "lost":
            self.at(begin, lambda: self.lose(0, 0, 1.0))
        self.run(until=until + (_SLEEP_S if self._kind == "jump" else 0.0))
        return self

    def figures(self, begin: float, window_s: float) -> Figures:
        """Return what came of a window."""
        first = round(begin / _BIN_S)
        bins = [self._counts[i] for i in range(first, first + round(window_s / _BIN_S)) if i in self._counts]
        good, n, took_s, size, batches = map(sum, zip(*bins, strict=True)) if bins else (0.0,) * 5
        return Figures(good / window_s, n / window_s, took_s / n if n else inf, size / batches if batches else 0.0)

    # -- what the clients ask for

    @property
    def now(self) -> float:
        """The time without what was slept."""
        return self.clock.now - self._slept_s

    def send(self, client: Caller) -> None:
        """Have a request of a client arrive now."""
        self.enter(Request(self.now, self.clock.now + self.scenario.timeout_s, client))

    def quiet_until(self) -> float:
        """Return when next to nothing comes until; 0 if it is not that time."""
        return self._end if self._is("trickle") else 0.0

    def _open(
        self, name: str, rate: float, begin: float, end: float, is_huge: bool = False
    ) -> Iterator[tuple[float, Request]]:
        """Yield Poisson traffic."""
        dice, now, limit = Random(f"{self._key}/{name}"), begin, self.scenario.limit
        while (now := now + dice.expovariate(rate)) < end:
            is_quiet = self._kind == "trickle" and self._begin <= now < self._end
            size = dice.randint(max(1, limit // 2), limit) if is_huge else 1
            if not is_quiet or dice.random() < 0.02:
                request = Request(now, now + self._slept_s + self.scenario.timeout_s)
                request.size = size
                yield now + self._slept_s, request

    # -- what happens to the batches

    def _is(self, *kinds: str) -> bool:
        """Report whether it is the time of a disturbance of one of these kinds."""
        return self._kind in kinds and self._begin <= self.now < self._end

    def _seconds(self, batch: Batch, now: float) -> float:
        """Return what a batch takes."""
        scenario, n, dice = self.scenario, batch.size, self._cost_dice
        sigma = scenario.sigma
        seconds = scenario.cost(n) * (dice.lognormvariate(-0.5 * sigma**2, sigma) if sigma else 1.0)
        if self._is("slow") or (self._is("slow worker") and batch.place == 0):
            seconds *= 10
        elif self._is("fast", "errors"):
            seconds *= 0.1
        elif self._is("slow errors"):
            seconds *= 3
        elif self._is("noise"):
            seconds *= dice.lognormvariate(-0.32, 0.8) * (20 if dice.random() < 0.05 else 1)
        elif self._is("large slow") and n > scenario.limit // 4:
            seconds *= 5
        elif self._is("small slow") and n <= scenario.limit // 2:
            seconds = 5 * scenario.cost(scenario.limit)
        elif self._is("warm-up"):
            seconds *= 20
        elif self._is("compile") and (batch.place, n) not in self._compiled:
            self._compiled.add((batch.place, n))
            seconds *= 20
        return seconds

    def _run(self, now: float, batch: Batch, hop_s: float) -> None:
        scenario, dice = self.scenario, self._way_dice
        if batch.ahead:
            hop_s += 0.5 * scenario.hop_s  # its reply comes back, too
        if self._is("hop stalls"):
            hop_s *= dice.lognormvariate(0.0, 0.8)
            stall_s = max(_STALL_S, scenario.cost(scenario.limit))
            hop_s += dice.expovariate(1.0 / stall_s) if dice.random() < 0.1 else 0.0
        super()._run(now, batch, hop_s)

    def _complete(self, batch: Batch, busy_s: float) -> None:
        if batch in self._slept_through:
            self._slept_through.remove(batch)
            busy_s += _SLEEP_S
        super()._complete(batch, busy_s)

    # -- what happens to the time

    def _sleep(self) -> None:
        """Have all that is to come happen later; workers count the time as theirs."""
        self._slept_s = _SLEEP_S
        self._slept_through = set(self._busy.values())
        self._events[:] = [(when + _SLEEP_S, order, event) for when, order, event in self._events]
        self._next_at += _SLEEP_S
        self._wake_at += _SLEEP_S

    def _freeze(self) -> None:
        """Have all that would come meanwhile happen at once when the front moves again."""
        until = self.clock.now + _FROZEN_S
        events = [(max(when, until), next(self._order), event) for when, _, event in sorted(self._events)]
        self._events[:] = events  # which is a heap, as it is sorted
        self._next_at, self._wake_at = max(self._next_at, until), max(self._wake_at, until)

    # -- what came of it, as its own watcher

    def started(self, now: float, batch: Batch, busy_s: float) -> None:
        counts = self._counts[int(self.now / _BIN_S)]
        counts[3] += batch.size
        counts[4] += 1

    def answered(self, now: float, requests: Sequence[Request]) -> None:
        counts, now, slo_s = self._counts[int(self.now / _BIN_S)], self.now, self.scenario.slo_s
        for request in requests:
            if request.error is None:
                took_s = now - request.item  # type: ignore[operator]  # it is when it was sent
                counts[0] += took_s <= slo_s
                counts[1] += 1
                counts[2] += took_s


class _Client:
    """One client of a closed loop; it backs off after an error."""

    def __init__(self, world: World, index: int, until: float) -> None:
        self._world, self._index, self._until = world, index, until
        self._dice = Random(f"{world.dice_key}/client/{index}")

    def send(self) -> None:
        """Send a request, unless its time is over or next to nothing is to come."""
        world = self._world
        quiet_until = world.quiet_until() if self._index else 0.0
        if quiet_until:
            world.at(quiet_until + self._dice.uniform(0.0, 0.02), self.send)
        elif world.now < self._until:
            world.send(self)

    def answered(self, request: Request) -> None:
        """Think, or back off, and send again."""
        mean_s = self._world.scenario.think_s if request.error is None else _BACKOFF_S
        self._world.at(self._world.clock.now + mean_s * self._dice.uniform(0.5, 1.5), self.send)
