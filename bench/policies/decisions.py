"""The decisions of simulated cases: each batch, each order to a worker of steps, each refusal.

`bench.policies.same_decisions` runs this for two trees, each in a process of its own. It uses no
more of carpool than every tree has: `simulate.run`, `run_steps`, and the return value of `poll` of
the pipeline that a virtual driver drives.

    python -m bench.policies.decisions SOURCES --names         the policies that it has, as JSON
    python -m bench.policies.decisions SOURCES <cases          each case: how many, and their hash
    python -m bench.policies.decisions SOURCES --full <case    each decision of a case, on a line

SOURCES is the folder that carpool must come from; a case is a line of JSON.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import carpool
from carpool.engine.drive import virtual
from carpool.engine.policy import BY_NAME, STEPS_BY_NAME
from carpool.simulate import StepCost, run, run_steps

Note = Callable[[str], None]


def main() -> int:
    sources, *options = sys.argv[1:]
    if not Path(carpool.__file__).is_relative_to(sources):
        sys.exit(f"carpool comes from {carpool.__file__} and not from {sources}")
    if "--names" in options:
        print(json.dumps({"run": list(BY_NAME), "run_steps": list(STEPS_BY_NAME)}))
        return 0
    for line in sys.stdin:
        case = json.loads(line)
        if "--full" in options:
            decide(case, print)
        else:
            print(json.dumps(hashed(case)), flush=True)
    return 0


def hashed(case: dict[str, Any]) -> dict[str, Any]:
    """The number of decisions of a case, and their hash."""
    digest, count = hashlib.sha256(), 0

    def note(line: str) -> None:
        nonlocal count
        count += 1
        digest.update(line.encode() + b"\n")

    decide(case, note)
    return {"count": count, "digest": digest.hexdigest()}


def decide(case: dict[str, Any], note: Note) -> None:
    """Run one case and note its decisions in their order; its failure, if any, is the last one."""
    settings = dict(case["settings"])
    begin = virtual.VirtualDriver.__init__

    def watched(driver: Any, core: Any, *args: Any, **named: Any) -> None:
        poll = core.poll

        def poll_and_note(now: float) -> Any:
            todo = poll(now)
            for line in decided(now, todo):
                note(line)
            return todo

        core.poll = poll_and_note
        begin(driver, core, *args, **named)

    virtual.VirtualDriver.__init__ = watched  # type: ignore[method-assign]
    try:
        if case["how"] == "run_steps":
            run_steps(**{**settings, "cost": StepCost(**settings["cost"])})
        else:
            run(**settings)
    except Exception as error:
        note(f"raises {type(error).__name__}: {error}")
    finally:
        virtual.VirtualDriver.__init__ = begin  # type: ignore[method-assign]


def decided(now: float, todo: Any) -> Iterator[str]:
    """The decisions of one poll, a line each."""
    for batch in todo.run:
        ids = [request.id for request in batch.requests]
        when = "ahead" if batch.ahead else "now"
        yield f"{now!r} batch of stage {batch.stage} to {batch.place} {when} ({batch.reason}): {ids}"
    for order in todo.orders:
        join = [request.id for request in order.join]
        others = (
            f"leave {list(order.leave)} pause {list(order.pause)} resume {list(order.resume)} ask {order.stop_when}"
        )
        yield f"{now!r} order {order.number} of stage {order.stage} to {order.place}: join {join} {others}"
    for request in todo.answer:
        if request.error is not None:
            error = request.error
            why = getattr(error, "reason", error.code)
            yield f"{now!r} refuses {request.id} ({request.item!r}): {why}, again after {error.retry_after_s!r} s"
    for stage, place in (*todo.kill, *todo.drained):
        yield f"{now!r} ends worker {place} of stage {stage}"


if __name__ == "__main__":
    raise SystemExit(main())
