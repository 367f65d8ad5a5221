"""Who takes part in `bench.shapes.http`: how each server is started, and how it is asked."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from time import monotonic, sleep

from bench import PYTHONPATH, ROOT
from bench.peers.install import python_of
from bench.tools.server import HOST, NotServing, started, tail

SERVERS = Path(__file__).parent / "servers"
START_TIMEOUT_S = 180
ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
"""So that other work on the machine disturbs all sides alike."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Embedder:
    """One server.

    Attributes:
        peer: Whose environment it runs in.
        command: How it is started; `{port}` stands for its port.
        path: Where it answers.
        env: What its environment has besides.
        is_openai: Whether it is asked as OpenAI's embeddings are, as Infinity is.
        directory: Where it runs.
    """

    peer: str
    command: list[str]
    path: str
    env: Mapping[str, str] = field(default_factory=dict)
    is_openai: bool = False
    directory: Path = SERVERS

    def body(self, text: str) -> bytes:
        """What is sent for a text."""
        return json.dumps({"model": "minilm", "input": [text]} if self.is_openai else text).encode()

    def vector(self, body: bytes) -> list[float]:
        """The vector in an answer."""
        answer = json.loads(body)
        vector: list[float] = answer["data"][0]["embedding"] if self.is_openai else answer
        return vector


def carpool(service: str) -> Embedder:
    """One of our services, in the environment of the model."""
    target = f"bench.shapes.servers.carpool_embed:{service}"
    command = [str(python_of("minilm")), "-m", "carpool", "serve", target, "--host", HOST, "--port", "{port}"]
    return Embedder(peer="minilm", command=command, path="/predict", env={"PYTHONPATH": PYTHONPATH}, directory=ROOT)


def mosec(size: int, wait_ms: int) -> Embedder:
    """mosec with a batch limit and a waiting time."""
    command = [str(python_of("minilm")), "mosec_embed.py", "--address", HOST, "--port", "{port}"]
    command += ["--timeout", "60000"]  # ms; its default of 3 s is less than a full queue takes here
    env = {"MAX_BATCH_SIZE": str(size), "MAX_WAIT_TIME_MS": str(wait_ms)}
    return Embedder(peer="minilm", command=command, path="/inference", env=env)


def infinity(size: int) -> Embedder:
    """Infinity with its torch engine."""
    command = [str(python_of("infinity").with_name("infinity_emb")), "v2", "--model-id", "{model}", "--engine", "torch"]
    command += ["--device", "cpu", "--batch-size", str(size), "--served-model-name", "minilm", "--no-bettertransformer"]
    command += ["--host", HOST, "--port", "{port}", "--no-model-warmup"]
    env = {"DO_NOT_TRACK": "1", "INFINITY_ANONYMOUS_USAGE_STATS": "0", "HF_HUB_OFFLINE": "1"}
    return Embedder(peer="infinity", command=command, path="/embeddings", env=env, is_openai=True)


EMBEDDERS: dict[str, Embedder] = {
    "carpool, length=": carpool("by_length"),
    "carpool": carpool("plain"),
    "carpool, sorted inside": carpool("inside"),
    "mosec, 32, 10 ms": mosec(32, 10),
    "mosec, 8, 1 ms": mosec(8, 1),
    "Infinity, 8": infinity(8),
    "Infinity, 32": infinity(32),
}


@contextmanager
def running(name: str, model: str, text: str) -> Iterator[int]:
    """Start a server, wait until it answers, and end it afterwards; gives its port."""
    embedder = EMBEDDERS[name]
    command = [word.replace("{model}", model) for word in embedder.command]
    with started(command, embedder.directory, {**ONE_THREAD, **embedder.env}, None) as server:
        deadline, problem = monotonic() + START_TIMEOUT_S, "it did not listen"
        while True:
            if server.process.poll() is not None or monotonic() > deadline:
                raise NotServing(f"{name} does not serve ({problem}):\n{tail(server.scratch / 'server.log')}")
            try:
                embedder.vector(ask(server.port, embedder, text))
                break
            except (OSError, HTTPException, ValueError, KeyError) as error:
                problem = repr(error)
                sleep(0.5)
        yield server.port


def ask(port: int, embedder: Embedder, text: str) -> bytes:
    """Ask once, on a connection of its own."""
    connection = HTTPConnection(HOST, port, timeout=60)
    try:
        connection.request("POST", embedder.path, embedder.body(text), {"Content-Type": "application/json"})
        response = connection.getresponse()
        body = response.read()
        if response.status != 200:
            raise ValueError(f"status {response.status}: {body[:200]!r}")
        return body
    finally:
        connection.close()
