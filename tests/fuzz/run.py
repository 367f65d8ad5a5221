"""Runs one program, watches every call, and says what was wrong.

    from tests.fuzz.program import *
    from tests.fuzz.run import check

    check(Program(Service(), (Actor((Predict(),)),)))

The program lives in threads of its own. The calling thread only watches: a call that takes longer than its time-out and
a grace is a finding, told with the stacks of all threads and tasks, and the rest of the program is left as it is. So a
process that has seen a hang should run no other program.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import os
import re
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import carpool
from tests.fuzz import models, telling, verdict
from tests.fuzz.actors import CHANGE_S, CHILD_S, SLOW_INPUT_S, Asked, InTask, InThread, Wrong
from tests.fuzz.leftovers import Before, Complaints, warm_up
from tests.fuzz.program import (
    KINDS,
    Actor,
    Batch,
    Change,
    Close,
    Fork,
    HangUp,
    Item,
    Leave,
    Many,
    Predict,
    Program,
    Stats,
    Step,
    Stream,
)
from tests.fuzz.program import Sleep as SleepStep
from tests.fuzz.subject import new_function, new_handle

GRACE_S = 10.0
"""What a call may take beyond its time-out: "a second" of the promise, and a busy machine."""

_NUMBER = re.compile(r"0x[0-9a-f]+|[0-9]+(?:[.][0-9]+)?")
_KIND = re.compile("|".join([*KINDS, "Boom"]))
_LOOK_S = 0.1
_IDLE_S = 20.0  # for a program in which no call is under way, and which does not end
_SETTLE_S = 5.0
_MOST_CALLS = 6
"""Calls of a model in a thread in which one item hangs: of a batch that raises, and of its halves."""
_FORGOTTEN = re.compile(
    r"ResourceWarning: unclosed (transport <_SelectorSocket|(resource|transport) <TCPTransport |<socket)"
)
_SAYS_SO = "its workers are ended"
_START_S = 30.0
_STOP_S = 6.0  # workers have 5 s to end
_MOST_COLLECTIONS = 4
_TASKS_SETTLE_S = 2.0


@dataclass
class Finding:
    """Something that was wrong.

    Attributes:
        kind: "hang", "wrong answer", "wrong error", "left behind", "complaint".
        what: One line, the same for the same defect as far as possible.
        text: All there is to tell.
        poisoned: Whether the process should run no other program.
    """

    kind: str
    what: str
    text: str
    poisoned: bool = False

    @property
    def signature(self) -> str:
        """The same for findings that are probably one defect."""
        return _KIND.sub("Kind", _NUMBER.sub("#", f"{self.kind}: {self.what}"))


class _Doing:
    """A call that is under way."""

    def __init__(self, who: str, step: Step | str, most_s: float) -> None:
        self.who, self.step, self.most_s = who, step, most_s
        self.thread = threading.get_ident()
        self.task = telling.current_task()
        self.began = time.monotonic()

    @property
    def overdue(self) -> bool:
        return time.monotonic() - self.began > self.most_s


class Run:
    """One run of one program.

    Args:
        program: What to do.
        grace_s: What a call may take beyond its time-out.

    Attributes:
        subject: The handle, or the batched function; None until it is made.
        tokens: Numbers that no two items share.
        tickets: That have been taken, with what they were taken for.
        findings: So far.
        worn: Whether a KeyboardInterrupt has ended a loop, as it does in asyncio, and left what it was doing.
    """

    def __init__(self, program: Program, grace_s: float = GRACE_S) -> None:
        self.program = program
        self.facts = verdict.Facts(program)
        self.is_batch = isinstance(program.subject, Batch)
        self.subject: Any = None
        self.tokens = itertools.count(1)
        self.tickets: list[tuple[Any, Asked]] = []
        self.children: list[Any] = []  # that were forked
        self.findings: list[Finding] = []
        self.output: list[str] = []
        self._grace_s = grace_s
        self._doing: dict[str, _Doing] = {}
        self._over = threading.Event()
        self._actors_left = len(program.actors)
        self._lock = threading.Lock()
        self._loops: list[asyncio.AbstractEventLoop] = []
        self.worn = False
        self._keep: Any = None  # the instance of a method
        self._kept: list[tuple[int, Any]] = []  # what is in the answers that were given
        self._kept_lock = threading.Lock()

    def go(self) -> list[Finding]:
        """Run the program, and return what was wrong."""
        before = Before()
        models.here = self
        with Complaints(self._complain):
            boss = threading.Thread(target=self._live, name="fuzz-boss", daemon=True)
            boss.start()
            busy_at = time.monotonic()
            while not self._over.wait(_LOOK_S):
                under_way = list(self._doing.values())
                if under_way:
                    busy_at = time.monotonic()
                overdue = [doing for doing in under_way if doing.overdue]
                if overdue or time.monotonic() - busy_at > _IDLE_S:
                    self._hung(overdue)
                    return self.findings
            boss.join()
            self._look_at_what_was_kept()
            self.subject = self._keep = None
            self.tickets.clear()
            for child in self.children:
                child.end()  # SystemExit ends a loop whose tasks may wait for children
            self.children.clear()
            self._loops.clear()
            _collect()
            settle_s = _SETTLE_S + (models.HANG_S * _MOST_CALLS if self.facts.hangs else 0)
            if left := before.left(settle_s):
                self._find("left behind", ", ".join(sorted(set(left))), telling.stacks(), poisoned=True)
        models.here = None
        return self.findings

    def keep(self, token: int, cargo: Any) -> None:
        """Take the cargo of an answer, which its caller keeps, and writes over later."""
        with self._kept_lock:
            if any(each is cargo for _, each in self._kept):
                return  # a part that is the answer, too
            if not models.holds(cargo, token):
                raise Wrong(f"the answer to token {token} carries {cargo!r:.300}")
            self._kept.append((token, cargo))
            if len(self._kept) % 3 == 0:
                before, mine = self._kept[0]
                models.overwrite(mine, -before)
                self._kept[0] = -before, mine
                self._kept.sort(key=lambda kept: -kept[0])

    def _look_at_what_was_kept(self) -> None:
        for token, cargo in self._kept:
            if not models.holds(cargo, token):
                self._find("wrong answer", "somebody else has written into an answer", f"{token}: {cargo!r:.300}")

    # -- what actors and models ask of it

    def may_raise(self, step: Step, error: BaseException, actor: Actor | None = None) -> bool:
        """Whether a step may end with this error."""
        return verdict.may_raise(self.program, self.facts, actor, step, error)

    def from_inside(self, order: str) -> None:
        """A model in a thread uses its own service or function, unless the program is over meanwhile."""
        if self.subject is None:
            return
        if order == "round":
            self._go_round()
            return
        take: Callable[[Step], None] = InThread(self).take
        if self.program.in_tasks:
            take = lambda step: asyncio.run(InTask(self).take(step))  # noqa: E731
        try:
            take(_FROM_INSIDE[order])
        except BaseException as error:
            self._judge_inside(order, error)

    async def from_inside_async(self, order: str) -> None:
        """A model in a task uses its own service or function, unless the program is over meanwhile."""
        if self.subject is None:
            return
        if order == "round":
            await self._go_round_async()
            return
        try:
            if self.program.in_tasks:
                await InTask(self).take(_FROM_INSIDE[order])
            else:
                InThread(self).take(_FROM_INSIDE[order])
        except BaseException as error:
            self._judge_inside(order, error)

    def _go_round(self) -> None:
        """By way of a function of its own, which has callers of its own."""

        @carpool.batch(max_batch_size=2)
        def other(xs: list[Any]) -> list[Any]:
            self.from_inside("again")
            return xs

        other(0)

    async def _go_round_async(self) -> None:
        @carpool.batch(max_batch_size=2)
        async def other(xs: list[Any]) -> list[Any]:
            await self.from_inside_async("again")
            return xs

        await other(0)

    def _judge_inside(self, order: str, error: BaseException) -> None:
        if isinstance(error, asyncio.CancelledError | GeneratorExit):
            raise error
        if not isinstance(error, carpool.CarpoolError | RuntimeError):
            self._find_error("inside", _FROM_INSIDE[order], error)

    # -- the program's life

    def _live(self) -> None:
        try:
            if self.program.in_tasks:
                self._live_in_loops()
            else:
                self._live_in_threads()
        except BaseException as error:
            self._find("harness", f"{type(error).__name__}", telling.told(error), poisoned=True)
        finally:
            self._over.set()

    def _live_in_threads(self) -> None:
        threads = [
            threading.Thread(target=self._act, args=(i, actor), name=f"fuzz-actor-{i}", daemon=True)
            for i, actor in enumerate(self.program.actors)
        ]
        early = getattr(self.program.subject, "early", False) and self.program.subject.way != "start"  # type: ignore[union-attr]
        started = False
        if early:
            self.subject = self._make()
            for thread in threads:
                thread.start()
        try:
            with _Watched(self, "main", "start", _START_S + self._longest_s()):
                self._start()
            started = True
        except BaseException as error:
            self._judge("main", None, Close(), error)
        if not early:
            for thread in threads:
                if started:
                    thread.start()
        for thread in threads:
            if thread.ident is not None:
                thread.join()
        if self.program.has_client and (started or early):
            for last in self._last_steps():
                self._act_one("main", None, last, InThread(self).take)
        elif started and getattr(self.program.subject, "abandon", False):
            self.subject = None
        elif started or early:
            self._act_one("main", None, Close(), InThread(self).take)

    def _start(self) -> None:
        if self.is_batch:
            self.subject = self._make()
            return
        if self.subject is None:
            self.subject = self._make()
        if self.program.subject.way in ("run", "client"):  # type: ignore[union-attr]
            self.subject.start()

    def _act(self, number: int, actor: Actor) -> None:
        for step in actor.steps:
            if not isinstance(step, Leave):
                self._act_one(f"actor {number}", actor, step, InThread(self).take)

    def _act_one(self, who: str, actor: Actor | None, step: Step, take: Callable[[Step], None]) -> None:
        try:
            with _Watched(self, who, step, self.most_s(step)):
                take(step)
        except BaseException as error:
            self._judge(who, actor, step, error)

    def _last_steps(self) -> tuple[Step, ...]:
        """What ends a client and its server."""
        return HangUp(drops=self.program.subject.abandon), Close()  # type: ignore[union-attr]

    # -- the same in tasks

    def _live_in_loops(self) -> None:
        n = getattr(self.program.subject, "loops", 1)
        threads = [threading.Thread(target=self._loop, args=(k,), name=f"fuzz-loop-{k}", daemon=True) for k in range(n)]
        self.subject = self._make()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if getattr(self.program.subject, "abandon", False) and not self.program.has_client:
            self._act_one("main", None, Close(), lambda step: asyncio.run(InTask(self).take(step)))

    def _loop(self, k: int) -> None:
        new_loop = asyncio.new_event_loop
        if self.program.subject.loop == "uvloop":
            import uvloop

            new_loop = uvloop.new_event_loop
        try:
            with asyncio.Runner(loop_factory=new_loop) as runner:
                self._loops.append(runner.get_loop())
                try:
                    runner.run(self._live_in_loop(k))
                except (KeyboardInterrupt, SystemExit):
                    if not self.facts.breaks_loop:
                        raise
                    self.worn = True
        except BaseException as error:
            if not self.worn:
                self._find_error(f"loop {k}", Close(), error)

    async def _live_in_loop(self, k: int) -> None:
        actors = [(i, actor) for i, actor in enumerate(self.program.actors) if max(actor.loop, 0) == k]
        strangers = [
            threading.Thread(target=self._be_stranger, args=(i, actor), name=f"fuzz-stranger-{i}", daemon=True)
            for i, actor in actors
            if actor.loop < 0
        ]
        tasks: list[asyncio.Task[None]] = []

        def set_off() -> None:
            tasks.extend(asyncio.ensure_future(self._act_async(i, actor)) for i, actor in actors if actor.loop >= 0)
            for stranger in strangers:
                stranger.start()

        early = getattr(self.program.subject, "early", False)
        if early:
            set_off()
            await asyncio.sleep(0)
        started = True
        if not self.is_batch:
            try:
                with _Watched(self, "main", "start", _START_S + self._longest_s()):
                    async with asyncio.timeout(self.program.subject.patience_s):  # type: ignore[union-attr]
                        await self.subject.start()
            except TimeoutError:
                started = False
            except BaseException as error:
                started = False
                self._judge("main", None, Close(), error)
        if started and not early:
            set_off()
        if tasks:
            await asyncio.wait(tasks)
        while self._actors_left and (started or early):  # noqa: ASYNC110 - some are in other threads
            await asyncio.sleep(0.002)
        if self.program.has_client:
            for last in self._last_steps():
                await self._act_one_async("main", None, last)
        elif getattr(self.program.subject, "abandon", False):
            return
        else:
            await self._act_one_async("main", None, Close())
        await self._look_for_tasks()

    async def _act_async(self, number: int, actor: Actor) -> None:
        try:
            for step in actor.steps:
                await self._act_one_async(_called(number, actor), actor, step)
        finally:
            with self._lock:
                self._actors_left -= 1

    async def _act_one_async(self, who: str, actor: Actor | None, step: Step) -> None:
        try:
            with _Watched(self, who, step, self.most_s(step)):
                await InTask(self).take(step)
        except BaseException as error:
            self._judge(who, actor, step, error)

    def _be_stranger(self, number: int, actor: Actor) -> None:
        """Use it from a loop where it is not at home."""
        try:
            asyncio.run(self._act_async(number, actor))
        except BaseException as error:
            self._judge(_called(number, actor), actor, Close(), error)

    async def _look_for_tasks(self) -> None:
        """No task but this one is to be left."""
        if self.program.has_client:  # what was dropped is closed by tasks of this loop
            _collect()
            await asyncio.sleep(0)
        until = time.monotonic() + _TASKS_SETTLE_S + (models.HANG_S if self.facts.hangs else 0)
        while left := asyncio.all_tasks() - {asyncio.current_task()}:
            if time.monotonic() > until:
                names = sorted({task.get_coro().__qualname__ for task in left})  # type: ignore[union-attr]
                self._find("left behind", f"task {', '.join(names)}", "\n".join(map(repr, left)))
                return
            await asyncio.sleep(0.005)

    def _make(self) -> Any:
        subject = self.program.subject
        if isinstance(subject, Batch):
            function, self._keep = new_function(subject)
            return function
        return new_handle(self.program, self._sink)

    def _sink(self, worker: str, is_error: bool, line: str) -> None:
        self.output.append(f"{worker}: {line}")
        if self.program.subject.sink:  # type: ignore[union-attr]
            models.throw(self.program.subject.sink)  # type: ignore[union-attr]
        if self.facts.quiet and "Traceback" in line:
            self._find("complaint", "a worker's traceback", "\n".join(self.output))

    def most_s(self, step: Step | None) -> float:
        """How long a step may take."""
        if isinstance(step, SleepStep):
            return step.seconds + self._grace_s
        if isinstance(step, Leave):
            return step.after_s + self.most_s(step.step)
        if isinstance(step, Fork):
            return CHILD_S + self._grace_s
        limit = verdict.limit_s(self.program, step) if step is not None else None
        most = self._longest_s() if limit is None else limit
        if self.is_batch:  # whoever runs the batch waits for its own call
            most += self._longest_s()
        if isinstance(step, Many) and self.program.has_client:  # which tries again meanwhile
            most *= max(1, len(step.items))
        if isinstance(step, Close):
            most = self._longest_s() + _STOP_S
        if isinstance(step, Change):
            most = self._longest_s() + 2 * CHANGE_S + _STOP_S
        if isinstance(step, Stream):
            most = most * (1 + len(step.items) // (step.max_in_flight or 64)) + SLOW_INPUT_S * len(step.items)
        return most + self._grace_s

    def _longest_s(self) -> float:
        """What all work of the program takes, one after the other."""
        does = [item.do for item in self.program.items]
        work = models.SLOW_S * 10 * does.count("slow") + models.HANG_S * 3 * does.count("hang")
        return max(self.program.subject.timeout_s or 0.0, work, 1.0)

    def begin(self, who: str, doing: _Doing) -> None:
        """Note that a call is under way."""
        self._doing[who] = doing

    def end(self, who: str) -> None:
        """Note that a call has ended."""
        self._doing.pop(who, None)

    def _hung(self, overdue: list[_Doing]) -> None:
        lines = [f"{each.who}: {each.step!r} has not ended for {each.most_s:.1f} s" for each in overdue]
        stacks = telling.stacks() + "".join(map(telling.tasks, self._loops))
        steps = sorted({each.step if isinstance(each.step, str) else _name(each.step) for each in overdue})
        stranger = "stranger's " if all(each.who.startswith("stranger") for each in overdue) else ""
        places = " ".join(sorted({telling.place(each.thread, each.task) for each in overdue}))
        what = f"{self._where()} {stranger}{'+'.join(steps)} at {places}"
        self._find("hang", what, "\n".join(lines) + "\n" + stacks, poisoned=True)

    def _where(self) -> str:
        subject = self.program.subject
        if isinstance(subject, Batch):
            return f"{'async ' if subject.tasks else ''}batch of {subject.over}"
        return f"{subject.way} {'-'.join(stage.run_in for stage in subject.stages)}"

    def _judge(self, who: str, actor: Actor | None, step: Step, error: BaseException) -> None:
        if isinstance(error, Wrong):
            what = str(error).splitlines()[0].split(", answered")[0]
            self._find("wrong answer", f"{_name(step)}: {what}", f"{who}: {step!r}\n{telling.told(error)}")
        elif self.worn and isinstance(error, asyncio.CancelledError):
            return  # the loop has ended, and has cancelled all that ran
        elif not self.may_raise(step, error, actor):
            self._find_error(who, step, error)

    def _find_error(self, who: str, step: Step, error: BaseException) -> None:
        what = f"{type(error).__name__}: {telling.line_of(error)} at {telling.raised_at(error)}"
        what = f"{self._where()} {_name(step)} raised {what}"
        self._find("wrong error", what, f"{who}: {step!r}\n{telling.told(error)}")

    def _complain(self, origin: str, text: str) -> None:
        if origin.startswith("log carpool") and not (origin.endswith(("ERROR", "CRITICAL")) and self.facts.quiet):
            return
        if origin.startswith("log carpool") and "Traceback" not in text:
            return
        if origin == "warning" and getattr(self.program.subject, "abandon", False) and _SAYS_SO in text:
            return
        if origin == "warning" and self.program.has_client and self.program.in_tasks and _FORGOTTEN.search(text):
            return  # httpcore closes those that a server has closed one by one, and forgets the rest if it is cancelled
        if origin.startswith("log asyncio") and self.facts.breaks_loop:
            return  # of what the loop has left when it ended
        lines = text.strip().splitlines() or [""]
        self._find("complaint", f"{origin}: {lines[0]:.120} … {lines[-1]:.120}", text)

    def _find(self, kind: str, what: str, text: str, poisoned: bool = False) -> None:
        self.findings.append(Finding(kind, what, text, poisoned))


class _Watched:
    """Around a call: notes when it begins and ends."""

    def __init__(self, run: Run, who: str, step: Step | str, most_s: float) -> None:
        self._run, self._who = run, who
        self._doing = _Doing(who, step, most_s)

    def __enter__(self) -> None:
        self._run.begin(self._who, self._doing)

    def __exit__(self, *exc: object) -> None:
        self._run.end(self._who)


_FROM_INSIDE: dict[str, Step] = {"again": Predict(Item(), timeout_s=0.5), "close": Close(), "stats": Stats()}


def _collect() -> None:
    """All garbage, so that what it complains of is heard now: finalizers free other objects."""
    for _ in range(_MOST_COLLECTIONS):
        if not gc.collect():
            return


def _called(number: int, actor: Actor) -> str:
    return f"{'stranger' if actor.loop < 0 else 'actor'} {number}"


def _name(step: Step) -> str:
    return _name(step.step) if isinstance(step, Leave) else type(step).__name__


def check(program: Program, grace_s: float = GRACE_S) -> None:
    """Run a program and tell what was wrong; ends the process, since a hang may be in it."""
    warm_up()
    findings = Run(program, grace_s).go()
    for finding in findings:
        print(f"{finding.kind}: {finding.what}\n{finding.text}\n")
    print(f"{len(findings)} findings")
    sys.stdout.flush()
    os._exit(bool(findings))
