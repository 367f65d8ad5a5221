"""Reports of nothing but parts are taken as they are: beside those that are sorted out first."""

from __future__ import annotations

from math import inf
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from carpool.engine.core.core import Core
from carpool.engine.core.running_set import MORE, Parts, SetReport
from carpool.engine.core.stepper import Stepper
from carpool.engine.request import Request, Stream
from tests.support.properties import PROPERTY
from tests.support.steps import stepper

STREAMS = 4
Event = tuple[str, Any]

ids = st.integers(1, STREAMS)
events = st.lists(
    st.one_of(
        st.tuples(st.just("report"), st.lists(ids, min_size=1, max_size=STREAMS, unique=True)),
        st.tuples(st.just("leave"), ids),
        st.tuples(st.just("pause"), ids),
        st.tuples(st.just("go on"), ids),
        st.tuples(st.just("wait"), st.sampled_from([0.25, 1.0, 8.0])),
    ),
    max_size=12,
)


def seen(requests: list[Request]) -> list[Any]:
    """All that a report can change in streams."""
    return [
        (
            *(request.state, request.deadline, request.stream.parts, request.stream.part_at, request.stream.next_due),
            *(request.stream.kept, request.stream.kept_bytes, str(request.error)),
        )
        for request in requests
        if request.stream is not None
    ]


class Unsorted(bytes):
    """Kinds of which nothing is known before one has looked at each."""

    def count(self, *what: Any) -> int:
        return 0


def history(happened: list[Event], collected: int, goal: float | None, resumable: bool, is_plain: bool) -> list[Any]:
    """What a pipeline has said to all that has happened, with reports that are sorted out or not."""
    stage = stepper(rows=STREAMS, resumable=resumable, silence_s=5.0, measure=lambda part: 7)
    stage.lobby.policy.part_slo_s = goal
    core = Core([stage])
    core.worker_ready(0, 0)
    requests = [Request(i, inf) for i in range(STREAMS)]
    for i, request in enumerate(requests):
        request.stream = Stream(is_collected=i == collected, until=6.0 if i == 1 else inf)
    core.flow.submit(0.0, requests)
    core.poll(0.0)
    now, said = 0.0, []
    for what, value in happened:
        if what == "wait":
            now += value
        elif what == "report":
            values = [b"part %d" % id for id in value]
            kinds = (bytes if is_plain else Unsorted)([MORE] * len(value))
            parts = Parts(value, kinds, values)
            report = SetReport(0, 0, stage.sets[0].number, False, parts, STREAMS, 0.25)
            try:
                core.reported(now, report)
            except ValueError as error:
                said.append(str(error))
        elif what == "leave":
            core.cancel(now, requests[value - 1])
        else:
            core.pause(now, requests[value - 1], what == "pause")
        todo = core.poll(now)
        said.append(([(request.id, part) for request, part in todo.parts], todo.wake_at, seen(requests)))
        said.append((stage.stray_parts, stage.parts, stage.lobby.attention_at, stage.times.usual_s, stage.queue.nbytes))
    return said


@PROPERTY
@given(events, st.integers(0, STREAMS), st.sampled_from([None, 0.5]), st.booleans())
def test_parts_that_are_sorted_out_are_the_same(
    happened: list[Event], collected: int, goal: float | None, resumable: bool
) -> None:
    """Whatever has left, pauses or is collected, a report of parts means the same if it is sorted out first."""
    both = [history(happened, collected, goal, resumable, is_plain) for is_plain in (True, False)]
    assert both[0] == both[1]


def test_the_fast_path_is_taken() -> None:
    """A report of nothing but parts of streams that run is not sorted out."""

    class Plain(Stepper):
        def _sort_out(self, *arguments: Any) -> None:
            raise AssertionError("parts were sorted out")

    stage = stepper()
    stage.__class__ = type("PlainStepper", (type(stage),), {"_sort_out": Plain._sort_out})
    core = Core([stage])
    core.worker_ready(0, 0)
    request = Request(0, inf)
    request.stream = Stream()
    core.flow.submit(0.0, [request])
    core.poll(0.0)
    core.reported(1.0, SetReport(0, 0, 1, False, Parts([request.id], bytes([MORE]), [b"1"]), 1, 1.0))
    assert list(core.poll(1.0).parts) == [(request, b"1")]
