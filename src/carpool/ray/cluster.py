"""A Ray cluster, on which the workers of a service run: `service.run(on=carpool.ray.Cluster())`."""

from __future__ import annotations

import asyncio
import copy
import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import ray

from carpool.engine.foreign import named_text_of
from carpool.engine.logger import logger
from carpool.errors import StartupError
from carpool.ray.actor_worker import ActorWorker
from carpool.ray.session import Session, Terms
from carpool.service.checks import at_least, check_range, cluster_needs, numbers_of_workers, seconds
from carpool.service.declaration import Declaration
from carpool.service.stage import Stage

_LEAST_SILENCE_S = 2.0
_LARGEST_PORT = 65535
_THROUGH_CLIENT = (
    "{address} is an address of Ray Client, through which workers could not connect back: start the program on the"
    " cluster, with `ray job submit --working-dir . -- carpool serve ...`, or on one of its nodes"
)

_lock = threading.Lock()
_sessions = 0  # of this process, which have begun and not ended
_has_begun_ray = False  # whether it is ours to end


@dataclass(frozen=True, slots=True, init=False)
class Cluster:
    """A Ray cluster, on which the worker processes of a service run as actors.

    Queue, policy and batches stay in this process, and so do stages with `run_in="thread"` or
    `"loop"`. Without an address it is the cluster that this program was submitted to
    (`RAY_ADDRESS`), or the one that was started on this machine, or else a new one for this
    program, which ends with it.

    Args:
        address: What `ray.init` takes: "auto" for the cluster of this machine, "HOST:PORT" of its
            head, or "local" for a new one.
        runtime_env: What the workers need that nodes do not have, in Ray's own words: `pip`,
            `working_dir`, `env_vars` and so on.
        ports: The first and the last port among which this process takes one for the workers to
            connect to. Defaults to any.
        silence_s: The workers on a node are lost if it has acknowledged nothing for this many
            seconds.
        stages: By the name of a stage, what differs from its declaration there: `workers`, a number
            or a pair of the fewest and the most, and whatever its `needs` may hold.

    Raises:
        ValueError: An argument is out of range, or the address is one of Ray Client.
        TypeError: An argument is of the wrong kind.
    """

    address: str | None
    runtime_env: Mapping[str, Any]
    ports: tuple[int, int] | None
    silence_s: float
    stages: Mapping[str, Mapping[str, Any]]

    def __init__(
        self,
        address: str | None = None,
        *,
        runtime_env: Mapping[str, Any] | None = None,
        ports: tuple[int, int] | None = None,
        silence_s: float = 5.0,
        stages: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        if seconds("silence_s", silence_s) < _LEAST_SILENCE_S:
            raise ValueError(f"silence_s must be at least {_LEAST_SILENCE_S:g} seconds, not {silence_s!r}")
        for name, value in (("runtime_env", runtime_env), ("stages", stages), *(stages or {}).items()):
            if value is not None and not isinstance(value, Mapping):
                raise TypeError(f"{name} must be a mapping, not {value!r}")
        _refuse_client(address or os.environ.get("RAY_ADDRESS", ""))
        values: dict[str, object] = {
            "address": address,
            "runtime_env": dict(runtime_env or {}),
            "ports": None if ports is None else _ports(ports),
            "silence_s": float(silence_s),
            "stages": {name: differing(name, each) for name, each in (stages or {}).items()},
        }
        for field, checked in values.items():
            object.__setattr__(self, field, checked)

    def moved(self, service: Declaration) -> Declaration:
        """Return the service as it runs there, with as many workers as `stages` says.

        Raises:
            ValueError: The service has branches; `stages` names a stage that there is not, or that
                does not run in processes;
                or a stage lets workers join by themselves.
        """
        if not service.is_line:
            raise ValueError(f"service {service.name} has branches, and on Ray services are stages in a row")
        check_names(self.stages, service)
        for stage in service.stages:
            if stage.name in self.stages and stage.run_in != "process":
                raise ValueError(
                    f'stages names {stage.name}, which stays in this process, since it has run_in="{stage.run_in}"'
                )
        there = copy.copy(service)
        stages = tuple(self._moved(stage) for stage in service.stages)
        object.__setattr__(there, "stages", stages)
        object.__setattr__(there, "graph", stages)
        return there

    def _moved(self, stage: Stage) -> Stage:
        if stage.join:
            raise ValueError(
                f"stage {stage.name} has join=True, and on Ray the cluster starts the workers: leave out one of them"
            )
        workers = self.stages.get(stage.name, {}).get("workers", stage.workers)
        if stage.run_in != "process" or workers == stage.workers:
            return stage
        check_range(workers, stage.traits)
        if any(each != stage.env[0] for each in stage.env):
            raise ValueError(
                f"stage {stage.name} has an env for each of its {stage.workers} workers, so there cannot be {workers}"
            )
        env = stage.env[:1] * (workers if isinstance(workers, int) else workers[1])
        return with_changes(stage, {"workers": workers, "env": env, "cpus": None, "devices": None})

    async def open(self, service: Declaration) -> Session:
        """Connect to the cluster, on the running loop.

        Args:
            service: The service, as `moved` has returned it.

        Raises:
            StartupError: There is no cluster there, or no port for its workers to connect to.
        """
        try:
            await asyncio.to_thread(self._connect)
        except Exception as error:
            raise StartupError(f"Ray cannot be reached or started: {named_text_of(error)}") from error
        try:
            terms = Terms({stage.name: self._needs(stage, service.name) for stage in service.stages}, self._own_env())
            return Session(service.name, terms, self.ports, self.silence_s, ActorWorker, _leave)
        except OSError as error:
            _leave()
            raise StartupError(f"workers could not connect to this process: {error}") from error
        except BaseException:
            _leave()
            raise

    def _needs(self, stage: Stage, service: str) -> dict[str, Any]:
        if stage.run_in == "process" and (stage.cpus is not None or stage.devices is not None):
            text = "stage %s: on Ray no worker is tied to cores or devices of a machine, so cpus= and devices= only say"
            text += " how much it needs; needs= says that in Ray's words"
            logger.info(text, stage.name, extra={"model": service, "stage": stage.name})
        return options_of(stage, self.stages.get(stage.name, {}))

    def _connect(self) -> None:
        global _sessions, _has_begun_ray
        with _lock:
            if not ray.is_initialized():
                ray.init(address=self.address, runtime_env=dict(self.runtime_env) or None, logging_level="WARNING")
                _has_begun_ray = True
            _sessions += 1

    def _own_env(self) -> Mapping[str, Any]:
        """Return the needs of actors beyond those that the whole program has been given."""
        return {} if _has_begun_ray else self.runtime_env


def _leave() -> None:
    """Disconnect this process, if a session has connected it and this was the last one."""
    global _sessions, _has_begun_ray
    with _lock:
        _sessions -= 1
        if _sessions == 0 and _has_begun_ray:
            _has_begun_ray = False
            ray.shutdown()


def _refuse_client(address: str) -> None:
    if address.startswith("ray://"):
        raise ValueError(_THROUGH_CLIENT.format(address=address))


def differing(stage: str, changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the differences of a stage from its declaration. Raises ValueError or TypeError."""
    name = f"stages[{stage!r}]"
    needs = {key: value for key, value in changes.items() if key != "workers"}
    checked = cluster_needs(name, needs)
    if "workers" in changes:
        checked["workers"] = numbers_of_workers(changes["workers"])
    return checked


def check_names(stages: Mapping[str, Any], service: Declaration) -> None:
    """Raise ValueError if something differs for a stage that there is not."""
    names = [stage.name for stage in service.stages]
    for name in stages:
        if name not in names:
            raise ValueError(f"stages names {name}, and {service.name} has {', '.join(names)}")


def options_of(stage: Stage, changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a stage's actors, in Ray's words.

    Args:
        stage: As it is declared.
        changes: The differences from that, as `differing` has returned it.
    """
    needs = dict(stage.needs)
    if stage.cpus is not None:
        needs = {"num_cpus": max(map(len, stage.cpus)), **needs}
    if stage.devices is not None:
        needs = {"num_gpus": max(len(each.split(",")) for each in stage.devices), **needs}
    return {**needs, **{name: n for name, n in changes.items() if name != "workers"}}


def with_changes(stage: Stage, values: Mapping[str, Any]) -> Stage:
    """Return a copy of a stage with other values for some fields, which fit together."""
    there = copy.copy(stage)
    for field, value in values.items():
        object.__setattr__(there, field, value)
    return there


def _ports(ports: Any) -> tuple[int, int]:
    try:
        first, last = ports
    except (TypeError, ValueError):
        raise ValueError(f"ports must be the first and the last one, such as (20000, 20100), not {ports!r}") from None
    if not 0 < at_least("ports", first, 1) <= at_least("ports", last, 1) <= _LARGEST_PORT:
        raise ValueError(f"ports must be the first and the last one, such as (20000, 20100), not {ports!r}")
    return int(first), int(last)
