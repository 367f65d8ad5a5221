"""carpool in an ordinary FastAPI app: a batched function and a service, behind routes with a key.

pip install fastapi uvicorn
API_KEY=mine uvicorn examples.fastapi_app:app
curl -H 'X-API-Key: mine' --json '[0.03,0.05,0.06,0.02,-0.04,-0.03,-0.04,-0.002,0.02,-0.01]' localhost:8000/progression
curl -H 'X-API-Key: mine' --json "$(python -c 'print([0.0] * 64)')" localhost:8000/digits
"""

import asyncio
import os
import secrets
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Annotated

from fastapi import Body, Depends, FastAPI, HTTPException, Request
from fastapi.security import APIKeyHeader
from sklearn.datasets import load_diabetes
from sklearn.linear_model import LinearRegression

import carpool
from examples.digits import service as digits

Row = Annotated[list[float], Body(min_length=10, max_length=10)]
Image = Annotated[list[float], Body(min_length=64, max_length=64)]

api_key = os.environ.get("API_KEY") or secrets.token_hex()
regression = LinearRegression().fit(*load_diabetes(return_X_y=True))
sizes: list[int] = []


@carpool.batch(max_batch_size=100, timeout_s=5.0)
async def progression(rows: list[list[float]]) -> list[float]:
    """Predict how far diabetes will have progressed; one call serves all waiting requests."""
    sizes.append(len(rows))
    answers: list[float] = (await asyncio.to_thread(regression.predict, rows)).tolist()
    return answers


def check_key(key: Annotated[str, Depends(APIKeyHeader(name="X-API-Key"))]) -> None:
    """Refuse a request with a wrong key; FastAPI refuses one without."""
    if not secrets.compare_digest(key.encode(), api_key.encode()):
        raise HTTPException(401, "this key is not known")


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncGenerator[None]:
    """Start the service, in its worker processes, before the first request; stop it at the end."""
    async with digits.run_async() as app.state.digits:
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


@app.get("/sizes")
async def batch_sizes() -> list[int]:
    """Return how many requests shared each call so far."""
    return sizes
