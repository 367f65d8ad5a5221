"""Starlette on uvicorn: a generator per request, no batching.  python starlette_counts.py PORT"""

import asyncio
import os
import sys
from collections.abc import AsyncIterator

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.routing import Route

STEP_S = float(os.environ.get("BENCH_STEP_S", "0"))


async def events(n: int) -> AsyncIterator[str]:
    for i in range(1, n + 1):
        if STEP_S:
            await asyncio.sleep(STEP_S)
        yield f"data: {i}\n\n"


async def predict(request: Request) -> StreamingResponse:
    return StreamingResponse(events((await request.json())["n"]), media_type="text/event-stream")


if __name__ == "__main__":
    app = Starlette(routes=[Route("/predict", predict, methods=["POST"])])
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning", access_log=False)
