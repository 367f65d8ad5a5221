"""The hint of `predict` is compared with what it gets, a list or one item, where a stage or a function is declared."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import functools
import inspect
import subprocess
import sys
import warnings
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from decimal import Decimal
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, NewType, Protocol, TypedDict, TypeVar, Union

import msgspec
import numpy as np
import pydantic
import pytest
from numpy.typing import NDArray

import carpool
from carpool import Stage
from carpool.engine.type_hints import HintWarning
from tests.support.late import Late

fastapi = Late("fastapi")

T = TypeVar("T")
Floats = TypeVar("Floats", list[float], np.ndarray)
UserId = NewType("UserId", int)
UserIds = NewType("UserIds", list[int])


class Colour(Enum):
    RED = 1


@dataclasses.dataclass
class Query:
    text: str


class Point(NamedTuple):
    x: float


class Record(TypedDict):
    text: str


class Struct(msgspec.Struct):
    text: str


class Checked(pydantic.BaseModel):
    text: str


class Foreign:
    """A class of some library, such as a tensor, of which nothing is known here."""


class Sized(Protocol):
    def __len__(self) -> int: ...


def model(takes: Any, gives: Any = None, **attributes: Any) -> type[carpool.Model]:
    """A model whose `predict` has these hints; None for none."""

    class Hinted(carpool.Model):
        def predict(self, x: Any) -> Any:
            return x

    hints = {"x": takes, "return": gives}
    Hinted.predict.__annotations__ = {name: hint for name, hint in hints.items() if hint is not None}
    for name, value in attributes.items():
        setattr(Hinted, name, value)
    return Hinted


def function(takes: Any) -> Callable[[Any], Any]:
    """A function with this hint."""

    def hinted(x: Any) -> Any:
        return x

    hinted.__annotations__ = {"x": takes}
    return hinted


@pytest.mark.parametrize(
    ("takes", "meant"),
    [
        (float, "list[float]"),
        (int, "list[int]"),
        (bool, "list[bool]"),
        (str, "list[str]"),
        (bytes, "list[bytes]"),
        (Decimal, "list[Decimal]"),
        (np.float32, "list[float32]"),
        (datetime.datetime, "list[datetime]"),
        (Colour, "list[Colour]"),
        (Literal["a", "b"], "list[Literal['a', 'b']]"),
        (float | None, "list[float | None]"),
        (Union[int, str], f"list[{Union[int, str]}]".replace("typing.", "")),  # noqa: UP007
        (Annotated[float, msgspec.Meta(ge=0)], "list[Annotated[float, "),
        (UserId, "list["),
        (dict[str, float], "list[dict[str, float]]"),
        (Mapping[str, float], "list[collections.abc.Mapping[str, float]]"),
        (Query, "list[Query]"),
        (Struct, "list[Struct]"),
        (Checked, "list[Checked]"),
        (Record, "list[Record]"),
        (Point, "list[Point]"),
    ],
)
def test_a_hint_that_cannot_mean_a_list_is_refused(takes: Any, meant: str) -> None:
    """A `predict` or function that gets lists, but is hinted to take one item, is refused, with the hint that was
    probably meant.
    """
    with pytest.raises(TypeError, match=r"with max_batch_size it gets a list: did you mean list\[") as refusal:
        Stage(model(takes), max_batch_size=8)
    assert meant in str(refusal.value) and str(refusal.value).startswith("predict of Hinted takes ")
    with pytest.raises(TypeError, match=r"^hinted takes .*with max_batch_size it gets a list: did you mean list\["):
        Stage(function(takes), max_batch_size=8)
    for each in (function(takes), model(takes), model(takes)()):
        with pytest.raises(TypeError, match=r"called in batches it gets a list: did you mean list\["):
            carpool.batch(max_batch_size=8)(each)
    Stage(model(takes))


@pytest.mark.parametrize(
    "takes",
    [
        None,
        Any,
        object,
        list,
        list[float],
        list[dict[str, float]],
        Sequence[float],
        Collection[float],
        Iterable[float],
        tuple[float, ...],
        Hashable,
        np.ndarray,
        NDArray[np.float32],
        T,
        Floats,
        UserIds,
        float | list[float],
        list[float] | None,
        Annotated[list[float], msgspec.Meta(min_length=1)],
        Sized,
        Foreign,
        pytest.param("pandas", id="DataFrame"),
        "Unknown",
    ],
)
def test_a_hint_that_may_mean_a_list_is_taken(takes: Any) -> None:
    """A hint that may stand for a list is never refused: sequences, arrays, frames, unions, type variables, classes of
    libraries, and what cannot be resolved.
    """
    if takes == "pandas":
        takes = pytest.importorskip("pandas").DataFrame
    Stage(model(takes), max_batch_size=8)
    carpool.batch(max_batch_size=8)(model(takes))


def test_hints_that_cannot_be_resolved_are_told_once(caplog: pytest.LogCaptureFixture) -> None:
    """What is read twice, for types and for the shape of `predict`, is complained about once."""
    Stage(model("Unknown"), max_batch_size=8)

    assert caplog.text.count("cannot be resolved") == 1


def test_merged_chunks_are_no_lists() -> None:
    """With `merge=` a function takes what callers bring, such as a dict of columns, so no hint is refused."""

    @carpool.batch(merge=True)
    def total(columns: dict[str, list[float]]) -> dict[str, list[float]]:
        return {"total": [sum(row) for row in zip(*columns.values(), strict=True)]}

    assert total({"a": [1.0, 2.0], "b": [3.0, 4.0]}) == {"total": [4.0, 6.0]}


def for_each(one: Callable[[Any, float], float]) -> Callable[[Any, list[float]], list[float]]:
    """A decorator that gives its function something else than it gets."""

    @functools.wraps(one)
    def each(self: Any, xs: list[float]) -> list[float]:
        return [one(self, x) for x in xs]

    return each


def test_decorators_may_take_lists_apart() -> None:
    """A hint of a function below a decorator says nothing, unless the decorator is known to pass on what it gets."""

    class Apart(carpool.Model):
        @for_each
        def predict(self, x: float) -> float:
            return 2 * x

    class PassedOn(carpool.Model):
        @contextlib.ContextDecorator.__call__.__get__(contextlib.nullcontext())  # as torch.inference_mode() does
        def predict(self, x: float) -> float:
            return x

    assert carpool.batch(Apart)(3.0) == 6.0
    Stage(Apart, max_batch_size=8)
    with pytest.raises(TypeError, match="did you mean"):
        Stage(PassedOn, max_batch_size=8)


def test_what_a_partial_has_filled_is_no_item() -> None:
    """The hint that counts is that of the first argument that is left to callers."""

    def above(threshold: float, xs: list[float]) -> list[bool]:
        return [x > threshold for x in xs]

    assert Stage(functools.partial(above, 0.5), max_batch_size=8).traits.input_type is float
    with pytest.raises(TypeError, match="above takes float, but"):
        Stage(above, kwargs={"xs": []}, max_batch_size=8)


@pytest.mark.parametrize(
    "each",
    [
        model(list[float]),
        model(list[float], list[float]),
        model(list[str], np.ndarray),
        model(list[float], list[float], examples=(1.0, 2.0)),
        model(list[str], list[int], examples=("a", "b")),
        model(list[float], preprocess=lambda self, x: x),
        function(list[float]),
    ],
)
def test_a_list_without_batches_is_asked_about(each: Any) -> None:
    """A `predict` that is hinted to take a list, in a stage without batches, is probably a slip: a warning names
    `max_batch_size`, at the line of the stage, and how to say that an item is meant.
    """
    if hasattr(each, "preprocess"):
        each.preprocess.__annotations__ = {"x": str, "return": float}
    with pytest.warns(HintWarning, match="give the stage a max_batch_size .* hint it as Sequence") as told:
        Stage(each)
    assert len(told) == 1 and told[0].filename == __file__


def of_hints(takes: Any, gives: Any) -> Callable[[Any, Any], Any]:
    """A hook with these hints."""

    def hook(self: Any, x: Any) -> Any:
        return x

    hook.__annotations__ = {name: hint for name, hint in {"x": takes, "return": gives}.items() if hint is not None}
    return hook


@pytest.mark.parametrize(
    "each",
    [
        model(None),
        model(Any),
        model(list),
        model(float, float),
        model(np.ndarray, np.ndarray),
        model(Sequence[float]),
        model(tuple[float, float], list[float]),
        model(Annotated[list[float], msgspec.Meta(min_length=64)], list[float]),
        model(list[float], float),
        model(list[float], str),
        model(list[float], dict[str, float]),
        model(list[float], list[float], examples=([1.0, 2.0],)),
        model(list[float], list[float], preprocess=of_hints(bytes, list[float])),
        model(list[float], list[float], preprocess=of_hints(None, None)),
        model(list[float], list[float], accepts=("text/csv",), decode=lambda self, bodies: bodies),
    ],
)
def test_a_list_that_is_an_item_is_taken(each: Any) -> None:
    """There is no warning where a result that is no list, an example, a hook, a format or the hint itself shows that
    an item is a list.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Stage(each)


def test_workers_do_not_repeat_the_question(tmp_path: Path) -> None:
    """The warning comes once, where the stage is declared: workers, which import the same module, keep quiet."""
    program = """
import carpool

class Sorted(carpool.Model):
    def predict(self, xs: list[float]) -> list[float]:
        return sorted(xs)

service = carpool.Service(carpool.Stage(Sorted, workers=2))

if __name__ == "__main__":
    with service.run() as s:
        print(s.predict([2.0, 1.0]))
"""
    (tmp_path / "declared.py").write_text(program)
    done = subprocess.run(
        [sys.executable, "declared.py"], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.endswith("[1.0, 2.0]\n")
    assert (done.stdout + done.stderr).count("HintWarning") == 1, done.stderr


def test_an_exception_in_the_place_of_a_result_may_be_hinted() -> None:
    """A hint that names exceptions beside the results means the results, which are all that is ever written."""
    assert Stage(model(list[str], list[int | Exception]), max_batch_size=8).traits.output_type is int
    assert Stage(model(str, int | KeyError | None)).traits.output_type == (int | None)
    assert Stage(model(str, ValueError | KeyError)).traits.output_type is Any


@carpool.batch
def length(texts: list[str]) -> list[int]:
    """Count letters."""
    return [len(text) for text in texts]


class Norm(carpool.Model):
    def preprocess(self, text: str) -> float:
        return float(text)

    def predict(self, xs: list[float]) -> list[float]:
        return [abs(x) for x in xs]

    @carpool.batch(max_batch_size=8)
    async def later(self, keys: list[bytes]) -> list[str]:
        return [key.decode() for key in keys]


def test_the_signature_of_a_batched_function_is_that_of_its_callers() -> None:
    """`inspect.signature` and `help` tell what callers bring and get, one item, and not the lists of the function."""

    @carpool.batch(merge=True)
    def doubled(rows: list[float]) -> list[float]:
        return [2 * row for row in rows]

    @carpool.batch
    def unhinted(xs):  # type: ignore[no-untyped-def]
        return xs

    assert str(inspect.signature(length)) == "(x: str) -> int"
    assert str(inspect.signature(Norm.later)) == str(inspect.signature(Norm().later)) == "(x: bytes) -> str"
    assert str(inspect.signature(carpool.batch(Norm))) == "(x: str) -> float"
    assert str(inspect.signature(carpool.batch(Norm()))) == "(x: str) -> float"
    assert str(inspect.signature(doubled)) == "(x: list[float]) -> list[float]"
    assert str(inspect.signature(unhinted)) == "(x)"
    assert "function" in inspect.signature(type(length)).parameters  # the class itself keeps its own
    assert length(*inspect.signature(length).bind(x="four").args) == length(x="four") == 4


def test_fastapi_depends_on_a_batched_function() -> None:
    """FastAPI's `Depends` asks its clients for one item, by the hint of one item."""
    app = fastapi.FastAPI()

    @app.get("/")
    def answer(n: Annotated[int, fastapi.Depends(length)]) -> int:
        return n

    (parameter,) = app.openapi()["paths"]["/"]["get"]["parameters"]
    assert (parameter["name"], parameter["schema"]["type"]) == ("x", "string")
