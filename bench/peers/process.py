"""carpool's worker processes beside mpservice's, without HTTP.

Six cases, one worker per stage: streams and lone calls of small ints, batched (64) and single, and
6 MB arrays through two stages. The sides take turns, A B A B ..., each turn in a process of its own
under the side's own Python. The arrays have a third side: one 6 MB buffer over a bare socket pair.
`limit` is two such transfers per stage, in and out, which no stage can do without.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, get_args

from bench.peers.install import not_installed, python_of, versions
from bench.tools import options
from bench.tools.comparison import compare, one_table, take_turns
from bench.tools.figures import Facts, Spread, median_ratio, short
from bench.tools.side import figures_of
from bench.tools.stopwatch import Case

Side = Literal["carpool", "mpservice", "socket"]

STAGES = 2
TRANSFERS = 2  # of one stage: the array goes in and comes out
SERVERS = "bench.peers.servers"


@dataclass(frozen=True, slots=True)
class Row:
    """Seconds per item of each side, round by round; the socket's are per transfer."""

    case: Case
    carpool: list[float]
    mpservice: list[float]
    socket: list[float] = field(default_factory=list)

    @property
    def ratio(self) -> float:
        return median_ratio(self.carpool, self.mpservice)

    def times_the_limit(self, side: Sequence[float]) -> float:
        """What one stage costs, as a multiple of the two bare transfers that it cannot avoid."""
        return median_ratio(side, self.socket) / (STAGES * TRANSFERS)


def measure(rounds: int, seconds: float, case: Case) -> Iterator[Row]:
    """The row of one case; only arrays have the third side."""
    sides = {side: partial(turn, side, case, seconds) for side in ("carpool", "mpservice")}
    if case.startswith("arrays"):
        sides["socket"] = partial(turn, "socket", case, min(seconds, 1))
    yield Row(case, **take_turns(case, rounds, sides, partial(amount, case)))


def turn(side: Side, case: Case, seconds: float) -> float:
    """One process that measures one side, and its figure."""
    commands: dict[Side, list[str]] = {
        "carpool": [sys.executable, "-m", f"{SERVERS}.carpool_pipeline", case, str(seconds)],
        "mpservice": [str(python_of("mpservice")), "-m", f"{SERVERS}.mpservice_pipeline", case, str(seconds)],
        "socket": [sys.executable, "-m", f"{SERVERS}.socket_copy", str(seconds)],
    }
    figures = figures_of(f"{side}, {case}", commands[side], ours=side == "carpool", seconds=seconds)
    figure: float = figures["seconds_per_item"]
    return figure


def amount(case: Case, seconds: float) -> str:
    """Streams of ints are shown in items per second, everything else in milliseconds."""
    is_rate = case in ("stream_batched", "stream_single")
    return f"{1 / seconds:,.0f}/s" if is_rate else f"{seconds * 1e3:.3f} ms"


HEADER = ("case", "carpool", "mpservice", "time, ratio", "bare transfer", "carpool/limit", "mpservice/limit")


def cells(row: Row) -> list[str]:
    """One line of the table."""
    show = partial(amount, row.case)
    figures = [row.case, *(Spread.of(side).text(show) for side in (row.carpool, row.mpservice)), short(row.ratio)]
    if not row.socket:
        return [*figures, "", "", ""]
    over_limit = (short(row.times_the_limit(side)) for side in (row.carpool, row.mpservice))
    return [*figures, Spread.of(row.socket).text(show), *over_limit]


def entry(row: Row) -> Facts:
    """A row as JSON has it."""
    seconds = {"carpool": row.carpool, "mpservice": row.mpservice, "bare_transfer": row.socket}
    figures: Facts = {"case": row.case, "seconds_per_item": seconds, "ratio": row.ratio}
    if row.socket:
        sides = {"carpool": row.carpool, "mpservice": row.mpservice}
        figures["times_the_limit"] = {name: row.times_the_limit(side) for name, side in sides.items()}
    return figures


def arguments() -> argparse.Namespace:
    parser = options.parser(__doc__)
    options.add_names(parser, "--cases", get_args(Case), "what is measured")
    options.add_measuring(parser, rounds=7, seconds=2)
    given = parser.parse_args()
    if not versions("mpservice"):
        parser.error(not_installed("mpservice"))
    return given


def main() -> int:
    given = arguments()
    found = compare(given.cases, partial(measure, given.rounds, given.seconds), versions("mpservice"), given.seconds)
    title = "carpool beside mpservice; the limit of an array is two bare 6 MB transfers per stage"
    return found.report(given, title, one_table(HEADER, cells), entry)


if __name__ == "__main__":
    sys.exit(main())
