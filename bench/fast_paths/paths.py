"""The table of all fast paths: what each stands for, what it gains, and where that is published."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from inspect import iscoroutinefunction
from typing import Any, NamedTuple

from bench.fast_paths import workloads
from bench.fast_paths.workloads import Workload
from carpool.engine.fast_paths import FAST_PATHS

LOADED_LATE = ("batch_function.tasks", "engine.drive.threads", "engine.drive.lending")
for module in LOADED_LATE:
    import_module(f"carpool.{module}")


class Path(NamedTuple):
    """One fast path.

    Attributes:
        name: As `carpool.engine.fast_paths.fast_path` has it.
        stands_for: Its twin, which takes over where it declines.
        workload: Goes by it.
        gain: The processor time of the workload without it, as a multiple of that with it, as
            measured on 28 November 2026, while nothing else ran; 1.00 would be none.
        figure: The heading in docs/benchmarks.md of the figures that show it.
        bytecodes: The same of bytecodes, where the gain in time is below 1.1 and hard to tell from
            none: what it is kept for.
    """

    name: str
    stands_for: str
    workload: Workload
    gain: float
    figure: str
    bytecodes: float | None = None


PATHS = (
    Path("admit_at_once", "Flow._admit, Queue.push", workloads.arrivals, 7.54, "What batching itself costs"),
    Path("alike", "Driver.poll, Flow._admit_at_once", workloads.bulk, 1.05, "Bulk", 1.16),
    Path("answer_at_once", "Transit.sort_out", workloads.arrivals, 1.09, "What batching itself costs", 1.13),
    Path("one_task", "AsyncBatch.many", workloads.tasks, 1.95, "Inside a program"),
    Path("same_loop", "AsyncBatch._driver", workloads.tasks, 1.09, "Inside a program", 1.03),
    Path("lone_call", "LineDriver.join and wait", workloads.a_thread, 6.29, "Inside a program"),
    Path("calls_now", "Invoker.run, Retrier.call", workloads.a_thread, 1.19, "Inside a program"),
    Path("lent_worker", "Driver.submit", workloads.a_caller, 2.45, "Worker processes without HTTP"),
    Path("frames_of_one", "encode, FrameReader._open", workloads.singles, 1.25, "Worker processes without HTTP"),
    Path("frames_of_scalars", "encode, FrameReader._open", workloads.numbers, 1.09, "Worker processes without HTTP"),
    Path("blocks", "parts_of", workloads.rows, 1.77, "Worker processes without HTTP"),
    Path("parts_of_scalars", "parts_of", workloads.parts, 1.81, "Answers in parts"),
    Path("whole_arrays", "BatchAnswerer._answer", workloads.rows, 1.13, "Worker processes without HTTP"),
    Path("items_alike", "BatchAnswerer._decode_each", workloads.numbers, 1.11, "Worker processes without HTTP"),
    Path("results_alike", "BatchAnswerer._write_each", workloads.numbers, 1.37, "Worker processes without HTTP"),
    Path("parts_alike", "Runner._take, StepAnswerer._pack_one", workloads.streams, 1.14, "Answers in parts"),
    Path("known_heads", "RequestReader.feed, App.admit", workloads.http, 1.61, "HTTP"),
    Path("answer_now", "Exchange.tell, AnswerWriter.flush", workloads.http, 1.11, "HTTP", 1.19),
    Path("usual_lines", "BulkItems._take_unusual_lines", workloads.bulk, 1.12, "Bulk", 1.28),
    Path("plain_lines", "entries.of_result", workloads.bulk, 1.05, "Bulk", 1.05),
)


@contextmanager
def counting(name: str) -> Iterator[list[int]]:
    """Give a list that gets, inside the block, a place for each time that a fast path is taken."""
    taken: list[int] = []

    def note(returned: Any, declined: object) -> Any:
        if returned is not declined:
            taken.append(1)
        return returned

    def counted(function: Any, declined: object) -> Any:
        async def call_later(*arguments: Any, **named: Any) -> Any:
            return note(await function(*arguments, **named), declined)

        def call(*arguments: Any, **named: Any) -> Any:
            return note(function(*arguments, **named), declined)

        return call_later if iscoroutinefunction(function) else call

    try:
        for each in FAST_PATHS[name]:
            each.put(counted(each.function, each.declined))
        yield taken
    finally:
        for each in FAST_PATHS[name]:
            each.put(each.function)
