"""Whether a policy recovers: random services in virtual time, calm, and disturbed for some seconds.

Each case is a service drawn at random: what batches cost, workers and the way to them, clients in a
closed loop or Poisson traffic, an SLO or none. It runs calm, and then with four of the kinds of
disturbances below, each of which ends. From 5 s after the end on, goodput and mean latency are
compared with those of the calm run in the same window; later only where a backlog is still to be
worked off that no policy could have avoided. Below 0.95 of the goodput, or above 1.2 times the mean
latency, the pair is run again with four other dice. It is a finding if the median of all dice is
beyond a limit and worse than each calm run, or if two of the dice are beyond twice what a limit
allows ("by chance": some states are entered only now and then).

    python -m bench.policies.recover 60 --seed TEXT                 sixty cases, some 230 pairs
    python -m bench.policies.recover 60 --seed TEXT --policy cork   the same for another policy
    python -m bench.policies.recover --seed TEXT --case 7 --only compile --later
                                    repeats one pair, and follows what it finds for 20 s more
    python -m bench.policies.recover --traps                        the traps that have been found

Each finding is printed with the command that repeats it: figures stand for the dice, one after the
other. The last line counts them: `N findings in M pairs (kind n of m, ...)`. The exit status is 1
if there is one. A pair takes about a second of a core, five times as much if it is suspect. The
same command prints the same, whatever the machine and `--jobs`. To find out what a policy believes
then, run a case with `World` (bench/policies/disturbed.py), and look at what it explains.
"""

from __future__ import annotations

import argparse
import importlib
import multiprocessing
import statistics
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import ceil, inf
from random import Random
from shlex import quote
from typing import NamedTuple

from bench.policies import traps
from bench.policies.disturbed import KINDS, START, Figures, Scenario, World
from bench.policies.runs import add_jobs, bar, prepare
from bench.tools import options
from carpool.engine.policy import BY_NAME, Policy
from carpool.simulate.costs import Affine, Knee, Sqrt, Tile
from carpool.simulate.policies import policy_of

LEAST_GOOD, MOST_MEAN = 0.95, 1.2
PER_CASE = 4  # kinds that are tried with each case
LATER_S, EVERY_S = 20.0, 4.0  # for how long findings are followed, and the windows in that time


def draw(seed: str) -> Scenario:
    """Draw a service and its clients."""
    dice = Random(seed)
    pick = dice.choice
    limit, workers, is_fast = pick((8, 16, 32, 64, 100, 128)), pick((1, 1, 1, 2, 3, 4)), dice.random() < 0.12
    full_s = 10 ** (dice.uniform(-4.5, -3.5) if is_fast else dice.uniform(-2.3, -1.2))  # of a full batch
    setup = pick((0.05, 0.2, 0.4, 0.7, 0.9))  # its share of that
    a, b, width = setup * full_s, (1.0 - setup) * full_s / limit, pick((limit // 8, limit // 4, limit // 2)) or 1
    cost = pick(
        (
            Affine(a, b),
            Affine(a, b),
            Tile(a, (1.0 - setup) * full_s / ceil(limit / width), width),
            Knee(a, 0.5 * b, limit // pick((2, 4)), pick((1, 4)) * b),
            Sqrt(full_s / limit**0.5),
        )
    )
    has_way = is_fast or dice.random() < 0.6
    hop_s = 10 ** dice.uniform(-4.0, -3.0) if has_way else 0.0
    hop_item_s = pick((0.0, 2e-6, 20e-6) if is_fast else (0.0, 2e-6, 20e-6, 100e-6)) if has_way else 0.0
    is_closed = is_fast or dice.random() < 0.6
    clients = 64 if is_fast else max(2, round(limit * workers * pick((0.25, 0.5, 1.0, 1.5, 2.0, 4.0))))
    think_s = pick((0.3e-3, 1e-3)) if is_fast else pick((0.0, 1e-3, 0.3 * full_s, full_s, 3.0 * full_s))
    has_slo = dice.random() < (0.5 if is_closed else 0.7) and not is_fast
    slo_s = inf
    if has_slo:
        rounds = max(1.0, clients / limit / workers) if is_closed else 1.0
        slo_s = (rounds + pick((0.8, 1.5, 3.0, 6.0))) * full_s + 2 * (hop_s + limit * hop_item_s) + think_s * is_closed
    rho = 0.0 if is_closed else pick((0.2, 0.5, 0.8, 0.95, 1.2) if has_slo else (0.2, 0.4, 0.5, 0.6))
    timeout_s = inf if has_slo or dice.random() < 0.7 else max(0.5, 20 * full_s)
    runs_ahead = has_way and dice.random() < 0.7
    sigma = pick((0.0, 0.02, 0.1, 0.3))
    return Scenario(
        cost, limit, sigma, workers, hop_s, hop_item_s, runs_ahead, clients, think_s, rho, slo_s, timeout_s, is_fast
    )


class Pair(NamedTuple):
    """The figures of one window, calm and after a disturbance."""

    calm: Figures
    other: Figures

    @property
    def good(self) -> float:
        """Goodput over that of the calm run."""
        return self.other.good / self.calm.good if self.calm.good else 1.0

    @property
    def mean(self) -> float:
        """Mean latency over that of the calm run."""
        return self.other.mean_s / self.calm.mean_s if self.calm.answered else 1.0

    def is_beyond(self, times: float = 1.0) -> bool:
        """Report whether it is beyond a limit, or beyond so many times what that allows."""
        return self.good < 1.0 - times * (1.0 - LEAST_GOOD) or self.mean > 1.0 + times * (MOST_MEAN - 1.0)


class Pairs:
    """The pairs of one scenario under one policy; a calm run is made once for all kinds.

    Args:
        scenario: What is run.
        policy: A name or a spec that carpool knows, or `module:Class`.
        key: The seed of all that is random.
        kinds: Of which there will be pairs.
        later_s: For how many seconds more than the window of each kind to run.
    """

    def __init__(self, scenario: Scenario, policy: str, key: str, kinds: Sequence[str], later_s: float = 0.0) -> None:
        self._scenario, self._policy, self._key = scenario, policy, key
        self._rest_s = scenario.window_s + later_s
        self._until = max(map(scenario.settled_at, kinds), default=0.0) + self._rest_s
        self._calm: dict[int, World] = {}

    def pair(self, kind: str, dice: int) -> Pair:
        """Return the figures of a calm run and a disturbed one with the same dice."""
        return self.windows(kind, dice)[0]

    def windows(self, kind: str, dice: int, count: int = 1) -> list[Pair]:
        """Return the figures of a pair in so many windows, one each 4 s."""
        key, begin = f"{self._key}/{dice}", self._scenario.settled_at(kind)
        if dice not in self._calm:
            self._calm[dice] = self._world(self._policy, None, key).play(self._until)
        calm = self._calm[dice]
        other = self._world("greedy", None, key) if kind == START else self._world(self._policy, kind, key)
        other.play(begin + self._rest_s)
        if kind == START:
            calm, other = other, calm
        found = []
        for at in [begin + EVERY_S * i for i in range(count)]:
            usual, after = (world.figures(at, self._scenario.window_s) for world in (calm, other))
            found.append(Pair(usual._replace(mean_s=after.mean_s) if kind == START else usual, after))
        return found

    def _world(self, policy: str, kind: str | None, key: str) -> World:
        return World(self._scenario, made(policy, self._scenario), kind, key)


def made(policy: str, scenario: Scenario) -> Policy:
    """Make a policy for a scenario. Raises what `policy_of` and the import of a module raise."""
    name, _, attribute = policy.partition(":")
    what = policy if name in BY_NAME or not attribute else getattr(importlib.import_module(name), attribute)
    slo_s = None if scenario.slo_s == inf else scenario.slo_s
    return policy_of(what, max_batch_size=scenario.limit, slo_s=slo_s, cost_s=scenario.cost)


def verdict(pairs: Sequence[Pair]) -> str:
    """Return what pairs with several dice say; empty if that is nothing.

    Only what is beyond all calm runs counts, as these differ by themselves at the edge of an
    overload; and four of five pairs must agree, or two be far beyond.
    """
    least, most_s = min(pair.calm.good for pair in pairs), max(pair.calm.mean_s for pair in pairs)
    low = [pair for pair in pairs if pair.is_beyond(0.5)]
    is_low = statistics.median(pair.good for pair in pairs) < LEAST_GOOD
    is_late = statistics.median(pair.mean for pair in pairs) > MOST_MEAN
    is_low &= statistics.median(pair.other.good for pair in pairs) < least
    is_late &= statistics.median(pair.other.mean_s for pair in pairs) > most_s
    if (is_low or is_late) and len(low) >= 0.8 * len(pairs):
        return "FINDING"
    far = sum(pair.is_beyond(2.0) and (pair.other.good < least or pair.other.mean_s > most_s) for pair in pairs)
    return f"BY CHANCE, {far} of {len(pairs)}" if far > 1 else ""


@dataclass(frozen=True, slots=True)
class Task:
    """One case to try, as a process is handed it.

    Attributes:
        seed: The text with which all cases are drawn.
        case: Its number.
        policy: As for `Pairs`.
        only: The kinds to try; none for some at random.
        repeat: With how many other dice a suspect pair is run again.
        later: Whether findings are followed.
    """

    seed: str
    case: int
    policy: str
    only: tuple[str, ...] = ()
    repeat: int = 4
    later: bool = False

    @property
    def key(self) -> str:
        return f"{self.seed}/{self.case}"


def tried(task: Task) -> dict[str, str]:
    """Return what each kind of disturbance that was tried has found, as text; empty if nothing."""
    scenario = draw(task.key)
    wanted = task.only or Random(f"{task.key}/kinds").sample(sorted(KINDS), PER_CASE)
    kinds = [kind for kind in wanted if scenario.can_be(kind)]
    pairs = Pairs(scenario, task.policy, task.key, kinds)
    return {kind: _looked_into(task, scenario, pairs, kind) for kind in kinds}


def _looked_into(task: Task, scenario: Scenario, pairs: Pairs, kind: str) -> str:
    """Return the finding of one kind as text; empty if there is none."""
    found = [pairs.pair(kind, 0)]
    if not found[0].is_beyond():
        return ""
    found += [pairs.pair(kind, dice) for dice in range(1, 1 + task.repeat)]
    word = verdict(found)
    if not word:
        return ""
    lines = [
        f"{word}, {kind}: {scenario}",
        f"  goodput {' '.join(f'{pair.good:.2f}' for pair in found)}"
        f"; mean latency {' '.join(f'{pair.mean:.2f}' for pair in found)}"
        f"; batches {' '.join(f'{pair.other.batch:.1f} of {pair.calm.batch:.1f}' for pair in found)}",
        f"  python -m bench.policies.recover --seed {quote(task.seed)} --case {task.case} --only {quote(kind)}"
        f" --policy {quote(task.policy)}",
    ]
    if task.later:
        worst = max(range(len(found)), key=lambda i: 4.0 * (1.0 - found[i].good) + found[i].mean)
        longer = Pairs(scenario, task.policy, task.key, [kind], LATER_S)
        later = longer.windows(kind, worst, 1 + int(LATER_S / EVERY_S))
        lines.append(f"  every {EVERY_S:.0f} s later: {' '.join(f'{pair.good:.2f}/{pair.mean:.2f}' for pair in later)}")
    return "\n".join(lines)


def main(words: Sequence[str] | None = None) -> int:
    given = arguments(words)
    if given.traps:
        return int(traps.show(lambda scenario: made(given.policy, scenario)) > 0)
    cases = [given.case] if given.case is not None else range(given.cases)
    tasks = [Task(given.seed, case, given.policy, given.only, given.repeat, given.later) for case in cases]
    pairs, findings, status = Counter[str](), Counter[str](), 0
    try:
        with bar("cases") as progress:
            shown = progress.add_task(f"{given.policy}, {given.seed}", total=len(tasks), runs=len(tasks))
            for found in results(tasks, given.jobs):
                pairs.update(found.keys())
                findings.update(kind for kind, text in found.items() if text)
                for text in filter(None, found.values()):
                    print(text, flush=True)
                progress.advance(shown)
    except KeyboardInterrupt:
        print("interrupted: what follows is of the cases before", file=sys.stderr)
        status = 1
    by_kind = ", ".join(f"{kind} {findings[kind]} of {n}" for kind, n in sorted(pairs.items()))
    print(f"{findings.total()} findings in {pairs.total()} pairs ({by_kind})")
    return int(bool(findings)) or status


def results(tasks: Sequence[Task], jobs: int) -> Iterator[dict[str, str]]:
    """Yield what each task has found, in their order."""
    if jobs == 1 or len(tasks) == 1:
        yield from map(tried, tasks)
        return
    with multiprocessing.get_context("spawn").Pool(min(jobs, len(tasks)), initializer=prepare) as pool:
        yield from pool.imap(tried, tasks)


def arguments(words: Sequence[str] | None) -> argparse.Namespace:
    parser = options.parser(__doc__)
    parser.description = f"{__doc__}\nkinds of disturbances:\n" + "\n".join(
        f"  {kind:<14}{what}" for kind, what in KINDS.items()
    )
    parser.add_argument("cases", nargs="?", type=int, default=40, help="how many cases; default: %(default)s")
    what = "what they are drawn with; default: %(default)s"
    parser.add_argument("--seed", default="recover", metavar="TEXT", help=what)
    what = "a name or a spec that carpool knows, or module:Class; default: %(default)s"
    parser.add_argument("--policy", default="adaptive", metavar="NAME", help=what)
    add_jobs(parser)
    parser.add_argument("--case", type=int, metavar="I", help="only this one")
    what = "kinds, separated by commas, all of which are tried with each case; default: 4 at random"
    parser.add_argument("--only", type=options.some_of(KINDS), default=(), metavar="KINDS", help=what)
    what = "with how many other dice suspects are run again; default: %(default)s"
    parser.add_argument("--repeat", type=int, default=4, metavar="N", help=what)
    parser.add_argument("--later", action="store_true", help="follow findings for another 20 s")
    parser.add_argument("--traps", action="store_true", help="run the traps that have been found, instead")
    given = parser.parse_args(words)
    given.only = tuple(given.only)
    try:
        made(given.policy, Scenario(Affine(1e-3, 1e-3), 8))
    except (AttributeError, ImportError, TypeError, ValueError) as error:
        parser.error(f"--policy {given.policy}: {error}")
    if given.cases < 1 or given.repeat < 1 or given.jobs < 1:
        parser.error("cases, --repeat and --jobs must be at least 1")
    return given


if __name__ == "__main__":
    sys.exit(main())
