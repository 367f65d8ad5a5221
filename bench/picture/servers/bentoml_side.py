"""BentoML's server of the picture.  python -m bentoml serve bentoml_side:{Digits|Texts}"""

import bentoml
from served_models import MODELS, SIZES


@bentoml.service(traffic={"timeout": 60})
class Digits:
    def __init__(self) -> None:
        self.model = MODELS["digits"]()

    @bentoml.api(batchable=True, max_batch_size=SIZES["digits"], max_latency_ms=60_000)
    def predict(self, items: list[list[float]]) -> list[int]:
        return self.model.predict(items)


@bentoml.service(traffic={"timeout": 60})
class Texts:
    def __init__(self) -> None:
        self.model = MODELS["texts"]()

    @bentoml.api(batchable=True, max_batch_size=SIZES["texts"], max_latency_ms=60_000)
    def predict(self, items: list[str]) -> list[list[float]]:
        return self.model.predict(items)
