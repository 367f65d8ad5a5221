"""Lone calls go to the worker from the caller's thread; whatever happens meanwhile, they end as by way of the loop."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from math import inf
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import carpool
from carpool.engine.core.batch import Reply
from carpool.engine.core.core import Core
from carpool.engine.drive import lending
from carpool.engine.drive.aio import Driver
from carpool.engine.drive.lending import Lending, LentCall
from carpool.engine.observe.stats import Stats
from carpool.engine.policy import Adaptive, Decision, DoneBatch, Greedy, Policy, View
from carpool.engine.policy.base import NOTHING
from carpool.engine.policy.one_by_one import OneByOne
from carpool.engine.request import Request
from carpool.service.thread_handle import Handle
from tests.effort import examples
from tests.engine.drive.counts import Counts
from tests.support import models
from tests.support.pipelines import stage
from tests.support.values import flat
from tests.support.waiting import PATIENCE_S, wait_until


def loan_of(service: Handle) -> Any:
    driver: Driver = service._inner.driver  # type: ignore[assignment]
    return driver.loan


def lent(service: Handle) -> Any:
    """Call until the worker is lent, and return the loan.

    The loop does not take its calls over for their length, which on a busy machine is anything.
    """
    assert service._thread is not None
    until = time.monotonic() + PATIENCE_S
    while True:
        loan = loan_of(service)
        if loan is not None:
            loan._longest_ms = 1000.0 * PATIENCE_S
            service._thread.ask(lambda: None, PATIENCE_S)  # if it is being taken back already, it has been then
            if not loan.is_over:
                return loan
        service.predict(0)
        assert time.monotonic() < until


def asking(service: Handle, item: Any) -> tuple[threading.Thread, list[Any]]:
    """Ask in a thread of its own; return it and where its answer will be."""
    answers: list[Any] = []
    thread = threading.Thread(target=lambda: answers.append(service.predict(item)))
    thread.start()
    return thread, answers


@pytest.fixture(scope="module")
def service() -> Iterator[Handle]:
    with carpool.Service(carpool.Stage(Counts), timeout_s=10.0).run() as running:
        yield running


# -- which way is taken


@pytest.mark.parametrize(("batched", "policy"), [(None, ""), (8, "adaptive"), (8, "greedy")])
def test_calls_that_are_alone_need_no_loop(batched: int | None, policy: str) -> None:
    """Once a few calls in a row have been alone, the worker is lent, and the loop does nothing for a call."""
    chosen = {} if batched is None else {"max_batch_size": batched, "policy": policy}
    model = Counts if batched is None else models.scale
    with carpool.Service(carpool.Stage(model, **chosen)).run() as s:  # type: ignore[arg-type]
        for x in range(40):
            s.predict(float(x) / 1e6)
        loan = lent(s)
        assert s._thread is not None
        posted: list[Any] = []
        s._thread.post, post = posted.append, s._thread.post  # type: ignore[method-assign,assignment]
        loan._post = posted.append
        for x in range(20):
            s.predict(float(x) / 1e6)
        s._thread.post = post  # type: ignore[method-assign]
        loan._post = post
        assert set(posted) <= {loan._settle}
        assert loan_of(s) is loan
        assert s.stats().outcomes["ok"] >= 60


def test_company_takes_the_worker_back(service: Handle, tmp_path: Path) -> None:
    """A second caller has the first one's call made into a batch like any other, and both are answered."""
    loan = lent(service)
    item = {"until": str(tmp_path / "go on")}
    first, its_answer = asking(service, item)
    wait_until(lambda: loan.slot)
    second, other_answer = asking(service, "second")
    wait_until(lambda: loan.is_over)
    (tmp_path / "go on").touch()
    for thread in (first, second):
        thread.join()
    assert [its_answer[0][0], other_answer[0][0]] == [item, "second"]


def test_company_that_another_worker_can_serve_leaves_the_worker_lent(tmp_path: Path) -> None:
    """A second caller is answered by the other worker, while the first one's call goes on."""
    with carpool.Service(carpool.Stage(Counts, workers=2), timeout_s=10.0).run() as s:
        loan = lent(s)
        item = {"until": str(tmp_path / "go on")}
        first, its_answer = asking(s, item)
        wait_until(lambda: loan.slot)
        assert s.predict("second")[0] == "second"
        assert loan_of(s) is loan and not its_answer
        (tmp_path / "go on").touch()
        first.join()
        assert its_answer[0][0] == item
        assert loan_of(s) is loan
        assert s.stats().outcomes["ok"] == s.stats().stages[0].batches


@pytest.mark.parametrize("how", [{"timeout_s": 5.0}, {"priority": 1}])
def test_those_in_a_hurry_or_with_a_priority_go_by_the_loop(
    service: Handle, how: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What takes thought is decided by the core."""
    loan = lent(service)
    monkeypatch.setattr(lending, "_LEAST_TIME", 6.0)
    service.predict(0, **how)
    assert loan.is_over


@pytest.mark.parametrize("item", ["large", "array"])
def test_what_is_no_plain_answer_is_left_to_the_loop(service: Handle, item: Any) -> None:
    """Long replies and those in several buffers are read by the loop."""
    loan = lent(service)
    result = service.predict(item)
    if item == "large":
        assert result == bytes(200_000)
    else:
        assert result.tolist() == [0, 1, 2, 3, 4]
    wait_until(lambda: loan.is_over)


def test_what_takes_long_is_left_to_the_loop(service: Handle, tmp_path: Path) -> None:
    """A call that is not answered after some time is taken over, and its answer read by the loop."""
    loan = lent(service)
    loan._longest_ms = 1000.0 * lending._LONGEST_S
    caller, answers = asking(service, {"until": str(tmp_path / "go on")})
    wait_until(lambda: loan.is_over)
    assert answers == []
    (tmp_path / "go on").touch()
    caller.join()
    assert len(answers) == 1


def test_an_error_of_the_model_is_raised_with_its_cause(service: Handle) -> None:
    """As by way of the loop."""
    lent(service)
    with pytest.raises(carpool.ModelError, match="no such thing") as caught:
        service.predict("raise")
    assert isinstance(caught.value.__cause__, LookupError)


def test_a_deadline_holds(service: Handle, tmp_path: Path) -> None:
    """A call that takes too long ends at its deadline."""
    loan = lent(service)
    loan._longest_ms = 1000.0 * lending._LONGEST_S
    with pytest.raises(carpool.DeadlineExceeded):
        service.predict({"until": str(tmp_path / "go on")}, timeout_s=0.15)
    (tmp_path / "go on").touch()
    service.predict(0)


def test_a_worker_that_dies_amid_a_lone_call() -> None:
    """The request is run once more and fails if that kills a worker again; the next one is answered."""
    with carpool.Service(carpool.Stage(Counts)).run() as s:
        lent(s)
        with pytest.raises(carpool.CarpoolError) as caught:
            s.predict("die")
        assert getattr(caught.value, "code", "") == "request_crashed_worker"
        assert s.predict("next")[0] == "next"


def test_a_worker_that_dies_while_it_is_lent_and_idle() -> None:
    """It is replaced, and nobody notices."""
    with carpool.Service(carpool.Stage(Counts)).run() as s:
        lent(s)
        (pid,) = s.pids
        os.kill(pid, signal.SIGKILL)
        assert s.predict("next")[2] != pid


@pytest.mark.parametrize("drain", [True, False])
def test_closing_amid_a_lone_call(drain: bool, tmp_path: Path) -> None:
    """It is answered if the service drains, and fails at once if not."""
    outcome: list[Any] = []
    item = {"until": str(tmp_path / "go on")}

    def call() -> None:
        try:
            outcome.append(s.predict(item))
        except carpool.Unavailable as error:
            outcome.append(error.code)

    with carpool.Service(carpool.Stage(Counts)).run() as s:
        loan = lent(s)
        caller = threading.Thread(target=call)
        caller.start()
        wait_until(lambda: loan.slot)
        closing = threading.Thread(target=s.close, args=(drain,))
        closing.start()
        wait_until(lambda: loan.is_over)
        if not drain:
            caller.join()
        (tmp_path / "go on").touch()
        caller.join()
        closing.join()
    assert outcome[0] == "stopped" if not drain else outcome[0][0] == item


def test_a_forked_child_does_not_read_its_parents_answer(service: Handle) -> None:
    """In another process than that which began the call, the answer is not touched."""
    loan = lent(service)
    loan._process = -1
    assert service.predict("mine")[0] == "mine"  # this process is the parent after all, whose loop reads it
    assert loan.is_over


# -- between any two steps


class Hooked(list[Any]):
    """A list that calls a function before something is put into it, or after."""

    def __init__(self, values: list[Any], hook: Callable[[], None], after: bool) -> None:
        super().__init__(values)
        self._hook, self._after = hook, after

    def append(self, value: Any) -> None:
        if not self._after:
            self._hook()
        super().append(value)
        if self._after:
            self._hook()

    extend: Any


class Slot(dict[int, LentCall]):
    """A slot that calls a function once a call has come into it."""

    hook: Callable[[], None]

    def setdefault(self, key: int, call: LentCall) -> LentCall:  # type: ignore[override]
        winner = super().setdefault(key, call)
        if winner is call and call is not lending._RECALLED:
            self.hook()
        return winner


class Poll:
    """A poll object that calls a function before it waits, or after."""

    def __init__(self, poll: Any, before: Callable[[], None], after: Callable[[], None]) -> None:
        self.poll_, self.before, self.after = poll, before, after

    def poll(self, ms: float) -> Any:
        self.before()
        found = self.poll_.poll(ms)
        self.after()
        return found


STEPS = ["in the slot", "before the message", "sent", "readable", "opened", "before it is done", "done", "freed"]


def arm(loan: Any, step: str, act: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Have `act` called once, at a step of the next call."""
    is_armed = [True]

    def once() -> None:
        if is_armed:
            is_armed.clear()
            act()

    def hook(at: str) -> Callable[[], None]:
        return once if at == step else lambda: None

    slot = Slot()
    slot.hook = hook("in the slot")
    loan.slot = slot
    loan._poll = Poll(loan._poll, hook("sent"), hook("readable"))
    loan.done = Hooked(loan.done, once, step == "done") if "done" in step else loan.done
    message, opened = lending._message, lending.open_reply

    def write(*rest: Any) -> bytes:
        hook("before the message")()
        return message(*rest)

    def read(*rest: Any) -> Any:
        found = opened(*rest)
        hook("opened")()
        return found

    monkeypatch.setattr(lending, "_message", write)
    monkeypatch.setattr(lending, "open_reply", read)
    if step == "freed":
        monkeypatch.setattr(lending, "len", lambda of: once() or len(of), raising=False)


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("what", ["recalled", "settled", "asked again", "interrupted", "interrupted after a recall"])
def test_between_any_two_steps(service: Handle, step: str, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop takes the worker back, at once or having made up the accounts, a signal handler calls
    the service, or the thread is interrupted.

    Each request is run once, has its own answer, and is counted; the worker lives.
    """
    lent(service)
    service.stats()  # which takes it back, and accounts for all
    loan = lent(service)
    (pid,) = service.pids
    driver, thread = service._inner.driver, service._thread
    assert driver is not None
    assert thread is not None
    _, calls, _ = service.predict("before")
    assert loan_of(service) is loan
    counted = sum(driver.stats.outcomes.values()) + driver.stats.cancelled + len(loan.done)
    asked: list[Any] = []

    def act() -> None:
        if what == "asked again":
            asked.append(service.predict("again"))
        if what == "settled":
            thread.ask(loan._settle, 5.0)
        if "recall" in what or what == "settled":
            thread.ask(driver.recall, 5.0)
        if "interrupted" in what:
            raise KeyboardInterrupt

    arm(loan, step, act, monkeypatch)
    if "interrupted" in what:
        with pytest.raises(KeyboardInterrupt):
            service.predict("first")
    else:
        asked.append(service.predict("first"))
    monkeypatch.undo()
    _, after, same = service.predict("after")

    ran = after - calls - 1
    assert same == pid
    assert sorted(number for _, number, _ in asked) == list(range(calls + 1, calls + 1 + len(asked)))
    assert {item for item, _, _ in asked} <= {"first", "again"}
    assert ran == len(asked) if "interrupted" not in what else ran <= 1
    total = service.stats()
    assert total.in_flight == 0
    counted_now = sum(total.outcomes.values())
    assert counted_now == counted + ran + 1


def test_a_call_that_ends_while_it_is_taken_over(service: Handle, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its thread has the answer, the loop reads it once more, and it is counted once."""
    calls_before = service.predict("count")[1]
    before = service.stats().outcomes["ok"]
    loan = lent(service)
    driver, thread = service._inner.driver, service._thread
    assert driver is not None
    assert thread is not None
    is_sent = lending._is_sent
    is_being_taken_over = threading.Event()

    def late(call: LentCall) -> bool:
        is_being_taken_over.set()
        wait_until(lambda: call in loan.done)
        return is_sent(call)

    def act() -> None:
        thread.post(driver.recall)
        assert is_being_taken_over.wait(PATIENCE_S)

    monkeypatch.setattr(lending, "_is_sent", late)
    arm(loan, "sent", act, monkeypatch)
    assert service.predict("first")[0] == "first"
    (pid,) = service.pids
    assert service.predict("after")[2] == pid
    calls = service.predict("count")[1]
    assert service.stats().outcomes["ok"] - before == calls - calls_before


def test_a_thread_whose_answer_the_loop_has_read_is_woken(service: Handle, monkeypatch: pytest.MonkeyPatch) -> None:
    """It does not wait for what is not in the socket any more."""
    loan = lent(service)
    driver, thread = service._inner.driver, service._thread
    assert driver is not None
    assert thread is not None
    before = driver.core.flow.answered + len(loan.done)

    def act() -> None:
        thread.ask(driver.recall, 5.0)
        wait_until(lambda: driver.core.flow.answered == before + 1)

    arm(loan, "sent", act, monkeypatch)
    began = time.monotonic()
    service.predict("first")
    assert time.monotonic() - began < PATIENCE_S / 2


def test_many_threads_that_come_and_go(service: Handle) -> None:
    """Calls that overlap now and then all have their own answers."""
    wrong: list[Any] = []

    def caller(number: int) -> None:
        for i in range(150):
            time.sleep(0.0003 * ((number * 7 + i) % 5))
            if service.predict((number, i))[0] != (number, i):
                wrong.append((number, i))

    threads = [threading.Thread(target=caller, args=(number,)) for number in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert not wrong
    assert service.stats().in_flight == 0


# -- the accounts


class Side:
    """A stage whose calls are all alone, decided step by step or accounted for afterwards."""

    def __init__(self, policy: Policy, slo_s: float | None) -> None:
        self.batcher = stage(policy=policy, runs_ahead=True, patience_s=3.0)
        self.core = Core([self.batcher], slo_s=slo_s)
        self.core.worker_ready(0, 0)
        self.stats = Stats("service", self.core, [None], [isinstance(policy, OneByOne)], slo_s)

    def step_by_step(self, began: float, ended: float, busy_s: float) -> None:
        request = Request(b"x", began + 5.0, nbytes=1)
        request.patient = True
        self.core.flow.submit(began, [request])
        (batch,) = self.core.poll(began).run
        self.stats.stages[0].started(batch)
        self.core.completed(ended, Reply(0, 0, batch.id, batch.ids, [b"y"], None, busy_s))
        self.stats.stages[0].completed(0, 1, busy_s, 0.001)
        self.stats.answered(self.core.poll(ended).answer, ended)

    def afterwards(self, began: float, ended: float, busy_s: float) -> None:
        call = LentCall(Request(b"x", began + 5.0, nbytes=1), began)
        call.ended, call.busy_s, call.waited_s = ended, busy_s, 0.001
        lender: Any = Lending.__new__(Lending)
        lender._core, lender._batcher, lender._driver, lender._pool = self.core, self.batcher, self, self
        self.roster, self.count_calls = self, None
        assert self.batcher.lend(began, began + 5.0, self.core.flow.slo_s) == 0
        lender._account_for(0, [call])
        self.core.take_back(self.batcher, 0)

    def finished_batch(self) -> None:
        """The roster's."""

    def state(self) -> Any:
        batcher, stats = self.batcher, self.stats
        counts = [
            self.core.flow.admitted,
            self.core.flow.answered,
            self.core.unanswered,
            batcher._batch_ids,
        ]
        times = [*vars(batcher.times).values()]
        learned = times, flat(batcher.lobby.policy), batcher.running, batcher.idle
        of_stage = {
            name: value for name, value in vars(stats.stages[0]).items() if type(value) in (int, dict, set, str)
        }
        durations = [
            (each.counts, each.sum_s)
            for each in (stats.latency, stats.stages[0].queue_time, stats.stages[0].compute_time)
        ]
        of_stage["reasons"] = sum(of_stage["reasons"].values())  # those of lone calls are that of the last batch
        del of_stage["_last_reason"]
        return counts, learned, of_stage, durations, stats.outcomes, stats.within_slo, stats.last_ok_at


POLICIES: dict[str, Callable[[], Policy]] = {
    "one by one": OneByOne,
    "greedy": lambda: Greedy(8),
    "greedy, one": lambda: Greedy(1),
    "adaptive": lambda: Adaptive(8),
}
CALLS = st.lists(
    st.tuples(*[st.sampled_from([1e-5, 1e-4, 1e-3, 0.009, 0.3])] * 3, st.sampled_from([1, 1, 1, 40])), max_size=12
)


@pytest.mark.parametrize("policy", POLICIES)
@examples(60)
@given(calls=CALLS, slo_s=st.sampled_from([None, 0.005, 1.0]))
def test_accounts_made_up_afterwards_are_the_same(policy: str, calls: list[Any], slo_s: float | None) -> None:
    """Whatever calls took, and wherever the policy would have let them go, all counts and all that
    was learned are those of calls that were decided step by step.
    """
    quick, slow = (Side(POLICIES[policy](), slo_s) for _ in range(2))
    now = 100.0
    for _ in range(12):  # lending begins after some, and knows why these went
        for side in (quick, slow):
            side.step_by_step(now, now + 0.002, 0.001)
        now += 0.01
    for pause_s, hop_s, busy_s, times in calls:
        for _ in range(times):
            now += pause_s
            ended = now + hop_s + busy_s
            if quick.batcher.lets_go(now, now + 5.0, quick.core.flow.slo_s):
                quick.afterwards(now, ended, busy_s)
            else:
                quick.step_by_step(now, ended, busy_s)
            slow.step_by_step(now, ended, busy_s)
            now = ended
        assert quick.state() == slow.state()


class Raises(Greedy):
    """A policy of the user's that raises when it is asked about lone requests, or told of them."""

    def __init__(self, at: str) -> None:
        super().__init__(4)
        self.at = at

    @property
    def lone_slack_s(self) -> float:  # type: ignore[override]
        if self.at == "lone_slack_s":
            raise LookupError("the policy")
        return -inf

    def learn(self, now: float, done: DoneBatch) -> None:
        if self.at == "learn" and done.is_alone:
            raise LookupError("the policy")


@pytest.mark.parametrize("at", ["lone_slack_s", "learn"])
def test_a_policy_that_raises_fails_its_stage(at: str) -> None:
    """Each call ends, and those that come later are told."""
    until = time.monotonic() + PATIENCE_S
    with carpool.Service(carpool.Stage(models.scale, max_batch_size=4, policy=Raises(at)), timeout_s=5.0).run() as s:
        code = ""
        while not code and time.monotonic() < until:
            try:
                s.predict(1.0)
            except carpool.Unavailable as error:
                code = error.code
        assert code == "stage_failed"


class HoldsBack(Greedy):
    """Has let lone requests go, and now would keep them for company."""

    holds = False
    lone_slack_s = -inf

    def decide(self, view: View) -> Decision:
        return NOTHING if self.holds else super().decide(view)


def test_what_has_gone_is_not_held_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """A policy may think otherwise by the time when a call is taken over: the worker has it already."""
    with carpool.Service(carpool.Stage(models.Slow, max_batch_size=4, policy=HoldsBack(4))).run() as s:
        loan = lent(s)
        driver, thread = s._inner.driver, s._thread
        assert driver is not None
        assert thread is not None
        policy = driver.core.crews[0].lobby.policy

        def act() -> None:
            policy.holds = True  # type: ignore[attr-defined]
            thread.ask(driver.recall, 5.0)

        arm(loan, "sent", act, monkeypatch)
        assert [s.predict(0.01)] == s.pids
        assert policy.holds  # type: ignore[attr-defined]
        policy.holds = False  # type: ignore[attr-defined]
