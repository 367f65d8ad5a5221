"""Streams of a model whose steps take no time, read side by side by tasks of one process.

    python -m bench.steps.crowd STREAMS SECONDS

prints seconds per part as JSON. Only public names are used, so that a former tree can run it, too.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from typing import Any

import carpool
from bench.steps.clockwork import Clockwork

WARM_UP_S = 0.5
STEPS = 10**9


async def read(handle: Any, until: float) -> int:
    """Count the parts of one stream until the time is up."""
    parts = 0
    async with handle.predict_stream({"steps": STEPS}) as stream:
        async for _ in stream:
            parts += 1
            if time.perf_counter() > until:
                break
    return parts


async def measure(handle: Any, streams: int, seconds: float) -> float:
    """Return the seconds that a part takes."""
    began = time.perf_counter()
    counts = await asyncio.gather(*[read(handle, began + seconds) for _ in range(streams)])
    return (time.perf_counter() - began) / sum(counts)


async def main(streams: int, seconds: float) -> None:
    """Run a service, and print the figure."""
    async with carpool.Service(carpool.Stage(Clockwork, max_rows=streams)).run_async() as handle:
        await measure(handle, streams, WARM_UP_S)
        print(json.dumps({"seconds_per_item": await measure(handle, streams, seconds)}))


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), float(sys.argv[2])))
