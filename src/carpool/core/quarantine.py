"""Requests whose worker was lost: each is run once more, alone, so that a guilty one is found.

A suspect waits in its old place of the queue, in a lane of its own kind. It is acquitted when it
has come through its stage, and found guilty when it has cost a second worker.
"""

from __future__ import annotations

from carpool.core.lane_order import Suspect
from carpool.errors import CarpoolError, DeadlineExceeded, ModelError, Unavailable
from carpool.request import Request

MOST_LOSSES = 2  # workers of one stage that a request may cost


def suspect(request: Request) -> None:
    """Have a request run alone in its present stage."""
    request.lane = request.lane._replace(key=Suspect(request.lane.key))


def acquit(request: Request) -> None:
    """Make a request like any other again, since it has come through its stage."""
    request.losses = 0
    lane = request.lane
    if isinstance(lane.key, Suspect):
        request.lane = lane._replace(key=lane.key.former_key)


def lost_with(request: Request, stage: str, given_up: str) -> CarpoolError:
    """Return the error of a request that is not run again after its worker was lost.

    Args:
        request: One that the worker had.
        stage: The name of the worker's stage.
        given_up: Why the worker was given up; empty if it died by itself.
    """
    if request.losses < MOST_LOSSES:
        text = f"a worker of stage {stage} died with this request"
        if given_up:
            text = f"a worker of stage {stage} was given up with this request: {given_up}"
        return Unavailable(text, code="worker_lost")
    if given_up:
        return DeadlineExceeded(
            f"two workers of stage {stage} were lost with this request, the second one when it ran alone and was"
            f" given up: {given_up}; it is not tried again"
        )
    text = (
        f"two workers of stage {stage} died with this request or had to be killed, the second one when it ran"
        " alone; it is not tried again"
    )
    return ModelError(text, code="request_crashed_worker")
