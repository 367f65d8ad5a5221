"""The lobby of a stage: what waits for one pool of workers, and the policy that says when it goes.

A batcher or a stepper owns it and has the workers; the lobby has none. It says how requests come,
leave, expire, are dropped, and wait again after their worker was lost.

The policy may be the user's, and is guarded here, once: what it raises goes to `on_fault`, and so
does an impossible decision. From then on the stage is served greedily, until its service ends. So
nothing has to be undone, and no code has to find out whose error it was. In a service, the fault
fails the stage once the core has finished its present work; in a batch function, one line before
the lock is released; a simulation raises it.

Requests whose worker was lost are run once more, each alone, so that a guilty one is found. Such a
suspect waits in its old place of the queue, in a lane of its own kind, and runs without a question
to the policy. It is acquitted when it has come through its stage. A second loss convicts it: it
fails, and both deaths are taken off the stage's account (`Roster.forgive`).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from math import inf
from typing import Any

from carpool.engine.core.batch import Expiry, Gone
from carpool.engine.core.lane_order import Suspect
from carpool.engine.core.queue import Queue
from carpool.engine.policy.adapted import Adapted
from carpool.engine.policy.base import Decision, DoneBatch, Policy, View
from carpool.engine.policy.greedy import Greedy
from carpool.engine.policy.length_cost import padded
from carpool.engine.request import QUEUED, RUNNING, Request
from carpool.errors import CarpoolError, DeadlineExceeded, ModelError, Unavailable

MOST_LOSSES = 2  # workers of one stage that a request may cost


class Lobby:
    """What waits in one stage, and the policy of the stage.

    Args:
        policy: Decides when and how many; owned by this stage alone.
        idempotent: Whether a request may be run once more when its worker is lost.
        weigh: Writes on a request what the result of the stage before counts for in this one: its
            size, if that is not 1, its length and its key. It may raise a `CarpoolError`. Of an
            item that no stage has had before, it gets the format, too.
        substitute: Returns what takes the place of a policy that has raised; by default a greedy
            one with the same limit.

    Attributes:
        stage: The position of the stage; the core sets it, and also `most_room`, `closing` and
            `nodes`.
        view: What the policy is asked with.
        batch_limit: The policy's limit, as of its last decision or lesson.
        on_fault: Is called with the stage's name and what its policy has raised, and may raise
            that; the driver sets it. Without it what policies raise is raised.
        learns: Whether the policy learns from batches that are done.
        most_room: The most requests that can ever be handed to workers at once, as there is room
            for what they become.
        closing: Whether no request can join the queue any more, so that nothing is held back.
        nodes: Its places in the graphs of services. Requests of all of them share batches; those of
            a lobby by itself have None for their node.
        entered: How many requests have joined the queue.
        wake_at: When to ask again what to do although nothing happened; None for never.
        attention_at: No request expires and no worker hangs before this.
    """

    def __init__(
        self,
        name: str,
        policy: Policy,
        queue: Queue,
        *,
        idempotent: bool = True,
        weigh: Callable[..., None] | None = None,
        substitute: Callable[[Policy], Policy] | None = None,
    ) -> None:
        self.name = name
        self.policy = policy
        self.queue = queue
        self.stage = 0
        self.view = View(queue)
        try:
            self.batch_limit = policy.limit
        except BaseException:  # as its first decision will show once more
            self.batch_limit = policy.max_batch_size or 1
        self.on_fault: Callable[[str, BaseException], None] | None = None
        self.idempotent = idempotent
        self.weigh = weigh or _counts_for_one
        self.most_room = inf
        self.nodes: list[Any] = [None]
        self.is_shared = False
        self.closing = False
        self.entered = self.early = 0
        self.wake_at: float | None = None
        self.attention_at = inf
        self._substitute = substitute
        self._unserved_since = inf
        self._note_calls_of(policy)

    # -- the policy

    def _note_calls_of(self, policy: Policy) -> None:
        kind = type(policy)
        self._listens = kind.arrived is not Policy.arrived
        self.learns = kind.learn is not Policy.learn
        self._predictor = policy if isinstance(policy, Adapted) and policy.predicts else None
        self.predicts = self._predictor is not None

    def failed(self, error: BaseException) -> None:
        if self.on_fault is None:
            raise error
        self.on_fault(self.name, error)
        former = self.policy
        policy = Greedy(self.batch_limit) if self._substitute is None else self._substitute(former)
        policy.allowed_batch_sizes, policy.allowed_lengths = former.allowed_batch_sizes, former.allowed_lengths
        policy.max_padded_size = former.max_padded_size
        self.policy = policy
        self._note_calls_of(policy)

    def guarded(self, call: Callable[..., Any], *about: object) -> Any:
        """Make a call of the policy, and return what it returns; None if it raises."""
        try:
            return call(*about)
        except BaseException as error:
            self.failed(error)
            return None

    def decide(self) -> Decision:
        view = self.view
        try:
            decision = self.policy.decide(view)
            self.batch_limit = limit = self.policy.limit
            n = decision.take
            if type(n) is not int:
                n = operator.index(n)
                decision = decision._replace(take=n)
            free_in_s = view.free_in_s
            if n and (not 0 < n <= limit or not (view.free or free_in_s is not None)):
                with_what = f"with {view.free} free workers" if free_in_s is None else "for a busy worker"
                raise self._impossible(n, with_what)
            if free_in_s is None and (decision.drop or decision.chosen):
                self._check_named(decision)
        except BaseException as error:
            self.failed(error)
            return self.policy.decide(view)
        return decision

    def learn(self, now: float, done: DoneBatch) -> None:
        try:
            self.policy.learn(now, done)
            self.batch_limit = self.policy.limit
        except BaseException as error:
            self.failed(error)

    def cost_s(self, size: int) -> float | None:
        return self.guarded(self.policy.cost_s, size)  # type: ignore[no-any-return]

    def predicted_wait_s(self, units_before: int, workers: int) -> float | None:
        """Return how long the policy says that a request waits behind so many units; None if it
        does not say.
        """
        if self._predictor is None:
            return None
        return self.guarded(self._predictor.wait_s, units_before, workers)  # type: ignore[no-any-return]

    @property
    def lone_slack_s(self) -> float:
        try:
            return self.policy.lone_slack_s
        except BaseException as error:
            self.failed(error)
            return inf

    def padded_length(self, length: int) -> int:
        allowed = self.policy.allowed_lengths
        return length if allowed is None else padded(length, allowed)

    @property
    def whose_policy(self) -> str:
        """The policy's name and its stage's, as the errors say them that it is to blame for."""
        return f"policy {type(getattr(self.policy, 'former', self.policy)).__name__} of stage {self.name}"

    def _check_named(self, decision: Decision) -> None:
        chosen = decision.chosen
        self._check_queued(decision.drop, "drops")
        if not decision.take or not chosen:
            return
        self._check_queued([*decision.drop, *chosen], "chooses")
        first = chosen[0].lane
        if any(r.lane.key != first.key or r.lane.bucket != first.bucket for r in chosen):
            raise RuntimeError(f"{self.whose_policy} chooses requests of several keys")
        size, longest = sum([r.size for r in chosen]), max([r.length for r in chosen])
        if len(chosen) > 1 and (
            size > self.batch_limit or len(chosen) * self.padded_length(longest) > self.policy.max_padded_size
        ):
            raise self._impossible(size, f"whose longest is {longest}")

    def _check_queued(self, requests: Sequence[Request], what_it_does: str) -> None:
        if len(set(requests)) < len(requests) or any(r.state != QUEUED or r.node not in self.nodes for r in requests):
            raise RuntimeError(f"{self.whose_policy} {what_it_does} what is not queued")

    def _impossible(self, n: int, with_what: str) -> RuntimeError:
        return RuntimeError(
            f"{self.whose_policy} asked for a batch of {n} {with_what} and a limit of {self.batch_limit}"
        )

    # -- requests come

    def enter(
        self,
        now: float,
        requests: Sequence[Request],
        soonest: float | None = None,
        nbytes: int | None = None,
        dues_differ: bool = True,
    ) -> None:
        """Put requests in the queue; their `node` and `arrived` must be set already.

        Args:
            soonest: The earliest of their deadlines, if it is known.
            nbytes: How many bytes they hold, if they are in order (see `Queue.push_in_order`).
            dues_differ: Likewise.
        """
        if soonest is None:
            soonest = min([request.deadline for request in requests])
        if soonest < self.attention_at:
            self.attention_at = soonest
        self.entered += len(requests)
        if nbytes is None:
            self.queue.push(requests)
        else:
            self.queue.push_in_order(requests, nbytes, dues_differ)
        if self._listens:
            self.guarded(self.policy.arrived, now, requests)

    def put_back(self, now: float, requests: Sequence[Request]) -> None:
        self.queue.put_back(requests)
        free = [request for request in requests if not request.losses]  # for policies there is no quarantine
        if free:
            self.guarded(self.policy.arrived, now, free)

    def quarantine(self, requests: Sequence[Request]) -> None:
        """Let requests wait again in their old places, each to be run alone, as one of them may
        have killed its worker. For the policy they do not arrive, and it neither decides on them
        nor learns from them.
        """
        for request in requests:
            request.lane = request.lane._replace(key=Suspect(request.lane.key))
        self.queue.put_back(requests)

    def take_back(
        self,
        now: float,
        blamed: Sequence[Request],
        resting: Sequence[Request],
        untold: Sequence[Request],
        may_run_again: Callable[[Request], bool],
        given_up: str,
    ) -> Gone:
        """Let the requests of a worker that is gone wait again, as far as they may run once more.

        Args:
            blamed: Those that the worker may have been at work on, so that each is to run alone.
            resting: Those that it had, and was not at work on.
            untold: Those that had not been sent to it.
            may_run_again: Reports whether one of the first two may be run once more.
            given_up: Why the worker was taken to hang; empty if it was not.
        """
        failed: list[tuple[Request, CarpoolError]] = []
        alone: list[Request] = []
        again: list[Request] = []
        for request in blamed:
            request.losses += 1
            if request.state != RUNNING:
                continue
            if request.losses < MOST_LOSSES and may_run_again(request):
                alone.append(request)
            else:
                failed.append((request, lost_with(request, self.name, given_up)))
        for request in resting:
            if may_run_again(request):
                again.append(request)
            else:
                failed.append((request, _lost_in_mid_stream(self.name)))
        self.quarantine(alone)
        self.put_back(now, [*untold, *again])
        return Gone(failed, alone, again)

    # -- requests go

    def leave(self, now: float, request: Request) -> None:
        self.queue.remove(request)
        self.guarded(self.policy.left, now, request)

    def in_the_way(self, request: Request) -> list[Request]:
        """Return the requests that must give up their places to a new one, if the queue is full.

        A batch of each priority stays, or half of a queue that is smaller than two batches. So do
        streams that have had parts, since their callers have been promised the rest.
        """
        found = self.queue.in_the_way(request, max(1, int(min(self.batch_limit, self.queue.max_size / 2))))
        return [] if any(map(_has_had_parts, found)) else found

    def displace(self, now: float, request: Request) -> None:
        self.guarded(self.policy.left, now, request)
        self.queue.evict(request)

    def drop(self, now: float, requests: Sequence[Request]) -> None:
        for request in requests:
            self.guarded(self.policy.left, now, request)
        for request in requests:
            self.queue.remove(request)

    def expire(self, now: float) -> list[Expiry]:
        """Remove the queued requests whose deadlines have passed."""
        waited = self.queue.expired(now)
        self.drop(now, waited)
        return [Expiry(request, None) for request in waited]

    def look_at(self, when: float) -> None:
        if when < self.attention_at:
            self.attention_at = when

    def unserved_since(self, now: float, has_worker: bool) -> float:
        """Return since when there has been no worker, as far as was asked; infinity if there is
        one.
        """
        if has_worker:
            self._unserved_since = inf
        elif self._unserved_since == inf:
            self._unserved_since = now
        return self._unserved_since

    def late_unserved(self, now: float, since: float) -> tuple[list[Request], float]:
        """Return the queued requests that are late as no worker has been there `since`, but streams
        that have had parts, and when the next one of the others will be late.
        """
        late, next_due = [], inf
        for request in self.queue:
            if is_late_unserved(now, request, since):
                if not _has_had_parts(request):
                    late.append(request)
            elif now < request.due < next_due:
                next_due = request.due
        return late, next_due


def is_late_unserved(now: float, request: Request, since: float) -> bool:
    """Report whether a request is late for its SLO while there has been no worker `since`.

    One that waits is late when it is due. One that comes has no chance if workers have been away
    for as long as it has time: they will hardly be back in less. Its deadline is looked at
    elsewhere.
    """
    due = request.due
    return due < request.deadline and (due <= now or due - request.arrived <= request.arrived - since)


def _lost_in_mid_stream(stage: str) -> Unavailable:
    text = f"a worker of stage {stage} was replaced in the midst of this answer, and its model cannot resume it"
    return Unavailable(text, code="worker_lost")


def _has_had_parts(request: Request) -> bool:
    return request.stream is not None and request.stream.parts > 0


def acquit(request: Request) -> None:
    """Make a request like any other again, since it has come through its stage."""
    request.losses = 0
    lane = request.lane
    if isinstance(lane.key, Suspect):
        request.lane = lane._replace(key=lane.key.former_key)


def lost_with(request: Request, stage: str, given_up: str) -> CarpoolError:
    if request.losses < MOST_LOSSES:
        text = f"a worker of stage {stage} died with this request"
        if given_up:
            text = f"a worker of stage {stage} was given up with this request: {given_up}"
        return Unavailable(text, code="worker_lost")
    if given_up:
        return DeadlineExceeded(
            f"two workers of stage {stage} were lost with this request, the second one when it ran alone and was"
            f" given up: {given_up}; it is not tried again"
        )
    text = (
        f"two workers of stage {stage} died with this request or had to be killed, the second one when it ran"
        " alone; it is not tried again"
    )
    return ModelError(text, code="request_crashed_worker")


def _counts_for_one(request: Request, result: object, format: int = 0) -> None:
    request.size = 1
