"""async-batcher's side of `bench.peers.inprocess`; prints seconds per item as JSON.

    python -m bench.peers.servers.async_batcher_function CASE SECONDS [WAIT_MS]

It waits for up to 10 ms for more unless WAIT_MS says otherwise.
"""

import sys

from async_batcher.batcher import AsyncBatcher

from bench.tools.closed_loop import MAX_BATCH_SIZE, AskAsync, main_of_tasks


class Double(AsyncBatcher[int, int]):
    async def process_batch(self, batch: list[int]) -> list[int]:
        return [2 * number for number in batch]


def start() -> AskAsync:
    waiting = {"max_queue_time": float(sys.argv[3]) / 1e3} if len(sys.argv) > 3 else {}
    return Double(max_batch_size=MAX_BATCH_SIZE, **waiting).process


if __name__ == "__main__":
    main_of_tasks(start, sys.argv[1], float(sys.argv[2]))
