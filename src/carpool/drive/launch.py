"""What is needed to start the workers of one stage, of whatever kind."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from carpool.drive.guard import Guard
from carpool.model import Adapter, AnyModel
from carpool.worker import affinity
from carpool.worker.setup import Setup


class WarmUpShape(NamedTuple):
    """A call of the warm-up with one example, over and over.

    Attributes:
        example: its position.
        n: how often it is in the call.
        length: how long it is.
    """

    example: int
    n: int
    length: int


@dataclass(frozen=True, slots=True)
class Launch:
    """What is needed to start the workers of one stage.

    Attributes:
        run_in: "process", "thread" or "loop".
        setup: what each worker gets first; `place` and `cores` are filled in for each.
        model: for workers inside this process; a worker process finds its own by `setup`.
        kwargs: those of the model, for the same workers.
        adapters: those of its addresses, for the same workers.
        cores: by place, the cores that it runs on; None for those of the parent before it was
            pinned.
        env: by place, environment variables to add.
        warm_up: the sum of the sizes of each number of examples that is run at a time.
        guard: guards the worker processes, if there are any.
        warm_up_shapes: what each of the setup's shapes is.
    """

    run_in: str
    setup: Setup
    model: AnyModel
    kwargs: Mapping[str, Any]
    adapters: Sequence[Adapter]
    cores: tuple[affinity.Cores | None, ...]
    env: tuple[Mapping[str, str], ...]
    warm_up: Mapping[int, int]
    guard: Guard | None
    warm_up_shapes: Sequence[WarmUpShape] = ()
