"""A small decoder with a KV cache in torch: as a model of steps, and as generators for batches.

3.4 million random weights in float32, one thread. An item is `{"ids": [...], "n": tokens}`. All
models prefill one prompt at a time, and have the same decoder. Its rows attend in blocks of eight,
each as far back as its own longest row, where that is less than the longest of all; so that it is,
longer rows stay in front of shorter ones. Rows of a padded batch are all of about one length, and
attend in one block.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import torch
from torch.nn.functional import rms_norm, scaled_dot_product_attention

import carpool

VOCABULARY, WIDTH, HEADS, LAYERS, LONGEST = 256, 256, 4, 4, 256
ROWS = 32
BLOCK = 8  # rows that attend together
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
        x = self._through_layers(first, ids)
        tokens: list[int] = (rms_norm(x[:, -1], (WIDTH,)) @ self.head).argmax(-1).tolist()
        return tokens

    def _through_layers(self, first: int, ids: list[list[int]], is_prompt: bool = False) -> torch.Tensor:
        """Return what the layers make of ids; of a prompt only the cache is wanted."""
        n, q = len(ids), len(ids[0])
        rows = slice(first, first + n)
        at = self.length[rows, None] + torch.arange(q)
        blocks = _blocks(at[:, -1].tolist())
        masks = [(torch.arange(seen) <= at[begin:end, :, None])[:, None] for begin, end, seen in blocks]
        x = self.tokens[torch.tensor(ids)] + self.places[at]
        row = torch.arange(n)[:, None]
        for i, ((qkv, out, up, down), cache) in enumerate(zip(self.weights, self.cache, strict=True)):
            three = (rms_norm(x, (WIDTH,)) @ qkv).view(n, q, 3, HEADS, WIDTH // HEADS)
            keys, values = cache[0, rows], cache[1, rows]
            keys[row, :, at], values[row, :, at] = three[:, :, 1], three[:, :, 2]
            if is_prompt and i == LAYERS - 1:
                break
            query = three[:, :, 0].transpose(1, 2)
            mixed = [
                scaled_dot_product_attention(
                    query[begin:end], keys[begin:end, :, :seen], values[begin:end, :, :seen], attn_mask=mask
                )
                for (begin, end, seen), mask in zip(blocks, masks, strict=True)
            ]
            together = mixed[0] if len(mixed) == 1 else torch.cat(mixed)
            x = x + together.transpose(1, 2).reshape(n, q, WIDTH) @ out
            x = x + torch.relu(rms_norm(x, (WIDTH,)) @ up) @ down
        self.length[rows] += q
        return x

    @torch.inference_mode()
    def take(self, row: int, ids: list[int]) -> None:
        """Begin a row with a prompt but for its last token."""
        self.length[row] = 0
        if len(ids) > 1:
            self._through_layers(row, [ids[:-1]], is_prompt=True)

    def move(self, source: int, target: int) -> None:
        """Copy what a row holds."""
        n = int(self.length[source])
        self.cache[:, :, target, :, :n] = self.cache[:, :, source, :, :n]
        self.length[target] = n


def _blocks(last: list[int]) -> list[tuple[int, int, int]]:
    """Return the blocks of rows that attend together, by the place of each row's last token.

    Returns:
        For each block its first row, the row behind its last one, and how far back it sees. One
        block where blocks would save less than a quarter.
    """
    n = len(last)
    blocks = [(i, min(i + BLOCK, n), max(last[i : i + BLOCK]) + 1) for i in range(0, n, BLOCK)]
    seen = max(last) + 1
    if sum((end - begin) * most for begin, end, most in blocks) > 0.75 * n * seen:
        return [(0, n, seen)]
    return blocks


class Running:
    """The rows of a decoder that run. A gap is filled by the longest row of the block behind, and
    so on until the last row has moved.
    """

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
        gap, length = sequence["row"], self.decoder.length.tolist()
        while gap < len(self.sequences) - 1:
            behind = range((gap // BLOCK + 1) * BLOCK, len(self.sequences))[:BLOCK]
            row = max(behind, key=length.__getitem__, default=len(self.sequences) - 1)
            self.decoder.move(row, gap)
            moved = self.sequences[gap] = self.sequences[row]
            moved["row"], gap = gap, row
        self.sequences.pop()


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
