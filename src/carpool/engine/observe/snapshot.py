"""The numbers of a service and of its stages at one moment, as `stats()` returns and shows them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from carpool.engine.observe.shown import Row, as_html, as_text, counted, milliseconds
from carpool.engine.observe.stream_stats import StreamSnapshot


@dataclass(frozen=True, slots=True)
class StageSnapshot:
    """The numbers of one stage at one moment. `print` shows the main ones as a table.

    Attributes:
        name: The name of the stage.
        queued: How many requests wait.
        running: How many requests are with workers.
        batches: How many calls of the model have been made; in a stage of steps, how many steps.
        mean_batch_size: The mean number of requests in a call.
        batch_sizes: How many calls had each size.
        padding_share: The share of the items that the model was called with which was padding, see
            `Stage(allowed_batch_sizes=...)`.
        length_padding_share: The share of the positions (tokens, frames, ...) that the model
            computed for its items which was padding, see `Stage(length=...)`.
        reasons: How many of these went to a worker for each reason.
        mean_queue_s: The mean seconds that a request spent in the queue.
        mean_compute_s: The mean seconds that a worker spent on a batch, reading and writing it
            included. In a stage of single items that is one item; several that travel together
            count with equal shares of their time.
        mean_idle_gap_s: The mean seconds that a worker waited for its next batch although requests
            were waiting.
        workers: How many workers are in each state.
        restarts: How many workers have been replaced.
        late_results: How many results were dropped because their request had been answered or
            cancelled before.
        stray_replies: How many results were dropped because their worker was not running the
            request.
        protocol_errors: How many workers were ended because they sent something wrong.
        split_batches: How many batches raised an error and were run again in parts.
        unsplit_batches: How many raised an error and were not, because too many had been.
        out_of_memory: How many batches ran out of memory.
        safe_batch_size: The largest batch known to fit into memory; None while none has run out.
            In a stage with `length=` that is a count times a longest length.
        policy: Why the policy decides as it does, see `Policy.explain`.
        early_answers: How many answers its model has given early (`Done`).
        places: How many requests have come to each place of the service's graph at which the stage
            stands.
        elsewhere: Where the workers run that are not on this machine, or have joined by themselves,
            in words, by their index.
    """

    name: str
    queued: int
    running: int
    batches: int
    mean_batch_size: float
    batch_sizes: dict[int, int]
    padding_share: float
    length_padding_share: float
    reasons: dict[str, int]
    mean_queue_s: float
    mean_compute_s: float
    mean_idle_gap_s: float
    workers: dict[str, int]
    restarts: int
    late_results: int
    stray_replies: int
    protocol_errors: int
    split_batches: int
    unsplit_batches: int
    out_of_memory: int
    safe_batch_size: int | None
    policy: dict[str, Any]
    elsewhere: dict[int, str] = field(default_factory=dict)
    early_answers: int = 0
    places: tuple[int, ...] = ()

    def __str__(self) -> str:
        return "\n".join([as_text(_rows([self])), *_notes([self])])

    def _repr_html_(self) -> str:
        return as_html(self.name, _rows([self]), _notes([self]))


@dataclass(frozen=True, slots=True)
class ServiceSnapshot:
    """The numbers of a service at one moment. `print` shows the main ones as a table.

    Attributes:
        name: The name of the service.
        outcomes: How many requests had each of `OUTCOMES`, and how many were `cancelled`.
        overloads: How many of those that were `overloaded` were refused for each reason, see
            `Overloaded`; a reason that there was not is left out.
        in_flight: How many admitted requests have no answer yet.
        mean_latency_s: The mean seconds from admission to an answer without an error.
        slo_attainment: The share of the requests that had an answer without an error within
            `slo_s`, where those that were invalid are left out; None if there is no SLO. Of answers
            in parts, the first part counts.
        stages: The numbers of each stage.
        streams: The numbers of answers in parts; None where the last stage answers whole.
    """

    name: str
    outcomes: dict[str, int]
    in_flight: int
    mean_latency_s: float
    slo_attainment: float | None
    stages: tuple[StageSnapshot, ...]
    streams: StreamSnapshot | None = None
    overloads: dict[str, int] = field(default_factory=dict)

    def __str__(self) -> str:
        return "\n".join([self._summary(), as_text(_rows(self.stages)), *self._lines()])

    def _repr_html_(self) -> str:
        return as_html(self._summary(), _rows(self.stages), self._lines())

    def _lines(self) -> list[str]:
        """Return what stands below the table."""
        return [*([] if self.streams is None else self.streams.lines), *_notes(self.stages)]

    def _summary(self) -> str:
        """Return what became of the requests, in one line."""
        parts = [f"{self.outcomes['ok']:,} ok"]
        parts += [self._told(name, n) for name, n in self.outcomes.items() if n and name != "ok"]
        parts.append(f"{self.in_flight:,} in flight")
        parts.append(f"mean latency {milliseconds(self.mean_latency_s)} ms")
        if self.slo_attainment is not None:
            parts.append(f"{self.slo_attainment:.1%} within the SLO")
        return f"{self.name}: {', '.join(parts)}"

    def _told(self, outcome: str, count: int) -> str:
        """Return in words how many requests had an outcome, and why if they were refused."""
        text = f"{count:,} {outcome.replace('_', ' ')}"
        if outcome != "overloaded" or not self.overloads:
            return text
        return f"{text} ({', '.join(reason.replace('_', ' ') for reason in self.overloads)})"


_HEADINGS = ("stage", "queued", "running", "calls", "mean size", "queue ms", "compute ms", "workers")


def _rows(stages: Sequence[StageSnapshot]) -> list[Row]:
    """Return a table of stages: what a look at a service is mostly for."""
    rows: list[Row] = [_HEADINGS]
    for stage in stages:
        counts = [f"{n:,}" for n in (stage.queued, stage.running, stage.batches)]
        times = [milliseconds(seconds) for seconds in (stage.mean_queue_s, stage.mean_compute_s)]
        workers = ", ".join(f"{n} {state}" for state, n in stage.workers.items()) or "none"
        rows.append((stage.name, *counts, f"{stage.mean_batch_size:.1f}", *times, workers))
    return rows


def _notes(stages: Sequence[StageSnapshot]) -> list[str]:
    """Return a line for each stage in which something went wrong."""
    notes = []
    for stage in stages:
        troubles = [
            (stage.restarts, "restart", "restarts"),
            (stage.split_batches, "split batch", "split batches"),
            (stage.unsplit_batches, "unsplit batch", "unsplit batches"),
            (stage.out_of_memory, "batch out of memory", "batches out of memory"),
            (stage.protocol_errors, "protocol error", "protocol errors"),
            (stage.late_results, "late result", "late results"),
            (stage.stray_replies, "stray reply", "stray replies"),
        ]
        told = [counted(*trouble) for trouble in troubles if trouble[0]]
        if told:
            notes.append(f"{stage.name}: {', '.join(told)}")
    return notes
