"""The warm-up refuses a model whose examples or results no request could carry."""

from __future__ import annotations

from typing import Any, Literal

import pytest

from carpool import Model, Service, Stage, StartupError
from tests.service.fitting import (
    BrokenFormat,
    HandsOnALock,
    Lists,
    Misfit,
    OfDucks,
    OfManyPictures,
    OfNan,
    OfPictures,
    OfPoints,
    OwnFormat,
    PictureOrText,
    RawResponds,
    Responds,
    Same,
    TextAsBytes,
    TextForBytes,
    Texts,
    Unhinted,
    WrongPicture,
)

RunIn = Literal["process", "thread", "loop"]
RUN_INS: list[RunIn] = ["process", "thread", "loop"]


def stage(model: type[Model], run_in: RunIn, max_batch_size: int | None = None) -> Stage:
    """Declare a stage; on the loop its model gets an `async def predict`."""
    if run_in == "loop":
        plain = model.predict

        async def predict(self: Model, x: Any) -> Any:
            return plain(self, x)

        takes, gives = plain.__annotations__.values()
        predict.__annotations__ = {"x": takes, "return": gives}
        model = type(model.__name__, (model,), {"predict": predict})
    return Stage(model, max_batch_size=max_batch_size, run_in=run_in)


def why_not(*stages: Stage) -> str:
    """Start a service and return why it does not."""
    with pytest.raises(StartupError) as caught, Service(*stages, name="tried").run():
        pass
    return str(caught.value)


@pytest.mark.parametrize("run_in", RUN_INS)
def test_a_result_that_does_not_fit(run_in: RunIn) -> None:
    """A model whose results do not fit its hint does not start, and the example is named."""
    text = why_not(stage(Texts, run_in, 8))
    assert text == (
        "worker 0 of stage Texts could not start: example 1: the result does not fit int: Expected `int`, got `str`"
    )
    text = why_not(stage(Lists, run_in))
    assert "example 2: the result does not fit list[int]: Expected `int`, got `str` - at `$[0]`" in text


@pytest.mark.parametrize("run_in", RUN_INS)
def test_an_example_that_does_not_fit(run_in: RunIn) -> None:
    """A model whose examples do not fit its hint does not start, though it could run them."""
    text = why_not(stage(Misfit, run_in, 8))
    assert "could not start: example 2 does not fit int: Expected `int`, got `str`" in text


@pytest.mark.parametrize("run_in", RUN_INS)
def test_two_stages(run_in: RunIn) -> None:
    """Only the last stage's results are compared with its hint, and only the first one's examples;
    between stages a result has to be such that it can be handed on.
    """
    text = why_not(stage(Same, run_in), stage(Texts, run_in, 8))
    assert "of stage Texts could not start: example 1: the result does not fit int" in text
    with Service(stage(Texts, run_in, 8), stage(Same, run_in), name="x").run():
        pass
    with Service(stage(Same, run_in), stage(Misfit, run_in, 8), name="x").run():
        pass
    text = why_not(stage(HandsOnALock, run_in), stage(Same, run_in))
    assert "of stage HandsOnALock could not start: example 1: " in text and "lock" in text


FITTING: list[type[Model]] = [
    *(OfPictures, OfManyPictures, OfDucks, Unhinted, OfNan, OfPoints, Responds, RawResponds, OwnFormat)
]


@pytest.mark.parametrize("model", FITTING, ids=lambda model: model.__name__)
def test_what_some_caller_can_send_and_get_is_taken(model: type[Model]) -> None:
    """An example is not refused as long as Python callers, JSON or msgpack can carry it."""
    with Service(Stage(model, run_in="thread"), name="taken").run() as handle:
        assert handle.stats()


@pytest.mark.parametrize(
    ("model", "text"),
    [
        (WrongPicture, "example 1 does not fit Picture: it is of type str"),
        (PictureOrText, "example 1: the result does not fit Picture: it is of type str"),
        (TextForBytes, "example 1: a raw response needs bytes, but the model returned an object of type str"),
        (TextAsBytes, "example 1 does not fit bytes: it is of type str"),
        (BrokenFormat, "example 1: ZeroDivisionError: no room"),
    ],
    ids=lambda each: getattr(each, "__name__", ""),
)
def test_what_nobody_can_get_is_refused(model: type[Model], text: str) -> None:
    """Classes, bytes and formats of the model's own are checked as their requests would be."""
    assert text in why_not(Stage(model, run_in="thread"))
