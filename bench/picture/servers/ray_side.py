"""Ray Serve's server of the picture.  python ray_side.py {digits|texts} PORT"""

import signal
import sys
import tempfile

import ray
from ray import serve
from served_models import MODELS, SIZES
from starlette.requests import Request
from starlette.responses import JSONResponse

NAME = sys.argv[1]


# A replica is handed 5 requests at a time by default, and then no batch could grow beyond 5.
@serve.deployment(max_ongoing_requests=1024)
class Model:
    def __init__(self) -> None:
        self.model = MODELS[NAME]()

    @serve.batch(max_batch_size=SIZES[NAME])
    async def batch(self, items: list) -> list:
        return self.model.predict(items)

    async def __call__(self, request: Request) -> JSONResponse:
        return JSONResponse(await self.batch(await request.json()))


if __name__ == "__main__":
    ray.init(address="local", include_dashboard=False, _temp_dir=tempfile.gettempdir())
    serve.start(http_options={"host": "127.0.0.1", "port": int(sys.argv[2])})
    serve.run(Model.bind(), route_prefix="/predict")
    signal.sigwait({signal.SIGINT, signal.SIGTERM})
    ray.shutdown()
