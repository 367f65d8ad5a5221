"""Faults made on purpose, for tests: a worker dies with half a reply written, a parent stops.

Faults are planned in an environment variable, several of them separated by commas:

    CARPOOL_FAULT="point[@worker]:action[:n]"

*point* is one of `POINTS` and *action* one of `ACTIONS`. *worker* is the place of a worker in its
stage; without it, the fault happens in every worker. *n* says on which pass of the point the fault
happens: 1 stands for the first pass of a process and is the default, `*` stands for every pass.

Each process counts its own passes, so a worker that replaces another one starts again. To have each
fault in one process only, name an empty folder in CARPOOL_FAULT_ONCE. `Stage(env=...)` limits both
variables to the workers of one stage.

    kill       send SIGKILL to itself
    stop       send SIGSTOP to itself
    exit       end at once, with exit code 0
    hang       never go on
    gil        never go on, and hold the GIL
    raise      raise an `InjectedFault`; at `in_predict` it looks like an error of the model
    eof        close the connection to the parent, and live on
    corrupt    make the first bytes of the reply wrong; only at `before_send`
    delay=S    go on after S seconds

Points are looked up when a worker or a stage starts. A point where nothing is planned is None, and
costs one comparison per batch and nothing per request.
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
    "worker.mid_recv",  # a part has been received of a batch that is too large for one read
    "worker.after_recv",  # a batch has been received
    "worker.before_predict",  # the batch has been decoded
    "worker.in_predict",  # the model is being called; each call is a pass
    "worker.after_predict",  # the model has answered, and nothing is encoded yet
    "worker.before_send",  # the reply is ready
    "worker.mid_send",  # half of the bytes of the reply have been written
    "worker.after_send",  # all bytes of the reply have been written
    "parent.after_dispatch",  # a batch has been given to a worker's socket
    "parent.before_reply",  # a reply has come, and its requests are not answered yet
)
ACTIONS: Final = ("kill", "stop", "exit", "hang", "gil", "raise", "eof", "corrupt", "delay")

EVERY_PASS: Final = 0

Hook = Callable[[], None]

connection: socket.socket | None = None
"""The socket to the parent, in a worker process; the action `eof` closes it."""


class InjectedFault(Exception):
    """The error that the action `raise` raises."""


@dataclass(frozen=True, slots=True)
class FaultPlan:
    """One planned fault.

    Args:
        point: Where it happens; one of `POINTS`.
        action: What happens; one of `ACTIONS`.
        n: On which pass of the point in a process it happens, counted from 1; or `EVERY_PASS`.
        worker: The place of the worker in which it happens; None for every worker of the stage.
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
            raise ValueError("corrupt needs a reply to change: its point must be worker.before_send")
        if self.point.startswith("parent.") and (self.action == "eof" or self.worker is not None):
            raise ValueError(
                f"{self.point} is not in a worker: it takes neither the action eof nor the number of a worker"
            )
        if self.n < 0 or self.seconds < 0:
            raise ValueError("the pass of a fault and its delay in seconds must not be negative")

    def __str__(self) -> str:
        where = self.point if self.worker is None else f"{self.point}@{self.worker}"
        what = f"delay={self.seconds:g}" if self.action == "delay" else self.action
        return f"{where}:{what}:{self.n or '*'}"

    @classmethod
    def parse(cls, text: str) -> FaultPlan:
        """Read a plan from the text that `str` makes of it, or from a shorter form of that.

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


def environment(plans: Iterable[FaultPlan], once: str | os.PathLike[str] | None = None) -> dict[str, str]:
    """Return the environment variables that make `plans` happen.

    They can be given to `Stage(env=...)` or to a whole server.

    Args:
        plans: The faults.
        once: An empty folder. If it is given, each fault happens in one process only.
    """
    variables = {VARIABLE: ",".join(map(str, plans))}
    return variables if once is None else {**variables, ONCE_VARIABLE: os.fspath(once)}


def planned() -> list[FaultPlan]:
    """Return the faults planned in this process's environment. Raises ValueError."""
    return [FaultPlan.parse(part) for part in os.environ.get(VARIABLE, "").split(",") if part.strip()]


def at(point: str, worker: int | None = None) -> Hook | None:
    """Return what to call on each pass of `point` in a worker, or None."""
    plans = [plan for plan in planned() if plan.point == point and plan.worker in (None, worker)]
    return _FaultPoint([plan for plan in plans if plan.action != "corrupt"]) if plans else None


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
    if hook is None:
        return function

    def call(*args: object) -> object:
        hook()
        return function(*args)

    return call


Send = Callable[[socket.socket, list[memoryview]], list[memoryview]]
"""Writes some of the buffers of a reply, and returns those that are left to write."""


def sending(worker: int) -> Send | None:
    """Return what sends the replies of a worker instead, or None."""
    first, middle = at("worker.before_send", worker), at("worker.mid_send", worker)
    corrupting = [p for p in planned() if p.action == "corrupt" and p.worker in (None, worker)]
    return partial(_send, first, _FaultPoint(corrupting) if corrupting else None, middle) if first or middle else None


def _send(
    first: Hook | None,
    corrupting: _FaultPoint | None,
    middle: Hook | None,
    sock: socket.socket,
    buffers: list[memoryview],
) -> list[memoryview]:
    """Pass the points before and in the middle of a reply; return what is left of it to write."""
    if first is not None:
        first()
    message = bytearray().join(buffers)
    if corrupting is not None and corrupting.due():
        message[:8] = bytes(255 - byte for byte in message[:8])
    half = len(message) // 2 if middle is not None else 0
    sock.sendall(message[:half])
    if middle is not None:
        middle()
    return [memoryview(message)[half:]]


class _FaultPoint:
    def __init__(self, plans: list[FaultPlan]) -> None:
        self._plans = plans
        self._passes = 0

    def __call__(self) -> None:
        for plan in self.due():
            _DOING[plan.action](plan)

    def due(self) -> list[FaultPlan]:
        self._passes += 1
        return [p for p in self._plans if p.n in (EVERY_PASS, self._passes) and _is_first(p)]


def _is_first(plan: FaultPlan) -> bool:
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
