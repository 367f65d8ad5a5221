"""`carpool.serve`: serve from a program of one's own, as `carpool serve` does from a shell."""

from __future__ import annotations

import asyncio
import errno
import importlib.util
import logging
import threading
from collections.abc import Coroutine, Sequence
from typing import Any, Literal

from carpool.drive.descriptors import fill_standard
from carpool.http.app import App
from carpool.http.protocols import BUILT_IN
from carpool.http.protocols.base import HttpProtocol
from carpool.http.protocols.vertex import Vertex
from carpool.logger import logger
from carpool.observe import log as log_lines
from carpool.service.service import Service
from carpool.worker import program

try:
    from carpool.http.server import Server
except ImportError as error:
    raise ImportError(
        f"serving needs a package that is missing ({error.name}): pip install 'carpool[serve]'", name=error.name
    ) from None

_LARGEST_PORT = 65535
_IN_WORKER = (
    "serve was called inside a worker process, which runs the main program once more to find its models: put the call"
    ' under `if __name__ == "__main__":`'
)
_LOOP_RUNS = (
    "serve blocks, but an event loop is running in this thread: call it where no loop runs, or use"
    " `async with service.run_async() as s:` here"
)
_NOT_MAIN = (
    "serve must be called in the main thread, since it acts on SIGTERM and Ctrl-C: call it there, or use"
    " `with service.run() as s:` in this thread"
)


def serve(
    *services: Service,
    host: str = "127.0.0.1",
    port: int = 8000,
    when_full: Literal["refuse", "wait"] = "refuse",
    timeout_status: Literal[504, 408] = 504,
    max_body_mb: float = 16.0,
    debug: bool = False,
    log: Literal["text", "json"] = "text",
    log_level: Literal["debug", "info", "warning", "error"] = "info",
    protocols: Sequence[str | HttpProtocol] | None = None,
    accept_compressed: bool = False,
    vertex: bool = False,
) -> None:
    """Serve services over HTTP until SIGTERM or Ctrl-C, as the command `carpool serve` does.

    The first signal lets the requests inside finish, and then `serve` returns. A second one ends
    the process at once, with the status 128 + its number. Call it under
    `if __name__ == "__main__":`, since worker processes run the main program to find their models.

    Args:
        services: What to serve. The first one answers at /predict, and each at
            /models/NAME/predict.
        host: The address to listen on. 0.0.0.0 makes the services reachable from other machines.
        port: The port to listen on; 0 takes a free one, which the log tells.
        when_full: What to do with a request while the queue is full: "refuse" it with 429, or let
            it "wait" until its deadline.
        timeout_status: The HTTP status of a request whose deadline has passed.
        max_body_mb: The size of the largest request body, in MiB.
        debug: Whether error responses show the texts of exceptions. Not for production.
        log: "text" for log lines that people read, or "json" for one object per line. A program
            that has set up logging already keeps what it has.
        log_level: The least level of log lines that are written. What models print is always shown.
        protocols: Which protocols of other servers are spoken besides carpool's own addresses, by
            their names or as objects; None for all.
        accept_compressed: Whether compressed request bodies are read.
        vertex: Whether to listen and answer as Vertex AI wants it; where the variables that it sets
            are there, this is done in any case.

    Raises:
        StartupError: A service could not start.
        Unavailable: Every service has failed, so there is nothing left to serve.
        OSError: The address cannot be listened on.
        ValueError: A setting is out of range, or two services have the same name.
        RuntimeError: This is a worker process, a thread other than the main one, or one in which an
            event loop is running.
    """
    if program.in_worker:
        raise RuntimeError(_IN_WORKER)
    if _loop_is_running():
        raise RuntimeError(_LOOP_RUNS)
    if threading.current_thread() is not threading.main_thread():
        raise RuntimeError(_NOT_MAIN)
    host, port, spoken = as_vertex_wants(host, port, protocols, vertex)
    check_port(port, "port=")
    if log not in ("text", "json"):
        raise ValueError(f"log must be 'text' or 'json', not {log!r}")
    if not logging.getLogger("carpool").hasHandlers():
        log_lines.set_up(log, log_lines.level_of(log_level))
    app = new_app(services, when_full, timeout_status, max_body_mb, debug, spoken, accept_compressed)
    server = Server(app, host, port)
    try:
        server.bind()
    except OSError as error:
        raise OSError(error.errno, why_not_bound(error, host, port, "port=", "host=")) from None
    run_until_stopped(server)


def new_app(
    services: Sequence[Service],
    when_full: Literal["refuse", "wait"],
    timeout_status: Literal[504, 408],
    max_body_mb: float,
    debug: bool,
    protocols: Sequence[str | HttpProtocol] | None = None,
    accept_compressed: bool = False,
) -> App:
    """Make the app of a server that logs what models print. Raises what `App` raises."""
    return App(
        *services,
        when_full=when_full,
        timeout_status=timeout_status,
        max_body_bytes=int(max_body_mb * 2**20),
        debug=debug,
        output=log_lines.worker_line,
        protocols=protocols,
        accept_compressed=accept_compressed,
    )


def as_vertex_wants(
    host: str, port: int, protocols: Sequence[str | HttpProtocol] | None, vertex: bool
) -> tuple[str, int, list[str | HttpProtocol] | None]:
    """Return where to listen and which protocols to speak: on Vertex AI, as its variables say.

    Args:
        host: As the user gives it, or the default.
        port: As the user gives it, or the default.
        protocols: As the user names them, where "none" stands for none; None for all.
        vertex: Whether it is to be done without the variables, too.

    Raises:
        ValueError: The variable of the port holds none.
    """
    chosen = None if protocols is None else [each for each in protocols if each != "none"]
    if vertex:
        chosen = [Vertex(always=True), *[each for each in chosen or BUILT_IN if each != Vertex.name]]
    if vertex or (Vertex().is_wanted and (protocols is None or Vertex.name in protocols)):
        host, port = Vertex.address(host, port)
    return host, port, chosen


def check_port(port: int, setting: str) -> None:
    """Refuse what is no port.

    Args:
        port: The port.
        setting: How the user names it.

    Raises:
        ValueError: There is no such port.
    """
    if type(port) is not int or not 0 <= port <= _LARGEST_PORT:
        raise ValueError(
            f"there is no port {port}: choose one from 1 to {_LARGEST_PORT} with {setting}, or 0 for a free one"
        )


def why_not_bound(error: OSError, host: str, port: int, port_setting: str, host_setting: str) -> str:
    """Return why a server cannot listen, and what to do about it.

    Args:
        error: What binding raised.
        host: The address.
        port: The port.
        port_setting: How the user sets the port.
        host_setting: How the user sets the address.
    """
    if error.errno == errno.EADDRINUSE:
        return f"port {port} is in use on {host}: stop what listens there, or choose another one with {port_setting}"
    if error.errno in (errno.EACCES, errno.EPERM):
        return f"port {port} may not be opened by this user: choose one above 1023 with {port_setting}"
    if error.errno == errno.EADDRNOTAVAIL:
        return f"{host} is not an address of this machine: choose another one with {host_setting}"
    return f"cannot listen on {host}:{port}: {error.strerror or error}"


def run_until_stopped(server: Server) -> None:
    """Run a server that listens already until a signal stops it. Raises as `Server.run` does."""
    address = f"http://{server.host}:{server.port}"
    _run(server.run(lambda: logger.info("ready on %s", address, extra={"address": address})))
    logger.info("stopped")


def _loop_is_running() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _run(main: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine on uvloop if it is installed, otherwise on asyncio's own loop."""
    fill_standard()
    if importlib.util.find_spec("uvloop") is not None:
        import uvloop

        uvloop.run(main)
    else:
        asyncio.run(main)
