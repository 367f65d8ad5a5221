"""The command `carpool score`: reads its arguments, shows how far it is, and sums up."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import chain, count, islice
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from carpool.client.score.inputs import Input, format_of
from carpool.client.score.outputs import (
    NOT_BEGUN,
    EarlierRun,
    Errors,
    LineRows,
    Output,
    ParquetFile,
    RowsFile,
    SheetRows,
    done_in,
    is_open_already,
)
from carpool.engine.clock import monotonic

if TYPE_CHECKING:
    from carpool.client.score.run import Scorer

_OK, _SOME_FAILED = 0, 1


class Job(NamedTuple):
    """What is to be scored.

    Attributes:
        source: The file of rows; "-" for the standard input.
        out: The file of answers; "-" for the standard output.
        errors: The file of errors; None for none.
        in_format: Of the rows; None for what the name of the file says.
        out_format: Of the answers; None for what the name of the file says.
        resume: Whether an earlier run is gone on with.
        retry_failed: Whether rows that failed in it are tried again.
    """

    source: str
    out: str
    errors: str | None
    in_format: str | None
    out_format: str | None
    resume: bool
    retry_failed: bool


def score(job: Job, scorer: Scorer) -> int:
    """Run a job and return the exit status: 1 if any row has failed.

    Raises:
        ValueError: The job cannot be run; the text says what to change.
        OSError: A file cannot be read or written.
    """
    out_format = job.out_format or format_of(job.out)
    done = _done(job, out_format)
    retried = [place.row for place in done.failed] if job.retry_failed else []
    source = Input(job.source, job.in_format or format_of(job.source))
    errors = None if job.errors is None else Errors(job.errors, done, is_retried=job.retry_failed)
    output = _output(job, out_format, done, scorer.fields)
    console = Console(stderr=True, highlight=False)
    if done.rows:
        again = f"; {len(retried):,} of them had failed and are tried again" if retried else ""
        console.print(f"{done.rows:,} rows were answered before{again}")
    numbers = chain(retried, count(done.rows + 1))
    rows, n_failed, began = 0, 0 if job.retry_failed else len(done.failed), monotonic()
    is_whole = False
    try:
        with _shown(console) as progress:
            task = progress.add_task("starting", total=source.size, rate="")
            for found in scorer.answers(source.rows(done.rows, frozenset(retried))):
                if not found and not rows:
                    began = monotonic()  # it is ready
                    progress.update(task, description="scoring")
                    continue
                answers = output.fitted(found)
                if errors is not None:
                    errors.write([*islice(numbers, len(answers))], answers)
                    if rows + len(answers) >= len(retried):
                        errors.forget()
                output.write(answers)
                rows += len(answers)
                n_failed += sum([answer.is_error for answer in answers])
                rate = rows / max(monotonic() - began, 1e-9)
                progress.update(task, completed=source.read_bytes, rate=f"{rows:,} rows, {rate:,.0f}/s")
        is_whole = True
    finally:
        output.close(is_whole=is_whole)
        if errors is not None:
            errors.close()
    _sum_up(console, scorer, rows, n_failed, monotonic() - began)
    return _SOME_FAILED if n_failed else _OK


def _done(job: Job, out_format: str) -> EarlierRun:
    """Return how far an earlier run came. Raises ValueError if it cannot be gone on with."""
    if not job.resume:
        if job.retry_failed:
            raise ValueError("--retry-failed goes with --resume")
        if not is_open_already(job.out) and Path(job.out).is_file() and Path(job.out).stat().st_size:
            raise ValueError(f"{job.out} is there already: go on with --resume, or choose another --out")
        return NOT_BEGUN
    if out_format == "parquet" or not _may_be_file(job.out):
        raise ValueError("--resume needs an --out that is a file of NDJSON or CSV")
    if not _may_be_file(job.source):
        raise ValueError("--resume needs an --in that is a file, since it reads it from the beginning")
    done = done_in(job.out, out_format)
    if job.retry_failed and len(done.failed) == done.rows:
        return NOT_BEGUN  # nothing in it is kept, the header neither
    return done


def _may_be_file(path: str) -> bool:
    return not is_open_already(path) and (Path(path).is_file() or not Path(path).exists())


def _output(job: Job, format: str, done: EarlierRun, fields: Sequence[str]) -> Output:
    if format == "parquet":
        return ParquetFile(job.out)
    rows = SheetRows(done.header, fields) if format == "csv" else LineRows()
    return RowsFile(job.out, rows, done, is_retried=job.retry_failed)


def _shown(console: Console) -> Progress:
    """Return what shows how far it is, every second; there is none where no person looks."""
    columns = (
        *(TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f} %")),
        *(TextColumn("{task.fields[rate]}"), TimeElapsedColumn(), TimeRemainingColumn(compact=True)),
    )
    return Progress(*columns, console=console, refresh_per_second=2, transient=True, disable=not sys.stderr.isatty())


def _sum_up(console: Console, scorer: Scorer, rows: int, n_failed: int, seconds: float) -> None:
    rate = rows / seconds if seconds else 0.0
    console.print(f"{rows:,} rows in {seconds:.1f} s, {rate:,.0f} rows/s, {n_failed:,} failed")
    for line in scorer.summary(seconds):
        console.print(line)
