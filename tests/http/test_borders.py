"""What a model declares of its input and output holds for every way in and out.

Models of many types, whose own `decode` says who asks and whose own `encode` leaves things out, are asked in each way
that there is: all addresses of models and of protocols, content types and `Accept`s, as carpool itself lists them.
"""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import httpx
import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

import carpool
from carpool.http import codec
from carpool.http.app import App
from carpool.http.endpoint import BULK_TYPES, Endpoint
from carpool.http.protocols import BUILT_IN
from carpool.http.protocols.base import HttpProtocol
from carpool.http.protocols.instances import HEALTH_ROUTE, PREDICT_ROUTE, Vertex
from carpool.http.streaming import BY_TYPE
from carpool.openai import Chat, Completion
from tests.effort import slow_where

JSON, MSGPACK, LINES, FORM, NPY = (
    "application/json",
    "application/msgpack",
    "application/x-ndjson",
    "multipart/form-data",
    "application/x-npy",
)
KNOWN = sorted(
    kind.decode()
    for kind in {*codec._JSON_TYPES, *codec._MSGPACK_TYPES, *codec._MADE_HERE, *BULK_TYPES, *BY_TYPE}
    | {b"application/vnd.api+json", b"application/octet-stream", b"text/plain", b"image/png"}
)
"""Every content type that carpool knows, and some of families of them."""

OURS = 1
"""Whom `decode` makes the tenant, by a header; bodies say that it is 7."""
LEAK = "7777"
"""What `encode` leaves out of each answer."""


class Item(msgspec.Struct):
    text: str = ""
    tenant: int = 0


class Pair(msgspec.Struct):
    query: str
    document: str
    tenant: int = 0


class Talk(Chat, kw_only=True):
    tenant: int = 0


class Words(Completion, kw_only=True):
    tenant: int = 0


Array = NDArray[np.float32]


class Subject(NamedTuple):
    """Models of one type.

    Attributes:
        takes: The type of an item.
        gives: That of an answer.
        answer: One, in which is what `encode` leaves out.
        body: An item as JSON, in which a client forges what `decode` adds.
        oip: The same as tensors.
    """

    takes: Any
    gives: Any
    answer: Any
    body: Any
    oip: Sequence[dict[str, Any]] = ()


def tensor(name: str, kind: str, data: list[Any], *more: int) -> dict[str, Any]:
    return {"name": name, "datatype": kind, "shape": [1, *more], "data": data}


X = ["x"]
TENANT = tensor("tenant", "INT64", [7])
SUBJECTS = {
    "item": Subject(
        Item, dict[str, int], {"x": 7777}, {"text": "x", "tenant": 7}, [tensor("text", "BYTES", X), TENANT]
    ),
    "text": Subject(str, list[float], [7777.0], "x", [tensor("input", "BYTES", X)]),
    "pair": Subject(
        Pair,
        float,
        7777.0,
        {"query": "x", "document": "x", "tenant": 7},
        [tensor("query", "BYTES", X), tensor("document", "BYTES", X), TENANT],
    ),
    "talk": Subject(Talk, str, LEAK, {"messages": [{"role": "user", "content": "x"}], "tenant": 7}),
    "words": Subject(Words, str, LEAK, {"prompt": "x", "tenant": 7}),
    "array": Subject(
        NDArray[np.float32], NDArray[np.float32], np.float32([7777]), [7.0], [tensor("input", "FP32", [7.0], 1)]
    ),
    "bytes": Subject(bytes, bytes, LEAK.encode(), "eHh4"),
}


def tenant_of(item: Any) -> Any:
    """Who asks, by an item."""
    if isinstance(item, str | bytes):
        return OURS if item[:1] in ("1", b"1") else 7
    return int(item[0]) if isinstance(item, np.ndarray) else item.tenant


def made_by_decode(kind: Any, body: bytes, tenant: int, *, is_msgpack: bool) -> Any:
    """What a model's own `decode` makes of the body of an item."""
    value = (msgspec.msgpack if is_msgpack else msgspec.json).decode(body)
    if kind in (str, bytes):
        return f"{tenant}" if kind is str else str(tenant).encode()
    if isinstance(value, list):
        return np.float32([tenant])
    return msgspec.convert({**value, "tenant": tenant}, kind)


class Border(NamedTuple):
    """What a model has of its own.

    Attributes:
        accepts: What its `decode` reads; empty for none.
        produces: What its `encode` writes; empty for none.
        wants_heads: Whether `decode` takes requests, and takes the tenant from a header.
        form: "whole", "parts" or "steps".
    """

    accepts: tuple[str, ...] = ()
    produces: tuple[str, ...] = ()
    wants_heads: bool = True
    form: str = "whole"


BORDERS = {
    "none": Border(),
    "decode": Border((JSON,)),
    "decode of bodies": Border((JSON,), wants_heads=False),
    "decode of msgpack": Border((MSGPACK,)),
    "decode of two": Border((JSON, MSGPACK)),
    "decode of another JSON": Border(("application/vnd.api+json",)),
    "encode": Border((), (JSON,)),
    "encode of msgpack": Border((), (MSGPACK,)),
    "both": Border((JSON,), (JSON,)),
    "parts, none": Border(form="parts"),
    "parts, both": Border((JSON,), (JSON,), form="parts"),
    "steps, both": Border((JSON,), (JSON,), form="steps"),
}


USUAL = ("none", "decode", "encode", "both", "parts, both")
"""With these each type is asked, with the others items of a record only."""


def model_of(subject: Subject, border: Border, seen: list[Any]) -> Any:
    """A model with such a border, which notes the tenant of each item that it sees."""
    takes, gives, answer = subject.takes, subject.gives, subject.answer
    members: dict[str, Any] = {}
    if border.accepts:

        def read(r: carpool.HTTPRequest) -> Any:
            assert r.content_type.partition(";")[0] in (*border.accepts, ""), r.content_type
            return made_by_decode(takes, r.body, int(r.headers["x-tenant"]), is_msgpack=r.content_type == MSGPACK)

        def decode(self: Any, requests: list[carpool.HTTPRequest]) -> list[Any]:
            return [read(request) for request in requests]

        def decode_bodies(self: Any, bodies: list[bytes]) -> list[Any]:
            return [made_by_decode(takes, bytes(body), OURS, is_msgpack=False) for body in bodies]

        members |= {"accepts": border.accepts, "decode": decode if border.wants_heads else decode_bodies}
    if border.produces:

        def encode(self: Any, results: list[Any]) -> list[bytes]:
            is_msgpack = border.produces == (MSGPACK,)
            return [(msgspec.msgpack.encode if is_msgpack else indented)({"encoded": 1}) for _ in results]

        members |= {"produces": border.produces, "encode": encode}

    def note(x: Any) -> Any:
        seen.append(tenant_of(x))
        return answer

    if border.form == "whole":

        def predict(self: Any, x: Any) -> Any:
            return note(x)

        predict.__annotations__ = {"x": takes, "return": gives}
        members["predict"] = predict
    elif border.form == "parts":

        def predict_parts(self: Any, x: Any) -> Iterator[Any]:
            yield note(x)

        predict_parts.__annotations__ = {"x": takes, "return": Iterator[gives]}
        members["predict"] = predict_parts
    else:

        def start(self: Any, xs: list[Any]) -> list[Any]:
            return [note(x) for x in xs]

        def step(self: Any, states: list[Any]) -> list[Any]:
            return [carpool.Last(state) for state in states]

        start.__annotations__ = {"xs": list[takes], "return": list[Any]}
        step.__annotations__ = {"states": list[Any], "return": list[gives]}
        members |= {"start": start, "step": step, "stop": lambda self, states: None}
    return type("Asked", (carpool.Model,), members)


def indented(value: Any) -> bytes:
    """JSON on several lines, which must not become several lines of bulk."""
    return json.dumps(value, indent=1).encode()


class Asked(NamedTuple):
    """One request.

    Attributes:
        path: Where it goes, as the document has it.
        headers: What it says of its body and of its answer.
        body: Its body.
    """

    path: str
    headers: dict[str, str]
    body: bytes


def own_ways(subject: Subject) -> Iterator[Asked]:
    """Each content type with which a body can come, and in which an answer can be wanted."""
    body = subject.body
    for path in ("/predict", "/predict/many"):
        value = [body, body] if path.endswith("many") else body
        for kind in KNOWN:
            sent, data = body_as(kind, value)
            yield Asked(path, {"content-type": sent}, data)
            for accept in KNOWN if kind == JSON else []:
                yield Asked(path, {"content-type": sent, "accept": accept}, data)
        for accept in (f"{MSGPACK}, {JSON}", "text/html, */*", "application/json;q=0, */*", "image/png"):
            yield Asked(path, {"content-type": JSON, "accept": accept}, json.dumps(value).encode())
        yield Asked(path, {}, json.dumps(value).encode())


def body_as(kind: str, value: Any) -> tuple[str, bytes]:
    """A content type, and a body of that type that says a value."""
    if "msgpack" in kind:
        return kind, msgspec.msgpack.encode(value)
    if kind == FORM:
        fields = value.items() if isinstance(value, dict) else [("file", value)]
        parts = [f'--b\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n{text}\r\n' for name, text in fields]
        return f"{FORM}; boundary=b", "".join([*parts, "--b--\r\n"]).encode()
    if kind == NPY:
        file = io.BytesIO()
        np.save(file, np.float32([7]))
        return kind, file.getvalue()
    if kind in {each.decode() for each in BULK_TYPES} and not isinstance(value, list):
        return kind, json.dumps(value).encode() + b"\n" + json.dumps(value).encode() + b"\n"
    return kind, json.dumps(value).encode()


def bodies_for(protocol: str, path: str, subject: Subject) -> list[Asked]:
    """Requests to an address of a protocol. A new protocol has to say here how it is asked."""
    item = subject.body
    rows = [{"instances": [item, item]}, {"inputs": [item]}]
    columns = {name: [value] for name, value in item.items()} if isinstance(item, dict) else {}
    bodies: list[Any] = []
    asked: list[Asked] = []
    if protocol == "kserve-v1":
        bodies = [*rows, *([{"inputs": columns}] if columns else [])]
    elif protocol == "vertex":
        bodies = rows[:1]
    elif protocol == "sagemaker":
        bodies = [*rows, {"dataframe_records": [item]}, item]
        if columns:
            split = {"columns": [*columns], "data": [[value for (value,) in columns.values()]]}
            bodies.append({"dataframe_split": split})
            lines = [",".join(columns), ",".join(str(value) for (value,) in columns.values())]
            asked.append(Asked(path, {"content-type": "text/csv"}, "\n".join(lines).encode()))
        of_body = [each for each in own_ways(subject) if each.path == "/predict" and "accept" not in each.headers]
        asked += [each._replace(path=path) for each in of_body]
    elif protocol == "oip":
        bodies = [{"inputs": list(subject.oip)}]
    elif protocol == "openai":
        if path == "/v1/embeddings" and not isinstance(item, list):
            bodies = [{"model": "asked", "input": "x"}]
        elif path != "/v1/embeddings" and isinstance(item, dict):
            bodies = [{"model": "asked", **item, "stream": stream} for stream in (False, True)]
    elif protocol == "rerank":
        bodies = [{"model": "asked", "query": "x", "documents": ["x"]}, {"query": "x", "texts": ["x"]}]
    else:
        raise AssertionError(f"say how an address of the protocol {protocol} is asked: {path}")
    return [*(Asked(path, {"content-type": JSON}, json.dumps(body).encode()) for body in bodies), *asked]


ASKS_NO_MODEL = ("/v2/repository/",)


def protocols() -> list[HttpProtocol]:
    """All that there are; that of Vertex at addresses of its own."""
    always = Vertex({PREDICT_ROUTE: "/vertex", HEALTH_ROUTE: "/vertex/health"}, always=True)
    return [always if kind is Vertex else kind() for kind in BUILT_IN.values()]


def ways_of_protocols(endpoints: Sequence[Endpoint], subject: Subject) -> Iterator[Asked]:
    """Each address at which a protocol takes items, aliases included."""
    for protocol in protocols():
        for route in protocol.routes(endpoints):
            if route.method == "POST" and not route.path.startswith(ASKS_NO_MODEL):
                yield from bodies_for(protocol.name, route.path, subject)


async def answers_of(app: App, ways: Sequence[Asked]) -> tuple[dict[str, Any], list[tuple[Asked, httpx.Response]]]:
    """The document of an app, and what becomes of each request."""
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        document = (await client.get("/openapi.json")).json()
        answers = []
        for way in ways:
            headers = {**way.headers, "x-tenant": str(OURS)}
            answers.append((way, await client.post(way.path, content=way.body, headers=headers)))
    await app.stop()
    return document, answers


QUICK = {("item", "decode"), ("item", "both"), ("talk", "decode"), ("pair", "encode"), ("talk", "parts, both")}
CASES = [(subject, border) for subject in SUBJECTS for border in BORDERS if subject == "item" or border in USUAL]


@slow_where(lambda subject, border: (subject, border) not in QUICK)
@pytest.mark.parametrize(("subject", "border"), CASES)
def test_no_way_leads_around_a_models_own_border(subject: str, border: str) -> None:
    """Whatever the way in, a model with a `decode` for JSON or msgpack gets its items from that, and whatever the way
    out, what its `encode` leaves out is in no answer; what cannot be kept is refused, and what is listed is answered.
    """
    seen: list[Any] = []
    of, own = SUBJECTS[subject], BORDERS[border]
    stage = carpool.Stage(model_of(of, own, seen), run_in="thread", max_rows=4 if own.form == "steps" else None)
    app = App(carpool.Service(stage, name="asked"), protocols=protocols())
    ways = [*own_ways(of), *ways_of_protocols(app.endpoints, of)]
    document, answers = asyncio.run(answers_of(app, ways))
    for way, answer in answers:
        what = (way, answer.status_code, answer.content[:300])
        assert not own.produces or LEAK not in answer.text, what
        assert answer.status_code in (200, 400, 404, 406, 413, 415, 422, 500), what
        if (own.accepts or own.produces) and NPY not in way.headers.values():  # of what is no array there is no .npy
            assert answer.status_code != 500 and '"status":500' not in answer.text, what
    assert not own.accepts or set(seen) <= {OURS}, "a body has said who asks"
    check_what_is_listed(document, answers, of, own)


def check_what_is_listed(
    document: Mapping[str, Any], answers: list[tuple[Asked, httpx.Response]], of: Subject, own: Border
) -> None:
    """What the document lists is answered in some way, and what it does not list in none."""
    lines = {kind.decode() for kind in BULK_TYPES}
    for path in {way.path for way, _ in answers}:
        of_path = [(way, answer) for way, answer in answers if way.path == path]
        good = [way for way, answer in of_path if answer.status_code == 200]
        operation = document["paths"].get(path, {}).get("post")
        if operation is None:
            is_alias = path.startswith(("/rerank", "/v2/rerank")) or "/versions/" in path
            assert is_alias or not good, (path, good)
            continue
        assert good or own.form != "whole" or not (own.accepts or own.produces), (path, of_path)
        if not path.startswith("/predict"):
            continue
        reads = operation["requestBody"]["content"]
        writes = {"*/*", *operation["responses"]["200"]["content"]}
        for way, answer in of_path:
            sent, wanted = way.headers.get("content-type", JSON), way.headers.get("accept", "*/*")
            if sent in reads and wanted in writes and (sent == JSON or (sent == MSGPACK and of.takes is not bytes)):
                assert answer.status_code == 200, (way, answer.content)
            if answer.status_code == 200 and own.accepts:
                assert {sent, codec._usual_name(sent.encode()).decode()} & {*reads, *lines}, way


def test_a_client_of_ours_asks_a_model_that_reads_and_writes_json_alone() -> None:
    """`carpool.AsyncClient`, which sends msgpack, sends JSON to a model whose own `decode` reads nothing else."""
    seen: list[Any] = []
    subject = SUBJECTS["item"]

    async def ask() -> None:
        app = App(
            carpool.Service(carpool.Stage(model_of(subject, BORDERS["both"], seen), run_in="thread"), name="asked")
        )
        async with carpool.AsyncClient(app, headers={"x-tenant": str(OURS)}) as client:
            assert [await client.predict(subject.body) for _ in range(2)] == [{"encoded": 1}] * 2
            assert [each async for each in client.predict_many([subject.body] * 3)] == [{"encoded": 1}] * 3
            with pytest.raises(carpool.CarpoolError, match="encode of its own"):
                [part async for part in client.predict_stream(subject.body)]
        await app.stop()

    asyncio.run(ask())
    assert seen == [OURS] * 5


def test_an_answer_that_is_no_single_value_of_json_stays_that_item_s_error() -> None:
    """What `encode` writes stands among other answers only if it is one value of JSON, so it is never taken for two."""

    class Loose(carpool.Model):
        produces = JSON

        def predict(self, x: str) -> str:
            return x

        def encode(self, results: list[str]) -> list[bytes]:
            return [result.encode() for result in results]

    bad = ["1], 2, [3", "1\n2", "", "{", '"\\ud800', "NaN"]

    async def ask() -> None:
        app = App(carpool.Service(carpool.Stage(Loose, run_in="thread"), name="loose"))
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
            items = ["[1,\n 2]", *bad, "3"]
            many = (await client.post("/predict/many", json=items)).json()
            lines = "".join(json.dumps(item) + "\n" for item in items)
            bulk = (await client.post("/predict", content=lines, headers={"content-type": LINES})).text.splitlines()
            for answers in (many, [json.loads(line) for line in bulk]):
                assert (answers[0], answers[-1], len(answers)) == ([1, 2], 3, len(items))
                assert {answer["error"]["code"] for answer in answers[1:-1]} == {"bad_result"}
            good = await client.post("/v1/models/loose:predict", json={"instances": ["1", "[2,\n3]"]})
            assert good.json() == {"predictions": [1, [2, 3]]}
            for each in bad:
                answer = await client.post("/v1/models/loose:predict", json={"instances": ["1", each]})
                assert answer.status_code == 500
        await app.stop()

    asyncio.run(ask())
