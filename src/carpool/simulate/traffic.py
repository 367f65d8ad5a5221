"""The requests of one run, and what sends them: open processes and the clients of closed loops.

Each purpose has a random source of its own, so that all policies see the same arrivals with the
same weights and SLOs, whatever they decide. Only a closed loop's arrivals depend on the decisions.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from math import inf
from random import Random

from carpool.core.batch import Batch
from carpool.drive.virtual import VirtualDriver
from carpool.request import Request
from carpool.service.checks import optional_seconds
from carpool.simulate.arrival_processes import Open, Scene
from carpool.simulate.arrivals import START_WITHIN_S, Arrivals, Closed
from carpool.simulate.record import UNFINISHED, Record
from carpool.simulate.replay import Trace
from carpool.simulate.servers import Servers
from carpool.simulate.weights import Weights


class Traffic:
    """Makes the requests of a run, and a record of them.

    Args:
        processes: The processes and closed loops that send requests.
        servers: The stages; loads are shares of their capacity.
        slos: SLOs in seconds; each request has one of them.
        duration_s: How long requests arrive; None for the length of the (longest) trace.
        weights: The weights of requests that bring none; None where these weigh 1.
        weights_known: Whether the core is told the weights, as sizes.
        seed: The seed of everything random.

    Attributes:
        duration_s: How long requests arrive, as given or found.
        record: What happens to the requests.
        load: The mean arrival rate as a share of capacity; None with a closed loop,
            because its rate depends on the answers.

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
        weights: Weights | None = None,
        weights_known: bool = False,
        seed: int = 0,
    ) -> None:
        self._servers = servers
        self._slos = slos
        self._weights = weights
        self._weights_known = weights_known
        self._seed = seed
        self._slo_dice = Random(f"{seed}/slo")
        self._weight_dice = Random(f"{seed}/weights")
        self._has_weights = weights is not None or any(_own_weights(process) is not None for process in processes)
        self._loops = [process for process in processes if isinstance(process, Closed)]
        self._driver: VirtualDriver
        open = [process for process in processes if not isinstance(process, Closed)]
        optional_seconds("duration_s", duration_s)
        self.duration_s = self._longest_s(open) if duration_s is None else duration_s
        self._open = [(process, self._scene(process, self.duration_s)) for process in open]
        self.record = Record(self.duration_s, len(servers.costs), slos)
        rates = [process.mean_rate(scene) / scene.capacity for process, scene in self._open]
        self.load = None if self._loops else sum(rates)

    def begin(self, driver: VirtualDriver) -> None:
        """Let open processes feed the driver, and clients send their first requests."""
        self._driver = driver
        streams = [self._stream(i, process, scene) for i, (process, scene) in enumerate(self._open)]
        merged = streams[0] if len(streams) == 1 else heapq.merge(*streams, key=lambda entry: entry[0])
        driver.feed((when, self._request(when, weight)) for when, weight in merged)
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
            self._driver.enter(self._request(now, None, client))

    def after(self, pause_s: float, client: _Client) -> None:
        """Let a client send again after `pause_s` seconds."""
        self._driver.at(self._driver.clock.now + pause_s, client.send)

    def weight_of(self, batch: Batch) -> float:
        """Return what a batch weighs, from which its cost follows."""
        if not self._has_weights:
            return len(batch)
        if self._weights_known:
            return batch.size
        weights = self.record.weights
        return sum([weights[request.item] for request in batch.requests])  # type: ignore[call-overload]

    def weigh(self, request: Request, index: object) -> None:
        """Give a request its size in a later stage, the same as in the first.

        A batcher passes the result of the stage before, which in a simulation is the request's
        index in the record.
        """
        request.size = _size(self.record.weights[index]) if self._tells_sizes else 1  # type: ignore[call-overload]

    @property
    def _tells_sizes(self) -> bool:
        return self._has_weights and self._weights_known

    def _request(self, when: float, weight: float | None, client: _Client | None = None) -> Request:
        """Make a request that arrives at `when`, with its index in the record as its item."""
        record = self.record
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
                weight = 1.0 if self._weights is None else self._weights.draw(self._weight_dice)
            if self._weights_known:
                request.size = _size(weight)
            record.weights.append(weight)
        return request

    def _stream(self, index: int, process: Open, scene: Scene) -> Iterator[tuple[float, float | None]]:
        """Yield the arrival times of one process, each with the weight that it brings, or None."""
        times = process.times(Random(f"{self._seed}/arrivals/{index}"), scene)
        own = _own_weights(process)
        return ((when, None) for when in times) if own is None else zip(times, own, strict=False)

    def _scene(self, process: Open, duration_s: float) -> Scene:
        """Return what a process must know of the run, with the capacity for its own weights."""
        return Scene(duration_s, self._servers.capacity(self._mean_weight(process), weights_known=self._weights_known))

    def _mean_weight(self, process: Open) -> float:
        """Return the mean weight of a process's requests, as the core counts it."""
        own = _own_weights(process)
        if own is None:
            return 1.0 if self._weights is None else self._weights.mean
        sizes = list(map(_size, own)) if self._weights_known else own
        return sum(sizes) / len(sizes)

    def _longest_s(self, processes: Sequence[Open]) -> float:
        """Return the seconds of the longest trace. Raises ValueError if there is none."""
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
        """Send a request now."""
        self._traffic.send(self)

    def answered(self, request: Request) -> None:
        """Think, or back off after a refusal, and send again."""
        loop = self._loop
        mean_s = loop.think_s if request.error is None else loop.backoff_s
        self._traffic.after(loop.pause_s(self._dice, mean_s), self)


def _own_weights(process: Arrivals) -> Sequence[float] | None:
    """Return the weights that a trace brings; None for anything else."""
    return process.weights() if isinstance(process, Trace) else None


def _size(weight: float) -> int:
    """Return the size that a weight becomes for policies that know weights."""
    return max(1, math.ceil(weight))
