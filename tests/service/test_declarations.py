"""Stages and services as declared: defaults, and an error that names what to change for each thing that cannot be."""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import carpool
from carpool import Adaptive, Greedy, Policy, Service, Stage, Static
from carpool.engine.forms import Form
from carpool.engine.policy import BY_NAME, OneByOne, StaticSteps
from carpool.engine.wire.frame import MAX_ITEMS
from tests.support import models


def identity(x: Any) -> Any:
    return x


async def later(x: Any) -> Any:
    return x


class NoPredict(carpool.Model):
    pass


class NoDecode(carpool.Model):
    accepts = ("text/csv",)

    def predict(self, x: Any) -> Any:
        return x


class Decodes(carpool.Model):
    accepts = ("text/csv",)

    def decode(self, bodies: list[bytes]) -> list[bytes]:
        return bodies

    def predict(self, xs: list[bytes]) -> list[bytes]:
        return xs


@pytest.mark.fault("F77")
@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"max_batch_size": 0}, "max_batch_size must be a whole number of at least 1, not 0"),
        ({"max_batch_size": 2.5}, "max_batch_size must be a whole number"),
        ({"workers": 0}, "workers must be a whole number of at least 1"),
        ({"workers": 2, "cpus": [0]}, "cpus has 1 entry for 2 workers"),
        ({"cpus": [9999]}, "cpus: 9999 cannot be used; this machine has cores"),
        ({"cpus": [[]]}, "cpus: no core at all cannot be used"),
        ({"max_queue_size": 0}, "max_queue_size must be"),
        ({"max_queue_bytes": -1}, "max_queue_bytes must be"),
        ({"max_batch_size": 64, "max_queue_size": 32}, "no full batch could ever form"),
        ({"max_batch_time_s": 0}, "max_batch_time_s must be a positive number of seconds"),
        ({"max_queue_delay_s": -0.1}, "max_queue_delay_s must be 0 or more seconds"),
        ({"size": len}, "size is for stages that take batches: give max_batch_size"),
        ({"allowed_batch_sizes": [1]}, "allowed_batch_sizes is for stages that take batches: give max_batch_size"),
        ({"max_batch_size": 8, "allowed_batch_sizes": []}, "must rise from one to the next"),
        ({"max_batch_size": 8, "allowed_batch_sizes": [4, 2, 8]}, r"must rise .* not \[4, 2, 8\]"),
        ({"max_batch_size": 8, "allowed_batch_sizes": [2, 2, 8]}, "must rise from one to the next"),
        ({"max_batch_size": 8, "allowed_batch_sizes": [0, 8]}, "each of allowed_batch_sizes must be a whole number"),
        ({"max_batch_size": 8, "allowed_batch_sizes": [1, 4]}, r"the last .* \(4\) must be max_batch_size \(8\)"),
        ({"max_batch_size": 8, "allowed_batch_sizes": [8], "size": len}, "leave out one of them"),
        ({"policy": "best"}, "there is no policy 'best'; choose one of .*greedy, static"),
        ({"policy": "static:10ms"}, "policy 'static:10ms' is how carpool simulate has it: .*max_queue_delay_s"),
        ({"max_batch_size": "8"}, "max_batch_size must be a whole number of at least 1, not '8'"),
        ({"max_batch_size": True}, "max_batch_size must be a whole number"),
        ({"workers": 2.0}, "workers must be a whole number"),
        ({"max_queue_size": math.inf}, "max_queue_size must be a whole number"),
        ({"max_batch_time_s": "1"}, "max_batch_time_s must be a positive number of seconds, not '1'"),
        ({"max_batch_time_s": math.nan}, "max_batch_time_s must be a positive number of seconds, not nan"),
        ({"max_queue_delay_s": "1"}, "max_queue_delay_s must be 0 or more seconds, and finite, not '1'"),
        ({"max_queue_delay_s": math.inf}, "max_queue_delay_s must be 0 or more seconds, and finite"),
        (
            {"max_batch_size": 8, "allowed_batch_sizes": [2, "4", 8]},
            "each of allowed_batch_sizes must be a whole number",
        ),
        ({"max_batch_size": 8, "policy": Static("2")}, "max_batch_size of the policy must be a whole number"),
        ({"max_batch_size": 8, "policy": Static(2, "1")}, "max_queue_delay_s of the policy must be 0 or more"),
        ({"cpus": [True]}, "cpus: True cannot be used"),
        ({"cpus": ["0"]}, "cpus: '0' cannot be used"),
        ({"name": ""}, "name must not be empty"),
        ({"env": {"A=B": "1"}}, r"env\['A=B'\] cannot be an environment variable"),
        ({"env": [{}, {}], "workers": 3}, "env has 2 entries for 3 workers: give one mapping for each worker"),
        ({"env": []}, "env has 0 entries for 1 worker"),
        ({"env": [{}], "cpus": [0, 0]}, "env has 1 entry for 2 workers"),
        ({"env": [{}, {"A": "1"}], "run_in": "thread"}, "env is for worker processes"),
        ({"env": [{}, {"CARPOOL_WORKERS": "1"}]}, r"env\[1\]\['CARPOOL_WORKERS'\] cannot be chosen"),
        ({"devices": 0}, "devices must be at least 1, not 0: leave it out"),
        ({"devices": []}, "devices is an empty list: leave it out"),
        ({"devices": [[0], []]}, "devices gives a worker an empty list"),
        ({"devices": ["cpu"]}, "devices: 'cpu' is no device: give its number"),
        ({"devices": ["cuda"]}, "devices: 'cuda' is no device"),
        ({"devices": ["0,"]}, "devices: '' is no device"),
        ({"devices": ["GPU-"]}, "devices: 'GPU-' is no device"),
        ({"devices": ["GPU-1\0"]}, "devices: 'GPU-1.x00' is no device"),
        ({"devices": ["cuda:\N{ARABIC-INDIC DIGIT THREE}"]}, "devices: 'cuda:.' is no device"),
        ({"devices": [True]}, "devices: True is no device"),
        ({"devices": [-1]}, "devices: -1 is no device"),
        ({"devices": [1.0]}, "devices: 1.0 is no device"),
        (
            {"devices": 4, "workers": 2},
            "devices has 4 entries for 2 workers, so some would never be used: have a worker",
        ),
        ({"devices": 2, "env": [{}]}, "devices has 2 entries for 1 worker, "),
        ({"devices": 2, "env": {"CUDA_VISIBLE_DEVICES": "0"}}, "devices sets CUDA_VISIBLE_DEVICES, and so does env"),
        ({"devices": 2, "run_in": "thread"}, r"devices is for worker processes.* f\"cuda:{carpool.worker_index\(\)}\""),
        ({"env": {"CARPOOL_WORKER": "1"}}, r"env\['CARPOOL_WORKER'\] cannot be chosen"),
        (
            {"max_batch_size": 70_000, "max_queue_size": 70_000},
            rf"max_batch_size \(70000\) must be at most {MAX_ITEMS}",
        ),
        (
            {"max_batch_size": 10**6, "max_queue_size": 70_000, "size": len},
            rf"max_queue_size \(70000\) must be at most {MAX_ITEMS}",
        ),
    ],
)
def test_a_stage_refuses_what_cannot_be(settings: dict[str, Any], told: str) -> None:
    """A stage refuses settings that cannot work, and the text names the setting and what would do."""
    with pytest.raises(ValueError, match=told):
        Stage(identity, **settings)


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"name": 3}, "name must be text, not 3"),
        ({"env": {"A": 1}}, r"env\['A'\] must be text, not 1: write '1'"),
        ({"env": {1: "A"}}, "env must have text as its keys, not 1"),
        ({"env": "A=1"}, "env must be a mapping"),
        ({"devices": "cuda:0"}, r"devices must be how many there are, or a list such as \[.*, not 'cuda:0'"),
        ({"devices": b"01"}, "devices must be how many there are, or a list"),
        ({"devices": {0, 1}}, "devices must be how many there are, or a list"),
        ({"devices": True}, "devices must be how many there are, or a list"),
        ({"devices": 1.5}, "devices must be how many there are, or a list"),
        ({"env": ["A=1"]}, r"env\[0\] must be a mapping"),
        ({"env": [{}, {"A": 1}]}, r"env\[1\]\['A'\] must be text, not 1: write '1'"),
        ({"kwargs": [1]}, "kwargs must be a mapping"),
        ({"kwargs": {1: 2}}, "kwargs must have text as its keys, not 1"),
        ({"kwargs": {"y": 2}}, "kwargs does not fit identity, called with an item: .*'y'"),
        ({"cpus": 0}, "cpus must be a list"),
        ({"idempotent": "no"}, "idempotent must be True or False, not 'no'"),
        ({"isolate_errors": 0}, "isolate_errors must be True or False, not 0"),
        ({"max_batch_size": 8, "allowed_batch_sizes": 8}, "allowed_batch_sizes must be a list of numbers"),
        ({"max_batch_size": 8, "size": "rows"}, "size must be a function of an item, not 'rows'"),
        ({"max_batch_size": 8, "policy": 3}, "policy must be a name or a Policy object"),
        ({"oom_errors": "MemoryError"}, "oom_errors must be a sequence"),
    ],
)
def test_a_stage_refuses_settings_of_the_wrong_kind(settings: dict[str, Any], told: str) -> None:
    """A setting of the wrong kind that Python would take by accident, such as True for 1, is
    refused by its name.
    """
    with pytest.raises(TypeError, match=told):
        Stage(identity, **settings)


def yields(xs: list[Any]) -> Iterator[Any]:
    yield from xs


async def yields_later(xs: list[Any]) -> AsyncIterator[Any]:
    for x in xs:
        yield x


class Yields:
    def __call__(self, xs: list[Any]) -> Iterator[Any]:
        yield from xs


class PredictYields(carpool.Model):
    def predict(self, xs: list[Any]) -> Iterator[Any]:  # type: ignore[override]
        yield from xs


class SetUpYields(carpool.Model):
    def setup(self) -> Iterator[None]:  # type: ignore[override]
        yield

    def predict(self, xs: list[Any]) -> list[Any]:
        return xs


class PostprocessYields(SetUpYields):
    def setup(self) -> None:  # type: ignore[override]
        pass

    async def postprocess(self, y: Any) -> AsyncIterator[Any]:
        yield y


GENERATORS: list[tuple[Any, str]] = [
    (yields, "yields"),
    (yields_later, "yields_later"),
    (Yields(), "Yields"),
    (functools.partial(yields), "yields"),
    (PredictYields, "PredictYields"),
]
HOOKS_THAT_YIELD: list[tuple[Any, str]] = [
    (SetUpYields, "setup of SetUpYields"),
    (PostprocessYields, "postprocess of PostprocessYields"),
]


@pytest.mark.parametrize(("model", "name"), GENERATORS)
def test_what_yields_has_no_place_in_a_batched_function(model: Any, name: str) -> None:
    """A batched function gives each caller one answer, so a generator is refused where it is
    declared, and the text names what to do instead.
    """
    with pytest.raises(TypeError, match=rf"^{name} answers in parts.*carpool\.Stage\({name}, run_in=.*`return`"):
        carpool.batch(model)


@pytest.mark.parametrize(("model", "name"), GENERATORS)
@pytest.mark.parametrize("settings", [{}, {"max_batch_size": 8}])
def test_what_yields_answers_in_parts(model: Any, name: str, settings: dict[str, Any]) -> None:
    """A `predict` that yields is a generator for each item, or with `max_batch_size` for each
    batch.
    """
    stage = Stage(model, run_in="loop" if model is yields_later else "process", **settings)
    assert stage.traits.form is (Form.BATCH_GENERATOR if settings else Form.GENERATOR)
    assert (stage.rows, stage.policy_name) == ((8, "static") if settings else (1, "paced"))


@pytest.mark.parametrize(("model", "name"), HOOKS_THAT_YIELD)
@pytest.mark.parametrize("declare", [Stage, functools.partial(Stage, max_batch_size=8), carpool.batch])
def test_hooks_that_yield_are_refused_when_declared(declare: Any, model: Any, name: str) -> None:
    """Only `predict` may be a generator; the text says what to do instead."""
    with pytest.raises(TypeError, match=rf"^{name} is a generator .* only predict may be one: collect .* `return`"):
        declare(model)


class Steps(carpool.Model):
    def start(self, xs: list[str]) -> list[Any]:
        return xs

    def step(self, states: list[Any]) -> list[int | carpool.Last[int] | None]:
        return [None for _ in states]

    def stop(self, state: Any) -> None:
        pass


class Rebuilt(Steps):
    def resume(self, xs: list[str], parts: list[list[int]]) -> list[Any]:
        return xs

    def collect(self, parts: list[int]) -> int:
        return sum(parts)

    def postprocess(self, part: int) -> float:
        return part / 2


def test_a_model_of_steps_says_by_its_hints_what_it_takes_and_gives() -> None:
    """Items have the type that `start` takes, parts that of what stands in the list of `step`, and
    the whole answer is a list of them, or what `collect` returns.
    """
    traits = Stage(Steps, max_batch_size=4).traits
    assert (traits.form, traits.input_type, traits.part_type, traits.output_type) == (Form.STEPS, str, int, list[int])
    assert not traits.can_resume and not traits.collects
    traits = Stage(Rebuilt, max_rows=4).traits
    assert (traits.part_type, traits.output_type) == (float, int)
    assert traits.can_resume and traits.collects


class StepsWithout:
    """Makes models of steps that lack something."""

    class start(carpool.Model):
        def step(self, states: list[Any]) -> list[Any]:
            return states

        def stop(self, state: Any) -> None:
            pass

    class stop(carpool.Model):
        def start(self, xs: list[Any]) -> list[Any]:
            return xs

        def step(self, states: list[Any]) -> list[Any]:
            return states

    class both(carpool.Model):
        def step(self, states: list[Any]) -> list[Any]:
            return states

    class step(carpool.Model):
        def start(self, xs: list[Any]) -> list[Any]:
            return xs

    class choice(Steps):
        def predict(self, x: Any) -> Any:
            return x


@pytest.mark.parametrize(
    ("model", "told"),
    [
        (StepsWithout.start, r"start has step but no start: give it start\(self, xs\)"),
        (StepsWithout.stop, r"stop has step but no stop: give it stop\(self, state\)"),
        (StepsWithout.both, r"both has step but no start and no stop: give it start\(self, xs\).* and stop\(self"),
        (StepsWithout.step, r"step has no predict method: .* or start, step and stop"),
        (StepsWithout.choice, r"choice has predict and also start, step and stop.*leave out predict"),
    ],
)
def test_half_a_model_of_steps_is_refused(model: Any, told: str) -> None:
    """What a model of steps lacks is named where it is declared."""
    with pytest.raises(TypeError, match=told):
        Stage(model, max_batch_size=4)


class StartsOne(Steps):
    def start(self, x: str) -> list[Any]:  # type: ignore[override]
        return [x]


class YieldsOfOne(carpool.Model):
    def predict(self, x: int) -> Iterator[int]:
        yield x


@pytest.mark.parametrize(
    ("model", "told"),
    [
        (StartsOne, r"start of StartsOne takes str, but with max_batch_size it gets a list: did you mean list\[str\]"),
        (YieldsOfOne, r"predict of YieldsOfOne takes int, but with max_batch_size it gets a list"),
    ],
)
def test_hints_of_single_items_are_no_hints_of_batches(model: Any, told: str) -> None:
    """`start`, and a generator for a batch, take lists: a hint that cannot mean one is a slip."""
    with pytest.raises(TypeError, match=told):
        Stage(model, max_batch_size=4)


def test_a_model_of_steps_has_no_place_in_a_batched_function() -> None:
    """A leader would have to step for others after its own answer, so it is refused."""
    with pytest.raises(TypeError, match=r'^Steps answers in parts.*run_in="thread"'):
        carpool.batch(Steps)


@pytest.mark.parametrize(
    ("model", "settings", "told"),
    [
        (Steps, {}, "Steps is a model of steps: give the stage a max_batch_size"),
        (Steps, {"max_rows": 0}, "max_rows must be a whole number of at least 1, not 0"),
        (Steps, {"max_batch_size": 4, "allowed_batch_sizes": [2, 4]}, "allowed_batch_sizes is for whole batches"),
        (Steps, {"max_batch_size": 4, "policy": "adaptive"}, "its policy must be one of greedy, paced, static"),
        (Steps, {"max_batch_size": 4, "policy": carpool.Greedy()}, "its policy must be one of greedy, paced, static"),
        (PredictYields, {"max_batch_size": 4, "max_rows": 4}, "max_rows is for steps"),
        (PredictYields, {"max_batch_size": 4, "policy": "greedy"}, "no stream can join a batch of PredictYields"),
        (identity, {"max_rows": 4}, "max_rows is for models that answer in parts, and identity returns whole answers"),
        (identity, {"max_batch_size": 4, "policy": "paced"}, "'paced' is for models that answer in parts"),
    ],
)
def test_settings_that_do_not_fit_the_form_are_refused(model: Any, settings: dict[str, Any], told: str) -> None:
    """Settings for whole answers and for answers in parts are not taken for each other's models."""
    with pytest.raises(ValueError, match=told):
        Stage(model, **settings)


@pytest.mark.parametrize("policy", ["paced", StaticSteps()])
def test_policies_of_steps_are_no_policies_of_batched_functions(policy: Any) -> None:
    """A batched function gives whole answers, so a policy of steps is refused."""
    with pytest.raises(ValueError, match=r"there is no policy 'paced'|StaticSteps is a policy for models that answer"):
        carpool.batch(policy=policy)(identity)


def test_only_the_last_stage_answers_in_parts() -> None:
    """A stage that yields must be the last, and the text says where else to put what follows it."""
    with pytest.raises(
        ValueError, match=r"stage yields answers in parts, so it must be the last.*postprocess of yields"
    ):
        Service(Stage(yields), identity)


@pytest.mark.parametrize("setting", ["part_slo_s", "max_stream_s"])
def test_goals_for_parts_need_parts(setting: str) -> None:
    """What is said about parts is refused where answers are whole, and checked elsewhere."""
    with pytest.raises(ValueError, match=f"{setting} is for models that answer in parts, and identity returns whole"):
        Service(identity, **{setting: 1.0})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=f"{setting} must be a positive number of seconds, not -1"):
        Service(yields, **{setting: -1})  # type: ignore[arg-type]


def test_what_collects_a_generator_is_none() -> None:
    """A wrapper that makes a list of what is yielded is a plain function, whatever it wraps."""

    @functools.wraps(yields)
    def collected(xs: list[Any]) -> list[Any]:
        return list(yields(xs))

    assert carpool.batch(collected)(1) == 1
    assert Stage(collected, max_batch_size=8).name == "yields"


class Scaled(carpool.Model):
    def __init__(self, k: int, offset: int = 0) -> None:
        self.k, self.offset = k, offset

    def predict(self, x: int) -> int:
        return self.k * x + self.offset


def test_a_partial_of_a_model_class_names_kwargs() -> None:
    """A partial of a model class is refused, since it would be called with items: `kwargs` belong
    to the stage. One of a plain class, such as int, is a function like any other.
    """
    for partial in (functools.partial(Scaled, k=5), functools.partial(functools.partial(Scaled), k=5)):
        with pytest.raises(TypeError, match=r"Stage\(Scaled, kwargs=\{'k': \.\.\.\}\)"):
            Stage(partial)
    assert Stage(functools.partial(int, base=16)).name == "int"


@pytest.mark.parametrize("kwargs", [None, {"offset": 1}, {"k": 1, "factor": 2}])
def test_kwargs_must_fit_the_constructor(kwargs: dict[str, Any] | None) -> None:
    """A missing or unknown argument of a model's constructor is reported when the stage is
    declared, not when each worker starts.
    """
    with pytest.raises(TypeError, match=r"kwargs does not fit Scaled.__init__: .*('k'|'factor')"):
        Stage(Scaled, kwargs=kwargs)
    assert Stage(Scaled, kwargs={"k": 1}).kwargs == {"k": 1}


class Breaks:
    """Examples that have a length and cannot be read."""

    def __len__(self) -> int:
        return 3

    def __iter__(self) -> Iterator[int]:
        raise OSError("no such file")


@pytest.mark.parametrize(
    ("attributes", "told"),
    [
        ({"examples": "abc"}, "examples of Odd must be a list or tuple of inputs, not str"),
        ({"examples": iter([1, 2])}, "examples of Odd must be .* not list_iterator"),
        ({"examples": {"a": 1}}, "examples of Odd must be .* not dict"),
        ({"examples": 3}, "examples of Odd must be .* not int"),
        ({"examples": None}, "examples of Odd must be .* not NoneType"),
        ({"examples": Breaks()}, "examples of Odd cannot be read: OSError: no such file"),
        ({"accepts": 3, "decode": identity}, "accepts of Odd must be content types"),
        ({"accepts": (b"text/csv",), "decode": identity}, "accepts of Odd must be content types"),
        ({"accepts": "csv", "decode": identity}, "accepts of Odd must be content types, such as .* not"),
        ({"produces": 3, "encode": identity}, "produces of Odd must be a content type"),
        ({"produces": ("text/csv", 3), "encode": identity}, "produces of Odd must be a content type"),
        ({"produces": ("a/b", "a/c"), "encode": identity}, "its encode must take the one to write as an argument"),
        (
            {"produces": ["a/b"] * 33, "encode": identity},
            "produces of Odd names 33 content types: at most 32 are possible",
        ),
        ({"produces": "text/csv\r\nx: y", "encode": identity}, "produces of Odd must be a content type"),
        ({"postprocess": 3}, "postprocess of Odd must be a method, not 3"),
    ],
)
def test_a_model_with_odd_attributes_is_refused(attributes: dict[str, Any], told: str) -> None:
    """A model with examples, content types or hooks of the wrong kind is refused, for stages and
    batch functions alike.
    """
    odd = type("Odd", (carpool.Model,), {"predict": lambda self, xs: xs, **attributes})
    for declare in (Stage, carpool.batch):
        with pytest.raises(TypeError, match=told):
            declare(odd)


def test_examples_may_be_the_rows_of_an_array() -> None:
    """Examples may be the rows of an array, or anything of a known length that can be read again
    and again.
    """
    rows = type("Rows", (carpool.Model,), {"predict": lambda self, xs: xs, "examples": np.ones((3, 2))})
    assert len(Stage(rows).traits.examples) == 3


def test_whole_numbers_may_be_numpys() -> None:
    """Whole numbers may be numpy's; they are kept as Python's, so that whatever is made of them can
    be sent and written.
    """
    four = np.int64(4)
    stage = Stage(
        identity, max_batch_size=four, workers=four, max_queue_size=four, max_queue_bytes=four,
        allowed_batch_sizes=np.array([2, 4]), cpus=[np.int32(0)] * 4,
    )  # fmt: skip
    assert (stage.max_batch_size, stage.workers, stage.allowed_batch_sizes) == (4, 4, (2, 4))
    assert {type(n) for n in (stage.max_batch_size, stage.workers, stage.max_queue_size, stage.max_queue_bytes)} == {
        int
    }
    assert {type(core) for cores in stage.cpus or () for core in cores} == {int}
    assert type(Service(identity, max_parallel_starts=four).max_parallel_starts) is int
    assert type(Stage(identity, max_batch_size=8, policy=Greedy(four)).new_policy().max_batch_size) is int
    assert carpool.batch(max_batch_size=four, max_queue_size=four, max_in_flight_batches=np.uint8(1))(identity)(1) == 1
    assert type(Stage(identity, max_batch_time_s=np.float32(2)).max_batch_time_s) is float


def test_a_large_batch_is_for_threads() -> None:
    """A batch limit beyond what one message holds is refused for processes and allowed for threads;
    where sizes are counted, the queue bounds the items.
    """
    large = {"max_batch_size": 10**6, "max_queue_size": 10**6}
    assert Stage(identity, run_in="thread", **large).max_batch_size == 10**6  # type: ignore[arg-type]
    assert Stage(len, max_batch_size=10**6, size=len).max_batch_size == 10**6
    assert Stage(identity, max_batch_size=MAX_ITEMS, max_queue_size=10**6).max_batch_size == MAX_ITEMS


class HeldBack(Static):
    """A policy that is `Static` in name only."""

    decide = Greedy.decide  # type: ignore[assignment]


def test_a_delay_must_be_shorter_than_the_time_out() -> None:
    """A policy that is certain to hold a lone request back for all of its time, over all stages
    together, is refused.
    """

    def held(delay_s: float, policy: Policy | str | None = "static", name: str = "a", limit: int = 2) -> Stage:
        return Stage(identity, name=name, max_batch_size=limit, policy=policy, max_queue_delay_s=delay_s)

    for stages in ([held(1.0)], [held(0.5), held(0.5, name="b")], [held(0.1, Static(max_queue_delay_s=3))]):
        with pytest.raises(
            ValueError, match=r"max_queue_delay_s \((1|3) s in all\) must be shorter than timeout_s \(1 s"
        ):
            Service(*stages, timeout_s=1)
    for fine in (held(0.9), held(9, limit=1), held(9, "adaptive"), held(9, HeldBack()), held(9, "greedy")):
        Service(fine, timeout_s=1)
    with pytest.raises(ValueError, match="must be shorter than timeout_s"):
        carpool.batch(policy="static", max_queue_delay_s=1, timeout_s=1)
    carpool.batch(policy="static", max_queue_delay_s=1)


def test_a_policy_must_be_constructed() -> None:
    """A policy whose constructor forgets its base is refused: there is nothing in it that a stage
    could fill in.
    """

    class Forgetful(Greedy):
        def __init__(self) -> None:
            pass

    with pytest.raises(TypeError, match=r"Forgetful.__init__ must call super\(\).__init__\(\)"):
        Stage(identity, max_batch_size=2, policy=Forgetful())


@pytest.mark.fault("F77")
@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"max_batch_size": "8"}, "max_batch_size must be a whole number"),
        ({"max_batch_size": 64, "max_queue_size": 8}, "no full batch could ever form"),
        ({"max_in_flight_batches": 0}, "max_in_flight_batches must be a whole number"),
        ({"timeout_s": "1"}, "timeout_s must be a positive number of seconds, not '1'"),
        ({"timeout_s": math.nan}, "timeout_s must be a positive number of seconds, not nan"),
        ({"timeout_s": True}, "timeout_s must be a positive number of seconds, not True"),
        ({"slo_s": math.inf}, "slo_s must be a finite number of seconds"),
        ({"max_queue_delay_s": "1"}, "max_queue_delay_s must be 0 or more seconds"),
        ({"split": lambda y, counts: y}, "a merge function needs a split function"),
    ],
)
def test_a_batch_function_refuses_what_cannot_be(settings: dict[str, Any], told: str) -> None:
    """A batch function refuses what a stage refuses, with the same texts, when it is declared and
    not at each call.
    """
    with pytest.raises(ValueError, match=told):
        carpool.batch(**settings)


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"size": "rows"}, "size must be a function of an item, not 'rows'"),
        ({"merge": "yes"}, r"merge must be True, carpool.pad\(...\) or a function of a list"),
        ({"merge": list, "split": 3}, "split must be a function of"),
        ({"isolate_errors": 1}, "isolate_errors must be True or False"),
        ({"execution_lock": 3}, "the execution_lock of identity must be a carpool.Lock, .* not 3"),
        ({"policy": Greedy}, "policy must be a name or a Policy object"),
    ],
)
def test_a_batch_function_refuses_settings_of_the_wrong_kind(settings: dict[str, Any], told: str) -> None:
    """A setting of the wrong kind that Python would take by accident is refused by a batch
    function, too.
    """
    with pytest.raises(TypeError, match=told):
        carpool.batch(**settings)(identity)


def test_a_batch_function_takes_what_can_be() -> None:
    """A batch function takes a queue that counts callers where batches count rows, and any lock
    that can be taken.
    """
    carpool.batch(max_batch_size=64, max_queue_size=8, size=len)
    carpool.batch(max_batch_size=64, max_queue_size=8, merge=True)
    assert carpool.batch(execution_lock=threading.RLock())(identity)(1) == 1


@pytest.mark.parametrize(
    ("model", "told"),
    [
        (3, "a model is a class with predict or a callable, not 3"),
        (NoDecode(), "give the class NoDecode, not an object of it"),
        (NoPredict, "NoPredict has no predict method"),
        (NoDecode, "has no decode method"),
        (later, "later is async"),
    ],
)
def test_a_stage_refuses_what_is_no_model(model: Any, told: str) -> None:
    """What is no model is refused when the stage is written down, not when it starts."""
    with pytest.raises(TypeError, match=told):
        Stage(model)


def test_a_size_must_be_a_function_of_what_the_front_can_read() -> None:
    """A `size` must be a function, and the formats must not be ones that only the model in its
    worker can decode.
    """
    with pytest.raises(TypeError, match="size must be a function of an item, not 3"):
        Stage(identity, max_batch_size=8, size=3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"only Decodes\.decode can read"):
        Stage(Decodes, max_batch_size=8, size=len)


def test_sizes_are_no_counts() -> None:
    """A limit in tokens may be far above the number of requests that may wait, in this stage and in
    the one behind.
    """
    stage = Stage(models.lengths, max_batch_size=8192, size=len, max_queue_size=16)

    assert Service(stage, Stage(identity, max_queue_size=4)).stages[0].max_batch_size == 8192


def test_a_policy_must_be_a_name_or_a_policy() -> None:
    """A policy must be a name or a policy object: a class is neither."""
    with pytest.raises(TypeError, match="policy must be a name or a Policy object"):
        Stage(identity, max_batch_size=2, policy=3)  # type: ignore[arg-type]


@pytest.mark.fault("F77")
@pytest.mark.parametrize(
    ("stages", "settings", "told"),
    [
        ([], {}, "at least one stage"),
        ([identity, identity], {}, "two stages are called 'identity'"),
        ([Stage(models.scale, max_batch_size=8), Stage(identity, max_queue_size=4)], {}, "smaller than the batches of"),
        ([identity], {"timeout_s": 0}, "timeout_s must be a positive number"),
        ([identity], {"slo_s": -1}, "slo_s must be a positive number"),
        ([identity], {"overload": "both"}, 'overload must be "goodput" .* or "latency", not \'both\''),
        ([identity], {"cpus": 9999}, "9999 cannot be used"),
        ([identity], {"timeout_s": "1"}, "timeout_s must be a positive number of seconds, not '1'"),
        ([identity], {"timeout_s": math.nan}, "timeout_s must be a positive number of seconds, not nan"),
        ([identity], {"slo_s": math.inf}, "slo_s must be a finite number of seconds, not inf; leave it out for none"),
        ([identity], {"max_parallel_starts": 1.5}, "max_parallel_starts must be a whole number"),
        ([identity], {"name": ""}, "name must not be empty"),
        ([identity], {"share": 0}, "share must be a positive number, not 0"),
        ([identity], {"share": math.inf}, "share must be a positive number, not inf"),
        ([identity], {"share": "2"}, "share must be a positive number, not '2'"),
    ],
)
def test_a_service_refuses_what_cannot_be(stages: list[Any], settings: dict[str, Any], told: str) -> None:
    """A service refuses settings that cannot work, each by its name."""
    with pytest.raises(ValueError, match=told):
        Service(*stages, **settings)


def test_no_time_out() -> None:
    """A time-out of None means no limit, as for batch functions, and is the same as infinity."""
    assert Service(identity, timeout_s=None).timeout_s == Service(identity, timeout_s=math.inf).timeout_s == math.inf


@pytest.mark.fault("F77")
@pytest.mark.parametrize("settings", [{"journal_size": "9"}, {"journal_size": -1}])
def test_a_run_refuses_what_cannot_be(settings: dict[str, Any]) -> None:
    """The arguments of `run` and `run_async` are checked as well."""
    for run in (Service(identity).run, Service(identity).run_async, Service(identity).start):
        with pytest.raises(ValueError, match="journal_size must be a whole number"):
            run(**settings)
        with pytest.raises(TypeError, match="output must be a function"):
            run(output="stderr")  # type: ignore[arg-type]


def test_defaults_of_a_stage() -> None:
    """By default a stage's name comes from its model, its workers from `cpus`, and its isolation
    from `idempotent`.
    """
    assert Stage(identity).name == "identity"
    assert Stage(functools.partial(models.scale, factor=2), max_batch_size=8).name == "scale"
    assert Stage(models.Affine, max_batch_size=8).name == "Affine"
    assert Stage(identity).workers == 1
    assert Stage(identity, cpus=[0, 0]).workers == 2
    assert Stage(identity, env=[{}, {}, {}]).workers == 3
    assert Stage(identity, devices=3).devices == ("0", "1", "2")
    assert Stage(identity, devices=np.int64(3)).workers == 3  # type: ignore[arg-type]
    assert Stage(identity, devices=["cuda:1", 0, "GPU-8932f937"], workers=4).devices == ("1", "0", "GPU-8932f937", "1")
    pairs = Stage(identity, devices=[["cuda:0", "cuda:1"], [2, 3]]).devices
    assert pairs == ("0,1", "2,3")
    assert Stage(identity, devices=pairs).devices == Stage(identity, devices=["cuda:0,cuda:1", "2,3"]).devices == pairs
    assert Stage(identity, devices=2, cpus=[0, 0, 0]).devices == ("0", "1", "0")
    assert Stage(identity, devices=2, env=[{}, {}, {}]).devices == ("0", "1", "0")
    assert Stage(identity).isolate_errors is True
    assert Stage(identity, idempotent=False).isolate_errors is False
    assert Stage(identity, idempotent=False, isolate_errors=True).isolate_errors is True


def test_a_stage_cannot_be_changed() -> None:
    """A stage cannot be changed: what is declared stays as it was checked."""
    stage = Stage(identity)
    with pytest.raises(AttributeError):
        stage.workers = 3  # type: ignore[misc]


def test_each_run_gets_a_policy_of_its_own() -> None:
    """Each run gets a copy of the policy with the stage's limits filled in, and a declared object
    stays as it is.
    """
    declared = Static(max_queue_delay_s=0.01)
    stage = Stage(identity, max_batch_size=8, policy=declared, allowed_batch_sizes=[2, 4, 8])

    one, two = stage.new_policy(), stage.new_policy("latency")

    assert one is not two
    assert (one.allowed_batch_sizes, one.overload, two.overload) == ((2, 4, 8), "goodput", "latency")
    assert (one.max_batch_size, one.max_queue_delay_s) == (8, 0.01)
    assert declared.max_batch_size is None
    assert isinstance(Stage(identity, max_batch_size=8).new_policy(), Adaptive)
    assert isinstance(Stage(identity).new_policy(), OneByOne)
    named = Stage(identity, max_batch_size=8, policy="static", max_queue_delay_s=0.5).new_policy()
    assert isinstance(named, Static)
    assert named.max_queue_delay_s == 0.5


def test_a_service_is_named_after_its_last_stage() -> None:
    """A service is named after its last stage unless it is given a name."""
    assert Service(identity, models.double).name == "double"
    assert Service(identity, name="mine").name == "mine"
    assert repr(Service(identity, models.double)) == "<Service double: identity -> double>"


def test_types_are_read_off_the_model() -> None:
    """The type of the input is read off `preprocess`, else `predict`, that of the output off
    `postprocess`, else `predict`; of a batch it is the item type.
    """
    assert Stage(models.scale, max_batch_size=2).traits.input_type is float
    assert Stage(models.scale, max_batch_size=2).traits.output_type is float
    affine = Stage(models.Affine, max_batch_size=2).traits
    assert (affine.input_type, affine.output_type) == (float, dict[str, float])
    assert affine.postprocess_takes_x
    assert Stage(identity).traits.input_type is Any


def test_types_that_cannot_be_resolved_are_no_obstacle(caplog: pytest.LogCaptureFixture) -> None:
    """Types that cannot be resolved are named in a warning, and items go unchecked."""

    def odd(x: Missing) -> int:  # type: ignore[name-defined]  # noqa: F821
        return 1

    assert Stage(odd).traits.input_type is Any
    assert "types of odd cannot be resolved" in caplog.text


@pytest.mark.parametrize("policy", [*sorted(BY_NAME)])
@pytest.mark.parametrize("slo_s", [None, 5.0])
def test_a_service_without_a_time_out_answers(policy: str, slo_s: float | None) -> None:
    """A service without a time-out answers: infinity goes through planning, frames, timers, streams
    and closing.
    """
    stage = Stage(identity, max_batch_size=8, policy=policy, max_queue_delay_s=0.001, run_in="thread")
    with Service(stage, timeout_s=None, slo_s=slo_s).run() as service:
        assert service.predict(1) == 1
        assert service.predict(2, timeout_s=math.inf, priority=np.int64(3)) == 2  # type: ignore[arg-type]
        assert service.predict(3, timeout_s=np.float32(9)) == 3  # type: ignore[arg-type]
        assert list(service.stream(range(300), max_in_flight=np.int64(16))) == list(range(300))  # type: ignore[arg-type]
        for wrong in ({"timeout_s": "1"}, {"timeout_s": math.nan}, {"priority": 1.5}, {"priority": True}):
            with pytest.raises(ValueError, match=f"{next(iter(wrong))} must be a"):
                service.predict(4, **wrong)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="max_in_flight must be a whole number"):
            service.stream([1], max_in_flight=1.5)  # type: ignore[arg-type]


def test_an_endless_time_out_of_a_process_and_of_a_batch_function() -> None:
    """An endless time-out goes through messages to worker processes, and through locks that threads
    wait for.
    """
    with Service(Stage(models.double, name="double"), timeout_s=math.inf).run() as service:
        assert service.predict(2) == 4
    for endless in (math.inf, 1e300):
        call = carpool.batch(timeout_s=endless)(identity)
        assert call(1) == call.submit(1).result(timeout_s=endless) == 1


def hooked(item: Any, takes: Any, gives: Any = None, hook: str = "preprocess") -> type[carpool.Model]:
    """A model whose `predict` takes or returns lists of such items, with a hook of these hints."""

    class Hooked(carpool.Model):
        def predict(self, xs: Any) -> Any:
            return xs

    def method(self: Any, x: Any) -> Any:
        return x

    method.__annotations__ = {"x": takes} if gives is None else {"x": takes, "return": gives}
    Hooked.predict.__annotations__ = {"xs" if hook == "preprocess" else "return": item}
    setattr(Hooked, hook, method)
    return Hooked


@pytest.mark.parametrize(
    ("model", "told"),
    [
        (hooked(list[float], list[float]), r"preprocess of Hooked takes list\[float\] .* predict takes float for each"),
        (hooked(list[float], list[float], list[float]), "process the whole batch in predict"),
        (hooked(list[str], Sequence[str], list[str]), r"write `-> str` after its parameters"),
        (hooked(list[float], list[str], list[float]), "preprocess of Hooked"),
        (hooked(list[float], list, list[float]), "preprocess of Hooked takes list by"),
        (hooked(list[NDArray[np.float32]], list[NDArray[np.float32]]), "preprocess of Hooked"),
        (hooked(list[float], list[float], hook="postprocess"), "postprocess of Hooked .* predict returns float for"),
        (hooked(list[float], list[float], list[str], "postprocess"), "postprocess of Hooked"),
    ],
)
def test_a_hook_that_is_hinted_to_take_the_batch_is_refused(model: type[carpool.Model], told: str) -> None:
    """A hook gets one item, so one that is hinted to take the batch is refused, and the text says
    where code for whole batches belongs.
    """
    with pytest.raises(TypeError, match=told):
        Stage(model, max_batch_size=8)
    with pytest.raises(TypeError, match=told):
        carpool.batch(max_batch_size=8)(model)


@pytest.mark.parametrize(
    "model",
    [
        hooked(list[list[float]], list[float]),  # items are lists
        hooked(list[list[float]], list[list[float]]),  # a matrix becomes a row
        hooked(list[float], list[float], float),  # a list becomes a number
        hooked(list[NDArray[np.float32]], list[float]),  # or an array
        hooked(list[str], list),
        hooked(list, list),
        hooked(list[float], float),
        hooked(list[float], str, list[float]),  # which is wrong, but no batch
        hooked(list[Any], list[float]),
        hooked(list[list[float]], list[float], hook="postprocess"),
        hooked(list[float], list, hook="postprocess"),
        hooked(list, list[float], hook="postprocess"),
        hooked(list[float], float, list[float], "postprocess"),
    ],
)
def test_a_hook_may_take_a_list_that_is_an_item(model: type[carpool.Model]) -> None:
    """A hook may take a list where a list can be what one item is."""
    Stage(model, max_batch_size=8)


def test_without_batches_hooks_may_take_lists() -> None:
    """Without batches hooks may take lists, since there a list is an item."""
    Stage(hooked(list[float], list[float]))
    Stage(hooked(list[float], list[float], hook="postprocess"))
