"""Document 5's experiment: one `read_csv` for a hundred CSV bodies against one for each.

After "Understanding BentoML adaptive micro batching", section 3. Both sides are carpool's server
with batches of up to 100 and the same model; only `decode` differs.
"""

from __future__ import annotations

from bench.peers.contestants import Exchange, Launch, serving
from bench.tools import wrk
from bench.tools.figures import Facts
from bench.tools.server import NotServing, running
from bench.tools.side import SideFailed

TITLE = "CSV rows over HTTP, 64 connections"
CONNECTIONS = 64
FIELDS = 10
WARM_UP_S = 1
SERVICES = {"document": "a_parse_each", "carpool": "one_parse"}


def csv_server(service: str) -> Launch:
    body = ",".join(f"0.{i}" for i in range(FIELDS)).encode()
    exchange = Exchange(body=body, answer=b"%.3f\n" % sum(i / 10 for i in range(FIELDS)), content_type="text/csv")
    return serving(f"bench.documents.csv_models:{service}", exchange)


def measure(side: str, seconds: float) -> Facts:
    """One turn of one side, with a server of its own."""
    try:
        with running(csv_server(SERVICES[side])) as server:
            wrk.run(server, connections=CONNECTIONS, seconds=WARM_UP_S)
            run = wrk.run(server, connections=CONNECTIONS, seconds=max(1, round(seconds)))
    except NotServing as problem:
        raise SideFailed(f"{TITLE}, {side}: {problem}") from None
    if run.failed:
        raise SideFailed(f"{TITLE}, {side}: {run.failed} of {run.answers} answers failed")
    return {
        "seconds_per_item": 1 / run.requests_per_s,
        "cpu_s_per_item": run.cpu_per_request_s,
        "p50_s": run.p50_s,
        "p99_s": run.p99_s,
    }
