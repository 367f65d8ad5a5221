"""Bulk beside single requests, and beside the model alone.

* `trivial`: `{"x": 1.5}` -> `{"y": 3.0}`. Lines of one bulk request take turns with single requests
  on 64 connections, which `wrk` makes.
* `digits`: scikit-learn's classifier of handwritten digits. Lines of one bulk request take turns
  with `offline`, a program that reads the same lines, calls the same model with 64 at a time, and
  writes the answers.

Both models run in one worker process, with batches of up to 64. CPU is that of the server's whole
process tree, per item; the client's is not in it. A ratio is the median over the rounds.
"""

from __future__ import annotations

import argparse
import http.client
import itertools
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass

import msgspec
from sklearn.datasets import load_digits

from bench.peers.contestants import Exchange, serving
from bench.tools import options, wrk
from bench.tools.comparison import Comparison, compare, one_table, take_turns
from bench.tools.figures import Facts, Spread, median_ratio, short
from bench.tools.server import HOST, NotServing, Server, running
from examples.digits import Digits

MODELS = "bench.protocols.servers.bulk_models"
CONNECTIONS, BATCH = 64, 64
SENT_AT_ONCE = 500
MOST_AHEAD = 20_000


@dataclass(frozen=True, slots=True)
class Turn:
    """What a turn showed."""

    items_per_s: float
    cpu_s: float


@dataclass(frozen=True, slots=True)
class Row:
    """One side, and how bulk compares with it."""

    case: str
    side: str
    turns: list[Turn]
    rate_ratio: float
    cpu_ratio: float


def lines_of(case: str) -> list[bytes]:
    """The lines that are sent over and over."""
    if case == "trivial":
        return [b'{"x": 1.5}\n'] * SENT_AT_ONCE
    images, _ = load_digits(return_X_y=True)
    return [msgspec.json.encode(image.tolist()) + b"\n" for image in images[:SENT_AT_ONCE]]


def in_bulk(server: Server, path: str, lines: list[bytes], seconds: float) -> Turn:
    """Send lines for so long, and read the answers meanwhile."""
    fields = ["Content-Type: application/x-ndjson", "Transfer-Encoding: chunked"]
    head = "\r\n".join([f"POST {path} HTTP/1.1", f"Host: {HOST}", *fields, "", ""])
    piece = b"".join(lines)
    chunk = b"%x\r\n%b\r\n" % (len(piece), piece)
    sent, answers, last = 0, 0, b""
    with socket.create_connection((HOST, server.port), timeout=60) as connection:
        cpu_s, began = server.cpu_s(), time.perf_counter()

        def send() -> None:
            nonlocal sent
            connection.sendall(head.encode())
            while time.perf_counter() - began < seconds:
                if sent - answers > MOST_AHEAD:  # sockets hold megabytes, which would have to be waited for
                    time.sleep(0.01)  # more often would take a core from the server now and then
                    continue
                connection.sendall(chunk)
                sent += len(lines)
            connection.sendall(b"0\r\n\r\n")

        sender = threading.Thread(target=send)
        sender.start()
        response = http.client.HTTPResponse(connection, method="POST")
        response.begin()
        while data := response.read1(2**18):
            answers += data.count(b"\n")
            last = data
        sender.join()
    took_s = time.perf_counter() - began
    if answers != sent:
        raise NotServing(f"{sent} lines have {answers} answers, which end with {last[-300:]!r}")
    return Turn(sent / took_s, (server.cpu_s() - cpu_s) / sent)


def singly(server: Server, seconds: float) -> Turn:
    """Let `wrk` ask for so long."""
    run = wrk.run(server, connections=CONNECTIONS, seconds=max(1, round(seconds)))
    if run.failed:
        raise NotServing(f"{run.failed} requests have failed")
    return Turn(run.requests_per_s, run.cpu_per_request_s)


def offline(lines: list[bytes], seconds: float) -> Turn:
    """Have the model answer lines in this process, without a server."""
    model = Digits()
    model.setup()
    decode, encode = msgspec.json.Decoder(list[float]).decode, msgspec.json.Encoder().encode
    n, batch = 0, itertools.cycle(lines)
    cpu_s, began = time.process_time(), time.perf_counter()
    with tempfile.TemporaryFile() as answers:
        while time.perf_counter() - began < seconds:
            images = [decode(line) for line in itertools.islice(batch, BATCH)]
            answers.write(b"\n".join(map(encode, model.predict(images))) + b"\n")
            n += BATCH
    return Turn(n / (time.perf_counter() - began), (time.process_time() - cpu_s) / n)


def measured(case: str, rounds: int, seconds: float) -> Iterator[Row]:
    """Let bulk and the other side take turns."""
    lines = lines_of(case)
    exchange = Exchange(body=lines[0].strip(), answer={"y": 3.0} if case == "trivial" else 0)
    with ExitStack() as stack:
        server = stack.enter_context(running(serving(f"{MODELS}:{case}", exchange)))
        in_bulk(server, "/predict", lines, 0.5)
        other = "single, 64 connections" if case == "trivial" else "offline"
        sides: dict[str, Callable[[], Turn]] = {
            "bulk": lambda: in_bulk(server, "/predict", lines, seconds),
            other: lambda: singly(server, seconds) if case == "trivial" else offline(lines, seconds),
        }
        turns = take_turns(case, rounds, sides, lambda turn: f"{turn.items_per_s:,.0f}/s", other_first=True)
    bulk = turns["bulk"]
    for side, found in turns.items():
        rates = median_ratio([turn.items_per_s for turn in bulk], [turn.items_per_s for turn in found])
        cpu = median_ratio([turn.cpu_s for turn in found], [turn.cpu_s for turn in bulk])
        yield Row(case, side, found, rates, cpu)


HEADER = ("model", "side", "items/s", "bulk's rate / this", "CPU, µs/item", "this CPU / bulk's")


def cells(row: Row) -> list[str]:
    return [
        row.case,
        row.side,
        Spread.of([turn.items_per_s for turn in row.turns]).text(short),
        f"{row.rate_ratio:.2f}",
        Spread.of([turn.cpu_s * 1e6 for turn in row.turns]).text(lambda us: f"{us:.2f}"),
        f"{row.cpu_ratio:.2f}",
    ]


def entry(row: Row) -> Facts:
    return asdict(row)


def arguments() -> argparse.Namespace:
    parser = options.parser(__doc__)
    options.add_names(parser, "--models", ("trivial", "digits"), "which models are asked")
    options.add_measuring(parser, rounds=5, seconds=2)
    return parser.parse_args()


def main() -> int:
    given = arguments()
    if "trivial" in given.models and (missing := wrk.missing()):
        sys.exit(missing)
    found: Comparison[Row] = compare(
        given.models, lambda case: measured(case, given.rounds, given.seconds), {}, given.seconds
    )
    return found.report(given, "bulk beside single requests and the model alone", one_table(HEADER, cells), entry)


if __name__ == "__main__":
    sys.exit(main())
