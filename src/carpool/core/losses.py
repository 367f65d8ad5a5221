"""What becomes of the requests of a worker that has died, or that goes: who runs again, who fails.

Requests that may have killed their worker are suspects (`core/lobby.py`). What the worker
cannot have looked at waits again as if it had not been taken. A stream goes on only where its model
can resume it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from carpool.core.endings import Endings
from carpool.core.journal import Journal
from carpool.core.lobby import MOST_LOSSES, lost_with
from carpool.core.stepper import Crew
from carpool.errors import Unavailable
from carpool.request import DONE, RUNNING, Request


class Losses:
    """Sorts out the requests of workers that are gone.

    Args:
        endings: Ends the requests that do not run again.
        journal: Records what happens to each request, if given.
    """

    def __init__(self, endings: Endings, journal: Journal | None) -> None:
        self._endings = endings
        self._journal = journal

    def lost(self, now: float, crew: Crew, place: int, unsent: Collection[int]) -> bool:
        """Do what `Pipeline.worker_lost` promises."""
        gone = crew.worker_gone(place, unsent)
        if gone is None:
            return False
        again = self._blame(now, crew, gone.blamed, gone.given_up)
        if again:
            crew.quarantine(again)
        self._put_back(now, crew, gone.untold, self._able_to_go_on(now, crew, gone.resting))
        for request in gone.blamed:
            if request.state == DONE:
                crew.forget(request)
        return gone.suspect is not None and gone.suspect.losses >= MOST_LOSSES

    def left(self, now: float, crew: Crew, place: int) -> None:
        """Do what `Pipeline.worker_left` promises."""
        gone = crew.worker_gone(place, blames=False)
        if gone is not None:
            self._put_back(now, crew, gone.untold, self._able_to_go_on(now, crew, gone.resting))

    def _able_to_go_on(self, now: float, crew: Crew, requests: Sequence[Request]) -> list[Request]:
        """Return the streams of a worker that has gone which can run elsewhere; fail the others."""
        again: list[Request] = []
        for request in requests:
            if crew.may_run_again(request):
                again.append(request)
            else:
                crew.forget(request)
                self._endings.fail(now, request, _lost_in_mid_stream(crew.name))
        return again

    def _blame(self, now: float, crew: Crew, suspects: Sequence[Request], given_up: str) -> list[Request]:
        """Count a lost worker against the requests that it had, and fail those not to be run again.

        Returns:
            Those that are to be run again.
        """
        again: list[Request] = []
        for request in suspects:
            request.losses += 1
            if request.state != RUNNING:
                continue
            if request.losses < MOST_LOSSES and crew.may_run_again(request):
                again.append(request)
                if self._journal is not None:
                    self._journal.record(now, "worker lost, queued again, alone", request.id, crew.name)
            else:
                self._endings.fail(now, request, lost_with(request, crew.name, given_up))
        return again

    def _put_back(self, now: float, crew: Crew, untold: Sequence[Request], resting: Sequence[Request]) -> None:
        """Let what a lost worker has not looked at wait again, as if it had not been taken.

        Args:
            now: The time.
            crew: Of the worker's stage.
            untold: Those of which it had not been told.
            resting: Those that it had, and was not at work on.
        """
        if self._journal is not None:
            for request in resting:
                self._journal.record(now, "worker gone, queued again", request.id, crew.name)
        crew.put_back(now, [*untold, *resting])


def _lost_in_mid_stream(stage: str) -> Unavailable:
    """Return the error of a stream whose worker was replaced, and which cannot go on elsewhere."""
    text = f"a worker of stage {stage} was replaced in the midst of this answer, and its model cannot resume it"
    return Unavailable(text, code="worker_lost")
