"""Batches composed by length that are late for some: those are left out."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from carpool.engine.policy.compose import ChosenGroup, Composer
from carpool.engine.policy.length_cost import LengthCost
from carpool.engine.request import Request
from tests.support.properties import PROPERTY


class Cost(LengthCost):
    """A second for the call, and a tenth for each position of ten."""

    def seconds(self, n: float, length: float | None = None) -> float:
        assert length is not None
        return 1.0 + 0.01 * n * length


def kept(batch: list[Request], longest: int = 10) -> list[Request]:
    """Those of a batch that are in time with it, in their order."""
    choice = ChosenGroup(batch, longest, COST.seconds(len(batch), longest), 2)
    left = Composer(COST).without_late(0.0, choice)
    assert left.seconds == COST.seconds(len(left.requests), longest)
    return [request for request in batch if request in left.requests]


COST = Cost()


def due(*dues: float, length: int = 10) -> list[Request]:
    """Requests of one length that are due then."""
    requests = []
    for at in dues:
        request = Request(at, at)
        request.length = length
        requests.append(request)
    return requests


def test_who_would_be_late_with_the_batch_is_left_out() -> None:
    """Of a batch of four, which takes 1.4 s, the one that is due after 1.1 s stays behind."""
    batch = due(1.1, 2.0, 3.0, 1.5)
    assert [r.due for r in kept(batch)] == [2.0, 3.0, 1.5]


def test_each_one_left_out_makes_the_batch_shorter_for_the_others() -> None:
    """With the first one left out the batch takes 1.3 s, which is in time for the second."""
    batch = due(1.1, 1.35, 3.0, 3.0)
    assert [r.due for r in kept(batch)] == [1.35, 3.0, 3.0]


def test_of_those_that_are_due_together_only_as_many_are_left_out_as_must_be() -> None:
    """Four take 1.4 s, and three 1.3 s, which is in time for all: the last of equals stays behind."""
    batch = due(1.35, 3.0, 1.35, 1.35)
    assert kept(batch) == batch[:3]


def test_a_batch_in_which_all_are_late_stays_as_it_is() -> None:
    """Nothing is left out of a batch that is late for all: whether it goes at all is another rule's."""
    batch = due(0.1, 0.2)
    assert kept(batch) == batch


@given(st.lists(st.tuples(st.floats(0.5, 5.0), st.integers(1, 40)), min_size=1, max_size=12))
@PROPERTY
def test_all_that_stay_are_in_time(given_requests: list[tuple[float, int]]) -> None:
    """What stays in a batch is in time if any of it is."""
    requests = [due(at, length=length)[0] for at, length in given_requests]
    longest = max(r.length for r in requests)

    left = kept(requests, longest)
    in_time = sum(r.due >= COST.seconds(len(left), longest) for r in left)
    assert in_time == len(left) or (left == requests and not in_time)
