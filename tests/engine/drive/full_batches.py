"""Items that are sure to share a batch: a stage that waits for all of them, and callers that bring them at once."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import carpool
from carpool import Stage


def together(service: Any, items: list[Any]) -> list[Any]:
    """The answers to items that come at the same time; an error for one that fails."""

    def ask(item: Any) -> Any:
        try:
            return service.predict(item)
        except carpool.CarpoolError as error:
            return error

    with ThreadPoolExecutor(len(items)) as pool:
        return list(pool.map(ask, items))


def stage(model: Any, n: int, **settings: Any) -> Stage:
    """A stage that waits until `n` items are there."""
    return Stage(model, max_batch_size=n, policy="static", max_queue_delay_s=20.0, **settings)
