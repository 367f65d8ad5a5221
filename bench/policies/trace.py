"""All policies on a real trace of requests to a language model, sped up to a share of capacity.

    python -m bench.policies.trace AzureLLMInferenceTrace_code.csv

The file has the columns TIMESTAMP, ContextTokens and GeneratedTokens, as the Azure public dataset
has them (CC-BY 4.0; Patel et al., "Splitwise", ISCA 2024). A request's size is its context: batches
are limited in tokens, and each costs a fixed time and a time per token, as reading prompts does.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from bench.policies.runs import Case, Row, Runs, add_running, chosen
from bench.tools import options
from bench.tools.docs import write
from bench.tools.figures import commit, table
from carpool.simulate.costs import cost_of

COSTS = ("affine:a=20ms,b=0.01ms", "affine:a=20ms,b=0.05ms")  # prompts read at 100,000 and at 20,000 tokens a second
SLO_BATCHES = 3.0


def main() -> int:
    given = arguments()
    if not given.trace.exists():
        sys.exit(f"there is no file {given.trace}: see --help for the columns that it must have")
    policies = chosen(given.policies)
    runs = Runs(given.cache, given.jobs)
    lines = []
    for cost in given.costs.split(";"):
        for load in map(float, given.loads.split(",")):
            settings = settings_of(given.trace, cost, load, given.max_batch_tokens)
            rows = runs.rows([Case(policy, settings, 0) for policy in policies], f"{cost} at {load:g}")
            lines += cells(f"{cost.partition(':')[2]} at {load:g}", settings["slo_s"], rows)
    text = table(HEADER, lines, markdown=True)
    print(f"{text}\n\ncommit {commit()}")
    if given.docs:
        write({"trace": text})
    return 0


def arguments() -> argparse.Namespace:
    parser = options.parser(__doc__)
    parser.add_argument("trace", type=Path, help="the CSV file")
    parser.add_argument("--loads", default="0.7,1.2", help="as shares of capacity; default: %(default)s")
    parser.add_argument("--costs", default=";".join(COSTS), help="separated by semicolons; default: %(default)s")
    parser.add_argument("--max-batch-tokens", type=int, default=16_384, help="default: %(default)s")
    parser.add_argument("--docs", action="store_true", help="write the table into docs/")
    add_running(parser)
    return parser.parse_args()


HEADER = ("cost, load", "SLO (ms)", "policy", "goodput (1/s)", "attainment", "mean (ms)", "p99 (ms)", "mean batch")


def settings_of(trace: Path, cost: str, load: float, max_batch_tokens: int) -> dict[str, object]:
    """What to simulate: the whole trace, with an SLO of three full batches."""
    return {
        "arrivals": f"trace:path={trace},size=ContextTokens,rho={load:g}",
        "cost": cost,
        "max_batch_size": max_batch_tokens,
        "slo_s": float(f"{SLO_BATCHES * cost_of(cost)(max_batch_tokens):.3g}"),
        "duration_s": None,
        "weights_known": True,
    }


def cells(name: str, slo_s: object, rows: Sequence[Row]) -> list[list[str]]:
    """A line for each policy."""
    assert isinstance(slo_s, float)
    return [
        [
            name,
            f"{slo_s * 1e3:.0f}",
            row.policy,
            f"{row.goodput:.4g}",
            f"{row.attainment:.3f}",
            f"{row.mean_s * 1e3:.1f}",
            f"{row.p99_s * 1e3:.1f}",
            f"{row.mean_batch_size:.2f}",
        ]
        for row in rows
    ]


if __name__ == "__main__":
    sys.exit(main())
