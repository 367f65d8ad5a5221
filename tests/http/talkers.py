"""Models that look at whole requests, and that answer with responses of their own."""

from __future__ import annotations

from typing import Any

import carpool
from carpool import HTTPRequest, Model, Response, Service, Stage


class Described(Model):
    """Says what it has seen of each request."""

    accepts = ("text/plain", "application/json")

    def decode(self, requests: list[HTTPRequest]) -> list[dict[str, Any]]:
        return [
            {
                "body": request.body.decode(),
                "content_type": request.content_type,
                "headers": dict(request.headers),
                "agent": request.headers.get("USER-Agent"),
                "query": request.query,
                "path": request.path,
                "n": len(requests),
            }
            for request in requests
        ]

    def predict(self, xs: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return xs


class Picky(Model):
    """Its `decode` gives an error in the place of an item, or raises."""

    accepts = ("text/plain",)

    def decode(self, requests: list[HTTPRequest]) -> list[Any]:
        if any("raise" in request.query for request in requests):
            raise ValueError("not these")
        return [self._read(request) for request in requests]

    def _read(self, request: HTTPRequest) -> Any:
        errors = {
            "invalid": carpool.ValidationError("it does not fit"),
            "value": ValueError("no"),
            "key": KeyError("k"),
        }
        (name,) = request.query or ("",)
        return errors.get(name, request.body.decode())

    def predict(self, xs: list[str]) -> list[str]:
        return [x + "!" for x in xs]


def response_to(x: Any) -> Any:
    """What an item asks for."""
    if x == "plain":
        return 1.5
    if x == "created":
        return Response(2.5, status=201, headers={"Location": "/things/7", "X-Of": "7"})
    if x == "bytes":
        return Response(b"\x89PNG", content_type="image/png", headers=[("Set-Cookie", "a=1"), ("Set-Cookie", "b=2")])
    if x == "nameless":
        return Response(bytearray(b"abc"), status=299)
    if x == "nothing":
        return Response(status=204, headers={"x-why": "empty"})
    if x == "unchanged":
        return Response(status=304)
    if x == "start again":
        return Response(status=205)
    if x == "wrong":
        return Response("no number", status=201)
    if x == "large":
        return Response(b"x" * 300_000)
    if x == "refused":
        return Response({"why": "x" * 3} if False else 0.5, status=409)
    raise RuntimeError(x)


class Answering(Model):
    """Any answer that can be thought of, for each item by itself."""

    def predict(self, xs: list[str]) -> list[float | Response]:
        return [response_to(x) for x in xs]


def alone(x: str) -> float | Response:
    """What a single item asks for."""
    return response_to(x)  # type: ignore[no-any-return]


class Lines(Model):
    """A format of its own for answers; `encode` gives responses as well."""

    produces = "text/lines"

    def predict(self, xs: list[str]) -> list[Any]:
        return [response_to(x) if x != "late" else "late" for x in xs]

    def encode(self, results: list[Any]) -> list[Any]:
        late = Response(b"late", status=202, content_type="text/late")
        return [late if result == "late" else f"<{result}>".encode() for result in results]


class Two(Model):
    """Writes either of two formats, and fails items in the place of their bodies."""

    accepts = ("text/a", "text/b")
    produces = ("text/a; v=1", "text/b")

    def decode(self, bodies: list[bytes]) -> list[str]:
        return [body.decode() for body in bodies]

    def predict(self, xs: list[str]) -> list[str]:
        return xs

    def encode(self, results: list[str], content_type: str) -> list[Any]:
        return [KeyError(x) if x == "bad" else f"{content_type}:{x}".encode() for x in results]


def first(x: str) -> Any:
    """A stage that is not the last one, which must not answer."""
    return Response(x) if x == "answer" else x


def second(x: str) -> str:
    """The stage after one that answers with responses."""
    return x + "?"


described = Service(Stage(Described, max_batch_size=16), name="described")
picky = Service(Stage(Picky, max_batch_size=16), name="picky")
answering = Service(Stage(Answering, max_batch_size=16), name="answering")
single = Service(Stage(alone, run_in="thread"), name="single")
lines = Service(Stage(Lines, max_batch_size=16), name="lines")
two = Service(Stage(Two, max_batch_size=16), name="two")
far = Service(Stage(first, run_in="thread"), Stage(Two, max_batch_size=4, run_in="thread"), name="far")
chain = Service(Stage(first), Stage(second), name="chain")

ALL = (described, picky, answering, single, lines, chain, two, far)
