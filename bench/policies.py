"""All policies on all workloads, in virtual time: who answers how many in time, and how soon.

    python -m bench.policies --quick        a tenth of it, in about two minutes
    python -m bench.policies --docs         everything, written into docs/policies-evidence.md

An interrupted run goes on where it was; runs are made again when the sources that they depend on change.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from bench import policy_oracles, policy_random
from bench.figures import ROOT, commit
from bench.policy_figures import draw_gains, draw_loads
from bench.policy_runs import SPECS, Case, Runs, unknown
from bench.policy_tables import (
    OURS,
    RIVALS,
    Means,
    Results,
    best_table,
    closed_loop_ratios,
    duels_with_best,
    summary_table,
    workload_table,
)
from bench.policy_workloads import Workload, load

DOCS = ROOT / "docs" / "policies-evidence.md"
CACHE = Path(os.environ.get("CARPOOL_BENCH_ENVS") or Path.home() / ".cache" / "carpool-bench") / "policies.jsonl"
PARTS = ("table", "oracles", "pictures", "random")
QUICK = 0.5  # of each duration, and one seed of five


@dataclass(frozen=True, slots=True)
class Plan:
    """What is run.

    Attributes:
        quick: a tenth of everything.
        pictures: the folder that they go to; None if there are to be none.
    """

    policies: Sequence[str]
    workloads: Sequence[Workload]
    seeds: int
    quick: bool
    pictures: Path | None


def main() -> int:
    given = arguments()
    plan = plan_of(given)
    runs = Runs(given.cache, given.jobs)
    sections: dict[str, str] = {}
    figures: dict[str, object] = {}
    began = time.monotonic()
    try:
        if "table" in given.parts:
            sections |= compare(plan, runs, figures)
        if "oracles" in given.parts:
            sections["latency"] = policy_oracles.latency_table(runs, quick=plan.quick)
            sections["clairvoyant"] = policy_oracles.goodput_table(runs)
        if plan.pictures and "pictures" in given.parts:
            draw_loads(plan.pictures / "policies-load.svg", plan.policies, runs, duration_s=4 if plan.quick else 20)
        if "random" in given.parts:
            sections["random"] = scenarios(given.random, given.seed_text, plan, runs, figures)
    except KeyboardInterrupt:
        print("interrupted; what is done is remembered", file=sys.stderr)
        return 1
    for name, text in sections.items():
        print(f"\n## {name}\n\n{text}")
    minutes = (time.monotonic() - began) / 60
    print(f"\ncommit {commit()}, {minutes:.1f} minutes")
    if given.json:
        given.json.write_text(json.dumps(figures, indent=1, default=str))
    if given.docs:
        write(DOCS, sections)
    return 0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one seed, half of each duration")
    parser.add_argument("--policies", default=",".join(SPECS), help="separated by commas; default: %(default)s")
    parser.add_argument("--workloads", default="", metavar="REGEX", help="those whose names match; default: all")
    parser.add_argument("--seeds", type=int, default=5, help="default: %(default)s")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="default: %(default)s")
    parser.add_argument("--parts", default="table,oracles,pictures", help=f"of {','.join(PARTS)}; default: %(default)s")
    parser.add_argument("--random", type=int, default=0, metavar="N", help="so many random scenarios as well")
    parser.add_argument("--seed-text", default="", help="what they are drawn with: the commit that froze the code")
    parser.add_argument("--json", type=Path, metavar="FILE", help="every figure")
    parser.add_argument("--docs", action="store_true", help="write tables and pictures into docs/")
    parser.add_argument("--pictures", type=Path, default=None, metavar="DIR", help="draw, without --docs")
    parser.add_argument("--cache", type=Path, default=CACHE, metavar="FILE", help="default: %(default)s")
    given = parser.parse_args()
    given.parts = given.parts.split(",") + (["random"] if given.random else [])
    if wrong := [part for part in given.parts if part not in PARTS]:
        parser.error(f"no such part: {', '.join(wrong)}; there are {', '.join(PARTS)}")
    if "random" in given.parts and not (given.random and given.seed_text):
        parser.error("random scenarios need their number and the text to draw them with: --random 150 --seed-text abc")
    if given.docs and (given.quick or given.workloads):
        parser.error("docs get the full run only: leave out --quick and --workloads")
    return given


def plan_of(given: argparse.Namespace) -> Plan:
    """What is asked for, as far as there is such a thing."""
    policies = given.policies.split(",")
    for name in unknown(policies):
        print(f"there is no policy {name}: left out", file=sys.stderr)
    policies = [name for name in policies if name not in unknown(policies)]
    workloads = load(given.workloads)
    if not policies or not workloads:
        sys.exit("nothing to run: no policy or no workload of that name")
    if given.quick:
        workloads = [workload.shortened(QUICK) for workload in workloads]
    pictures = DOCS.parent if given.docs else given.pictures
    return Plan(policies, workloads, 1 if given.quick else given.seeds, given.quick, pictures)


def compare(plan: Plan, runs: Runs, figures: dict[str, object]) -> dict[str, str]:
    """Everybody on everything."""
    results = run_all(plan, runs)
    figures["table"] = {f"{workload}, {policy}": asdict(means) for (workload, policy), means in results.items()}
    sections = {"table": workload_table(plan.workloads, plan.policies, results)}
    if OURS in plan.policies and set(RIVALS) & set(plan.policies):
        summary = summary_table(plan.workloads, plan.policies, results)
        sections["summary"] = f"{summary}\n\n{plan.seeds} seeds, commit `{commit()}`."
        sections["best"] = best_table(plan.workloads, plan.policies, results)
        closed = closed_loop_ratios(plan.policies, results)
        if closed:
            sections["best"] += "\n\n" + ", ".join(f"{name}: {ratio:.2f}x" for name, ratio in closed.items())
        if plan.pictures:
            groups = {workload.name: workload.group for workload in plan.workloads}
            duels = duels_with_best(plan.workloads, plan.policies, results)
            draw_gains(plan.pictures / "policies-gain.svg", duels, groups)
    return sections


def run_all(plan: Plan, runs: Runs) -> Results:
    """The means over the seeds by workload and policy."""
    cases = [
        Case(policy, workload.settings, seed)
        for workload in plan.workloads
        for policy in plan.policies
        for seed in range(plan.seeds)
    ]
    rows = iter(runs.rows(cases, "workloads"))
    return {
        (workload.name, policy): Means.of([next(rows) for _ in range(plan.seeds)])
        for workload in plan.workloads
        for policy in plan.policies
    }


def scenarios(count: int, seed_text: str, plan: Plan, runs: Runs, figures: dict[str, object]) -> str:
    """Everybody on what was drawn."""
    workloads = policy_random.draw(count, seed_text)
    results = policy_random.run(workloads, plan.policies, runs)
    figures["random"] = {
        workload.name: {
            "settings": workload.settings,
            **{policy: asdict(results[workload.name, policy]) for policy in plan.policies},
        }
        for workload in workloads
    }
    quantiles = policy_random.quantile_table(workloads, plan.policies, results)
    worst = policy_random.worst_table(workloads, plan.policies, results)
    return f"{count} scenarios drawn with `{seed_text}`:\n\n{quantiles}\n\n{worst}"


def write(path: Path, sections: dict[str, str]) -> None:
    """Put each section between its markers, `<!-- bench: name -->` and `<!-- end -->`."""
    text = path.read_text()
    for name, content in sections.items():
        pattern = re.compile(rf"(<!-- bench: {name} -->\n).*?(<!-- end -->)", re.DOTALL)
        text, found = pattern.subn(lambda match, content=content: f"{match[1]}{content}\n{match[2]}", text)  # type: ignore[misc]
        if not found:
            print(f"{path} has no place for {name}", file=sys.stderr)
    path.write_text(text)


if __name__ == "__main__":
    sys.exit(main())
