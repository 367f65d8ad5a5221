"""The ids of requests whose clients have given them none."""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Callable


class RequestIds:
    """Gives each request another id: a part that is drawn at random once, and a number.

    A good answer on the fast path writes both by itself (`AnswerWriter.answer_now`), since a call
    and an object less are the difference between a cost that can be measured and one that cannot.

    Attributes:
        start: What all ids begin with.
        next_number: Returns what follows it in the next id.
    """

    def __init__(self) -> None:
        self.start = f"{secrets.token_hex(6)}-".encode()
        self.next_number: Callable[[], int] = itertools.count(1).__next__

    def new(self) -> bytes:
        """Return the id of another request."""
        return b"%b%d" % (self.start, self.next_number())
