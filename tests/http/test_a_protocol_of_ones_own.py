"""A protocol that somebody else has written: it touches no file of ours."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from carpool import Service, Stage
from carpool.engine.wire.payload import JSON
from carpool.http.app import App
from carpool.http.exchange import HttpResponse
from carpool.http.protocols import protocols_named
from carpool.http.protocols.base import (
    HttpProtocol,
    ModelOfApp,
    ProtocolRequest,
    ProtocolRoute,
    ShownError,
    Submission,
    unfit,
)
from tests.support.http import models
from tests.support.http.both_fronts import ask, asked, both_fronts
from tests.support.http.front import get
from tests.support.http.net import serving
from tests.support.sources import ROOT


class Lines(HttpProtocol):
    """Numbers in lines: `POST /lines/NAME` with a number in each, answered by lines."""

    name = "lines"
    prefixes = ("/lines",)
    headers = ("x-shout",)

    def routes(self, models: Sequence[ModelOfApp]) -> Iterator[ProtocolRoute]:
        yield ProtocolRoute("GET", "/lines", lambda request: HttpResponse(200, b"hello", b"text/plain"))
        for model in models:
            yield ProtocolRoute("POST", f"/lines/{model.name}", _Route(model).answer, model)

    def error(self, error: ShownError) -> HttpResponse:
        if error.code == "request_timeout":
            raise RuntimeError("a protocol that fails")
        return HttpResponse(error.status, f"! {error.code}: {error.message}".encode(), b"text/plain")


class _Route:
    def __init__(self, model: ModelOfApp) -> None:
        self.model = model

    def answer(self, request: ProtocolRequest) -> Submission:
        if self.model.takes.input_type is not float:
            raise unfit(f"{self.model.name} takes no numbers")
        lines = bytes(request.body).split()
        if b"broken" in lines:
            raise RuntimeError("the protocol is broken")
        is_loud = b"x-shout" in request.headers

        def respond(results: list[Any]) -> HttpResponse:
            shown = [f"! {each.status}" if isinstance(each, ShownError) else each.decode() for each in results]
            if "1000.0" in shown:
                raise RuntimeError("the protocol cannot say this")
            body = "\n".join(shown)
            return HttpResponse(200, (body.upper() + "!" if is_loud else body).encode(), b"text/plain")

        is_partial = not request.headers.get(b"x-request-timeout-ms")
        return Submission(self.model, lines, respond, JSON, JSON, is_partial=is_partial)


other = Service(Stage(models.Moody, max_batch_size=8), name="moody")


@pytest.fixture(scope="module")
def doors() -> Iterator[Any]:
    with both_fronts(App(models.scale, other, protocols=[Lines()])) as both:
        yield both


def test_rows_are_items_and_results_make_one_answer(port: int) -> None:
    """A protocol says which items a request brings and what is made of their results, by both fronts."""
    answer = ask(port, "/lines/scale", b"1 2 3")
    assert (answer.status, answer.body) == (200, b"2.0\n4.0\n6.0")
    assert answer.headers["content-type"] == "text/plain"
    assert ask(port, "/lines/scale", b"1", "X-Shout: yes").body == b"2.0!"
    assert ask(port, "/lines/scale", b"").body == b""


def test_a_page_needs_no_model(port: int) -> None:
    """A protocol may answer at once, and addresses with a slash behind them are the same."""
    for path in ("/lines", "/lines/"):
        answer = asked(port, get(path), "GET")
        assert (answer.status, answer.body) == (200, b"hello")
    assert asked(port, get("/lines", method="HEAD"), "HEAD").status == 200
    assert asked(port, get("/lines", method="OPTIONS"), "OPTIONS").headers["allow"] == "GET, HEAD, OPTIONS"


def test_errors_are_in_the_words_of_the_protocol(port: int) -> None:
    """Whatever fails is told as the protocol tells it: what is not there, what does not fit, what raises."""
    nowhere = ask(port, "/lines/none", b"1").body
    assert nowhere.startswith(b"! not_found: There is nothing at this address. The protocol lines has /lines")
    wrong = asked(port, get("/lines/scale"), "GET")
    assert (wrong.status, wrong.headers["allow"]) == (405, "POST, OPTIONS")
    unfit = ask(port, "/lines/moody", b"1")
    assert (unfit.status, unfit.body) == (404, b"! not_found: moody takes no numbers")
    for body in (b"broken", b"500"):
        raised = ask(port, "/lines/scale", body)
        assert (raised.status, raised.body) == (500, b"! model_error: The model raised an error.")
    refused = ask(port, "/lines/scale", b"1 x", "X-Request-Timeout-Ms: 5000")
    assert refused.status == 400 and refused.body.startswith(b"! invalid_request")
    assert "x-request-id" in refused.headers
    assert ask(port, "/lines/scale", b"2").body == b"4.0"


def test_an_item_may_fail_alone(port: int) -> None:
    """A protocol that says so gets the error of an item in the place of its result."""
    assert ask(port, "/lines/scale", b'1 "two" 3').body == b"2.0\n! 422\n6.0"


def test_addresses_of_ours_are_ours(port: int) -> None:
    """The app's own addresses do not change with protocols, and neither do its errors."""
    assert ask(port, "/predict", 4).body == b"8.0"
    assert json.loads(ask(port, "/nothing", 1).body)["error"]["code"] == "not_found"
    assert ask(port, "/v2/models/scale/infer", {}).status == 404


def test_protocols_are_chosen_by_name() -> None:
    """A protocol is named, imported by `module:attribute`, or given as it is; else the error says what there is."""
    assert [type(each).__name__ for each in protocols_named(["oip", f"{__name__}:Lines", Lines()])] == [
        "OpenInference",
        "Lines",
        "Lines",
    ]
    with pytest.raises(ValueError, match=r"no protocol 'olp': choose among .*oip"):
        App(models.scale, protocols=["olp"])
    with pytest.raises(ValueError, match="cannot be imported"):
        App(models.scale, protocols=["no.such:thing"])
    with pytest.raises(TypeError, match="is no protocol"):
        App(models.scale, protocols=[f"{__name__}:other"])
    with pytest.raises(TypeError, match="a list of protocols"):
        App(models.scale, protocols="oip")


def test_the_protocol_of_the_page() -> None:
    """The program of docs/protocols.md does what the page says."""
    page = (ROOT / "docs" / "protocols.md").read_text()
    (program,) = re.findall(r"```python\n(# lines\.py\n.*?)```", page, re.DOTALL)
    module: dict[str, Any] = {"__name__": "lines"}
    exec(compile(program, "lines.py", "exec"), module)  # the page is ours
    with serving(
        App(Service(Stage(module["double"], run_in="thread"), name="double"), protocols=[module["Lines"]()])
    ) as running:
        assert ask(running.port, "/lines/double", b"1\n2").body == b"2.0\n4.0\n"
        assert ask(running.port, "/lines/none", b"1").body.startswith(b"! There is nothing at this address. The ")
