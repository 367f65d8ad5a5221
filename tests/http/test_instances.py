"""TF Serving, KServe V1, SageMaker, MLflow and Vertex AI: rows in, predictions out."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypedDict

import pytest

import carpool
from carpool import Service, Stage
from carpool.frames import Pandas
from carpool.http.app import App
from carpool.http.protocols.instances import Vertex
from carpool.http.serve import as_vertex_wants
from carpool.service.settings import with_defaults
from tests.support.http import models
from tests.support.http.both_fronts import asked
from tests.support.http.front import get
from tests.support.http.net import serving
from tests.support.http.served import Double, ask, fetched, posted


@dataclass
class Flat:
    """A row of a table."""

    rooms: int
    area: float
    city: str = "?"


class Price(carpool.Model):
    """A model of rows."""

    def predict(self, xs: list[Flat]) -> list[dict[str, Any]]:
        return [{"price": x.rooms * x.area, "city": x.city} for x in xs]


def total(xs: list[float]) -> float:
    """A model of lists of numbers."""
    return sum(xs)


class Ages(Pandas):
    """A model of tables."""

    def predict(self, frame: Any) -> Any:
        return frame["age"] + 1


@pytest.fixture(scope="module")
def flats() -> Iterator[int]:
    with serving(App(Service(Stage(Price, max_batch_size=8, run_in="thread"), name="flats"))) as running:
        yield running.port


@pytest.fixture(scope="module")
def lists() -> Iterator[int]:
    with serving(App(Service(Stage(total, run_in="thread"), name="lists"))) as running:
        yield running.port


# -- TF Serving and KServe V1


def test_instances_and_predictions(port: int) -> None:
    """Each instance is an item, and the predictions are in their order."""
    assert posted(port, "/v1/models/double:predict", {"instances": [1, 2.5]}) == (200, {"predictions": [2.0, 5.0]})
    assert posted(port, "/v1/models/double/versions/1:predict", {"instances": []}) == (200, {"predictions": []})
    named = {"signature_name": "serving_default", "instances": [{"numbers": [1, 2], "label": "a"}]}
    assert posted(port, "/v1/models/named:predict", named) == (200, {"predictions": [{"total": 3.0, "label": "aa"}]})
    assert posted(port, "/v1/models/a/b:predict", {"instances": [1]}) == (200, {"predictions": [2.0]})


def test_columns_of_inputs(port: int) -> None:
    """Inputs may come by column, and then outputs do as well."""
    assert posted(port, "/v1/models/double:predict", {"inputs": [1, 2]}) == (200, {"outputs": [2.0, 4.0]})
    columns = {"numbers": [[1], [2]], "label": ["a", "b"]}
    answer = posted(port, "/v1/models/named:predict", {"inputs": columns})
    assert answer == (200, {"outputs": {"total": [1.0, 2.0], "label": ["aa", "bb"]}})


def test_bytes_are_base64(port: int) -> None:
    """Bytes come as TF Serving has them."""
    b64 = base64.b64encode(b"abc").decode()
    answer = posted(port, "/v1/models/flip:predict", {"instances": [{"b64": b64}]})
    assert answer == (200, {"predictions": [base64.b64encode(b"cba").decode()]})


def test_the_state_of_a_model_has_the_keys_of_all(port: int) -> None:
    """One answer for TF Serving, KServe and OpenAI."""
    status, told = fetched(port, "/v1/models/double")
    assert status == 200 and told["ready"] is True and told["id"] == told["name"] == "double"
    assert told["model_version_status"][0]["state"] == "AVAILABLE" and told["object"] == "model"
    _, listed = fetched(port, "/v1/models")
    assert listed["object"] == "list" and "double" in listed["models"]
    assert {each["id"] for each in listed["data"]} == set(listed["models"])


BAD_V1: list[tuple[str, Any, int]] = [
    ("no JSON", b"{", 400),
    ("a list", [], 400),
    ("neither", {}, 400),
    ("both", {"instances": [], "inputs": []}, 400),
    ("no list", {"instances": 3}, 400),
    ("an object", {"instances": {"a": 1}}, 400),
    ("an item that does not fit", {"instances": ["a"]}, 400),
    ("one of several does not fit", {"instances": [1, "a", 2]}, 400),
    ("columns of different lengths", {"inputs": {"a": [1], "b": []}}, 400),
    ("columns that are none", {"inputs": {"a": 1}}, 400),
    ("no columns", {"inputs": {}}, 400),
    ("more than the queue holds", {"instances": [1] * 2000}, 413),
    ("nested too deep", b'{"instances": ' + b"[" * 100_000, 400),
]


@pytest.mark.parametrize(("what", "body", "status"), BAD_V1, ids=[each[0] for each in BAD_V1])
def test_bad_instances(ours: int, what: str, body: Any, status: int) -> None:
    """What is wrong has a status and a text, in the protocol's form, and the next request is served."""
    found, answer = posted(ours, "/v1/models/double:predict", body)
    assert (found, list(answer)) == (status, ["error"]) and isinstance(answer["error"], str)
    assert posted(ours, "/v1/models/double:predict", {"instances": [1]})[0] == 200


def test_unknown_models(ours: int) -> None:
    """A model that there is not is a 404 with a text."""
    for path in ("/v1/models/none:predict", "/v1/models/none/versions/1:predict"):
        status, answer = posted(ours, path, {"instances": [1]})
        assert status == 404 and isinstance(answer["error"], str)


# -- SageMaker and MLflow


def test_ping(port: int) -> None:
    """Both ask whether the container is healthy."""
    for path in ("/ping", "/health"):
        assert fetched(port, path) == (200, {"status": "Healthy"})
    assert asked(port, get("/version"), "GET").body.decode() == carpool.__version__


def test_invocations_in_all_forms(flats: int) -> None:
    """Rows come as MLflow has them, or the body is one item."""
    rows = [{"rooms": 2, "area": 10.0, "city": "a"}, {"rooms": 3, "area": 10.0, "city": "b"}]
    wanted = {"predictions": [{"price": 20.0, "city": "a"}, {"price": 30.0, "city": "b"}]}
    split = {"columns": ["rooms", "area", "city"], "data": [[2, 10.0, "a"], [3, 10.0, "b"]], "index": [0, 1]}
    for body in (
        {"instances": rows},
        {"dataframe_records": rows},
        {"dataframe_split": split},
        {"inputs": rows},
        {"inputs": {"rooms": [2, 3], "area": [10, 10], "city": ["a", "b"]}},
        {"instances": rows, "params": {}},
    ):
        assert posted(flats, "/invocations", body) == (200, wanted), body
    assert posted(flats, "/invocations", rows[0]) == (200, wanted["predictions"][0])
    table = b"rooms,area,city\r\n2,10,a\r\n3,10,b\r\n"
    assert posted(flats, "/invocations", table, "Content-Type: text/csv") == (200, wanted)
    assert posted(flats, "/invocations", b"2,10,a\n3,10,b\n", "Content-Type: text/csv; charset=utf-8") == (200, wanted)


def test_invocations_of_lists_of_numbers(lists: int) -> None:
    """Lines of numbers are items of a model of lists, with a header or without."""
    for table in (b"1,2\n3,4\n", b"a,b\n1,2\n3,4\n"):
        assert posted(lists, "/invocations", table, "Content-Type: text/csv") == (200, {"predictions": [3.0, 7.0]})
    split = {"dataframe_split": {"columns": ["a", "b"], "data": [[1, 2], [3, 4]]}}
    assert posted(lists, "/invocations", split) == (200, {"predictions": [3.0, 7.0]})
    assert posted(lists, "/invocations", [1, 2]) == (200, 3.0)


def any_numbers(xs: list[list[float | None]]) -> list[Any]:
    return xs


def any_texts(xs: list[list[str]]) -> list[Any]:
    return xs


def sizes(xs: list[tuple[str, float | None]]) -> list[Any]:
    return xs


class Pair(TypedDict):
    a: str
    b: str


def pairs(xs: list[Pair]) -> list[Any]:
    return [[x["a"], x["b"]] for x in xs]


@pytest.mark.parametrize(
    ("model", "first", "told", "row"),
    [
        (any_numbers, b"1,,3", "", [1, None, 3]),
        (any_numbers, b",,", "", [None, None, None]),
        (any_numbers, b",2,", "", [None, 2, None]),
        (any_numbers, b"a,b,c", "", None),
        (any_numbers, b",a,b", "", None),
        (any_numbers, b"1,2,3", "header=present", None),
        (any_numbers, b"1,x,3", "", 400),
        (any_texts, b"a,b,c", "", 400),
        (any_texts, b"a,b,c", "header=absent", ["a", "b", "c"]),
        (any_texts, b"a,b,c", 'header="present"', None),
        (any_texts, b"a,,c", "", ["a", "", "c"]),
        (sizes, b"cat,", "", ["cat", None]),
        (sizes, b"name,size", "", None),
        (pairs, b"a,a", "", ["a", "a"]),
        (pairs, b"a,b", "", None),
        (pairs, b"a,b", "charset=utf-8; header=absent", ["a", "b"]),
        (pairs, b"x,y", "header=present", 400),
    ],
)
def test_a_first_line_that_can_be_a_row_is_no_header(model: Any, first: bytes, told: str, row: Any) -> None:
    """A line of CSV is a header where it can be no row, or the client says so; what may be either is refused."""
    second = {any_numbers: (b"4,5,6", [4, 5, 6]), any_texts: (b"d,e,f", ["d", "e", "f"])}.get(model)
    body, wanted = second or ((b"dog,2", ["dog", 2]) if model is sizes else (b"c,d", ["c", "d"]))
    with serving(App(Service(Stage(model, max_batch_size=4, run_in="thread")))) as running:
        kind = f"Content-Type: text/csv; {told}" if told else "Content-Type: text/csv"
        status, answer = posted(running.port, "/invocations", first + b"\n" + body + b"\n", kind)
    if row == 400:
        assert status == 400
    else:
        assert (status, answer) == (200, {"predictions": [*([] if row is None else [row]), wanted]})


def test_invocations_of_tables() -> None:
    """The rows of a request are one table for a model of tables, with an answer for each row."""
    with serving(App(Service(Stage(Ages, max_batch_size=4, run_in="thread"), name="ages"))) as running:
        rows = [{"age": 1}, {"age": 2}]
        for path, body in (
            ("/invocations", {"dataframe_records": rows}),
            ("/invocations", {"dataframe_split": {"columns": ["age"], "data": [[1], [2]]}}),
            ("/v1/models/ages:predict", {"instances": rows}),
        ):
            assert posted(running.port, path, body) == (200, {"predictions": [2, 3]})
        answer = ask(running.port, "/invocations", b"age\n1\n2\n", "Content-Type: text/csv", "Accept: application/json")
        assert (answer.status, json.loads(answer.body)) == (200, [2, 3])


def test_invocations_of_bytes() -> None:
    """SageMaker sends any content type; what the model reads is an item as it is."""
    with serving(App(models_of_bytes())) as running:
        answer = ask(running.port, "/invocations", b"\xffabc", "Content-Type: image/png")
        assert (answer.status, answer.body) == (200, b"cba\xff")
    with serving(App(models.csv)) as running:
        answer = ask(running.port, "/invocations", b"1,2", "Content-Type: text/csv", "Accept: text/csv")
        assert (answer.status, answer.body) == (200, b"3.0,1")


def models_of_bytes() -> Service:
    return Service(Stage(models.Reverse, max_batch_size=4, run_in="thread"), name="reverse")


BAD_INVOCATIONS: list[tuple[str, Any, str, int]] = [
    ("no JSON", b"{", "application/json", 400),
    ("two forms", {"instances": [], "inputs": []}, "application/json", 400),
    ("params", {"instances": [], "params": {"a": 1}}, "application/json", 400),
    ("an unknown content type", b"abc", "image/png", 415),
    ("a row of another length", {"dataframe_split": {"columns": ["rooms"], "data": [[1, 2]]}}, "application/json", 400),
    ("a table without lines", b"", "text/csv", 400),
    ("a line of another length", b"rooms,area\n1\n", "text/csv", 400),
    ("quotes that do not end", b'rooms,area\n"1,2\n', "text/csv", 400),
    ("no UTF-8", b"rooms,area\n\xff,1\n", "text/csv", 400),
    ("a field that does not fit", b"rooms,area\nmany,1\n", "text/csv", 400),
]


@pytest.mark.parametrize(("what", "body", "kind", "status"), BAD_INVOCATIONS, ids=[each[0] for each in BAD_INVOCATIONS])
def test_bad_invocations(flats: int, what: str, body: Any, kind: str, status: int) -> None:
    """What is wrong has a status and a text, and the next request is served."""
    found, answer = posted(flats, "/invocations", body, f"Content-Type: {kind}")
    assert (found, list(answer)) == (status, ["error"]), answer
    assert posted(flats, "/invocations", {"instances": []}) == (200, {"predictions": []})


# -- Vertex AI


def test_vertex_names_the_paths() -> None:
    """The paths are those of the variables, also where they are addresses that every app has."""
    environ = {"AIP_HEALTH_ROUTE": "/is_well", "AIP_PREDICT_ROUTE": "/predict"}
    app = App(Service(Stage(Double, max_batch_size=4, run_in="thread")), protocols=[Vertex(environ)])
    with serving(app) as running:
        assert fetched(running.port, "/is_well") == (200, {"status": "Healthy"})
        assert posted(running.port, "/predict", {"instances": [1, 2]}) == (200, {"predictions": [2.0, 4.0]})
        assert posted(running.port, "/models/Double/predict", 4) == (200, 8.0)
        for wrong in ({}, {"instances": [1], "parameters": {"a": 1}}, {"instances": ["a"]}):
            status, answer = posted(running.port, "/predict", wrong)
            assert status == 400 and list(answer) == ["error"]


def test_vertex_is_there_only_if_it_is_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without its variables nothing changes; with `--vertex` the usual paths and port are taken."""
    monkeypatch.delenv("AIP_PREDICT_ROUTE", raising=False)
    assert list(Vertex().routes([])) == []
    monkeypatch.setenv("AIP_HTTP_PORT", "9000")
    usual = with_defaults({})
    assert Vertex.address(usual["host"], usual["port"]) == ("0.0.0.0", 9000)
    assert Vertex.address("127.0.0.1", 8000) == ("127.0.0.1", 8000)  # who says so wants it
    assert Vertex.address("::1", 7000) == ("::1", 7000)
    monkeypatch.setenv("AIP_HTTP_PORT", "soon")
    with pytest.raises(ValueError, match="no port"):
        Vertex.address("127.0.0.1", 8000)


def test_vertex_chooses_address_and_paths_if_it_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """With `--vertex`, or where its variables are set, the server listens as Vertex AI wants it."""
    for name in ("AIP_PREDICT_ROUTE", "AIP_HTTP_PORT"):
        monkeypatch.delenv(name, raising=False)
    plain = with_defaults({})
    assert as_vertex_wants(plain) == (plain, None)
    none = with_defaults({"protocol": ("none",)})
    assert as_vertex_wants(none) == (none, [])
    settings, chosen = as_vertex_wants(with_defaults({"protocol": ("oip",), "vertex": True}))
    assert (settings["host"], settings["port"]) == ("0.0.0.0", 8080) and chosen is not None
    assert isinstance(chosen[0], Vertex) and chosen[0].is_wanted and chosen[1:] == ["oip"]
    monkeypatch.setenv("AIP_PREDICT_ROUTE", "/predict")
    assert as_vertex_wants(plain)[0]["port"] == 8080
    assert as_vertex_wants(with_defaults({"protocol": ("oip",)}))[0]["port"] == 8000


def test_protocols_know_that_a_service_starts_or_stops() -> None:
    """Health says 503 while nothing can be answered, and requests are refused in the protocol's form."""
    app = App(Service(Stage(Double, max_batch_size=4, run_in="thread"), name="double"))
    with serving(app) as running:
        running.call(app.drain)
        for path in ("/v2/health/ready", "/v2/models/double/ready", "/ping", "/v1/models/double"):
            assert fetched(running.port, path)[0] == 503, path
        status, answer = posted(running.port, "/v1/models/double:predict", {"instances": [1]})
        assert status == 503 and isinstance(answer["error"], str)
        status, answer = posted(running.port, "/v1/embeddings", {"model": "double", "input": "a"})
        assert status == 503 and json.dumps(answer)
