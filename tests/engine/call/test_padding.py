"""`merge=carpool.pad(...)`: arrays of different length share a call, and none gets another's length by it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import carpool
from tests.effort import examples

Make = Callable[[Any], Any]


@pytest.fixture(params=["numpy", "torch"])
def make(request: pytest.FixtureRequest) -> Make:
    """An array or a tensor of a numpy array."""
    if request.param == "numpy":
        return np.array
    torch: Any = pytest.importorskip("torch")
    return lambda x: torch.from_numpy(np.array(x))


def together(function: Any, chunks: list[Any]) -> list[Any]:
    """The results of callers whose chunks are in one batch."""
    tickets = [function.submit(chunk) for chunk in chunks]
    function.close()
    return [ticket.result() for ticket in tickets]


@pytest.mark.parametrize(
    ("side", "padded"), [("right", [[1, 2, -1], [3, 4, 5], [6, 7, 8]]), ("left", [[-1, 1, 2], [3, 4, 5], [6, 7, 8]])]
)
def test_shorter_rows_are_filled_up_to_the_longest(make: Make, side: str, padded: list[list[int]]) -> None:
    """Shorter rows are filled up on the side that was asked for, with the value, in the caller's
    dtype, and the function is told the lengths.
    """
    seen: list[Any] = []

    @carpool.batch(merge=carpool.pad(value=-1, side=side))
    def totals(xs: Any, lengths: Any) -> Any:
        seen.append((xs, lengths))
        return xs.sum(1) + lengths

    short, long = make([[1, 2]]), make([[3, 4, 5], [6, 7, 8]])
    results = together(totals, [short, long])

    ((xs, lengths),) = seen
    assert xs.tolist() == padded
    assert (type(xs), xs.dtype) == (type(short), short.dtype)
    assert (type(lengths), lengths.tolist()) == (type(short), [2, 3, 3])
    assert [result.tolist() for result in results] == [[4], [15, 24]]


@pytest.mark.fault("F76")
@examples(60)
@given(data=st.data())
@pytest.mark.parametrize("library", ["numpy", "torch"])
@pytest.mark.parametrize("side", ["right", "left"])
def test_merged_equals_alone(library: str, side: str, data: st.DataObject) -> None:
    """With a function that goes by its lengths each caller gets what it gets alone, in threads and
    in asyncio.
    """
    shapes = data.draw(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 4)), min_size=1, max_size=5))
    chunks: list[Any] = [np.arange(rows * length, dtype="f4").reshape(rows, length) for rows, length in shapes]
    if library == "torch":
        chunks = list(map(pytest.importorskip("torch").from_numpy, chunks))
    options: dict[str, Any] = {"merge": carpool.pad(side=side), "max_batch_size": data.draw(st.integers(1, 8))}

    def squares(xs: Any, lengths: Any) -> list[list[float]]:
        ends = [slice(n) if side == "right" else slice(xs.shape[1] - n, None) for n in lengths.tolist()]
        return [(x[end] * x[end]).tolist() for x, end in zip(xs, ends, strict=True)]

    @carpool.batch(**options)
    async def soon(xs: Any, lengths: Any) -> Any:
        return squares(xs, lengths)

    async def main() -> list[Any]:
        return await asyncio.gather(*[soon(chunk) for chunk in chunks])

    expected = [(chunk * chunk).tolist() for chunk in chunks]
    assert together(carpool.batch(**options)(squares), chunks) == expected
    assert asyncio.run(main()) == expected


def test_parts_of_dicts_are_padded_each_by_itself(make: Make) -> None:
    """Parts of dicts are padded each by itself; those that have no lengths are joined as they are,
    and are not among the lengths.
    """
    seen: list[Any] = []

    @carpool.batch(merge=carpool.pad())
    def keys(x: dict[str, Any], *, lengths: dict[str, Any]) -> list[str]:
        seen.append(({name: list(map(list, part)) for name, part in x.items() if name != "key"}, lengths))
        return x["key"]

    one = {"ids": make([[1]]), "image": make([[[1, 2]]]), "key": ["a"]}
    two = {"ids": make([[2, 3]]), "image": make([[[4], [5]]]), "key": ["b"]}

    assert together(keys, [one, two]) == [["a"], ["b"]]
    ((x, lengths),) = seen
    assert x["ids"] == [[1, 0], [2, 3]]
    assert [[line.tolist() for line in image] for image in x["image"]] == [[[1, 2], [0, 0]], [[4, 0], [5, 0]]]
    assert {name: part.tolist() for name, part in lengths.items()} == {"ids": [1, 2], "image": [[1, 2], [2, 1]]}


def test_other_dtypes_and_axes_share_no_call() -> None:
    """Arrays share a call if they differ in length only, and not in dtype or in other axes."""
    seen: list[Any] = []
    function = carpool.batch(merge=carpool.pad())(lambda x, lengths: seen.append(x) or [0] * len(x))
    together(function, [np.ones((1, 1)), np.ones((1, 2), "f4"), np.ones((1, 2, 1)), np.ones((1, 3))])

    assert sorted((x.dtype, x.shape) for x in seen) == sorted(
        [(np.dtype("f4"), (1, 2)), (np.dtype("f8"), (1, 2, 1)), (np.dtype("f8"), (2, 3))]
    )


@pytest.mark.parametrize("output", [lambda x: x, lambda x: x.tolist(), lambda x: {"y": [0] * len(x), "x": x}])
def test_results_are_never_cut_by_a_guess(make: Make, output: Callable[[Any], Any]) -> None:
    """An output with the padded length may have it by chance, so it is an error where the function
    does not ask for lengths.
    """
    function = carpool.batch(merge=carpool.pad())(output)

    assert len(function(make([[1, 2]]))) == len(output(make([[1, 2]])))  # nothing was padded
    tickets = [function.submit(make([[1, 2]])), function.submit(make([[1, 2, 3]]))]
    for ticket in tickets:
        with pytest.raises(ValueError, match=r"padded to 3 along axis 1.*parameter named lengths"):
            ticket.result()


def test_an_output_of_another_length_is_cut_by_rows(make: Make) -> None:
    """An output of another length than the padded one is cut by rows; a function that takes lengths
    is believed in any case.
    """

    def classes(x: Any) -> Any:
        return make(np.ones((len(x), 10)))

    chunks = [make([[1]]), make(np.ones((2, 4), int))]
    told = carpool.batch(merge=carpool.pad())(lambda x, lengths: classes(x)[:, : x.shape[1]])

    assert [len(y) for y in together(carpool.batch(merge=carpool.pad())(classes), chunks)] == [1, 2]
    assert [tuple(y.shape) for y in together(told, chunks)] == [(1, 4), (2, 4)]


def test_methods_are_told_lengths_too() -> None:
    """A batched method gets the lengths too, with `self` before the array."""

    class Model:
        @carpool.batch(merge=carpool.pad())
        def lengths(self, x: np.ndarray, lengths: np.ndarray) -> np.ndarray:
            return lengths

    assert Model().lengths(np.ones((2, 3))).tolist() == [3, 3]


def test_gradients_pass_through_padding() -> None:
    """Gradients pass through padding as through torch's own functions."""
    torch = pytest.importorskip("torch")
    mine = torch.ones((1, 2), requires_grad=True)
    first, _ = together(
        carpool.batch(merge=carpool.pad())(lambda x: (x * x).sum(1)), [mine, torch.ones((1, 3), requires_grad=True)]
    )
    first.sum().backward()

    assert mine.grad.tolist() == [[2.0, 2.0]]


@pytest.mark.parametrize(
    ("value", "dtype"), [(0.5, "i8"), (-1, "u1"), (2, "?"), (float("nan"), "i4"), (0, "M8[s]"), ("long", "U2")]
)
def test_a_value_that_does_not_fit_is_refused(value: Any, dtype: str) -> None:
    """A fill value that does not fit the array is refused at the first call, of a lone caller too:
    numpy and torch would quietly make another value of it.
    """
    function = carpool.batch(merge=carpool.pad(value))(lambda x: x)

    with pytest.raises(ValueError, match=r"cannot pad an array of .*: give a value that it can hold"):
        function(np.ones((1, 1), "i8").astype(dtype))
    torch = pytest.importorskip("torch")
    if dtype in ("i8", "u1", "?"):
        with pytest.raises(ValueError, match=r"cannot pad an array of torch\."):
            function(torch.from_numpy(np.ones((1, 1), dtype)))


@pytest.mark.parametrize(
    ("value", "dtype"),
    [(0, "f4"), (0.1, "f4"), (float("nan"), "f8"), (True, "?"), (np.datetime64("NaT", "s"), "M8[s]")],
)
def test_a_value_that_fits_is_not(value: Any, dtype: str) -> None:
    """A fill value that is only rounded to the array's own precision is taken."""
    chunks = [np.ones((1, n), "i8").astype(dtype) for n in (1, 2)]
    (filled, _) = together(carpool.batch(merge=carpool.pad(value))(lambda x, lengths: x), chunks)

    assert filled[0, 1] == np.array(value).astype(dtype) or value != value


@pytest.mark.parametrize("chunk", [np.ones(3), [[1, 2], [3]], {"a": np.ones(3)}])
def test_what_has_nothing_to_pad_is_refused(chunk: Any) -> None:
    """An argument without an axis to pad, such as a single sequence, is refused: its items would be
    taken for rows.
    """
    with pytest.raises(TypeError, match=r"of at least two axes, rows and positions.*for a single row give x\[None\]"):
        carpool.batch(merge=carpool.pad())(lambda x: x)(chunk)


def test_wrong_sides_are_explained() -> None:
    """Another side than the two that there are is refused with their names, and so is `split=`,
    which is for merge functions.
    """
    with pytest.raises(ValueError, match="side must be 'right' or 'left', not 'top'"):
        carpool.pad(side="top")
    with pytest.raises(ValueError, match="a merge function needs a split function"):
        carpool.batch(merge=carpool.pad(), split=len)  # type: ignore[call-overload]
