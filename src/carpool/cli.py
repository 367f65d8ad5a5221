"""The command line: `carpool serve`, `carpool score`, `carpool simulate` and `carpool demo`.

Every error that a user can make is reported in one line, with what to do about it.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn

try:
    from cyclopts import App as Cli
    from cyclopts import Parameter
    from rich.console import Console
except ImportError:
    raise SystemExit("carpool: the command line needs its extra packages: pip install 'carpool[serve]'") from None

import carpool
from carpool.errors import StartupError, Unavailable
from carpool.logger import logger
from carpool.observe import log
from carpool.simulate.command import simulate

if TYPE_CHECKING:
    from carpool.http.app import App
    from carpool.http.server import Server


def _demo_can_run() -> bool:
    """Report whether what `carpool demo` needs besides the command line is installed."""
    return all(importlib.util.find_spec(name) is not None for name in ("sklearn", "httptools"))


cli = Cli(
    name="carpool",
    help="Dynamic batching for Python models: many callers, one vectorised call, each caller its own answer.",
    version=carpool.__version__,
    help_epilogue="Start with: carpool demo" if _demo_can_run() else None,
)
_FAILED = 1
_USAGE_ERROR = 2


@cli.command
def serve(
    target: str,
    /,
    *more: str,
    host: str = "127.0.0.1",
    port: int = 8000,
    when_full: Literal["refuse", "wait"] = "refuse",
    timeout_status: Literal[504, 408] = 504,
    max_body_mb: float = 16.0,
    debug: bool = False,
    log_format: Annotated[Literal["text", "json"], Parameter(name="--log")] = "text",
    log_level: Literal["debug", "info", "warning", "error"] = "info",
    protocols: Annotated[list[str] | None, Parameter(name="--protocol")] = None,
    vertex: bool = False,
    accept_compressed: bool = False,
) -> None:
    """Serve one or several services over HTTP.

    Example: carpool serve program:service --port 8000

    Here program.py is a file in the current folder, with service = carpool.Service(...) in it.

    Then: curl --json '21.0' localhost:8000/predict

    The exit status is 0 after SIGTERM or Ctrl-C, 1 if a service cannot start or no service can
    answer any more, 2 for a wrong command, and 128 + N if signal N has come twice.

    Parameters
    ----------
    target:
        The service, as module:attribute. The module may be in the current folder. The service
        answers at /predict and at /models/NAME/predict.
    more:
        Further services. Each answers at /models/NAME/predict.
    host:
        The address to listen on. 0.0.0.0 makes the service reachable from other machines.
    port:
        The port to listen on; 0 takes a free one.
    when_full:
        What to do with a request while the queue is full: refuse it with 429, or let it wait until
        its deadline.
    timeout_status:
        The HTTP status of a request whose deadline has passed.
    max_body_mb:
        The size of the largest request body, in MiB.
    debug:
        Show the texts of exceptions in error responses. Not for production.
    log_format:
        Write log lines for people, or one JSON object per line.
    log_level:
        The least important lines that are shown, also of your models' own loggers: debug says now
        and then why batches go when they do, info tells of starts and ends, warning of requests
        that are refused or late, error of lost workers and of what models raise. What models print
        is always shown.
    protocols:
        A protocol of other servers to speak besides carpool's own addresses: oip, kserve-v1,
        sagemaker, openai, rerank, vertex, or module:attribute for one of yours. Give it once for
        each; without it all of them are spoken, and "none" stands for none.
    vertex:
        Listen and answer as Vertex AI wants it: on all addresses, at port AIP_HTTP_PORT (8080), and
        at AIP_HEALTH_ROUTE and AIP_PREDICT_ROUTE. This is the default where these are set.
    accept_compressed:
        Read compressed request bodies (Content-Encoding: gzip, deflate, zstd), which count expanded
        for the size of the largest body.
    """
    log.set_up(log_format, log.level_of(log_level))
    services = [_find(name) for name in (target, *more)]
    try:
        from carpool.http.serve import as_vertex_wants, check_port, new_app, why_not_bound
        from carpool.http.server import Server

        host, port, spoken = as_vertex_wants(host, port, protocols, vertex)
        check_port(port, "--port")
        app = new_app(services, when_full, timeout_status, max_body_mb, debug, spoken, accept_compressed)
    except ImportError as error:
        _fail(f"serving needs a package that is missing ({error.name}): pip install 'carpool[serve]'")
    except ValueError as error:
        _fail(str(error))
    server = Server(app, host, port)
    try:
        server.bind()
    except OSError as error:
        _fail(why_not_bound(error, host, port, "--port", "--host"))
    address = f"http://{server.host}:{server.port}"
    if log_format == "text":
        _print_summary(app, address)
    else:
        _log_summary(app, address)
    _run_until_stopped(server)


@cli.command
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
            scorer = ServiceScorer(_find(target))
        status = run_job(Job(source, out, errors, in_format, out_format, resume), scorer)
    except (ImportError, ValueError, TypeError, OSError) as error:
        _fail(str(error))
    except (StartupError, Unavailable) as error:
        logging.shutdown()
        print(f"carpool: {error}", file=sys.stderr)
        raise SystemExit(_FAILED) from None
    raise SystemExit(status)


@cli.command
def demo() -> None:
    """Serve handwritten digits over HTTP to 64 clients and check every answer.

    It needs scikit-learn: pip install 'carpool[serve,examples]'
    """
    _add_current_folder()
    try:
        from carpool import demo as demonstration

        status = demonstration.run(Console())
    except ModuleNotFoundError as error:
        _fail(f"the demo needs {error.name}: pip install 'carpool[serve,examples]'")
    raise SystemExit(status)


cli.command(simulate)  # not by its name: its module would not be read for the list of commands


def main() -> None:
    """Run the command that is named in `sys.argv`."""
    cli()


def _run_until_stopped(server: Server) -> None:
    """Run a server that listens already. Exits with an error if it cannot start or has failed."""
    from carpool.http.serve import run_until_stopped

    try:
        run_until_stopped(server)
    except StartupError as error:
        logging.shutdown()  # log lines that are still on their way come first
        print(f"carpool: {error}", file=sys.stderr)
        raise SystemExit(_FAILED) from None
    except Unavailable as error:
        logger.critical("%s; ended", error)
        raise SystemExit(_FAILED) from None


def _find(target: str) -> carpool.Service:
    """Return the service at `module:attribute`, or exit with an error that says what is there."""
    module_name, colon, attribute = target.partition(":")
    if not colon or not module_name or not attribute:
        _fail(f"{target!r} does not name a service: write module:attribute, for example program:service")
    _add_current_folder()
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not (module_name == error.name or module_name.startswith(f"{error.name}.")):
            _end_for_import(module_name, error)
        hint = " (write the name of the module, not that of its file)" if Path(module_name).suffix == ".py" else ""
        _fail(f"there is no module {error.name!r} in {os.getcwd()} or on the Python path{hint}")
    except Exception as error:
        _end_for_import(module_name, error)
    found: Any = getattr(module, attribute, None)
    if isinstance(found, carpool.Service):
        return found
    services = [name for name, value in vars(module).items() if isinstance(value, carpool.Service)]
    known = f"it has {', '.join(services)}" if services else "it has no carpool.Service"
    if found is None:
        _fail(f"module {module_name!r} has no attribute {attribute!r}; {known}")
    _fail(f"{target} is a {type(found).__name__}, not a carpool.Service; {known}")


def _end_for_import(module_name: str, error: Exception) -> NoReturn:
    """Exit because a module raised when it was imported, with its traceback from the module on."""
    ours = (__file__, importlib.__file__, "<frozen importlib")
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename.startswith(ours):
        frames = frames.tb_next
    print("".join(traceback.format_exception(error.with_traceback(frames))), end="", file=sys.stderr)
    print(f"carpool: module {module_name!r} cannot be imported", file=sys.stderr)
    raise SystemExit(_FAILED)


def _add_current_folder() -> None:
    """Let modules be found in the current folder, as `python -m` does."""
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())


def _print_summary(app: App, address: str) -> None:
    """Print for a person what is about to be served."""
    console = Console(stderr=True, highlight=False)
    console.print(f"[bold]carpool {carpool.__version__}[/] on [bold]{address}[/]")
    for service, path in zip(app.services, _paths(app), strict=True):
        paths = ", ".join([path, *[route.path for route in service.routes]])
        console.print(f"  [bold]{service.name}[/]  POST {paths}")
        for stage in service.stages:
            console.print(f"    stage {stage.name}: {_in_short(stage)}")
    if address.startswith("http://0.0.0.0"):
        console.print("  [yellow]reachable from other machines; there is no authentication[/]")


def _log_summary(app: App, address: str) -> None:
    """Log for a program what is about to be served, since loading the models may take minutes."""
    serves = [
        {"model": service.name, "path": path, "stages": {stage.name: _in_short(stage) for stage in service.stages}}
        for service, path in zip(app.services, _paths(app), strict=True)
    ]
    names = ", ".join(service.name for service in app.services)
    about = {"address": address, "serves": serves}
    logger.info("carpool %s starts %s on %s", carpool.__version__, names, address, extra=about)


def _paths(app: App) -> list[str]:
    """Return the first address of each service."""
    from carpool.http.addresses import predict_path

    return ["/predict", *[predict_path(service.name) for service in app.services[1:]]]


def _in_short(stage: carpool.Stage) -> str:
    """Describe a stage's batches, workers, cores and policy in one line."""
    batches = "single items"
    if stage.max_batch_size:
        batches = f"batches of up to {stage.max_batch_size}{' in size' if stage.size is not None else ''}"
    workers = f"{stage.workers} worker{'s' if stage.workers > 1 else ''}"
    cores = ""
    if stage.cpus is not None:
        cores = " on cores " + " | ".join(",".join(map(str, sorted(each))) for each in stage.cpus)
    policy = f", policy {stage.policy_name}" if stage.max_batch_size else ""
    return f"{batches}, {workers}{cores}{policy}"


def _fail(text: str) -> NoReturn:
    """Exit with an error in one line, for a command that cannot be carried out."""
    print(f"carpool: {text}", file=sys.stderr)
    raise SystemExit(_USAGE_ERROR)
