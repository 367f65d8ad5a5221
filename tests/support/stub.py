"""A worker without a model: it speaks the frame protocol, echoes items, and misbehaves on demand.

It serves tests of whatever talks to workers. It can stand by itself, at one end of a socket pair:

    ours, theirs = socket.socketpair()
    threading.Thread(target=StubWorker(theirs, Misbehaviour.FOREIGN_ID).run, daemon=True).start()

or take the place of the worker processes of a real service:

    with stub_workers(Misbehaviour.CUT, once=tmp_path), carpool.Service(stage).run() as service:
        assert service.predict("x") == "x"
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator
from enum import StrEnum
from typing import Final

from msgspec.structs import replace

from carpool.engine.drive import process
from carpool.engine.wire.frame import MAX_FRAME_BYTES, Frame, FrameKind, FrameReader, encode

_VARIABLE: Final = "CARPOOL_STUB"
_ONCE_VARIABLE: Final = "CARPOOL_STUB_ONCE"
_FLOOD_S: Final = 0.2  # how long a flood lasts


class Misbehaviour(StrEnum):
    """What a stub does with a batch instead of answering it."""

    SILENCE = "silence"  # does nothing, ever
    EOF = "eof"  # closes the connection
    CUT = "cut"  # closes it after half of the reply
    GARBAGE = "garbage"  # sends bytes that are not a frame
    VERSION = "version"  # replies in another version of the protocol
    HUGE = "huge"  # begins a reply that is longer than a frame may be
    WRONG_KIND = "wrong_kind"  # sends a batch instead of a reply
    FOREIGN_ID = "foreign_id"  # answers a request that it was not given
    DUPLICATE_ID = "duplicate_id"  # answers one request twice, and another not at all
    MISSING_ITEM = "missing_item"  # answers all requests but one
    OTHER_BATCH = "other_batch"  # answers for a batch that it was not given
    TWICE = "twice"  # sends the reply twice
    BEFORE = "before"  # sends a reply to a batch that it was not given, then the right one
    FLOOD = "flood"  # replies again and again, as fast as it can, then closes


def echo(frame: Frame) -> Frame:
    """Return the good reply to a batch, with the payload of each item as it came."""
    return Frame(FrameKind.REPLY, frame.batch_id, list(frame.ids), bytes(len(frame.ids)), payloads=list(frame.payloads))


class StubWorker:
    """The worker's end of a connection.

    Args:
        sock: The socket, in blocking mode.
        misbehaviour: What to do with one of the batches; None for an honest worker.
        on_batch: The number of that batch, counted from 1.
        answer: Makes the replies to all other batches.
    """

    def __init__(
        self,
        sock: socket.socket,
        misbehaviour: Misbehaviour | None = None,
        *,
        on_batch: int = 1,
        answer: Callable[[Frame], Frame] = echo,
    ) -> None:
        self._sock = sock
        self._misbehaviour = misbehaviour
        self._on_batch = on_batch
        self._answer = answer
        self._reader = FrameReader()
        self._batches = 0

    def run(self) -> None:
        """Announce that the worker is ready, and answer batches until the other end closes."""
        for state in (b"loading", b"ready"):
            self._send(Frame(FrameKind.STATE, ids=[0], formats=b"\0", payloads=[state]))
        with contextlib.suppress(OSError):  # the other end has given this worker up
            while n := self._sock.recv_into(self._reader.get_buffer()):
                for frame in self._reader.received(n):
                    if frame.kind == FrameKind.BATCH:
                        self._received_batch(frame)

    def _received_batch(self, frame: Frame) -> None:
        """Answer a batch, or misbehave."""
        self._batches += 1
        reply = self._answer(frame)
        if self._misbehaviour is None or self._batches != self._on_batch:
            self._send(reply)
        else:
            self._misbehave(self._misbehaviour, reply)

    def _misbehave(self, how: Misbehaviour, reply: Frame) -> None:
        """Do what `how` says, instead of sending the reply."""
        data = _bytes_of(reply)
        other_batch = replace(reply, batch_id=reply.batch_id + 1_000_000)
        foreign = [1_000_000 + id for id in reply.ids]
        match how:
            case Misbehaviour.SILENCE:
                time.sleep(3600)
            case Misbehaviour.EOF:
                self._sock.shutdown(socket.SHUT_RDWR)
            case Misbehaviour.CUT:
                self._sock.sendall(data[: len(data) // 2])
                self._sock.shutdown(socket.SHUT_RDWR)
            case Misbehaviour.GARBAGE:
                self._sock.sendall(b"\xff" * 4096)
            case Misbehaviour.VERSION:
                self._sock.sendall(data[:3] + bytes([data[3] + 1]) + data[4:])
            case Misbehaviour.HUGE:
                self._sock.sendall(data[:24] + (MAX_FRAME_BYTES + 1).to_bytes(8, "little") + data[32:])
            case Misbehaviour.WRONG_KIND:
                n = len(reply.ids)
                self._send(replace(reply, kind=FrameKind.BATCH, accepts=bytes(n), deadlines=[0.0] * n))
            case Misbehaviour.FOREIGN_ID:
                self._send(replace(reply, ids=foreign))
            case Misbehaviour.DUPLICATE_ID:
                self._send(
                    replace(reply, ids=[reply.ids[0]] * len(reply.ids)) if len(reply.ids) > 1 else _doubled(reply)
                )
            case Misbehaviour.MISSING_ITEM:
                self._send(replace(reply, ids=reply.ids[:-1], formats=reply.formats[:-1], payloads=reply.payloads[:-1]))
            case Misbehaviour.OTHER_BATCH:
                self._send(other_batch)
            case Misbehaviour.TWICE:
                self._sock.sendall(data * 2)
            case Misbehaviour.BEFORE:
                self._send(other_batch)
                self._send(reply)
            case Misbehaviour.FLOOD:
                end = time.monotonic() + _FLOOD_S
                while time.monotonic() < end:
                    self._sock.sendall(data * 100)
                self._sock.shutdown(socket.SHUT_RDWR)

    def _send(self, frame: Frame) -> None:
        self._sock.sendall(_bytes_of(frame))


@contextlib.contextmanager
def stub_workers(
    misbehaviour: Misbehaviour | None = None, *, on_batch: int = 1, once: str | os.PathLike[str] | None = None
) -> Iterator[None]:
    """Start stubs in place of worker processes, in all services of this process, inside the block.

    Args:
        misbehaviour: As for `StubWorker`.
        on_batch: As for `StubWorker`.
        once: An empty folder. If it is given, only the first stub to start misbehaves.
    """
    variables = {_VARIABLE: f"{misbehaviour or ''}:{on_batch}", _ONCE_VARIABLE: os.fspath(once) if once else ""}
    before = process.WORKER_MODULE
    os.environ.update(variables)
    process.WORKER_MODULE = __name__
    try:
        yield
    finally:
        process.WORKER_MODULE = before
        for name in variables:
            del os.environ[name]


def _doubled(reply: Frame) -> Frame:
    """Return a reply that has each item twice."""
    return replace(reply, ids=[*reply.ids] * 2, formats=reply.formats * 2, payloads=[*reply.payloads] * 2)


def _bytes_of(frame: Frame) -> bytes:
    """Return a frame as it goes over the socket."""
    return b"".join(bytes(part) for part in encode(frame))


def _is_first() -> bool:
    """Report whether this stub may misbehave: every stub, or only the first one that asks."""
    folder = os.environ.get(_ONCE_VARIABLE)
    if not folder:
        return True
    try:
        os.close(os.open(os.path.join(folder, "misbehaved"), os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


def main() -> None:
    """Run a stub in a process that was started as a worker is."""
    name, _, on_batch = os.environ[_VARIABLE].rpartition(":")
    misbehaviour = Misbehaviour(name) if name and _is_first() else None
    StubWorker(socket.socket(fileno=int(sys.argv[1])), misbehaviour, on_batch=int(on_batch)).run()


if __name__ == "__main__":
    main()
