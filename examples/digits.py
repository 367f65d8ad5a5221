"""A scikit-learn classifier of handwritten digits, served over HTTP with dynamic batching.

carpool serve examples.digits:service
curl --json "$(python -c 'print([0.0] * 64)')" localhost:8000/predict
"""

from typing import Annotated

import msgspec
import numpy as np
from sklearn.datasets import load_digits
from sklearn.svm import SVC

import carpool

Image = Annotated[list[float], msgspec.Meta(min_length=64, max_length=64, description="8 × 8 pixels, 0 to 16")]


def halves() -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return images and labels to learn from and those held out: 898 and 899 of 1,797."""
    images, labels = load_digits(return_X_y=True)
    middle = len(images) // 2
    return images[:middle], labels[:middle], images[middle:], labels[middle:]


class Digits(carpool.Model):
    """Says which digit an image shows."""

    examples = ([0.0] * 64,)

    def setup(self) -> None:
        images, labels, _, _ = halves()
        self.classifier = SVC(gamma=0.001).fit(images, labels)

    def predict(self, images: list[Image]) -> list[int]:
        digits: list[int] = self.classifier.predict(np.array(images)).tolist()
        return digits


service = carpool.Service(carpool.Stage(Digits, max_batch_size=64), name="digits")
