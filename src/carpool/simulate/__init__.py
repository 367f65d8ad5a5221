"""The simulator: the decisions of a service under a virtual clock, as fast as they can be made."""

from __future__ import annotations

from carpool.simulate.arrivals import MMPP, Bursts, Closed, Flash, Gamma, Poisson, Sine, Trace
from carpool.simulate.compare import compare, sweep
from carpool.simulate.coordinator import Coordinator
from carpool.simulate.costs import Affine, Cost, Drifting, Grid, Knee, Noisy, Padded, SortedInside, Sqrt, Table, Tile
from carpool.simulate.engine import run
from carpool.simulate.features import (
    Bimodal,
    Equal,
    Exponential,
    Fixed,
    FromFile,
    InTurn,
    Lognormal,
    Pareto,
    Recorded,
    Zipf,
)
from carpool.simulate.report import Report, mean_of
from carpool.simulate.servers import capacity
from carpool.simulate.steps import StepCost, StepReport, run_steps

__all__ = [
    "MMPP",
    "Affine",
    "Bimodal",
    "Bursts",
    "Closed",
    "Coordinator",
    "Cost",
    "Drifting",
    "Equal",
    "Exponential",
    "Fixed",
    "Flash",
    "FromFile",
    "Gamma",
    "Grid",
    "InTurn",
    "Knee",
    "Lognormal",
    "Noisy",
    "Padded",
    "Pareto",
    "Poisson",
    "Recorded",
    "Report",
    "Sine",
    "SortedInside",
    "Sqrt",
    "StepCost",
    "StepReport",
    "Table",
    "Tile",
    "Trace",
    "Zipf",
    "capacity",
    "compare",
    "mean_of",
    "run",
    "run_steps",
    "sweep",
]
