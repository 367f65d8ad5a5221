"""The command line: `carpool serve` and its companions, `simulate` and `demo`.

Every error that a user can make is reported in one line, with what to do about it.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import logging
import os
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn

try:
    from cyclopts import App as Cli
    from cyclopts import Parameter, Token
    from cyclopts.argument import ArgumentCollection
    from rich.console import Console
except ImportError:
    raise SystemExit("carpool: the command line needs its extra packages: pip install 'carpool[serve]'") from None

import carpool
from carpool import operate
from carpool.config import Config, as_texts, read, values
from carpool.errors import StartupError, Unavailable
from carpool.logger import logger
from carpool.observe import log
from carpool.service.overrides import OF_A_SERVICE, OF_A_STAGE, changed
from carpool.settings import LISTS, NAMES, ServerSettings
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
    settings: Annotated[ServerSettings | None, Parameter(name="*")] = None,
    config: str | None = None,
    changes: Annotated[tuple[str, ...], Parameter(name="--set")] = (),
) -> None:
    """Serve one or several services over HTTP.

    Example: carpool serve program:service --port 8000

    Here program.py is a file in the current folder, with service = carpool.Service(...) in it.

    Then: curl --json '21.0' localhost:8000/predict

    Each option may also stand in the environment, as CARPOOL_PORT, and in carpool.toml or
    [tool.carpool] of pyproject.toml, as port; docs/configuration.md tells more.

    SIGHUP has it load the models anew: new code and weights, without losing a request.

    The exit status is 0 after SIGTERM or Ctrl-C, 1 if a service cannot start or no service can
    answer any more, 2 for a wrong command, and 128 + N if signal N has come twice.

    Parameters
    ----------
    target:
        The service, as module:attribute. The module may be in the current folder. The service
        answers at /predict and at /models/NAME/predict.
    more:
        Further services. Each answers at /models/NAME/predict.
    config:
        The file with settings, in the place of carpool.toml.
    changes:
        A setting of a stage or a service that counts before what the code says, such as
        stages.Digits.workers=4 or services.digits.slo_s=0.1; with --on ray also what differs for a
        stage on the cluster, such as Digits.num_gpus=0.5. It may be given several times.
    """
    chosen = settings or ServerSettings()
    log.set_up(chosen.log, log.level_of(chosen.log_level))
    services = [_find(name) for name in (target, *more)]
    of_cluster = [change for change in changes if chosen.on and not change.startswith(("stages.", "services."))]
    found = _sources.read(config, tuple(change for change in changes if change not in of_cluster))
    for doubt in found.doubts:
        logger.warning("%s", doubt)
    try:
        from carpool.http.serve import check_port, new_server, why_not_bound

        services = changed(services, values(found.services), values(found.stages))
        check_port(chosen.port, "--port")
        server = new_server(services, chosen, _cluster(of_cluster) if chosen.on else None)
    except ImportError as error:
        if error.name == "ray":
            _fail("--on ray needs Ray: pip install 'carpool[ray]'")
        _fail(f"serving needs a package that is missing ({error.name}): pip install 'carpool[serve]'")
    except (ValueError, TypeError) as error:
        _fail(str(error))
    except OSError as error:
        _fail(f"{error.filename}: {error.strerror}" if error.filename else str(error))
    try:
        server.bind()
    except OSError as error:
        _fail(why_not_bound(error, chosen, _as_flag))
    _summarize(server, chosen)
    _run_until_stopped(server, chosen)


@cli.command(name="config")
def show_config(
    *targets: str,
    settings: Annotated[ServerSettings | None, Parameter(name="*")] = None,
    config: str | None = None,
    changes: Annotated[tuple[str, ...], Parameter(name="--set")] = (),
) -> None:
    """Show the settings that carpool serve would have here, and where each is from.

    Parameters
    ----------
    targets:
        Services, as module:attribute, whose own settings are shown, too.
    config:
        The file with settings, in the place of carpool.toml.
    changes:
        See carpool serve.
    """
    chosen = settings or ServerSettings()
    found = _sources.read(config, changes)
    try:
        services = changed([_find(name) for name in targets], values(found.services), values(found.stages))
    except (ValueError, TypeError) as error:
        if targets:
            _fail(str(error))
        services = []
    rows = [(name, getattr(chosen, name), _sources.of(name)) for name in NAMES]
    for kind, changes_of, names in (
        ("services", found.services, {service.name: service for service in services}),
        ("stages", found.stages, {stage.name: stage for service in services for stage in service.stages}),
    ):
        for name in {**names, **changes_of}:
            of_one = changes_of.get(name, {})
            for setting in OF_A_SERVICE if kind == "services" else OF_A_STAGE:
                if setting in of_one:
                    rows.append((f"{kind}.{name}.{setting}", of_one[setting].value, of_one[setting].source))
                elif name in names:
                    rows.append((f"{kind}.{name}.{setting}", getattr(names[name], setting), "code"))
    width = max(len(name) for name, _, _ in rows)
    for name, value, source in rows:
        print(f"{name:<{width}}  {_shown(value)}  # {source}")
    for doubt in found.doubts:
        print(f"# {doubt}")


@cli.command
def key(name: str, /, *, expires: str = "") -> None:
    """Make an API key for somebody.

    The key is for them, and is not shown again. The line is for the file of --api-keys, and has
    only its SHA-256.

    Parameters
    ----------
    name:
        Who gets it: the name is in logs and metrics.
    expires:
        The day, or the moment, from which it is no longer good, such as 2027-01-31.
    """
    from carpool.http.keys import new_key

    try:
        made, line = new_key(name, expires)
    except ValueError as error:
        _fail(str(error))
    print(f"key:  {made}", file=sys.stderr)
    print(line)


@cli.command
def top(url: str = "http://127.0.0.1:8000", /, *, key_file: Path | None = None) -> None:
    """Show the figures of a server in the terminal: the dashboard's, each second.

    Parameters
    ----------
    url:
        Where the server is, or its admin address, which may be unix:PATH.
    key_file:
        A file with an API key, if the server needs one; CARPOOL_KEY may have it instead.
    """
    from carpool import top as terminal

    try:
        key = os.environ.get("CARPOOL_KEY", "") if key_file is None else key_file.read_text().strip()
        terminal.run(url, key, Console())
    except (terminal.NoFigures, OSError) as error:
        _fail(str(error))
    except KeyboardInterrupt:
        pass


@cli.command
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
    from carpool.service.join import token_of
    from carpool.service.work import stage_to_join, work
    from carpool.wire.handshake import HandshakeError
    from carpool.worker.address import parse_address
    from carpool.worker.remote import Refused, Way
    from carpool.worker.tls import Tls

    log.set_up(log_format, log.level_of(log_level))
    service = _find(target)
    try:
        chosen = stage_to_join(service, stage)
        address = parse_address(connect)
        tls = None if ca is None else Tls(cert, key, ca)
        way = Way(address, token_of(address, token), tls)
        work(service, chosen, way, wait_s)
    except ValueError as error:
        _fail(str(error))
    except HandshakeError as error:
        _fail(f"the service at {connect} cannot be joined: {error}")
    except StartupError as error:
        print(f"carpool: {error}", file=sys.stderr)
        raise SystemExit(_FAILED) from None
    except Refused as error:
        print(f"carpool: the service at {connect} does not admit this worker: {error}", file=sys.stderr)
        raise SystemExit(_FAILED) from None
    except OSError as error:
        print(f"carpool: the service at {connect} cannot be reached: {error}", file=sys.stderr)
        raise SystemExit(_FAILED) from None


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


cli.command(operate.reload)
cli.command(operate.scale)
cli.command(simulate)  # not by its name: its module would not be read for the list of commands


class _Sources:
    """Gives commands the settings of the environment and the file, unless a flag says them."""

    def __init__(self) -> None:
        self._of: dict[str, str] = {}

    def __call__(self, app: Cli, commands: tuple[str, ...], arguments: ArgumentCollection) -> None:
        """Fill in what no flag says; this is what cyclopts calls."""
        if not commands or commands[0] not in ("serve", "config"):
            return
        by_name = {
            argument.name.removeprefix("--").replace("-", "_"): argument for argument in arguments if argument.names
        }
        path = next((token.value for token in by_name["config"].tokens), None)
        found = self.read(path, ())
        for name in NAMES:
            argument = by_name[name]
            if argument.tokens:
                self._of[name] = "flag"
            elif name in found.settings:
                value, place, self._of[name] = found.settings[name]
                texts = list(as_texts(value))
                if name in LISTS and not isinstance(value, list):
                    texts = [text for text in str(value).split(",") if text]
                for i, text in enumerate(texts):
                    argument.append(Token(keyword=place, value=text, source=self._of[name], index=i))

    def read(self, path: str | None, changes: tuple[str, ...]) -> Config:
        """Read the environment and the file, or exit with an error."""
        try:
            return read(os.environ, Path.cwd(), path, changes)
        except ValueError as error:
            _fail(str(error))

    def of(self, name: str) -> str:
        """Return where the value of a setting is from."""
        return self._of.get(name, "default")


_sources = _Sources()
cli.config = (_sources,)


def main() -> None:
    """Run the command that is named in `sys.argv`."""
    cli()


def _run_until_stopped(server: Server, settings: ServerSettings) -> None:
    """Run a server that listens already. Exits with an error if it cannot start or has failed."""
    from carpool.http.serve import run_until_stopped

    try:
        run_until_stopped(server)
    except StartupError as error:
        if settings.log == "json":
            logger.critical("%s", error, extra={"code": "startup_failed"})
        logging.shutdown()  # log lines that are still on their way come first
        if settings.log != "json":
            print(f"carpool: {error}", file=sys.stderr)
        raise SystemExit(_FAILED) from None
    except Unavailable as error:
        logger.critical("%s; ended", error)
        raise SystemExit(_FAILED) from None


def _cluster(settings: list[str]) -> Any:
    """Return the cluster on which worker processes run.

    Raises:
        ValueError: a setting is none, or is out of range.
        ImportError: Ray is missing.
    """
    stages: dict[str, dict[str, Any]] = {}
    for setting in settings:
        name, equals, value = setting.partition("=")
        stage, dot, key = name.rpartition(".")
        if not (equals and dot and stage and key):
            _fail(f"{setting!r} is not a setting: write STAGE.NAME=VALUE, for example Digits.workers=16")
        try:
            stages.setdefault(stage, {})[key] = json.loads(value)
        except ValueError:
            stages.setdefault(stage, {})[key] = value  # text needs no quotes
    return carpool.ray.Cluster(stages=stages)


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


def _summarize(server: Server, settings: ServerSettings) -> None:
    """Tell a person, or a program, what is about to be served."""
    if settings.log == "text":
        _print_summary(server, settings)
    else:
        _log_summary(server.app, server.address)


def _print_summary(server: Server, settings: ServerSettings) -> None:
    """Print for a person what is about to be served."""
    app = server.app
    console = Console(stderr=True, highlight=False)
    console.print(f"[bold]carpool {carpool.__version__}[/] on [bold]{server.address}[/]")
    for service, path in zip(app.services, _paths(app), strict=True):
        paths = ", ".join([path, *[route.path for route in service.routes]])
        console.print(f"  [bold]{service.name}[/]  POST {paths}")
        for stage in service.stages:
            console.print(f"    stage {stage.name}: {_in_short(stage)}")
    if server.admin_listener is not None:
        console.print(f"  metrics and dashboard on [bold]{server.admin_listener.address}[/]")
    if settings.insecure and not server.listener.is_private and (app.access is None or app.access.keys is None):
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
    cores = ""
    if stage.cpus is not None:
        cores = " on cores " + " | ".join(",".join(map(str, sorted(each))) for each in stage.cpus)
    policy = f", policy {stage.policy_name}" if stage.max_batch_size else ""
    return f"{batches}, {stage.workers_in_short}{cores}{policy}"


def _as_flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _shown(value: Any) -> str:
    """Return a value as TOML has it, or nearly so."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple | list):
        return f"[{', '.join(_shown(each) for each in value)}]"
    return '"none"' if value is None else f'"{value}"' if isinstance(value, str) else str(value)


def _fail(text: str) -> NoReturn:
    """Exit with an error in one line, for a command that cannot be carried out."""
    print(f"carpool: {text}", file=sys.stderr)
    raise SystemExit(_USAGE_ERROR)
