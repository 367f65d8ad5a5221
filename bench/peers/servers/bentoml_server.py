"""BentoML's server of `bench.peers.http`.

    python -m bentoml serve bentoml_server:{Echo|Sleep|Raw} --working-dir . --host ... --port ...

A batchable API takes and returns a list, over HTTP as well:
{"items": [{"x": 1.5}]} -> [{"y": 3.0}].
"""

from typing import Annotated

import bentoml
from bentoml.validators import ContentType
from sleeping import double_slowly


@bentoml.service
class Echo:
    @bentoml.api(batchable=True, max_batch_size=64)
    def predict(self, items: list[dict[str, float]]) -> list[dict[str, float]]:
        return [{"y": 2 * item["x"]} for item in items]


@bentoml.service
class Sleep:
    @bentoml.api(batchable=True, max_batch_size=64, max_latency_ms=60)
    def predict(self, items: list[dict[str, float]]) -> list[dict[str, float]]:
        return double_slowly(items)


@bentoml.service
class Raw:
    @bentoml.api
    def predict(self, body: bytes, /) -> Annotated[bytes, ContentType("application/octet-stream")]:
        return body
