"""Whatever a worker says, in whatever order: an error of ours that ends it, or what the protocol allows; no answer is
made up, and no request has two."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from carpool import Service, Stage
from carpool.engine.call.results import Trouble
from carpool.engine.core.core import Core
from carpool.engine.core.roster import Roster, Starts
from carpool.engine.drive import worker_pool
from carpool.engine.drive.aio import Driver
from carpool.engine.drive.pools import BatchPool
from carpool.engine.observe.stats import Stats
from carpool.engine.request import DONE, Request
from carpool.engine.wire.frame import Frame, FrameError, FrameKind
from carpool.engine.wire.outcome import Outcome
from carpool.engine.wire.payload import JSON, OBJECT, Scalars
from carpool.service import assemble
from tests.support import models
from tests.support.properties import PROPERTY

N = 3  # requests in the batch that the worker has


class Silent:
    """A worker that takes batches and never answers."""

    pid = None
    where = ""
    send_ahead = None
    hello = None
    broke_protocol = False

    def __init__(self, launch: Any, worker: int, heard: Callable[[Frame], None], lost: Any, sink: Any) -> None:
        self.heard = heard
        self.frames: list[Frame] = []

    def send(self, frame: Frame) -> None:
        self.frames.append(frame)

    def kill(self, why: str = "") -> None: ...


class Told(Request):
    """A caller that counts its answers."""

    __slots__ = ("answers",)

    def tell(self) -> None:
        self.answers += 1


def state(name: str | bytes) -> Frame:
    return Frame(FrameKind.STATE, 0, [0], b"\0", payloads=[name.encode() if isinstance(name, str) else name])


small = st.integers(0, 6)
payloads = st.one_of(
    st.binary(max_size=12),
    st.sampled_from([b"ready", b"loading", b"dead", b"starting"]),
    st.lists(st.binary(max_size=3), min_size=2, max_size=3),
    st.builds(
        lambda *parts: msgspec.msgpack.encode([Trouble(*parts)]),
        *[st.booleans()] * 3,
        *[st.lists(st.lists(st.integers(-1, 4), max_size=3), max_size=3)] * 2,
    ),
    st.lists(st.tuples(small, st.floats(allow_nan=True)), max_size=3).map(msgspec.msgpack.encode),
)
scalars = st.sampled_from([0.5, 7, "", None, True])
times = st.one_of(st.just(0.5), st.floats(allow_nan=True, allow_infinity=True))


@st.composite
def frames(draw: st.DrawFn) -> Frame:
    n = draw(st.sampled_from([N, N, 0, 1, 2, 4]))
    ids = draw(st.one_of(st.just([*range(1, n + 1)]), st.lists(small, min_size=n, max_size=n)))
    formats = draw(st.one_of(st.just(bytes(n)), st.binary(min_size=n, max_size=n)))
    kind = draw(st.sampled_from(FrameKind))
    results = st.lists(payloads, min_size=n, max_size=n)
    if kind == FrameKind.REPLY and n > 1:
        results = st.one_of(results, st.lists(scalars, min_size=n, max_size=n).map(Scalars))
    return Frame(
        kind,
        draw(st.sampled_from([1, 1, 1, 0, 2])),
        ids,
        formats,
        payloads=draw(results),
        busy_s=draw(times),
        waited_s=draw(times),
    )


async def listen(heard: list[Frame], accepts: Sequence[int] = (OBJECT,) * N) -> tuple[list[Told], list[Frame], Driver]:
    """A stage whose only worker has a batch and then says all this; the requests, what was taken of it, the driver."""
    service = Service(Stage(models.scale, max_batch_size=N, policy="greedy"))
    batcher = assemble._crew(service, service.stages[0], None)
    core = Core([batcher])
    roster = Roster(1, lambda: 0.0)
    driver = Driver(core, Stats("fuzz", core, [roster], [False]), clock=lambda: 0.0)
    stage = BatchPool(0, assemble.launch(service, 0, None, 1), driver, roster, Starts([roster], 1), print)  # type: ignore[arg-type]
    driver.executors = [stage]
    stage.start()
    worker: Any = stage._workers[0]
    worker.heard(state("loading"))
    worker.heard(state("ready"))
    requests = [Told(i, float("inf")) for i in range(N)]
    for request, accept in zip(requests, accepts, strict=True):
        request.answers = 0
        request.accept = accept
    driver.submit_all(requests)
    driver.poll()
    assert [frame.ids for frame in worker.frames] == [[1, 2, 3]]
    taken = []
    for frame in heard:
        try:
            worker.heard(frame)
        except FrameError:
            break  # its connection ends here
        taken.append(frame)
    driver.poll()
    return requests, taken, driver


@pytest.mark.fault("F49")
@PROPERTY
@given(st.lists(frames(), max_size=5))
def test_only_what_is_allowed_is_taken(heard: list[Frame]) -> None:
    """A message of a worker that the protocol does not allow raises `FrameError`; whatever comes,
    every request has at most one answer, its own.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(worker_pool._KINDS, "process", Silent)
        requests, taken, driver = asyncio.run(listen(heard))

    replies = [frame for frame in taken if frame.kind == FrameKind.REPLY]
    answered = [id for frame in replies for id in frame.ids]
    assert len(answered) == len(set(answered))
    assert set(answered) <= {1, 2, 3}
    assert all(frame.batch_id == 1 for frame in replies)
    for request in requests:
        assert request.answers == (request.id in answered) == (request.state == DONE)
        if request.answers and request.error is None:
            payload = [p for f in replies for id, p in zip(f.ids, f.payloads, strict=True) if id == request.id]
            assert [request.result] == payload
    batcher = driver.core.batchers[0]
    assert (batcher.stray_replies, batcher.late_results) == (0, 0)
    assert 0 <= batcher.times.usual_s < float("inf")
    assert not {frame.kind for frame in taken} & {FrameKind.SETUP, FrameKind.BATCH, FrameKind.STATE, FrameKind.FAILED}


def test_a_sound_reply_is_taken() -> None:
    """A reply that is sound is taken, in one piece or in several."""
    whole = Frame(FrameKind.REPLY, 1, [1, 2, 3], bytes(N), payloads=[b"a", b"b", b"c"])
    parts = [replace(whole, ids=[id], formats=b"\0", payloads=[p]) for id, p in ((2, b"b"), (3, b"c"), (1, b"a"))]
    for heard in ([whole], parts):
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(worker_pool._KINDS, "process", Silent)
            requests, taken, _ = asyncio.run(listen(heard))
        assert taken == heard
        assert [request.result for request in requests] == [b"a", b"b", b"c"]


@pytest.mark.parametrize(
    ("ids", "accepts", "is_taken"),
    [
        ([1, 2, 3], [OBJECT, OBJECT, OBJECT], True),
        ([1, 2, 3], [OBJECT, JSON, OBJECT], False),
        ([1, 2, 3], [JSON, JSON, JSON], False),
        ([1, 3], [OBJECT, JSON, OBJECT], True),  # a piece of a reply, of which another has the bytes
        ([2, 3], [OBJECT, JSON, OBJECT], False),
    ],
)
def test_scalars_are_for_python_callers_only(ids: list[int], accepts: list[int], is_taken: bool) -> None:
    """Where bytes are to be written to a socket, there are bytes; else the worker has broken the protocol."""
    reply = Frame(FrameKind.REPLY, 1, ids, bytes(len(ids)), payloads=Scalars([0.5] * len(ids)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(worker_pool._KINDS, "process", Silent)
        requests, taken, _ = asyncio.run(listen([reply], accepts))

    assert taken == [reply] * is_taken
    assert [request.result for request in requests] == [0.5 if is_taken and i in ids else None for i in (1, 2, 3)]


@pytest.mark.parametrize("outcome", sorted(set(Outcome) - {Outcome.OK, Outcome.DONE}))
def test_a_failure_is_told_by_no_scalar(outcome: Outcome) -> None:
    """Reports and responses are bytes."""
    reply = Frame(FrameKind.REPLY, 1, [1, 2, 3], bytes([0, outcome, 0]), payloads=Scalars([0.5, "why", None]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(worker_pool._KINDS, "process", Silent)
        requests, taken, _ = asyncio.run(listen([reply]))

    assert taken == []
    assert [request.state == DONE for request in requests] == [False] * 3
