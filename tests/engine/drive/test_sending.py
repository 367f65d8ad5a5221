"""What goes to a worker process and comes from it: frames go in one go or in parts, and are heard in their order."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

from hypothesis import given
from hypothesis import strategies as st

from carpool.engine.drive import framesocket
from carpool.engine.drive.framesocket import FrameSocket
from carpool.engine.wire.frame import Frame, FrameKind, encode


class Writers:
    """As much of a loop as a sender needs: whether it is to be called when the socket is writable."""

    def __init__(self) -> None:
        self.writer: Any = None

    def add_reader(self, fd: int, reader: Any) -> None: ...

    def add_writer(self, fd: int, writer: Any) -> None:
        self.writer = writer

    def remove_writer(self, fd: int) -> None:
        self.writer = None


def arrived(frames: Sequence[Frame], reads: Sequence[int], one_go_below: int) -> bytes:
    """The bytes at the other end, where so much is read after each frame and the rest in the end."""
    ours, theirs = socket.socketpair()
    for end in (ours, theirs):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        end.setblocking(False)
    loop: Any = Writers()
    with patch.object(framesocket.asyncio, "get_running_loop", return_value=loop):
        connection = FrameSocket(ours, print, print)
    data = bytearray()

    def read(n: int) -> bool:
        try:
            data.extend(theirs.recv(n))
        except BlockingIOError:
            return False
        if loop.writer is not None:
            loop.writer()
        return True

    with ours, theirs, patch.object(framesocket, "LARGE", one_go_below):
        for frame, n in zip(frames, reads, strict=True):
            connection.send(frame)
            if n:
                read(n)
        while read(2**16):
            pass
        assert not connection._unsent
        assert loop.writer is None
    return bytes(data)


@given(st.lists(st.tuples(st.lists(st.integers(0, 9000), min_size=1, max_size=3), st.integers(0, 9000)), max_size=8))
def test_frames_in_one_go_and_in_parts_are_the_same_bytes(plan: list[tuple[list[int], int]]) -> None:
    """Whether a frame is joined and sent at once or not, it arrives whole and in its place."""
    frames = [
        Frame(FrameKind.REPLY, i, list(range(len(sizes))), bytes(len(sizes)), payloads=[bytes([i]) * n for n in sizes])
        for i, (sizes, _) in enumerate(plan)
    ]
    reads = [n for _, n in plan]

    joined = arrived(frames, reads, one_go_below=framesocket.LARGE)
    assert joined == arrived(frames, reads, one_go_below=0)
    assert joined == b"".join([bytes(part) for frame in frames for part in encode(frame)])


def test_catching_up_amid_frames_lets_none_overtake_another() -> None:
    """Whoever catches up while frames are delivered is told that there were some, and reads no further ones."""
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    heard: list[int] = []

    def hear(frame: Frame) -> None:
        if not heard:
            theirs.sendall(b"".join(encode(Frame(FrameKind.CALL, 4))))
            heard.append(frame.batch_id)
            assert connection.catch_up()
        else:
            heard.append(frame.batch_id)

    with ours, theirs, patch.object(framesocket.asyncio, "get_running_loop", return_value=Writers()):
        connection = FrameSocket(ours, hear, print)
        theirs.sendall(b"".join(b"".join(encode(Frame(FrameKind.CALL, i))) for i in (1, 2, 3)))
        assert connection.read() and heard == [1, 2, 3]
        assert connection.catch_up() and heard == [1, 2, 3, 4]
        assert not connection.catch_up()
