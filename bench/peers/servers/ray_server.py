"""Ray Serve's server of `bench.peers.http`.  python ray_server.py {echo|raw} PORT"""

import signal
import sys
import tempfile

import ray
from ray import serve
from starlette.requests import Request
from starlette.responses import Response


# A replica is handed 5 requests at a time by default, and then no batch could grow beyond 5. Ray's
# advice is to raise that limit with the batch size; 256 connections are the most that are opened.
@serve.deployment(max_ongoing_requests=256)
class Echo:
    @serve.batch(max_batch_size=64)
    async def double(self, items: list[dict[str, float]]) -> list[dict[str, float]]:
        return [{"y": 2 * item["x"]} for item in items]

    async def __call__(self, request: Request) -> dict[str, float]:
        return await self.double(await request.json())


@serve.deployment
class Raw:
    async def __call__(self, request: Request) -> Response:
        return Response(await request.body(), media_type="application/octet-stream")


if __name__ == "__main__":
    workload, port = sys.argv[1], int(sys.argv[2])
    # Sockets, logs and the object store's files go to TMPDIR, which the harness removes.
    ray.init(address="local", include_dashboard=False, _temp_dir=tempfile.gettempdir())
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    serve.run({"echo": Echo, "raw": Raw}[workload].bind(), route_prefix="/predict")
    signal.sigwait({signal.SIGINT, signal.SIGTERM})
    ray.shutdown()
