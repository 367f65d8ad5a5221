"""carpool's worker processes beside mpservice's, without HTTP.  python -m bench.process_peers [--pairs 7] ...

Six cases, one worker per stage: streams and lone calls of small ints, batched (64) and single, and 6 MB
arrays through two stages. A B A B ..., N times over, in one run; each turn is a process of its own under the
side's own Python. The arrays have a third in each round: one 6 MB buffer over a bare socket pair, the limit
for a transfer.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args

from bench.figures import Spread, machine, median_ratio, short, table
from bench.peers.install import python_of, versions
from bench.process_tree import adopt_orphans, end_on_sigterm
from bench.side import Facts, SideFailed, figures_of
from bench.stopwatch import Case

Side = Literal["carpool", "mpservice", "socket"]

STAGES = 2
TRANSFERS = 2  # of one stage: the array goes in and comes out


@dataclass(frozen=True, slots=True)
class Row:
    """Seconds per item of each side, by pair; the socket's per transfer."""

    case: Case
    carpool: list[float] = field(default_factory=list)
    mpservice: list[float] = field(default_factory=list)
    socket: list[float] = field(default_factory=list)

    @property
    def ratio(self) -> float:
        return median_ratio(self.carpool, self.mpservice)

    def times_the_limit(self, side: Sequence[float]) -> float:
        """What one stage costs over the two bare transfers that it cannot do without."""
        return median_ratio(side, self.socket) / (STAGES * TRANSFERS)


def measure(case: Case, pairs: int, seconds: float) -> Row:
    """The sides in turn; the third one only for arrays."""
    row = Row(case)
    for pair in range(pairs):
        row.carpool.append(turn("carpool", case, seconds))
        row.mpservice.append(turn("mpservice", case, seconds))
        if case.startswith("arrays"):
            row.socket.append(turn("socket", case, min(seconds, 1)))
        sides = (row.carpool, row.mpservice, row.socket)
        figures = " / ".join(amount(case, side[-1]) for side in sides if side)
        print(f"  {case} pair {pair + 1}/{pairs}: {figures}", file=sys.stderr, flush=True)
    return row


def turn(side: Side, case: Case, seconds: float) -> float:
    """One process that measures one side, and its figure."""
    commands: dict[Side, list[str]] = {
        "carpool": [sys.executable, "-m", "bench.carpool_pipeline", case, str(seconds)],
        "mpservice": [
            str(python_of("mpservice")),
            "-m",
            "bench.peers.mpservice_pipeline",
            case,
            str(seconds),
        ],
        "socket": [sys.executable, "-m", "bench.socket_copy", str(seconds)],
    }
    figures = figures_of(f"{side}, {case}", commands[side], ours=side == "carpool", seconds=seconds)
    figure: float = figures["seconds_per_item"]
    return figure


def amount(case: Case, seconds: float) -> str:
    """Streams of ints are told in items per second, all else in milliseconds."""
    is_rate = case in ("stream_batched", "stream_single")
    return f"{1 / seconds:,.0f}/s" if is_rate else f"{seconds * 1e3:.3f} ms"


HEADER = ("case", "carpool", "mpservice", "time, ratio", "bare transfer", "carpool/limit", "mpservice/limit")


def cells(row: Row) -> list[str]:
    def spread(values: list[float]) -> str:
        found = Spread.of(values)
        middle, low, high = (amount(row.case, value) for value in (found.median, found.low, found.high))
        return f"{middle} ({low}, {high})"

    figures = [row.case, spread(row.carpool), spread(row.mpservice), short(row.ratio)]
    if not row.socket:
        return [*figures, "", "", ""]
    over_limit = (short(row.times_the_limit(side)) for side in (row.carpool, row.mpservice))
    return [*figures, spread(row.socket), *over_limit]


def as_json(rows: list[Row], failures: list[str], facts: Facts) -> str:
    def entry(row: Row) -> Facts:
        seconds = {"carpool": row.carpool, "mpservice": row.mpservice, "bare_transfer": row.socket}
        figures: Facts = {"case": row.case, "seconds_per_item": seconds, "ratio": row.ratio}
        if row.socket:
            figures["times_the_limit"] = {
                "carpool": row.times_the_limit(row.carpool),
                "mpservice": row.times_the_limit(row.mpservice),
            }
        return figures

    return json.dumps({"machine": facts, "rows": [entry(row) for row in rows], "failures": failures}, indent=1)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default=",".join(get_args(Case)), help="separated by commas; default: all")
    parser.add_argument("--pairs", type=int, default=7, help="default: %(default)s")
    parser.add_argument("--seconds", type=float, default=2, help="of each turn; default: %(default)s")
    parser.add_argument("--json", type=Path, metavar="FILE", help="every turn and every figure")
    parser.add_argument("--markdown", action="store_true", help="the table as Markdown")
    given = parser.parse_args()
    if unknown := set(given.cases.split(",")) - set(get_args(Case)):
        parser.error(f"unknown: {', '.join(sorted(unknown))}; there are {', '.join(get_args(Case))}")
    if not versions("mpservice"):
        parser.error("mpservice is not installed: python -m bench.peers.install mpservice")
    return given


def main() -> int:
    given = arguments()
    end_on_sigterm()
    adopt_orphans()
    facts = {**machine(), "peers": versions("mpservice"), "seconds": given.seconds}
    rows: list[Row] = []
    failures: list[str] = []
    try:
        for case in given.cases.split(","):
            try:
                rows.append(measure(case, given.pairs, given.seconds))
            except SideFailed as problem:
                failures.append(str(problem))
    except KeyboardInterrupt:
        failures.append("interrupted")
    if given.json:
        given.json.write_text(as_json(rows, failures, facts))
    print("carpool beside mpservice; the limit of an array is two bare 6 MB transfers per stage")
    print(", ".join(f"{name} {value}" for name, value in facts.items()))
    if rows:
        print("\n" + table(HEADER, [cells(row) for row in rows], markdown=given.markdown))
    for failure in failures:
        print(f"\nFAILED {failure}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
