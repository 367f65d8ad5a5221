"""The running set of a worker: what orders and steps make of its states, whatever the model does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carpool.engine.call.retry import Failed, Retrier, run_now
from carpool.engine.parts import END, Last
from carpool.engine.wire import order as wire
from carpool.engine.worker.generators import BatchGenerators, ItemGenerators
from carpool.engine.worker.steps import Lineup, Outs, Row, Runner


class Counting:
    """Counts up to its item; what its settings say goes wrong on the way.

    Attributes:
        calls: The calls of `start`, `resume` and `step`, with the items.
        open: The states that were not stopped.
    """

    def __init__(self) -> None:
        self.calls: list[tuple[str, list[int]]] = []
        self.open: list[list[int]] = []
        self.bad_start: Callable[[list[int]], BaseException | None] = lambda xs: None
        self.bad_step: Callable[[list[list[int]]], BaseException | None] = lambda states: None
        self.instead: dict[tuple[int, int], Any] = {}  # by item and count: what stands in the place of a part

    def start(self, xs: list[int]) -> list[list[int]]:
        self.calls.append(("start", list(xs)))
        return self._begin([[x, 0] for x in xs])

    def step(self, states: list[list[int]]) -> list[Any]:
        self.calls.append(("step", [state[0] for state in states]))
        if error := self.bad_step(states):
            raise error
        for state in states:
            state[1] += 1
        return [self.instead.get((x, n), Last(n) if n == x else n) for x, n in states]

    def stop(self, state: list[int]) -> None:
        self.open.remove(state)

    def _begin(self, states: list[list[int]]) -> list[list[int]]:
        if error := self.bad_start([state[0] for state in states]):
            raise error
        self.open += states
        return states


class Resuming(Counting):
    """Can go on from the parts that it has given."""

    def resume(self, xs: list[int], parts: list[list[int]]) -> list[list[int]]:
        self.calls.append(("resume", list(xs)))
        assert all(said == list(range(1, len(said) + 1)) for said in parts), "the parts are not those that it gave"
        return self._begin([[x, len(said)] for x, said in zip(xs, parts, strict=True)])


class World:
    """A runner, and what has come of each stream.

    Attributes:
        heard: The parts of each stream.
        ends: What ended each: None, or the error.
        back: The ids of streams that were given back.
        answers: The whole answers.
    """

    def __init__(self, model: Any, isolate_errors: bool = True, **settings: Any) -> None:
        self.model = model
        self.runner = Runner(
            model,
            Retrier(isolate_errors=isolate_errors, clock=lambda: 0.0),
            can_resume=hasattr(model, "resume"),
            **settings,
        )
        self.heard: dict[int, list[Any]] = {}
        self.ends: dict[int, BaseException | None] = {}
        self.back: list[int] = []
        self.answers: dict[int, Any] = {}

    def order(self, *join: int, takes: int = wire.TAKES_PARTS, **order: Any) -> None:
        """Follow an order; the items of those that join are their ids."""
        rows = [Row(x, x, 0, takes) for x in join]
        self.hear(run_now(self.runner.follow(wire.OrderHead(**order), rows)))

    def step(self, n: int = 1) -> None:
        for _ in range(n):
            self.hear(run_now(self.runner.step()))

    def finish(self) -> None:
        while self.runner.has_running:
            self.step()

    def hear(self, outs: Outs) -> None:
        for row, kind, value, _ in outs:
            id = row.id
            assert id not in self.ends, "something comes after an end"
            if kind == wire.BACK:
                self.back.append(id)
            elif type(value) is Failed:
                self.ends[id] = value.error
            elif kind == wire.LAST and row.takes != wire.TAKES_PARTS:
                self.answers[id], self.ends[id] = value, None
            else:
                if kind != wire.END:
                    self.heard.setdefault(id, []).append(value)
                if kind != wire.MORE:
                    self.ends[id] = None


def up_to(n: int) -> list[int]:
    return list(range(1, n + 1))


# -- the usual


def test_streams_join_leave_pause_and_end_between_steps() -> None:
    """An order takes effect between two steps; who pauses is not stepped; who leaves or ends is
    stopped once.
    """
    world = World(Counting())
    world.order(3, 5)
    world.step()
    world.order(9, pause=[3])
    world.step()
    world.order(leave=[9], resume=[3])
    world.finish()
    assert world.heard == {3: [1, 2, 3], 5: up_to(5), 9: [1]}
    assert world.ends == {3: None, 5: None}
    assert world.model.open == []
    assert world.model.calls[:5] == [
        ("start", [3, 5]),
        ("step", [3, 5]),
        ("start", [9]),
        ("step", [5, 9]),
        ("step", [5, 3]),
    ]


def test_one_that_joins_may_pause_at_once() -> None:
    """A stream that an order has join and pause is started, and not stepped."""
    world = World(Counting())
    world.order(3, 5, pause=[5])
    world.step()
    assert world.heard == {3: [1]}


@pytest.mark.parametrize("given", [END, Last(2), Last(END), Last(None)])
def test_an_end_comes_with_a_part_or_without(given: Any) -> None:
    """`END` ends a stream without a part, `Last` with its part, and nothing comes after it."""
    world = World(Counting())
    world.model.instead[5, 2] = given
    world.order(5, 7)
    world.finish()
    assert world.heard == {5: [1, 2] if type(given) is Last and given.value == 2 else [1], 7: up_to(7)}
    assert world.ends == {5: None, 7: None}


def test_none_is_no_part() -> None:
    """None in the place of a part means that nothing came this time."""
    world = World(Counting())
    world.model.instead = {(5, 2): None, (5, 3): None}
    world.order(5)
    world.finish()
    assert world.heard == {5: [1, 4, 5]}


def test_a_whole_answer_is_collected() -> None:
    """A caller that takes the whole answer gets it once, and no parts; `collect` makes it."""
    world = World(Counting(), postprocess=str, collect=",".join)
    world.order(3, takes=wire.TAKES_WHOLE)
    world.order(2, takes=wire.TAKES_BOTH)
    world.finish()
    assert world.answers == {3: "1,2,3", 2: "1,2"}
    assert world.heard == {2: ["1", "2"]}


def test_postprocess_gets_each_part() -> None:
    """`postprocess` makes of each part what callers get, and may take the item as well."""
    world = World(Counting(), postprocess=lambda part, x: f"{part} of {x}", postprocess_takes_x=True)
    world.order(2)
    world.finish()
    assert world.heard == {2: ["1 of 2", "2 of 2"]}


# -- what goes wrong


def poisoned(guilty: int) -> Callable[[list[Any]], BaseException | None]:
    def find(xs: list[Any]) -> BaseException | None:
        return ArithmeticError("poison") if guilty in [x[0] if isinstance(x, list) else x for x in xs] else None

    return find


@pytest.mark.parametrize("n", [1, 2, 7, 8])
def test_start_that_raises_fails_the_guilty_alone(n: int) -> None:
    """Streams whose start raises begin again in halves, until the guilty one is alone."""
    world = World(Counting())
    world.model.bad_start = poisoned(3)
    world.order(*range(3, 3 + n))
    world.finish()
    assert type(world.ends.pop(3)) is ArithmeticError
    assert world.ends == dict.fromkeys(range(4, 3 + n))
    assert world.heard == {x: up_to(x) for x in range(4, 3 + n)}
    assert world.model.open == []


@pytest.mark.parametrize("at", [0, 1, 4])
@pytest.mark.parametrize("n", [1, 2, 7])
def test_step_that_raises_fails_the_guilty_alone_where_the_model_resumes(n: int, at: int) -> None:
    """Where `step` raises, the others go on from their parts: none is missing, and none comes
    twice.
    """
    world = World(Resuming())
    world.order(*range(6, 6 + n))
    world.step(at)
    world.model.bad_step = poisoned(6)
    world.finish()
    assert type(world.ends.pop(6)) is ArithmeticError
    assert world.ends == dict.fromkeys(range(7, 6 + n))
    assert world.heard == {6: up_to(at), **{x: up_to(x) for x in range(7, 6 + n)}} if at else True
    assert world.model.open == []


def test_without_resume_those_with_parts_fail_and_the_others_start_again() -> None:
    """Where `step` raises and the model cannot resume, a stream that has had parts fails, one
    without parts starts again, and so does one whose parts nobody has seen.
    """
    world = World(Counting())
    world.order(6)
    world.order(8, takes=wire.TAKES_WHOLE)
    world.step(2)
    world.order(7, 9)
    world.model.bad_step = poisoned(9)
    world.finish()
    assert {id: type(error) for id, error in world.ends.items()} == {
        6: ArithmeticError,
        7: type(None),
        8: type(None),
        9: ArithmeticError,
    }
    assert world.heard == {6: [1, 2], 7: up_to(7)}
    assert world.answers == {8: up_to(8)}
    assert world.model.open == []


def test_nothing_is_run_again_unless_errors_are_isolated() -> None:
    """Without `isolate_errors` all fail that were in the call."""
    world = World(Resuming(), isolate_errors=False)
    world.order(6, 7)
    world.model.bad_step = poisoned(6)
    world.step()
    assert {type(error) for error in world.ends.values()} == {ArithmeticError}
    assert len(world.ends) == 2 and world.model.open == []


def test_an_exception_in_the_place_of_a_part_fails_its_stream() -> None:
    """A model may fail one stream by putting an exception in the place of its part."""
    world = World(Counting())
    world.model.instead[5, 2] = ValueError("not a number")
    world.order(5, 7)
    world.finish()
    assert repr(world.ends[5]) == "ValueError('not a number')" and world.heard == {5: [1], 7: up_to(7)}


@pytest.mark.parametrize("hook", ["postprocess", "collect"])
def test_a_hook_that_raises_fails_its_stream(hook: str) -> None:
    """What `postprocess` and `collect` raise fails the stream alone."""

    def fails(given: Any) -> Any:
        if given in (2, [1, 2]):
            raise KeyError("hook")
        return given

    world = World(Counting(), **{hook: fails})
    world.order(2, takes=wire.TAKES_WHOLE)
    world.order(1, takes=wire.TAKES_WHOLE)
    world.finish()
    assert type(world.ends[2]) is KeyError and world.answers == {1: [1]}
    assert world.model.open == []


@pytest.mark.parametrize("given", [[], [1, 2, 3], None, 7, "ab", {1, 2}])
@pytest.mark.parametrize("where", ["start", "step"])
def test_a_result_of_the_wrong_length_fails_all_of_the_call(where: str, given: Any) -> None:
    """Results that cannot be told apart fail all streams of the call, which is not repeated."""
    world = World(Resuming())
    if where == "start":
        world.model.start = lambda xs: given
    world.order(5, 7)
    if where == "step":
        world.model.step = lambda states: given
        world.step()
    assert [getattr(error, "code", None) for error in world.ends.values()] == ["bad_result"] * 2
    assert world.model.open == []


@pytest.mark.parametrize("where", ["start", "step"])
def test_out_of_memory_gives_the_newest_half_back(where: str) -> None:
    """Memory that runs out is no stream's fault: the newest half is given back, the others go on."""
    world = World(Resuming())
    too_many: Any = lambda xs: MemoryError() if len(xs) > 2 else None  # noqa: E731
    if where == "start":
        world.model.bad_start = too_many
    world.order(6, 7, 8, 9)
    if where == "step":
        world.step(2)
        world.model.bad_step = too_many
    world.finish()
    assert world.back == [8, 9]
    assert world.ends == {6: None, 7: None} and {world.heard[6][-1], world.heard[7][-1]} == {6, 7}
    assert world.model.open == []


@pytest.mark.parametrize("where", ["start", "step"])
def test_out_of_memory_with_nothing_else_fails_a_lone_stream(where: str) -> None:
    """A stream for which there is no memory although it is alone fails."""
    world = World(Resuming())
    setattr(world.model, f"bad_{where}", lambda xs: MemoryError())
    world.order(6)
    world.finish()
    assert type(world.ends[6]) is MemoryError and world.back == []


def test_stop_that_raises_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    """What `stop` raises ends no stream, and is in the log."""
    world = World(Counting())

    def stop(state: Any) -> None:
        raise OSError("it does not let go")

    world.model.stop = stop
    world.order(2, 3)
    world.finish()
    assert world.ends == {2: None, 3: None}
    assert "it does not let go" in caplog.text


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("join"), st.integers(1, 30)),
        st.tuples(st.sampled_from(["leave", "pause", "resume"]), st.integers(1, 30)),
        st.tuples(st.just("step"), st.integers(1, 3)),
        st.tuples(st.just("raise"), st.integers(1, 30)),
    ),
    max_size=25,
)


@pytest.mark.parametrize(
    ("resumes", "takes"), [(False, wire.TAKES_WHOLE), (True, wire.TAKES_WHOLE), (True, wire.TAKES_PARTS)]
)
@pytest.mark.parametrize("at", [0, 1, 4])
def test_streams_that_lose_steps_find_the_guilty_all_the_same(resumes: bool, takes: int, at: int) -> None:
    """Where a stream comes to the step that raises only after some others, as it begins from the
    start, its half is stepped apart until then: the guilty one fails, and the others end.
    """

    class Silent(Resuming if resumes else Counting):  # type: ignore[misc]
        """Says nothing but its last number."""

        def step(self, states: list[Any]) -> list[Any]:
            if any(x == 7 and i == at for x, i in states):
                raise ArithmeticError("poison")
            parts = super().step(states)
            return [part if type(part) is Last or takes == wire.TAKES_WHOLE else None for part in parts]

    world = World(Silent())
    world.order(5, 6, 7, 8, takes=takes)
    for _ in range(60):
        if world.runner.has_running:
            world.step()
    assert not world.runner.has_running and world.model.open == []
    assert type(world.ends.pop(7)) is ArithmeticError and world.ends == {5: None, 6: None, 8: None}
    if takes == wire.TAKES_WHOLE:
        assert world.answers == {x: up_to(x) for x in (5, 6, 8)}


@given(STEPS, st.booleans())
def test_whatever_happens_each_stream_gets_its_own_parts_once(story: list[tuple[str, int]], resumes: bool) -> None:
    """In whatever order streams join, leave, pause and raise: each hears its own parts from the
    first on, without a gap, at most one end, and every state is stopped exactly once.
    """
    world = World(Resuming() if resumes else Counting())
    joined: set[int] = set()
    for what, x in story:
        if what == "join" and x not in joined:
            joined.add(x)
            world.order(x)
        elif what in ("leave", "pause", "resume"):
            world.order(**{what: [x]})
        elif what == "raise":
            world.model.bad_step = poisoned(x)
        elif world.runner.has_running:
            world.step(x) if x == 1 else [world.step() for _ in range(x) if world.runner.has_running]
    world.finish()
    run_now(world.runner.stop_all())
    assert world.model.open == []
    for x, parts in world.heard.items():
        assert parts == up_to(len(parts)) and (world.ends.get(x, 0) is not None or len(parts) == x)


@given(st.lists(st.sampled_from([None, 1, 2.5, "text", True, END, Last(1), Last("x"), b"bytes", [1], KeyError()])))
def test_scalars_are_taken_like_all_else(given: list[Any]) -> None:
    """The fast path for scalars says the same of them as the slow one."""

    class Slow(Runner):
        def _take_plain(self, lineup: Lineup, parts: list[Any]) -> Outs | None:
            return None

    heard: list[list[Any]] = []
    for kind in (Runner, Slow):
        for can_resume in (True, False):
            runner = kind(Counting(), Retrier(isolate_errors=True), can_resume=can_resume)
            row, outs = Row(1, 1, 0, wire.TAKES_PARTS), Outs()
            for part in given:
                row.state = [1, 0]
                runner._model.open.append(row.state)  # type: ignore[attr-defined]
                plain = runner._take_plain(Lineup([row]), [part])
                outs.extend(plain or Outs())
                if plain is None and part is not None:
                    run_now(runner._take(row, part, outs))
            heard.append([repr(outs_of(outs)), row.n_parts, row.raw if can_resume else None])
    assert heard[0] == heard[2] and heard[1] == heard[3]


def outs_of(outs: Outs) -> list[Any]:
    return [(kind, value.error if type(value) is Failed else value, raw) for _, kind, value, raw in outs]


# -- generators


def not_fatal(error: BaseException) -> bool:
    return False


def test_a_generator_for_each_item_is_stepped() -> None:
    """Each item has a generator of its own; one that raises fails alone; one that is left is
    closed.
    """
    closed: list[int] = []

    def count(x: int) -> Any:
        try:
            for i in range(1, x + 1):
                if x == 4 and i == 3:
                    raise ValueError("four")
                yield i
        finally:
            closed.append(x)

    world = World(ItemGenerators(count, not_fatal))
    world.order(2, 4, 9)
    world.step(4)
    world.order(leave=[9])
    assert world.heard == {2: [1, 2], 4: [1, 2], 9: [1, 2, 3, 4]}
    assert world.ends[2] is None and type(world.ends[4]) is ValueError
    assert closed == [2, 4, 9]


@pytest.mark.parametrize("kind", [StopIteration, StopAsyncIteration, GeneratorExit, SystemExit])
def test_a_generator_that_raises_like_an_end_fails(kind: type[BaseException]) -> None:
    """What looks like the end of a generator, but was raised in it, is a failure."""

    def count(x: int) -> Any:
        yield 1
        raise kind

    world = World(ItemGenerators(count, not_fatal))
    world.order(2)
    world.finish()
    assert world.heard == {2: [1]} and isinstance(world.ends[2], (RuntimeError, kind))


def batches(told: list[Any]) -> Callable[[list[int]], Any]:
    def count(xs: list[int]) -> Any:
        for i in range(1, max(xs) + 1):
            told.append((yield [END if i > x else i for x in xs]))

    return count


def test_a_generator_for_a_batch_is_told_who_still_runs() -> None:
    """A generator for a batch gives each item its parts, and learns from `yield` who still runs."""
    told: list[Any] = []
    world = World(BatchGenerators(batches(told)))
    world.order(2, 4, 3)
    world.step(2)
    world.order(leave=[3])
    world.finish()
    assert world.heard == {2: [1, 2], 4: up_to(4), 3: [1, 2]}
    assert told == [{0, 1, 2}, {0, 1}, {1}, {1}]


def test_a_stream_of_a_batch_that_pauses_loses_nothing() -> None:
    """The parts of a stream that pauses are kept, and the others of its batch go on."""
    world = World(BatchGenerators(batches([])))
    world.order(3, 5)
    world.order(pause=[3])
    world.step(4)
    assert world.heard == {5: up_to(4)}
    world.order(resume=[3])
    world.finish()
    assert world.heard == {3: up_to(3), 5: up_to(5)} and world.ends == {3: None, 5: None}


def test_a_generator_for_a_batch_may_end_early() -> None:
    """Where a generator ends, all answers of its batch have ended."""

    def count(xs: list[int]) -> Any:
        yield list(xs)

    world = World(BatchGenerators(count))
    world.order(2, 3)
    world.finish()
    assert world.heard == {2: [2], 3: [3]} and world.ends == {2: None, 3: None}
