"""Rules of composition by length, on workloads in virtual time, beside plain order.

    python -m bench shapes --trace AzureLLMInferenceTrace_code.csv --docs
    python -m bench shapes --parts closed --only "cv1 padded" --seeds 1
    python -m bench shapes --parts random --random 60 --seed-text $(git rev-parse HEAD)

Plain order is first come, first served, at most 32 in a batch. "sorted inside" is the user whose
code takes twice as many and runs them by length in eights; "Infinity" sorts eight batches' worth of
its queue. All of these know the true costs; carpool learns them, with what a warm-up tells it.
`closed` are clients that wait for their answers, `open` arrivals at 0.4 to 0.9 of plain order's
capacity, `slo` the same and more with a goal, where everybody drops the hopeless. The part `case`
is one closed loop whose costs have no noise; `oracle` sets six requests beside the best of all ways
to serve them.

Without the trace (Azure public dataset, CC-BY 4.0; Patel et al., "Splitwise", ISCA 2024) its
workloads are left out. docs/policies-evidence.md says what the figures mean.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from bench.shapes import oracle
from bench.shapes.rules import OURS, PLAIN, RULES, in_kind, names_of
from bench.shapes.tables import Results, case_table, kind_table, worst_table
from bench.shapes.workloads import KINDS, Workload, case, draw, load
from bench.tools import options
from bench.tools.docs import write
from bench.tools.figures import commit
from carpool.simulate import Report, mean_of, run

PARTS = (*KINDS, "case", "oracle", "random")


def main() -> int:
    given = arguments()
    rules = names_of(given.rules)
    keep = write if given.docs else lambda sections: None
    began = time.monotonic()
    with ProcessPoolExecutor(given.jobs) as pool:
        for kind in KINDS:
            if kind in given.parts and (workloads := load(kind, given.trace, given.only)):
                some = in_kind(kind, rules)
                results = run_all(pool, workloads, some, given.seeds)
                text = kind_table(kind, results, workloads, some, PLAIN)
                tell(f"{kind}: {len(workloads)} workloads", text, results, workloads, some)
                keep({f"shapes-{kind}": text})
        if "case" in given.parts:
            text = case_table(run_all(pool, [case()], rules, given.seeds), case(), rules)
            print(f"\n## case\n\n{text}")
            keep({"shapes-case": text})
        if "random" in given.parts:
            keep({"shapes-random": drawn(pool, given.random, given.seed_text, rules, given.seeds)})
        if "oracle" in given.parts:
            text = oracle.table_of(pool, given.cases)
            print(f"\n## oracle\n\n{text}")
            keep({"shapes-oracle": text})
    print(f"\ncommit {commit()}, {(time.monotonic() - began) / 60:.1f} minutes")
    return 0


def arguments() -> argparse.Namespace:
    parser = options.parser(__doc__)
    options.add_names(parser, "--parts", PARTS, "what is made", "closed,open,slo,case,oracle")
    parser.add_argument("--trace", type=Path, help="the CSV file of the trace")
    parser.add_argument("--only", default="", metavar="REGEX", help="workloads whose names match")
    parser.add_argument("--rules", default=";".join(RULES), help="separated by semicolons; default: %(default)s")
    parser.add_argument("--seeds", type=int, default=2, help="of each workload; default: %(default)s")
    parser.add_argument("--cases", type=int, default=150, help="of the oracle; default: %(default)s")
    parser.add_argument("--random", type=int, default=0, metavar="N", help="so many random workloads as well")
    parser.add_argument("--seed-text", default="", help="what they are drawn with: the commit that froze the code")
    parser.add_argument("--jobs", type=int, default=2, help="processes; default: %(default)s")
    parser.add_argument("--docs", action="store_true", help="write the tables into docs/")
    given = parser.parse_args()
    given.parts += ["random"] if given.random and "random" not in given.parts else []
    if "random" in given.parts and not (given.random and given.seed_text):
        parser.error("random workloads need their number and the text to draw them with: --random 60 --seed-text abc")
    if PLAIN not in names_of(given.rules):
        parser.error(f"all ratios are to {PLAIN!r}: --rules must name it")
    return given


def drawn(pool: ProcessPoolExecutor, count: int, seed_text: str, rules: Sequence[str], seeds: int) -> str:
    """The tables of workloads that were drawn, one for each kind."""
    workloads = draw(count, seed_text)
    results = run_all(pool, workloads, rules, seeds)
    texts = [f"{count} workloads drawn with `{seed_text}`."]
    for kind in KINDS:
        if some := [w for w in workloads if w.kind == kind]:
            texts.append(f"{kind}, {len(some)} workloads:\n\n{kind_table(kind, results, some, rules, PLAIN)}")
            tell(f"random {kind}", texts[-1], results, some, rules)
    return "\n\n".join(texts)


def tell(title: str, text: str, results: Results, workloads: Sequence[Workload], rules: Sequence[str]) -> None:
    """Print a table, and where ours fares worst."""
    print(f"\n## {title}\n\n{text}", flush=True)
    if OURS in rules:
        print(f"\nwhere {OURS} fares worst:\n\n{worst_table(results, workloads, OURS, PLAIN)}", flush=True)


def run_all(pool: ProcessPoolExecutor, workloads: Sequence[Workload], rules: Sequence[str], seeds: int) -> Results:
    """Every rule on every workload, the mean of its seeds."""
    places = [(w, rule, seed) for w in workloads for rule in rules for seed in range(1, seeds + 1)]
    reports = iter(pool.map(one_run, *zip(*places, strict=True)))
    return {(w.name, rule): mean_of([next(reports) for _ in range(seeds)]) for w in workloads for rule in rules}


def one_run(workload: Workload, rule: str, seed: int) -> Report:
    """One rule on one workload."""
    who = RULES[rule]
    return run(who.policy(workload), seed=seed, **who.changed(workload.settings))


if __name__ == "__main__":
    sys.exit(main())
