"""What becomes of the requests of a worker that has died, or that goes: who runs again, who fails.

Requests that may have killed their worker are suspects (`core/quarantine.py`). What the worker
cannot have looked at waits again as if it had not been taken. A stream goes on only where its model
can resume it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from carpool.core.batcher import Batcher
from carpool.core.endings import Endings
from carpool.core.journal import Journal
from carpool.core.quarantine import MOST_LOSSES, lost_with
from carpool.core.running_set import stream_of
from carpool.core.stepper import Stepper
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

    # -- workers that run batches

    def batch_lost(self, now: float, batcher: Batcher, place: int, unsent: Collection[int]) -> bool:
        """Do what `Pipeline.worker_lost` promises for a worker that runs batches."""
        batch = batcher.worker_lost(place)
        if batch is None:
            return False
        untouched = [request for request in batch.requests if request.id in unsent and request.state == RUNNING]
        suspects = [request for request in batch.requests if request.id not in unsent]
        again = self._blame(now, batcher, suspects, batch.given_up)
        if again:
            batcher.quarantine(again)
        self._put_back(now, batcher, untouched, batcher.withdraw_ahead(place))
        return batch.requests[0].losses >= MOST_LOSSES

    def batch_left(self, now: float, batcher: Batcher, place: int) -> None:
        """Do what `Pipeline.worker_left` promises for a worker that runs batches."""
        batch = batcher.worker_lost(place)
        if batch is None:
            return
        again = [request for request in batch.requests if request.state == RUNNING]
        self._put_back(now, batcher, again, batcher.withdraw_ahead(place))

    # -- workers of a stage of steps

    def set_lost(self, now: float, stepper: Stepper, place: int, unsent: Collection[int]) -> bool:
        """Do what `Pipeline.worker_lost` promises for a worker of a stage of steps.

        Only those streams are to blame that it may have been stepping or starting.
        """
        lost = stepper.worker_gone(place, unsent)
        if lost is None:
            return False
        again = self._blame(now, stepper, lost.blamed, lost.given_up)
        for request in lost.blamed:
            if request.state == DONE:
                stepper.forget(stream_of(request))
        stepper.quarantine(again)
        self._put_back(now, stepper, lost.untold, self._able_to_go_on(now, stepper, lost.resting))
        if lost.suspect is None or lost.suspect.losses < MOST_LOSSES:
            return False
        if stream_of(lost.suspect).redo:
            stepper.shorten_probations()
        return True

    def set_left(self, now: float, stepper: Stepper, place: int) -> None:
        """Do what `Pipeline.worker_left` promises for a worker of a stage of steps."""
        lost = stepper.worker_gone(place)
        if lost is not None:
            again = self._able_to_go_on(now, stepper, [*lost.blamed, *lost.resting])
            self._put_back(now, stepper, lost.untold, again)

    def _able_to_go_on(self, now: float, stepper: Stepper, requests: Sequence[Request]) -> list[Request]:
        """Return the streams of a worker that has gone which can run elsewhere; fail the others."""
        again: list[Request] = []
        for request in requests:
            if stepper.may_run_again(request):
                again.append(request)
            else:
                stepper.forget(stream_of(request))
                self._endings.fail(now, request, _lost_in_mid_stream(stepper.name))
        return again

    # -- both

    def _blame(self, now: float, batcher: Batcher, suspects: Sequence[Request], given_up: str) -> list[Request]:
        """Count a lost worker against the requests that it had, and fail those not to be run again.

        Returns:
            Those that are to be run again.
        """
        again: list[Request] = []
        for request in suspects:
            request.losses += 1
            if request.state != RUNNING:
                continue
            if request.losses < MOST_LOSSES and batcher.may_run_again(request):
                again.append(request)
                if self._journal is not None:
                    self._journal.record(now, "worker lost, queued again, alone", request.id, batcher.name)
            else:
                self._endings.fail(now, request, lost_with(request, batcher.name, given_up))
        return again

    def _put_back(self, now: float, batcher: Batcher, untouched: list[Request], ahead: list[Request]) -> None:
        """Let what a lost worker has not looked at wait again, as if it had not been taken.

        Args:
            now: The time.
            batcher: Of the worker's stage.
            untouched: Requests of its batch.
            ahead: Requests of its next batch.
        """
        if self._journal is not None:
            for request in ahead:
                self._journal.record(now, "worker gone, queued again", request.id, batcher.name)
        batcher.put_back(now, [*untouched, *ahead])


def _lost_in_mid_stream(stage: str) -> Unavailable:
    """Return the error of a stream whose worker was replaced, and which cannot go on elsewhere."""
    text = f"a worker of stage {stage} was replaced in the midst of this answer, and its model cannot resume it"
    return Unavailable(text, code="worker_lost")
