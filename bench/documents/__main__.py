"""carpool beside the designs that it was made after.  python -m bench.documents [1 2 3 5] [--rounds 3] ...

1: one worker process with batches of 100 for 256 tasks; 2: rows of components, 256 tasks; 3: threads that run their
batches themselves; 5: a hundred CSV bodies by one parse or by one each, over HTTP (both sides are carpool; needs wrk).
The two sides of a row in turn, N times over, each turn a process of its own.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from bench import wrk
from bench.documents import tables
from bench.documents.rows import ROWS
from bench.figures import Spread, machine, short, table
from bench.process_tree import adopt_orphans, end_on_sigterm
from bench.side import Facts, SideFailed, figures_of

TITLES = {
    "1": "Document 1, BatchedService: 256 tasks, one worker process, batches of up to 100",
    "2": "Document 2, ModelService: 256 tasks, components in processes",
    "3": "Document 3, CooperativeQueue: threads, no process",
    "5": "Document 5: a read_csv for each request (document) and one for all of a batch (carpool)",
}
THREAD_VARIABLES = tuple(f"{library}_NUM_THREADS" for library in ("OMP", "OPENBLAS", "MKL", "BLIS", "NUMEXPR"))
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


def measure(result: Result, rounds: int, seconds: float) -> None:
    """The sides in turn; the one that begins changes from round to round."""
    for round in range(rounds):
        pair = {side: turn(result, side, seconds) for side in (SIDES if round % 2 == 0 else SIDES[::-1])}
        result.document.append(pair["document"])
        result.carpool.append(pair["carpool"])
        figures = " / ".join(f"{1 / pair[side]['seconds_per_item']:,.0f}" for side in SIDES)
        print(f"  {result.title} round {round + 1}/{rounds}: {figures}", file=sys.stderr, flush=True)


def turn(result: Result, side: str, seconds: float) -> Facts:
    if result.document_number == "5":
        return tables.measure(side, seconds)
    row = ROWS[result.document_number][result.row]
    unset = [part for name in THREAD_VARIABLES for part in ("-u", name)]
    env = ["env", *unset, *(f"{name}={value}" for name, value in row.env.items())]
    program = [sys.executable, "-m", "bench.documents.rows", result.document_number, result.row, side, str(seconds)]
    return figures_of(f"{row.title}, {side}", [*env, *program], ours=True, seconds=seconds)


# -- tables

HEADER = ("row", "document, req/s", "carpool, req/s", "ratio", "CPU µs/req, document / carpool")
WORKER_HEADER = ("batch", "call ms", "between calls ms", "of that idle ms")
HTTP_HEADER = ("p50 ms", "p99 ms")


def cells(result: Result) -> list[str]:
    def rate(side: list[Facts]) -> str:
        found = Spread.of([1 / facts["seconds_per_item"] for facts in side])
        return f"{found.median:,.0f} ({found.low:,.0f}-{found.high:,.0f})"

    ratios = Spread.of(result.ratios)
    spread = f"{short(ratios.median)} ({short(ratios.low)}-{short(ratios.high)})"
    sides = (result.document, result.carpool)
    return [
        result.title,
        *map(rate, sides),
        spread,
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


def as_json(results: list[Result], failures: list[str], facts: Facts) -> str:
    def entry(result: Result) -> Facts:
        sides = {"document": result.document, "carpool": result.carpool}
        return {"document_number": result.document_number, "row": result.row, "turns": sides, "ratios": result.ratios}

    return json.dumps({"machine": facts, "rows": [entry(result) for result in results], "failures": failures}, indent=1)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("documents", nargs="*", default=list(TITLES), help="1, 2, 3, 5; default: all")
    parser.add_argument("--rows", help="separated by commas; default: all of these documents")
    parser.add_argument("--rounds", type=int, default=3, help="default: %(default)s")
    parser.add_argument("--seconds", type=float, default=2, help="of each turn; default: %(default)s")
    parser.add_argument("--json", type=Path, metavar="FILE", help="every turn and every figure")
    parser.add_argument("--markdown", action="store_true", help="the tables as Markdown")
    given = parser.parse_args()
    if unknown := set(given.documents) - set(TITLES):
        parser.error(f"unknown: {', '.join(sorted(unknown))}; there are {', '.join(TITLES)}")
    known = [row for document in given.documents for row in rows_of(document)]
    given.rows = given.rows.split(",") if given.rows else known
    if unknown := set(given.rows) - set(known):
        parser.error(f"unknown: {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    if "5" in given.documents and not wrk.is_installed():
        parser.error("document 5 needs wrk: apt-get install wrk")
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
    end_on_sigterm()
    adopt_orphans()
    facts = {**machine(), "rounds": given.rounds, "seconds": given.seconds}
    results: list[Result] = []
    failures: list[str] = []
    try:
        for result in wanted(given):
            try:
                measure(result, given.rounds, given.seconds)
                results.append(result)
            except SideFailed as problem:
                failures.append(str(problem))
    except KeyboardInterrupt:
        failures.append("interrupted")
    if given.json:
        given.json.write_text(as_json(results, failures, facts))
    print(", ".join(f"{name} {value}" for name, value in facts.items()))
    for document in TITLES:
        if found := [result for result in results if result.document_number == document]:
            print(f"\n{TITLES[document]}\n")
            print(table(header(document), [cells(result) for result in found], markdown=given.markdown))
    for failure in failures:
        print(f"\nFAILED {failure}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
