"""`carpool score`: answers all rows of a file with a model."""

from __future__ import annotations

import logging
from typing import Annotated, Literal

from cyclopts import Parameter

import carpool
from carpool.cli.exits import FAILED, fail
from carpool.cli.targets import find_service
from carpool.errors import CarpoolError
from carpool.observe import log


def score(
    target: str,
    /,
    *,
    source: Annotated[str, Parameter(name="--in", allow_leading_hyphen=True)],
    out: Annotated[str, Parameter(allow_leading_hyphen=True)],
    errors: str | None = None,
    resume: bool = False,
    model: str | None = None,
    in_format: Literal["ndjson", "csv", "parquet"] | None = None,
    out_format: Literal["ndjson", "csv", "parquet"] | None = None,
    log_level: Literal["debug", "info", "warning", "error"] = "warning",
) -> None:
    """Answer all rows of a file with a model, in order and in constant memory.

    Example: carpool score program:service --in rows.ndjson --out answers.ndjson

    The exit status is 0 if all rows were answered, 1 if some have failed, and 2 for a wrong
    command.

    Parameters
    ----------
    target:
        The service, as module:attribute, which is started for it; or the address of a running
        server, such as http://host:8000.
    source:
        The file of rows: NDJSON with an item in each line, CSV with a header, or Parquet. "-" is
        the standard input.
    out:
        The file of answers, one for each row; a row that has failed has an object with its error.
        "-" is the standard output.
    errors:
        A file that gets a line for each row that has failed, with its number.
    resume:
        Go on where an earlier run was ended, by whatever.
    model:
        The name of the model, of a server that has several.
    in_format:
        The format of the rows, where the name of the file does not say it.
    out_format:
        The format of the answers, where the name of the file does not say it.
    log_level:
        The least important log lines that are shown; see `carpool serve`.
    """
    log.set_up("text", log.level_of(log_level))
    from carpool.score.command import Job
    from carpool.score.command import score as run_job
    from carpool.score.run import Scorer, ServerScorer, ServiceScorer

    try:
        scorer: Scorer
        if target.startswith(("http://", "https://")):
            scorer = ServerScorer(target, model, carpool.Client)
        else:
            scorer = ServiceScorer(find_service(target))
        status = run_job(Job(source, out, errors, in_format, out_format, resume), scorer)
    except (ImportError, ValueError, TypeError, OSError) as error:
        fail(str(error))
    except CarpoolError as error:  # the service does not start, or the server ends its answer
        logging.shutdown()
        fail(str(error), FAILED)
    raise SystemExit(status)
