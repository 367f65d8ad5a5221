"""A service: stages in a row, declared once and run as often as you like."""

from __future__ import annotations

from collections.abc import Collection
from math import inf

from carpool.drive.output import LineSink, print_line
from carpool.model import AnyModel
from carpool.service.handle import AsyncHandle, Handle
from carpool.service.settings import at_least, check_held, check_overload, finite, function, held_s, seconds, text
from carpool.service.stage import Stage, as_stage, check_chain
from carpool.worker import affinity


class Service:
    """An immutable declaration; `run`, `run_async` and `start` bring it to life.

    Args:
        stages: what a request passes through, first to last; a bare model stands for a stage of single items.
        name: the model's name over HTTP and in metrics; defaults to the last stage's.
        timeout_s: longest time from a request's arrival to its answer; None, or infinity, for no limit. Then nothing
            ends a call that hangs unless its stage has a `max_batch_time_s`.
        slo_s: the latency, end to end, that requests should be answered within; goodput is counted against it. A policy
            that plans (adaptive, deadline, cork) serves what can make it and refuses early, with `Overloaded` (429),
            what cannot; what was not refused and is late is still answered until `timeout_s`. Other policies serve
            in the order of what is due, and refuse nothing.
        overload: what a planning policy looks after while more comes than can be served: "goodput", as many answers
            within `slo_s` as possible, or "latency", soon answers for those that are served, at the cost of some
            goodput.
        cpus: the core, or cores, that the coordinator is tied to while the service runs.
        max_parallel_starts: how many workers, of all stages together, may load their models at the same time, at first
            and after deaths; defaults to the number of cores there are for this process, at least 2.

    Raises:
        ValueError: see `Stage`; or two stages have one name, a queue is too small for the batches before it, or the
            static policy holds requests back for longer than `timeout_s`.
        TypeError: see `Stage`.
    """

    def __init__(
        self,
        *stages: Stage | AnyModel,
        name: str | None = None,
        timeout_s: float | None = 30.0,
        slo_s: float | None = None,
        overload: str = "goodput",
        cpus: int | Collection[int] | None = None,
        max_parallel_starts: int | None = None,
    ) -> None:
        self._stages = tuple(as_stage(stage) for stage in stages)
        check_chain(self._stages)
        check_overload(overload)
        if max_parallel_starts is not None:
            max_parallel_starts = at_least("max_parallel_starts", max_parallel_starts, 1)
        self._name = text("name", name) or self._stages[-1].name
        self._timeout_s = inf if timeout_s is None else seconds("timeout_s", timeout_s)
        self._slo_s = finite("slo_s", slo_s)
        check_held(sum(held_s(stage.new_policy()) for stage in self._stages), self._timeout_s)
        self._overload = overload
        self._cpus = None if cpus is None else affinity.parse(cpus)
        self._max_parallel_starts = max_parallel_starts

    def __repr__(self) -> str:
        return f"<Service {self._name}: {' -> '.join(stage.name for stage in self._stages)}>"

    @property
    def stages(self) -> tuple[Stage, ...]:
        """The stages, first to last."""
        return self._stages

    @property
    def name(self) -> str:
        """The model's name over HTTP and in metrics."""
        return self._name

    @property
    def timeout_s(self) -> float:
        """Longest time from a request's arrival to its answer; infinity for no limit."""
        return self._timeout_s

    @property
    def slo_s(self) -> float | None:
        """The latency that requests should be answered within."""
        return self._slo_s

    @property
    def overload(self) -> str:
        """What is looked after while more comes than can be served."""
        return self._overload

    @property
    def cpus(self) -> affinity.Cores | None:
        """Where the coordinator runs."""
        return self._cpus

    @property
    def max_parallel_starts(self) -> int | None:
        """How many workers may load at the same time, if it was said."""
        return self._max_parallel_starts

    def run_async(self, *, journal_size: int = 0, output: LineSink = print_line) -> AsyncHandle:
        """The service on the running loop: `async with service.run_async() as s: await s.predict(x)`.

        Args:
            journal_size: how many events to remember for `story`; 0 for none.
            output: what to do with each line that a worker prints.
        """
        function("output", output, "a worker's name, whether it is an error, and a line")
        return AsyncHandle(self, journal_size=at_least("journal_size", journal_size, 0), output=output)

    def run(self, *, journal_size: int = 0, output: LineSink = print_line) -> Handle:
        """The service on a loop thread of its own: `with service.run() as s: s.predict(x)`.

        Args: see `run_async`.
        """
        function("output", output, "a worker's name, whether it is an error, and a line")
        return Handle(self, journal_size=at_least("journal_size", journal_size, 0), output=output)

    def start(self, *, journal_size: int = 0, output: LineSink = print_line) -> Handle:
        """Like `run`, started at once; the caller must `close` it. One that is dropped is ended, with a warning."""
        return self.run(journal_size=journal_size, output=output).start()
