"""Makes programs up. All dice are one `Random`, so a seed and a number are a program."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

from tests.fuzz.program import (
    CLIENTS,
    GRAPHS,
    KINDS,
    Actor,
    Batch,
    Cancel,
    Change,
    Close,
    Fork,
    HangUp,
    Item,
    Kill,
    Leave,
    Many,
    Parts,
    Predict,
    Program,
    Result,
    Service,
    Silence,
    Sleep,
    Stage,
    StartAgain,
    Stats,
    Step,
    Stream,
    Submit,
)

_POLICIES = (None, None, "adaptive", "greedy", "static", "static", "aimd", "cork", "deadline", "few", "idle")
_PROCESSES = 0.04
_MOST_IN_PROCESSES = 30
_IN_PARTS = 0.3  # of services
_CLIENTS = 0.25  # of services
_GRAPHS = 0.4  # of services that answer whole, and are asked by handles
_SILENT = 0.2  # of those
_MOST_IN_SILENCE = 12  # each step may take its whole time there
_INSIDE = ("again", "round", "close", "stats")


def program(seed: int, number: int) -> Program:
    """The program with this number."""
    return _Draw(Random(f"{seed}/{number}")).program()


class _Draw:
    def __init__(self, dice: Random) -> None:
        self._dice = dice
        self._trouble = dice.random()  # how much of it there is: a third of the programs have none
        self._in_process = dice.random() < _PROCESSES
        self._tame = self._trouble < 0.33
        self._closes = dice.random() < 0.4
        self._forks = dice.random() < 0.06
        self._hung = False
        self._parts_dice = Random(f"parts {dice.random()}")
        self._answers_in_parts = False
        self._changes_dice = Random(f"changes {self._trouble}")  # of its own, so that no other program changes
        self._cargo_dice = Random(f"cargo {self._trouble}")  # likewise
        self._shapes_dice = Random(f"shapes {self._trouble}")  # likewise
        self._clients_dice = Random(f"clients {self._trouble}")  # likewise
        self._graphs_dice = Random(f"graphs {self._trouble}")  # likewise
        self._has_client = self._hangs_up = self._falls_silent = False

    def program(self) -> Program:
        is_batch = not self._in_process and self._chance(0.5)
        self._subject: Any = self._batch() if is_batch else self._service()
        self._forks = self._forks and not (is_batch and self._subject.lock)  # held for ever in the child
        self._in_tasks = Program(self._subject, ()).in_tasks
        actors = self._actors()
        return Program(self._subject, self._with_silence(actors) if self._falls_silent else actors)

    # -- subjects

    def _service(self) -> Service:
        n = self._pick((1, 1, 1, 2, 2, 3))
        stages = tuple(self._stage("process" if self._in_process and i == 0 else "") for i in range(n))
        if self._parts_dice.random() < _IN_PARTS:
            stages = (*stages[:-1], self._in_parts(stages[-1]))
            self._answers_in_parts = True
        way = self._pick(("run", "run", "start", "run_async", "run_async", "app"))
        dice = self._clients_dice
        if dice.random() < _CLIENTS:
            way, self._has_client = dice.choice(CLIENTS), True
            self._hangs_up, self._falls_silent = dice.random() < 0.5, dice.random() < _SILENT
        graph = ""
        if not self._answers_in_parts and way in ("run", "start", "run_async") and self._graphs_dice.random() < _GRAPHS:
            graph = self._graphs_dice.choice(GRAPHS)
        over_json = way == "app" or self._has_client
        return Service(
            stages,
            way=way,
            timeout_s=self._pick((10.0, 10.0, 10.0, 1.0, 0.3, 0.05)),
            slo_s=self._pick((None, None, None, None, 0.005, 0.5)),
            loop=self._pick(("asyncio", "uvloop")),
            early=self._chance(0.05),
            sink=self._kind() if self._in_process and self._wild(0.1) and not self._has_client else "",
            abandon=way != "app" and self._chance(0.1),
            patience_s=self._pick((0.0, 0.001, 0.005)) if way == "run_async" and self._chance(0.06) else None,
            cargo=self._cargo_dice.choice(("", "list") if over_json else ("", "list", "array", "large")),
            graph=graph,
        )

    def _in_parts(self, stage: Stage) -> Stage:
        """A stage in the place of another that answers in parts."""
        dice = self._parts_dice
        return Stage(
            run_in=stage.run_in,
            model=dice.choice(("steps", "steps", "resuming", "resuming", "generator")),
            max_batch_size=dice.choice((1, 2, 4, 16)),
            max_queue_size=stage.max_queue_size,
            workers=stage.workers,
            policy=dice.choice((None, None, "paced", "greedy", "static")),
            max_batch_time_s=stage.max_batch_time_s,
            isolate_errors=stage.isolate_errors,
        )

    def _stage(self, run_in: str) -> Stage:
        run_in = run_in or self._pick(("thread", "thread", "loop"))
        batch = self._pick((None, 1, 2, 4, 4, 16))
        size = batch is not None and self._chance(0.15)
        model = self._pick(("function", "class"))
        return Stage(
            run_in=run_in,
            model=model,
            max_batch_size=batch,
            max_queue_size=self._pick((1024, 1024, 16, 16)),
            workers=self._pick((1, 1, 2, 3)) if run_in != "process" else self._pick((1, 1, 2)),
            policy=self._policy() if batch is not None else None,
            max_queue_delay_s=self._pick((None, None, None, 0.0, 0.002, 0.02)),
            max_batch_time_s=self._pick((None, None, None, 0.3)),
            size=size,
            shapes=batch is not None and batch > 1 and self._shapes_dice.random() < 0.2,
            allowed=batch is not None and batch > 1 and not size and self._chance(0.1),
            examples=self._kind() if model == "class" and self._wild(0.03) else self._pick(("", "", "", "good")),
            isolate_errors=self._pick((None, None, True, False)),
            setup=self._kind() if model == "class" and self._wild(0.04) else "",
            teardown=self._kind() if model == "class" and self._wild(0.04) else "",
        )

    def _batch(self) -> Batch:
        over = self._pick(("function", "function", "method", "class", "merge", "arrays"))
        tasks = self._chance(0.5)
        lock = self._chance(0.1)
        return Batch(
            over,
            tasks=tasks,
            loops=self._pick((1, 1, 1, 2, 3)) if tasks and not lock and over != "class" else 1,
            loop=self._pick(("asyncio", "uvloop")),
            max_batch_size=self._pick((1, 2, 4, 4, 16, None)),
            max_queue_size=self._pick((1024, 1024, 16, 2)),
            max_in_flight_batches=self._pick((1, 1, 2, 3)),
            policy=self._policy(),
            max_queue_delay_s=self._pick((None, None, 0.002, 0.02)),
            timeout_s=self._pick((None, None, 10.0, 10.0, 1.0, 0.05)),
            slo_s=self._pick((None, None, None, None, 0.005, 0.5)),
            size=self._chance(0.15),
            lock=lock,
            isolate_errors=self._chance(0.3),
            setup=self._kind() if over == "class" and tasks and self._wild(0.1) else "",
            teardown=self._kind() if over == "class" and self._wild(0.1) else "",
        )

    def _policy(self) -> str | None:
        if self._wild(0.05):
            return f"raises {self._kind()}"
        return self._pick(_POLICIES)

    # -- actors and steps

    def _actors(self) -> tuple[Actor, ...]:
        most = _MOST_IN_SILENCE if self._falls_silent else _MOST_IN_PROCESSES if self._in_process else 60
        n = self._pick((1, 2, 3, 4, 6, 8))
        each = self._pick((2, 5, 10, 20))
        loops = getattr(self._subject, "loops", 1)
        actors = []
        for _ in range(n):
            loop = self._dice.randrange(loops)
            if self._in_tasks and self._may_have_strangers() and self._wild(0.04):
                loop = -1
            steps = tuple(self._step() for _ in range(min(self._dice.randint(1, each), most // n)))
            actors.append(Actor(steps, loop))
        return tuple(actors)

    def _with_silence(self, actors: tuple[Actor, ...]) -> tuple[Actor, ...]:
        """The actors, of whom the first has the server fall silent some time."""
        steps = list(actors[0].steps)
        steps.insert(self._clients_dice.randint(0, len(steps)), Silence())
        return replace(actors[0], steps=tuple(steps)), *actors[1:]

    def _may_have_strangers(self) -> bool:
        """A function has no home; and an app is at home where it is asked first."""
        if not isinstance(self._subject, Service) or self._has_client:
            return False
        return not (self._subject.way == "app" and self._subject.early)

    def _step(self) -> Step:
        if self._hangs_up and self._clients_dice.random() < 0.06:
            return HangUp(drops=self._clients_dice.random() < 0.5)
        is_handle = isinstance(self._subject, Service) and self._subject.way != "app" and not self._has_client
        if is_handle and self._changes_dice.random() < 0.04:
            most = 2 if self._in_process else 4
            return Change(self._changes_dice.randrange(len(self._subject.stages)), self._changes_dice.randint(0, most))
        if self._closes and self._chance(0.06):
            return Close(drain=self._chance(0.7))
        if self._forks and self._chance(0.15):
            return Fork(self._pick(("predict", "stream", "stats", "close", "nothing")))
        if self._in_process and self._wild(0.08):
            return Kill()
        step = self._call()
        if self._in_tasks and self._chance(0.15):
            return Leave(step, self._pick((0.0, 0.0, 0.001, 0.01)))
        return step

    def _call(self) -> Step:
        is_batch = isinstance(self._subject, Batch)
        choice = self._dice.random()
        if not is_batch and self._parts_dice.random() < (0.6 if self._answers_in_parts else 0.03):
            return self._parts()
        if choice < 0.55:
            if is_batch:
                return Predict(self._item())
            return Predict(self._item(), self._timeout(), self._pick((0, 0, 0, 1, 5)))
        if choice < 0.7:
            return self._stream()
        if choice < 0.78:
            return Many(tuple(self._item() for _ in range(self._dice.randint(0, 8))))
        if choice < 0.85:
            return Sleep(self._pick((0.0, 0.001, 0.005)))
        if is_batch:
            if self._in_tasks:
                return Predict(self._item())
            return self._pick(
                (
                    Submit(self._item(), self._chance(0.3)),
                    Result(self._dice.randrange(8), self._timeout()),
                    Cancel(self._dice.randrange(8)),
                )
            )
        if choice < 0.88 and not self._has_client:
            return StartAgain()
        return Stats()

    def _parts(self) -> Parts:
        dice = self._parts_dice
        return Parts(
            self._item(),
            self._timeout(),
            leave_after=dice.choice((None, None, None, 0, 1, 3)),
            slow=dice.random() < 0.1,
            on_part=dice.random() < 0.2,
            drops=self._has_client and self._clients_dice.random() < 0.5,
        )

    def _stream(self) -> Stream:
        sources = ["list", "generator", "slow", "raises"]
        if self._in_tasks:
            sources += ["async", "async slow", "async raises"]
        return Stream(
            tuple(self._item() for _ in range(self._pick((0, 1, 3, 10, 20)))),
            source=self._pick(tuple(sources)),
            kind=self._kind(),
            leave_after=self._pick((None, None, None, 1, 3)),
            return_exceptions=self._chance(0.3),
            max_in_flight=self._pick((None, None, 1, 2, 5)),
            drops=self._has_client and self._clients_dice.random() < 0.5,
            timeout_s=self._timeout() if self._has_client else None,
        )

    def _item(self) -> Item:
        if self._tame or not self._chance(0.1):
            return Item("slow") if self._chance(0.02) else Item()
        do = self._pick(("raise", "raise", "raise", "pre", "post", "size", "dump", "load", "return", "short", "slow"))
        if self._chance(0.05):
            do = self._pick(("again", "again", "round", "close", "stats", "hang", "die"))
        if self._has_client and do in _INSIDE:
            do = "slow"
        if do == "hang":
            do, self._hung = ("slow" if self._hung else "hang"), True
        return Item(do, self._kind(), self._dice.randrange(len(getattr(self._subject, "stages", (0,)))))

    def _timeout(self) -> float | None:
        return self._pick((None, None, None, None, 0.5, 0.02, 0.001))

    # -- dice

    def _kind(self) -> str:
        return self._pick(KINDS)

    def _chance(self, share: float) -> bool:
        return self._dice.random() < share

    def _wild(self, share: float) -> bool:
        """A chance that tame programs do not have."""
        return not self._tame and self._chance(share)

    def _pick(self, what: tuple[Any, ...]) -> Any:
        return self._dice.choice(what)
