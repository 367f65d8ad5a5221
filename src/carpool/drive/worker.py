"""A worker, what it is at work on, and its end, as the pool of its stage sees them."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

from carpool.core.roster import PlaceState
from carpool.wire.frame import Frame
from carpool.wire.handshake import Hello


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
