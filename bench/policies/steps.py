"""Policies of steps, and what others do, by what their readers see, in virtual time.

    python -m bench policies.steps --trace AzureLLMInferenceTrace_code.csv

A row of the table is a load, a column a rule: static batches (a set that runs is joined by nobody
and padded to its first size), greedy (all that fits joins at once, as in Orca and in LitServe's
continuous loop), the counters of text-generation-inference, inputs in chunks of 256 and 512 units
(Sarathi-Serve, vLLM) and carpool's `paced`. Each of them refuses a request as soon as its first
part cannot come in time any more, by its own reckoning. A cell has % of requests good / good and
smooth, and the 99th percentile of the longest gap in ms. A second table has noise (cv 0.3), stalls
and costs that must be learned; chunks, which know no costs, are not in it.

The loads `code` need the trace of the Azure public dataset (CC-BY 4.0; Patel et al., "Splitwise");
they are left out without it. The costs stand for a GPU of 5 ms + 0.1 ms a token and 18 ms + 0.15 ms
a row, a small decoder on a CPU, and a diffusion model of 30 equal steps.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from bench.policies.step_rules import Counters, chunked, static
from bench.tools import options
from bench.tools.docs import write
from bench.tools.figures import commit, table
from carpool.engine.policy import GreedySteps, Paced
from carpool.simulate.steps import StepCost, StepReport, run_steps

GPU = StepCost(5e-3, 1e-4, 18e-3, 1.5e-4)
TINY = StepCost(1.1e-3, 9e-5, 1.2e-3, 1.75e-4)
EQUAL = StepCost(1e-2, 0.0, 2e-2, 3e-2)
CHAT = "lognormal:input=200.3,output=181.3,input_sigma=1.1,output_sigma=0.8,most_input=2048,most_output=1024"
SMALL = "exponential:least_input=8,most_input=64,output=32,most_output=160"


class Load(NamedTuple):
    """One row of the tables.

    Attributes:
        name: For people.
        settings: What `run_steps` takes.
    """

    name: str
    settings: dict[str, Any]


def loads(trace: Path | None) -> list[Load]:
    """All loads; those of the trace only if there is one."""
    gpu = {"cost": GPU, "part_slo_s": 0.05, "rows": 64, "most_requests": 1500}
    chat = {**gpu, "lengths": CHAT, "slo_s": 1.0}
    tiny = {"cost": TINY, "lengths": SMALL, "slo_s": 0.05, "part_slo_s": 0.01, "rows": 32, "most_requests": 3000}
    equal = {"cost": EQUAL, "lengths": "fixed:input=1,output=30", "slo_s": 5 / 6, "part_slo_s": 0.1437, "rows": 16}
    made = []
    if trace is not None:
        code = {**gpu, "lengths": f"trace:{trace}", "slo_s": 2.0}
        own = {"arrivals": f"trace:{trace}", "lengths": f"trace:{trace},in_order=yes"}
        made = [poisson("code", code, 2), poisson("code", code, 4), Load("code, its own arrivals", {**code, **own})]
    return [
        *made,
        poisson("chat", chat, 8),
        poisson("chat", chat, 10),
        poisson("tiny", tiny, 60),
        poisson("tiny", tiny, 100),
        poisson("30 steps", {**equal, "most_requests": 1000}, 0.6),
        poisson("30 steps", {**equal, "most_requests": 1000}, 1.0),
    ]


def poisson(name: str, settings: dict[str, Any], rate: float) -> Load:
    """A load at so many requests a second."""
    return Load(f"{name} {rate:g}", {**settings, "arrivals": f"poisson:rate={rate}"})


RULES: dict[str, Callable[..., StepReport]] = {
    "static": static,
    "greedy": partial(run_steps, GreedySteps),
    "TGI": partial(run_steps, Counters),
    "chunks of 256": partial(chunked, 256),
    "chunks of 512": partial(chunked, 512),
    "**paced**": partial(run_steps, Paced),
}
LEARNING = ("static", "greedy", "TGI", "**paced**")
"""Rules that are run with noise and learned costs, too."""


def main() -> int:
    given = arguments()
    chosen = [load for load in loads(given.trace) if not given.only or load.name.startswith(given.only)]
    texts = {}
    with ProcessPoolExecutor(given.jobs) as pool:
        for name, rules, change in (("steps", tuple(RULES), known), ("steps-noise", LEARNING, noisy)):
            lines = []
            for load in chosen:
                settings = {**change(load.settings), "duration_s": 1e9, "seed": given.seed}
                found = list(pool.map(_run, [(rule, settings) for rule in rules]))
                lines.append((load.name, *map(cell, found)))
                print(*lines[-1], sep="  ", flush=True)
            texts[name] = table(("load, requests/s", *rules), lines, markdown=True)
            print(f"\n{texts[name]}\n")
    print(f"commit {commit()}")
    if given.docs:
        write(texts)
    return 0


def arguments() -> argparse.Namespace:
    parser = options.parser(__doc__)
    parser.add_argument("--trace", type=Path, help="the CSV file of the trace")
    parser.add_argument("--only", default="", help="only loads whose names begin so")
    parser.add_argument("--seed", type=int, default=1, help="default: %(default)s")
    parser.add_argument("--jobs", type=int, default=2, help="processes; default: %(default)s")
    parser.add_argument("--docs", action="store_true", help="write the tables into docs/")
    return parser.parse_args()


def known(settings: dict[str, Any]) -> dict[str, Any]:
    """The load as it is; all costs are known."""
    return settings


def noisy(settings: dict[str, Any]) -> dict[str, Any]:
    """The same load with a cv of 0.3, one stall of 20 paces in 500, and costs to be learned."""
    cost: StepCost = settings["cost"]
    disturbed = replace(cost, sigma=0.294, stall_share=0.002, stall_s=20 * settings["part_slo_s"])
    return {**settings, "cost": disturbed, "learned": True}


def cell(report: StepReport) -> str:
    """% good / good and smooth, and the 99th percentile of the longest gap in ms."""
    return f"{100 * report.good:.0f}/{100 * report.smooth:.0f}, {1000 * report.gap_p99_s:.0f}"


def _run(given: tuple[str, dict[str, Any]]) -> StepReport:
    rule, settings = given
    return RULES[rule](**settings)


if __name__ == "__main__":
    raise SystemExit(main())
