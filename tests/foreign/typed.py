"""Types with code of the user's in them, which reads requests and writes answers."""

from __future__ import annotations

from typing import Any

import msgspec
from pydantic import BaseModel, field_validator

from carpool import Model
from tests.support.kinds import fail


class Checked(BaseModel):
    """A pydantic model with a validator and a serialiser of the user's."""

    kind: str = ""

    @field_validator("kind")
    @classmethod
    def check(cls, kind: str) -> str:
        if kind:
            fail(kind)
        return kind


class Order(msgspec.Struct):
    """A request.

    Attributes:
        checked: Holds the name of a kind if its validator is to raise.
    """

    n: int
    at: str = ""
    kind: str = ""
    checked: Checked | None = None

    def __post_init__(self) -> None:
        if self.at == "__post_init__":
            fail(self.kind)


class Unwritable:
    """A result that raises as it is written, whatever way is tried."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def model_dump(self, *args: Any, **options: Any) -> Any:
        fail(self.kind)


class UnwritableArray:
    """An array whose `tolist` raises when it is written."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def tolist(self) -> Any:
        fail(self.kind)


def answer_to(order: Order) -> Any:
    """The answer that a request should have."""
    if order.at == "model_dump":
        return Unwritable(order.kind)
    if order.at == "tolist":
        return UnwritableArray(order.kind)
    return 10 * order.n


def order_of(body: dict[str, Any]) -> Order:
    """What an address of its own makes of a body."""
    if body.get("at") == "order_of":
        fail(body["kind"])
    return Order(body["n"])


async def order_of_later(body: dict[str, Any]) -> Order:
    """The same for a loop."""
    return order_of(body)


class Typed(Model):
    """A model that takes these types."""

    def predict(self, orders: list[Order]) -> list[Any]:
        return [answer_to(order) for order in orders]


class AsyncTyped(Model):
    """The same model for a loop."""

    async def predict(self, orders: list[Order]) -> list[Any]:
        return [answer_to(order) for order in orders]
