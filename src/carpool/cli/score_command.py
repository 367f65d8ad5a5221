"""`carpool score`: answers all rows of a file with a model."""

from __future__ import annotations

import logging
from typing import Annotated, Literal

from cyclopts import Parameter

import carpool
from carpool.cli.sources import FAILED, fail, find_service, sources, values
from carpool.engine.logger import logger
from carpool.engine.observe import log
from carpool.errors import CarpoolError
from carpool.service.overrides import changed
from carpool.service.service import Service


def score(
    target: str,
    /,
    *,
    source: Annotated[str, Parameter(name="--in", allow_leading_hyphen=True)],
    out: Annotated[str, Parameter(allow_leading_hyphen=True)],
    errors: str | None = None,
    resume: bool = False,
    retry_failed: bool = False,
    model: str | None = None,
    in_format: Literal["ndjson", "csv", "parquet"] | None = None,
    out_format: Literal["ndjson", "csv", "parquet"] | None = None,
    log_level: Literal["debug", "info", "warning", "error"] = "warning",
) -> None:
    """Answer all rows of a file with a model, in order and in constant memory.

    Example: carpool score program:service --in rows.ndjson --out answers.ndjson

    What the environment and carpool.toml say of its stages and of the service counts as for
    `carpool serve`, but for time-outs and SLOs: nobody waits for an answer.

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
    retry_failed:
        With --resume: first try the rows again that failed in earlier runs.
    model:
        The name of the model, of a server that has several; of a service it is the service's own.
    in_format:
        The format of the rows, where the name of the file does not say it.
    out_format:
        The format of the answers, where the name of the file does not say it.
    log_level:
        The least important log lines that are shown; see `carpool serve`.
    """
    log.set_up("text", log.level_of(log_level))
    from carpool.client.score.run import Job, Scorer, ServerScorer, ServiceScorer
    from carpool.client.score.run import score as run_job

    try:
        scorer: Scorer
        if target.startswith(("http://", "https://")):
            scorer = ServerScorer(target, model, carpool.Client)
        else:
            service = service_to_score(target)
            if model not in (None, service.name):
                raise ValueError(f"{target} is the service {service.name}, not {model!r}: leave --model out")
            scorer = ServiceScorer(service)
        status = run_job(Job(source, out, errors, in_format, out_format, resume, retry_failed), scorer)
    except (ImportError, ValueError, TypeError, OSError) as error:
        fail(str(error))
    except CarpoolError as error:  # the service does not start, or the server ends its answer
        logging.shutdown()
        fail(str(error), FAILED)
    raise SystemExit(status)


def service_to_score(target: str) -> Service:
    """Return a service with the settings of the environment and the file, without time-outs.

    Raises:
        ValueError: A setting is none, or is out of range.
        TypeError: A value is of the wrong kind.
    """
    service = find_service(target)
    found = sources.read(None, ())
    for doubt in found.doubts:
        logger.warning("%s", doubt)
    # a file may also be that of a server with other services
    of_services = {name: each for name, each in values(found.services).items() if name == service.name}
    names = {name for stage in service.stages for name in (stage.name, f"{service.name}/{stage.name}")}
    of_stages = {name: each for name, each in values(found.stages).items() if name in names}
    (service,) = changed([service], of_services, of_stages)
    (service,) = changed([service], {service.name: {"timeout_s": None, "slo_s": None, "part_slo_s": None}}, {})
    return service
