"""The load generator: one run of `wrk` against one server.

wrk sends the next request of a connection when the answer to the last one is there (a closed loop),
in one thread unless more are asked for.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.tools.server import Server

# wrk counts every answer as a request and a status of 400 or more as an error besides.
SCRIPT = """
wrk.method = "POST"
%(headers)s
local bodies = {}
for i = 1, %(bodies)d do
  local file = io.open("%(folder)s/" .. i, "rb")
  bodies[i] = file:read("*all")
  file:close()
end
wrk.body = bodies[1]

local turn = 0
if #bodies > 1 then
  request = function()
    turn = turn %% #bodies + 1
    return wrk.format(nil, nil, nil, bodies[turn])
  end
end

done = function(summary, latency, requests)
  local e = summary.errors
  io.write(string.format(
    '\\n{"answers": %%d, "duration_us": %%d, "p50_us": %%d, "p99_us": %%d, "bad": %%d, "broken": %%d}\\n',
    summary.requests, summary.duration, latency:percentile(50), latency:percentile(99),
    e.status, e.connect + e.read + e.write + e.timeout))
end
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What one run showed."""

    answers: int
    duration_s: float
    p50_s: float
    p99_s: float
    cpu_s: float  # of the server's whole process tree
    failed: int  # answers with a status of 400 or more, and connections that broke or timed out

    @property
    def requests_per_s(self) -> float:
        return max(self.answers - self.failed, 0) / self.duration_s

    @property
    def cpu_per_request_s(self) -> float:
        return self.cpu_s / self.answers if self.answers else float("nan")


def missing() -> str:
    """What to do where wrk is not installed; empty where it is."""
    return "" if shutil.which("wrk") else "wrk is not installed; Debian and Ubuntu have it: apt-get install wrk"


def run(server: Server, *, connections: int, seconds: int, threads: int = 1, bodies: Sequence[bytes] = ()) -> Run:
    """Load the server for so many seconds.

    Args:
        server: Who is asked, with the body and the headers of its exchange.
        connections: How many requests are open at a time.
        seconds: How long.
        threads: Of wrk, which share the connections.
        bodies: What is sent in turn, instead of the one body of the exchange.
    """
    exchange = server.launch.exchange
    with tempfile.TemporaryDirectory(prefix="cb-wrk-") as folder:
        sent = bodies or [exchange.body]
        for number, body in enumerate(sent, 1):
            Path(folder, str(number)).write_bytes(body)
        script = Path(folder, "post.lua")
        headers = {"Content-Type": exchange.content_type, "Accept": exchange.content_type, **exchange.headers}
        lines = "\n".join([f'wrk.headers["{name}"] = "{value}"' for name, value in headers.items()])
        script.write_text(SCRIPT % {"headers": lines, "folder": folder, "bodies": len(sent)})
        # By default wrk calls an answer that takes 2 s a failure; the slowest peers need that long.
        pace = [f"-t{threads}", f"-c{connections}", f"-d{seconds}s", "--timeout", "10s"]
        load = ["wrk", *pace, "-s", str(script), server.url]
        cpu_before = server.cpu_s()
        report = subprocess.run(load, check=True, capture_output=True, text=True).stdout
        cpu_s = server.cpu_s() - cpu_before
    facts = json.loads(report.splitlines()[-1])
    return Run(
        answers=facts["answers"],
        duration_s=facts["duration_us"] / 1e6,
        p50_s=facts["p50_us"] / 1e6,
        p99_s=facts["p99_us"] / 1e6,
        cpu_s=cpu_s,
        failed=facts["bad"] + facts["broken"],
    )
