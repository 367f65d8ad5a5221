"""Every place where code that is not ours is called, every kind of exception there, by every way that leads to it.

`tests/foreign/places.py` has the table. Here each of its rows is walked: every call ends in time, the next is served,
worker processes are the same, closing ends, and nothing is left behind. `make test-all` walks all of it; `make test`
comes to each place by each way with one kind of exception (`quick_walk`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest

from tests.foreign import batches, operating, policies, protocols, services, steps, surroundings, virtual
from tests.foreign.places import PLACES, Place
from tests.foreign.table import CELLS, LEFT_OUT, WAYS, Cell, Way
from tests.support.sources import ROOT

CHECKS = (services, batches, policies, steps, operating, surroundings, protocols, virtual)  # they fill the table


NAMES = [place.name for place in PLACES]


def test_the_table_is_walked() -> None:
    """All places that are listed are tested, and all that are tested are listed."""
    assert sorted(set(NAMES)) == sorted({cell.place for cell in CELLS})
    assert len(NAMES) == len(set(NAMES))


@pytest.mark.parametrize("place", PLACES, ids=NAMES)
def test_the_guards_of_a_place_exist(place: Place) -> None:
    """Each file in which a place is guarded is there."""
    files = [file for file in place.guarded_in.split(", ") if file]
    assert [file for file in files if not (ROOT / "src" / "carpool" / file).exists()] == []


@pytest.mark.parametrize("place", NAMES)
def test_every_way_to_a_place_is_walked_or_left_out_for_a_reason(place: str) -> None:
    """Each driver, behind each of its doors, is walked at each place or left out for a reason, and
    none is both.
    """
    walked = {cell.way for cell in CELLS if cell.place == place}
    left_out = {way for name, way in LEFT_OUT if name == place}
    assert walked | left_out == set(WAYS)
    assert not walked & left_out


@pytest.fixture(scope="module")
def way(request: pytest.FixtureRequest) -> Iterator[Way]:
    """All cells of one way in a row; in the end nothing of it is left."""
    way = Way(request.param)
    yield way
    way.close()


def quick_walk() -> set[Cell]:
    """A tenth of the cells: each check by each way with one kind, the next check with the next one, and at least once
    by each way each kind.

    A check by worker processes is made behind one door, the next one behind the next door, if it is made by threads
    behind the others: to start processes takes most of the time of the walk.
    """
    walk: set[Cell] = set()
    left_out = left_to_threads()
    for way in WAYS:
        checks: dict[tuple[str, str], list[Cell]] = {}
        for cell in CELLS:
            if cell.way == way:
                checks.setdefault((cell.place, cell.what), []).append(cell)
        chosen = [
            cells[i % len(cells)] for i, (check, cells) in enumerate(checks.items()) if (*check, way) not in left_out
        ]
        met = {cell.kind for cell in chosen}
        unmet = {cell.kind: cell for cells in checks.values() for cell in cells if cell.kind not in met}
        walk |= {*chosen, *unmet.values()}
    return walk


def left_to_threads() -> set[tuple[str, str, str]]:
    """The checks by worker processes, with their ways, that the quick walk makes by threads behind the same door."""
    left_out: set[tuple[str, str, str]] = set()
    made = dict.fromkeys((cell.place, cell.what, cell.way) for cell in CELLS)
    for i, (place, what) in enumerate(dict.fromkeys(check[:2] for check in made)):
        ways = [way for way in WAYS if way.startswith("process") and (place, what, way) in made]
        by_threads = {way for way in ways if (place, what, way.replace("process", "thread")) in made}
        left_out |= {(place, what, way) for way in by_threads - set(ways[i % len(ways or [""]) :][:1])}
    return left_out


QUICK_WALK = quick_walk()


def test_the_quick_walk_comes_everywhere_and_meets_every_kind() -> None:
    """The quick walk makes each check by each way, but for those by processes that it makes by threads behind the same
    door and by processes behind another; it meets each kind by each way, and is the same walk each time.
    """
    checks = {(cell.place, cell.what, cell.way) for cell in QUICK_WALK}
    everything = {(cell.place, cell.what, cell.way) for cell in CELLS}
    by_processes = {check[:2] for check in checks if check[2].startswith("process")}
    for place, what, way in everything - checks:
        assert way.startswith("process")
        assert (place, what, way.replace("process", "thread")) in checks
        assert (place, what) in by_processes
    assert {(cell.way, cell.kind) for cell in QUICK_WALK} == {(cell.way, cell.kind) for cell in CELLS}
    assert quick_walk() == QUICK_WALK
    assert len(QUICK_WALK) < len(CELLS) / 8


def of(cell: Cell) -> Any:
    """The parameters of a test, with its name."""
    name = re.sub(r"[^\w .=,-]", "", f"{cell.place} {cell.what}".strip())
    name = f"{cell.way}-{name}-{cell.kind}".replace(" ", "_")
    return pytest.param(cell.way, cell, id=name, marks=() if cell in QUICK_WALK else pytest.mark.slow)


@pytest.mark.fault("F71", "F83")
@pytest.mark.parametrize(
    ("way", "cell"),
    [of(cell) for way in WAYS for cell in CELLS if cell.way == way],
    indirect=["way"],
    scope="module",  # or pytest would open each way anew for each cell
)
def test_whatever_foreign_code_raises_every_call_ends_and_the_next_is_served(way: Way, cell: Cell) -> None:
    """Whatever one kind raises at one place by one way, every call ends, and the next one is
    served.
    """
    try:
        cell.check(way, cell.kind)
    except BaseException as error:
        way.discard()
        if isinstance(error, Exception) or not error.args:
            raise
        raise AssertionError(f"a planned {type(error).__name__} has come here") from error
