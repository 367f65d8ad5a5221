"""What becomes of the results of a stage: answers of requests, or what the next stage gets."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from carpool.core import trail
from carpool.core.batch import Reply
from carpool.core.endings import Endings
from carpool.core.journal import Journal
from carpool.core.lobby import acquit
from carpool.core.stepper import Crew
from carpool.errors import CarpoolError, DeadlineExceeded, ModelError
from carpool.request import DONE, RUNNING, Request


class Passage:
    """The way of requests out of a stage, into the next one or back to their callers.

    Args:
        batchers: Of the stages, first to last.
        endings: Ends the requests that go no further.
        measure: Returns the bytes that a result will hold while it waits for the next stage.
        journal: Records what happens to each request, if given.
    """

    def __init__(
        self,
        batchers: Sequence[Crew],
        endings: Endings,
        measure: Callable[[object], int],
        journal: Journal | None,
    ) -> None:
        self._batchers = batchers
        self._endings = endings
        self._measure = measure
        self._journal = journal

    def sort_out(self, now: float, reply: Reply, takers: Sequence[Request | None], began: float | None) -> None:
        """End the requests of a reply that end in its stage, and pass the others on.

        Each request that is answered ends in one of six ways:

        1. its caller does not wait any more, or it never was that worker's: the result is dropped;
        2. its deadline had passed when the worker read it: it expires;
        3. its deadline has passed since, and another stage would follow: it expires;
        4. it has failed: it is answered with its error;
        5. it has been through the last stage: it is answered with its result;
        6. else the result is what the next stage gets, unless it cannot be weighed for it, which
           fails the request.

        Args:
            now: The time.
            reply: Has the results and errors of all of them.
            takers: The requests, each in the place of its result; None for a stray one.
            began: When the worker began with the batch; None if it is not the one that it runs.
        """
        results, errors, stage = reply.results, reply.errors, reply.stage
        is_last = stage == len(self._batchers) - 1
        passed: list[Request] = []
        for i, request in enumerate(takers):
            if request is None:
                continue
            if request.state != RUNNING:
                self._batchers[stage].late_results += 1
            elif errors is not None and i in errors:
                if isinstance(errors[i], DeadlineExceeded):  # the worker does not know where the time went
                    self._endings.expire(now, request, began)
                else:
                    self._endings.fail(now, request, errors[i])
            elif is_last:
                request.result = results[i]
                self._endings.answer(now, request)
            elif request.deadline <= now:
                self._endings.expire(now, request, began)
            elif self._weigh(now, request, stage + 1, results[i]):
                request.item = results[i]
                request.nbytes = self._measure(results[i])
                passed.append(request)
        if passed:
            assert began is not None
            self._pass_on(now, stage, passed, began)

    def answer_all(self, takers: Sequence[Request | None], results: Sequence[object]) -> int:
        """Answer the requests of a reply of the last stage that has no errors.

        Fast path of `sort_out`: the same outcome, see tests/core/test_fast_paths.py.

        Returns:
            How many results came too late.
        """
        endings = self._endings
        answers = endings.answers
        before = len(answers)
        for request, result in zip(takers, results, strict=True):
            if request is not None and request.state == RUNNING:
                request.state = DONE
                request.result = result
                answers.append(request)  # one by one: a thread that is killed amid a batch must lose none
        answered = len(answers) - before
        endings.answered += answered
        return len(takers) - takers.count(None) - answered

    def _weigh(self, now: float, request: Request, stage: int, result: object) -> bool:
        """Weigh a request for its next stage and report whether that worked; if not, it fails."""
        try:
            if request.losses:
                acquit(request)  # this restores its own key, before it gets that of the next stage
            self._batchers[stage].lobby.weigh(request, result)
        except CarpoolError as error:
            self._endings.fail(now, request, error)
            return False
        except BaseException as error:  # a `Weigher` raises only CarpoolErrors; others may be given
            kind = type(error).__name__
            text = f"size= of stage {self._batchers[stage].name} raised {kind}"
            self._endings.fail(now, request, ModelError(text, type_name=kind))
            return False
        return True

    def _pass_on(self, now: float, stage: int, requests: Sequence[Request], started: float) -> None:
        """Pass requests on to the next stage, which gets their results.

        Args:
            now: The time.
            stage: The stage that is done with them.
            requests: Those that go on.
            started: When that stage began to work on them.
        """
        trail.extend(requests, stage, started, now)
        for request in requests:
            request.stage = stage + 1
            request.arrived = now
            request.format = 0
            if self._journal is not None:
                self._journal.record(now, "passed", request.id, self._batchers[stage].name)
        self._batchers[stage + 1].enter(now, requests)
