"""`carpool serve` serves services over HTTP until a signal ends it.

It begins with a summary, for a person in the terminal or for a program in the log. `carpool config`
shows the settings that a server would have, and where each is from.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter
from rich.console import Console

import carpool
from carpool.cli.sources import FAILED, Config, chosen_by, fail, find_service, sources, values
from carpool.engine.logger import logger
from carpool.engine.observe import log
from carpool.engine.policy.base import name_of
from carpool.errors import StartupError, Unavailable
from carpool.service.overrides import OF_A_SERVICE, OF_A_STAGE, as_written, changed
from carpool.service.service import Service
from carpool.service.settings import NAMES, ServerOptions, ServerSettings
from carpool.service.stage import Stage
from carpool.version import __version__

if TYPE_CHECKING:
    from carpool.http.app import App
    from carpool.http.server import Server


def serve(
    target: str,
    /,
    *more: str,
    settings: Annotated[ServerOptions | None, Parameter(name="*")] = None,
    config: str | None = None,
    changes: Annotated[tuple[str, ...], Parameter(name="--set")] = (),
) -> None:
    """Serve one or several services over HTTP.

    Example: carpool serve program:service --port 8000

    Here program.py is a file in the current folder, with service = carpool.Service(...) in it.

    Then: curl --json '21.0' localhost:8000/predict

    Each option may also stand in the environment, as CARPOOL_PORT, and in carpool.toml or
    [tool.carpool] of pyproject.toml, as port; see "Settings" in the docs.

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
    chosen = chosen_by(settings)
    log.set_up(chosen["log"], log.level_of(chosen["log_level"]))
    services = [find_service(name) for name in (target, *more)]
    of_cluster = [change for change in changes if chosen["on"] and not change.startswith(("stages.", "services."))]
    found = sources.read(config, tuple(change for change in changes if change not in of_cluster))
    for doubt in found.doubts:
        logger.warning("%s", doubt)
    server = _new_server(services, chosen, found, of_cluster)
    try:
        server.bind()
    except OSError as error:
        from carpool.http.serve import why_not_bound

        fail(why_not_bound(error, chosen, sources.place))
    summarize(server, chosen)
    _run_until_stopped(server)


def _new_server(services: Sequence[Service], chosen: ServerSettings, found: Config, of_cluster: list[str]) -> Server:
    try:
        from carpool.http.serve import check_port, new_server

        services = changed(services, values(found.services), values(found.stages))
        check_port(chosen["port"], sources.place("port"))
        return new_server(services, chosen, _cluster(of_cluster) if chosen["on"] else None)
    except ImportError as error:
        if error.name == "ray":
            fail("--on ray needs Ray: pip install 'carpool[ray]'")
        fail(f"serving needs a package that is missing ({error.name}): pip install 'carpool[serve]'")
    except (ValueError, TypeError) as error:
        fail(sources.placed(found, error))
    except OSError as error:
        fail(f"{error.filename}: {error.strerror}" if error.filename else str(error))


def _run_until_stopped(server: Server) -> None:
    """Run a server that listens already; exit if it cannot start or has failed."""
    from carpool.http.serve import run_until_stopped

    try:
        run_until_stopped(server)
    except StartupError as error:
        fail(str(error), FAILED)
    except Unavailable as error:
        logger.critical("%s; ended", error)
        raise SystemExit(FAILED) from None


def _cluster(settings: list[str]) -> Any:
    """Return the cluster on which worker processes run. Raises ValueError for a bad setting,
    ImportError without Ray.
    """
    stages: dict[str, dict[str, Any]] = {}
    for setting in settings:
        name, equals, value = setting.partition("=")
        stage, dot, key = name.rpartition(".")
        if not (equals and dot and stage and key):
            fail(f"{setting!r} is not a setting: write STAGE.NAME=VALUE, for example Digits.workers=16")
        try:
            stages.setdefault(stage, {})[key] = json.loads(value)
        except ValueError:
            stages.setdefault(stage, {})[key] = value  # text needs no quotes
    return carpool.ray.Cluster(stages=stages)


def summarize(server: Server, settings: ServerSettings) -> None:
    if settings["log"] == "text":
        print_summary(server, settings)
    else:
        _log_summary(server.app, server.address)


def print_summary(server: Server, settings: ServerSettings) -> None:
    app = server.app
    console = Console(stderr=True, highlight=False)
    console.print(f"[bold]carpool {__version__}[/] on [bold]{server.address}[/]")
    for service, path in zip(app.services, _paths(app), strict=True):
        paths = ", ".join([path, *[route.path for route in service.routes]])
        console.print(f"  [bold]{service.name}[/]  POST {paths}")
        for stage in service.stages:
            console.print(f"    stage {stage.name}: {in_short(stage)}")
    if server.admin_listener is not None:
        console.print(f"  metrics and dashboard on [bold]{server.admin_listener.address}[/]")
    if settings["insecure"] and not server.listener.is_private and (app.access is None or app.access.keys is None):
        console.print("  [yellow]reachable from other machines; there is no authentication[/]")


def _log_summary(app: App, address: str) -> None:
    """Log the services that are about to be served, since their models may load for minutes."""
    serves = [
        {"model": service.name, "path": path, "stages": {stage.name: in_short(stage) for stage in service.stages}}
        for service, path in zip(app.services, _paths(app), strict=True)
    ]
    names = ", ".join(service.name for service in app.services)
    about = {"address": address, "serves": serves}
    logger.info("carpool %s starts %s on %s", __version__, names, address, extra=about)


def _paths(app: App) -> list[str]:
    from carpool.http.endpoint import predict_path

    return ["/predict", *[predict_path(service.name) for service in app.services[1:]]]


def in_short(stage: Stage) -> str:
    batches = "single items"
    if stage.max_batch_size:
        batches = f"batches of up to {stage.max_batch_size}{' in size' if stage.size is not None else ''}"
    cores = ""
    if stage.cpus is not None:
        cores = " on cores " + " | ".join(",".join(map(str, sorted(each))) for each in stage.cpus)
    policy = f", policy {stage.policy_name}" if stage.max_batch_size else ""
    return f"{batches}, {stage.workers_in_short}{cores}{policy}"


def show_config(
    *targets: str,
    settings: Annotated[ServerOptions | None, Parameter(name="*")] = None,
    config: str | None = None,
    changes: Annotated[tuple[str, ...], Parameter(name="--set")] = (),
) -> None:
    """Show the settings that carpool serve would have here, and where each is from.

    The lines can stand in carpool.toml.

    Parameters
    ----------
    targets:
        Services, as module:attribute, whose own settings are shown, too.
    config:
        The file with settings, in the place of carpool.toml.
    changes:
        See carpool serve.
    """
    values_of: dict[str, Any] = {**chosen_by(settings)}
    found = sources.read(config, changes)
    try:
        services = changed([find_service(name) for name in targets], values(found.services), values(found.stages))
    except (ValueError, TypeError) as error:
        if targets:
            fail(sources.placed(found, error))
        services = []
    rows = [(name, values_of[name], sources.of(name)) for name in NAMES]
    for kind, changes_of, names in (
        ("services", found.services, {service.name: service for service in services}),
        ("stages", found.stages, {stage.name: stage for service in services for stage in service.stages}),
    ):
        for name in {**names, **changes_of}:
            of_one = changes_of.get(name, {})
            for setting in OF_A_SERVICE if kind == "services" else OF_A_STAGE:
                key = f"{kind}.{_key(name)}.{setting}"
                if setting in of_one:
                    rows.append((key, of_one[setting].value, of_one[setting].source))
                elif name in names:
                    rows.append((key, as_written(names[name], setting), "code"))
    width = max(len(name) for name, _, _ in rows)
    for name, value, source in rows:
        try:
            print(f"{name:<{width}} = {_in_toml(value)}  # {source}")
        except TypeError:
            print(f"# {name} is {name_of(value)}, which only code can say")
    for doubt in found.doubts:
        print(f"# {doubt}")


def _in_toml(value: Any) -> str:
    """Return a value as TOML has it. Raises TypeError if it cannot be written."""
    if value is None:
        return '"none"'
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return str(value)
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, tuple | list):
        return f"[{', '.join(map(_in_toml, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{_key(key)} = {_in_toml(each)}' for key, each in value.items())}}}"
    raise TypeError(f"a {type(value).__name__} cannot be written in TOML")


def _key(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else _in_toml(name)
