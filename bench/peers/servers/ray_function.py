"""Ray's side of `bench.peers.inprocess`; prints seconds per item as JSON.

    python -m bench.peers.servers.ray_function CASE SECONDS [WAIT_MS]

`@serve.batch` runs alone. It waits for 10 ms for a batch to fill, its own default, unless WAIT_MS
says otherwise. It asks its replica for its name and how many requests it may have at a time; there
is no replica, so a stand-in answers. Nothing else of Ray runs.
"""

import sys
from types import SimpleNamespace

from ray import serve
from ray.serve import context

from bench.tools.closed_loop import MAX_BATCH_SIZE, TASKS, AskAsync, double_async, main_of_tasks


def start() -> AskAsync:
    context._INTERNAL_REPLICA_CONTEXT = SimpleNamespace(
        _deployment_config=SimpleNamespace(max_ongoing_requests=TASKS),
        app_name="bench",
        deployment="bench",
        replica_tag="bench",
        replica_id=SimpleNamespace(unique_id="bench"),
    )
    waiting = {"batch_wait_timeout_s": float(sys.argv[3]) / 1e3} if len(sys.argv) > 3 else {}
    return serve.batch(max_batch_size=MAX_BATCH_SIZE, **waiting)(double_async)


if __name__ == "__main__":
    main_of_tasks(start, sys.argv[1], float(sys.argv[2]))
