"""A stage as its user declares it: checked when it is written down, immutable, and nothing starts here."""

from __future__ import annotations

import copy
import inspect
import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from carpool.model import AnyModel, Traits, name_of, traits_of
from carpool.policy import BY_NAME, Greedy, OneByOne, Policy
from carpool.worker import affinity


@dataclass(frozen=True, slots=True, init=False)
class Stage:
    """One step of a service: a model and the workers that run it.

    Args:
        model: a `Model` subclass or any callable. With `max_batch_size`, `predict` takes a list of items and returns
            a sequence of as many results; without it, one item and one result.
        name: defaults to the class or function name.
        workers: worker processes, which is also the limit on batches run in parallel; defaults to `len(cpus)` or 1.
        cpus: per worker the core, or set of cores, that it is tied to; BLAS thread counts are set to match.
        kwargs: for the model's constructor, or for each call of a function.
        env: environment variables for the workers.
        max_batch_size: most items in one call of `predict`.
        policy: a policy object, or the name of one ("greedy", "static"); defaults to "greedy".
        max_queue_delay_s: longest time a request is held back only to fill a batch.
        max_queue_size, max_queue_bytes: bounds of the stage's queue.
        max_batch_time_s: a worker that spends longer in one call is killed; defaults to a third of the service's
            `timeout_s`.
        idempotent: whether a request may be run once more when its worker dies.
        isolate_errors: whether a batch that raises is run again in parts, so that only the guilty items fail;
            defaults to `idempotent`.

    Raises:
        ValueError: a setting is out of range; the text says which and what would do.
        TypeError: `model` is no model.
    """

    model: AnyModel
    name: str
    workers: int
    cpus: tuple[affinity.Cores, ...] | None
    kwargs: Mapping[str, Any]
    env: Mapping[str, str]
    max_batch_size: int | None
    policy: Policy | str | None
    max_queue_delay_s: float | None
    max_queue_size: int
    max_queue_bytes: int
    max_batch_time_s: float | None
    idempotent: bool
    isolate_errors: bool
    traits: Traits = field(repr=False)

    def __init__(
        self,
        model: AnyModel,
        *,
        name: str | None = None,
        workers: int | None = None,
        cpus: Sequence[int | Collection[int]] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        env: Mapping[str, str] | None = None,
        max_batch_size: int | None = None,
        policy: Policy | str | None = None,
        max_queue_delay_s: float | None = None,
        max_queue_size: int = 1024,
        max_queue_bytes: int = 256 * 2**20,
        max_batch_time_s: float | None = None,
        idempotent: bool = True,
        isolate_errors: bool | None = None,
    ) -> None:
        if max_batch_size is not None:
            _at_least("max_batch_size", max_batch_size, 1)
        if workers is None:
            workers = len(cpus) if cpus else 1
        _at_least("workers", workers, 1)
        _at_least("max_queue_size", max_queue_size, 1)
        _at_least("max_queue_bytes", max_queue_bytes, 1)
        if max_batch_size is not None and max_queue_size < max_batch_size:
            raise ValueError(
                f"max_queue_size ({max_queue_size}) is smaller than max_batch_size ({max_batch_size}):"
                " no full batch could ever form"
            )
        _positive("max_batch_time_s", max_batch_time_s)
        if max_queue_delay_s is not None and not max_queue_delay_s >= 0:
            raise ValueError(f"max_queue_delay_s must be 0 or more seconds, not {max_queue_delay_s!r}")
        _check_policy(policy)
        if inspect.iscoroutinefunction(model):
            raise TypeError(f"{name_of(model)} is async: a worker process runs plain functions, one call after another")
        values: dict[str, Any] = {
            "model": model,
            "name": name or name_of(model),
            "workers": workers,
            "cpus": None if cpus is None else affinity.parse_all(cpus, workers),
            "kwargs": dict(kwargs or {}),
            "env": dict(env or {}),
            "max_batch_size": max_batch_size,
            "policy": policy,
            "max_queue_delay_s": max_queue_delay_s,
            "max_queue_size": max_queue_size,
            "max_queue_bytes": max_queue_bytes,
            "max_batch_time_s": max_batch_time_s,
            "idempotent": idempotent,
            "isolate_errors": idempotent if isolate_errors is None else isolate_errors,
            "traits": traits_of(model, max_batch_size is not None),
        }
        for each in fields(self):
            object.__setattr__(self, each.name, values[each.name])

    @property
    def policy_name(self) -> str:
        """The policy's name, for people."""
        if self.max_batch_size is None:
            return "one by one"
        if isinstance(self.policy, str):
            return self.policy
        return type(self.policy or Greedy()).__name__.lower()

    def new_policy(self) -> Policy:
        """A policy of its own for one run of the stage, with the stage's limits filled in."""
        if self.max_batch_size is None:
            return OneByOne()
        policy = self.policy if self.policy is not None else Greedy()
        policy = BY_NAME[policy]() if isinstance(policy, str) else copy.deepcopy(policy)
        if policy.max_batch_size is None or policy.max_batch_size > self.max_batch_size:
            policy.max_batch_size = self.max_batch_size
        if policy.max_queue_delay_s is None:
            policy.max_queue_delay_s = self.max_queue_delay_s
        return policy


def as_stage(stage: Stage | AnyModel) -> Stage:
    """A stage as it is; a bare model as a stage of single items."""
    return stage if isinstance(stage, Stage) else Stage(stage)


def check_chain(stages: Sequence[Stage]) -> None:
    """What must hold between the stages of one service.

    Raises:
        ValueError: there is none, two have one name, or a queue is too small for the batches that come in.
    """
    if not stages:
        raise ValueError("a service needs at least one stage")
    names = [stage.name for stage in stages]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"two stages are called {twice[0]!r}: give one of them another name with name=")
    for before, stage in itertools.pairwise(stages):
        if stage.max_queue_size < (before.max_batch_size or 1):
            raise ValueError(
                f"max_queue_size of stage {stage.name} ({stage.max_queue_size}) is smaller than the batches of"
                f" stage {before.name} before it ({before.max_batch_size})"
            )


def check_seconds(name: str, value: float | None) -> None:
    """A duration that must be positive, where it is given at all."""
    _positive(name, value)


def _check_policy(policy: Policy | str | None) -> None:
    if isinstance(policy, str) and policy not in BY_NAME:
        known = ", ".join(sorted(BY_NAME))
        raise ValueError(f"there is no policy {policy!r}; choose one of {known}, or give a Policy object")
    if policy is not None and not isinstance(policy, str | Policy):
        raise TypeError(f"policy must be a name or a Policy object, not {policy!r}")


def _at_least(name: str, value: int, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name} must be a whole number of at least {least}, not {value!r}")


def _positive(name: str, value: float | None) -> None:
    if value is not None and not value > 0:
        raise ValueError(f"{name} must be a positive number of seconds, not {value!r}")
