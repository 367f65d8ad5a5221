"""Tells what is about to be served: a person in the terminal, or a program in the log."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console

from carpool.engine.logger import logger
from carpool.service.settings import ServerSettings
from carpool.service.stage import Stage
from carpool.version import __version__

if TYPE_CHECKING:
    from carpool.http.app import App
    from carpool.http.server import Server


def summarize(server: Server, settings: ServerSettings) -> None:
    """Tell a person, or a program, what is about to be served."""
    if settings.log == "text":
        print_summary(server, settings)
    else:
        _log_summary(server.app, server.address)


def print_summary(server: Server, settings: ServerSettings) -> None:
    """Print for a person what is about to be served."""
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
    if settings.insecure and not server.listener.is_private and (app.access is None or app.access.keys is None):
        console.print("  [yellow]reachable from other machines; there is no authentication[/]")


def _log_summary(app: App, address: str) -> None:
    """Log for a program what is about to be served, since loading the models may take minutes."""
    serves = [
        {"model": service.name, "path": path, "stages": {stage.name: in_short(stage) for stage in service.stages}}
        for service, path in zip(app.services, _paths(app), strict=True)
    ]
    names = ", ".join(service.name for service in app.services)
    about = {"address": address, "serves": serves}
    logger.info("carpool %s starts %s on %s", __version__, names, address, extra=about)


def _paths(app: App) -> list[str]:
    """Return the first address of each service."""
    from carpool.http.addresses import predict_path

    return ["/predict", *[predict_path(service.name) for service in app.services[1:]]]


def in_short(stage: Stage) -> str:
    """Describe a stage's batches, workers, cores and policy in one line."""
    batches = "single items"
    if stage.max_batch_size:
        batches = f"batches of up to {stage.max_batch_size}{' in size' if stage.size is not None else ''}"
    cores = ""
    if stage.cpus is not None:
        cores = " on cores " + " | ".join(",".join(map(str, sorted(each))) for each in stage.cpus)
    policy = f", policy {stage.policy_name}" if stage.max_batch_size else ""
    return f"{batches}, {stage.workers_in_short}{cores}{policy}"
