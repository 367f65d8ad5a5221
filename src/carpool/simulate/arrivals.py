"""When requests come: by open processes, or from clients that wait for their answers.

Whatever form a user gives arrivals in, here they become a list of processes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from random import Random
from typing import Any

from carpool.simulate import specs
from carpool.simulate.arrival_processes import MMPP, Bursts, Flash, Gamma, Open, Poisson, Sine
from carpool.simulate.replay import GivenTimes, Trace

USUAL_ARRIVALS = "poisson:rate=800"
"""The requests of a simulation that is not told any, and the example in error texts."""

START_WITHIN_S = 0.02
"""The clients of a closed loop send their first requests at random within this time."""

THINKS = ("uniform", "exponential", "fixed")


@dataclass(frozen=True)
class Closed:
    """A closed loop: clients that wait for their answer, think, and ask again.

    Args:
        clients: How many there are; their first requests come at random within 20 ms.
        think_s: Mean time from an answer to the next request: mostly the way over the network.
        think: How this time is distributed: `uniform` (from a half to one and a half of the mean),
            `exponential` or `fixed`.
        backoff_s: Mean time from a refusal to the next try, distributed in the same way.
    """

    clients: int = 16
    think_s: float = 0.001
    think: str = "uniform"
    backoff_s: float = 0.02

    def __post_init__(self) -> None:
        if not isinstance(self.clients, int) or self.clients < 1:
            raise ValueError(f"closed: clients must be a whole number of at least 1, not {self.clients!r}")
        if self.think not in THINKS:
            raise ValueError(f"closed: think must be one of {', '.join(THINKS)}, not {self.think!r}")
        if self.think_s < 0 or not self.backoff_s > 0:
            raise ValueError("closed: think must be at least 0 and backoff positive")

    def pause_s(self, dice: Random, mean_s: float) -> float:
        """Draw the time that a client thinks or backs off, in seconds."""
        if self.think == "uniform":
            return mean_s * (0.5 + dice.random())
        if self.think == "exponential" and mean_s:
            return dice.expovariate(1 / mean_s)
        return mean_s

    def scaled(self, factor: float) -> Closed:
        """Return the same loop with `factor` times as many clients, but at least one."""
        return replace(self, clients=max(1, round(self.clients * factor)))


Arrivals = Open | Closed

KINDS: dict[str, Callable[..., Arrivals]] = {
    "poisson": Poisson,
    "gamma": Gamma,
    "mmpp": MMPP,
    "sine": Sine,
    "flash": Flash,
    "bursts": Bursts,
    "closed": Closed,
    "trace": Trace,
}
"""What a spec can name."""


def arrivals_of(arrivals: Any) -> list[Arrivals]:
    """Return the processes of one run, from a spec, a process, several of both, or times.

    Raises:
        ValueError: A spec is wrong; the text says what to change.
        TypeError: `arrivals` is none of these.
    """
    if isinstance(arrivals, Open | Closed):
        return [arrivals]
    if isinstance(arrivals, str):
        return [
            specs.build(part, KINDS, "arrival process", USUAL_ARRIVALS) for part in specs.split(arrivals, "+", KINDS)
        ]
    if isinstance(arrivals, list | tuple) and any(isinstance(part, str | Open | Closed) for part in arrivals):
        return [process for part in arrivals for process in arrivals_of(part)]
    if isinstance(arrivals, Iterable):
        return [GivenTimes(arrivals)]
    raise TypeError(
        f"arrivals must be a spec such as {USUAL_ARRIVALS!r}, a process, several, or times, not {arrivals!r}"
    )
