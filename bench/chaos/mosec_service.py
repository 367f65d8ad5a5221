"""mosec with the witness as its model.

    python mosec_service.py WORKERS BATCH HANG_S --address ... --port ...

starts it on 127.0.0.1.
"""

import sys

from mosec import Server, Worker
from witness import Witness


class Witnessed(Worker):
    def __init__(self) -> None:
        self._witness = Witness()

    def forward(self, data: list[dict]) -> list[dict]:
        return self._witness.answer(data)


if __name__ == "__main__":
    workers, batch, hang_s = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    server = Server()
    server.append_worker(Witnessed, num=workers, max_batch_size=batch, max_wait_time=1, timeout=hang_s)
    server.run()
