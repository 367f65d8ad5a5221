"""mosec's server of `bench.peers.http`.

    python mosec_server.py {echo|sleep|raw} --address 127.0.0.1 --port PORT

mosec reads its options from the command line itself and ignores what it does not know, so the
waiting time comes by MAX_WAIT_TIME_MS. Without it mosec keeps its default, which is 10 ms.
"""

import os
import sys

from mosec import Server, Worker
from sleeping import double_slowly


class Double(Worker):
    def forward(self, data: list[dict[str, float]]) -> list[dict[str, float]]:
        return [{"y": 2 * item["x"]} for item in data]


class DoubleSlowly(Worker):
    def forward(self, data: list[dict[str, float]]) -> list[dict[str, float]]:
        return double_slowly(data)


class Identity(Worker):
    resp_mime_type = "application/octet-stream"

    def deserialize(self, data: bytes) -> bytes:
        return data

    def forward(self, data: bytes) -> bytes:
        return data

    def serialize(self, data: bytes) -> bytes:
        return data


if __name__ == "__main__":
    waiting = {"max_wait_time": int(ms)} if (ms := os.environ.get("MAX_WAIT_TIME_MS")) else {}
    server = Server()
    if sys.argv[1] != "raw":
        model = Double if sys.argv[1] == "echo" else DoubleSlowly
        server.append_worker(model, max_batch_size=64, **waiting)
    else:
        # Single items: for a lone connection a batch would only add the waiting time.
        server.append_worker(Identity)
    server.run()
