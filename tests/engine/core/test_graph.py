"""What graphs do, each thing once: forks with a join, switches, early ends, lists, stages with several nodes."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from itertools import count
from math import inf
from typing import Any

import pytest

from carpool.engine.core.batch import DONE_EARLY, Batch, Reply
from carpool.engine.core.batcher import Batcher
from carpool.engine.core.core import Core
from carpool.engine.core.flow import Flow
from carpool.engine.core.graph import Declared, Each, Fork, Switch
from carpool.engine.core.levels import BY_KEY
from carpool.engine.core.queue import Queue
from carpool.engine.core.running_set import SetReport
from carpool.engine.core.stepper import Stepper
from carpool.engine.policy import Adaptive, Greedy, Static
from carpool.engine.policy.steps import GreedySteps
from carpool.engine.request import Request, Stream
from carpool.errors import DeadlineExceeded, ModelError, Overloaded
from tests.support.pipelines import Listed, together
from tests.support.shapes import Early
from tests.support.steps import StubWorker, part_of


def stage(name: str, limit: int = 4, max_size: float = inf, **settings: Any) -> Batcher:
    return Batcher(name, Greedy(limit), Queue(max_size), **settings)


class Caller:
    """Notes its parts, and when it was told."""

    def __init__(self) -> None:
        self.parts: list[object] = []
        self.told_at = -1.0

    def take_part(self, request: Request, part: object) -> None:
        self.parts.append(part)

    def answered(self, request: Request) -> None:
        assert self.told_at < 0


class Named(tuple[str, Any]):
    """A result, and the way that it names."""


class World:
    """Stages that append their names to their items, with one worker each, and 1 s a batch, in virtual time."""

    def __init__(
        self,
        *crews: Any,
        serves: Sequence[Declared] | None = None,
        compute: Callable[[int, Any], Any] | None = None,
        costs: Sequence[float] | None = None,
    ) -> None:
        first, *others = [list(crews)] if serves is None else serves
        self.core = Core(crews, first)
        self.flows = [self.core.flow, *[self.core.serve(other) for other in others]]
        self.names = [crew.name for crew in crews]
        self.compute = compute or self.append
        self.costs = costs or [1.0] * len(crews)
        self.now = 0.0
        self.batches: list[Batch] = []
        self.running: dict[tuple[int, int], Batch] = {}
        self.answers: list[Request] = []
        self.stubs: dict[int, StubWorker] = {}
        self._events: list[tuple[float, int, Callable[[], object]]] = []
        self._numbers = count()
        for index, crew in enumerate(crews):
            self.core.worker_ready(index, 0)
            if isinstance(crew, Stepper):
                self.stubs[index] = StubWorker(0, crew.rows, stage=index)

    def append(self, stage: int, item: Any) -> Any:
        return f"{item}{self.names[stage]}"

    def submit(self, flow: Flow, item: Any, timeout_s: float = inf, *, patient: bool = False, **more: Any) -> Request:
        request = Request(item, self.now + timeout_s, more.get("caller") or Caller())
        request.patient, request.stream = patient, more.get("stream")
        flow.submit(self.now, [request])
        self.poll()
        return request

    def ask(self, flow: Flow, item: Any, **settings: Any) -> Any:
        """What a request comes to."""
        request = self.submit(flow, item, **settings)
        self.run()
        return request.result if request.error is None else request.error

    def at(self, when: float, happens: Callable[[], object]) -> None:
        heapq.heappush(self._events, (when, next(self._numbers), happens))

    def poll(self) -> None:
        todo = self.core.poll(self.now)
        for batch in todo.run:
            self.batches.append(batch)
            self.running[batch.stage, batch.place] = batch
            self.at(self.now + self.costs[batch.stage], lambda batch=batch: self._reply(batch))  # type: ignore[misc]
        for request, part in todo.parts:
            request.tell_part(part)
        for order in todo.orders:
            stub = self.stubs[order.stage]
            stub.inbox.append(order)
            self.at(self.now, lambda stub=stub: self._step(stub))  # type: ignore[misc]
        self.answers += todo.answer
        for request in todo.answer:
            request.tell()
            if isinstance(request.caller, Caller):
                request.caller.told_at = self.now
        if todo.wake_at < inf:
            self.at(todo.wake_at, lambda: None)

    def run(self, until: float = inf) -> None:
        while self._events and self._events[0][0] <= until:
            self.now = max(self.now, self._events[0][0])
            while self._events and self._events[0][0] <= self.now:
                heapq.heappop(self._events)[2]()
            self.poll()

    def lose(self, stage: int) -> None:
        """The stage's worker dies, and another is there at once."""
        del self.running[stage, 0]
        self.core.worker_lost(self.now, stage, 0)
        self.core.worker_ready(stage, 0)

    def _reply(self, batch: Batch) -> None:
        if self.running.get((batch.stage, batch.place)) is not batch:
            return
        del self.running[batch.stage, batch.place]
        made = [self.compute(batch.stage, request.item) for request in batch.requests]
        errors: dict[int, Exception] = {i: each for i, each in enumerate(made) if isinstance(each, Exception)}
        turns: dict[int, object] = {i: DONE_EARLY for i, each in enumerate(made) if isinstance(each, Early)}
        turns |= {i: each[0] for i, each in enumerate(made) if isinstance(each, Named)}
        results = [
            each.value if isinstance(each, Early) else each[1] if isinstance(each, Named) else each for each in made
        ]
        at = batch.stage, batch.place, batch.id, batch.ids
        self.core.completed(self.now, Reply(*at, results, errors or None, 0.9, turns=turns or None))

    def _step(self, stub: StubWorker) -> None:
        """A worker makes a step: the third part of each stream is its last."""
        stub.follow()
        if stub.active:
            report = stub.step(lambda state: part_of(state, last=state.made == 2), step_s=0.1)
        else:
            stub.stopped = True
            report = SetReport(stub.stage, stub.place, stub.seen, True)
        self.core.reported(self.now, report)
        if not stub.stopped:
            self.at(self.now + 0.1, lambda: self._step(stub))

    def check_empty(self) -> None:
        """Nothing is left behind."""
        assert not self.core._transit.families
        for crew in self.core.crews:
            assert not crew.queue.count and not crew.running
        assert not self.core.waiting and not self.core.unanswered
        assert not any(block.running for flow in self.flows for block in flow.graph.blocks)


def test_the_branches_of_a_fork_answer_in_the_time_of_the_slowest() -> None:
    """A request that forks comes to a tuple, or to a mapping, of what its branches come to."""
    a, b, c, d = (stage(name) for name in "abcd")
    world = World(a, b, c, d, serves=[[a, Fork([b, [c, d]])], Fork([b, c], names=("one", "two"))])
    tuples, mappings = world.flows
    assert world.ask(tuples, "x") == ("xab", "xacd")
    assert world.now == 3.0
    assert world.ask(mappings, "x") == {"one": "xb", "two": "xc"}
    world.check_empty()


def test_what_follows_a_join_gets_what_all_branches_have_come_to() -> None:
    """Forks nest, and a branch may be empty."""
    a, b, c, d = (stage(name) for name in "abcd")
    world = World(a, b, c, d, serves=[[Fork([[a, Fork([b, c])], []]), d]])
    assert world.ask(world.core.flow, "x") == "(('xab', 'xac'), 'x')d"
    world.check_empty()


def test_a_way_is_chosen_by_the_item() -> None:
    """A switch that comes first asks for the way before a request is admitted."""
    a, b, c = (stage(name) for name in "abc")
    world = World(a, b, c, serves=[[Switch({"b": b, "c": [c, a]}, lambda x: x[0])]])
    assert [world.ask(world.core.flow, x) for x in ("b", "c")] == ["bb", "cca"]
    error = world.ask(world.core.flow, "d")
    assert isinstance(error, ModelError) and str(error) == "there is no branch 'd'; there are 'b', 'c'"
    assert world.core.flow.refused == 1
    world.check_empty()


def test_a_way_is_named_by_the_stage_before() -> None:
    """A result takes the way that it names; one that names none, or one that there is not, fails."""
    a, b, c = (stage(name) for name in "abc")
    ways = {"b": b, "c": list[Any]()}

    def compute(stage: int, x: Any) -> Any:
        return (Named((x, "went ")) if x else "lost") if stage == 0 else f"{x}{'abc'[stage]}"

    world = World(a, b, c, serves=[[a, Switch(ways), c]], compute=compute)
    assert [world.ask(world.core.flow, x) for x in ("b", "c")] == ["went bc", "went c"]
    assert str(world.ask(world.core.flow, "d")) == "there is no branch 'd'; there are 'b', 'c'"
    assert str(world.ask(world.core.flow, "")) == "no branch was named, and Route has no choose=; there are 'b', 'c'"
    world.check_empty()


def test_a_result_that_names_a_way_where_none_is_fails() -> None:
    """It is no other stage's item."""
    a, b = stage("a"), stage("b")
    world = World(a, b, compute=lambda stage, x: Named(("way", x)))
    assert str(world.ask(world.core.flow, "x")) == "a result names 'way' as its branch, and no Route follows"


@pytest.mark.parametrize("raises", [ValueError("odd"), KeyError("k")])
def test_a_choice_that_raises_fails_its_request(raises: Exception) -> None:
    """Of all requests only this one."""

    def choose(x: Any) -> str:
        if x == "bad":
            raise raises
        return "b"

    a, b = stage("a"), stage("b")
    world = World(a, b, serves=[[a, Switch({"b": b}, choose)]], compute=lambda stage, x: x)
    error = world.ask(world.core.flow, "bad")
    assert isinstance(error, ModelError) and str(error).startswith(
        f"choose= of the Route to 'b' raised {type(raises).__name__}"
    )
    assert world.ask(world.core.flow, "good") == "good"


def test_an_early_end_answers_a_request_wherever_it_is() -> None:
    """Its other branches are ended, and nothing follows."""
    a, b, c, d = (stage(name) for name in "abcd")

    def compute(stage: int, x: Any) -> Any:
        return Early("sure") if (stage, x) == (1, "xa") else f"{x}{'abcd'[stage]}"

    world = World(a, b, c, d, serves=[[a, Fork([b, [c, d]]), d]], compute=compute)
    assert world.ask(world.core.flow, "x") == "sure"
    world.check_empty()
    assert all(batch.stage != 3 for batch in world.batches)
    assert world.ask(world.core.flow, "y") == "('yab', 'yacd')d"


def test_each_item_of_a_list_goes_through_the_body() -> None:
    """In batches with those of others, and no more at a time than there is room for."""
    detect, classify, write = stage("detect"), stage("classify", 2, 2), stage("write")

    def compute(stage: int, x: Any) -> Any:
        return (x.split() if isinstance(x, str) else x) if stage == 0 else f"{x}!" if stage == 1 else x

    world = World(detect, classify, write, serves=[[detect, Each(classify), write]], compute=compute)
    assert world.ask(world.core.flow, "a b c d e") == ["a!", "b!", "c!", "d!", "e!"]
    assert [len(batch) for batch in world.batches] == [1, 2, 2, 1, 1]
    assert world.ask(world.core.flow, "") == []
    assert str(world.ask(world.core.flow, 7)) == "ForEach takes a list, and has been given int"
    world.check_empty()


def test_a_stage_in_two_services_mixes_their_requests() -> None:
    """Requests of all nodes of a stage share batches, and each goes on as its own service says."""
    a, b, shared = stage("a"), stage("b"), stage("s")
    world = World(a, b, shared, serves=[[a, shared], [b, shared, b]])
    one, two = world.flows
    requests = [world.submit(flow, x) for flow, x in ((one, "x"), (two, "y"), (one, "z"))]
    world.run()
    assert [request.result for request in requests] == ["xas", "ybsb", "zas"]
    assert max(len(batch) for batch in world.batches if batch.stage == 2) == 2
    world.check_empty()


def test_a_stage_that_is_in_one_line_twice_does_not_stand_still() -> None:
    """Room is counted by node, and what has none is passed over."""
    s, b = stage("s", 2, 2), stage("b", 2, 2)
    world = World(s, b, serves=[[s, b, s]])
    requests = [world.submit(world.core.flow, "x", patient=True) for _ in range(20)]
    world.run()
    assert [request.result for request in requests] == ["xsbs"] * 20
    world.check_empty()


def test_the_first_error_answers_at_once_and_ends_the_siblings() -> None:
    """What a worker has of them is late, and nothing follows."""
    slow, bad, after = stage("slow"), stage("bad"), stage("after")
    world = World(
        slow,
        bad,
        after,
        serves=[[Fork([[slow, after], bad]), after]],
        costs=[10.0, 1.0, 1.0],
        compute=lambda stage, x: ModelError("boom") if stage == 1 else x,
    )
    caller = Caller()
    request = world.submit(world.core.flow, "x", caller=caller)
    world.run()
    assert str(request.error) == "boom" and caller.told_at == 1.0
    assert slow.late_results == 1 and not [batch for batch in world.batches if batch.stage == 2]
    world.check_empty()


def test_a_branch_whose_worker_dies_is_run_again_alone() -> None:
    """The other branch is not."""
    a, b = stage("a"), stage("b")
    world = World(a, b, serves=[Fork([a, b])])
    request = world.submit(world.core.flow, "x")
    world.at(0.5, lambda: world.lose(0))
    world.run()
    assert request.result == ("xa", "xb")
    assert [batch.stage for batch in world.batches] == [0, 1, 0]
    world.check_empty()


def test_the_text_of_a_deadline_has_the_branch_that_was_waited_for() -> None:
    """The time in branches is not that of the wait for what follows their join."""
    quick, slow, behind = stage("quick"), stage("slow"), stage("behind")
    world = World(quick, slow, behind, serves=[[Fork([[quick], [slow], []]), behind]], costs=[1.0, 3.0, 9.0])
    error = world.ask(world.core.flow, "x", timeout_s=5.0)
    assert isinstance(error, DeadlineExceeded)
    assert str(error) == (
        "no answer within 5.000 s: 0.000 s waiting for slow, 3.000 s in slow, 0.000 s waiting for behind, 2.000 s in"
        " behind"
    )


def test_one_deadline_for_all_branches() -> None:
    """The error says where the branch was that was not there in time."""
    a, b = stage("a"), stage("b")
    world = World(a, b, serves=[[Fork([a, b]), b]], costs=[5.0, 1.0])
    caller = Caller()
    error = world.ask(world.core.flow, "x", timeout_s=3.0, caller=caller)
    assert isinstance(error, DeadlineExceeded)
    assert str(error).startswith("no answer within 3.000 s: 0.000 s waiting for a, 3.000 s in a")
    assert caller.told_at == 3.0
    world.check_empty()


def test_the_time_at_the_door_of_a_list_is_named() -> None:
    """An item for which there was no room has waited for room."""
    a, b = stage("a"), stage("b", 1, 1)
    world = World(a, b, serves=[[a, Each(b)]], costs=[1.0, 2.0], compute=lambda stage, x: [1, 2, 3] if x == "x" else x)
    error = world.ask(world.core.flow, "x", timeout_s=2.0)
    text = "no answer within 2.000 s: 0.000 s waiting for a, 1.000 s in a, 1.000 s waiting for room in the queue"
    assert str(error) == text


def test_who_leaves_is_out_of_all_branches() -> None:
    """What waits is not run, and nobody is told."""
    a, b, c = stage("a", 1), stage("b", 1), stage("c")
    world = World(a, b, c, serves=[[Fork([[a, c], b])]])
    first, second = [world.submit(world.core.flow, x) for x in "xy"]
    world.at(0.5, lambda: [world.core.cancel(world.now, request) for request in (first, second)])
    world.run()
    assert world.answers == [] and world.core.flow.cancelled == 2
    assert [batch.stage for batch in world.batches] == [0, 1]
    world.check_empty()


def test_a_full_way_of_a_switch_that_comes_first_holds_back_no_other() -> None:
    """Each way has a door of its own; who is not patient is refused where there is no room."""
    slow, quick = stage("slow", 1, 1), stage("quick", 1, 1)
    world = World(slow, quick, serves=[[Switch({"slow": slow, "quick": quick}, lambda x: x)]], costs=[10.0, 1.0])
    flow = world.core.flow
    requests = [world.submit(flow, x, patient=x == "slow") for x in ("slow", "slow", "slow", "quick")]
    world.run(2.0)
    assert [request.result for request in requests] == [None, None, None, "quickquick"]
    impatient = world.submit(flow, "slow")
    assert isinstance(impatient.error, Overloaded) and impatient.error.reason == "queue_full"
    world.run()
    world.check_empty()


def test_a_lot_is_taken_in_only_if_there_is_room_on_all_of_its_ways() -> None:
    """It is admitted as a whole, or refused."""
    one, two = stage("one", 1, 2), stage("two", 1, 1)
    world = World(one, two, serves=[[Switch({"one": one, "two": two}, lambda x: x)]])
    flow = world.core.flow
    for _ in range(2):
        world.submit(flow, "two", patient=True)
    lot = [Listed(item, inf) for item in ("one", "two")]
    flow.submit(0.0, together(lot))
    assert all(isinstance(request.error, Overloaded) for request in lot)
    world.run()
    lot = [Listed(item, inf) for item in ("one", "two")]
    flow.submit(world.now, together(lot))
    world.poll()
    world.run()
    assert [request.result for request in lot] == ["oneone", "twotwo"]


@pytest.mark.parametrize(("room", "is_admitted"), [(3, True), (2, False)])
def test_a_lot_counts_at_each_node_with_what_comes_there(room: int, is_admitted: bool) -> None:
    """One of three requests goes through a fork, and all three need room at the stage that follows it."""
    once, after = stage("once", 4, 1), stage("after", 4, room)
    world = World(once, after, serves=[[Switch({"fork": Fork([once, []]), "direct": []}, lambda x: x), after]])
    world.compute = lambda stage, item: item
    lot = [Listed(item, inf) for item in ("direct", "fork", "direct")]
    world.core.flow.submit(0.0, together(lot))
    assert [isinstance(request.error, Overloaded) for request in lot] == [not is_admitted] * 3
    world.poll()
    world.run()
    if is_admitted:
        assert [request.result for request in lot] == ["direct", ("fork", "fork"), "direct"]
    world.check_empty()


def test_a_fork_waits_for_room_in_all_of_its_branches_and_behind_their_join() -> None:
    """Else each of several forks could have what another one needs."""
    a, b, after = stage("a", 4), stage("b", 1, 1), stage("after", 1, 1)
    world = World(a, b, after, serves=[[a, Fork([b, []]), after]], costs=[0.0, 1.0, 3.0])
    requests = [world.submit(world.core.flow, "x", patient=True) for _ in range(5)]
    world.run()
    assert [request.result for request in requests] == ["('xab', 'xa')after"] * 5
    assert all(len(batch) == 1 for batch in world.batches)
    world.check_empty()


def test_a_stream_may_end_a_way_and_is_collected_in_a_branch() -> None:
    """A caller that reads parts gets them by a way; of a branch the whole is joined."""
    a, steps = stage("a"), Stepper("steps", GreedySteps(4), Queue(), rows=4)
    world = World(a, steps, serves=[[a, Switch({"steps": steps}, lambda x: "steps")], [Fork([a, steps])]])
    routed, forked = world.flows
    caller = Caller()
    request = world.submit(routed, "x", caller=caller, stream=Stream())
    world.run()
    assert caller.parts == [0, 1, 2] and request.error is None
    assert world.ask(forked, "x") == ("xa", 3)
    world.check_empty()


def test_a_stage_that_answers_in_parts_must_be_the_last() -> None:
    """Nothing can follow parts."""
    a, steps = stage("a"), Stepper("steps", GreedySteps(4), Queue(), rows=4)
    with pytest.raises(ValueError, match="stage steps answers in parts, so it must be the last of its service"):
        Core([steps, a])


def test_time_ahead_is_that_of_the_longest_branch() -> None:
    """What policies hear of what comes after."""
    a, quick, slow, last = stage("a"), stage("quick"), stage("slow"), stage("last")
    world = World(a, quick, slow, last, serves=[[a, Fork([quick, slow]), last]], costs=[1.0, 2.0, 8.0, 4.0])
    world.ask(world.core.flow, "x")
    world.poll()
    by_name = {node.name: node for node in world.core.flow.graph.nodes}
    assert [round(by_name[name].onward_s, 6) for name in ("a", "quick", "slow", "last")] == [12.0, 4.0, 4.0, 0.0]


@pytest.mark.parametrize("policy", [Greedy, Static, Adaptive])
def test_keys_and_policies_work_on_a_shared_stage(policy: Any) -> None:
    """With the requests of several nodes as with those of one."""
    shared = Batcher("s", policy(4), Queue(levels=BY_KEY), weigh=lambda request, item: None)
    a = stage("a")
    world = World(a, shared, serves=[[a, shared], [shared]])
    requests = [world.submit(flow, "x") for flow in world.flows for _ in range(5)]
    world.run()
    assert [request.result for request in requests] == ["xas"] * 5 + ["xs"] * 5
    world.check_empty()


def test_a_service_is_late_only_where_no_way_has_a_worker() -> None:
    """By an SLO a request is refused while a stage that it must pass has no worker; a switch has other ways."""
    a, b, c = stage("a"), stage("b"), stage("c")
    core = Core([a, b, c], [a, Switch({"b": b, "c": c})], slo_s=2.0)
    core.worker_ready(1, 0)
    (refused,) = requests = [Request("x", inf)]
    refused.patient = True
    core.flow.submit(0.0, requests)
    core.poll(0.0)
    assert core.poll(3.0).answer == [refused]
    assert isinstance(refused.error, Overloaded) and refused.error.reason == "slo"


def test_an_error_is_the_value_of_its_branch() -> None:
    """What a model raises in a branch, also within a fork that does not keep errors, is what the branch comes to."""
    bad, good, after = stage("bad"), stage("good"), stage("after")
    world = World(
        bad,
        good,
        after,
        serves=[[Fork([Fork([bad, good]), [good], bad], keeps_errors=True), after]],
        compute=lambda stage, x: ModelError("boom") if stage == 0 else x,
    )
    inner, item, direct = world.ask(world.core.flow, "x")
    assert item == "x" and str(inner) == str(direct) == "boom"
    world.check_empty()


def test_an_error_is_the_value_of_the_last_branch_at_the_end_of_a_service() -> None:
    bad = stage("bad")
    world = World(bad, serves=[Fork([bad, []], ("a", "b"), keeps_errors=True)], compute=lambda *_: ModelError("boom"))
    found = world.ask(world.core.flow, "x")
    assert (str(found["a"]), found["b"]) == ("boom", "x")
    world.check_empty()


def test_a_deadline_is_no_value() -> None:
    a, b = stage("a"), stage("b")
    world = World(a, b, serves=[[Fork([a, b], keeps_errors=True), b]], costs=[5.0, 1.0])
    assert isinstance(world.ask(world.core.flow, "x", timeout_s=3.0), DeadlineExceeded)
    world.check_empty()


def test_a_lost_worker_is_a_value_and_its_siblings_go_on() -> None:
    a, b = stage("a", idempotent=False), stage("b")
    world = World(a, b, serves=[Fork([a, b], keeps_errors=True)])
    request = world.submit(world.core.flow, "x")
    world.at(0.5, lambda: world.lose(0))
    world.run()
    lost, result = request.result  # type: ignore[misc]
    assert lost.code == "worker_lost" and result == "xb"
    world.check_empty()


def test_a_full_way_refuses_its_own_and_holds_back_no_other() -> None:
    """The stage before goes on; what finds no place is told so, and may try again."""
    first, slow, quick = stage("first", 8), stage("slow", 1, max_size=1), stage("quick", 8)
    ways = Switch({"s": slow, "q": quick}, lambda x: x[0], refuses=True)
    world = World(first, slow, quick, serves=[[first, ways]], costs=[1.0, 100.0, 1.0], compute=lambda stage, x: x)
    requests = [world.submit(world.core.flow, x) for x in ("s1", "q1", "s2", "s3", "q2", "s4")]
    world.run(until=10.0)
    assert [request.result for request in requests if request.result] == ["q1", "q2"]
    errors = [request.error for request in requests if request.error is not None]
    assert {type(error) for error in errors} == {Overloaded}
    assert len(errors) == 2  # one runs, and one waits
    assert all(error.reason == "queue_full" and error.retry_after_s for error in errors)  # type: ignore[attr-defined]
    world.run()
    world.check_empty()


def test_a_way_at_the_beginning_that_refuses_does_not_let_its_callers_wait() -> None:
    slow, quick = stage("slow", 1, max_size=1), stage("quick")
    ways = Switch({"s": slow, "q": quick}, lambda x: x[0], refuses=True)
    world = World(slow, quick, serves=[ways], costs=[100.0, 1.0])
    requests = [world.submit(world.core.flow, x, patient=True) for x in ("s", "s", "s", "q")]
    assert [isinstance(request.error, Overloaded) for request in requests] == [False, False, True, False]
    world.run()
    assert requests[3].result == "qquick"
    world.check_empty()


@pytest.mark.parametrize("before", ["", "f"])
def test_a_graph_is_held_at_its_doors(before: str) -> None:
    """Nothing new begins until those inside are answered; who comes waits, also if it would not wait for room,
    and where the graph begins with a stage that is idle.
    """
    first, a, b = stage("f"), stage("a"), stage("b")
    graph: list[Declared] = [Fork([a, b])]
    world = World(first, a, b, serves=[[first, *graph] if before else graph], costs=[1.0, 1.0, 3.0])
    inside = world.submit(world.core.flow, "x")
    world.core.hold(True)
    comes = [world.submit(world.core.flow, "y"), world.submit(world.core.flow, "z", patient=True)]
    world.run(until=2.0)
    assert not world.core.is_empty_behind_queue and not inside.result
    world.run(until=6.0)
    assert inside.result and world.core.is_empty_behind_queue and not any(request.result for request in comes)
    world.core.hold(False)
    world.poll()
    world.run()
    assert [request.result for request in comes] == [(f"{x}{before}a", f"{x}{before}b") for x in "yz"]
    world.check_empty()


def test_a_list_has_at_most_so_many_items() -> None:
    a = stage("a")
    world = World(a, serves=[Each(a, 2)], compute=lambda stage, x: x)
    assert world.ask(world.core.flow, ["x", "y"]) == ["x", "y"]
    error = world.ask(world.core.flow, ["x", "y", "z"])
    assert isinstance(error, ModelError) and "has 3 items, and max_items is 2" in str(error)
    world.check_empty()
