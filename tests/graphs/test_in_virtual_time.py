"""What graphs do for the time of answers, in virtual time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf
from random import Random
from statistics import mean
from typing import Any

import pytest

from carpool.engine.core.batch import Batch
from carpool.engine.core.batcher import Batcher
from carpool.engine.core.core import Core
from carpool.engine.core.graph import Declared, Fork, Switch
from carpool.engine.core.queue import Queue
from carpool.engine.drive.virtual import VirtualDriver
from carpool.engine.policy import Adaptive, Greedy
from carpool.engine.request import Request
from tests.effort import slow_where

SECONDS = 6.0
Cost = Callable[[int], float]


def crew(name: str, limit: int, room: float = inf, policy: Any = Greedy) -> Batcher:
    return Batcher(name, policy(limit), Queue(room))


class Client:
    """Asks again as soon as it is answered."""

    def __init__(self, driver: VirtualDriver, item: Any, took: list[float]) -> None:
        self.driver, self.item, self.took = driver, item, took
        self.ask()

    def ask(self) -> None:
        self.asked = self.driver.clock.now
        self.driver.submit(self.item, caller=self, patient=True)

    def answered(self, request: Request) -> None:
        assert request.error is None
        self.took.append(self.driver.clock.now - self.asked)
        self.driver.at(self.driver.clock.now, self.ask)


def rates(crews: list[Batcher], graph: Declared, costs: list[Cost], clients: dict[str, int]) -> dict[str, list[float]]:
    """The seconds of each answer within the time, by the item that each client asks for."""
    driver = VirtualDriver(Core(crews, graph), costs)
    took: dict[str, list[float]] = {item: [] for item in clients}
    for item, n in clients.items():
        for _ in range(n):
            Client(driver, item, took[item])
    driver.run(SECONDS)
    return took


def linear(a: float, b: float) -> Cost:
    return lambda n: a + b * n


@pytest.mark.parametrize(
    ("limits", "room", "costs", "clients"),
    [
        ((8, 8, 8), 8, (linear(0.001, 0.0001), linear(0.001, 0.0001), linear(0.01, 0.001)), (40, 40)),
        ((1, 8, 8), 8, (linear(0.0001, 0.0001), linear(0.001, 0.0001), linear(0.01, 0.001)), (40, 40)),
        ((1, 8, 1), 1, (linear(0.0001, 0.0001), linear(0.001, 0.0001), linear(0.005, 0.001)), (40, 40)),
        ((1, 2, 2), 2, (linear(0.0001, 0.0), linear(0.02, 0.0), linear(0.01, 0.0)), (40, 40)),
        ((4, 4, 4), 4, (linear(0.0001, 0.0), linear(0.0001, 0.0), linear(0.01, 0.0)), (200, 2)),
        ((4, 4, 4), 4, (linear(0.0001, 0.0), linear(0.0001, 0.0), linear(0.01, 0.0)), (2, 200)),
        ((1, 4, 1), 1, (linear(0.0001, 0.0), linear(0.0001, 0.0), linear(0.01, 0.0)), (2, 200)),
    ],
)
def test_two_lines_into_one_stage_do_not_starve_each_other(
    limits: tuple[int, ...], room: int, costs: tuple[Cost, ...], clients: tuple[int, int]
) -> None:
    """Each has a quarter of the answers at least, or as many as its few clients can have."""
    a, b = crew("a", limits[0]), crew("b", limits[1])
    last = crew("last", limits[2], room)
    graph = Switch({"a": [a, last], "b": [b, last]}, choose=str)
    took = rates([a, b, last], graph, [*costs], {"a": clients[0], "b": clients[1]})
    n = {item: len(each) for item, each in took.items()}
    for item, asking in zip("ab", clients, strict=True):
        in_turn = asking * SECONDS / mean(took[item]) if took[item] else inf
        assert n[item] >= min(0.25 * sum(n.values()), 0.9 * in_turn), n


def test_branches_answer_in_the_time_of_the_slowest() -> None:
    branches = [crew(name, 1) for name in "abc"]
    took = rates(branches, Fork(branches), [linear(0.02, 0.0), linear(0.005, 0.0), linear(0.02, 0.0)], {"x": 1})
    assert max(took["x"]) < 0.0201


def test_a_cascade_has_several_times_the_rate_of_its_line() -> None:
    """Four in five are answered by the first stage, at a tenth of the cost of the second one."""

    def rate(graph: Callable[[Batcher, Batcher], Declared]) -> int:
        small, large = crew("small", 16), crew("large", 16)
        costs = [linear(0.0, 0.001), linear(0.0, 0.01)]
        items = {f"{'sure' if i % 5 else 'not sure'} {i}": 1 for i in range(200)}
        return sum(map(len, rates([small, large], graph(small, large), costs, items).values()))

    line = rate(lambda small, large: [small, large])
    cascade = rate(lambda small, large: [small, Switch({"not": [large], "sur": []}, choose=lambda item: item[:3])])
    assert cascade > 3 * line


@slow_where(lambda load: load != 0.6)
@pytest.mark.parametrize("load", [0.3, 0.6, 0.9])
def test_adaptive_behind_a_route_is_about_as_quick_as_greedy(load: float) -> None:
    """Arrivals behind a stage come in groups; waiting for more of them costs little."""

    def mean_s(policy: Any) -> float:
        first, de, en = (crew(name, 64, 4096, policy) for name in ("first", "de", "en"))
        route = Switch({"de": de, "en": en}, choose=lambda x: "de" if x < 0.3 else "en")
        core = Core([first, de, en], [first, route])
        took: list[float] = []

        class Watcher:
            def started(self, now: float, batch: Batch, busy_s: float) -> None:
                pass

            def answered(self, now: float, requests: Sequence[Request]) -> None:
                took.extend([now - request.admitted for request in requests if request.admitted > 2.0])

        driver = VirtualDriver(core, lambda batch, now: 0.004 + 0.00025 * len(batch), watcher=Watcher())
        random, at = Random(1), 0.0
        while at < 7.0:
            at += random.expovariate(load * 3200)
            driver.arrive(at, random.random())
        driver.run()
        return mean(took)

    assert mean_s(Adaptive) < 1.06 * mean_s(Greedy)
