"""`carpool worker`: runs a worker that joins a service which runs elsewhere."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from carpool.cli.sources import FAILED, fail, find_service
from carpool.engine.logger import logger
from carpool.engine.observe import log
from carpool.errors import StartupError


def worker(
    target: str,
    /,
    *,
    connect: str,
    stage: str | None = None,
    token: Path | None = None,
    ca: Path | None = None,
    cert: Path | None = None,
    key: Path | None = None,
    wait_s: float = 60.0,
    log_format: Annotated[Literal["text", "json"], Parameter(name="--log")] = "text",
    log_level: Literal["debug", "info", "warning", "error"] = "info",
) -> None:
    """Run a worker that joins a service which runs elsewhere: in another container, or on another
    machine.

    Example: carpool worker program:service --stage Digits --connect 10.0.0.7:7000 --token FILE

    The service is one with Stage(..., join=True), served with --join 10.0.0.7:7000. Workers may
    come and go at any time; one that is stopped by SIGTERM or Ctrl-C finishes what it has.

    The exit status is 0 after that or when the service has ended, 1 if the service cannot be
    reached or the model cannot be loaded, and 2 for a wrong command or token.

    Parameters
    ----------
    target:
        The service, as module:attribute. The module may be in the current folder.
    connect:
        Where the service lets workers join: HOST:PORT, or the path of a Unix socket.
    stage:
        The name of the stage, if several let workers join.
    token:
        A file with the token that the service knows, too; a Unix socket can do without.
    ca:
        A file with certificates of those who vouch for the service, for TLS.
    cert:
        A file with this worker's certificate, if the service demands one.
    key:
        A file with the key of that certificate, if it is not in the same file.
    wait_s:
        How many seconds to try to connect while nothing listens there.
    log_format:
        Write log lines for people, or one JSON object per line.
    log_level:
        The least important lines that are shown, also of your models' own loggers.
    """
    from carpool.engine.wire.handshake import HandshakeError
    from carpool.engine.worker.address import Tls, parse_address
    from carpool.engine.worker.remote import Refused, Way
    from carpool.service.join import token_of
    from carpool.service.work import stage_to_join, work

    log.set_up(log_format, log.level_of(log_level))
    _limit_threads(stage or target)
    service = find_service(target)
    for number in (signal.SIGTERM, signal.SIGINT):  # until it has joined there is nothing to finish
        signal.signal(number, lambda _number, _frame: os._exit(0))
    try:
        chosen = stage_to_join(service, stage)
        address = parse_address(connect)
        tls = None if ca is None else Tls(cert, key, ca)
        way = Way(address, token_of(address, token), tls)
        work(service, chosen, way, wait_s)
    except ValueError as error:
        fail(str(error))
    except HandshakeError as error:
        fail(f"the service at {connect} cannot be joined: {error}")
    except StartupError as error:
        fail(str(error), FAILED)
    except Refused as error:
        fail(f"the service at {connect} does not admit this worker: {error}", FAILED)
    except OSError as error:
        fail(f"the service at {connect} cannot be reached: {error}", FAILED)


def _limit_threads(name: str) -> None:
    from carpool.engine.worker.place import decide_threads, usable_cores

    cores = usable_cores()
    threads = decide_threads(name, os.environ, {}, workers=1, pinned=None, cores=cores, all_workers=1)
    os.environ.update(threads.variables[0])
    logger.info("%s", threads.why)
