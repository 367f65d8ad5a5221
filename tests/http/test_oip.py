"""The Open Inference Protocol V2 over REST, in JSON and with binary tensors."""

from __future__ import annotations

import gc
import json
import struct
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

from carpool.engine.type_hints import meant
from carpool.errors import InvalidRequest
from carpool.http.items import ExchangeItem, ExchangeItems
from carpool.http.protocols.rows import items_of, table_of, tensors_of
from carpool.http.protocols.tensors import Tensor, elements_of, to_binary
from tests.http.oip import binary, infer, parted, tensor
from tests.support.http.served import ask, fetched, posted


def test_server_and_models_describe_themselves(port: int) -> None:
    """Health, metadata, readiness, the repository and Triton's configuration are where clients look."""
    assert fetched(port, "/v2/health/live") == (200, {"live": True})
    assert fetched(port, "/v2/health/ready") == (200, {"ready": True, "live": True})
    status, server = fetched(port, "/v2")
    assert status == 200 and server["name"] == "carpool" and "binary_tensor_data" in server["extensions"]
    assert fetched(port, "/v2/")[0] == 200
    assert "named" in fetched(port, "/v2/models")[1]["models"]
    for path in ("/v2/models/rows", "/v2/models/rows/versions/1"):
        status, rows = fetched(port, path)
        assert (status, rows["name"], rows["versions"]) == (200, "rows", ["1"])
        assert rows["inputs"] == [{"name": "input", "datatype": "FP32", "shape": [-1, -1]}]
        assert fetched(port, f"{path}/ready") == (200, {"name": "rows", "ready": True})
    _, named = fetched(port, "/v2/models/named")
    assert [(each["name"], each["datatype"], each["shape"]) for each in named["inputs"]] == [
        ("numbers", "FP64", [-1, -1]),
        ("label", "BYTES", [-1]),
    ]
    assert [each["name"] for each in named["outputs"]] == ["total", "label"]
    _, config = fetched(port, "/v2/models/named/config")
    assert config["max_batch_size"] == 64 and config["input"][1]["data_type"] == "TYPE_STRING"
    status, index = posted(port, "/v2/repository/index", {})
    assert status == 200 and {"name": "rows", "version": "1", "state": "READY", "reason": ""} in index
    assert posted(port, "/v2/repository/index", b"")[0] == 200
    assert posted(port, "/v2/repository/models/rows/unload", {})[0] == 400


def test_a_name_may_have_a_slash_in_it(port: int) -> None:
    """Some clients quote a slash in a name and some do not; both find the model."""
    for name in ("a/b", "a%2Fb"):
        assert fetched(port, f"/v2/models/{name}/ready")[0] == 200
        assert infer(port, name, tensor("input", "FP64", [1], [4]))[1]["outputs"][0]["data"] == [8.0]


def test_each_row_is_an_item(port: int) -> None:
    """The first axis is the rows, and the answer has a row for each, in their order; ids come back."""
    status, answer = infer(port, "double", tensor("x", "FP64", [3], [1, 2.5, 3]), id="mine")
    assert (status, answer["model_name"], answer["id"]) == (200, "double", "mine")
    assert answer["outputs"] == [tensor("output", "FP64", [3], [2.0, 5.0, 6.0])]
    assert infer(port, "double", tensor("x", "INT32", [2, 1], [[1], [2]]))[1]["outputs"][0]["data"] == [2.0, 4.0]
    status, answer = infer(port, "rows", tensor("input", "FP32", [2, 3], [[1, 2, 3], [4, 5, 6]]))
    assert answer["outputs"] == [tensor("output", "FP32", [2, 3], [2, 4, 6, 8, 10, 12])]
    status, answer = infer(
        port, "named", tensor("label", "BYTES", [2], ["a", "b"]), tensor("numbers", "FP64", [2, 2], [1, 2, 3, 4])
    )
    assert {each["name"]: each["data"] for each in answer["outputs"]} == {"total": [3.0, 7.0], "label": ["aa", "bb"]}


def test_outputs_are_chosen_by_name(port: int) -> None:
    """Only what is asked for is sent; what there is not is a bad request."""
    inputs = [tensor("label", "BYTES", [1], ["a"]), tensor("numbers", "FP64", [1, 1], [1])]
    status, answer = infer(port, "named", *inputs, outputs=[{"name": "label"}])
    assert [each["name"] for each in answer["outputs"]] == ["label"]
    status, answer = infer(port, "named", *inputs, outputs=[{"name": "nothing"}])
    assert status == 400 and "no output 'nothing'" in answer["error"]


def test_zero_rows(port: int) -> None:
    """No rows in, no rows out, and no model is asked."""
    status, answer = infer(port, "double", tensor("input", "FP64", [0], []))
    assert (status, answer["outputs"]) == (200, [tensor("output", "FP64", [0], [])])
    answered = binary(port, "rows", [({"name": "input", "datatype": "FP32", "shape": [0, 3]}, b"")])
    assert answered.status == 200


@pytest.mark.parametrize("dtype", ["?", "u1", "u2", "u4", "u8", "i1", "i2", "i4", "i8", "f2", "f4", "f8"])
def test_every_dtype_goes_there_and_back(port: int, dtype: str) -> None:
    """Numbers of every datatype come back as they were, as binary data and in JSON."""
    array = np.array([[0, 1], [2, 3]]).astype(dtype)
    names = {"?": "BOOL", "f": "FP", "i": "INT", "u": "UINT"}
    datatype = names[dtype[0]] + (str(array.itemsize * 8) if dtype != "?" else "")
    head = {"name": "input", "datatype": datatype, "shape": [2, 2]}
    answer = binary(port, "any", [(head, array.tobytes())], parameters={"binary_data_output": True})
    told, data = parted(answer)
    (output,) = told["outputs"]
    back = np.frombuffer(data, {"BOOL": "?", "FP64": "f8", "INT64": "i8"}[output["datatype"]]).reshape(output["shape"])
    assert (back == array).all() and output["parameters"]["binary_data_size"] == len(data)
    status, answer_json = infer(port, "any", tensor("input", datatype, [2, 2], array.tolist()))
    assert status == 200 and answer_json["outputs"][0]["data"] == array.ravel().tolist()


def test_arrays_keep_their_dtype(port: int) -> None:
    """A model of arrays gets them in the dtype of its hint, and may change what it gets."""
    rows = np.arange(6, dtype=np.float32).reshape(2, 3)
    head = {"name": "input", "datatype": "FP32", "shape": [2, 3]}
    told, data = parted(
        binary(
            port, "rows", [(head, rows.tobytes())], outputs=[{"name": "output", "parameters": {"binary_data": True}}]
        )
    )
    assert told["outputs"][0] == {
        "name": "output",
        "datatype": "FP32",
        "shape": [2, 3],
        "parameters": {"binary_data_size": 24},
    }
    assert (np.frombuffer(data, np.float32).reshape(2, 3) == rows * 2).all()
    pixels = {"name": "pixels", "datatype": "UINT8", "shape": [2, 3]}
    gain = {"name": "gain", "datatype": "INT64", "shape": [2]}
    lit = binary(port, "lit", [(pixels, bytes(range(6))), (gain, np.array([1, 10]).tobytes())])
    assert json.loads(lit.body)["outputs"][0]["data"] == [0, 1, 2, 30, 40, 50]


def test_large_tensors(ours: int) -> None:
    """Six megabytes go in and out as they are."""
    rows = np.random.default_rng(0).random((1, 1_500_000), np.float32)
    head = {"name": "input", "datatype": "FP32", "shape": list(rows.shape)}
    _, data = parted(binary(ours, "rows", [(head, rows.tobytes())], parameters={"binary_data_output": True}))
    assert (np.frombuffer(data, np.float32) == rows[0] * 2).all()


@pytest.mark.parametrize("is_binary", [True, False])
def test_rows_that_lie_apart_are_one_tensor(ours: int, is_binary: bool) -> None:
    """Large rows come back in their order, also of another order of axes or of bytes than ours, and
    rows of several dtypes or of texts as numpy stacks them.
    """
    rows = np.arange(4 * 50 * 100, dtype=np.float32).reshape(4, 50, 100)
    texts = np.array([["x" * 9000] * 2] * 2)
    for name, results in {
        "C": list(rows * 2),
        "Fortran": [np.asfortranarray(row) for row in rows],
        "foreign": [row.astype(">f4") for row in rows],
        "mixed": [rows[0].astype(np.int32), *rows[1:]],
        "one": [rows[0]],
        "texts": list(texts),
    }.items():
        (made,) = tensors_of(None, results)
        wanted = np.stack(results)
        assert made.shape == list(wanted.shape), name
        if is_binary and name != "texts":
            assert b"".join(to_binary(made)) == wanted.astype(wanted.dtype.newbyteorder("<")).tobytes(), name
        elif not is_binary:
            assert list(elements_of(made)) == wanted.ravel().tolist(), name
    data = rows.astype("<f4").tobytes()
    head = {"name": "input", "datatype": "FP32", "shape": list(rows.shape)}
    answer = binary(ours, "rows", [(head, data)], parameters={"binary_data_output": is_binary})
    if is_binary:
        assert parted(answer)[1] == (rows * 2).tobytes()
    else:
        assert json.loads(answer.body)["outputs"][0]["data"] == (rows * 2).ravel().tolist()


def items_of_requests() -> list[Any]:
    """What this process holds of requests of several items."""
    return [each for each in gc.get_objects() if isinstance(each, ExchangeItems | ExchangeItem)]


@pytest.mark.parametrize("path", ["/v2/models/rows/infer", "/models/rows/predict/many"])
def test_what_is_answered_is_let_go_at_once(doors: Any, path: str) -> None:
    """Items and answers of a request are free once it is answered: nothing of them waits until the
    interpreter looks for cycles.
    """
    running = doors[0]
    gc.collect()
    before = items_of_requests()  # of other tests in this process, whose apps may still run
    gc.disable()
    try:
        body: Any = [[1, 2]] * 3 if path.endswith("many") else {"inputs": [{**X, "data": [1, 2]}]}
        for _ in range(3):
            assert ask(running.port, path, body).status == 200
        running.wait_until(lambda: len(items_of_requests()) == len(before))
    finally:
        gc.enable()


Image = Annotated[list[float], msgspec.Meta(min_length=4, max_length=4)]
Pixels = np.ndarray[tuple[Literal[3], int], np.dtype[np.uint8]]


@pytest.mark.parametrize(
    ("kind", "is_whole", "shape", "dtype", "fitting", "other"),
    [
        pytest.param(Image, False, (4,), "f8", [(2, 4), (0, 4)], [(2, 3), (2, 4, 1), (2,)], id="a length of lists"),
        pytest.param(list[Image], False, (-1, 4), "f8", [(1, 7, 4)], [(1, 4, 7)], id="the inner of two axes"),
        pytest.param(tuple[int, int, int], False, (3,), "i8", [(1, 3)], [(1, 2)], id="a tuple"),
        pytest.param(Pixels, False, (3, -1), "u1", [(1, 3, 5)], [(1, 2, 5), (1, 3), (1, 3, 5, 1)], id="an array"),
        pytest.param(Pixels, True, (-1,), "u1", [(3, 5), (1, 2)], [], id="an array of all rows"),
        pytest.param(meant(NDArray[np.uint8]), False, (-1,), "u1", [(1, 3, 5), (1,)], [], id="an array of any shape"),
    ],
)
def test_shapes_that_hints_name_are_told_and_checked(
    kind: Any, is_whole: bool, shape: tuple[int, ...], dtype: str, fitting: list[Any], other: list[Any]
) -> None:
    """Where a hint names the length of an axis, metadata tells it, and rows of another shape are a
    bad request.
    """
    table = table_of(kind, "input", is_whole=is_whole)
    assert table.columns[0].shape == shape
    for lengths in fitting:
        array = np.zeros(lengths, dtype)
        assert len(items_of(table, [Tensor("input", table.columns[0].datatype, array)]).values) == lengths[0]
    for lengths in other:
        with pytest.raises(InvalidRequest, match="a row of input"):
            items_of(table, [Tensor("input", table.columns[0].datatype, np.zeros(lengths, dtype))])


def test_texts_and_bytes(port: int) -> None:
    """BYTES are texts or bytes, as the model takes them."""
    assert infer(port, "shout", tensor("x", "BYTES", [2], ["a", "é"]))[1]["outputs"][0]["data"] == ["A", "É"]
    data = b"".join(struct.pack("<I", len(each)) + each for each in (b"\xff\x00", b""))
    head = {"name": "x", "datatype": "BYTES", "shape": [2]}
    told, back = parted(binary(port, "flip", [(head, data)], parameters={"binary_data_output": True}))
    assert told["outputs"][0]["datatype"] == "BYTES" and back == b"\x02\0\0\0\x00\xff\0\0\0\0"
    assert binary(port, "flip", [(head, data)]).status == 500  # JSON cannot express these bytes


def test_a_body_without_json(port: int) -> None:
    """With a header length of 0 the body is one tensor, and so is the answer."""
    answer = ask(port, "/v2/models/rows/infer", np.ones(3, np.float32).tobytes(), "Inference-Header-Content-Length: 0")
    told, data = parted(answer)
    assert told["outputs"][0]["shape"] == [1, 3] and np.frombuffer(data, np.float32).tolist() == [2, 2, 2]
    told, data = parted(ask(port, "/v2/models/flip/infer", b"\x03\0\0\0abc", "Inference-Header-Content-Length: 0"))
    assert data == b"\x03\0\0\0cba"


def test_time_outs_and_priorities(ours: int) -> None:
    """`timeout` is in microseconds, and `priority` may be given."""
    row = tensor("x", "FP64", [1], [1])
    assert infer(ours, "double", row, parameters={"timeout": 20_000_000, "priority": 1})[0] == 200
    assert infer(ours, "double", row, parameters={"timeout": 1})[0] in (429, 504)
    for wrong in ({"timeout": "soon"}, {"priority": -1}, {"priority": True}):
        assert infer(ours, "double", row, parameters=wrong)[0] == 400


def test_statistics_count_what_was_done(ours: int) -> None:
    """Triton's statistics say how many requests there were, of one model and of all."""
    infer(ours, "shout", tensor("x", "BYTES", [2], ["a", "b"]))
    _, one = fetched(ours, "/v2/models/shout/stats")
    (stats,) = one["model_stats"]
    assert stats["inference_stats"]["success"]["count"] >= 2 and stats["batch_stats"]
    assert len(fetched(ours, "/v2/models/stats")[1]["model_stats"]) == 9


def test_what_does_not_fit_says_why(port: int) -> None:
    """A model that takes no tensors answers 404 with the reason, and an unknown one 404."""
    status, answer = infer(port, "union", tensor("x", "FP32", [1], [1]))
    assert status == 404 and "no row of a tensor" in answer["error"]
    assert fetched(port, "/v2/models/union")[0] == 404
    assert fetched(port, "/v2/models/union/ready")[0] == 200
    assert fetched(port, "/v2/models/none")[0] == 404 and "error" in fetched(port, "/v2/nothing")[1]
    status, answer = infer(port, "any", tensor("x", "BYTES", [1], ["raise"]))
    assert status == 500 and "1234" not in answer["error"]


X = {"name": "input", "datatype": "FP32", "shape": [1, 2]}
BAD_JSON: list[tuple[str, Any]] = [
    ("no JSON", b"{"),
    ("a list", []),
    ("no inputs", {}),
    ("empty inputs", {"inputs": []}),
    ("no shape", {"inputs": [{"name": "a", "datatype": "FP32", "data": [1]}]}),
    ("an unknown datatype", {"inputs": [{**X, "datatype": "FP31", "data": [1, 2]}]}),
    ("a datatype of another kind", {"inputs": [{**X, "datatype": "BYTES", "data": ["a", "b"]}]}),
    ("another datatype than the model's", {"inputs": [{**X, "datatype": "FP64", "data": [1, 2]}]}),
    ("too few elements", {"inputs": [{**X, "data": [1]}]}),
    ("too many elements", {"inputs": [{**X, "data": [1, 2, 3]}]}),
    ("lists of different lengths", {"inputs": [{**X, "shape": [2, 2], "data": [[1, 2], [3]]}]}),
    ("texts as numbers", {"inputs": [{**X, "data": ["a", "b"]}]}),
    ("bools as numbers", {"inputs": [{**X, "data": [True, False]}]}),
    ("an object as data", {"inputs": [{**X, "data": {"a": 1}}]}),
    ("no data", {"inputs": [X]}),
    ("a negative length", {"inputs": [{**X, "shape": [-1, 2], "data": [1, 2]}]}),
    ("no axes", {"inputs": [{**X, "shape": [], "data": [1]}]}),
    ("too many axes", {"inputs": [{**X, "shape": [1] * 40, "data": [1]}]}),
    ("lengths that overflow", {"inputs": [{**X, "shape": [2**40, 2**40], "data": [1]}]}),
    ("10 GB declared", {"inputs": [{**X, "shape": [1, 2_500_000_000], "data": [1]}]}),
    ("out of range", {"inputs": [{**X, "data": [1e300, 1]}]}),
    ("out of the range of integers", {"inputs": [{**X, "datatype": "INT8", "data": [1000, 1]}]}),
    ("two inputs of one name", {"inputs": [{**X, "data": [1, 2]}, {**X, "data": [1, 2]}]}),
    ("an input that there is not", {"inputs": [{**X, "data": [1, 2]}, {**X, "name": "b", "data": [1, 2]}]}),
    ("BF16 in JSON", {"inputs": [{**X, "datatype": "BF16", "data": [1, 2]}]}),
    ("nested too deep", b'{"inputs": ' + b"[" * 100_000),
    ("a wrong output", {"inputs": [{**X, "data": [1, 2]}], "outputs": [{"name": "z"}]}),
    (
        "a classification",
        {"inputs": [{**X, "data": [1, 2]}], "outputs": [{"name": "output", "parameters": {"classification": 2}}]},
    ),
    ("binary data without its header", {"inputs": [{**X, "parameters": {"binary_data_size": 8}}]}),
]


@pytest.mark.parametrize(("what", "body"), BAD_JSON, ids=[what for what, _ in BAD_JSON])
def test_bad_json(ours: int, what: str, body: Any) -> None:
    """Whatever is wrong with a request is a 400 in the protocol's own form, and the next one is served."""
    status, answer = posted(ours, "/v2/models/rows/infer", body)
    assert status == 400 and list(answer) == ["error"] and isinstance(answer["error"], str), answer
    assert infer(ours, "rows", {**X, "data": [1, 2]})[1]["outputs"][0]["data"] == [2.0, 4.0]


def binary_body(size: Any, data: bytes, **more: Any) -> tuple[bytes, bytes]:
    head = json.dumps({"inputs": [{**X, "parameters": {"binary_data_size": size}, **more}]}).encode()
    return head, head + data


BAD_BINARY: list[tuple[str, Any, bytes, Any]] = [
    ("a short tail", 8, b"1234567", None),
    ("a long tail", 8, b"123456789", None),
    ("a size that is not the shape's", 4, b"1234", None),
    ("a negative size", -8, b"12345678", None),
    ("a size that is no number", "8", b"12345678", None),
    ("a bool as a size", True, b"1", None),
    ("a size beyond everything", 2**62, b"12345678", None),
    ("a header longer than the body", 8, b"12345678", 10**6),
    ("a header that ends within the JSON", 8, b"12345678", 5),
    ("a header that is no number", 8, b"12345678", "x"),
    ("a negative header", 8, b"12345678", "-1"),
]


@pytest.mark.parametrize(("what", "size", "data", "header"), BAD_BINARY, ids=[each[0] for each in BAD_BINARY])
def test_bad_binary(ours: int, what: str, size: Any, data: bytes, header: Any) -> None:
    """Binary data that does not add up is a 400, and nothing is allocated for what is only declared."""
    head, body = binary_body(size, data)
    sent = len(head) if header is None else header
    answer = ask(ours, "/v2/models/rows/infer", body, f"Inference-Header-Content-Length: {sent}")
    assert answer.status == 400 and list(json.loads(answer.body)) == ["error"]
    assert infer(ours, "rows", {**X, "data": [1, 2]})[0] == 200


BAD_TEXTS = {
    "ends within a length": b"\x01\0",
    "ends within an element": b"\x05\0\0\0ab",
    "a length that overflows": b"\xff\xff\xff\xffab",
    "too few": b"\x01\0\0\0a",
    "too many": b"\x01\0\0\0a" * 3,
    "not UTF-8": b"\x01\0\0\0\xff" * 2,
}


@pytest.mark.parametrize("what", BAD_TEXTS)
def test_bad_texts(ours: int, what: str) -> None:
    """So is a BYTES tensor whose lengths do not add up, or that is no text for a model of texts."""
    head = {"name": "x", "datatype": "BYTES", "shape": [2]}
    assert binary(ours, "shout", [(head, BAD_TEXTS[what])]).status == 400
