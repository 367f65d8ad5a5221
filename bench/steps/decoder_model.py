"""A small decoder with a KV cache in torch: as a model of steps, and as generators for batches.

3.4 million random weights in float32, one thread. An item is `{"ids": [...], "n": tokens}`. All
models prefill one prompt at a time.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import torch
from torch.nn.functional import rms_norm, scaled_dot_product_attention

import carpool

VOCABULARY, WIDTH, HEADS, LAYERS, LONGEST = 256, 256, 4, 4, 256
ROWS = 32
Item = dict[str, Any]
Sequence = dict[str, int]


class Decoder:
    """The first rows of the cache run."""

    def __init__(self, rows: int) -> None:
        torch.set_num_threads(1)
        chance = torch.Generator().manual_seed(7)

        def draw(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=chance) / shape[0] ** 0.5

        self.tokens, self.places = draw(VOCABULARY, WIDTH) * 16, draw(LONGEST, WIDTH) * 16
        self.head = draw(WIDTH, VOCABULARY)
        shapes = ((WIDTH, 3 * WIDTH), (WIDTH, WIDTH), (WIDTH, 4 * WIDTH), (4 * WIDTH, WIDTH))
        self.weights = [[draw(*shape) for shape in shapes] for _ in range(LAYERS)]
        self.cache = torch.zeros(LAYERS, 2, rows, HEADS, LONGEST, WIDTH // HEADS)
        self.length = torch.zeros(rows, dtype=torch.long)

    @torch.inference_mode()
    def forward(self, first: int, ids: list[list[int]]) -> list[int]:
        """Take in as many ids at the ends of rows from the first one on; return the next tokens."""
        n, q = len(ids), len(ids[0])
        rows = slice(first, first + n)
        at = self.length[rows, None] + torch.arange(q)
        seen = int(at.max()) + 1
        mask = (torch.arange(seen) <= at[:, :, None])[:, None]
        x = self.tokens[torch.tensor(ids)] + self.places[at]
        row = torch.arange(n)[:, None]
        for (qkv, out, up, down), cache in zip(self.weights, self.cache, strict=True):
            three = (rms_norm(x, (WIDTH,)) @ qkv).view(n, q, 3, HEADS, WIDTH // HEADS)
            keys, values = cache[0, rows], cache[1, rows]
            keys[row, :, at], values[row, :, at] = three[:, :, 1], three[:, :, 2]
            query = three[:, :, 0].transpose(1, 2)
            mixed = scaled_dot_product_attention(query, keys[:, :, :seen], values[:, :, :seen], attn_mask=mask)
            x = x + mixed.transpose(1, 2).reshape(n, q, WIDTH) @ out
            x = x + torch.relu(rms_norm(x, (WIDTH,)) @ up) @ down
        self.length[rows] += q
        tokens: list[int] = (rms_norm(x[:, -1], (WIDTH,)) @ self.head).argmax(-1).tolist()
        return tokens

    def take(self, row: int, ids: list[int]) -> None:
        """Begin a row with a prompt but for its last token."""
        self.length[row] = 0
        if len(ids) > 1:
            self.forward(row, [ids[:-1]])

    def move(self, source: int, target: int) -> None:
        """Copy what a row holds."""
        n = int(self.length[source])
        self.cache[:, :, target, :, :n] = self.cache[:, :, source, :, :n]
        self.length[target] = n


class Running:
    """The rows of a decoder that run: a gap is filled by the last one."""

    def __init__(self) -> None:
        self.decoder = Decoder(ROWS)
        self.sequences: list[Sequence] = []

    def add(self, item: Item) -> Sequence:
        row = len(self.sequences)
        self.decoder.take(row, item["ids"])
        self.sequences.append({"row": row, "last": item["ids"][-1], "left": item["n"]})
        return self.sequences[-1]

    def step(self) -> None:
        """Give each sequence its next token."""
        tokens = self.decoder.forward(0, [[each["last"]] for each in self.sequences])
        for each, token in zip(self.sequences, tokens, strict=True):
            each["last"], each["left"] = token, each["left"] - 1

    def drop(self, sequence: Sequence) -> None:
        last = self.sequences.pop()
        if last is not sequence:
            self.decoder.move(last["row"], sequence["row"])
            last["row"] = sequence["row"]
            self.sequences[last["row"]] = last


def part_of(sequence: Sequence) -> Any:
    """A token, which may be the last one."""
    return sequence["last"] if sequence["left"] else carpool.Last(sequence["last"])


class Steps(carpool.Model):
    """Sequences join and leave between any two steps."""

    examples = tuple({"ids": list(range(1, 2 + i % 40)), "n": 3} for i in range(ROWS))

    def setup(self) -> None:
        self.running = Running()

    def start(self, items: list[Item]) -> list[Sequence]:
        return [self.running.add(item) for item in items]

    def step(self, states: list[Sequence]) -> list[Any]:
        assert len(states) == len(self.running.sequences), "nobody pauses here"
        self.running.step()
        return [part_of(each) for each in states]

    def stop(self, state: Sequence) -> None:
        self.running.drop(state)


class Batches(carpool.Model):
    """Nobody joins a batch that runs, but who has ended is stepped no more."""

    def setup(self) -> None:
        self.running = Running()

    def predict(self, items: list[Item]) -> Generator[list[Any], Any, None]:
        batch = [self.running.add(item) for item in items]
        while self.running.sequences:
            running = {each["row"]: each for each in self.running.sequences}
            self.running.step()
            parts = [part_of(each) if running.get(each["row"]) is each else carpool.END for each in batch]
            for each in running.values():
                if not each["left"]:
                    self.running.drop(each)
            yield parts


class Padded(carpool.Model):
    """Nobody joins a batch that runs, and all of it is stepped until the last one has ended, as by
    `generate()` of Hugging Face.
    """

    def setup(self) -> None:
        self.running = Running()

    def predict(self, items: list[Item]) -> Generator[list[Any], Any, None]:
        batch = [self.running.add(item) for item in items]
        for i in range(1, max(item["n"] for item in items) + 1):
            self.running.step()
            if i == max(item["n"] for item in items):
                self.running.sequences.clear()
            yield [
                carpool.END if i > item["n"] else carpool.Last(each["last"]) if i == item["n"] else each["last"]
                for item, each in zip(items, batch, strict=True)
            ]
