"""Ray Serve: `@serve.batch` over a generator.  python ray_counts.py PORT"""

import asyncio
import os
import signal
import sys
import tempfile
from collections.abc import AsyncIterator
from typing import Any

import ray
from ray import serve
from starlette.requests import Request
from starlette.responses import StreamingResponse

STEP_S = float(os.environ.get("BENCH_STEP_S", "0"))


# A replica is handed 5 requests at a time by default, and then no batch could grow beyond 5.
@serve.deployment(max_ongoing_requests=256)
class Counts:
    @serve.batch(max_batch_size=64)
    async def count(self, ns: list[int]) -> AsyncIterator[list[Any]]:
        for i in range(1, max(ns) + 1):
            await asyncio.sleep(STEP_S)
            yield [f"data: {i}\n\n" if i <= n else StopIteration for n in ns]

    async def __call__(self, request: Request) -> StreamingResponse:
        return StreamingResponse(self.count((await request.json())["n"]), media_type="text/event-stream")


if __name__ == "__main__":
    ray.init(address="local", include_dashboard=False, _temp_dir=tempfile.gettempdir())
    serve.start(http_options={"host": "127.0.0.1", "port": int(sys.argv[1])})
    serve.run(Counts.bind(), route_prefix="/predict")
    signal.sigwait({signal.SIGINT, signal.SIGTERM})
    ray.shutdown()
