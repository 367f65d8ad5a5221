"""What a random program consists of: plain values, which print as Python and can be made smaller one by one.

A program has one subject (a service, or a function with `@carpool.batch`) and a few actors, threads or tasks, who take
their steps side by side.
"""

from __future__ import annotations

from dataclasses import MISSING, dataclass, fields
from typing import Any

KINDS = (
    "Exception",
    "StopIteration",
    "StopAsyncIteration",
    "GeneratorExit",
    "CancelledError",
    "KeyboardInterrupt",
    "SystemExit",
    "MemoryError",
    "RecursionError",
    "Mute",  # its `str` raises
)
"""Of exceptions that foreign code raises; see `models.make`."""


CLIENTS = ("client", "async client")
"""Ways in which a service is served over HTTP and asked by carpool's own clients."""

SHORT_CALL_S = 0.3
"""The time of a client's calls where the server falls silent."""

GRAPHS = ("parallel", "values", "route", "each", "early", "shared")
"""What the stages of a service may be in: branches, those whose errors are values, ways of which an item takes one, a
list; or behind a stage that answers early, or in two branches that have the first of them in common."""

IN_PARTS = ("steps", "resuming", "generator")
"""Models that answer in parts."""


class _Value:
    """Prints itself as the call that makes it, without what is as usual."""

    def __repr__(self) -> str:
        shown = []
        for field in fields(self):  # type: ignore[arg-type]
            value = getattr(self, field.name)
            if field.default is MISSING:
                shown.append(repr(value))
            elif value != field.default:
                shown.append(f"{field.name}={value!r}")
        return f"{type(self).__name__}({', '.join(shown)})"


def _value(kind: type) -> Any:
    return dataclass(frozen=True, repr=False)(kind)


# -- items


@_value
class Item(_Value):
    """What the model is to do besides answering.

    Attributes:
        do: "" for nothing; "raise" fails the call of `predict`, "pre" and "post" the hook of this name, "size" the
            functions that say its size, its length and its key, "dump"
            the pickling of the item and "load" that of the result; "return" returns an exception in the item's place;
            "short" returns too few results; "slow" takes 20 ms and "hang" two seconds; "again", "close" and "stats"
            use the service or function from inside, "round" by way of another function; "die" kills the worker process.
        kind: Of the exception.
        at: The stage that obeys.
    """

    do: str = ""
    kind: str = "Exception"
    at: int = 0


# -- steps


class Step(_Value):
    """What an actor does, and waits for."""


@_value
class Predict(Step):
    """One call of the service or function."""

    item: Item = Item()
    timeout_s: float | None = None
    priority: int = 0


@_value
class Many(Step):
    """`many` of a function; so many calls at once, in a task, or one after the other of a service."""

    items: tuple[Item, ...]


@_value
class Stream(Step):
    """A stream of a service; of a function, `many`.

    Attributes:
        source: "list", "generator", "slow" or "raises"; with "async " before it, an asynchronous one.
        kind: Of the exception that the source raises.
        leave_after: How many answers are taken.
        drops: Whether a client's answers are dropped then, and not closed.
        timeout_s: For how long a server may be silent; only clients are given it.
    """

    items: tuple[Item, ...]
    source: str = "list"
    kind: str = "Exception"
    leave_after: int | None = None
    return_exceptions: bool = False
    max_in_flight: int | None = None
    drops: bool = False
    timeout_s: float | None = None


@_value
class Parts(Step):
    """The answer of a service in parts; only services get it.

    Attributes:
        leave_after: After how many parts the block is left.
        slow: Whether its caller takes 2 ms for each part.
        on_part: Whether the parts are heard by a callback, beside the whole answer.
        drops: Whether a client's parts are dropped when they are left, and not closed.
    """

    item: Item = Item()
    timeout_s: float | None = None
    leave_after: int | None = None
    slow: bool = False
    on_part: bool = False
    drops: bool = False


@_value
class Submit(Step):
    """Take a ticket, for everybody to use; and lead, if nobody does."""

    item: Item = Item()
    lead: bool = False


@_value
class Result(Step):
    """Wait for the result of a ticket that somebody has taken."""

    ticket: int
    timeout_s: float | None = None


@_value
class Cancel(Step):
    """Give up a ticket that somebody has taken."""

    ticket: int


@_value
class Leave(Step):
    """Begin a step and cancel it, in a task; in a thread it is not begun."""

    step: Step
    after_s: float = 0.0


@_value
class Close(Step):
    """Close the service or function; stop the server, if there is one."""

    drain: bool = True


@_value
class HangUp(Step):
    """Close the client that all actors share, or drop it; they have a new one from then on."""

    drops: bool = False


@_value
class Silence(Step):
    """Have the server fall silent, with all connections open, until it is stopped."""


@_value
class Stats(Step):
    """Ask for the statistics; of a server, whether it is ready."""


@_value
class StartAgain(Step):
    """Start a handle that was started before, which must be refused."""


@_value
class Fork(Step):
    """Fork; the child tries `then` ("predict", "stream", "stats", "close" or "nothing") and ends."""

    then: str = "predict"


@_value
class Kill(Step):
    """Kill a worker process from outside."""


@_value
class Change(Step):
    """Have another number of workers in a stage, or new workers in all of them.

    Attributes:
        stage: Which one, by its position.
        workers: How many; 0 for new workers in all stages.
    """

    stage: int = 0
    workers: int = 0


@_value
class Sleep(Step):
    """Do nothing for a while."""

    seconds: float


# -- subjects


@_value
class Stage(_Value):
    """One stage of a service.

    Attributes:
        model: "function" or "class" (with hooks); which of `def` and `async def` depends on `run_in`. Or, as the last
            stage, one that answers in parts: "steps", "resuming" (steps with `resume`) or "generator" (for each item).
        size: Whether items are weighed.
        shapes: Whether items have lengths and keys.
        allowed: Whether there are only some sizes of batches.
        examples: "" for none, "good", or the exception that the model raises for them.
        policy: A name, or "raises KIND" for one that does after a few calls.
        setup, teardown: the exception that the hook of a class raises, if any.
    """

    run_in: str = "thread"
    model: str = "function"
    max_batch_size: int | None = 4
    max_queue_size: int = 1024
    workers: int = 1
    policy: str | None = None
    max_queue_delay_s: float | None = None
    max_batch_time_s: float | None = None
    size: bool = False
    shapes: bool = False
    allowed: bool = False
    examples: str = ""
    isolate_errors: bool | None = None
    setup: str = ""
    teardown: str = ""


@_value
class Service(_Value):
    """A service, for threads or for tasks.

    Attributes:
        way: "run", "start", "run_async", "app" for an ASGI app, or one of `CLIENTS` for a server.
        loop: For tasks and servers, "asyncio" or "uvloop".
        early: Whether the actors do not wait until it has started.
        sink: The exception that `output=` raises, if any.
        abandon: Whether it is dropped without being closed; for tasks, whether the loop ends before it is closed, on
            another one.
        patience_s: After this time the start is cancelled, in a task.
        graph: "" for stages in a row, or one of `GRAPHS`.
        cargo: What items and answers carry that models and callers write over: "list", "array", "large", or "".
    """

    stages: tuple[Stage, ...] = (Stage(),)
    way: str = "run"
    timeout_s: float = 10.0
    slo_s: float | None = None
    loop: str = "asyncio"
    early: bool = False
    sink: str = ""
    abandon: bool = False
    patience_s: float | None = None
    cargo: str = ""
    graph: str = ""


@_value
class Batch(_Value):
    """A function whose callers share its calls.

    Attributes:
        over: "function", "method", "class", "merge" (of lists) or "arrays" (of two dtypes, merged).
        tasks: Whether it is an `async def`.
        loops: How many event loops call it, each in a thread of its own.
        lock: Whether it has an execution lock.
        setup, teardown: the exception that the hook of a class raises, if any.
    """

    over: str = "function"
    tasks: bool = False
    loops: int = 1
    loop: str = "asyncio"
    max_batch_size: int | None = 4
    max_queue_size: int = 1024
    max_in_flight_batches: int = 1
    policy: str | None = None
    max_queue_delay_s: float | None = None
    timeout_s: float | None = None
    slo_s: float | None = None
    size: bool = False
    lock: bool = False
    isolate_errors: bool = False
    setup: str = ""
    teardown: str = ""


@_value
class Actor(_Value):
    """Takes steps one after the other, in a thread or task of its own.

    Attributes:
        loop: Which of the loops, for tasks; -1 for a stranger, who uses the subject on a loop where it is not at home.
    """

    steps: tuple[Step, ...]
    loop: int = 0


@_value
class Program(_Value):
    """A subject and its actors."""

    subject: Service | Batch
    actors: tuple[Actor, ...]

    @property
    def in_tasks(self) -> bool:
        """Whether the actors are tasks."""
        if isinstance(self.subject, Batch):
            return self.subject.tasks
        return self.subject.way in ("run_async", "app", "async client")

    @property
    def has_client(self) -> bool:
        """Whether its service is served, and asked by a client."""
        return isinstance(self.subject, Service) and self.subject.way in CLIENTS

    @property
    def over_http(self) -> bool:
        """Whether its service is an app, served or not."""
        return isinstance(self.subject, Service) and self.subject.way in ("app", *CLIENTS)

    @property
    def client_s(self) -> float:
        """The time of a client's calls."""
        silent = any(isinstance(step, Silence) for step in self.steps)
        return min(self.subject.timeout_s or SHORT_CALL_S, SHORT_CALL_S) if silent else self.subject.timeout_s or 0.0

    @property
    def steps(self) -> list[Step]:
        """Of all actors, those that are begun only to be left, too."""
        found: list[Step] = []
        for actor in self.actors:
            for step in actor.steps:
                found.append(step)
                if isinstance(step, Leave):
                    found.append(step.step)
        return found

    @property
    def items(self) -> list[Item]:
        """The items of all steps."""
        found: list[Item] = []
        for step in self.steps:
            if isinstance(step, Predict | Submit | Parts):
                found.append(step.item)
            elif isinstance(step, Many | Stream):
                found += step.items
        return found

    @property
    def stages(self) -> tuple[Any, ...]:
        """Of the service; the function itself has the settings of one."""
        return self.subject.stages if isinstance(self.subject, Service) else (self.subject,)

    @property
    def in_parts(self) -> bool:
        """Whether its service answers in parts."""
        return isinstance(self.subject, Service) and self.subject.stages[-1].model in IN_PARTS

    @property
    def has_processes(self) -> bool:
        """Whether it starts worker processes."""
        return isinstance(self.subject, Service) and any(stage.run_in == "process" for stage in self.subject.stages)


def listing(program: Program) -> str:
    """The program as a file that Python runs."""
    actors = "".join(
        f"        Actor(({''.join(f'{step!r}, ' for step in actor.steps)})"
        + (f", loop={actor.loop}" if actor.loop else "")
        + "),\n"
        for actor in program.actors
    )
    return (
        "from tests.fuzz.program import *\nfrom tests.fuzz.run import check\n\nif __name__ == '__main__':\n"
        f"    check(Program(\n        {program.subject!r},\n        (\n{actors}        ),\n    ))\n"
    )
