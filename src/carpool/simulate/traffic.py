"""The requests of one run, and their senders: open processes, and clients of closed loops.

Each purpose has a random source of its own, so that all policies see the same arrivals with the
same weights, lengths, keys and SLOs, whatever they decide. Only a closed loop's arrivals depend on
the decisions.
"""

from __future__ import annotations

import functools
import heapq
import math
from collections.abc import Callable, Iterator, Sequence
from itertools import repeat
from math import inf
from random import Random
from typing import NamedTuple

from carpool.engine.core.batch import Batch
from carpool.engine.drive.virtual import VirtualDriver
from carpool.engine.request import Lane, Request
from carpool.service.checks import optional_seconds
from carpool.simulate.arrivals import START_WITHIN_S, Arrivals, Closed, Open, Scene, Trace
from carpool.simulate.features import ALIKE, Features, Length, Lengths, sample_of
from carpool.simulate.report import UNFINISHED, Record
from carpool.simulate.servers import Servers


class _Arrival(NamedTuple):
    """One request of an open process, with the weight and the length that it brings, if any."""

    when: float
    weight: float | None = None
    length: int | None = None


class Traffic:
    """Makes the requests of a run, and a record of them.

    Args:
        slos: SLOs in seconds; each request has one of them.
        duration_s: How long requests arrive; None for the length of the (longest) trace.
        settle_s: How long requests arrive before those that count.

    Attributes:
        duration_s: How long requests arrive, as given or found.
        load: The mean arrival rate as a share of capacity; None with a closed loop, because its
            rate depends on the answers.

    Raises:
        ValueError: A duration makes no sense.
    """

    def __init__(
        self,
        processes: Sequence[Arrivals],
        servers: Servers,
        *,
        slos: Sequence[float] = (inf,),
        duration_s: float | None = 30.0,
        features: Features = ALIKE,
        settle_s: float = 0.0,
        seed: int = 0,
    ) -> None:
        self._servers = servers
        self._slos = slos
        self._features = features
        self._seed = seed
        self._slo_dice = Random(f"{seed}/slo")
        self._weight_dice = Random(f"{seed}/weights")
        self._drawn_lengths = _drawn(features.lengths, Random(f"{seed}/lengths"))
        self._drawn_lanes = None if features.keys is None else map(_lane, features.keys.draw(Random(f"{seed}/keys")))
        self._has_weights = features.weights is not None or any(_own_weights(p) is not None for p in processes)
        self._has_lengths = features.lengths is not None or any(_own_lengths(p) is not None for p in processes)
        if self._has_weights and self._has_lengths:
            raise ValueError("requests have weights or lengths, but not both: leave out one of them")
        self._loops = [process for process in processes if isinstance(process, Closed)]
        self._driver: VirtualDriver
        open = [process for process in processes if not isinstance(process, Closed)]
        optional_seconds("duration_s", duration_s)
        self.duration_s = self._longest_s(open) if duration_s is None else duration_s
        self._open = [(process, self._scene(process, self.duration_s)) for process in open]
        if settle_s >= self.duration_s:
            raise ValueError(f"settle_s must be less than the {self.duration_s:g} s for which requests arrive")
        self.record = Record(self.duration_s, len(servers.costs), slos, settle_s)
        rates = [process.mean_rate(scene) / scene.capacity for process, scene in self._open]
        self.load = None if self._loops else sum(rates)

    def times(self) -> Iterator[float]:
        """Yield when requests of open processes arrive, process by process."""
        for i, (process, scene) in enumerate(self._open):
            for when, *_ in self._stream(i, process, scene):
                yield when

    @property
    def has_keys(self) -> bool:
        """Whether only requests with equal keys may share a batch."""
        return self._drawn_lanes is not None

    @property
    def plain_costs(self) -> tuple[Callable[[float], float], ...]:
        """For each stage the mean seconds of a batch of n in order of arrival, undisturbed."""
        own = next((process for process, _ in self._open if _own_lengths(process) is not None), None)
        return self._servers.plain_costs(self._lengths(own))

    def begin(self, driver: VirtualDriver) -> None:
        """Let open processes feed the driver, and clients send their first requests."""
        self._driver = driver
        streams = [self._stream(i, process, scene) for i, (process, scene) in enumerate(self._open)]
        merged = streams[0] if len(streams) == 1 else heapq.merge(*streams, key=lambda arrival: arrival.when)
        driver.feed((arrival.when, self._request(arrival)) for arrival in merged)
        clients = 0
        for i, loop in enumerate(self._loops):
            dice = Random(f"{self._seed}/closed/{i}")
            for _ in range(loop.clients):
                client = _Client(clients, loop, dice, self)
                driver.at(dice.uniform(0.0, START_WITHIN_S), client.send)
                clients += 1

    def send(self, client: _Client) -> None:
        """Let a request of a client arrive now, unless the time of arrivals is over."""
        now = self._driver.clock.now
        if now < self.duration_s:
            self._driver.enter(self._request(_Arrival(now), client))

    def after(self, pause_s: float, client: _Client) -> None:
        """Let a client send again after `pause_s` seconds."""
        self._driver.at(self._driver.clock.now + pause_s, client.send)

    def weight_of(self, batch: Batch) -> float:
        """Return the weight of a batch, from which its cost follows."""
        if not self._has_weights:
            return len(batch)
        if self._features.weights_known:
            return batch.size
        weights = self.record.weights
        return sum([weights[request.item] for request in batch.requests])  # type: ignore[call-overload]

    def lengths_of(self, batch: Batch) -> Sequence[int]:
        """Return the lengths of a batch's requests; empty where they have none."""
        if not self._has_lengths:
            return ()
        lengths = self.record.lengths
        return [lengths[request.item] for request in batch.requests]  # type: ignore[call-overload]

    def weigh(self, request: Request, index: object, format: int = 0) -> None:
        """Do nothing: in each stage a request has the size and the length that it has in the first.

        A batcher passes the result of the stage before, which in a simulation is the request's
        index in the record.
        """

    @property
    def tells_lengths(self) -> bool:
        """Whether the core gets the lengths of requests."""
        return self._has_lengths and self._features.lengths_known

    def _request(self, arrival: _Arrival, client: _Client | None = None) -> Request:
        """Make a request with its index in the record as its item."""
        when, weight, length = arrival
        record, features = self.record, self._features
        request = Request(len(record.arrived), inf, client)
        record.arrived.append(when)
        record.finished.append(UNFINISHED)
        if self._loops:
            record.client.append(-1 if client is None else client.index)
        slo_s = self._slos[0]
        if len(self._slos) > 1:
            slo_s = self._slo_dice.choice(self._slos)
            record.slo_s.append(slo_s)
        request.due = when + slo_s
        if self._has_weights:
            if weight is None:
                weight = 1.0 if features.weights is None else features.weights.draw(self._weight_dice)
            if features.weights_known:
                request.size = _size(weight)
            record.weights.append(weight)
        if self._has_lengths:
            if length is None:
                length = next(self._drawn_lengths).input
            record.lengths.append(length)
            if features.lengths_known:
                request.length = length
        if self._drawn_lanes is not None:
            request.lane = next(self._drawn_lanes)
        return request

    def _stream(self, index: int, process: Open, scene: Scene) -> Iterator[_Arrival]:
        """Yield the arrivals of one process, each with the weight and the length that it brings."""
        times = process.times(Random(f"{self._seed}/arrivals/{index}"), scene)
        return map(_Arrival, times, _own_weights(process) or repeat(None), _own_lengths(process) or repeat(None))

    def _scene(self, process: Open, duration_s: float) -> Scene:
        return Scene(duration_s, self.capacity(process))

    def capacity(self, process: Arrivals | None = None) -> float:
        """Return the most requests per second that can be served for ever."""
        known = self._features.weights_known
        return self._servers.capacity(self._mean_weight(process), weights_known=known, lengths=self._lengths(process))

    def _mean_weight(self, process: Arrivals | None) -> float:
        own, weights = _own_weights(process), self._features.weights
        if own is None:
            return 1.0 if weights is None else weights.mean
        sizes = list(map(_size, own)) if self._features.weights_known else own
        return sum(sizes) / len(sizes)

    def _lengths(self, process: Arrivals | None) -> Sequence[int]:
        own, lengths = _own_lengths(process), self._features.lengths
        if own is not None:
            return own
        return [] if lengths is None else sample_of(lengths)

    def _longest_s(self, processes: Sequence[Open]) -> float:
        lengths = [process.length_s(self._scene(process, 0.0)) for process in processes if isinstance(process, Trace)]
        if not lengths:
            raise ValueError("duration_s can only be left out for a trace, which has a length of its own")
        return max(lengths)


class _Client:
    """One client of a closed loop: it asks, waits for the answer, thinks, and asks again."""

    __slots__ = ("_dice", "_loop", "_traffic", "index")

    def __init__(self, index: int, loop: Closed, dice: Random, traffic: Traffic) -> None:
        self.index = index
        self._loop = loop
        self._dice = dice
        self._traffic = traffic

    def send(self) -> None:
        self._traffic.send(self)

    def answered(self, request: Request) -> None:
        loop = self._loop
        mean_s = loop.think_s if request.error is None else loop.backoff_s
        self._traffic.after(loop.pause_s(self._dice, mean_s), self)


def arrivals_per_second(traffic: Traffic) -> dict[float, float]:
    """Return how many requests open processes send in each second of a run, by when it begins."""
    counts: dict[float, float] = dict.fromkeys(map(float, range(math.ceil(traffic.duration_s))), 0.0)
    for when in traffic.times():
        counts[float(int(when))] += 1
    return counts


def _own_weights(process: Arrivals | None) -> Sequence[float] | None:
    """Return the weights that a trace brings; None for anything else."""
    return process.weights() if isinstance(process, Trace) else None


def _own_lengths(process: Arrivals | None) -> Sequence[int] | None:
    """Return the lengths that a trace brings; None for anything else."""
    return process.lengths() if isinstance(process, Trace) else None


def _drawn(lengths: Lengths | None, dice: Random) -> Iterator[Length]:
    """Yield the lengths of requests that bring none, which are 1 where no source is given."""
    return repeat(Length(1)) if lengths is None else lengths.draw(dice)


@functools.cache
def _lane(key: int) -> Lane:
    return Lane(0, key, 0)


def _size(weight: float) -> int:
    """Return the size that a weight becomes for policies that have weights."""
    return max(1, math.ceil(weight))
