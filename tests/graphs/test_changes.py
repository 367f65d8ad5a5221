"""Graphs whose workers change: more and fewer of them, new ones, and some that join and are killed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import carpool
from carpool import ForEach, Parallel, Route, Service, Stage, StartupError
from tests.effort import slow_where
from tests.graphs.models import as_it_is
from tests.support import joining
from tests.support.changing import Callers, Pid, Versioned
from tests.support.joining import joined, wait_for_workers
from tests.support.processes import alive
from tests.support.waiting import wait_until


@pytest.fixture
def file(tmp_path: Path) -> Path:
    found = tmp_path / "version"
    found.write_text("1")
    return found


def twice(versions: Sequence[int]) -> list[Any]:
    return [versions, versions]


def whether_long(versions: Any) -> str:
    return "long" if len(versions) > 1 else "short"


def versions(file: Path, run_in: Any) -> Service:
    """A service each of whose answers has the versions of all workers that it has met, in branches,
    a route and a list.
    """

    def stage(name: str) -> Stage:
        settings: dict[str, Any] = {"kwargs": {"file": str(file)}, "run_in": run_in, "max_batch_size": 4}
        return Stage(Versioned, name=name, **settings)

    shared, spread = stage("shared"), Stage(twice, run_in="thread", name="spread")
    return Service(
        stage("first"),
        Parallel(
            shared, [Route({"long": stage("long"), "short": shared}, choose=whether_long), spread, ForEach(shared)]
        ),
        name="versions",
    )


def met(answer: Any) -> set[int]:
    """The versions in an answer."""
    return {answer} if isinstance(answer, int) else set().union(*map(met, answer))


@slow_where(lambda run_in: run_in == "process")
@pytest.mark.parametrize("run_in", ["thread", "process"])
def test_no_request_meets_old_and_new_workers(file: Path, run_in: str) -> None:
    """While all workers are replaced under load, each request has been through old ones only, or
    through new ones only, in all of its branches and items.
    """
    with versions(file, run_in).run() as service, Callers(service, 8) as callers:
        for version in (2, 3):
            old = service.pids
            file.write_text(str(version))
            service.reload()
            assert service.predict([]) == ([version] * 2, [[version] * 3] * 2)
            assert not any(alive(pid) for pid in old)
    assert callers.errors == []
    assert {frozenset(met(answer)) for answer in callers.answers} <= {frozenset({n}) for n in (1, 2, 3)}


def test_when_new_workers_cannot_load_the_old_ones_go_on(file: Path) -> None:
    """A version that cannot load changes nothing for callers of a graph."""
    with versions(file, "thread").run() as service, Callers(service, 4) as callers:
        file.write_text("broken")
        with pytest.raises(StartupError, match="could not be set up"):
            service.reload()
        assert met(service.predict([])) == {1}
    assert callers.errors == []


@pytest.mark.slow
def test_a_stage_at_several_places_is_scaled_once() -> None:
    """More workers of such a stage serve all of its places, and fewer are left of one pool."""
    shared = Stage(Pid, name="shared", max_batch_size=1)
    service = Service(Parallel(shared, [Stage(as_it_is, run_in="thread", name="text"), shared]), name="scaled")
    with service.run() as s, ThreadPoolExecutor(8) as pool:

        def seen() -> tuple[set[Any], set[Any]]:
            answers = list(pool.map(s.predict, range(24)))
            left, right = zip(*answers, strict=True)
            return set(left), set(right)

        def ready() -> int:
            return s.stats().stages[0].workers.get("ready", 0)

        assert len(set.union(*seen())) == ready() == 1
        s.scale("shared", 3)
        wait_until(lambda: ready() == 3)
        wait_until(lambda: all(len(place) == 3 for place in seen()))
        assert set(s.pids) == {pid for _, pid in set.union(*seen())}
        s.scale("shared", 1)
        wait_until(lambda: ready() == 1)
        assert len(set.union(*seen())) == 1


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[tuple[Any, Path]]:
    """A service with branches, whose workers join, and the file with the token."""
    token = tmp_path / "token"
    token.write_bytes(joining.TOKEN + b"\n")
    join = carpool.Join(str(tmp_path / "gate.sock"), token_file=token)
    with joining.branches().run(join=join) as handle:
        yield handle, token


def test_workers_join_a_branch(gate: tuple[Any, Path]) -> None:
    """A request waits in one of its branches until a worker has joined, which then serves all places
    of its stage.
    """
    handle, token = gate
    with ThreadPoolExecutor() as callers:
        waiting = callers.submit(handle.predict, "x")
        twice = callers.submit(handle.predict, "twice")
        with joined("branches", handle.join_address, token) as pid:
            found = waiting.result(20)
            assert found["there"] == (pid, "x")
            assert found["here"][1] == "x" and found["here"][0] != pid
            assert twice.result(20)["there"] == (pid, (pid, "twice"))


def test_a_joined_worker_that_is_killed_repeats_its_branch(gate: tuple[Any, Path]) -> None:
    """What a killed worker had is run by one that joins later; the other branch is not run again."""
    handle, token = gate
    with ThreadPoolExecutor() as callers:
        slow = joined("branches", handle.join_address, token, TAKES_S="30")
        with slow:
            wait_for_workers(handle, 1, stage=1)
            asked = callers.submit(handle.predict, "x")
            wait_until(lambda: handle.stats().stages[1].running == 1)
            wait_until(lambda: handle.stats().stages[0].batches == 1)
        with joined("branches", handle.join_address, token) as pid:
            assert asked.result(20)["there"] == (pid, "x")
            assert handle.stats().stages[0].batches == 1
