"""What the batches of a run cost: curve, padding, noise, and the change from one key to another."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from random import Random

from carpool.engine.core.batch import Batch
from carpool.engine.policy import Policy
from carpool.simulate.costs import BatchShape
from carpool.simulate.servers import Servers
from carpool.simulate.traffic import Traffic


class BatchCosts:
    """Says how long each batch takes, and records its padding and its changes of key.

    Args:
        servers: The stages.
        policies: The policy of each stage, which says what batches are padded to.
        traffic: Knows the weights and the lengths of requests.
        switch_s: The seconds by which a batch takes longer if the one before on its worker had
            another key, or if it is the first.
        seed: The seed of everything random; each stage has a source of its own.
    """

    def __init__(
        self, servers: Servers, policies: Sequence[Policy], traffic: Traffic, switch_s: float, seed: int
    ) -> None:
        self._costs = servers.costs
        self._seconds = [cost.over(traffic.duration_s) for cost in servers.costs]
        self._dice = [Random(f"{seed}/cost/{i}") for i in range(len(self._seconds))]
        self._sizes = [_padding(policy.allowed_batch_sizes) for policy in policies]
        self._lengths = [_padding(policy.allowed_lengths) for policy in policies]
        self._traffic = traffic
        self._switch_s = switch_s
        self._last_keys: dict[tuple[int, int], Hashable] = {}

    def __call__(self, batch: Batch, now: float) -> float:
        """Return the seconds that a batch which is handed to its worker now takes."""
        stage = batch.stage
        work = self._work(batch)
        seconds = self._seconds[stage](work, now, self._dice[stage])
        record = self._traffic.record.stages[stage]
        if work.lengths:
            record.computed += self._costs[stage].computed(work)
            record.of_requests += sum(work.lengths)
        if self._traffic.has_keys and self._is_switch(batch):
            record.switches += 1
            seconds += self._switch_s
        return seconds

    def _work(self, batch: Batch) -> BatchShape:
        """Return what the worker of a batch is given."""
        stage = batch.stage
        n = self._sizes[stage](self._traffic.weight_of(batch))
        lengths = self._traffic.lengths_of(batch)
        return BatchShape(n, self._lengths[stage](max(lengths)), lengths) if lengths else BatchShape(n)

    def _is_switch(self, batch: Batch) -> bool:
        """Report whether a batch has another key than the one before on its worker."""
        place, key = (batch.stage, batch.place), batch.requests[0].lane.key
        is_switch = place not in self._last_keys or self._last_keys[place] != key
        self._last_keys[place] = key
        return is_switch


def _padding(allowed: Sequence[int] | None) -> Callable[[float], float]:
    """Return the function from a size or a length to the one that it is padded to."""
    if not allowed:
        return lambda n: n
    return lambda n: next((each for each in allowed if each >= n), n)
