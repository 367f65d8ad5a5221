"""`ModelError.__cause__`: what the model raised, itself or as a copy, where one can be had; and what it keeps alive."""

from __future__ import annotations

import asyncio
import gc
import pickle
import re
import subprocess
import sys
import textwrap
import traceback
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest

import carpool
from carpool import Handle, ModelError, Service, Stage
from carpool.engine.wire.outcome import (
    LONGEST_CAUSE,
    FailureReport,
    Outcome,
    pack_report,
    read_report,
    unpack_error,
    with_cause,
)
from carpool.errors import CarpoolError
from tests.effort import slow_where
from tests.support.causes import (
    RAISED,
    SHARED,
    TEXT_ONLY,
    NoNotes,
    Plain,
    echo,
    fails,
    fails_at_large,
    fails_later,
    fails_together,
    lambda_of,
    refuse,
    refuse_later,
)
from tests.support.loops import on_a_loop
from tests.support.output import Output
from tests.support.waiting import let_go


def stage(run_in: Any, **settings: Any) -> Stage:
    return Stage(fails_later if run_in == "loop" else fails, run_in=run_in, **settings)


@pytest.fixture(scope="module")
def running() -> Iterator[Callable[[str], Handle]]:
    """Services that several tests ask, one after the other: one for each `run_in`."""
    with ExitStack() as stack:
        yield cache(lambda run_in: stack.enter_context(Service(stage(run_in)).run()))


@pytest.fixture(scope="module")
def in_a_process(running: Callable[[str], Handle]) -> Handle:
    """The service with a worker process."""
    return running("process")


def failed(ask: Callable[[], Any]) -> ModelError:
    with pytest.raises(ModelError) as caught:
        ask()
    return caught.value


@pytest.mark.parametrize("run_in", ["process", "thread", "loop"])
def test_the_cause_is_what_the_model_raised(run_in: Any, running: Callable[[str], Handle]) -> None:
    """The `__cause__` of a `ModelError` is an exception of the class and arguments that the model
    raised, by each way to ask; from a process only if the class can be had here.
    """
    service = running(run_in)
    for name, make in RAISED.items():
        if run_in == "loop" and name == "StopIteration":
            continue  # Python makes a RuntimeError of it, in coroutines
        by_stream = next(iter(service.stream([name], return_exceptions=True)))
        raised = failed(lambda name=name: list(service.stream([name])))  # type: ignore[misc]
        for error in (failed(lambda name=name: service.predict(name)), by_stream, raised):  # type: ignore[misc]
            if run_in == "process" and name in TEXT_ONLY:
                assert error.__cause__ is None, name
                assert error.type_name, name
            else:
                assert type(error.__cause__).__name__ == type(make()).__name__, name
                assert list(map(type, error.__cause__.args)) == list(map(type, make().args)), name
                assert error.__cause__ is error.__cause__
    assert service.predict("good") == "good"


@pytest.mark.parametrize("run_in", ["process", "thread", "loop"])
@on_a_loop
async def test_tasks_get_the_cause_too(run_in: Any) -> None:
    """Tasks that use `predict` and `stream` on a loop of their own get the cause, also of kinds
    that mean something to asyncio.
    """
    async with Service(stage(run_in)).run_async() as service:
        for name in ("KeyError", "GeneratorExit", "CancelledError", "KeyboardInterrupt", "SystemExit"):
            kind = type(RAISED[name]())
            with pytest.raises(ModelError) as caught:
                await service.predict(name)
            assert type(caught.value.__cause__) is kind
            (error,) = [x async for x in service.stream([name], return_exceptions=True)]
            assert type(error.__cause__) is kind


def test_the_cause_can_be_raised_in_the_place_of_the_error(in_a_process: Handle) -> None:
    """The cause can be raised in the place of the error, as the docs show."""

    def ask(name: str) -> Any:
        try:
            return in_a_process.predict(name)
        except ModelError as error:
            raise error.__cause__ or error from None

    with pytest.raises(KeyError, match="x"):
        ask("KeyError")
    with pytest.raises(ModelError, match="1 and 2"):
        ask("two arguments")


def test_from_a_process_it_has_attributes_and_the_worker_s_traceback(in_a_process: Handle) -> None:
    """A cause from a worker process has its attributes, and the worker's traceback as a note for
    whoever sees it.
    """
    cause = failed(lambda: in_a_process.predict("a class of one's own")).__cause__

    assert isinstance(cause, Plain)
    assert cause.also == [1, 2]
    (note,) = cause.__notes__
    assert note.startswith("In the worker:\nTraceback (most recent call last)")
    assert "in fails" in note
    assert note.endswith("Plain: text")


@pytest.mark.parametrize("run_in", ["process", "thread", "loop"])
def test_the_text_begins_with_the_name_of_the_class(run_in: Any, running: Callable[[str], Handle]) -> None:
    """The text of a `ModelError` is the last line of the model's traceback: name of the class and
    text, or the name alone.
    """
    service = running(run_in)
    for name, text in {"KeyError": "KeyError: 'x'", "GeneratorExit": "GeneratorExit", "local": "Local: x"}.items():
        error = failed(lambda name=name: service.predict(name))  # type: ignore[misc]
        assert (str(error), error.type_name) == (text, text.partition(":")[0])


PRINTED = ["KeyError", "two arguments", "local", "StopIteration"]


def times_shown(error: BaseException) -> int:
    """How often the line of the model's code is in what is printed for an uncaught exception."""
    return "".join(traceback.format_exception(error)).count("raise RAISED[name]()")


@pytest.mark.parametrize("run_in", ["process", "thread"])
@pytest.mark.parametrize("name", PRINTED)
def test_the_user_s_line_is_shown_once(run_in: Any, name: str, running: Callable[[str], Handle]) -> None:
    """What prints a `ModelError` shows the user's line, once: by the cause, or by a note where there
    is no cause; also a second time, and after the cause was asked for.
    """
    service = running(run_in)
    one = failed(lambda: service.predict(name))
    (other,) = service.stream([name], return_exceptions=True)
    for error in (one, other):
        assert times_shown(error) == 1
        error.__cause__  # noqa: B018
        assert times_shown(error) == 1


def test_a_cause_that_takes_no_note_leaves_it_to_the_error(in_a_process: Handle) -> None:
    """Where the cause takes no note, the error itself has it."""
    error = failed(lambda: in_a_process.predict("no notes"))
    assert type(error.__cause__) is NoNotes
    assert error.__notes__[0].startswith("In the worker:\n") and "NoNotes" in error.__notes__[0]


@on_a_loop
async def test_the_user_s_line_is_shown_once_to_tasks() -> None:
    """The same in tasks, whose loop does not open the cause: the note is the error's own."""
    async with Service(stage("process")).run_async() as service:
        for name in PRINTED[:-1]:
            with pytest.raises(ModelError) as caught:
                await service.predict(name)
            (note,) = caught.value.__notes__
            assert note.startswith("In the worker:\nTraceback (most recent call last)")
            assert times_shown(caught.value) == 1
            assert times_shown(caught.value) == 1


UNCAUGHT = {
    "division": ("return 1 / x", r"ZeroDivisionError: .*division by zero"),
    "local": ("raise Local(1 / 1)", "Local: 1.0"),
}


@slow_where(lambda what, way: (what == "local") is (way == "threads"))
@pytest.mark.parametrize("what", UNCAUGHT)
@pytest.mark.parametrize("way", ["threads", "tasks"])
def test_an_uncaught_error_shows_the_user_s_line(what: str, way: str, tmp_path: Path) -> None:
    """A program that ends by a `ModelError` shows the user's line once, of threads and of tasks, with
    a cause and without.
    """
    (tmp_path / "program.py").write_text(
        textwrap.dedent(
            """
            import asyncio
            import sys
            import carpool

            def divides(x):
                return 1 / x

            def fails(x):
                class Local(Exception): pass
                raise Local(1 / 1)

            async def main(service):
                async with service.run_async() as s:
                    await s.predict(0.0)

            if __name__ == "__main__":
                service = carpool.Service(carpool.Stage(fails if sys.argv[1] == "local" else divides))
                if sys.argv[2] == "tasks":
                    asyncio.run(main(service))
                with service.run() as s:
                    s.predict(0.0)
            """
        )
    )
    line, text = UNCAUGHT[what]
    command = [sys.executable, "program.py", what, way]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert re.search(f"carpool.errors.ModelError: {text}\n", done.stderr)
    assert done.stderr.count(line) == 1, (what, way, done.stderr)


@pytest.mark.parametrize("run_in", ["thread", "loop"])
def test_inside_the_process_it_is_the_object_itself(run_in: Any) -> None:
    """From a worker inside the process the cause is the object itself, which callers of one batch
    share by errors of their own; its traceback begins in the user's code.
    """

    async def together(names: list[str]) -> list[str]:
        return fails_together(names)

    model = together if run_in == "loop" else fails_together
    policy = carpool.Static(max_queue_delay_s=0.05)
    shared = Stage(model, run_in=run_in, max_batch_size=2, isolate_errors=False, policy=policy)
    with Service(shared).run() as service:
        one, two = service.stream(["shared", "mate"], return_exceptions=True)
    assert one is not two
    assert one.__cause__ is two.__cause__ is SHARED
    frames = [frame.name for frame in traceback.extract_tb(SHARED.__traceback__)]
    assert frames == [*(["together"] if run_in == "loop" else []), "fails_together"]
    SHARED.__traceback__ = None


def test_a_model_error_of_the_model_s_own_stands_for_itself() -> None:
    """A `ModelError` that the model itself raises is not its own cause; what it was raised from is
    its cause, as over a process.
    """

    def refuses(x: str) -> str:
        try:
            return {}[x]
        except KeyError as error:
            raise ModelError("not this one") from error

    with Service(Stage(refuses, run_in="thread")).run() as service:
        error = failed(lambda: service.predict("x"))
    assert str(error) == "not this one"
    assert type(error.__cause__) is KeyError


def test_results_that_cannot_leave_the_worker_have_a_cause() -> None:
    """Results that cannot leave the worker have a cause, too, not only what the model's own code
    raises.
    """
    with Service(Stage(lambda_of, run_in="thread")).run() as service:
        error = failed(lambda: service.predict(1))
    assert isinstance(error.__cause__, (AttributeError, pickle.PicklingError, TypeError))


def test_a_cause_from_a_later_stage_and_of_hooks_comes_through() -> None:
    """Causes from later stages and of hooks come through as well."""
    stages = Stage(echo, run_in="thread"), Stage(fails)
    with Service(*stages).run() as service:
        assert type(failed(lambda: service.predict("KeyError")).__cause__) is KeyError


# -- what it must not do


class Item:
    """Something that can be seen to go."""

    seen: weakref.ref[Item] | None = None

    def __setstate__(self, state: Any) -> None:
        Item.seen = weakref.ref(self)  # the copy that the model gets

    def __reduce__(self) -> Any:
        return Item, (), {"some": "state"}


def holds(error: ModelError) -> None:
    assert error.__cause__ is not None
    assert Item.seen is not None
    assert Item.seen() is not None


@slow_where(lambda run_in, way: (way == "stream") is (run_in == "thread"))
@pytest.mark.parametrize("run_in", ["thread", "loop"])
@pytest.mark.parametrize("way", ["predict", "stream", "streamed errors"])
def test_items_go_with_the_error(run_in: Any, way: str) -> None:
    """The traceback of a cause holds the model's frames, and so its items, for as long as the error
    lives and no longer.
    """
    model = refuse_later if run_in == "loop" else refuse

    def ask(service: Any) -> None:
        try:
            if way == "predict":
                service.predict(Item())
            (error,) = service.stream([Item()], return_exceptions=way == "streamed errors")
            raise error
        except ModelError as error:
            holds(error)

    with Service(Stage(model, run_in=run_in)).run() as service:
        gc.collect()
        gc.disable()
        try:
            ask(service)
            let_go()
            assert Item.seen is not None
            assert Item.seen() is None
        finally:
            gc.enable()


@on_a_loop
async def test_items_go_with_the_error_of_a_task() -> None:
    """Errors that a task got hold the items of the model's frames for as long as they live and no
    longer.
    """
    async with Service(Stage(refuse_later, run_in="loop")).run_async() as service:
        gc.collect()
        gc.disable()
        try:
            try:
                await service.predict(Item())
            except ModelError as error:
                holds(error)
            for _ in range(3):
                await asyncio.sleep(0)
            let_go()
            assert Item.seen is not None
            assert Item.seen() is None
        finally:
            gc.enable()


def test_items_of_a_batch_go_with_its_errors() -> None:
    """Errors of a batch that was run again in parts, which our own frames have held together, let
    its items go with them, too.
    """
    seen: list[weakref.ref[Any]] = []

    def refuse_all(items: list[Any]) -> Any:
        if len(seen) < len(items):
            seen.extend(map(weakref.ref, items))
        raise ValueError(len(items))

    batched = Stage(refuse_all, run_in="thread", max_batch_size=8, policy=carpool.Static(max_queue_delay_s=0.05))
    with Service(batched).run() as service:
        gc.collect()
        gc.disable()
        try:
            errors = list(service.stream([Item() for _ in range(8)], max_in_flight=8, return_exceptions=True))
            assert all(type(error.__cause__) is ValueError for error in errors)
            del errors
            let_go()
            assert [ref for ref in seen if ref() is not None] == []
        finally:
            gc.enable()


class Trap(Exception):
    """An exception that must not be asked for anything."""

    __cause__ = property(lambda self: 1 / 0)


class Unsendable:
    def __reduce__(self) -> Any:
        raise Trap("planned")


def test_only_errors_of_ours_are_asked_for_a_cause() -> None:
    """What an item raises when it is pickled reaches its caller as it is: only errors of ours have
    causes that are looked for.
    """
    with Service(Stage(echo, run_in="thread")).run() as service:
        with pytest.raises(Trap, match="planned"):
            service.predict(Unsendable())
        (error,) = service.stream([Unsendable()], return_exceptions=True)
        assert type(error) is Trap


def test_nothing_is_imported_for_a_cause(tmp_path: Path) -> None:
    """If only the worker knows a cause's class it is told as text, and its module is not loaded
    here.
    """
    (tmp_path / "heavy.py").write_text("class HeavyError(Exception): pass\n")
    (tmp_path / "program.py").write_text(
        textwrap.dedent(
            """
            import sys
            import carpool

            def fails(x):
                import heavy
                raise heavy.HeavyError(x)

            class InMain(Exception):
                pass

            def fails_in_main(x):
                raise InMain(x)

            if __name__ == "__main__":
                with carpool.Service(carpool.Stage(fails)).run() as service:
                    try:
                        service.predict(1)
                    except carpool.ModelError as error:
                        assert error.__cause__ is None and error.type_name == "HeavyError"
                    assert "heavy" not in sys.modules
                with carpool.Service(carpool.Stage(fails_in_main)).run() as service:
                    try:
                        service.predict(1)
                    except carpool.ModelError as error:
                        assert type(error.__cause__) is InMain and error.__cause__.args == (1,)
                    service.predict(2)
            """
        )
    )
    done = subprocess.run(
        [sys.executable, "program.py"], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    assert "AssertionError" not in done.stderr
    shown = done.stderr.partition("\nThe above exception was the direct cause of the following exception:\n")
    assert "In the worker:" in shown[0]  # the interpreter prints an uncaught one with its cause
    assert "carpool.errors.ModelError: InMain: 2" in shown[2]


def test_a_cause_is_opened_when_it_is_asked_for() -> None:
    """A cause is unpickled once, when it is asked for, and not on the loop that makes the error."""
    report = with_cause(FailureReport("text", "Opens", "Traceback"), Opens("x"))
    Opens.opened = 0
    error = unpack_error(Outcome.MODEL_ERROR, pack_report(report))

    assert Opens.opened == 0
    assert error.__cause__ is error.__cause__
    assert Opens.opened == 1


class Opens(Exception):
    opened = 0

    def __setstate__(self, state: Any) -> None:
        Opens.opened += 1

    def __reduce__(self) -> Any:
        return Opens, self.args, {"some": "state"}


def test_a_cause_that_is_set_is_the_cause() -> None:
    """A cause that was set, by `raise ... from` or by hand, is the cause, and what a worker has
    sent is forgotten then.
    """
    error = unpack_error(Outcome.MODEL_ERROR, pack_report(with_cause(FailureReport("text"), KeyError("x"))))
    other = ValueError("other")
    with pytest.raises(ModelError) as caught:
        raise error from other
    assert caught.value.__cause__ is other
    error.__cause__ = None
    assert error.__cause__ is None


@pytest.mark.parametrize("cause", [b"", b"no pickle", b"\x80\x05", b"\x80\x05N.", pickle.dumps("text"), b"x" * 10**6])
def test_bytes_that_are_no_exception_are_no_cause(cause: bytes) -> None:
    """Bytes in the place of a cause that are no pickled exception are ignored, whatever a worker
    has sent.
    """
    report = FailureReport("text", cause=cause, module="builtins")
    error = unpack_error(Outcome.MODEL_ERROR, msgspec.msgpack.encode(report))
    assert (str(error), error.__cause__) == ("text", None)


def test_pickling_ends_at_the_limit() -> None:
    """Pickling a cause that has no end costs no more than its beginning."""
    steps = 0

    class Endless(Exception):
        def __reduce__(self) -> Any:
            def items() -> Any:
                nonlocal steps
                while True:
                    steps += 1
                    yield "x" * 100, steps

            return Plain, ("x",), None, None, items()

    assert with_cause(FailureReport("text"), Endless()).cause == b""
    assert 0 < steps < 2 * LONGEST_CAUSE


def test_the_causes_of_a_reply_have_a_bound() -> None:
    """A batch that fails as a whole does not send a large exception once per item; the texts are
    told all the same.
    """
    output = Output()
    large = Stage(fails_at_large, max_batch_size=64, isolate_errors=False, policy=carpool.Static(max_queue_delay_s=0.1))
    with Service(large).run(output=output) as service:
        errors = list(service.stream(range(64), max_in_flight=64, return_exceptions=True))
    assert {type(error) for error in errors} == {ModelError}
    found = [error for error in errors if error.__cause__ is not None]
    assert 0 < len(found) < 64
    assert len({id(error.__cause__) for error in found}) == len(found)


def test_reports_without_a_cause_are_as_they_were() -> None:
    """For errors that are no `ModelError` nothing is pickled."""
    for outcome in (Outcome.INVALID, Outcome.INVALID_ITEM, Outcome.EXPIRED):
        error: CarpoolError = unpack_error(outcome, pack_report(with_cause(FailureReport("x"), KeyError("x"))))
        assert error.__cause__ is None
    assert read_report(pack_report(FailureReport("x"))) == FailureReport("x")
