"""The same models as deployments of Ray Serve, batched by `@serve.batch`."""

from __future__ import annotations

import asyncio
from typing import Any

from ray import serve

from bench.cluster.models import BATCH, BATCH_S, ITEM_S


class Doubling:
    """Doubles numbers; by its handle a number, over HTTP one as JSON.

    Args:
        takes_time: Whether it takes as long as a model would.
    """

    def __init__(self, takes_time: bool) -> None:
        self.takes_time = takes_time

    async def wait_for(self, seconds: float) -> None:
        """Have batches wait for so long from now on, if they are not full."""
        self.batch.set_batch_wait_timeout_s(seconds)

    @serve.batch(max_batch_size=BATCH, batch_wait_timeout_s=0.0)
    async def batch(self, xs: list[float]) -> list[float]:
        if self.takes_time:
            await asyncio.sleep(BATCH_S + ITEM_S * len(xs))
        return [2 * x for x in xs]

    async def __call__(self, request: Any) -> Any:
        number = request if isinstance(request, float) else await request.json()
        return await self.batch(number)


def deploy(takes_time: bool, replicas: int) -> Any:
    """Deploy one with as many replicas as the other side has workers, and return its handle."""
    options = {"max_ongoing_requests": 2048, "num_replicas": replicas, "ray_actor_options": {"num_cpus": 0}}
    deployment = serve.deployment(Doubling, **options)
    return serve.run(deployment.bind(takes_time), name="doubling", route_prefix="/predict")
