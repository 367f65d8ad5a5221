"""Stages in a row: what a service is made of, and whether each can follow the one before."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from carpool.model import AnyModel
from carpool.service.checks import header_of
from carpool.service.stage import Stage


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
