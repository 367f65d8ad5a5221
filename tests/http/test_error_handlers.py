"""`install_error_handlers`: carpool's errors in the routes of other frameworks; and the table of errors in the docs."""

from __future__ import annotations

import inspect
import io
import json
import logging
import re
import types
from collections.abc import Callable
from typing import Any

import pytest

import carpool
from carpool import errors
from carpool.errors import OVERLOAD_REASONS
from carpool.http import install_error_handlers
from carpool.http.codec import MESSAGES, error_response
from tests.support.late import Late
from tests.support.loops import on_a_loop
from tests.support.sources import ROOT

fastapi, applications = Late("fastapi"), Late("starlette.applications")

Answer = tuple[int, dict[str, str], Any]


def test_addresses_of_objects_are_not_told() -> None:
    """A text that quotes the `repr` of an object, as parsers' texts do, tells no address in memory."""
    error = carpool.ValidationError(f"cannot identify image file {io.BytesIO()!r}")
    assert "0x" in str(error)
    told = json.loads(error_response(error, "1").body)["error"]
    assert told["message"] == told["details"][0]["msg"] == "cannot identify image file <_io.BytesIO object>"


def test_completion_offers_what_users_need() -> None:
    """`dir` of the packages has the public names and none of the modules behind them."""
    assert dir(carpool.http) == sorted(carpool.http.__all__)
    assert dir(carpool) == sorted([*carpool.__all__, "__version__"])


async def ask(app: Any, path: str = "/", kind: str = "http", *, method: str = "GET", request_id: str = "") -> Answer:
    """The status, headers and body of an app's answer."""
    headers = [(b"x-request-id", request_id.encode())] if request_id else []
    scope = {"type": kind, "method": method, "path": path, "headers": headers, "query_string": b"", "root_path": ""}
    sent: list[Any] = []

    async def receive() -> Any:
        return {"type": f"{kind}.connect"} if kind == "websocket" else {"type": "http.request", "body": b""}

    async def send(message: Any) -> None:
        sent.append(message)

    await app(scope, receive, send)
    start, body = sent
    found = {name.decode(): value.decode() for name, value in start["headers"]}
    return start["status"], found, json.loads(body["body"]) if body["body"] else None


def in_fastapi(route: Callable[[], Any]) -> Any:
    app = fastapi.FastAPI()
    app.get("/")(route)
    app.head("/")(route)
    return app


def in_starlette(route: Callable[[], Any]) -> Any:
    async def answer(request: Any) -> Any:
        return route()

    app = applications.Starlette()
    app.add_route("/", answer, methods=["GET"])
    return app


def raiser(error: Exception) -> Callable[[], Any]:
    def route() -> Any:
        raise error

    return route


EXPECTED: list[tuple[Callable[[], Exception], int, str, str | None]] = [
    (lambda: carpool.Overloaded("full", retry_after_s=2.2), 429, "overloaded", "3"),
    (lambda: carpool.Overloaded("full"), 429, "overloaded", None),
    (lambda: carpool.DeadlineExceeded("no answer within 1 s"), 504, "deadline_exceeded", None),
    (lambda: carpool.ValidationError("no cat"), 422, "invalid_item", None),
    (lambda: carpool.Unavailable("closing", code="draining"), 503, "draining", "1"),
    (lambda: carpool.ModelError("KeyError: 'secret'", type_name="KeyError"), 500, "model_error", None),
]


@pytest.mark.parametrize("host", [in_fastapi, in_starlette])
@on_a_loop
async def test_errors_of_ours_are_answered_as_our_server_answers_them(host: Any) -> None:
    """Each of our errors that a route raises has its status, code, `Retry-After` and `X-Request-Id`,
    and no text of a user's exception.
    """
    for make, status, code, retry_after in EXPECTED:
        app = host(raiser(make()))
        install_error_handlers(app)
        found, headers, body = await ask(app, request_id="mine")
        assert (found, body["error"]["code"], headers.get("retry-after")) == (status, code, retry_after)
        assert headers["x-request-id"] == body["error"]["request_id"] == "mine"
        assert "secret" not in json.dumps(body)
        assert ("details" in body["error"]) == (status == 422)


def test_an_app_of_another_kind_is_told_what_to_do() -> None:
    """A Flask app, which has no such handlers, is refused with the place where the docs have its own."""

    class Flask:
        pass

    with pytest.raises(TypeError, match=r'this is a Flask: in Flask register a handler .* "HTTP" in the docs'):
        install_error_handlers(Flask())  # type: ignore[arg-type]


def told(error: carpool.CarpoolError) -> dict[str, Any]:
    """What the body of the answer to a request says that ended with an error."""
    found: dict[str, Any] = json.loads(error_response(error, "mine").body)["error"]
    return found


@pytest.mark.parametrize("reason", OVERLOAD_REASONS)
def test_a_429_says_why(reason: str) -> None:
    """The body of a 429 names one of a closed set of reasons, and says it in words of its own where
    it is one of ours; other errors have none, and no text of a policy's leaves the machine.
    """
    body = told(carpool.Overloaded("secret", reason=reason))
    assert body["reason"] == reason
    same = [
        other for other in OVERLOAD_REASONS if told(carpool.Overloaded("x", reason=other))["message"] == body["message"]
    ]
    assert same == (["policy", "other"] if reason in ("policy", "other") else [reason])
    assert "secret" not in body["message"]
    assert "reason" not in told(carpool.Unavailable("draining", code="draining"))


def test_a_reason_that_there_is_not_is_other() -> None:
    """Whatever an error's class makes of its reason, bodies and metrics say one of the closed set."""
    odd = carpool.Overloaded("x", reason="the moon")
    assert odd.reason == "other"
    odd.reason = object()  # type: ignore[assignment]
    assert told(odd)["reason"] == "other"


@on_a_loop
async def test_what_a_model_raised_is_logged_under_the_request_s_id(caplog: pytest.LogCaptureFixture) -> None:
    """What a model raised is logged with its traceback, under an id that the client gets as well."""
    error = carpool.ModelError("KeyError: 'x'", type_name="KeyError", traceback="line 7\n")
    app = in_fastapi(raiser(error))
    install_error_handlers(app)
    with caplog.at_level(logging.ERROR):
        _, headers, _ = await ask(app, request_id="no id\r\n")
    (line,) = [record.getMessage() for record in caplog.records if record.name == "carpool"]
    assert line == f"request {headers['x-request-id']}: KeyError: 'x'\nline 7"  # and no empty line behind it


@on_a_loop
async def test_what_may_have_killed_a_worker_is_logged_under_the_request_s_id(caplog: pytest.LogCaptureFixture) -> None:
    """A request that timed out after a worker was lost with it is named in the log; others are not."""
    suspect = carpool.DeadlineExceeded("no answer within 5 s")
    suspect.worker_lost = True
    for error, expected in ((suspect, ["request r7 may have killed its worker"]), (carpool.DeadlineExceeded("x"), [])):
        app = in_fastapi(raiser(error))
        install_error_handlers(app)
        caplog.clear()
        assert (await ask(app, request_id="r7"))[0] == 504
        lines = [record.getMessage().partition(",")[0] for record in caplog.records if record.name == "carpool"]
        assert lines == expected


@on_a_loop
async def test_the_settings_are_those_of_our_app() -> None:
    """`timeout_status` and `debug` mean what they mean to `App`, and are checked."""
    app = in_fastapi(raiser(carpool.DeadlineExceeded("late")))
    install_error_handlers(app, timeout_status=408)
    assert (await ask(app))[0] == 408
    shown = in_fastapi(raiser(carpool.ModelError("KeyError: 'x'", type_name="KeyError")))
    install_error_handlers(shown, debug=True)
    assert (await ask(shown))[2]["error"]["message"] == "'x'"
    with pytest.raises(ValueError, match="timeout_status must be 504 or 408"):
        install_error_handlers(app, timeout_status=500)
    with pytest.raises(TypeError, match="debug"):
        install_error_handlers(app, debug="yes")  # type: ignore[arg-type]


@on_a_loop
async def test_other_errors_heads_and_websockets() -> None:
    """A HEAD gets no body; other errors are left to the app; so is an error of a websocket."""
    app = in_fastapi(raiser(carpool.Overloaded("full")))
    install_error_handlers(app)
    assert (await ask(app, method="HEAD"))[::2] == (429, None)
    other = in_fastapi(raiser(KeyError("x")))
    install_error_handlers(other)
    with pytest.raises(KeyError):
        await ask(other)

    async def socket(websocket: fastapi.WebSocket) -> None:
        raise carpool.Overloaded("full")

    app.websocket("/socket")(socket)
    with pytest.raises(carpool.Overloaded):
        await ask(app, "/socket", "websocket")


# -- the docs

HTTP_MD = (ROOT / "docs" / "http.md").read_text()


def test_the_handler_for_flask() -> None:
    """The handler that the docs show for Flask answers with status, code and `Retry-After`."""
    (block,) = re.findall(r"```python\n(# flask_app\.py\n.*?)```", HTTP_MD, re.DOTALL)
    handlers: dict[type, Any] = {}

    class Flask:
        def __init__(self, name: str) -> None:
            pass

        def register_error_handler(self, kind: type, handler: Any) -> None:
            handlers[kind] = handler

    flask = types.ModuleType("flask")
    flask.Flask = Flask  # type: ignore[attr-defined]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(__import__("sys").modules, "flask", flask)
        exec(block, {"__name__": "flask_app"})
    handler = handlers[carpool.CarpoolError]
    for make, status, code, retry_after in EXPECTED:
        body, found, headers = handler(make())
        assert (body, found) == ({"error": {"code": code}}, status)
        assert "Retry-After" in headers if retry_after else headers == {}


def test_the_table_of_errors_is_that_of_the_classes() -> None:
    """The table of errors names every class, with its own status, code and `retry_after_s`."""
    page = (ROOT / "docs" / "failures.md").read_text()
    section = page.split("\n## What callers catch\n")[1].split("\n## ")[0]
    row = r"^\| `(\w+)`[^|]*\| [^|]*\| (\d+)([^|]*?) \| `(\w+)`([^|]*?) \| ([^|]*?) \|$"
    rows = re.findall(row, section, re.MULTILINE)
    assert sorted(row[0] for row in rows) == sorted({*errors.__all__} - {"CarpoolError"})
    for name, status, _, code, more, retry_after in rows:
        kind = getattr(errors, name)
        made = kind("x")
        assert (made.status, made.code) == (int(status), code)
        assert retry_after.startswith(f"{made.retry_after_s}")
        takes_seconds = "retry_after_s" in inspect.signature(kind.__init__).parameters
        assert (retry_after != "None") == takes_seconds
        assert {*re.findall(r"`(\w+)`", more)} <= {*MESSAGES, "out_of_memory"}
