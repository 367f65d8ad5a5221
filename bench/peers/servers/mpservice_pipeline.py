"""mpservice's side of `bench.peers.process`; prints seconds per item as JSON.

    python -m bench.peers.servers.mpservice_pipeline CASE SECONDS

There is one worker process per stage, and everything else is at mpservice's defaults: with a batch
size it waits for up to 10 ms for more.
"""

import json
import sys
from collections.abc import Iterable
from typing import Any, cast

from mpservice.mpserver import ProcessServlet, SequentialServlet, Server, Worker

from bench.tools.stopwatch import Case, seconds_per_item


class DoubleAll(Worker):
    def call(self, x: list[int]) -> list[int]:
        return [2 * number for number in x]


class DoubleOne(Worker):
    def call(self, x: int) -> int:
        return 2 * x


class Touch(Worker):
    def call(self, x: Any) -> Any:
        x[0] += 1
        return x


class Pipeline:
    def __init__(self, server: Server) -> None:
        self.server = server

    def call(self, x: Any) -> Any:
        return self.server.call(x)

    def stream(self, xs: Iterable[Any]) -> Any:
        return self.server.stream(xs)


def main(case: Case, seconds: float) -> None:
    if case.startswith("arrays"):
        servlet = SequentialServlet(ProcessServlet(Touch), ProcessServlet(Touch))
    elif case.endswith("batched"):
        servlet = ProcessServlet(DoubleAll, batch_size=64)
    else:
        servlet = ProcessServlet(DoubleOne)
    with Server(servlet) as server:
        result = seconds_per_item(case, Pipeline(server), seconds)
    print(json.dumps({"seconds_per_item": result}))


if __name__ == "__main__":
    main(cast(Case, sys.argv[1]), float(sys.argv[2]))
