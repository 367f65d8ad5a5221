"""Reading and writing a batch of one format at once has the same outcome as doing so item by item."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import product
from math import inf, nan
from typing import Annotated, Any, Literal

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from msgspec import Meta

from carpool import Model
from carpool.engine.call.invoke import Invoker
from carpool.engine.call.results import Failed, run_now
from carpool.engine.call.retry import Retrier
from carpool.engine.rows import ArrayRows
from carpool.engine.wire import order as wire
from carpool.engine.wire.arrays import block_of
from carpool.engine.wire.frame import Frame, FrameKind
from carpool.engine.wire.outcome import read_report
from carpool.engine.wire.payload import JSON, MSGPACK, OBJECT, RAW, Scalars, dump, load
from carpool.engine.worker.answer import BatchAnswerer
from carpool.engine.worker.serve import StepAnswerer
from carpool.engine.worker.steps import Outs, Row
from carpool.model import traits_of
from tests.support.properties import PROPERTY
from tests.support.values import seen


class Reads(Model):
    def predict(self, xs: list[int]) -> list[int]:
        return xs


class Arrays(Model):
    def predict(self, xs: list[Any]) -> list[Any]:
        return xs


def answerer_of(model: type[Model], is_last: bool = True) -> BatchAnswerer:
    invoker = Invoker(model, {}, traits_of(model, True), Retrier(isolate_errors=True), batched=True)
    return BatchAnswerer(invoker, is_first=True, is_last=is_last)


class Rows(Model):
    """Returns ten rows, whatever it gets."""

    def predict(self, xs: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        return np.zeros((10, 2))


def test_a_number_of_rows_that_fits_by_chance_is_doubted_in_arrays_too() -> None:
    """Ten rows for three items are an error, and so they are for ten items after that, whether the items are one array
    or not.
    """
    for in_one in (True, False):
        invoker = Invoker(Rows, {}, traits_of(Rows, True), Retrier(isolate_errors=True), batched=True)
        assert invoker.runs_arrays

        def run(n: int, invoker: Invoker = invoker, in_one: bool = in_one) -> Any:
            whole = np.zeros((n, 2))
            return invoker.run_array(whole, [], inf, None) if in_one else invoker.run_now(list(whole), [])

        assert all(type(each) is Failed for each in run(3))
        assert all(type(each) is Failed for each in run(10))


scalars = st.one_of(st.none(), st.booleans(), st.integers(-(2**70), 2**70), st.floats(), st.text(max_size=3))
arrays = st.builds(
    lambda shape, dtype, start: np.arange(start, start + np.prod(shape)).reshape(shape).astype(dtype),
    st.sampled_from([(2,), (3,), (2, 2), (0,), ()]),
    st.sampled_from(["f4", "f8", "i8", ">f4"]),
    st.integers(0, 9),
)
objects = st.one_of(scalars, arrays, st.lists(scalars, max_size=2), st.binary(max_size=3))
alike = st.one_of(
    st.lists(st.floats(), min_size=1, max_size=5),
    st.lists(st.builds(lambda i: np.array([i, i + 1.0]), st.integers(0, 9)), min_size=1, max_size=5),
    st.lists(objects, min_size=1, max_size=5),
)
bodies = st.sampled_from([b"1", b"-7", b'"x"', b"", b"{", b"[[[[1]]]]", b"\xff", b"\x07", b"1.5"])


def told(value: Any) -> Any:
    """All that a program can tell of a value or of a failure."""
    if type(value) is Failed:
        return "failed", type(value.error), str(value.error)
    return seen(value)


def batch(format: int, payloads: list[Any], deadline: float = inf) -> Frame:
    n = len(payloads)
    return Frame(FrameKind.BATCH, 1, list(range(n)), bytes([format]) * n, bytes(n), [deadline] * n, payloads)


def decoded(model: type[Model], frame: Frame) -> None:
    """What is read at once is what is read item by item, or nothing is read at once."""
    together = answerer_of(model)._decode_alike(frame, 0.0)
    each = run_now(answerer_of(model)._decode_each(frame, 0.0, inf, []))

    if together is not None:
        assert [told(value) for value in together] == [told(value) for value in each]
    else:
        assert Failed in set(map(type, each))


@PROPERTY
@given(alike)
def test_objects_are_read_at_once_as_one_by_one(values: list[Any]) -> None:
    """Objects that are read at once, as scalars or as one array, are those that are read one by
    one.
    """
    decoded(Arrays, batch(OBJECT, [dump(value) for value in values]))


@PROPERTY
@given(st.sampled_from([JSON, MSGPACK, RAW]), st.lists(bodies, min_size=1, max_size=5))
def test_bodies_are_read_at_once_as_one_by_one(format: int, payloads: list[bytes]) -> None:
    """Bodies of one format that are read at once give the items that are read one by one; if one
    cannot be read, none is read at once.
    """
    decoded(Reads, batch(format, list(payloads)))


def test_expired_items_are_not_read_at_once() -> None:
    """A batch with an item whose deadline has passed is read item by item."""
    frame = batch(OBJECT, [dump(1.0), dump(2.0)])
    frame.deadlines = [inf, 0.0]

    assert answerer_of(Reads)._decode_alike(frame, 0.0) is None


@PROPERTY
@given(alike, st.sampled_from([OBJECT, JSON, MSGPACK, RAW]), st.booleans(), st.booleans())
def test_results_are_written_at_once_as_one_by_one(
    values: list[Any], accept: int, is_last: bool, as_rows: bool
) -> None:
    """Results that are written at once have the outcomes and payloads of those that are written one
    by one; if one cannot be written, none is written at once.
    """
    if as_rows:
        assume(
            {(type(v), getattr(v, "shape", None), str(getattr(v, "dtype", ""))) for v in values}
            == {(np.ndarray, (2,), "float64")}
        )
        values = ArrayRows(np.stack(values))
    n = len(values)
    accepts = bytes([accept]) * n
    together, each = (Frame(FrameKind.REPLY, 1, list(range(n))) for _ in range(2))
    answerer = answerer_of(Arrays, is_last)
    encoders = answerer._usual.encoders  # type: ignore[union-attr]
    done = answerer._write_alike(values, accepts, set(map(type, values)), together, encoders)
    answerer._write_each(list(values), accepts, each, encoders)

    if done:
        assert together.formats == each.formats
        assert [opened(p, accept, is_last) for p in together.payloads] == [
            opened(p, accept, is_last) for p in each.payloads
        ]
    else:
        assert any(each.formats)
        failed = [read_report(p) for p, outcome in zip(each.payloads, each.formats, strict=True) if outcome]
        assert all(report.message for report in failed)


def gives(kind: Any) -> type[Model]:
    """A model whose results are of a type."""

    class Gives(Model):
        def predict(self, xs):  # type: ignore[no-untyped-def]
            return xs

    Gives.predict.__annotations__ = {"xs": list[Any], "return": list[kind]}
    return Gives


plain = [None, True, 0, -7, 2**63, 2**64, 0.5, inf, -inf, nan, "", "null", "x,y", '"', "1],[2", "\ud800"]


@PROPERTY
@given(
    st.sampled_from([Any, int, float, str, bool, float | None, int | str, Literal["x,y"], Annotated[int, Meta(ge=0)]]),
    st.lists(st.sampled_from(plain), min_size=1, max_size=6) | st.lists(st.integers(-1, 9), min_size=4, max_size=6),
)
def test_scalars_are_written_as_json_at_once_as_one_by_one(kind: Any, values: list[Any]) -> None:
    """Scalars that are written in one go are the same bytes as one by one, and are so written only
    if each of them fits.
    """
    answerer = answerer_of(gives(kind))
    accepts = bytes([JSON]) * len(values)
    together, each = (Frame(FrameKind.REPLY, 1, list(range(len(values)))) for _ in range(2))

    encoders = answerer._usual.encoders  # type: ignore[union-attr]
    done = answerer._write_alike(values, accepts, set(map(type, values)), together, encoders)
    answerer._write_each(values, accepts, each, encoders)

    if done:
        assert (together.formats, together.payloads) == (each.formats, each.payloads)
    else:
        assert any(each.formats)


RETURNS: dict[str, Callable[[Any], Any]] = {
    "twice": lambda xs: 2 * xs,
    "itself, changed": lambda xs: np.add(xs, 1, out=xs) if xs.flags.writeable else xs + 1,
    "another order of axes": lambda xs: np.asfortranarray(xs),
    "every second column": lambda xs: xs[:, ::2],
    "wider": lambda xs: xs[:, None] * np.ones((1, 3, 1)),
    "a byte order of its own": lambda xs: xs.astype(">f8"),
    "texts": lambda xs: np.array([["one", "two"]] * len(xs)),
    "no columns": lambda xs: xs[:, :0],
    "sums": lambda xs: xs.sum(axis=1),
    "a list of rows": list,
    "a list with an error": lambda xs: [ValueError("one"), *xs[1:]],
    "one too few": lambda xs: xs[1:],
    "a scalar": lambda xs: xs.sum(),
    "a matrix": lambda xs: np.asmatrix(xs),
}


class TakesArrays(Model):
    """Raises for rows that begin with one of `guilty`, and returns what was drawn; keeps what it was called with."""

    def __init__(self, returns: str, guilty: set[int], most: int, is_async: bool) -> None:
        self.returns, self.guilty, self.most, self.is_async = returns, guilty, most, is_async
        self.calls: list[Any] = []

    def predict(self, xs: np.ndarray[Any, Any]) -> Any:
        self.calls.append(seen(np.array(xs)))
        if len(xs) > self.most:
            raise MemoryError
        is_guilty = bool(self.guilty & {int(x) for x in xs[:, 0]})
        returned = RETURNS[self.returns](xs)
        if is_guilty:
            raise KeyError("guilty")
        return self._later(returned) if self.is_async else returned

    async def _later(self, returned: Any) -> Any:
        return returned


def answered(model: TakesArrays, whole: Any, accept: int, deadline: float, *, at_once: bool) -> Any:
    """All that can be told of how a batch that is one array is answered, by the model too."""
    n = len(whole)
    block = block_of([dump(row) for row in whole], 10**6)
    assert block is not None
    frame = batch(OBJECT, [0] * n, deadline)
    frame.payloads, frame.accepts = block, bytes([accept]) * n
    announced: list[int] = []
    invoker = Invoker(
        *(model, {}, traits_of(TakesArrays, True), Retrier(isolate_errors=True)),
        batched=True,
        before_next_call=partial(announced.append, 1),
    )
    assert invoker.runs_arrays
    invoker.runs_arrays = at_once
    answerer = BatchAnswerer(invoker, is_first=True, is_last=True)
    reply = run_now(answerer.answer(frame))
    told = [
        opened(body, accept, True) if outcome == 0 else read_report(body).message
        for outcome, body in zip(reply.formats, reply.payloads, strict=True)
    ]
    return reply.formats, told, answerer.trouble, model.calls, announced


@pytest.mark.parametrize("returns", sorted(RETURNS))
def test_an_array_is_answered_at_once_as_ever(returns: str) -> None:
    """A batch that is one array has the outcomes, payloads, troubles and calls of the model that it
    has row by row, whatever the model does with it.
    """
    for guilty, most, is_async, is_writable in product([set(), {1}, {0, 2}], [9, 2], [False, True], [False, True]):
        whole = np.arange(8, dtype=np.float32).reshape(4, 2) // 2
        whole.flags.writeable = is_writable
        quick, slow = (TakesArrays(returns, guilty, most, is_async) for _ in range(2))

        expected = answered(slow, whole, OBJECT, inf, at_once=False)
        assert answered(quick, whole, OBJECT, inf, at_once=True) == expected


@PROPERTY
@given(
    st.sampled_from(sorted(RETURNS)),
    st.integers(2, 5),
    st.sampled_from(["f4", "f8", "i8"]),
    st.sampled_from([OBJECT, JSON]),
    st.sampled_from([inf, 0.0]),
)
def test_arrays_are_answered_at_once_as_ever(returns: str, n: int, dtype: str, accept: int, deadline: float) -> None:
    """The same holds for arrays of other types, callers of other kinds, and deadlines that have passed."""
    whole = np.arange(2 * n).reshape(n, 2).astype(dtype) // 2
    quick, slow = (TakesArrays(returns, set(), 9, False) for _ in range(2))

    expected = answered(slow, whole, accept, deadline, at_once=False)
    assert answered(quick, whole, accept, deadline, at_once=True) == expected


class FillsOneArray(Model):
    """Returns the same array again and again, with other elements."""

    def __init__(self) -> None:
        self.array = np.zeros((2, 3))

    def predict(self, xs: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        self.array += 1
        return self.array


def test_results_that_stay_in_the_process_have_memory_of_their_own() -> None:
    """A model that runs in this process may write into the array that it has returned, as nothing
    of it is sent before the next call.
    """
    frame = batch(OBJECT, [0, 0])
    frame.payloads = block_of([dump(row) for row in np.ones((2, 3))], 10**6) or ()
    invoker = Invoker(FillsOneArray, {}, traits_of(FillsOneArray, True), Retrier(isolate_errors=True), batched=True)
    answerer = BatchAnswerer(invoker, is_first=True, is_last=True, same_process=True)
    replies = [run_now(answerer.answer(frame)) for _ in range(2)]

    assert [[opened(body, OBJECT, True) for body in reply.payloads] for reply in replies] == [
        [seen(np.full(3, float(call)))] * 2 for call in (1, 2)
    ]


@pytest.mark.parametrize("values", [[0.5], [1, 2], ["a", "b"], [None, True, 1.5]])
def test_scalars_for_python_are_one_block(values: list[Any]) -> None:
    """Scalars for Python callers are payloads as they are, so that they travel as one array."""
    reply = Frame(FrameKind.REPLY, 1, list(range(len(values))))
    run_now(answerer_of(Arrays).encode(values, bytes([OBJECT]) * len(values), reply))

    assert type(reply.payloads) is Scalars
    assert (list(reply.payloads), reply.formats) == (values, bytes(len(values)))


def opened(payload: Any, accept: int, is_last: bool) -> Any:
    """A payload as the next process sees it."""
    return seen(load(payload)) if accept == OBJECT or not is_last else payload


class Parts(Model):
    def start(self, xs: list[Any]) -> list[Any]:
        return xs

    def step(self, states: list[Any]) -> list[Any]:
        return states

    def stop(self, state: Any) -> None:
        """There is nothing to free."""


class Resumable(Parts):
    def resume(self, xs: list[Any], parts: list[list[Any]]) -> list[Any]:
        return xs


@PROPERTY
@given(
    st.lists(
        st.tuples(st.one_of(objects, st.builds(object)), st.sampled_from([JSON, MSGPACK, OBJECT, RAW])), max_size=4
    ),
    st.booleans(),
    st.booleans(),
)
def test_parts_are_packed_together_as_one_by_one(given: list[tuple[Any, int]], can_resume: bool, alike: bool) -> None:
    """What is packed says the same of each stream, also of those whose parts cannot be packed."""

    class OneByOne(StepAnswerer):
        def _pack_plain(self, outs: Outs) -> Outs | None:
            return None

    told_of = []
    for kind in (StepAnswerer, OneByOne):
        retrier = Retrier(isolate_errors=True)
        model = Resumable if can_resume else Parts
        invoker = Invoker(model, {}, traits_of(model, True), retrier, batched=True)
        answerer = kind(
            invoker, BatchAnswerer(invoker, is_first=True, is_last=True), retrier, before_next_call=lambda: None
        )
        outs = Outs()
        for i, (part, accept) in enumerate(given):
            row = Row(i, None, given[0][1] if alike else accept, wire.TAKES_PARTS)
            row.raw = [part]
            outs.add(row, wire.MORE, part, part)
        packed = run_now(answerer.pack(outs))
        has_failed = [kind != wire.MORE for kind in packed.kinds]
        said = ["failed" if failed else seen(each) for each, failed in zip(packed.values, has_failed, strict=True)]
        told_of.append(repr((packed.ids, packed.kinds, said, packed.kept or [0] * len(said))))
    assert told_of[0] == told_of[1]
