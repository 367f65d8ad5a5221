"""carpool's services of `bench.shapes.http`: with `length=`, without, and with a user who sorts."""

from __future__ import annotations

import random

import carpool
from bench.shapes.servers import minilm


def words(text: str) -> int:
    """How long a text is: its words, each of which is a token, and the two at its ends."""
    return len(text.split()) + 2


class Embed(carpool.Model):
    """Encodes what it gets in one padded call."""

    examples = tuple(
        " ".join(random.Random(n).choices(["one", "word", "after", "another"], k=n)) for n in (3, 14, 60, 180)
    )

    def setup(self) -> None:
        self.model = minilm.load()

    def predict(self, texts: list[str]) -> list[list[float]]:
        return minilm.encode(self.model, texts)


class EmbedSorted(Embed):
    """Encodes what it gets by length, in calls of eight."""

    def predict(self, texts: list[str]) -> list[list[float]]:
        return minilm.encode(self.model, texts, 8)


plain = carpool.Service(carpool.Stage(Embed, max_batch_size=32), name="plain", timeout_s=60)
inside = carpool.Service(carpool.Stage(EmbedSorted, max_batch_size=64), name="inside", timeout_s=60)
by_length = carpool.Service(carpool.Stage(Embed, max_batch_size=32, length=words), name="by_length", timeout_s=60)
