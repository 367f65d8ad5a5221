"""`carpool.serve`: serve from a program of one's own, as `carpool serve` does from a shell."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import importlib.util
import logging
import os
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any, Unpack

from carpool.engine.logger import logger
from carpool.engine.observe import log as log_lines
from carpool.engine.observe.log import fill_standard
from carpool.engine.worker import program
from carpool.engine.worker.own_metrics import FOLDER_VARIABLE
from carpool.http.access import LOCAL_NAMES, Access, new_access
from carpool.http.app import AdminApp, App
from carpool.http.listener import Certificates, InheritedListener, Listener, PortListener, UnixListener, listener_at
from carpool.http.protocols import BUILT_IN
from carpool.http.protocols.base import HttpProtocol
from carpool.http.protocols.instances import Vertex
from carpool.http.server_state import Limits
from carpool.service.checks import at_least, nonnegative_seconds, positive, seconds
from carpool.service.elsewhere import Elsewhere
from carpool.service.join import Join
from carpool.service.service import Service
from carpool.service.settings import AnswerSettings, ServerSettings, UsualNumber, with_defaults

try:
    from carpool.http.server import Server
except ImportError as error:
    raise ImportError(
        f"serving needs a package that is missing ({error.name}): pip install 'carpool[serve]'", name=error.name
    ) from None

_LARGEST_PORT = 65535
_MODE_DIGITS = 3
_LONGEST_S = 30 * 24 * 3600.0  # timers of event loops cannot run for ever
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


def serve(*services: Service, **settings: Unpack[ServerSettings]) -> None:
    """Serve services over HTTP until SIGTERM or Ctrl-C, as the command `carpool serve` does.

    The first signal lets the requests inside finish, and then `serve` returns. A second one ends
    the process at once, with the status 128 + its number. SIGHUP has the models loaded anew, in new
    workers (but if the terminal of the process was closed, it is a signal like the others). Call it
    under `if __name__ == "__main__":`, since worker processes run the main program to find their
    models.

    Args:
        services: Those to serve. The first one answers at /predict, and each at
            /models/NAME/predict.
        settings: Those of `carpool serve`, such as `host="0.0.0.0"`, `port=8000` and
            `api_keys="keys.txt"`; "Settings" in the docs has them all. `log` and `log_level` do
            nothing in a program that has set up logging already. The environment and
            `carpool.toml` are not read, but for keys in CARPOOL_API_KEYS.

    Raises:
        StartupError: A service could not start.
        Unavailable: Every service has failed, so there is nothing left to serve.
        OSError: The address cannot be listened on, or a file cannot be read.
        ValueError: A setting is out of range, two services have the same name, or everybody could
            ask at a public address.
        TypeError: There is no such setting.
        RuntimeError: This is a worker process, a thread other than the main one, or one in which an
            event loop is running.
    """
    if program.in_worker:
        raise RuntimeError(_IN_WORKER)
    if _loop_is_running():
        raise RuntimeError(_LOOP_RUNS)
    if threading.current_thread() is not threading.main_thread():
        raise RuntimeError(_NOT_MAIN)
    chosen = with_defaults(settings)
    check_port(chosen["port"], "port=")
    if chosen["log"] not in ("text", "json"):
        raise ValueError(f"log must be 'text' or 'json', not {chosen['log']!r}")
    if chosen["reload"] not in ("beside", "rolling"):
        raise ValueError(f"reload must be 'beside' or 'rolling', not {chosen['reload']!r}")
    if not logging.getLogger("carpool").hasHandlers():
        log_lines.set_up(chosen["log"], log_lines.level_of(chosen["log_level"]))
    server = new_server(services, chosen)
    try:
        server.bind()
    except OSError as error:
        raise OSError(error.errno, why_not_bound(error, chosen, "{}=".format)) from None
    run_until_stopped(server)


def new_server(services: Sequence[Service], settings: ServerSettings, on: Elsewhere | None = None) -> Server:
    """Make the server that some settings describe. Nothing is bound or started here.

    Raises:
        ValueError: A setting is out of range, or everybody could ask at a public address.
        TypeError: JSON and msgpack cannot express a type hint of a service.
        OSError: A file that a setting names cannot be read.
    """
    settings, protocols = as_vertex_wants(with_defaults(settings))
    listener = _listener(settings)
    admin_listener = None if settings["admin_address"] is None else listener_at(settings["admin_address"])
    tls = _certificates(settings)
    app = _new_app(services, settings, protocols, on, listener)
    admin = None if admin_listener is None else (admin_listener, _new_admin_app(app, settings, admin_listener))
    _check_not_open(listener, app.access, tls is not None and settings["tls_client_ca"] is not None, settings)
    if admin is not None:
        _check_not_open(admin[0], admin[1].access, False, settings)
    app.admin.rolling = settings["reload"] == "rolling"
    server = Server(app, limits=_limits(settings), listener=listener, tls=tls, admin=admin)
    server.watched = Path.cwd() if settings["watch"] else None
    server.drain_delay_s = min(nonnegative_seconds("drain_delay_s", settings["drain_delay_s"]), _LONGEST_S)
    return server


def _new_app(
    services: Sequence[Service],
    settings: ServerSettings,
    protocols: list[str | HttpProtocol] | None,
    on: Elsewhere | None,
    listener: Listener,
) -> App:
    chosen: dict[str, Any] = {**settings}
    of_the_app = {
        **{name: chosen[name] for name in AnswerSettings.__annotations__},
        "max_body_bytes": max(1, int(positive("max_body_mb", chosen["max_body_mb"]) * 2**20)),
        "protocols": protocols,
        "join": _join(settings),
        "on": on or chosen["on"],
        "output": log_lines.worker_line,
        "allow_host": chosen["allow_host"] or _usual_names(listener),
        "has_admin_address": chosen["admin_address"] is not None,
    }
    return App(*services, **of_the_app)


def _new_admin_app(app: App, settings: ServerSettings, listener: Listener) -> AdminApp:
    names = settings["allow_host"] or _usual_names(listener)
    access = new_access(settings["api_keys"], names, settings["cors_origin"], open_readyz=settings["open_readyz"])
    return AdminApp(app, access)


def _listener(settings: ServerSettings) -> Listener:
    if settings["socket"] is not None and settings["fd"] is not None:
        raise ValueError("socket and fd are two places to listen: choose one")
    if settings["socket"] is not None:
        return UnixListener(Path(settings["socket"]), _mode(settings["socket_mode"]))
    if settings["fd"] is not None:
        return InheritedListener(settings["fd"])
    return PortListener(str(settings["host"]), int(settings["port"]))  # getaddrinfo takes no number of another type


def _join(settings: ServerSettings) -> Join | None:
    token, certificate, key, authority = (
        settings["join_token"],
        settings["join_cert"],
        settings["join_key"],
        settings["join_ca"],
    )
    if settings["join"] is None:
        if token or certificate or key or authority:
            raise ValueError("join_token, join_cert, join_key and join_ca go with join: say where workers connect")
        return None
    return Join(settings["join"], token_file=token, certificate=certificate, key=key, authority=authority)


def _mode(text: str) -> int:
    if len(text) != _MODE_DIGITS or any(c not in "01234567" for c in text):
        raise ValueError(f"socket_mode must be permissions such as 600 or 660, not {text!r}")
    return int(text, 8)


def _certificates(settings: ServerSettings) -> Certificates | None:
    if settings["tls_cert"] is None:
        for name in ("tls_key", "tls_client_ca"):
            if settings.get(name) is not None:
                raise ValueError(f"{name} does nothing without tls_cert, the server's certificate: give it, too")
        return None
    key, roots = settings["tls_key"], settings["tls_client_ca"]
    return Certificates(
        Path(settings["tls_cert"]), None if key is None else Path(key), None if roots is None else Path(roots)
    )


def _usual_names(listener: Listener) -> tuple[str, ...]:
    """Return the names by which a server that only this machine reaches is called by browsers.

    Without them a page of any site could have its own name lead here (DNS rebinding).
    """
    if isinstance(listener, UnixListener) or not listener.is_private:
        return ()
    return (*LOCAL_NAMES, *([listener.host] if isinstance(listener, PortListener) else ()))


def _check_not_open(listener: Listener, access: Access | None, has_client_ca: bool, settings: ServerSettings) -> None:
    """Raise ValueError if everybody could ask at a public address, and nobody has said so."""
    if listener.is_private or has_client_ca or settings["insecure"] or (access is not None and access.keys is not None):
        return
    raise ValueError(
        f"everybody who reaches {listener.address} could ask: let clients send a key (carpool key NAME makes one, and"
        " --api-keys FILE or CARPOOL_API_KEYS takes it), or a certificate (--tls-client-ca), or say --insecure"
    )


def _limits(settings: ServerSettings) -> Limits:
    return Limits(
        connections=at_least("max_connections", settings["max_connections"], 1),
        header_bytes=at_least("max_header_bytes", settings["max_header_bytes"], 256),
        header_fields=at_least("max_headers", settings["max_headers"], 1),
        pipelined=at_least("max_pipelined", settings["max_pipelined"], 1),
        header_s=min(seconds("header_timeout_s", settings["header_timeout_s"]), _LONGEST_S),
        body_s=min(seconds("body_timeout_s", settings["body_timeout_s"]), _LONGEST_S),
        idle_s=min(seconds("idle_timeout_s", settings["idle_timeout_s"]), _LONGEST_S),
        write_s=min(seconds("write_timeout_s", settings["write_timeout_s"]), _LONGEST_S),
    )


def as_vertex_wants(settings: ServerSettings) -> tuple[ServerSettings, list[str | HttpProtocol] | None]:
    """Return the settings and the protocols to speak: on Vertex AI, as its variables say.

    Raises:
        ValueError: The variable of the port holds none.
    """
    named: list[str | HttpProtocol] | None = [each for each in settings["protocol"] if each != "none"]
    if not settings["protocol"]:
        named = None
    if settings["vertex"]:
        named = [Vertex(always=True), *[each for each in named or BUILT_IN if each != Vertex.name]]
    if settings["vertex"] or (Vertex().is_wanted and (named is None or Vertex.name in named)):
        host, port = Vertex.address(settings["host"], settings["port"])
        settings = {**settings, "host": host, "port": port}
    return settings, named


def check_port(port: int, setting: str) -> None:
    """Refuse what is no port.

    Args:
        port: The port.
        setting: How the user names it.

    Raises:
        ValueError: There is no such port.
    """
    if type(port) not in (int, UsualNumber) or not 0 <= port <= _LARGEST_PORT:
        raise ValueError(
            f"there is no port {port}: choose one from 1 to {_LARGEST_PORT} with {setting}, or 0 for a free one"
        )


def why_not_bound(error: OSError, settings: ServerSettings, named: Callable[[str], str]) -> str:
    """Return why a server cannot listen, and what to do about it."""
    host, port = settings["host"], settings["port"]
    if settings["socket"] is not None or settings["fd"] is not None:
        return f"cannot listen: {error.strerror or error}"
    if error.errno == errno.EADDRINUSE:
        return f"port {port} is in use on {host}: stop what listens there, or choose another one with {named('port')}"
    if error.errno in (errno.EACCES, errno.EPERM):
        return f"port {port} may not be opened by this user: choose one above 1023 with {named('port')}"
    if error.errno == errno.EADDRNOTAVAIL:
        return f"{host} is not an address of this machine: choose another one with {named('host')}"
    return f"cannot listen on {host}:{port}: {error.strerror or error}"


def run_until_stopped(server: Server) -> None:
    """Run a server that listens already until a signal stops it. Raises as `Server.run` does."""
    address = server.address
    with _own_metrics(server.app):
        _run(server.run(lambda: logger.info("ready on %s", address, extra={"address": address})))
    logger.info("stopped")


@contextlib.contextmanager
def _own_metrics(app: App) -> Iterator[None]:
    """Have workers leave the metrics of their models where the app finds them."""
    if importlib.util.find_spec("prometheus_client") is None:
        yield
        return
    from carpool.engine.observe.own_metrics import OwnMetricsOfWorkers

    try:
        app.own_metrics = OwnMetricsOfWorkers()
    except OSError as error:  # a root file system that is read-only, and nothing at /tmp
        logger.warning("metrics of the models' own are not collected, as there is no folder for them: %s", error)
        yield
        return
    os.environ[FOLDER_VARIABLE] = app.own_metrics.folder
    try:
        yield
    finally:
        del os.environ[FOLDER_VARIABLE]
        app.own_metrics.close()


def _loop_is_running() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _run(main: Coroutine[Any, Any, None]) -> None:
    fill_standard()
    if importlib.util.find_spec("uvloop") is not None:
        import uvloop

        uvloop.run(main)
    else:
        asyncio.run(main)
