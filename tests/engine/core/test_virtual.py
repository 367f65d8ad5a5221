"""The virtual driver: a day of traffic without a second of waiting, the same every time."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from carpool.engine.core.batch import Batch
from carpool.engine.drive.virtual import VirtualDriver
from carpool.engine.policy import Decision, Greedy, Policy, Static, View
from carpool.engine.request import Lane, Request
from carpool.errors import DeadlineExceeded, ModelError
from tests.support.pipelines import items, outcome, pipeline_of, stage


def driver(
    cost: Callable[[int], float] = lambda n: 1.0,
    *,
    policy: Policy | None = None,
    workers: int = 1,
    compute: Callable[[list[Any]], list[Any]] = lambda items: items,
    hop_s: float = 0.0,
    turn_s: float = 0.0,
    **settings: Any,
) -> VirtualDriver:
    """One stage; the pipeline's workers are made by the driver."""
    made = pipeline_of(stage(policy=policy, **settings), workers=0)
    return VirtualDriver(made, [cost], [workers], [compute], hop_s=hop_s, turn_s=turn_s)


class Times:
    """A caller that notes when each answer comes."""

    def __init__(self, run: VirtualDriver) -> None:
        self.at: dict[Any, float] = {}
        self._run = run

    def answered(self, request: Request) -> None:
        self.at[request.item] = self._run.clock.now


def schedule(run: VirtualDriver) -> list[tuple[float, int, list[Any], str]]:
    return [(batch.started, batch.place, items(batch.requests), batch.reason) for batch in run.batches]


@pytest.mark.parametrize("policy", [Greedy(4), Static(4), Static(4, 0.0)])
def test_a_lone_request_on_an_idle_worker_does_not_wait(policy: Policy) -> None:
    """The latency of a lone request on an idle worker is exactly the cost of a batch of one."""
    run = driver(lambda n: 2.0 + n, policy=policy)
    times = Times(run)
    for when in (1, 10, 20):
        run.arrive(when, when, caller=times)

    run.run()

    assert times.at == {1: 4, 10: 13, 20: 23}


def test_what_arrives_in_one_moment_shares_a_batch() -> None:
    """All events of a moment are delivered before anything is decided, as in one turn of a real loop."""
    run = driver(lambda n: 1.0)
    for item in "abc":
        run.arrive(5, item)
    run.arrive(6, "d")  # the moment at which the first batch is done

    run.run()

    assert schedule(run) == [(5, 0, ["a", "b", "c"], "free"), (6, 0, ["d"], "free")]


def test_time_moves_only_as_far_as_asked() -> None:
    """Running the clock until a moment leaves what comes later in the future."""
    run = driver(lambda n: 4.0)
    request = run.arrive(5, "a")

    run.run(until=8)
    before = (run.clock.now, outcome(request), len(run.answers))
    run.run(until=9)

    assert before == (8, None, 0)
    assert (run.clock.now, outcome(request), run.answers) == (9, "a", [request])


ARRIVALS = [0, 1, 2, 10, 11, 12, 13, 20]


def test_static_and_greedy_on_one_script() -> None:
    """On eight arrivals with batches of 4 s, `Static` and `Greedy` send exactly these batches, with
    exactly these mean latencies.
    """
    found = {}
    for name, policy in (("greedy", Greedy(4)), ("static", Static(4, 3.0))):
        run = driver(lambda n: 4.0, policy=policy)
        times = Times(run)
        for when in ARRIVALS:
            run.arrive(when, when, caller=times)
        run.run()
        found[name] = schedule(run), [times.at[when] - when for when in ARRIVALS]

    assert found["greedy"] == (
        [
            (0, 0, [0], "free"),
            (4, 0, [1, 2], "free"),
            (10, 0, [10], "free"),
            (14, 0, [11, 12, 13], "free"),
            (20, 0, [20], "free"),
        ],
        [4, 7, 6, 4, 7, 6, 5, 4],
    )
    assert found["static"] == (
        [(3, 0, [0, 1, 2], "delay"), (13, 0, [10, 11, 12, 13], "full"), (23, 0, [20], "delay")],
        [7, 6, 5, 7, 6, 5, 4, 7],
    )


def random_run(seed: int) -> list[object]:
    """A crowded hour with errors, deadlines, priorities and dying workers."""
    dice = random.Random(seed)
    run = driver(
        lambda n: 0.5 + 0.125 * n,
        workers=2,
        compute=lambda xs: [ModelError("bad") if x % 7 == 0 else -x for x in xs],
        max_size=20,
    )
    for i in range(500):
        when = dice.uniform(0, 100)
        run.arrive(when, i, dice.choice([2.0, 20.0]), lane=Lane(dice.choice([0, 0, 1]), None, 0), patient=i % 2 == 0)
    for when in range(5, 100, 10):
        run.at(when, lambda: run.lose(0, 0, back_after_s=2.0))
    run.run()
    return [*schedule(run), *[(request.id, request.item, outcome(request)) for request in run.answers]]


def test_the_same_seed_gives_the_same_run() -> None:
    """A run with the same seed has the same batches and answers; one with another seed has others."""
    assert random_run(1) == random_run(1)
    assert random_run(1) != random_run(2)


def test_every_request_of_a_run_is_answered() -> None:
    """Whatever happens to the workers, each request of a run is answered exactly once."""
    answers = [entry[1] for entry in random_run(3) if isinstance(entry, tuple) and len(entry) == 3]

    assert sorted(answers) == list(range(500))


class Client:
    """A caller that thinks for a while and asks again, so many times."""

    def __init__(self, run: VirtualDriver, name: str, think_s: float, times: int) -> None:
        self.asked = 0
        self.heard: list[tuple[float, Any]] = []
        self._run, self._name, self._think_s, self._times = run, name, think_s, times
        self.ask()

    def ask(self) -> None:
        self.asked += 1
        self._run.submit(f"{self._name}{self.asked}", caller=self)

    def answered(self, request: Request) -> None:
        self.heard.append((self._run.clock.now, request.result))
        if self.asked == self._times:
            return
        if self._think_s:
            self._run.at(self._run.clock.now + self._think_s, self.ask)
        else:
            self.ask()


def test_callers_may_come_back() -> None:
    """In a closed loop the answer to one request brings the next one, at once or after a while.
    What waits goes to the free worker before anybody is told, so `e3` cannot share the batch of
    `s2`.
    """
    run = driver(lambda n: 2.0)
    eager, slow = Client(run, "e", 0, 4), Client(run, "s", 1, 2)

    run.run()

    assert eager.heard == [(2, "e1"), (4, "e2"), (8, "e3"), (10, "e4")]
    assert slow.heard == [(2, "s1"), (6, "s2")]
    assert schedule(run) == [
        (0, 0, ["e1", "s1"], "free"),
        (2, 0, ["e2"], "free"),
        (4, 0, ["s2"], "free"),
        (6, 0, ["e3"], "free"),
        (8, 0, ["e4"], "free"),
    ]


def test_results_are_those_of_the_stub_model() -> None:
    """An exception in the place of a result fails its item; each stage computes on the results before it."""
    made = pipeline_of(stage(), stage(), workers=0)
    run = VirtualDriver(
        made,
        [lambda n: 1.0, lambda n: 2.0],
        computes=[
            lambda xs: [x + 1 for x in xs],
            lambda xs: [ModelError("three") if x == 3 else 10 * x for x in xs],
        ],
    )
    requests = [run.arrive(0, x) for x in (1, 2, 3)]

    run.run()

    assert [outcome(request) for request in requests] == [20, ModelError, 40]
    assert run.clock.now == 3


@pytest.mark.parametrize("kind", [KeyError, StopIteration, KeyboardInterrupt, GeneratorExit])
def test_what_a_stub_model_raises_is_the_cause_of_its_error(kind: type[BaseException]) -> None:
    """The caller of an item for which the stub model raised gets a `ModelError` with that very
    exception as its cause, as from a worker.
    """
    planned = kind("planned")
    run = driver(compute=lambda xs: [planned for _ in xs])
    request = run.arrive(0, "x")

    run.run()

    assert type(request.error) is ModelError
    assert request.error.__cause__ is planned
    assert (str(request.error), request.error.type_name) == (f"{kind.__name__}: {planned}", kind.__name__)


def test_a_deadline_is_kept_to_the_moment() -> None:
    """A caller hears exactly at its deadline, whether its request is queued or at work."""
    run = driver(lambda n: 10.0, max_batch_size=1)
    times = Times(run)
    run.arrive(0, "at work", 4.0, caller=times)
    run.arrive(0, "queued", 7.0, caller=times)

    run.run()

    assert times.at == {"at work": 4, "queued": 7}
    assert [outcome(request) for request in run.answers] == [DeadlineExceeded, DeadlineExceeded]
    assert [len(batch) for batch in run.batches] == [1]


def test_another_worker_takes_over_from_a_lost_one_at_once() -> None:
    """Requests of a lost worker go to another one at once, although nothing else happens, and long
    before the lost one is back.
    """
    run = driver(lambda n: 4.0, workers=2)
    run.arrive(0, "a")
    run.run(until=1)
    run.lose(0, run.batches[0].place, back_after_s=50)

    run.run()

    assert schedule(run) == [(0, 1, ["a"], "free"), (1, 0, ["a"], "quarantine")]
    assert [request.result for request in run.answers] == ["a"]


def test_a_worker_that_hangs_is_replaced() -> None:
    """A worker that hangs is replaced at its limit; what it had is run once more and then fails."""
    run = driver(lambda n: 100.0, max_batch_time_s=10)
    times = Times(run)
    request = run.arrive(0, "a", caller=times)

    run.run()

    assert [batch.started for batch in run.batches] == [0, 10]
    assert times.at == {"a": 20}
    assert isinstance(request.error, DeadlineExceeded)
    assert "given up: it is in one call for longer than max_batch_time_s (10 s)" in str(request.error)


def test_a_long_run_decides_once_per_moment() -> None:
    """Twenty thousand requests take no more polls than there are moments at which something happens."""
    run = driver(lambda n: 2**-9 + 2**-14 * n, max_batch_size=64)
    polls = 0
    poll = run.core.poll

    def counted(now: float) -> Any:
        nonlocal polls
        polls += 1
        return poll(now)

    run.core.poll = counted  # type: ignore[method-assign]
    for i in range(20_000):
        run.arrive(i * 2**-13, i, 1.0)

    run.run()

    assert len(run.answers) == 20_000
    assert {request.error for request in run.answers} == {None}
    assert polls <= 20_000 + len(run.batches) + 1


def feed(*times: float) -> list[tuple[float, Request]]:
    return [(when, Request(when, float("inf"))) for when in times]


def test_a_feed_is_drawn_in_step_with_time() -> None:
    """A feed that is drawn as time goes on gives the same run as arrivals that are known
    beforehand, and each is drawn only when the one before has arrived.
    """
    run = driver(lambda n: 4.0)
    drawn: list[float] = []

    def endless() -> Iterator[tuple[float, Request]]:
        for when in itertools.count(0.0, 3.0):
            drawn.append(when)
            yield from feed(when)

    run.feed(endless())
    run.arrive(3, "b")
    run.run(until=10)

    assert schedule(run) == [(0, 0, [0.0], "free"), (4, 0, [3.0, "b"], "free"), (8, 0, [6.0], "free")]
    assert drawn == [0, 3, 6, 9, 12]


def test_a_turn_delays_decisions_and_answers() -> None:
    """What happens within a turn that an event has begun shares one decision; only a reply while
    nobody waits ends the turn at once.
    """
    run = driver(lambda n: 4.0, turn_s=0.5)
    times = Times(run)
    for when in (1, 1.5, 1.75):
        run.arrive(when, when, caller=times)

    run.run()

    assert schedule(run) == [(1.5, 0, [1, 1.5], "free"), (6, 0, [1.75], "free")]
    assert times.at == {1: 6, 1.5: 6, 1.75: 10}


def test_the_hop_is_no_part_of_the_busy_time() -> None:
    """With a hop to the worker each batch takes longer by it, its busy time does not, and the
    policy learns how long the way is.
    """
    run = driver(lambda n: 4.0, hop_s=1.0)
    run.feed(feed(0, 1))

    run.run()

    assert [batch.started for batch in run.batches] == [0, 5]
    assert run.clock.now == 10
    assert run.core.crews[0].times.hop_s == pytest.approx(0.19)  # a tenth of what it lacks, twice


def test_wake_ups_are_counted() -> None:
    """Polls count as wake-ups only if there is no other reason for them than the time."""
    static, greedy = driver(policy=Static(4, 3.0)), driver()
    for run in (static, greedy):
        run.feed(feed(0, 1, 10))
        run.run()

    assert (static.wake_ups, greedy.wake_ups) == (2, 0)


class Insomniac(Greedy):
    """Asks to be asked again at once, for a while."""

    def decide(self, view: View) -> Decision:
        return super().decide(view) if view.now > 1 + 1e-5 else Decision(wake_at=view.now)


def test_a_policy_cannot_stop_the_clock() -> None:
    """A policy that asks to be woken at once, again and again, moves the clock on by a tick each
    time.
    """
    run = driver(policy=Insomniac(4))
    run.feed(feed(1))

    run.run()

    assert len(run.answers) == 1
    assert run.wake_ups == pytest.approx(10, abs=1)


class Watching:
    """A watcher that notes what it is told."""

    def __init__(self) -> None:
        self.told: list[object] = []

    def started(self, now: float, batch: Batch, busy_s: float) -> None:
        self.told.append((now, len(batch), busy_s))

    def answered(self, now: float, requests: Sequence[Request]) -> None:
        self.told.append((now, items(requests)))


def test_a_watcher_is_told_instead_of_lists_being_kept() -> None:
    """A watcher hears of each batch with its cost, which may depend on the batch and the time, and
    of each answer; no lists are kept then.
    """
    watcher = Watching()
    made = pipeline_of(stage(), workers=0)
    run = VirtualDriver(made, lambda batch, now: now + len(batch), watcher=watcher)
    run.feed(feed(1, 2))

    run.run()

    assert watcher.told == [(1, 1, 2), (3, 1, 4), (3, [1]), (7, [2])]
    assert (run.batches, run.answers) == ([], [])
