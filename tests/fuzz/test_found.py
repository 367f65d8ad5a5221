"""Programs that the machine has found and made small, which no other test stands for. Each is run a few times."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.effort import share
from tests.fuzz.program import (
    Actor,
    Batch,
    Close,
    Item,
    Leave,
    Many,
    Parts,
    Predict,
    Program,
    Service,
    Sleep,
    Stage,
    Stream,
)
from tests.fuzz.runner import Runner

_TIMES = share(48) // 16  # three, and one in a quick run

FOUND = {
    "a loop that ends cancels its workers, and no new ones are started on it": Program(
        Service((Stage("loop"),), way="run_async", abandon=True), (Actor((Sleep(0.0),)),)
    ),
    "what a later stage cannot unpickle is no fault of the request": Program(
        Service((Stage(), Stage("loop", max_batch_size=None))), (Actor((Predict(Item("load", "RecursionError")),)),)
    ),
    "a teardown that raises SystemExit ends its worker, not the loop": Program(
        Service((Stage("loop", "class", teardown="SystemExit"), Stage("loop")), way="run_async"), (Actor((Close(),)),)
    ),
    "a start that meets a close says that the service was closed": Program(
        Service((Stage("process", "class", examples="good"),), early=True), (Actor((Sleep(0.005), Close())),)
    ),
    "streams that begin anew together after a step has raised find the guilty one": Program(
        Service((Stage(model="steps", policy="greedy"),), way="run_async", timeout_s=5.0),
        (Actor((Many((Item(), Item("raise"))), Predict())),),
    ),
    "an answer in parts over ASGI whose client leaves while a part comes leaves no task": Program(
        Service((Stage("loop", "resuming", max_batch_size=2, workers=2),), way="app", timeout_s=1.0),
        tuple(Actor((Parts(leave_after=0), Leave(Parts(leave_after=1), 0.001)) * 4) for _ in range(3)),
    ),
    "callers that a loop meets at its end have their answers, though it cancels batches before they begin": Program(
        Batch(tasks=True, loop="uvloop", max_batch_size=16, max_queue_size=2),
        (
            Actor((Stream((), source="slow"), Predict(), Many((Item(),) * 7), *(Predict(),) * 4)),
            Actor((Predict(),)),
            Actor(
                (
                    Leave(Many((Item(), Item("return", "SystemExit"), Item("pre", "OSError"), Item(), Item())), 0.001),
                    Predict(),
                    Stream((Item(),), source="async slow", max_in_flight=5),
                    Predict(),
                )
            ),
        ),
    ),
    **{
        f"an async teardown that raises {kind} neither cancels nor closes those who close": Program(
            Batch("class", tasks=True, teardown=kind), (Actor((Predict(),)),)
        )
        for kind in ("GeneratorExit", "CancelledError")
    },
}


@pytest.fixture(scope="module")
def runner() -> Iterator[Runner]:
    """One process in which the programs run one after the other; after a finding it is another one."""
    one = Runner(grace_s=3.0)
    try:
        yield one
    finally:
        one.close()


@pytest.mark.parametrize("rule", FOUND)
def test_what_was_found_stays_mended(runner: Runner, rule: str) -> None:
    """Each program in which a fault was found once runs without a finding; its name is the rule."""
    findings = [finding for _ in range(_TIMES) for finding in runner.run(FOUND[rule])]
    assert not findings, "\n\n".join(f"{finding.kind}: {finding.what}\n{finding.text}" for finding in findings)
