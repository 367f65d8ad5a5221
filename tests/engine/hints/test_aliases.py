"""A hint that is an alias is read as what it stands for, wherever it stands: `NDArray` is one since NumPy 2.5."""

from __future__ import annotations

import sys
import textwrap
import typing
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypedDict, TypeVar

import msgspec
import numpy as np
import pydantic
import pydantic_core
import pytest
from numpy.typing import NDArray
from typing_extensions import TypeAliasType

import carpool
from carpool import Model, Stage
from carpool.client.messages import reader_of, result_in
from carpool.engine.hints import schema
from carpool.engine.type_hints import meant
from carpool.http.protocols.rows import fields_of
from carpool.model import traits_of
from carpool.service.declaration import routes_of

A, B = TypeVar("A"), TypeVar("B")

ALIASES: dict[str, Callable[[Any], Any]] = {
    "an alias": lambda hint: TypeAliasType("Alias", hint),
    "an alias of an alias": lambda hint: TypeAliasType("Outer", TypeAliasType("Inner", hint)),
    "an alias with a parameter": lambda hint: TypeAliasType("Of", A, type_params=(A,))[hint],
    "parameters in another order": lambda hint: TypeAliasType("First", B, type_params=(A, B))[int, hint],
}
if sys.version_info >= (3, 12):
    ALIASES["the `type` of the language"] = lambda hint: typing.TypeAliasType("Alias", hint)
    ALIASES["a `type` with a parameter"] = lambda hint: typing.TypeAliasType("Of", A, type_params=(A,))[hint]


@dataclass
class Query:
    text: str


class Checked(pydantic.BaseModel):
    text: str


HINTS = {
    "a number": float,
    "a text": str,
    "bytes": bytes,
    "a list": list[float],
    "a dict": dict[str, int],
    "a tuple": tuple[int, str],
    "an array": np.ndarray[tuple[Any, ...], np.dtype[np.float32]],
    "a list of arrays": list[np.ndarray[tuple[Any, ...], np.dtype[np.int8]]],
    "a union": float | None,
    "a literal": Literal["a", "b"],
    "a number with bounds": Annotated[float, msgspec.Meta(ge=0)],
    "a dataclass": Query,
    "a pydantic model": Checked,
}


def hinted(function: Any, takes: Any, gives: Any) -> Any:
    """A function with these hints of its last argument and of its result."""
    function.__annotations__ = {"x": takes, "return": gives}
    return function


def plain(takes: Any, gives: Any) -> Any:
    return hinted(lambda x: x, takes, gives)


def generator(gives: Any) -> Any:
    def yields(x: Any) -> Any:
        yield x

    return hinted(yields, float, Iterator[gives])


def model(takes: Any, gives: Any, **hooks: Any) -> type[Model]:
    functions = {"predict": hinted(lambda self, x: x, takes, gives), **hooks}
    return type("M", (Model,), functions)


def stepped(takes: Any, gives: Any) -> type:
    methods = {
        "start": hinted(lambda self, x: x, list[takes], list[Any]),
        "step": hinted(lambda self, x: x, list[Any], list[gives]),
        "stop": lambda self, state: None,
        "predict": Model.predict,
    }
    return type("M", (Model,), methods)


PLACES: dict[str, Callable[[Any], Any]] = {
    "the batch": lambda hint: traits_of(model(hint, Any), batched=True),
    "an item": lambda hint: traits_of(model(hint, hint), batched=False),
    "an item of a batch": lambda hint: traits_of(model(list[hint], list[hint]), batched=True),
    "a function": lambda hint: traits_of(plain(list[hint], list[hint]), batched=True),
    "the results of a batch": lambda hint: traits_of(model(list[float], hint), batched=True),
    "one of two kinds": lambda hint: traits_of(model(typing.Union[hint, None], list[hint | None]), batched=False),  # noqa: UP007
    "the values of a dict": lambda hint: traits_of(model(dict[str, hint], tuple[hint, ...]), batched=False),
    "preprocess": lambda hint: traits_of(
        model(list[int], Any, preprocess=hinted(lambda self, x: x, hint, int)), batched=True
    ),
    "postprocess": lambda hint: traits_of(
        model(Any, list[int], postprocess=hinted(lambda self, x: x, int, hint)), batched=True
    ),
    "parts": lambda hint: traits_of(generator(hint), batched=False),
    "steps": lambda hint: traits_of(stepped(hint, hint | None), batched=True),
    "an address of its own": lambda hint: routes_of({"/own": plain(hint, float)}, Stage(model(float, float)))[0].takes,
}


def seen(place: str, hint: Any) -> Any:
    """What is read of a hint at a place, or the error that refuses it."""
    try:
        return PLACES[place](hint)
    except TypeError as refusal:
        return str(refusal)


@pytest.mark.parametrize("hint", HINTS.values(), ids=HINTS)
@pytest.mark.parametrize("alias", ALIASES.values(), ids=ALIASES)
@pytest.mark.parametrize("place", PLACES)
def test_an_alias_is_what_it_stands_for(place: str, alias: Callable[[Any], Any], hint: Any) -> None:
    """A model whose hint is an alias is read as one with the hint that the alias stands for."""
    assert seen(place, alias(hint)) == seen(place, hint)


def record(kind: str, hint: Any) -> type:
    """A record with one field of such a hint."""
    if kind == "TypedDict":
        return TypedDict("Record", {"x": hint})  # type: ignore[operator]
    if kind == "dataclass":
        return dataclass(type("Record", (), {"__annotations__": {"x": hint}}))
    if kind == "Struct":
        return msgspec.defstruct("Record", [("x", hint)])
    try:
        return pydantic.create_model("Record", x=(hint, ...))
    except pydantic_core.SchemaError as error:
        pytest.skip(f"this pydantic cannot read it: {error}")


@pytest.mark.parametrize("kind", ["TypedDict", "dataclass", "Struct", "pydantic"])
@pytest.mark.parametrize("alias", ALIASES.values(), ids=ALIASES)
def test_the_fields_of_records_are_read_alike(kind: str, alias: Callable[[Any], Any]) -> None:
    """A field whose hint is an alias is one of what the alias stands for, for forms and protocols."""
    for hint in (float, list[int]):
        fields = fields_of(record(kind, alias(hint)))
        assert fields == fields_of(record(kind, hint)) == {"x": (hint, False)}


def test_faults_inside_of_a_field_are_told() -> None:
    """The faults of an item are found also behind a hint that is an alias."""
    if sys.version_info < (3, 12):
        pytest.skip("msgspec reads fields of the language's own aliases, which are new then")
    for kind in ("TypedDict", "dataclass", "Struct"):
        inside = record(kind, typing.TypeAliasType("Texts", list[typing.TypeAliasType("Text", str)]))
        with pytest.raises(msgspec.ValidationError) as caught:
            schema.json_reader(inside)(b'{"x": [1, "a", 2]}')
        error: Any = schema.as_our_error(caught.value, "JSON", inside, b'{"x": [1, "a", 2]}')
        assert [each["loc"] for each in error.details] == [["x", 0], ["x", 2]]


@pytest.mark.parametrize("alias", ALIASES.values(), ids=ALIASES)
def test_a_client_reads_what_an_alias_stands_for(alias: Callable[[Any], Any]) -> None:
    """The type of an answer may be an alias."""
    array = reader_of(alias(HINTS["an array"]))(msgspec.msgpack.encode([1, 2]))
    assert (array.dtype, array.tolist()) == (np.float32, [1.0, 2.0])
    assert reader_of(alias(Query), is_json=True)(b'{"text": "a"}') == Query("a")
    assert result_in(b"a", "text/plain", alias(bytes)) == b"a"


def test_numpy_s_own_alias_means_arrays() -> None:
    """`NDArray` means arrays of its dtype with every version of NumPy."""
    traits = traits_of(model(NDArray[np.float32], NDArray[np.float32]), batched=True)
    assert traits.takes_array and schema.dtype_of(traits.input_type) == np.float32
    assert schema.type_name(traits.input_type) == schema.type_name(HINTS["an array"])


def test_a_hint_without_aliases_is_left_alone() -> None:
    """A hint without an alias stays the same object."""
    for hint in (*HINTS.values(), Callable[[int], str], list[A], tuple[int, ...], None, "a text", Literal[1, "x"]):
        assert meant(hint) is hint


def test_an_alias_inside_of_itself_stays_there() -> None:
    """A hint that is part of itself has an end: the alias stays where it stands in itself."""
    if sys.version_info < (3, 12):
        pytest.skip("the language has no `type` yet")
    names: dict[str, Any] = {}
    exec("type Json = list[Json] | dict[str, Json] | float\ntype Tree[T] = tuple[T, list[Tree[T]]]", names)
    json, tree = names["Json"], names["Tree"]
    assert meant(json) == list[json] | dict[str, json] | float
    assert meant(tree[int]) == tuple[int, list[tree[int]]]
    carpool.Service(Stage(model(list[json], list[tree[int]]), max_batch_size=4))


def test_an_alias_that_means_nothing_where_it_stands_is_no_hint() -> None:
    """An alias of something that is not there is as a hint of it: items are not checked, and the
    log says so.
    """
    if sys.version_info < (3, 12):
        pytest.skip("the language has no `type` yet")
    names: dict[str, Any] = {}
    exec("type Lost = list[Nowhere]", names)
    assert traits_of(model(names["Lost"], float), batched=True).input_type is Any


def test_hints_that_only_type_checkers_know_are_no_obstacle() -> None:
    """A name in a hint that is imported only for type checkers is as no hint, for whatever reads the
    signature: since Python 3.14 that needs no `from __future__ import annotations`.
    """
    text = """
        class M:
            def __init__(self, scale: Nowhere = 1) -> None: pass
            def predict(self, xs: list[Nowhere]) -> list[float]: return xs
        def several(xs: list[Nowhere], ys: list[int]) -> list[Nowhere]: return xs
        def adapter(body: Nowhere) -> float: return 1.0
        def padded(x: Nowhere, lengths: Nowhere) -> Nowhere: return x
    """
    lazily = "" if sys.version_info >= (3, 14) else "from __future__ import annotations\n"
    names: dict[str, Any] = {}
    exec(compile(lazily + textwrap.dedent(text), "<hints>", "exec", dont_inherit=True), names)

    first = Stage(names["M"], max_batch_size=4, kwargs={"scale": 2})
    assert first.traits.input_type is Any
    assert routes_of({"/own": names["adapter"]}, first)[0].takes is Any
    assert carpool.batch(names["several"])(1, 2) == 1
    padded = carpool.batch(merge=carpool.pad())(names["padded"])
    assert padded(np.ones((1, 2))).tolist() == [[1.0, 1.0]]
