"""All policies on all workloads, in virtual time: how many requests are in time, and how soon.

Needs no peers and nothing of the machine: the same command gives the same figures everywhere. Runs
are remembered by their settings, their seed and the sources that they depend on. So an interrupted
bench goes on where it was, and when a policy changes, only its own runs are made again.
docs/policies-evidence.md says what the figures mean.

    python -m bench.policies --quick        half of each run and one seed, in about two minutes
    python -m bench.policies --docs         everything, written into the docs
    python -m bench.policies --parts random --random 150 --seed-text $(git rev-parse HEAD)
    python -m bench.policies --parts table --policies adaptive,cork --workloads "closed|knee"
    python -m bench.policies --parts table --seeds 3 --policies adaptive,greedy,cork,contestants \\
        --sets rivals,ahead,near:$(git rev-parse HEAD)*40
    python -m bench.policies --parts table --seeds 3 --beside symphony \\
        --policies efficient,symphony,symphony:learns=yes --sets usual,random:TEXT*60
    python -m bench.policies --parts table --seeds 1 --policies adaptive,tuned \\
        --sets usual,busy,rivals,ahead,random:TEXT*60

The last but two sets the rules of other systems beside ours where one of them has been ahead, with
figures of their own; each of `carpool.simulate.contestants` may be named by itself. The next one is
about efficiency: worker-seconds for each good answer beside Symphony's. The last one is about the
best settings in hindsight, and makes 16 runs of `tuned` for each of ours. A fourth figure in a cell
is the coordinator's busy share. The sets of workloads are:

"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from bench.policies import oracles, scenarios, sets
from bench.policies.runs import Runs, add_running, chosen
from bench.policies.sets import named
from bench.policies.tables import (
    OURS,
    RIVALS,
    Means,
    Results,
    ahead_table,
    best_table,
    closed_loop_ratios,
    duels_with_best,
    figures_table,
    hindsight_table,
    means_of,
    summary_table,
    workload_table,
)
from bench.policies.workloads import USUAL, Workload
from bench.tools import options
from bench.tools.docs import DOCS, write
from bench.tools.figures import commit
from carpool.simulate.contestants import CONTESTANTS
from carpool.simulate.policies import TUNED

PARTS = ("table", "oracles", "pictures", "random")
QUICK = 0.5  # of each duration, and one seed of five


@dataclass(frozen=True, slots=True)
class Plan:
    """What is to be run.

    Attributes:
        sets: The workloads of each set.
        quick: Whether everything is shortened.
        pictures: The folder for them; None if none are drawn.
        beside: The policy beside which the figures of the others are set.
    """

    policies: Sequence[str]
    sets: Mapping[str, Sequence[Workload]]
    seeds: int
    quick: bool
    pictures: Path | None
    beside: str = OURS


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
            sections["latency"] = oracles.latency_table(runs, quick=plan.quick)
            sections["clairvoyant"] = oracles.goodput_table(runs)
        if plan.pictures and "pictures" in given.parts:
            from bench.policies.pictures import draw_loads  # matplotlib, for which the tables do not wait

            draw_loads(plan.pictures / "policies-load.svg", runs, duration_s=4 if plan.quick else 20)
        if "random" in given.parts:
            sections["random"] = drawn(given.random, given.seed_text, plan, runs, figures)
    except KeyboardInterrupt:
        print("interrupted; what has been run is remembered", file=sys.stderr)
        return 1
    for name, text in sections.items():
        print(f"\n## {name}\n\n{text}")
    minutes = (time.monotonic() - began) / 60
    print(f"\ncommit {commit()}, {minutes:.1f} minutes")
    if given.json:
        given.json.write_text(json.dumps(figures, indent=1, default=str))
    if given.docs:
        sections = {name: text for name, text in sections.items() if name in (given.sections or sections)}
        if "table" in sections:
            (DOCS / "policies-workloads.txt").write_text(f"{sections.pop('table')}\n")
        write(sections)
    return 0


def arguments() -> argparse.Namespace:
    parser = options.parser(f"{__doc__}{(sets.__doc__ or '').partition(chr(10) * 2)[2]}")
    parser.add_argument("--quick", action="store_true", help="one seed, half of each duration")
    parser.add_argument("--workloads", default="", metavar="REGEX", help="those whose names match; default: all")
    parser.add_argument("--seeds", type=int, default=5, help="of each workload; default: %(default)s")
    what = "sets of workloads, separated by commas; default: %(default)s"
    parser.add_argument("--sets", default="usual,busy", metavar="NAMES", help=what)
    options.add_names(parser, "--parts", PARTS, "what is made", "table,oracles,pictures")
    parser.add_argument("--random", type=int, default=0, metavar="N", help="so many random scenarios as well")
    parser.add_argument("--seed-text", default="", help="what they are drawn with: the commit that froze the code")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to write every figure")
    parser.add_argument("--docs", action="store_true", help="write tables and pictures into docs/")
    what = "those that go into docs/, separated by commas; default: all"
    parser.add_argument("--sections", type=lambda text: text.split(","), metavar="NAMES", help=what)
    parser.add_argument("--pictures", type=Path, metavar="DIR", help="where to draw without --docs")
    what = "the policy beside which the figures of others are set; default: %(default)s"
    parser.add_argument("--beside", default=OURS, metavar="NAME", help=what)
    add_running(parser)
    given = parser.parse_args()
    given.parts += ["random"] if given.random else []
    if "random" in given.parts and not (given.random and given.seed_text):
        parser.error("random scenarios need their number and the text to draw them with: --random 150 --seed-text abc")
    if given.docs and (given.quick or given.workloads):
        parser.error("docs get the full run only: leave out --quick and --workloads")
    return given


def plan_of(given: argparse.Namespace) -> Plan:
    """What the command line asks for, as far as it exists."""
    policies = chosen(given.policies)
    try:
        found = named(given.sets, given.workloads)
    except argparse.ArgumentTypeError as error:
        sys.exit(f"--sets: {error}")
    if not policies or not found:
        sys.exit("nothing to run: no policy or no workload of that name")
    if given.quick:
        found = {name: [workload.shortened(QUICK) for workload in workloads] for name, workloads in found.items()}
    pictures = DOCS if given.docs else given.pictures
    return Plan(policies, found, 1 if given.quick else given.seeds, given.quick, pictures, given.beside)


def compare(plan: Plan, runs: Runs, figures: dict[str, object]) -> dict[str, str]:
    """The sections that compare all policies on all workloads of all sets."""
    sections: dict[str, str] = {}
    told_seeds = f"{plan.seeds} seed{'s' * (plan.seeds > 1)}, commit `{commit()}`."
    has_contestants = any(name.partition(":")[0] in CONTESTANTS for name in plan.policies)
    everything: dict[tuple[str, str], Means] = {}
    for name, workloads in plan.sets.items():
        results = means_of(workloads, plan.policies, lambda _: range(plan.seeds), runs, name)
        everything |= results
        if name == USUAL:
            sections |= compare_usual(plan, workloads, results)
        else:
            sections[name] = workload_table(workloads, plan.policies, results)
        if plan.beside in plan.policies and len(plan.policies) > 1 and (has_contestants or name != USUAL):
            parts = [figures_table(workloads, plan.policies, results, plan.beside)]
            if OURS in plan.policies:
                parts.append(ahead_table(workloads, plan.policies, results))
            title = "figures" if name == USUAL else f"{name}-figures"
            if plan.beside != OURS:
                title = f"beside-{plan.beside}-{name.partition(':')[0]}"
            sections[title] = "\n\n".join((*parts, told_seeds))
    if {OURS, TUNED} <= set(plan.policies):
        sections[TUNED] = f"{hindsight_table(plan.sets, everything)}\n\n{told_seeds}"
    figures["table"] = {f"{workload}, {policy}": asdict(means) for (workload, policy), means in everything.items()}
    return sections


def compare_usual(plan: Plan, workloads: Sequence[Workload], results: Results) -> dict[str, str]:
    """The sections about the usual set, which says who is better on the whole."""
    sections = {"table": workload_table(workloads, plan.policies, results)}
    if OURS in plan.policies and set(RIVALS) & set(plan.policies):
        summary = summary_table(workloads, plan.policies, results)
        sections["summary"] = f"{summary}\n\n{plan.seeds} seeds, commit `{commit()}`."
        sections["best"] = best_table(workloads, plan.policies, results)
        closed = closed_loop_ratios(plan.policies, results)
        if closed:
            sections["best"] += "\n\n" + ", ".join(f"{name}: {ratio:.2f}x" for name, ratio in closed.items())
        if plan.pictures:
            from bench.policies.pictures import draw_gains

            groups = {workload.name: workload.group for workload in workloads}
            duels = duels_with_best(workloads, plan.policies, results)
            draw_gains(plan.pictures / "policies-gain.svg", duels, groups)
    return sections


def drawn(count: int, seed_text: str, plan: Plan, runs: Runs, figures: dict[str, object]) -> str:
    """The section about all policies on scenarios that were drawn."""
    workloads = scenarios.draw(count, seed_text)
    results = scenarios.run(workloads, plan.policies, runs)
    figures["random"] = {
        workload.name: {
            "settings": workload.settings,
            **{policy: asdict(results[workload.name, policy]) for policy in plan.policies},
        }
        for workload in workloads
    }
    quantiles = scenarios.quantile_table(workloads, plan.policies, results)
    worst = scenarios.worst_table(workloads, plan.policies, results)
    return f"{count} scenarios drawn with `{seed_text}`:\n\n{quantiles}\n\n{worst}"


if __name__ == "__main__":
    sys.exit(main())
