"""Cost models that have learned a known curve, and the curves of the measurements in the docs, in seconds."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import cycle, islice
from random import Random

from carpool.engine.policy.cost import CostModel
from carpool.simulate import Affine, Knee, Tile

FIXED = Affine(0.008, 0.00025)
"""Mostly set-up: 2667 items a second at 64."""

TILES = Tile(0.003, 0.004, 16)
"""The same for 1 to 16, for 17 to 32 ...: 3368 items a second at 64."""

KNEE = Knee(0.008, 0.00025, 32, 0.0009)
"""Best at 32, with 2000 items a second."""


def learned(
    seconds: Callable[[float], float],
    limit: int = 64,
    sizes: Iterable[int] = (),
    batches: int = 2000,
    noise: float = 0.0,
) -> CostModel:
    """A cost model after batches of these sizes by turns, or of all up to the limit in some order.

    Each took as long as `seconds` says, amid log-normal noise of this sigma.
    """
    dice = Random(0)
    if not sizes:
        sizes = dice.sample(range(1, limit + 1), limit)
    model = CostModel(limit)
    for n in islice(cycle(sizes), batches):
        model.add(n, seconds(n) * dice.lognormvariate(0.0, noise))
    return model
