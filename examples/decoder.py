"""A small transformer that knows a text by heart: given the beginning of a line, it completes it.

python -m examples.decoder      trains it, checks its cache, completes all lines at the same time
carpool serve examples.decoder:service
curl -N localhost:8000/predict -d '"Now is"' -H 'Accept: text/event-stream'

Its layers are random; only what reads them off is trained, in a fraction of a second. Each stream
has a slot of the KV cache, and free slots are kept in a list, so that no row ever moves.
examples/streaming.py keeps its rows dense instead.
"""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
import numpy as np

import carpool
from carpool.testing import check_steps

# The first lines of the Zen of Python, by Tim Peters (PEP 20, in the public domain)
TEXT = """\
Beautiful is better than ugly.
Explicit is better than implicit.
Simple is better than complex.
Complex is better than complicated.
Flat is better than nested.
Sparse is better than dense.
Readability counts.
Errors should never pass silently.
Unless explicitly silenced.
In the face of ambiguity, refuse the temptation to guess.
Now is better than never.
"""
SYMBOLS, WIDTH, HEADS, LAYERS, FEATURES, LONGEST = 128, 64, 4, 2, 768, 64
SLOTS = 8  # streams that a worker runs at a time
Beginning = Annotated[str, msgspec.Meta(min_length=1, max_length=LONGEST // 2)]


def ids_of(text: str) -> list[int]:
    """Return the numbers of characters; those that are not ASCII share one."""
    return [min(ord(c), SYMBOLS - 1) for c in text]


def normal(x: Any) -> Any:
    """Scale vectors to a common length."""
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6)


@dataclass(eq=False)
class Line:
    """The state of one stream: its slot of the cache, and its last character."""

    slot: int
    last: int


class Recite(carpool.Model):
    """A decoder in steps: all lines under way get their next character in one call."""

    examples = ("Now", "Sparse is")

    def setup(self) -> None:
        draw = np.random.default_rng(0).normal
        shape = (SLOTS, HEADS, LONGEST, WIDTH // HEADS)
        self.symbols, self.places = draw(size=(SYMBOLS, WIDTH)), draw(size=(LONGEST, WIDTH))
        self.layers = [draw(size=(4, WIDTH, WIDTH)) / WIDTH**0.5 for _ in range(LAYERS)]
        self.widen = draw(size=(WIDTH, FEATURES)) / WIDTH**0.5
        self.keys, self.values = np.zeros((LAYERS, *shape)), np.zeros((LAYERS, *shape))
        self.lengths = np.zeros(SLOTS, int)
        self.free = list(range(SLOTS))
        self.train()

    def train(self) -> None:
        """Find the weights that tell the next character from the features of what came before."""
        features: list[Any] = []
        follows: list[int] = []
        for line in TEXT.splitlines(keepends=True):
            self.lengths[0] = 0
            features.append(self.features([0], [ids_of(line[:-1])])[0])
            follows += ids_of(line[1:])
        x: Any = np.concatenate(features)
        self.read_off: Any = np.linalg.solve(x.T @ x + 0.1 * np.eye(FEATURES), x.T @ np.eye(SYMBOLS)[follows])

    def features(self, slots: list[int], ids: list[list[int]]) -> Any:
        """Take in as many characters at the end of each slot; return what the layers make of them.

        Args:
            slots: Which slots of the cache.
            ids: A row of characters for each of them.

        Returns:
            An array of shape (slots, characters, FEATURES).
        """
        n, new = len(slots), len(ids[0])
        at = self.lengths[slots][:, None] + np.arange(new)
        seen = int(at.max()) + 1
        is_later: Any = np.arange(seen) > at[:, None, :, None]
        x = self.symbols[ids] + self.places[at]
        for weights, keys, values in zip(self.layers, self.keys, self.values, strict=True):
            asked, key, value = ((normal(x) @ each).reshape(n, new, HEADS, -1).swapaxes(1, 2) for each in weights[:3])
            for i, slot in enumerate(slots):
                keys[slot][:, at[i]], values[slot][:, at[i]] = key[i], value[i]
            score = asked @ keys[slots, :, :seen].swapaxes(2, 3) / (WIDTH / HEADS) ** 0.5
            weight = np.exp(np.where(is_later, -np.inf, score))
            mixed = (weight / weight.sum(-1, keepdims=True)) @ values[slots, :, :seen]
            x = x + mixed.swapaxes(1, 2).reshape(n, new, WIDTH) @ weights[3]
        self.lengths[slots] += new
        return np.maximum(normal(x) @ self.widen, 0)

    def preprocess(self, beginning: Beginning) -> Beginning:
        """Refuse what has no room, before it takes a slot; over HTTP its type says so, too."""
        if not 0 < len(beginning) <= LONGEST // 2:
            raise carpool.ValidationError(f"a beginning has 1 to {LONGEST // 2} characters, not {len(beginning)}")
        return beginning

    def start(self, beginnings: list[Beginning]) -> list[Line]:
        return self.resume(beginnings, [[] for _ in beginnings])

    def resume(self, beginnings: list[Beginning], parts: list[list[str]]) -> list[Line]:
        """Begin, or go on after these characters: they were made by a worker that is no more."""
        lines: list[Line] = []
        for beginning, said in zip(beginnings, parts, strict=True):
            *before, last = ids_of(beginning + "".join(said))
            line = Line(self.free.pop(), last)
            self.lengths[line.slot] = 0
            if before:
                self.features([line.slot], [before])
            lines.append(line)
        return lines

    def step(self, lines: list[Line]) -> list[str | carpool.End]:
        features = self.features([line.slot for line in lines], [[line.last] for line in lines])
        symbols: list[int] = (features[:, 0] @ self.read_off).argmax(-1).tolist()
        for line, symbol in zip(lines, symbols, strict=True):
            line.last = symbol
        return [self.part(line) for line in lines]

    def part(self, line: Line) -> str | carpool.End:
        """Return the last character as a part; a new line or a full slot ends the answer."""
        is_end = chr(line.last) == "\n" or self.lengths[line.slot] == LONGEST
        return carpool.END if is_end else chr(line.last)

    def stop(self, line: Line) -> None:
        self.free.append(line.slot)

    def collect(self, parts: list[str]) -> str:
        """Make one text of the parts, for callers that want the whole answer."""
        return "".join(parts)


service = carpool.Service(carpool.Stage(Recite, max_batch_size=SLOTS), name="recite")


def main() -> None:
    """Check the cache of the model, and complete all lines at the same time."""
    beginnings = [line[:n] for line in TEXT.splitlines() for n in (3, 9)]
    check_steps(Recite, beginnings[:8], streams=40, max_batch_size=SLOTS)
    print("in company each line gets what it gets alone")
    with service.run() as s, ThreadPoolExecutor(SLOTS) as threads:
        lines = [*map(str.__add__, beginnings, threads.map(s.predict, beginnings))]
        print(*lines[::2], sep="\n")
        with s.predict_stream("Now is") as parts:
            print("Now is", *parts)
    print(f"{sum(line in TEXT.splitlines() for line in lines)} of {len(lines)} lines are right")


if __name__ == "__main__":
    main()
