"""Runs many programs, in several processes side by side, and makes those that fail smaller."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from tests.fuzz import draw
from tests.fuzz.program import Program, listing
from tests.fuzz.run import GRACE_S, Finding
from tests.fuzz.runner import Runner
from tests.fuzz.shrink import shrink

SHRINK_S = 60.0


@dataclass
class Found:
    """One kind of finding.

    Attributes:
        number: Of the program that showed it first.
        finding: That program's.
        program: The smallest one that shows it.
        times: How many programs have shown it.
    """

    number: int
    finding: Finding
    program: Program
    times: int = 1

    def __str__(self) -> str:
        lines = [f"{self.finding.kind}: {self.finding.what}", f"{self.times} times, first in program {self.number}"]
        return "\n".join([*lines, "", listing(self.program), self.finding.text])


@dataclass
class Tally:
    """How far a hunt is.

    Attributes:
        steps, programs: that have been run.
        found: By signature.
        elapsed_s: Since it began.
    """

    steps: int = 0
    programs: int = 0
    found: dict[str, Found] = field(default_factory=dict)
    elapsed_s: float = 0.0


def hunt(
    *,
    steps: int,
    seed: int,
    jobs: int = 1,
    seconds: float = float("inf"),
    grace_s: float = GRACE_S,
    shrink_s: float = SHRINK_S,
    mutant: str = "",
    first: int = 0,
    until: Callable[[Found], bool] = lambda found: False,
    tell: Callable[[Tally, Found | None], None] = lambda tally, found: None,
) -> Tally:
    """Run programs until so many steps have been taken, or the time is over.

    Args:
        steps: How many.
        seed: Of all programs.
        jobs: Processes side by side.
        seconds: At most.
        grace_s: What a call may take beyond its time-out.
        shrink_s: For making one program smaller; 0 to leave it.
        mutant: Which promise is broken on purpose.
        first: The number of the first program.
        until: Whether a finding is what was looked for, so that the hunt is over.
        tell: Called after each program, with what it has shown that is new.
    """
    hunters = _Hunt(steps, seed, seconds, grace_s, shrink_s, mutant, first, until, tell)
    threads = [threading.Thread(target=hunters.work, daemon=True) for _ in range(jobs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        while thread.is_alive():
            thread.join(0.5)
    return hunters.tally


class _Hunt:
    def __init__(
        self,
        steps: int,
        seed: int,
        seconds: float,
        grace_s: float,
        shrink_s: float,
        mutant: str,
        first: int,
        until: Callable[[Found], bool],
        tell: Callable[[Tally, Found | None], None],
    ) -> None:
        self.tally = Tally()
        self._steps, self._seed, self._grace_s = steps, seed, grace_s
        self._shrink_s, self._mutant, self._is_it, self._tell = shrink_s, mutant, until, tell
        self._found_it = False
        self._began = time.monotonic()
        self._until = self._began + seconds
        self._next = first
        self._lock = threading.Lock()

    def work(self) -> None:
        """Run programs in one process; called in a thread for each."""
        runner = Runner(self._grace_s, self._mutant)
        try:
            while not self._is_over():
                with self._lock:
                    number, self._next = self._next, self._next + 1
                program = draw.program(self._seed, number)
                self._count(number, program, runner.run(program), runner)
        finally:
            runner.close()

    def _is_over(self) -> bool:
        tally = self.tally
        return self._found_it or tally.steps >= self._steps or time.monotonic() > self._until

    def _count(self, number: int, program: Program, findings: list[Finding], runner: Runner) -> None:
        new: list[Found] = []
        with self._lock:
            self.tally.steps += len(program.steps)
            self.tally.programs += 1
            self.tally.elapsed_s = time.monotonic() - self._began
            for signature, finding in {each.signature: each for each in findings}.items():
                if signature in self.tally.found:
                    self.tally.found[signature].times += 1
                else:
                    self.tally.found[signature] = found = Found(number, finding, program)
                    new.append(found)
                    self._found_it = self._found_it or self._is_it(found)
            if not new:
                self._tell(self.tally, None)
        for found in new:
            self._shrink(found, runner)
            with self._lock:
                self._tell(self.tally, found)

    def _shrink(self, found: Found, runner: Runner) -> None:
        signature = found.finding.signature

        def fails(program: Program) -> bool:
            for finding in runner.run(program):
                if finding.signature == signature:
                    found.finding = finding
                    return True
            return False

        if self._shrink_s:
            found.program = shrink(found.program, fails, budget_s=self._shrink_s)
