"""Stages and services as declared: defaults, and an error that names what to change for each thing that cannot be."""

from __future__ import annotations

import functools
from typing import Any

import pytest

import carpool
from carpool import Adaptive, Service, Stage, Static
from carpool.policy import OneByOne
from tests import models


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


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"max_batch_size": 0}, "max_batch_size must be a whole number of at least 1, not 0"),
        ({"max_batch_size": 2.5}, "max_batch_size must be a whole number"),
        ({"workers": 0}, "workers must be a whole number of at least 1"),
        ({"workers": 2, "cpus": [0]}, "cpus has 1 entries for 2 workers"),
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
        ({"max_batch_size": 8, "allowed_batch_sizes": [8], "size": len}, "a stage can have one of them"),
        ({"policy": "best"}, "there is no policy 'best'; choose one of .*greedy, static"),
    ],
)
def test_a_stage_refuses_what_cannot_be(settings: dict[str, Any], told: str) -> None:
    """The text names the setting and what would do."""
    with pytest.raises(ValueError, match=told):
        Stage(identity, **settings)


@pytest.mark.parametrize(
    ("model", "told"),
    [
        (3, "a model is a class with predict or a callable, not 3"),
        (NoPredict, "NoPredict has no predict method"),
        (NoDecode, "has no decode method"),
        (later, "later is async"),
    ],
)
def test_a_stage_refuses_what_is_no_model(model: Any, told: str) -> None:
    """Said when it is written down, not when it starts."""
    with pytest.raises(TypeError, match=told):
        Stage(model)


def test_a_size_must_be_a_function_of_what_the_front_can_read() -> None:
    """No number; and no formats that only the model can decode, in its worker."""
    with pytest.raises(TypeError, match="size must be a function of an item, not 3"):
        Stage(identity, max_batch_size=8, size=3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"only Decodes\.decode can read"):
        Stage(Decodes, max_batch_size=8, size=len)


def test_sizes_are_no_counts() -> None:
    """A limit in tokens may be far above the number of requests that may wait, here and in the stage behind."""
    stage = Stage(models.lengths, max_batch_size=8192, size=len, max_queue_size=16)

    assert Service(stage, Stage(identity, max_queue_size=4)).stages[0].max_batch_size == 8192


def test_a_policy_must_be_a_name_or_a_policy() -> None:
    """A class, say, is neither."""
    with pytest.raises(TypeError, match="policy must be a name or a Policy object"):
        Stage(identity, max_batch_size=2, policy=3)  # type: ignore[arg-type]


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
    ],
)
def test_a_service_refuses_what_cannot_be(stages: list[Any], settings: dict[str, Any], told: str) -> None:
    """Each with the name of what is wrong."""
    with pytest.raises(ValueError, match=told):
        Service(*stages, **settings)


def test_defaults_of_a_stage() -> None:
    """Names come from the model, workers from cpus, isolation from idempotence."""
    assert Stage(identity).name == "identity"
    assert Stage(functools.partial(models.scale, factor=2)).name == "scale"
    assert Stage(models.Affine).name == "Affine"
    assert Stage(identity).workers == 1
    assert Stage(identity, cpus=[0, 0]).workers == 2
    assert Stage(identity).isolate_errors is True
    assert Stage(identity, idempotent=False).isolate_errors is False
    assert Stage(identity, idempotent=False, isolate_errors=True).isolate_errors is True


def test_a_stage_cannot_be_changed() -> None:
    """What is declared stays as it was checked."""
    stage = Stage(identity)
    with pytest.raises(AttributeError):
        stage.workers = 3  # type: ignore[misc]


def test_each_run_gets_a_policy_of_its_own() -> None:
    """With the stage's limits filled in; a declared object stays as it is."""
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
    """Unless it is given a name."""
    assert Service(identity, models.double).name == "double"
    assert Service(identity, name="mine").name == "mine"
    assert repr(Service(identity, models.double)) == "<Service double: identity -> double>"


def test_types_are_read_off_the_model() -> None:
    """Input from preprocess, else predict; output from postprocess, else predict; a batch's item type."""
    assert Stage(models.scale, max_batch_size=2).traits.input_type is float
    assert Stage(models.scale, max_batch_size=2).traits.output_type is float
    affine = Stage(models.Affine, max_batch_size=2).traits
    assert (affine.input_type, affine.output_type) == (float, dict[str, float])
    assert affine.postprocess_takes_x
    assert Stage(identity).traits.input_type is Any


def test_types_that_cannot_be_resolved_are_no_obstacle(caplog: pytest.LogCaptureFixture) -> None:
    """They are named in a warning, and items go unchecked."""

    def odd(x: Missing) -> int:  # type: ignore[name-defined]  # noqa: F821
        return 1

    assert Stage(odd).traits.input_type is Any
    assert "types of odd cannot be resolved" in caplog.text
