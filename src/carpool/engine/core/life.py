"""The life of a service's handle and of its loop: the handle starts, is open, drains and is closed;
the loop does the work that threads post to it, until it has ended. Sans-IO.

It may also lose its process by a fork, or its loop. What happens (a caller closes it, its start has
succeeded, the process is forked) is reported to `happened`, which returns what to do about it.
Exactly one of any number of closers does the closing; the others wait for it.

    state      START     OPENED    CLOSE           HURRY            ENDED   FORKED  LOOP_GONE
    new        starting  -         new             new              -       new     -
    starting   refused   open      draining, end   draining, end    -       forked  abandoned, kill
    open       refused   -         draining, end   draining, end    -       forked  abandoned, kill
    draining   refused   draining  draining, wait  draining, hurry  closed  forked  abandoned, kill
    closed     refused   -         closed          closed           -       forked  closed
    forked     refused   -         forked          forked           -       forked  forked
    abandoned  refused   -         abandoned       abandoned        -       forked  abandoned

No work that threads post is lost with the loop. All calls of its mailbox are made under one lock of
the driver's. While the loop lives, the first work since it last looked is to wake it; the loop's
thread empties the mailbox after the loop has stopped. Later work is done by the thread that brings
it, which meets a stopped driver and gets its answer at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum, auto

from carpool.errors import Unavailable


class LifeState(Enum):
    """The states of a handle's life."""

    NEW = auto()
    STARTING = auto()
    OPEN = auto()
    DRAINING = auto()  # closed for new calls; those inside are being finished
    CLOSED = auto()
    FORKED = auto()  # this process is a child of the one that started it
    ABANDONED = auto()  # its event loop has ended before it was closed


class Event(Enum):
    """What can happen to a handle."""

    START = auto()
    OPENED = auto()  # the start has succeeded
    CLOSE = auto()  # a caller closes it, and the calls inside are to be finished
    HURRY = auto()  # a caller closes it at once
    ENDED = auto()  # the closing is done, or the start has failed and everything is gone again
    FORKED = auto()
    LOOP_GONE = auto()


class Act(Enum):
    """What the caller that reports an event has to do."""

    NOTHING = auto()
    START = auto()
    END = auto()  # finish or fail the calls inside, and end the workers; then report `ENDED`
    WAIT = auto()  # wait for another caller, which does that
    HURRY = auto()  # the same, but first have the calls inside failed now
    KILL = auto()  # end the workers without the loop, which has gone


_TABLE: dict[tuple[LifeState, Event], tuple[LifeState, Act]] = {
    (LifeState.NEW, Event.START): (LifeState.STARTING, Act.START),
    (LifeState.STARTING, Event.OPENED): (LifeState.OPEN, Act.NOTHING),
    (LifeState.DRAINING, Event.CLOSE): (LifeState.DRAINING, Act.WAIT),
    (LifeState.DRAINING, Event.HURRY): (LifeState.DRAINING, Act.HURRY),
    (LifeState.DRAINING, Event.ENDED): (LifeState.CLOSED, Act.NOTHING),
    (LifeState.ABANDONED, Event.FORKED): (LifeState.FORKED, Act.NOTHING),
    # the loop of a closed one may have been about to end, and never will
    (LifeState.CLOSED, Event.FORKED): (LifeState.FORKED, Act.NOTHING),
    **{
        (state, event): (LifeState.DRAINING, Act.END)
        for state in (LifeState.STARTING, LifeState.OPEN)
        for event in (Event.CLOSE, Event.HURRY)
    },
    **{
        (state, Event.FORKED): (LifeState.FORKED, Act.NOTHING)
        for state in (LifeState.STARTING, LifeState.OPEN, LifeState.DRAINING)
    },
    **{
        (state, Event.LOOP_GONE): (LifeState.ABANDONED, Act.KILL)
        for state in (LifeState.STARTING, LifeState.OPEN, LifeState.DRAINING)
    },
}
"""An event that is not listed for a state changes nothing and asks for nothing."""

_REFUSALS: dict[LifeState, tuple[type[RuntimeError] | type[Unavailable], str]] = {
    LifeState.NEW: (RuntimeError, "the service is not running: use it inside `with service.run() as s:`"),
    LifeState.CLOSED: (Unavailable, "the service has stopped"),
    LifeState.FORKED: (RuntimeError, "this service was started by another process; start one in this process"),
    LifeState.ABANDONED: (
        RuntimeError,
        "the event loop that this service was started on has ended: start it anew on the present one",
    ),
}
"""The errors of calls, in the states in which none is let through."""

STARTED_BEFORE = "this handle was started before; call run or run_async again for a new one"


class Life:
    """The life of one handle.

    Attributes:
        takes_calls: Whether calls are let through; while it starts or drains, the core decides what
            becomes of them.
    """

    __slots__ = ("__weakref__", "state", "takes_calls")

    def __init__(self) -> None:
        self.state = LifeState.NEW
        self.takes_calls = False

    def __repr__(self) -> str:
        return f"<Life {self.state.name.lower()}>"

    def happened(self, event: Event) -> Act:
        """Note that something has happened, and return what to do about it.

        Raises:
            RuntimeError: It cannot be started a second time.
        """
        if event is Event.START and self.state is not LifeState.NEW:
            raise RuntimeError(STARTED_BEFORE)
        self.state, act = _TABLE.get((self.state, event), (self.state, Act.NOTHING))
        self.takes_calls = self.state not in _REFUSALS
        return act

    def refusal(self) -> Exception:
        kind, text = _REFUSALS[self.state]
        return Unavailable(text, code="stopped") if kind is Unavailable else kind(text)


Work = Callable[[], object]


class Mailbox:
    """The work that has been posted and not been taken, until the loop `is_over`."""

    __slots__ = ("_is_woken", "_work", "is_over")

    def __init__(self) -> None:
        self._work: list[Work] = []
        self._is_woken = False
        self.is_over = False

    def post(self, work: Work) -> bool:
        """Leave some work, and report whether the loop must be woken for it.

        It need not be if it has been woken already and has not looked since.

        Raises:
            ValueError: The loop has ended: the caller is to do the work itself.
        """
        if self.is_over:
            raise ValueError("the loop has ended")
        self._work.append(work)
        must_wake, self._is_woken = not self._is_woken, True
        return must_wake

    def take(self) -> Sequence[Work]:
        work, self._work = self._work, []
        self._is_woken = False
        return work

    def end(self) -> Sequence[Work]:
        """Note that the loop has ended, and return what was posted, to be done all the same.

        From now on no work can be posted.
        """
        self.is_over = True
        return self.take()
