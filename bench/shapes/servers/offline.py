"""The model without any server: what can be had of it at most, and the texts for all sides.

python offline.py texts        texts as JSON, and the vectors of the first of them
python offline.py speed FILE   texts per second of sorted ones from a file, by batch size
"""

import json
import random
import sys
import time
from pathlib import Path

from minilm import encode, load

TEXTS, CHECKED, TIMED = 4000, 32, 400
SIZES = (8, 16, 32)


def texts() -> None:
    """Print texts of words of one token each: log-normal, 14 in the median, 180 at most."""
    model, dice = load(), random.Random(7)
    words = sorted(word for word in model.tokenizer.get_vocab() if word.isalpha() and len(word) > 2)
    counts = [max(1, min(180, int(dice.lognormvariate(2.64, 0.9)))) for _ in range(TEXTS)]
    made = [" ".join(dice.choice(words) for _ in range(count)) for count in counts]
    print(json.dumps({"texts": made, "vectors": encode(model, made[:CHECKED])}))


def speed(path: str) -> None:
    """Print how many texts per second the model does that are sorted beforehand."""
    model = load()
    some = sorted(json.loads(Path(path).read_text())["texts"][:TIMED], key=lambda text: len(text.split()))
    encode(model, some[:8])
    found = {}
    for size in SIZES:
        begin = time.perf_counter()
        for i in range(0, len(some), size):
            encode(model, some[i : i + size])
        found[str(size)] = len(some) / (time.perf_counter() - begin)
    print(json.dumps(found))


if __name__ == "__main__":
    texts() if sys.argv[1] == "texts" else speed(sys.argv[2])
