"""Answers in parts: a generator, and a small decoder with a KV cache whose streams share each step.

python -m examples.streaming    eight threads read streams, and each is compared with itself alone
carpool serve examples.streaming:service
curl -N localhost:8000/predict -d '{"prompt": [3, 1, 4], "max_tokens": 8}' \\
    -H 'Accept: text/event-stream'
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

import carpool

VOCABULARY, WIDTH, HEADS, LAYERS, LONGEST = 97, 48, 4, 2, 256
ROWS = 8  # streams that a worker runs at a time


class Countdown(carpool.Model):
    """The smallest model that answers in parts: `predict` yields."""

    def predict(self, n: int) -> Iterator[int]:
        yield from range(n, 0, -1)


class Prompt(msgspec.Struct):
    """What a client sends: token ids, and how many to add."""

    prompt: list[int]
    max_tokens: int


@dataclass
class Sequence:
    """The state of one stream: its row of the cache, its last token, how many are left."""

    row: int
    last: int
    left: int


@dataclass
class Decoder:
    """A decoder with random weights, and a cache with a row for each stream."""

    rows: int
    weights: list[list[Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        draw = np.random.default_rng(7).normal
        self.tokens, self.places, self.head = (
            draw(size=shape) for shape in ((VOCABULARY, WIDTH), (LONGEST, WIDTH), (WIDTH, VOCABULARY))
        )
        shapes = ((WIDTH, 3 * WIDTH), (WIDTH, WIDTH), (WIDTH, 4 * WIDTH), (4 * WIDTH, WIDTH))
        self.weights = [[draw(size=shape) / shape[0] ** 0.5 for shape in shapes] for _ in range(LAYERS)]
        self.cache = np.zeros((LAYERS, 2, self.rows, HEADS, LONGEST, WIDTH // HEADS))
        self.length = np.zeros(self.rows, int)

    def forward(self, rows: list[int], ids: list[list[int]]) -> list[int]:
        """Take in as many ids at the end of each row, and return the next token of each."""
        at = self.length[rows][:, None] + np.arange(len(ids[0]))
        n, seen = len(rows), int(at.max()) + 1
        later = np.arange(seen)[None, None, None, :] > at[:, None, :, None]
        x = self.tokens[ids] + self.places[at]
        for (qkv, out, up, down), (keys, values) in zip(self.weights, self.cache, strict=True):
            three = (_norm(x) @ qkv).reshape(n, -1, 3, HEADS, WIDTH // HEADS)
            row = np.array(rows)[:, None]
            keys[row, :, at], values[row, :, at] = three[:, :, 1], three[:, :, 2]
            score = three[:, :, 0].transpose(0, 2, 1, 3) @ keys[rows, :, :seen].transpose(0, 1, 3, 2)
            score = np.where(later, -np.inf, score / (WIDTH // HEADS) ** 0.5)
            score = np.exp(score - score.max(-1, keepdims=True))
            mixed = (score / score.sum(-1, keepdims=True)) @ values[rows, :, :seen]
            x = x + mixed.transpose(0, 2, 1, 3).reshape(n, -1, WIDTH) @ out
            x = x + np.maximum(_norm(x) @ up, 0) @ down
        self.length[rows] += len(ids[0])
        tokens: list[int] = (_norm(x[:, -1]) @ self.head).argmax(-1).tolist()
        return tokens


def _norm(x: Any) -> Any:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6)


class Generate(carpool.Model):
    """A model of steps: streams join and leave between any two steps."""

    examples = (Prompt([1, 2, 3], 4),)

    def setup(self) -> None:
        self.decoder = Decoder(ROWS)
        self.running: list[Sequence] = []

    def preprocess(self, prompt: Prompt) -> Prompt:
        """Refuse what the cache has no room for, before it takes a row."""
        n = len(prompt.prompt)
        if not (n and prompt.max_tokens > 0 and n + prompt.max_tokens <= LONGEST):
            raise carpool.ValidationError(f"prompt and max_tokens have 1 to {LONGEST} tokens together, and 1 each")
        if not 0 <= min(prompt.prompt) <= max(prompt.prompt) < VOCABULARY:
            raise carpool.ValidationError(f"a token is a number from 0 to {VOCABULARY - 1}")
        return prompt

    def start(self, prompts: list[Prompt]) -> list[Sequence]:
        return self.resume(prompts, [[] for _ in prompts])

    def resume(self, prompts: list[Prompt], parts: list[list[int]]) -> list[Sequence]:
        """Begin, or go on after these tokens: they were made by a worker that is no more."""
        for prompt, said in zip(prompts, parts, strict=True):
            ids, row = prompt.prompt + said, len(self.running)
            self.decoder.length[row] = 0
            if len(ids) > 1:
                self.decoder.forward([row], [ids[:-1]])
            self.running.append(Sequence(row, ids[-1], prompt.max_tokens - len(said)))
        return self.running[-len(prompts) :]

    def step(self, running: list[Sequence]) -> list[int | carpool.Last[int]]:
        tokens = self.decoder.forward([each.row for each in running], [[each.last] for each in running])
        for each, token in zip(running, tokens, strict=True):
            each.last, each.left = token, each.left - 1
        return [each.last if each.left else carpool.Last(each.last) for each in running]

    def stop(self, sequence: Sequence) -> None:
        """Free a row: the last one moves into the gap."""
        last = self.running.pop()
        if last is not sequence:
            self.decoder.cache[:, :, sequence.row] = self.decoder.cache[:, :, last.row]
            self.decoder.length[sequence.row] = self.decoder.length[last.row]
            last.row = sequence.row
            self.running[last.row] = last


service = carpool.Service(carpool.Stage(Generate, max_batch_size=ROWS), name="tokens")


def alone(prompt: Prompt) -> list[int]:
    """Return the tokens of a prompt that has the decoder for itself."""
    model = Generate()
    model.setup()
    (state,) = model.start([prompt])
    tokens = [model.step([state])[0] for _ in range(prompt.max_tokens)]
    return [token.value if isinstance(token, carpool.Last) else token for token in tokens]


def main() -> None:
    """Count down, then read 24 streams at the same time, and compare each with itself alone."""
    with carpool.Service(carpool.Stage(Countdown, run_in="thread")).run() as s, s.predict_stream(3) as parts:
        print("countdown:", *parts)

    draw = np.random.default_rng(1)
    prompts = [
        Prompt(draw.integers(1, 90, draw.integers(1, 30)).tolist(), int(draw.integers(1, 60))) for _ in range(24)
    ]
    with service.run() as s:

        def read(prompt: Prompt) -> list[int]:
            with s.predict_stream(prompt) as tokens:
                return list(tokens)

        with ThreadPoolExecutor(8) as threads:
            answers = list(threads.map(read, prompts))
        print("collected:", s.predict(prompts[0]) == answers[0])
    same = sum(answer == alone(prompt) for answer, prompt in zip(answers, prompts, strict=True))
    print(f"{same} of {len(prompts)} streams, {sum(map(len, answers))} tokens, are those of their prompts alone")


if __name__ == "__main__":
    main()
