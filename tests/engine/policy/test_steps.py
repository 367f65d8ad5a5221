"""The policies of steps: what they learn, who may join, and that nobody starves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil, inf
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carpool.engine.policy import AIMD, STEPS_BY_NAME, GreedySteps, Paced, StaticSteps, StepPolicy, new_step_policy
from carpool.engine.policy.cost_line import CostLine
from carpool.engine.request import Request, Stream
from tests.effort import examples
from tests.support.steps import ask, drive, reader, stepper


@dataclass
class SetStub:
    """A running set as a policy sees it."""

    active: int = 0
    spare: float = inf
    is_stepping: bool = False
    has_newcomers: bool = False
    starting: int = 0
    size: int = 0

    def __len__(self) -> int:
        return self.active

    def spare_s(self, now: float) -> float:
        return self.spare


def heads(*lengths: int, due: float = inf) -> list[Request]:
    """Requests of these lengths at the head of the queue."""
    made = []
    for length in lengths:
        request = Request("x", due)
        request.stream = Stream(length)
        made.append(request)
    return made


def paced(part_slo_s: float | None = 0.05, rows: int = 64) -> Paced:
    """The policy with known costs: 5 ms + 0.1 ms a unit to start, 18 ms + 0.15 ms a stream to step."""
    policy = Paced(rows, part_slo_s)
    policy.start, policy.step = CostLine(5e-3, 1e-4), CostLine(18e-3, 1.5e-4)
    return policy


# -- costs


@given(
    a=st.floats(1e-4, 1e-1),
    b=st.floats(1e-6, 1e-3),
    xs=st.lists(st.integers(1, 10_000), min_size=3, max_size=30, unique=True),
)
@examples(50)
def test_a_line_learns_a_line(a: float, b: float, xs: list[int]) -> None:
    """From amounts that differ it knows the seconds of all others."""
    line = CostLine()
    for x in xs:
        line.learn(x, a + b * x)
    for x in (1, 77, 20_000):
        assert line.seconds(x) == pytest.approx(a + b * x, rel=0.02, abs=1e-5)


def test_a_line_forgets() -> None:
    """What has become twice as slow is known after some samples."""
    line, dice = CostLine(), Random(1)
    for factor in (1, 2):
        for _ in range(200):
            x = dice.randint(1, 32)
            line.learn(x, factor * (0.01 + 0.001 * x))
    assert line.seconds(16) == pytest.approx(0.052, rel=0.03)


def test_a_stall_is_believed_only_if_it_repeats() -> None:
    """One step that stood still for a second says nothing about the next ones; two in a row do."""
    line = CostLine()
    for i in range(20):
        line.learn(1 + i % 8, 0.02)
    line.learn(4, 1.0)
    assert line.seconds(4) == pytest.approx(0.02)
    line.learn(4, 0.02)
    line.learn(4, 1.0)
    line.learn(4, 1.0)
    assert line.seconds(4) > 0.05


def test_equal_amounts_teach_a_level_and_leave_the_slope() -> None:
    """All streams may be of one length; then nothing is known of others but what was known before."""
    line = CostLine(0.0, 0.001)
    for _ in range(50):
        line.learn(10, 0.03)
    assert line.seconds(10) == pytest.approx(0.03)
    assert line.b == 0.001


# -- the rule


def test_the_pace_is_the_goal_or_half_that_of_a_full_set() -> None:
    """What even a lone stream would miss is no goal."""
    assert paced(0.05).pace_s == 0.05
    assert paced(None).pace_s == pytest.approx(2 * (18e-3 + 64 * 1.5e-4))
    assert paced(0.01).pace_s == pytest.approx(2 * 18.15e-3)


def test_steps_that_are_quicker_than_any_reader_hold_nobody_back() -> None:
    """Without a goal the pace is a hundred parts a second at most: what is around such a step takes longer than
    it, so all would be late for ever, and nobody could join.
    """
    quick = Paced(64)
    quick.step = CostLine(1e-5, 1e-7)
    assert quick.pace_s == 0.01


def test_newcomers_use_spare_time_and_no_more() -> None:
    """The longest head of the queue whose start and step fit into it joins."""
    policy, queue = paced(), heads(100, 100, 100)
    one, two = 5e-3 + 1e-2 + 18e-3 + 11 * 1.5e-4, 5e-3 + 2e-2 + 18e-3 + 12 * 1.5e-4

    assert policy.join(0.0, queue, SetStub(10, one - 1e-6)) == 0
    assert policy.join(0.0, queue, SetStub(10, one + 1e-6)) == 1
    assert policy.join(0.0, queue, SetStub(10, two + 1e-6)) == 2
    assert policy.join(0.0, queue, SetStub(10)) == 3
    assert policy.explain(0.0)["rule"] == "all"


def test_the_step_under_way_comes_first() -> None:
    """Its time is not there to be used."""
    policy, queue = paced(), heads(100)
    needed = 5e-3 + 1e-2 + 18e-3 + 11 * 1.5e-4

    assert policy.join(0.0, queue, SetStub(10, needed + 1e-3)) == 1
    assert policy.join(0.0, queue, SetStub(10, needed + 1e-3, is_stepping=True)) == 0


def test_the_parts_of_the_step_under_way_count_for_quick_starts() -> None:
    """Starts of a twentieth of a step would gain nothing from waiting for each other. Others do wait:
    `spare` has no parts yet that are still to come.
    """
    needed = 18e-3 + 11 * 1.5e-4
    for start_s, joins in ((0.04 * needed, 1), (0.06 * needed, 0)):
        policy = paced()
        policy.start = CostLine(start_s)
        assert policy.join(0.0, heads(1), SetStub(10, 0.01, is_stepping=True)) == joins
        assert policy.join(0.0, heads(1), SetStub(10, 0.01)) == 0, "no part is on its way"
        assert policy.join(0.0, heads(1), SetStub(10, -0.02, is_stepping=True)) == 0, (
            "a part would be late all the same"
        )
        policy.part_slo_s = None
        assert policy.join(0.0, heads(1), SetStub(10, -0.02, is_stepping=True)) == joins, "it is counted from anew"


def test_whose_first_part_comes_with_the_step_under_way_is_due_one_pace_later() -> None:
    """Such a stream is not due yet, but it will be when the newcomers stop it."""
    policy = paced()

    assert policy.join(0.0, heads(250), SetStub(1, is_stepping=True, has_newcomers=True)) == 1
    assert policy.join(0.0, heads(280), SetStub(1, is_stepping=True, has_newcomers=True)) == 0
    assert policy.join(0.0, heads(280), SetStub(1, is_stepping=True)) == 1


def test_joins_that_are_on_their_way_count() -> None:
    """Requests that come one by one during one step are let in no more readily than all at once."""
    policy = paced()
    needed = 5e-3 + 3e-2 + 18e-3 + 12 * 1.5e-4 + policy.step.seconds(11)

    assert policy.join(0.0, heads(100), SetStub(11, needed + 1e-6, True, starting=200)) == 1
    assert policy.join(0.0, heads(100), SetStub(11, needed - 1e-6, True, starting=200)) == 0


def test_no_set_grows_until_its_steps_break_the_pace() -> None:
    """A step may take 0.9 of it, so that spare time grows while others wait."""
    policy = paced(0.0221)
    fits = int((0.9 * 0.0221 - 18e-3) / 1.5e-4)

    assert policy.join(0.0, heads(*[1] * 64), SetStub(0)) == fits
    assert policy.explain(0.0)["rule"] == "pace"


def test_an_empty_set_is_joined_whatever_it_takes() -> None:
    """By one at least: nobody waits for what cannot become better."""
    assert paced(0.001).join(0.0, heads(100_000, 1), SetStub(0, -5.0)) >= 1


def test_a_stream_that_is_resumed_costs_its_parts_too() -> None:
    """They are started like the item itself."""
    policy, queue = paced(), heads(100)
    assert queue[0].stream is not None
    queue[0].stream.parts = 900
    assert policy.join(0.0, queue, SetStub(10, 0.05)) == 0
    queue[0].stream.parts = 0
    assert policy.join(0.0, queue, SetStub(10, 0.05)) == 1


def test_a_request_is_late_when_its_start_does_not_fit_before_its_due() -> None:
    """The service's SLO counts to the first part, which comes with the step after the start."""
    policy, (request,) = paced(), heads(100, due=1.0)
    policy.active = 9
    needed = 0.015 + 18e-3 + 10 * 1.5e-4
    assert not policy.is_late(1.0 - needed - 1e-6, request) and policy.is_late(1.0 - needed + 1e-6, request)


def test_nobody_is_late_for_the_sake_of_those_who_join_with_it() -> None:
    """Three that fit into spare time join one by one, if together the first one's part would come too late."""
    policy = paced()
    together = 5e-3 + 3 * 1e-2 + 18e-3 + 13 * 1.5e-4

    assert policy.join(0.0, heads(100, 100, 100, due=together + 1e-6), SetStub(10)) == 3
    assert policy.join(0.0, heads(100, 100, 100, due=together - 1e-6), SetStub(10)) == 2
    assert policy.explain(0.0)["rule"] == "due"
    assert policy.join(0.0, heads(100, due=0.001), SetStub(10)) == 1


def test_greedy_and_static() -> None:
    """Greedy takes all that fits at once, static only into an empty set."""
    assert GreedySteps(4).join(0.0, heads(1, 1), SetStub(3, -1.0)) == 2
    assert StaticSteps(4).join(0.0, heads(1, 1), SetStub(3)) == 0
    assert StaticSteps(4).join(0.0, heads(1, 1), SetStub(0)) == 2


@pytest.mark.parametrize(("start_s", "first_part"), [(0.04, 6.12), (0.2, 7.6)])
def test_a_free_place_is_filled_before_the_next_step_unless_starting_together_is_worth_a_step(
    start_s: float, first_part: float
) -> None:
    """A stream has just had its first part, so there is nothing to spare. Where starts are quick, those who
    come in the step after that are in the one behind it; where they are not, they wait and start together.
    """
    policy = Paced(4, None)
    policy.start, policy.step = CostLine(start_s), CostLine(1.0)
    driver = drive(stepper(rows=4, policy=policy), start_s=lambda n: start_s, step_s=lambda n: 1.0)
    ask(driver, 3), ask(driver, 20), ask(driver, 20, 2.5)
    newcomers = [ask(driver, 5, 4.5), ask(driver, 5, 4.8)]
    driver.run()

    assert [reader(each).times[0] for each in newcomers] == pytest.approx([first_part] * 2)


@pytest.mark.parametrize("length", [1, 50, 400])
def test_nobody_starves(length: int) -> None:
    """The head of the queue joins within (start + step) / (0.1 pace) steps, whatever comes behind it."""
    pace_s = 0.05
    policy = paced(pace_s, rows=40)
    stage = stepper(rows=40, policy=policy)
    driver = drive(stage, start_s=lambda n: policy.start.seconds(n), step_s=lambda n: policy.step.seconds(n))
    for i in range(39):
        ask(driver, 2000, i / 50)
    head = ask(driver, 5, 3.0, length=length)
    for i in range(100):
        ask(driver, 5, 3.0 + i / 1000)
    driver.run(until=3.0)
    before = driver.step_workers[0].steps
    while not reader(head).parts:
        driver.run(until=driver.clock.now + 0.01)

    bound = (policy.start.seconds(length) + policy.step.seconds(40)) / (0.1 * pace_s)
    assert driver.step_workers[0].steps - before <= ceil(bound) + 2


@given(
    lengths=st.lists(st.tuples(st.integers(1, 500), st.integers(1, 30)), min_size=5, max_size=20),
    gap_ms=st.integers(0, 60),
    pace_s=st.floats(0.025, 0.05),
    start=st.sampled_from([(5e-3, 1e-4), (1e-4, 1e-6)]),
)
@examples(60)
def test_no_part_is_late_for_the_sake_of_newcomers(
    lengths: list[tuple[int, int]], gap_ms: int, pace_s: float, start: tuple[float, float]
) -> None:
    """With costs that are known, every part comes within one pace per part of the first one."""
    policy = paced(pace_s, rows=16)
    policy.start = CostLine(*start)
    stage = stepper(rows=16, policy=policy)
    driver = drive(stage, start_s=CostLine(*start).seconds, step_s=policy.step.seconds)
    requests = [ask(driver, n, i * gap_ms / 1000, length=length) for i, (length, n) in enumerate(lengths)]
    driver.run()

    for request in requests:
        times = reader(request).times
        assert len(times) == request.item
        assert all(at <= times[0] + i * pace_s + 1e-9 for i, at in enumerate(times))


def test_without_a_warm_up_a_policy_learns_from_the_first_steps() -> None:
    """Costs of zero let all in; from the first reports on it knows better."""
    policy = Paced(32, 0.05)
    driver = drive(stepper(rows=32, policy=policy), start_s=lambda n: 5e-3 + 1e-4 * n, step_s=lambda n: 0.02 + 1e-4 * n)
    requests = [ask(driver, 20, i / 20, length=20 + i % 50) for i in range(60)]
    driver.run()

    assert all(request.error is None for request in requests)
    assert policy.start.a == pytest.approx(5e-3, rel=0.05) and policy.step.a == pytest.approx(0.02, rel=0.05)


# -- names


@pytest.mark.parametrize(("name", "kind"), [(None, Paced), *STEPS_BY_NAME.items()])
def test_a_stage_of_steps_names_its_policy(name: str | None, kind: type[StepPolicy]) -> None:
    """`paced` is what it gets if it names none."""
    made = new_step_policy(name, 8, part_slo_s=0.1, slo_s=2.0)

    assert type(made) is kind
    assert (made.rows, made.part_slo_s, made.slo_s) == (8, 0.1, 2.0)


def test_a_template_is_copied_and_keeps_its_settings() -> None:
    """Within the stage's limits."""
    template = Paced(rows=100, part_slo_s=0.2)
    made = new_step_policy(template, 8, part_slo_s=0.1)

    assert made is not template and (made.rows, made.part_slo_s) == (8, 0.2)


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda: new_step_policy("adaptive", 8), ValueError, "no policy of steps 'adaptive'; choose one of 'paced'"),
        (lambda: new_step_policy(AIMD(), 8), TypeError, "AIMD decides on batches"),
    ],
)
def test_what_is_no_policy_of_steps_is_refused(make: Callable[[], object], error: type[Exception], text: str) -> None:
    """By name, with those that there are."""
    with pytest.raises(error, match=text):
        make()
