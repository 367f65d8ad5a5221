"""A web page that shows characters as they come: FastAPI has the page, and the model beside it.

pip install fastapi uvicorn
uvicorn examples.page:app       then open http://localhost:8000

The page and the model have one origin, so the browser needs no CORS headers.
"""

import time
from pathlib import Path

from fastapi import FastAPI
from fastapi.responses import FileResponse

import carpool
from examples.decoder import SLOTS, Line, Recite


class Unhurried(Recite):
    """Takes as long for a step as a model that is too large for this page."""

    def step(self, lines: list[Line]) -> list[str | carpool.End]:
        time.sleep(0.05)
        return super().step(lines)


service = carpool.Service(carpool.Stage(Unhurried, max_batch_size=SLOTS), name="recite")
model = carpool.http.App(service)
app = FastAPI(lifespan=carpool.lifespan(model))
app.mount("/model", model)


@app.get("/")
async def page() -> FileResponse:
    """Return the page, which asks `model/predict` for a stream of events."""
    return FileResponse(Path(__file__).with_name("page.html"))
