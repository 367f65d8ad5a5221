"""carpool's side of `bench.peers.process`; prints seconds per item as JSON.

    python -m bench.peers.servers.carpool_pipeline CASE SECONDS

There is one worker process per stage, and everything else is at carpool's defaults.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from typing import Any, cast

from bench.peers.servers import carpool_models
from bench.tools.stopwatch import Case, seconds_per_item


class Pipeline:
    def __init__(self, service: Any) -> None:
        self.service = service

    def call(self, x: Any) -> Any:
        return self.service.predict(x)

    def stream(self, xs: Iterable[Any]) -> Any:
        return self.service.stream(xs)


def main(case: Case, seconds: float) -> None:
    if case.startswith("arrays"):
        declared = carpool_models.arrays
    elif case.endswith("batched"):
        declared = carpool_models.double
    else:
        declared = carpool_models.double_single
    with declared.run() as service:
        result = seconds_per_item(case, Pipeline(service), seconds)
    print(json.dumps({"seconds_per_item": result}))


if __name__ == "__main__":
    main(cast(Case, sys.argv[1]), float(sys.argv[2]))
