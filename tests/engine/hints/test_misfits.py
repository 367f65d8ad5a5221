"""What is wrong with an item, fault by fault: by msgspec's types and pydantic's, bounded, and the same over HTTP."""

from __future__ import annotations

import enum
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Generic, Literal, NamedTuple, NotRequired, TypedDict, TypeVar

import msgspec
import numpy as np
import pydantic
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from numpy.typing import NDArray

import carpool
from carpool import Service, Stage
from carpool.engine.details import MOST, sanitized
from carpool.engine.hints import misfits, schema
from carpool.engine.wire.outcome import FailureReport, Outcome, pack_report, unpack_error
from carpool.errors import ValidationError
from tests.support.properties import PROPERTY

T = TypeVar("T")
Count = Annotated[int, msgspec.Meta(ge=0)]


class Color(enum.Enum):
    RED = "red"


class Inner(msgspec.Struct, forbid_unknown_fields=True, rename="camel"):
    some_count: Count
    numbers: list[int] = []


class Cat(msgspec.Struct, tag="cat"):
    lives: int


class Dog(msgspec.Struct, tag="dog"):
    age: int
    name: str


class Row(msgspec.Struct, array_like=True):
    a: int
    b: int


class Box(msgspec.Struct, Generic[T]):
    inside: T
    label: str


class Tree(msgspec.Struct):
    v: int = 0
    kids: list[Tree] = []


class Checked(msgspec.Struct):
    low: int
    high: int

    def __post_init__(self) -> None:
        if self.low > self.high:
            raise ValueError("low is above high")


class Pair(NamedTuple):
    a: int
    b: str


@dataclass
class Page:
    title: Annotated[str, msgspec.Meta(max_length=3)]
    point: tuple[float, float]
    inner: Inner | None = None
    scores: dict[int, float] = field(default_factory=dict)


class Query(TypedDict):
    page: Page
    top: NotRequired[int]


class Person(pydantic.BaseModel):
    text: str = pydantic.Field(max_length=3)
    n: int = pydantic.Field(ge=0)
    secret: pydantic.SecretStr = pydantic.SecretStr("")


class Couple(msgspec.Struct):
    both: list[Person]
    since: int


def error_of(kind: Any, item: Any, what: str = "JSON") -> ValidationError:
    """What a caller is told of an item."""
    packed = what == "msgpack"
    body = msgspec.msgpack.encode(item) if packed else item if isinstance(item, bytes) else json.dumps(item).encode()
    with pytest.raises(Exception) as caught:
        (schema.msgpack_reader if packed else schema.json_reader)(kind)(body)
    error = schema.as_our_error(caught.value, what, kind, body)
    assert isinstance(error, ValidationError)
    assert "\n" not in str(error)
    return error


def places(kind: Any, item: Any, what: str = "JSON") -> list[tuple[str, str]]:
    """Where the faults are, and of which kind."""
    return [(".".join(map(str, each["loc"])), each["type"]) for each in error_of(kind, item, what).details]


CASES: list[tuple[Any, Any, list[tuple[str, str]]]] = [
    (int, "x", [("", "wrong_type")]),
    (list[int], ["a", 1, "b"], [("0", "wrong_type"), ("2", "wrong_type")]),
    (Sequence[int], [1, None], [("1", "wrong_type")]),
    (set[Count], [1, -1], [("1", "out_of_bounds")]),
    (tuple[int, ...], [1, "x", "y"], [("1", "wrong_type"), ("2", "wrong_type")]),
    (tuple[int, str], ["x", 1], [("0", "wrong_type"), ("1", "wrong_type")]),
    (tuple[int, str], [1], [("", "out_of_bounds")]),
    (Annotated[list[int], msgspec.Meta(min_length=2)], ["x"], [("", "out_of_bounds"), ("0", "wrong_type")]),
    (Annotated[list[int], msgspec.Meta(min_length=2)], [1], [("", "out_of_bounds")]),
    (dict[str, int], {"a.b": "x", "c": 1, "d": None}, [("a.b", "wrong_type"), ("d", "wrong_type")]),
    (Literal["a"] | int, "b", [("", "invalid_value")]),
    (dict[str, Color], {"a": "blue", "b": "red"}, [("a", "invalid_value")]),
    (Inner, {}, [("someCount", "missing")]),
    (
        Inner,
        {"someCount": -1, "numbers": [1, "x"], "other": 1},
        [("other", "unknown_field"), ("someCount", "out_of_bounds"), ("numbers.1", "wrong_type")],
    ),
    (
        list[Cat | Dog],
        [{"type": "cat", "lives": "x"}, {"type": "dog", "name": 1}, {"type": "cow"}],
        [("0.lives", "wrong_type"), ("1.age", "missing"), ("1.name", "wrong_type"), ("2.type", "invalid_value")],
    ),
    (Cat, {"type": "dog", "lives": "x"}, [("type", "invalid_value")]),
    (list[Row], [[1, 2], ["x", "y"]], [("1.0", "wrong_type")]),
    (list[Pair], [["x", 1]], [("0.0", "wrong_type")]),
    (Box[int], {"inside": "x"}, [("label", "missing"), ("inside", "wrong_type")]),
    (list[Checked], [{"low": 2, "high": 1}, {"low": "x", "high": "y"}], []),
    (
        Query,
        {
            "page": {
                "title": "long",
                "point": ["x", 1],
                "inner": {"someCount": "x", "numbers": 3},
                "scores": {"1": "x"},
            },
            "top": "x",
        },
        [
            ("page.title", "out_of_bounds"),
            ("page.point.0", "wrong_type"),
            ("page.inner.someCount", "wrong_type"),
            ("page.inner.numbers", "wrong_type"),
            ("page.scores.1", "wrong_type"),
            ("top", "wrong_type"),
        ],
    ),
    (Query, {"top": 1}, [("page", "missing")]),
    (Person, {"text": "long", "n": -1}, [("text", "string_too_long"), ("n", "greater_than_equal")]),
    (
        Couple,
        {"both": [{"text": "long", "n": -1}, {"text": "", "n": 0}, {"n": 1}], "since": "x"},
        [
            ("both.0.text", "string_too_long"),
            ("both.0.n", "greater_than_equal"),
            ("both.2.text", "missing"),
            ("since", "wrong_type"),
        ],
    ),
    (dict[str, NDArray[np.float32]], {"a": [[1], [2, 3]], "b": ["x"], "c": [1]}, []),
]
CASES = [case for case in CASES if case[2]]


@pytest.mark.parametrize(("kind", "item", "faults"), CASES)
@pytest.mark.parametrize("what", ["JSON", "msgpack"])
def test_every_fault_of_an_item_is_told(kind: Any, item: Any, faults: list[tuple[str, str]], what: str) -> None:
    """Every fault of an item is listed with its place and kind, in the order of the type's fields;
    the message is one line about the first.
    """
    if what == "msgpack" and kind is Query:
        item = {**item, "page": {**item["page"], "scores": {1: "x"}}} if "page" in item else item
    assert places(kind, item, what) == faults


def test_what_types_own_code_says_is_told() -> None:
    """What `__post_init__` and readers of our own say is told for each part that they refuse."""
    found = error_of(list[Checked], [{"low": 2, "high": 1}, {"low": "x", "high": "y"}]).details
    assert [(each["loc"], each["type"]) for each in found] == [
        ([0], "value_error"),
        ([1, "low"], "wrong_type"),
        ([1, "high"], "wrong_type"),
    ]
    assert found[0]["msg"] == "low is above high"
    arrays = error_of(dict[str, NDArray[np.float32]], {"a": [[1], [2, 3]], "b": ["x"], "c": [1]}).details
    assert [(each["loc"], each["type"]) for each in arrays] == [(["a"], "value_error"), (["b"], "value_error")]


def test_keys_of_a_dict_are_named() -> None:
    """Keys of a dict that cannot be what the type says are named."""
    found = error_of(dict[int, float], {"a": 1.0, "2": 2.0, "b": 3.0}).details
    assert [each["loc"] for each in found] == [["a"], ["b"]]


def test_a_secret_is_not_repeated() -> None:
    """pydantic's own list has the input, its link and its context; ours says what is wrong, and
    repeats no secret.
    """
    error = error_of(Person, {"text": "hunter2", "n": 0, "secret": 17})
    assert "hunter2" not in json.dumps(error.details)
    assert {frozenset(each) for each in error.details} == {frozenset({"loc", "msg", "type"})}


def test_details_are_bounded() -> None:
    """Whatever the item, details are bounded in number, depth and length; of a large item only the
    first fault is told.
    """
    assert len(error_of(list[int], ["x"] * 1000).details) == MOST
    (long,) = error_of(dict[str, int], {"k" * 10_000: "x"}).details
    assert len(json.dumps(long)) < 1000
    nested: Any = {"v": "x"}
    for _ in range(100):
        nested = {"kids": [nested]}
    (deep,) = error_of(Tree, nested).details
    assert len(deep["loc"]) == 32
    assert places(list[int], ["x"] * 100_000) == [("0", "wrong_type")]


def test_looking_for_faults_ends() -> None:
    """Where there is too much to be looked at the search for faults ends, and the first one is
    told.
    """
    calls = 0

    class Counts(pydantic.BaseModel):
        n: int

        @pydantic.field_validator("n")
        @classmethod
        def count(cls, n: int) -> int:
            nonlocal calls
            calls += 1
            return n

    item = {f"{i}": {"n": i} for i in range(3000)} | {"bad": {"n": "x"}}
    (found,) = error_of(dict[str, Counts], item).details
    assert found["msg"].startswith("Input should be a valid integer")
    assert calls < 8000


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit, RecursionError])
def test_a_type_that_raises_later_on_costs_only_details(error: type[BaseException]) -> None:
    """If a type's own code raises at the second look, only details are lost: the first fault is
    told.
    """
    calls = 0

    class Moody(msgspec.Struct):
        n: int

        def __post_init__(self) -> None:
            nonlocal calls
            calls += 1
            if calls > 1:
                raise error("mood")

    found = error_of(tuple[Moody, int], [{"n": 1}, "x"]).details
    assert [each["loc"] for each in found][-1:] == [[1]] or error is ValueError


def test_what_a_type_s_own_exception_holds_is_not_looked_at() -> None:
    """Details of a type's own exception, or a trap in their place, are not looked at; the item does
    not fit all the same.
    """

    class Odd(ValueError):
        details = property(lambda self: 1 / 0)

    class Picky(msgspec.Struct):
        n: int

        def __post_init__(self) -> None:
            raise Odd("never")

    (found,) = error_of(list[Picky], [{"n": 1}]).details
    assert found == {"loc": [0], "msg": "never", "type": "value_error"}


# -- items of any kind

SCALARS = st.none() | st.booleans() | st.integers(-5, 5) | st.text("ab.[]`$ -", max_size=4)
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["page", "title", "point", "inner", "scores", "someCount", "numbers", "v", "kids", "type"])
            | st.text("ab.[]`$ -", max_size=4),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)
KINDS = [
    Query,
    Page,
    Inner,
    Tree,
    Cat | Dog,
    Box[list[int]],
    dict[str, Row],
    list[Page | None],
    tuple[int, Tree],
    Couple,
]


@PROPERTY
@given(st.sampled_from(KINDS), VALUES, st.sampled_from(["JSON", "msgpack"]))
@example(tuple[int, Tree], [None], "JSON")  # too short, of which one reader does not speak first
def test_whatever_does_not_fit_has_details(kind: Any, item: Any, what: str) -> None:
    """Whatever does not fit has at least one detail, all of them at places that are there or
    missing, and that of the first fault is among them.
    """
    body = msgspec.msgpack.encode(item) if what == "msgpack" else json.dumps(item).encode()
    try:
        (schema.msgpack_reader if what == "msgpack" else schema.json_reader)(kind)(body)
    except msgspec.ValidationError as error:
        ours = schema.as_our_error(error, what, kind, body)
        assert isinstance(ours, ValidationError)
        assert ours.details
        for each in ours.details:
            part = item
            for step in each["loc"][:-1]:
                part = part[step]
            assert each["msg"]
        (first, *_) = misfits.first_of(error, [])
        assert any(_same(first["loc"], each["loc"]) for each in ours.details), (first, ours.details)


def _same(one: list[int | str], other: list[int | str]) -> bool:
    """Whether two places are the same one, as far as msgspec's text names it: not the keys of a dict."""
    if "..." in one:
        one = one[: one.index("...")]
        other = other[: len(one)]
    return one == other or any(set(str(step)) & set(".[]`$") for step in other)


# -- details of any kind


class Awkward:
    def __iter__(self) -> Any:
        raise SystemExit


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ([{"loc": ["a", 0], "msg": "m", "type": "t"}], [{"loc": ["a", 0], "msg": "m", "type": "t"}]),
        (({"loc": (True, 2.5), "msg": 3, "type": None, "input": "secret"},), [["True", "2.5"], "3", "None"]),
        ([{"loc": [10**30], "msg": "\ud800", "type": "t"}], [[f"{10**30}"], "?", "t"]),
        (None, []),
        (3, []),
        (Awkward(), []),
        (["text"], []),
        ([{"loc": Awkward(), "msg": "m", "type": "t"}], []),
        ([{"loc": [], "msg": "m"}], []),
    ],
)
def test_details_are_made_plain(given: Any, expected: list[Any]) -> None:
    """Details become short texts and numbers, whatever they were."""
    found = sanitized(given)
    if expected and isinstance(expected[0], list):
        assert [found[0]["loc"], found[0]["msg"], found[0]["type"]] == expected
    else:
        assert found == expected
    json.dumps(found).encode()


def test_details_cross_the_process_border() -> None:
    """Details cross the border between processes as plain data."""
    details = [{"loc": ["a", 1], "msg": "m", "type": "t"}]
    error = unpack_error(Outcome.INVALID_ITEM, pack_report(FailureReport("x", details=details)))  # type: ignore[arg-type]
    assert isinstance(error, ValidationError)
    assert error.details == tuple(details)


@pytest.mark.parametrize(
    "details",
    [3, "x", [3], [{"loc": 3, "msg": "", "type": ""}], [{"loc": [1.5], "msg": "", "type": ""}], [{}]],
)
def test_details_that_a_worker_makes_up_do_no_harm(details: Any) -> None:
    """Details that a worker makes up are read as none, or the report as unreadable."""
    error = unpack_error(Outcome.INVALID_ITEM, msgspec.msgpack.encode(["x", "", "", details]))
    assert isinstance(error, ValidationError)
    assert error.details == ()


def test_details_that_a_worker_makes_up_are_bounded() -> None:
    """Of any number of details that a worker makes up, of any length, few and short ones are kept."""
    many = [{"loc": [0] * 1000, "msg": "m" * 10**5, "type": "t" * 10**5}] * 1000
    bounded = unpack_error(Outcome.INVALID_ITEM, msgspec.msgpack.encode(["x", "", "", many]))
    assert isinstance(bounded, ValidationError)
    assert len(bounded.details) == MOST
    assert len(json.dumps(bounded.details)) < 100_000


class Refuses(carpool.Model):
    """A type that raises what the item says."""

    def predict(self, x: str) -> str:
        if x == "with details":
            raise ValidationError("not this", details=[{"loc": ["a"], "msg": "bad", "type": "mine"}])
        if x == "with odd ones":
            error = ValidationError("not this")
            error.details = Awkward()  # type: ignore[assignment]
            raise error
        raise ValidationError("not this")


@pytest.mark.parametrize("run_in", ["process", "thread"])
def test_a_model_may_give_details_of_its_own(run_in: Any) -> None:
    """Python callers find the details that a model gives on the error, as they were given."""
    with Service(Stage(Refuses, run_in=run_in)).run() as service:
        for item, expected in (
            ("with details", ({"loc": ["a"], "msg": "bad", "type": "mine"},)),
            ("with odd ones", ()),
            ("without", ()),
        ):
            with pytest.raises(ValidationError, match="not this") as caught:
                service.predict(item)
            assert caught.value.details == expected


def test_an_error_keeps_its_details_when_it_is_copied(roundtrip: Callable[[Any], Any]) -> None:
    """A copy of an error has its details."""
    error = roundtrip(ValidationError("x", details=[{"loc": ["a"], "msg": "bad", "type": "mine"}]))
    assert (str(error), error.details[0]["loc"]) == ("x", ["a"])


@pytest.fixture(params=["pickle", "copy"])
def roundtrip(request: pytest.FixtureRequest) -> Callable[[Any], Any]:
    import copy
    import pickle

    return copy.copy if request.param == "copy" else lambda x: pickle.loads(pickle.dumps(x))
