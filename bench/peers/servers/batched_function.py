"""batched's side of `bench.peers.inprocess`; prints seconds per item as JSON.

    python -m bench.peers.servers.batched_function CASE SECONDS [WAIT_MS]

It looks for a full batch every 5 ms unless WAIT_MS says otherwise.
"""

import sys

from batched import aio

from bench.tools.closed_loop import MAX_BATCH_SIZE, AskAsync, double_async, main_of_tasks


def start() -> AskAsync:
    waiting = {"timeout_ms": float(sys.argv[3])} if len(sys.argv) > 3 else {}
    return aio.dynamically(batch_size=MAX_BATCH_SIZE, **waiting)(double_async)


if __name__ == "__main__":
    main_of_tasks(start, sys.argv[1], float(sys.argv[2]))
