"""The command."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from random import SystemRandom

from tests.fuzz import draw
from tests.fuzz.hunt import SHRINK_S, Found, Tally, hunt
from tests.fuzz.mutants import MUTANTS
from tests.fuzz.program import listing
from tests.fuzz.run import GRACE_S, check

_DESCRIPTION = """Random programs over the public API of carpool.

Each program starts a service, or makes a batched function, and lets a few threads or tasks use it side by side: calls
with and without time-outs, streams, tickets, cancellation, closing, forks, killed workers, and models, hooks, policies,
sinks and inputs that raise anything. Every call must return within its time-out, with its own answer or a documented
error, and nothing may be left behind: threads, tasks, descriptors, children, complaints of Python.

What is not so is a finding. It is printed with the smallest program found that shows it, as a file that Python runs
(from the root of the checkout), and with the stacks of all threads and tasks where something hangs."""

_EPILOG = """examples:
  python -m tests.fuzz --steps 2000                   seconds, a new seed, which is printed
  python -m tests.fuzz --steps 200000 --jobs 2        ten minutes on two cores
  python -m tests.fuzz --minutes 120 --jobs 2         as many steps as come in two hours
  python -m tests.fuzz --seed 7 --first 42 --steps 1  one program again, the 42nd of seed 7
  python -m tests.fuzz --seed 7 --first 42 --show     only print it
  python -m tests.fuzz --mutant swap                  break a promise on purpose, and see it found"""


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; the number of findings decides the exit status."""
    options = _options(arguments)
    if options.show:
        print(listing(draw.program(options.seed, options.first)))
        return 0
    if options.run:
        check(draw.program(options.seed, options.first), options.grace_s)
    print(f"seed {options.seed}", flush=True)
    line = _Line(options.steps, options.minutes)
    tally = hunt(
        steps=options.steps,
        seed=options.seed,
        jobs=options.jobs,
        seconds=60 * options.minutes,
        grace_s=options.grace_s,
        shrink_s=options.shrink_s,
        mutant=options.mutant,
        first=options.first,
        tell=line.tell,
    )
    line.end(tally)
    return 1 if tally.found else 0


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.fuzz",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--steps", type=float, help="how many steps to take; defaults to 2,000, or to no limit with --minutes")
    add("--minutes", type=float, help="stop after this time")
    add("--seed", type=int, help="of the programs; defaults to a new one")
    add("--jobs", type=int, default=1, help="processes side by side (default: 1)")
    add("--first", type=int, default=0, metavar="N", help="begin with the Nth program of the seed (default: 0)")
    add("--show", action="store_true", help="print the first program and end")
    add("--run", action="store_true", help="run the first program in this process, tell what was wrong, and end")
    add(
        "--grace-s", type=float, default=GRACE_S, help="what a call may take beyond its time-out (default: %(default)s)"
    )
    add("--shrink-s", type=float, default=SHRINK_S, help="time to make one program smaller (default: %(default)s)")
    add("--mutant", default="", choices=["", *MUTANTS], help="break this promise on purpose")
    options = parser.parse_args(arguments)
    if options.steps is None:
        options.steps = 2000 if options.minutes is None else float("inf")
    if options.minutes is None:
        options.minutes = float("inf")
    if options.seed is None:
        options.seed = SystemRandom().randrange(10**6)
    return options


class _Line:
    """Tells how far it is: one line that is overwritten on a terminal, and now and then one elsewhere."""

    def __init__(self, steps: float, minutes: float) -> None:
        self._steps, self._seconds = steps, 60 * minutes
        self._terminal = sys.stderr.isatty()
        self._last = 0.0

    def tell(self, tally: Tally, found: Found | None) -> None:
        if found is not None:
            print(f"\n=== finding {len(tally.found)} ===\n{found}", flush=True)
        now = time.monotonic()
        if now - self._last < (0.2 if self._terminal else 30.0):
            return
        self._last = now
        done = min(max(tally.steps / self._steps, tally.elapsed_s / self._seconds), 1.0)
        bar = "#" * int(30 * done)
        text = f"[{bar:<30}] {_sum(tally)}"
        print(f"\r{text}\033[K" if self._terminal else text, end="" if self._terminal else "\n", file=sys.stderr)
        sys.stderr.flush()

    def end(self, tally: Tally) -> None:
        if self._terminal:
            print(file=sys.stderr)
        print(_sum(tally))
        for found in sorted(tally.found.values(), key=lambda found: -found.times):
            print(f"{found.times:6}  program {found.number}: {found.finding.kind}: {found.finding.what}")


def _sum(tally: Tally) -> str:
    pace = tally.steps / max(tally.elapsed_s, 1e-9)
    return (
        f"{tally.steps:,} steps in {tally.programs:,} programs, {tally.elapsed_s:.0f} s, {pace:.0f} steps/s,"
        f" {len(tally.found)} findings"
    )


if __name__ == "__main__":
    sys.exit(main())
