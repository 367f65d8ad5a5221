"""Those that may share the next batch: who is given up so that the others are in time."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from hypothesis import given
from hypothesis import strategies as st

from carpool.engine.core.queue import Queue
from carpool.engine.policy.adaptive import Candidates
from carpool.engine.request import DEFAULT_LANE, Request
from tests.effort import examples

PROPERTY = examples(100, derandomize=True)


def waiting(dues: Sequence[float], sizes: Sequence[int], priorities: Sequence[int] = ()) -> Candidates:
    """Requests that are due then, of these sizes."""
    queue = Queue()
    for i, (due, size) in enumerate(zip(dues, sizes, strict=True)):
        request = Request("x", inf)
        request.arrived = 0.0
        request.due, request.size = due, size
        request.lane = DEFAULT_LANE._replace(priority=priorities[i] if priorities else 0)
        queue.push([request])
    return Candidates(queue)


requests = st.lists(
    st.tuples(st.floats(0, 80), st.sampled_from([1, 1, 2, 3, 7]), st.integers(0, 1)), min_size=1, max_size=30
)


@PROPERTY
@given(requests, st.integers(1, 16), st.floats(0, 40), st.booleans())
def test_who_is_late_in_line_is_late_and_the_next_one_is_not(
    given: list[tuple[float, int, int]], most: int, at: float, mixed: bool
) -> None:
    """Each of them would be late with all behind it, and the first one behind them is in time; all
    are late if none would be in time.
    """
    dues, sizes, priorities = zip(*sorted(given), strict=True)
    left = waiting(dues, sizes, priorities if mixed else ())
    line = list(left.requests)

    def is_late(due: float, units: int) -> bool:
        return due - at < 2.0 + min(units, most)

    behind = [sum(request.size for request in line[i:]) for i in range(len(line))]
    late = [is_late(request.due, units) for request, units in zip(line, behind, strict=True)]
    found = left.late_in_line(is_late)
    assert found == [request for request, is_so in zip(line, late, strict=True) if is_so][: len(found)]
    if not mixed:
        assert (len(found) == len(line)) == all(late)
        assert len(found) == len(line) or not late[len(found)]
    assert not set(left.late_in_line(is_late, behind=line[0].size)) & {line[0]}
    assert left.requests == line


@PROPERTY
@given(requests, st.integers(0, 60), st.floats(0, 80))
def test_of_the_first_ones_as_many_go_as_must(given: list[tuple[float, int, int]], units: int, due_by: float) -> None:
    """Of those that are due by then the lowest priority goes first, then who is due first, until
    enough have gone.
    """
    dues, sizes, priorities = zip(*given, strict=True)
    left = waiting(dues, sizes, priorities)
    order = sorted(left.requests, key=lambda request: (request.lane.priority, request.due))
    order = [request for request in order if request.due <= due_by]
    left.drop_first(units, due_by)

    gone = len(left.dropped)
    assert sorted(map(id, left.dropped)) == sorted(map(id, order[:gone]))
    assert sum(request.size for request in left.dropped) >= min(units, sum(request.size for request in order))
    assert sum(request.size for request in left.dropped[:-1]) < max(1, units)


@PROPERTY
@given(requests, st.booleans())
def test_the_last_due_is_that_of_all_lanes(given: list[tuple[float, int, int]], mixed: bool) -> None:
    """With several lanes the last in line need not be due last."""
    dues, sizes, priorities = zip(*given, strict=True)
    assert waiting(dues, sizes, priorities if mixed else ()).last_due == max(dues)
