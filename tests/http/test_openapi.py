"""/openapi.json: valid by the standard, and true: what it promises is what the server does."""

from __future__ import annotations

import json
from typing import Any

import pytest

import carpool
from carpool import Service
from carpool.http import openapi
from carpool.http.app import App
from tests.effort import slow_where
from tests.support.http import models, served, typed
from tests.support.http.front import Front, get, post
from tests.support.http.jump import on_a_jumping_loop, run, turns
from tests.support.http.net import Client, RunningServer, predict, serving
from tests.support.late import Late

jsonschema, openapi_spec_validator = Late("jsonschema"), Late("openapi_spec_validator")

TYPED = (typed.shift, typed.measure, typed.greet, typed.prune, typed.double, typed.total, typed.checked)
EVERY_ERROR = {"400", "413", "415", "422", "429", "500", "503", "504"}


def document(*services: Service, **settings: Any) -> dict[str, Any]:
    """The document as a client gets it."""

    async def main() -> dict[str, Any]:
        front = Front()
        front.app = App(*services, **settings)
        front.state.app = front.app
        wire = front.connect()
        wire.send(get("/openapi.json"))
        await turns()
        (answer,) = wire.answers()
        assert (answer.status, answer.headers["content-type"]) == (200, "application/json")
        found: dict[str, Any] = json.loads(answer.body)
        return found

    return run(main())


def resolve(doc: dict[str, Any], schema: dict[str, Any]) -> dict[str, Any]:
    """A schema that stands by itself, with the document's components."""
    return {**schema, "components": doc["components"]}


@slow_where(lambda services: services is not TYPED)
@pytest.mark.parametrize(
    "services", [TYPED, (models.scale,), (models.csv, models.reverse, models.two_steps, models.echo)]
)
def test_it_is_valid(services: tuple[Service, ...]) -> None:
    """The document is valid by the validator of OpenAPI 3.1, for types of every kind."""
    doc = document(*services)
    assert doc["openapi"].startswith("3.1")
    openapi_spec_validator.OpenAPIV31SpecValidator(doc).validate()


def test_the_version_is_the_api_s() -> None:
    """The version of the API is not that of carpool, which the description names."""
    info = document(models.scale)["info"]
    assert info["version"] == "1" and f"carpool {carpool.__version__}" in info["description"]


def test_every_address_is_there() -> None:
    """The document has the addresses of the models and those that every app has, and no other."""
    assert set(document(models.scale, models.two_steps, protocols=())["paths"]) == {
        "/predict",
        "/models/scale/predict",
        "/models/two%20steps/predict",
        "/predict/many",
        "/models/scale/predict/many",
        "/models/two%20steps/predict/many",
        "/models/scale/ready",
        "/models/two%20steps/ready",
        "/",
        "/livez",
        "/readyz",
        "/metrics",
        "/openapi.json",
    }


OF_OIP = {"/v2", "/v2/models", "/v2/models/stats", "/v2/repository/index", "/v2/health/live", "/v2/health/ready"}


def test_addresses_of_protocols_are_there_for_the_models_that_they_fit() -> None:
    """The document and the page at `/` list the addresses of protocols once each, without those
    that fit no model.
    """
    doc = document(models.scale, served.services()[7], protocols=["oip", "openai", "rerank"], timeout_status=408)
    openapi_spec_validator.OpenAPIV31SpecValidator(doc).validate()
    own = set(document(models.scale, served.services()[7], protocols=())["paths"])
    of_scale = {f"/v2/models/scale{part}" for part in ("", "/ready", "/config", "/stats", "/infer")}
    of_union = {"/v2/models/union/ready", "/v2/models/union/stats"}  # whose items are no rows of tensors
    of_list = {"/v1/models", "/v1/models/scale", "/v1/models/union"}
    assert set(doc["paths"]) - own == {*OF_OIP, *of_scale, *of_union, *of_list}
    infer = doc["paths"]["/v2/models/scale/infer"]["post"]
    assert set(infer["requestBody"]["content"]) == {"application/json", "application/octet-stream"}
    assert {"200", "400", "404", "408", "429", "503"} <= set(infer["responses"]) and infer["tags"] == ["oip"]
    ids = [operation["operationId"] for path in doc["paths"].values() for operation in path.values()]
    assert len(ids) == len(set(ids))


@pytest.mark.parametrize(("status", "other"), [(504, "408"), (408, "504")])
def test_every_error_is_documented(status: int, other: str) -> None:
    """The document has each error with a description and the schema of its body, and the time-out
    under the status that the app uses.
    """
    doc = document(models.scale, timeout_status=status)
    for path in ("/predict", "/models/scale/predict"):
        responses = doc["paths"][path]["post"]["responses"]
        assert set(responses) == {"200", str(status), *EVERY_ERROR} - {other}
        for code in set(responses) - {"200"}:
            assert responses[code]["description"]
            assert responses[code]["content"]["application/json"]["schema"] == {
                "$ref": "#/components/schemas/CarpoolError"
            }
        assert all("Retry-After" in responses[code]["headers"] for code in ("429", "503"))


def test_errors_are_as_their_schema_says(server: RunningServer) -> None:
    """The body of a real error fits the schema in the document."""
    doc = document(models.scale)
    error = json.loads(predict(server.port, "x").body)
    jsonschema.validate(error, resolve(doc, {"$ref": "#/components/schemas/CarpoolError"}))
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"error": {"code": "x"}}, resolve(doc, {"$ref": "#/components/schemas/CarpoolError"}))
    assert error["error"]["details"]
    error["error"]["details"][0]["loc"] = "no list"
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(error, resolve(doc, {"$ref": "#/components/schemas/CarpoolError"}))


@slow_where(lambda name: name not in ("shift", "measure", "checked"))
@pytest.mark.parametrize("name", [service.name for service in TYPED])
def test_examples_and_answers_fit_their_schemas(name: str) -> None:
    """The examples of the document can be sent as they are, and the answers are what it promises."""
    service = next(service for service in TYPED if service.name == name)
    doc = document(service)
    operation = doc["paths"]["/predict"]["post"]
    body = operation["requestBody"]["content"]["application/json"]
    result = operation["responses"]["200"]["content"]["application/json"]["schema"]
    assert operation["requestBody"]["content"]["application/msgpack"]["schema"] == body["schema"]
    examples = [example["value"] for example in body.get("examples", {}).values()]
    assert len(examples) == len(service.stages[0].traits.examples)
    with serving(App(service)) as running:
        for example in examples:
            jsonschema.validate(example, resolve(doc, body["schema"]))
            answer = predict(running.port, example)
            assert answer.status == 200
            jsonschema.validate(json.loads(answer.body), resolve(doc, result))


@pytest.mark.parametrize(
    ("service", "wrong"),
    [
        (typed.shift, {"x": "1"}),
        (typed.shift, {"x": 101}),
        (typed.shift, {"x": 1, "color": "green"}),
        (typed.measure, {"width": 1}),
        (typed.greet, {"name": "A", "age": -1, "address": {"city": "B"}}),
        (typed.greet, {"name": "A", "age": 1, "address": {"city": ""}}),
        (typed.prune, {"trees": {"oak": {"branches": [{"leaf": "x"}]}}, "owner": {"address": {"field": 1}}}),
        (typed.prune, {"trees": {}, "owner": {"address": {"city": "Bonn"}}}),
        (typed.double, "abc"),
        (models.scale, "1"),
    ],
)
def test_what_does_not_fit_the_schema(service: Service, wrong: Any) -> None:
    """What the schema refuses the server refuses, too."""
    doc = document(service)
    schema = doc["paths"]["/predict"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(wrong, resolve(doc, schema))


def test_formats_of_one_s_own() -> None:
    """A model's own formats are listed beside JSON and msgpack."""
    doc = document(models.csv, models.reverse)
    csv = doc["paths"]["/models/csv/predict"]["post"]
    assert set(csv["requestBody"]["content"]) == {"text/csv", "application/json", "application/msgpack"}
    assert set(csv["responses"]["200"]["content"]) == {
        "text/csv; charset=utf-8",
        "application/json",
        "application/msgpack",
    }
    raw = doc["paths"]["/models/reverse/predict"]["post"]
    assert "application/octet-stream" in raw["requestBody"]["content"]
    assert "application/octet-stream" in raw["responses"]["200"]["content"]


def test_limits_and_headers_are_named() -> None:
    """The document names the largest body and the three headers that a client may set."""
    operation = document(models.scale, max_body_bytes=12345)["paths"]["/predict"]["post"]
    assert "12345" in operation["description"]
    assert {p["name"] for p in operation["parameters"]} == {
        "X-Request-Timeout-Ms",
        "X-Request-Priority",
        "X-Request-Id",
    }


@on_a_jumping_loop
async def test_it_is_there_before_the_models_are() -> None:
    """The document can be had before any worker is ready, and HEAD has its length."""
    front = Front()
    front.app.drain()
    wire = front.connect()
    wire.send(get("/openapi.json") + get("/openapi.json", method="HEAD") + post(b"1", "/openapi.json"))
    await turns()
    answers = wire.answers(["GET", "HEAD", "POST"])
    assert [a.status for a in answers] == [200, 200, 405]
    assert answers[1].headers["content-length"] == str(len(answers[0].body))


def test_a_real_server_gives_it(server: RunningServer) -> None:
    """A real server gives the same document as is made from the services."""
    with Client(server.port) as client:
        got = json.loads(client.ask(get("/openapi.json")).body)
    of_protocols = server.app.protocol_routes()
    made = openapi.document(server.app.endpoints, 504, 2**20, of_protocols=of_protocols)
    assert got == json.loads(json.dumps(made))
