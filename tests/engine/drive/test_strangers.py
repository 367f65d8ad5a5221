"""Who may be proving itself at a time: bounded, each for some time for sure, and fair to sources. Numbers for times."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from carpool.engine.drive.gate import Strangers
from tests.support.properties import PROPERTY

moves = st.lists(
    st.tuples(st.sampled_from(["enter", "enter", "enter", "leave", "wait"]), st.integers(0, 30), st.sampled_from("abc"))
)


@PROPERTY
@given(moves=moves, most=st.integers(1, 5), sure_s=st.integers(0, 4))
def test_they_are_bounded_and_each_has_its_time(moves: list[tuple[str, int, str]], most: int, sure_s: int) -> None:
    """There are never more than there may be, whoever goes has had its time, and is the oldest of
    the source that has most.
    """
    strangers: Strangers[int] = Strangers(most, sure_s)
    inside: dict[int, tuple[str, float]] = {}
    now, next_one = 0.0, 0
    for move, n, source in moves:
        if move == "wait":
            now += n / 4
        elif move == "leave" and inside:
            who = [*inside][n % len(inside)]
            strangers.leave(who)
            del inside[who]
        elif move == "enter":
            now += strangers.wait_s(now)
            assert strangers.wait_s(now) == 0.0
            going = strangers.enter(next_one, source, now)
            assert (going is None) == (len(inside) < most)
            if going is not None:
                theirs, since = inside[going]
                counts = {each: [*(of for of, _ in inside.values())].count(each) for each in "abc"}
                assert now >= since + sure_s and counts[theirs] == max(counts.values())
                assert going == min(who for who, (of, _) in inside.items() if of == theirs)
                del inside[going]
            inside[next_one] = source, now
            next_one += 1
        assert len(strangers) == len(inside) <= most
        strangers.leave(-1)  # one that was never in


def test_a_crowd_of_one_source_keeps_no_other_out() -> None:
    """One that comes alone stays, while those of the crowd push out one another."""
    strangers: Strangers[str] = Strangers(4, 1.0)
    for n in range(4):
        strangers.enter(f"crowd {n}", "far", 0.0)
    assert strangers.wait_s(0.25) == 0.75
    assert strangers.enter("worker", "near", 1.0) == "crowd 0"
    assert [strangers.enter(f"more {n}", "far", 2.0) for n in range(3)] == ["crowd 1", "crowd 2", "crowd 3"]
