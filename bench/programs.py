"""The programs that there are to run: what each measures, and how long it takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Program(NamedTuple):
    """One program; `python -m bench.NAME` runs it.

    Attributes:
        name: Of its module, below `bench`.
        minutes: That it takes on two cores with its defaults; None if that depends on what it is
            given.
        measures: What it finds out, for people.
        needs: What must be there besides `make setup`.
        in_all: Whether `all` runs it: it needs no arguments, and installs nothing.
    """

    name: str
    minutes: float | None
    measures: str
    needs: str = ""
    in_all: bool = True


PROGRAMS = (
    Program("alone.core_overhead", 0.2, "the core and its asyncio driver beside a bare list of futures"),
    Program("alone.simulator_speed", 0.1, "how many requests per second the simulator serves"),
    Program("alone.copies", 0.4, "6 MB through a stage in a thread and in a process, beside a bare copy"),
    Program("alone.blas", 5, "BLAS threads as carpool chooses them, one, and all", "torch, scikit-learn"),
    Program("alone.threads", 1.5, "thread workers beside processes, in pure Python; for Pythons without the GIL"),
    Program("peers.install", None, "nothing: it makes the peers' environments, once", "network", False),
    Program("site", 0.2, "nothing: it builds the site of the documentation, for `make docs`", "make docs", False),
    Program("tools.entries", 0.1, "nothing: it begins entries of docstrings with a capital letter", "", False),
    Program("tools.lowest", 0.1, "nothing: it prints the lowest versions for `make test-lowest`", "", False),
    Program("tools.pythons", 0.1, "nothing: it finds the oldest and the newest Python on this machine", "", False),
    Program("tools.small_wheel", 0.3, "nothing: it compresses a wheel once more for `make dist`", "", False),
    Program("peers.inprocess", 9, "`@carpool.batch` beside other batchers", "batched, async_batcher, ray"),
    Program("peers.process", 8, "worker processes without HTTP, beside mpservice", "mpservice"),
    Program("peers.http", 50, "HTTP servers beside each other", "all peers, wrk"),
    Program("picture", 60, "throughput and p99 against load, of five servers", "all peers, models", False),
    Program("picture.terminal", 0.3, "nothing: it draws the terminal of `carpool demo` and `carpool top`", "", False),
    Program("documents", 8, "the designs that carpool was made after", "wrk"),
    Program("policies", 15, "all policies on 119 workloads, and on a dozen with a busy coordinator, in virtual time"),
    Program("policies.ablation", 60, "what each mechanism of Adaptive is worth"),
    Program("policies.coordinator", 5, "a busy coordinator, real beside simulated", "wrk, an idle machine"),
    Program("policies.limits", 6, "with several workers, a limit of 64 beside the best limit"),
    Program("policies.lengths", 0.1, "what it takes to compose a batch by length"),
    Program("policies.overhead", 0.5, "what a policy's own decisions cost"),
    Program("policies.steps", 2, "policies of steps, and what others do, in virtual time", "for some rows: the trace"),
    Program("policies.scaling", 8, "how many workers five traffics take, by the rules of autoscalers"),
    Program("policies.same_decisions", None, "whether two revisions decide alike, on all of these", "git", False),
    Program("policies.recover", 4, "whether a policy recovers from disturbances that end, in random services"),
    Program("policies.trace", None, "all policies on a trace of a language model", "the trace", False),
    Program(
        "shapes", 20, "rules of composition by length on 135 workloads, in virtual time", "for some rows: the trace"
    ),
    Program("shapes.keys", 0.5, "thousands of keys: what a round costs, and what affinity saves"),
    Program("shapes.http", 8, "texts of different length for a real model, beside other servers", "minilm, infinity"),
    Program("steps.decoder", 2, "a small decoder: every step shared, beside whole batches", "torch"),
    Program("steps.overload", 1.5, "a small decoder at overload: who is let in when, as readers see it", "torch"),
    Program(
        "steps.llama", 2, "a decoder of Hugging Face: every step shared, beside `generate()`", "torch, transformers"
    ),
    Program("steps.equality", 4, "whether streams in a crowd equal themselves alone, by type", "torch, transformers"),
    Program("steps.overhead", 1, "what carpool costs a step of a model, beside a bare loop"),
    Program("steps.sse", 18, "server-sent events, beside other servers", "for some rows: peers"),
    Program("steps.leaving", 1.5, "clients that leave a stream, or do not read theirs"),
    Program("protocols.tensors", 0.5, "tensors of 6 MB by the Open Inference Protocol", "for some rows: peers"),
    Program(
        "protocols.bulk",
        9,
        "bulk beside single requests, and beside a model alone",
        "wrk, scikit-learn, for some rows: minilm",
    ),
    Program("protocols.lines", 5, "memory after ten million lines through one bulk request"),
    Program("reality.calibration", 4, "latency, simulated and of a real server", "an idle machine"),
    Program("reality.overload", 15, "goodput at up to three times capacity", "mosec, bentoml, an idle machine"),
    Program("reality.open_loop", None, "any server, with requests at random times", "a server", False),
    Program(
        "cluster",
        47,
        "carpool on Ray beside Ray Serve, own processes and actor calls",
        "ray[serve], wrk",
        False,
    ),
    Program("fast_paths", 1, "what each fast path gains, with it and without it in one process"),
    Program("gpu", None, "what carpool does on a card, beside LitServe and mosec", "torch, a GPU", False),
    Program("pairs", None, "the working tree beside a former revision, on the hot paths", "wrk", False),
    Program("chaos", 2, "what is lost when workers are killed under load"),
    Program("chaos.streams", 2, "whether streams lose tokens when workers are killed and clients leave or sleep"),
    Program("chaos.mutants", 10, "whether that soak finds what it looks for"),
)

STARTED_BY_OTHERS = {
    "picture.servers.litserve_side": "picture",
    "picture.servers.mosec_side": "picture",
    "picture.servers.ray_side": "picture",
    "alone.blas_side": "alone.blas",
    "chaos.clients": "chaos",
    "documents.rows": "documents",
    "gpu.decoder": "gpu",
    "gpu.floor": "gpu",
    "gpu.servers.litserve_tensors": "gpu",
    "gpu.servers.mosec_tensors": "gpu",
    "gpu.side": "gpu",
    "policies.decisions": "policies.same_decisions",
    "peers.servers.async_batcher_function": "peers.inprocess",
    "peers.servers.bare_echo": "peers.http",
    "peers.servers.batched_function": "peers.inprocess",
    "peers.servers.behind_nginx": "peers.http",
    "peers.servers.carpool_function": "peers.inprocess",
    "peers.servers.carpool_pipeline": "peers.process",
    "peers.servers.litserve_server": "peers.http",
    "peers.servers.mosec_server": "peers.http",
    "peers.servers.mpservice_pipeline": "peers.process",
    "peers.servers.ray_function": "peers.inprocess",
    "peers.servers.ray_server": "peers.http",
    "peers.servers.socket_copy": "peers.process",
    "protocols.servers.mlserver_tensors": "protocols.tensors",
    "protocols.servers.mosec_tensors": "protocols.tensors",
    "protocols.servers.offline": "protocols.bulk",
    "steps.crowd": "pairs",
    "shapes.servers.mosec_embed": "shapes.http",
    "shapes.servers.offline": "shapes.http",
    "steps.servers.litserve_counts": "steps.sse",
    "steps.servers.mosec_counts": "steps.sse",
    "steps.servers.ray_counts": "steps.sse",
    "steps.servers.starlette_counts": "steps.sse",
    "chaos.litserve_service": "chaos",
    "chaos.mosec_service": "chaos",
}
"""Modules that can be run as well, but are one side of a program, or a part of it."""

HEADER = ("program", "minutes", "what it measures", "what it needs")


def total_minutes() -> float:
    """What `all` takes."""
    return sum(program.minutes or 0 for program in PROGRAMS if program.in_all)


def listing(*, markdown: bool = False) -> str:
    """A table of all programs."""
    rows = [_cells(program) for program in PROGRAMS]
    if markdown:
        rules = ("---", "---:", "---", "---")
        rows = [(f"`{name}`", *rest) for name, *rest in rows]
        return "\n".join(f"| {' | '.join(cells)} |" for cells in (HEADER, rules, *rows))
    widths = [max(map(len, column)) for column in zip(HEADER, *rows, strict=True)]
    return "\n".join(_line(cells, widths) for cells in (HEADER, ["-" * width for width in widths], *rows))


def _cells(program: Program) -> Sequence[str]:
    minutes = "" if program.minutes is None else f"{program.minutes:g}"
    return program.name, minutes, program.measures, program.needs


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    """Numbers stand on the right of their column, words on the left."""
    name, minutes, *words = (
        cell.rjust(width) if place == 1 else cell.ljust(width)
        for place, (cell, width) in enumerate(zip(cells, widths, strict=True))
    )
    return "  ".join((name, minutes, *words)).rstrip()
