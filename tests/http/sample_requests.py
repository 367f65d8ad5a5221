"""A request of every kind, with the status of its answer."""

from __future__ import annotations

import msgspec

from tests.support.http.front import chunked, get, post

LIMIT = 2**20  # of a body, on the servers of this folder
ID = "X-Request-Id: mine"
LARGEST = b'"' + b"x" * (LIMIT - 2) + b'"'


REQUESTS: dict[str, tuple[int, bytes]] = {
    "JSON": (200, post(b"3.0")),
    "by name": (200, post(b"3.0", "/models/scale/predict")),
    "a name that is quoted": (200, post(b"40", "/models/two%20steps/predict")),
    "a query": (200, post(b"3.0", "/predict?x=%20y")),
    "msgpack": (200, post(msgspec.msgpack.encode(3.0), "/predict", "Content-Type: application/msgpack")),
    "msgpack wanted": (200, post(b"3.0", "/predict", "Accept: application/msgpack")),
    "nothing wanted that there is": (200, post(b"3.0", "/predict", "Accept: image/png")),
    "a type of the model's own": (200, post(b"1,2", "/models/csv/predict", "Content-Type: text/csv; charset=utf-8")),
    "bytes": (200, post(b"\x00\xff\r\n", "/models/reverse/predict", "Content-Type: image/png")),
    "the largest body": (200, post(LARGEST, "/models/echo/predict")),
    "chunks": (200, chunked(b"[1", b",2", b",3]", path="/models/echo/predict")),
    "an expectation": (200, post(b"3.0", "/predict", "Expect: 100-continue")),
    "time-out and priority": (200, post(b"3.0", "/predict", "X-Request-Timeout-Ms: 9000", "X-Request-Priority: -7")),
    "live": (200, get("/livez")),
    "ready": (200, get("/readyz")),
    "the document": (200, get("/openapi.json")),
    "bad syntax": (400, post(b"[1,", "/models/echo/predict", ID)),
    "no body": (400, post(b"", "/predict", ID)),
    "no UTF-8": (400, post(b'"\xff"', "/models/echo/predict", ID)),
    "nested too deep": (400, post(b"[" * 100_000 + b"]" * 100_000, "/models/echo/predict", ID)),
    "a bad time-out": (400, post(b"3.0", "/predict", ID, "X-Request-Timeout-Ms: soon")),
    "a bad priority": (400, post(b"3.0", "/predict", ID, "X-Request-Priority: 101")),
    "no such address": (404, post(b"3.0", "/predicted", ID)),
    "the root": (200, get("/", ID)),
    "no such model": (404, post(b"3.0", "/models/nobody/predict", ID)),
    "GET of a model": (405, get("/predict", ID)),
    "POST to a probe": (405, post(b"", "/livez", ID)),
    "PUT": (405, get("/models/scale/predict", ID, method="PUT")),
    "too long": (413, post(LARGEST + b" ", "/models/echo/predict", ID)),
    "too long by counting": (
        413,
        chunked(LARGEST[:-9], LARGEST[-9:], b" ", path="/models/echo/predict", headers=(ID,)),
    ),
    "a content type": (415, post(b"3.0", "/predict", ID, "Content-Type: text/csv")),
    "a character set": (415, post(b"3.0", "/predict", ID, "Content-Type: application/json; charset=latin-1")),
    "compressed": (415, post(b"3.0", "/predict", ID, "Content-Encoding: gzip")),
    "a type that does not fit": (422, post(b'"3"', "/predict", ID)),
    "a field that does not fit": (422, post(b'{"value": "no"}', "/models/gated/predict", ID)),
    "the model says no": (422, post(b'"invalid"', "/models/moody/predict", ID)),
    "the model raises": (500, post(b'"raise"', "/models/moody/predict", ID)),
    "the model fails for one item": (500, post(b'"fails"', "/models/moody/predict", ID)),
    "a result that does not fit": (500, post(b'"wrong"', "/models/moody/predict", ID)),
}
