"""A worker process that is lent to the callers' threads, so that lone calls need no loop.

A call of a service from a thread takes four wake-ups: the loop, the worker, the loop and the
caller. Where calls come one at a time, the loop lends the worker that would be next: it stops
watching that worker's socket, and a caller's thread writes its request there and reads the answer
itself. Two wake-ups are left, and no decision (`Batcher.lend`).

For the core a worker that is lent is away. Once something waits that no other worker is free for,
or the service closes, `Todo.recall` names it, and the loop takes it back (`Lending.recall`). A call
under way becomes a batch like any other. The worker is also taken back when it dies, and when a
call takes long (20 ms) or is answered by anything but a plain result.

Callers' threads do not touch the core. The loop makes up the accounts of their calls, 32 at a time
(`Core.lone_done`), and in any case before the core learns of what came later;
`tests/engine/drive/test_lending.py` compares the books with those of the long way.

No lock is held by anybody, since threads may be interrupted at any point, and the loop must not
wait for them. What caller and loop could both do is a token in a list or a dict, which one of them
gets:

* `Loan.slot` has room for one call; whoever puts something in first has it, and the loop's recall
  fills it for good;
* `LentCall.outbox` has the message: who takes it out decides whether it is sent;
* `LentCall.turn` is the right to read the answer.

Taking a token, sending or receiving with it and keeping the outcome is one call of C code
(`list.extend`), which no signal handler interrupts.

Two wake-ups instead of four are 12 µs instead of 28 when nothing else runs, and on a busy machine
110 µs of processor time. Eight lone calls in a row start a loan. Rejected: a loop that spins (it
takes a core from the worker and saves one hop of four), and a lock around each turn of the loop
(Ctrl-C would raise in the midst of the core's state, since signal handlers run in the main thread,
which is mostly the caller's). Only services with one stage in processes lend, without `size=` or a
journal, on systems with `pidfd` and `eventfd`, and where the policy lets lone requests go
(`lone_slack_s`).
"""

from __future__ import annotations

import itertools
import os
import select
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from math import inf
from typing import Final

from carpool.engine.clock import Clock, monotonic
from carpool.engine.core.batch import Todo
from carpool.engine.drive.aio import Driver
from carpool.engine.drive.pools import BatchPool
from carpool.engine.drive.process import WorkerProcess
from carpool.engine.fast_paths import fast_path
from carpool.engine.request import DONE, Request
from carpool.engine.wire.frame import Frame, FrameKind, encode, open_reply
from carpool.engine.wire.payload import LARGE

NOT_RUN: Final = 0
"""What `Loan.run` returns where nothing was done: the request is to be submitted."""

ANSWERED: Final = 1
"""What `Loan.run` returns where the request has its result."""

TAKEN_OVER: Final = 2
"""What `Loan.run` returns where the loop sees to the answer, for which the caller is to wait."""

CALLS_BEFORE: Final = 8
"""So many calls in a row must have been alone for the worker to be lent."""

_LONGEST_S = 0.02  # then the loop takes a call over, which so loses little by the way
_LEAST_TIME: Final = 4 * _LONGEST_S  # a request that is in more of a hurry is the loop's
_SHARE: Final = 0.5  # of that time: stages that take longer have nothing to gain
_ACCOUNTS_AT_ONCE = 32
_LONGEST_C_CALL_S = 1.0  # of a thread that has begun to send or to receive; it does not block
_FIRST: Final = (0,)
_FIRST_ID: Final = 2**62  # of lone calls, and of their batches: no other request or batch comes to such an id
_RECEIVED_BYTES: Final = LARGE

Post = Callable[[Callable[[], object]], None]
"""Has something done on the loop, soon; may be called in any thread."""


class LentCall:
    """A call that a caller's thread makes with the worker that was lent.

    Attributes:
        request: What is asked; its caller is woken by the loop where that takes the call over.
        id: The id that the worker gets for the request, and for its batch; 0 until then.
        began: When it was begun; `ended` is when its answer was there.
        busy_s: How long the worker spent on it; before that it had waited for `waited_s`.
        outbox: The message, until somebody takes it.
        sent: How many bytes of it were sent; empty until then.
        turn: How many bytes to receive at most, until somebody begins to.
        received: What was received, as one piece; empty until then.
    """

    __slots__ = ("began", "busy_s", "ended", "id", "outbox", "received", "request", "sent", "turn", "waited_s")

    def __init__(self, request: Request, began: float) -> None:
        self.request = request
        self.id = 0
        self.began = self.ended = began
        self.busy_s = self.waited_s = 0.0
        self.outbox = [b""]
        self.sent: list[int] = []
        self.turn = [_RECEIVED_BYTES]
        self.received: list[bytes] = []


class _Bell:
    """Wakes the thread that waits for a worker's answer with `poll`, once and for all."""

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_CLOEXEC)

    def ring(self) -> None:
        os.eventfd_write(self.fd, 1)

    def __del__(self) -> None:
        if hasattr(self, "fd"):
            os.close(self.fd)


_RECALLED = LentCall(Request(None, inf), 0.0)
"""What the slot of a loan holds that is over."""


class Loan:
    """One worker that is lent, until it is taken back. Callers' threads use `run` only.

    Args:
        bell: Rung where the loop takes a call over, as it may read the answer before the call's
            thread looks.
        place: Its place in the stage.
        ids: Of its calls.
        longest_s: After how long the loop is to take a call over.
        post: Has something done on the loop, such as `settle` and `recall`.

    Attributes:
        is_over: Whether it has been taken back; it is set before the slot is looked at.
        slot: The call under way, with the key 0.
        done: Calls that were answered, and have not been accounted for.
    """

    def __init__(
        self,
        worker: WorkerProcess,
        sock: socket.socket,
        bell: _Bell,
        place: int,
        *,
        ids: Iterator[int],
        longest_s: float,
        post: Post,
        settle: Callable[[], None],
        recall: Callable[[], None],
        clock: Clock = monotonic,
    ) -> None:
        self.worker = worker
        self.bell = bell
        self.place = place
        self.is_over = False
        self.slot: dict[int, LentCall] = {}
        self.done: list[LentCall] = []
        self._next_id = ids.__next__
        self._longest_ms = 1000.0 * longest_s
        self._post = post
        self._settle = settle
        self._recall = recall
        self._clock = clock
        self._process = os.getpid()
        self._send, self._receive = sock.send, sock.recv
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)
        self._poll.register(bell.fd, select.POLLIN)
        self._readable = [(sock.fileno(), select.POLLIN)]  # if not, the loan is over or the worker dead

    def run(self, request: Request) -> int:
        """Have a request, whose caller the loop can wake, answered by the worker, if it is free;
        return `NOT_RUN`, `ANSWERED` or `TAKEN_OVER`.

        Raises:
            BaseException: The thread was interrupted; the loop takes the call over.
        """
        call = LentCall(request, self._clock())
        if request.deadline - call.began < _LEAST_TIME or request.nbytes >= LARGE:
            return NOT_RUN
        try:
            if self.slot.setdefault(0, call) is not call:
                return NOT_RUN
            if not self._has_sent(call):
                self._post(self._recall)
                return NOT_RUN
            if not self._is_answered(call):
                self._post(self._recall)
                return TAKEN_OVER
        except BaseException:
            self._post(self._recall)
            raise
        if not len(self.done) % _ACCOUNTS_AT_ONCE:
            self._post(self._settle)
        return ANSWERED

    def _has_sent(self, call: LentCall) -> bool:
        call.id = self._next_id()
        message = _message(call.request, call.id)
        if self.is_over:
            return False
        try:
            call.outbox[0] = message
            call.sent.extend(map(self._send, map(call.outbox.pop, _FIRST)))
        except IndexError:  # the loop has taken it out
            return False
        except OSError:  # the worker is dead, or its socket full; the loop finds out
            call.sent.append(0)
            return False
        if call.sent[0] < len(message):  # its socket was empty, so this cannot be
            self._post(partial(self.worker.kill, "it was killed as its socket took only a part of a message"))
        return True

    def _is_answered(self, call: LentCall) -> bool:
        if self._poll.poll(self._longest_ms) != self._readable or os.getpid() != self._process:
            return False
        try:
            call.received.extend(map(self._receive, map(call.turn.pop, _FIRST)))
        except IndexError:  # the loop reads it
            return False
        reply = open_reply(call.received[0], call.id)
        if reply is None:
            return False
        call.request.result, call.busy_s, call.waited_s = reply
        call.ended = self._clock()
        self.done.append(call)
        self.slot.pop(0, None)
        return True


def _message(request: Request, id: int) -> bytes:
    formats, accepts = bytes((request.format,)), bytes((request.accept,))
    items = [request.item]
    return b"".join(encode(Frame(FrameKind.BATCH, id, (id,), formats, accepts, (request.deadline,), items)))  # type: ignore[arg-type]


class Lending:
    """Lends the worker of a service with one stage to callers' threads, and takes it back, on the
    loop. The driver's `loan` is what callers find.
    """

    def __init__(self, driver: Driver, pool: BatchPool, post: Post) -> None:
        self._driver = driver
        self._pool = pool
        self._core = driver.core
        self._batcher = pool.batcher
        self._post = post
        self._longest_s = min(_LONGEST_S, self._batcher.times.least_s)
        self._ids = itertools.count(_FIRST_ID)
        self._in_a_row = 0  # calls that have been alone

    def polled(self, todo: Todo) -> None:
        n = len(todo.answer)
        if not n or self._driver.loan is not None:
            return
        if n > 1 or self._core.unanswered:
            self._in_a_row = 0
            return
        self._in_a_row += 1
        if self._in_a_row >= CALLS_BEFORE:
            self._lend()

    @fast_path("lent_worker", declined=False)
    def _lend(self) -> bool:
        """Lend the next worker, if it can be lent and a lone request would go at once; report
        whether it was.

        Fast path of `Driver.submit` and the loop, for callers in threads: the same outcome, see
        tests/engine/drive/test_lending.py.
        """
        driver = self._driver
        if not hasattr(os, "eventfd") or self._core.flow.closed_because is not None or self._is_slow:
            return False
        try:
            bell = _Bell()
        except OSError:  # no descriptor is left
            return False
        now = driver.clock()
        place = self._batcher.lend(now, now + _LEAST_TIME, self._core.flow.slo_s)
        if place is None:
            return False
        lent = self._pool.lend(place, self.recall)
        if lent is None:
            self._core.take_back(self._batcher, place)
            return False
        driver.loan = Loan(
            *lent,
            bell,
            place,
            ids=self._ids,
            longest_s=self._longest_s,
            post=self._post,
            settle=self.settle,
            recall=self.recall,
            clock=driver.clock,
        )
        return True

    @property
    def _is_slow(self) -> bool:
        return self._batcher.times.usual_s > _SHARE * self._longest_s

    def settle(self) -> None:
        """Make up the accounts, and take the worker back if lone calls would now have to wait."""
        driver = self._driver
        loan = driver.loan
        if loan is None or not loan.done:
            return
        done = loan.done[:]
        if done[-1] is loan.slot.get(0):  # its thread is not done with it, and a recall looks whether it is here
            del done[-1]
        del loan.done[: len(done)]
        self._account_for(loan.place, done)
        now = driver.clock()
        if self._is_slow or not self._batcher.lets_go(now, now + _LEAST_TIME, self._core.flow.slo_s):
            self.recall()

    def recall(self) -> None:
        """Take the worker back; a call that is under way becomes a batch like any other."""
        driver = self._driver
        loan, driver.loan = driver.loan, None
        if loan is None:
            return
        self._in_a_row = 0
        loan.is_over = True
        call = loan.slot.setdefault(0, _RECALLED)
        done = loan.done[:]  # from here on the thread of a call that is not in it can add to the loan's, in vain
        is_under_way = call is not _RECALLED and call not in done and _is_sent(call)
        unread = _take_turn(call) if is_under_way else b""
        self._account_for(loan.place, done)
        if is_under_way:
            loan.bell.ring()
            batch = self._core.take_back(self._batcher, loan.place, call.request, call.began, call.id)
        else:
            batch = self._core.take_back(self._batcher, loan.place)
        loan.worker.take_back(unread)
        driver.took_back(batch)

    def _account_for(self, place: int, calls: Sequence[LentCall]) -> None:
        core, stats = self._core, self._driver.stats
        stage = stats.stages[0]
        for call in calls:
            request = call.request
            request.state = DONE
            request.admitted = call.began
            core.lone_done(self._batcher, place, call.began, call.ended, call.busy_s, True)
            stage.went_alone(place, call.busy_s, call.waited_s)
            stats.answered((request,), call.ended)
        if calls:
            self._pool.roster.finished_batch()
        if self._pool.count_calls is not None:
            for _ in calls:
                self._pool.count_calls(place, 1)


def _is_sent(call: LentCall) -> bool:
    """Report whether the worker gets a call of a loan that is over; if not, nobody will send it."""
    try:
        call.outbox.pop()
    except IndexError:
        _wait_for(call.sent)
        return bool(call.sent and call.sent[0])
    return False


def _take_turn(call: LentCall) -> bytes:
    """Have the loop read the answer of a call, and return what its thread has received before."""
    try:
        call.turn.pop()
    except IndexError:
        _wait_for(call.received)
    return call.received[0] if call.received else b""


def _wait_for(outcome: list[int] | list[bytes]) -> None:
    """Wait for what a thread keeps in the same call of C code in which it took its token."""
    until = monotonic() + _LONGEST_C_CALL_S
    while not outcome and monotonic() < until:
        time.sleep(0)  # lets that thread have the interpreter
