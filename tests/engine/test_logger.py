"""carpool's own log: it never raises, and shows who has written a line."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from carpool.engine.logger import logger
from tests.foreign.surroundings import bad_handler
from tests.support.kinds import KINDS


@pytest.mark.fault("F83")
@pytest.mark.parametrize("kind", KINDS)
def test_a_handler_that_raises_loses_its_line_and_no_more(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    """If a handler of the log raises, whatever it is, it loses its line, and the next one reaches
    the handlers that work.
    """
    with bad_handler(kind) as handler:
        logger.error("lost")
    assert handler.hits == 1
    logger.error("found %d", 1)
    assert caplog.messages[-1] == "found 1"


def test_a_line_tells_where_it_was_written(caplog: pytest.LogCaptureFixture) -> None:
    """A line of the log tells the place in the code that has something to say, not the guard around
    it.
    """
    logger.warning("here")
    assert Path(caplog.records[-1].pathname) == Path(__file__)
    assert caplog.records[-1].levelno == logging.WARNING
