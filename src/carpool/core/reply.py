"""What a worker has answered, as drivers hand it to the pipeline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

DONE_EARLY: Final = object()
"""The turn of a result that is the answer, whatever would follow."""


class Reply:
    """The answers of one worker to a batch, or to a part of it.

    There is one reply per batch, not one per request.

    Attributes:
        stage: The position of the worker's stage in the pipeline.
        place: The position of the worker in its stage.
        batch_id: The batch that is answered.
        ids: The requests that are answered, all of the batch or some of it.
        results: One for each of `ids`; where there is an error, the result does not matter.
        errors: By position in `ids`, why a request failed; None if none did.
        busy_s: Seconds that the worker spent on these answers, reading and writing included.
        waited_s: Seconds that the worker stood still before it got the batch.
        turns: By position in `ids`, where a result goes if it says so itself: `DONE_EARLY`, or the
            name of the way that it takes through the switch that follows; None if none does.
    """

    __slots__ = ("batch_id", "busy_s", "errors", "ids", "place", "results", "stage", "turns", "waited_s")

    def __init__(
        self,
        stage: int,
        place: int,
        batch_id: int,
        ids: Sequence[int],
        results: Sequence[object],
        errors: dict[int, Exception] | None = None,
        busy_s: float = 0.0,
        waited_s: float = 0.0,
        turns: Mapping[int, object] | None = None,
    ) -> None:
        self.stage = stage
        self.place = place
        self.batch_id = batch_id
        self.ids = ids
        self.results = results
        self.errors = errors
        self.busy_s = busy_s
        self.waited_s = waited_s
        self.turns = turns

    def __repr__(self) -> str:
        failed = len(self.errors or ())
        return f"<Reply stage={self.stage} place={self.place} batch={self.batch_id} n={len(self.ids)} failed={failed}>"
