"""The `Service` that users declare: stages in a row, declared once and run as often as needed.

What runs a service is imported where one is run. Worker processes import the modules that declare
services, too, and without it they start in half the time, and take 11 MB less each.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Unpack

from carpool.service.declaration import Declaration

if TYPE_CHECKING:
    from carpool.service.handle import AsyncHandle, RunSettings
    from carpool.service.settings import ServerSettings
    from carpool.service.thread_handle import Handle

FRONTS: dict[str, Callable[[], Callable[..., None]]] = {}
"""Imports of the functions that serve services over a protocol, at the first use: Python callers
need no HTTP. `carpool/__init__.py` fills it in, since services do not import the modules that build
on them."""


class Service(Declaration):
    """An immutable declaration of a service; `run`, `run_async` and `start` bring it to life.

    Args:
        stages: The way of a request, first to last: stages, and elements of graphs (lists
            of elements, `Parallel`, `Route`, `ForEach`; docs/graphs.md). A bare model stands for a
            stage of single items. One `Stage` object at several places is one pool of workers.
        name: The model's name over HTTP and in metrics. Defaults to the name of the last stage, or
            to "service" where that is none.
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
        overload: The goal of a policy that plans while more requests come than can be served:
            "goodput" for as many answers within `slo_s` as possible, or "latency" for quick answers
            to those that are served, at the cost of some goodput.
        share: The guarantee of this service where a server has several: half of its
            connections, and of the memory for bodies that are being received, is divided among them
            in proportion to their shares ("Operating" in the docs).
        cpus: The core, or cores, that the coordinator is tied to while the service runs.
        max_parallel_starts: How many workers, of all stages together, may load their models at the
            same time, at the start and after deaths. Defaults to the number of cores available to
            this process, and is at least 2.
        routes: Further addresses for HTTP, each with the function that makes an item of what is
            sent there: `routes={"/classify_url": fetch}`. It runs in the workers of the first
            stage, and its type hint says what a body may be. None stands for the item itself.

    Raises:
        ValueError: A setting of a stage is out of range (see `Stage`), two stages have the same
            name, a queue is too small for the batches of the stage before it, a graph cannot work
            (see docs/graphs.md), or the static policy holds requests back for longer than
            `timeout_s`. An address of `routes` is none, or is one that each service has.
        TypeError: A setting is of the wrong kind, or a model cannot be served (see `Stage`), or by
            the hints a stage cannot take what the one before gives. What `routes` gives for an
            address is no function of one argument that could run in the workers, or takes what
            cannot be sent over HTTP.
    """

    __slots__ = ()

    def run_async(self, **settings: Unpack[RunSettings]) -> AsyncHandle:
        """Return a handle for tasks: `async with service.run_async() as s: await s.predict(x)`.

        The service starts on the running loop when the block is entered, and is closed at its end.

        Args:
            settings: By name; each can be left out:
                `journal_size`, how many events to remember for the handle's `story`; none by
                default.
                `output`, called with each line that a worker prints: the worker's name, whether the
                line went to standard error, and the line. By default it is printed.
                `when_full`, what to do with a request while the queue is full: let it "wait" until
                its time-out, as by default, or "refuse" it with `Overloaded`. The items of `stream`
                always wait.
                `join`, where workers of stages with `join=True` connect: a `Join`, or the path of a
                Unix socket.
                `on`, where worker processes run: "ray", or a `carpool.ray.Cluster`. By default they
                run on this machine.

        Raises:
            ValueError: `journal_size` is not a whole number of at least 0; or `when_full` is
                neither "wait" nor "refuse"; or a stage that needs it lacks `join`, or no stage lets
                workers join; or the service cannot run there.
            TypeError: `output` cannot be called, or there is no such setting.
            ImportError: `on="ray"`, and Ray is not installed.
        """
        from carpool.service.handle import AsyncHandle

        return AsyncHandle(self, settings)

    def run(self, **settings: Unpack[RunSettings]) -> Handle:
        """Return a handle for threads: `with service.run() as s: s.predict(x)`.

        The service starts on a loop in a thread of its own when the block is entered, and is closed
        at its end.

        Args:
            settings: Those of `run_async`.

        Raises:
            ValueError: See `run_async`.
            TypeError: See `run_async`.
            ImportError: See `run_async`.
        """
        from carpool.service.thread_handle import Handle

        return Handle(self, settings)

    def start(self, **settings: Unpack[RunSettings]) -> Handle:
        """Start the service at once and return a handle for threads, which the caller must `close`.

        A service whose handle is dropped without `close` is ended, with a `ResourceWarning`.

        Args:
            settings: Those of `run_async`.

        Raises:
            StartupError: A worker could not load its model or run its examples.
            ValueError: See `run_async`.
            TypeError: See `run_async`.
            ImportError: See `run_async`.
        """
        return self.run(**settings).start()

    def serve(self, **settings: Unpack[ServerSettings]) -> None:
        """Serve this service over HTTP until SIGTERM or Ctrl-C: `service.serve(port=8000)`.

        It is `carpool.serve` for one service; see there for the settings and for what is raised. It
        needs `carpool[serve]`.
        """
        FRONTS["http"]()(self, **settings)
