"""A tensor of 6 MB in and out, one at a time: the binary tensors of the Open Inference Protocol
beside the native route, and beside other servers.

All models give back what they get. `native` is carpool's own address with a body of bytes, `oip`
one row of 6 MB, `oip, 10 rows` ten images of 602 kB, each of which is an item with a place of its
own in the queue. The doors take turns; a ratio is the median over the rounds. CPU is that of the
server's whole process tree, per request; the client's is not in it.

The peers run in environments of their own (`python -m bench.peers.install mosec_msgpack mlserver`).
mosec's `MsgpackMixin` carries numpy arrays in msgpack; MLServer speaks the Open Inference Protocol,
too, but answers binary tensors over REST with 500 (1.7.1), so it is asked in JSON (`mlserver-json`)
beside ours (`oip-json`).
"""

from __future__ import annotations

import argparse
import json
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import numpy as np

from bench import PYTHONPATH, ROOT
from bench.peers.contestants import carpool
from bench.peers.install import not_installed, python_of, versions
from bench.tools import options
from bench.tools.comparison import Comparison, compare, one_table, take_turns
from bench.tools.figures import Facts, Spread, median_ratio
from bench.tools.server import HOST, START_TIMEOUT_S, NotServing, Started, started

IMAGES = np.arange(10 * 3 * 224 * 224, dtype=np.float32).reshape(10, 3, 224, 224)
SERVERS = Path(__file__).parent / "servers"
MODELS = "bench.protocols.servers.tensor_models"


@dataclass(frozen=True, slots=True)
class Door:
    """One way in.

    Attributes:
        name: What the table calls it.
        server: The name of the server that has it.
        path: Where it is.
        headers: Of the request.
        body: Of the request.
        is_right: Whether an answer's body is the tensor that was sent.
    """

    name: str
    server: str
    path: str
    headers: dict[str, str]
    body: bytes
    is_right: Callable[[bytes], bool]

    @property
    def request(self) -> bytes:
        """The request as it is sent."""
        headers = {"Host": HOST, "Content-Length": len(self.body), **self.headers}
        lines = [f"POST {self.path} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items())]
        return "\r\n".join([*lines, "", ""]).encode() + self.body


def ends_with_the_tensor(body: bytes) -> bool:
    return body.endswith(IMAGES.tobytes())


def of_oip(name: str, server: str, shape: list[int]) -> Door:
    """The binary tensors of the Open Inference Protocol."""
    tensor = {"name": "input", "datatype": "FP32", "shape": shape, "parameters": {"binary_data_size": IMAGES.nbytes}}
    head = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}}).encode()
    headers = {"Inference-Header-Content-Length": str(len(head)), "Content-Type": "application/octet-stream"}
    body = head + IMAGES.tobytes()
    return Door(name, server, "/v2/models/tensors/infer", headers, body, ends_with_the_tensor)


def of_json(name: str, server: str) -> Door:
    """The same protocol in JSON."""
    tensor = {"name": "input", "datatype": "FP32", "shape": list(IMAGES.shape), "data": IMAGES.ravel().tolist()}
    body = json.dumps({"inputs": [tensor]}).encode()

    def is_right(answer: bytes) -> bool:
        (output,) = json.loads(answer)["outputs"]
        return bool(np.array_equal(np.asarray(output["data"], np.float32).reshape(IMAGES.shape), IMAGES))

    return Door(name, server, "/v2/models/tensors/infer", {"Content-Type": "application/json"}, body, is_right)


def of_mosec() -> Door:
    """mosec's way to carry arrays: msgpack with the mark of msgpack_numpy."""
    import msgspec

    array = {b"nd": True, b"type": "<f4", b"kind": b"", b"shape": list(IMAGES.shape), b"data": IMAGES.tobytes()}
    body = msgspec.msgpack.encode({key.decode(): value for key, value in array.items()})

    def is_right(answer: bytes) -> bool:
        return IMAGES.tobytes() in answer

    return Door("mosec, msgpack", "mosec", "/inference", {"Content-Type": "application/msgpack"}, body, is_right)


NATIVE = Door(
    "native",
    "carpool",
    "/models/raw/predict",
    {"Content-Type": "application/octet-stream", "Accept": "application/octet-stream"},
    IMAGES.tobytes(),
    IMAGES.tobytes().__eq__,
)
MAKERS: dict[str, Callable[[], Door]] = {
    "oip": lambda: of_oip("oip", "carpool", [1, IMAGES.size]),
    "oip-10-rows": lambda: of_oip("oip, 10 rows", "carpool", list(IMAGES.shape)),
    "oip-json": lambda: of_json("oip, json", "carpool"),
    "mosec": of_mosec,
    "mlserver-json": lambda: of_json("mlserver, json (binary: 500 in 1.7.1)", "mlserver"),
}
USUAL = "oip,oip-10-rows"


def command(server: str) -> tuple[list[str], Path, dict[str, str]]:
    """The command line of a server, its folder, and what its environment has besides."""
    if server == "carpool":
        words = [*carpool(), "serve", f"{MODELS}:tensors", f"{MODELS}:raw", "--host", HOST, "--port", "{port}"]
        return words, ROOT, {"PYTHONPATH": PYTHONPATH}
    if server == "mosec":
        words = [str(python_of("mosec_msgpack")), "mosec_tensors.py", "--address", HOST, "--port", "{port}"]
        return words, SERVERS, {}
    return [str(python_of("mlserver")), "mlserver_tensors.py", "{port}"], SERVERS, {}


class Asker:
    """A connection to a door."""

    def __init__(self, door: Door, server: Started) -> None:
        self.door = door
        self._server = server
        self._request = door.request
        self._socket: socket.socket | None = None

    def ask(self) -> bytearray:
        """Send the request; return the body of the answer."""
        if self._socket is None:
            self._socket = socket.create_connection((HOST, self._server.port), timeout=60)
        self._socket.sendall(self._request)
        data = bytearray()
        while (end := data.find(b"\r\n\r\n")) < 0:
            data += self._received(65536)
        head = bytes(data[:end]).decode("latin-1").lower().split("\r\n")
        length = next(int(line[15:]) for line in head if line.startswith("content-length:"))
        body = bytearray(length)
        at = len(data) - end - 4
        body[:at] = data[end + 4 :]
        rest = memoryview(body)[at:]
        while rest:
            n = self._socket.recv_into(rest)
            if not n:
                raise NotServing(f"{self.door.name} closed the connection within an answer, {head[0]}")
            rest = rest[n:]
        if " 200" not in head[0]:
            raise NotServing(f"{self.door.name} answered {head[0]}: {bytes(body[:300])!r}")
        return body

    def _received(self, most: int) -> bytes:
        assert self._socket is not None
        data = self._socket.recv(most)
        if not data:
            raise NotServing(f"{self.door.name} closed the connection")
        return data

    def until_right(self) -> None:
        """Ask until the server is up; a wrong answer is an error at once."""
        deadline = time.monotonic() + START_TIMEOUT_S
        while True:
            try:
                answer = self.ask()
            except (OSError, NotServing):
                self._socket = None
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.2)
                continue
            if not self.door.is_right(bytes(answer)):  # a comparison, once
                raise NotServing(f"{self.door.name} answered wrongly: {bytes(answer[:300])!r}")
            return

    def turn(self, requests: int) -> Turn:
        """Ask one request after the other, on a new connection.

        The server may have closed the former one, idle during the turns of others, as uvicorn does
        after 5 s.
        """
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        cpu_s, began = self._server.tree.cpu_s(), time.perf_counter()
        for _ in range(requests):
            self.ask()
        took_s = time.perf_counter() - began
        return Turn(took_s / requests, (self._server.tree.cpu_s() - cpu_s) / requests)


@dataclass(frozen=True, slots=True)
class Turn:
    """What a turn showed, per request."""

    time_s: float
    cpu_s: float


@dataclass(frozen=True, slots=True)
class Row:
    """A door beside the native one."""

    door: str
    turns: list[Turn]
    time_ratio: float
    cpu_ratio: float


def measured(doors: list[Door], rounds: int, requests: int) -> Iterator[Row]:
    """Let all doors take turns."""
    with ExitStack() as stack:
        servers: dict[str, Started] = {}
        for name in dict.fromkeys(door.server for door in doors):
            words, folder, env = command(name)
            servers[name] = stack.enter_context(started(words, folder, env, None))
        askers = [Asker(door, servers[door.server]) for door in doors]
        for asker in askers:
            asker.until_right()
            asker.turn(max(2, requests // 4))
        sides = {asker.door.name: lambda asker=asker: asker.turn(requests) for asker in askers}
        turns = take_turns("6 MB", rounds, sides, lambda turn: f"{turn.time_s * 1e3:.1f} ms", other_first=True)
    native = turns[NATIVE.name]
    for name, found in turns.items():
        times = median_ratio([turn.time_s for turn in found], [turn.time_s for turn in native])
        yield Row(name, found, times, median_ratio([turn.cpu_s for turn in found], [turn.cpu_s for turn in native]))


HEADER = ("door", "time, ms", "time / native", "CPU, ms", "CPU / native")


def cells(row: Row) -> list[str]:
    def milliseconds(seconds: float) -> str:
        return f"{seconds * 1e3:.2f}"

    return [
        row.door,
        Spread.of([turn.time_s for turn in row.turns]).text(milliseconds),
        f"{row.time_ratio:.2f}",
        Spread.of([turn.cpu_s for turn in row.turns]).text(milliseconds),
        f"{row.cpu_ratio:.2f}",
    ]


def entry(row: Row) -> Facts:
    return {**asdict(row), "median_s": median(turn.time_s for turn in row.turns)}


def arguments() -> argparse.Namespace:
    parser = options.parser(__doc__)
    options.add_names(parser, "--doors", MAKERS, "which doors take turns with the native one", USUAL)
    parser.add_argument("--requests", type=int, default=40, help="of each turn; default: %(default)s")
    options.add_measuring(parser, rounds=7, seconds=0)
    return parser.parse_args()


PEERS = {"mosec": "mosec_msgpack", "mlserver": "mlserver"}


def main() -> int:
    given = arguments()
    doors = [NATIVE, *(MAKERS[name]() for name in given.doors)]
    peers = [PEERS[door.server] for door in doors if door.server in PEERS]
    if missing := [peer for peer in peers if not versions(peer)]:
        sys.exit(not_installed(*missing))
    found: Comparison[Row] = compare(
        [doors], lambda case: measured(case, given.rounds, given.requests), versions(*peers), 0
    )
    return found.report(given, "a tensor of 6 MB in and out", one_table(HEADER, cells), entry)


if __name__ == "__main__":
    sys.exit(main())
