"""The `Stage` that users declare: checked when it is made, and immutable. Nothing starts here.

Checks of one setting are in `checks.py`; those of settings against one another and against the
model stand below the class.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Literal

from carpool.engine.call.invoke import is_async
from carpool.engine.call.retry import OomErrors
from carpool.engine.forms import Form
from carpool.engine.policy import Adaptive, OneByOne, Policy, PolicyName, StepPolicy, new_policy, new_step_policy
from carpool.engine.policy.base import name_of as name_of_policy
from carpool.engine.type_hints import HintWarning
from carpool.engine.wire.frame import MAX_ITEMS
from carpool.engine.worker.place import (
    VISIBLE_DEVICES,
    Cores,
    Devices,
    count_entries,
    parse_cpus,
    parse_devices,
    share_devices,
)
from carpool.model import AnyModel, Traits, check_kwargs, check_takes_a_list, doubt_about_an_item, name_of, traits_of
from carpool.service.checks import (
    Key,
    Setting,
    check_callable,
    check_is_for_batches,
    check_key,
    check_length,
    check_parts,
    check_policy,
    check_range,
    check_room,
    cluster_needs,
    count_environments,
    environments,
    exceptions,
    flag,
    keep,
    keep_checked,
    mapping,
    numbers_of_workers,
    optional_count,
    optional_delay,
    optional_finite_seconds,
    optional_flag,
    optional_mib,
    optional_seconds,
    optional_text,
    positive_count,
    rising,
    setting,
    shown_as_given,
)

RunIn = Literal["process", "thread", "loop"]


@shown_as_given
@dataclass(frozen=True, slots=True)
class Stage:
    """One step of a service: a model and the workers that run it.

    Args:
        model: A `Model` subclass or any callable. With `max_batch_size`, `predict` takes a list of
            items and returns a sequence of as many results; without it, `predict` takes one item
            and returns one result. A model whose `predict` yields, or that has `start`, `step` and
            `stop` instead, answers in parts ("Answers in parts" in the docs).
        name: The name in errors, logs and metrics. Defaults to the name of the class or function.
        workers: How many workers the stage has, which is also how many batches it can run in
            parallel. Each has a model of its own. Defaults to one for each entry of `cpus`, of an
            `env` that is a list, or of `devices`, or 1. A pair such as (1, 8) stands for the fewest
            and the most: the stage begins with the fewest, and follows the load
            ("Changes while it runs" in the docs). With `join` it may be 0.
        join: Whether further workers may join the stage by themselves (`carpool worker`), from
            other containers, virtual environments or machines. They come and go while the service
            runs, and have their own cores, environment and devices. See "Workers that join"
            in the docs.
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
            effect. See "Ray" in the docs.
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
            ("Lengths and keys" in the docs). `max_batch_size` stays the number of items. It is
            called as `size` is.
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
        policy: A policy object, or the name of one ("Policies" in the docs). Defaults to
            "adaptive", which finds batch size and waiting time by itself. Models that answer in
            parts have "paced" (the default), "greedy" and "static".
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
            ready before the old one goes. None for any number; see "Changes
            while it runs" in the docs.
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
    _: KW_ONLY
    name: Setting[str | None, str] = setting(None, optional_text)
    workers: Setting[int | tuple[int, int] | None, int | tuple[int, int]] = setting(None, from_outside=True)
    join: bool = setting(False, flag)
    cpus: Setting[Sequence[int | Collection[int]] | None, tuple[Cores, ...] | None] = setting(None, from_outside=True)
    run_in: RunIn = "process"
    kwargs: Setting[Mapping[str, Any] | None, Mapping[str, Any]] = setting(None, mapping)
    env: Setting[Mapping[str, str] | Sequence[Mapping[str, str]] | None, tuple[Mapping[str, str], ...]] = setting(
        None, from_outside=True
    )
    devices: Setting[Devices | None, tuple[str, ...] | None] = setting(None, from_outside=True)
    needs: Setting[Mapping[str, Any] | None, Mapping[str, Any]] = setting(None, cluster_needs)
    max_batch_size: int | None = setting(None, optional_count, from_outside=True)
    max_rows: int | None = setting(None, optional_count, from_outside=True)
    allowed_batch_sizes: Setting[Sequence[int] | None, tuple[int, ...] | None] = setting(
        None, rising("[1, 2, 4]"), from_outside=True
    )
    size: Callable[[Any], int] | None = None
    length: Callable[[Any], int] | None = None
    max_padded_size: int | None = setting(None, optional_count)
    allowed_lengths: Setting[Sequence[int] | None, tuple[int, ...] | None] = setting(None, rising("[32, 64, 128]"))
    key: Key | None = None
    max_workers_per_key: int | None = setting(None, optional_count)
    policy: Policy | PolicyName | None = setting(None, from_outside=True)
    max_queue_delay_s: float | None = setting(None, optional_delay, from_outside=True)
    max_queue_size: int = setting(1024, positive_count, from_outside=True)
    max_queue_bytes: int = setting(256 * 2**20, positive_count, from_outside=True)
    max_batch_time_s: float | None = setting(None, optional_seconds, from_outside=True)
    idempotent: bool = setting(True, flag, from_outside=True)
    isolate_errors: Setting[bool | None, bool] = setting(None, optional_flag, from_outside=True)
    max_calls: int | None = setting(None, optional_count)
    max_memory_mb: float | None = setting(None, optional_mib)
    max_age_s: float | None = setting(None, optional_finite_seconds)
    oom_errors: Setting[OomErrors | None, tuple[str, ...] | None] = setting((), exceptions)
    traits: Traits = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._share_among_workers()
        traits = traits_of(self.model, optional_count("max_batch_size", self.max_batch_size) is not None)
        keep(self, "traits", traits)
        keep_checked(self)
        keep(self, "name", self.name or traits.name)
        keep(self, "isolate_errors", self.idempotent if self.isolate_errors is None else self.isolate_errors)
        self._check_model()
        self._check_batches()
        self._check_workers()

    def _share_among_workers(self) -> None:
        """Count the workers, and give each its cores, devices and environment.

        Raises ValueError or TypeError.
        """
        given: Any = self
        workers = _default_workers(given.cpus, given.env, given.devices) if given.workers is None else given.workers
        keep(self, "workers", numbers_of_workers(workers, least=0 if flag("join", self.join) else 1))
        most = self.most_workers
        if given.cpus is not None:
            keep(self, "cpus", parse_cpus(given.cpus, most))
        keep(self, "env", environments(given.env, most))
        if given.devices is not None:
            keep(self, "devices", share_devices(parse_devices(given.devices), most))

    def _check_model(self) -> None:
        traits = self.traits
        check_parts(traits, self.max_batch_size, self.max_rows, self.allowed_batch_sizes, self.policy)
        if self.max_batch_size is not None or traits.form is Form.STEPS:
            why = "with max_batch_size" if self.max_batch_size else "as one of a model of steps"
            check_takes_a_list(self.model, why)
        elif doubt := doubt_about_an_item(self.model):
            warnings.warn(doubt, HintWarning, stacklevel=4)
        check_kwargs(self.model, self.kwargs)
        check_policy(self.policy, in_parts=traits.in_parts)

    def _check_batches(self) -> None:
        most, traits = self.max_batch_size, self.traits
        if self.allowed_batch_sizes is not None:
            _check_allowed_sizes(self.allowed_batch_sizes, most, has_size=self.size is not None)
        if self.size is not None:
            _check_size(self.size, most, traits)
        elif most is not None and not traits.in_parts:
            check_room(most, self.max_queue_size)
        check_length(self.length, self.max_padded_size, self.allowed_lengths, has_size=self.size is not None)
        if self.length is not None:
            check_is_for_batches("length", most, traits)
        if self.key is not None:
            check_key(self.key, most, traits)
        elif self.max_workers_per_key is not None:
            raise ValueError("max_workers_per_key is for stages with keys: give key=, too")
        if self.run_in == "process" and most is not None:
            _check_fits_frame(most, self.max_queue_size, is_weighed=self.size is not None)

    def _check_workers(self) -> None:
        settings = {
            "join": self.join,
            "cpus": self.cpus is not None,
            "env": any(self.env),
            "devices": self.devices is not None,
            "max_memory_mb": self.max_memory_mb is not None,
        }
        _check_run_in(self.run_in, self.model, {name for name, is_given in settings.items() if is_given})
        if self.devices is not None and any(VISIBLE_DEVICES in each for each in self.env):
            raise ValueError(f"devices sets {VISIBLE_DEVICES}, and so does env: leave out one of them")
        check_range(self.workers, self.traits)

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
            count = f"{self.workers[0]} to {self.workers[1]} workers"
        else:
            count = f"{self.workers} worker{'s' if self.workers > 1 else ''}"
        if self.join:
            return f"{count}, and those that join" if self.workers else "workers that join"
        return count

    @property
    def policy_name(self) -> str:
        """The policy's name, as people read it."""
        if self.traits.in_parts:
            return self.policy if isinstance(self.policy, str) else name_of_policy(self.new_step_policy())
        if self.max_batch_size is None:
            return "one by one"
        if isinstance(self.policy, str):
            return self.policy
        return name_of_policy(self.policy or Adaptive())

    def new_policy(self, overload: str = "goodput", slo_s: float | None = None) -> Policy:
        """Make a policy for one run of the stage, with the limits of the stage filled in.

        Args:
            overload: The goal of the service under overload; see `Service`.
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
        """Make a policy for one run of a stage that answers in parts."""
        policy = "static" if self.traits.form is Form.BATCH_GENERATOR else self.policy
        return new_step_policy(policy, self.rows, part_slo_s=part_slo_s, slo_s=slo_s, overload=overload)

    @property
    def rows(self) -> int:
        """How many streams a worker runs at a time, where the model answers in parts."""
        if self.size is not None:
            return self.max_rows or self.max_queue_size
        limits = [limit for limit in (self.max_rows, self.max_batch_size) if limit is not None]
        return min(limits, default=1)


_ONLY_FOR_PROCESSES = {
    "join": "workers that join are processes: a stage with join=True cannot have {run_in}, so leave out one of them",
    "env": 'env is for worker processes: a stage with run_in="thread" or "loop" has the environment of this process',
    "devices": (
        "devices is for worker processes, and workers with {run_in} share what this process sees: choose in the"
        ' model\'s setup, such as f"cuda:{{carpool.worker_index()}}"'
    ),
    "max_memory_mb": "max_memory_mb is for worker processes: workers with {run_in} share the memory of this process",
}
"""Why a setting has no meaning for workers that are threads or tasks of this process."""


def _default_workers(cpus: Any, env: Any, devices: Any) -> int:
    if cpus is not None:
        return count_entries(cpus) or 1
    if devices is not None and count_environments(env) is None:
        return len(parse_devices(devices))
    return count_environments(env) or 1


def _check_run_in(run_in: str, model: AnyModel, given: Collection[str]) -> None:
    """Check where workers run against the model, and against settings that say more of it.

    Raises:
        ValueError: There is no such place, or a setting has no meaning there.
        TypeError: The model cannot run there.
    """
    if run_in not in ("process", "thread", "loop"):
        raise ValueError(f'run_in must be "process", "thread" or "loop", not {run_in!r}')
    if is_async(model) and run_in != "loop":
        raise TypeError(f'{name_of(model)} is async: run it with run_in="loop", or write it with plain def')
    if run_in == "loop" and not is_async(model):
        raise TypeError(
            f'{name_of(model)} is a plain function and would block the loop: run it with run_in="thread", or write it'
            " with async def"
        )
    if run_in != "process":
        for name, why in _ONLY_FOR_PROCESSES.items():
            if name in given:
                raise ValueError(why.format(run_in=f'run_in="{run_in}"'))
    if run_in == "loop" and "cpus" in given:
        raise ValueError(
            'cpus ties processes and threads to cores; a stage with run_in="loop" runs where its loop does'
        )


def _check_fits_frame(max_batch_size: int, max_queue_size: int, *, is_weighed: bool) -> None:
    """Check that one message to a worker process can hold a batch.

    Where batches are limited by the sizes of items, their number is limited by the queue only.
    """
    setting, most = ("max_queue_size", max_queue_size) if is_weighed else ("max_batch_size", max_batch_size)
    if min(max_batch_size, most) > MAX_ITEMS:
        raise ValueError(
            f"{setting} ({most}) must be at most {MAX_ITEMS}, which is what one message to a worker process holds;"
            ' a stage with run_in="thread" has no such limit'
        )


def _check_allowed_sizes(sizes: Sequence[int], max_batch_size: int | None, *, has_size: bool) -> None:
    if max_batch_size is None:
        raise ValueError("allowed_batch_sizes is for stages that take batches: give max_batch_size, too")
    if has_size:
        raise ValueError("allowed_batch_sizes counts items, and size= does not: leave out one of them")
    if sizes[-1] != max_batch_size:
        raise ValueError(f"the last of allowed_batch_sizes ({sizes[-1]}) must be max_batch_size ({max_batch_size})")


def _check_size(size: Callable[[Any], int], max_batch_size: int | None, traits: Traits) -> None:
    check_callable("size", size, "an item")
    if max_batch_size is None:
        raise ValueError("size is for stages that take batches: give max_batch_size, the largest sum of sizes, too")
    if traits.accepts:
        raise ValueError(
            f"size cannot weigh bodies that only {traits.name}.decode can read: leave out size= or accepts"
        )
