"""carpool beside the designs that it was made after.

These are written anew from the articles that show them, and are as fast.

* 1: one worker process with batches of 100 for 256 tasks.
* 2: rows of components, 256 tasks.
* 3: threads that run their batches themselves.
* 5: an experiment, one `read_csv` for all CSV bodies of a batch against one for each, over HTTP;
  both sides are served by carpool, and `wrk` asks.

The two sides of a row take turns, each turn in a process of its own, and take turns in beginning.
What counts is a window of a closed loop. No number of BLAS or OpenMP threads is in the environment
unless a row says that one is *exported*. In 1 the model keeps a clock, the same on both sides: the
time of its calls, the time between two calls (sending answers, reading the next batch), and what of
that is not processor time of its thread: *idle*. On a machine that does other work as well, waiting
for a core is a part of it.

Some of it:

    python -m bench.documents 1 3 --rows net,free --rounds 5
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial

from bench.documents import tables
from bench.documents.rows import ROWS
from bench.tools import options, wrk
from bench.tools.comparison import compare, take_turns
from bench.tools.figures import Facts, Spread, short, table
from bench.tools.side import figures_of
from carpool.engine.worker.place import THREAD_VARIABLES

TITLES = {
    "1": "Document 1, BatchedService: 256 tasks, one worker process, batches of up to 100",
    "2": "Document 2, ModelService: 256 tasks, components in processes",
    "3": "Document 3, CooperativeQueue: threads, no process",
    "5": "Document 5: a read_csv for each request (document) and one for all of a batch (carpool)",
}
THREAD_VARIABLES = (*THREAD_VARIABLES, "BLIS_NUM_THREADS")
SIDES = ("document", "carpool")


@dataclass(frozen=True, slots=True)
class Result:
    """One row, with the figures of each turn of both sides."""

    document_number: str
    row: str
    title: str
    document: list[Facts] = field(default_factory=list)
    carpool: list[Facts] = field(default_factory=list)

    @property
    def ratios(self) -> list[float]:
        """Of the rates, pair by pair; above 1 is better."""
        return [
            theirs["seconds_per_item"] / ours["seconds_per_item"]
            for theirs, ours in zip(self.document, self.carpool, strict=True)
        ]


def measure(rounds: int, seconds: float, result: Result) -> Iterator[Result]:
    """Fill one row; the side that begins changes from round to round."""
    sides = {side: partial(turn, result, side, seconds) for side in SIDES}

    def rate(facts: Facts) -> str:
        return f"{1 / facts['seconds_per_item']:,.0f}"

    turns = take_turns(result.title, rounds, sides, rate, other_first=True)
    yield replace(result, document=turns["document"], carpool=turns["carpool"])


def turn(result: Result, side: str, seconds: float) -> Facts:
    """One process that measures one side, and its figures."""
    if result.document_number == "5":
        return tables.measure(side, seconds)
    row = ROWS[result.document_number][result.row]
    program = [sys.executable, "-m", "bench.documents.rows", result.document_number, result.row, side, str(seconds)]
    title = f"{row.title}, {side}"
    return figures_of(title, program, ours=True, seconds=seconds, env=row.env, unset=THREAD_VARIABLES)


# -- tables

HEADER = ("row", "document, req/s", "carpool, req/s", "ratio", "CPU µs/req, document / carpool")
WORKER_HEADER = ("batch", "call ms", "between calls ms", "of that idle ms")
HTTP_HEADER = ("p50 ms", "p99 ms")


def cells(result: Result) -> list[str]:
    def rate(side: list[Facts]) -> str:
        return Spread.of([1 / facts["seconds_per_item"] for facts in side]).text(lambda rate: f"{rate:,.0f}")

    sides = (result.document, result.carpool)
    return [
        result.title,
        *map(rate, sides),
        Spread.of(result.ratios).text(short),
        both(result, "cpu_s_per_item", lambda s: short(s * 1e6)),
        *more_cells(result),
    ]


def more_cells(result: Result) -> list[str]:
    """What is known of the worker, or of the clients."""
    if result.document_number == "1":
        times = (both(result, name, lambda s: f"{s * 1e3:.3f}") for name in ("call_s", "between_s", "idle_s"))
        return [both(result, "items_per_batch", lambda n: f"{n:.0f}"), *times]
    if result.document_number == "5":
        return [both(result, name, lambda s: f"{s * 1e3:.2f}") for name in ("p50_s", "p99_s")]
    return []


def both(result: Result, name: str, text: Callable[[float], str]) -> str:
    """The medians of the two sides."""
    return " / ".join(
        text(Spread.of([facts[name] for facts in side]).median) for side in (result.document, result.carpool)
    )


def header(document: str) -> tuple[str, ...]:
    return HEADER + {"1": WORKER_HEADER, "5": HTTP_HEADER}.get(document, ())


def entry(result: Result) -> Facts:
    """A row as JSON has it."""
    sides = {"document": result.document, "carpool": result.carpool}
    return {"document_number": result.document_number, "row": result.row, "turns": sides, "ratios": result.ratios}


def tables_of(results: list[Result], markdown: bool) -> str:
    """A table for each document, under its title."""
    found = []
    for document, title in TITLES.items():
        if rows := [cells(result) for result in results if result.document_number == document]:
            found.append(f"{title}\n\n{table(header(document), rows, markdown=markdown)}")
    return "\n\n".join(found)


def arguments() -> argparse.Namespace:
    parser = options.parser(__doc__)
    parser.add_argument("documents", nargs="*", default=list(TITLES), help="1, 2, 3 or 5; all of them if none is named")
    parser.add_argument("--rows", help="separated by commas; default: all of these documents")
    options.add_measuring(parser, rounds=3, seconds=2)
    given = parser.parse_args()
    if unknown := set(given.documents) - set(TITLES):
        parser.error(f"unknown: {', '.join(sorted(unknown))}; choose from {', '.join(TITLES)}")
    known = [row for document in given.documents for row in rows_of(document)]
    given.rows = given.rows.split(",") if given.rows else known
    if unknown := set(given.rows) - set(known):
        parser.error(f"unknown: {', '.join(sorted(unknown))}; choose from {', '.join(known)}")
    if "5" in given.documents and (problem := wrk.missing()):
        parser.error(f"document 5 needs wrk. {problem}")
    return given


def rows_of(document: str) -> list[str]:
    return ["csv"] if document == "5" else list(ROWS[document])


def wanted(given: argparse.Namespace) -> list[Result]:
    """A result for each row, still empty."""
    return [
        Result(document, row, tables.TITLE if document == "5" else ROWS[document][row].title)
        for document in given.documents
        for row in rows_of(document)
        if row in given.rows
    ]


def main() -> int:
    given = arguments()
    found = compare(wanted(given), partial(measure, given.rounds, given.seconds), {}, given.seconds)
    return found.report(given, "carpool beside the documents' designs; a ratio is that of the rates", tables_of, entry)


if __name__ == "__main__":
    sys.exit(main())
