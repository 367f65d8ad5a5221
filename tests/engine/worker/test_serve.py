"""A worker's life over a link that is a list: what it says, in which order, and what it does when it cannot."""

from __future__ import annotations

import functools
import weakref
from typing import Any

import msgspec
import numpy as np
import pytest

from carpool import Model
from carpool.engine.call.invoke import Invoker
from carpool.engine.call.results import Trouble, run_now
from carpool.engine.call.retry import Retrier
from carpool.engine.wire import frame as wire_frame
from carpool.engine.wire import outcome
from carpool.engine.wire.frame import Frame, FrameKind, encode
from carpool.engine.wire.outcome import Outcome
from carpool.engine.wire.payload import LARGE, load
from carpool.engine.worker.answer import BatchAnswerer
from carpool.engine.worker.serve import serve
from carpool.model import traits_of
from tests.engine.worker.link import Link, batch, live, setup_of


def test_a_whole_life() -> None:
    """A worker loads, warms up alone and as a full batch, takes the time of several sizes, answers,
    and tears down.
    """
    link = Link(batch(7, 1, 2), batch(8, 3))
    log = live(link)

    timed = ["predict 1", "predict 2", "predict 4"]
    assert log == ["setup", "predict 1", "predict 4", *timed, *timed, "predict 2", "predict 1", "teardown"]
    assert [bytes(frame.payloads[0]) for frame in link.sent[:3]] == [b"loading", b"warming", b"ready"]  # type: ignore[arg-type]
    assert [frame.kind for frame in link.sent] == [FrameKind.STATE] * 3 + [FrameKind.REPLY] * 2
    assert [[load(p) for p in frame.payloads] for frame in link.sent[3:]] == [[2, 4], [6]]
    assert [frame.batch_id for frame in link.sent[3:]] == [7, 8]


class Remembered(Model):
    """Gives its arrays back, and knows which of them are still there."""

    def __init__(self, log: list[weakref.ref[Any]]) -> None:
        self.log = log

    def predict(self, xs: list[Any]) -> list[Any]:
        self.log += map(weakref.ref, xs)
        return xs


class ForgetfulLink(Link):
    """Keeps nothing of what is sent, and notes how many arrays are there when the worker comes for its next batch."""

    def __init__(self, log: list[weakref.ref[Any]], *frames: Frame) -> None:
        super().__init__(*frames)
        self.log = log
        self.left: list[int] = []

    async def receive(self) -> Frame | None:
        self.left.append(sum(array() is not None for array in self.log))
        return await super().receive()

    def send(self, frame: Frame) -> None:
        encode(frame)


def test_an_idle_worker_keeps_nothing_of_its_last_batch() -> None:
    """When a worker comes for its next batch, the last one and its answers are gone, so that their
    memory can be used for it.
    """
    log: list[weakref.ref[Any]] = []
    array = np.zeros(LARGE)
    link = ForgetfulLink(log, batch(1, array, array), batch(2, array))
    run_now(serve(link, setup_of(), lambda: (Remembered, {"log": log}, (), ())))
    assert len(log) == 3
    assert link.left == [0, 0, 0]


class Slowed(Model):
    """Each call takes as long as its batch is large, by a clock of its own."""

    examples = (1, 2, 3)
    now = 0.0

    def predict(self, xs: list[int]) -> list[int]:
        Slowed.now += len(xs) + (10 if Slowed.now == 0 else 0)
        return xs


def warmed_up(sizes: tuple[int, ...], batched: bool = True) -> list[tuple[int, float]]:
    Slowed.now = 0.0
    invoker = Invoker(Slowed, {}, traits_of(Slowed, batched), Retrier(isolate_errors=True), batched=batched)
    return run_now(BatchAnswerer(invoker, is_first=True, is_last=True).warm_up(sizes, clock=lambda: Slowed.now / 64))


def test_the_least_time_of_each_size_counts() -> None:
    """Of each size the least time of the warm-up counts: what only the first call takes, such as
    loading a library, teaches nothing.
    """
    assert warmed_up((1, 2, 8)) == [(1, 1 / 64), (2, 2 / 64), (8, 8 / 64)]


def test_a_slow_model_is_not_timed_at_length() -> None:
    """The examples of a slow model are all run once, one alone and all in full batches; sizes that
    there was no time for are left out.
    """
    assert warmed_up((1, 64, 256)) == [(1, 11 / 64), (256, 4.0)]
    assert warmed_up((1, 32, 64)) == [(1, 1 / 64), (32, 0.5), (64, 1.0)]


def test_single_items_are_run_and_not_timed() -> None:
    """A model of single items is warmed up but not timed, since nothing would learn from it."""
    link = Link()
    log: list[str] = []
    run_now(serve(link, setup_of(batched=False, warm_up=()), lambda: (Alone, {"log": log}, (), ())))

    assert log == ["predict 1", "predict 1", "predict 2", "predict 3"]
    assert msgspec.msgpack.decode(link.sent[-1].payloads[1]) == []  # type: ignore[arg-type]


class Alone(Model):
    examples = (1, 2, 3)

    def __init__(self, log: list[str]) -> None:
        self.log = log

    def predict(self, x: int) -> int:
        self.log.append(f"predict {x}")
        return x


class Picky(Model):
    examples = (4, 2, 0, 1)

    def predict(self, xs: list[int]) -> list[float]:
        return [1 / x for x in xs]


@pytest.mark.fault("F27")
def test_the_example_that_fails_is_named() -> None:
    """If an example fails it is named with the user's traceback, and the worker is not ready."""
    link = Link(batch(1, 1))
    live(link, Picky, warm_up=(1, 2))
    report = outcome.read_report(link.sent[-1].payloads[0])

    assert link.sent[-1].kind == FrameKind.FAILED
    assert report.message == (
        "worker 0 of stage counting could not start: example 3 of 4 does not run through its model:"
        " ZeroDivisionError: division by zero"
    )
    assert "return [1 / x for x in xs]" in report.traceback


def test_batches_are_padded_to_allowed_sizes() -> None:
    """Batches are padded to allowed sizes with the last item; the surplus results are dropped, and
    each item has its own.
    """
    link = Link(batch(1, 5), batch(2, 1, 2, 3), batch(3, 1, 2, 3, 4))
    log = live(link, allowed_batch_sizes=(2, 4))

    assert log[-4:] == ["predict 2", "predict 4", "predict 4", "teardown"]
    assert [[load(p) for p in frame.payloads] for frame in link.sent[-3:]] == [[10], [2, 4, 6], [2, 4, 6, 8]]


def test_the_parts_of_a_batch_that_raised_are_padded_too() -> None:
    """The parts of a batch that raised are padded, too: the model never sees another size, and
    padding is no item that could be guilty.
    """
    sizes: list[int] = []

    def inverse(xs: list[int]) -> list[float]:
        sizes.append(len(xs))
        return [1 / x for x in xs]

    link = Link(batch(1, 4, 2, 0))
    live(link, inverse, allowed_batch_sizes=(2, 4))
    (reply,) = link.sent[-1:]

    assert set(sizes) <= {2, 4}
    assert [load(p) for p in reply.payloads[:2]] == [0.25, 0.5]
    assert list(reply.formats) == [Outcome.OK, Outcome.OK, Outcome.MODEL_ERROR]


def test_a_wrong_number_of_results_shows_with_padding() -> None:
    """A wrong number of results is reported with how many the padded call was given and how many it
    returned.
    """
    link = Link(batch(1, 4, 2, 1))
    live(link, few, allowed_batch_sizes=(4,))

    assert link.sent[-1].formats == bytes([Outcome.BAD_RESULT] * 3)
    assert "a call with 4 items must return 4 results" in outcome.read_report(link.sent[-1].payloads[0]).message


def few(xs: list[int]) -> list[int]:
    return xs[:3]


def test_a_model_that_cannot_load_says_why() -> None:
    """If a model cannot load the worker says why, with the user's traceback, and answers nothing."""

    def broken() -> Any:
        raise LookupError("no weights")

    link = Link(batch(1, 1))
    run_now(serve(link, setup_of(), broken))
    report = outcome.read_report(link.sent[-1].payloads[0])

    assert [frame.kind for frame in link.sent] == [FrameKind.STATE, FrameKind.FAILED]
    assert report.message == "worker 0 of stage counting could not start: its model could not be imported"
    assert "no weights" in report.traceback


class Wire(Link):
    """Takes what can be encoded as frames."""

    def send(self, frame: Frame) -> None:
        encode(frame)
        super().send(frame)


def times_1000(xs: list[str]) -> list[str]:
    return [1000 * x for x in xs]


def test_results_that_do_not_fit_into_one_message_go_in_several(monkeypatch: pytest.MonkeyPatch) -> None:
    """Results that do not fit into one message are sent in as few as will do, the last of which
    tells times: an answer does not depend on its mates.
    """
    monkeypatch.setattr(wire_frame, "MAX_FRAME_BYTES", 2500)
    link = Wire(batch(7, *"abcde"), batch(8, "f"))
    live(link, times_1000, warm_up=())
    first, second, third, good = link.sent[-4:]

    assert [frame.ids for frame in (first, second, third)] == [[1, 2], [3, 4], [5]]
    assert {frame.batch_id for frame in (first, second, third)} == {7}
    answers = [load(p) for frame in link.sent[-4:] for p in frame.payloads]
    assert answers == [1000 * x for x in "abcdef"]
    assert (first.busy_s, second.busy_s) == (0.0, 0.0)
    assert third.busy_s > 0
    assert set(good.formats) == {Outcome.OK}


def test_a_result_that_cannot_be_sent_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A result that cannot be sent fails alone, with a text that says why; its mates and the next
    batch are answered.
    """
    monkeypatch.setattr(wire_frame, "MAX_FRAME_BYTES", 2500)
    link = Wire(batch(7, "a", "bbb", "c"), batch(8, "d"))
    live(link, times_1000, warm_up=())
    a, b, c, d = link.sent[-4:]

    assert [load(frame.payloads[0]) for frame in (a, c, d)] == [1000 * x for x in "acd"]
    assert (b.batch_id, b.ids, list(b.formats)) == (7, [2], [Outcome.BAD_RESULT])
    text = outcome.read_report(b.payloads[0]).message
    assert text.startswith("the result cannot be sent: a message of 1 items, 1 buffers and 30")
    assert "over the limit" in text


def test_a_function_needs_no_setup() -> None:
    """A function or a partial needs no setup."""
    link = Link(batch(1, 5))
    live(link, functools.partial(map_with, 3))

    assert [load(p) for p in link.sent[-1].payloads] == [15]


def map_with(factor: int, xs: list[int]) -> list[int]:
    return [factor * x for x in xs]


class Narrow(Model):
    """Runs out of memory with more than `most` items."""

    examples = (1,)
    most = 3

    def predict(self, xs: list[int]) -> list[int]:
        if len(xs) > self.most:
            raise MemoryError
        return [2 * x for x in xs]


def troubles(frames: list[Frame]) -> list[list[Trouble]]:
    return [
        msgspec.msgpack.decode(frame.payloads[0], type=list[Trouble])  # type: ignore[arg-type]
        for frame in frames
        if frame.kind == FrameKind.TROUBLE
    ]


def test_what_ran_out_of_memory_is_told_before_the_reply() -> None:
    """What ran out of memory is reported before the reply, by positions in the batch, also where some
    of its items could not be read; and only where there is something to report.
    """
    link = Link(batch(7, *range(6)), batch(8, 1, 2))
    link.frames[0].payloads = [b"\xc1", *link.frames[0].payloads[1:]]
    live(link, Narrow, warm_up=())

    told = [frame for frame in link.sent[3:] if frame.kind != FrameKind.CALL]
    assert [frame.kind for frame in told] == [FrameKind.TROUBLE, FrameKind.REPLY, FrameKind.REPLY]
    assert [frame.batch_id for frame in told] == [7, 7, 8]
    (trouble,) = troubles(link.sent)
    assert trouble == [Trouble(out_of_memory=True, ran_out=[[1, 2, 3, 4, 5]], fitted=[[1, 2], [3, 4, 5]])]
    assert list(told[1].formats) == [Outcome.MODEL_ERROR] + [Outcome.OK] * 5


def test_a_warm_up_that_runs_out_of_memory_says_so_and_times_what_fits() -> None:
    """If a warm-up runs out of memory the worker says so, times what fits and is ready, so that the
    first full batch is not the first failure.
    """
    link = Link()
    live(link, Narrow, warm_up=(1, 2, 4))
    *_, told, ready = link.sent

    assert bytes(ready.payloads[0]) == b"ready"  # type: ignore[arg-type]
    timings = msgspec.msgpack.decode(ready.payloads[1], type=list[tuple[int, float]])  # type: ignore[arg-type]
    assert [n for n, _ in timings] == [1, 2]
    (trouble,) = troubles(link.sent)
    assert (told.kind, told.batch_id) == (FrameKind.TROUBLE, 0)
    assert trouble[0] == Trouble(out_of_memory=True, ran_out=[[0, 1, 2, 3]], fitted=[[0, 1], [2, 3]])


def test_calls_of_the_warm_up_are_not_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls of the warm-up are not reported: they belong to no batch, and have no limit."""
    monkeypatch.setattr("carpool.engine.worker.serve._REPORT_EVERY_S", -1.0)
    link = Link(batch(7, 1, 2, 3, 4))
    live(link, Narrow, warm_up=(1, 2, 4))

    assert {frame.batch_id for frame in link.sent if frame.kind == FrameKind.CALL} == {7}


def test_calls_soon_after_the_batch_has_come_are_not_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stage counts from when it has sent a batch, so a report soon after that would only wake it."""
    monkeypatch.setattr("carpool.engine.worker.serve._REPORT_EVERY_S", 100.0)
    link = Link(batch(7, 1, 2, 3, 4), batch(8, 1, 2, 3, 4))
    live(link, Narrow, warm_up=())

    assert [frame for frame in link.sent if frame.kind == FrameKind.CALL] == []


def test_listed_errors_mean_out_of_memory_and_none_turns_it_off() -> None:
    """The errors that mean out of memory are those that the stage lists by their full names, or
    none.
    """

    def full(xs: list[int]) -> list[int]:
        if len(xs) > 1:
            raise BufferError
        return xs

    for oom_errors, outcome_of_all in ((("builtins.BufferError",), Outcome.OK), ((), Outcome.MODEL_ERROR)):
        link = Link(batch(7, 1, 2))
        live(link, full, isolate_errors=False, oom_errors=oom_errors)
        assert list(link.sent[-1].formats) == [outcome_of_all] * 2

    link = Link(batch(7, 1, 2, 3, 4))
    live(link, Narrow, warm_up=(), isolate_errors=False, oom_errors=None)
    assert list(link.sent[-1].formats) == [Outcome.MODEL_ERROR] * 4
