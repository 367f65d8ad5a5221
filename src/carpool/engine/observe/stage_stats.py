"""What one stage of a service has done so far, in numbers.

Counting is a handful of integer additions per request; means are computed when somebody asks.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from math import inf
from typing import Any, Protocol

from carpool.engine.call.results import Trouble
from carpool.engine.call.retry import padded_size
from carpool.engine.core.batch import Batch
from carpool.engine.core.core import Core
from carpool.engine.core.roster import PlaceState, Roster
from carpool.engine.core.stepper import Crew
from carpool.engine.foreign import text_of
from carpool.engine.logger import logger
from carpool.engine.observe.durations import Durations
from carpool.engine.observe.sent_metrics import SentMetrics
from carpool.engine.observe.snapshot import StageSnapshot
from carpool.engine.policy import Policy
from carpool.engine.policy.base import name_of
from carpool.engine.policy.length_cost import padded
from carpool.engine.request import Request
from carpool.engine.wire.handshake import Hello

_EXPLAIN_EVERY_S = 10.0  # how often a stage logs why its batches go

REASONS = (
    "full",
    "free",
    "length",
    "delay",
    "size",
    "tight",
    "shed",
    "probe",
    "cold",
    "closing",
    "quarantine",
    "other",
)
"""Why a batch was sent to its worker. Whatever else a policy says is counted as `other`."""


class BatchWatcher(Protocol):
    """Whoever is told of each batch of a stage."""

    def batch_started(self, stage: StageStats, batch: Batch) -> None:
        """Note that a worker has got to a batch."""

    def batch_completed(self, stage: StageStats, place: int) -> None:
        """Note that a worker has answered its batch."""


class StageStats:
    """Counters of one stage.

    Args:
        name: The name of the stage.
        core: The core to which the stage belongs.
        index: The position of the stage in the core.
        roster: The roster of the stage's workers; None for a stage that has none.
        single: Whether its model takes single items. Then each item is a batch of its own in all
            counts and times, however many of them travel to the worker together.

    Attributes:
        name: The name of the stage.
        batcher: The batcher of the stage, which keeps some counts itself.
        roster: The roster of the stage's workers, if it has one.
        batch_sizes: How many calls of the model had each size.
        reasons: How many batches were sent for each of `REASONS`.
        queue_time: The time from arrival in the stage to the start of the batch, per request.
        compute_time: The time that a worker spent on a batch, per batch.
        idle_gap: How long a worker waited between two batches although requests were waiting.
        split_batches: How many batches raised an error and were run again in parts.
        unsplit_batches: How many raised an error and were not, because too many had been.
        out_of_memory: How many batches had a call that ran out of memory.
        elsewhere: What the workers that run somewhere else have said of themselves, by place.
        sent_metrics: The metrics of the model's own that these have sent.
        protocol_errors: How many workers were ended because they sent something wrong.
        items: How many requests the batches of a stage with `allowed_batch_sizes` held.
        padding: How many items were added to these to reach an allowed size.
        positions: In a stage with `length`, how many positions (tokens, frames, ...) the model has
            computed for the items, those included that it has padded them with.
        length_padding: How many of these were padding.
        watcher: Is told of each batch; None unless requests are logged or traced one by one.
    """

    def __init__(self, name: str, core: Core, index: int, roster: Roster | None, single: bool) -> None:
        self.name = name
        self.batch_sizes: dict[int, int] = {}
        self.reasons = dict.fromkeys(REASONS, 0)
        self.queue_time = Durations()
        self.compute_time = Durations()
        self.idle_gap = Durations()
        self.roster = roster
        self.batcher = core.batchers[index]
        self.items = self.padding = self.positions = self.length_padding = 0
        self.split_batches = self.unsplit_batches = self.out_of_memory = self.protocol_errors = 0
        self._single = single
        self._last_reason = ""
        self._explain_at = -inf
        self.elsewhere: dict[int, Hello] = {}
        self.sent_metrics = SentMetrics()
        self.watcher: BatchWatcher | None = None
        self._wanted: set[int] = set()  # places of workers that became free while requests waited

    def started(self, batch: Batch) -> None:
        """Count a batch that goes to its worker."""
        n = len(batch.requests)
        size, calls = (1, n) if self._single else (n, 1)
        self.batch_sizes[size] = self.batch_sizes.get(size, 0) + calls
        sizes = self.batcher.lobby.policy.allowed_batch_sizes
        if sizes is not None:
            self.items += n
            self.padding += padded_size(n, sizes) - n
        if batch.longest:
            self._count_positions(batch)
        if batch.reason != self._last_reason:
            self._log_reason(batch)
        self.reasons[batch.reason if batch.reason in self.reasons else "other"] += calls
        self.queue_time.add_since(batch.started, [request.arrived for request in batch.requests])
        if self.watcher is not None:
            self.watcher.batch_started(self, batch)

    def completed(self, place: int, n: int, busy_s: float, waited_s: float) -> None:
        """Count a batch that is done.

        This must be called before the worker gets its next batch, unless that one went ahead.

        Args:
            place: The place of the worker.
            n: How many requests it answered.
            busy_s: How long the worker spent on the batch, in seconds.
            waited_s: How long the worker had waited before it, in seconds.
        """
        if self._single and n > 1:
            self.compute_time.add(busy_s / n, n)  # one time for all is measured: each gets its share
        else:
            self.compute_time.add(busy_s)
        if self.watcher is not None:
            self.watcher.batch_completed(self, place)
        if place in self._wanted:
            self.idle_gap.add(waited_s)
        if self.batcher.queue or place in self.batcher.in_flight:
            self._wanted.add(place)
        else:
            self._wanted.discard(place)

    def went_alone(self, place: int, busy_s: float, waited_s: float) -> None:
        """Count a batch of one request that found everything idle, and is done.

        A part of the fast path `lent_worker`: the same counts as those of `started` and
        `completed`, see tests/engine/drive/test_lending.py.
        Only the reason is that of the last batch, as nobody has asked the policy.
        """
        self.batch_sizes[1] = self.batch_sizes.get(1, 0) + 1
        sizes = self.batcher.lobby.policy.allowed_batch_sizes
        if sizes is not None:
            self.items += 1
            self.padding += padded_size(1, sizes) - 1
        self.reasons[self._last_reason if self._last_reason in self.reasons else "other"] += 1
        self.queue_time.add(0.0)
        self.compute_time.add(busy_s)
        if place in self._wanted:
            self.idle_gap.add(waited_s)
            self._wanted.discard(place)

    def joined(self, now: float, requests: Sequence[Request]) -> None:
        """Count requests that join a running set, unless they have been in one before."""
        arrivals = [r.arrived for r in requests if not (r.losses or (r.stream and r.stream.parts))]
        if arrivals:
            self.queue_time.add_since(now, arrivals)

    def stepped(self, rows: int, step_s: float) -> None:
        """Count a step of a running set, which is a call of the model with so many requests."""
        self.batch_sizes[rows] = self.batch_sizes.get(rows, 0) + 1
        self.compute_time.add(step_s)

    def troubled(self, trouble: Sequence[Trouble]) -> None:
        """Count what happened to a batch besides its results."""
        self.split_batches += any(each.split for each in trouble)
        self.unsplit_batches += any(each.unsplit for each in trouble)
        self.out_of_memory += any(each.out_of_memory for each in trouble)

    def _count_positions(self, batch: Batch) -> None:
        """Count how much of the items' lengths is padding up to the longest, or an allowed one."""
        allowed = self.batcher.lobby.policy.allowed_lengths
        longest = batch.longest if allowed is None else padded(batch.longest, allowed)
        positions = len(batch.requests) * longest
        self.positions += positions
        self.length_padding += positions - sum([min(request.length, longest) for request in batch.requests])

    @property
    def length_padding_share(self) -> float:
        """The share of the positions computed for items that was padding; 0 before the first."""
        return self.length_padding / self.positions if self.positions else 0.0

    @property
    def safe_batch_size(self) -> int | None:
        """The largest batch known to fit into memory; None while none has run out of it."""
        limit = self.batcher.safe_size.limit
        return None if limit == inf else int(limit)

    def _log_reason(self, batch: Batch) -> None:
        """Note that a batch goes for another reason than the last one, and log why now and then."""
        self._last_reason = batch.reason
        if batch.started >= self._explain_at and logger.isEnabledFor(logging.DEBUG):
            self._explain_at = batch.started + _EXPLAIN_EVERY_S
            why = explained(self.batcher.lobby.policy, batch.started, self.batcher)
            logger.debug("stage %s: a batch of %d goes (%s); %s", self.name, batch.n, batch.reason, why)

    @property
    def mean_batch_size(self) -> float:
        """The mean number of requests in a call of the model; 0 before the first call."""
        calls = sum(self.batch_sizes.values())
        return sum(n * count for n, count in self.batch_sizes.items()) / calls if calls else 0.0

    @property
    def padding_share(self) -> float:
        """The share of the items that the model was called with which was padding, from 0 to 1."""
        return self.padding / (self.items + self.padding) if self.padding else 0.0

    @property
    def workers(self) -> dict[PlaceState, int]:
        """The number of workers in each state."""
        states = dict.fromkeys(PlaceState, 0)
        for record in self.roster.places.values() if self.roster is not None else ():
            states[record.state] += 1
        return states

    def worker_name(self, place: int) -> str:
        """Return what the log calls the worker in a place."""
        record = None if self.roster is None else self.roster.places.get(place)
        return f"{self.name}/{place if record is None else record.index}"

    def gone(self, place: int) -> None:
        """Forget a worker that is gone for good."""
        self._wanted.discard(place)

    @property
    def places(self) -> tuple[int, ...]:
        """How many requests have come to each place of the graph at which the stage stands."""
        return tuple(node.entered for node in self.batcher.lobby.nodes if node is not None)

    def snapshot(self, now: float) -> StageSnapshot:
        """Return a copy of the numbers at `now`."""
        return StageSnapshot(
            name=self.name,
            queued=len(self.batcher.queue),
            running=self.batcher.running,
            batches=sum(self.batch_sizes.values()),
            mean_batch_size=self.mean_batch_size,
            batch_sizes=dict(sorted(self.batch_sizes.items())),
            padding_share=self.padding_share,
            length_padding_share=self.length_padding_share,
            reasons=dict(self.reasons),
            mean_queue_s=self.queue_time.mean_s,
            mean_compute_s=self.compute_time.mean_s,
            mean_idle_gap_s=self.idle_gap.mean_s,
            workers={str(state): n for state, n in self.workers.items() if n},
            restarts=0 if self.roster is None else self.roster.restarts,
            late_results=self.batcher.late_results,
            stray_replies=self.batcher.stray_replies,
            protocol_errors=self.protocol_errors,
            split_batches=self.split_batches,
            unsplit_batches=self.unsplit_batches,
            out_of_memory=self.out_of_memory,
            safe_batch_size=self.safe_batch_size,
            policy=explained(self.batcher.lobby.policy, now, self.batcher),
            elsewhere={place: hello.whereabouts for place, hello in sorted(self.elsewhere.items())},
            early_answers=self.batcher.lobby.early,
            places=self.places,
        )


def explained(policy: Policy, now: float, crew: Crew | None = None) -> dict[str, Any]:
    """Return what a policy says about its decisions, or the error that it raises when asked.

    Args:
        policy: The policy.
        now: The time.
        crew: The crew that it decides for, which adds what it has learned of its batches' way and
            of the coordinator's work.
    """
    try:
        why = dict(policy.explain(now))
    except BaseException as error:  # the policy may be the user's; a look at it must do no harm
        return {"policy": name_of(policy), "error": f"{type(error).__name__}: {text_of(error)}"}
    if "policy" in why:
        why.setdefault("hop_s", 0.0 if crew is None else crew.times.hop_s)
        view = None if crew is None else crew.lobby.view
        if view is not None and (view.request_work_s or view.batch_work_s):
            why.setdefault("request_work_s", view.request_work_s)
            why.setdefault("batch_work_s", view.batch_work_s)
    return why
