"""`carpool.HTTPError`: an item that the model refuses with a status, a code and headers of its own."""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterator
from typing import Any

import pytest

import carpool
from carpool import HTTPError, Service
from carpool.engine.observe.refusals import outcome_of
from carpool.engine.wire.outcome import FailureReport, Outcome, pack_report, unpack_error
from carpool.http.app import App
from carpool.http.codec import error_response
from tests.http.refusing import CHAIN, INSIDE, refusal
from tests.support.http.both_fronts import both_fronts
from tests.support.http.net import predict


@pytest.fixture(scope="module")
def fronts() -> Iterator[Any]:
    with both_fronts(App(CHAIN, INSIDE)) as both:
        yield both


@pytest.mark.parametrize("name", ["chain", "inside"])
def test_a_refusal_is_answered_as_the_model_says(fronts: Any, name: str) -> None:
    """Raised or returned, in any stage, from a process or a thread, by both fronts: status, code, text
    and headers are those of the model.
    """
    for front in fronts:
        path = f"/models/{name}/predict"
        gone, down = predict(front.port, "gone", path), predict(front.port, "down", path)
        raised, good = predict(front.port, "raised", path), predict(front.port, "word", path)
        assert (gone.status, gone.headers["x-left"]) == (410, "May")
        told = json.loads(gone.body)["error"]
        assert (told["code"], told["message"]) == ("user_gone", "this user has left")
        assert told["request_id"] == gone.headers["x-request-id"]
        for answer in (down, raised):
            assert (answer.status, json.loads(answer.body)["error"]["code"]) == (503, "refused")
            assert answer.headers["retry-after"] == "7"
        assert (good.status, good.body) == (200, b"4")


@pytest.mark.parametrize("service", [CHAIN, INSIDE], ids=lambda service: str(service.name))
def test_python_callers_get_it_for_their_item_alone(service: Service) -> None:
    """Python callers get the refusal with all it says, and the others of the batch their answers."""
    with service.run() as handle:
        gone, one, down, raised, two = handle.stream(["gone", "a", "down", "raised", "bb"], return_exceptions=True)
        with pytest.raises(HTTPError, match="this user has left"):
            handle.predict("gone")
    assert (one, two) == (1, 2)
    assert [type(error) for error in (gone, down, raised)] == [HTTPError] * 3
    assert (str(gone), gone.status, gone.code) == ("this user has left", 410, "user_gone")
    assert gone.headers == (("X-Left", "May"),)
    assert [*map(outcome_of, (gone, down))] == ["invalid_item", "model_error"]


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"status": 200}, "from 400 to 599, not 200: return a Response"),
        ({"status": 600}, "from 200 to 599"),
        ({"status": "404"}, "status must be a whole number"),
        ({"status": 404, "code": "not found"}, "letters, digits and underscores"),
        ({"status": 404, "code": 4}, "code must be text"),
        ({"status": 404, "headers": {"X-Bad": "a\r\nb"}}, "one line of ASCII"),
        ({"status": 404, "headers": {"Content-Length": "4"}}, "written by the server"),
        ({"status": 404, "headers": {"X-Request-Id": "4"}}, "written by the server"),
    ],
)
def test_what_cannot_be_answered_is_refused_where_it_is_made(settings: Any, text: str) -> None:
    """What cannot be sent is an error where the refusal is made."""
    with pytest.raises((ValueError, TypeError), match=text):
        HTTPError("no", **settings)


def test_it_can_be_pickled() -> None:
    """A refusal is pickled with all it says, as callers in process pools need."""
    again = pickle.loads(pickle.dumps(refusal("gone")))
    assert (type(again), str(again), vars(again)) == (HTTPError, "this user has left", vars(refusal("gone")))


@pytest.mark.parametrize("sent", [None, (200, "x", ()), (404, "x y", ()), (404, "x", (("A", "b\r\nc"),))])
def test_what_a_worker_says_is_checked_again(sent: Any) -> None:
    """A refusal that must not be sent to a client is an error of the model, whatever a worker says."""
    error = unpack_error(Outcome.REFUSED, pack_report(FailureReport("x", refusal=sent)))
    assert type(error) is carpool.ModelError


def test_a_status_of_one_s_own() -> None:
    """A status that has no name in HTTP is answered as well."""
    assert error_response(HTTPError("odd", status=499), "id").status == 499
