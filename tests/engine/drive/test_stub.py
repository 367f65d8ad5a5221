"""The stub worker: honest when it should be, and whatever it does, no caller of a real service gets a wrong answer."""

from __future__ import annotations

import socket
import threading
from pathlib import Path

import pytest

import carpool
from carpool.engine.drive import process
from carpool.engine.wire.frame import Frame, FrameError, FrameKind, FrameReader
from tests.effort import slow_where
from tests.support import models
from tests.support.frames import FRAMES, data_of, plain
from tests.support.stub import Misbehaviour, StubWorker, stub_workers


def exchange(misbehaviour: Misbehaviour | None, *frames: Frame, on_batch: int = 1) -> bytes:
    """All that a stub sends after these frames and the end."""
    ours, theirs = socket.socketpair()
    worker = threading.Thread(target=StubWorker(theirs, misbehaviour, on_batch=on_batch).run, daemon=True)
    with ours, theirs:
        ours.settimeout(20)
        worker.start()
        ours.sendall(data_of(FRAMES["setup"], *frames))
        ours.shutdown(socket.SHUT_WR)
        worker.join(20)
        theirs.close()
        return b"".join(iter(lambda: ours.recv(65_536), b""))


def frames_in(data: bytes) -> list[Frame]:
    reader = FrameReader()
    frames = []
    for i in range(len(data)):
        reader.get_buffer()[:1] = data[i : i + 1]
        frames += reader.received(1)
    return frames


def test_an_honest_stub_echoes() -> None:
    """An honest stub says that it loads and is ready, and answers each batch with its items as they
    came.
    """
    batch = FRAMES["batch with several buffers"]

    *states, reply = frames_in(exchange(None, batch))

    assert [bytes(state.payloads[0]) for state in states] == [b"loading", b"ready"]  # type: ignore[arg-type]
    assert (reply.kind, reply.batch_id, list(reply.ids)) == (FrameKind.REPLY, batch.batch_id, list(batch.ids))
    assert plain([reply])[0][6] == plain([batch])[0][6]


@pytest.mark.parametrize("misbehaviour", [Misbehaviour.GARBAGE, Misbehaviour.VERSION, Misbehaviour.HUGE])
def test_what_is_no_frame(misbehaviour: Misbehaviour) -> None:
    """The reader refuses what is no frame."""
    with pytest.raises(FrameError):
        frames_in(exchange(misbehaviour, FRAMES["batch"]))


@pytest.mark.parametrize(
    ("misbehaviour", "ids"),
    [
        (Misbehaviour.FOREIGN_ID, [[1_000_001, 1_000_002, 1_000_003]]),
        (Misbehaviour.DUPLICATE_ID, [[1, 1, 1]]),
        (Misbehaviour.MISSING_ITEM, [[1, 2]]),
        (Misbehaviour.TWICE, [[1, 2, 3], [1, 2, 3]]),
        (Misbehaviour.CUT, []),
        (Misbehaviour.EOF, []),
    ],
)
def test_what_is_the_wrong_frame(misbehaviour: Misbehaviour, ids: list[list[int]]) -> None:
    """A frame that is sound in itself, but not what was asked for, is refused."""
    replies = frames_in(exchange(misbehaviour, FRAMES["batch"]))[2:]

    assert [list(reply.ids) for reply in replies] == ids


def test_it_misbehaves_with_one_batch_only() -> None:
    """A stub misbehaves only with the batch whose number was given."""
    batch = FRAMES["batch"]
    replies = frames_in(exchange(Misbehaviour.OTHER_BATCH, batch, batch, batch, on_batch=2))[2:]

    assert [reply.batch_id for reply in replies] == [7, 1_000_007, 7]


QUICK = (Misbehaviour.SILENCE, Misbehaviour.GARBAGE, Misbehaviour.FOREIGN_ID)
"""One of each sort, for the quick run; what the others send is tried above, and in `test_hostile_workers.py`."""


@pytest.mark.fault("F49", "F50", "F51")
@slow_where(lambda misbehaviour: misbehaviour not in QUICK)
@pytest.mark.parametrize("misbehaviour", Misbehaviour)
def test_a_service_survives_it(misbehaviour: Misbehaviour, tmp_path: Path) -> None:
    """Whatever a stub does every caller gets its own answer, at the latest from the next worker,
    and the service goes on.
    """
    stage = carpool.Stage(models.scale, max_batch_size=4, max_batch_time_s=2.0)
    with stub_workers(misbehaviour, once=tmp_path), carpool.Service(stage, timeout_s=60).run() as service:
        items = [f"item {i}" for i in range(30)]
        assert list(service.stream(items)) == items
        assert service.predict("again") == "again"


def test_real_workers_are_back_afterwards() -> None:
    """After the `with` of a stub the workers are real again."""
    with stub_workers():
        pass
    assert process.WORKER_MODULE == "carpool.engine.worker.main"
