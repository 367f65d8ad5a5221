"""Pictures of graphs: where things stand, and which figures stand at their lines."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carpool import ForEach, Parallel, Route, Service, Stage
from carpool.engine.core.graph import Graph
from carpool.engine.observe.picture import Dot, picture, places
from carpool.http.app import App
from carpool.service.places import outline
from tests.support import chromium
from tests.support.http import models
from tests.support.http.front import get, post
from tests.support.http.metrics import scrape, value
from tests.support.http.net import Client, RunningServer, serving
from tests.support.properties import PROPERTY
from tests.support.shapes import Made, a_shape, declared
from tests.support.waiting import wait_until


def a_graph(seed: int) -> Graph:
    """A random graph of stages that nobody runs."""
    crews = [SimpleNamespace(name=f"s{i}", queue=SimpleNamespace(max_size=8)) for i in range(4)]
    return Graph(declared(a_shape(Random(seed), [Made()] * 4), crews), None)


def room_of(dot: Dot) -> float:
    """How wide a dot is drawn at least."""
    return 1.0 if dot.node is not None else 0.5


@PROPERTY
@given(st.integers(0, 10**6))
def test_any_graph_can_be_drawn(seed: int) -> None:
    """Each place is drawn once, nothing lies on anything else, and all lines lead to the right."""
    graph = a_graph(seed)
    found = picture(graph)
    assert {dot.node for dot in found.dots if dot.node is not None} == set(graph.nodes)
    assert sum(dot.node is not None for dot in found.dots) == len(graph.nodes)
    for i, dot in enumerate(found.dots):
        assert 0 < dot.x < found.width
        assert 0 < dot.y < found.height
        for other in found.dots[:i]:
            assert abs(dot.y - other.y) >= 1 or abs(dot.x - other.x) >= (room_of(dot) + room_of(other)) / 2 - 1e-9
    for link in found.links:
        assert found.dots[link.begins].x < found.dots[link.ends].x


@PROPERTY
@given(st.integers(0, 10**6))
def test_one_line_comes_to_each_stage(seed: int) -> None:
    """One line comes to each stage and one leaves it, and all that opens is closed, in its order."""
    found = picture(a_graph(seed))
    closes = {"parallel": "join", "route": "merge", "list": "gather", "start": "end"}
    opened = []
    for i, dot in enumerate(found.dots):
        comes, leaves = [sum(link[at] == i for link in found.links) for at in (1, 0)]
        if dot.kind == "stage":
            assert (comes, leaves) == (1, 1)
        elif dot.kind in closes:
            opened.append((dot.kind, leaves))
            assert comes == (dot.kind != "start")
        else:
            kind, left = opened.pop()
            assert closes[kind] == dot.kind
            assert comes == left
            assert leaves == (dot.kind != "end")
    assert not opened


def test_branches_without_stages_run_at_a_height_of_their_own() -> None:
    """A branch that hands its item on is drawn between the others, not through them."""
    found = picture(outline(Service(Parallel(plus, []), name="s").graph))
    (empty,) = [link for link in found.links if link.y is not None]
    (stage,) = [dot for dot in found.dots if dot.kind == "stage"]
    assert abs(stage.y - empty.y) == 1  # type: ignore[operator]


@PROPERTY
@given(st.integers(0, 10**6))
def test_each_place_has_a_name_of_its_own(seed: int) -> None:
    """Places have different names, which end in that of the stage; names of branches stand before it."""
    graph = a_graph(seed)
    found = places(graph)
    assert len({place.name for place in found.values()}) == len(graph.nodes)
    for node, place in found.items():
        assert place.name.partition(" ")[0] == "/".join([*[branch.name for branch in place.branches], node.name])


def spread(x: int) -> list[int]:
    return [x] * 3


def lead(sides: dict[str, int]) -> int:
    return sides["left"]


def side_of(xs: list[int]) -> str:
    return "even" if xs[0] % 2 == 0 else "odd"


def plus(x: int) -> int:
    return x + 1


def first_of(xs: Sequence[int]) -> int:
    return xs[0]


def a_service() -> Service:
    """A service without processes, one stage of which stands in two branches and in a list."""
    shared = Stage(plus, run_in="thread", name="shared")
    return Service(
        Parallel({"left": shared, "right": [shared, Stage(plus, run_in="thread", name="more")]}),
        Stage(lead, run_in="thread", name="lead"),
        Stage(spread, run_in="thread", name="spread"),
        ForEach(shared),
        Route({"even": [], "odd": Stage(first_of, run_in="thread", name="last")}, choose=side_of),
        name="branchy",
    )


@pytest.fixture(scope="module")
def running() -> Iterator[RunningServer]:
    with serving(App(a_service(), models.scale)) as found:
        yield found


def test_a_place_has_figures_of_its_own(running: RunningServer) -> None:
    """The dashboard and /metrics say of each place how many requests came there and waited."""
    with Client(running.port) as client:
        before = service_of(client)
        for x in range(4):
            assert client.ask(post(str(x).encode(), "/models/branchy/predict")).status == 200
        now = service_of(client)
    counts = {}
    for dot, old in zip(now["graph"]["dots"], before["graph"]["dots"], strict=True):
        if dot["kind"] == "stage":
            counts[dot["place"]] = dot["entered"] - old["entered"]
            assert (dot["queued"], dot["running"]) == (0, 0)
            assert now["stages"][dot["stage"]]["name"] == dot["name"]
    assert counts == {
        "left/shared": 4,
        "right/shared": 4,
        "right/more": 4,
        "lead": 4,
        "spread": 4,
        "each/shared": 12,
        "odd/last": 2,
    }
    metrics = scrape(running)
    for place in ("left/shared", "right/shared", "each/shared"):
        found = value(metrics, "carpool_place_queue_duration_seconds", "_count", stage="shared", place=place)
        (dot,) = [each for each in now["graph"]["dots"] if each.get("place") == place]
        assert found == dot["entered"]
        assert value(metrics, "carpool_place_queue_length", stage="shared", place=place) == 0
    whole = value(metrics, "carpool_queue_duration_seconds", "_count", model="branchy", stage="shared")
    assert value(metrics, "carpool_place_queue_duration_seconds", "_count") == whole


def test_a_line_is_not_drawn(running: RunningServer) -> None:
    """A service of stages in a row has no picture, and no metrics of places."""
    with Client(running.port) as client:
        assert [each["graph"] is None for each in figures_of(client)] == [False, True]
    assert value(scrape(running), "carpool_place_queue_length", model="Scale") == 0


def figures_of(client: Client) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(client.ask(get("/dashboard/data")).body)["figures"]["services"]
    return found


def service_of(client: Client) -> dict[str, Any]:
    return next(each for each in figures_of(client) if each["name"] == "branchy")


@pytest.mark.slow
@pytest.mark.skipif(chromium.PATH is None, reason="there is no Chromium")
def test_a_browser_draws_the_graph(tmp_path: Path) -> None:
    """The page shows each stage at each of its places, and how many requests came there, without an
    error.
    """
    with serving(App(a_service())) as running, chromium.run(tmp_path) as tab, Client(running.port) as client:
        tab.prepare("window.__errors = []; addEventListener('error', (e) => window.__errors.push(String(e.message)));")
        tab.open(f"http://127.0.0.1:{running.port}/dashboard")
        shown = "[...document.querySelectorAll('.graph .%s')].map((e) => e.textContent).join()"
        wait_until(lambda: tab.value(shown % "name") == "shared,shared,more,lead,spread,shared,last")
        assert client.ask(post(b"1")).status == 200
        wait_until(lambda: "/s" in tab.value(shown % "load"))
        assert tab.value(shown % "branch") == "left,right,odd,even"
        assert tab.value("window.__errors.join()") == ""
