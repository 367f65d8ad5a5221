"""mosec's `SSEWorker`: a batch stays until its longest answer ends.

    python mosec_counts.py --address 127.0.0.1 --port PORT

MAX_WAIT_TIME_MS is how long it waits for a batch to fill; 10 by default, as mosec's own.
"""

import os
import time
from typing import Any

from mosec import Server, SSEWorker

STEP_S = float(os.environ.get("BENCH_STEP_S", "0"))


class Counts(SSEWorker):
    def forward(self, data: list[dict[str, int]]) -> list[dict[str, Any]]:
        for i in range(1, max(item["n"] for item in data) + 1):
            if STEP_S:
                time.sleep(STEP_S)
            for index, item in enumerate(data):
                if i <= item["n"]:
                    self.send_stream_event(str(i), index=index)
        return [{} for _ in data]


if __name__ == "__main__":
    server = Server()
    waiting = {"max_wait_time": int(ms)} if (ms := os.environ.get("MAX_WAIT_TIME_MS")) else {}
    server.append_worker(Counts, max_batch_size=64, **waiting)
    server.run()
