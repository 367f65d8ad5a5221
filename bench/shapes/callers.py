"""The load of `bench.shapes.http`: clients that wait for answers, or texts at random times."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from math import ceil
from random import Random
from statistics import fmean

from bench.shapes.embedders import Embedder
from bench.tools.server import HOST

GRACE_S = 20.0  # for what is under way when an open loop ends


@dataclass(frozen=True, slots=True)
class Heard:
    """What one run showed.

    Attributes:
        requests_per_s: Answered in the time that counts.
        mean_s: Latency of those that were sent in that time and answered.
        p99_s: Of the same.
        long_p99_s: Of the longest tenth of these.
        failed: Answers with another status, broken connections, and what was never answered.
    """

    requests_per_s: float
    mean_s: float
    p99_s: float
    long_p99_s: float
    failed: int


class _Run:
    """Sends texts and takes notes of the answers.

    Args:
        port: Of the server.
        embedder: How it is asked.
        texts: What is sent, in a random order.
        seed: Of that order.
    """

    def __init__(self, port: int, embedder: Embedder, texts: Sequence[str], seed: int) -> None:
        self._port, self._embedder = port, embedder
        self._texts, self._dice = texts, Random(seed)
        self._idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []
        self.answers: list[tuple[float, float, int]] = []  # sent, answered, length
        self.failed = 0

    async def send(self, sent: float) -> None:
        """Send one text, and note how long its answer took from `sent` on."""
        text = self._dice.choice(self._texts)
        body = self._embedder.body(text)
        head = f"POST {self._embedder.path} HTTP/1.1\r\nHost: {HOST}\r\nContent-Type: application/json\r\n"
        try:
            reader, writer = self._idle.pop() if self._idle else await asyncio.open_connection(HOST, self._port)
            writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            lines = (await reader.readuntil(b"\r\n\r\n")).lower().split(b"\r\n")
            length = next(int(line[15:]) for line in lines if line.startswith(b"content-length:"))
            await reader.readexactly(length)
        except (OSError, asyncio.IncompleteReadError, StopIteration):
            self.failed += 1
            return
        self._idle.append((reader, writer))
        if lines[0].split()[1] == b"200":
            self.answers.append((sent, time.perf_counter(), len(text.split())))
        else:
            self.failed += 1

    def close(self) -> None:
        """Close the connections."""
        for _, writer in self._idle:
            writer.close()


def closed(
    port: int, embedder: Embedder, texts: Sequence[str], *, clients: int, warm_up_s: float, seconds: float, seed: int
) -> Heard:
    """Clients of which each sends its next text when it has the answer to the last one."""

    async def load(run: _Run, begin: float) -> None:
        async def client() -> None:
            while (now := time.perf_counter()) < begin + warm_up_s + seconds:
                await run.send(now)

        await asyncio.gather(*[client() for _ in range(clients)])

    return _heard(_Run(port, embedder, texts, seed), load, warm_up_s, seconds)


def open_loop(
    port: int, embedder: Embedder, texts: Sequence[str], *, rate: float, warm_up_s: float, seconds: float, seed: int
) -> Heard:
    """Texts at random times, whatever became of earlier ones; latency counts from these times."""

    async def load(run: _Run, begin: float) -> None:
        dice, when, tasks = Random(f"{seed}/times"), begin, set()
        while (when := when + dice.expovariate(rate)) < begin + warm_up_s + seconds:
            await asyncio.sleep(max(0.0, when - time.perf_counter()))
            tasks.add(asyncio.create_task(run.send(when)))
        _, pending = await asyncio.wait(tasks, timeout=GRACE_S)
        for task in pending:
            task.cancel()
        run.failed += len(pending)

    return _heard(_Run(port, embedder, texts, seed), load, warm_up_s, seconds)


def _heard(run: _Run, load: Callable[[_Run, float], Awaitable[None]], warm_up_s: float, seconds: float) -> Heard:
    """Load a server; what the warm-up sends does not count."""
    begin = time.perf_counter()

    async def all_of_it() -> None:
        await load(run, begin)
        run.close()

    asyncio.run(all_of_it())
    first, last = begin + warm_up_s, begin + warm_up_s + seconds
    counted = [(answered - sent, length) for sent, answered, length in run.answers if sent >= first]
    least = sorted(length for _, length in counted)[len(counted) * 9 // 10] if counted else 0
    return Heard(
        requests_per_s=sum(first <= answered < last for _, answered, _ in run.answers) / seconds,
        mean_s=fmean(latency for latency, _ in counted) if counted else float("nan"),
        p99_s=_p99([latency for latency, _ in counted]),
        long_p99_s=_p99([latency for latency, length in counted if length >= least]),
        failed=run.failed,
    )


def _p99(values: list[float]) -> float:
    return sorted(values)[max(0, ceil(0.99 * len(values)) - 1)] if values else float("nan")
