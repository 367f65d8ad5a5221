"""Virtual time: whoever asks for a simulation is told what raised in it, and nothing is left."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from carpool import simulate
from tests.foreign import surroundings  # noqa: F401
from tests.foreign.policies import AHEAD, ALONE, WARM_UP, Raises, Switch, row
from tests.foreign.table import BATCHES, CELLS, SERVICES, VIRTUAL, Way, left_out, place
from tests.foreign.ways import raised_by
from tests.support.kinds import fail, is_of

SIMULATION = "costs and arrivals of a simulation"


def raised(run: Callable[[], Any], kind: str) -> None:
    """A simulation ends with what was raised in it."""
    error = raised_by(run)
    assert is_of(error, kind) or is_of(error.__cause__, kind), error


@place(SIMULATION, VIRTUAL, "a cost")
def cost(way: Way, kind: str) -> None:
    raised(lambda: simulate.run(cost=lambda n: fail(kind), duration_s=0.1), kind)


@place(SIMULATION, VIRTUAL, "arrivals")
def arrivals(way: Way, kind: str) -> None:
    def times() -> Iterator[float]:
        yield 0.0
        yield 0.001
        fail(kind)

    raised(lambda: simulate.run(arrivals=times(), duration_s=0.1), kind)


for at in ("decide", "arrived", "learn", "limit"):

    @place(row(at), VIRTUAL)
    def policy(way: Way, kind: str, at: str = at) -> None:
        switch = Switch(kind)
        switch.at = at
        raised(lambda: simulate.run(policy=Raises(switch), duration_s=0.1), kind)
        assert switch.hits


left_out(SIMULATION, SERVICES + BATCHES, "they are for virtual time")
for at in ("left", AHEAD):
    left_out(row(at), VIRTUAL, "it is called where `decide` is, from the same loop")
for at in (WARM_UP, "explain", *ALONE):
    left_out(row(at), VIRTUAL, "there is no warm-up, nobody asks for statistics, and all wait in a queue")
for name in {cell.place for cell in CELLS}:
    if name != SIMULATION and not name.startswith("policies"):
        left_out(name, VIRTUAL, "workers, inputs and callers are made up there")
