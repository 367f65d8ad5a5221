"""Answers in parts, in graphs: at the end of a service they are streamed, and in a branch they are collected."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest

import carpool
from carpool import Done, Model, Parallel, Route, Service, Stage
from tests.graphs.models import as_it_is, parity, plus_one
from tests.graphs.over_http import asked


class CountsUp(Model):
    def predict(self, x: int) -> Iterator[int]:
        yield from range(x)


class Each(Model):
    def predict(self, xs: tuple[int, int]) -> Iterator[int]:
        yield from xs


class Steps(Model):
    """Counts to each item, a step at a time."""

    def start(self, xs: list[int]) -> list[list[int]]:
        return [[x, 0] for x in xs]

    def step(self, states: list[list[int]]) -> list[Any]:
        said: list[Any] = []
        for state in states:
            state[1] += 1
            said.append(carpool.Last(state[1]) if state[1] >= state[0] else state[1])
        return said

    def stop(self, state: list[int]) -> None:
        pass


def zero_is_early(x: int) -> Any:
    return Done([7]) if x == 0 else x


@pytest.mark.parametrize("run_in", ["thread", "process"])
def test_a_branch_that_answers_in_parts_is_collected(run_in: Any) -> None:
    steps = Stage(Steps, run_in=run_in, max_rows=4)
    service = Service(
        Parallel({"a": steps, "b": [Stage(plus_one, run_in=run_in), Stage(CountsUp, run_in=run_in)], "c": steps}),
        Stage(as_it_is, run_in=run_in),
    )
    with service.run() as s:
        assert list(s.stream(range(1, 9))) == [
            {"a": [*range(1, x + 1)], "b": [*range(x + 1)], "c": [*range(1, x + 1)]} for x in range(1, 9)
        ]


@pytest.mark.parametrize("run_in", ["thread", "process"])
def test_the_last_stage_streams_behind_a_join(run_in: Any) -> None:
    service = Service(Parallel(Stage(plus_one, run_in=run_in), []), Stage(Each, run_in=run_in))
    with service.run() as s:
        assert s.predict(3) == [4, 3]
        with s.predict_stream(3) as parts:
            assert list(parts) == [4, 3]


def test_a_route_at_the_end_collects() -> None:
    ways = {"even": Stage(CountsUp, run_in="thread"), "odd": []}
    with Service(Route(ways, choose=parity)).run() as s:  # type: ignore[arg-type]
        assert (s.predict(2), s.predict(3)) == ([0, 1], 3)


def test_an_early_answer_is_one_part() -> None:
    service = Service(Stage(zero_is_early, run_in="thread"), Stage(CountsUp, run_in="thread"))
    with service.run() as s:
        assert (s.predict(2), s.predict(0)) == ([0, 1], [7])
        for x, parts in ((2, [0, 1]), (0, [[7]])):
            with s.predict_stream(x) as taken:
                assert list(taken) == parts

    async def main() -> None:
        async with asked(service) as client:
            headers = {"accept": "application/x-ndjson"}
            for x, parts in ((2, [0, 1]), (0, [[7]])):
                assert (await client.post("/predict", json=x)).json() == ([0, 1] if x else [7])
                lines = (await client.post("/predict", json=x, headers=headers)).text.splitlines()
                assert [json.loads(line)["part"] for line in lines[:-1]] == parts
                assert json.loads(lines[-1]) == {"end": {"parts": len(parts)}}

    asyncio.run(main())
