"""Batching rules of other systems, to be simulated beside the policies of a service.

No service can choose them. Each file names its source, and what it leaves out.
"""

from __future__ import annotations

from collections.abc import Callable

from carpool.engine.policy import Policy
from carpool.simulate.contestants.batch import SelfTuned
from carpool.simulate.contestants.clockwork import Clockwork
from carpool.simulate.contestants.ray import Ray
from carpool.simulate.contestants.symphony import Symphony
from carpool.simulate.contestants.triton import Triton
from carpool.simulate.contestants.tuned import GRID, Tuned
from carpool.simulate.contestants.window import Window

__all__ = ["CONTESTANTS", "GRID", "Tuned"]

CONTESTANTS: dict[str, Callable[..., Policy]] = {
    "window": Window,
    "ray": Ray,
    "triton": Triton,
    "symphony": Symphony,
    "clockwork": Clockwork,
    "batch": SelfTuned,
    "tuned": Tuned,
}
"""The contestants by the names that a spec can give."""
