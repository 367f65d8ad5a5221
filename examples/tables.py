r"""Tables over HTTP: the CSV, JSON and Arrow bodies of a whole batch become one pandas frame.

carpool serve examples.tables:service
printf 'age,bmi,pressure\n0.03,0.06,0.02\n0.01,-0.04,0.0\n' > rows.csv
curl -H 'content-type: text/csv' --data-binary @rows.csv localhost:8000/predict

Run as a program, it compares one `read_csv` for all requests with one for each (without `columns`).
"""

import asyncio
import statistics
import time
from collections.abc import MutableMapping
from typing import Any

import pandas as pd
from sklearn.datasets import load_diabetes
from sklearn.linear_model import LinearRegression

import carpool
from carpool.frames import Pandas
from carpool.http import App

COLUMNS = {"age": "float64", "bmi": "float64", "pressure": "float64"}
CLIENTS, SECONDS = 64, 3.0
Message = MutableMapping[str, Any]


class EachByItself(Pandas):
    """Predicts for each row how far diabetes will have progressed in a year; reads each body alone.

    No columns are declared, so that it has to find the types in each body.
    """

    answer = "progression"
    examples = ({"age": 0.0, "bmi": 0.0, "pressure": 0.0},)

    def setup(self) -> None:
        data = load_diabetes(as_frame=True)
        known = data.data.rename(columns={"bp": "pressure"})[list(COLUMNS)]
        self.regression = LinearRegression().fit(known, data.target)

    def predict(self, frame: pd.DataFrame) -> pd.Series:
        return pd.Series(self.regression.predict(frame)).round(1)


class Progression(EachByItself):
    """Does the same, and declares its columns: all bodies of a batch are read at once."""

    columns = COLUMNS


service = carpool.Service(carpool.Stage(Progression, max_batch_size=64), name="progression")


async def ask(app: App, body: bytes) -> bytes:
    """Send one request, as an ASGI server would hand it over, and return the body of the answer."""
    sent: list[Message] = []
    messages: list[Message] = [{"type": "http.request", "body": body}]

    async def receive() -> Message:
        return messages.pop() if messages else await asyncio.Future()

    async def send(message: Message) -> None:
        sent.append(message)

    headers = [(b"content-type", b"text/csv")]
    await app({"type": "http", "method": "POST", "path": "/predict", "headers": headers}, receive, send)
    assert sent[0]["status"] == 200, sent
    answer: bytes = sent[1]["body"]
    return answer


async def measure(model: type[Pandas]) -> tuple[float, float]:
    """Measure requests per second and the median latency in ms; clients ask again once answered."""
    app = App(carpool.Service(carpool.Stage(model, max_batch_size=64), name="measured"))
    await app.start()
    took: list[float] = []

    async def client(n: int) -> None:
        body = b"age,bmi,pressure\n0.0%d,0.06,0.02\n" % n
        while time.perf_counter() < end:
            began = time.perf_counter()
            await ask(app, body)
            took.append(1000 * (time.perf_counter() - began))

    began = time.perf_counter()
    end = began + SECONDS
    await asyncio.gather(*[client(n) for n in range(CLIENTS)])
    rate = len(took) / (time.perf_counter() - began)
    await app.stop()
    return rate, statistics.median(took)


async def main() -> None:
    for name, model in (("one read for all", Progression), ("each by itself", EachByItself)):
        rate, p50 = await measure(model)
        print(f"{name}: {rate:.0f} requests/s, p50 {p50:.1f} ms")


if __name__ == "__main__":
    asyncio.run(main())
