"""Two models share one accelerator: each has its own batches, and a lock lets one run at a time.

python -m examples.shared_lock      sixteen threads call both; the "GPU" raises if calls overlap
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from sklearn.decomposition import PCA
from sklearn.svm import SVC

import carpool
from examples.digits import halves

_IMAGES, _LABELS, IMAGES, LABELS = halves()
pca, classifier = PCA(20, random_state=0).fit(_IMAGES), SVC(gamma=0.001).fit(_IMAGES, _LABELS)
gpu = carpool.Lock()
running: list[str] = []
calls = {"transform": 0, "predict": 0}


def on_gpu(model: Callable[..., Any], images: list[np.ndarray]) -> np.ndarray:
    """Run a model on what stands for a device that two models must not use at the same time."""
    running.append(model.__name__)
    assert len(running) == 1, f"{running} overlap"
    calls[running[0]] += 1
    results: np.ndarray = model(images)
    running.clear()
    return results


@carpool.batch(execution_lock=gpu, timeout_s=10.0)
def embed(images: list[np.ndarray]) -> np.ndarray:
    """Return the images in 20 principal components."""
    return on_gpu(pca.transform, images)


@carpool.batch(execution_lock=gpu, timeout_s=10.0)
def classify(images: list[np.ndarray]) -> np.ndarray:
    """Return the digits that the images show."""
    return on_gpu(classifier.predict, images)


def both(image: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Call both models for one image."""
    return embed(image), classify(image)


def main() -> None:
    """Call both for every image; then hold the lock for other work, while a call is refused."""
    with ThreadPoolExecutor(16) as threads:
        embeddings, digits = zip(*threads.map(both, IMAGES), strict=True)
    far = np.abs(embeddings - pca.transform(IMAGES)).max()
    print(f"{(digits == classifier.predict(IMAGES)).sum()} of {len(IMAGES)} digits as from one call for all")
    print(f"embeddings at most {far:.1e} off, calls: {calls}")
    with gpu:  # no batch is running: weights may be changed
        pca.fit(IMAGES)
        try:
            embed(IMAGES[0])
        except RuntimeError as error:
            print(f"refused: {error}")


if __name__ == "__main__":
    main()
