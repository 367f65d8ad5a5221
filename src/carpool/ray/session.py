"""The connection of one running service to a Ray cluster.

Calls of Ray that may block (asking for an actor, killing one, asking what the cluster has) are
errands: a thread of its own does them one after the other, so that the loop never waits for a
cluster of which the head is gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from math import inf
from queue import SimpleQueue
from typing import Any, NamedTuple

import ray

from carpool.engine.clock import Clock, monotonic
from carpool.engine.drive.gate import Gate
from carpool.engine.drive.worker import Launch
from carpool.engine.foreign import named_text_of
from carpool.engine.logger import logger
from carpool.engine.observe.stats import Stats
from carpool.engine.worker.address import JoinAddress
from carpool.ray.ray_metrics import TELL_EVERY_S, RayMetrics, where_workers_are
from carpool.ray.shell import Shell, WayHome, ray_tls
from carpool.ray.suspects import SUSPECT_S, Suspects

_SOCKET = "gate.sock"
_LAST_ERRANDS_S = 10.0
_NODE_LABEL = "ray.io/node-id"


class ActorOrder(NamedTuple):
    """An actor that is asked for.

    Attributes:
        on_proven_node: Whether it is to be on a node whose workers have answered.
    """

    launch: Launch
    place: int
    ticket: str
    token: bytes
    on_proven_node: bool


class Placed(NamedTuple):
    """An actor of which Ray has taken note.

    Attributes:
        actor: Its handle.
        call: The reference of its one call.
        avoids: Whether it must not be placed on some nodes.
    """

    actor: Any
    call: Any
    avoids: bool


@dataclass(frozen=True, slots=True)
class Terms:
    """The demands of the workers of a service on the cluster.

    Attributes:
        needs: By stage, options of its actors in Ray's own words.
        runtime_env: The environment of all actors.
    """

    needs: Mapping[str, Mapping[str, Any]]
    runtime_env: Mapping[str, Any]


class Session:
    """The connection of one running service to a cluster, on the running loop; see `Site`.

    Args:
        terms: The demands of its workers on the cluster.
        ports: The first and the last port that its gate may have; None for any.
        silence_s: For how long a node may be silent.
        new_worker: Makes a worker; it is called with this session, and then like `WorkerProcess`.
        has_ended: Called once it has been closed, in the thread for errands.

    Attributes:
        gate: Where its actors connect.
        fastest_s: By stage, the shortest time that an actor has taken to connect.

    Raises:
        OSError: There is no port for the gate.
    """

    def __init__(
        self,
        service: str,
        terms: Terms,
        ports: tuple[int, int] | None,
        silence_s: float,
        new_worker: Callable[..., Any],
        has_ended: Callable[[], None],
    ) -> None:
        self.service = service
        self.hire: Callable[..., Any] = partial(new_worker, self)
        self.clock: Clock = monotonic
        self.fastest_s: dict[str, float] = {}
        self.gate = Gate(ray_tls(), silence_s, service)
        self._terms = terms
        self._has_ended = has_ended
        self._loop = asyncio.get_running_loop()
        self._suspects = Suspects()
        self._node = ray.get_runtime_context().get_node_id()
        self._address = _listen(self.gate, ray.util.get_node_ip_address(), ports)
        self._folder = tempfile.mkdtemp(prefix="carpool-")  # which only this user can enter
        self.gate.listen(JoinAddress(path=os.path.join(self._folder, _SOCKET)))
        self._shells: dict[str, Any] = {}
        self._metrics: RayMetrics | None = None
        self._telling: asyncio.TimerHandle | None = None
        self._errands: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run_errands, name="carpool-ray", daemon=True)
        self._thread.start()

    def observe(self, stats: Stats) -> None:
        """Write the service into Ray's metrics every few seconds, from now on."""
        metrics = self._metrics = RayMetrics(self.service)

        def tell() -> None:
            self._errands.put(partial(metrics.tell, stats.snapshot(self.clock()), where_workers_are(stats)))
            self._telling = self._loop.call_later(TELL_EVERY_S, tell)

        tell()

    async def close(self) -> None:
        """Let go of the cluster, once all workers have ended."""
        if self._telling is not None:
            self._telling.cancel()
        self.gate.close()
        if self._metrics is not None:
            self._errands.put(self._metrics.end)
        self._errands.put(None)
        await asyncio.to_thread(self._thread.join, _LAST_ERRANDS_S)
        shutil.rmtree(self._folder, ignore_errors=True)

    def abandon(self) -> None:
        """Let go of the cluster without the loop, which ends or has ended."""
        self.gate.abandon()
        self._errands.put(None)
        self._thread.join(_LAST_ERRANDS_S)
        shutil.rmtree(self._folder, ignore_errors=True)

    # -- for its workers

    def place(
        self,
        order: ActorOrder,
        is_wanted: Callable[[], bool],
        placed: Callable[[ActorOrder, Placed | BaseException], None],
    ) -> None:
        """Ask for an actor.

        Args:
            order: The actor that is asked for.
            is_wanted: Whether it still is, when its turn comes.
            placed: Called on the loop with what has come of it.
        """

        def ask() -> None:
            if not is_wanted():
                return
            made: Placed | BaseException
            try:
                made = self._place(order)
            except BaseException as error:
                made = error
            if not is_wanted() and isinstance(made, Placed):
                _kill(made.actor)
            self.from_ray(placed, order, made)

        self._errands.put(ask)

    def kill(self, actor: Any) -> None:
        if actor is not None:
            self._errands.put(lambda: _kill(actor))

    def from_ray(self, act: Callable[..., None], *arguments: Any) -> None:
        """Call a function on the loop, from another thread; do nothing if the loop has ended."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(act, *arguments)

    def suspect(self, node: str) -> None:
        """Place no worker on a silent node for a while."""
        text = "nothing is heard of node %s: no worker is placed there for %g s if there is another node"
        logger.warning(text, node, SUSPECT_S, extra={"model": self.service})
        self._suspects.add(self.clock(), node)

    def connected(self, stage: str, node: str, took_s: float) -> None:
        """Take note that an actor has connected.

        Args:
            stage: Its stage.
            node: Its node.
            took_s: How long after it was asked for.
        """
        self._suspects.connected(node)
        self.fastest_s[stage] = min(self.fastest_s.get(stage, inf), took_s)

    def disconnected(self, node: str) -> None:
        """Take note that the connection of a worker on a node has ended."""
        self._suspects.disconnected(self.clock(), node)

    def find_room(self, stage: str, found: Callable[[bool], None]) -> None:
        """Find out whether the cluster has room for a worker.

        Args:
            stage: The stage.
            found: Called on the loop with whether it has.
        """
        self._errands.put(lambda: self.from_ray(found, has_free(self._needs(stage), ray.available_resources())))

    def tell_what_is_missing(self, launch: Launch, place: int) -> None:
        """Log the needs of a worker, and the free room of the cluster."""
        stage = launch.setup.stage
        needs = self._needs(stage)

        def tell() -> None:
            free = {name: n for name, n in ray.available_resources().items() if not name.startswith("node:")}
            text = "worker %s/%d waits for room in the cluster: it needs %s, and free are %s"
            about = {"model": self.service, "stage": stage, "worker": f"{stage}/{place}"}
            logger.warning(text, stage, place, needs, free or "no resources at all", extra=about)

        self._errands.put(tell)

    # -- in the thread for errands

    def _run_errands(self) -> None:
        while (errand := self._errands.get()) is not None:
            try:
                errand()
            except BaseException as error:  # Ray is not ours, and its head may be gone
                logger.warning("Ray raised %s", named_text_of(error), extra={"model": self.service})
        self._has_ended()

    def _place(self, order: ActorOrder) -> Placed:
        launch, place = order.launch, order.place
        stage = launch.setup.stage
        options = {**self._needs(stage), "max_restarts": 0, "max_concurrency": 1}
        options["name"] = f"carpool {self.service} {stage}/{place} {order.ticket}"
        env = {**self._terms.runtime_env, "env_vars": dict(self._terms.runtime_env.get("env_vars", {}))}
        # Without its index: actors with the same variables can have processes that Ray keeps.
        env["env_vars"].update(launch.declared_env_of(place))
        options["runtime_env"] = env
        alive = [node["NodeID"] for node in ray.nodes() if node["Alive"]]
        avoided = self._suspects.avoided(self.clock(), alive)
        well = self._suspects.well(self.clock(), alive)
        if order.on_proven_node and well:
            chosen = f"in({','.join(well)})"
        else:
            chosen = f"!in({','.join(avoided)})" if avoided else ""
        if chosen:
            options["label_selector"] = {**dict(options.get("label_selector") or {}), _NODE_LABEL: chosen}
        actor = self._shell(stage).options(**options).remote(f"{stage}/{place}")
        host, port = self._address.host, self._address.port
        path = os.path.join(self._folder, _SOCKET)
        home = WayHome(host, port, path, self._node, self.service, stage, order.ticket, order.token)
        return Placed(actor, actor.live.remote(home), bool(avoided))

    def _needs(self, stage: str) -> dict[str, Any]:
        return {"num_cpus": 1, "scheduling_strategy": "SPREAD", **self._terms.needs.get(stage, {})}

    def _shell(self, stage: str) -> Any:
        """Return the actor class of a stage, which has its name, as Ray's dashboard shows that."""
        if stage not in self._shells:
            name = stage if stage.isidentifier() else Shell.__name__
            self._shells[stage] = ray.remote(type(name, (Shell,), {}))
        return self._shells[stage]


def has_free(needs: Mapping[str, Any], free: Mapping[str, float]) -> bool:
    """Report whether a cluster has room for an actor, on any nodes.

    Args:
        needs: In Ray's words.
        free: The resources that are free, by name.
    """
    named = {"CPU": "num_cpus", "GPU": "num_gpus", "memory": "memory"}
    wanted = {name: needs.get(option) or 0 for name, option in named.items()} | dict(needs.get("resources") or {})
    return all(free.get(name, 0) >= n for name, n in wanted.items() if n)


def _kill(actor: Any) -> None:
    with contextlib.suppress(Exception):  # it is dead, or the cluster is
        ray.kill(actor)


def _listen(gate: Gate, host: str, ports: tuple[int, int] | None) -> JoinAddress:
    first, last = ports or (0, 0)
    for port in range(first, last + 1):
        try:
            return gate.listen(JoinAddress(host=host, port=port))
        except OSError:
            if port == last:
                raise
    raise AssertionError("there is at least one port")
