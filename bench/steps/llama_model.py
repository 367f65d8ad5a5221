"""A Llama of Hugging Face, with random weights: as a model of steps, and as padded `generate()`.

8 layers of 512, and no download. `train` makes a small one that has learned a text. An item is
`{"ids": [...], "n": tokens}`; decoding is greedy and no token ends an answer, so both models say
as many tokens as they are asked for.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import carpool
from carpool.hf import Rows

ROWS, LONGEST, VOCABULARY = 32, 256, 1024
Item = dict[str, Any]


def llama(width: int = 512, layers: int = 8) -> Any:
    """Return the model; its weights are the same each time."""
    torch.set_num_threads(1)
    torch.manual_seed(7)
    config = LlamaConfig(
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        vocab_size=VOCABULARY,
        max_position_embeddings=LONGEST,
    )
    return LlamaForCausalLM(config).eval()


SMALL = {"width": 128, "layers": 2}


def train(text: bytes, path: Path, steps: int = 150) -> None:
    """Have a small model learn the bytes of a text, so that it knows mostly well what to say."""
    model = llama(**SMALL).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    ids = torch.tensor(list(text))
    for _ in range(steps):
        at = torch.randint(len(ids) - 64, (16, 1)) + torch.arange(64)
        loss = model(input_ids=ids[at], labels=ids[at]).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    torch.save(model.state_dict(), path)


class Sequence:
    """A stream: its row, its last token, and how many tokens are left.

    Attributes:
        row: Of the cache.
        last: Its last token.
        left: How many tokens it is still to say.
    """

    __slots__ = ("last", "left", "row")

    def __init__(self, row: Any, last: int, left: int) -> None:
        self.row, self.last, self.left = row, last, left


class Steps(carpool.Model):
    """Sequences join and leave between any two steps."""

    examples = tuple({"ids": list(range(1, 2 + i % 24)), "n": 2} for i in range(ROWS))

    def __init__(self, dtype: str = "float32", trained: str = "") -> None:
        self.dtype, self.trained = dtype, trained

    def setup(self) -> None:
        model = llama(**(SMALL if self.trained else {}))
        if self.trained:
            model.load_state_dict(torch.load(self.trained))
        self.rows = Rows(model.to(getattr(torch, self.dtype)), ROWS, LONGEST)

    def start(self, items: list[Item]) -> list[Sequence]:
        return self.resume(items, [[] for _ in items])

    def resume(self, items: list[Item], parts: list[list[int]]) -> list[Sequence]:
        ids = [item["ids"] + said for item, said in zip(items, parts, strict=True)]
        rows = self.rows.take_all([each[:-1] for each in ids])
        lefts = [item["n"] - len(said) for item, said in zip(items, parts, strict=True)]
        return [Sequence(row, each[-1], left) for row, each, left in zip(rows, ids, lefts, strict=True)]

    def step(self, running: list[Sequence]) -> list[Any]:
        logits = self.rows.forward([each.row for each in running], [[each.last] for each in running])
        for each, token in zip(running, logits.argmax(-1).tolist(), strict=True):
            each.last, each.left = token, each.left - 1
        return [each.last if each.left else carpool.Last(each.last) for each in running]

    def stop(self, sequence: Sequence) -> None:
        self.rows.give(sequence.row)


class Padded(carpool.Model):
    """Batches of prompts, padded on the left, of which each is as long as its longest answer."""

    def setup(self) -> None:
        self.model = llama()
        self.model.generation_config.eos_token_id = None

    def predict(self, items: list[Item]) -> list[list[int]]:
        longest = max(len(item["ids"]) for item in items)
        pads = [longest - len(item["ids"]) for item in items]
        with torch.inference_mode():
            said = self.model.generate(
                input_ids=torch.tensor([[0] * pad + item["ids"] for pad, item in zip(pads, items, strict=True)]),
                attention_mask=torch.tensor([[0] * pad + [1] * (longest - pad) for pad in pads]),
                max_new_tokens=max(item["n"] for item in items),
                do_sample=False,
                pad_token_id=0,
            )
        return [each[longest : longest + item["n"]] for each, item in zip(said.tolist(), items, strict=True)]
