"""What workers of a stage of steps report: parts, ends, streams given back, and times."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import Any, Final

from carpool.core.quarantine import acquit
from carpool.core.running_set import Part, RunningSet, SetReport, stream_of
from carpool.core.stage_streams import StageStreams
from carpool.errors import ModelError
from carpool.policy.steps import Stepped
from carpool.request import Request, Stream

_LATEST: Final = 5.0  # paces; where a stream further behind its goal is counted from anew, as nothing can save it


class StepReports(StageStreams):
    """What reports change in the running sets of a stage.

    Its arguments are those of `StageStreams`.
    """

    def reported(
        self, now: float, report: SetReport
    ) -> tuple[list[tuple[Request, object]], list[tuple[Request, Part]]]:
        """Take what a worker says after a step.

        Returns:
            The parts to hand on, each with its request, and the ends: the requests are not done
            yet, and the value of such a part has not been handed on only if the stream is
            collected.

        Raises:
            ValueError: The worker breaks the protocol: it is not known, has seen an order that was
                not sent, has stepped more streams than a set may have, or names a stream
                twice, or one that it was not given or that has ended. Nothing was done.
        """
        running = self._checked(report)
        self._learn_report(now, report)
        parts: list[tuple[Request, object]] = []
        ended: list[tuple[Request, Part]] = []
        if report.ids and not self._take_plain(now, running, report.ids, report.values, parts):
            self._take_parts(now, running, list(map(Part, report.ids, report.values)), parts, ended)
        elif report.parts:
            self._take_parts(now, running, report.parts, parts, ended)
        if report.returned:
            self._take_back(now, running, report.returned, ended)
        self._note_progress(now, running, report)
        self.parts += len(parts)
        return parts, ended

    def _checked(self, report: SetReport) -> RunningSet:
        """Return the set that a report is about. Raises what `reported` does."""
        running = self.sets.get(report.place)
        if running is None or not running.seen <= report.seen <= running.number:
            raise ValueError(f"worker {report.place} of stage {self.name} reports on order {report.seen}")
        if report.rows > self.rows:
            raise ValueError(
                f"worker {report.place} of stage {self.name} has stepped {report.rows} of {self.rows} streams"
            )
        ids = set(report.ids) if report.ids else {part.id for part in report.parts}
        if len(ids) < len(report.parts) + len(report.ids):
            raise ValueError(f"worker {report.place} of stage {self.name} names a stream twice in one report")
        if report.returned:
            ids.update(report.returned)
        if not ids <= running.members.keys() and (strangers := ids - running.members.keys() - running.gone.keys()):
            raise ValueError(f"worker {report.place} of stage {self.name} has no streams {sorted(strangers)}")
        return running

    def _learn_report(self, now: float, report: SetReport) -> None:
        """Learn from the times of a report, and have the policy do so."""
        rows, length = report.rows, report.length
        if not rows and not length:
            return
        is_first, place = self._places.is_first, report.place
        starts = length > 0 and is_first(place, ("start", length.bit_length()))
        steps = rows > 0 and is_first(place, self._knots.nearest(rows))
        self._tell(self.policy.learn, now, Stepped(rows, report.step_s, length, report.start_s, steps, starts))
        if rows:
            self.steps += 1
            self.step_s += (report.step_s - self.step_s) * (0.2 if self.step_s else 1.0)

    def _take_parts(
        self,
        now: float,
        running: RunningSet,
        said: Sequence[Part],
        parts: list[tuple[Request, object]],
        ended: list[tuple[Request, Part]],
    ) -> None:
        """Sort out what a worker says of its streams, and move on the times of those that go on."""
        members = running.members
        pace_s = self._pace_s
        # without a goal, newcomers need not wait until a stream has caught up with what it has lost
        latest_s = _LATEST * pace_s if self.policy.part_slo_s else 0.0
        silence_until = now + self._silence_s
        for part in said:
            id, value, last, error = part
            request = members.get(id)
            if request is None:  # it has left meanwhile
                self.stray_parts += 1
                continue
            stream = request.stream
            assert stream is not None
            if value is not None and not stream.is_collected:
                parts.append((request, value))
                stream.parts += 1
                if stream.parts == 1:
                    self.times.learn_usual(now - stream.joined)
                stream.heard = now
                if not stream.is_paused:
                    due = stream.next_due
                    stream.next_due = (now if due == inf or now - due > latest_s else due) + pace_s
                    deadline = request.deadline = silence_until if silence_until < stream.until else stream.until
                    if deadline < self.attention_at:
                        self.attention_at = deadline
                if self.resumable:
                    self._keep(stream, value)
            if last or error is not None:
                self._take_out(now, running, request)
                ended.append((request, part))

    def _take_plain(
        self,
        now: float,
        running: RunningSet,
        ids: Sequence[int],
        values: Sequence[object],
        parts: list[tuple[Request, object]],
    ) -> bool:
        """Take parts of streams that go on; return False, with nothing done, if one has left.

        Fast path of `_take_parts`: the same outcome, see tests/core/test_step_reports.py.
        """
        requests: list[Any] = list(map(running.members.get, ids))
        if None in requests or None in values:
            return False
        streams: list[Any] = [request.stream for request in requests]
        if True in [stream.is_collected for stream in streams]:
            return False
        pace_s = self._pace_s
        oldest = now - _LATEST * pace_s if self.policy.part_slo_s else now
        until, attention_at = now + self._silence_s, self.attention_at
        for request, stream in zip(requests, streams, strict=True):
            stream.heard = now
            if not stream.parts:
                self.times.learn_usual(now - stream.joined)
            stream.parts += 1
            if not stream.is_paused:
                due = stream.next_due
                stream.next_due = (due if oldest <= due < inf else now) + pace_s
                request.deadline = deadline = until if until < stream.until else stream.until
                if deadline < attention_at:
                    attention_at = deadline
        self.attention_at = attention_at
        if self.resumable:
            for stream, value in zip(streams, values, strict=True):
                self._keep(stream, value)
        parts += zip(requests, values, strict=True)
        return True

    @property
    def _pace_s(self) -> float:
        """How far apart the parts of a stream are due."""
        try:
            return self.policy.pace_s
        except BaseException as error:
            self._failed(error)
            return self.policy.pace_s

    def _keep(self, stream: Stream, value: object) -> None:
        """Keep a part, so that the stream can go on from there."""
        stream.kept.append(value)
        if self._measure is not None:
            nbytes = self._measure(value)
            stream.kept_bytes += nbytes
            self.queue.nbytes += nbytes

    def _take_back(
        self, now: float, running: RunningSet, returned: Sequence[int], ended: list[tuple[Request, Part]]
    ) -> None:
        """Let streams wait again that were stopped as memory ran out, and remember what fits."""
        tried = running.size
        again = []
        for id in returned:
            request = running.members.get(id)
            if request is None:
                continue
            if self.may_run_again(request):
                self._take_out(now, running, request, is_over=False)
                again.append(request)
            else:
                self._take_out(now, running, request)
                text = "MemoryError: memory ran out in a step, and this stream must not or cannot be started again"
                ended.append((request, Part(id, error=ModelError(text, type_name="MemoryError"))))
        running.untested = 0
        if running.size < tried:
            self.safe_size.ran_out(tried, running.size)
        self.put_back(now, again)

    def _note_progress(self, now: float, running: RunningSet, report: SetReport) -> None:
        """Note which orders a worker has followed, and what follows from a step without a fault."""
        if self.times.learns and report.rows:
            self.times.learn_most(report.rows, now - running.heard)
        running.hear(now)
        running.seen = report.seen
        running.note_step(report)
        is_up_to_date = report.seen == running.number
        running.is_stopped = report.stopped and is_up_to_date
        if is_up_to_date:
            running.starting = 0
        if running.gone and is_up_to_date:
            running.gone = {id: number for id, number in running.gone.items() if number > report.seen}
        if running.suspect is not None and report.rows and report.seen >= running.suspected_by:
            self._note_probation(running, running.suspect)
        if running.untested and report.rows and is_up_to_date:
            if running.untested > self.safe_size.limit:
                self.safe_size.fitted(running.untested)
            running.untested = 0

    def _note_probation(self, running: RunningSet, suspect: Request) -> None:
        """Note that a suspect has made a step alone; once it has made enough, it is acquitted."""
        stream_of(suspect).probation -= 1
        if stream_of(suspect).probation <= 0:
            acquit(suspect)
            running.suspect = None
            running.is_restless = True
