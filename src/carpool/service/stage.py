"""The `Stage` that users declare: checked when it is made, and immutable. Nothing starts here."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from carpool.batch_hints import HintWarning
from carpool.call.invoke import is_async
from carpool.call.oom import OomErrors, names_of
from carpool.forms import Form
from carpool.model import (
    AnyModel,
    Traits,
    check_kwargs,
    check_takes_a_list,
    doubt_about_an_item,
    name_of,
    traits_of,
)
from carpool.policy import Adaptive, OneByOne, Policy, PolicyName, StepPolicy, new_policy, new_step_policy
from carpool.service.checks import (
    at_least,
    check_callable,
    check_length,
    check_parts,
    check_policy,
    check_range,
    check_room,
    cluster_needs,
    count_environments,
    environments,
    flag,
    mapping,
    numbers_of_workers,
    optional_delay,
    optional_finite_seconds,
    optional_mib,
    optional_seconds,
    optional_text,
    valid_batch_sizes,
    valid_lengths,
)
from carpool.wire.frame import MAX_ITEMS
from carpool.worker import affinity
from carpool.worker.devices import VISIBLE_DEVICES, Devices, parse_devices, share_devices

RunIn = Literal["process", "thread", "loop"]

Key = Callable[[Any], Any] | str
"""What requests must have in common to share a batch: a function of an item, the name of a field of
it, or `header:` and the name of an HTTP header."""

_HEADER = "header:"


@dataclass(frozen=True, slots=True, init=False)
class Stage:
    """One step of a service: a model and the workers that run it.

    Args:
        model: A `Model` subclass or any callable. With `max_batch_size`, `predict` takes a list of
            items and returns a sequence of as many results; without it, `predict` takes one item
            and returns one result. A model whose `predict` yields, or that has `start`, `step` and
            `stop` instead, answers in parts (docs/streaming.md).
        name: The name in errors, logs and metrics. Defaults to the name of the class or function.
        workers: How many workers the stage has, which is also how many batches it can run in
            parallel. Each has a model of its own. Defaults to one for each entry of `cpus`, of an
            `env` that is a list, or of `devices`, or 1. A pair such as (1, 8) stands for the fewest
            and the most: the stage begins with the fewest, and follows the load (docs/changes.md).
            With `join` it may be 0.
        join: Whether further workers may join the stage by themselves (`carpool worker`), from
            other containers, virtual environments or machines. They come and go while the service
            runs, and have their own cores, environment and devices. See docs/join.md.
        cpus: For each worker the core, or set of cores, that it is tied to. Unless you set
            `OMP_NUM_THREADS` yourself, the worker also gets as many BLAS threads as cores.
        run_in: "process" for worker processes; "thread" for threads of this process, for models
            that release the GIL while they work; "loop" for `async def` models, on the
            coordinator's event loop.
        kwargs: Arguments for the model's constructor, or for each call if the model is a function.
        env: Environment variables for the worker processes: one mapping for all of them, or a list
            with one for each (the attribute always is the latter). If `OMP_NUM_THREADS` is among
            them, or exported, it is the number of BLAS threads; otherwise the workers of the
            service share the cores. `CARPOOL_WORKER` and `CARPOOL_WORKERS` are set besides: the
            worker's index, and how many workers the stage has at most.
        devices: The GPUs of the worker processes: how many there are, or a list with a device for
            each (`"cuda:0"`, 0 or a UUID), or a list of devices. `CUDA_VISIBLE_DEVICES` is set
            accordingly before a worker imports anything, so the model finds its GPU as "cuda".
            Workers share the devices in turn if there are more of them. Numbers count what this
            process sees when the service starts. (The attribute has one entry for each worker, or
            is None.)
        needs: What a worker needs on a Ray cluster, in Ray's own words: `{"num_gpus": 0.5}`. It may
            have `num_cpus` (1 if you do not say), `num_gpus`, `memory`, `accelerator_type`,
            `resources`, `label_selector` and `scheduling_strategy`. On one machine it has no
            effect. See docs/ray.md.
        max_batch_size: The largest number of items in one call of `predict`; with `size`, the
            largest sum of their sizes. An item that is larger by itself goes alone. None for calls
            with single items. Of a model that answers in parts it is how many streams a worker
            runs at a time; with `size`, the largest sum of what they may come to hold.
        max_rows: How many streams a worker of a model that answers in parts runs at a time.
            Defaults to `max_batch_size`; where `size` is given, to `max_queue_size`. Without either
            a generator for each item runs alone.
        allowed_batch_sizes: The only numbers of items that `predict` is called with, rising, the
            last one being `max_batch_size`. Smaller batches are padded with their last item, and
            the surplus results are dropped. For models that are compiled or tuned for each shape.
        size: A function that returns how much of a batch an item takes up (rows, tokens, pixels):
            a whole number of at least 1; 0 counts as 1. It gets the item as the stage does, before
            `preprocess`. It runs in the coordinator, which opens items for nothing else but
            `length` and `key`.
        length: A function that returns how long an item is (tokens, frames, pixels), where a call
            costs as much as if all of its items were as long as the longest: a whole number of at
            least 1; 0 counts as 1. Batches are then composed of items of about the same length
            (docs/lengths.md). `max_batch_size` stays the number of items. It is called as `size`
            is.
        max_padded_size: The largest product of a call's number of items and its longest length. An
            item that is longer by itself goes alone.
        allowed_lengths: The only lengths that `predict` pads its items to, rising, where it is
            compiled for each shape. carpool composes and counts by them; the padding itself, and
            the cutting of items that are longer than the last, is the model's.
        key: Only items with the same key share a call: a function of an item that returns text, a
            number, None or a tuple of these; or the name of an item's field, which is None where
            an item has none; or "header:" and the name of an HTTP header, which is None for callers
            in Python. It is called as `size` is.
        max_workers_per_key: The largest number of workers that run items of one key at a time.
        policy: A policy object, or the name of one (docs/policies.md). Defaults to "adaptive",
            which finds batch size and waiting time by itself. Models that answer in parts have
            "paced" (the default), "greedy" and "static".
        max_queue_delay_s: The longest time in seconds that a request is held back only to fill a
            batch. None leaves it to the policy.
        max_queue_size: The largest number of requests in the stage's queue.
        max_queue_bytes: The largest sum of the sizes of the requests in the stage's queue, in
            bytes.
        max_batch_time_s: The longest time of one call, in seconds. A worker that takes longer is
            replaced: a process is killed, a thread is left to itself. If it is None, a call may go
            on as long as a caller waits for it. It is given up when no caller has waited for a
            third of the service's `timeout_s`; sooner only if it has run that long and ten times as
            long as such batches take.
        idempotent: Whether a request may be run once more when its worker dies.
        isolate_errors: Whether a batch that raises is run again in parts, so that only the guilty
            items fail. Defaults to `idempotent`.
        max_calls: After how many calls of the model a worker is replaced by a fresh one, which is
            ready before the old one goes. None for any number; see docs/changes.md.
        max_memory_mb: The same for the memory of a worker process, in MiB.
        max_age_s: The same for the time since a worker was ready, in seconds.
        oom_errors: Exception classes, or their full names, that mean "out of memory", besides
            MemoryError and torch's. A batch that raises one is run again in smaller calls, and
            later batches are smaller. (If `idempotent` and `isolate_errors` are both False it
            fails, and only later batches are smaller.) None: running out of memory is like any
            other error.

    Raises:
        ValueError: A setting is out of range; the text says which one and what would be right.
        TypeError: `model` is not a model or cannot be served, or a setting is of the wrong kind.
    """

    model: AnyModel
    name: str
    workers: int | tuple[int, int]
    join: bool
    cpus: tuple[affinity.Cores, ...] | None
    run_in: RunIn
    kwargs: Mapping[str, Any]
    env: tuple[Mapping[str, str], ...]
    devices: tuple[str, ...] | None
    needs: Mapping[str, Any]
    max_batch_size: int | None
    max_rows: int | None
    allowed_batch_sizes: tuple[int, ...] | None
    size: Callable[[Any], int] | None
    length: Callable[[Any], int] | None
    max_padded_size: int | None
    allowed_lengths: tuple[int, ...] | None
    key: Key | None
    max_workers_per_key: int | None
    policy: Policy | PolicyName | None
    max_queue_delay_s: float | None
    max_queue_size: int
    max_queue_bytes: int
    max_batch_time_s: float | None
    idempotent: bool
    isolate_errors: bool
    max_calls: int | None
    max_memory_mb: float | None
    max_age_s: float | None
    oom_errors: tuple[str, ...] | None
    traits: Traits = field(repr=False)

    def __init__(
        self,
        model: AnyModel,
        *,
        name: str | None = None,
        workers: int | tuple[int, int] | None = None,
        join: bool = False,
        cpus: Sequence[int | Collection[int]] | None = None,
        run_in: RunIn = "process",
        kwargs: Mapping[str, Any] | None = None,
        env: Mapping[str, str] | Sequence[Mapping[str, str]] | None = None,
        devices: Devices | None = None,
        needs: Mapping[str, Any] | None = None,
        max_batch_size: int | None = None,
        max_rows: int | None = None,
        allowed_batch_sizes: Sequence[int] | None = None,
        size: Callable[[Any], int] | None = None,
        length: Callable[[Any], int] | None = None,
        max_padded_size: int | None = None,
        allowed_lengths: Sequence[int] | None = None,
        key: Key | None = None,
        max_workers_per_key: int | None = None,
        policy: Policy | PolicyName | None = None,
        max_queue_delay_s: float | None = None,
        max_queue_size: int = 1024,
        max_queue_bytes: int = 256 * 2**20,
        max_batch_time_s: float | None = None,
        idempotent: bool = True,
        isolate_errors: bool | None = None,
        max_calls: int | None = None,
        max_memory_mb: float | None = None,
        max_age_s: float | None = None,
        oom_errors: OomErrors | None = (),
    ) -> None:
        if max_batch_size is not None:
            max_batch_size = at_least("max_batch_size", max_batch_size, 1)
        if workers is None:
            workers = _default_workers(cpus, env, devices)
        flag("join", join)
        workers = numbers_of_workers(workers, least=0 if join else 1)
        most = workers if isinstance(workers, int) else workers[1]
        max_queue_size = at_least("max_queue_size", max_queue_size, 1)
        max_queue_bytes = at_least("max_queue_bytes", max_queue_bytes, 1)
        traits = traits_of(model, max_batch_size is not None)
        if max_rows is not None:
            max_rows = at_least("max_rows", max_rows, 1)
        check_parts(traits, max_batch_size, max_rows, allowed_batch_sizes, policy)
        if max_batch_size is not None or traits.form is Form.STEPS:
            check_takes_a_list(model, "with max_batch_size" if max_batch_size else "as one of a model of steps")
        elif doubt := doubt_about_an_item(model):
            warnings.warn(doubt, HintWarning, stacklevel=2)
        kwargs, env = mapping("kwargs", kwargs), environments(env, most)
        needs = cluster_needs("needs", needs)
        check_kwargs(model, kwargs)
        if allowed_batch_sizes is not None:
            allowed_batch_sizes = _allowed_sizes(allowed_batch_sizes, max_batch_size, size)
        if size is not None:
            _check_size(size, max_batch_size, traits)
        elif max_batch_size is not None and not traits.in_parts:
            check_room(max_batch_size, max_queue_size)
        check_length(length, max_padded_size, allowed_lengths, has_size=size is not None)
        if length is not None:
            _check_is_for_batches("length", max_batch_size, traits)
        if max_padded_size is not None:
            max_padded_size = at_least("max_padded_size", max_padded_size, 1)
        if allowed_lengths is not None:
            allowed_lengths = valid_lengths(allowed_lengths)
        if key is not None:
            _check_key(key, max_batch_size, traits)
        if max_workers_per_key is not None:
            max_workers_per_key = _workers_per_key(max_workers_per_key, key)
        pinned, has_devices = cpus is not None, devices is not None
        _check_run_in(run_in, model, joins=join, is_pinned=pinned, has_env=any(env), has_devices=has_devices)
        if run_in == "process" and max_batch_size is not None:
            _check_fits_frame(max_batch_size, max_queue_size, is_weighed=size is not None)
        check_policy(policy, in_parts=traits.in_parts)
        flag("idempotent", idempotent)
        name = optional_text("name", name) or traits.name
        cpus = None if cpus is None else affinity.parse_all(cpus, most)
        devices = None if devices is None else _devices(devices, most, env)
        max_queue_delay_s = optional_delay("max_queue_delay_s", max_queue_delay_s)
        max_batch_time_s = optional_seconds("max_batch_time_s", max_batch_time_s)
        isolate_errors = idempotent if isolate_errors is None else flag("isolate_errors", isolate_errors)
        oom_errors = None if oom_errors is None else names_of(oom_errors)
        max_calls = None if max_calls is None else at_least("max_calls", max_calls, 1)
        max_memory_mb, max_age_s = optional_mib(max_memory_mb, run_in), optional_finite_seconds("max_age_s", max_age_s)
        check_range(workers, traits)
        checked = locals()  # by now each field has a local variable of its name
        for each in fields(self):
            object.__setattr__(self, each.name, checked[each.name])

    @property
    def least_workers(self) -> int:
        """How many workers it has at first, and at least while it follows the load."""
        return self.workers if isinstance(self.workers, int) else self.workers[0]

    @property
    def most_workers(self) -> int:
        """How many workers it has at most."""
        return self.workers if isinstance(self.workers, int) else self.workers[1]

    @property
    def workers_in_short(self) -> str:
        """How many workers it has, for people."""
        if isinstance(self.workers, tuple):
            return f"{self.workers[0]} to {self.workers[1]} workers"
        return f"{self.workers} worker{'s' if self.workers > 1 else ''}"

    @property
    def policy_name(self) -> str:
        """The policy's name, as people read it."""
        if self.traits.in_parts:
            return self.policy if isinstance(self.policy, str) else type(self.new_step_policy()).__name__.lower()
        if self.max_batch_size is None:
            return "one by one"
        if isinstance(self.policy, str):
            return self.policy
        return type(self.policy or Adaptive()).__name__.lower()

    def new_policy(self, overload: str = "goodput", slo_s: float | None = None) -> Policy:
        """Make a policy for one run of the stage, with the limits of the stage filled in.

        Args:
            overload: What the service pursues under overload; see `Service`.
            slo_s: The latency that the service promises, in seconds, if it does.
        """
        if self.max_batch_size is None:
            return OneByOne()
        return new_policy(
            self.policy,
            self.max_batch_size,
            max_queue_delay_s=self.max_queue_delay_s,
            allowed_batch_sizes=self.allowed_batch_sizes,
            max_padded_size=self.max_padded_size,
            allowed_lengths=self.allowed_lengths,
            overload=overload,
            slo_s=slo_s,
        )

    def new_step_policy(
        self, part_slo_s: float | None = None, slo_s: float | None = None, overload: str = "goodput"
    ) -> StepPolicy:
        """Make a policy for one run of a stage that answers in parts.

        Args:
            part_slo_s: How far apart the parts of an answer should be, in seconds.
            slo_s: How soon the first part should be there, in seconds.
            overload: What the service pursues under overload; see `Service`.
        """
        policy = "static" if self.traits.form is Form.BATCH_GENERATOR else self.policy
        return new_step_policy(policy, self.rows, part_slo_s=part_slo_s, slo_s=slo_s, overload=overload)

    @property
    def rows(self) -> int:
        """How many streams a worker runs at a time, where the model answers in parts."""
        if self.size is not None:
            return self.max_rows or self.max_queue_size
        limits = [limit for limit in (self.max_rows, self.max_batch_size) if limit is not None]
        return min(limits, default=1)


def _default_workers(cpus: Any, env: Any, devices: Any) -> int:
    """Return how many workers the settings suggest that have an entry for each."""
    if cpus is not None:
        return affinity.count_entries(cpus) or 1
    if devices is not None and count_environments(env) is None:
        return len(parse_devices(devices))
    return count_environments(env) or 1


def _devices(devices: Any, workers: int, env: Sequence[Mapping[str, str]]) -> tuple[str, ...]:
    """Return the devices of each worker. Raises ValueError or TypeError."""
    if any(VISIBLE_DEVICES in each for each in env):
        raise ValueError(f"devices sets {VISIBLE_DEVICES}, and so does env: leave out one of them")
    return share_devices(parse_devices(devices), workers)


def _check_run_in(
    run_in: str, model: AnyModel, *, joins: bool, is_pinned: bool, has_env: bool, has_devices: bool
) -> None:
    if run_in not in ("process", "thread", "loop"):
        raise ValueError(f'run_in must be "process", "thread" or "loop", not {run_in!r}')
    if is_async(model) and run_in != "loop":
        raise TypeError(f'{name_of(model)} is async: run it with run_in="loop", or write it with plain def')
    if run_in == "loop" and not is_async(model):
        raise TypeError(
            f'{name_of(model)} is a plain function and would block the loop: run it with run_in="thread", or write it'
            " with async def"
        )
    if run_in != "process" and joins:
        raise ValueError(
            f'workers that join are processes: a stage with join=True cannot have run_in="{run_in}", so leave out one'
            " of them"
        )
    if run_in == "loop" and is_pinned:
        raise ValueError(
            'cpus ties processes and threads to cores; a stage with run_in="loop" runs where its loop does'
        )
    if run_in != "process" and has_env:
        raise ValueError(
            'env is for worker processes: a stage with run_in="thread" or "loop" has the environment of this process'
        )
    if run_in != "process" and has_devices:
        raise ValueError(
            f'devices is for worker processes, and workers with run_in="{run_in}" share what this process sees: choose'
            ' in the model\'s setup, such as f"cuda:{carpool.worker_index()}"'
        )


def _check_fits_frame(max_batch_size: int, max_queue_size: int, is_weighed: bool) -> None:
    """Check that one message to a worker process can hold a batch.

    Where batches are limited by the sizes of items, their number is limited by the queue only.
    """
    setting, most = ("max_queue_size", max_queue_size) if is_weighed else ("max_batch_size", max_batch_size)
    if min(max_batch_size, most) > MAX_ITEMS:
        raise ValueError(
            f"{setting} ({most}) must be at most {MAX_ITEMS}, which is what one message to a worker process holds;"
            ' a stage with run_in="thread" has no such limit'
        )


def _allowed_sizes(
    allowed_batch_sizes: Sequence[int], max_batch_size: int | None, size: Callable[[Any], int] | None
) -> tuple[int, ...]:
    if max_batch_size is None:
        raise ValueError("allowed_batch_sizes is for stages that take batches: give max_batch_size, too")
    if size is not None:
        raise ValueError("allowed_batch_sizes counts items, and size= does not: leave out one of them")
    return valid_batch_sizes(allowed_batch_sizes, max_batch_size)


def _check_size(size: Callable[[Any], int], max_batch_size: int | None, traits: Traits) -> None:
    check_callable("size", size, "an item")
    if max_batch_size is None:
        raise ValueError("size is for stages that take batches: give max_batch_size, the largest sum of sizes, too")
    if traits.accepts:
        raise ValueError(
            f"size cannot weigh bodies that only {traits.name}.decode can read: leave out size= or accepts"
        )


def _check_is_for_batches(setting: str, max_batch_size: int | None, traits: Traits) -> None:
    """Check that a setting which looks at items, and says which share a batch, can be used."""
    if max_batch_size is None:
        raise ValueError(f"{setting} is for stages that take batches: give max_batch_size, too")
    if traits.in_parts:
        raise ValueError(f"{setting} is for whole batches, and {traits.name} answers in parts: leave it out")
    if traits.accepts:
        raise ValueError(
            f"{setting} cannot look at bodies that only {traits.name}.decode can read: leave out {setting}= or accepts"
        )


def _check_key(key: Any, max_batch_size: int | None, traits: Traits) -> None:
    if not isinstance(key, str):
        check_callable("key", key, "an item")
    elif not key.removeprefix(_HEADER):
        raise ValueError(f'key must name a field of the items, or a header as in "header:X-Adapter", not {key!r}')
    elif header_of(key) is not None:
        if max_batch_size is None or traits.in_parts:
            raise ValueError("key is for stages that take whole batches: give max_batch_size, or leave it out")
        return
    _check_is_for_batches("key", max_batch_size, traits)


def _workers_per_key(value: Any, key: Any) -> int:
    if key is None:
        raise ValueError("max_workers_per_key is for stages with keys: give key=, too")
    return at_least("max_workers_per_key", value, 1)


def header_of(key: Any) -> bytes | None:
    """Return the name, in lower case, of the header that a `key=` reads; None if it reads none."""
    if not isinstance(key, str) or not key.startswith(_HEADER):
        return None
    return key.removeprefix(_HEADER).strip().lower().encode("latin-1")


def as_stage(stage: Stage | AnyModel) -> Stage:
    """Return a stage as it is, and a bare model as a stage of single items."""
    return stage if isinstance(stage, Stage) else Stage(stage)


def check_chain(stages: Sequence[Stage]) -> None:
    """Check that stages can follow one another in one service.

    Raises:
        ValueError: There is no stage, two have the same name, or a queue is too small for the
            batches of the stage before it.
    """
    if not stages:
        raise ValueError("a service needs at least one stage")
    for stage in stages[:-1]:
        if stage.traits.in_parts:
            raise ValueError(
                f"stage {stage.name} answers in parts, so it must be the last of its service: do what follows it in"
                f" postprocess of {stage.traits.name}, which gets each part"
            )
    names = [stage.name for stage in stages]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"two stages are called {twice[0]!r}: give one of them another name with name=")
    for stage in stages[1:]:
        if header_of(stage.key) is not None:
            raise ValueError(f"key of stage {stage.name} is a header, which only the first stage can see")
    for before, stage in itertools.pairwise(stages):
        if before.size is None and stage.max_queue_size < (before.max_batch_size or 1):
            raise ValueError(
                f"max_queue_size of stage {stage.name} ({stage.max_queue_size}) is smaller than the batches of"
                f" stage {before.name} before it ({before.max_batch_size})"
            )
