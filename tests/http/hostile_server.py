"""A server that is easy to hurt: little memory for bodies, a raised recursion limit, a slow model, a broken route."""

from __future__ import annotations

import asyncio
import sys
import time
from typing import Any

import uvloop

from carpool import Model, Service, Stage
from carpool.http.app import App
from carpool.http.exchange import Exchange
from carpool.http.server import Server
from carpool.http.server_state import Limits

LARGEST = 2 * 2**20
ANSWER = 8 * 2**20
SLOW_S = 0.5


class Echo(Model):
    """Anything comes back as it is; one of its examples cannot be told."""

    examples = (1, object())

    def predict(self, xs: list[Any]) -> list[Any]:
        return xs


class Large(Model):
    """Its answer is larger than what anybody reads in one go."""

    def predict(self, xs: list[bytes]) -> list[bytes]:
        return [bytes(ANSWER)] * len(xs)


class Slow(Model):
    """A model that takes its time."""

    def predict(self, xs: list[Any]) -> list[Any]:
        time.sleep(SLOW_S)
        return xs


def one(x: Any) -> int:
    """Each item counts for one, but has to be read for that."""
    return 1


class Fragile(App):
    """Has an address at which something is raised."""

    def _make_routes(self, *of: Any) -> Any:
        return {**super()._make_routes(*of), b"/raise": {b"GET": (self._raise, None, None)}}

    def _raise(self, exchange: Exchange) -> None:
        raise SystemExit("not today")


def main() -> None:
    """Serve on a free port until a signal comes."""
    sys.setrecursionlimit(10**6)
    stages = {
        "echo": Stage(Echo, max_batch_size=64, run_in="thread", size=one),
        "large": Stage(Large, max_batch_size=4, run_in="thread"),
        "slow": Stage(Slow, max_batch_size=1000, run_in="thread"),
    }
    app = Fragile(*[Service(stage, name=name) for name, stage in stages.items()], max_body_bytes=LARGEST)
    server = Server(app, port=0, limits=Limits(body_bytes_in_flight=LARGEST))

    def ready() -> None:
        print(f"ready on http://127.0.0.1:{server.port}", file=sys.stderr, flush=True)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(server.run(ready))


if __name__ == "__main__":
    main()
