"""A service as an ASGI app, which looks to the actors like a handle: they ask it in JSON, without a server."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import carpool
from carpool.http import App
from tests.fuzz.models import Sent

_ERRORS: dict[int, Any] = {
    429: carpool.Overloaded,
    500: carpool.ModelError,
    503: carpool.Unavailable,
    504: carpool.DeadlineExceeded,
}
_BY_CODE: dict[str, Any] = {
    "model_error": carpool.ModelError,
    "bad_result": carpool.ModelError,
    "request_crashed_worker": carpool.ModelError,
    "deadline_exceeded": carpool.DeadlineExceeded,
    "worker_lost": carpool.Unavailable,
    "stage_failed": carpool.Unavailable,
    "stopped": carpool.Unavailable,
    "draining": carpool.Unavailable,
}
_MANY = b"[%b0]" % (b"0," * 70_000)
_LIES = (
    ("/predict/many", b"application/json", _MANY),
    ("/predict/many", b"application/msgpack", b"\xdd\xff\xff\xff\xff"),
    ("/v1/models/{}:predict", b"application/json", b'{"instances": %b}' % _MANY),
    ("/v1/models/{}:predict", b"application/json", b'{"inputs": {"%b": [%b0]}}' % (b"x" * 50_000, b"0," * 1000)),
    (
        "/v2/models/{}/infer",
        b"application/json",
        b'{"inputs": [{"name": "input", "datatype": "FP32", "shape": [%d, 0], "data": []}]}' % 2**40,
    ),
    ("/v2/models/{}/infer", b"application/json", b'{"inputs": [], "outputs": [%b{}]}' % (b"{}," * 9000)),
    ("/invocations", b"application/json", b'{"instances": %b}' % _MANY),
    (
        "/invocations",
        b"application/json",
        b'{"dataframe_split": {"columns": ["%b"], "data": [%b[1]]}}' % (b"x" * 50_000, b"[1]," * 1000),
    ),
    ("/invocations", b"application/json", b'{"dataframe_records": [%b{}]}' % (b"{}," * 25_000)),
    ("/invocations", b"application/msgpack", b"\xdd\xff\xff\xff\xff"),
    ("/predict", b"application/json", b"[" * 100_000),
)
"""Bodies that claim to be huge: by address, type and bytes. None of them becomes items; a body of
msgpack at /invocations waits as the one item that it says to be, so that an SLO may refuse it."""
_REFUSED = {400, 404, 413, 429, 503}

_PAGES = ("/", "/livez", "/readyz", "/metrics", "/openapi.json")


class Front:
    """Like an `AsyncHandle`, for what the two have in common.

    Args:
        app: Which nobody serves.
    """

    def __init__(self, app: App) -> None:
        self.app = app
        self.pids: list[int] = []
        self._asked = 0

    async def start(self) -> None:
        """Start all services, as a lifespan does."""
        await self.app.ensure_started(anew=True)

    async def close(self, drain: bool = True) -> None:
        """Stop all services."""
        await self.app.stop(drain)

    async def predict(
        self, x: Sent, *, timeout_s: float | None = None, priority: int = 0, on_part: Callable[[Any], Any] | None = None
    ) -> Sent:
        """POST an item. Raises the error that the status stands for."""
        if on_part is not None:
            async with self.predict_stream(x, timeout_s=timeout_s) as parts:
                async for part in parts:
                    on_part(part)
            return Sent(*part)
        headers = [(b"content-type", b"application/json"), (b"x-request-priority", b"%d" % priority)]
        if timeout_s is not None:
            headers.append((b"x-request-timeout-ms", b"%d" % max(1, int(1000 * timeout_s))))
        self._asked += 1
        if self._asked % 5 == 4:
            await self._lie(*_LIES[self._asked // 5 % len(_LIES)])
        if self._asked % 5 in (1, 2, 3):
            way = (self._predict_in_a_list, self._predict_in_a_line, self._predict_by_a_protocol)[self._asked % 5 - 1]
            return await way(x, headers)
        status, body = await self._ask("POST", "/predict", headers, json.dumps(x).encode())
        if status == 200:
            return Sent(*json.loads(body))
        raise _ERRORS[status](body.decode())

    def predict_stream(self, x: Sent, *, timeout_s: float | None = None) -> FrontParts:
        """The parts of an answer, as server-sent events and as lines in turn."""
        headers = [(b"content-type", b"application/json")]
        if timeout_s is not None:
            headers.append((b"x-request-timeout-ms", b"%d" % max(1, int(1000 * timeout_s))))
        self._asked += 1
        return FrontParts(self.app, json.dumps(x).encode(), headers, as_events=self._asked % 2 == 0)

    async def _predict_in_a_list(self, x: Sent, headers: list[Any]) -> Sent:
        """The same, with the item as the only one of a list."""
        status, body = await self._ask("POST", "/predict/many", headers, json.dumps([x]).encode())
        if status != 200:
            raise _ERRORS[status](body.decode())
        (entry,) = json.loads(body)
        if type(entry) is dict:
            raise _ERRORS[entry["error"]["status"]](json.dumps(entry))
        return Sent(*entry)

    async def _predict_in_a_line(self, x: Sent, headers: list[Any]) -> Sent:
        """The same, with the item as the only line of a bulk request."""
        headers = [(b"content-type", b"application/x-ndjson"), *headers[1:]]
        status, body = await self._ask("POST", "/predict", headers, json.dumps(x).encode())
        if status != 200:
            raise _ERRORS[status](body.decode())
        (line,) = body.splitlines()
        entry = json.loads(line)
        if type(entry) is dict:
            error = entry["error"]
            raise (_BY_CODE.get(error["code"]) or _ERRORS[error["status"]])(line.decode())
        return Sent(*entry)

    async def _predict_by_a_protocol(self, x: Sent, headers: list[Any]) -> Sent:
        """The same, by the protocol of TF Serving."""
        path = f"/v1/models/{self.app.endpoints[0].name}:predict"
        status, body = await self._ask("POST", path, headers, json.dumps({"instances": [x]}).encode())
        if status != 200:
            raise _ERRORS[status](body.decode())
        (answer,) = json.loads(body)["predictions"]
        return Sent(*answer)

    async def _lie(self, path: str, kind: bytes, body: bytes) -> None:
        """POST a body that claims to be huge, which is refused."""
        path = path.format(self.app.endpoints[0].name)
        status, told = await self._ask("POST", path, [(b"content-type", kind)], body)
        if status not in _REFUSED:
            raise AssertionError(f"a body that claims to be huge at {path} is answered {status}: {told[:200]!r}")

    async def stream(
        self, xs: Any, *, max_in_flight: int | None = None, return_exceptions: bool = False
    ) -> AsyncIterator[Any]:
        """The items one after the other."""
        source = xs if hasattr(xs, "__aiter__") else _one_by_one(xs)
        async with contextlib.aclosing(source):
            async for x in source:
                try:
                    yield await self.predict(x)
                except carpool.CarpoolError as error:
                    if not return_exceptions:
                        raise
                    yield error

    async def stats(self) -> None:
        """Ask for all addresses that there are besides."""
        for page in _PAGES:
            status, _ = await self._ask("GET", page, [], b"")
            if status not in (200, 503):
                raise AssertionError(f"GET {page} is answered {status}")

    def story(self, request_id: int) -> None:
        """There is no story through a front."""

    async def _ask(self, method: str, path: str, headers: list[Any], body: bytes) -> tuple[int, bytes]:
        sent: list[dict[str, Any]] = []
        asked = [{"type": "http.request", "body": body}]

        async def receive() -> dict[str, Any]:
            if not asked:
                await asyncio.get_running_loop().create_future()  # the client stays
            return asked.pop()

        async def send(message: dict[str, Any]) -> None:
            sent.append(message)

        scope = {"type": "http", "method": method, "path": path, "raw_path": path.encode(), "headers": headers}
        await self.app(scope, receive, send)
        head, *rest = sent
        return head["status"], b"".join(message["body"] for message in rest)


class FrontParts:
    """The parts of one answer, over ASGI.

    Args:
        app: Is asked.
        body: Of the request.
        headers: Of the request.
        as_events: Whether the client wants server-sent events; else lines of JSON.
    """

    def __init__(self, app: App, body: bytes, headers: list[Any], *, as_events: bool) -> None:
        accept = b"text/event-stream" if as_events else b"application/x-ndjson"
        headers = [*headers, (b"accept", accept)]
        self._scope = {
            "type": "http",
            "method": "POST",
            "path": "/predict",
            "raw_path": b"/predict",
            "headers": headers,
        }
        self._app, self._body, self._as_events = app, body, as_events
        self._messages: asyncio.Queue[Any] = asyncio.Queue()
        self._status, self._data, self._n = 0, b"", 0
        self._has_ended = False

    async def __aenter__(self) -> FrontParts:
        self._left = asyncio.Event()
        self._call = asyncio.ensure_future(self._app(self._scope, self._receive, self._messages.put))
        self._call.add_done_callback(lambda _: self._messages.put_nowait(None))
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._left.set()
        try:
            await self._call
        except asyncio.CancelledError:
            self._call.cancel()
            raise

    def __aiter__(self) -> FrontParts:
        return self

    async def __anext__(self) -> Any:
        while True:
            if self._status == 200 and (said := self._next()) is not None:
                return said
            message = await self._messages.get()
            if message is None:
                raise AssertionError(f"the answer broke off: {self._data!r}")
            self._status = message.get("status", self._status)
            self._data += message.get("body", b"")
            if self._status != 200 and message["type"] == "http.response.body":
                raise _ERRORS[self._status](self._data.decode())

    def _next(self) -> Any:
        """The next part; None if it is not there yet."""
        end = b"\n\n" if self._as_events else b"\n"
        while end in self._data:
            piece, _, self._data = self._data.partition(end)
            if piece.startswith(b":"):
                continue
            kind, said = self._read(piece.decode())
            if kind == "error":
                raise _BY_CODE[said["code"]](json.dumps(said))
            if kind == "end":
                if said != {"parts": self._n} or self._data:
                    raise AssertionError(f"the end says {said} after {self._n} parts, then {self._data!r}")
                raise StopAsyncIteration
            self._n += 1
            return said
        return None

    def _read(self, piece: str) -> tuple[str, Any]:
        if not self._as_events:
            ((kind, said),) = json.loads(piece).items()
            return kind, said
        kind = "part"
        if piece.startswith("event: "):
            line, _, piece = piece.partition("\n")
            kind = line.removeprefix("event: ")
        said = json.loads(piece.removeprefix("data: "))
        return kind, said["error"] if kind == "error" else said

    async def _receive(self) -> dict[str, Any]:
        if self._body:
            body, self._body = self._body, b""
            return {"type": "http.request", "body": body}
        await self._left.wait()
        return {"type": "http.disconnect"}


async def _one_by_one(xs: Any) -> AsyncIterator[Any]:
    for x in xs:
        yield x
