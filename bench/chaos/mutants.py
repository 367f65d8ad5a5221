"""Does the soak find what it looks for? carpool breaks one promise, and the soak must fail.

Each mutant is a patch of the running server, made as its service is imported. A soak that passes
over a mutant is a fault of the soak, and the exit code is 1.
"""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

from bench.chaos import report
from bench.chaos.soak import soak
from bench.chaos.targets import target
from bench.tools import options
from bench.tools.process_tree import adopt_orphans, end_on_sigterm

VARIABLE = "CHAOS_MUTANT"

_kept: list[Any] = []


@dataclass(frozen=True, slots=True)
class Mutant:
    """One promise broken.

    Attributes:
        breaks: Does it, in the server or its workers.
        found: A word of the failure that the soak must report.
    """

    breaks: Callable[[], None]
    found: str


def apply_from_environment() -> None:
    """Break what the environment names, if it names something."""
    if name := os.environ.get(VARIABLE):
        MUTANTS[name].breaks()


def _wrap(owner: type, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    setattr(owner, name, make(getattr(owner, name)))


def _every(n: int) -> Callable[[], bool]:
    """True on every n-th call."""
    calls = count(1)
    return lambda: next(calls) % n == 0


def _no_retry() -> None:
    """What a dead worker had fails, although it may be run again."""
    from carpool.engine.core.core import Core

    def make(worker_lost: Callable[..., Any]) -> Callable[..., Any]:
        def lose(self: Any, now: float, stage: int, place: int, *rest: Any) -> Any:
            self.batchers[stage].lobby.idempotent = False
            return worker_lost(self, now, stage, place, *rest)

        return lose

    _wrap(Core, "worker_lost", make)


def _swapped_answers() -> None:
    """Two requests of a batch get each other's result."""
    from carpool.engine.core.core import Core

    now_and_then = _every(50)

    def make(completed: Callable[..., Any]) -> Callable[..., Any]:
        def complete(self: Any, now: float, reply: Any) -> Any:
            if len(reply.results) > 1 and now_and_then():
                reply.results = [reply.results[1], reply.results[0], *reply.results[2:]]
            return completed(self, now, reply)

        return complete

    _wrap(Core, "completed", make)


def _forgotten_answers() -> None:
    """A request is done, and nobody tells its client."""
    from carpool.http.answer_writer import HttpExchange

    now_and_then = _every(3000)
    _wrap(HttpExchange, "tell", lambda tell: lambda self: None if now_and_then() else tell(self))


def _late_answers() -> None:
    """A client is told long after its deadline."""
    from carpool.http.answer_writer import HttpExchange

    now_and_then = _every(3000)

    def make(tell: Callable[..., Any]) -> Callable[..., Any]:
        def later(self: Any) -> None:
            if now_and_then():
                asyncio.get_running_loop().call_later(12.0, tell, self)
            else:
                tell(self)

        return later

    _wrap(HttpExchange, "tell", make)


def _doubled_answers() -> None:
    """The same answer is written twice."""
    from carpool.http.connection import Connection

    now_and_then = _every(3000)

    def make(answer_now: Callable[..., Any]) -> Callable[..., Any]:
        def answer(self: Any, exchange: Any) -> Any:
            done = answer_now(self, exchange)
            if done and now_and_then():
                self._queue.given.append(exchange)
                answer_now(self, exchange)
            return done

        return answer

    _wrap(Connection, "answer_now", make)


def _second_runs() -> None:
    """A worker runs a batch again that it has answered."""
    from carpool.engine.worker.answer import BatchAnswerer

    now_and_then = _every(100)

    def make(answer: Callable[..., Any]) -> Callable[..., Any]:
        async def twice(self: Any, frame: Any) -> Any:
            if now_and_then():
                await answer(self, frame)
            return await answer(self, frame)

        return twice

    _wrap(BatchAnswerer, "answer", make)


def _leaked_memory() -> None:
    """What connections have carried is never let go."""
    from carpool.http.answer_writer import HttpExchange

    def make(tell: Callable[..., Any]) -> Callable[..., Any]:
        def keep(self: Any) -> None:
            _kept.append(self.item)
            tell(self)

        return keep

    _wrap(HttpExchange, "tell", make)


def _leaked_descriptors() -> None:
    """Each lost worker leaves a descriptor behind."""
    from carpool.engine.core.core import Core

    def make(worker_lost: Callable[..., Any]) -> Callable[..., Any]:
        def lose(self: Any, *arguments: Any) -> Any:
            os.dup(2)
            return worker_lost(self, *arguments)

        return lose

    _wrap(Core, "worker_lost", make)


def _uncounted_requests() -> None:
    """`/metrics` misses some good answers."""
    from carpool.engine.observe.stats import Stats

    now_and_then = _every(50)
    _wrap(Stats, "answered", lambda count_: lambda self, *given: None if now_and_then() else count_(self, *given))


MUTANTS = {
    "no_retry": Mutant(_no_retry, "ordinary requests got a 200"),
    "swapped_answers": Mutant(_swapped_answers, "crossed"),
    "forgotten_answers": Mutant(_forgotten_answers, "lost"),
    "late_answers": Mutant(_late_answers, "late"),
    "doubled_answers": Mutant(_doubled_answers, "duplicated"),
    "second_runs": Mutant(_second_runs, "ghost"),
    "leaked_memory": Mutant(_leaked_memory, "leaked memory"),
    "leaked_descriptors": Mutant(_leaked_descriptors, "leaked descriptors"),
    "uncounted_requests": Mutant(_uncounted_requests, "/metrics"),
}


def survives(name: str, minutes: float, seed: int) -> list[str]:
    """What the soak says of a mutant."""
    server = target("carpool")
    server = replace(server, env={**server.env, VARIABLE: name})
    with tempfile.TemporaryDirectory(prefix="carpool-mutant-") as folder:
        outcome = soak(server, minutes * 60, seed, Path(folder), lambda gone, clients, faults: None)
    return report.row_of(server, seed, outcome).failures()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = options.parser(__doc__)
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"one of {', '.join(MUTANTS)}; all of them if none is named"
    )
    parser.add_argument("--minutes", type=float, default=0.3, help="of each soak; default: %(default)s")
    parser.add_argument("--seed", type=int, default=1, help="of clients and nemesis; default: %(default)s")
    given = parser.parse_args(arguments)
    end_on_sigterm()
    adopt_orphans()
    missed = 0
    for name in given.names or MUTANTS:
        failures = survives(name, given.minutes, given.seed)
        found = any(MUTANTS[name].found in text for text in failures)
        missed += not found
        print(f"{name}: {'found' if found else 'NOT FOUND'} ({'; '.join(failures) or 'the soak passed'})", flush=True)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
