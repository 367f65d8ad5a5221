"""What a service stands in: the ASGI server that calls it, and the handlers of its log."""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Iterator
from typing import Any

from tests.foreign import models
from tests.foreign.batches import Batched, ten_times
from tests.foreign.models import bad, good
from tests.foreign.policies import Raises, Switch
from tests.foreign.services import failed_by_model, one_of_three
from tests.foreign.table import BATCHES, HANDLES, INSIDE, PROCESSES, WAYS, WEB, Way, left_out, place
from tests.foreign.ways import AsgiCall, closing
from tests.support.kinds import fail, is_of

ASGI = [name for name in WAYS if name.endswith("ASGI")]
SERVER = "ASGI's `receive` and `send`"


class BadServer(AsgiCall):
    """An ASGI server that raises.

    Args:
        at: Whether the body cannot be read, the client's leaving not be waited for, or an answer not be sent.
    """

    def __init__(self, at: str, kind: str, body: bytes) -> None:
        super().__init__(body)
        self.at, self.kind = at, kind

    async def receive(self) -> dict[str, Any]:
        if self.at == "receive, of the body" or (self.at == "receive, meanwhile" and not self._messages):
            fail(self.kind)
        return await super().receive()

    async def send(self, message: dict[str, Any]) -> None:
        if self.at == "send":
            fail(self.kind)
        await super().send(message)


for at in ("receive, of the body", "send"):

    @place(SERVER, ASGI, at)
    def server(way: Way, kind: str, at: str = at) -> None:
        """The exception goes to the server as it came, and the service goes on."""
        door = way.shared
        call = BadServer(at, kind, b'{"n": 1}')
        (told,) = door.loop.ask([lambda: _asked(door, call)])
        assert is_of(told.error, kind), told
        assert [told.value for told in door.ask(good(4), good(5), good(6))] == [40, 50, 60]


@place(SERVER, ASGI, "receive, meanwhile")
def server_meanwhile(way: Way, kind: str) -> None:
    """Likewise while the answer is not there yet; the request is not waited for any more."""
    door = way.shared
    before = door.stats().outcomes["cancelled"]
    call = BadServer("receive, meanwhile", kind, json.dumps(bad("sleep", kind)).encode())
    (told,) = door.loop.ask([lambda: _asked(door, call)])
    assert is_of(told.error, kind), told
    assert door.stats().outcomes["cancelled"] == before + 1
    assert [told.value for told in door.ask(good(4), good(5), good(6))] == [40, 50, 60]


async def _asked(door: Any, call: AsgiCall) -> None:
    path = "/models/hooks/predict" if len(door.app.endpoints) > 1 else "/predict"
    await door.app(call.scope("POST", path, {}), call.receive, call.send)


left_out(SERVER, [name for name in WAYS if name not in ASGI], "only ASGI has them")

# -- logs

LOG = "handlers of the log"


class BadHandler(logging.Handler):
    """A handler of the log that raises."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.hits = 0

    def handle(self, record: logging.LogRecord) -> bool:
        self.hits += 1
        fail(self.kind)


@contextlib.contextmanager
def bad_handler(kind: str) -> Iterator[BadHandler]:
    """carpool's log goes to one that raises."""
    handler = BadHandler(kind)
    logging.getLogger("carpool").addHandler(handler)
    try:
        yield handler
    finally:
        logging.getLogger("carpool").removeHandler(handler)


@place(LOG, WEB)
def model_error_logged(way: Way, kind: str) -> None:
    """The line is lost, and nothing else."""
    with bad_handler(kind) as handler:
        one_of_three(way, bad("predict", "Exception"), failed_by_model, "Exception")
        assert handler.hits


@place(LOG, [name for name in INSIDE if name in HANDLES])
def failure_logged(way: Way, kind: str) -> None:
    """The line is lost, and nothing else."""
    switch = Switch("Exception")
    model = models.slow_async if way.run_in == "loop" else models.slow
    with bad_handler(kind) as handler, closing(way.open(way.service(model, policy=Raises(switch)))) as door:
        switch.at = "decide"
        for told in door.ask(good(1), good(2), good(3)):
            assert told.code == "stage_failed", told
        assert handler.hits


left_out(
    LOG,
    [name for name in PROCESSES if name in HANDLES],
    "it is the coordinator that writes the log, whatever the workers are: threads stand for all",
)


@place(LOG, BATCHES)
def memory_logged(way: Way, kind: str) -> None:
    """Out of memory is told; the line is lost, and nothing else."""

    def runs_out(xs: list[Any]) -> Any:
        if len(xs) > 1:
            raise MemoryError("planned")
        return ten_times(xs)

    with bad_handler(kind) as handler, closing(Batched(way, runs_out)) as batched:
        assert batched.many([good(1), good(2), good(3)]).value == [10, 20, 30]
        assert handler.hits
        assert [told.value for told in batched.ask(good(4), good(5), good(6))] == [40, 50, 60]
