"""A worker, what it takes to start one, what it is at work on, and its end, as the pool of its
stage sees them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from carpool.engine.core.roster import PlaceState
from carpool.engine.drive.guard import Guard
from carpool.engine.wire.frame import Frame
from carpool.engine.wire.handshake import Hello
from carpool.engine.worker.place import INDEX_VARIABLE, Cores
from carpool.engine.worker.program import Setup
from carpool.model import Adapter, AnyModel


class Worker(Protocol):
    """One worker as its pool sees it.

    Attributes:
        broke_protocol: Whether it has sent what it must not send; it is ended for that.
        fell_silent: Whether it was lost since nothing was heard of its machine.
        hello: What it has said of itself, if it has come from somewhere else.
    """

    @property
    def broke_protocol(self) -> bool: ...
    @property
    def fell_silent(self) -> bool: ...
    @property
    def hello(self) -> Hello | None: ...

    @property
    def pid(self) -> int | None:
        """The id of its process, if it has one of its own on this machine."""

    @property
    def where(self) -> str:
        """Where it runs, in words for the log; empty for this process."""

    @property
    def has_unread_batch(self) -> bool:
        """Whether the model cannot have seen the batch that the worker was given last."""

    @property
    def send(self) -> Callable[[Frame], None]:
        """Sends it a frame."""

    @property
    def send_ahead(self) -> Callable[[Frame], None] | None:
        """Sends it a large frame while it is busy, as soon as that harms nobody.

        What is sent later waits behind it. None if `send` may do that at once.
        """

    def close_input(self) -> None:
        """Send nothing more: the worker finishes, tears down and ends."""

    def catch_up(self) -> bool:
        """Read what it has sent already, and report whether there was anything."""

    def give_up(self, why: str, on_frame: Callable[[Frame], None]) -> None:
        """End a worker that hangs, soon. What it still sends goes to `on_frame`."""

    def kill(self, why: str = "") -> None:
        """End it at once; where it cannot be ended, have nothing more to do with it."""

    def abandon(self) -> None:
        """End it and let go of everything without the loop, which ends or has ended."""

    async def ended(self) -> None:
        """Wait until it is gone."""


class Work(Protocol):
    """What a worker is at work on: a batch, or a running set.

    Attributes:
        given_up: Why the worker is taken to hang; empty if it is not.
    """

    given_up: str

    @property
    def unwanted_since(self) -> float:
        """When the last of its callers went; infinity if one still waits."""


class Loss(NamedTuple):
    """The end of a worker.

    Attributes:
        place: Its place in its stage.
        label: Its name for the log.
        worker: The worker.
        state: Its state before.
        why: What has become of it, as this process saw it.
        failure: What it has told of its failure itself, with a traceback; empty if nothing.
    """

    place: int
    label: str
    worker: Worker
    state: PlaceState
    why: str
    failure: str

    @property
    def cause(self) -> str:
        """What the log says."""
        return self.failure or self.why


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
    """All that the start of a worker of one stage takes.

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
