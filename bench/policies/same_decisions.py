"""Whether two trees decide alike: the working tree and a revision, decision by decision.

    python -m bench policies.same_decisions main              all cases, in a quarter of an hour
    python -m bench policies.same_decisions main --quick      a tenth of each duration
    python -m bench policies.same_decisions HEAD~3 --only "knee|keys" --policies adaptive,cork

The cases are all policies on the 119 workloads of `bench.policies`, on some scenes with what these
do not have (lengths, keys, weights, stages, full queues, workers that come and go, batches ahead),
and all policies of steps on the loads of `bench.policies.steps`. A decision is each batch given to
a worker, with its time, place and requests, each order to a worker of steps, and each refusal, with
its reason. A policy that only one of the trees has is left out, and named. The exit status is 1 if
any case differs; the first decision that does is shown.
"""

from __future__ import annotations

import argparse
import io
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench import ROOT
from bench.policies import steps
from bench.policies.runs import SPECS
from bench.policies.workloads import load
from bench.tools import options
from carpool.engine.policy import BY_NAME, STEPS_BY_NAME

QUICK = 0.1  # of each duration
SEED = 1
AT_ONCE = 20  # cases in one process
WIDTH = 300  # of a decision, as shown

COST = "affine:a=8ms,b=0.25ms"
AHEAD = {"hop_s": 4e-4, "runs_ahead": True, "max_batch_size": 8}
PADDED = {"cost": "padded:a=2ms,b=20us", "lengths": "lognormal:input=14,input_sigma=0.8", "max_batch_size": 32}
SCENES: dict[str, dict[str, Any]] = {
    "ahead": {**AHEAD, "arrivals": "poisson:rho=0.9"},
    "ahead closed": {**AHEAD, "arrivals": "closed:clients=48,think=1ms", "hop_item_s": 1e-5},
    "ahead, two workers": {**AHEAD, "arrivals": "poisson:rho=1.1", "turn_s": 2e-4, "workers": 2, "slo_s": None},
    "lengths": {**PADDED, "arrivals": "poisson:rho=0.9", "slo_s": 0.1},
    "lengths closed": {**PADDED, "arrivals": "closed:clients=64,think=1ms", "slo_s": None, "max_padded_size": 600},
    "allowed lengths": {**PADDED, "arrivals": "poisson:rho=1.3", "allowed_lengths": [16, 32, 128], "workers": 2},
    "keys": {"arrivals": "poisson:rho=0.5", "keys": "zipf:count=20,power=1", "switch_s": 5e-3, "workers": 3},
    "keys held": {"arrivals": "poisson:rho=0.9", "keys": "8", "max_workers_per_key": 1, "workers": 2, "slo_s": None},
    "weights": {"arrivals": "poisson:rho=0.9", "weights": "pareto:shape=1.7,cap=50", "weights_known": True},
    "stages": {"arrivals": "poisson:rho=0.8", "cost": [COST, "affine:a=2ms,b=1ms"], "max_batch_size": [64, 16]},
    "full queue": {"arrivals": "poisson:rho=1.5", "max_queue_size": 100, "slo_s": None},
    "scaling": {"arrivals": "sine:rho=0.6,swing=0.5", "workers": "1-4", "start_s": 0.5},
}


@dataclass(frozen=True, slots=True)
class Case:
    """One run that both trees make.

    Attributes:
        name: For people, with the policy.
        how: The function of `carpool.simulate`: `run` or `run_steps`.
        settings: What it takes, as JSON has it.
    """

    name: str
    how: str
    settings: dict[str, Any]

    @property
    def policy(self) -> str:
        """The name of the policy, without its parameters."""
        name: str = self.settings["policy"].partition(":")[0]
        return name

    def shortened(self, factor: float) -> Case:
        """The same for a part of the time; loads of steps end with their requests."""
        settings = {**self.settings, "duration_s": self.settings["duration_s"] * factor}
        if "most_requests" in settings:
            settings["most_requests"] = max(1, int(settings["most_requests"] * factor))
        return Case(self.name, self.how, settings)


@dataclass(frozen=True, slots=True)
class Tree:
    """One carpool.

    Attributes:
        name: For people.
        sources: The folder that has the package.
    """

    name: str
    sources: Path

    def command(self, option: str = "") -> list[str]:
        """The command that starts `bench.policies.decisions` with this tree's carpool."""
        return [sys.executable, "-m", "bench.policies.decisions", str(self.sources), *option.split()]

    def environment(self) -> dict[str, str]:
        return {**os.environ, "PYTHONPATH": f"{self.sources}{os.pathsep}{ROOT}", "PYTHONHASHSEED": "0"}

    def ask(self, cases: Sequence[Case] = (), option: str = "") -> list[Any]:
        """The lines that are printed for some cases, read as JSON."""
        done = subprocess.run(
            self.command(option),
            input="".join(json.dumps(asdict(case)) + "\n" for case in cases),
            stdout=subprocess.PIPE,
            env=self.environment(),
            text=True,
            check=True,
        )
        return [json.loads(line) for line in done.stdout.splitlines()]

    def decisions(self, case: Case) -> Iterator[str]:
        """All decisions of a case, one by one; the process ends with the iterator."""
        with subprocess.Popen(
            self.command("--full"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=self.environment(),
            text=True,
        ) as process:
            assert process.stdin is not None and process.stdout is not None
            process.stdin.write(json.dumps(asdict(case)))
            process.stdin.close()
            try:
                for line in process.stdout:
                    yield line.rstrip("\n")
            finally:
                process.kill()


def main() -> int:
    given = arguments()
    with tempfile.TemporaryDirectory(prefix="same-decisions-") as folder:
        there = Tree(given.revision, unpacked(given.revision, Path(folder) / "there"))
        here = Tree("working tree", copied(ROOT / "src", Path(folder) / "here"))
        cases = common(all_cases(given.only, given.policies), here, there)
        if given.quick:
            cases = [case.shortened(QUICK) for case in cases]
        return 1 if compare(cases, here, there, given.jobs) else 0


def arguments() -> argparse.Namespace:
    parser = options.parser(__doc__)
    parser.add_argument("revision", help="of git, beside which the working tree is set")
    parser.add_argument("--quick", action="store_true", help="a tenth of each duration")
    parser.add_argument("--only", default="", metavar="REGEX", help="cases whose names match; default: all")
    names = dict.fromkeys([*BY_NAME, *STEPS_BY_NAME])
    options.add_names(parser, "--policies", names, "which take part")
    jobs = len(os.sched_getaffinity(0))
    parser.add_argument("--jobs", type=int, default=jobs, help="how many processes work; default: %(default)s")
    return parser.parse_args()


def unpacked(revision: str, folder: Path) -> Path:
    """The sources of a revision, in a folder of their own. Exits if there is no such revision."""
    archive = subprocess.run(
        ["git", "archive", "--format=tar", revision, "src"], cwd=ROOT, stdout=subprocess.PIPE, check=False
    )
    if archive.returncode:
        sys.exit(f"git has no revision {revision!r} with a folder src")
    with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as tar:
        tar.extractall(folder, filter="data")
    return folder / "src"


def copied(sources: Path, folder: Path) -> Path:
    """A copy of the sources, which nobody changes while they are run."""
    shutil.copytree(sources, folder, ignore=shutil.ignore_patterns("__pycache__"))
    return folder


def all_cases(pattern: str, policies: Sequence[str]) -> list[Case]:
    """Those whose names match a regular expression and whose policies are among the named."""
    usual = {"cost": COST, "max_batch_size": 64, "slo_s": 0.06, "duration_s": 10}
    named = [(workload.name, workload.settings) for workload in load()]
    named += [(f"scene {name}", {**usual, **scene}) for name, scene in SCENES.items()]
    cases = []
    for name, settings in named:
        for policy in BY_NAME:
            spec = SPECS.get(policy, policy)
            cases.append(Case(f"{name}, {policy}", "run", {**settings, "policy": spec, "seed": SEED}))
    for each in steps.loads(None):
        for kind, change in (("steps", steps.known), ("noisy steps", steps.noisy)):
            for policy in STEPS_BY_NAME:
                settings = {**change(each.settings), "duration_s": 1e9, "seed": SEED, "policy": policy}
                cost = asdict(settings["cost"])
                cases.append(Case(f"{kind} {each.name}, {policy}", "run_steps", {**settings, "cost": cost}))
    wanted = re.compile(pattern)
    return [case for case in cases if wanted.search(case.name) and case.policy in policies]


def common(cases: Sequence[Case], here: Tree, there: Tree) -> list[Case]:
    """The cases of policies that both trees have; the names of other policies are printed."""
    (ours,), (theirs,) = here.ask(option="--names"), there.ask(option="--names")
    for how in ours:
        for name in sorted({*ours[how]} ^ {*theirs[how]}):
            print(f"{name} ({how}) is in one of the trees only: left out", file=sys.stderr)
    return [case for case in cases if case.policy in ours[case.how] and case.policy in theirs[case.how]]


def compare(cases: Sequence[Case], here: Tree, there: Tree, jobs: int) -> int:
    """Run all cases in both trees and print those that differ; returns how many do."""
    if not cases:
        sys.exit("nothing to run: no case of that name")
    decisions = different = 0
    bunches = [cases[i : i + AT_ONCE] for i in range(0, len(cases), AT_ONCE)]
    with ThreadPoolExecutor(jobs) as pool:
        sides = [(pool.submit(here.ask, bunch), pool.submit(there.ask, bunch)) for bunch in bunches]
        for i, (bunch, (ours, theirs)) in enumerate(zip(bunches, sides, strict=True)):
            if sys.stderr.isatty():
                print(f"\r{i * AT_ONCE} of {len(cases)} cases", end="", file=sys.stderr, flush=True)
            for case, own, other in zip(bunch, ours.result(), theirs.result(), strict=True):
                decisions += own["count"]
                if own != other:
                    different += 1
                    print(f"\n{case.name}: differs\n{first_difference(case, here, there)}", flush=True)
    print(f"\n{len(cases)} cases, {decisions:,} decisions: {different or 'none'} differ from {there.name}")
    return different


def first_difference(case: Case, here: Tree, there: Tree) -> str:
    """The first decision of a case that is not the same in both trees, as both make it."""
    ours, theirs = here.decisions(case), there.decisions(case)
    try:
        pairs = itertools.zip_longest(ours, theirs, fillvalue="nothing more")
        for place, (own, other) in enumerate(pairs, start=1):
            if own != other:
                sides = ((here.name, own), (there.name, other))
                return "\n".join(f"  decision {place} of the {name}: {text[:WIDTH]}" for name, text in sides)
    finally:
        ours.close()
        theirs.close()
    return "  the same when run again: chance decides, which no seed governs"


if __name__ == "__main__":
    raise SystemExit(main())
