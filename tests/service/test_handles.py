"""Handles of a running service, from threads and from asyncio."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable

import pytest

import carpool
from carpool import Service, Stage
from carpool.service.handle import AsyncHandle
from tests.support import models
from tests.support.loops import on_a_loop
from tests.support.waiting import PATIENCE_S

SCALE = Service(Stage(models.scale, max_batch_size=16), name="scale", slo_s=5.0)


def test_predict_from_many_threads() -> None:
    """Of many threads that call `predict` each gets its own answers."""
    with SCALE.run() as service:
        wrong: list[tuple[int, float]] = []

        def client(first: int) -> None:
            for x in range(first, first + 100):
                y = service.predict(x)
                if y != 2 * x:
                    wrong.append((x, y))

        threads = [threading.Thread(target=client, args=(1000 * i,)) for i in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        snapshot = service.stats()

    assert wrong == []
    assert snapshot.outcomes["ok"] == 1600
    assert snapshot.stages[0].mean_batch_size > 1
    assert snapshot.slo_attainment == 1.0


@pytest.mark.slow
@on_a_loop
async def test_five_hundred_tasks_of_five_hundred_calls() -> None:
    """Of 500 tasks with 500 calls each all get the right answers, and none is lost."""
    async with SCALE.run_async() as service:

        async def client(first: int) -> None:
            for x in range(first, first + 500):
                assert await service.predict(x) == 2 * x

        await asyncio.gather(*[client(1000 * i) for i in range(500)])
        assert service.stats().outcomes["ok"] == 250_000
        assert service.stats().in_flight == 0


@on_a_loop
async def test_a_full_queue_makes_a_caller_wait() -> None:
    """A full queue makes callers in the process wait instead of refusing them, and keeps the order
    of their arrival.
    """
    stage = Stage(models.Slow, max_batch_size=2, max_queue_size=2)
    async with Service(stage).run_async() as service:
        answers = await asyncio.gather(*[service.predict(0.01) for _ in range(30)])
        assert len(answers) == 30
        assert service.stats().outcomes["overloaded"] == 0


class Held(carpool.Model):
    """Waits inside until it is let go."""

    gate: asyncio.Event

    async def predict(self, xs: list[int]) -> list[int]:  # type: ignore[override]
        await Held.gate.wait()
        return xs


@on_a_loop
async def test_a_full_queue_refuses_where_that_was_asked_for() -> None:
    """With `when_full="refuse"`, a request that meets a full queue raises `Overloaded` at once, also
    one for parts; items of a stream wait all the same.
    """
    Held.gate = asyncio.Event()
    service = Service(Stage(Held, run_in="loop", max_batch_size=1, max_queue_size=1))
    async with service.run_async(when_full="refuse") as s:
        inside = []
        for x in range(2):
            inside.append(asyncio.ensure_future(s.predict(x)))
            for _ in range(20):
                await asyncio.sleep(0)  # the first one is with the worker before the second comes
        with pytest.raises(carpool.Overloaded, match="the queue is full"):
            await s.predict(3)
        with pytest.raises(carpool.Overloaded, match="the queue is full"):
            async with s.predict_stream(4) as parts:
                await anext(parts)
        Held.gate.set()
        assert await asyncio.gather(*inside) == [0, 1]
        assert [y async for y in s.stream(range(8))] == list(range(8))


def test_what_a_full_queue_does_is_one_of_two() -> None:
    """A `when_full` that is neither is refused where it is given."""
    with pytest.raises(ValueError, match='when_full must be "refuse" or "wait"'):
        SCALE.run(when_full="drop")  # type: ignore[arg-type]


@on_a_loop
async def test_a_full_queue_of_a_static_policy_has_room_for_a_higher_priority() -> None:
    """When the queue of a `Static` policy is full, the newest request of the lowest priority gives
    up its place to a higher one, and hears that the queue is full.
    """
    gate = asyncio.Event()

    async def gated(xs: list[int]) -> list[int]:
        await gate.wait()
        return xs

    stage = Stage(gated, max_batch_size=1, policy=carpool.Static(max_queued_batches=4), run_in="loop")
    async with Service(stage).run_async() as service:
        low = []
        for x in range(5):  # one runs, four wait
            low.append(asyncio.ensure_future(service.predict(x)))
            await asyncio.sleep(0.01)
        high = asyncio.ensure_future(service.predict(9, priority=5))
        await asyncio.wait(low, timeout=10, return_when=asyncio.FIRST_COMPLETED)
        gate.set()
        assert await high == 9
        *served, refused = await asyncio.gather(*low, return_exceptions=True)
        assert served == [0, 1, 2, 3]
        assert (type(refused), str(refused)) == (carpool.Overloaded, "the queue is full")


@on_a_loop
async def test_who_waits_for_room_has_a_deadline_too() -> None:
    """The deadline of a caller that waits for room passes at the door as it does in the queue."""
    gate = asyncio.Event()

    async def gated(xs: list[int]) -> list[int]:
        await gate.wait()
        return xs

    stage = Stage(gated, max_batch_size=1, max_queue_size=1, run_in="loop")
    async with Service(stage).run_async() as service:
        busy = [asyncio.ensure_future(service.predict(x)) for x in range(2)]
        await asyncio.sleep(0.1)
        with pytest.raises(carpool.DeadlineExceeded, match="waiting for room"):
            await service.predict(2, timeout_s=0.1)
        gate.set()
        assert await asyncio.gather(*busy) == [0, 1]


def test_a_timeout_can_only_shorten() -> None:
    """A caller's time-out can only shorten the service's own."""
    with Service(Stage(models.Slow, max_batch_size=2), timeout_s=0.3).run() as service:
        with pytest.raises(carpool.DeadlineExceeded):
            service.predict(2.0, timeout_s=60)
        with pytest.raises(ValueError, match="timeout_s must be a positive number"):
            service.predict(0.0, timeout_s=0)


def test_a_deadline_is_a_timeout_error() -> None:
    """`except TimeoutError` catches a missed deadline, and `except ValueError` a validation error."""
    assert issubclass(carpool.DeadlineExceeded, TimeoutError)
    assert issubclass(carpool.ValidationError, ValueError)
    assert all(issubclass(e, carpool.CarpoolError) for e in (carpool.Overloaded, carpool.Unavailable))


def test_larger_priority_goes_first() -> None:
    """Of all that waits, the request with the largest priority is taken first."""
    order: list[str] = []

    async def main() -> None:
        async with Service(Stage(models.Slow, max_batch_size=1)).run_async() as service:

            async def ask(name: str, priority: int) -> None:
                await service.predict(0.02, priority=priority)
                order.append(name)

            tasks = [asyncio.ensure_future(ask("first", 0))]
            await asyncio.sleep(0.01)
            tasks += [asyncio.ensure_future(ask(n, p)) for n, p in [("low", -1), ("high", 5), ("normal", 0)]]
            await asyncio.gather(*tasks)

    asyncio.run(main())

    assert order == ["first", "high", "normal", "low"]


def test_batches_are_limited_by_the_sum_of_sizes() -> None:
    """Texts are batched in their order so that their lengths sum up to no more than the limit; one
    that is longer goes alone.
    """
    stage = Stage(models.lengths, max_batch_size=10, size=len, max_queue_size=8)
    texts = [n * "x" for n in (4, 4, 4, 30, 1, 9, 1, 0, 10, 3)]

    with Service(stage).run() as service:
        batches = list(service.stream(texts))
        alone = service.predict("xxx")

    assert alone == [3]
    assert [n in batch for n, batch in zip((4, 4, 4, 30, 1, 9, 1, 0, 10, 3), batches, strict=True)] == [True] * 10
    assert [batch for batch in batches if sum(batch) > 10] == [[30]]


def test_a_later_stage_weighs_what_it_gets() -> None:
    """A later stage weighs the result of the stage before, not the caller's item."""
    stages = [Stage(models.spell), Stage(models.lengths, max_batch_size=10, size=len)]

    with Service(*stages).run() as service:
        batches = list(service.stream([4, 4, 4, 30, 1, 9, 1, 0, 10, 3] * 5))

    assert len(batches) == 50
    assert [batch for batch in batches if sum(batch) > 10] == [[30]] * 5


def test_an_item_that_cannot_be_weighed_fails_alone() -> None:
    """An item that cannot be weighed fails alone in a call and in a stream, of either kind, and the
    others get their answers.
    """
    stage = Stage(models.lengths, max_batch_size=10, size=len, run_in="thread")
    xs = ["a", 7, "ccc"]

    async def main() -> list[object]:
        async with Service(stage).run_async() as service:
            with pytest.raises(carpool.ModelError, match="size= of stage lengths raised TypeError"):
                await service.predict(7)
            return [y async for y in service.stream(xs, return_exceptions=True)]

    with Service(stage).run() as service:
        answers = list(service.stream(xs, return_exceptions=True))
        with pytest.raises(carpool.ModelError, match="size= of stage lengths raised TypeError"):
            service.predict(7)

    for found in (answers, asyncio.run(main())):
        assert [isinstance(y, carpool.ModelError) for y in found] == [False, True, False]
        assert 3 in found[2]  # type: ignore[operator]


def test_batches_of_allowed_sizes() -> None:
    """With `allowed_batch_sizes` the model sees no other size, the padding shows in the numbers,
    and each caller gets the answer to its own item.
    """
    stage = Stage(models.lengths, max_batch_size=8, allowed_batch_sizes=[4, 8])
    with Service(stage).run() as service:
        assert service.predict("abc") == [3, 3, 3, 3]
        counted = service.stats().stages[0]
        batches = list(service.stream([n * "x" for n in range(100)]))

    assert (counted.batch_sizes, counted.padding_share) == ({1: 1}, 0.75)
    assert {len(batch) for batch in batches} <= {4, 8}
    assert [n in batch for n, batch in enumerate(batches)] == [True] * 100


def test_a_policy_s_own_sizes_are_padded_to() -> None:
    """If the stage has no allowed sizes, batches are padded to those of its policy."""
    policy = carpool.Static(allowed_batch_sizes=[2, 4])
    with Service(Stage(models.lengths, max_batch_size=8, policy=policy)).run() as service:
        assert service.predict("abc") == [3, 3]


@pytest.mark.parametrize("priority", [101, -101, 1.5, True, "high", float("inf")])
def test_a_priority_is_a_small_whole_number(priority: object) -> None:
    """A priority is a whole number between -100 and 100, both included; anything else is an error
    at once.
    """
    with Service(Stage(models.scale, max_batch_size=2, run_in="thread")).run() as service:
        with pytest.raises(ValueError, match="priority must be a whole number from -100 to 100"):
            service.predict(1, priority=priority)  # type: ignore[arg-type]
        assert [service.predict(1, priority=p) for p in (-100, 100)] == [2, 2]


def test_policies_know_the_service_s_wish_and_its_slo() -> None:
    """The policy of each stage is told the service's `overload`; with an SLO of its own, its
    refusals are heard as overload.
    """
    stage = Stage(models.scale, max_batch_size=2, run_in="thread", policy=models.RefusesWhatIsDue())

    async def main() -> list[str]:
        async with Service(stage, slo_s=5.0, overload="latency").run_async() as service:
            with pytest.raises(carpool.Overloaded):
                await service.predict(1)
            return [batcher.lobby.policy.overload for batcher in service.running_driver.core.crews]

    assert asyncio.run(main()) == ["latency"]


def test_stats_tell_why() -> None:
    """The stats have what each stage's policy explains, which is asked in the thread that it
    belongs to.
    """
    stage = Stage(models.scale, max_batch_size=2, run_in="thread", policy=models.NamesItsThread())
    with Service(stage).run() as service:
        service.predict(1)
        assert service.stats().stages[0].policy == {"thread": "carpool"}


@on_a_loop
async def test_who_expires_while_the_loop_stands_still_hears_so() -> None:
    """A caller that expires while the loop stands still hears so, whatever the loop reads first
    when it goes on, although the answer came in time.
    """
    inside, leave = threading.Event(), threading.Event()

    def gated(xs: list[int]) -> list[int]:
        inside.set()
        leave.wait(10)
        return xs

    async with Service(Stage(gated, max_batch_size=1, run_in="thread")).run_async() as service:
        hasty = asyncio.ensure_future(service.predict(1, timeout_s=0.3))
        await asyncio.to_thread(inside.wait, 10)
        leave.set()
        time.sleep(0.6)  # noqa: ASYNC251 - the loop is to stand still
        with pytest.raises(carpool.DeadlineExceeded):
            await hasty


class Inside:
    """A function for a thread that waits inside until it is let go."""

    def __init__(self) -> None:
        self.has_come, self.may_leave = threading.Event(), threading.Event()

    def __call__(self, xs: list[int]) -> list[int]:
        self.has_come.set()
        self.may_leave.wait(PATIENCE_S)
        return xs

    async def asked(self) -> tuple[AsyncHandle, asyncio.Future[int]]:
        """A service with one call inside."""
        service = Service(Stage(self, name="inside", max_batch_size=1, run_in="thread")).run_async()
        await service.start()
        call = asyncio.ensure_future(service.predict(1))
        await asyncio.to_thread(self.has_come.wait, PATIENCE_S)
        return service, call


@pytest.mark.fault("F52")
@on_a_loop
async def test_a_close_that_drains_answers_what_is_inside() -> None:
    """`close` finishes the requests inside if it drains."""
    inside = Inside()
    service, call = await inside.asked()
    closing = asyncio.ensure_future(service.close())
    await asyncio.sleep(0.05)
    assert not closing.done()
    inside.may_leave.set()
    await closing
    assert await call == 1


@pytest.mark.fault("F52")
@on_a_loop
async def test_a_close_that_does_not_drain_fails_what_is_inside() -> None:
    """`close(drain=False)` fails the requests inside at once."""
    inside = Inside()
    service, call = await inside.asked()
    closing = asyncio.ensure_future(service.close(drain=False))
    with pytest.raises(carpool.Unavailable) as failed:
        await call
    assert failed.value.code == "stopped"
    inside.may_leave.set()
    await closing


@on_a_loop
async def test_calls_while_stopping_are_refused() -> None:
    """A service that drains refuses new calls."""
    inside = Inside()
    service, call = await inside.asked()
    closing = asyncio.ensure_future(service.close())
    await asyncio.sleep(0.05)
    with pytest.raises(carpool.Unavailable, match="stopping"):
        await service.predict(2)
    inside.may_leave.set()
    await asyncio.gather(call, closing)


def test_the_story_of_a_request() -> None:
    """With a journal, what happened to each request can be told in order."""
    with SCALE.run(journal_size=100) as service:
        service.predict(1)
        service.predict(2)
        story = [entry.event for entry in service.story(2)]
        assert service.story() == service.story(2)

    assert story == ["admitted", "runs", "answered"]


def test_the_journal_is_off_unless_asked_for() -> None:
    """Without a journal a request has no story to tell."""
    with SCALE.run() as service:
        service.predict(1)
        assert service.story(1) == []


@pytest.mark.fault("F53")
def test_a_handle_is_of_no_use_in_a_forked_child() -> None:
    """A handle of the parent raises in a forked child instead of hanging."""
    with SCALE.run() as service:
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                service.predict(1)
                os.write(write, b"answered")
            except RuntimeError as error:
                os.write(write, str(error).encode())
            finally:
                os._exit(0)
        os.waitpid(pid, 0)
        told = os.read(read, 1000).decode()
        os.close(read)
        os.close(write)

        assert service.predict(1) == 2
    assert told == "this service was started by another process; start one in this process"


def test_stats_tell_where_time_goes() -> None:
    """The stats have batch sizes, reasons, times in queue and worker, and the workers."""
    with Service(Stage(models.Slow, max_batch_size=4), name="s").run() as service:
        list(service.stream([0.01] * 20))
        snapshot = service.stats()

    stage = snapshot.stages[0]
    assert sum(n * count for n, count in stage.batch_sizes.items()) == 20
    assert stage.batches == sum(stage.reasons.values())
    assert 0.005 < stage.mean_compute_s < 1
    assert snapshot.mean_latency_s > stage.mean_queue_s
    assert stage.workers == {"ready": 1}


def test_nothing_is_left_behind() -> None:
    """After many starts and stops there are as many threads and descriptors as before."""
    SCALE.start().close()
    threads, descriptors = threading.active_count(), len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        with SCALE.run() as service:
            list(service.stream(range(100)))

    assert threading.active_count() == threads
    assert len(os.listdir("/proc/self/fd")) == descriptors


@pytest.mark.parametrize("run", [SCALE.run, SCALE.run_async, SCALE.start])
def test_a_run_has_no_other_settings(run: Callable[..., object]) -> None:
    """A setting that there is not is refused before anything is started, by a text that lists those that there are."""
    with pytest.raises(TypeError, match=r"no setting 'outptu'; there are join, journal_size, on, output, when_full"):
        run(outptu=print)
