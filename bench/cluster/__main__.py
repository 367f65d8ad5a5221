"""carpool on Ray beside Ray Serve, and beside carpool's own processes, in turns.

* `handle`: callers in Python against a `DeploymentHandle`.
* `http`: our own HTTP against Serve's replica asked directly, no proxy in between.
* `own`: carpool on Ray against carpool with its own worker processes; by callers in Python, and for
  `arrays` with arrays of 6 MB.
* `tcp`: the same with a worker on another node (both are on this machine), hence over TCP and not a
  Unix socket.
* `far`: carpool with such a worker against calls of an actor on that node, which take arrays and
  answers through Ray's object store; the best of one and of four calls at a time.

Serve is at its best: throughput-optimized, `max_ongoing_requests` 2048, and for each turn the best
of three settings of `batch_wait_timeout_s` (0, 10 and 30 ms), each of which has a turn. `trivial`
doubles numbers, `timed` takes 8 ms and 0.25 ms an item, with batches of up to 64; `arrays` gives
back what it gets, for up to 16 callers, since the arrays of more do not fit the object store.
Ratios are medians over neighbours in time; processor time is that of all processes, Ray's daemons
and the callers in Python among them, `wrk` not.

    python -m bench.cluster --rounds 5 --seconds 4 --json ray.json
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import os
import sys
import tempfile
import time
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from bench import PYTHONPATH
from bench.cluster import models
from bench.cluster.load import EXCHANGE, Load, Turn
from bench.tools import options, wrk
from bench.tools.comparison import Comparison, one_table, say
from bench.tools.figures import Spread, machine, median_ratio, short
from bench.tools.process_tree import adopt_orphans, end_on_sigterm
from bench.tools.server import free_port

CALLERS = (1, 16, 64, 256)
WAITS_S = (0.0, 0.01, 0.03)
DIRECT_PORTS = range(30000, 30004)  # where replicas of Serve listen that are asked directly
FIND_S = 20.0
MOST_WITH_ARRAYS = 16  # callers
ON_ANOTHER_NODE = {"resources": {"far": 1}}
AT_ONCE = (1, 4)


class Case(NamedTuple):
    """What is measured: which way of asking, which model, with how many workers."""

    way: str
    model: str
    workers: int

    @property
    def name(self) -> str:
        """As `--cases` has it."""
        return f"{self.way}.{self.model}.{self.workers}"

    @property
    def is_far(self) -> bool:
        """Whether its worker is on another node."""
        return self.way in ("tcp", "far")


CASES = [
    *(Case("handle", model, workers) for model, workers in (("trivial", 1), ("timed", 1), ("timed", 2))),
    *(Case("http", model, 1) for model in ("trivial", "timed")),
    *(Case("own", model, 1) for model in ("trivial", "timed", "arrays")),
    *(Case(way, "arrays", 1) for way in ("tcp", "far")),
]
MODELS = {"trivial": models.Trivial, "timed": models.Timed, "arrays": models.Arrays}

Asking = Callable[[int], Awaitable[Turn]]
"""Has a number of callers ask one side for a turn."""


@dataclass(frozen=True, slots=True)
class Row:
    """One case with a number of callers; turns of both sides that are neighbours have one index."""

    case: str
    callers: int
    ours: list[Turn]
    theirs: list[Turn]


def main() -> int:
    parser = options.parser(__doc__)
    options.add_measuring(parser, rounds=5, seconds=4)
    options.add_names(parser, "--cases", [case.name for case in CASES], "what is measured")
    options.add_names(parser, "--callers", map(str, CALLERS), "how many callers there are")
    given = parser.parse_args()
    try:
        import ray
        import ray.serve
    except ImportError:
        parser.error("Ray is not installed: pip install 'ray[serve]'")
    cases = [case for case in CASES if case.name in given.cases]
    near, far = ([case for case in cases if case.is_far == is_far] for is_far in (False, True))
    if any(case.way == "http" for case in cases) and wrk.missing():
        parser.error(wrk.missing())
    end_on_sigterm()
    adopt_orphans()
    found: Comparison[Row] = Comparison({**machine(), "ray": ray.__version__, "seconds": given.seconds})
    with tempfile.TemporaryDirectory(prefix="ray") as folder:
        _prepare(folder)
        try:
            for start, some in ((_one_node, near), (_two_nodes, far)):
                if some:
                    with start():
                        asyncio.run(_measure(some, list(map(int, given.callers)), given, found))
        except KeyboardInterrupt:
            found.failures.append("interrupted: not everything was measured")
    return found.report(given, "carpool on Ray / the other side", one_table(_HEADER, _cells), asdict)


_QUIET = {"enable_access_log": False, "log_level": "WARNING"}
_SMALL = {"include_dashboard": False, "object_store_memory": 600 * 2**20, "num_cpus": 8}


def _prepare(folder: str) -> None:
    """Have Ray keep to a folder, and give Serve its settings for throughput."""
    os.environ.update(
        RAY_TMPDIR=folder,
        HOME=folder,
        RAY_USAGE_STATS_ENABLED="0",
        RAY_SERVE_THROUGHPUT_OPTIMIZED="1",
        PYTHONPATH=PYTHONPATH,
    )


@contextlib.contextmanager
def _one_node() -> Iterator[None]:
    """A node for this program alone, with Serve."""
    import ray
    from ray import serve

    ray.init(address="local", log_to_driver=False, logging_level="ERROR", _node_ip_address="127.0.0.1", **_SMALL)
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": free_port()}, logging_config=_QUIET)
        yield
    finally:
        serve.shutdown()
        ray.shutdown()


@contextlib.contextmanager
def _two_nodes() -> Iterator[None]:
    """Two nodes for this program alone, which is on the first one."""
    import ray
    from ray.cluster_utils import Cluster

    head, other = "127.0.0.2", "127.0.0.3"  # Ray takes 127.0.0.1 for whatever other address the machine has
    nodes = Cluster(initialize_head=True, head_node_args={"node_ip_address": head, **_SMALL})
    try:
        room = {"resources": {"far": 3}, "num_cpus": 8, "object_store_memory": _SMALL["object_store_memory"]}
        nodes.add_node(node_ip_address=other, **room)
        nodes.wait_for_nodes()
        ray.init(address=nodes.address, log_to_driver=False, logging_level="ERROR", _node_ip_address=head)
        try:
            yield
        finally:
            ray.shutdown()
    finally:
        nodes.shutdown()


async def _measure(
    cases: Sequence[Case], callers: Sequence[int], given: argparse.Namespace, found: Comparison[Row]
) -> None:
    load = Load()
    sides = {"handle": _handles, "http": _http, "own": _own, "tcp": _own, "far": _far}
    for case in cases:
        async with sides[case.way](case, load, given.seconds) as (ours, theirs):
            for asking in (ours, *theirs):
                await asking(16)  # warm
            for n in callers:
                if case.model == "arrays" and n > MOST_WITH_ARRAYS:
                    continue
                found.rows.append(await _take_turns(case, n, ours, theirs, given.rounds))


async def _take_turns(case: Case, n: int, ours: Asking, theirs: Sequence[Asking], rounds: int) -> Row:
    """Let both sides take turns; of several ways to set the other one, the best counts."""
    row = Row(case.name, n, [], [])
    for number in range(rounds):
        row.ours.append(await ours(n))
        row.theirs.append(max([await asking(n) for asking in theirs], key=lambda turn: turn.per_s))
        figures = f"{short(row.ours[-1].per_s)}/s / {short(row.theirs[-1].per_s)}/s"
        say(f"  {case.name}, {n} callers, round {number + 1} of {rounds}: {figures}")
    return row


# -- the sides


@contextlib.asynccontextmanager
async def _handles(case: Case, load: Load, seconds: float) -> AsyncIterator[tuple[Asking, list[Asking]]]:
    async with models.service(MODELS[case.model], case.workers).run_async(on="ray") as handle, _serve(case) as theirs:

        def waiting(wait_s: float) -> Asking:
            async def asking(n: int) -> Turn:
                await _tune(theirs, wait_s, case.workers)
                return await load.callers(theirs.remote, n, seconds)

            return asking

        yield (lambda n: load.callers(handle.predict, n, seconds)), list(map(waiting, WAITS_S))


@contextlib.asynccontextmanager
async def _http(case: Case, load: Load, seconds: float) -> AsyncIterator[tuple[Asking, list[Asking]]]:
    program = (sys.executable, "-m", "carpool", "serve", f"bench.cluster.served:{case.model}")
    port = free_port()
    where = ("--on", "ray", "--host", "127.0.0.1", "--port", str(port))
    import ray

    env = {**os.environ, "RAY_ADDRESS": ray.get_runtime_context().gcs_address}
    ours = await asyncio.create_subprocess_exec(*program, *where, env=env)
    try:
        await asyncio.to_thread(_find, [port])
        async with _serve(case) as theirs:
            direct = await asyncio.to_thread(_find, DIRECT_PORTS)

            def waiting(wait_s: float) -> Asking:
                async def asking(n: int) -> Turn:
                    await _tune(theirs, wait_s, case.workers)
                    return await load.connections(direct, n, seconds)

                return asking

            yield (lambda n: load.connections(port, n, seconds)), list(map(waiting, WAITS_S))
    finally:
        ours.terminate()
        await ours.wait()


@contextlib.asynccontextmanager
async def _own(case: Case, load: Load, seconds: float) -> AsyncIterator[tuple[Asking, list[Asking]]]:
    there = ON_ANOTHER_NODE if case.is_far else {}
    service = models.service(MODELS[case.model], case.workers, **there)
    asked = _asked(case)
    async with service.run_async(on="ray") as on_ray, service.run_async() as here:
        yield (
            (lambda n: load.callers(on_ray.predict, n, seconds, *asked)),
            [lambda n: load.callers(here.predict, n, seconds, *asked)],
        )


@contextlib.asynccontextmanager
async def _far(case: Case, load: Load, seconds: float) -> AsyncIterator[tuple[Asking, list[Asking]]]:
    from bench.cluster import arrays

    asked = _asked(case)

    def calling(most_at_once: int) -> Asking:
        actor = arrays.actor(most_at_once, num_cpus=0, **ON_ANOTHER_NODE)
        return lambda n: load.callers(actor.call.remote, n, seconds, *asked)

    async with models.service(MODELS[case.model], case.workers, **ON_ANOTHER_NODE).run_async(on="ray") as handle:
        yield (lambda n: load.callers(handle.predict, n, seconds, *asked)), list(map(calling, AT_ONCE))


def _asked(case: Case) -> tuple[Callable[..., Any], ...]:
    """Return what a case asks for and what checks its answers; nothing where it is numbers."""
    if case.model != "arrays":
        return ()
    from bench.cluster import arrays

    return arrays.item_of, arrays.is_same


@contextlib.asynccontextmanager
async def _serve(case: Case) -> AsyncIterator[Any]:
    """A handle of the same model in Ray Serve."""
    from ray import serve

    from bench.cluster.on_serve import deploy

    handle = await asyncio.to_thread(deploy, case.model == "timed", case.workers)
    try:
        yield handle
    finally:
        await asyncio.to_thread(serve.delete, "doubling")


async def _tune(handle: Any, wait_s: float, replicas: int) -> None:
    """Have all replicas wait for so long; Serve chooses which one hears a call, hence several."""
    for _ in range(3 * replicas):
        await handle.wait_for.remote(wait_s)


def _find(ports: Sequence[int]) -> int:
    """Return the first port that answers right. Raises TimeoutError."""
    end = time.monotonic() + FIND_S
    for port in itertools.cycle(ports):
        with contextlib.suppress(OSError):
            url, headers = f"http://127.0.0.1:{port}{EXCHANGE.path}", {"Content-Type": EXCHANGE.content_type}
            with urllib.request.urlopen(urllib.request.Request(url, EXCHANGE.body, headers), timeout=5) as answer:
                if float(answer.read()) == EXCHANGE.answer:
                    return port
        if time.monotonic() > end:
            break
        time.sleep(0.1)
    raise TimeoutError(f"nothing answers at any of the ports {list(ports)}")


# -- what is shown

_HEADER = ("case", "callers", "requests/s", "other's", "ratio", "p50 ms", "p99 ms", "CPU µs", "CPU ratio")


def _cells(row: Row) -> tuple[str, ...]:
    def both(read: Callable[[Turn], float]) -> str:
        ours, theirs = (Spread.of(list(map(read, turns))).median for turns in (row.ours, row.theirs))
        return f"{short(ours)} / {short(theirs)}"

    def ratio(read: Callable[[Turn], float]) -> str:
        return short(median_ratio(list(map(read, row.ours)), list(map(read, row.theirs))))

    rates = [Spread.of([turn.per_s for turn in turns]).text(short) for turns in (row.ours, row.theirs)]
    return (
        *(row.case, str(row.callers), *rates, ratio(lambda turn: turn.per_s)),
        both(lambda turn: 1000 * turn.p50_s),
        both(lambda turn: 1000 * turn.p99_s),
        both(lambda turn: 1e6 * turn.cpu_s),
        ratio(lambda turn: turn.cpu_s),
    )


if __name__ == "__main__":
    sys.exit(main())
