"""NaN and infinities by every way over HTTP: they arrive as they are, or there is an error in their place."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import math
import re
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

import carpool
from carpool import Service, Stage
from carpool.http import stream_response
from carpool.testing import served
from tests.support.sources import ROOT

httpx = pytest.importorskip("httpx")

VALUES = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
TOO_LARGE_FOR_FLOAT32 = "1e39"


def number(xs: list[str]) -> list[float]:
    return [float(x) for x in xs]


def optional(xs: list[float | None]) -> list[str]:
    return [repr(x) for x in xs]


def halved(xs: list[float]) -> list[float]:
    return [x / 2 for x in xs]


def vectors(xs: list[str]) -> list[list[float]]:
    return [[float(x), 0.5] for x in xs]


def rows(xs: list[str]) -> NDArray[np.float64]:
    return np.array([[float(x), 0.5] for x in xs])


def scores(xs: list[tuple[str, str]]) -> list[float]:
    return [float(document) for _, document in xs]


def parts(x: str) -> Iterator[float]:
    yield float(x)


@pytest.fixture(scope="module")
def client() -> Iterator[Any]:
    several = (number, optional, halved, vectors, rows, scores)
    services = [Service(Stage(each, max_batch_size=4, run_in="thread"), name=each.__name__) for each in several]
    with served(*services, Service(Stage(parts, run_in="thread"), name="parts")) as client:
        yield client


@dataclass
class Way:
    """How to ask for a number that is written as text.

    Attributes:
        path: The address.
        body: Makes the body.
        kind: The content type of the body.
        accept: That of the answer.
        read: Returns the number in a good answer; None where the way cannot express it.
    """

    path: str
    body: Callable[[str], Any]
    kind: str = "application/json"
    accept: str = "*/*"
    read: Callable[[Any], float] | None = None


def tensor(text: str, **more: Any) -> dict[str, Any]:
    return {"inputs": [{"name": "input", "datatype": "BYTES", "shape": [1], "data": [text]}], **more}


def in_binary(answer: Any) -> float:
    length = int(answer.headers["inference-header-content-length"])
    return float(struct.unpack("<d", answer.content[length:])[0])


MSGPACK = "application/msgpack"
WAYS = {
    "json": Way("/models/number/predict", lambda x: x),
    "list": Way("/models/number/predict/many", lambda x: [x, "1"]),
    "lines": Way("/models/number/predict", lambda x: x, "application/x-ndjson", "application/x-ndjson"),
    "events": Way("/models/parts/predict", lambda x: x, accept="text/event-stream"),
    "lines of parts": Way("/models/parts/predict", lambda x: x, accept="application/x-ndjson"),
    "msgpack": Way(
        "/models/number/predict", lambda x: x, accept=MSGPACK, read=lambda a: msgspec.msgpack.decode(a.content)
    ),
    "list in msgpack": Way(
        "/models/number/predict/many",
        lambda x: msgspec.msgpack.encode([x]),
        MSGPACK,
        read=lambda a: msgspec.msgpack.decode(a.content)[0],
    ),
    "npy": Way(
        "/models/rows/predict",
        lambda x: x,
        accept="application/x-npy",
        read=lambda a: np.load(io.BytesIO(a.content))[0],
    ),
    "array in json": Way("/models/rows/predict", lambda x: x),
    "instances": Way("/v1/models/number:predict", lambda x: {"instances": [x]}),
    "columns": Way("/v1/models/number:predict", lambda x: {"inputs": [x]}),
    "oip": Way("/v2/models/number/infer", tensor),
    "oip in binary": Way(
        "/v2/models/number/infer", lambda x: tensor(x, parameters={"binary_data_output": True}), read=in_binary
    ),
    "invocations": Way("/invocations", lambda x: {"instances": [x]}),
    "embeddings": Way("/v1/embeddings", lambda x: {"model": "vectors", "input": x}),
    "embeddings in base64": Way(
        "/v1/embeddings", lambda x: {"model": "vectors", "input": x, "encoding_format": "base64"}
    ),
    "rerank": Way("/v1/rerank", lambda x: {"model": "scores", "query": "", "documents": ["1", x, "2"], "top_n": 1}),
    "rerank of texts": Way("/rerank", lambda x: {"model": "scores", "query": "", "texts": [x, "1"]}),
}


@pytest.mark.parametrize("text", VALUES)
@pytest.mark.parametrize("name", WAYS)
def test_it_arrives_or_is_an_error(client: Any, name: str, text: str) -> None:
    """A result that is no finite number is carried where the format can, and is an error elsewhere: never null."""
    way = WAYS[name]
    body = way.body(text)
    sent = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"content-type": way.kind, "accept": way.accept}
    answer = httpx.post(client.url + way.path, content=sent, headers=headers, timeout=60)
    if way.read is not None:
        found = way.read(answer)
        assert answer.status_code == 200 and (found == VALUES[text] or math.isnan(found) == math.isnan(VALUES[text]))
        return
    is_in_place = answer.status_code == 200  # of the item, or of the part
    assert is_in_place == (name in ("list", "lines", "events", "lines of parts")) or answer.status_code == 500
    assert b"error" in answer.content and b"null" not in answer.content.replace(b'"param":null', b"")
    if name not in ("instances", "columns", "oip", "invocations", "rerank", "rerank of texts"):  # these have no codes
        assert b'"bad_result"' in answer.content


def test_numbers_that_float32_cannot_hold_are_no_vectors(client: Any) -> None:
    """A vector in base64 has no infinities that the model has not returned, and shortened ones no zeros."""
    asked = {"model": "vectors", "input": TOO_LARGE_FOR_FLOAT32}
    plain = httpx.post(client.url + "/v1/embeddings", json=asked)
    assert plain.json()["data"][0]["embedding"] == [1e39, 0.5]
    assert httpx.post(client.url + "/v1/embeddings", json={**asked, "encoding_format": "base64"}).status_code == 500
    good = httpx.post(client.url + "/v1/embeddings", json={**asked, "input": "2", "encoding_format": "base64"}).json()
    assert struct.unpack("<2f", base64.b64decode(good["data"][0]["embedding"])) == (2.0, 0.5)


@pytest.mark.parametrize("text", ["NaN", "Infinity", "-Infinity", "1e999"])
@pytest.mark.parametrize(
    ("path", "frame"),
    [
        ("/models/optional/predict", "%s"),
        ("/models/optional/predict/many", "[1, %s]"),
        ("/v1/models/optional:predict", '{"instances": [%s]}'),
        ("/v1/models/optional:predict", '{"inputs": [%s]}'),
        ("/v2/models/halved/infer", '{"inputs": [{"name": "x", "datatype": "FP64", "shape": [1], "data": [%s]}]}'),
    ],
)
def test_it_is_not_read_as_json(client: Any, path: str, frame: str, text: str) -> None:
    """JSON that says NaN, as some libraries write it, is refused, or in a list its item is."""
    answer = httpx.post(client.url + path, content=frame % text)
    assert answer.status_code in (400, 422) or (text == "1e999" and b'"status":4' in answer.content)


@pytest.mark.parametrize("text", VALUES)
def test_a_cell_is_not_read_as_null(text: str) -> None:
    """A cell of a CSV table of `/invocations` that says NaN is refused, where a missing one is taken."""
    with served(Service(Stage(optional, max_batch_size=4, run_in="thread"))) as client:
        headers = {"content-type": "text/csv; header=absent"}
        answer = httpx.post(client.url + "/invocations", content=f"1.5\n{text}\n".encode(), headers=headers)
        assert answer.status_code == 400, answer.text


def test_clients_send_it_or_refuse_to(client: Any) -> None:
    """What the client sends by itself arrives as it is; lines cannot hold it, and so are not sent."""
    error = "NaN and infinities cannot be written as JSON (as msgpack they can)"
    assert error in (ROOT / "docs" / "http.md").read_text()

    async def asked(value: float) -> str:
        async with carpool.AsyncClient(client.url, model="optional") as theirs:
            with pytest.raises(ValueError, match=re.escape(error)):
                [each async for each in theirs.predict_many([1.0, value])]
            return str(await theirs.predict(value))

    with carpool.Client(client.url, model="optional") as theirs:
        for text, value in VALUES.items():
            assert theirs.predict(value) == asyncio.run(asked(value)) == text
            with pytest.raises(ValueError, match=re.escape(error)):
                list(theirs.predict_many([1.0, value]))


@pytest.mark.parametrize("text", VALUES)
def test_parts_of_ones_own_routes(text: str) -> None:
    """A part that is told by `stream_response` is an error as it is by `carpool serve`."""

    async def parts() -> Any:
        yield 1.0
        yield {"x": [VALUES[text]]}

    async def body() -> bytes:
        response = await stream_response(parts())
        return b"".join([bytes(piece) async for piece in response.body_iterator])

    told = asyncio.run(body())
    assert told.startswith(b"data: 1.0\n\nevent: error\n") and b'"bad_result"' in told and b"end" not in told
