"""A batch, and the other words between the core and its drivers: what workers have answered, and
what a driver is to do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Final, NamedTuple

from carpool.engine.core.running_set import Order
from carpool.engine.request import DONE, RUNNING, Request
from carpool.errors import CarpoolError


class Batch:
    """Requests that one worker runs together.

    Attributes:
        id: Unique within its stage.
        place: The position of its worker in the stage.
        requests: Those that the worker still owes an answer.
        n: How many requests it had at first.
        longest: Their longest length; 0 where requests have no lengths.
        reason: Why it went when it did (the policy's word).
        is_switch: Whether its worker has served another key before.
        ahead: Whether it was handed over while its worker still had another.
        started: When its worker got to it, which is when it was handed over unless it went ahead.
        call_started: When user code was last entered for it.
        given_up: Why the worker is taken to hang; empty if it is not.
        busy_s: Seconds that its worker has spent on it, as far as it has replied.
        hop_s: Seconds that it was on its way besides, once it is done.
        ok: Whether these replies had no errors, and no call ran out of memory.
        ask_if_first: Called at most once, by `is_first`; None once that is known.
        is_alone: Whether it is a request that went without a question, which is left out.
        is_warm_up: Whether it is a call of a warm-up, without requests.
    """

    is_alone = is_warm_up = False

    __slots__ = (
        "_is_first",
        "ahead",
        "answered_at",
        "ask_if_first",
        "busy_s",
        "call_started",
        "given_up",
        "hop_s",
        "id",
        "ids",
        "is_switch",
        "longest",
        "n",
        "ok",
        "place",
        "reason",
        "requests",
        "size",
        "stage",
        "started",
    )

    def __init__(
        self,
        id: int,
        stage: int,
        place: int,
        requests: list[Request],
        size: int,
        reason: str,
        now: float,
        ahead: bool = False,
        longest: int = 0,
    ) -> None:
        self.id = id
        self.stage = stage
        self.place = place
        self.requests = requests
        self.size = size
        self.longest = longest
        self.is_switch = False
        self.ids = [request.id for request in requests]
        self.reason = reason
        self.ahead = ahead
        self.started = self.call_started = self.answered_at = now
        self.given_up = ""
        self.n = len(requests)
        self.busy_s = self.hop_s = 0.0
        self.ok = True
        self.ask_if_first: Callable[[Batch], bool] | None = None
        self._is_first = False

    def __len__(self) -> int:
        return len(self.requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self.requests)

    @property
    def earliest_deadline(self) -> float:
        return min([request.deadline for request in self.requests if request.state == RUNNING], default=inf)

    @property
    def unwanted_since(self) -> float:
        """When the last of its callers went or was answered; infinity if one still waits."""
        if any(request.state == RUNNING for request in self.requests):
            return inf
        return max(self.answered_at, max([request.deadline for request in self.requests], default=self.answered_at))

    @property
    def is_first(self) -> bool:
        """Whether it was the first one of about its size on its worker; see `policy.DoneBatch`.

        The first use asks the batcher (`Batcher._note_kind`), which records this size for the
        worker. Nothing is recorded of batches that no policy asks about, such as trifles.
        """
        if self.ask_if_first is not None:
            self._is_first, self.ask_if_first = self.ok and self.ask_if_first(self), None
        return self._is_first

    def expire(self, now: float) -> list[Request]:
        expired = [request for request in self.requests if request.state == RUNNING and request.deadline <= now]
        for request in expired:
            request.state = DONE
        return expired

    def __repr__(self) -> str:
        return f"<Batch {self.id} stage={self.stage} place={self.place} n={len(self)} {self.reason}>"


class LoneBatch(Batch):
    """A lone request that went without a question.

    One object, without requests, stands for all that are done before the core records them.
    """

    __slots__ = ()
    is_alone = True


class WarmUpBatch(Batch):
    """A call of a warm-up."""

    __slots__ = ()
    is_warm_up = True

    def __init__(self, now: float, stage: int, n: int, size: int, longest: int, busy_s: float) -> None:
        super().__init__(0, stage, -1, [], size, "warm-up", now, longest=longest)
        self.n, self.busy_s = n, busy_s


DONE_EARLY: Final = object()
"""The turn of a result that is the answer, whatever would follow."""


@dataclass(slots=True, eq=False, repr=False)
class Reply:
    """The answers of one worker to a batch, or to a part of it.

    Attributes:
        results: One for each of `ids`; where there is an error, the result does not matter.
        errors: By position in `ids`, why a request failed; None if none did.
        busy_s: Seconds that the worker spent on these answers, reading and writing included.
        waited_s: Seconds that the worker stood still before it got the batch.
        turns: By position in `ids`, where a result goes if it says so itself: `DONE_EARLY`, or the
            name of the way that it takes through the switch that follows; None if none does.
    """

    stage: int
    place: int
    batch_id: int
    ids: Sequence[int]
    results: Sequence[object]
    errors: dict[int, Exception] | None = None
    busy_s: float = 0.0
    waited_s: float = 0.0
    turns: Mapping[int, object] | None = None

    def __repr__(self) -> str:
        failed = len(self.errors or ())
        return f"<Reply stage={self.stage} place={self.place} batch={self.batch_id} n={len(self.ids)} failed={failed}>"


class Expiry(NamedTuple):
    """A request whose deadline has passed: it is now done, and has no answer yet. `started` is when
    it was handed to a worker, None if it was not, and `hint` what else stands in the error.
    """

    request: Request
    started: float | None
    hint: str = ""


class Attention(NamedTuple):
    """The findings of a crew's `attend`: the requests whose deadlines have passed, and the places
    of the workers that hang.
    """

    expired: list[Expiry]
    hung: list[int]


class Gone(NamedTuple):
    """What has become of the requests of a worker that is gone.

    Attributes:
        failed: Those that are not run again, each with its error; they are not done yet.
        alone: Those that wait again, each to be run alone.
        again: Those that wait again, as the worker was not at work on them.
        is_guilty: Whether this loss, and the one before it, are the fault of the only request that
            it was at work on.
    """

    failed: Sequence[tuple[Request, CarpoolError]]
    alone: Sequence[Request]
    again: Sequence[Request]
    is_guilty: bool = False


class Todo:
    """The work that a poll of the core returns for its driver.

    Attributes:
        run: Batches to send to their workers; do this first, the workers are idle, or nearly so.
        answer: Requests whose answers are to be delivered.
        kill: (stage, place) of each worker that hangs.
        wake_at: When to poll again although nothing happens; infinity for never.
        drained: The same of each worker that was to go and has nothing left: it is to be ended.
        recall: The same of each worker that is lent and should come back: poll again then.
        orders: Messages for workers of a stage of steps; send them first, too.
        parts: Requests, each with a part of its answer to hand on: do this after `orders`, and
            before `answer`, where those follow that have ended.
    """

    __slots__ = ("answer", "drained", "kill", "orders", "parts", "recall", "run", "wake_at")

    def __init__(self) -> None:
        self.run: list[Batch] = []
        self.answer: list[Request] = []
        self.kill: list[tuple[int, int]] = []
        self.drained: list[tuple[int, int]] = []
        self.recall: Sequence[tuple[int, int]] = ()
        self.orders: list[Order] = []
        self.parts: list[tuple[Request, object]] = []
        self.wake_at = inf
