"""Our own server around an app: it binds, starts the services, serves, and stops on a signal.

Where systemd asks for it, it sends `sd_notify` messages: up, going down, still alive.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from carpool.engine.logger import logger
from carpool.engine.observe import log
from carpool.errors import CarpoolError, Unavailable
from carpool.http.admin import ReloadOrder, SourceFiles, reload_on_change
from carpool.http.app import AdminApp, App
from carpool.http.connection import Connection
from carpool.http.listener import Acceptor, Certificates, InheritedListener, Listener, PortListener
from carpool.http.server_state import Limits, ServerState

_LAST_ANSWERS_S = 5.0
_LAST_HEADS_S = 1.0  # who has connected at last, and has asked for nothing by then, is not waited for
_LOOK_EVERY_S = 1.0


@dataclass(slots=True)
class _ServedAddress:
    """Where a server listens, and the app that it serves there.

    Attributes:
        tls: The server's certificate; None where TLS is not spoken.
        state: The state that its connections share, once it accepts any.
        acceptor: Accepts connections.
    """

    listener: Listener
    app: App | AdminApp
    tls: Certificates | None
    sock: socket.socket | None = None
    state: ServerState | None = None
    acceptor: Acceptor | None = None

    def bind(self) -> None:
        self.sock = self.listener.bind()
        self.sock.setblocking(False)

    async def listen(self, limits: Limits) -> None:
        assert self.sock is not None
        state = self.state = ServerState(self.app, limits)
        if self.app.access is not None:
            self.app.access.on_change.append(state.forget_heads)
        if isinstance(self.app, App):
            self.app.on_new_routes.append(state.routes_changed)
            self.app.connection_shares = state.shares
        self.acceptor = Acceptor(self.sock, self._connect, self.tls, limits.connections)

    def _connect(self) -> Connection:
        assert self.state is not None
        return Connection(self.state)

    async def _accept_the_last(self, acceptor: Acceptor) -> None:
        """Stop listening, and serve those who have connected and were not accepted yet.

        The kernel resets them where the last descriptor of the socket is closed. If the parent has
        one, they wait for the next server.
        """
        assert self.sock is not None
        waiting: list[socket.socket] = []
        with self.sock.dup() as listening:
            acceptor.close()
            if not isinstance(self.listener, InheritedListener):
                with contextlib.suppress(OSError):  # there are no more
                    while True:
                        waiting.append(listening.accept()[0])
        await asyncio.gather(
            acceptor.connected(), *[acceptor.connect(sock, _LAST_HEADS_S) for sock in waiting], return_exceptions=True
        )

    async def end(self, patience_s: float) -> None:
        """Close every connection: idle ones now, the others after their answers."""
        if self.acceptor is not None:
            await self._accept_the_last(self.acceptor)
        elif self.sock is not None:  # it was bound, and nothing was accepted
            self.sock.close()
        if self.state is not None:
            self.state.drain()
            asyncio.get_running_loop().call_later(_LAST_HEADS_S, self.state.drain)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(patience_s):
                    await self.state.empty()
            self.state.abort()
        self.acceptor = None
        self.listener.release()


class Server:
    """Serves one app, at one address or with another one for those who run it.

    Args:
        listener: Where to listen, in the place of host and port.
        admin: Where those who run the server ask, and what is served there.

    Attributes:
        listener: Where the server listens.
        admin_listener: Where those who run it ask; None if that is no address of its own.
        watched: The folder whose source files have the services reloaded when they change; None for
            none.
        drain_delay_s: For how long requests are still served after SIGTERM, while `/readyz` says
            already that the server drains.
    """

    def __init__(
        self,
        app: App,
        host: str = "127.0.0.1",
        port: int = 8000,
        limits: Limits | None = None,
        *,
        listener: Listener | None = None,
        tls: Certificates | None = None,
        admin: tuple[Listener, AdminApp] | None = None,
    ) -> None:
        self.app = app
        self.listener = listener or PortListener(host, port)
        self.admin_listener = None if admin is None else admin[0]
        self._limits = limits or Limits()
        self._tls = tls
        app.is_tls = tls is not None
        self._addresses = [_ServedAddress(self.listener, app, tls)]
        if admin is not None:
            self._addresses.append(_ServedAddress(admin[0], admin[1], None))
        self._looking: asyncio.TimerHandle | None = None
        self.watched: Path | None = None
        self.drain_delay_s = 0.0
        self._serves_until: float | None = None  # the end of that delay, by the loop's clock
        self._had_terminal = False
        self._outlives_terminal = False
        self._beside: list[asyncio.Task[None]] = []  # reloads, and what watches for changes

    @property
    def sockets(self) -> list[socket.socket]:
        """The listening sockets; empty until `bind`."""
        return [served.sock for served in self._addresses if served.sock is not None]

    @property
    def state(self) -> ServerState | None:
        """The state that the connections at its address share; None until it listens."""
        return self._addresses[0].state

    @property
    def host(self) -> str:
        """The address that is bound, if it is one of TCP."""
        return self.listener.host if isinstance(self.listener, PortListener) else ""

    @property
    def port(self) -> int:
        """The port; the one that was taken, once it is bound."""
        return self.listener.port if isinstance(self.listener, PortListener) else 0

    @property
    def address(self) -> str:
        """The address of the server, for people."""
        address = self.listener.address
        return address if ":/" in address else f"http{'s' if self._tls is not None else ''}://{address}"

    def bind(self) -> None:
        """Take the addresses before anything costly is started. Raises OSError."""
        for served in self._addresses:
            served.bind()

    async def listen(self) -> None:
        """Accept connections; the app answers 503 until it has started."""
        if not self.sockets:
            self.bind()
        for served in self._addresses:
            await served.listen(self._limits)
        if self._tls is not None or any(served.app.access is not None for served in self._addresses):
            self._look_at_files()

    def _look_at_files(self) -> None:
        if self._tls is not None:
            self._tls.refresh()
        for served in self._addresses:
            if served.app.access is not None:
                served.app.access.refresh()
        self._looking = asyncio.get_running_loop().call_later(_LOOK_EVERY_S, self._look_at_files)

    async def stop(self, drain: bool = True) -> None:
        """Refuse new requests, finish those inside, stop the services, close every connection.

        Args:
            drain: Whether to finish the requests inside; else they fail.
        """
        self.app.drain()
        await self.app.stop(drain)
        if self._looking is not None:
            self._looking.cancel()
        await asyncio.gather(*[served.end(_LAST_ANSWERS_S if drain else 0) for served in self._addresses])

    async def run(self, ready: Callable[[], None] = lambda: None) -> None:
        """Serve until SIGTERM or SIGINT, then drain. A second signal ends the process at once.

        After SIGTERM requests are served for `drain_delay_s` more.

        SIGHUP has the services load their models anew; see `AsyncHandle.reload`.

        Raises:
            OSError: The address is not free.
            StartupError: A service could not start.
            Unavailable: Every service has failed, so there is nothing left to serve.
        """
        if not self.sockets:
            self.bind()
        stopping = asyncio.Event()
        beating: asyncio.Future[None] | None = None
        loop = asyncio.get_running_loop()
        self._had_terminal = _has_terminal()
        self._outlives_terminal = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN  # as nohup has it
        self._take_signals(stopping)
        files = None if self.watched is None else SourceFiles(self.watched)
        try:
            await self.listen()
            stopped = asyncio.ensure_future(stopping.wait())
            starting = asyncio.ensure_future(self.app.start())
            if await _done_first(starting, stopped):
                starting.result()
                self._take_signals(stopping)  # again: Ray's own handler would log a stop as a crash
                ready()
                notify_systemd("READY=1")
                beating = asyncio.ensure_future(keep_systemd_awake())
                if files is not None:
                    self._beside.append(loop.create_task(reload_on_change(self.app.admin, files)))
                if await _done_first(asyncio.ensure_future(self.app.failed()), stopped):
                    raise Unavailable("no service can answer any more", code="stage_failed")
                await self._serve_on()
        finally:
            notify_systemd("STOPPING=1")
            for task in self._beside:
                task.cancel()
            await self.stop()
            if beating is not None:
                beating.cancel()
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                loop.remove_signal_handler(number)

    def _take_signals(self, stopping: asyncio.Event) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._received_signal, number, stopping)
        loop.add_signal_handler(signal.SIGHUP, self._hung_up, stopping)

    def _hung_up(self, stopping: asyncio.Event) -> None:
        """Reload on SIGHUP; but if it says that the terminal was closed, stop, or serve on."""
        if not self._had_terminal or _has_terminal():
            self._reload_soon()
        elif self._outlives_terminal:
            self._had_terminal = False
            logger.info("SIGHUP: the terminal has gone; serving on, as SIGHUP was ignored at the start")
        else:
            self._received_signal(signal.SIGHUP, stopping)

    def _reload_soon(self) -> None:
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
            log.flush()
            os._exit(128 + number)
        if number == signal.SIGTERM and self.drain_delay_s > 0 and self.app.refusing is None:
            self._announce_end()
        else:
            logger.info("%s: no new requests; finishing those inside", number.name)
            self.app.drain()
        stopping.set()

    def _announce_end(self) -> None:
        """Announce to probers and clients that the server will drain, and begin the delay."""
        logger.info("SIGTERM: not ready any more; serving for %g s until requests are refused", self.drain_delay_s)
        self._serves_until = asyncio.get_running_loop().time() + self.drain_delay_s
        self.app.announce_end()
        for served in self._addresses:
            if served.state is not None:
                served.state.announce_end()
        notify_systemd("STOPPING=1")

    async def _serve_on(self) -> None:
        if self._serves_until is not None:
            await asyncio.sleep(self._serves_until - asyncio.get_running_loop().time())
            logger.info("no new requests; finishing those inside")


def _has_terminal() -> bool:
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


_MICROSECONDS = 1e6


def notify_systemd(state: str) -> None:
    """Send systemd a state, such as `READY=1`; do nothing without it, or if it has gone."""
    address = os.environ.get("NOTIFY_SOCKET")
    if not address:
        return
    if address.startswith("@"):  # a name in the abstract name space
        address = "\0" + address[1:]
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock:
        sock.sendto(state.encode(), address)


def watchdog_s() -> float | None:
    """Return the seconds between two signs of life for systemd; None for none."""
    if os.environ.get("WATCHDOG_PID", str(os.getpid())) != str(os.getpid()):
        return None
    text = os.environ.get("WATCHDOG_USEC", "")
    return int(text) / _MICROSECONDS / 2 if text.isdigit() and int(text) else None


async def keep_systemd_awake() -> None:
    """Send systemd signs of life as long as this loop turns, until cancelled."""
    every_s = watchdog_s()
    while every_s is not None:
        notify_systemd("WATCHDOG=1")
        await asyncio.sleep(every_s)
