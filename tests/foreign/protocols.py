"""Functions that say where an item belongs, and protocols: what HTTP and others call besides models."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import carpool
from carpool.http.exchange import HttpResponse
from carpool.http.protocols.base import (
    HttpProtocol,
    ModelOfApp,
    PartsWriter,
    ProtocolRequest,
    ProtocolRoute,
    ShownError,
    Submission,
)
from tests.foreign import models
from tests.foreign.batches import Batched, ten_times
from tests.foreign.models import bad, good, trip
from tests.foreign.services import failed_by_model
from tests.foreign.table import BATCHES, HANDLES, SERVICES, VIRTUAL, WEB, Way, left_out, place
from tests.foreign.ways import AsgiCall, Refused, Told, closing
from tests.support.kinds import fail, is_of

SHAPES = "`length=` and `key=`"


def length_of(x: Any) -> int:
    """`length=`: it may raise."""
    trip(x, "length=")
    return 1


def key_of(x: Any) -> str:
    """`key=`: it may raise."""
    trip(x, "key=")
    return "one"


def shaped(way: Way) -> Any:
    """A service whose items have a length and a key."""
    model = models.slow_async if way.run_in == "loop" else models.slow
    return way.other("shaped", lambda: way.service(model, name="shaped", length=length_of, key=key_of))


for at in ("length=", "key="):

    @place(SHAPES, SERVICES, at)
    def shape_of_an_item(way: Way, kind: str, at: str = at) -> None:
        """Its item fails alone."""
        door = shaped(way)
        pids = door.pids
        first, guilty, third = door.ask(good(1), bad(at, kind), good(3))
        assert (first.value, third.value) == (10, 30), (first, third)
        failed_by_model(guilty, kind)
        assert [told.value for told in door.ask(good(4), good(5))] == [40, 50]
        assert door.pids == pids

    @place(SHAPES, [name for name in WEB if name.endswith("ASGI")], f"{at} of a line")
    def shape_of_a_line(way: Way, kind: str, at: str = at) -> None:
        """The line fails alone, in its place."""
        door = shaped(way)
        lines = b"".join(json.dumps(item).encode() + b"\n" for item in (good(1), bad(at, kind), good(3)))
        call = AsgiCall(lines)
        scope = call.scope("POST", "/predict", {"content-type": "application/x-ndjson"})
        (told,) = door.loop.ask([lambda: door.app(scope, call.receive, call.send)])
        assert told.error is None, told
        first, guilty, third = map(json.loads, call.body.splitlines())
        assert (first, guilty["error"]["code"], third) == (10, "model_error", 30)


@place(SHAPES, BATCHES, "length=")
def length_in_batches(way: Way, kind: str) -> None:
    """Its caller gets the exception itself."""
    with closing(Batched(way, ten_times, length=length_of)) as batched:
        first, guilty, third = batched.ask(good(1), bad("length=", kind), good(3))
        assert (first.value, third.value) == (10, 30), (first, third)
        assert is_of(guilty.error, kind) or isinstance(guilty.error, carpool.ModelError), guilty
        assert [told.value for told in batched.ask(good(4), good(5))] == [40, 50]


# -- protocols

PROTOCOL = "protocols: functions of addresses, `respond` and writers"


class Tripping(HttpProtocol):
    """A protocol whose requests say where it is to raise."""

    name = "tripping"
    prefixes = ("/tripping",)

    def routes(self, models: Sequence[ModelOfApp]) -> Iterator[ProtocolRoute]:
        yield ProtocolRoute("POST", "/tripping", partial(answer, models[0]))

    def error(self, error: ShownError) -> HttpResponse:
        told = {"error": {"code": error.code, "message": error.message}}
        return HttpResponse(error.status, json.dumps(told).encode())


class Speechless(Tripping):
    """A protocol that cannot tell an error, and not say what fits it."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def routes(self, models: Sequence[ModelOfApp]) -> Iterator[ProtocolRoute]:
        yield ProtocolRoute("POST", "/tripping", partial(answer, models[0]), fits=lambda: fail(self.kind))

    def error(self, error: ShownError) -> HttpResponse:
        fail(self.kind)


class Writer(PartsWriter):
    """Writes the answer, if it does not raise."""

    def __init__(self, item: Any) -> None:
        self.item = item

    def part(self, index: int, part: Any) -> bytes:
        trip(self.item, "part")
        return json.dumps(part).encode()

    def is_over(self, index: int) -> bool:
        return False

    def end(self, index: int) -> bytes:
        return b""

    def close(self) -> bytes:
        return b""

    def error(self, error: ShownError) -> bytes:
        return b""


def answer(model: ModelOfApp, request: ProtocolRequest) -> Submission:
    """The item of a request."""
    item = json.loads(bytes(request.body))
    trip(item, "answer")
    in_parts = Writer(item) if item.get("at") == "part" else None
    return Submission(model, [item], partial(respond, item), parts=in_parts)


def respond(item: Any, results: list[Any]) -> HttpResponse:
    """The answer of a request."""
    trip(item, "respond")
    return HttpResponse(200, json.dumps(results[0]).encode())


def failed(told: Told) -> None:
    """A 500 of this request."""
    assert isinstance(told.error, Refused) and told.error.status == 500, told


for at in ("answer", "respond", "part"):

    @place(PROTOCOL, WEB, at)
    def protocol(way: Way, kind: str, at: str = at) -> None:
        """Its request fails alone."""
        make = partial(way.service, models.slow_async if way.run_in == "loop" else models.slow, name="spoken")
        with closing(way.open(make(), protocols=[Tripping()])) as door:
            first, guilty, third = door.ask(good(1), bad(at, kind), good(3), path="/tripping")
            assert (first.value, third.value) == (10, 30), (first, third)
            failed(guilty)
            assert [told.value for told in door.ask(good(4), good(5), path="/tripping")] == [40, 50]


WORDS = "protocols: `error` and `fits`"


@place(WORDS, WEB)
def speechless(way: Way, kind: str) -> None:
    """Errors are in our own words then, and the address is not listed."""
    make = partial(way.service, models.slow_async if way.run_in == "loop" else models.slow, name="spoken")
    with closing(way.open(make(), protocols=[Speechless(kind)])) as door:
        (guilty,) = door.ask(bad("answer", "Exception"), path="/tripping")
        failed(guilty)
        assert guilty.error.code == "model_error"
        assert "/tripping" not in door.get("/").value
        assert "/tripping" not in door.get("/openapi.json").value["paths"]
        assert [told.value for told in door.ask(good(4), good(5), path="/tripping")] == [40, 50]


COUNT = "`count_tokens`"


class Counted(carpool.Model):
    """Vectors of texts, some of which cannot be counted."""

    @staticmethod
    def count_tokens(text: str) -> int:
        if text.startswith("raise "):
            fail(text.removeprefix("raise "))
        return len(text)

    def predict(self, texts: list[str]) -> list[list[float]]:
        return [[float(len(text))] for text in texts]


@place(COUNT, [name for name in WEB if not name.startswith("loop")])
def count_tokens(way: Way, kind: str) -> None:
    """Its request fails alone."""
    door = way.other("counted", lambda: way.service(Counted, name="counted"))
    asked = [{"model": "counted", "input": text} for text in ("a", f"raise {kind}", "abc")]
    first, guilty, third = door.ask(*asked, path="/v1/embeddings")
    assert [told.value["usage"]["total_tokens"] for told in (first, third)] == [1, 3], (first, third)
    failed(guilty)
    (again,) = door.ask({"model": "counted", "input": "ab"}, path="/v1/embeddings")
    assert again.value["data"][0]["embedding"] == [2.0]


left_out(SHAPES, VIRTUAL, "requests of virtual time have lengths and keys, and no items to find them in")
left_out(
    COUNT, [name for name in WEB if name.startswith("loop")], "it is the coordinator that counts: others stand for it"
)
for place_of_web in (PROTOCOL, WORDS, COUNT):
    left_out(place_of_web, [*HANDLES, *BATCHES, *VIRTUAL], "only HTTP has protocols")
