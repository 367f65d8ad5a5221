"""carpool in an ordinary FastAPI app: a batched function and a service, behind routes with a key.

pip install fastapi uvicorn 'carpool[metrics]'
API_KEY=mine uvicorn examples.fastapi_app:app
curl -H 'X-API-Key: mine' --json '[0.03,0.05,0.06,0.02,-0.04,-0.03,-0.04,-0.002,0.02,-0.01]' localhost:8000/progression
curl -H 'X-API-Key: mine' --json "$(python -c 'print([0.0] * 64)')" localhost:8000/digits
"""

import os
import secrets
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Annotated

from fastapi import Body, Depends, FastAPI, HTTPException, Request
from fastapi.responses import PlainTextResponse, Response
from fastapi.security import APIKeyHeader
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from sklearn.datasets import load_diabetes
from sklearn.linear_model import LinearRegression

import carpool
from examples.digits import service as digits

Row = Annotated[list[float], Body(min_length=10, max_length=10)]
Image = Annotated[list[float], Body(min_length=64, max_length=64)]

api_key = os.environ.get("API_KEY") or secrets.token_hex()
regression = LinearRegression().fit(*load_diabetes(return_X_y=True))
metrics = CollectorRegistry()


@carpool.batch(max_batch_size=100, timeout_s=5.0, run_in="thread")
def progression(rows: list[list[float]]) -> list[float]:
    """Predict how far diabetes will have progressed; one call serves all waiting requests."""
    answers: list[float] = regression.predict(rows).tolist()
    return answers


def check_key(key: Annotated[str, Depends(APIKeyHeader(name="X-API-Key"))]) -> None:
    """Refuse a request with a wrong key; FastAPI refuses one without."""
    if not secrets.compare_digest(key.encode(), api_key.encode()):
        raise HTTPException(401, "this key is not known")


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncGenerator[None]:
    """Start the service, in its worker processes, before the first request; stop it at the end."""
    async with digits.run_async() as app.state.digits:
        metrics.register(carpool.collector(progression, app.state.digits))
        yield


app = FastAPI(lifespan=lifespan, dependencies=[Depends(check_key)])
carpool.http.install_error_handlers(app)  # a queue that is full is 429 with Retry-After, and so on


@app.post("/progression")
async def answer(row: Row) -> float:
    """Answer like any other route; FastAPI checks the row."""
    return await progression(row)


@app.post("/digits")
async def digit(image: Image, request: Request) -> int:
    """Say which digit an image shows: the worker answers many of these requests with one call."""
    found: int = await request.app.state.digits.predict(image)
    return found


@app.get("/stats", response_class=PlainTextResponse)
async def stats() -> str:
    """Tell what the batched function has done so far, as a table: calls, batch sizes, times."""
    return str(progression.stats())


@app.get("/metrics")
async def scrape() -> Response:
    """Answer Prometheus, about the function and the service, beside metrics of the app's own."""
    return Response(generate_latest(metrics), media_type=CONTENT_TYPE_LATEST)
