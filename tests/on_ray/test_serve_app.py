"""A service as an application of Ray Serve: over HTTP and by handles, while replicas come and go."""

from __future__ import annotations

import json
import os
import signal
import socket
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

import carpool
from tests.support.pressing import Callers
from tests.support.processes import alive
from tests.support.waiting import wait_until

PROGRAM = "tests.on_ray.program:service"


@pytest.fixture(scope="module")
def address(cluster: Any) -> Iterator[str]:
    """Where Serve listens."""
    serve = pytest.importorskip("ray.serve")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    # One proxy: nodes on one machine would share its port, and Serve ends those of nodes without a replica.
    serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": port})
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        serve.shutdown()


def ask(address: str, x: Any) -> Any:
    request = urllib.request.Request(f"{address}/predict", json.dumps(x).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.loads(response.read())


class Handle:
    """Asks by HTTP what `Callers` ask."""

    def __init__(self, address: str) -> None:
        self.address = address

    def predict(self, x: Any) -> Any:
        return ask(self.address, x)


def pids_of(handle: Any) -> set[int]:
    """The workers that answer requests which a handle of Serve sends at once."""
    responses = [handle.predict.remote(x) for x in range(16)]
    return {response.result(timeout_s=30)["pid"] for response in responses}


@pytest.mark.timeout(300)
def test_an_app_of_ray_serve(address: str) -> None:
    """A service answers over Serve's HTTP and by its handles. A worker that is killed under load is
    replaced by its replica, and no request fails; the workers of a deployment end with it.
    """
    from ray import serve

    handle = serve.run(carpool.ray.app(PROGRAM, replicas=1), name="place")
    assert ask(address, 7)["x"] == 7
    assert handle.predict.remote(8).result(timeout_s=30)["x"] == 8
    with Callers(Handle(address), lambda answer: (answer["pid"], answer["x"]), n=4) as callers:
        callers.go_on(20)
        os.kill(next(iter(callers.pids)), signal.SIGKILL)
        callers.go_on(50)
    assert callers.errors == []
    serve.delete("place")
    wait_until(lambda: not any(map(alive, callers.pids)), 60)


@pytest.mark.timeout(300)
def test_a_rolling_update(address: str) -> None:
    """Under load an application goes from one replica to two of a new version, and no request fails.

    All four workers of the new ones are asked by the handle, since the proxy sends requests to a
    replica of its own node where there is one.
    """
    from ray import serve

    serve.run(carpool.ray.app(PROGRAM, replicas=1), name="place")
    with Callers(Handle(address), lambda answer: (answer["pid"], answer["x"]), n=4) as callers:
        callers.go_on(20)
        before = set(callers.pids)
        handle = serve.run(carpool.ray.app(PROGRAM, replicas=2), name="place")
        callers.pids.clear()
        callers.go_on(20)
        after: set[int] = set()
        wait_until(lambda: after.update(pids_of(handle)) or len(after) == 4, 60)
    assert callers.errors == []
    assert not (callers.pids | after) & before
    serve.delete("place")


def test_what_names_no_service() -> None:
    """A target that is none is refused where the app is made."""
    pytest.importorskip("ray.serve")
    with pytest.raises(ValueError, match="write module:attribute"):
        carpool.ray.app("tests.on_ray.program")
    with pytest.raises(ValueError, match=r"is a type, not a carpool\.Service"):
        carpool.ray.app("tests.on_ray.program:Place")
