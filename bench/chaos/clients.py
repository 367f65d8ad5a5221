"""A process full of clients, which ask, wait, and write down what became of each request.

Closed-loop clients each hold a connection, ask, wait for the answer, think, and ask again. The open
loop asks at random times whatever the server does, on whichever connection is free, and opens more
when none is. Once a second a line of JSON on the output tells how far they are.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import socket
import sys
import time
from functools import partial
from pathlib import Path

from bench.chaos.asks import HOST, Answer, AnswerReader, Ask, Asks
from bench.chaos.journal import RESET, SILENCE, Journal

PATIENCE_S = 5.0  # so long after its deadline a client gives up
MOST_OPEN = 400  # connections of the open loop
RECONNECT_S = 0.1


class Clients:
    """All clients of this process."""

    def __init__(self, given: argparse.Namespace, journal: Journal, asks: Asks) -> None:
        self.port: int = given.port
        self.journal = journal
        self.asks = asks
        self.random = random.Random(f"{given.seed} pauses")
        self.think_s: float = given.think
        self.stopping = False
        self.quiet = asyncio.Event()  # stopping, and nothing is under way
        self.asked = self.good = self.bad = self.unsent = 0
        self.connections: set[Connection] = set()
        self.idle: list[Connection] = []  # of the open loop
        self._connecting: set[asyncio.Task[None]] = set()

    async def run(self, seconds: float, closed: int, rate: float) -> None:
        """Everything, until the last answer has come or has been given up."""
        end = time.monotonic() + seconds
        for _ in range(closed):
            self.connect(closed=True)
        tasks = [asyncio.create_task(self._watch())]
        if rate:
            tasks.append(asyncio.create_task(self._open_loop(rate, end)))
        await asyncio.sleep(seconds)
        self.stopping = True
        if any(connection.ask for connection in self.connections):
            await self.quiet.wait()
        for task in tasks:
            task.cancel()
        for connection in list(self.connections):
            connection.close()
        self._tell()
        await asyncio.sleep(0.2)

    def connect(self, *, closed: bool, first: Ask | None = None) -> None:
        """Another connection; `first` is sent as soon as it is there."""
        task = asyncio.create_task(self._connect(closed, first))
        self._connecting.add(task)
        task.add_done_callback(self._connecting.discard)

    async def _connect(self, closed: bool, first: Ask | None) -> None:
        while not self.stopping or first is not None:
            sock = socket.socket()
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            loop = asyncio.get_running_loop()
            try:
                await loop.sock_connect(sock, (HOST, self.port))
                await loop.create_connection(partial(Connection, self, closed, first), sock=sock)
            except OSError:
                sock.close()
                if first is not None:  # it was never sent
                    self.unsent += 1
                    first = None
                await asyncio.sleep(RECONNECT_S)
                continue
            return

    async def _open_loop(self, rate: float, end: float) -> None:
        """Poisson arrivals; those that are late because this process was busy go at once."""
        next_at = time.monotonic()
        while (now := time.monotonic()) < end:
            while next_at <= now:
                next_at += self.random.expovariate(rate)
                self._send_somewhere()
            await asyncio.sleep(next_at - now)

    def _send_somewhere(self) -> None:
        while self.idle:
            connection = self.idle.pop()
            if connection.is_open:
                connection.send(self.asks.make())
                return
        if len(self.connections) < MOST_OPEN:
            self.connect(closed=False, first=self.asks.make())
        else:
            self.unsent += 1

    async def _watch(self) -> None:
        """Give up on those that nobody answers, and tell how far we are."""
        while True:
            await asyncio.sleep(1)
            now = time.monotonic()
            for connection in list(self.connections):
                if connection.ask and now > connection.give_up_at:
                    connection.end(SILENCE)
                    connection.close()
            self._tell()

    def _tell(self) -> None:
        print(json.dumps([self.asked, self.good, self.bad, self.unsent]), flush=True)


class Connection(asyncio.Protocol):
    """One keep-alive connection with at most one request under way.

    Attributes:
        ask: The request under way.
        give_up_at: Until when it is waited for.
        is_open: Whether another one can be sent.
    """

    def __init__(self, clients: Clients, closed: bool, first: Ask | None) -> None:
        self.ask: Ask | None = None
        self.give_up_at = 0.0
        self.is_open = False
        self._clients = clients
        self._closed = closed
        self._first = first
        self._reader = AnswerReader()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self.is_open = True
        self._clients.connections.add(self)
        if self._closed:
            self._next()
        elif self._first is not None:
            self.send(self._first)

    def send(self, ask: Ask) -> None:
        """Send a request; none may be under way."""
        clients = self._clients
        clients.asked += 1
        self.ask = ask
        self.give_up_at = time.monotonic() + ask.timeout_s + PATIENCE_S
        clients.journal.asked(ask.id, ask.kind, ask.timeout_s, ask.sha)
        self._transport.write(ask.message)

    def data_received(self, data: bytes) -> None:
        try:
            answers = self._reader.received(data)
        except ValueError:
            self._clients.journal.unasked()
            self.close()
            return
        for answer in answers:
            if self.ask is None:
                self._clients.journal.unasked()
            else:
                self.end(answer.status, answer)
                self._after(answer)

    def connection_lost(self, error: Exception | None) -> None:
        self.is_open = False
        self._clients.connections.discard(self)
        self.end(RESET)
        if self._closed and not self._clients.stopping:
            self._clients.connect(closed=True)

    def end(self, status: str, answer: Answer | None = None) -> None:
        """The request under way, if there is one, has ended."""
        if self.ask is None:
            return
        clients = self._clients
        if answer is None:
            clients.journal.ended(self.ask.id, status)
        else:
            clients.journal.ended(self.ask.id, status, answer.id, answer.sha)
        if status == "200":
            clients.good += 1
        else:
            clients.bad += 1
        self.ask = None
        if clients.stopping and not any(connection.ask for connection in clients.connections):
            clients.quiet.set()

    def close(self) -> None:
        """Close it; what is under way has ended already."""
        self.is_open = False
        self._transport.abort()

    def _after(self, answer: Answer) -> None:
        """What a client does once it has its answer."""
        if answer.closes:
            self.close()
        elif not self._closed:
            self._clients.idle.append(self)
        else:
            pause_s = self._clients.random.expovariate(1 / self._clients.think_s)
            asyncio.get_running_loop().call_later(pause_s, self._next)

    def _next(self) -> None:
        if self.is_open and not self._clients.stopping:
            self.send(self._clients.asks.make())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("port", type=int)
    parser.add_argument("--journal", type=Path, required=True)
    parser.add_argument("--seed", required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--closed", type=int, default=64, help="closed-loop clients; default: %(default)s")
    parser.add_argument("--think", type=float, default=0.05, help="seconds they think, on the mean; %(default)s")
    parser.add_argument("--rate", type=float, default=500, help="requests per second of the open loop; %(default)s")
    parser.add_argument("--path", default="/predict")
    parser.add_argument("--timeout", type=float, default=10.0, help="the server's, in seconds; %(default)s")
    parser.add_argument("--deadline-header", default="")
    given = parser.parse_args()
    journal = Journal(given.journal)
    asks = Asks(given.seed, given.path, given.timeout, given.deadline_header)
    asyncio.run(Clients(given, journal, asks).run(given.seconds, given.closed, given.rate))
    journal.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
