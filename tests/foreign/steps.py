"""What is asked of services that answer in parts, at each place where they call code that is not ours."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any

import carpool
from tests.foreign.models import bad, good, trip
from tests.foreign.services import failed_by_model, names
from tests.foreign.table import BATCHES, HANDLES, SERVICES, VIRTUAL, WEB, Way, left_out, place
from tests.foreign.ways import AsyncHandleDoor, Told, raised_by, within
from tests.support.kinds import is_of

NO_PARTS = "batched functions and simulated models give whole answers"


class Steps(carpool.Model):
    """Answers with ten times `n` after two steps; items say where it raises."""

    def start(self, xs: list[Any]) -> list[Any]:
        for x in xs:
            trip(x, "start")
        return [[x, 0] for x in xs]

    def resume(self, xs: list[Any], parts: list[list[Any]]) -> list[Any]:
        for x in xs:
            trip(x, "resume")
        return [[x, len(said)] for x, said in zip(xs, parts, strict=True)]

    def step(self, states: list[Any]) -> list[Any]:
        for x, i in states:
            trip(x, "step" if i == 0 else "later step")
            if i and x.get("at") == "resume":
                raise ValueError("so that it is resumed")
        for state in states:
            state[1] += 1
        return [carpool.Last(x) if i == 2 else x for x, i in states]

    def stop(self, state: Any) -> None:
        trip(state[0], "stop")

    def collect(self, parts: list[Any]) -> int:
        trip(parts[0], "collect")
        n: int = 10 * parts[0]["n"]
        return n


class AsyncSteps(Steps):
    async def start(self, xs: list[Any]) -> list[Any]:  # type: ignore[override]
        return super().start(xs)

    async def step(self, states: list[Any]) -> list[Any]:  # type: ignore[override]
        return super().step(states)

    async def stop(self, state: Any) -> None:  # type: ignore[override]
        super().stop(state)

    async def resume(self, xs: list[Any], parts: list[list[Any]]) -> list[Any]:  # type: ignore[override]
        return super().resume(xs, parts)

    async def collect(self, parts: list[Any]) -> int:  # type: ignore[override]
        return super().collect(parts)


class Yielding(carpool.Model):
    def predict(self, x: Any) -> Iterator[int]:  # type: ignore[override]
        yield 10 * x["n"]
        trip(x, "yield")

    def collect(self, parts: list[int]) -> int:
        return parts[-1]


class YieldingLater(carpool.Model):
    async def predict(self, x: Any) -> AsyncIterator[int]:  # type: ignore[override]
        yield 10 * x["n"]
        trip(x, "yield")

    def collect(self, parts: list[int]) -> int:
        return parts[-1]


def steps_of(way: Way) -> Any:
    """The service of steps that all cells of a way share."""
    model = AsyncSteps if way.run_in == "loop" else Steps
    return way.other("steps", lambda: way.service(model, "steps", policy="greedy"))


def generators_of(way: Way) -> Any:
    model = YieldingLater if way.run_in == "loop" else Yielding
    return way.other(
        "generators", lambda: way.service(model, "generators", policy="greedy", max_batch_size=None, max_rows=3)
    )


def one_of_three_streams(door: Any, item: Any) -> Told:
    """How the guilty one ended, whose mates are answered, as is who comes next; no worker was lost."""
    pids = door.pids
    first, guilty, third = door.ask(good(1), item, good(3))
    assert (first.value, third.value) == (10, 30), (first, third)
    assert [told.value for told in door.ask(good(4), good(5), good(6))] == [40, 50, 60]
    assert door.pids == pids
    return guilty  # type: ignore[no-any-return]


@place("`start` of a model of steps", SERVICES)
def start_raises(way: Way, kind: str) -> None:
    failed_by_model(one_of_three_streams(steps_of(way), bad("start", kind)), kind)


@place("`step`", SERVICES)
def step_raises(way: Way, kind: str) -> None:
    failed_by_model(one_of_three_streams(steps_of(way), bad("step", kind)), kind)


@place("`step`", SERVICES, "after a part", kinds=("Exception", "SystemExit", "CancelledError"))
def later_step_raises(way: Way, kind: str) -> None:
    failed_by_model(one_of_three_streams(steps_of(way), bad("later step", kind)), kind)


@place("`resume`", SERVICES)
def resume_raises(way: Way, kind: str) -> None:
    """Alone in its set, a stream is not resumed at all: then it has failed for the step before."""
    told = one_of_three_streams(steps_of(way), bad("resume", kind))
    assert told.code == "model_error", told
    if isinstance(told.error, carpool.ModelError):
        assert told.error.type_name in {*names(kind), "ValueError"}


@place("`stop`", SERVICES)
def stop_raises(way: Way, kind: str) -> None:
    """The answer is whole all the same."""
    guilty = one_of_three_streams(steps_of(way), {**bad("stop", kind), "n": 7})
    assert guilty.value == 70


@place("`collect`", SERVICES)
def collect_raises(way: Way, kind: str) -> None:
    failed_by_model(one_of_three_streams(steps_of(way), bad("collect", kind)), kind)


@place("a `predict` that yields", SERVICES)
def generator_raises(way: Way, kind: str) -> None:
    failed_by_model(one_of_three_streams(generators_of(way), bad("yield", kind)), kind)


@place("callbacks: `on_part`", HANDLES)
def callback_raises(way: Way, kind: str) -> None:
    """Its caller gets the exception itself, and the stream is stopped."""
    door = steps_of(way)

    def predict(item: Any) -> Any:
        if isinstance(door, AsyncHandleDoor):
            return door.loop.wait(lambda: door.handle.predict(item, on_part=hear))
        return within(lambda: door.handle.predict(item, on_part=hear))

    def hear(part: Any) -> None:
        trip(part, "on_part")

    error = raised_by(lambda: predict(bad("on_part", kind)))
    assert is_of(error, kind), error
    assert predict(good(3)) == 30


for name in ("`start` of a model of steps", "`step`", "`resume`", "`stop`", "`collect`", "a `predict` that yields"):
    left_out(name, BATCHES + VIRTUAL, NO_PARTS)
left_out("callbacks: `on_part`", BATCHES + VIRTUAL, NO_PARTS)
left_out("callbacks: `on_part`", WEB, "there are no callbacks over HTTP")
