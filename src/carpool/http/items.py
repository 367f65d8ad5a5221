"""The items of one exchange that brings several: each is a request of its own, and one answer is
written once all of them are done.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from carpool.engine.request import Request
from carpool.engine.wire.outcome import CheckedResponse
from carpool.engine.wire.payload import size_of
from carpool.errors import ModelError
from carpool.http import entries
from carpool.http.exchange import Exchange

if TYPE_CHECKING:
    from carpool.http.exchange import ServedModel


class ExchangeItem(Request):
    """One item of an exchange that brings several.

    Attributes:
        whole: All of them.
        index: Its position among them, where their answers come in parts; else not set.
    """

    __slots__ = ("index", "whole")

    index: int

    def __init__(self, whole: ExchangeItems, item: object, deadline: float, nbytes: int) -> None:
        super().__init__(item, deadline, None, nbytes)
        self.whole = whole

    @property
    def companions(self) -> Sequence[Request]:
        """All items of the exchange that were submitted."""
        return self.whole.submitted

    def tell(self) -> None:
        """Hand on that the answer is there."""
        self.whole.item_ended(self)

    def tell_part(self, part: object) -> None:
        """Hand on a part of the answer."""
        self.whole.take_part(self, part)


class ExchangeItems:
    """The items of one exchange.

    Args:
        exchange: Is answered once all items are.
        model: Gets the items.

    Attributes:
        model: Gets the items.
        items: In their order.
        submitted: Those that are not known to be unfit; they are admitted together or not at all.
    """

    def __init__(self, exchange: Exchange, model: ServedModel) -> None:
        self.model = model
        self.items: list[ExchangeItem] = []
        self.submitted: list[Request] = []
        self._exchange = exchange
        self._missing = 0

    def begin(self) -> Sequence[Request]:
        """Return the items that are to be submitted; where there is none, answer at once."""
        self.submitted = [item for item in self.items if item.error is None]
        self._missing = len(self.submitted)
        if not self._missing:
            self._answer_and_let_go()
        return self.submitted

    def item_ended(self, item: ExchangeItem) -> None:
        """Answer the exchange if this was the last answer that was missing."""
        self._missing -= 1
        if not self._missing:
            self._answer_and_let_go()

    def take_part(self, item: ExchangeItem, part: object) -> None:
        """Take a part of an item's answer, where parts are delivered as they come."""
        raise NotImplementedError

    def _answer_and_let_go(self) -> None:
        """Answer the exchange, and refer to it and to the items no more.

        They refer to this object, too: without this, bodies and answers of megabytes would be
        there until the interpreter looks for cycles, and their memory could not be used again.
        """
        self._answer()
        self.items, self.submitted = [], []
        del self._exchange

    @property
    def refusal(self) -> Exception | None:
        """Why none of the submitted items was admitted; None if they were, or if there is none."""
        is_refused = self.submitted and not any(item.id for item in self.submitted)
        return self.submitted[0].error if is_refused else None

    @property
    def answer_bytes(self) -> int:
        """How many bytes the results hold, as far as they are bytes."""
        return sum([_nbytes(item.result) for item in self.items if item.error is None])

    def cancel(self) -> None:
        """Give up all items: nobody waits for them any more."""
        if self.model.driver is not None:
            for request in self.submitted:
                self.model.driver.cancel(request)

    def pause(self, is_paused: bool) -> None:
        """Have no more parts made for a client that does not take them, or go on."""
        if self.model.driver is not None:
            for request in self.submitted:
                if request.stream is not None:
                    self.model.driver.pause(request, is_paused)

    def _answer(self) -> None:
        """Answer the exchange, as all items are done."""
        raise NotImplementedError


def _nbytes(result: Any) -> int:
    return size_of(result.body if type(result) is CheckedResponse else result)


def as_entry(body: bytes, format: int) -> bytes:
    """Return an answer that a model has written itself as it stands among others, on one line.

    Raises:
        ModelError: It is not one value in this format, so that it would be taken for several.
    """
    try:
        return entries.value_in(body, format)
    except Exception as error:  # the bytes are the model's, and may be anything
        raise ModelError(f"the model wrote an answer that is {error}", code="bad_result") from None
