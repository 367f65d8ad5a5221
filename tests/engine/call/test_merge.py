"""`merge=True`: a function gets and gives the same under load as alone, bit by bit, or says at once that it cannot."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import carpool
from carpool.engine.policy import BY_NAME
from tests.effort import examples

LIBRARIES = ("builtins", "numpy", "torch", "pandas", "polars", "pyarrow", "dicts")


# -- chunks of each library, so that some are alike and others are not in one thing


def _numpy(draw: Callable[..., Any], n: int) -> Any:
    values = [draw(st.integers(0, 99)) for _ in range(n)]
    width = draw(st.sampled_from([None, 1, 2]))
    dtype = draw(st.sampled_from(["<i8", ">i8", "<i4", "q", "f2", "f8", "?", "c8", "U2", "U3", "S2", "O", "M8[s]"]))
    array = np.array(values, dtype="i8").astype(dtype)
    if width is not None:
        array = np.stack([array] * width, axis=1)
    return array if draw(st.booleans()) else np.asfortranarray(array)


def _torch(draw: Callable[..., Any], n: int) -> Any:
    torch = pytest.importorskip("torch")
    values = [draw(st.integers(0, 99)) for _ in range(n)]
    kind = draw(st.sampled_from([torch.int64, torch.int32, torch.bool, torch.float32, torch.bfloat16, torch.complex64]))
    tensor = torch.tensor(values).to(kind)
    if draw(st.booleans()):
        tensor = torch.stack([tensor] * 2, dim=1)
    return tensor.requires_grad_(kind.is_floating_point and draw(st.booleans()))


def _pandas_column(draw: Callable[..., Any], n: int) -> Any:
    pd = pytest.importorskip("pandas")
    text = [draw(st.sampled_from(["a", "b"])) for _ in range(n)]
    kind = draw(st.sampled_from(["int64", "Int8", "float64", "str", "object", "ab", "ba", "time"]))
    if kind in ("ab", "ba"):
        return pd.Categorical(text, categories=list(kind))
    if kind == "time":
        return pd.to_datetime([ord(letter) for letter in text], utc=draw(st.booleans()))
    return pd.array(text if kind in ("str", "object") else [ord(letter) for letter in text], dtype=kind)


def _pandas_index(draw: Callable[..., Any], n: int) -> Any:
    pd = pytest.importorskip("pandas")
    kind = draw(st.sampled_from(["range", "float", "text", "named", "two"]))
    if kind == "two":
        return pd.MultiIndex.from_arrays([range(n), list("abcdef")[:n]], names=["x", "y"])
    if kind in ("range", "named"):
        return pd.RangeIndex(n, name="i" if kind == "named" else None)
    return pd.Index([n - 0.5 for n in range(n)] if kind == "float" else [str(n) for n in range(n)], dtype=None)


def _pandas(draw: Callable[..., Any], n: int) -> Any:
    pd = pytest.importorskip("pandas")
    index = _pandas_index(draw, n)
    if draw(st.booleans()):
        return pd.Series(_pandas_column(draw, n), index=index, name=draw(st.sampled_from([None, 1, True, "s"])))
    names = draw(st.permutations(["b", "a", 0]))[: draw(st.integers(0, 3))]
    return pd.DataFrame({name: _pandas_column(draw, n) for name in names}, index=index)


def _polars_column(draw: Callable[..., Any], n: int) -> Any:
    pl = pytest.importorskip("polars")
    text = [draw(st.sampled_from(["a", "b", None])) for _ in range(n)]
    kinds = [pl.Int64, pl.UInt8, pl.String, pl.Categorical, pl.Enum(["a", "b"]), pl.Enum(["b", "a"]), pl.List(pl.Int8)]
    kind = draw(st.sampled_from(kinds))
    numbers = [None if letter is None else ord(letter) for letter in text]
    if kind == pl.List:
        return pl.Series("s", [None if n is None else [n] for n in numbers], dtype=kind)
    return pl.Series("s", numbers if kind.is_numeric() else text, dtype=kind)


def _polars(draw: Callable[..., Any], n: int) -> Any:
    pl = pytest.importorskip("polars")
    if draw(st.booleans()):
        return _polars_column(draw, n).rename(draw(st.sampled_from(["s", "t"])))
    names = draw(st.permutations(["b", "a", "c"]))[: draw(st.integers(1, 3))]
    return pl.DataFrame({name: _polars_column(draw, n) for name in names})


def _arrow_array(draw: Callable[..., Any], n: int) -> Any:
    pa = pytest.importorskip("pyarrow")
    text = [draw(st.sampled_from(["a", "b", None])) for _ in range(n)]
    kind = draw(st.sampled_from([pa.int64(), pa.int8(), pa.string(), pa.large_string(), pa.list_(pa.string())]))
    if pa.types.is_list(kind):
        return pa.array([None if letter is None else [letter] for letter in text], type=kind)
    return pa.array(
        [letter and ord(letter) for letter in text] if pa.types.is_integer(kind) else text,  # type: ignore[arg-type]
        type=kind,
    )


def _pyarrow(draw: Callable[..., Any], n: int) -> Any:
    pa = pytest.importorskip("pyarrow")
    kind = draw(st.sampled_from(["array", "chunked", "batch", "table"]))
    if kind == "array":
        return _arrow_array(draw, n)
    if kind == "chunked":
        first = _arrow_array(draw, n)
        return pa.chunked_array([first[: n // 2], first[n // 2 :]], type=first.type)
    names = draw(st.permutations(["b", "a"]))[: draw(st.integers(1, 2))]
    columns = [_arrow_array(draw, n) for _ in names]
    if kind == "table" and draw(st.booleans()):
        columns = [column if pa.types.is_list(column.type) else column.dictionary_encode() for column in columns]
    made = (pa.table if kind == "table" else pa.record_batch)(columns, names=names)
    return made.replace_schema_metadata({"by": "hand"}) if draw(st.booleans()) else made


def _dicts(draw: Callable[..., Any], n: int) -> Any:
    names = draw(st.permutations(["b", "a", 1, True]))[: draw(st.integers(1, 3))]
    parts = {"builtins": lambda: list(range(n)), "numpy": lambda: _numpy(draw, n)}
    return {name: parts[draw(st.sampled_from(sorted(parts)))]() for name in names}


@st.composite
def chunks_of(draw: Callable[..., Any], library: str) -> list[Any]:
    """A few chunks, each from one of few makes, so that many are alike."""
    makes: dict[str, Callable[[Any, int], Any]] = {
        "builtins": lambda draw, n: [draw(st.one_of(st.integers(), st.text(max_size=2))) for _ in range(n)],
        "numpy": _numpy,
        "torch": _torch,
        "pandas": _pandas,
        "polars": _polars,
        "pyarrow": _pyarrow,
        "dicts": _dicts,
    }
    made = [makes[library](draw, draw(st.integers(0, 6))) for _ in range(draw(st.integers(1, 3)))]
    return [made[i] for i in draw(st.lists(st.integers(0, len(made) - 1), min_size=1, max_size=6))]


# -- bit by bit


def same(one: Any, other: Any) -> bool:
    """Whether two chunks are of the same kind, with the same names and types, and equal to the last bit."""
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return list(one) == list(other) and all(map(same, one.values(), other.values()))
    match type(one).__module__.partition(".")[0]:
        case "numpy":
            plain = one.tolist() == other.tolist() if one.dtype == object else one.tobytes() == other.tobytes()
            return plain and one.shape == other.shape and (one.dtype, one.dtype.char) == (other.dtype, other.dtype.char)
        case "torch":
            alike = one.dtype == other.dtype and one.requires_grad == other.requires_grad and one.shape == other.shape
            return bool(alike and one.equal(other))
        case "pandas":
            return _same_in_pandas(one, other)
        case "polars":
            if hasattr(one, "schema"):
                return list(one.schema.items()) == list(other.schema.items()) and one.equals(other)
            return one.name == other.name and one.dtype == other.dtype and one.equals(other)
        case "pyarrow":
            return one.equals(other, check_metadata=True) if hasattr(one, "schema") else one.equals(other)
    return bool(one == other)


def _same_in_pandas(one: Any, other: Any) -> bool:
    """The index may be one of the same numbers instead of a range."""
    testing = sys.modules["pandas"].testing
    check = testing.assert_frame_equal if hasattr(one, "columns") else testing.assert_series_equal
    check(one, other, check_exact=True, check_categorical=True, check_index_type="equiv")
    names = list(one.columns) if hasattr(one, "columns") else [one.name]
    others = list(other.columns) if hasattr(other, "columns") else [other.name]
    return names == others and list(map(type, names)) == list(map(type, others))


def alike(seen: list[Any], chunks: list[Any]) -> bool:
    """Whether each input that a function saw looks like some caller's chunk, but for its rows."""

    def looks(x: Any) -> str:
        if isinstance(x, dict):
            return repr([(name, looks(part)) for name, part in x.items()])
        names = ("type",) if type(x).__module__ == "pyarrow.lib" else ("dtype", "dtypes", "name", "requires_grad")
        return repr([type(x)] + [str(getattr(x, name, None)) for name in names])

    return {looks(x) for x in seen} <= {looks(chunk) for chunk in chunks}


@pytest.mark.fault("F76")
@pytest.mark.parametrize("library", LIBRARIES)
@examples(60)
@given(data=st.data())
def test_merged_equals_alone_in_threads(library: str, data: st.DataObject) -> None:
    """Whoever calls at the same time in other threads, each caller's merged result is that of its
    own chunk, to the last bit.
    """
    chunks = data.draw(chunks_of(library))
    seen: list[Any] = []

    @carpool.batch(merge=True, max_batch_size=data.draw(st.integers(1, 12)), policy="static")
    def function(x: Any) -> Any:
        seen.append(x)
        return x

    tickets = [function.submit(chunk) for chunk in chunks]
    function.close()

    for ticket, chunk in zip(tickets, chunks, strict=True):
        assert same(ticket.result(), chunk)
    assert alike(seen, chunks)


@pytest.mark.fault("F76")
@pytest.mark.parametrize("library", LIBRARIES)
@examples(30)
@given(data=st.data())
def test_merged_equals_alone_in_asyncio(library: str, data: st.DataObject) -> None:
    """Whichever tasks call at the same time, each caller's merged result is that of its own chunk,
    to the last bit.
    """
    chunks = data.draw(chunks_of(library))
    seen: list[Any] = []

    @carpool.batch(merge=True, max_batch_size=data.draw(st.integers(1, 12)), policy="static")
    async def function(x: Any) -> Any:
        seen.append(x)
        return {"it": x}

    async def main() -> list[Any]:
        return await asyncio.gather(*[function(chunk) for chunk in chunks])

    for result, chunk in zip(asyncio.run(main()), chunks, strict=True):
        assert same(result, {"it": chunk})
    assert alike(seen, chunks)


# -- who shares a call


@pytest.mark.parametrize("library", LIBRARIES)
@examples(20)
@given(data=st.data())
def test_equal_chunks_share_a_call(library: str, data: st.DataObject) -> None:
    """Chunks that are alike do share a call, so the tests above do not hold only because everyone
    goes alone.
    """
    chunk = data.draw(chunks_of(library))[0]
    calls: list[Any] = []
    function = carpool.batch(merge=True, policy="static")(lambda x: calls.append(x) or x)
    tickets = [function.submit(chunk) for _ in range(3)]
    function.close()

    assert len(calls) == 1
    assert all(same(ticket.result(), chunk) for ticket in tickets)


def test_gradients_reach_each_caller() -> None:
    """A tensor that requires gradients gets its own ones through the merged call, whose graph its
    callers share.
    """
    torch = pytest.importorskip("torch")
    function = carpool.batch(merge=True)(lambda x: x * x)
    mine, yours = torch.tensor([3.0], requires_grad=True), torch.tensor([5.0, 7.0], requires_grad=True)
    tickets = [function.submit(mine), function.submit(yours)]
    function.close()
    for ticket in tickets:
        ticket.result().sum().backward(retain_graph=True)

    assert mine.grad.tolist() == [6.0]
    assert yours.grad.tolist() == [10.0, 14.0]


UNLIKE: list[Any] = [
    np.array([[2**53 + 1]]),
    np.array([[0.5]]),
    np.array([[1, 2]]),
    [1],
    {"a": np.array([1]), "b": [2]},
    {"b": [2], "a": np.array([1])},
]


@pytest.mark.parametrize("policy", sorted(BY_NAME))
def test_every_policy_serves_all_that_cannot_share_a_call(policy: str) -> None:
    """Threads that bring chunks of many kinds at once are all served, each with its own result,
    whatever rule makes the batches.
    """
    function = carpool.batch(merge=True, policy=policy, max_batch_size=4, max_queue_delay_s=0.01)(lambda x: x)
    chunks = UNLIKE * 20
    with ThreadPoolExecutor(16) as threads:
        results = list(threads.map(function, chunks, timeout=60))

    assert all(map(same, results, chunks))


@pytest.mark.parametrize("policy", sorted(BY_NAME))
def test_every_policy_serves_all_tasks_that_cannot_share_a_call(policy: str) -> None:
    """Tasks that bring chunks of many kinds at once are all served, each with its own result,
    whatever rule makes the batches.
    """

    @carpool.batch(merge=True, policy=policy, max_batch_size=4, max_queue_delay_s=0.01)
    async def function(x: Any) -> Any:
        await asyncio.sleep(0)
        return x

    chunks = UNLIKE * 20

    async def main() -> list[Any]:
        return await asyncio.wait_for(asyncio.gather(*[function(chunk) for chunk in chunks]), 60)

    assert all(map(same, asyncio.run(main()), chunks))


def test_a_kind_that_floods_keeps_no_other_out() -> None:
    """Kinds of chunks take turns: one caller's array goes after at most one more batch of the many
    that came before it.
    """
    served: list[type] = []
    function = carpool.batch(merge=True, max_batch_size=2)(lambda x: served.append(type(x)) or x)
    for _ in range(20):
        function.submit([1])
    function.submit(np.ones(1))
    function.close()

    assert served.index(np.ndarray) <= 1


# -- refused


class Own(np.ndarray):
    """An array with ideas of its own."""


def refused() -> dict[str, Any]:
    """What is not joined, by what its error calls it."""
    found: dict[str, Any] = {
        "numpy.ndarray without axes": np.array(3),
        "numpy.float64": np.float64(3),
        "a str": "text",
        "a set": {1, 2},
        "a tuple": (1, 2),
        "a generator": (i for i in range(3)),
        "a range": range(3),
        "a NoneType": None,
        "MaskedArray": np.ma.array([1], mask=[True]),
        "tests.engine.call.test_merge.Own": np.ones(2).view(Own),
        "recarray": np.rec.array([(1,)]),
    }
    found["csr_array"] = pytest.importorskip("scipy.sparse").csr_array(np.eye(2))
    return found


def refused_by_others() -> dict[str, Any]:
    """The same of libraries that may not be there."""
    torch, pd = pytest.importorskip("torch"), pytest.importorskip("pandas")
    pl, pa = pytest.importorskip("polars"), pytest.importorskip("pyarrow")
    return {
        "a torch.Tensor without axes": torch.tensor(1),
        "torch.nn.parameter.Parameter": torch.nn.Parameter(torch.ones(1)),
        "a torch tensor that is sparse": torch.eye(2).to_sparse(),
        "a pandas.Index": pd.Index([1]),
        "LazyFrame": pl.LazyFrame({"a": [1]}),
        "DictionaryArray with a dictionary": pa.array(["a"]).dictionary_encode(),
        "RecordBatch with a dictionary": pa.record_batch([pa.array(["a"]).dictionary_encode()], names=["a"]),
        "Table without columns": pa.table({}),
        "a data frame without columns": pl.DataFrame(),
    }


@pytest.mark.parametrize("which", [refused, refused_by_others])
def test_what_cannot_be_joined_is_refused_at_the_first_call(which: Callable[[], dict[str, Any]]) -> None:
    """What cannot be joined is refused by name at the first call, of a lone caller too, with what
    to use instead; whether it is called, submitted, among many or in a dict.
    """
    called: list[Any] = []
    function = carpool.batch(merge=True, max_batch_size=1)(lambda x: called.append(x) or x)

    @carpool.batch(merge=True)
    async def soon(x: Any) -> Any:
        called.append(x)
        return x

    for name, chunk in which().items():
        for call in (function, function.submit, lambda x: function.many([x]), lambda x: asyncio.run(soon(x))):
            with pytest.raises(TypeError, match=f"cannot join and cut up .*{name}.*merge= and split="):
                call(chunk)
        with pytest.raises(TypeError, match=f"{name}.*merge= and split="):
            function({"a": chunk})
    assert called == []


@pytest.mark.parametrize("which", [refused, refused_by_others])
def test_an_output_that_cannot_be_cut_up_is_an_error(which: Callable[[], dict[str, Any]]) -> None:
    """An output that cannot be cut up, such as a pair of arrays for two rows, is an error, for a
    lone caller too.
    """
    for name, output in which().items():
        function = carpool.batch(merge=True)(lambda x, output=output: output)
        with pytest.raises(TypeError, match=f"what the function returned cannot be shared out.*{name}"):
            function([1, 2])


def test_results_that_do_not_fit_together_are_an_error() -> None:
    """Results of one caller's rows from several calls are joined only if none of them changes by
    that; else that is an error.
    """
    function = carpool.batch(merge=True, max_batch_size=2)(lambda x: x if x.max() < 3 else x / 2)

    assert function(np.arange(3)).tolist() == [0, 1, 2]
    with pytest.raises(ValueError, match=r"differ in type, names or shape.*int64.*float64"):
        function(np.arange(4))


def test_nothing_is_imported() -> None:
    """A program that merges lists loads none of the array libraries."""
    program = """
import sys, carpool
assert carpool.batch(merge=True, max_batch_size=2)(lambda x: x)([1, 2, 3]) == [1, 2, 3]
print(sorted({"numpy", "torch", "pandas", "polars", "pyarrow"} & sys.modules.keys()))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "[]\n"


# -- rows and sizes


def test_sizes_limit_the_batch_and_rows_cut_the_output() -> None:
    """With `size=` each caller still gets its own rows, and a chunk above the limit is halved as
    far as it can be.
    """
    calls: list[list[int]] = []
    function = carpool.batch(merge=True, size=lambda x: int(x.sum()), max_batch_size=5)(
        lambda x: calls.append(x.tolist()) or x
    )
    tickets = [function.submit(np.array(chunk)) for chunk in ([3], [1, 1], [4, 1], [9, 2, 2], [0])]
    function.close()

    assert [ticket.result().tolist() for ticket in tickets] == [[3], [1, 1], [4, 1], [9, 2, 2], [0]]
    assert calls == [[3, 1, 1], [4, 1], [9], [2, 2, 0]]


def test_a_chunk_among_many_is_cut_up_too() -> None:
    """A chunk among the items of `many` is cut up so that no call has more rows than it may, and
    each item gets one result.
    """
    calls: list[int] = []
    function = carpool.batch(merge=True, max_batch_size=4)(lambda x: calls.append(len(x)) or x)

    @carpool.batch(merge=True, max_batch_size=4)
    async def soon(x: Any) -> Any:
        calls.append(len(x))
        return x

    async def main() -> list[Any]:
        return await soon.many([[1, 2], list(range(9)), []])

    for results in (function.many([[1, 2], list(range(9)), []]), asyncio.run(main())):
        assert results == [[1, 2], list(range(9)), []]
    assert max(calls) <= 4


@pytest.mark.parametrize("merge", ["yes", 3, [len]])
def test_what_is_no_way_to_merge_is_refused(merge: Any) -> None:
    """What is no way to merge is refused where the function is declared."""
    with pytest.raises(TypeError, match=r"merge must be True, carpool.pad\(\.\.\.\) or a function"):
        carpool.batch(merge=merge)


def test_what_has_no_length_needs_size() -> None:
    """With merge functions of the user's own and values without a length, `size=` says how many
    rows there are.
    """
    function = carpool.batch(merge=sum, split=lambda y, counts: [y for _ in counts])(lambda x: x)

    with pytest.raises(TypeError, match=r"an object of type int has no length: with merge= and split=, size= must say"):
        function(3)


def test_a_list_that_changes_during_the_call_shifts_nobody() -> None:
    """If a list changes during the call nobody gets another's rows: who gets which is settled
    before the function is called.
    """

    def function(x: list[int]) -> list[int]:
        mine.append(0)
        yours.pop()
        return [2 * n for n in x]

    mine, yours = [1, 2], [3, 4]
    batched = carpool.batch(merge=True)(function)
    tickets = [batched.submit(mine), batched.submit(yours)]

    assert [ticket.result() for ticket in tickets] == [[2, 4], [6, 8]]


def test_a_changed_array_is_seen_changed() -> None:
    """What callers bring is not copied: it is read when the batch is made, as docs/functions.md says."""
    function = carpool.batch(merge=True)(lambda x: x + 0)
    mine = np.array([1, 2])
    ticket = function.submit(mine)
    mine[0] = 9

    assert ticket.result().tolist() == [9, 2]
