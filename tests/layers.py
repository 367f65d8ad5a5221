"""The layers of `src/carpool`, in three rings: a module imports its own layer and the layers above it in this table.

`tests/test_layers.py` enforces the table; ARCHITECTURE.md describes the rings.
"""

from __future__ import annotations

from typing import Final, NamedTuple


class Layer(NamedTuple):
    """Folders, or files of the root, that may import each other as long as no circle results."""

    ring: str
    names: str
    holds: str


LAYERS: Final = (
    Layer(
        "engine",
        "process_one version settings clock details errors allowance foreign logger faults fast_paths request "
        "http_request http_response type_hints rows batch_hints parts turns openai forms model",
        "the nouns that all others share",
    ),
    Layer("engine", "hints", "the meaning of type hints: readers, writers, misfits"),
    Layer("engine", "call", "one call of user code, and its outcome"),
    Layer("engine", "policy", "when a batch goes, and with which requests"),
    Layer("engine", "core", "state machines: events in, actions out"),
    Layer("engine", "wire", "bytes and batch messages, without input or output"),
    Layer("engine", "worker", "the life of a worker: load the model, answer batches"),
    Layer("engine", "observe", "counts, logs and traces; the core imports nothing of it"),
    Layer("engine", "drive", "the only code that waits"),
    Layer("fronts", "service", "services: declared, assembled, run"),
    Layer("fronts", "batch_function", "`@carpool.batch`"),
    Layer("fronts", "carpool hf metrics types", "the names that users import"),
    Layer("fronts", "http", "requests over HTTP: our own server, the ASGI app, other servers' protocols"),
    Layer("satellites", "frames", "models of tables"),
    Layer("satellites", "simulate", "policies in virtual time"),
    Layer("satellites", "client", "`carpool.Client` and `carpool.AsyncClient`"),
    Layer("satellites", "testing", "tools for users' own tests"),
    Layer("satellites", "score", "`carpool score`"),
    Layer("satellites", "ray", "services on a Ray cluster"),
    Layer("satellites", "demo plain_request top config profile", "the parts of commands"),
    Layer("satellites", "cli", "the command line"),
    Layer("satellites", "__main__", "`python -m carpool`"),
)

EXCEPTIONS: Final = frozenset(
    {
        ("carpool", "carpool.http.serve"),  # `carpool.serve` is loaded when it is first used
        ("carpool", "carpool.ray"),  # likewise `carpool.ray`
    }
)
"""Imports of a lower layer that are meant: importer and imported module."""

NARROW: Final = {
    "carpool.http.protocols": "exchange",
    "carpool.simulate.contestants": "",
}
"""Folders that import only these modules of the folder around them: a protocol has no socket and no driver."""
