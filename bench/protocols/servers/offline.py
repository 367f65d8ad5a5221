"""A model of `bench.protocols.bulk` without a server: it reads lines, and writes the answers.

python -m bench.protocols.servers.offline MODEL FILE BATCH SECONDS

It goes through the lines of the file again and again, so many at a time, for so long. It prints as
JSON how many items it answered a second, the processor time of one, and what it answers to the
first line alone.
"""

from __future__ import annotations

import itertools
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

import carpool
from bench.protocols.servers import bulk_models


def model_of(case: str) -> tuple[carpool.Model, type]:
    """The model of a case, ready, and the type of its items."""
    model, item = bulk_models.OFFLINE[case]
    made = model()
    made.setup()
    return made, item


def main(case: str, path: str, batch: int, seconds: float) -> None:
    """Print the rate and the processor time of an item."""
    model, item = model_of(case)
    predict: Any = model.predict
    decode: Callable[[bytes], Any] = msgspec.json.Decoder(item).decode
    encode = msgspec.json.Encoder().encode
    lines = Path(path).read_bytes().splitlines()
    (first,) = predict([decode(lines[0])])
    again: Iterator[bytes] = itertools.cycle(lines)
    n = 0
    cpu_s, began = time.process_time(), time.perf_counter()
    with tempfile.TemporaryFile() as answers:
        while time.perf_counter() - began < seconds:
            items = [decode(line) for line in itertools.islice(again, batch)]
            answers.write(b"\n".join(map(encode, predict(items))) + b"\n")
            n += batch
    took_s = time.perf_counter() - began
    print(json.dumps({"items_per_s": n / took_s, "cpu_s": (time.process_time() - cpu_s) / n, "first": first}))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4]))
