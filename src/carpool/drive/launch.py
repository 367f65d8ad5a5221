"""What is needed to start the workers of one stage, of whatever kind."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from carpool.drive.guard import Guard
from carpool.model import Adapter, AnyModel
from carpool.worker.place import INDEX_VARIABLE, Cores
from carpool.worker.program import Setup


class WarmUpShape(NamedTuple):
    """A call of the warm-up with one example, over and over.

    Attributes:
        example: Its position.
        n: How often it is in the call.
        length: How long it is.
    """

    example: int
    n: int
    length: int


@dataclass(frozen=True, slots=True)
class Launch:
    """What is needed to start the workers of one stage.

    Attributes:
        run_in: "process", "thread" or "loop".
        setup: What each worker gets first; `place` and `cores` are filled in for each.
        model: For workers inside this process; a worker process finds its own by `setup`.
        kwargs: Those of the model, for the same workers.
        adapters: Those of its addresses, for the same workers.
        cores: By the index of a worker, the cores that it runs on; None for those of the parent
            before it was pinned.
        env: By the index of a worker, environment variables to add.
        warm_up: The sum of the sizes of each number of examples that is run at a time.
        guard: Guards the worker processes, if there are any.
        hire: Makes a worker for a place where worker processes run somewhere else; None for this
            machine. It is called like `WorkerProcess`.
        is_idempotent: Whether a request may run once more after its worker was lost.
        warm_up_shapes: What each of the setup's shapes is.
    """

    run_in: str
    setup: Setup
    model: AnyModel
    kwargs: Mapping[str, Any]
    adapters: Sequence[Adapter]
    cores: tuple[Cores | None, ...]
    env: tuple[Mapping[str, str], ...]
    warm_up: Mapping[int, int]
    guard: Guard | None
    is_idempotent: bool
    hire: Callable[..., Any] | None = None
    warm_up_shapes: Sequence[WarmUpShape] = ()

    def cores_of(self, index: int) -> Cores | None:
        """Return the cores of a worker; beyond the workers declared they are shared in turn."""
        return self.cores[index % len(self.cores)]

    def env_of(self, index: int) -> Mapping[str, str]:
        """Return the variables of a worker process, its index among them."""
        return {**self.declared_env_of(index), INDEX_VARIABLE: str(index)}

    def declared_env_of(self, index: int) -> Mapping[str, str]:
        """Return the declared variables of a worker; beyond those declared they repeat in turn."""
        return self.env[index % len(self.env)]
