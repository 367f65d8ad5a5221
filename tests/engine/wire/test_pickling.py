"""A row of a batch is pickled without its batch, wherever it stands in an object."""

from __future__ import annotations

import pickle
import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import carpool
from carpool import Service, Stage
from carpool.engine.wire.outcome import FailureReport, with_cause
from carpool.engine.wire.payload import dump, dumps, load, size_of

ROOM = 1500
"""Bytes that a pickle takes besides the numbers in it."""
FEW = 8
"""Numbers in a row."""
SECRET = 123456789.0
"""A number of the neighbours."""

IN_OBJECTS: dict[str, Callable[[Any], Any]] = {
    "alone": lambda row: row,
    "list": lambda row: [row],
    "dict": lambda row: {"vec": row},
    "tuple": lambda row: (1, row),
    "Response": lambda row: carpool.Response(row),
    "Last": lambda row: carpool.Last(row),
    "exception": lambda row: ValueError("bad", row),
}


def is_small(value: Any) -> bool:
    """Whether what is pickled has neither more bytes than it needs nor a number of the neighbours."""
    payload = dump(value)
    parts = payload if type(payload) is list else [payload]
    return size_of(payload) <= 8 * FEW + ROOM and not any(struct.pack("<d", SECRET) in bytes(part) for part in parts)


@pytest.mark.parametrize("where", IN_OBJECTS)
def test_a_row_of_pyarrow_takes_only_itself_along(where: str) -> None:
    """A slice of an array, a column, a batch or a table of pyarrow is pickled alone."""
    arrow = pytest.importorskip("pyarrow")
    array = arrow.array([SECRET] * 5 + [1.0] * FEW + [SECRET] * 20_000)
    table = arrow.table({"a": array, "b": ["x"] * len(array)})
    slices = [array, arrow.chunked_array([array]), table, table.to_batches()[0]]
    for whole in slices:
        row = whole.slice(5, FEW)
        assert is_small(IN_OBJECTS[where](row))
        assert load(dump(row)).equals(row)  # type: ignore[attr-defined]


def test_the_rows_of_each_type_of_pyarrow_come_as_they_are() -> None:
    """Rows of texts, lists, records and the like come as they are, without those beside them."""
    arrow = pytest.importorskip("pyarrow")
    kinds = [
        arrow.array(["mine", None] + ["theirs"] * 5000),
        arrow.array([b"mine", b""] + [b"theirs"] * 5000, arrow.binary_view()),
        arrow.array(["mine", "a text of more than twelve"] + ["theirs, which is long, too"] * 500, arrow.string_view()),
        arrow.array([["mine"], []] + [["theirs"]] * 5000),
        arrow.array([{"a": "mine"}, {"a": None}] + [{"a": "theirs"}] * 5000),
        arrow.array([True, False] + [True] * 6),
        arrow.array([None] * 9),
    ]
    for whole in kinds:
        row = whole.slice(0, 2)
        pickled = dumps(row)
        assert pickle.loads(pickled).equals(row) and b"theirs" not in pickled and len(pickled) < ROOM


def rows_of_torch(torch: Any) -> dict[str, Any]:
    """Rows of tensors whose other numbers are those of others."""
    batch = torch.full((100, FEW), SECRET, dtype=torch.float64)
    batch[7] = torch.arange(FEW)
    wide = torch.full((FEW, 300), SECRET, dtype=torch.float64)
    wide[:, 3] = 1.0
    return {
        "row": batch[7],
        "column": wide[:, 3],
        "steps": wide[::3, 3:4],
        "transposed": batch[7:8].t(),
        "one element": batch[7, 3],
        "no element": batch[0:0],
        "expanded": torch.tensor([1.0, SECRET], dtype=torch.float64)[:1].expand(10**9),
        "half": batch.to(torch.bfloat16)[7],
        "leaf": batch[7].detach().requires_grad_(),
        "result of others": batch.clone().requires_grad_()[7] * 1.0,
        "view that requires grad": batch.clone().requires_grad_()[7],
        "parameter": torch.nn.Parameter(batch[7]),
        "quantized": torch.quantize_per_tensor(batch.float(), 0.1, 0, torch.quint8)[7],
        "complex": torch.view_as_complex(batch.reshape(100, 4, 2))[7],
        "conjugate": torch.view_as_complex(batch.reshape(100, 4, 2)).conj()[7],
    }


@pytest.mark.filterwarnings("ignore:.*quantized:UserWarning", "ignore:TypedStorage:UserWarning")
def test_a_row_that_is_a_key_takes_only_itself_along() -> None:
    """A dict of plain values may have a key that is none."""
    torch = pytest.importorskip("torch")
    assert is_small({rows_of_torch(torch)["row"]: 1.0})


@pytest.mark.filterwarnings("ignore:.*quantized:UserWarning", "ignore:TypedStorage:UserWarning")
@pytest.mark.parametrize("where", IN_OBJECTS)
def test_a_row_of_torch_takes_only_itself_along(where: str) -> None:
    """A tensor that shows a part of its memory is pickled alone, whatever its kind."""
    torch = pytest.importorskip("torch")
    for name, row in rows_of_torch(torch).items():
        assert is_small(IN_OBJECTS[where](row)), name
        came: Any = load(dump(row))
        assert torch.equal(came, row) and type(came) is type(row), name
        assert (came.dtype, came.shape, came.requires_grad) == (row.dtype, row.shape, row.requires_grad), name


def test_what_is_no_plain_view_is_left_to_torch() -> None:
    """A whole tensor, a sparse one and one without memory come as torch pickles them."""
    torch = pytest.importorskip("torch")

    class Tagged(torch.Tensor):  # type: ignore[name-defined,misc]
        def __reduce_ex__(self, protocol: Any) -> Any:
            return str, ("as it says itself",)

    for whole in (torch.ones(10), torch.ones(3, 4).t(), torch.eye(9).to_sparse(), torch.ones(9, 9, device="meta")):
        assert dumps(whole) == pickle.dumps(whole, 5)
    assert pickle.loads(dumps(torch.ones(9, 9)[3].as_subclass(Tagged))) == "as it says itself"
    tagged = torch.ones(9, 9)[3]
    tagged.name_of_mine = "mine"
    assert pickle.loads(dumps(tagged)).name_of_mine == "mine"


@pytest.mark.filterwarnings("ignore:.*quantized:UserWarning")
def test_the_arguments_of_an_error_take_only_themselves_along() -> None:
    """A row in the arguments of an exception travels without its batch."""
    torch = pytest.importorskip("torch")
    row = rows_of_torch(torch)["row"]
    assert len(with_cause(FailureReport(""), ValueError(row)).cause) < ROOM


class Rows:
    def predict(self, xs: list[float]) -> list[Any]:
        import torch

        out = torch.tensor(xs, dtype=torch.float64).repeat_interleave(FEW).reshape(len(xs), FEW)
        if xs[0] < 0:
            raise ValueError(out[0])
        return [{"vec": row} for row in out]


@pytest.mark.parametrize("run_in", ["process", "thread"])
def test_callers_get_their_own_rows_only(run_in: Any) -> None:
    """Neither an answer nor an error's arguments hold the numbers of others, and an item is sent
    without what lies beside it.
    """
    torch = pytest.importorskip("torch")
    stage = Stage(Rows, max_batch_size=8, policy="static", max_queue_delay_s=0.2, run_in=run_in)
    with Service(stage).run() as s:
        for x, answer in enumerate(s.stream(map(float, range(8)))):
            assert set(torch.tensor([]).double().set_(answer["vec"].untyped_storage()).tolist()) == {float(x)}
        errors = list(s.stream([-1.0, -2.0], return_exceptions=True))
    for x, error in zip((-1.0, -2.0), errors, strict=True):
        (argument,) = error.__cause__.args
        assert set(argument.tolist()) == {x} and argument.untyped_storage().nbytes() == 8 * FEW


def test_numpy_is_pickled_as_ever() -> None:
    """Where neither library is loaded, and for what is not theirs, the pickle is Python's own."""
    for value in ({"a": [1, "b"]}, np.arange(9).reshape(3, 3)[1:, 1:], ValueError("x")):
        assert dumps(value) == pickle.dumps(value, 5)
