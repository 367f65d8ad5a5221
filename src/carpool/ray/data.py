"""Offline scoring: the models of a service over a dataset of Ray Data.

Each stage becomes an operator of the dataset with a pool of actors of its own. An actor runs its
stage as a service of one worker, in its own process. So batches, their composition by length, and
the isolation of items that fail are those of any service. Ray moves the rows between operators.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

import ray.data

from carpool.engine.foreign import text_of
from carpool.model import traits_of
from carpool.ray.cluster import check_names, differing, options_of, with_changes
from carpool.service.checks import at_least
from carpool.service.declaration import Declaration
from carpool.service.service import Service
from carpool.service.stage import Stage

_ROWS = 1024  # so many that each batch is chosen among many others

Rows = dict[str, Any]
"""Some rows of a dataset, by column."""


def map_batches(
    dataset: Any,
    what: Declaration | Stage | Any,
    *,
    column: str | None = None,
    output: str = "answer",
    errors: str | None = None,
    rows: int | None = None,
    stages: Mapping[str, Mapping[str, Any]] | None = None,
    **options: Any,
) -> Any:
    """Return a dataset of Ray Data with a column for the answers of a model to its rows.

    Each stage has a pool of up to as many actors as it has workers, and of at least one, or of the
    fewest where `workers` is a pair. Goals and limits in time (`slo_s`, `timeout_s`) do not count,
    since nobody waits.

    Args:
        dataset: The dataset.
        what: A service, a stage or a model.
        column: The column of which the values are the items. Without it an item is a whole row, as
            a dict.
        output: The column for the answers.
        errors: The column for the errors of rows that fail, which have None for an answer; it is
            empty where there is an answer. Without it the first row that fails ends the execution.
        rows: How many rows an actor has before it at a time, among which its batches are composed.
            Defaults to 1024, or the stage's `max_batch_size` if that is more.
        stages: By the name of a stage, what differs from its declaration; see `Cluster`.
        options: Further options of `Dataset.map_batches`, for each stage, such as `memory`.

    Raises:
        ValueError: A setting is out of range, or a stage cannot run there.
        TypeError: A setting is of the wrong kind, or `what` is none of these.
    """
    service = what if isinstance(what, Declaration) else Service(what)
    if rows is not None:
        at_least("rows", rows, 1)
    named = {name: differing(name, each) for name, each in (stages or {}).items()}
    check_names(named, service)
    for stage in service.stages:
        settings = settings_of(stage, named.get(stage.name, {}))
        scorer = type(stage.name, (StageScorer,), {}) if stage.name.isidentifier() else StageScorer
        dataset = dataset.map_batches(
            scorer,
            fn_constructor_args=(_to_send(_alone(stage)), column, output, errors),
            batch_size=rows or max(_ROWS, stage.max_batch_size or 1),
            batch_format="numpy",
            zero_copy_batch=False,  # models may write into what they are given
            **{**settings, **options},
        )
        column = output
    return dataset


class StageScorer:
    """An actor of a dataset: it runs one stage for the rows that it is given.

    Args:
        column: The column of its items; None for whole rows.
        errors: The column for errors; None to raise them.
    """

    def __init__(self, stage: Stage, column: str | None, output: str, errors: str | None) -> None:
        self._column = column
        self._output = output
        self._errors = errors
        self._handle = Service(_as_received(stage), timeout_s=None).start()
        # Its model is torn down when Ray lets go of the actor, or ends its process, in good order.
        weakref.finalize(self, self._handle.close, drain=False)

    def __call__(self, rows: Rows) -> Rows:
        """Return the rows with their answers."""
        items = _items(rows, self._column)
        errors = [""] * len(items) if self._errors is None else _errors_in(rows, self._errors, len(items))
        wanted = [item for item, error in zip(items, errors, strict=True) if not error]
        raises = self._errors is None
        results = self._handle.stream(wanted, max_in_flight=max(1, len(wanted)), return_exceptions=not raises)
        answers: list[Any] = []
        for n, error in enumerate(errors):
            answer: Any = None if error else next(results)
            if isinstance(answer, BaseException):
                answer, errors[n] = None, text_of(answer)
            answers.append(answer)
        added: Rows = {self._output: answers}
        return {**rows, **added} if self._errors is None else {**rows, **added, self._errors: errors}


def settings_of(stage: Stage, changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a stage's operator in Ray's words. Raises ValueError."""
    if any(each != stage.env[0] for each in stage.env):
        raise ValueError(
            f"stage {stage.name} has an env for each of its workers, and the actors of a dataset are alike: give it"
            " one for all"
        )
    workers = changes.get("workers", stage.workers)
    settings = options_of(stage, changes)
    if stage.run_in == "loop":  # whose workers are tasks of one process
        workers = 1
    # All at once could leave no core for reading the dataset, which they then would wait for.
    least, most = workers if isinstance(workers, tuple) else (1, workers)
    settings["compute"] = ray.data.ActorPoolStrategy(min_size=max(least, 1), max_size=max(most, 1))
    if stage.env and stage.env[0]:
        settings["runtime_env"] = {"env_vars": dict(stage.env[0])}
    return settings


def _alone(stage: Stage) -> Stage:
    """Return a stage as an actor runs it: with one worker, in its own process."""
    if stage.run_in == "loop":
        return stage
    own = {"run_in": "thread", "workers": 1, "join": False, "env": ({},), "cpus": None, "devices": None}
    return with_changes(stage, {**own, "max_memory_mb": None})


def _to_send(stage: Stage) -> Stage:
    """Return a stage without the readings of its model's hints, which need not pickle."""
    return with_changes(stage, {"traits": None})


def _as_received(stage: Stage) -> Stage:
    """Return a stage with the readings of its model's hints."""
    return with_changes(stage, {"traits": traits_of(stage.model, stage.max_batch_size is not None)})


def _items(rows: Rows, column: str | None) -> list[Any]:
    if column is None:
        columns = [_values(each) for each in rows.values()]
        return [dict(zip(rows, values, strict=True)) for values in zip(*columns, strict=True)]
    if column not in rows:
        raise ValueError(f"there is no column {column!r} in the dataset: it has {', '.join(rows)}")
    return _values(rows[column])


def _values(column: Any) -> list[Any]:
    """Return the values of a column as Python has them; rows of a larger array stay arrays."""
    values: list[Any] = column.tolist() if column.ndim == 1 else list(column)
    return values


def _errors_in(rows: Rows, errors: str, n: int) -> list[str]:
    return list(map(str, rows[errors])) if errors in rows else [""] * n
