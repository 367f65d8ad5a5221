"""A worker's link to its parent that is a list of frames, and a worker's whole life over it."""

from __future__ import annotations

from typing import Any

from carpool import Model
from carpool.engine.call.results import run_now
from carpool.engine.wire.frame import Frame, FrameKind
from carpool.engine.wire.payload import dump
from carpool.engine.worker.program import Setup, describe
from carpool.engine.worker.serve import serve


class Link:
    """Gives the frames one after the other and keeps what is sent."""

    def __init__(self, *frames: Frame) -> None:
        self.frames = list(frames)
        self.sent: list[Frame] = []
        self.came_at = 0.0

    async def receive(self) -> Frame | None:
        return self.frames.pop(0) if self.frames else None

    async def has_news(self) -> bool:
        return False

    def send(self, frame: Frame) -> None:
        self.sent.append(frame)


class Counting(Model):
    examples = (1,)
    log: list[str]

    def __init__(self, log: list[str]) -> None:
        self.log = log

    def setup(self) -> None:
        self.log.append("setup")

    def predict(self, xs: list[int]) -> list[int]:
        self.log.append(f"predict {len(xs)}")
        return [2 * x for x in xs]

    def teardown(self) -> None:
        self.log.append("teardown")


def setup_of(**changes: Any) -> Setup:
    facts: dict[str, Any] = {
        "program": describe(),
        "model": b"",
        "stage": "counting",
        "place": 0,
        "batched": True,
        "allowed_batch_sizes": None,
        "warm_up": (1, 2, 4),
        "is_first": True,
        "is_last": True,
        "isolate_errors": True,
        "retry_on_oom": True,
        "oom_errors": (),
        "cores": None,
        "log_level": None,
    }
    return Setup(**{**facts, **changes})


def batch(id: int, *items: Any) -> Frame:
    n = len(items)
    forever = [float("inf")] * n
    return Frame(FrameKind.BATCH, id, list(range(1, n + 1)), bytes(n), bytes(n), forever, [dump(x) for x in items])


def live(link: Link, model: Any = Counting, **changes: Any) -> list[str]:
    log: list[str] = []
    run_now(serve(link, setup_of(**changes), lambda: (model, {"log": log} if model is Counting else {}, (), ())))
    return log
