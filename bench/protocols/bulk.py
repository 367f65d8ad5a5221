"""Bulk beside single requests, and beside the model alone.

* `trivial`: `{"x": 1.5}` -> `{"y": 3.0}`. Lines of one bulk request take turns with single requests
  on 64 connections, which `wrk` makes.
* `digits`: scikit-learn's classifier of handwritten digits. Lines of one bulk request take turns
  with `offline`, a program that reads the same lines, calls the same model with 64 at a time, and
  writes the answers.
* `sentences`: MiniLM (torch, one thread), a real sentence-embedding model, and texts of different
  length, with `length=`. It takes turns with `offline` as well, and with two that read the texts in
  the order of their lengths: `offline, sorted` 64 at a time, and `offline, sorted, by 8` eight.

All models run in one worker process, with batches of up to 64. CPU is that of the server's whole
process tree, per item; the client's is not in it. A ratio is the median over the rounds.

    python -m bench.peers.install minilm      makes the environment of sentences, once
"""

from __future__ import annotations

import argparse
import http.client
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import msgspec

from bench import PYTHONPATH
from bench.peers.contestants import Exchange, Launch, serving
from bench.peers.install import python_of
from bench.shapes.embedders import ONE_THREAD
from bench.shapes.http import texts_in
from bench.tools import options, wrk
from bench.tools.comparison import Comparison, compare, one_table, take_turns
from bench.tools.figures import Facts, Spread, median_ratio, short
from bench.tools.server import HOST, NotServing, Server, running
from bench.tools.side import figures_of

MODELS = "bench.protocols.servers.bulk_models"
ALONE = "bench.protocols.servers.offline"
CONNECTIONS, BATCH = 64, 64
SENT_AT_ONCE = 500
MOST_AHEAD = {"trivial": 20_000, "digits": 20_000, "sentences": 500}
"""How many lines the client may send that have no answer yet, before it sends some more."""
SLOW_S = 20.0
"""How long a turn of sentences takes at least, which are a few hundred a second."""


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


def lines_of(case: str, folder: Path) -> list[bytes]:
    """The lines that are sent over and over."""
    if case == "trivial":
        return [b'{"x": 1.5}\n'] * SENT_AT_ONCE
    if case == "sentences":
        items = texts_in(folder).all
    else:
        from sklearn.datasets import load_digits  # half a second, for which other programs do not wait

        items = load_digits(return_X_y=True)[0].tolist()
    return [msgspec.json.encode(item) + b"\n" for item in items[:SENT_AT_ONCE]]


def in_bulk(server: Server, lines: list[bytes], most_ahead: int, seconds: float) -> Turn:
    """Send lines for so long, and read the answers meanwhile."""
    fields = ["Content-Type: application/x-ndjson", "Transfer-Encoding: chunked"]
    head = "\r\n".join(["POST /predict HTTP/1.1", f"Host: {HOST}", *fields, "", ""])
    piece = b"".join(lines)
    chunk = b"%x\r\n%b\r\n" % (len(piece), piece)
    sent, answers, last = 0, 0, b""
    with socket.create_connection((HOST, server.port), timeout=60) as connection:
        cpu_s, began = server.cpu_s(), time.perf_counter()

        def send() -> None:
            nonlocal sent
            connection.sendall(head.encode())
            while time.perf_counter() - began < seconds:
                if sent - answers > most_ahead:  # sockets hold megabytes, which would have to be waited for
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


def offline(case: str, lines: Sequence[bytes], seconds: float, batch: int = BATCH) -> tuple[Turn, object]:
    """Have the model answer lines without a server; gives its answer to the first one, too."""
    with tempfile.NamedTemporaryFile(suffix=".ndjson") as file:
        file.write(b"".join(lines))
        file.flush()
        command = [python_for(case), "-m", ALONE, case, file.name, str(batch), str(seconds)]
        found = figures_of(f"{case} offline", command, ours=True, seconds=seconds, env=environment_for(case))
    return Turn(found["items_per_s"], found["cpu_s"]), found["first"]


def python_for(case: str) -> str:
    """The interpreter that has what a model needs."""
    return str(python_of("minilm")) if case == "sentences" else sys.executable


def environment_for(case: str) -> dict[str, str]:
    """What the environment of a model has besides."""
    return dict(ONE_THREAD) if case == "sentences" else {}


def launch(case: str, exchange: Exchange) -> Launch:
    """How to start the server."""
    ours = serving(f"{MODELS}:{case}", exchange)
    if case != "sentences":
        return ours
    command = [python_for(case), "-m", "carpool", *ours.command[ours.command.index("serve") :]]
    return replace(ours, command=command, env={"PYTHONPATH": PYTHONPATH, **environment_for(case)})


def measured(case: str, rounds: int, seconds: float) -> Iterator[Row]:
    """Let bulk and the other sides take turns."""
    seconds = max(seconds, SLOW_S) if case == "sentences" else seconds
    with ExitStack() as stack:
        lines = lines_of(case, Path(stack.enter_context(tempfile.TemporaryDirectory())))
        answer: object = {"y": 3.0} if case == "trivial" else offline(case, lines, 0.1)[1]
        server = stack.enter_context(running(launch(case, Exchange(body=lines[0].strip(), answer=answer))))
        bulk = partial(in_bulk, server, lines, MOST_AHEAD[case])
        bulk(0.5)
        sides: dict[str, Callable[[], Turn]] = {"bulk": lambda: bulk(seconds)}
        if case == "trivial":
            sides["single, 64 connections"] = lambda: singly(server, seconds)
        else:
            sides["offline"] = lambda: offline(case, lines, seconds)[0]
        if case == "sentences":
            rising = sorted(lines, key=lambda line: len(line.split()))
            sides["offline, sorted"] = lambda: offline(case, rising, seconds)[0]
            sides["offline, sorted, by 8"] = lambda: offline(case, rising, seconds, 8)[0]
        turns = take_turns(case, rounds, sides, lambda turn: f"{turn.items_per_s:,.0f}/s", other_first=True)
    for side, found in turns.items():
        rates = median_ratio([turn.items_per_s for turn in turns["bulk"]], [turn.items_per_s for turn in found])
        cpu = median_ratio([turn.cpu_s for turn in found], [turn.cpu_s for turn in turns["bulk"]])
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
    options.add_names(parser, "--models", ("trivial", "digits", "sentences"), "which models are asked")
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
