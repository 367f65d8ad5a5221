"""Guests: workers that come by themselves, and whose places come and go."""

from __future__ import annotations

from math import inf

import pytest

from carpool.engine.core.roster import MOST_DEATHS, PlaceState, Roster, Starts
from tests.support.pipelines import asks, pipeline_of, reply, stage


def roster(workers: int = 0) -> Roster:
    return Roster(workers, lambda: 0.5)


def test_a_guest_has_a_place_of_its_own_and_the_least_free_index() -> None:
    """The place of a guest goes with it, and its index is free for the next one."""
    guests = roster()
    assert [guests.admit() for _ in range(3)] == [0, 1, 2]
    guests.lost(1.0, 1)
    guests.remove(1)
    place = guests.admit()
    assert (place, guests.places[place].index) == (3, 1)
    assert guests.places[guests.admit()].index == 3


def test_nothing_is_started_for_guests() -> None:
    """No start is due or awaited for a place whose guest has gone, and none counts as a restart."""
    guests = roster()
    for _ in range(3):
        guests.lost(1.0, guests.admit())
    assert guests.due(2.0) == []
    assert guests.next_start() == inf
    assert guests.restarts == 0


def test_guests_never_fail_a_stage() -> None:
    """However many guests die, a stage does not fail for it: others may come."""
    guests = roster()
    for _ in range(3 * MOST_DEATHS):
        guests.lost(1.0, guests.admit())
    assert not guests.failed


def test_guests_load_elsewhere() -> None:
    """A guest that loads its model takes no room from the workers that are started here."""
    guests = roster(2)
    guests.admit()
    assert guests.loading == 0
    assert Starts([guests], 2).room == 2
    assert guests.due(0.0) == [0, 1]
    assert guests.loading == 2


def test_a_guest_lives_like_any_worker() -> None:
    """A guest loads and is ready, and one that hangs has its place until it is gone."""
    guests = roster()
    place = guests.admit()
    guests.moved(place, PlaceState.LOADING)
    guests.moved(place, PlaceState.READY)
    assert guests.ready == 1
    guests.lost(1.0, place, gone=False)
    assert guests.admit() == 1
    guests.is_gone(place)
    with pytest.raises(ValueError, match="dead already"):
        guests.lost(1.0, place)


def test_guests_are_not_scaled() -> None:
    """Those who set a number of workers mean workers that are started here."""
    guests = roster(2)
    guests.admit()
    assert guests.established == [0, 1]


def test_a_worker_that_drains_gets_nothing_further() -> None:
    """A worker that drains answers what it has, a batch ahead included, and gets no further batch."""
    one = stage(max_batch_size=1)
    core = pipeline_of(one, workers=2)
    requests = asks("abcd")
    core.flow.submit(0.0, requests)
    first, second = core.poll(0.0).run
    core.drain(0, first.place)
    assert not core.poll(0.5).drained
    reply(core, 1.0, first)
    todo = core.poll(1.0)
    assert todo.drained == [(0, first.place)]
    assert [batch.place for batch in todo.run] == []
    reply(core, 2.0, second)
    assert [batch.place for batch in core.poll(2.0).run] == [second.place]


def test_an_idle_worker_that_drains_is_not_used() -> None:
    """A worker that drains while it is idle is empty, and gets nothing; its successor does."""
    one = stage()
    core = pipeline_of(one)
    core.drain(0, 0)
    core.flow.submit(0.0, asks("a"))
    assert core.poll(0.0).run == []
    core.worker_left(1.0, 0, 0)
    core.worker_ready(0, 0)
    assert len(core.poll(1.0).run) == 1
