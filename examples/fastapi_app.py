"""carpool in an ordinary FastAPI app: a batched function behind a route, and a mounted service.

pip install fastapi uvicorn
uvicorn examples.fastapi_app:app
curl --json '[0.03,0.05,0.06,0.02,-0.04,-0.03,-0.04,-0.002,0.02,-0.01]' localhost:8000/progression
curl --json "$(python -c 'print([0.0] * 64)')" localhost:8000/digits/predict
"""

import asyncio
from typing import Annotated

from fastapi import Body, FastAPI
from sklearn.datasets import load_diabetes
from sklearn.linear_model import LinearRegression

import carpool
from examples.digits import service as digits

Row = Annotated[list[float], Body(min_length=10, max_length=10)]

regression = LinearRegression().fit(*load_diabetes(return_X_y=True))
sizes: list[int] = []


@carpool.batch(max_batch_size=100, timeout_s=5.0)
async def progression(rows: list[list[float]]) -> list[float]:
    """Predict how far diabetes will have progressed; one call serves all waiting requests."""
    sizes.append(len(rows))
    answers: list[float] = (await asyncio.to_thread(regression.predict, rows)).tolist()
    return answers


digits_app = carpool.http.App(digits)  # in worker processes of its own
app = FastAPI(lifespan=carpool.lifespan(digits_app))  # starts them before the first request, stops them at the end
app.mount("/digits", digits_app)


@app.post("/progression")
async def answer(row: Row) -> float:
    """Answer like any other route; FastAPI checks the row."""
    return await progression(row)


@app.get("/sizes")
async def batch_sizes() -> list[int]:
    """Return how many requests shared each call so far."""
    return sizes
