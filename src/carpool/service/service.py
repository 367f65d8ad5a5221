"""The `Service` that users declare: stages in a row, declared once and run as often as needed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, Unpack

from carpool.drive.output import LineSink, print_line
from carpool.service.checks import at_least, check_callable, when_full_waits
from carpool.service.declaration import Declaration
from carpool.service.elsewhere import Elsewhere, elsewhere_of
from carpool.service.handle import AsyncHandle, Handle, Whereabouts
from carpool.service.join import Join, join_of
from carpool.settings import SettingsByName

FRONTS: dict[str, Callable[[], Callable[..., None]]] = {}
"""What imports the function that serves services over a protocol, at its first use: Python callers
need no HTTP. `carpool/__init__.py` fills it in, since services do not know the modules that build
on them."""

_SINK_ARGUMENTS = "a worker's name, whether it is an error, and a line"


class Service(Declaration):
    """An immutable declaration of a service; `run`, `run_async` and `start` bring it to life.

    Args:
        stages: What a request passes through, first to last. A bare model stands for a stage of
            single items.
        name: The model's name over HTTP and in metrics. Defaults to the name of the last stage.
        timeout_s: The longest time from a request's arrival to its answer, in seconds. None or
            infinity means no limit; then nothing ends a call that hangs unless its stage has a
            `max_batch_time_s`.
        slo_s: The latency, end to end and in seconds, that requests should be answered within.
            Goodput is counted against it. A policy that plans (adaptive, deadline, cork) serves the
            requests that can be in time and refuses the others early, with `Overloaded` (429). A
            request that was not refused and is late is still answered until `timeout_s`. Other
            policies serve requests in the order in which they are due and refuse none.
        part_slo_s: How far apart the parts of an answer should be, in seconds, where the last
            stage's model answers in parts; `slo_s` then counts to the first part, and `timeout_s`
            bounds each silence of a stream. None for no goal.
        max_stream_s: The longest time of an answer in parts, in seconds. None or infinity means no
            limit.
        overload: What a policy that plans pursues while more requests come than can be served:
            "goodput" for as many answers within `slo_s` as possible, or "latency" for quick answers
            to those that are served, at the cost of some goodput.
        cpus: The core, or cores, that the coordinator is tied to while the service runs.
        max_parallel_starts: How many workers, of all stages together, may load their models at the
            same time, at the start and after deaths. Defaults to the number of cores available to
            this process, and is at least 2.
        routes: Further addresses for HTTP, each with the function that makes an item of what is
            sent there: `routes={"/classify_url": fetch}`. It runs in the workers of the first
            stage, and its type hint says what a body may be. None stands for the item itself.

    Raises:
        ValueError: A setting of a stage is out of range (see `Stage`), two stages have the same
            name, a queue is too small for the batches of the stage before it, or the static policy
            holds requests back for longer than `timeout_s`. An address of `routes` is none, or is
            one that each service has.
        TypeError: A setting is of the wrong kind, or a model cannot be served (see `Stage`). What
            `routes` gives for an address is no function of one argument that could run in the
            workers, or takes what cannot be sent over HTTP.
    """

    __slots__ = ()

    def run_async(
        self,
        *,
        journal_size: int = 0,
        output: LineSink = print_line,
        when_full: Literal["wait", "refuse"] = "wait",
        join: str | Join | None = None,
        on: Literal["ray"] | Elsewhere | None = None,
    ) -> AsyncHandle:
        """Return a handle for tasks: `async with service.run_async() as s: await s.predict(x)`.

        The service starts on the running loop when the block is entered, and is closed at its end.

        Args:
            journal_size: How many events to remember for the handle's `story`; 0 for none.
            output: Called with each line that a worker prints: the worker's name, whether the line
                went to standard error, and the line.
            when_full: What to do with a request while the queue is full: let it "wait" until its
                time-out, or "refuse" it with `Overloaded`. The items of `stream` always wait.
            join: Where workers of stages with `join=True` connect: a `Join`, or the path of a Unix
                socket.
            on: Where worker processes run: "ray", or a `carpool.ray.Cluster`. None for this
                machine.

        Raises:
            ValueError: `journal_size` is not a whole number of at least 0; or `when_full` is
                neither "wait" nor "refuse"; or a stage that needs it lacks `join`, or no stage lets
                workers join; or the service cannot run there.
            TypeError: `output` cannot be called.
            ImportError: `on="ray"`, and Ray is not installed.
        """
        check_callable("output", output, _SINK_ARGUMENTS)
        waits, where = when_full_waits(when_full), self._where(join, on)
        journal_size = at_least("journal_size", journal_size, 0)
        return AsyncHandle(self, journal_size=journal_size, output=output, waits=waits, where=where)

    def run(
        self,
        *,
        journal_size: int = 0,
        output: LineSink = print_line,
        when_full: Literal["wait", "refuse"] = "wait",
        join: str | Join | None = None,
        on: Literal["ray"] | Elsewhere | None = None,
    ) -> Handle:
        """Return a handle for threads: `with service.run() as s: s.predict(x)`.

        The service starts on a loop in a thread of its own when the block is entered, and is closed
        at its end.

        Args:
            journal_size: See `run_async`.
            output: See `run_async`.
            when_full: See `run_async`.
            join: See `run_async`.
            on: See `run_async`.

        Raises:
            ValueError: See `run_async`.
            TypeError: See `run_async`.
        """
        check_callable("output", output, _SINK_ARGUMENTS)
        waits, where = when_full_waits(when_full), self._where(join, on)
        journal_size = at_least("journal_size", journal_size, 0)
        return Handle(self, journal_size=journal_size, output=output, waits=waits, where=where)

    def start(
        self,
        *,
        journal_size: int = 0,
        output: LineSink = print_line,
        when_full: Literal["wait", "refuse"] = "wait",
        join: str | Join | None = None,
        on: Literal["ray"] | Elsewhere | None = None,
    ) -> Handle:
        """Start the service at once and return a handle for threads, which the caller must `close`.

        A service whose handle is dropped without `close` is ended, with a `ResourceWarning`.

        Args:
            journal_size: See `run_async`.
            output: See `run_async`.
            when_full: See `run_async`.
            join: See `run_async`.
            on: See `run_async`.

        Raises:
            StartupError: A worker could not load its model or run its examples.
            ValueError: See `run_async`.
            TypeError: See `run_async`.
        """
        return self.run(journal_size=journal_size, output=output, when_full=when_full, join=join, on=on).start()

    def _where(self, join: str | Join | None, on: Literal["ray"] | Elsewhere | None) -> Whereabouts:
        return Whereabouts(join_of(self, join), elsewhere_of(on))

    def serve(self, **settings: Unpack[SettingsByName]) -> None:
        """Serve this service over HTTP until SIGTERM or Ctrl-C: `service.serve(port=8000)`.

        It is `carpool.serve` for one service; see there for the settings and for what is raised. It
        needs `carpool[serve]`.
        """
        FRONTS["http"]()(self, **settings)
