"""Our own server around an app: it binds, starts the services, serves, and stops on a signal."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

from carpool.errors import CarpoolError, Unavailable
from carpool.http.admin import ReloadOrder
from carpool.http.app import App
from carpool.http.connection import Connection
from carpool.http.server_state import Limits, ServerState
from carpool.http.watch import SourceFiles, reload_on_change
from carpool.logger import logger

_BACKLOG = 2048
_LAST_ANSWERS_S = 5.0


class Server:
    """Serves one app on one address.

    Args:
        app: what to serve.
        host: the address to bind.
        port: the port to bind; 0 takes a free one.
        limits: how much one client may take up.

    Attributes:
        app: what is served.
        host: the address.
        port: the port; the one that was taken, once it is bound.
        sockets: what the server listens on; empty until `bind`.
        watched: the folder whose source files have the services reloaded when they change; None
            for none.
    """

    def __init__(self, app: App, host: str = "127.0.0.1", port: int = 8000, limits: Limits | None = None) -> None:
        self.app = app
        self.host = host
        self.port = port
        self.sockets: list[socket.socket] = []
        self._limits = limits or Limits()
        self._state: ServerState | None = None
        self._servers: list[asyncio.Server] = []
        self.watched: Path | None = None
        self._had_terminal = False
        self._beside: list[asyncio.Task[None]] = []  # reloads, and what watches for changes

    def bind(self) -> None:
        """Take the address, before anything costly is started. Raises OSError if it is not free."""
        family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
        sock = socket.create_server((self.host, self.port), family=family, backlog=_BACKLOG)
        sock.setblocking(False)
        self.sockets = [sock]
        self.port = sock.getsockname()[1]

    async def listen(self) -> None:
        """Accept connections; the app answers 503 until it has started."""
        if not self.sockets:
            self.bind()
        state = self._state = ServerState(self.app, self._limits)
        loop = asyncio.get_running_loop()
        self._servers = [
            await loop.create_server(lambda: Connection(state), sock=sock, backlog=_BACKLOG) for sock in self.sockets
        ]

    async def stop(self, drain: bool = True) -> None:
        """Refuse new requests, finish those inside, stop the services, close every connection.

        Args:
            drain: whether to finish the requests inside; else they fail.
        """
        self.app.drain()
        await self.app.stop(drain)
        for server in self._servers:
            server.close()
        if self._state is not None:
            self._state.drain()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LAST_ANSWERS_S if drain else 0):
                    await self._state.empty()
            self._state.abort()
        self._servers = []

    async def run(self, ready: Callable[[], None] = lambda: None) -> None:
        """Serve until SIGTERM or SIGINT, then drain. A second signal ends the process at once.

        SIGHUP has the services load their models anew; see `AsyncHandle.reload`.

        Args:
            ready: called when the services have started.

        Raises:
            OSError: the address is not free.
            StartupError: a service could not start.
            Unavailable: every service has failed, so there is nothing left to serve.
        """
        if not self.sockets:
            self.bind()
        stopping = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._received_signal, number, stopping)
        files = None if self.watched is None else SourceFiles(self.watched)
        self._had_terminal = _has_terminal()
        loop.add_signal_handler(signal.SIGHUP, self._hung_up, stopping)
        try:
            await self.listen()
            stopped = asyncio.ensure_future(stopping.wait())
            starting = asyncio.ensure_future(self.app.start())
            if await _done_first(starting, stopped):
                starting.result()
                ready()
                if files is not None:
                    self._beside.append(loop.create_task(reload_on_change(self.app.admin, files)))
                if await _done_first(asyncio.ensure_future(self.app.failed()), stopped):
                    raise Unavailable("no service can answer any more", code="stage_failed")
        finally:
            for task in self._beside:
                task.cancel()
            await self.stop()
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                loop.remove_signal_handler(number)

    def _hung_up(self, stopping: asyncio.Event) -> None:
        """Reload on SIGHUP; but stop if it says that the terminal was closed."""
        if self._had_terminal and not _has_terminal():
            self._received_signal(signal.SIGHUP, stopping)
        else:
            self._reload_soon()

    def _reload_soon(self) -> None:
        """Have all services load their models anew, if they have started."""
        if self.app.refusing is not None:
            logger.warning("SIGHUP: nothing is reloaded: %s", self.app.refusing)
            return
        logger.info("SIGHUP: the services are reloaded")
        self._beside = [task for task in self._beside if not task.done()]
        self._beside.append(asyncio.get_running_loop().create_task(self._reload()))

    async def _reload(self) -> None:
        with contextlib.suppress(CarpoolError):  # it has been logged
            await self.app.admin.reload(ReloadOrder())

    def _received_signal(self, number: signal.Signals, stopping: asyncio.Event) -> None:
        if stopping.is_set():
            logger.warning("second signal: ending at once")
            for endpoint in self.app.endpoints:
                if endpoint.handle is not None:
                    endpoint.handle.kill()
            logging.shutdown()  # write the lines that are still on their way
            os._exit(128 + number)
        logger.info("%s: no new requests; finishing those inside", number.name)
        self.app.drain()
        stopping.set()


def _has_terminal() -> bool:
    """Report whether this process has a terminal that controls it."""
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY))
    except OSError:
        return False
    return True


async def _done_first(work: asyncio.Future[None], stopped: asyncio.Future[Any]) -> bool:
    """Report whether `work` was done before we were stopped; if not, cancel it."""
    await asyncio.wait([work, stopped], return_when=asyncio.FIRST_COMPLETED)
    if work.done():
        return True
    work.cancel()
    await asyncio.wait([work])
    return False
