"""What it takes to start the workers of one stage, of whatever kind."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from carpool.drive.guard import Guard
from carpool.model import AnyModel
from carpool.worker import affinity
from carpool.worker.setup import Setup


@dataclass(frozen=True, slots=True)
class Launch:
    """What is needed to start the workers of one stage.

    Attributes:
        run_in: "process", "thread" or "loop".
        setup: what each is told; `place` and `cores` are filled in for each worker.
        model, kwargs: for workers inside this process; a worker process finds its own by `setup`.
        cores: per worker where it runs; None for "as the parent did before it was pinned".
        env: per worker, environment variables to add.
        warm_up: numbers of examples that are run at a time, and the sum of their sizes.
        guard: told of each worker process, if there are any.
    """

    run_in: str
    setup: Setup
    model: AnyModel
    kwargs: Mapping[str, Any]
    cores: tuple[affinity.Cores | None, ...]
    env: tuple[Mapping[str, str], ...]
    warm_up: Mapping[int, int]
    guard: Guard | None
