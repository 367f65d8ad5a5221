"""Results of other libraries by every protocol: what one of them writes as numbers is numbers by the others.

Each model gives the same result to every item. It runs in this process, so that the test knows what was sent on.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

import carpool
from carpool.engine.type_hints import meant
from carpool.http.protocols.rows import table_of, tensors_of
from carpool.http.protocols.tensors import elements_of
from carpool.testing import served
from tests.http.oip import infer, tensor
from tests.support.http.served import ask, fetched, posted


def torch() -> Any:
    return pytest.importorskip("torch")


NUMBERS: dict[str, Callable[[], Any]] = {
    "longdouble": lambda: np.array([1, 2], np.longdouble),
    "float16": lambda: np.array([1, 2], np.float16),
    "scalars": lambda: [np.float32(1), np.longdouble(2)],
    "bfloat16": lambda: torch().tensor([1.0, 2.0], dtype=torch().bfloat16),
    "grad": lambda: torch().nn.Parameter(torch().tensor([1.0, 2.0])),
    "float8": lambda: torch().tensor([1.0, 2.0]).to(torch().float8_e5m2),
    "tensors in a list": lambda: [torch().tensor(1.0), torch().tensor(2.0)],
}
NO_NUMBERS: dict[str, Callable[[], Any]] = {
    "moments": lambda: np.array(["2026", "2027"], "M8[ns]"),
    "durations": lambda: np.array([1, 2], "m8[ns]"),
    "complex": lambda: np.array([1, 2], np.complex64),
    "sparse": lambda: torch().eye(2).to_sparse(),
    "meta": lambda: torch().empty(2, device="meta"),
}
PROGRAM = """
import sys
import carpool, httpx
from carpool.testing import served
from carpool.engine.type_hints import meant
from tests.http.test_odd_results import Parameters, TEXT

service = carpool.Service(carpool.Stage(Parameters, max_batch_size=4), name="m", timeout_s=120)
with served(service) as client:
    for path, body in (("/v2/models/m/infer", {"inputs": [TEXT]}), ("/v1/embeddings", {"model": "m", "input": "a"})):
        answer = httpx.post(client.url + path, json=body, timeout=120)
        assert answer.status_code == 200, answer.text
assert "torch" not in sys.modules
"""
TEXT = tensor("input", "BYTES", [1], ["a"])


@dataclass
class Served:
    """The port of a server whose model answers with `result`."""

    port: int
    result: Any


@pytest.fixture(scope="module")
def odd() -> Iterator[Served]:
    found = Served(0, None)

    def vector(texts: list[str]) -> list[Any]:
        return [found.result for _ in texts]

    def score(pairs: list[tuple[str, str]]) -> list[Any]:
        return [found.result for _ in pairs]

    stages = [carpool.Stage(each, max_batch_size=4, run_in="thread") for each in (vector, score)]
    with served(*[carpool.Service(stage, name=stage.name) for stage in stages]) as client:
        found.port = int(client.url.rpartition(":")[2])
        yield found


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_are_numbers_by_every_protocol(odd: Served, name: str) -> None:
    """A vector whose numbers are of an odd kind is the same numbers by each way to ask."""
    odd.result = NUMBERS[name]()
    numbers = [1.0, 2.0]
    assert posted(odd.port, "/models/vector/predict", "a") == (200, numbers)
    packed = ask(odd.port, "/models/vector/predict", msgspec.msgpack.encode("a"), "Content-Type: application/msgpack")
    assert msgspec.msgpack.decode(packed.body) == numbers
    assert posted(odd.port, "/models/vector/predict/many", ["a"]) == (200, [numbers])
    assert posted(odd.port, "/v1/models/vector:predict", {"instances": ["a"]}) == (200, {"predictions": [numbers]})
    status, answer = infer(odd.port, "vector", TEXT)
    assert status == 200 and answer["outputs"][0]["data"] == numbers
    status, answer = posted(odd.port, "/v1/embeddings", {"model": "vector", "input": "a"})
    assert status == 200 and answer["data"][0]["embedding"] == numbers
    saved = ask(odd.port, "/models/vector/predict", "a", "Accept: application/x-npy")
    assert saved.status == 200 and saved.body.startswith(b"\x93NUMPY")


@pytest.mark.parametrize("name", ["longdouble", "grad"])
def test_scores_are_numbers(odd: Served, name: str) -> None:
    """A score of an odd kind is a score."""
    odd.result = NUMBERS[name]()[0]
    status, answer = posted(odd.port, "/v1/rerank", {"model": "score", "query": "q", "documents": ["d"]})
    assert status == 200 and answer["results"][0]["relevance_score"] == 1.0


@pytest.mark.parametrize("name", NO_NUMBERS)
def test_what_is_no_number_is_none_by_any_protocol(odd: Served, name: str) -> None:
    """Moments, durations and what no protocol expresses are not taken for numbers, and are `bad_result`."""
    odd.result = NO_NUMBERS[name]()
    status, answer = posted(odd.port, "/v1/embeddings", {"model": "vector", "input": "a"})
    assert status == 500 and answer["error"]["code"] == "bad_result"
    status, answer = posted(odd.port, "/v1/rerank", {"model": "score", "query": "q", "documents": ["d"]})
    assert status == 500
    if name in ("moments", "durations"):  # these are texts, as in JSON
        _, texts = posted(odd.port, "/models/vector/predict", "a")
        status, answer = infer(odd.port, "vector", TEXT)
        assert status == 200 and answer["outputs"][0] == tensor("output", "BYTES", [1, 2], texts)
    else:
        assert posted(odd.port, "/models/vector/predict", "a")[1]["error"]["code"] == "bad_result"
        assert infer(odd.port, "vector", TEXT)[0] == 500


class Whole(carpool.Model):
    """Gives an array whose rows are the results, which its hint says."""

    def predict(self, xs: NDArray[np.float32]) -> NDArray[np.float32]:
        return xs.astype(np.float64) * 2


def small(xs: list[str]) -> list[list[float]]:
    return [np.array([1, 2], np.float32) for _ in xs]  # type: ignore[misc]


def whole_numbers(xs: list[str]) -> list[float]:
    return [1 for _ in xs]


def wrong(xs: list[str]) -> list[int]:
    return [1.5 for _ in xs]  # type: ignore[misc]


def unknown(xs: list[str]) -> list[Any]:
    return [1 for _ in xs]


def test_metadata_says_what_is_answered() -> None:
    """The outputs in a model's metadata have the datatype of its answers, whatever numbers it returns; where its
    hint says nothing, metadata does not either."""
    models = (Whole, small, whole_numbers, wrong, unknown)
    services = [
        carpool.Service(carpool.Stage(model, max_batch_size=4, run_in="thread"), name=model.__name__)
        for model in models
    ]
    with served(*services) as client:
        port = int(client.url.rpartition(":")[2])

        def outputs(name: str, given: dict[str, Any]) -> tuple[list[Any], Any]:
            says = fetched(port, f"/v2/models/{name}")[1]["outputs"]
            status, answer = infer(port, name, given)
            return says, answer["outputs"][0] if status == 200 else status

        for shape, data in (([1, 3], [1.0, 2.0, 3.0]), ([0, 3], [])):
            says, gives = outputs("Whole", tensor("input", "FP32", shape, data))
            assert says == [{"name": "output", "datatype": "FP32", "shape": [-1, -1]}]
            assert gives["datatype"] == "FP32" and gives["data"] == [2 * each for each in data]
        says, gives = outputs("small", TEXT)
        assert says[0]["datatype"] == gives["datatype"] == "FP64" and gives["data"] == [1.0, 2.0]
        says, gives = outputs("whole_numbers", TEXT)
        assert says[0]["datatype"] == gives["datatype"] == "FP64" and gives["data"] == [1.0]
        assert outputs("wrong", TEXT) == ([{"name": "output", "datatype": "INT64", "shape": [-1]}], 500)
        says, gives = outputs("unknown", TEXT)
        assert says == [] and gives["datatype"] == "INT64"


@pytest.mark.parametrize(
    ("kind", "results", "shape", "data"),
    [
        (list[float], [[1], [2]], [2, 1], [1.0, 2.0]),
        (list[list[float]], [[], []], [2, 0, 0], []),
        (NDArray[np.int32], [np.array([1, 2], np.int64)], [1, 2], [1, 2]),
        (int, [np.uint8(1), np.uint8(2)], [2], [1, 2]),
        (list[str], [["a", "b"]], [1, 2], ["a", "b"]),
    ],
)
def test_results_fit_their_hint(kind: Any, results: list[Any], shape: list[int], data: list[Any]) -> None:
    """Tensors of results have the datatype and the axes of their hint."""
    table = table_of(meant(kind), "output")
    (found,) = tensors_of(table, results)
    assert found.datatype == table.columns[0].datatype and found.shape == shape
    assert list(elements_of(found)) == data


@pytest.mark.parametrize(
    ("kind", "results"),
    [
        (list[int], [[1.5]]),
        (NDArray[np.int8], [np.array([300])]),
        (NDArray[np.float16], [np.array([1e6])]),
        (list[float], [[[1.0]]]),
        (float, [[1.0]]),
        (float, ["1"]),
        (str, [1.0]),
        (tuple[float, float], [[1.0, 2.0, 3.0]]),
    ],
)
def test_results_that_do_not_fit_their_hint(kind: Any, results: list[Any]) -> None:
    """Results that a hint does not mean are `bad_result`, as they are in JSON."""
    with pytest.raises(carpool.ModelError) as caught:
        tensors_of(table_of(meant(kind), "output"), results)
    assert caught.value.code == "bad_result"


class Parameters(carpool.Model):
    """Gives rows that belong to a graph of torch, which is imported in the worker only."""

    def setup(self) -> None:
        import torch

        self.row = torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16))

    def predict(self, texts: list[str]) -> list[list[float]]:
        return [self.row for _ in texts]  # type: ignore[misc]


@pytest.mark.slow
def test_the_server_imports_no_library_of_its_models() -> None:
    """Reading a tensor in the server would import torch there, on the loop of all services; none is read."""
    torch()
    subprocess.run([sys.executable, "-c", PROGRAM], check=True, timeout=300)
