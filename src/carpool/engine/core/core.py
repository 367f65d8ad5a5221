"""The core: the stages and services that one driver drives.

Events go in (`Flow.submit`, `cancel`, `completed`, `worker_ready`, `worker_lost` and others),
`poll` says what to do next. The invariants:

* every request gets exactly one answer, even if it is refused, unless its caller has cancelled it:
  `DONE` is entered once, and `core/transit.py` hands the request out;
* an error in any stage goes straight back to its caller;
* only the doors of a service refuse (`core/flow.py`), and switches that are declared to
  (`Onward.refuses`); behind the doors a batch goes to a worker only when there is room for its
  results (`core/graph.py`);
* late stages are asked first, so that the room they make can be used in the same poll;
* whatever a policy raises, its stage goes on without it (`core/lobby.py`); `abort` answers all that
  are inside.

What a lost worker cannot have looked at waits again as if it had not been taken. A stream goes on
only where its model can resume it. Where no request can arrive any more (`_is_last_call`), the
batcher takes the requests that its policy holds back. Policies are called before a change of a
request or after it is complete, so `abort` finds every request: at a door, in a queue or in a
batch.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Sequence
from math import inf
from typing import Any

from carpool.engine.core.batch import Batch, Gone, Reply, Todo
from carpool.engine.core.batcher import Batcher
from carpool.engine.core.content import Content
from carpool.engine.core.flow import Flow
from carpool.engine.core.graph import Declared, Door, Each, Node, all_after
from carpool.engine.core.journal import Journal, parts_so_far, record_batches, record_orders, record_report
from carpool.engine.core.running_set import BACK, FAILED, SetReport, stream_of
from carpool.engine.core.stepper import Crew, Stepper
from carpool.engine.core.transit import Moves, Transit
from carpool.engine.request import DONE, NEW, QUEUED, RUNNING, Request
from carpool.errors import CarpoolError


class Core:
    """The stages of one driver, and its services.

    Args:
        crews: Of the stages; their order is the numbers of the stages.
        declared: What the graph of the first service is made of; a line of all stages if it is not
            given.
        journal: Records what happens to each request, if given.

    Attributes:
        flow: The first of them.
        doors: The requests that wait for room outside of all queues.
    """

    def __init__(
        self,
        crews: Sequence[Crew],
        declared: Declared | None = None,
        *,
        slo_s: float | None = None,
        content: Content | None = None,
        journal: Journal | None = None,
    ) -> None:
        self.crews = tuple(crews)
        self._journal = journal
        self._transit = Transit(journal)
        self._has_closed = False
        self._todo = Todo()
        self.flows: list[Flow] = []
        self.doors: list[Door] = []
        self._lists: list[Each] = []
        self._steppers: dict[int, Stepper] = {}
        for stage, crew in enumerate(self.crews):
            if isinstance(crew, Stepper):
                self._steppers[stage] = crew
            crew.lobby.stage = stage
            crew.lobby.nodes = []
        self.flow = self.serve(list(crews) if declared is None else declared, slo_s=slo_s, content=content)

    def __repr__(self) -> str:
        between = " -> " if self._line else ", "
        return f"<Core {between.join(map(repr, self.crews))}>"

    def serve(
        self,
        declared: Declared,
        *,
        slo_s: float | None = None,
        content: Content | None = None,
    ) -> Flow:
        """Add a service over the stages, and return it; nothing may wait in them yet. The arguments
        are those of the class.

        Raises:
            ValueError: A stage that answers in parts is not the last one.
        """
        flow = Flow(declared, self._transit, slo_s=slo_s, content=content)
        for node in flow.graph.nodes:
            if isinstance(node.crew, Stepper) and (node.needs or node.doors):
                text = f"stage {node.name} answers in parts, so it must be the last of its service, or of its branch"
                raise ValueError(text)
            node.crew.lobby.nodes.append(node)
        self.flows.append(flow)
        self._lists += [block for block in flow.graph.blocks if isinstance(block, Each)]
        self.doors += [*flow.doors, *[block.door for block in flow.graph.blocks if isinstance(block, Each)]]
        for crew in self.crews:
            lobby = crew.lobby
            if len(lobby.nodes) > 1:
                lobby.is_shared = True
                crew.queue.count_by_source()
        for each_flow in self.flows:
            each_flow.settle()
        for crew in self.crews:
            lobby = crew.lobby
            lobby.most_room = lobby.nodes[0].most_room if len(lobby.nodes) == 1 else inf
        # the stages, those first that come late, as nodes are in this order
        self._order = list(dict.fromkeys([node.crew for each in self.flows for node in each.graph.nodes]))
        self._before = _all_before(self.flows)
        # by stage, the service whose answers all its results are; None where they are not
        self._ends = [
            crew.lobby.nodes[0].flow if len(crew.lobby.nodes) == 1 and crew.lobby.nodes[0].is_last else None
            for crew in self.crews
        ]
        # of a single line the stages, the last one first, each with its node; else empty
        is_line = len(self.flows) == 1 and flow.is_line
        self._line = [(crew, crew.lobby.nodes[0]) for crew in self._order] if is_line else []
        return flow

    @property
    def waiting(self) -> int:
        """How many requests are in queues and at doors; the children of a request count as such."""
        waiting = 0
        for door in self.doors:
            waiting += door.queue.count
        for crew in self.crews:
            waiting += crew.queue.count
        return waiting

    @property
    def unanswered(self) -> int:
        """How many callers of admitted requests still wait."""
        return sum([flow.unanswered for flow in self.flows])

    def offered(self, stage: int) -> int:
        crew = self.crews[stage]
        first = {node.flow for node in crew.lobby.nodes if node.is_first}
        at_doors: int = sum([flow.refused + flow.alone for flow in first])
        return crew.lobby.entered + at_doors

    # -- the driver's own work

    @property
    def requests_and_batches(self) -> tuple[int, int] | None:
        """How many requests have come to the stages so far, and how many batches have been made;
        None where a stage answers in parts, so that no batch says what the work was for.
        """
        batches = 0
        for crew in self.crews:
            if crew.made is None:
                return None
            batches += crew.made
        return sum([self.offered(stage) for stage in range(len(self.crews))]), batches

    def note_work(self, request_s: float, batch_s: float) -> None:
        """Put into the views of all policies how many seconds the driver works for each request in
        each stage, and for each batch besides.
        """
        for crew in self.crews:
            view = crew.lobby.view
            view.request_work_s, view.batch_work_s = request_s, batch_s

    # -- callers

    def cancel(self, now: float, request: Request) -> None:
        """Note that a caller has gone.

        A queued request is never run; a running one's result is dropped.
        """
        state = request.state
        if state == NEW:
            request.state = DONE
        if state not in (QUEUED, RUNNING):
            return
        request.node.flow.cancelled += 1
        request.caller = None
        if self._journal is not None:
            self._journal.record(now, "cancelled", request.id, detail=parts_so_far(now, request))
        self._transit.withdraw(now, request)

    def suffice(self, now: float, request: Request) -> None:
        if request.state in (QUEUED, RUNNING):
            self._transit.withdraw(now, request)
            self._transit.answer(now, request)

    def pause(self, now: float, request: Request, is_paused: bool) -> None:
        """Note that a caller wants no more parts for now, or wants them again; it takes effect once
        the request is where its answer is made in parts.
        """
        stream, node = request.stream, request.node
        if stream is None or stream.is_paused == is_paused or request.state not in (QUEUED, RUNNING):
            return
        stream.is_paused = is_paused
        if request.state == RUNNING and type(node) is Node:
            node.crew.caller_changed(now, request)
        if self._journal is not None:
            self._journal.record(now, "paused" if is_paused else "goes on", request.id, self.crews[-1].name)

    def lone_done(self, batcher: Batcher, place: int, began: float, now: float, busy_s: float, ok: bool) -> None:
        """Note that a lone request, which was let run without `submit`, is done; see `Batcher`.

        It can only be a core of one stage, which is the batcher's, and of one service.
        """
        self.flow.went_alone(ok)
        batcher.lone_done(place, began, now, busy_s, ok)

    def take_back(
        self, batcher: Batcher, place: int, request: Request | None = None, began: float = 0.0, id: int = 0
    ) -> Batch | None:
        """Have a worker back that `Batcher.lend` took out; poll then.

        Args:
            request: What it is at work on; None if on nothing.
            began: When it began with that.
            id: The id that the worker has for this request, and for its batch.

        Returns:
            The batch that the request is in, as if the worker had been given it when it began.
        """
        if request is not None:
            self.flow.admit_lone(began, request, id)
        return batcher.take_back(place, request, began)

    def close(self, error: CarpoolError) -> None:
        """Refuse new requests with `error` from now on; those inside go on, and nothing is held
        back for company that cannot come.
        """
        self._has_closed = True
        for flow in self.flows:
            flow.closed_because = error
        self.hold(False)

    def abort(self, now: float, error: CarpoolError) -> None:
        self.close(error)
        fail = self._transit.fail
        for door in self.doors:
            for request in list(door.queue):
                if request.state == QUEUED:  # else a sibling has failed before
                    door.queue.remove(request)
                    fail(now, request, copy.copy(error))
        for crew in self.crews:
            for request in list(crew.queue):
                if request.state == QUEUED:
                    crew.queue.remove(request)
                    fail(now, request, copy.copy(error))
            for request in crew.owed:
                if request.state == RUNNING:
                    request.state = DONE
                    crew.caller_changed(now, request)
                    fail(now, request, copy.copy(error))

    # -- workers that answer

    def completed(self, now: float, reply: Reply) -> None:
        """Take the answers of a worker to a batch, or to a part of it.

        See `core/transit.py` for what becomes of each.

        Raises:
            ValueError: There are more or fewer results than ids; then nothing was done.
        """
        ids, results, errors, stage = reply.ids, reply.results, reply.errors, reply.stage
        if len(results) != len(ids):
            raise ValueError(f"{len(results)} results for {len(ids)} requests")
        crew: Any = self.crews[stage]  # a batcher: from workers of steps the driver takes reports only
        batch = crew.in_flight.get(reply.place)
        if now >= crew.lobby.attention_at and batch is not None and batch.id == reply.batch_id:
            for late in batch.expire(now):  # a driver that stood still has not polled
                self._transit.expire(now, late, batch.started)
        takers = crew.completed(now, reply.place, reply.batch_id, ids, reply.busy_s, ok=not errors)
        flow = self._ends[stage]
        if errors is None and flow is not None and self._journal is None and reply.turns is None:
            n_late = self._transit.answer_all(flow, takers, results)
            if n_late is not None:
                crew.late_results += n_late
                return
        self._transit.sort_out(now, crew, reply, takers, batch.started if batch is not None else None)

    def reported(self, now: float, report: SetReport) -> None:
        """Take what a worker of a stage of steps says after a step.

        The parts are handed on by the next poll, and so are the answers of requests that have
        ended. If the worker has stopped, that poll should come at once.

        Raises:
            ValueError: The worker breaks the protocol, or there is no such stage of steps; then
                nothing was done.
        """
        crew = self._steppers.get(report.stage)
        if crew is None:
            raise ValueError(f"there is no stage {report.stage} of steps")
        if now >= crew.lobby.attention_at:  # a driver that stood still has not polled
            self._attend(now, crew)
        parts, ended = crew.reported(now, report)
        self._todo.parts += parts
        if self._journal is not None:
            said = report.parts
            back = {id for id, kind in zip(said.ids, said.kinds, strict=True) if kind == BACK}
            returned = [request for request in crew.queue if request.id in back]
            record_report(self._journal, now, crew.name, [request for request, _ in parts], returned)
        moves: Moves = {}
        for request, kind, value in ended:
            if request.state == RUNNING:  # else a sibling has failed in this very report
                self._end_stream(now, request, kind, value, moves)
        if moves:
            self._transit.move(now, moves)

    def _end_stream(self, now: float, request: Request, kind: int, value: Any, moves: Moves) -> None:
        """Answer a request whose stream has ended, as its worker says, or have its answer go on."""
        stream = stream_of(request)
        if kind == FAILED:
            self._transit.fail(now, request, value)
        elif not request.node.is_last:
            request.stream = None
            self._transit.take_turn(now, request, value, None, stream.joined, moves)
        else:
            if stream.is_collected or stream.is_told_both:
                request.result = value
            self._transit.answer(now, request)

    # -- workers that come and go

    def restart_hang_timer(self, now: float, stage: int, place: int, batch_id: int | None = None) -> None:
        """Count the time of a worker anew: it has started another call for its batch; or, without a
        batch, it seemed to hang and does not.
        """
        self.crews[stage].restart_hang_timer(now, place, batch_id)

    def drain(self, stage: int, place: int) -> None:
        """Let a worker get nothing more. It finishes what it has; then `Todo.drained` names it."""
        self.crews[stage].places.drain(place)

    def hold(self, is_held: bool) -> None:
        """Have the stages at which requests begin start no batch for now, or go on.

        What comes waits in their queues, so the stages behind them run empty. It has no effect on
        those that have nothing behind them, and ends when the service closes. In a graph that is no
        line what comes waits at the doors, as its requests may be at several stages at a time.
        """
        for flow in self.flows:
            if not flow.is_line:
                flow.is_held = is_held and flow.closed_because is None
                continue
            for node in flow.graph.nodes:
                node.is_held = is_held and node.is_first and not node.is_last and flow.closed_because is None

    @property
    def is_empty_behind_queue(self) -> bool:
        """Whether no request is between its first queue and its answer, streams apart."""
        if self._transit.families:
            return False
        for crew in self.crews:
            if crew.in_flight:
                return False
            if crew.queue.count and not self._line:
                return False
            if crew.queue.count and any(node.queued and not node.is_first for node in crew.lobby.nodes):
                return False
        return True

    def worker_ready(self, stage: int, place: int) -> None:
        self.crews[stage].worker_ready(place)

    def worker_lost(self, now: float, stage: int, place: int, unsent: Collection[int] = ()) -> bool:
        """Note that a worker has died, or was killed because it hung or broke the protocol.

        What it owed is run once more, each request alone (see `core/lobby.py`).

        Args:
            unsent: Requests of its batch that it cannot have begun with: they wait as if untaken.

        Returns:
            Whether this death, and the one before it, are the fault of the only request that the
            worker had, and not the stage's.
        """
        crew = self.crews[stage]
        return self._lost(now, crew, crew.worker_gone(now, place, unsent))

    def worker_left(self, now: float, stage: int, place: int) -> None:
        """Note that a worker is gone, perhaps amid a batch, and that no request is to blame.

        The requests that it had wait again.
        """
        crew = self.crews[stage]
        self._lost(now, crew, crew.worker_gone(now, place, blames=False))

    def _lost(self, now: float, crew: Crew, gone: Gone | None) -> bool:
        if gone is None:
            return False
        if self._journal is not None:
            for request in gone.alone:
                self._journal.record(now, "worker lost, queued again, alone", request.id, crew.name)
            for request in gone.again:
                self._journal.record(now, "worker gone, queued again", request.id, crew.name)
        for request, error in gone.failed:
            self._transit.fail(now, request, error)
        return gone.is_guilty

    # -- what to do

    def poll(self, now: float) -> Todo:
        todo = self._todo
        has_slo = False
        for flow in self.flows:
            if flow.slo_s < inf:
                has_slo = True
                late_at = flow.refuse_unserved(now)
                if late_at < todo.wake_at:
                    todo.wake_at = late_at
        if self._line:
            self._poll_line(now)
        else:
            self._poll_graph(now)
        for crew in self.crews:
            if crew.places.leaving:
                drained = [(crew.lobby.stage, place) for place in crew.take_drained()]
                todo.drained += drained
                if drained and has_slo and not crew.has_worker:
                    return self.poll(now)  # what waits for this stage is refused when it is late, from now on
        for crew in self.crews:
            lobby = crew.lobby
            if lobby.attention_at < todo.wake_at:
                todo.wake_at = lobby.attention_at
            if lobby.wake_at is not None and lobby.wake_at < todo.wake_at:
                todo.wake_at = lobby.wake_at
            places = crew.places
            if places.lent:
                are_needed = self._has_closed or (crew.queue.count and not places.idle)
                back = places.lent if are_needed else places.lent & places.leaving
                todo.recall = [*todo.recall, *[(lobby.stage, place) for place in back]]
        for door in self.doors:
            if door.queue.count:
                todo.wake_at = min(todo.wake_at, door.queue.earliest_deadline)
        transit = self._transit
        todo.answer, transit.answers = transit.answers, todo.answer
        self._todo = Todo()
        return todo

    @property
    def has_untold_answers(self) -> bool:
        """Whether requests have been answered that no poll has handed out yet."""
        return bool(self._transit.answers)

    def collect_answers(self) -> list[Request]:
        transit = self._transit
        answers, transit.answers = transit.answers, []
        return answers

    def _poll_line(self, now: float) -> None:
        onward_s = 0.0
        for crew, node in self._line:
            crew.lobby.view.onward_s = onward_s
            self._poll_stage(now, crew, node)
            if not node.is_first:
                onward_s += node.expected_s(now)
        door = self.flow.doors[0].queue
        if door.count:
            self._expire_at_doors(now)
        if self._has_closed:
            self._poll_last_calls(now)
        first, node = self._line[-1]
        while door.count and self.flow.fill(now) and first.idle:
            self._poll_stage(now, first, node)
            if self._has_closed:
                self._poll_last_calls(now)

    def _poll_graph(self, now: float) -> None:
        for flow in self.flows:
            flow.graph.look_ahead(now)
        for crew in self._order:
            crew.lobby.view.onward_s = min([node.onward_s for node in crew.lobby.nodes])
        self._expire_at_doors(now)
        for crew in self._order:  # before any stage is asked, since those that expire while they run leave room
            if now >= crew.lobby.attention_at:
                self._attend(now, crew)
        has_moved = True
        while has_moved:
            before, polled = [crew.queue.count for crew in self._order], []
            for crew in self._order:
                self._poll_stage(now, crew, crew.lobby.nodes[0])
                polled.append(crew.queue.count)
            if self._has_closed:
                self._poll_last_calls(now)
            # Not their sum: where an error is a value, one that expires here waits elsewhere.
            has_moved = not before == polled == [crew.queue.count for crew in self._order]
            for each in self._lists:
                has_moved = self._let_in(now, each) or has_moved
            for flow in self.flows:
                has_moved = flow.fill(now) or has_moved

    def _let_in(self, now: float, each: Each) -> bool:
        """Let items of a list in at its door while there is room; report whether any came in."""
        queue, before = each.door.queue, each.door.queue.count
        while queue.count and each.door.has_room():
            (child,) = queue.take(1, now)
            self._transit.let_in(now, child, each)
        return queue.count < before

    def _expire_at_doors(self, now: float) -> None:
        for door in self.doors:
            for request in door.queue.expired(now):
                if request.state == QUEUED:  # else a sibling has just expired
                    door.queue.remove(request)
                    self._transit.expire(now, request)

    def _poll_last_calls(self, now: float) -> None:
        """Ask each stage once more whose queue nothing can join any more, since this poll began."""
        for crew in reversed(self._order):  # the last that could has just expired, or was refused
            if crew.queue.count and not crew.lobby.closing and self._is_last_call(crew):
                self._poll_stage(now, crew, crew.lobby.nodes[0])

    def _poll_stage(self, now: float, crew: Crew, node: Node) -> None:
        todo, lobby, journal = self._todo, crew.lobby, self._journal
        if now >= lobby.attention_at:
            self._attend(now, crew)
        if self._has_closed:
            lobby.closing = self._is_last_call(crew)
        behind = node.behind
        if node.is_shared or node.is_last:  # the crew asks each of its nodes; or answers need no room
            room = inf
        elif behind is not None and not node.is_held:  # in a line: as below, with fewer calls
            room = behind.max_size - behind.count if behind.nbytes < behind.max_bytes else 0
        else:
            room = node.room() + crew.running
        dropped: list[tuple[Request, str]] = []
        if journal is None:
            crew.poll(now, room, todo, dropped)
        else:
            n_run, n_orders = len(todo.run), len(todo.orders)
            crew.poll(now, room, todo, dropped)
            record_batches(journal, now, crew.name, todo.run[n_run:])
            record_orders(journal, now, crew.name, todo.orders[n_orders:])
        if dropped:
            self._drop(now, dropped)

    def _drop(self, now: float, dropped: list[tuple[Request, str]]) -> None:
        if len(self.flows) == 1:
            self.flow.drop(now, dropped)
            return
        for flow in self.flows:
            if of_flow := [(request, why) for request, why in dropped if request.node.flow is flow]:
                flow.drop(now, of_flow)

    def _attend(self, now: float, crew: Crew) -> None:
        expired, hung = crew.attend(now)
        for request, started, hint in expired:
            self._transit.expire(now, request, started, hint)
        self._todo.kill += [(crew.lobby.stage, place) for place in hung]

    def _is_last_call(self, crew: Crew) -> bool:
        """Report whether all that can ever join a stage's queue is in it.

        It is asked only once new requests are refused (`Flow.closed_because`).
        """
        if any(node.flow.closed_because is None or node.flow.lets_in for node in crew.lobby.nodes):
            return False
        if any(each.door.queue.count for each in self._lists):
            return False
        return not any(one.queue.count or one.owed for one in self._before[crew])


def _all_before(flows: Sequence[Flow]) -> dict[Crew, set[Crew]]:
    follows: dict[Crew, set[Crew]] = {}
    for flow in flows:
        for node in flow.graph.nodes:
            follows.setdefault(node.crew, set()).update([other.crew for other in all_after(node)])
    before: dict[Crew, set[Crew]] = {crew: set() for crew in follows}
    for crew, following in follows.items():
        reached = set(following)
        found = list(reached)
        while found:
            new = follows[found.pop()] - reached
            reached |= new
            found += new
        for other in reached - {crew}:
            before[other].add(crew)
    return before
