"""The soak of streams: is every token right while workers are killed and clients leave or sleep?

A real server with two services, one whose model can resume and one whose cannot, clients that read
to the end, leave early, sleep in mid-stream or take whole answers, and a nemesis that kills and
stops workers. Each client computes its tokens by itself. Clients come in rounds: now and then none
asks until the last answer has ended, as newcomers move on what else might stand still for ever. The
exit code is 1 if a token is wrong, missing or double, an answer ends in a way that it must not, or
something is left in the end.

    python -m bench.chaos.streams --minutes 20
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench import PYTHONPATH, ROOT
from bench.chaos.stream_services import WORKERS, following, padded
from bench.tools import options
from bench.tools.process_tree import adopt_orphans, end_on_sigterm
from bench.tools.server import HOST, NotServing, Started, started, tail

CLIENTS = 40
PATIENCE_S = 60.0  # a client that hears nothing for so long has found a hang
START_S, SETTLE_S = 60.0, 20.0
ROUND_S = 10.0  # for which clients ask, before all of them wait for the last answer
SLEEP_S = 2.0  # of a client in mid-stream
STOPPED_S = 3.0  # of a worker, which is longer than it may be silent
RSS_GROWTH = 64 * 2**20
MOST_COLLECTED = 100  # tokens of a whole answer: it begins anew with each worker lost, and a long one may never end
KINDS = {"reads": 50, "leaves": 20, "sleeps": 8, "collects": 22}
"""How often each kind of client comes, in parts of a hundred."""

_BLAMED = "two workers of stage "
"""How an error begins that tells that a stream was found guilty. Its code depends on how the second
worker was lost: one that was stopped is given up like one that hangs, which exceeds a deadline."""

_ENDS = {
    "resuming": {"whole", "left", "request_crashed_worker"},
    "plain": {"whole", "left", "request_crashed_worker", "worker_lost"},
}
"""How an answer may end; a stream on probation is blamed for a worker that is killed just then."""


class Wrong(Exception):
    """An answer that is not its client's own."""


@dataclass
class Tally:
    """What was seen.

    Attributes:
        ends: How answers have ended, by service and end.
        wrongs: What must not be.
        tokens: How many were checked.
        faults: By kind.
        longest_s: The longest silence that a reading client of a whole answer has heard.
        began: When the first of it may have been seen.
    """

    ends: Counter[tuple[str, str]] = field(default_factory=Counter)
    wrongs: list[str] = field(default_factory=list)
    tokens: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    longest_s: float = 0.0
    began: float = field(default_factory=time.monotonic)

    @property
    def age_s(self) -> float:
        """For how many seconds it has been kept."""
        return time.monotonic() - self.began


class Client:
    """Asks for one answer after the other, each on a connection of its own."""

    def __init__(self, port: int, dice: random.Random, tally: Tally) -> None:
        self._port, self._dice, self._tally = port, dice, tally

    async def run(self, until: float) -> None:
        """Ask until a time."""
        while time.monotonic() < until:
            service = self._dice.choice(("resuming", "plain"))
            kind = self._dice.choices(list(KINDS), list(KINDS.values()))[0]
            item = [self._dice.randrange(10**9), 1 + int(self._dice.expovariate(1 / 100)), 0]
            if kind == "sleeps":
                item[1:] = [100, 32 * 1024]
            elif kind == "collects":
                item[1] = min(item[1], MOST_COLLECTED)
            try:
                async with asyncio.timeout(PATIENCE_S + SLEEP_S):
                    end = await self._ask(service, kind, item)
            except TimeoutError:
                end = "hangs"
            except (Wrong, OSError, EOFError, ValueError) as error:
                end = f"{type(error).__name__}: {error}"
            self._tally.ends[service, end.partition(":")[0]] += 1
            if end.partition(":")[0] not in _ENDS[service]:
                self._tally.wrongs.append(f"at {self._tally.age_s:.1f} s: {service}, {kind}, {item}: {end}")

    async def _ask(self, service: str, kind: str, item: list[int]) -> str:
        """Return how the answer has ended."""
        reader, writer = await asyncio.open_connection(HOST, self._port, limit=2**20)
        try:
            accept = "application/json" if kind == "collects" else "text/event-stream"
            body = json.dumps(item).encode()
            head = f"POST /models/{service}/predict HTTP/1.0\r\nAccept: {accept}\r\nContent-Length: {len(body)}\r\n\r\n"
            writer.write(head.encode() + body)
            status = int((await reader.readuntil(b"\r\n\r\n")).split()[1])
            if status != 200:
                return _failure(json.loads(await reader.read()), 0)
            if kind == "collects":
                return self._check_whole(item, json.loads(await reader.read()))
            return await self._read(reader, kind, item)
        finally:
            writer.transport.abort()

    def _check_whole(self, item: list[int], answer: list[object]) -> str:
        token = item[0]
        for said in answer:
            token = self._check(token, item, said)
        if len(answer) != item[1]:
            raise Wrong(f"{len(answer)} tokens of {item[1]}")
        return "whole"

    async def _read(self, reader: asyncio.StreamReader, kind: str, item: list[int]) -> str:
        token, n = item[0], 0
        leaves_after = self._dice.randrange(item[1] + 1) if kind == "leaves" else -1
        heard = time.monotonic()
        async for event, said in _events(reader):
            if event == "error":
                return _failure(said, n)
            if event == "end":
                if said != {"parts": n} or n != item[1]:
                    raise Wrong(f"the end {said} after {n} tokens of {item[1]}")
                return "whole"
            now = time.monotonic()
            self._tally.longest_s = max(self._tally.longest_s, now - heard)
            token, n, heard = self._check(token, item, said), n + 1, now
            if n == leaves_after:
                return "left"
            if kind == "sleeps" and n == 10:
                await asyncio.sleep(SLEEP_S)
                heard = time.monotonic()
        raise Wrong(f"it broke off after {n} tokens")

    def _check(self, token: int, item: list[int], said: object) -> int:
        token = following(token)
        if said != padded(token, item[2]):
            raise Wrong(f"{said!r:.40} in the place of {token}")
        self._tally.tokens += 1
        return token


def _failure(said: Any, n: int) -> str:
    """Return the code of an error, after how many tokens it came, and what it says."""
    code, message = said["error"]["code"], said["error"]["message"]
    if message.startswith(_BLAMED):
        code = "request_crashed_worker"
    return f"{code}: after {n} tokens: {message}"


async def _events(reader: asyncio.StreamReader) -> AsyncIterator[tuple[str, object]]:
    """Server-sent events as they come: their type and data."""
    while True:
        try:
            lines = (await reader.readuntil(b"\n\n")).decode().split("\n")
        except asyncio.IncompleteReadError:
            return
        if not lines[0].startswith(":"):
            event = lines[0].removeprefix("event: ") if lines[0].startswith("event: ") else "part"
            yield event, json.loads(lines[event != "part"].removeprefix("data: "))


async def _harm(server: Started, dice: random.Random, until: float, tally: Tally) -> None:
    """Kill or stop a worker now and then."""
    while time.monotonic() < until:
        await asyncio.sleep(dice.uniform(0.3, 3.0))
        workers = [process.pid for process in server.tree.members() if _is_worker(process.pid)]
        if not workers:
            continue
        pid = dice.choice(workers)
        with suppress(ProcessLookupError):
            if dice.random() < 0.85:
                tally.faults["kill"] += 1
                os.kill(pid, signal.SIGKILL)
            else:
                tally.faults["stop"] += 1
                os.kill(pid, signal.SIGSTOP)
                await asyncio.sleep(STOPPED_S)
                os.kill(pid, signal.SIGCONT)


def _is_worker(pid: int) -> bool:
    with suppress(OSError):
        return b"carpool.engine.worker.main" in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False


def _rss(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return 1024 * int(re.findall(r"VmRSS:\s+(\d+)", status)[0])


async def _get(port: int, path: str) -> str:
    reader, writer = await asyncio.open_connection(HOST, port)
    writer.write(f"GET {path} HTTP/1.0\r\n\r\n".encode())
    text = (await reader.read()).decode()
    writer.close()
    return text


async def _wait_until_ready(server: Started, log: Path) -> None:
    until = time.monotonic() + START_S
    while time.monotonic() < until and server.process.poll() is None:
        with suppress(OSError):
            if " 200 " in (await _get(server.port, "/readyz")).partition("\r\n")[0]:
                return
        await asyncio.sleep(0.1)
    raise NotServing(f"the server is not ready:\n{tail(log)}")


async def _left_inside(port: int) -> list[str]:
    """What the gauges say is inside, once nobody asks any more."""
    until = time.monotonic() + SETTLE_S
    while True:
        text = await _get(port, "/metrics")
        gauges = re.findall(
            r"^(carpool_(?:in_flight_requests|queue_length|queue_bytes|running)\{.*\}) (\S+)$", text, re.MULTILINE
        )
        left = [f"{name} is {value}" for name, value in gauges if float(value) != 0]
        if not left or time.monotonic() > until:
            return left if gauges else ["there are no gauges"]
        await asyncio.sleep(0.2)


async def soak(server: Started, log: Path, seconds: float, seed: int) -> Tally:
    """Run a soak, and return what was seen."""
    await _wait_until_ready(server, log)
    tally = Tally()
    await asyncio.gather(
        *[
            Client(server.port, random.Random(f"{seed} warm {i}"), Tally()).run(time.monotonic() + 5)
            for i in range(CLIENTS)
        ]
    )
    before = _rss(server.process.pid)
    tally.began = time.monotonic()
    until = tally.began + seconds
    clients = [Client(server.port, random.Random(f"{seed} {i}"), tally) for i in range(CLIENTS)]
    telling = asyncio.ensure_future(_tell(tally, seconds))
    harming = asyncio.ensure_future(_harm(server, random.Random(f"{seed} nemesis"), until, tally))
    while (now := time.monotonic()) < until:
        await asyncio.gather(*[client.run(min(until, now + ROUND_S)) for client in clients])
    await harming
    telling.cancel()
    tally.wrongs += await _left_inside(server.port)
    grown = _rss(server.process.pid) - before
    print(f"the server's memory has grown by {grown / 2**20:.1f} MiB")
    if grown > RSS_GROWTH:
        tally.wrongs.append(f"the server's memory has grown by {grown / 2**20:.0f} MiB")
    blamed = sum(n for (_, end), n in tally.ends.items() if end == "request_crashed_worker")
    if blamed > tally.faults.total():
        tally.wrongs.append(f"{blamed} streams were blamed for {tally.faults.total()} faults")
    return tally


async def _tell(tally: Tally, seconds: float) -> None:
    while True:
        await asyncio.sleep(15)
        print(f"{tally.age_s:.0f} of {seconds:.0f} s: {tally.tokens:,} tokens, {dict(tally.faults)}", flush=True)


def main() -> int:
    parser = options.parser(__doc__)
    parser.add_argument("--minutes", type=float, default=2.0, help="under faults; default: %(default)s")
    parser.add_argument("--seed", type=int, help="of clients and nemesis; default: a new one, which is printed")
    given = parser.parse_args()
    seed = given.seed if given.seed is not None else random.SystemRandom().randrange(2**31)
    end_on_sigterm()
    adopt_orphans()
    print(
        f"soak of streams: {given.minutes:g} minutes, seed {seed}, {WORKERS} workers for each of 2 services", flush=True
    )
    services = [f"bench.chaos.stream_services:{name}" for name in ("resuming", "plain")]
    command = [sys.executable, "-m", "carpool", "serve", *services, "--port", "{port}"]
    with tempfile.TemporaryDirectory(prefix="carpool-streams-") as folder:
        log = Path(folder) / "server.log"
        try:
            with started(command, ROOT, {"PYTHONPATH": PYTHONPATH}, log) as server:
                tally = asyncio.run(soak(server, log, 60 * given.minutes, seed))
        except NotServing as error:
            print(error, file=sys.stderr)
            return 1
    print(f"{tally.tokens:,} tokens checked, {dict(tally.faults)}, longest silence {tally.longest_s:.2f} s")
    for (service, end), n in sorted(tally.ends.items()):
        print(f"{n:8,}  {service}: {end}")
    for wrong in tally.wrongs[:20]:
        print(f"WRONG {wrong}")
    print(f"{'FAILED' if tally.wrongs else 'passed'}, seed {seed}")
    return 1 if tally.wrongs else 0


if __name__ == "__main__":
    sys.exit(main())
