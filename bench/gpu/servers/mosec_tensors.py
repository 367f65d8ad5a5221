"""mosec's server of `bench gpu`: raw bytes of an array in, raw float32 out.

    python mosec_tensors.py TASK --address 127.0.0.1 --port PORT

mosec reads its options from the command line itself. MAX_WAIT_TIME_MS is how long a batch fills,
BENCH_GPU_BATCH its limit, BENCH_GPU_WORKERS the number of processes.
"""

import os
import sys

import numpy as np
from mosec import Server, Worker

from bench.gpu.tasks import TASKS, Runner, of_bytes

TASK = sys.argv[1]


class Tensors(Worker):
    resp_mime_type = "application/octet-stream"

    def __init__(self) -> None:
        super().__init__()
        self.runner = Runner(TASKS[TASK])

    def deserialize(self, data: bytes) -> np.ndarray:
        return of_bytes(TASK, data)

    def forward(self, data: list[np.ndarray]) -> list[np.ndarray]:
        return list(self.runner.call(data))

    def serialize(self, data: np.ndarray) -> bytes:
        return data.tobytes()


class Double(Worker):
    def forward(self, data: list[dict[str, float]]) -> list[dict[str, float]]:
        return [{"y": 2 * item["x"]} for item in data]


if __name__ == "__main__":
    server = Server()
    server.append_worker(
        Double if TASK == "double" else Tensors,
        num=int(os.environ.get("BENCH_GPU_WORKERS", "1")),
        max_batch_size=int(os.environ["BENCH_GPU_BATCH"]),
        max_wait_time=int(os.environ["MAX_WAIT_TIME_MS"]),
    )
    server.run()
