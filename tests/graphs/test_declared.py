"""What cannot work is refused where it is written, by name and with a cure."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import pytest
from numpy.typing import NDArray

import carpool
from carpool import Done, ForEach, Model, Parallel, Route, Service, Stage, To
from carpool.http import App
from carpool.service.overrides import changed
from tests.graphs.models import add_up, as_it_is, parity, plus_one, small, times_ten, to_branch, total, up_to


def a_text(x: str) -> str:
    return x


def to_text(x: int) -> str:
    return str(x)


def early_text(x: int) -> Done[str] | int:
    return x


async def later(x: int) -> str:
    return "a"


class Later:
    async def __call__(self, x: int) -> str:
        return "a"


def a_or_b(x: int) -> Literal["a", "b"]:
    return "a"


def an_array(x: int) -> NDArray[np.float64]:
    return np.zeros(x)


class Csv(Model):
    accepts = "text/csv"
    produces = "text/csv"

    def predict(self, x: int) -> int:
        return x

    def decode(self, bodies: list[bytes]) -> list[int]:
        return [int(body) for body in bodies]

    def encode(self, results: list[int]) -> list[bytes]:
        return [str(each).encode() for each in results]


class Parts(Model):
    def predict(self, x: int) -> Any:
        yield x


def small_queue(size: int) -> Stage:
    return Stage(as_it_is, max_queue_size=size, name=f"queue_of_{size}")


def of_eight(xs: list[Any]) -> list[Any]:
    return xs


@pytest.mark.parametrize(
    ("declare", "kind", "text"),
    [
        (lambda: Service(), ValueError, "at least one stage"),
        (lambda: Service([], []), ValueError, "at least one stage"),
        (lambda: Parallel(), ValueError, "Parallel needs at least one branch"),
        (lambda: Parallel({}), ValueError, "Parallel needs at least one branch"),
        (lambda: Parallel(plus_one, errors="ignore"), ValueError, 'must be "raise" or "values"'),
        (lambda: Parallel({1: plus_one}), TypeError, "a name is a text"),
        (lambda: Parallel(plus_one, {"a": plus_one}), TypeError, "a dict is no element"),
        (lambda: Route(plus_one), TypeError, "Route takes a dict"),
        (lambda: Route({}), ValueError, "Route needs at least one branch"),
        (lambda: Route({"": plus_one}), TypeError, "not empty"),
        (lambda: Route({"a": plus_one}, when_full="drop"), ValueError, 'must be "wait" or "refuse"'),
        (lambda: Route({"a": plus_one}, choose="a"), TypeError, "choose"),
        (lambda: Route({"a": plus_one}, choose=later), TypeError, "not one with async def"),
        (lambda: Route({"a": plus_one}, choose=Later()), TypeError, "not one with async def"),
        (lambda: Route({"a": plus_one}, choose=a_or_b), ValueError, "returns 'b' by its hint, and there is no such"),
        (lambda: Route({f"b{i}": [] for i in range(241)}, choose=parity), ValueError, "at most 240"),
        (lambda: ForEach(), ValueError, "ForEach needs at least one element"),
        (lambda: ForEach(plus_one, max_items=0), ValueError, "max_items must be a whole number of at least 1"),
        (lambda: Service(Parallel(3)), TypeError, "not 3"),
        (lambda: Service(Route({"a": plus_one})), ValueError, "begins a service: give it choose="),
        (lambda: Service(Parallel(plus_one), Route({"a": as_it_is})), ValueError, "give it choose="),
        (lambda: Service(plus_one, Route({"a": times_ten})), ValueError, "or return To(name, item)"),
        (lambda: Service(to_text, Parallel(a_text, plus_one)), TypeError, "to_text gives str by its hint, and stage"),
        (lambda: Service(to_text, ForEach(a_text)), TypeError, "ForEach takes a list"),
        (lambda: Service(an_array, ForEach(as_it_is)), TypeError, "ForEach takes a list"),
        (lambda: Service(to_branch), ValueError, "to_branch returns To by its hint, and no Route follows"),
        (lambda: Service(to_branch, times_ten), ValueError, "no Route follows"),
        (lambda: Service(Parallel(to_branch), Route({"a": []}, choose=str)), ValueError, "no Route follows"),
        (lambda: Service(up_to, ForEach(a_text)), TypeError, "the list of stage up_to gives int"),
        (lambda: Service(Parallel(plus_one, times_ten), a_text), TypeError, "Parallel gives tuple[int, int]"),
        (lambda: Service(Parallel(plus_one, plus_one)), ValueError, "two stages are called 'plus_one'"),
        (lambda: Service(plus_one, Route({"a": a_text}, choose=parity)), TypeError, "stage a_text takes str"),
        (lambda: Service(early_text, times_ten), TypeError, "Done[str] by its hint, and the service gives int"),
        (lambda: Service(Stage(small, max_batch_size=2), Parallel({"a": plus_one})), TypeError, "returns Done[int]"),
        (lambda: Service(Stage(small, max_batch_size=2), Csv), ValueError, "go past encode of stage Csv"),
        (lambda: Service(Parallel(plus_one, Csv)), ValueError, "Csv reads a format of its own"),
        (lambda: Service(plus_one, Parallel(times_ten, Csv)), ValueError, "Csv writes a format of its own"),
        (lambda: Service(plus_one, Route({"a": Csv}, choose=parity)), ValueError, "Csv writes a format of its own"),
        (lambda: Service(Route({"a": Parts}, choose=parity), plus_one), ValueError, "Parts answers in parts"),
        (lambda: Service(Parts, ForEach(plus_one)), ValueError, "the last of its service, or of its branch"),
        (
            lambda: Service(Stage(of_eight, max_batch_size=8), Parallel(small_queue(9), small_queue(7))),
            ValueError,
            "max_queue_size of stage queue_of_7 (7) is smaller than the batches of stage of_eight",
        ),
        (
            lambda: Service(Stage(of_eight, max_batch_size=8), Parallel(as_it_is), small_queue(7)),
            ValueError,
            "queue_of_7 (7)",
        ),
        (
            lambda: Service(as_it_is, Parallel(Stage(of_eight, max_batch_size=2, key="header:X-Key"))),
            ValueError,
            "is a header, which only the first stage can see",
        ),
        (lambda: Service(Parallel(plus_one), routes={"/other": None}), ValueError, "begin with a stage"),
        (lambda: Service(Parallel(Parts), max_stream_s=3.0), ValueError, "service returns whole answers"),
    ],
)
def test_what_cannot_work_is_refused(declare: Callable[[], Any], kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=re.escape(text)):
        declare()


def test_a_line_of_lines_is_a_line() -> None:
    service = Service([plus_one, []], [[times_ten]])
    assert [stage.name for stage in service.stages] == ["plus_one", "times_ten"]
    assert service.is_line and service.name == "times_ten"
    assert repr(service) == "<Service times_ten: plus_one -> times_ten>"


def test_a_service_that_ends_in_branches_has_the_name_that_it_is_given() -> None:
    assert Service(Parallel(plus_one)).name == "service"
    assert Service(Parallel(plus_one), name="both").name == "both"
    service = Service(
        plus_one, Route({"even": [], "odd": times_ten}, choose=parity), Parallel({"a": as_it_is, "b": []})
    )
    assert (
        repr(service)
        == "<Service service: plus_one -> Route(even: [], odd: times_ten) -> Parallel(a: as_it_is, b: [])>"
    )


def test_the_same_stage_at_several_places_is_one_stage() -> None:
    shared = Stage(plus_one)
    service = Service(shared, Parallel(shared, [times_ten, shared]))
    assert [stage.name for stage in service.stages] == ["plus_one", "times_ten"] and not service.is_line


def test_a_setting_from_outside_changes_a_shared_stage_once_for_all_places() -> None:
    shared = Stage(plus_one, max_queue_size=10)
    service = Service(shared, Parallel({"a": shared, "b": [shared, shared]}, errors="values"), timeout_s=3.0)
    (other,) = changed([service], {}, {"plus_one": {"max_queue_size": 20}})
    assert [stage.max_queue_size for stage in other.stages] == [20]
    assert repr(other) == repr(service) and other.timeout_s == 3.0 and other.graph[1].errors == "values"  # type: ignore[union-attr]


def test_services_that_share_a_stage_are_refused() -> None:
    shared = Stage(plus_one, run_in="thread")
    with pytest.raises(ValueError, match="services a and b share stage plus_one"):
        App(Service(shared, name="a"), Service(Parallel(shared), name="b"))


def test_branches_may_give_what_the_next_one_takes() -> None:
    Route({"a": [], "b": [], "c": []}, choose=a_or_b)
    Route({"a": []}, choose=str)
    Service(Stage(small, max_batch_size=4), times_ten)
    Service(Parallel(plus_one, times_ten), Stage(total, max_batch_size=8))
    Service(up_to, ForEach(plus_one, times_ten), add_up)
    Service(to_branch, Route({"small": plus_one, "large": []}), times_ten)
    Service(
        to_branch,
        Route({"small": Stage(to_branch, name="b"), "large": Stage(to_branch, name="c")}),
        Route({"small": plus_one, "large": []}),
    )


def test_a_service_with_branches_cannot_run_on_ray() -> None:
    pytest.importorskip("ray")
    from carpool.ray.cluster import Cluster

    with pytest.raises(ValueError, match="has branches"):
        Cluster().moved(Service(Parallel(plus_one)))


def test_what_a_result_says_can_be_read() -> None:
    assert repr(Done(3)) == "Done(3)" and repr(To("a", 3)) == "To('a', 3)"
    assert repr(Parallel(plus_one, [times_ten])) == "Parallel(plus_one, times_ten)"
    assert repr(ForEach(plus_one)) == "ForEach(plus_one)"
    assert carpool.Route({"a": []}, choose=parity).branches == {"a": ()}
