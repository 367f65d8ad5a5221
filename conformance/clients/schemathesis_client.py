"""schemathesis over carpool's own OpenAPI document: no 5xx, and every answer as documented."""

import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

from calls import URL, call, tell


@call
def run_over_the_document():
    command = [
        str(Path(sys.executable).with_name("schemathesis")),
        "run",
        f"{URL}/openapi.json",
        "--checks",
        "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance",
        "--max-examples",
        "10",
        "--header",
        "X-Request-Timeout-Ms: 20000",  # a time-out of microseconds is answered 504, as documented
        "--exclude-path-regex",
        "busy",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout.partition("FAILURES")[2]


tell("schemathesis", version("schemathesis"))
