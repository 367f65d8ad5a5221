"""The core: the stages and services that one driver drives.

Events go in (`Flow.submit`, `cancel`, `completed`, `worker_ready`, `worker_lost` and others),
`poll` says what to do next. The invariants:

* every request gets exactly one answer, even if it is refused, unless its caller has cancelled it:
  `DONE` is entered once, and `core/transit.py` hands the request out;
* an error in any stage goes straight back to its caller;
* only the doors of a service refuse (`core/flow.py`); behind them nodes give room to each other: a
  batch goes to a worker only when there is room for its results (`core/graph.py`);
* late stages are asked first, so that the room they make can be used in the same poll;
* whatever a policy raises, its stage goes on without it (`core/stage_requests.py`); `abort` answers
  all that are inside.

What becomes of results stands in `core/transit.py`. Requests that may have killed their worker are
suspects (`core/quarantine.py`); what the worker cannot have looked at waits again as if it had not
been taken. A stream goes on only where its model can resume it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Sequence
from math import inf

from carpool.core.batch import Batch
from carpool.core.batcher import Batcher
from carpool.core.flow import Flow
from carpool.core.graph import Declared, Door, Each, Node, all_after
from carpool.core.journal import Journal, parts_so_far
from carpool.core.quarantine import MOST_LOSSES, lost_with
from carpool.core.reply import Reply
from carpool.core.running_set import Order, Part, SetReport, stream_of
from carpool.core.stepper import Stepper
from carpool.core.todo import StepTodo, Todo
from carpool.core.transit import Moves, Transit
from carpool.core.work_journal import record_batch, record_orders, record_report
from carpool.errors import CarpoolError, Unavailable
from carpool.request import DONE, NEW, QUEUED, RUNNING, Request


class Core:
    """The stages of one driver, and its services.

    Args:
        batchers: Of the stages; their order is the numbers of the stages.
        declared: What the graph of the first service is made of; a line of all stages if it is not
            given.
        slo_s: As for `Flow`, of the first service.
        measure: Likewise.
        journal: Records what happens to each request, if given.

    Attributes:
        batchers: As given.
        stepper: The last of them, if it is one of steps; else None.
        flows: The services.
        flow: The first of them.
        doors: The requests that wait for room outside of all queues.
    """

    def __init__(
        self,
        batchers: Sequence[Batcher],
        declared: Declared | None = None,
        *,
        slo_s: float | None = None,
        measure: Callable[[object], int] = lambda result: 0,
        journal: Journal | None = None,
    ) -> None:
        self.batchers = tuple(batchers)
        last = self.batchers[-1]
        self.stepper = last if isinstance(last, Stepper) else None
        self._steppers = [batcher for batcher in self.batchers if isinstance(batcher, Stepper)]
        self._journal = journal
        self._transit = Transit(journal)
        self._is_held = self._has_closed = False
        self._new_todo = StepTodo if self._steppers else Todo
        self._todo = self._new_todo()
        self._parts: list[tuple[Request, object]] = []
        self.flows: list[Flow] = []
        self.doors: list[Door] = []
        self._lists: list[Each] = []
        for stage, batcher in enumerate(self.batchers):
            batcher.stage = stage
            batcher.nodes = []
        self.flow = self.serve(list(batchers) if declared is None else declared, slo_s=slo_s, measure=measure)

    def __repr__(self) -> str:
        between = " -> " if self._line else ", "
        return f"<Core {between.join(map(repr, self.batchers))}>"

    def serve(
        self,
        declared: Declared,
        *,
        slo_s: float | None = None,
        measure: Callable[[object], int] = lambda result: 0,
    ) -> Flow:
        """Add a service over the stages, and return it; nothing may wait in them yet.

        Args:
            declared: What its graph is made of.
            slo_s: As for `Flow`.
            measure: Likewise.

        Raises:
            ValueError: There could never be room for what a stage makes, or a stage that answers in
                parts is not the last one.
        """
        flow = Flow(declared, self._transit, slo_s=slo_s, measure=measure)
        for node in flow.graph.nodes:
            if isinstance(node.crew, Stepper) and (node.needs or node.doors):
                text = f"stage {node.name} answers in parts, so it must be the last of its service, or of its branch"
                raise ValueError(text)
            node.crew.nodes.append(node)
        self.flows.append(flow)
        self._lists += [block for block in flow.graph.blocks if isinstance(block, Each)]
        self.doors += [*flow.doors, *[block.door for block in flow.graph.blocks if isinstance(block, Each)]]
        for batcher in self.batchers:
            if len(batcher.nodes) > 1:
                batcher.queue.count_by_source()
        for each_flow in self.flows:
            for node in each_flow.graph.nodes:
                node.settle()
        for batcher in self.batchers:
            batcher.next_max_size = batcher.nodes[0].most_room if len(batcher.nodes) == 1 else inf
        self._order = _late_first(self.flows)
        self._before = _all_before(self.flows)
        # by stage, the service whose answers all its results are; None where they are not
        self._ends = [
            batcher.nodes[0].flow if len(batcher.nodes) == 1 and batcher.nodes[0].is_last else None
            for batcher in self.batchers
        ]
        # of a single line the stages, the last one first, each with its node; else empty
        is_line = len(self.flows) == 1 and all(node.is_in_line for node in flow.graph.nodes)
        self._line = [(batcher, batcher.nodes[0]) for batcher in self._order] if is_line else []
        return flow

    @property
    def waiting(self) -> int:
        """How many requests are in queues and at doors; the children of a request count as such."""
        waiting = 0
        for door in self.doors:
            waiting += door.queue.count
        for batcher in self.batchers:
            waiting += batcher.queue.count
        return waiting

    @property
    def unanswered(self) -> int:
        """How many callers of admitted requests still wait."""
        return sum([flow.unanswered for flow in self.flows])

    def offered(self, stage: int) -> int:
        """Return how many requests have come to a stage so far, those refused included."""
        batcher = self.batchers[stage]
        first = {node.flow for node in batcher.nodes if node.is_first}
        at_doors: int = sum([flow.refused + flow.alone for flow in first])
        return batcher.entered + at_doors

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
        """Note that a caller has all that it wants of a stream: its answer is complete."""
        if request.state in (QUEUED, RUNNING):
            self._transit.withdraw(now, request)
            self._transit.answer(now, request)

    def pause(self, now: float, request: Request, is_paused: bool) -> None:
        """Note that a caller wants no more parts for now, or wants them again.

        It is for requests that have a stream, and has no effect before they get to the stage that
        makes it.
        """
        stream, node = request.stream, request.node
        if not self._steppers or request.state not in (QUEUED, RUNNING):
            return
        if stream is None or stream.is_paused == is_paused:
            return
        name = ""
        if type(node) is Node and isinstance(node.crew, Stepper):
            name = node.name
            node.crew.pause(now, request, is_paused)
        else:
            stream.is_paused = is_paused
        if self._journal is not None:
            self._journal.record(now, "paused" if is_paused else "goes on", request.id, name)

    def went_alone(self, began: float, now: float, busy_s: float, ok: bool) -> None:
        """Note that a lone request, which `Batcher.lets_go` let run without `submit`, was answered.

        It can only be a service of one stage.
        """
        self.flow.went_alone(ok)
        self.batchers[0].went_alone(began, now, busy_s, ok)

    def take_over(self, now: float, request: Request) -> Batch:
        """Make a batch of a lone request that a worker has had since `now`, and return it.

        `Batcher.lets_go` allowed it, and the worker is the one at `Batcher.lone_place`. It can only
        be a service of one stage.
        """
        self.flow.admit_lone(now, request)
        return self.batchers[0].start_lone(now)

    def close(self, error: CarpoolError) -> None:
        """Refuse new requests with `error` from now on; those inside go on.

        From the next poll on nothing is held back for company that cannot come.
        """
        self._has_closed = True
        for flow in self.flows:
            flow.closed_because = error

    def abort(self, now: float, error: CarpoolError) -> None:
        """Refuse new requests, and fail all that are inside."""
        self.close(error)
        fail = self._transit.fail
        for door in self.doors:
            for request in list(door.queue):
                if request.state == QUEUED:  # else a sibling has failed before
                    door.queue.remove(request)
                    fail(now, request, copy.copy(error))
        for batcher in self.batchers:
            for request in list(batcher.queue):
                if request.state == QUEUED:
                    batcher.queue.remove(request)
                    fail(now, request, copy.copy(error))
            for request in batcher.owed:
                if request.state == RUNNING:
                    batcher.abandon(now, request)
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
        batcher = self.batchers[stage]
        batch = batcher.in_flight.get(reply.place)
        if now >= batcher.attention_at and batch is not None and batch.id == reply.batch_id:
            for late in batch.expire(now):  # a driver that stood still has not polled
                self._transit.expire(now, late, batch.started)
        takers = batcher.completed(now, reply.place, reply.batch_id, ids, reply.busy_s, ok=not errors)
        flow = self._ends[stage]
        if errors is None and flow is not None and self._journal is None and reply.turns is None:
            batcher.late_results += self._transit.answer_all(flow, takers, results)
            return
        self._transit.sort_out(now, batcher, reply, takers, batch.started if batch is not None else None)

    def reported(self, now: float, report: SetReport) -> None:
        """Take what a worker of a stage of steps says after a step.

        The parts are handed on by the next poll, and so are the answers of requests that have
        ended. If the worker has stopped, that poll should come at once.

        Raises:
            ValueError: The worker breaks the protocol, or there is no such stage of steps; then
                nothing was done.
        """
        stepper = self.batchers[report.stage] if 0 <= report.stage < len(self.batchers) else None
        if not isinstance(stepper, Stepper):
            raise ValueError(f"stage {report.stage} is not one of steps")
        if now >= stepper.attention_at:  # a driver that stood still has not polled
            self._attend(now, stepper)
        returned = [] if self._journal is None else stepper.members_of(report.place, report.returned)
        parts, ended = stepper.reported(now, report)
        self._parts += parts
        if self._journal is not None:
            record_report(self._journal, now, stepper.name, [request for request, _ in parts], returned)
        moves: Moves = {}
        for request, part in ended:
            if request.state == RUNNING:  # else a sibling has failed in this very report
                self._end_stream(now, request, part, moves)
        if moves:
            self._transit.move(now, moves)

    def _end_stream(self, now: float, request: Request, part: Part, moves: Moves) -> None:
        """Answer a request whose stream has ended, as its worker says, or have its answer go on."""
        stream = stream_of(request)
        if part.error is not None:
            self._transit.fail(now, request, part.error)
        elif not request.node.is_last:
            request.stream = None
            self._transit.take_turn(now, request, part.value, None, stream.joined, moves)
        else:
            if stream.is_collected:
                request.result = part.value
            self._transit.answer(now, request)

    # -- workers that come and go

    def call_started(self, now: float, stage: int, place: int, batch_id: int) -> None:
        """Note that a worker which makes several calls for one batch has started the next one."""
        self.batchers[stage].call_started(now, place, batch_id)

    def trained(self, now: float, stage: int, n: int, size: int, busy_s: float, longest: int = 0) -> None:
        """Note that a warm-up has run `n` examples, with sizes summing to `size`, in `busy_s`.

        With `longest`, it was `n` times one example of that length.
        """
        self.batchers[stage].trained(now, n, size, busy_s, longest)

    def trained_steps(self, now: float, rows: int, step_s: float, length: int, start_s: float) -> None:
        """Note that a warm-up has made a step of `rows`, and has started `length` units of work.

        Args:
            now: The time.
            rows: How many streams were stepped.
            step_s: Seconds of the step.
            length: The sum of their lengths.
            start_s: Seconds of starting them.
        """
        if self.stepper is not None:
            self.stepper.trained_steps(now, rows, step_s, length, start_s)

    def drain(self, stage: int, place: int) -> None:
        """Let a worker get nothing more. It finishes what it has; then `Todo.drained` names it."""
        self.batchers[stage].drain(place)

    def hold(self, is_held: bool) -> None:
        """Have the stages at which requests begin start no batch for now, or go on.

        What comes waits in their queues, so the stages behind them run empty. It has no effect on
        those that have nothing behind them, and ends when the service closes.
        """
        self._is_held = is_held

    @property
    def is_empty_behind_queue(self) -> bool:
        """Whether no request is between its first queue and its answer, streams apart."""
        for batcher in self.batchers:
            if batcher.running and not isinstance(batcher, Stepper):
                return False
            if batcher.queue.count and any(node.queued and not node.is_first for node in batcher.nodes):
                return False
        return True

    def worker_ready(self, stage: int, place: int) -> None:
        """Note that a worker can take batches from now on."""
        self.batchers[stage].worker_ready(place)

    def worker_lost(self, now: float, stage: int, place: int, unsent: Collection[int] = ()) -> bool:
        """Note that a worker has died, or was killed because it hung or broke the protocol.

        What it owed is run once more, each request alone, so that one which kills workers is found
        and harms no other; it fails if it must not be run again, or was the only one that a worker
        had when this happened once more.

        Args:
            now: The time.
            stage: The position of the worker's stage.
            place: The position of the worker in it.
            unsent: Requests of its batch that it had not been sent yet, so that they wait again as
                if they had not been taken.

        Returns:
            Whether this death, and the one before it, are the fault of the only request that the
            worker had, and not the stage's.
        """
        batcher = self.batchers[stage]
        if isinstance(batcher, Stepper):
            return self._set_lost(now, batcher, place, unsent)
        batch = batcher.worker_lost(place)
        if batch is None:
            return False
        ahead = batcher.withdraw_ahead(place)
        untouched = [request for request in batch.requests if request.id in unsent]
        suspects = [request for request in batch.requests if request.id not in unsent]
        again = self._blame(now, batcher, suspects, batch.given_up)
        if again:
            batcher.quarantine(again)
        self._put_back(now, batcher, untouched, ahead)
        return batch.requests[0].losses >= MOST_LOSSES

    def worker_left(self, now: float, stage: int, place: int) -> None:
        """Note that a worker is gone, perhaps amid a batch, and that no request is to blame.

        The requests that it had wait again.
        """
        batcher = self.batchers[stage]
        if isinstance(batcher, Stepper):
            lost = batcher.worker_gone(place)
            if lost is not None:
                again = self._able_to_go_on(now, batcher, [*lost.blamed, *lost.resting])
                self._put_back(now, batcher, lost.untold, again)
            return
        batch = batcher.worker_lost(place)
        if batch is not None:
            self._put_back(now, batcher, batch.requests, batcher.withdraw_ahead(place))

    def _set_lost(self, now: float, stepper: Stepper, place: int, unsent: Collection[int]) -> bool:
        """Do what `worker_lost` promises for a worker of a stage of steps.

        Only those streams are to blame that it may have been stepping or starting.
        """
        lost = stepper.worker_gone(place, unsent)
        if lost is None:
            return False
        again = self._blame(now, stepper, lost.blamed, lost.given_up)
        for request in lost.blamed:
            if request.state == DONE:
                stepper.forget(stream_of(request))
        stepper.quarantine(again)
        self._put_back(now, stepper, lost.untold, self._able_to_go_on(now, stepper, lost.resting))
        if lost.suspect is None or lost.suspect.losses < MOST_LOSSES:
            return False
        if stream_of(lost.suspect).redo:
            stepper.shorten_probations()
        return True

    def _able_to_go_on(self, now: float, stepper: Stepper, requests: Sequence[Request]) -> list[Request]:
        """Return the streams of a worker that has gone which can run elsewhere; fail the others."""
        again: list[Request] = []
        for request in requests:
            if stepper.may_run_again(request):
                again.append(request)
            else:
                stepper.forget(stream_of(request))
                self._transit.fail(now, request, _lost_in_mid_stream(stepper.name))
        return again

    def _blame(self, now: float, batcher: Batcher, suspects: Sequence[Request], given_up: str) -> list[Request]:
        """Count a lost worker against the requests that it had, and fail those not to be run again.

        Returns:
            Those that are to be run again.
        """
        again: list[Request] = []
        for request in suspects:
            request.losses += 1
            if request.state != RUNNING:
                continue
            if request.losses < MOST_LOSSES and batcher.may_run_again(request):
                again.append(request)
                if self._journal is not None:
                    self._journal.record(now, "worker lost, queued again, alone", request.id, batcher.name)
            else:
                self._transit.fail(now, request, lost_with(request, batcher.name, given_up))
        return again

    def _put_back(self, now: float, batcher: Batcher, untouched: Sequence[Request], ahead: Sequence[Request]) -> None:
        """Let what a lost worker has not looked at wait again, as if it had not been taken.

        Args:
            now: The time.
            batcher: Of the worker's stage.
            untouched: Requests of its batch.
            ahead: Requests of its next batch.
        """
        again = [request for request in [*untouched, *ahead] if request.state == RUNNING]
        if self._journal is not None:
            for request in ahead:
                self._journal.record(now, "worker gone, queued again", request.id, batcher.name)
        batcher.put_back(now, again)

    # -- what to do

    def poll(self, now: float) -> Todo:
        """Return all there is to do now, because of what happened or because time has passed."""
        todo = self._todo
        for flow in self.flows:
            if flow.slo_s < inf:
                late_at = flow.refuse_unserved(now)
                if late_at < todo.wake_at:
                    todo.wake_at = late_at
        if self._line:
            self._poll_line(now)
        else:
            self._poll_graph(now)
        for batcher in self.batchers:
            if batcher.attention_at < todo.wake_at:
                todo.wake_at = batcher.attention_at
            if batcher.wake_at is not None and batcher.wake_at < todo.wake_at:
                todo.wake_at = batcher.wake_at
            if batcher.leaving:
                todo.drained = [*todo.drained, *[(batcher.stage, place) for place in batcher.take_drained()]]
        for door in self.doors:
            if door.queue.count:
                todo.wake_at = min(todo.wake_at, door.queue.earliest_deadline)
        transit = self._transit
        todo.answer, transit.answers = transit.answers, todo.answer
        if self._steppers:
            self._hand_out(now, todo)
        self._todo = self._new_todo()
        return todo

    @property
    def has_untold_answers(self) -> bool:
        """Whether requests have been answered that no poll has handed out yet."""
        return bool(self._transit.answers)

    def collect_answers(self) -> list[Request]:
        """Return the requests answered since the last poll, where nothing is to be done now."""
        return self._transit.collect()

    def _poll_line(self, now: float) -> None:
        """Ask the stages of a single line, late ones first."""
        onward_s = 0.0
        for batcher, node in self._line:
            batcher.view.onward_s = onward_s
            self._poll_stage(now, batcher, node)
            if not node.is_first:
                onward_s += batcher.expected_s(now)
        if self._has_closed:
            self._poll_last_calls(now)
        flow = self.flow
        if flow.doors[0].queue.count:
            self._expire_at_doors(now)
            first, node = self._line[-1]
            while flow.fill(now) and first.idle:
                self._poll_stage(now, first, node)

    def _poll_graph(self, now: float) -> None:
        """Ask all stages until nothing more can go: what one gives room for, another may use."""
        for flow in self.flows:
            flow.graph.look_ahead(lambda batcher: batcher.expected_s(now))
        for batcher in self._order:
            batcher.view.onward_s = min([node.onward_s for node in batcher.nodes])
            batcher.view.spare_s = min([node.spare_s for node in batcher.nodes])
        self._expire_at_doors(now)
        has_moved = True
        while has_moved:
            waiting = sum([batcher.queue.count for batcher in self._order])
            for batcher in self._order:
                self._poll_stage(now, batcher, batcher.nodes[0])
            if self._has_closed:
                self._poll_last_calls(now)
            has_moved = waiting != sum([batcher.queue.count for batcher in self._order])
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
        """Ask the stages once more of which the last that could join the queue has gone."""
        for batcher in reversed(self._order):  # it has just expired, or was refused
            if batcher.queue.count and not batcher.closing and self._is_last_call(batcher):
                self._poll_stage(now, batcher, batcher.nodes[0])

    def _poll_stage(self, now: float, batcher: Batcher, node: Node) -> None:
        """Ask one stage what to do.

        Args:
            now: The time.
            batcher: The stage's.
            node: Its only one, or the first of several.
        """
        if now >= batcher.attention_at:
            self._attend(now, batcher)
        if self._has_closed:
            batcher.closing = self._is_last_call(batcher)
        run = self._todo.run
        before = len(run)
        dropped: list[tuple[Request, str]] = []
        behind = node.behind
        if behind is not None and not self._is_held:
            room = behind.max_size - behind.count if behind.nbytes < behind.max_bytes else 0
            while (batch := batcher.next_batch(now, room - batcher.running, dropped)) is not None:
                run.append(batch)
        elif node.is_last and not node.is_shared:
            while (batch := batcher.next_batch(now, inf, dropped)) is not None:
                run.append(batch)
        elif node.is_shared:
            while (batch := batcher.next_batch(now, inf, dropped, self._rooms(batcher))) is not None:
                run.append(batch)
        else:
            while (batch := batcher.next_batch(now, self._room(node), dropped)) is not None:
                run.append(batch)
        if self._journal is not None:
            for batch in run[before:]:
                record_batch(self._journal, now, batcher.name, batch)
        if dropped:
            self._drop(now, dropped)

    def _room(self, node: Node) -> float:
        """Return how many requests may be handed to workers at a node."""
        if self._is_held and node.is_first and not node.is_last and node.flow.closed_because is None:
            return 0
        return node.room()

    def _rooms(self, batcher: Batcher) -> dict[Node, float]:
        return {node: self._room(node) for node in batcher.nodes}

    def _drop(self, now: float, dropped: list[tuple[Request, str]]) -> None:
        """End what policies have dropped."""
        if len(self.flows) == 1:
            self.flow.drop(now, dropped)
            return
        for flow in self.flows:
            if of_flow := [(request, why) for request, why in dropped if request.node.flow is flow]:
                flow.drop(now, of_flow)

    def _attend(self, now: float, batcher: Batcher) -> None:
        """End what has expired in a stage, and have its workers that hang killed."""
        expired, hung = batcher.attend(now)
        for request, started in expired:
            self._transit.expire(now, request, started, batcher.hint(now, request, started))
        self._todo.kill += [(batcher.stage, place) for place in hung]

    def _hand_out(self, now: float, todo: Todo) -> None:
        """Put orders and parts on the list of what a driver must do."""
        assert isinstance(todo, StepTodo)
        orders: list[Order] = []
        for stepper in self._steppers:
            own = stepper.take_orders()
            orders += own
            if self._journal is not None:
                record_orders(self._journal, now, stepper.name, own)
        todo.orders = orders
        todo.parts, self._parts = self._parts, []

    def _is_last_call(self, batcher: Batcher) -> bool:
        """Report whether all that can ever join a stage's queue is in it.

        It is asked only once new requests are refused (`Flow.closed_because`).
        """
        if any(node.flow.closed_because is None or node.flow.lets_in for node in batcher.nodes):
            return False
        if any(each.door.queue.count for each in self._lists):
            return False
        return not any(one.queue.count or one.is_wanted for one in self._before[batcher])


def _late_first(flows: Sequence[Flow]) -> list[Batcher]:
    """Return the batchers of some services, those first that come late."""
    found: dict[Batcher, None] = {}
    for flow in flows:
        for node in flow.graph.nodes:  # which are in this order
            found.setdefault(node.crew)
    return list(found)


def _all_before(flows: Sequence[Flow]) -> dict[Batcher, set[Batcher]]:
    """Return for each batcher those from which requests may come to it, also through others."""
    follows: dict[Batcher, set[Batcher]] = {}
    for flow in flows:
        for node in flow.graph.nodes:
            follows.setdefault(node.crew, set()).update([other.crew for other in all_after(node)])
    before: dict[Batcher, set[Batcher]] = {batcher: set() for batcher in follows}
    for batcher, following in follows.items():
        reached = set(following)
        found = list(reached)
        while found:
            new = follows[found.pop()] - reached
            reached |= new
            found += new
        for other in reached - {batcher}:
            before[other].add(batcher)
    return before


def _lost_in_mid_stream(stage: str) -> Unavailable:
    """Return the error of a stream whose worker was replaced, and which cannot go on elsewhere."""
    text = f"a worker of stage {stage} was replaced in the midst of this answer, and its model cannot resume it"
    return Unavailable(text, code="worker_lost")
