"""mosec's server of `bench.shapes.http`.

    python mosec_embed.py --address 127.0.0.1 --port PORT

The batch limit and the waiting time in ms come by MAX_BATCH_SIZE and MAX_WAIT_TIME_MS, since mosec
reads its options from the command line itself.
"""

import os

from minilm import encode, load
from mosec import Server, Worker


class Embed(Worker):
    def __init__(self) -> None:
        self.model = load()

    def forward(self, data: list[str]) -> list[list[float]]:
        return encode(self.model, data)


if __name__ == "__main__":
    server = Server()
    server.append_worker(
        Embed,
        max_batch_size=int(os.environ["MAX_BATCH_SIZE"]),
        max_wait_time=int(os.environ["MAX_WAIT_TIME_MS"]),
        timeout=60,
    )
    server.run()
