"""Which answers and errors a call may end with, given what its program does. What has no excuse here is a finding."""

from __future__ import annotations

import linecache
from pathlib import Path
from typing import Any

import carpool
from carpool import CarpoolError
from tests.fuzz import models
from tests.fuzz.program import (
    Actor,
    Batch,
    Cancel,
    Change,
    Close,
    Fork,
    HangUp,
    Kill,
    Leave,
    Many,
    Parts,
    Predict,
    Program,
    Result,
    Silence,
    StartAgain,
    Stats,
    Step,
    Stream,
    Submit,
)

SHORT_S = 3.0
"""A time-out that is longer can only pass where something hangs."""

_MANY = 1000  # more than a program ever asks at once
_OURS = str(Path(carpool.__file__).parent)
_RAISING = ("raise", "pre", "post", "size", "dump", "load", "return")
_WRONG_MODELS = (*_RAISING, "short", "die", "hang", "close", "again", "round", "stats")


class Facts:
    """What a program does that can disturb others than the one who does it."""

    def __init__(self, program: Program) -> None:
        steps, items, subject = program.steps, program.items, program.subject
        self.is_batch = isinstance(subject, Batch)
        self.does = {item.do for item in items if item.do}
        self.kinds = {item.kind for item in items if item.do in _RAISING}
        self.closes = "close" in self.does or any(isinstance(step, Close) for step in steps)
        self.policy_raises = any((stage.policy or "").startswith("raises") for stage in program.stages)
        examples = {getattr(stage, "examples", "") for stage in program.stages} - {"", "good"}
        self.setup_raises = bool(examples) or any(stage.setup for stage in program.stages)
        self.teardown_raises = any(stage.teardown for stage in program.stages)
        self.sink_raises = bool(getattr(subject, "sink", ""))
        self.early = bool(getattr(subject, "early", False)) or getattr(subject, "patience_s", None) is not None
        self.kills = "die" in self.does or any(isinstance(step, Kill) for step in steps)
        self.hangs = bool(self.does & {"hang", "again", "round", "close"})
        self.hurried = not self.is_batch and subject.timeout_s < SHORT_S
        self.refuses = bool(subject.slo_s) or any(stage.policy == "few" for stage in program.stages)
        if program.over_http:  # whose front refuses where callers of a handle wait
            self.refuses = self.refuses or any(stage.max_queue_size < _MANY for stage in program.stages)
        self.has_client = program.has_client
        self.silent = any(isinstance(step, Silence) for step in steps)
        self.hangs_up = any(isinstance(step, HangUp) and not step.drops for step in steps)
        self.cancels = any(isinstance(step, Cancel | Leave) for step in steps)
        policies = [stage.policy or "" for stage in program.stages]
        self.kinds |= {policy.removeprefix("raises ") for policy in policies if policy.startswith("raises ")}
        self.kinds |= {stage.setup for stage in program.stages if stage.setup}
        self.kinds |= {stage.teardown for stage in program.stages if stage.teardown}
        self.breaks_loop = self.is_batch and program.in_tasks and bool(self.kinds & {"KeyboardInterrupt", "SystemExit"})
        self.quiet = not (
            self.does - {"slow"}
            or self.policy_raises
            or self.setup_raises
            or self.teardown_raises
            or self.sink_raises
            or self.kills
            or self.silent
            or (subject.timeout_s or SHORT_S) < SHORT_S
        )


def is_own(program: Program, facts: Facts, token: int, answer: Any) -> bool:
    """Whether an answer is that to the item with this token, from all stages that it was to pass."""
    n, graph = len(program.stages), getattr(program.subject, "graph", "")

    def passed(one: Any, stages: int) -> bool:
        if isinstance(one, models.Sent | models.Stubborn):
            return bool(one.token == token and one.passed == stages)
        return False

    def may_be_value(one: Any) -> bool:
        if isinstance(one, carpool.DeadlineExceeded):  # the item is in one call for longer than `max_batch_time_s`
            return facts.hangs or any(stage.max_batch_time_s is not None for stage in program.stages)
        return isinstance(one, carpool.ModelError | carpool.Unavailable) and not facts.quiet

    match graph:
        case "parallel":
            return type(answer) is tuple and len(answer) == n and all(passed(one, 1) for one in answer)
        case "values":
            names = [str(i) for i in range(n)]
            whole = type(answer) is dict and list(answer) == names
            return whole and all(passed(one, 1) or may_be_value(one) for one in answer.values())
        case "route":
            return passed(answer, int(models.branch_of(token, n) < n))
        case "each":
            whole = type(answer) is list and len(answer) == models.n_items(token)
            return whole and all(passed(one, n) for one in answer)
        case "early":
            return passed(answer, 0 if models.ends_early(token) else n)
        case "shared":
            return type(answer) is tuple and len(answer) == 2 and passed(answer[0], 1) and passed(answer[1], n)
    return passed(answer, n)


def cargoes(answer: Any) -> list[Any]:
    """What an answer carries that can be written to."""
    if type(answer) is dict:
        answer = list(answer.values())
    if type(answer) in (list, tuple):
        return [cargo for one in answer for cargo in cargoes(one)]
    return [] if isinstance(answer, carpool.CarpoolError) else [answer.cargo]


def may_raise(program: Program, facts: Facts, actor: Actor | None, step: Step, error: BaseException) -> bool:
    """Whether a step may end with this error."""
    if isinstance(step, Leave):
        step = step.step
    if isinstance(step, StartAgain):
        return _is_deliberate(error)
    if isinstance(step, Change) and isinstance(error, carpool.Unavailable):
        return True  # of several stages, if they are never empty for long enough
    if isinstance(error, CarpoolError):
        return _may_raise_ours(program, facts, actor, step, error)
    if _is_own_kind(facts, step, error):
        return True
    if isinstance(error, TimeoutError) and isinstance(step, Result):
        return step.timeout_s is not None
    if facts.has_client and isinstance(error, TypeError) and _dumps(step):
        return True  # it cannot be written
    return _is_deliberate(error) and _is_misused(program, facts, actor, step)


def limit_s(program: Program, step: Step) -> float | None:
    """The time-out of a step's call; None for none."""
    given = [program.client_s if program.has_client else program.subject.timeout_s]
    if isinstance(step, Result) or not isinstance(program.subject, Batch):
        given.append(getattr(step, "timeout_s", None))
    return min([limit for limit in given if limit is not None], default=None)


def _may_raise_ours(program: Program, facts: Facts, actor: Actor | None, step: Step, error: CarpoolError) -> bool:
    limit = limit_s(program, step)
    short = limit is not None and limit < SHORT_S
    stranger = actor is not None and actor.loop < 0
    if isinstance(error, carpool.DeadlineExceeded) and isinstance(step, Stats):
        return True  # it was not ready
    if isinstance(error, carpool.DeadlineExceeded):
        return short or facts.hangs or (isinstance(step, Result) and step.timeout_s is not None)
    if isinstance(error, carpool.Overloaded):
        return short or facts.refuses or facts.hangs
    if isinstance(error, carpool.StartupError):
        return facts.setup_raises or facts.policy_raises or facts.closes or facts.sink_raises or facts.kills
    if isinstance(error, carpool.Unavailable):
        if facts.closes or facts.policy_raises or facts.kills or facts.setup_raises or facts.early or stranger:
            return True
        if facts.silent or facts.hangs_up:
            return True
        if facts.hangs or (facts.is_batch and facts.cancels):
            return True
        if facts.hurried and program.in_parts and "slow" in facts.does:
            return True  # its steps are given up after a share of that time
        return bool(facts.kinds & {"KeyboardInterrupt", "SystemExit", "GeneratorExit", "CancelledError"})
    if isinstance(error, carpool.ModelError):
        if facts.hurried or facts.teardown_raises:
            return True  # its calls are given up after a share of that time
        return bool(facts.does & set(_WRONG_MODELS)) or facts.kills or facts.policy_raises or facts.setup_raises
    return False


def _is_own_kind(facts: Facts, step: Step, error: BaseException) -> bool:
    """Whether an exception is one that the program raises, where it is told as it is."""
    kinds = set(facts.kinds) if facts.is_batch else set()
    if isinstance(step, Predict | Submit | Parts):
        kinds |= {step.item.kind} if step.item.do == "dump" else set()
    if isinstance(step, Many | Stream):
        kinds |= {item.kind for item in step.items if item.do == "dump"}
    if isinstance(step, Stream) and "raises" in step.source:
        kinds.add(step.kind)
    if isinstance(step, Close):
        kinds |= facts.kinds
    if isinstance(error, RuntimeError) and type(error) is RuntimeError:
        return bool(kinds & {"StopIteration", "StopAsyncIteration"})  # what Python makes of them in a generator
    return any(type(error) is type(models.make(kind)) for kind in kinds) and _is_fuzz(error)


def _dumps(step: Step) -> bool:
    """Whether a step has an item that cannot be written."""
    return any(item.do == "dump" for item in Program(Batch(), (Actor((step,)),)).items)


def _is_fuzz(error: BaseException) -> bool:
    if isinstance(error, GeneratorExit):
        return True  # a new one, where a coroutine is closed by it
    return isinstance(error, models.Mute) or "fuzz" in error.args


def _is_misused(program: Program, facts: Facts, actor: Actor | None, step: Step) -> bool:
    """Whether a program breaks a rule for which there is an error with a text."""
    stranger = actor is not None and actor.loop < 0
    if facts.is_batch and "short" in facts.does:
        return True  # the merged output has too few rows
    return bool(
        stranger
        or facts.closes
        or facts.hangs_up
        or facts.early
        or facts.setup_raises
        or facts.does & {"again", "round"}
        or isinstance(step, Fork)
    )


def _is_deliberate(error: BaseException) -> bool:
    """Whether our own code has raised it, by a `raise`: a RuntimeError, TypeError or ValueError with a text of ours."""
    if type(error) not in (RuntimeError, TypeError, ValueError):
        return False
    frame = error.__traceback__
    while frame is not None and frame.tb_next is not None:
        frame = frame.tb_next
    if frame is None:
        return False
    name = frame.tb_frame.f_code.co_filename
    return name.startswith(_OURS) and _raises(name, frame.tb_lineno)


def _raises(name: str, line: int) -> bool:
    """Whether the statement at a line is a `raise`, which may begin some lines above."""
    return any(linecache.getline(name, line - up).lstrip().startswith("raise ") for up in range(4))
