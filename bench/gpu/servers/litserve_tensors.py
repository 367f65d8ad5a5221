"""LitServe's server of `bench gpu`: an array as the file of a form in, raw float32 out.

    python litserve_tensors.py TASK PORT

It reads no raw bodies, so a form is its shortest way for bytes. BENCH_GPU_BATCH is the limit of a
batch, MAX_WAIT_TIME_MS how long it fills, LITSERVE_FRONTS the number of its HTTP processes.
"""

import os
import sys

import litserve
import numpy as np
from fastapi import Request, Response

from bench.gpu.tasks import TASKS, Runner, of_bytes

TASK, PORT = sys.argv[1], int(sys.argv[2])


class Tensors(litserve.LitAPI):
    def setup(self, device: str) -> None:
        self.runner = Runner(TASKS[TASK])

    def decode_request(self, request: Request) -> np.ndarray:
        return of_bytes(TASK, request["item"].file.read())

    def batch(self, inputs: list[np.ndarray]) -> list[np.ndarray]:
        return list(inputs)

    def predict(self, items: list[np.ndarray]) -> np.ndarray:
        return self.runner.call(items)

    def unbatch(self, output: np.ndarray) -> list[np.ndarray]:
        return list(output)

    def encode_response(self, output: np.ndarray) -> Response:
        return Response(output.tobytes(), media_type="application/octet-stream")


if __name__ == "__main__":
    api = Tensors(
        max_batch_size=int(os.environ["BENCH_GPU_BATCH"]),
        batch_timeout=int(os.environ["MAX_WAIT_TIME_MS"]) / 1e3,
    )
    server = litserve.LitServer(api, workers_per_device=int(os.environ.get("BENCH_GPU_WORKERS", "1")), timeout=60)
    server.run(
        host="127.0.0.1",
        port=PORT,
        generate_client_file=False,
        num_api_servers=int(os.environ.get("LITSERVE_FRONTS", "1")),
        log_level="warning",
        access_log=False,
    )
