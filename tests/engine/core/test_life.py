"""The life of a handle: every order in which a few callers, closers and the loop can take their steps, explored.

As with the line of `@carpool.batch` (test_line.py), all states that can be reached are visited once. One in which
nobody can move although somebody still waits is a hang.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from carpool.engine.core.life import Act, Event, Life, LifeState, Mailbox
from carpool.errors import Unavailable
from tests.engine.core.explore import explore


@dataclass(eq=False)
class Actor:
    """Somebody's next step.

    Attributes:
        kind: Starter, caller, closer or hurrier.
        at: Where it is.
        heard: What it got in the end.
    """

    kind: str
    at: str = "begin"
    heard: str = ""


@dataclass
class World:
    """A handle, the thread of its loop, and those who use it."""

    actors: list[Actor]
    life: Life = field(default_factory=Life)
    mailbox: Mailbox = field(default_factory=Mailbox)
    rung: bool = False  # the loop has something to look at
    started: bool = False  # the starter's coroutine runs on the loop
    inside: list[int] = field(default_factory=list)  # callers whose requests wait for their answers
    ending: str = ""  # how it is being ended
    stopped: bool = False  # the driver takes nothing more
    loop: str = "runs"
    ends: int = 0

    def moves(self) -> list[tuple[str, int]]:
        found: list[tuple[str, int]] = []
        for i, actor in enumerate(self.actors):
            begins = actor.at == "begin" and (actor.kind == "starter" or self.actors[0].at != "begin")
            if begins or actor.at == "post" or (actor.at == "wait for end" and self.loop == "ended"):
                found.append(("step", i))
        if self.loop == "runs":
            if self.rung:
                found.append(("look", 0))
            if self.started and self.life.state is LifeState.STARTING:
                found += [("opened", 0), ("start failed", 0)]
            if self.inside and not self.stopped:
                found.append(("answer", 0))
            if self.ending and not self.stopped and (self.ending == "hurry" or not self.inside):
                found.append(("drained", 0))
            if self.stopped and self.life.state is LifeState.DRAINING:
                found.append(("ended", 0))
        elif self.loop == "stops":
            found.append(("loop ends", 0))
        return found

    def move(self, what: str, which: int) -> None:
        if what == "step":
            self._step(which, self.actors[which])
        elif what == "look":
            self.rung = False
            for name in self.mailbox.take():
                self._do(name)  # type: ignore[arg-type]
        elif what == "opened":
            self.life.happened(Event.OPENED)
            self._starter_hears("started")
        elif what == "start failed":
            self._close(Event.HURRY)
            self._starter_hears("failed")
        elif what == "answer":
            self.actors[self.inside[0]].at, self.actors[self.inside.pop(0)].heard = "gone", "answered"
        elif what == "drained":
            self.stopped = True
            self._refuse_inside()
        elif what == "ended":
            self.life.happened(Event.ENDED)
            self.ends += 1
            self._starter_hears("closed")
            self.loop = "stops"
        else:
            for name in self.mailbox.end():
                self._do(name)  # type: ignore[arg-type]
            self.loop = "ended"

    def _step(self, which: int, actor: Actor) -> None:
        if actor.at == "wait for end":
            actor.at, actor.heard = "gone", "closed"
        elif actor.at == "begin":
            if actor.kind == "starter":
                self.life.happened(Event.START)
                self.started = True
                actor.at = "wait for start"
            elif actor.kind == "caller" and not self.life.takes_calls:
                assert isinstance(self.life.refusal(), Unavailable)
                actor.at, actor.heard = "gone", "refused"
            elif actor.kind != "caller" and self.life.state is LifeState.CLOSED:
                actor.at, actor.heard = "gone", "closed"
            else:
                actor.at = "post"
        else:
            actor.at = "wait for answer" if actor.kind == "caller" else "wait for end"
            try:
                self.rung = self.mailbox.post(which) or self.rung  # type: ignore[arg-type]
            except ValueError:
                self._do(which)

    def _do(self, which: int) -> None:
        actor = self.actors[which]
        if actor.kind != "caller":
            self._close(Event.CLOSE if actor.kind == "closer" else Event.HURRY)
        elif self.stopped or self.ending:
            actor.at, actor.heard = "gone", "refused"
        else:
            self.inside.append(which)

    def _close(self, event: Event) -> None:
        act = self.life.happened(event)
        if act is Act.END:
            assert not self.ending
            self.ending = "drain" if event is Event.CLOSE else "hurry"
        elif act is Act.HURRY:
            self.ending = "hurry"
            self._refuse_inside()

    def _refuse_inside(self) -> None:
        for which in self.inside:
            self.actors[which].at, self.actors[which].heard = "gone", "refused"
        self.inside.clear()

    def _starter_hears(self, what: str) -> None:
        if self.actors[0].at == "wait for start":
            self.actors[0].at, self.actors[0].heard = "gone", what

    def state(self) -> str:
        """All that decides what can still happen."""
        actors = [(actor.kind, actor.at, actor.heard) for actor in self.actors]
        box = (list(self.mailbox._work), self.mailbox._is_woken, self.mailbox.is_over)
        return repr((actors, self.life.state, box, self.rung, self.inside, self.ending, self.stopped, self.loop))


@pytest.mark.fault("F72")
@pytest.mark.parametrize(
    "others",
    [
        ["caller", "closer"],
        ["caller", "caller", "closer"],
        ["caller", "caller", "hurrier"],
        ["caller", "closer", "closer"],
        ["caller", "closer", "hurrier"],
        ["closer", "closer", "hurrier"],
        ["caller", "caller", "closer", "hurrier"],
    ],
    ids=" ".join,
)
def test_every_order_of_starting_calling_and_closing_ends(others: list[str]) -> None:
    """In every order of starting, calling and closing each caller is answered or refused, each
    closer returns, and exactly one of them has done the closing.
    """
    outcomes: set[str] = set()
    for end in explore(World([Actor("starter"), *[Actor(kind) for kind in others]])):
        assert [actor.at for actor in end.actors] == ["gone"] * len(end.actors), end.state()
        assert end.life.state is LifeState.CLOSED
        assert end.ends == 1
        outcomes |= {actor.heard for actor in end.actors}
    assert {"answered", "refused", "closed", "started", "failed"} >= outcomes >= {"closed", "started", "failed"}
    if "caller" in others:
        assert outcomes >= {"answered", "refused"}


@pytest.mark.parametrize("state", list(LifeState))
@pytest.mark.parametrize("event", list(Event))
def test_the_table_in_the_docstring_is_the_table(state: LifeState, event: Event) -> None:
    """The code follows the table in the docstring, each cell of which says which state follows."""
    from carpool.engine.core import life

    lines = [line.split("  ") for line in (life.__doc__ or "").splitlines() if line.startswith("    ")]
    head, *rows = [[cell.strip() for cell in line if cell.strip()] for line in lines]
    row = next(row for row in rows if row[0].startswith(state.name.lower()))
    cells = " ".join(row).replace(", ", ",").split()
    cell = cells[head_index(head, event)]
    one = Life()
    one.state = state
    if cell == "refused":
        with pytest.raises(RuntimeError, match="started before"):
            one.happened(event)
        return
    act = one.happened(event)
    following, _, what = cell.partition(",")
    assert one.state.name.lower() == (state.name.lower() if following == "-" else following)
    assert act.name.lower() == (what or ("start" if event is Event.START else "nothing"))


def head_index(head: list[str], event: Event) -> int:
    """The column of an event."""
    return " ".join(head).split().index(event.name)


@pytest.mark.parametrize("state", [LifeState.NEW, LifeState.CLOSED, LifeState.FORKED, LifeState.ABANDONED])
def test_calls_that_are_not_let_through_hear_why(state: LifeState) -> None:
    """A call to a closed service raises `Unavailable`; a call to one that cannot be used from here
    is reported as a mistake of the program's.
    """
    one = Life()
    one.state = state
    assert isinstance(one.refusal(), Unavailable if state is LifeState.CLOSED else RuntimeError)
