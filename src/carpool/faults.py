"""Faults made on purpose, for tests: a worker that dies with half a reply written, a parent stopped after a dispatch.

    CARPOOL_FAULT="point[@worker]:action[:n]"       several separated by commas

*point* is one of `POINTS`, *worker* the number of a worker in its stage (any, if left out), *action* one of `ACTIONS`,
and *n* on which pass of that point the fault happens in a process: 1 is the first and what you get without it, `*` is
every pass. A worker that replaces another counts anew; to have each fault in one process only, name an empty folder in
CARPOOL_FAULT_ONCE. `Stage(env=...)` limits both to the workers of one stage.

    kill       SIGKILL itself                       raise      an `InjectedFault`; in `in_predict` it is the model's own
    stop       SIGSTOP itself                       eof        close the connection to the parent and live on
    exit       end at once, with code 0             corrupt    make the reply's first bytes wrong (only `before_send`)
    hang       never go on                          delay=S    go on after S seconds
    gil        never go on, and hold the GIL

Points are bound when a worker or a stage starts. Where nothing is set there, they are None and cost a comparison per
batch, nothing per request.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Final

VARIABLE: Final = "CARPOOL_FAULT"
ONCE_VARIABLE: Final = "CARPOOL_FAULT_ONCE"

POINTS: Final = (
    "worker.setup",  # before the model's `setup`
    "worker.mid_recv",  # part of a batch has been received, of one that is too large for one read
    "worker.after_recv",  # a batch has been received
    "worker.before_predict",  # it has been decoded
    "worker.in_predict",  # the model is being called; each call is a pass
    "worker.after_predict",  # it has answered, nothing is encoded yet
    "worker.before_send",  # the reply is ready
    "worker.mid_send",  # half of its bytes have been written
    "worker.after_send",  # all of them have been
    "parent.after_dispatch",  # a batch has been given to a worker's socket
    "parent.before_reply",  # a reply has come, its requests have not been told
)
ACTIONS: Final = ("kill", "stop", "exit", "hang", "gil", "raise", "eof", "corrupt", "delay")

EVERY_PASS: Final = 0

Hook = Callable[[], None]

connection: socket.socket | None = None
"""In a worker process: its end of the socket to the parent, for `eof`."""


class InjectedFault(Exception):
    """What the action `raise` raises."""


@dataclass(frozen=True, slots=True)
class FaultPlan:
    """One fault, as data.

    Args:
        point: where; one of `POINTS`.
        action: what; one of `ACTIONS`.
        n: on which pass in a process, counted from 1; `EVERY_PASS` for each.
        worker: in which worker of the stage; None for any.
        seconds: how long a `delay` is.

    Raises:
        ValueError: there is no such point or action, or not at that point.
    """

    point: str
    action: str
    n: int = 1
    worker: int | None = None
    seconds: float = 0.0

    def __post_init__(self) -> None:
        if self.point not in POINTS:
            raise ValueError(f"no fault point {self.point!r}; there are {', '.join(POINTS)}")
        if self.action not in ACTIONS:
            raise ValueError(f"no fault action {self.action!r}; there are {', '.join(ACTIONS)}")
        if self.action == "corrupt" and self.point != "worker.before_send":
            raise ValueError("corrupt needs bytes to spoil: its point is worker.before_send")
        if self.point.startswith("parent.") and (self.action == "eof" or self.worker is not None):
            raise ValueError(f"{self.point} belongs to no worker: it takes neither eof nor a worker's number")
        if self.n < 0 or self.seconds < 0:
            raise ValueError("a fault's pass is counted from 1, its delay in seconds from 0")

    def __str__(self) -> str:
        where = self.point if self.worker is None else f"{self.point}@{self.worker}"
        what = f"delay={self.seconds:g}" if self.action == "delay" else self.action
        return f"{where}:{what}:{self.n or '*'}"

    @classmethod
    def parse(cls, text: str) -> FaultPlan:
        """What `str` makes of a plan, and its shorter forms.

        Raises:
            ValueError: the text is no plan.
        """
        where, _, rest = text.strip().partition(":")
        what, _, n = rest.partition(":")
        point, at, worker = where.partition("@")
        action, _, seconds = what.partition("=")
        try:
            return cls(
                point,
                action,
                EVERY_PASS if n == "*" else int(n or 1),
                int(worker) if at else None,
                float(seconds or 0),
            )
        except ValueError as error:
            raise ValueError(f"{VARIABLE}: {text!r} is not point[@worker]:action[:n] ({error})") from None


def environment(plans: Iterable[FaultPlan], once: str | os.PathLike[str] | None = None) -> dict[str, str]:
    """The environment variables that make `plans` happen, for `Stage(env=...)` or a whole server.

    Args:
        plans: the faults.
        once: an empty folder; with it each fault happens in one process only.
    """
    variables = {VARIABLE: ",".join(map(str, plans))}
    return variables if once is None else {**variables, ONCE_VARIABLE: os.fspath(once)}


def planned() -> list[FaultPlan]:
    """The faults that this process's environment asks for.

    Raises:
        ValueError: the variable cannot be read.
    """
    return [FaultPlan.parse(part) for part in os.environ.get(VARIABLE, "").split(",") if part.strip()]


def at(point: str, worker: int | None = None) -> Hook | None:
    """What to call on each pass of `point` in worker `worker`; None if nothing is planned there."""
    mine = [plan for plan in planned() if plan.point == point and plan.worker in (None, worker)]
    return _FaultPoint([plan for plan in mine if plan.action != "corrupt"]) if mine else None


class WorkerPoints:
    """The points of one worker, each None unless something is planned there."""

    def __init__(self, worker: int) -> None:
        self.setup = at("worker.setup", worker)
        self.after_recv = at("worker.after_recv", worker)
        self.before_predict = at("worker.before_predict", worker)
        self.in_predict = at("worker.in_predict", worker)
        self.after_predict = at("worker.after_predict", worker)
        self.after_send = at("worker.after_send", worker)


def before(hook: Hook | None, function: Callable[..., object]) -> Callable[..., object]:
    """`function` with `hook`, if there is one, called before it."""
    if hook is None:
        return function

    def call(*args: object) -> object:
        hook()
        return function(*args)

    return call


Send = Callable[[socket.socket, list[memoryview]], list[memoryview]]
"""Takes the buffers of a reply, writes some of them, and returns those that are left to write."""


def sending(worker: int) -> Send | None:
    """What is planned for the sending of replies by `worker`; None if nothing is."""
    first, middle = at("worker.before_send", worker), at("worker.mid_send", worker)
    spoilt = [p for p in planned() if p.action == "corrupt" and p.worker in (None, worker)]
    return partial(_send, first, _FaultPoint(spoilt) if spoilt else None, middle) if first or middle else None


def _send(
    first: Hook | None, spoil: _FaultPoint | None, middle: Hook | None, sock: socket.socket, buffers: list[memoryview]
) -> list[memoryview]:
    if first is not None:
        first()
    message = bytearray().join(buffers)
    if spoil is not None and spoil.due():
        message[:8] = bytes(255 - byte for byte in message[:8])
    half = len(message) // 2 if middle is not None else 0
    sock.sendall(message[:half])
    if middle is not None:
        middle()
    return [memoryview(message)[half:]]


class _FaultPoint:
    """A point with something planned: counts its passes."""

    def __init__(self, plans: list[FaultPlan]) -> None:
        self._plans = plans
        self._passes = 0

    def __call__(self) -> None:
        for plan in self.due():
            _DOING[plan.action](plan)

    def due(self) -> list[FaultPlan]:
        """Another pass: the plans whose turn it is."""
        self._passes += 1
        return [p for p in self._plans if p.n in (EVERY_PASS, self._passes) and _is_first(p)]


def _is_first(plan: FaultPlan) -> bool:
    """Whether no other process has had this fault, where that matters."""
    folder = os.environ.get(ONCE_VARIABLE)
    if not folder:
        return True
    try:
        os.close(os.open(os.path.join(folder, str(plan)), os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


def _hang(plan: FaultPlan) -> None:
    while True:
        time.sleep(3600)


def _hold_gil(plan: FaultPlan) -> None:
    while True:
        ctypes.PyDLL(None).sleep(3600)  # PyDLL, unlike CDLL, keeps the GIL


def _raise(plan: FaultPlan) -> None:
    raise InjectedFault(str(plan))


def _close(plan: FaultPlan) -> None:
    if connection is not None:
        connection.shutdown(socket.SHUT_RDWR)


_DOING: dict[str, Callable[[FaultPlan], None]] = {
    "kill": lambda plan: os.kill(os.getpid(), signal.SIGKILL),
    "stop": lambda plan: os.kill(os.getpid(), signal.SIGSTOP),
    "exit": lambda plan: os._exit(0),
    "hang": _hang,
    "gil": _hold_gil,
    "raise": _raise,
    "eof": _close,
    "delay": lambda plan: time.sleep(plan.seconds),
}
