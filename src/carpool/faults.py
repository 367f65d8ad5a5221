"""Faults made on purpose, for tests: a worker that dies with half a reply written, for example.

    CARPOOL_FAULT="point[@worker]:action[:n]"       several are separated by commas

*point* is one of `POINTS`. *worker* is the place of a worker in its stage; without it, any worker
is meant. *action* is one of `ACTIONS`. *n* is the pass of that point, in one process, on which the
fault happens: 1, the default, is the first pass, and `*` is every pass. A worker that replaces
another one counts from 1 again. To have each fault in one process only, name an empty folder in
CARPOOL_FAULT_ONCE. `Stage(env=...)` limits both to the workers of one stage.

    kill       send SIGKILL to itself
    stop       send SIGSTOP to itself
    exit       end at once, with code 0
    hang       never go on
    gil        never go on, and hold the GIL
    raise      raise an `InjectedFault`; at `in_predict` it is as if the model had raised it
    eof        close the connection to the parent and live on
    corrupt    make the first bytes of the reply wrong (only at `before_send`)
    delay=S    go on after S seconds

Points are bound when a worker or a stage starts. A point without a fault is None, which costs a
comparison per batch and nothing per request.
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
    "worker.mid_recv",  # a batch that is too large for one read has been received in part
    "worker.after_recv",  # a batch has been received
    "worker.before_predict",  # it has been decoded
    "worker.in_predict",  # the model is called; each call is a pass
    "worker.after_predict",  # the model has answered, nothing is encoded yet
    "worker.before_send",  # the reply is ready
    "worker.mid_send",  # half of the reply's bytes have been written
    "worker.after_send",  # all bytes have been written
    "parent.after_dispatch",  # a batch has been written to a worker's socket
    "parent.before_reply",  # a reply has come, its callers have not been answered
)
ACTIONS: Final = ("kill", "stop", "exit", "hang", "gil", "raise", "eof", "corrupt", "delay")

EVERY_PASS: Final = 0

Hook = Callable[[], None]

Send = Callable[[socket.socket, list[memoryview]], list[memoryview]]
"""Takes the buffers of a reply, writes some of them, and returns those that are left to write."""

connection: socket.socket | None = None
"""In a worker process, its end of the socket to the parent, which `eof` shuts down."""


class InjectedFault(Exception):
    """The exception that the action `raise` raises."""


@dataclass(frozen=True, slots=True)
class FaultPlan:
    """One fault that is to happen.

    Args:
        point: Where it happens, one of `POINTS`.
        action: What happens, one of `ACTIONS`.
        n: The pass of the point on which it happens, counted from 1 in each process; `EVERY_PASS`
            for each.
        worker: The place of the worker in its stage; None for any worker.
        seconds: How long a `delay` is.

    Raises:
        ValueError: There is no such point or action, or the action is not possible at the point.
    """

    point: str
    action: str
    n: int = 1
    worker: int | None = None
    seconds: float = 0.0

    def __post_init__(self) -> None:
        if self.point not in POINTS:
            raise ValueError(f"there is no fault point {self.point!r}; choose one of {', '.join(POINTS)}")
        if self.action not in ACTIONS:
            raise ValueError(f"there is no fault action {self.action!r}; choose one of {', '.join(ACTIONS)}")
        if self.action == "corrupt" and self.point != "worker.before_send":
            raise ValueError("corrupt needs the bytes of a reply: use it at the point worker.before_send")
        if self.point.startswith("parent.") and (self.action == "eof" or self.worker is not None):
            raise ValueError(f"{self.point} is not in a worker: leave out eof and @worker")
        if self.n < 0 or self.seconds < 0:
            raise ValueError("the pass and the delay of a fault must not be negative")

    def __str__(self) -> str:
        where = self.point if self.worker is None else f"{self.point}@{self.worker}"
        what = f"delay={self.seconds:g}" if self.action == "delay" else self.action
        return f"{where}:{what}:{self.n or '*'}"

    @classmethod
    def parse(cls, text: str) -> FaultPlan:
        """Read a plan that `str` has written, or a shorter form of it.

        Raises:
            ValueError: The text does not describe a plan.
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


_ACTIONS: dict[str, Callable[[FaultPlan], None]] = {
    "kill": lambda plan: os.kill(os.getpid(), signal.SIGKILL),
    "stop": lambda plan: os.kill(os.getpid(), signal.SIGSTOP),
    "exit": lambda plan: os._exit(0),
    "hang": _hang,
    "gil": _hold_gil,
    "raise": _raise,
    "eof": _close,
    "delay": lambda plan: time.sleep(plan.seconds),
}


def _is_first(plan: FaultPlan) -> bool:
    """Report whether this process may have a fault: no other one had it, or each may have it."""
    folder = os.environ.get(ONCE_VARIABLE)
    if not folder:
        return True
    try:
        os.close(os.open(os.path.join(folder, str(plan)), os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


class _FaultPoint:
    """A point at which something is planned; it counts its passes."""

    def __init__(self, plans: list[FaultPlan]) -> None:
        self._plans = plans
        self._passes = 0

    def __call__(self) -> None:
        for plan in self.due():
            _ACTIONS[plan.action](plan)

    def due(self) -> list[FaultPlan]:
        """Count a pass, and return the plans whose turn it is."""
        self._passes += 1
        return [p for p in self._plans if p.n in (EVERY_PASS, self._passes) and _is_first(p)]


def environment(plans: Iterable[FaultPlan], once: str | os.PathLike[str] | None = None) -> dict[str, str]:
    """Return the environment variables that make faults happen, for `Stage(env=...)` or a server.

    Args:
        plans: The faults.
        once: An empty folder; with it each fault happens in one process only.
    """
    variables = {VARIABLE: ",".join(map(str, plans))}
    return variables if once is None else {**variables, ONCE_VARIABLE: os.fspath(once)}


def planned() -> list[FaultPlan]:
    """Return the faults that the environment of this process asks for.

    Raises:
        ValueError: The variable cannot be read.
    """
    return [FaultPlan.parse(part) for part in os.environ.get(VARIABLE, "").split(",") if part.strip()]


def at(point: str, worker: int | None = None) -> Hook | None:
    """Return what to call on each pass of a point; None if nothing is planned there.

    Args:
        point: One of `POINTS`.
        worker: The place of this worker in its stage; None in the parent.
    """
    mine = [plan for plan in planned() if plan.point == point and plan.worker in (None, worker)]
    return _FaultPoint([plan for plan in mine if plan.action != "corrupt"]) if mine else None


class WorkerPoints:
    """The points of one worker, each of them None unless something is planned there.

    Args:
        worker: The place of the worker in its stage.
    """

    def __init__(self, worker: int) -> None:
        self.setup = at("worker.setup", worker)
        self.after_recv = at("worker.after_recv", worker)
        self.before_predict = at("worker.before_predict", worker)
        self.in_predict = at("worker.in_predict", worker)
        self.after_predict = at("worker.after_predict", worker)
        self.after_send = at("worker.after_send", worker)


def before(hook: Hook | None, function: Callable[..., object]) -> Callable[..., object]:
    """Return a function that calls `hook`, if there is one, and then `function`."""
    if hook is None:
        return function

    def call(*args: object) -> object:
        hook()
        return function(*args)

    return call


def sending(worker: int) -> Send | None:
    """Return what sends the replies of a worker, with faults; None if nothing is planned."""
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
