"""A model of steps that makes its worker send what it must not; the item says what. Each attack happens once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

import carpool
from carpool.engine.wire import order as wire
from carpool.engine.wire.frame import Frame, FrameKind
from carpool.engine.wire.outcome import Outcome
from tests.engine.drive.hostile import send_attacks

INFINITY = float("inf")
N = 6
"""How many parts each stream has; the fourth report is spoilt."""


def with_head(frame: Frame, **changes: Any) -> Frame:
    head = msgspec.msgpack.decode(frame.payloads[0], type=wire.ReportHead)
    data = msgspec.msgpack.encode(msgspec.structs.replace(head, **changes))
    return replace(frame, payloads=[data, *frame.payloads[1:]])


def of(frame: Frame, ids: list[int], kinds: list[int], payloads: list[Any], number: int | None = None) -> Frame:
    return wire.parts_frame(frame.batch_id if number is None else number, wire.ReportHead(), ids, kinds, payloads)


INSTEAD: dict[str, Callable[[Frame], list[Frame | bytes]]] = {
    "zeros": lambda frame: [bytes(1000)],
    "something else altogether": lambda frame: [b"HTTP/1.1 200 OK\r\n\r\n" + bytes(64)],
    "a stream that it never had": lambda frame: [of(frame, [10**6], [wire.MORE], [b"\x80\x04K\x01."])],
    "the id 0": lambda frame: [of(frame, [0], [wire.MORE], [b"1"])],
    "a stream twice": lambda frame: [of(frame, [*frame.ids[1:]] * 2, [wire.MORE] * 2, [*frame.payloads[1:]] * 2)],
    "a stream twice with another between": lambda frame: [
        of(frame, [frame.ids[1], 9999, frame.ids[1]], [wire.MORE, wire.BACK, wire.LAST], [b"1", b"", b"1"])
    ],
    "an order from the future": lambda frame: [replace(frame, batch_id=frame.batch_id + 5)],
    "an order from the past": lambda frame: [replace(frame, batch_id=0)],
    "a kind that is none": lambda frame: [replace(frame, formats=bytes([0, 0x77]))],
    "no first item": lambda frame: [replace(frame, ids=frame.ids[1:], formats=frame.formats[1:], payloads=[b"1"])],
    "nothing": lambda frame: [Frame(FrameKind.PARTS, frame.batch_id)],
    "a first item in pieces": lambda frame: [replace(frame, payloads=[[b"\x90", b""], *frame.payloads[1:]])],
    "a first item that cannot be read": lambda frame: [replace(frame, payloads=[b"\xc1", *frame.payloads[1:]])],
    "a time that is none": lambda frame: [with_head(frame, step_s=float("nan"))],
    "an endless time": lambda frame: [with_head(frame, start_s=INFINITY)],
    "a negative time": lambda frame: [with_head(frame, step_s=-1.0)],
    "fewer than no streams": lambda frame: [with_head(frame, stepped=-1)],
    "more streams than there are numbers": lambda frame: [with_head(frame, stepped=2**63)],
    "buffers for others": lambda frame: [with_head(frame, buffers=[1, 1, 1])],
    "more buffers than there are": lambda frame: [
        replace(with_head(frame, buffers=[7]), payloads=[with_head(frame, buffers=[7]).payloads[0], [b"a", b"b"]])
    ],
    "a negative number of buffers": lambda frame: [
        replace(with_head(frame, buffers=[-1]), payloads=[with_head(frame, buffers=[-1]).payloads[0], [b"a", b"b"]])
    ],
    "a failure that cannot be read": lambda frame: [of(frame, frame.ids[1:], [Outcome.MODEL_ERROR], [b"\xc1"])],
    "a failure without a report": lambda frame: [of(frame, frame.ids[1:], [Outcome.MODEL_ERROR], [b""])],
    "a response to one who speaks no HTTP": lambda frame: [of(frame, frame.ids[1:], [Outcome.RESPONSE], [b"\x90"])],
    "a stranger given back": lambda frame: [of(frame, [10**6], [wire.BACK], [b""])],
    "a reply": lambda frame: [replace(frame, kind=FrameKind.REPLY)],
    "an order": lambda frame: [replace(frame, kind=FrameKind.ORDER, accepts=bytes(2), deadlines=[INFINITY] * 2)],
    "trouble": lambda frame: [Frame(FrameKind.TROUBLE, frame.batch_id, [0], b"\0", payloads=[b"\x90"])],
}
AFTER: dict[str, Callable[[Frame], list[Frame | bytes]]] = {
    "ready once more": lambda frame: [Frame(FrameKind.STATE, 0, [0], b"\0", payloads=[b"ready"])],
    "the end and then a part": lambda frame: [
        of(frame, frame.ids[1:], [wire.END], [b""]),
        of(frame, frame.ids[1:], [wire.MORE], [*frame.payloads[1:]]),
    ],
    "two ends": lambda frame: [of(frame, frame.ids[1:], [wire.END], [b""])] * 2,
}
ENDS_EARLY = frozenset({"the end and then a part", "two ends"})
"""Nobody can tell that the first end is not true; what follows it is found out."""

FAILS = frozenset({"a failure that cannot be read", "a failure without a report"})
"""Nobody can tell that it is not true, either."""

COLLECTED = "an end without an answer"
"""Of a caller that takes the whole answer."""
ATTACKS: dict[str, Callable[[Frame], list[Frame | bytes]]] = {
    **INSTEAD,
    **{name: lambda frame, attack=attack: [frame, *attack(frame)] for name, attack in AFTER.items()},  # type: ignore[misc]
}
ATTACKS[COLLECTED] = lambda frame: [of(frame, frame.ids[1:], [wire.END], [b""])]
TRUNCATED = "half a report"


class HostileSteps(carpool.Model):
    """Counts to `N`, and goes on where it was; the fourth report of an attacker is spoilt.

    Args:
        diary: A folder in which each attack is noted, so that a resumed stream does no harm.
    """

    def __init__(self, diary: str) -> None:
        self.diary = Path(diary)
        self.attack = ""

    def setup(self) -> None:
        send_attacks(self, FrameKind.PARTS, ATTACKS, least=2)

    def start(self, xs: list[str]) -> list[list[Any]]:
        return [[x, 0] for x in xs]

    def resume(self, xs: list[str], parts: list[list[int]]) -> list[list[Any]]:
        return [[x, len(said)] for x, said in zip(xs, parts, strict=True)]

    def step(self, states: list[list[Any]]) -> list[Any]:
        for state in states:
            state[1] += 1
            if state[1] == 4 and (state[0] in ATTACKS or state[0] == TRUNCATED):
                note = self.diary / state[0].replace(" ", "-")
                if not note.exists():
                    note.touch()
                    self.attack = state[0]
        return [carpool.Last(i) if i == N else i for _, i in states]

    def stop(self, state: list[Any]) -> None:
        pass
