"""How sides are set beside each other, in every program that does so.

Case after case is measured: in each round every side has its turn, so that other work on the
machine slows neighbours alike. A case that fails is reported at the end and does not stop the
others. Ctrl-C ends the measuring, and what has been measured by then is printed all the same.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from bench.tools.figures import Facts, machine, table
from bench.tools.process_tree import adopt_orphans, end_on_sigterm
from bench.tools.side import SideFailed

Case = TypeVar("Case")
Row = TypeVar("Row")
Turn = TypeVar("Turn")


@dataclass(slots=True)
class Comparison(Generic[Row]):
    """All that a program has found.

    Attributes:
        machine: Where, when and with which versions it was measured.
        rows: What the cases gave.
        failures: Why cases gave nothing.
    """

    machine: Facts
    rows: list[Row] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def report(
        self,
        given: argparse.Namespace,
        title: str,
        tables: Callable[[list[Row], bool], str],
        entry: Callable[[Row], Facts],
    ) -> int:
        """Print what was found, and write it where `--json` says; returns the exit status.

        Args:
            given: What the command line says, with the options of `options.add_measuring`.
            title: Says what the tables show.
            tables: Makes them of the rows, as Markdown or not.
            entry: A row as JSON has it.
        """
        if given.json:
            found = {"machine": self.machine, "rows": list(map(entry, self.rows)), "failures": self.failures}
            given.json.write_text(json.dumps(found, indent=1))
        print(title)
        print(", ".join(f"{name} {value}" for name, value in self.machine.items()))
        if self.rows:
            print(f"\n{tables(self.rows, given.markdown)}")
        for failure in self.failures:
            print(f"\nFAILED {failure}")
        return 1 if self.failures else 0


def compare(
    cases: Iterable[Case], measure: Callable[[Case], Iterable[Row]], versions: Mapping[str, str], seconds: float
) -> Comparison[Row]:
    """Measure all cases.

    Args:
        cases: What there is to measure.
        measure: Gives the rows of a case, one after the other, or raises `SideFailed`.
        versions: Of the packages that take part besides ours.
        seconds: How long each turn takes.
    """
    end_on_sigterm()
    adopt_orphans()
    found: Comparison[Row] = Comparison({**machine(), **versions, "seconds": seconds})
    try:
        for case in cases:
            try:
                found.rows.extend(measure(case))
            except SideFailed as problem:
                found.failures.append(str(problem))
    except KeyboardInterrupt:
        found.failures.append("interrupted: not everything was measured")
    return found


def one_table(header: Sequence[str], cells: Callable[[Row], Sequence[str]]) -> Callable[[list[Row], bool], str]:
    """What makes a single table of all rows, for `report`."""
    return lambda rows, markdown: table(header, list(map(cells, rows)), markdown=markdown)


def take_turns(
    what: str,
    rounds: int,
    sides: Mapping[str, Callable[[], Turn]],
    show: Callable[[Turn], str],
    *,
    other_first: bool = False,
) -> dict[str, list[Turn]]:
    """Let the sides take turns, and tell after each round how it went.

    Args:
        what: The name of the case.
        rounds: How many turns each side has.
        sides: What a turn of each side does.
        show: Its figure, for people.
        other_first: Whether the order is reversed in every other round.

    Returns:
        What the turns gave, by side; those of one round have the same index.
    """
    found: dict[str, list[Turn]] = {side: [] for side in sides}
    for number in range(rounds):
        order: Sequence[str] = list(sides)
        for side in order[::-1] if other_first and number % 2 else order:
            found[side].append(sides[side]())
        figures = " / ".join(show(turns[-1]) for turns in found.values())
        say(f"  {what}, round {number + 1} of {rounds}: {figures}")
    return found


def say(line: str) -> None:
    """Tell how far it is, where it does not get between the tables."""
    print(line, file=sys.stderr, flush=True)
