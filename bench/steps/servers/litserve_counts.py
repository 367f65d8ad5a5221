"""LitServe's servers: a generator for each batch, and its continuous loop.

    python litserve_counts.py {batches|continuous} PORT

A batch fills for 1 ms.
"""

import os
import sys
import time
from collections.abc import Iterator
from typing import Any

import litserve
from litserve.loops.continuous_batching_loop import ContinuousBatchingLoop, Output
from litserve.utils import LitAPIStatus

STEP_S = float(os.environ.get("BENCH_STEP_S", "0"))


def rest() -> None:
    if STEP_S:
        time.sleep(STEP_S)


class Batches(litserve.LitAPI):
    def setup(self, device: str) -> None:
        """LitServe wants one."""

    def decode_request(self, request: dict[str, int]) -> int:
        return request["n"]

    def predict(self, ns: list[int]) -> Iterator[list[str]]:
        for i in range(1, max(ns) + 1):
            rest()
            yield [f"data: {i}\n\n" if i <= n else "" for n in ns]

    def encode_response(self, outputs: Iterator[list[str]]) -> Any:
        yield from outputs

    def unbatch(self, outputs: Iterator[list[str]]) -> Iterator[list[str]]:
        yield from outputs


class Continuous(litserve.LitAPI):
    def setup(self, device: str) -> None:
        self.running: dict[str, list[int]] = {}

    def decode_request(self, request: dict[str, int]) -> int:
        return request["n"]

    def add_request(self, uid: str, request: dict[str, int]) -> None:
        self.running[uid] = [0, request["n"]]

    def has_capacity(self) -> bool:
        return len(self.running) < 64

    def has_active_requests(self) -> bool:
        return bool(self.running)

    def step(self, previous: Any) -> list[Output]:
        rest()
        outputs = []
        for uid, state in list(self.running.items()):
            state[0] += 1
            outputs.append(Output(uid, f"data: {state[0]}\n\n", LitAPIStatus.OK))
            if state[0] == state[1]:
                del self.running[uid]
                outputs.append(Output(uid, "", LitAPIStatus.FINISH_STREAMING))
        return outputs

    def encode_response(self, output: str) -> str:
        return output


if __name__ == "__main__":
    kind, port = sys.argv[1], int(sys.argv[2])
    if kind == "batches":
        api = Batches(max_batch_size=64, batch_timeout=0.001, stream=True)
    else:
        api = Continuous(max_batch_size=64, stream=True, loop=ContinuousBatchingLoop())
    server = litserve.LitServer(api)
    server.run(host="127.0.0.1", port=port, generate_client_file=False, log_level="warning", access_log=False)
