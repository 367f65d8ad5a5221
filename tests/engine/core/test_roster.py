"""The roster: what a worker can become, when a dead one is replaced, and when a stage has failed."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest

from carpool.engine.core.roster import (
    FIRST_DELAY_S,
    LONGEST_DELAY_S,
    MOST_DEATHS,
    MOST_FORGIVEN,
    NO_ROOM_DELAY_S,
    PlaceState,
    Roster,
    Starts,
)

INFINITY = float("inf")
WAY = {
    PlaceState.DEAD: (),
    PlaceState.STARTING: (),
    PlaceState.LOADING: (PlaceState.LOADING,),
    PlaceState.WARMING: (PlaceState.LOADING, PlaceState.WARMING),
    PlaceState.READY: (PlaceState.LOADING, PlaceState.READY),
}
LEGAL = {
    (PlaceState.STARTING, PlaceState.LOADING),
    (PlaceState.LOADING, PlaceState.WARMING),
    (PlaceState.LOADING, PlaceState.READY),
    (PlaceState.WARMING, PlaceState.READY),
}


def roster(workers: int = 1, dice: Sequence[float] = (1.0,)) -> Roster:
    """All places started; the dice show these numbers in turn, the last one for ever."""
    thrown = iter(dice)
    made = Roster(workers, lambda: next(thrown, dice[-1]))
    made.due(0)
    return made


def become(one: Roster, state: PlaceState) -> Roster:
    for step in WAY[state]:
        one.moved(0, step)
    return one


def test_all_workers_are_to_be_started_at_first() -> None:
    """At first all workers are to be started, each once: from then on it counts as starting."""
    one = Roster(3, lambda: 0.0)

    assert one.next_start() == 0
    assert one.due(0) == [0, 1, 2]
    assert [place.state for place in one.places.values()] == [PlaceState.STARTING] * 3
    assert (one.due(0), one.next_start(), one.restarts) == ([], INFINITY, 0)


@pytest.mark.fault("F26")
@pytest.mark.parametrize("before", [state for state in WAY if state != PlaceState.DEAD])
@pytest.mark.parametrize("after", PlaceState)
def test_a_worker_moves_only_forward(before: PlaceState, after: PlaceState) -> None:
    """A worker moves from starting to loading, warming and ready, where warming may be left
    out; anything else raises and changes nothing.
    """
    one = become(roster(), before)

    if (before, after) in LEGAL:
        one.moved(0, after)
        assert one.places[0].state == after
    else:
        with pytest.raises(ValueError, match=f"worker 0 cannot become {after} while {before}"):
            one.moved(0, after)
        assert one.places[0].state == before


@pytest.mark.fault("F15")
@pytest.mark.parametrize("after", PlaceState)
def test_a_dead_worker_becomes_nothing_by_itself(after: PlaceState) -> None:
    """A dead worker stays dead until it is due, and then starts again."""
    one = roster()
    one.lost(0, 0)

    with pytest.raises(ValueError, match=f"worker 0 cannot become {after} while dead"):
        one.moved(0, after)


def test_a_worker_dies_once() -> None:
    """A second death of the same process is reported as a mistake, and not counted."""
    one = roster()
    one.lost(0, 0)

    for _ in range(MOST_DEATHS):
        with pytest.raises(ValueError, match="worker 0 is dead already"):
            one.lost(0, 0)

    assert not one.failed


def test_only_ready_workers_are_ready() -> None:
    """Workers that start, load, warm up or drain, and dead ones, do not count as ready."""
    one = Roster(6, lambda: 0.0)
    one.due(0)
    for worker, state in enumerate(WAY):
        for step in WAY[state]:
            one.moved(worker, step)

    assert one.ready == 1


@pytest.mark.fault("F16")
def test_the_first_death_is_mended_at_once_then_later_and_later() -> None:
    """The first death is mended at once, the next after 0.5 s, and each further one in a row after
    twice as long.
    """
    one, now, delays = roster(), 100.0, []
    for _ in range(MOST_DEATHS - 1):
        one.lost(now, 0)
        delays.append(one.next_start() - now)
        assert one.due(one.next_start() - 0.125) == []
        now = one.next_start()
        assert one.due(now) == [0]

    assert delays == [0, FIRST_DELAY_S, 2 * FIRST_DELAY_S, 4 * FIRST_DELAY_S]
    assert one.restarts == MOST_DEATHS - 1


@pytest.mark.parametrize(("dice", "share"), [(0.0, 0.5), (0.5, 0.75), (1.0, 1.0)])
def test_the_delay_is_spread_by_the_dice(dice: float, share: float) -> None:
    """The delay before a restart is drawn from between a half and the whole of it, so that workers
    do not start in step.
    """
    one = roster(1, [dice])
    one.lost(7, 0)
    one.due(7)
    one.lost(7, 0)

    assert one.next_start() == 7 + FIRST_DELAY_S * share


def test_no_delay_is_longer_than_the_longest(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many deaths a stage bears, no restart is delayed for longer than the longest delay."""
    monkeypatch.setattr("carpool.engine.core.roster.MOST_DEATHS", 100)
    one, now, delays = roster(), 0.0, []
    for _ in range(20):
        one.lost(now, 0)
        delays.append(one.next_start() - now)
        now = one.next_start()
        one.due(now)

    assert max(delays) == delays[-1] == LONGEST_DELAY_S


def test_one_finished_batch_starts_the_count_anew() -> None:
    """Once any worker of the stage has finished a batch, the next death is mended at once again."""
    one = roster(2)
    for _ in range(3 * MOST_DEATHS):
        for _ in range(MOST_DEATHS - 1):
            one.due(INFINITY)
            one.lost(0, 0)
        one.finished_batch()
        one.due(INFINITY)
        one.lost(50, 0)
        assert one.places[0].start_at == 50
        one.finished_batch()

    assert not one.failed


@pytest.mark.fault("F15")
def test_five_deaths_in_a_row_fail_the_stage() -> None:
    """After five deaths in a row the stage has failed and starts nobody any more, although other
    workers of it live without doing anything.
    """
    one = roster(2)
    failed = []
    for _ in range(MOST_DEATHS):
        one.lost(0, 1)
        failed.append(one.failed)
        one.due(INFINITY)

    assert MOST_DEATHS == 5
    assert failed == [False] * 4 + [True]
    assert (one.due(INFINITY), one.next_start()) == ([], INFINITY)


def test_workers_that_die_together_count_as_one_death() -> None:
    """Ten workers that are killed together are replaced at once, and count as one death; a second
    one would be that of their successors.
    """
    one = roster(10)
    for worker in range(10):
        one.lost(worker, worker)

    assert [place.start_at for place in one.places.values()] == list(range(10))
    assert one.due(9) == list(range(10))
    one.lost(9, 3)
    one.lost(9, 4)
    assert one.next_start() == 9 + FIRST_DELAY_S
    assert not one.failed


def test_generations_that_die_fail_the_stage() -> None:
    """A stage has failed when five generations of workers have died in a row, however many died of
    each.
    """
    one = roster(3)
    for death in range(MOST_DEATHS):
        assert not one.failed, death
        for worker in range(3):
            one.lost(0, worker)
        one.due(INFINITY)

    assert one.failed


# -- those that hang, and those that cannot be started


def test_who_hangs_is_lost_at_once_and_replaced_when_gone() -> None:
    """The death of a worker that hangs counts when it is given up; its place is free when its
    process has ended.
    """
    one = roster()
    become(one, PlaceState.READY)
    one.lost(5, 0, gone=False)

    assert (one.ready, one.places[0].state) == (0, PlaceState.HUNG)
    assert (one.due(INFINITY), one.next_start()) == ([], INFINITY)
    for wrong in (
        lambda: one.lost(5, 0),
        lambda: one.moved(0, PlaceState.READY),
        lambda: one.moved(0, PlaceState.DEAD),
    ):
        with pytest.raises(ValueError, match="hung"):
            wrong()
    one.is_gone(0)
    assert one.next_start() == 5
    assert one.due(5) == [0]
    one.lost(6, 0)
    assert one.next_start() == 6 + FIRST_DELAY_S  # the second death


def test_only_who_hangs_is_gone_later() -> None:
    """Only a worker that was given up can be gone later: one that runs or is dead already cannot."""
    one = roster()
    with pytest.raises(ValueError, match="did not hang"):
        one.is_gone(0)
    one.lost(0, 0)
    with pytest.raises(ValueError, match="did not hang"):
        one.is_gone(0)


def test_what_cannot_be_started_is_no_death() -> None:
    """A worker that cannot be started for want of a process, memory or a descriptor is tried again
    now and then, and the stage does not fail.
    """
    one, now = roster(), 0.0
    for _ in range(5 * MOST_DEATHS):
        one.not_started(now, 0)
        assert one.next_start() == now + NO_ROOM_DELAY_S
        now = one.next_start()
        assert one.due(now) == [0]

    assert (one.failed, one.restarts) == (False, 0)
    one.lost(now, 0)
    assert one.next_start() == now


# -- how many load at a time


def test_no_more_load_at_a_time_than_may() -> None:
    """Over all stages at most so many workers are between their start and being ready or dead."""
    first, second = Roster(3, lambda: 1.0), Roster(2, lambda: 1.0)
    starts = Starts([first, second], 2)

    assert first.due(0, starts.room) == [0, 1]
    assert (starts.room, second.due(0, starts.room), second.next_start()) == (0, [], 0)
    for state in (PlaceState.LOADING, PlaceState.WARMING):
        first.moved(0, state)
        assert starts.room == 0
    first.moved(0, PlaceState.READY)
    assert (starts.room, first.due(0, starts.room)) == (1, [2])
    first.lost(1, 1)
    assert second.due(1, starts.room) == [0]
    assert starts.room == 0


def test_a_stage_without_a_worker_starts_one_first() -> None:
    """Each stage starts one worker before any stage starts its second one; then the first stages
    go on, and a stage that has lost its only worker goes before those that only lack some.
    """
    first, second, third = stages = [Roster(3, lambda: 1.0), Roster(1, lambda: 1.0), Roster(2, lambda: 1.0)]
    starts = Starts(stages, 2)

    def started(now: float) -> list[list[int]]:
        return [roster.due(now, starts.room_for(now, roster)) for roster in stages]

    def ready(roster: Roster, place: int) -> None:
        for state in (PlaceState.LOADING, PlaceState.READY):
            roster.moved(place, state)

    assert started(0) == [[0], [0], []]
    assert [len(roster.waiting(0)) for roster in stages] == [2, 0, 2]
    ready(first, 0)
    assert started(0) == [[], [], [0]]
    ready(third, 0), ready(second, 0)
    assert started(0) == [[1, 2], [], []]
    second.lost(1, 0)
    ready(first, 1)
    assert started(1) == [[], [0], []]
    ready(first, 2)
    assert started(1) == [[], [], [1]]


@pytest.mark.parametrize("most", [1, 2, 3, 9])
def test_who_starts_first_leaves_no_room_unused(most: int) -> None:
    """As many workers load at a time as may, and as there are, whichever stage is asked first."""
    for order in itertools.permutations(range(3)):
        stages = [Roster(3, lambda: 1.0), Roster(1, lambda: 1.0), Roster(2, lambda: 1.0)]
        starts = Starts(stages, most)
        loading = sum(len(stages[i].due(0, starts.room_for(0, stages[i]))) for i in (*order, *order))
        assert loading == min(most, 6)


def test_when_stopping_deaths_are_expected_and_nobody_is_started() -> None:
    """While stopping, deaths are not counted, however many there are, and nobody is started."""
    one = roster(2 * MOST_DEATHS)
    one.stopping = True
    for worker in range(2 * MOST_DEATHS):
        one.lost(0, worker)

    assert (one.failed, one.due(INFINITY), one.next_start()) == (False, [], INFINITY)


# -- deaths that are one request's fault


def lose(one: Roster, *nows: float) -> None:
    """The only worker dies at each of these times, and is started anew when that is due."""
    for now in nows:
        one.due(INFINITY)
        one.lost(now, 0)


def test_deaths_that_are_a_requests_fault_are_taken_back() -> None:
    """When two deaths turn out to be a request's fault they are not counted any more, and the
    successor starts at once; what was counted before them stays.
    """
    one = roster()
    lose(one, 1, 2)
    assert one.next_start() == 2 + FIRST_DELAY_S
    lose(one, 3, 4)
    one.forgive(4)
    assert one.next_start() == 4 + FIRST_DELAY_S  # the first two remain
    lose(one, 5, 6)

    assert not one.failed
    one.forgive(6)
    lose(one, 7, 8)
    assert not one.failed
    lose(one, 9)
    assert one.failed


def test_the_fifth_death_in_a_row_may_be_forgiven() -> None:
    """If the fifth death in a row turns out to be a request's fault, the stage has not failed after
    all.
    """
    one = roster()
    lose(one, 1, 2, 3, 4, 5)
    assert (one.failed, one.next_start()) == (True, INFINITY)

    one.forgive(5)

    assert (one.failed, one.next_start()) == (False, 5 + 2 * FIRST_DELAY_S)


def test_workers_given_up_for_slow_calls_are_no_deaths_in_a_row() -> None:
    """The loss of a worker that was given up for a slow call is taken back by itself; one that
    crashes counts as before.
    """
    one = roster()
    one.finished_batch()
    for now in range(20):
        lose(one, now)
        one.forgive(now, deaths=1)
    assert not one.failed

    lose(one, *range(100, 100 + MOST_DEATHS))
    assert one.failed


def test_no_more_is_forgiven_than_has_happened() -> None:
    """If a finished batch has already wiped out the first of two deaths, only the second can be
    forgiven.
    """
    one = roster()
    lose(one, 1)
    one.finished_batch()
    lose(one, 2)
    one.forgive(2)
    lose(one, *range(3, 3 + MOST_DEATHS - 1))
    assert not one.failed
    lose(one, 9)
    assert one.failed


@pytest.mark.parametrize("shown", ["by a batch", "by a warm-up"])
def test_a_stage_that_works_survives_any_number_of_poison_requests(shown: str) -> None:
    """However many poison requests come, a stage that works does not fail; restarts slow down after
    some in a row, until a batch is finished.
    """
    one = roster()
    if shown == "by a batch":
        one.finished_batch()
    else:
        become(one, PlaceState.WARMING).moved(0, PlaceState.READY)
    delays = []
    for now in range(0, 200, 2):
        lose(one, now, now + 1)
        one.forgive(now + 1)
        delays.append(one.next_start() - now - 1)

    assert not one.failed
    assert delays[: MOST_FORGIVEN + 4] == [0] * (MOST_FORGIVEN + 1) + [0.5, 1, 2]
    assert max(delays) == LONGEST_DELAY_S
    one.finished_batch()
    lose(one, 300, 301)
    one.forgive(301)
    assert one.next_start() == 301


def test_a_stage_that_has_never_worked_is_given_up() -> None:
    """A stage that has died with so many requests in a row, and done nothing else, has failed: it
    is not the requests' fault.
    """
    one = roster()
    become(one, PlaceState.READY)  # without a warm-up that shows nothing
    failed = []
    for now in range(MOST_FORGIVEN):
        lose(one, now, now)
        one.forgive(now)
        failed.append(one.failed)

    assert MOST_FORGIVEN == 5
    assert failed == [False] * 4 + [True]
    assert one.next_start() == INFINITY


# -- places that come and go


def test_a_newcomer_is_started_and_counts_for_nothing_until_it_is_established() -> None:
    """The death of a newcomer is no death of the stage, and it is not started again."""
    one = roster()
    one.moved(0, PlaceState.LOADING)
    one.moved(0, PlaceState.READY)
    for n in range(MOST_DEATHS + 1):
        place = one.add()
        assert place == n + 1
        assert one.due(0) == [place]
        one.lost(0, place)
        one.remove(place)
    assert not one.failed
    assert one.established == [0]
    assert one.restarts == 0

    place = one.add()
    assert one.established == [0]
    one.establish(place)
    assert one.established == [0, place]


def test_a_place_that_is_left_is_not_filled_again() -> None:
    """A worker that is to go drains; its end is no death, and nothing is started in its place."""
    one = become(roster(), PlaceState.READY)
    one.leave(0)
    assert one.places[0].state == PlaceState.DRAINING
    assert one.established == []
    one.lost(5, 0)
    assert (one.due(INFINITY), one.next_start(), one.failed) == ([], INFINITY, False)
    one.remove(0)
    assert one.places == {}


def test_indices_are_used_again() -> None:
    """A newcomer has the least index that no other worker has, unless it succeeds a certain one."""
    one = Roster(3, lambda: 0.0)
    assert one.places[one.add()].index == 3
    one.leave(1)
    assert one.places[one.add()].index == 1
    assert one.places[one.add(2)].index == 2


def test_while_all_are_renewed_only_newcomers_are_started() -> None:
    """A dead worker is not started again beside its successor; it is, once the renewal is over."""
    one = roster()
    one.lost(0, 0)
    one.is_renewed = True
    new = one.add(0)
    assert one.due(9) == [new]
    one.is_renewed = False
    assert one.due(9) == [0]


def test_who_goes_first() -> None:
    """Workers that are not ready go first, then those with the greatest index."""
    one = Roster(4, lambda: 0.0)
    one.due(0)
    for place in (0, 2, 3):
        one.moved(place, PlaceState.LOADING)
        one.moved(place, PlaceState.READY)
    assert one.least_useful(3) == [1, 3, 2]


def test_restarts_are_not_forgotten_with_their_place() -> None:
    """The number of restarts never falls, as a counter must not."""
    one = roster(2)
    one.lost(0, 0)
    one.due(0)
    assert one.restarts == 1
    one.leave(0)
    one.lost(0, 0)
    one.remove(0)
    assert one.restarts == 1


def test_a_place_that_is_taken_over_is_tried_until_a_worker_is_ready() -> None:
    """However often its worker dies before it is ready, the stage has not failed; the pauses grow."""
    one = become(roster(), PlaceState.READY)
    place, now, pauses = one.add(is_new=False), 0.0, []
    for _ in range(MOST_DEATHS + 3):
        assert one.due(now) == [place]
        one.lost(now, place)
        pauses.append(one.next_start() - now)
        now = one.next_start()
    assert pauses == [
        FIRST_DELAY_S * 2**n if FIRST_DELAY_S * 2**n < LONGEST_DELAY_S else LONGEST_DELAY_S for n in range(8)
    ]
    assert not one.failed
