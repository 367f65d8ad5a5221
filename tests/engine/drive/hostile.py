"""A model that makes its worker send what it must not; the item says what. Each attack happens once."""

from __future__ import annotations

import os
import struct
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

import carpool
from carpool import Response
from carpool.engine.call.results import Trouble
from carpool.engine.wire.frame import MAGIC, Frame, FrameKind, encode
from carpool.engine.wire.outcome import Outcome, pack_response
from tests.support.frames import header

INFINITY = float("inf")


def say(kind: FrameKind, *payloads: Any, batch_id: int = 0) -> Frame:
    return Frame(kind, batch_id, [0] * len(payloads), bytes(len(payloads)), payloads=list(payloads))


def trouble(reply: Frame, *what: Trouble) -> Frame:
    return say(FrameKind.TROUBLE, msgspec.msgpack.encode(list(what)), batch_id=reply.batch_id)


def times(n: int, reply: Frame) -> Frame:
    return replace(reply, ids=[*reply.ids] * n, formats=reply.formats * n, payloads=[*reply.payloads] * n)


def block(reply: Frame, n: int, head: bytes, elements: bytes) -> bytes:
    """A reply whose results are said to be arrays in one block."""
    lengths = (len(head), len(elements))
    start = header(items=n, buffers=2, batch=reply.batch_id, length=sum(lengths), block=1)
    return start + bytes(9 * n) + struct.pack("<2I", *lengths) + head + elements


def scalars(reply: Frame, n: int, data: bytes) -> bytes:
    """A reply whose results are said to be scalars in one block."""
    start = header(items=n, buffers=1, batch=reply.batch_id, length=len(data), block=2)
    return start + bytes(9 * n) + struct.pack("<I", len(data)) + data


INSTEAD: dict[str, Callable[[Frame], list[Frame | bytes]]] = {
    "something else altogether": lambda reply: [b"GET / HTTP/1.1\r\nHost: localhost:8000\r\nAccept: */*\r\n\r\n"],
    "zeros": lambda reply: [bytes(1000)],
    "another version": lambda reply: [MAGIC + b"\x02" + bytes(44)],
    "another kind": lambda reply: [MAGIC + b"\x01\x63" + bytes(43)],
    "a length beyond measure": lambda reply: [MAGIC + b"\x01\x06" + b"\xff" * 43],
    "a foreign id": lambda reply: [replace(reply, ids=[reply.ids[0] + 1000])],
    "an id of 0": lambda reply: [replace(reply, ids=[0])],
    "a request twice in one": lambda reply: [times(2, reply)],
    "nothing": lambda reply: [Frame(FrameKind.REPLY, reply.batch_id)],
    "another batch": lambda reply: [replace(reply, batch_id=reply.batch_id + 1)],
    "no batch": lambda reply: [replace(reply, batch_id=0)],
    "an unknown outcome": lambda reply: [replace(reply, formats=b"\x77")],
    "a response to one who speaks no HTTP": lambda reply: [
        replace(reply, formats=bytes([Outcome.RESPONSE]), payloads=[pack_response(Response(b"x"), b"x")])
    ],
    "a block of one item": lambda reply: [block(reply, 1, b"\1\1f\1\2\0\0\0", b"x" * 8)],
    "a block for others": lambda reply: [block(reply, 2, b"\1\1f\1\2\0\0\0", b"x" * 16)],
    "a block of objects": lambda reply: [block(reply, 2, b"\1\1O\1\2\0\0\0", b"x" * 32)],
    "a block that is too short": lambda reply: [block(reply, 2, b"\1\1f\1\2\0\0\0", b"x" * 14)],
    "scalars for others": lambda reply: [scalars(reply, 2, b"\x92\x01\x02")],
    "one scalar as a block": lambda reply: [scalars(reply, 1, b"\x91\x01")],
    "a list among scalars": lambda reply: [scalars(reply, 2, b"\x92\x01\x90")],
    "too few scalars": lambda reply: [scalars(reply, 2, b"\x91\x01")],
    "a time that is none": lambda reply: [replace(reply, busy_s=float("nan"))],
    "an endless time": lambda reply: [replace(reply, waited_s=INFINITY)],
    "a negative time": lambda reply: [replace(reply, busy_s=-1.0)],
    "what only the parent says": lambda reply: [replace(reply, kind=FrameKind.SETUP)],
    "a batch": lambda reply: [replace(reply, kind=FrameKind.BATCH, accepts=b"\0", deadlines=[INFINITY])],
}
BEFORE: dict[str, Callable[[Frame], list[Frame]]] = {
    "ready once more": lambda reply: [say(FrameKind.STATE, b"ready")],
    "a state that is none": lambda reply: [say(FrameKind.STATE, b"\xff")],
    "a state in pieces": lambda reply: [say(FrameKind.STATE, [b"rea", b"dy"])],
    "no state at all": lambda reply: [say(FrameKind.STATE)],
    "metrics from a worker on this machine": lambda reply: [say(FrameKind.METRICS, b"\x90")],
    "that it could not load": lambda reply: [say(FrameKind.FAILED, b"")],
    "a call for another batch": lambda reply: [Frame(FrameKind.CALL, reply.batch_id + 1)],
    "trouble that cannot be read": lambda reply: [say(FrameKind.TROUBLE, b"\xc1", batch_id=reply.batch_id)],
    "trouble in pieces": lambda reply: [say(FrameKind.TROUBLE, [b"\x90", b""], batch_id=reply.batch_id)],
    "trouble that is none": lambda reply: [say(FrameKind.TROUBLE, b"\x91\x01", batch_id=reply.batch_id)],
    "trouble of another batch": lambda reply: [trouble(replace(reply, batch_id=reply.batch_id + 1), Trouble())],
    "trouble of other items": lambda reply: [trouble(reply, Trouble(ran_out=[[0, 77]]))],
    "trouble of items before the first": lambda reply: [trouble(reply, Trouble(ran_out=[[-1]]))],
}
AFTER: dict[str, Callable[[Frame], list[Frame | bytes]]] = {
    "the reply twice": lambda reply: [reply],
    "another reply": lambda reply: [replace(reply, ids=[1])],
    "a late call": lambda reply: [Frame(FrameKind.CALL, reply.batch_id)],
    "megabytes that nobody asked for": lambda reply: [times(200, replace(reply, payloads=[b"x" * 1_000_000]))],
}
ATTACKS: dict[str, Callable[[Frame], list[Frame | bytes]]] = {
    **INSTEAD,
    **{name: lambda reply, attack=attack: [*attack(reply), reply] for name, attack in BEFORE.items()},  # type: ignore[misc]
    **{name: lambda reply, attack=attack: [reply, *attack(reply)] for name, attack in AFTER.items()},  # type: ignore[misc]
}
TRUNCATED = "half a reply"


def send_attacks(
    model: Any, kind: FrameKind, attacks: Mapping[str, Callable[[Frame], Iterable[Frame | bytes]]], least: int = 1
) -> None:
    """Have this worker process send `attacks[model.attack]` once in the place of a frame of the kind.

    Args:
        model: Its `attack` names what to send; it is emptied then.
        kind: Of the frames that are spoilt.
        attacks: Make of such a frame what is sent. Of any other name, half of the frame is sent,
            and the process ends.
        least: How many items such a frame must have.
    """
    connection = sys.modules["__main__"].ParentSocket  # type: ignore[attr-defined]
    send = connection.send

    def attack(link: Any, frame: Frame) -> None:
        if frame.kind != kind or not model.attack or len(frame.ids) < least:
            send(link, frame)
            return
        name, model.attack = model.attack, ""
        if name not in attacks:
            data = b"".join(bytes(part) for part in encode(frame))
            link.sock.sendall(data[: len(data) // 2])
            os._exit(0)
        for what in attacks[name](frame):
            if isinstance(what, Frame):
                send(link, what)
            else:
                link.sock.sendall(what)

    connection.send = attack


class Hostile(carpool.Model):
    """Returns its item.

    Args:
        diary: A folder in which each attack is noted, so that a second run of the item does no harm.
    """

    def __init__(self, diary: str) -> None:
        self.diary = Path(diary)
        self.attack = ""

    def setup(self) -> None:
        send_attacks(self, FrameKind.REPLY, ATTACKS)

    def predict(self, x: str) -> str:
        if x in ATTACKS or x == TRUNCATED:
            note = self.diary / x.replace(" ", "-")
            if not note.exists():
                note.touch()
                self.attack = x
        return x
