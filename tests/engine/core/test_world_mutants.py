"""Do the random worlds find what they look for? The core breaks one rule, and a world must notice.

A mutant is a function of the core in which some text stands in the place of another.
"""

from __future__ import annotations

import inspect
import sys
import textwrap
from collections.abc import Callable
from random import Random
from typing import Any, NamedTuple

import pytest

from carpool.engine.core.batcher import Batcher
from carpool.engine.core.core import Core
from carpool.engine.core.flow import Flow
from carpool.engine.core.graph import Door, Graph, Node, needs_of, with_room
from carpool.engine.core.lobby import Lobby
from carpool.engine.core.places import Places
from carpool.engine.core.transit import Transit
from tests.engine.core.schedules import a_graph, a_lending_line, a_line, a_tight_graph, throw

WORLDS = 1500
"""So many are tried until one notices; most mutants are found by one of the first twenty."""


class Change(NamedTuple):
    """A function, and what stands in it in the place of what."""

    function: Callable[..., Any]
    old: str
    new: str


MUTANTS: dict[str, list[Change]] = {
    "the room behind a join is taken at the end of each branch, not before the fork": [
        Change(needs_of, "[after.then, *after.branches]", "[*after.branches]"),
        Change(
            Graph.__init__,
            "for other in node.needs:",
            "if node.after is JOIN and node.name == 'stage': node.needs += needs_of(node.block.then)[0]\n"
            + 8 * " "
            + "for other in node.needs:",
        ),
    ],
    "what has no room behind it stands in the way of others of its stage": [
        Change(Batcher._visible, "if lane_queue.lane.source in shut]", "if next(iter(order)).lane.source in shut]")
    ],
    "room is counted by stage, not by node": [
        Change(Node.queued.fget, "queue.of_source(self)[0] if self.is_shared else queue.count", "queue.count")  # type: ignore[attr-defined]
    ],
    "a route that refuses lets in what there is no room for": [
        Change(Transit._go_on, "not _has_room(found.after, moves)", "False")
    ],
    "an error that is a value ends its request": [
        Change(Transit.fail, "family.block.keeps_errors and", "False and"),
    ],
    "an error that is a value does not count for its join": [
        Change(
            Transit._keep, "self._go_on(now, child, JOIN", "child.state = DONE if moves else DONE  # (now, child, JOIN"
        )
    ],
    "an error leaves the siblings alone": [Change(Transit._close, "self.withdraw(now, child)", "pass")],
    "a fork that has failed counts as open": [Change(Transit._close, "family.block.running -= 1", "pass")],
    "a fork takes room in the first of its branches only": [
        Change(needs_of, "*after.branches]", "*after.branches[:1]]")
    ],
    "a switch takes room in the last of its ways only": [
        Change(needs_of, "[*after.ways.values()]", "[*after.ways.values()][-1:]")
    ],
    "stages are asked once a poll": [Change(Core._poll_graph, "while has_moved:", "if has_moved:")],
    "an early answer leaves the branches alone": [
        Change(Transit._answer_early, "self._close(now, family)", "self.families.pop(request)")
    ],
    "who is at the door of a list stays there when its parent has gone": [
        Change(Transit.withdraw, "node.queue.remove(request)", "request.state = DONE")
    ],
    "items of lists come in at once, without a door": [Change(Core._let_in, " and each.door.has_room()", "")],
    "a batch from several nodes is cut by what each needs alone": [
        Change(with_room, "if all(left[node] >= 1 for node in needs):", "if True:")
    ],
    "who begins in the midst of a graph takes no account of those on their way there": [
        Change(Door.has_room, "node.places() < here", "node.crew.queue.max_size - node.queued < here")
    ],
    "nobody waits for those at the door of a list": [
        Change(Node.room, "if each.door.queue.count:", "if False:"),
        Change(Door.has_room, "if each.door.queue.count:", "if False:"),
    ],
    "open forks take no room behind their join": [Change(Graph.__init__, "other.sources.append(block)", "pass")],
    "what runs takes no room at the next node": [Change(Node.places, "taken += source.running", "pass")],
    "children are joined in the order in which they end": [
        Change(Transit._go_on, "[family.results[child] for child in family.children]", "[*family.results.values()]")
    ],
    "who has failed on the way waits at the next node": [
        Change(Transit.move, "[request for request in requests if request.state == RUNNING]", "requests")
    ],
    "who has left the door of a list goes on with the list": [
        Change(Transit.let_in, "child.item, None", "child.caller.parent.item, None")
    ],
    "a result that says where it goes is not asked": [
        Change(Transit.take_turn, "turn is DONE_EARLY", "turn is None and False")
    ],
    "only the first of several flows is closed": [
        Change(Core.close, "for flow in self.flows:", "for flow in self.flows[:1]:")
    ],
    "a child may be answered by itself": [
        Change(Transit.fail, "while type(family := request.caller) is Siblings:", "while False:")
    ],
    "suspects wait for others' room": [Change(Batcher._visible, "goes_alone or ", "")],
    "a policy may hold back what nobody can join": [Change(Core._is_last_call, "return not any(", "return any(")],
    "a lot is counted as one": [Change(Flow._number, "self.admitted += len(lot)", "self.admitted += 1")],
    "a suspect may run with others": [
        Change(Lobby.quarantine, "key=Suspect(request.lane.key)", "key=request.lane.key")
    ],
    "who has been acquitted stays alone": [Change(Transit._weigh, "acquit(request)", "pass")],
    "a worker that is lent stays among the idle ones": [Change(Batcher.lend, "self._idle.pop()", "self._idle[-1]")],
    "a worker is lent while another is busy": [Change(Batcher.lend, "self.in_flight\n", "False\n")],
    "a worker is lent while another is": [Change(Batcher.lend, "self.places.lent\n", "False\n")],
    "a worker is lent while something waits": [Change(Batcher.lend, "self.queue.count\n", "False\n")],
    "what waits does without the worker that is lent": [
        Change(Core.poll, " or (crew.queue.count and not places.idle)", "")
    ],
    "a worker that is to go stays lent": [Change(Core.poll, "places.lent & places.leaving", "()")],
    "a worker stays lent when the service closes": [Change(Core.poll, "self._has_closed or ", "")],
    "a worker is drained while it is lent": [Change(Batcher.take_drained, " | self.places.lent", "")],
    "a worker that was lent and is to go is idle again": [
        Change(Batcher.take_back, "if place not in self.places.leaving:", "if True:")
    ],
    "a worker that is lent is not there": [
        Change(Batcher.has_worker.fget, " or self.places.lent", "")  # type: ignore[attr-defined]
    ],
    "a worker that has gone stays lent": [Change(Places.gone, "self.lent.discard(place)", "pass")],
    "the call of a worker that is taken back is in no batch": [
        Change(Batcher.take_back, "batch = self.in_flight[place] =", "batch =")
    ],
    "the call of a worker that is taken back does not run": [Change(Batcher.take_back, "self.running += 1", "pass")],
    "the call of a worker that is taken back has not come": [
        Change(Batcher.take_back, "self.lobby.entered += 1", "pass")
    ],
    "nobody looks at the time of a call that was taken back": [
        Change(Batcher.take_back, "self.lobby.look_at(min(request.deadline, began + self.times.least_s))", "pass")
    ],
    "a call that was taken back has an id that others have": [
        Change(Flow.admit_lone, "request.id = id", "request.id = self._transit.last_id")
    ],
    "a call that was taken back was not admitted": [Change(Flow.admit_lone, "self.admitted += 1", "pass")],
    "a lone call that is done does not count": [Change(Core.lone_done, "self.flow.went_alone(ok)", "pass")],
    "a lone call that is done has not gone alone": [Change(Flow.went_alone, "self.alone += 1", "pass")],
    "a lone call that has failed has not": [Change(Flow.went_alone, "self.failed += 1", "pass")],
}


def _with(change: Change) -> Callable[..., Any]:
    """The function, changed."""
    source = textwrap.dedent(inspect.getsource(change.function))
    assert source.count(change.old) == 1, source.count(change.old)
    module = sys.modules[change.function.__module__]
    lines = source.replace(change.old, change.new).split("\n")
    while lines[0].startswith("@"):
        del lines[0]
    found: dict[str, Any] = {}
    exec(compile("\n".join(["from __future__ import annotations", *lines]), "mutant", "exec"), vars(module), found)
    return found[change.function.__name__]  # type: ignore[no-any-return]


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTANTS)
def test_a_broken_rule_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some world breaks over each of the rules that can be broken."""
    for change in MUTANTS[name]:
        made, module = _with(change), sys.modules[change.function.__module__]
        owner = change.function.__qualname__.rpartition(".")[0]
        if not owner:
            for other in [each for each in sys.modules.values() if each.__name__.startswith("carpool.engine.core.")]:
                if vars(other).get(made.__name__) is change.function:
                    monkeypatch.setattr(other, made.__name__, made)
            continue
        kind = getattr(module, owner)
        is_property = isinstance(vars(kind)[made.__name__], property)
        monkeypatch.setattr(kind, made.__name__, property(made) if is_property else made)
    with pytest.raises(AssertionError, match="it broke at the end of this"):
        _play(WORLDS)


@pytest.mark.slow
def test_no_broken_rule_is_found_where_none_is() -> None:
    """The same worlds are unbroken where the core is."""
    _play(WORLDS // 5)


def _play(worlds: int) -> None:
    for seed in range(worlds):
        throw(Random(seed), [a_graph, a_tight_graph, a_graph, a_line][seed % 4])
        throw(Random(seed), a_lending_line)
