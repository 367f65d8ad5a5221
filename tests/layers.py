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
        "engine.process_one version engine.clock engine.details errors engine.allowance engine.foreign engine.logger "
        "engine.faults engine.fast_paths engine.request engine.http_request engine.http_response engine.type_hints "
        "engine.rows engine.parts engine.turns openai engine.forms model",
        "the nouns that all others share",
    ),
    Layer("engine", "engine.hints", "the meaning of type hints: readers, writers, misfits"),
    Layer("engine", "engine.call", "one call of user code, and its outcome"),
    Layer("engine", "engine.policy", "when a batch goes, and with which requests"),
    Layer("engine", "engine.core", "state machines: events in, actions out"),
    Layer("engine", "engine.wire", "bytes and batch messages, without input or output"),
    Layer("engine", "engine.worker", "the life of a worker: load the model, answer batches"),
    Layer("engine", "engine.observe", "counts, logs and traces; the core imports nothing of it"),
    Layer("engine", "engine.drive", "the only code that waits"),
    Layer("fronts", "policy wire", "old public paths of the engine"),
    Layer("fronts", "service", "services: declared, assembled, run"),
    Layer("fronts", "batch_function", "`@carpool.batch`"),
    Layer("fronts", "carpool hf metrics types", "the names that users import"),
    Layer("fronts", "http", "requests over HTTP: our own server, the ASGI app, other servers' protocols"),
    Layer("satellites", "frames", "models of tables"),
    Layer("satellites", "simulate", "policies in virtual time"),
    Layer("satellites", "client", "`carpool.Client`, `carpool.AsyncClient` and `carpool score`"),
    Layer("satellites", "testing", "tools for users' own tests"),
    Layer("satellites", "ray", "services on a Ray cluster"),
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
