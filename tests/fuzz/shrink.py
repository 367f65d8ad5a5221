"""Makes a program that fails smaller, as long as it still fails in the same way.

Programs of threads do not fail each time, so every smaller one is tried a few times before it is thought sound.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import MISSING, fields, replace
from typing import Any

from tests.fuzz.program import Actor, Item, Leave, Program, Service, Step

Fails = Callable[[Program], bool]


def shrink(program: Program, fails: Fails, *, tries: int = 3, budget_s: float = 60.0) -> Program:
    """The smallest program found that fails.

    Args:
        program: One that failed.
        fails: Runs a program and says whether it fails in the same way.
        tries: How often a program is run before it is thought sound.
        budget_s: No more is tried after this time.
    """
    until = time.monotonic() + budget_s
    smaller = True
    while smaller:
        smaller = False
        for candidate in simpler(program):
            if time.monotonic() > until:
                return program
            if any(fails(candidate) for _ in range(tries)):
                program, smaller = candidate, True
                break
    return program


def simpler(program: Program) -> Iterator[Program]:
    """Programs with one thing less, those with much less first."""
    actors = program.actors
    for i in range(len(actors)):
        if len(actors) > 1:
            yield replace(program, actors=actors[:i] + actors[i + 1 :])
    for i, actor in enumerate(actors):
        for steps in _shorter(actor.steps):
            yield _with_actor(program, i, replace(actor, steps=steps))
    subject = program.subject
    if isinstance(subject, Service) and len(subject.stages) > 1:
        for i in range(len(subject.stages)):
            stages = subject.stages[:i] + subject.stages[i + 1 :]
            yield replace(program, subject=replace(subject, stages=stages))
    if isinstance(subject, Service):
        for i, stage in enumerate(subject.stages):
            for plainer in _plainer(stage):
                stages = (*subject.stages[:i], plainer, *subject.stages[i + 1 :])
                yield replace(program, subject=replace(subject, stages=stages))
    for plainer in _plainer(subject, keep=("stages", "way", "tasks", "over")):
        yield replace(program, subject=plainer)
    for i, actor in enumerate(actors):
        for j, step in enumerate(actor.steps):
            for simple in _simpler_steps(step):
                steps = (*actor.steps[:j], simple, *actor.steps[j + 1 :])
                yield _with_actor(program, i, replace(actor, steps=steps))


def _with_actor(program: Program, i: int, actor: Actor) -> Program:
    return replace(program, actors=(*program.actors[:i], actor, *program.actors[i + 1 :]))


def _shorter(values: tuple[Any, ...], least: int = 1) -> Iterator[tuple[Any, ...]]:
    if len(values) > 3:
        half = len(values) // 2
        yield values[:half]
        yield values[half:]
    if len(values) > least:
        for i in range(len(values)):
            yield values[:i] + values[i + 1 :]


def _plainer(value: Any, keep: tuple[str, ...] = ()) -> Iterator[Any]:
    """The value with one field as usual."""
    for field in fields(value):
        usual = field.default
        if usual is not MISSING and field.name not in keep and getattr(value, field.name) != usual:
            yield replace(value, **{field.name: usual})


def _simpler_steps(step: Step) -> Iterator[Step]:
    if isinstance(step, Leave):
        yield step.step
        for inner in _simpler_steps(step.step):
            yield replace(step, step=inner)
        return
    items: tuple[Item, ...] = getattr(step, "items", ())
    for shorter in _shorter(items, least=0):
        yield replace(step, items=shorter)  # type: ignore[call-arg]
    for i, item in enumerate(items):
        if item != Item():
            yield replace(step, items=(*items[:i], Item(), *items[i + 1 :]))  # type: ignore[call-arg]
    yield from _plainer(step)
